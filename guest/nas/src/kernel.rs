//! What the kernels have in common: a run, and what came of it.

use std::fmt;

use crate::exchange::{Element, ExchangeError};
use crate::team::Member;

/// A problem of one of the kernels, of one class.
pub trait Kernel: Sync {
    /// What its members send each other.
    type Element: Element;

    /// Memory that the arrays of one process take, in bytes, where each of `ranks` processes has `threads` threads. It
    /// is known before anything is allocated.
    fn bytes(&self, threads: usize, ranks: usize) -> usize;

    /// One member's share of one run, setup and verification included. `tick` is told the number of each iteration, from
    /// 1 on, when the member has done it. All members come to the same verdict.
    fn run(
        &self,
        member: &Member<'_, Self::Element>,
        tick: &mut dyn FnMut(u32),
    ) -> Result<Verdict, ExchangeError>;
}

/// Whether a run computed what it must.
///
/// Printed, it says `verified=yes`, or `verified=no` and the values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// The result is right.
    pub verified: bool,
    /// What was computed: values between commas.
    pub found: String,
    /// What the specification says.
    pub expected: String,
}

impl Verdict {
    /// Holds each value against the one expected of it; `tolerance` is relative to that. What is not a number is wrong.
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

/// Values between commas.
pub(crate) fn list(values: &[f64]) -> String {
    let words: Vec<String> = values.iter().map(|value| format!("{value:.13e}")).collect();
    words.join(",")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::team;

    /// The verdict of a run on `threads` threads, once as many iterations were told as there are.
    pub(crate) fn verdict<K: Kernel>(kernel: &K, threads: usize, iterations: u32) -> Verdict {
        team::run(threads, None, |member| {
            let mut told = Vec::new();
            let verdict = kernel.run(member, &mut |iteration| told.push(iteration))?;
            assert_eq!(told, (1..=iterations).collect::<Vec<_>>());
            Ok(verdict)
        })
        .unwrap()
    }

    /// Whatever the number of threads is.
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
