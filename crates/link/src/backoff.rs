//! How long to wait between attempts to reach a peer again. Pure: the caller sleeps.

use std::time::Duration;

/// Waits that double from attempt to attempt up to a cap, each shortened by up to a half at random, so that many
/// who lost the same peer do not all come back at the same moment.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    cap: Duration,
    attempt: u32,
    random: u64,
}

impl Backoff {
    /// The same seed gives the same waits.
    pub fn new(first: Duration, cap: Duration, seed: u64) -> Self {
        Self { first, cap, attempt: 0, random: seed }
    }

    /// How often [`Backoff::next_wait`] was asked since the beginning or the last [`Backoff::reset`].
    pub fn attempts(&self) -> u32 {
        self.attempt
    }

    /// How long to wait before the next attempt.
    pub fn next_wait(&mut self) -> Duration {
        let doubled = self.first.saturating_mul(1_u32.checked_shl(self.attempt).unwrap_or(u32::MAX));
        self.attempt = self.attempt.saturating_add(1);
        let full = doubled.min(self.cap);
        let half = full / 2;
        let span_ns = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX);
        half + Duration::from_nanos(self.random() % span_ns.max(1))
    }

    /// Begins anew, after a success.
    pub fn reset(&mut self) {
        self.attempt = 0;
    }

    /// `SplitMix64`: small, seeded, good enough to spread waits.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn waits_grow_to_the_cap_and_no_further(seed: u64, first_ms in 1_u64..1_000, cap_ms in 1_u64..60_000) {
            let (first, cap) = (Duration::from_millis(first_ms), Duration::from_millis(cap_ms));
            let mut backoff = Backoff::new(first, cap, seed);
            for attempt in 0..80_u32 {
                let full = first.saturating_mul(2_u32.saturating_pow(attempt)).min(cap);
                let wait = backoff.next_wait();
                prop_assert!(wait <= full && wait >= full / 2, "attempt {}: {:?} of {:?}", attempt, wait, full);
            }
            prop_assert_eq!(backoff.attempts(), 80);
            backoff.reset();
            prop_assert!(backoff.next_wait() <= first);
        }

        #[test]
        fn seeds_tell_the_waits(seed: u64) {
            let waits = |seed| {
                let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_mins(1), seed);
                std::array::from_fn::<_, 8, _>(|_| backoff.next_wait())
            };
            prop_assert_eq!(waits(seed), waits(seed));
            prop_assert_ne!(waits(seed), waits(seed.wrapping_add(1)));
        }
    }
}
