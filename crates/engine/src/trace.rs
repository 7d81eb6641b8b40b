//! Traces: the observations that a policy was shown and its decisions, for replay.
//!
//! A [`Decider`] reads no clock and draws no random number, so its decisions follow from its observations.
//! [`TracedPolicy`] records both as a [`Trace`]; those of a migration are [`Traces`](crate::traces::Traces), and become
//! part of its report.
//!
//! A trace begins where its policy begins, and keeps a limited number of entries; of the observations after them it
//! keeps only the count. Dropping the first entries instead would need the policy's learned state, which is more than
//! measured numbers. So the entries of a trace can be replayed, however many were left out.

use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Types that a trace can record.
pub trait Recordable: Clone + Debug + PartialEq + Serialize + DeserializeOwned {}

impl<T: Clone + Debug + PartialEq + Serialize + DeserializeOwned> Recordable for T {}

/// A policy that decides repeatedly, from its observations and nothing else.
pub trait Decider: Recordable {
    /// Observation that the policy is shown.
    type Observed: Recordable;
    /// Decision of the policy.
    type Decision: Recordable;

    /// Most entries that a trace keeps.
    const MAX_ENTRIES: usize;

    /// Decides after an observation.
    fn decide(&mut self, observed: &Self::Observed) -> Self::Decision;
}

/// A policy, its observations and its decisions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Trace<P: Decider> {
    /// The policy before its first decision.
    pub policy: P,
    /// Entries, in order.
    pub entries: Vec<TraceEntry<P>>,
    /// Number of observations after these entries, which were not kept.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
}

/// Serialized form of a policy without parameters: nothing. Its learned state is not part of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoParameters {}

impl<P: Decider + From<NoParameters>> From<P> for NoParameters {
    fn from(_: P) -> Self {
        Self {}
    }
}

/// One observation and the decision that followed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct TraceEntry<P: Decider> {
    /// True if the learned state was reset before the observation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_reset: bool,
    /// The observation.
    #[serde(flatten)]
    pub observed: P::Observed,
    /// The decision.
    pub decision: P::Decision,
}

impl<P: Decider> Trace<P> {
    /// Creates the trace of a policy that has decided nothing yet.
    pub fn new(policy: P) -> Self {
        Self { policy, entries: Vec::new(), left_out: 0 }
    }

    /// Repeats all decisions, in order. The result equals this trace unless the rule has changed since.
    #[must_use]
    pub fn replay(&self) -> Self {
        let mut policy = self.policy.clone();
        let replay_entry = |entry: &TraceEntry<P>| {
            if entry.is_reset {
                policy = self.policy.clone();
            }
            TraceEntry { decision: policy.decide(&entry.observed), ..entry.clone() }
        };
        let entries = self.entries.iter().map(replay_entry).collect();
        Self { policy: self.policy.clone(), entries, left_out: self.left_out }
    }

    /// Returns the decisions, in order.
    pub fn decisions(&self) -> impl Iterator<Item = &P::Decision> {
        self.entries.iter().map(|entry| &entry.decision)
    }

    /// Appends the entries of `other` that this trace lacks; this trace has to be an earlier state of `other`.
    pub fn catch_up(&mut self, other: &Self) {
        self.entries.extend_from_slice(other.entries.get(self.entries.len()..).unwrap_or_default());
        self.left_out = other.left_out;
    }
}

/// A policy that records its trace.
#[derive(Clone, Debug)]
pub struct TracedPolicy<P: Decider> {
    pub(crate) policy: P,
    is_new: bool,
    trace: Trace<P>,
}

impl<P: Decider> TracedPolicy<P> {
    /// Starts the trace of a policy that has decided nothing yet.
    pub fn new(policy: impl Into<P>) -> Self {
        let policy = policy.into();
        Self { trace: Trace::new(policy.clone()), is_new: false, policy }
    }

    /// Decides, and records observation and decision.
    pub fn decide_on(&mut self, observed: P::Observed) -> P::Decision {
        let decision = self.policy.decide(&observed);
        self.record(observed, decision.clone());
        decision
    }

    /// Records an observation and the decision.
    pub(crate) fn record(&mut self, observed: P::Observed, decision: P::Decision) {
        let is_reset = std::mem::take(&mut self.is_new);
        if self.trace.entries.len() < P::MAX_ENTRIES {
            self.trace.entries.push(TraceEntry { is_reset, observed, decision });
        } else {
            self.trace.left_out += 1;
        }
    }

    /// Resets the learned state of the policy.
    pub fn reset(&mut self) {
        self.policy = self.trace.policy.clone();
        self.is_new = !self.trace.entries.is_empty();
    }

    /// Returns the policy.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// Returns the trace so far.
    pub fn trace(&self) -> &Trace<P> {
        &self.trace
    }

    /// Updates the trace in a report, which may be absent or an earlier state.
    pub fn update_report(&self, reported: &mut Option<Trace<P>>) {
        reported.get_or_insert_with(|| Trace::new(self.trace.policy.clone())).catch_up(&self.trace);
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests;
