//! The source's part of the handover.
//!
//! ```text
//! idle ─► prepared ─► stopped ──► committed ────► done
//!            │           │            │  ▲
//!            │           ▼            ▼  │
//!            │        aborting     reclaiming
//!            │           │            │
//!            ▼           │            ▼
//!         aborted ◄──────┘         returning ──► returned
//!
//! QEMU lost: from prepared, stopped and committed when the QEMU here is gone; leads to done or aborted
//! ```
//!
//! Before COMMITTED every failure leads to ABORTED, and the guest continues at the source. From COMMITTED on the
//! source does not run the guest by itself: only REFUSED, the registry, or an operator return it.
//!
//! *QEMU lost* is the one state both before and after that point: the source's QEMU is lost, the journal has no
//! ABORTED, and so the destination may hold the last copy of the guest, or even run it.
//!
//! Such a host asks before it starts the VM, and if the destination turns out to be ready, sends GO: the guest cannot
//! have run at the source since it was stopped, because that would be in the journal, durably. It does not reclaim:
//! there is nothing at the source to run.

mod step;

use proto::message::{RegistryRequest, Verdict};
use proto::{Epoch, Incarnation};
use serde::{Deserialize, Serialize};

use super::operator::OperatorDecision;
use super::registry::{RegistryAnswer, RequestPurpose};
use super::terms::{MigrationTerms, QemuAtStart, Role};
use super::transition::{Ignored, Illegal, Step};

/// State of the source, as the journal keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum SourceState {
    /// No migration of this epoch has begun.
    Idle,
    /// PREPARED. Pre-copy runs.
    Prepared {
        /// True if the guest ran when the migration began.
        run: bool,
    },
    /// The guest is stopped, or will be in a moment; last pages and device state are being sent or have been sent.
    Stopped {
        /// True if the guest ran before, and so is to run afterwards, at either host.
        run: bool,
    },
    /// The source's QEMU is lost and the destination may hold the only copy: it receives GO as soon as it is known to
    /// be ready.
    QemuLost {
        /// The incarnation that is committed to; none as long as it is not known.
        incarnation: Option<Incarnation>,
        /// Run flag of `Stopped`.
        run: bool,
    },
    /// COMMITTED to this incarnation. The point of no return is passed.
    Committed {
        /// The process that is to run.
        incarnation: Incarnation,
        /// Run flag of `Stopped`.
        run: bool,
        /// True after INCOMPLETE: the guest has run at the destination, and must not run at the source any more.
        #[serde(default)]
        has_run: bool,
    },
    /// The registry is being asked to return the VM.
    Reclaiming {
        /// The incarnation that was committed to; none if it is not known (from `QemuLost`).
        incarnation: Option<Incarnation>,
        /// Run flag of `Stopped`.
        run: bool,
        /// True if an operator wants the VM even if the destination owns it.
        force: bool,
    },
    /// ABORTED. The guest is being continued.
    Aborting,
    /// RETURNED. The guest is being continued.
    Returning,
    /// ABORTED, and the guest is in its former state.
    Aborted,
    /// RETURNED after COMMITTED, and the guest is in its former state.
    Returned,
    /// The destination owns the guest. The source's remains are to be removed.
    Done {
        /// The process that owns it; none if it is not known (from `QemuLost`).
        incarnation: Option<Incarnation>,
        /// Run flag of `Stopped`.
        run: bool,
    },
}

/// Event at the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum SourceEvent {
    /// A migration of this epoch begins. The destination does not know of it yet.
    Begin {
        /// True if the guest runs; false if its user had paused it.
        run: bool,
    },
    /// Pre-copy has ended: the guest is to be stopped.
    Stop {
        /// True if the guest runs at this moment.
        run: bool,
    },
    /// READY has arrived.
    Ready {
        /// Epoch of the message.
        epoch: Epoch,
        /// The incarnation that is ready.
        incarnation: Incarnation,
    },
    /// RUNNING has arrived.
    Running {
        /// Epoch of the message.
        epoch: Epoch,
    },
    /// INCOMPLETE has arrived: the destination runs the guest, and needs the source's pages (post-copy).
    Incomplete {
        /// Epoch of the message.
        epoch: Epoch,
    },
    /// REFUSED has arrived: the destination has not run the guest and never will.
    Refused {
        /// Epoch of the message.
        epoch: Epoch,
    },
    /// CRASHED has arrived: the destination's copy is lost, and one of its vCPUs may have run.
    Crashed {
        /// Epoch of the message.
        epoch: Epoch,
    },
    /// The destination, in doubt, asks for the source's decision.
    Asked {
        /// Epoch of the question.
        epoch: Epoch,
    },
    /// A user cancels the migration.
    Cancel,
    /// A failure at the source, or an illegal message, prevents the migration.
    Failed,
    /// The destination has not sent anything for too long.
    PeerSilent,
    /// The connections are lost and were not restored in time.
    PeerLost,
    /// The source's QEMU has ended.
    QemuDied,
    /// The guest runs again; or, if it was to stay paused, is in its former state.
    Continued,
    /// `cont` has failed.
    ContinueFailed,
    /// The agent has started and has loaded the state from the journal.
    Restarted(QemuAtStart),
    /// The destination has been unreachable for longer than the configured limit.
    ContactLostForGood,
    /// The registry has answered, or has failed to answer.
    RegistryAnswered(RegistryAnswer),
    /// An operator has decided.
    OperatorDecided(OperatorDecision),
    /// Timer: the state's request is to be repeated.
    Repeat,
}

/// Action of the source's agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEffect {
    /// Write the state into the journal.
    Journal {
        /// The state to write.
        state: SourceState,
        /// True if the entry has to be synced before the next effect.
        durable: bool,
    },
    /// Inform the participants of the migration that COMMITTED is in the journal.
    CommitParticipants,
    /// Inform the participants of the migration that the guest runs at the destination, or is the destination's by an
    /// operator's decision.
    NotifyRunning,
    /// QMP `stop`.
    StopVm,
    /// Send SIGSTOP to the source's QEMU.
    FreezeQemu,
    /// Send SIGCONT to the source's QEMU.
    ThawQemu,
    /// QMP `cont`; ends in `Continued`, `ContinueFailed` or `QemuDied`.
    ContinueVm,
    /// End the source's QEMU and remove its resources.
    QuitQemu,
    /// Undo all changes for the migration: trackers, bitmaps, throttles, connections.
    UndoAll,
    /// Send GO.
    SendGo {
        /// The process that is to run.
        incarnation: Incarnation,
        /// True if the guest is to run.
        run: bool,
    },
    /// Notify the destination that this epoch is aborted. Best effort: the destination will ask.
    SendAbort,
    /// Answer the destination's question.
    Answer(Verdict),
    /// Ask for the destination's state; it answers READY, RUNNING, REFUSED or CRASHED.
    AskDestination,
    /// Send a request to the registry; ends in `RegistryAnswered`. The agent need not wait for the answer before the
    /// next effect.
    Registry {
        /// Purpose of the request.
        why: RequestPurpose,
        /// The request.
        request: RegistryRequest,
    },
    /// Report to the user.
    Report(SourceReport),
}

/// Report to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceReport {
    /// The migration was cancelled; the guest is at the source.
    Cancelled,
    /// The migration failed at the source; the guest is at the source.
    Failed,
    /// The destination fell silent, was lost or gave up before COMMITTED; the guest is at the source.
    PeerGaveUp,
    /// The agent was restarted before COMMITTED; the guest is at the source.
    Interrupted,
    /// The source's QEMU ended before anything was handed over: the guest crashed, as it may without a migration.
    VmCrashed,
    /// The source's QEMU is lost, and the destination may have the only copy: the source asks it. The VM must not be
    /// started at the source.
    QemuLost,
    /// The destination refused after COMMITTED; the guest is at the source.
    Returned,
    /// The guest runs at the destination, and some of its memory is only at the source.
    Incomplete,
    /// The guest runs at the destination, which needs the source's memory and cannot be reached.
    NeededThere,
    /// The guest runs at the destination, and some of its memory was only at the source and is lost.
    MemoryLost,
    /// The guest is at the destination.
    Done,
    /// Too late to cancel: COMMITTED is journalled. `whimbrel recover` lists the possible decisions.
    TooLate,
    /// Contact is lost after COMMITTED and there is no registry: `whimbrel recover`.
    OperatorNeeded,
    /// The destination owns the VM in the registry; the source waits for it.
    DestinationOwns,
    /// The registry has a record that does not fit this migration.
    ForeignRecord,
    /// The destination's copy is lost and may have run; the source's stopped copy is kept: `whimbrel recover`.
    DestinationCrashed,
    /// QEMU did not continue the guest; the agent tries again.
    ContinueFailed,
    /// The source's stopped QEMU ended while the registry was being asked: only the destination's copy remains.
    CopyLost,
    /// The destination reports that it runs the guest, which is the source's. Two copies may be running: check at
    /// once.
    Contradiction,
}

impl SourceState {
    /// Returns the stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Prepared { .. } => "prepared",
            Self::Stopped { .. } => "stopped",
            Self::QemuLost { .. } => "qemu-lost",
            Self::Committed { .. } => "committed",
            Self::Reclaiming { .. } => "reclaiming",
            Self::Aborting => "aborting",
            Self::Returning => "returning",
            Self::Aborted => "aborted",
            Self::Returned => "returned",
            Self::Done { .. } => "done",
        }
    }

    /// Returns true if nothing follows but answers and cleaning up.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Aborted | Self::Returned | Self::Done { .. })
    }

    /// Returns true if the journal entry is synced before the next effect. This holds for all states after which the
    /// guest may run at the source although the last synced entry would let a rebooted host believe that it has not.
    fn durable(&self) -> bool {
        matches!(
            self,
            Self::Prepared { .. } | Self::Aborting | Self::Returning | Self::Aborted | Self::Returned
        )
    }
}

impl SourceEvent {
    /// Returns the stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Begin { .. } => "begin",
            Self::Stop { .. } => "stop",
            Self::Ready { .. } => "ready",
            Self::Running { .. } => "running",
            Self::Incomplete { .. } => "incomplete",
            Self::Refused { .. } => "refused",
            Self::Crashed { .. } => "crashed",
            Self::Asked { .. } => "asked",
            Self::Cancel => "cancel",
            Self::Failed => "failed",
            Self::PeerSilent => "peer-silent",
            Self::PeerLost => "peer-lost",
            Self::QemuDied => "qemu-died",
            Self::Continued => "continued",
            Self::ContinueFailed => "continue-failed",
            Self::Restarted(_) => "restarted",
            Self::ContactLostForGood => "contact-lost-for-good",
            Self::RegistryAnswered(_) => "registry-answered",
            Self::OperatorDecided(_) => "operator-decided",
            Self::Repeat => "repeat",
        }
    }

    /// Returns the epoch of a peer's message.
    fn epoch(&self) -> Option<Epoch> {
        match self {
            Self::Ready { epoch, .. }
            | Self::Running { epoch }
            | Self::Incomplete { epoch }
            | Self::Refused { epoch }
            | Self::Crashed { epoch }
            | Self::Asked { epoch } => Some(*epoch),
            _ => None,
        }
    }
}

impl From<(RequestPurpose, RegistryRequest)> for SourceEffect {
    fn from((why, request): (RequestPurpose, RegistryRequest)) -> Self {
        Self::Registry { why, request }
    }
}

impl SourceEffect {
    /// Returns the stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Journal { durable: false, .. } => "journal",
            Self::Journal { durable: true, .. } => "journal-sync",
            Self::CommitParticipants => "commit-participants",
            Self::NotifyRunning => "notify-running",
            Self::StopVm => "stop-vm",
            Self::FreezeQemu => "freeze-qemu",
            Self::ThawQemu => "thaw-qemu",
            Self::ContinueVm => "continue-vm",
            Self::QuitQemu => "quit-qemu",
            Self::UndoAll => "undo-all",
            Self::SendGo { .. } => "send-go",
            Self::SendAbort => "send-abort",
            Self::Answer(Verdict::Committed { .. }) => "answer-committed",
            Self::Answer(Verdict::Aborted) => "answer-aborted",
            Self::Answer(Verdict::Returned) => "answer-returned",
            Self::Answer(Verdict::Undecided) => "answer-undecided",
            Self::AskDestination => "ask-destination",
            Self::Registry { why, .. } => why.name(),
            Self::Report(_) => "report",
        }
    }
}

/// Computes the transition of the source for an event. These are all legal transitions.
///
/// # Errors
///
/// [`Illegal`] where the event cannot happen in the state; the state stays as it is.
pub fn source(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> Result<Step<SourceState, SourceEffect>, Illegal> {
    if event.epoch().is_some_and(|epoch| epoch != terms.epoch()) {
        return Ok(Step::Ignored(Ignored::OtherEpoch));
    }
    step::step(terms, state, event).ok_or(Illegal {
        role: Role::Source,
        state: state.name(),
        event: event.name(),
    })
}
