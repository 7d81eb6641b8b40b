//! Slowing a guest's processors down, so that it writes to its memory no faster than the link carries that away.
//!
//! A guest that is slower writes less: that is the idea of QEMU's auto-converge, too, which takes a fifth of all
//! processors away and then a tenth more and a tenth more, by having them sleep. Here it is as little as the measured
//! rates need, of the processor time that the guest really uses, up or down at each look; and whoever enforces it
//! lets it run and wait in turns of some milliseconds.

use serde::{Deserialize, Serialize};

use super::{Held, Seen};
use crate::trace::Decider;

/// A look at a guest after a round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuLook {
    /// Why it may have to be slower.
    #[serde(flatten)]
    pub wish: Wish,
    /// What was seen of it; absent as long as that is not known.
    pub seen: Option<CpuObservation>,
}

/// Why a guest's processors may have to be slower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// Whoever decides on the stop has chosen that.
    pub is_chosen: bool,
    /// A user asked for it, where the downtime would be too long.
    pub is_asked_for: bool,
    /// How often all that was dirty has been sent.
    pub passes: u32,
    /// What the downtime would be.
    pub expected_downtime_ns: u64,
    /// What it may be.
    pub max_downtime_ns: u64,
}

impl Wish {
    /// Whether the guest is to be slow. In the first pass it is not known yet how much will be left, so that no downtime is
    /// known to be too long.
    pub fn is_to_be_slow(&self) -> bool {
        let is_too_long = self.passes > 0 && self.expected_downtime_ns > self.max_downtime_ns;
        self.is_chosen || (self.is_asked_for && is_too_long)
    }
}

/// What was seen of a guest in the last round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuObservation {
    /// Processor time that each of its virtual processors used, in microseconds per second: 1,000,000 is all the time.
    pub used_us_per_s: Vec<u64>,
    /// How fast it dirtied memory, in bytes of whole pages per second.
    pub dirtied_bytes_per_s: u64,
    /// How fast memory was sent, in the same.
    pub drained_bytes_per_s: u64,
}

/// Holds a guest to so much processor time that it dirties half of what is sent: then all that is left is half after
/// each way through it. When it dirties far less for a while, it gets more step by step, and is let go in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuDrain {
    // What was learnt. Not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    held: Held,
    /// What each of its processors used when all together used the most, while they were not held; or more, if that was
    /// seen since.
    #[serde(skip)]
    usual_us_per_s: Vec<u64>,
}

impl CpuDrain {
    /// A processor that works keeps at least one part in so many: who gets less does not answer any more. The kernel sees at
    /// its next tick that a thread has used up its time, 4 ms late with 250 of them a second, and has it make up for that.
    /// Of a period of 24 ms a sixth is as much as it can be late: one more period is always enough.
    pub const LEAST_SHARE: u64 = 6;
    /// The same of one, in microseconds per second.
    const LEAST_US_PER_S: u64 = 1_000_000_u64.div_ceil(Self::LEAST_SHARE);

    /// With how much all of a guest's processors together do not stand still for long, where each usually uses so much, in
    /// microseconds per second: that, of one that works more than a sixth of the time a sixth.
    fn least(usual_us_per_s: &[u64]) -> u64 {
        sum(usual_us_per_s.iter().map(|usual| (*usual).min(Self::LEAST_US_PER_S)))
    }

    fn hold(&mut self, observed: &CpuObservation) {
        let CpuObservation { used_us_per_s: each_used, dirtied_bytes_per_s, drained_bytes_per_s } = observed;
        let used = sum(each_used.iter().copied());
        if self.held.cap.is_none() && used > self.usual() {
            self.usual_us_per_s.clone_from(each_used);
        }
        self.usual_us_per_s.resize(each_used.len(), 0);
        for (usual, used) in self.usual_us_per_s.iter_mut().zip(each_used) {
            *usual = (*usual).max(*used);
        }
        self.held.hold(&Seen {
            used,
            dirtied: *dirtied_bytes_per_s,
            share: drained_bytes_per_s / 2,
            least: Self::least(&self.usual_us_per_s).max(Self::LEAST_US_PER_S),
            most: self.usual(),
        });
    }

    /// What all of them together usually use.
    fn usual(&self) -> u64 {
        sum(self.usual_us_per_s.iter().copied())
    }

    /// How much each may use for all of them together to use no more than this: the same for each, for nobody knows which
    /// one will work next; and those that usually use less than that leave it to the others.
    fn for_each(&self, all_us_per_s: u64) -> u64 {
        let mut usual = self.usual_us_per_s.clone();
        usual.sort_unstable();
        let (mut left, mut others) = (all_us_per_s, usual.len() as u64);
        for usual in usual {
            if others == 1 || usual.saturating_mul(others) >= left {
                break;
            }
            (left, others) = (left - usual, others - 1);
        }
        (left / others.max(1)).max(Self::LEAST_US_PER_S)
    }

    /// What that is of what they usually use, in hundredths.
    pub fn percent(&self) -> u64 {
        let percent = |cap: u64| (u128::from(cap) * 100).checked_div(self.usual().into());
        self.held.cap.and_then(percent).map_or(100, |percent| percent.min(100) as u64)
    }
}

fn sum(of: impl Iterator<Item = u64>) -> u64 {
    of.fold(0, u64::saturating_add)
}

impl Decider for CpuDrain {
    type Observed = CpuLook;
    /// How much processor time each of its processors may use from now on, in microseconds per second; none if they are
    /// not held.
    type Decision = Option<u64>;

    const KEPT: usize = 1000;

    fn decide(&mut self, look: &CpuLook) -> Option<u64> {
        if let Some(seen) = look.seen.as_ref().filter(|_| look.wish.is_to_be_slow()) {
            self.hold(seen);
        }
        self.held.cap.map(|all| self.for_each(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is decided of a guest that is to be slow.
    fn decide(policy: &mut CpuDrain, seen: CpuObservation) -> Option<u64> {
        policy.decide(&CpuLook { wish: Wish { is_chosen: true, ..Wish::default() }, seen: Some(seen) })
    }

    const MIB: u64 = 1 << 20;

    fn seen(each_used: &[u64], dirtied_bytes_per_s: u64) -> CpuObservation {
        CpuObservation {
            used_us_per_s: each_used.to_vec(),
            dirtied_bytes_per_s,
            drained_bytes_per_s: 100 * MIB,
        }
    }

    /// A guest whose processors would use so much each and dirty so much together, on a link that drains 100 MiB a second;
    /// what each may use at the end, after so many looks.
    fn held_after(looks: u32, wants_us: &[u64], dirties: u64) -> (CpuDrain, Option<u64>) {
        let (mut policy, mut cap) = (CpuDrain::default(), None::<u64>);
        for _ in 0..looks {
            let used: Vec<_> =
                wants_us.iter().map(|wants| cap.map_or(*wants, |cap| cap.min(*wants))).collect();
            let dirtied = dirties * used.iter().sum::<u64>() / wants_us.iter().sum::<u64>();
            cap = decide(&mut policy, seen(&used, dirtied));
        }
        (policy, cap)
    }

    #[test]
    fn a_guest_gets_what_lets_it_dirty_half_of_what_is_sent() {
        // Two processors that dirty twice as much as is sent: a quarter of that is half of it.
        let (policy, cap) = held_after(1, &[1_000_000; 2], 200 * MIB);
        assert_eq!((cap, policy.percent()), (Some(250_000), 25));
        // And there it stays.
        let (policy, cap) = held_after(40, &[1_000_000; 2], 200 * MIB);
        assert!(cap.is_some_and(|cap| (CpuDrain::LEAST_US_PER_S..=500_000).contains(&cap)), "{policy:?}");
    }

    #[test]
    fn a_guest_that_dirties_little_is_not_held() {
        for dirties in [0, 10, 50] {
            let (policy, cap) = held_after(40, &[1_000_000], dirties * MIB);
            assert_eq!((cap, policy.percent()), (None, 100));
        }
        // One that is idle uses nothing, and what it dirties comes from elsewhere: nothing helps, and nothing is
        // divided by zero.
        for idle in [&[][..], &[0], &[0, 0]] {
            let mut policy = CpuDrain::default();
            let idle = CpuObservation { drained_bytes_per_s: 0, ..seen(idle, MIB) };
            assert_eq!((decide(&mut policy, idle), policy.percent()), (Some(CpuDrain::LEAST_US_PER_S), 100));
        }
    }

    #[test]
    fn no_processor_that_works_is_held_to_less_than_a_sixth() {
        for processors in [1, 4] {
            let (policy, cap) = held_after(40, &vec![1_000_000; processors], 100_000 * MIB);
            assert_eq!((cap, policy.percent()), (Some(CpuDrain::LEAST_US_PER_S), 16), "{processors}");
        }
    }

    #[test]
    fn processors_that_hardly_work_keep_no_other_fast() {
        let each = [20_000, 1_000_000, 20_000, 20_000];
        assert_eq!(CpuDrain::least(&each), CpuDrain::LEAST_US_PER_S + 3 * 20_000);
        assert_eq!(CpuDrain::least(&[]), 0);
        // Half of what they use, and what they do not use is the other's.
        let (policy, cap) = held_after(1, &each, 100 * MIB);
        assert_eq!((cap, policy.percent()), (Some(530_000 - 3 * 20_000), 50));
    }

    #[test]
    fn processors_that_work_get_the_same() {
        assert_eq!(held_after(1, &[900_000, 300_000, 600_000], 100 * MIB).1, Some(300_000));
        assert_eq!(held_after(1, &[900_000, 100_000, 800_000], 100 * MIB).1, Some(400_000));
    }

    /// Nobody stands still because it did nothing before; and what it uses is seen.
    #[test]
    fn a_processor_that_begins_to_work_gets_as_much_as_the_others() {
        let (mut policy, cap) = held_after(1, &[1_000_000, 0], 200 * MIB);
        assert_eq!(cap, Some(250_000));
        assert_eq!(decide(&mut policy, seen(&[250_000, 250_000], 100 * MIB)), Some(CpuDrain::LEAST_US_PER_S));
    }

    /// What works moves from one to another: the least is what lets each have its sixth, not what both once used together.
    #[test]
    fn a_program_that_moves_between_processors_is_held_to_a_sixth_all_the_same() {
        let mut policy = CpuDrain::default();
        decide(&mut policy, seen(&[217_000, 152_000], MIB));
        decide(&mut policy, seen(&[51_000, 405_000], 100 * MIB));
        let caps: Vec<_> = (0..4).map(|_| decide(&mut policy, seen(&[26_000, 204_000], 98 * MIB))).collect();
        assert_eq!(caps.last(), Some(&Some(CpuDrain::LEAST_US_PER_S)), "{caps:?}");
    }

    #[test]
    fn a_guest_that_has_become_calm_is_let_go() {
        let (mut policy, cap) = held_after(1, &[1_000_000], 400 * MIB);
        assert_eq!(cap, Some(CpuDrain::LEAST_US_PER_S));
        let calm = seen(&[100_000], MIB);
        let caps: Vec<_> = (0..12).map(|_| decide(&mut policy, calm.clone())).collect();
        assert_eq!(caps[1..4], [cap, cap.map(|cap| 2 * cap), cap.map(|cap| 2 * cap)]);
        assert_eq!((caps[7], caps[8], policy.percent()), (cap.map(|cap| 4 * cap), None, 100));
    }

    #[test]
    fn a_guest_is_slow_where_that_was_chosen_or_was_asked_for_and_is_needed() {
        let asked = Wish {
            is_asked_for: true,
            passes: 1,
            expected_downtime_ns: 301,
            max_downtime_ns: 300,
            ..Wish::default()
        };
        assert!(asked.is_to_be_slow());
        for not in [
            Wish { is_asked_for: false, ..asked },
            Wish { passes: 0, ..asked },
            Wish { expected_downtime_ns: 300, ..asked },
        ] {
            assert!(!not.is_to_be_slow(), "{not:?}");
            assert!(Wish { is_chosen: true, ..not }.is_to_be_slow(), "{not:?}");
        }
    }

    /// It stays as slow as it was: it is let go by how it writes, not by what is wished for.
    #[test]
    fn nothing_changes_where_nothing_is_known_or_wished_for() {
        let fast = CpuLook { seen: Some(seen(&[1_000_000], 400 * MIB)), ..CpuLook::default() };
        let mut policy = CpuDrain::default();
        assert_eq!(policy.decide(&fast), None);
        let cap = decide(&mut policy, seen(&[1_000_000], 400 * MIB));
        assert!(cap.is_some());
        assert_eq!(policy.decide(&CpuLook::default()), cap);
        assert_eq!(policy.decide(&fast), cap);
    }
}
