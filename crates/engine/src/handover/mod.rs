//! Handover: one owner at any time, decided by a journalled record, never by a guess.
//!
//! ```text
//! source                                         destination
//!   PREPARED(epoch)    journalled, synced          PREPARED(epoch)   journalled, synced
//!   pre-copy …                                     writes RAM, disks
//!   stop; last pages; device state ──────────────► loads, paused
//!   SIGSTOP; FROZEN(epoch, run) ─────────────────► SIGSTOP; READY journalled
//!                                          ◄────── READY(epoch, incarnation)      from here: in doubt
//!   COMMITTED(epoch)   journalled; SIGSTOP again, if need be
//!   ===== point of no return =====
//!   GO(epoch, incarnation)                 ──────► registry: acquire ownership (where configured)
//!                                                  STARTING journalled; cont; ACTIVE(epoch)
//!                                          ◄────── RUNNING(epoch)
//!   quits its QEMU; DONE
//! ```
//!
//! Each role is one checked function, [`source::source`] and [`destination::destination`]: state and event in, next
//! state and effects out. A transition that they do not have is illegal. The table in `docs/handover-table.md` and the
//! fault points at which the tests kill agents are computed by running them (`table`).
//!
//! # Contract with the agent
//!
//! 1. **Effects are done in their order**, each one finished before the next begins. A message is finished when it was
//!    handed to the link (or when there was no link), `StopVm`, `FreezeQemu` and `ThawQemu` when their effect was
//!    observed, `ContinueVm` and `Cont` when the command was sent. A QEMU may be frozen before `FreezeQemu`, so that no
//!    foreign `cont` arrives between the last check and COMMITTED; `ContinueVm` and `UndoAll` release it. The order is
//!    the argument for safety: a decision is in the journal before any other program can see it.
//! 2. **The new state holds once its `Journal` effect is done.** A transition without one changes nothing that matters
//!    after a restart. An agent whose journal fails does none of the effects that follow and stays in the old state.
//!    Before COMMITTED the source then feeds `Failed`; otherwise the event is processed again later, or the state's
//!    request is repeated. ABORTED alone may be entered late: without it a restart aborts as well, so the guest
//!    continues at once, and the entry is retried until it is written. A driver that panics ends the agent, as if it
//!    had been killed.
//! 3. **`durable`** entries are synced before the next effect. Others must survive the agent's death but may be lost
//!    with the host. The rule behind it: entries that let a vCPU of the *source* run again are durable, because its
//!    RAM does not outlive a crash of the host but its disks do; `PREPARED` is durable because it makes a rebooted
//!    host ask first.
//! 4. **After a restart** the agent loads the last entry and its [`MigrationTerms`], searches the QEMU and feeds
//!    `Restarted` before anything else. Unfinished effects are not remembered; every state repeats what is necessary,
//!    so all effects must be harmless when done twice.
//! 5. **Messages** of a peer go to the state machine of their epoch, out of the journal if need be: a source that has
//!    begun another attempt still answers for the older one. A message of an unknown epoch goes to a fresh machine
//!    (`Idle`), which answers REFUSED; that is right only for a journal that is known to be complete. An agent that
//!    cannot know that does not answer, and a source then has to record durably that the destination has accepted
//!    before it sends anything: until then a reboot has lost it no entry that matters, and it need not ask. The
//!    machine compares the epoch again. Answers of the registry go to the machine that asked and to no other.
//! 6. **`Repeat`** is fed by a timer whenever the last event is some time ago, and when a link has been restored.
//! 7. An [`Illegal`] event changes nothing. From a peer it is a protocol error: close the connection and, before
//!    COMMITTED, feed `Failed`.
//!
//! # Durations of doubt
//!
//! The destination is in doubt from READY until it receives GO, the source from COMMITTED until it receives RUNNING or
//! REFUSED. Neither ends its doubt by a time-out; see [`recover`] for the decisions of an operator.

pub mod destination;
mod fault_point;
mod operator;
pub mod recover;
pub mod registry;
pub mod source;
#[cfg(feature = "testing")]
pub mod table;

use std::fmt;

use proto::message::RegistryRequest;
use proto::{Epoch, HostId, MigrationId};
use serde::{Deserialize, Serialize};

pub use fault_point::FaultPoint;

/// Data on which both hosts agreed when they prepared; journalled with PREPARED and the same throughout a migration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MigrationTerms {
    /// The VM and the epoch of this attempt.
    pub migration: MigrationId,
    /// The host at which the VM runs.
    pub source: HostId,
    /// The host at which the VM is to run.
    pub destination: HostId,
    /// With an ownership registry: the epoch in which the source owns the VM there, as pre-flight read it (it may have
    /// grown since, see [`registry`]). Without one: none.
    pub registry: Option<Epoch>,
    /// The host that keeps that registry. Answers of no other host count. Absent in entries of older agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness: Option<HostId>,
}

impl MigrationTerms {
    /// Returns the epoch of this attempt.
    pub fn epoch(&self) -> Epoch {
        self.migration.epoch
    }
}

/// Role of a host in a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The host at which the VM runs.
    Source,
    /// The host at which the VM is to run.
    Destination,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// State of its QEMU that an agent finds when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QemuAtStart {
    /// The process lives and its vCPUs run.
    Running,
    /// The process lives and its vCPUs do not run, or it is held by SIGSTOP and cannot be asked.
    Paused,
    /// The process is gone, on the same boot of the host. The journal is complete.
    Gone,
    /// The host has booted since PREPARED. The process is gone and entries that were not synced may be missing.
    Rebooted,
}

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
    fn to(to: S) -> Self {
        Self { to, guards: Vec::new(), effects: Vec::new() }
    }

    fn when(mut self, guard: &'static str) -> Self {
        self.guards.push(guard);
        self
    }

    fn then(mut self, effects: impl IntoIterator<Item = E>) -> Self {
        self.effects.extend(effects);
        self
    }

    /// Adds a request to the registry, where there is one.
    fn asking(self, why: registry::RequestPurpose, request: Option<RegistryRequest>) -> Self
    where
        E: From<(registry::RequestPurpose, RegistryRequest)>,
    {
        match request {
            Some(request) => self.when("registry").then([E::from((why, request))]),
            None => self.when("no-registry"),
        }
    }

    /// Adds an outer guard: guards are listed from the outside in.
    fn within(mut self, guard: &'static str) -> Self {
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
fn moved<S, E>(to: Transition<S, E>) -> Option<Step<S, E>> {
    Some(Step::Transition(to))
}

/// Stays in the state; the event is legal and has no effects.
fn stay<S, E>(state: S) -> Option<Step<S, E>> {
    moved(Transition::to(state))
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
fn ignored<S, E>(why: Ignored) -> Option<Step<S, E>> {
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

#[cfg(test)]
mod tests;
