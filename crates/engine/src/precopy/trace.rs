//! What a policy was shown and what it decided, so that anybody can decide it again.

use serde::{Deserialize, Serialize};

use super::{
    Aim, ByHybrid, ByPattern, ByRounds, BySla, ByTarget, Decision, Held, Outlook, Policy, RoundObservation,
};

/// A policy of any kind, as a trace keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "kebab-case")]
#[allow(clippy::large_enum_variant, reason = "a migration has one")]
pub enum AnyPolicy {
    /// Patterns.
    Pattern(ByPattern),
    /// Pre-copy first, then post-copy.
    Hybrid(ByHybrid),
    /// What keeps the limits.
    Sla(BySla),
    /// KVM's rule.
    Target(ByTarget),
    /// Xen's rule.
    Rounds(ByRounds),
}

impl Policy for AnyPolicy {
    fn aim(&mut self, aim: Aim) {
        match self {
            Self::Pattern(policy) => policy.aim(aim),
            Self::Hybrid(policy) => policy.aim(aim),
            Self::Sla(policy) => policy.aim(aim),
            Self::Target(policy) => policy.aim(aim),
            Self::Rounds(policy) => policy.aim(aim),
        }
    }

    fn held(&mut self, held: Held) {
        match self {
            Self::Pattern(policy) => policy.held(held),
            Self::Hybrid(policy) => policy.held(held),
            Self::Sla(policy) => policy.held(held),
            Self::Target(policy) => policy.held(held),
            Self::Rounds(policy) => policy.held(held),
        }
    }

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        match self {
            Self::Pattern(policy) => policy.decide(observed),
            Self::Hybrid(policy) => policy.decide(observed),
            Self::Sla(policy) => policy.decide(observed),
            Self::Target(policy) => policy.decide(observed),
            Self::Rounds(policy) => policy.decide(observed),
        }
    }
}

impl From<ByPattern> for AnyPolicy {
    fn from(policy: ByPattern) -> Self {
        Self::Pattern(policy)
    }
}

impl From<ByHybrid> for AnyPolicy {
    fn from(policy: ByHybrid) -> Self {
        Self::Hybrid(policy)
    }
}

impl From<BySla> for AnyPolicy {
    fn from(policy: BySla) -> Self {
        Self::Sla(policy)
    }
}

impl From<ByTarget> for AnyPolicy {
    fn from(policy: ByTarget) -> Self {
        Self::Target(policy)
    }
}

impl From<ByRounds> for AnyPolicy {
    fn from(policy: ByRounds) -> Self {
        Self::Rounds(policy)
    }
}

/// All that a policy's decisions followed from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// The policy before its first decision.
    pub policy: AnyPolicy,
    /// What came then, in order.
    pub entries: Vec<TraceEntry>,
}

/// One thing that happened to a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum TraceEntry {
    /// The aim changed.
    Aim(Aim),
    /// The guest's processors became slower, or were let go.
    Held {
        /// Which of it.
        held: Held,
    },
    /// A round was over.
    Round {
        /// What was seen.
        observed: RoundObservation,
        /// What was decided.
        decision: Decision,
    },
}

impl Trace {
    /// Decides everything again, in order. Equal to the decisions in the trace unless the rule has changed since.
    pub fn replay(&self) -> Vec<Decision> {
        let mut policy = self.policy.clone();
        let mut again = Vec::new();
        for entry in &self.entries {
            match entry {
                TraceEntry::Aim(aim) => policy.aim(*aim),
                TraceEntry::Held { held } => policy.held(*held),
                TraceEntry::Round { observed, .. } => again.push(policy.decide(observed)),
            }
        }
        again
    }

    /// The decisions as they were made.
    pub fn decisions(&self) -> Vec<Decision> {
        let decision = |entry: &TraceEntry| match entry {
            TraceEntry::Aim(_) | TraceEntry::Held { .. } => None,
            TraceEntry::Round { decision, .. } => Some(*decision),
        };
        self.entries.iter().filter_map(decision).collect()
    }
}

/// A policy that keeps its trace.
#[derive(Clone, Debug)]
pub struct Traced {
    policy: AnyPolicy,
    aim: Option<Aim>,
    trace: Trace,
}

impl Traced {
    /// Keeps the trace of a policy that has decided nothing yet.
    pub fn new(policy: impl Into<AnyPolicy>) -> Self {
        let policy = policy.into();
        Self { trace: Trace { policy: policy.clone(), entries: Vec::new() }, aim: None, policy }
    }

    /// Whether it looks at pages that are sent again.
    pub fn has_history(&self) -> bool {
        matches!(self.policy, AnyPolicy::Pattern(_))
    }

    /// What a policy that looks ahead expected at its last look.
    pub fn outlook(&self) -> Option<Outlook> {
        match &self.policy {
            AnyPolicy::Sla(policy) => policy.outlook(),
            _ => None,
        }
    }

    /// What happened so far.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }
}

impl Policy for Traced {
    fn aim(&mut self, aim: Aim) {
        if self.aim != Some(aim) {
            self.aim = Some(aim);
            self.trace.entries.push(TraceEntry::Aim(aim));
            self.policy.aim(aim);
        }
    }

    fn held(&mut self, held: Held) {
        self.trace.entries.push(TraceEntry::Held { held });
        self.policy.held(held);
    }

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        let decision = self.policy.decide(observed);
        self.trace.entries.push(TraceEntry::Round { observed: *observed, decision });
        decision
    }
}
