//! The policies as traces keep them ([`crate::trace`]), and what they are shown.

use serde::{Deserialize, Serialize};

use super::{
    Aim, ByHybrid, ByPattern, ByRounds, BySla, ByTarget, Decision, Held, Outlook, Policy, RoundObservation,
};
use crate::trace::{self, Decider};

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

/// One thing that happens to a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum Happened {
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
    },
}

impl Decider for AnyPolicy {
    type Observed = Happened;
    /// What to do after a round; nothing else is decided.
    type Decision = Option<Decision>;

    /// As good as all: the report has a line of each round anyway, and it is the last decision that is asked about.
    const KEPT: usize = 10_000;

    fn decide(&mut self, happened: &Happened) -> Option<Decision> {
        match happened {
            Happened::Aim(aim) => self.aim(*aim),
            Happened::Held { held } => self.held(*held),
            Happened::Round { observed } => return Some(Policy::decide(self, observed)),
        }
        None
    }
}

impl AnyPolicy {
    /// Its name, as a user gives it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Pattern(_) => "pattern",
            Self::Hybrid(_) => "hybrid",
            Self::Sla(_) => "sla",
            Self::Target(_) => "target",
            Self::Rounds(_) => "rounds",
        }
    }
}

/// All that a policy's decisions followed from.
pub type Trace = trace::Trace<AnyPolicy>;

/// A policy that keeps its trace.
pub type Traced = trace::Traced<AnyPolicy>;

impl Traced {
    /// Takes a changed aim; it holds from the next decision on.
    pub fn aim(&mut self, aim: Aim) {
        let last = self.trace().entries.iter().rev().find_map(|entry| match entry.observed {
            Happened::Aim(aim) => Some(aim),
            _ => None,
        });
        if last != Some(aim) {
            self.decide_on(Happened::Aim(aim));
        }
    }

    /// The guest is as fast as it was no more.
    pub fn held(&mut self, held: Held) {
        self.decide_on(Happened::Held { held });
    }

    /// What to do after this round.
    pub fn decide(&mut self, observed: &RoundObservation) -> Decision {
        let decision = Policy::decide(&mut self.policy, observed);
        self.keep(Happened::Round { observed: *observed }, Some(decision));
        decision
    }

    /// Whether it looks at pages that are sent again.
    pub fn has_history(&self) -> bool {
        matches!(self.policy(), AnyPolicy::Pattern(_) | AnyPolicy::Sla(_))
    }

    /// What a policy that looks ahead expected at its last look.
    pub fn outlook(&self) -> Option<Outlook> {
        match self.policy() {
            AnyPolicy::Sla(policy) => policy.outlook(),
            _ => None,
        }
    }
}
