//! What whoever decides was shown and what it decided, so that anybody can decide it again.
//!
//! A [`Decider`] reads no clock and draws no random number, so its decisions follow from what it was shown. [`Traced`] keeps
//! that as a [`Trace`]; those of a migration are [`Traces`], and go into its report.
//!
//! A trace begins where its decider does, and keeps so many looks: of what comes after them it counts how often it decided.
//! To leave out the first ones in their place would need what was learnt from them, which is more than numbers that were
//! measured; so what is kept can be decided again whatever was left out.

mod traces;

use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use traces::{Difference, Others, Replayed, Traces};

/// What can be kept in a trace.
pub trait Kept: Clone + Debug + PartialEq + Serialize + DeserializeOwned {}

impl<T: Clone + Debug + PartialEq + Serialize + DeserializeOwned> Kept for T {}

/// Decides again and again, by what it was shown and nothing else.
pub trait Decider: Kept {
    /// What it is shown.
    type Observed: Kept;
    /// What it says.
    type Decision: Kept;

    /// Most looks that a trace of it keeps.
    const KEPT: usize;

    /// Decides.
    fn decide(&mut self, observed: &Self::Observed) -> Self::Decision;
}

/// All that decisions followed from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Trace<P: Decider> {
    /// Who decided, before the first decision.
    pub policy: P,
    /// What came then, in order.
    pub entries: Vec<Entry<P>>,
    /// How many looks came after these, and were not kept.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
}

/// What a trace has of somebody who knows nothing before the first look: nothing. What was learnt is not part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blank {}

impl<P: Decider + From<Blank>> From<P> for Blank {
    fn from(_: P) -> Self {
        Self {}
    }
}

/// One look.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Entry<P: Decider> {
    /// What had been learnt before was forgotten.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub anew: bool,
    /// What was seen.
    #[serde(flatten)]
    pub observed: P::Observed,
    /// What was decided.
    pub decision: P::Decision,
}

impl<P: Decider> Trace<P> {
    /// Of somebody who has decided nothing yet.
    pub fn new(policy: P) -> Self {
        Self { policy, entries: Vec::new(), left_out: 0 }
    }

    /// Decides everything again, in order: the same trace, unless the rule has changed since.
    #[must_use]
    pub fn replay(&self) -> Self {
        let mut policy = self.policy.clone();
        let again = |entry: &Entry<P>| {
            if entry.anew {
                policy = self.policy.clone();
            }
            Entry { decision: policy.decide(&entry.observed), ..entry.clone() }
        };
        let entries = self.entries.iter().map(again).collect();
        Self { policy: self.policy.clone(), entries, left_out: self.left_out }
    }

    /// The decisions, in order.
    pub fn decisions(&self) -> impl Iterator<Item = &P::Decision> {
        self.entries.iter().map(|entry| &entry.decision)
    }

    /// Has this one, which was like the other one some looks ago, be like it again.
    pub fn catch_up(&mut self, other: &Self) {
        self.entries.extend_from_slice(other.entries.get(self.entries.len()..).unwrap_or_default());
        self.left_out = other.left_out;
    }
}

/// Somebody who decides and keeps the trace.
#[derive(Clone, Debug)]
pub struct Traced<P: Decider> {
    pub(crate) policy: P,
    is_new: bool,
    trace: Trace<P>,
}

impl<P: Decider> Traced<P> {
    /// Keeps the trace of somebody who has decided nothing yet.
    pub fn new(policy: impl Into<P>) -> Self {
        let policy = policy.into();
        Self { trace: Trace::new(policy.clone()), is_new: false, policy }
    }

    /// Decides, and keeps why.
    pub fn decide_on(&mut self, observed: P::Observed) -> P::Decision {
        let decision = self.policy.decide(&observed);
        self.keep(observed, decision.clone());
        decision
    }

    /// Keeps what was decided.
    pub(crate) fn keep(&mut self, observed: P::Observed, decision: P::Decision) {
        let anew = std::mem::take(&mut self.is_new);
        if self.trace.entries.len() < P::KEPT {
            self.trace.entries.push(Entry { anew, observed, decision });
        } else {
            self.trace.left_out += 1;
        }
    }

    /// Forgets what was learnt.
    pub fn begin_anew(&mut self) {
        self.policy = self.trace.policy.clone();
        self.is_new = !self.trace.entries.is_empty();
    }

    /// Who decides.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// What happened so far.
    pub fn trace(&self) -> &Trace<P> {
        &self.trace
    }

    /// Tells a report, which was told before or never was.
    pub fn tell(&self, told: &mut Option<Trace<P>>) {
        told.get_or_insert_with(|| Trace::new(self.trace.policy.clone())).catch_up(&self.trace);
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests;
