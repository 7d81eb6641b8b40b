//! The rules of KVM and Xen, for comparison.

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

use super::forecast::FixedCost;
use super::policy::{
    Decision, GiveUp, Limit, OnLimit, Policy, PreCopyGoals, RoundObservation, ThrottleChange,
};
use super::post_copy_start::PostCopyStart;

/// KVM's rule (Ibrahim et al., Algorithm 1): stops as soon as the remaining pages take less than the downtime limit at
/// the rate of the last round, and sends rounds until then. Here it has a limit of rounds, like every policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetPolicy {
    goals: PreCopyGoals,
    on_limit: OnLimit,
    #[serde(skip)]
    post_copy_start: PostCopyStart,
}

/// KVM's rule has no fixed cost of a stop.
const NO_FIXED_COST: FixedCost = FixedCost { stop_ns: 0, save_ns: 0, load_ns: 0, continue_ns: 0 };

impl TargetPolicy {
    /// Creates the policy.
    pub fn new(goals: PreCopyGoals, on_limit: OnLimit) -> Self {
        Self { goals, on_limit, post_copy_start: PostCopyStart::default() }
    }
}

impl Policy for TargetPolicy {
    fn set_goals(&mut self, goals: PreCopyGoals) {
        self.goals = goals;
    }

    /// Does nothing: the rule depends on the last round alone.
    fn throttle_changed(&mut self, _: ThrottleChange) {}

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        let expected_downtime_ns = at_the_last_rate(observed);
        let stop = Decision::StopAndCopy { expected_downtime_ns, pattern: None };
        let is_last = observed.pass >= self.goals.max_passes;
        if observed.pass > 0 && expected_downtime_ns < self.goals.max_downtime_ns {
            return stop;
        }
        match self.on_limit {
            OnLimit::Stop if is_last && observed.pass > 0 => stop,
            OnLimit::PostCopy if is_last && observed.pass > 0 => self.post_copy_start.decide(
                observed,
                expected_downtime_ns,
                &NO_FIXED_COST,
                self.goals.max_downtime_ns,
            ),
            OnLimit::Abort if is_last && observed.pass > 0 => Decision::GiveUp {
                reason: GiveUp {
                    limit: Limit::Passes,
                    expected_downtime_ns,
                    fixed_ns: 0,
                    max_downtime_ns: self.goals.max_downtime_ns,
                },
            },
            _ => Decision::NextRound {
                expected_downtime_ns,
                most_pages: None,
                slow: false,
                must_precopy_only: false,
            },
        }
    }
}

/// Xen's rule (section IX of the same; the figures are those of Xen's tools): stops when almost no pages remain, or
/// after many rounds, or when several times the memory was sent, whatever the downtime is then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundCountPolicy {
    #[serde(skip)]
    memory_pages: u64,
    #[serde(skip)]
    sent_pages: u64,
}

impl RoundCountPolicy {
    /// Limit on the number of passes.
    pub const MAX_PASSES: u32 = 29;
    /// Limit on the pages sent, as a multiple of the memory.
    pub const MAX_MEMORY_MULTIPLE: u64 = 3;
    /// Number of remaining pages below which the guest is stopped.
    pub const FEW_PAGES: u64 = 50;
}

impl Policy for RoundCountPolicy {
    /// Does nothing: the rule has no goals.
    fn set_goals(&mut self, _: PreCopyGoals) {}

    /// Does nothing: the rule counts rounds and pages, however fast the guest is.
    fn throttle_changed(&mut self, _: ThrottleChange) {}

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        let expected_downtime_ns = at_the_last_rate(observed);
        self.sent_pages = self.sent_pages.saturating_add(observed.pages_sent);
        if observed.pass <= 1 {
            self.memory_pages = self.sent_pages;
        }
        let is_over = observed.dirty_pages < Self::FEW_PAGES
            || observed.pass >= Self::MAX_PASSES
            || self.sent_pages > self.memory_pages.saturating_mul(Self::MAX_MEMORY_MULTIPLE);
        if observed.pass > 0 && is_over {
            Decision::StopAndCopy { expected_downtime_ns, pattern: None }
        } else {
            Decision::NextRound {
                expected_downtime_ns,
                most_pages: None,
                slow: false,
                must_precopy_only: false,
            }
        }
    }
}

/// Returns the expected downtime (Algorithm 1, lines 21 and 28): the remaining pages, at the rate of the last round.
fn at_the_last_rate(observed: &RoundObservation) -> u64 {
    let left_bytes = u128::from(observed.dirty_pages) * u128::from(PAGE_BYTES);
    let ns = (left_bytes * 1_000_000_000).checked_div(observed.link_rate_bytes_per_s().into());
    match ns {
        Some(ns) => u64::try_from(ns).unwrap_or(u64::MAX),
        None if left_bytes == 0 => 0,
        None => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page takes a millisecond.
    fn observed(pass: u32, dirty_pages: u64, pages_sent: u64) -> RoundObservation {
        RoundObservation {
            pass,
            dirty_pages,
            pages_sent,
            bytes_sent: pages_sent * PAGE_BYTES,
            duration_ns: pages_sent * 1_000_000,
            ..RoundObservation::default()
        }
    }

    fn stops(decision: Decision) -> bool {
        matches!(decision, Decision::StopAndCopy { .. })
    }

    #[test]
    fn kvm_s_rule_is_the_allowed_downtime() {
        let goals = PreCopyGoals { max_downtime_ns: 30_000_000, max_passes: 10, ..PreCopyGoals::default() };
        let mut policy = TargetPolicy::new(goals, OnLimit::Abort);
        assert!(!stops(policy.decide(&observed(0, 0, 5))));
        assert!(!stops(policy.decide(&observed(1, 30, 1_000))));
        assert!(stops(policy.decide(&observed(2, 29, 30))));
        assert!(matches!(policy.decide(&observed(10, 30, 30)), Decision::GiveUp { .. }));
        assert!(stops(TargetPolicy::new(goals, OnLimit::Stop).decide(&observed(10, 30, 30))));
        assert!(!stops(policy.decide(&observed(3, 1, 0))), "nothing is known of the link");
    }

    #[test]
    fn xen_s_rule_is_a_count() {
        let mut policy = RoundCountPolicy::default();
        assert!(!stops(policy.decide(&observed(1, 900, 1_000))));
        assert!(!stops(policy.decide(&observed(2, 900, 1_000))));
        assert!(!stops(policy.decide(&observed(3, 900, 1_000))));
        assert!(stops(policy.decide(&observed(4, 900, 1))), "more than three times the memory");
        assert!(stops(RoundCountPolicy::default().decide(&observed(1, 49, 1_000))));
        assert!(stops(RoundCountPolicy::default().decide(&observed(29, 900, 1_000))));
    }
}
