//! EP, embarrassingly parallel: pairs of random numbers in a circle are made into Gaussian deviates, which are added
//! up.
//!
//! It computes in batches and hardly touches memory. Its members meet only to add up their sums, sixteen times in a
//! run.

use crate::class::Class;
use crate::exchange::ExchangeError;
use crate::kernel::{Kernel, Verdict};
use crate::random::{Random, SEED_EP};
use crate::team::Member;

/// Iterations, which the specification does not have: they are for observers of the progress.
const ITERATIONS: usize = 16;
/// Pairs of a batch.
const BATCH: usize = 1 << 16;
/// Square annuli in which the deviates are counted.
const ANNULI: usize = 10;
/// Relative tolerance, of the specification.
const TOLERANCE: f64 = 1e-8;

/// A problem: a number of pairs.
#[derive(Debug, Clone)]
pub struct Problem {
    batches: usize,
    seed: u64,
    /// Sum of |X|, sum of |Y|, pairs in the circle.
    expected: [f64; 3],
}

impl Problem {
    /// Returns the problem of a class.
    pub fn new(class: Class) -> Self {
        let (pairs_log2, expected) = match class {
            Class::S => (24, [1.051_299_420_395_306e7, 1.051_517_131_857_535e7, 13_176_389.0]),
            Class::W => (25, [2.102_505_525_182_392e7, 2.103_162_209_578_822e7, 26_354_769.0]),
            Class::A => (28, [1.682_235_632_304_711e8, 1.682_195_123_368_299e8, 210_832_767.0]),
        };
        Self { batches: (1 << pairs_log2) / BATCH, seed: SEED_EP, expected }
    }
}

impl Kernel for Problem {
    type Element = f64;

    fn bytes(&self, threads: usize, _ranks: usize) -> usize {
        threads * 2 * BATCH * size_of::<f64>()
    }

    fn run(&self, member: &Member<'_, f64>, tick: &mut dyn FnMut(u32)) -> Result<Verdict, ExchangeError> {
        let mut numbers = vec![0.0; 2 * BATCH];
        let mut tally = Tally::default();
        let mut total = Tally::default();
        for iteration in 1..=ITERATIONS {
            let before = (iteration - 1) * self.batches / ITERATIONS;
            let batches = iteration * self.batches / ITERATIONS - before;
            for batch in member.range(batches) {
                let mut random = Random::at(self.seed, ((before + batch) * numbers.len()) as u64);
                numbers.fill_with(|| random.draw());
                tally.add(&numbers);
            }
            let sums = member.sum([tally.x, tally.y])?;
            total = Tally { x: sums[0], y: sums[1], counts: member.sum(tally.counts)? };
            tick(iteration as u32);
        }
        Ok(Verdict::of(&[total.x, total.y, total.counts.iter().sum()], &self.expected, TOLERANCE))
    }
}

/// Results for the pairs so far.
#[derive(Debug, Default)]
struct Tally {
    x: f64,
    y: f64,
    counts: [f64; ANNULI],
}

impl Tally {
    fn add(&mut self, numbers: &[f64]) {
        for [x, y] in numbers.as_chunks::<2>().0 {
            let (x, y) = (2.0 * x - 1.0, 2.0 * y - 1.0);
            let square = x * x + y * y;
            if square <= 1.0 {
                let factor = (-2.0 * square.ln() / square).sqrt();
                let (x, y) = ((x * factor).abs(), (y * factor).abs());
                self.x += x;
                self.y += y;
                self.counts[x.max(y) as usize] += 1.0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::tests::{assert_verifies, verdict};

    #[test]
    fn verifies() {
        assert_verifies(&Problem::new(Class::S), &[1, 2], 16);
    }

    #[test]
    fn other_numbers_do_not_verify() {
        let mut problem = Problem::new(Class::S);
        problem.seed += 2;
        assert!(!verdict(&problem, 2, 16).verified);
    }

    #[test]
    fn one_pair_too_few_does_not_verify() {
        // A batch of which one pair lies outside of the circle, though it should not.
        let expected = Problem::new(Class::S).expected;
        let mut found = expected;
        found[2] -= 1.0;
        assert!(Verdict::of(&expected, &expected, TOLERANCE).verified);
        assert!(!Verdict::of(&found, &expected, TOLERANCE).verified);
    }
}
