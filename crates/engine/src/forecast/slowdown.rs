//! The CPU throttle of a simulated guest: the real policy decides, and the guest writes less in proportion.

use crate::pre_copy::{PreCopyGoals, RoundObservation, ThrottleChange};
use crate::throttle::processors::{CpuObservation, CpuSample, CpuThrottlePolicy, ThrottleDemand};
use crate::trace::Decider;

/// CPU throttle of a simulated guest.
pub(super) struct Slowdown {
    policy: CpuThrottlePolicy,
    /// Use of each processor without a limit, in microseconds per second.
    usual_us_per_s: Vec<u64>,
    is_requested: bool,
    /// True once a sample was taken: the next one has a use to compare with.
    has_sampled: bool,
    limit_us_per_s: Option<u64>,
    was_slowed: bool,
}

/// A processor that works all the time, in microseconds per second.
const BUSY_US_PER_S: u64 = 1_000_000;

impl Slowdown {
    /// Creates the throttle of a guest whose processors use so much; one that is busy if that is not known.
    pub(super) fn new(usual_us_per_s: &[u64], is_requested: bool) -> Self {
        let usual_us_per_s =
            if usual_us_per_s.is_empty() { vec![BUSY_US_PER_S] } else { usual_us_per_s.to_vec() };
        Self {
            policy: CpuThrottlePolicy::default(),
            usual_us_per_s,
            is_requested,
            has_sampled: false,
            limit_us_per_s: None,
            was_slowed: false,
        }
    }

    /// Returns the speed of the guest: 1 without a limit.
    pub(super) fn speed(&self) -> f64 {
        let usual: u64 = self.usual_us_per_s.iter().sum();
        let used: u64 = self.used_us_per_s().iter().sum();
        if usual == 0 { 1.0 } else { used as f64 / usual as f64 }
    }

    /// Returns true if the guest had a limit at any time.
    pub(super) fn was_slowed(&self) -> bool {
        self.was_slowed
    }

    /// Decides the limit after a round; returns the change if the guest became slower.
    pub(super) fn update(
        &mut self,
        observed: &RoundObservation,
        is_chosen: bool,
        expected_downtime_ns: u64,
        goals: PreCopyGoals,
    ) -> Option<ThrottleChange> {
        if !is_chosen && !self.is_requested {
            return None;
        }
        let sent = RoundObservation {
            dirty_pages: observed.pages_sent.saturating_sub(observed.empty_pages),
            remaining_pages: 0,
            interval_ns: observed.duration_ns,
            ..*observed
        };
        let seen = CpuObservation {
            used_us_per_s: self.used_us_per_s(),
            dirtied_bytes_per_s: observed.without_must_precopy().dirty_rate_bytes_per_s(),
            sent_bytes_per_s: sent.dirty_rate_bytes_per_s(),
        };
        let wish = ThrottleDemand {
            is_chosen,
            is_requested: self.is_requested,
            passes: observed.pass,
            expected_downtime_ns,
            max_downtime_ns: goals.max_downtime_ns,
        };
        let seen = std::mem::replace(&mut self.has_sampled, true).then_some(seen);
        let limit = self.policy.decide(&CpuSample { wish, seen });
        let before = std::mem::replace(&mut self.limit_us_per_s, limit);
        self.was_slowed |= limit.is_some();
        (limit.unwrap_or(u64::MAX) < before.unwrap_or(u64::MAX)).then_some(ThrottleChange::Slower)
    }

    fn used_us_per_s(&self) -> Vec<u64> {
        let limit = self.limit_us_per_s.unwrap_or(u64::MAX);
        self.usual_us_per_s.iter().map(|usual| (*usual).min(limit)).collect()
    }
}
