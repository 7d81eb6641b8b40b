//! Handover: one owner at any time, decided by a record, never by a guess.
//!
//! ```text
//! source                                         destination
//!   PREPARED(epoch)    journalled, synced          PREPARED(epoch)   journalled, synced
//!   pre-copy …                                     writes RAM, disks
//!   stop; last pages; device state ──────────────► loads, paused
//!   SIGSTOP; HELD(epoch, run) ───────────────────► SIGSTOP; READY journalled
//!                                          ◄────── READY(epoch, incarnation)      from here: in doubt
//!   COMMITTED(epoch)   journalled; SIGSTOP again, if need be
//!   ===== point of no return =====
//!   GO(epoch, incarnation)                 ──────► register: take ownership (where configured)
//!                                                  STARTING journalled; cont; ACTIVE(epoch)
//!                                          ◄────── RUNNING(epoch)
//!   quits its QEMU; DONE
//! ```
//!
//! Each role is one checked function, [`source::source`] and [`destination::destination`]: state and event in, next
//! state and effects out. What is not in them is not legal. The table in `docs/handover-table.md` and the fault points
//! at which the tests kill agents are computed by running them ([`table`]).
//!
//! # Contract with the agent
//!
//! 1. **Effects are done in their order**, each one finished before the next begins; finished means for a message
//!    that it was handed to the link (or that there was no link to hand it to), for `StopVm`, `PauseQemu` and
//!    `ResumeQemu` that they were seen to hold, for `ContinueVm` and `Cont` that the command was sent. A QEMU may be held
//!    before `PauseQemu`, so that nobody's `cont` comes between the last look and COMMITTED; `ContinueVm` and `UndoAll`
//!    let it go. The order is
//!    the argument for safety: a decision stands in the journal before anybody can see it.
//! 2. **The new state holds once its `Journal` effect is done.** A transition without one changes nothing that
//!    matters after a restart. An agent whose journal fails does none of the effects that follow and stays in the old
//!    state. Before COMMITTED the source then feeds `Failed`; otherwise the event is taken again later, or what the state
//!    waits for is repeated. ABORTED alone may be entered late: without it a restart aborts as well, so the guest goes on
//!    at once, and the entry is tried until it stands. A driver that panics ends the agent, as if it had been killed.
//! 3. **`durable`** entries are synced before the next effect. Others must survive the agent's death but may be lost
//!    with the host. The rule behind it: what lets a vCPU of the *source* run again is durable, for its RAM outlives
//!    no crash of the host but its disks do; `PREPARED` is durable because it makes a rebooted host ask first.
//! 4. **After a restart** the agent loads the last entry and its [`Terms`], looks for the QEMU and feeds `Restarted`
//!    before anything else. Unfinished effects are not remembered; every state knows what to do again, so all effects
//!    must be harmless when done twice.
//! 5. **Messages** of a peer go to the machine of their epoch, out of the journal if need be: a source that has begun
//!    another attempt still answers for the older one. One that the journal does not know meets a fresh machine
//!    (`Idle`), which answers REFUSED; that is right only for a journal that is known to be whole. An agent that cannot
//!    know that says nothing, and a source then has to note durably that the destination has accepted before it sends
//!    anything: until then a reboot has lost it no entry that matters, and it need not ask. The epoch is compared here
//!    again. The register's answers go to the machine that asked and to no other.
//! 6. **`Repeat`** comes from a timer whenever the last event is some time ago, and when a link has come back.
//! 7. An [`Illegal`] event changes nothing. Coming from a peer it is a protocol error: close the connection and, before
//!    COMMITTED, feed `Failed`.
//!
//! # Durations of doubt
//!
//! The destination is in doubt from READY until it hears GO, the source from COMMITTED until it hears RUNNING or
//! REFUSED. Neither ends its doubt by a time-out; see [`recover`] for what an operator can do.

pub mod destination;
pub mod recover;
pub mod register;
pub mod source;
pub mod table;

use std::fmt;

use proto::message::RegisterRequest;
use proto::{Epoch, HostId, MigrationId};
use serde::{Deserialize, Serialize};

/// What both sides agreed on when they prepared; journalled with PREPARED and the same for all of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Terms {
    /// The VM and the epoch of this attempt.
    pub migration: MigrationId,
    /// Where the VM runs.
    pub source: HostId,
    /// Where it is to run.
    pub destination: HostId,
    /// With a register of owners: the epoch in which the source holds the VM there, as pre-flight read it (it may have
    /// grown since, see [`register`]). Without one: none.
    pub register: Option<Epoch>,
    /// The host that keeps that register. Nobody else's word is the register's. Absent in entries of older agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness: Option<HostId>,
}

impl Terms {
    /// The epoch of this attempt.
    pub fn epoch(&self) -> Epoch {
        self.migration.epoch
    }
}

/// One of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Where the VM runs.
    Source,
    /// Where it is to run.
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

/// What an agent finds of its QEMU when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// The process lives and its vCPUs run.
    Running,
    /// The process lives and its vCPUs do not run, or it is held by SIGSTOP and cannot be asked.
    Paused,
    /// The process is gone, on the same boot of the host. The journal is complete.
    Gone,
    /// The host has booted since PREPARED. The process is gone and entries that were not synced may be missing.
    Rebooted,
}

/// What an event leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step<S, E> {
    /// A legal transition, possibly back to the same state.
    Moved(Move<S, E>),
    /// Nothing changes and nothing is to be done.
    Ignored(Ignored),
}

/// A legal transition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move<S, E> {
    /// The next state.
    pub to: S,
    /// What else the transition depended on, beside the names of state and event.
    pub guards: Vec<&'static str>,
    /// What to do, in this order.
    pub effects: Vec<E>,
}

impl<S, E> Move<S, E> {
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

    /// An effect that is there only with a register.
    fn asking(self, why: register::Use, request: Option<RegisterRequest>) -> Self
    where
        E: From<(register::Use, RegisterRequest)>,
    {
        match request {
            Some(request) => self.when("register").then([E::from((why, request))]),
            None => self.when("no-register"),
        }
    }

    /// Guards are written in the order in which they were met from the outside in, outer first.
    fn within(mut self, guard: &'static str) -> Self {
        self.guards.insert(0, guard);
        self
    }

    /// The transition's stable name, such as `source/committed/refused[register]`.
    pub fn name(&self, role: Role, state: &str, event: &str) -> String {
        let guards =
            if self.guards.is_empty() { String::new() } else { format!("[{}]", self.guards.join(",")) };
        format!("{role}/{state}/{event}{guards}")
    }
}

/// Why an event was passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ignored {
    /// It speaks of another epoch of the VM.
    OtherEpoch,
    /// It speaks of another incarnation than the one committed to.
    OtherIncarnation,
    /// It says what is known already, or comes after the decision it would have influenced.
    TooLate,
    /// It asks for what is not yet known; the answer will be sent unasked.
    NotYet,
}

/// An event that cannot happen in this state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {role} of a handover cannot take the event `{event}` in the state `{state}`")]
pub struct Illegal {
    /// Which side.
    pub role: Role,
    /// The state's name.
    pub state: &'static str,
    /// The event's name.
    pub event: &'static str,
}

#[cfg(test)]
mod tests;
