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
//!    observed, `ContinueVm` and `Cont` when the command was sent, `CommitParticipants` and `NotifyRunning` when all
//!    participants have returned. A QEMU may be frozen before `FreezeQemu`, so that no
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
mod terms;
mod transition;

pub use fault_point::FaultPoint;
pub use terms::{MigrationTerms, QemuAtStart, Role};
pub use transition::{Ignored, Illegal, Step, Transition};

#[cfg(test)]
mod tests;
