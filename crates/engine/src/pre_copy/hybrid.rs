//! Pre-copy first, then post-copy: the downtime does not depend on how fast the guest writes.

use serde::{Deserialize, Serialize};

use super::forecast::{FixedCost, Forecast};
use super::policy::{Decision, Policy, PreCopyGoals, RoundObservation, ThrottleChange};
use super::post_copy_start::PostCopyStart;

/// Sends all of memory once, or several times, while the guest runs at the source; the remaining pages are sent while
/// it runs at the destination. In the first pass the pages that the guest writes are sent last, so that few are sent
/// twice.
///
/// If the remaining pages take no longer than the fixed part of the stop, the guest is stopped for them: it then
/// needs both hosts no longer than necessary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HybridPolicy {
    goals: PreCopyGoals,
    passes: u32,
    fixed: FixedCost,
    // Learned state. It is not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    forecast: Forecast,
    #[serde(skip)]
    post_copy_start: PostCopyStart,
}

impl HybridPolicy {
    /// Creates a policy that begins post-copy after `passes` passes; with 0 nothing is sent before the stop.
    pub fn new(goals: PreCopyGoals, passes: u32, fixed: FixedCost) -> Self {
        Self {
            goals,
            passes,
            fixed,
            forecast: Forecast::default(),
            post_copy_start: PostCopyStart::default(),
        }
    }
}

impl Policy for HybridPolicy {
    /// Sets the goals. The downtime is the fixed part, and the pages of disks that cannot be sent before the stop.
    fn set_goals(&mut self, goals: PreCopyGoals) {
        self.goals = goals;
    }

    /// Does nothing: the guest's write rate does not matter.
    fn throttle_changed(&mut self, _: ThrottleChange) {}

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        self.forecast.learn(observed);
        let pages_ns = self.forecast.pages_ns(observed);
        let fixed_ns = self.fixed.downtime_ns(0).saturating_add(observed.scan_ns.saturating_mul(2));
        let stop_ns = self.fixed.downtime_ns(pages_ns).saturating_add(observed.scan_ns.saturating_mul(2));
        if observed.pass < self.passes {
            Decision::NextRound {
                expected_downtime_ns: fixed_ns,
                most_pages: None,
                slow: false,
                must_precopy_only: false,
            }
        } else if pages_ns <= fixed_ns {
            Decision::StopAndCopy { expected_downtime_ns: stop_ns, pattern: None }
        } else {
            self.post_copy_start.decide(observed, pages_ns, &self.fixed, self.goals.max_downtime_ns)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round in which a page takes a microsecond; the estimated fixed part of a stop is 15 ms.
    fn observed(pass: u32, dirty_pages: u64) -> RoundObservation {
        let (pages_sent, duration_ns) = (1_000_000, 1_000_000_000);
        RoundObservation { pass, dirty_pages, pages_sent, duration_ns, ..RoundObservation::default() }
    }

    #[test]
    fn remaining_pages_are_sent_in_post_copy_unless_few() {
        for passes in [0, 1, 3] {
            for (dirty_pages, is_little) in [(100, true), (14_999, true), (15_001, false), (1 << 30, false)] {
                let mut policy = HybridPolicy::new(PreCopyGoals::default(), passes, FixedCost::default());
                for pass in 0..passes {
                    let next = policy.decide(&observed(pass, dirty_pages));
                    assert!(matches!(next, Decision::NextRound { .. }), "{next:?}");
                }
                let last = policy.decide(&observed(passes, dirty_pages));
                assert_eq!(matches!(last, Decision::StopAndCopy { .. }), is_little, "{last:?}");
                assert_eq!(matches!(last, Decision::PostCopy { .. }), !is_little, "{last:?}");
            }
        }
    }
}
