//! Results of events: transitions, and events that are ignored or illegal.

use proto::message::RegistryRequest;

use super::registry::RequestPurpose;
use super::terms::Role;

/// Result of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step<S, E> {
    /// A legal transition, possibly back to the same state.
    Transition(Transition<S, E>),
    /// The event changes no state and has no effects.
    Ignored(Ignored),
}

/// A legal transition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition<S, E> {
    /// The next state.
    pub to: S,
    /// Other conditions of the transition, beside the names of state and event.
    pub guards: Vec<&'static str>,
    /// Effects, in this order.
    pub effects: Vec<E>,
}

impl<S, E> Transition<S, E> {
    pub(super) fn to(to: S) -> Self {
        Self { to, guards: Vec::new(), effects: Vec::new() }
    }

    pub(super) fn when(mut self, guard: &'static str) -> Self {
        self.guards.push(guard);
        self
    }

    pub(super) fn then(mut self, effects: impl IntoIterator<Item = E>) -> Self {
        self.effects.extend(effects);
        self
    }

    /// Adds a request to the registry, where there is one.
    pub(super) fn asking(self, why: RequestPurpose, request: Option<RegistryRequest>) -> Self
    where
        E: From<(RequestPurpose, RegistryRequest)>,
    {
        match request {
            Some(request) => self.when("registry").then([E::from((why, request))]),
            None => self.when("no-registry"),
        }
    }

    /// Adds an outer guard: guards are listed from the outside in.
    pub(super) fn within(mut self, guard: &'static str) -> Self {
        self.guards.insert(0, guard);
        self
    }

    /// Returns the transition's stable name, such as `source/committed/refused[registry]`.
    pub fn name(&self, role: Role, state: &str, event: &str) -> String {
        let guards =
            if self.guards.is_empty() { String::new() } else { format!("[{}]", self.guards.join(",")) };
        format!("{role}/{state}/{event}{guards}")
    }
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
pub(super) fn moved<S, E>(to: Transition<S, E>) -> Option<Step<S, E>> {
    Some(Step::Transition(to))
}

/// Stays in the state; the event is legal and has no effects.
pub(super) fn stay<S, E>(state: S) -> Option<Step<S, E>> {
    moved(Transition::to(state))
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
pub(super) fn ignored<S, E>(why: Ignored) -> Option<Step<S, E>> {
    Some(Step::Ignored(why))
}

/// Reason for which an event was ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ignored {
    /// The event is about another epoch of the VM.
    OtherEpoch,
    /// The event is about another incarnation than the one committed to.
    OtherIncarnation,
    /// The event reports what is known already, or arrives after the decision that it would have influenced.
    TooLate,
    /// The event asks for information that is not yet known; the answer will be sent without a further question.
    NotYet,
}

/// Error of an event that cannot happen in this state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {role} of a handover cannot process the event `{event}` in the state `{state}`")]
pub struct Illegal {
    /// Role of the host.
    pub role: Role,
    /// Name of the state.
    pub state: &'static str,
    /// Name of the event.
    pub event: &'static str,
}
