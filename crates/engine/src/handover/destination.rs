//! The destination's part of the handover.
//!
//! ```text
//! idle ─► prepared ─► ready ─► acquiring ─► starting ─► (completing) ─► active
//!            │          │ │        │           │             │            │
//!            ▼          ▼ │        ▼           ▼             ▼            ▼
//!     copy-destroyed ◄────┼──── refusing ──► refused             crashed
//!                         ▼
//!                      refused
//! ```
//!
//! *QEMU lost*: the host has booted since PREPARED, and the registry is asked whether the copy can have run, or the
//! source.
//!
//! *Completing* exists in post-copy alone: the guest runs at the destination, which owns it, but some of its memory is
//! still at the source. It needs both hosts until the last page has arrived, and so RUNNING is not sent before.
//!
//! From READY on the destination is in doubt: it may neither run nor discard its copy until the source, the registry
//! or an operator has decided. REFUSED is no decision about the guest: it reports that this copy cannot run, and never
//! has.
//!
//! With a registry `cont` is not sent before the record names this host; *acquiring* is the state in which the registry
//! is asked. A destination that tried to acquire ownership and cannot run returns the VM in the registry before it
//! sends REFUSED, also if it does not know whether its request was carried out: the record (e, source) rules out any
//! later acquisition.

mod step;

use proto::message::{RegistryRequest, Verdict};
use proto::{Epoch, Incarnation};
use serde::{Deserialize, Serialize};

use super::operator::OperatorDecision;
use super::registry::{RegistryAnswer, RequestPurpose};
use super::terms::{MigrationTerms, QemuAtStart, Role};
use super::transition::{Ignored, Illegal, Step};

/// State of the destination, as the journal keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum DestinationState {
    /// No migration of this epoch has begun, or none that is known. Also the state that a message meets at an agent
    /// whose journal has no entry of its migration.
    Idle,
    /// PREPARED. Memory is being written.
    Prepared,
    /// READY: loaded, paused, durable. In doubt.
    Ready {
        /// The incarnation that GO has to name.
        incarnation: Incarnation,
        /// True if the guest is to run; false if its user had paused it, and it stays paused. Absent in entries of
        /// older agents.
        #[serde(default = "runs")]
        run: bool,
    },
    /// GO was accepted; the registry is being asked for ownership.
    Acquiring {
        /// The incarnation that GO has named.
        incarnation: Incarnation,
        /// True if the guest is to run; false if its user had paused it, and it stays paused.
        run: bool,
    },
    /// `cont` is being sent. From here on a vCPU may have run.
    Starting {
        /// The incarnation that GO has named.
        incarnation: Incarnation,
        /// True if a former process of the agent may have sent `cont` already, so that a failure of the next one does
        /// not prove that no vCPU has run.
        again: bool,
    },
    /// This host owns the guest, which runs, and pages are missing (post-copy).
    Completing {
        /// The incarnation that runs.
        incarnation: Incarnation,
    },
    /// This host owns the guest.
    Active {
        /// The incarnation that runs.
        incarnation: Incarnation,
    },
    /// This host will never run the guest; the registry is being asked to record the source as the owner.
    Refusing,
    /// REFUSED: this host has not run the guest and never will.
    Refused,
    /// The guest continues at the source; the copy is removed.
    CopyDestroyed,
    /// The host has booted since PREPARED: the copy is lost, and the registry, or the source if there is none, is
    /// being asked whether the copy can have run.
    QemuLost,
    /// The copy is lost, and may have run: `cont` had been sent, or its fate is unknown.
    Crashed {
        /// True if the guest is known to have run, so that the source's copy is out of date.
        has_run: bool,
    },
}

/// Default for entries of older agents, which kept no such field: the guest runs.
fn runs() -> bool {
    true
}

/// Event at the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum DestinationEvent {
    /// A migration of this epoch was proposed, and pre-flight found no blocker.
    Prepare,
    /// Memory and device state are loaded, the guest is paused, its disks are durable.
    Loaded {
        /// The incarnation that has loaded them.
        incarnation: Incarnation,
        /// True if, as the source reports, the guest ran before it was stopped.
        run: bool,
    },
    /// GO has arrived.
    Go {
        /// Epoch of the message.
        epoch: Epoch,
        /// The incarnation that GO names.
        incarnation: Incarnation,
        /// True if the guest is to run.
        run: bool,
    },
    /// The source has answered a question.
    SourceAnswered {
        /// Epoch of the answer.
        epoch: Epoch,
        /// Decision in the source's journal.
        verdict: Verdict,
    },
    /// The source has aborted.
    AbortReceived {
        /// Epoch of the message.
        epoch: Epoch,
    },
    /// The source, whose copy is lost, asks for the destination's state.
    Asked {
        /// Epoch of the question.
        epoch: Epoch,
    },
    /// A failure at the destination, or an illegal message, prevents the migration.
    Failed,
    /// A user of this host cancels the migration.
    Cancel,
    /// The source has not sent anything for too long.
    PeerSilent,
    /// The connections are lost and were not restored in time, or the source did not answer.
    PeerLost,
    /// The source has been unreachable for longer than the configured limit.
    ContactLostForGood,
    /// The destination's QEMU has ended.
    QemuDied,
    /// `cont` has returned, the guest runs.
    Continued {
        /// True if pages are missing (post-copy).
        missing: bool,
    },
    /// The last missing page is placed.
    Completed,
    /// QEMU has refused `cont`, or it could not be sent at all: no vCPU has run.
    ContFailed,
    /// The agent has started and has loaded the state from the journal.
    Restarted(QemuAtStart),
    /// The registry has answered, or has failed to answer.
    RegistryAnswered(RegistryAnswer),
    /// An operator has decided.
    OperatorDecided(OperatorDecision),
    /// Timer: the state's request is to be repeated.
    Repeat,
}

/// Action of the destination's agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationEffect {
    /// Write the state into the journal.
    Journal {
        /// The state to write.
        state: DestinationState,
        /// True if the entry has to be synced before the next effect.
        durable: bool,
    },
    /// Send READY.
    SendReady {
        /// The incarnation that is ready.
        incarnation: Incarnation,
    },
    /// Ask the source; ends in `SourceAnswered` or `PeerLost`.
    AskSource,
    /// Send a request to the registry; ends in `RegistryAnswered`. The agent need not wait for the answer before the
    /// next effect.
    Registry {
        /// Purpose of the request.
        why: RequestPurpose,
        /// The request.
        request: RegistryRequest,
    },
    /// Let the participants act for the last time before the guest, thaw QEMU, and send QMP `cont`; ends in
    /// `Continued`, `ContFailed` or `QemuDied`.
    Cont,
    /// Send SIGCONT to the destination's QEMU, whose guest may stay paused: the VM's users control it from here on.
    ThawQemu,
    /// Inform the participants of the migration that the guest runs here, or stays paused here. They cannot undo what
    /// they do then.
    CommitParticipants,
    /// QMP `announce-self`: switches learn the new location of the guest.
    Announce,
    /// Send INCOMPLETE: the guest runs here, and needs the source's pages.
    SendIncomplete,
    /// Send RUNNING.
    SendRunning,
    /// Send REFUSED.
    SendRefused,
    /// Send CRASHED.
    SendCrashed,
    /// Kill the destination's QEMU and remove its resources.
    DestroyCopy,
    /// Report to the user.
    Report(DestinationReport),
}

/// Report to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationReport {
    /// The migration ended before READY; its remains are removed.
    CopyDestroyed,
    /// The guest continues at the source; the copy is removed.
    SourceKept,
    /// In doubt and the source cannot be asked: `whimbrel recover` lists the possible decisions.
    OperatorNeeded,
    /// In doubt, or past it: a user cannot cancel here.
    TooLate,
    /// The guest runs here, and some of its memory is missing.
    Incomplete,
    /// Some of the memory of the guest, which runs here, is at the source, which cannot be reached.
    SourceNeeded,
    /// The guest runs here.
    Active,
    /// This copy could not run and has not; the source keeps the guest.
    Refused,
    /// The guest crashed here, as it may on any host; its disks are here.
    Crashed,
    /// The copy is lost, and it is unknown whether it has run here.
    Lost,
    /// The host was rebooted during a migration: the copy is lost, and it is unknown whether it has run.
    QemuLost,
    /// QEMU did not continue the guest; the agent tries again.
    ContFailed,
    /// The registry has a record that does not fit this migration.
    ForeignRecord,
}

impl DestinationState {
    /// Returns the stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Prepared => "prepared",
            Self::Ready { .. } => "ready",
            Self::Acquiring { .. } => "acquiring",
            Self::Starting { .. } => "starting",
            Self::Completing { .. } => "completing",
            Self::Active { .. } => "active",
            Self::Refusing => "refusing",
            Self::Refused => "refused",
            Self::CopyDestroyed => "copy-destroyed",
            Self::QemuLost => "qemu-lost",
            Self::Crashed { .. } => "crashed",
        }
    }

    /// Returns true if nothing follows but answers and cleaning up.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Active { .. } | Self::Refused | Self::CopyDestroyed | Self::Crashed { .. })
    }

    /// Returns true if this copy of the guest may neither be run nor discarded before a decision arrives.
    pub fn is_in_doubt(&self) -> bool {
        matches!(self, Self::Ready { .. } | Self::Acquiring { .. })
    }

    /// Returns true if the journal entry is synced before the next effect. A host that loses entries between these two
    /// has lost its RAM too, and restarts as `QemuLost`. COMPLETING lasts, and proves that the copy has run. CRASHED,
    /// once sent, must not be forgotten: a source that had lost its QEMU has aborted since, and its answer would count.
    fn durable(&self) -> bool {
        matches!(self, Self::Prepared | Self::Completing { .. } | Self::Crashed { .. })
    }
}

impl DestinationEvent {
    /// Returns the stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Loaded { .. } => "loaded",
            Self::Go { .. } => "go",
            Self::SourceAnswered { .. } => "source-answered",
            Self::AbortReceived { .. } => "abort-received",
            Self::Asked { .. } => "asked",
            Self::Failed => "failed",
            Self::Cancel => "cancel",
            Self::PeerSilent => "peer-silent",
            Self::PeerLost => "peer-lost",
            Self::ContactLostForGood => "contact-lost-for-good",
            Self::QemuDied => "qemu-died",
            Self::Continued { .. } => "continued",
            Self::Completed => "completed",
            Self::ContFailed => "cont-failed",
            Self::Restarted(_) => "restarted",
            Self::RegistryAnswered(_) => "registry-answered",
            Self::OperatorDecided(_) => "operator-decided",
            Self::Repeat => "repeat",
        }
    }

    /// Returns true if the event is a statement of another party, which holds only at the time at which it is made; any
    /// other event is a fact. If the journal does not accept a fact, it is repeated until it does. A statement is not
    /// repeated later, because the decision elsewhere may have changed before the journal accepts it: the state's
    /// repetition asks again, and an operator sees that the decision was not carried out.
    pub fn is_statement(&self) -> bool {
        match self {
            Self::Go { .. }
            | Self::SourceAnswered { .. }
            | Self::AbortReceived { .. }
            | Self::Asked { .. }
            | Self::RegistryAnswered(_)
            | Self::OperatorDecided(_) => true,
            Self::Prepare
            | Self::Loaded { .. }
            | Self::Failed
            | Self::Cancel
            | Self::PeerSilent
            | Self::PeerLost
            | Self::ContactLostForGood
            | Self::QemuDied
            | Self::Continued { .. }
            | Self::Completed
            | Self::ContFailed
            | Self::Restarted(_)
            | Self::Repeat => false,
        }
    }

    /// Returns the epoch of a peer's message.
    fn epoch(&self) -> Option<Epoch> {
        match self {
            Self::Go { epoch, .. }
            | Self::SourceAnswered { epoch, .. }
            | Self::AbortReceived { epoch }
            | Self::Asked { epoch } => Some(*epoch),
            _ => None,
        }
    }
}

impl From<(RequestPurpose, RegistryRequest)> for DestinationEffect {
    fn from((why, request): (RequestPurpose, RegistryRequest)) -> Self {
        Self::Registry { why, request }
    }
}

impl DestinationEffect {
    /// Returns the stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Journal { durable: false, .. } => "journal",
            Self::Journal { durable: true, .. } => "journal-sync",
            Self::SendReady { .. } => "send-ready",
            Self::AskSource => "ask-source",
            Self::Registry { why, .. } => why.name(),
            Self::Cont => "cont",
            Self::ThawQemu => "thaw-qemu",
            Self::CommitParticipants => "commit-participants",
            Self::Announce => "announce",
            Self::SendIncomplete => "send-incomplete",
            Self::SendRunning => "send-running",
            Self::SendRefused => "send-refused",
            Self::SendCrashed => "send-crashed",
            Self::DestroyCopy => "destroy-copy",
            Self::Report(_) => "report",
        }
    }
}

/// Computes the transition of the destination for an event. These are all legal transitions.
///
/// # Errors
///
/// [`Illegal`] where the event cannot happen in the state; the state stays as it is.
pub fn destination(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> Result<Step<DestinationState, DestinationEffect>, Illegal> {
    if event.epoch().is_some_and(|epoch| epoch != terms.epoch()) {
        return Ok(Step::Ignored(Ignored::OtherEpoch));
    }
    step::step(terms, state, event).ok_or(Illegal {
        role: Role::Destination,
        state: state.name(),
        event: event.name(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_decisions_are_statements_and_all_else_is_fact() {
        use DestinationEvent as Event;
        let epoch = Epoch(1);
        let statements = [
            Event::SourceAnswered { epoch, verdict: Verdict::Undecided },
            Event::AbortReceived { epoch },
            Event::Asked { epoch },
            Event::RegistryAnswered(RegistryAnswer::Unreachable),
            Event::OperatorDecided(OperatorDecision::DiscardCopy),
        ];
        let facts = [
            Event::Failed,
            Event::Cancel,
            Event::PeerLost,
            Event::QemuDied,
            Event::Continued { missing: true },
            Event::Completed,
            Event::ContFailed,
            Event::Restarted(QemuAtStart::Gone),
        ];
        for (events, expected) in [(&statements[..], true), (&facts[..], false)] {
            for event in events {
                assert_eq!(event.is_statement(), expected, "{event:?}");
            }
        }
    }
}
