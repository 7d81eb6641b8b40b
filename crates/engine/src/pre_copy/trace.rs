//! Serialized form of the policies in traces ([`crate::trace`]), and their observations.

use serde::{Deserialize, Serialize};

#[cfg(feature = "comparison")]
use super::classic::{RoundCountPolicy, TargetPolicy};
use super::hybrid::HybridPolicy;
use super::pattern::PatternPolicy;
use super::policy::{Decision, Policy, PreCopyGoals, RoundObservation, ThrottleChange};
use super::sla::{Outlook, SlaPolicy};
use crate::trace::{self, Decider};

/// Any of the policies, as a trace records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "kebab-case")]
#[allow(clippy::large_enum_variant, reason = "a migration has one")]
pub enum AnyPolicy {
    /// Detection of patterns.
    Pattern(PatternPolicy),
    /// Pre-copy first, then post-copy.
    Hybrid(HybridPolicy),
    /// Choice of the way that keeps the limits.
    Sla(SlaPolicy),
    /// KVM's rule.
    #[cfg(feature = "comparison")]
    Target(TargetPolicy),
    /// Xen's rule.
    #[cfg(feature = "comparison")]
    Rounds(RoundCountPolicy),
}

impl Policy for AnyPolicy {
    fn set_goals(&mut self, goals: PreCopyGoals) {
        match self {
            Self::Pattern(policy) => policy.set_goals(goals),
            Self::Hybrid(policy) => policy.set_goals(goals),
            Self::Sla(policy) => policy.set_goals(goals),
            #[cfg(feature = "comparison")]
            Self::Target(policy) => policy.set_goals(goals),
            #[cfg(feature = "comparison")]
            Self::Rounds(policy) => policy.set_goals(goals),
        }
    }

    fn throttle_changed(&mut self, change: ThrottleChange) {
        match self {
            Self::Pattern(policy) => policy.throttle_changed(change),
            Self::Hybrid(policy) => policy.throttle_changed(change),
            Self::Sla(policy) => policy.throttle_changed(change),
            #[cfg(feature = "comparison")]
            Self::Target(policy) => policy.throttle_changed(change),
            #[cfg(feature = "comparison")]
            Self::Rounds(policy) => policy.throttle_changed(change),
        }
    }

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        match self {
            Self::Pattern(policy) => policy.decide(observed),
            Self::Hybrid(policy) => policy.decide(observed),
            Self::Sla(policy) => policy.decide(observed),
            #[cfg(feature = "comparison")]
            Self::Target(policy) => policy.decide(observed),
            #[cfg(feature = "comparison")]
            Self::Rounds(policy) => policy.decide(observed),
        }
    }
}

impl From<PatternPolicy> for AnyPolicy {
    fn from(policy: PatternPolicy) -> Self {
        Self::Pattern(policy)
    }
}

impl From<HybridPolicy> for AnyPolicy {
    fn from(policy: HybridPolicy) -> Self {
        Self::Hybrid(policy)
    }
}

impl From<SlaPolicy> for AnyPolicy {
    fn from(policy: SlaPolicy) -> Self {
        Self::Sla(policy)
    }
}

#[cfg(feature = "comparison")]
impl From<TargetPolicy> for AnyPolicy {
    fn from(policy: TargetPolicy) -> Self {
        Self::Target(policy)
    }
}

#[cfg(feature = "comparison")]
impl From<RoundCountPolicy> for AnyPolicy {
    fn from(policy: RoundCountPolicy) -> Self {
        Self::Rounds(policy)
    }
}

/// Event that a policy observes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum PolicyEvent {
    /// The goals changed.
    Goals(PreCopyGoals),
    /// The CPU throttle changed.
    ThrottleChanged {
        /// The change.
        change: ThrottleChange,
    },
    /// A round has ended.
    Round {
        /// The observation.
        observed: RoundObservation,
    },
}

impl Decider for AnyPolicy {
    type Observed = PolicyEvent;
    /// Decision after a round; other events lead to none.
    type Decision = Option<Decision>;

    /// Practically all entries: the report has a line for each round anyway, and questions are about the last
    /// decision.
    const MAX_ENTRIES: usize = 10_000;

    fn decide(&mut self, happened: &PolicyEvent) -> Option<Decision> {
        match happened {
            PolicyEvent::Goals(goals) => self.set_goals(*goals),
            PolicyEvent::ThrottleChanged { change } => self.throttle_changed(*change),
            PolicyEvent::Round { observed } => return Some(Policy::decide(self, observed)),
        }
        None
    }
}

impl AnyPolicy {
    /// Returns the policy's name in the user interface.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Pattern(_) => "pattern",
            Self::Hybrid(_) => "hybrid",
            Self::Sla(_) => "sla",
            #[cfg(feature = "comparison")]
            Self::Target(_) => "target",
            #[cfg(feature = "comparison")]
            Self::Rounds(_) => "rounds",
        }
    }
}

/// Trace of a stop policy.
pub type StopTrace = trace::Trace<AnyPolicy>;

/// A stop policy that records its trace.
pub type TracedStopPolicy = trace::TracedPolicy<AnyPolicy>;

impl TracedStopPolicy {
    /// Sets changed goals, which apply from the next decision on.
    pub fn set_goals(&mut self, goals: PreCopyGoals) {
        let last = self.trace().entries.iter().rev().find_map(|entry| match entry.observed {
            PolicyEvent::Goals(goals) => Some(goals),
            _ => None,
        });
        if last != Some(goals) {
            self.decide_on(PolicyEvent::Goals(goals));
        }
    }

    /// Records a change of the CPU throttle.
    pub fn throttle_changed(&mut self, change: ThrottleChange) {
        self.decide_on(PolicyEvent::ThrottleChanged { change });
    }

    /// Decides after a round.
    pub fn decide(&mut self, observed: &RoundObservation) -> Decision {
        let decision = Policy::decide(&mut self.policy, observed);
        self.record(PolicyEvent::Round { observed: *observed }, Some(decision));
        decision
    }

    /// Returns true if the policy uses the count of pages that were sent again.
    pub fn has_history(&self) -> bool {
        matches!(self.policy(), AnyPolicy::Pattern(_) | AnyPolicy::Sla(_))
    }

    /// Returns the outcomes that a policy which looks ahead expected at the last scan.
    pub fn outlook(&self) -> Option<Outlook> {
        match self.policy() {
            AnyPolicy::Sla(policy) => policy.outlook(),
            _ => None,
        }
    }
}
