//! Common parts of the kernels: a run, and its verdict.

use std::fmt;

use crate::exchange::{Element, ExchangeError};
use crate::team::Member;

/// A problem of one of the kernels, of one class.
pub trait Kernel: Sync {
    /// Type of the data that its members send each other.
    type Element: Element;

    /// Returns the memory that the arrays of one process use, in bytes, where each of `ranks` processes has `threads`
    /// threads. It is known before anything is allocated.
    fn bytes(&self, threads: usize, ranks: usize) -> usize;

    /// Does one member's share of one run, setup and verification included. `tick` receives the number of each
    /// iteration, from 1 on, when the member has done it. All members return the same verdict.
    fn run(
        &self,
        member: &Member<'_, Self::Element>,
        tick: &mut dyn FnMut(u32),
    ) -> Result<Verdict, ExchangeError>;
}

/// Result of a run's verification.
///
/// Its text is `verified=yes`, or `verified=no` and the values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// True if the result is right.
    pub verified: bool,
    /// The computed values, separated by commas.
    pub found: String,
    /// The specification's values.
    pub expected: String,
}

impl Verdict {
    /// Compares each value with the expected one; `tolerance` is relative to that. NaN is wrong.
    pub fn of(found: &[f64], expected: &[f64], tolerance: f64) -> Self {
        let right = |(found, expected): (&f64, &f64)| ((found - expected) / expected).abs() <= tolerance;
        let verified = found.len() == expected.len() && found.iter().zip(expected).all(right);
        Self { verified, found: list(found), expected: list(expected) }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.verified {
            f.write_str("verified=yes")
        } else {
            write!(f, "verified=no found={} expected={}", self.found, self.expected)
        }
    }
}

/// Formats values, separated by commas.
pub(crate) fn list(values: &[f64]) -> String {
    let words: Vec<String> = values.iter().map(|value| format!("{value:.13e}")).collect();
    words.join(",")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::team;

    /// Returns the verdict of a run on `threads` threads, and asserts that all iterations were reported.
    pub(crate) fn verdict<K: Kernel>(kernel: &K, threads: usize, iterations: u32) -> Verdict {
        team::run(threads, None, |member| {
            let mut reported = Vec::new();
            let verdict = kernel.run(member, &mut |iteration| reported.push(iteration))?;
            assert_eq!(reported, (1..=iterations).collect::<Vec<_>>());
            Ok(verdict)
        })
        .unwrap()
    }

    /// Asserts that the kernel verifies, for several numbers of threads.
    pub(crate) fn assert_verifies<K: Kernel>(kernel: &K, threads: &[usize], iterations: u32) {
        for &threads in threads {
            let verdict = verdict(kernel, threads, iterations);
            assert!(verdict.verified, "{threads} threads: {verdict}");
        }
    }

    #[test]
    fn only_what_is_near_enough_is_right() {
        assert!(Verdict::of(&[1.0, -2.0], &[1.0 + 1e-9, -2.0], 1e-8).verified);
        assert!(!Verdict::of(&[1.0, -2.0], &[1.0 + 1e-7, -2.0], 1e-8).verified);
        assert!(!Verdict::of(&[1.0, f64::NAN], &[1.0, 1.0], 1e-8).verified);
        assert!(!Verdict::of(&[1.0], &[1.0, 1.0], 1e-8).verified);
        let wrong = Verdict::of(&[1.0], &[2.0], 1e-8);
        assert_eq!(wrong.to_string(), "verified=no found=1.0000000000000e0 expected=2.0000000000000e0");
    }
}
