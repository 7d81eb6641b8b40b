//! IS, integer sort: ranks keys of an about Gaussian distribution, ten times, with two keys changed before each.
//!
//! Its members own keys by their place, and rank keys by their value. Each iteration counts the keys in each bucket,
//! assigns every member a run of buckets with about as many keys as the others have, and sends each key to the member
//! of its bucket. All of the memory is read and almost all rewritten each time.

use crate::class::Class;
use crate::exchange::ExchangeError;
use crate::kernel::{Kernel, Verdict};
use crate::random::{Random, SEED};
use crate::team::Member;

/// Number of times that the keys are ranked.
const ITERATIONS: u32 = 10;
/// Buckets into which the values are divided. Their number changes no rank.
const BUCKETS: usize = 512;
/// Keys whose ranks are known.
const TESTS: usize = 5;

/// A problem: a number of keys, up to a value.
#[derive(Debug, Clone)]
pub struct Problem {
    keys: usize,
    /// Keys are less than this power of two.
    key_bits: u32,
    seed: u64,
    tests: KnownRanks,
}

/// Ranks from the specification.
#[derive(Debug, Clone)]
struct KnownRanks {
    /// Places of the keys.
    places: [usize; TESTS],
    /// Number of keys that are less, before the changes.
    ranks: [u32; TESTS],
    /// Number of ranks that rise by one each iteration, while the others fall: the changes put a key below the first
    /// ones and above the others.
    rising: usize,
    /// First iteration in which they rise.
    rise_from: u32,
    /// First iteration in which they fall.
    fall_from: u32,
}

impl KnownRanks {
    fn expected(&self, iteration: u32) -> [u32; TESTS] {
        let mut ranks = self.ranks;
        let (rising, falling) = ranks.split_at_mut(self.rising);
        for rank in rising {
            *rank = (*rank + iteration).wrapping_sub(self.rise_from);
        }
        for rank in falling {
            *rank = (*rank + self.fall_from).wrapping_sub(iteration);
        }
        ranks
    }
}

impl Problem {
    /// Returns the problem of a class.
    pub fn new(class: Class) -> Self {
        let (keys_log2, key_bits, tests) = match class {
            Class::S => (
                16,
                11,
                KnownRanks {
                    places: [48_427, 17_148, 23_627, 62_548, 4431],
                    ranks: [0, 18, 346, 64_917, 65_463],
                    rising: 3,
                    rise_from: 0,
                    fall_from: 0,
                },
            ),
            Class::W => (
                20,
                16,
                KnownRanks {
                    places: [357_773, 934_767, 875_723, 898_999, 404_505],
                    ranks: [1249, 11_698, 1_039_987, 1_043_896, 1_048_018],
                    rising: 2,
                    rise_from: 2,
                    fall_from: 0,
                },
            ),
            Class::A => (
                23,
                19,
                KnownRanks {
                    places: [2_112_377, 662_041, 5_336_171, 3_642_833, 4_250_760],
                    ranks: [104, 17_523, 123_928, 8_288_932, 8_388_264],
                    rising: 3,
                    rise_from: 1,
                    fall_from: 1,
                },
            ),
        };
        Self { keys: 1 << keys_log2, key_bits, seed: SEED, tests }
    }
}

impl Kernel for Problem {
    type Element = u32;

    fn bytes(&self, _threads: usize, ranks: usize) -> usize {
        // The keys by place, by value, and sorted in the end; and the count of each.
        (3 * self.keys + (1 << self.key_bits)) * size_of::<u32>() / ranks
    }

    fn run(&self, member: &Member<'_, u32>, tick: &mut dyn FnMut(u32)) -> Result<Verdict, ExchangeError> {
        let mut keys = Keys::new(self, member);
        let mut ranking = Ranking::new(member);
        let mut wrong_ranks = 0;
        for iteration in 1..=ITERATIONS {
            keys.change(iteration, 1 << self.key_bits);
            let tested = member.sum(self.tests.places.map(|place| keys.get(place).unwrap_or(0)))?;
            ranking.rank(self, &keys.own, member)?;
            let found = member.sum(tested.map(|key| ranking.less_than(key).unwrap_or(0)))?;
            let expected = self.tests.expected(iteration);
            wrong_ranks += found.iter().zip(expected).filter(|(found, expected)| *found != expected).count();
            tick(iteration);
        }
        let unsorted = ranking.unsorted(self, member)?;
        Ok(Verdict {
            verified: wrong_ranks == 0 && unsorted == 0,
            found: format!("wrong_ranks:{wrong_ranks},unsorted:{unsorted}"),
            expected: "wrong_ranks:0,unsorted:0".into(),
        })
    }
}

/// A member's keys by their place.
struct Keys {
    /// Place of the first one.
    first: usize,
    own: Vec<u32>,
}

impl Keys {
    fn new(problem: &Problem, member: &Member<'_, u32>) -> Self {
        let places = member.range(problem.keys);
        let mut random = Random::at(problem.seed, 4 * places.start as u64);
        let scale = f64::from(1_u32 << problem.key_bits) / 4.0;
        let own = places.clone().map(|_| {
            let sum = random.draw() + random.draw() + random.draw() + random.draw();
            (scale * sum) as u32
        });
        Self { first: places.start, own: own.collect() }
    }

    fn get(&self, place: usize) -> Option<u32> {
        self.own.get(place.checked_sub(self.first)?).copied()
    }

    /// Makes the specification's changes before an iteration: a low key and a high one.
    fn change(&mut self, iteration: u32, limit: u32) {
        for (place, key) in [(iteration, iteration), (iteration + ITERATIONS, limit - iteration)] {
            let own = (place as usize).checked_sub(self.first);
            if let Some(own) = own.and_then(|own| self.own.get_mut(own)) {
                *own = key;
            }
        }
    }
}

/// A member's keys by their value.
struct Ranking {
    /// Keys from each member, in its order. After an iteration their memory is used for the other direction.
    blocks: Vec<Vec<u32>>,
    /// The least key of its buckets.
    low: u32,
    /// Number of keys below that.
    below: u32,
    /// Number of keys that are not greater, among all members' keys, for each key from `low` on.
    not_greater: Vec<u32>,
}

impl Ranking {
    fn new(member: &Member<'_, u32>) -> Self {
        Self { blocks: vec![Vec::new(); member.parts()], low: 0, below: 0, not_greater: Vec::new() }
    }

    /// Ranks all keys: receives those of its own buckets, and counts them.
    fn rank(
        &mut self,
        problem: &Problem,
        keys: &[u32],
        member: &Member<'_, u32>,
    ) -> Result<(), ExchangeError> {
        let shift = problem.key_bits - BUCKETS.ilog2();
        let mut own_counts = [0; BUCKETS];
        for key in keys {
            own_counts[(key >> shift) as usize] += 1;
        }
        let counts = member.sum(own_counts)?;
        // A bucket is owned by the member in whose part the first of its keys would stand if the keys were sorted.
        let mut before = 0;
        let owners = counts.map(|count| {
            let owner = (before as usize * member.parts() / problem.keys).min(member.parts() - 1);
            before += count;
            owner
        });
        let first = owners.partition_point(|&owner| owner < member.part());
        let end = owners.partition_point(|&owner| owner <= member.part());
        self.low = (first as u32) << shift;
        self.below = counts[..first].iter().sum();

        for (part, block) in self.blocks.iter_mut().enumerate() {
            let counts = own_counts.iter().zip(&owners).filter(|(_, owner)| **owner == part);
            let count = counts.map(|(count, _)| *count as usize).sum();
            block.clear();
            if block.capacity() < count {
                // The changes of a whole run fit in as well.
                block.reserve_exact(count + 2 * ITERATIONS as usize);
            }
        }
        for &key in keys {
            self.blocks[owners[(key >> shift) as usize]].push(key);
        }
        self.blocks = member.trade(std::mem::take(&mut self.blocks))?;

        self.not_greater.clear();
        self.not_greater.resize((end - first) << shift, 0);
        for key in self.blocks.iter().flatten() {
            // A key below the lowest wraps around to an index beyond the end.
            let count = self.not_greater.get_mut(key.wrapping_sub(self.low) as usize);
            *count.ok_or(ExchangeError::Malformed("a key that belongs elsewhere"))? += 1;
        }
        let mut sum = self.below;
        for count in &mut self.not_greater {
            sum += *count;
            *count = sum;
        }
        Ok(())
    }

    /// Returns the number of keys that are less than this one, if it is known here.
    fn less_than(&self, key: u32) -> Option<u32> {
        let index = key.checked_sub(self.low)? as usize;
        self.not_greater.get(index)?;
        Some(index.checked_sub(1).map_or(self.below, |index| self.not_greater[index]))
    }

    /// Puts every key at the place of its rank, and counts the unsorted ones, among all members.
    fn unsorted(&mut self, problem: &Problem, member: &Member<'_, u32>) -> Result<u32, ExchangeError> {
        let mut sorted = vec![u32::MAX; self.blocks.iter().map(Vec::len).sum()];
        for &key in self.blocks.iter().flatten() {
            let rank = &mut self.not_greater[(key - self.low) as usize];
            *rank = rank.wrapping_sub(1);
            if let Some(place) = sorted.get_mut(rank.wrapping_sub(self.below) as usize) {
                *place = key;
            }
        }
        let steps = sorted.windows(2).filter(|pair| pair[0] > pair[1]).count() as u32;
        // The members' keys follow each other as the members do.
        let ends = [sorted.first(), sorted.last()].map(|end| end.map_or([0, 0], |&key| [1, key]));
        let ends = member.gather(ends.as_flattened().to_vec(), 4 * member.parts())?;
        let ends: Vec<u32> =
            ends.as_chunks::<2>().0.iter().filter(|end| end[0] == 1).map(|end| end[1]).collect();
        let [placed, steps] = member.sum([sorted.len() as u32, steps])?;
        Ok(steps + u32::from(!ends.is_sorted()) + (problem.keys as u32).abs_diff(placed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::tests::{assert_verifies, verdict};
    use crate::team;

    #[test]
    fn verifies() {
        assert_verifies(&Problem::new(Class::S), &[1, 2, 3, 16], ITERATIONS);
    }

    #[test]
    fn other_keys_do_not_verify() {
        let mut problem = Problem::new(Class::S);
        problem.seed += 2;
        assert!(!verdict(&problem, 2, ITERATIONS).verified);
    }

    #[test]
    fn each_known_rank_is_held_against_what_was_found() {
        for test in 0..TESTS {
            let mut problem = Problem::new(Class::S);
            problem.tests.ranks[test] += 1;
            let verdict = verdict(&problem, 2, ITERATIONS);
            assert_eq!(verdict.found, "wrong_ranks:10,unsorted:0");
            assert!(!verdict.verified);
        }
    }

    #[test]
    fn ranks_are_those_of_sorted_keys() {
        let problem = Problem::new(Class::S);
        team::run(2, None, |member| {
            let keys = Keys::new(&problem, member);
            let mut sorted = (*member.gather(keys.own.clone(), problem.keys)?).clone();
            sorted.sort_unstable();
            let mut ranking = Ranking::new(member);
            ranking.rank(&problem, &keys.own, member)?;
            for key in 0..1 << problem.key_bits {
                let [rank] = member.sum([ranking.less_than(key).unwrap_or(0)])?;
                assert_eq!(rank as usize, sorted.partition_point(|&other| other < key), "key {key}");
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_key_that_changes_after_it_was_counted_does_not_verify() {
        let problem = Problem::new(Class::S);
        let unsorted = |disturbance: u32| {
            team::run(1, None, |member| {
                let keys = Keys::new(&problem, member);
                let mut ranking = Ranking::new(member);
                ranking.rank(&problem, &keys.own, member)?;
                ranking.blocks[0][1000] ^= disturbance;
                ranking.unsorted(&problem, member)
            })
            .unwrap()
        };
        assert_eq!(unsorted(0), 0);
        assert_ne!(unsorted(64), 0);
    }
}
