//! The source's side of the handover.
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
//! bereft: from prepared, stopped and committed when the QEMU here is gone; leads to done or aborted
//! ```
//!
//! Before COMMITTED whatever goes wrong ends in ABORTED, and the guest runs on here. From COMMITTED on the source does
//! not run the guest by itself: only REFUSED, the register, or an operator give it back.
//!
//! *Bereft* is the one state on both sides of that point: the source's QEMU is gone, the journal does not say ABORTED,
//! and so the destination may hold the last copy of the guest, or even run it. Such a host asks before it starts the
//! VM, and if the destination turns out to be ready, gives it GO: the guest cannot have run here since it was stopped,
//! for that would be in the journal, durably. It does not reclaim: there is nothing here to run.

mod step;

use proto::message::{RegisterRequest, Verdict};
use proto::{Epoch, Incarnation};
use serde::{Deserialize, Serialize};

use super::recover::Decision;
use super::register::{RegisterAnswer, Use};
use super::{Found, Ignored, Illegal, Role, Step, Terms};

/// Where the source stands. What the journal keeps.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum SourceState {
    /// No migration of this epoch yet.
    Idle,
    /// PREPARED. Pre-copy runs.
    Prepared {
        /// Whether the guest ran when the migration began.
        run: bool,
    },
    /// The guest is stopped, or will be in a moment; last pages and device state are under way or sent.
    Stopped {
        /// Whether the guest ran before, and so is to run afterwards, here or there.
        run: bool,
    },
    /// This side's QEMU is gone and the destination may hold the only copy: it is given GO as soon as it is known to
    /// be ready.
    Bereft {
        /// The incarnation that is committed to; none as long as it is not known.
        incarnation: Option<Incarnation>,
        /// As in `Stopped`.
        run: bool,
    },
    /// COMMITTED to this incarnation. The point of no return is behind.
    Committed {
        /// Which process is to run.
        incarnation: Incarnation,
        /// As in `Stopped`.
        run: bool,
        /// INCOMPLETE came: it has run there, and nobody may run it here any more.
        #[serde(default)]
        ran: bool,
    },
    /// The register is being asked to give the VM back.
    Reclaiming {
        /// The incarnation that was committed to; none when it is not known (from `Bereft`).
        incarnation: Option<Incarnation>,
        /// As in `Stopped`.
        run: bool,
        /// An operator wants it even if the destination owns it.
        force: bool,
    },
    /// ABORTED. The guest is being continued.
    Aborting,
    /// RETURNED. The guest is being continued.
    Returning,
    /// ABORTED, and the guest is as it was.
    Aborted,
    /// RETURNED after COMMITTED, and the guest is as it was.
    Returned,
    /// The destination has it. What is left here is to be removed.
    Done {
        /// Which process has it; none when it is not known (from `Bereft`).
        incarnation: Option<Incarnation>,
        /// As in `Stopped`.
        run: bool,
    },
}

/// What happens to the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum SourceEvent {
    /// A migration of this epoch begins. The destination has not been told yet.
    Begin {
        /// Whether the guest runs (or was paused by its user).
        run: bool,
    },
    /// Pre-copy is over: stop the guest.
    Stop {
        /// Whether the guest runs at this moment.
        run: bool,
    },
    /// READY came.
    Ready {
        /// Of which epoch.
        epoch: Epoch,
        /// Who is ready.
        incarnation: Incarnation,
    },
    /// RUNNING came.
    Running {
        /// Of which epoch.
        epoch: Epoch,
    },
    /// INCOMPLETE came: the destination runs the guest, and needs what is here of it (post-copy).
    Incomplete {
        /// Of which epoch.
        epoch: Epoch,
    },
    /// REFUSED came: the destination has not run the guest and never will.
    Refused {
        /// Of which epoch.
        epoch: Epoch,
    },
    /// CRASHED came: the destination's copy is gone, and one of its vCPUs may have run.
    Crashed {
        /// Of which epoch.
        epoch: Epoch,
    },
    /// The destination, in doubt, asks.
    Asked {
        /// About which epoch.
        epoch: Epoch,
    },
    /// A user wants the migration to end.
    Cancel,
    /// Something on this side, or an illegal message, made going on impossible.
    Failed,
    /// The destination has not said anything for too long.
    PeerSilent,
    /// The connections are gone and did not come back in time.
    PeerLost,
    /// This side's QEMU ended.
    QemuDied,
    /// The guest runs again (or, where it was to stay paused, is as before).
    Continued,
    /// `cont` failed.
    ContinueFailed,
    /// The agent has started and loaded the state from the journal.
    Restarted(Found),
    /// The configuration's limit of patience with an unreachable destination has passed.
    ContactLostForGood,
    /// The register answered, or did not.
    RegisterSays(RegisterAnswer),
    /// An operator has decided.
    OperatorDecides(Decision),
    /// Time to repeat what the state is waiting for.
    Repeat,
}

/// What the source's agent is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEffect {
    /// Write the state into the journal.
    Journal {
        /// What to write.
        state: SourceState,
        /// Whether it has to be synced before the next effect.
        durable: bool,
    },
    /// QMP `stop`.
    StopVm,
    /// SIGSTOP this side's QEMU.
    PauseQemu,
    /// SIGCONT this side's QEMU.
    ResumeQemu,
    /// QMP `cont`; ends in `Continued`, `ContinueFailed` or `QemuDied`.
    ContinueVm,
    /// End this side's QEMU and remove what belonged to it.
    QuitQemu,
    /// Take back all that was done for the migration: trackers, bitmaps, throttles, connections.
    UndoAll,
    /// Send GO.
    SendGo {
        /// Which process is to run.
        incarnation: Incarnation,
        /// Whether the guest is to run on.
        run: bool,
    },
    /// Tell the destination that this epoch is aborted. Best effort: it will ask.
    SendAbort,
    /// Answer the destination's question.
    Answer(Verdict),
    /// Ask the destination what it has; it answers READY, RUNNING, REFUSED or CRASHED.
    AskDestination,
    /// Ask the register; ends in `RegisterSays`. The agent need not wait for the answer before the next effect.
    Register {
        /// What for.
        why: Use,
        /// The request.
        request: RegisterRequest,
    },
    /// Tell the user.
    Report(SourceReport),
}

/// What a user gets to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceReport {
    /// The migration was cancelled; the guest is here.
    Cancelled,
    /// The migration failed on this side; the guest is here.
    Failed,
    /// The destination fell silent, was lost or gave up before COMMITTED; the guest is here.
    PeerGaveUp,
    /// The agent was restarted before COMMITTED; the guest is here.
    Interrupted,
    /// This side's QEMU ended before anything was handed over: the guest crashed, as it may without a migration.
    VmCrashed,
    /// This side's QEMU is gone, the destination may have the only copy: asking it. Do not start the VM here.
    Bereft,
    /// The destination refused after COMMITTED; the guest is here.
    Returned,
    /// The guest runs at the destination, and some of its memory is only here.
    Incomplete,
    /// The same, and the destination cannot be reached.
    NeededThere,
    /// The guest runs at the destination, and some of its memory was only here and is lost.
    MemoryLost,
    /// The guest is at the destination.
    Done,
    /// Too late to cancel: COMMITTED stands. `whimbrel recover` tells what can be done.
    TooLate,
    /// Contact is lost after COMMITTED and there is no register: `whimbrel recover`.
    OperatorNeeded,
    /// The destination owns the VM in the register; waiting for it.
    DestinationOwns,
    /// The register has a record that does not fit this migration.
    RegisterForeign,
    /// The destination's copy is gone and may have run; this side's stopped copy is kept: `whimbrel recover`.
    DestinationCrashed,
    /// QEMU did not continue the guest; it will be tried again.
    ContinueFailed,
    /// This side's stopped QEMU ended while the register was being asked: only the destination's copy is left.
    CopyLost,
    /// The destination says that it runs the guest, which is this host's. Two may be running: look at once.
    Contradiction,
}

impl SourceState {
    /// Stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Prepared { .. } => "prepared",
            Self::Stopped { .. } => "stopped",
            Self::Bereft { .. } => "bereft",
            Self::Committed { .. } => "committed",
            Self::Reclaiming { .. } => "reclaiming",
            Self::Aborting => "aborting",
            Self::Returning => "returning",
            Self::Aborted => "aborted",
            Self::Returned => "returned",
            Self::Done { .. } => "done",
        }
    }

    /// Whether nothing more will happen, but for answers and cleaning up.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Aborted | Self::Returned | Self::Done { .. })
    }

    /// Whether its journal entry is synced before the next effect: everything after which the guest may run here
    /// although the last synced entry would let a rebooted host believe that it has not.
    fn durable(&self) -> bool {
        matches!(
            self,
            Self::Prepared { .. } | Self::Aborting | Self::Returning | Self::Aborted | Self::Returned
        )
    }
}

impl SourceEvent {
    /// Stable name.
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
            Self::RegisterSays(_) => "register-says",
            Self::OperatorDecides(_) => "operator-decides",
            Self::Repeat => "repeat",
        }
    }

    /// The epoch that a peer's message speaks of.
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

impl From<(Use, RegisterRequest)> for SourceEffect {
    fn from((why, request): (Use, RegisterRequest)) -> Self {
        Self::Register { why, request }
    }
}

impl SourceEffect {
    /// Stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Journal { durable: false, .. } => "journal",
            Self::Journal { durable: true, .. } => "journal-sync",
            Self::StopVm => "stop-vm",
            Self::PauseQemu => "pause-qemu",
            Self::ResumeQemu => "resume-qemu",
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
            Self::Register { why, .. } => why.name(),
            Self::Report(_) => "report",
        }
    }
}

/// The source's legal transitions: all of them, and nothing else.
///
/// # Errors
///
/// [`Illegal`] where the event cannot happen in the state; the state stays as it is.
pub fn source(
    terms: &Terms,
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
