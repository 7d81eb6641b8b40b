//! The destination's side of the handover.
//!
//! ```text
//! idle ─► prepared ─► ready ─► taking ─► starting ─► (completing) ─► active
//!            │          │ │       │         │               │           │
//!            ▼          ▼ │       ▼         ▼               ▼           ▼
//!        discarded ◄──────┼── refusing ──► refused           crashed
//!                         ▼
//!                      refused
//!
//! bereft: the host has booted since PREPARED, and the register is asked what happened after, or the source
//! ```
//!
//! *Completing* is there in post-copy alone: the guest runs here, and is this host's, but some of its memory is at the
//! source still. It needs both hosts until the last page has come, and so is not told to be RUNNING before.
//!
//! From READY on it is in doubt: it may neither run nor discard what it has, until the source, the register or an
//! operator has spoken. REFUSED is no decision about the guest: it says that this copy cannot run, and never has.
//!
//! With a register `cont` is not sent before the record names this host; *taking* is the state in which that is asked.
//! A destination that wanted to take and cannot run gives the VM back in the register before it says REFUSED, also
//! when it does not know whether its request was carried out: the record (e, source) shuts the door for it.

mod step;

use proto::message::{RegisterRequest, Verdict};
use proto::{Epoch, Incarnation};
use serde::{Deserialize, Serialize};

use super::recover::Decision;
use super::register::{RegisterAnswer, Use};
use super::{Found, Ignored, Illegal, Role, Step, Terms};

/// Where the destination stands. What the journal keeps.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum DestinationState {
    /// No migration of this epoch yet, or none that was heard of. Also the state in which a message meets an agent
    /// whose journal has nothing of its migration.
    Idle,
    /// PREPARED. Memory is being written.
    Prepared,
    /// READY: loaded, paused, durable. In doubt.
    Ready {
        /// What GO has to name.
        incarnation: Incarnation,
        /// Whether the guest is to run on, or was paused by its user and stays so. Absent in entries of older agents.
        #[serde(default = "runs")]
        run: bool,
    },
    /// GO was obeyed; the register is being asked for ownership.
    Taking {
        /// The incarnation that GO named.
        incarnation: Incarnation,
        /// Whether the guest is to run on, or was paused by its user and stays so.
        run: bool,
    },
    /// `cont` is being sent. From here on a vCPU may have run.
    Starting {
        /// The incarnation that GO named.
        incarnation: Incarnation,
        /// Whether an earlier life of the agent may have sent `cont` already, so that a failure of the next one does
        /// not prove that no vCPU has run.
        again: bool,
    },
    /// The guest is this host's and runs, and pages of it are still to come (post-copy).
    Completing {
        /// The incarnation that is running.
        incarnation: Incarnation,
    },
    /// The guest is this host's.
    Active {
        /// The incarnation that is running.
        incarnation: Incarnation,
    },
    /// Will never run it; the register is being asked to say that the source owns it.
    Refusing,
    /// REFUSED: has not run it and never will.
    Refused,
    /// The source runs on; what was here is removed.
    Discarded,
    /// The host has booted since PREPARED: the copy is gone, and the register, or the source where there is none, is
    /// being asked whether it can have run.
    Bereft,
    /// The copy is gone, and may have run: `cont` had been sent, or nobody knows.
    Crashed {
        /// Whether the guest is known to have run, so that the source's copy is out of date.
        ran: bool,
    },
}

/// An agent that did not know continued any guest.
fn runs() -> bool {
    true
}

/// What happens to the destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum DestinationEvent {
    /// A migration of this epoch was proposed, and pre-flight found no blocker.
    Prepare,
    /// Memory and device state are loaded, the guest is paused, its disks are durable.
    Loaded {
        /// What was loaded into.
        incarnation: Incarnation,
        /// Whether the guest ran before it was stopped, as its source says.
        run: bool,
    },
    /// GO came.
    Go {
        /// Of which epoch.
        epoch: Epoch,
        /// For whom.
        incarnation: Incarnation,
        /// Whether the guest is to run on.
        run: bool,
    },
    /// The source answered a question.
    SourceSays {
        /// Of which epoch.
        epoch: Epoch,
        /// What its journal says.
        verdict: Verdict,
    },
    /// The source aborted.
    AbortReceived {
        /// Of which epoch.
        epoch: Epoch,
    },
    /// The source, whose copy is gone, asks what is here.
    Asked {
        /// About which epoch.
        epoch: Epoch,
    },
    /// Something on this side, or an illegal message, made going on impossible.
    Failed,
    /// A user of this host wants the migration to end.
    Cancel,
    /// The source has not said anything for too long.
    PeerSilent,
    /// The connections are gone and did not come back in time, or the source did not answer.
    PeerLost,
    /// The configuration's limit of patience with an unreachable source has passed.
    ContactLostForGood,
    /// This side's QEMU ended.
    QemuDied,
    /// `cont` has returned, the guest runs.
    Contd {
        /// Whether pages of it are still to come (post-copy).
        missing: bool,
    },
    /// The last page that was to come is there.
    Completed,
    /// QEMU refused `cont`, or it could not be sent at all: no vCPU has run.
    ContFailed,
    /// The agent has started and loaded the state from the journal.
    Restarted(Found),
    /// The register answered, or did not.
    RegisterSays(RegisterAnswer),
    /// An operator has decided.
    OperatorDecides(Decision),
    /// Time to repeat what the state is waiting for.
    Repeat,
}

/// What the destination's agent is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationEffect {
    /// Write the state into the journal.
    Journal {
        /// What to write.
        state: DestinationState,
        /// Whether it has to be synced before the next effect.
        durable: bool,
    },
    /// Send READY.
    SendReady {
        /// Who is ready.
        incarnation: Incarnation,
    },
    /// Ask the source; ends in `SourceSays` or `PeerLost`.
    AskSource,
    /// Ask the register; ends in `RegisterSays`. The agent need not wait for the answer before the next effect.
    Register {
        /// What for.
        why: Use,
        /// The request.
        request: RegisterRequest,
    },
    /// QMP `cont`; ends in `Contd`, `ContFailed` or `QemuDied`.
    Cont,
    /// QMP `announce-self`: switches learn where the guest is now.
    Announce,
    /// Send INCOMPLETE: the guest runs here, and needs what the source has of it.
    SendIncomplete,
    /// Send RUNNING.
    SendRunning,
    /// Send REFUSED.
    SendRefused,
    /// Send CRASHED.
    SendCrashed,
    /// Kill this side's QEMU and remove what was made for it.
    Discard,
    /// Tell the user.
    Report(DestinationReport),
}

/// What a user gets to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationReport {
    /// The migration ended before READY; nothing is left here.
    Discarded,
    /// The source runs on; nothing is left here.
    SourceKept,
    /// In doubt and the source cannot be asked: `whimbrel recover` tells what can be done.
    OperatorNeeded,
    /// In doubt, or past it: a user cannot cancel here.
    TooLate,
    /// The guest runs here, and some of its memory is still to come.
    Incomplete,
    /// Some of the memory of the guest, which runs here, is at the source, and that cannot be reached.
    SourceNeeded,
    /// The guest runs here.
    Active,
    /// This copy could not run and has not; the source keeps the guest.
    Refused,
    /// The guest crashed here, as it may on any host; its disks are here.
    Crashed,
    /// The copy is gone, and nobody knows whether it has run here.
    Lost,
    /// The host was booted anew with a migration under way: the copy is gone, and whether it had run is not known.
    Bereft,
    /// QEMU did not continue the guest; it will be tried again.
    ContFailed,
    /// The register has a record that does not fit this migration.
    RegisterForeign,
}

impl DestinationState {
    /// Stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Prepared => "prepared",
            Self::Ready { .. } => "ready",
            Self::Taking { .. } => "taking",
            Self::Starting { .. } => "starting",
            Self::Completing { .. } => "completing",
            Self::Active { .. } => "active",
            Self::Refusing => "refusing",
            Self::Refused => "refused",
            Self::Discarded => "discarded",
            Self::Bereft => "bereft",
            Self::Crashed { .. } => "crashed",
        }
    }

    /// Whether nothing more will happen, but for answers and cleaning up.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Active { .. } | Self::Refused | Self::Discarded | Self::Crashed { .. })
    }

    /// Whether this copy of the guest may neither be run nor thrown away without being told.
    pub fn in_doubt(&self) -> bool {
        matches!(self, Self::Ready { .. } | Self::Taking { .. })
    }

    /// Whether its journal entry is synced before the next effect. A host that loses entries between these two has
    /// lost its RAM too, and wakes up `Bereft`. COMPLETING lasts, and is the proof that the copy has run. CRASHED, once said,
    /// must not be forgotten: a source that was bereft has aborted since, and its word would count.
    fn durable(&self) -> bool {
        matches!(self, Self::Prepared | Self::Completing { .. } | Self::Crashed { .. })
    }
}

impl DestinationEvent {
    /// Stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Loaded { .. } => "loaded",
            Self::Go { .. } => "go",
            Self::SourceSays { .. } => "source-says",
            Self::AbortReceived { .. } => "abort-received",
            Self::Asked { .. } => "asked",
            Self::Failed => "failed",
            Self::Cancel => "cancel",
            Self::PeerSilent => "peer-silent",
            Self::PeerLost => "peer-lost",
            Self::ContactLostForGood => "contact-lost-for-good",
            Self::QemuDied => "qemu-died",
            Self::Contd { .. } => "contd",
            Self::Completed => "completed",
            Self::ContFailed => "cont-failed",
            Self::Restarted(_) => "restarted",
            Self::RegisterSays(_) => "register-says",
            Self::OperatorDecides(_) => "operator-decides",
            Self::Repeat => "repeat",
        }
    }

    /// The epoch that a peer's message speaks of.
    fn epoch(&self) -> Option<Epoch> {
        match self {
            Self::Go { epoch, .. }
            | Self::SourceSays { epoch, .. }
            | Self::AbortReceived { epoch }
            | Self::Asked { epoch } => Some(*epoch),
            _ => None,
        }
    }
}

impl From<(Use, RegisterRequest)> for DestinationEffect {
    fn from((why, request): (Use, RegisterRequest)) -> Self {
        Self::Register { why, request }
    }
}

impl DestinationEffect {
    /// Stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Journal { durable: false, .. } => "journal",
            Self::Journal { durable: true, .. } => "journal-sync",
            Self::SendReady { .. } => "send-ready",
            Self::AskSource => "ask-source",
            Self::Register { why, .. } => why.name(),
            Self::Cont => "cont",
            Self::Announce => "announce",
            Self::SendIncomplete => "send-incomplete",
            Self::SendRunning => "send-running",
            Self::SendRefused => "send-refused",
            Self::SendCrashed => "send-crashed",
            Self::Discard => "discard",
            Self::Report(_) => "report",
        }
    }
}

/// The destination's legal transitions: all of them, and nothing else.
///
/// # Errors
///
/// [`Illegal`] where the event cannot happen in the state; the state stays as it is.
pub fn destination(
    terms: &Terms,
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
