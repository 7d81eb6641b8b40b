//! State of an evacuation: what is stored, and what is known only until the controller ends.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::action::EvacuationAction;
use super::command::{CommandId, EvacuationId, MoveEnd, MoveProgress};
use super::contents::HostContents;
use super::explain::WaitReason;
use super::outcome::{BlockedReason, EvacuationOutcome};
use super::report::{DeadlineStanding, EvacuationReport};
use super::request::{EvacuationGoal, EvacuationRequest};
use crate::forecast::Estimate;
use crate::planner::PlannedMove;

/// Evacuation of hosts, or return of what left one.
///
/// Its serialised form is what the controller stores. A restored one is in the same state, and knows nothing about hosts
/// until their agents have answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evacuation {
    pub(super) id: EvacuationId,
    pub(super) request: EvacuationRequest,
    pub(super) phase: EvacuationPhase,
    pub(super) begun_ns: u64,
    /// Number of the last command.
    pub(super) last_number: u32,
    pub(super) vms: BTreeMap<String, VmRecord>,
    /// All moves that were ordered, by the numbers of their commands.
    pub(super) moves: BTreeMap<u32, MoveRecord>,
    /// Moves of the present plan, in their order.
    pub(super) queue: Vec<QueuedMove>,
    /// Hosts that it has cordoned, and that were not cordoned before.
    pub(super) cordoned: BTreeSet<String>,
    pub(super) departures: Vec<Departure>,
    /// Evacuations that go first.
    pub(super) waits_for: Vec<EvacuationId>,
    /// Outlook that was reported last.
    pub(super) deadline: Option<DeadlineStanding>,
    pub(super) outcome: Option<EvacuationOutcome>,
    #[serde(skip)]
    pub(super) volatile: Volatile,
}

/// Phase of an evacuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvacuationPhase {
    /// Hosts are asked for facts; nothing is planned yet.
    AsksFacts,
    /// Another evacuation goes first.
    WaitsForEvacuation,
    /// VMs are moved.
    Moves,
    /// All VMs have left, and something else remains on a host.
    WaitsForEmpty,
    /// It was cancelled, and moves are still under way.
    Cancels,
    /// It has ended.
    Finished,
}

/// VM that has left a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Departure {
    /// VM.
    pub vm: String,
    /// Host that it left.
    pub from: String,
    /// Host to which it was moved.
    pub to: String,
    /// Time at which its move ended.
    pub at_ns: u64,
}

/// VM that an evacuation moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VmRecord {
    /// Host as far as is known.
    pub(super) at: String,
    /// Host that it left last, by a move of this evacuation.
    pub(super) left: Option<String>,
    /// Attempts that have failed.
    pub(super) attempts: u32,
    /// Time before which there is no further attempt.
    pub(super) pause_until_ns: u64,
    /// Hosts that have refused it, with the reasons.
    pub(super) refused_by: BTreeMap<String, String>,
    /// Host to which the last attempt failed for another reason: another one is tried if there is one.
    pub(super) failed_at: Option<String>,
    /// True if there is no further attempt.
    pub(super) has_given_up: bool,
    pub(super) standing: VmStanding,
}

/// Standing of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "standing", rename_all = "kebab-case")]
pub(super) enum VmStanding {
    /// It has to be moved.
    Waiting,
    /// A move was ordered, and has not ended.
    Moving {
        /// Number of the command.
        number: u32,
    },
    /// It is not moved before something changes.
    Blocked {
        /// Reason.
        why: BlockedReason,
    },
    /// It is where it should be.
    Arrived,
    /// It has ended, or was moved by another request.
    Gone,
}

/// Move that was ordered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MoveRecord {
    pub(super) planned: PlannedMove,
    /// Rate of the link between both hosts, in bytes per second.
    pub(super) link_bytes_per_s: u64,
    pub(super) priority: i32,
    pub(super) ordered_ns: u64,
    /// True once the destination has reported the VM as its own.
    pub(super) appeared: bool,
    pub(super) state: MoveState,
}

/// State of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub(super) enum MoveState {
    /// The agent has not confirmed the order.
    Ordered,
    Underway,
    /// It is being cancelled: because the evacuation is, or because the move did not progress.
    Cancelling,
    InDoubt {
        reason: String,
    },
    Ended {
        end: MoveEnd,
        at_ns: u64,
    },
}

/// Move of the present plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct QueuedMove {
    pub(super) planned: PlannedMove,
    pub(super) priority: i32,
    /// Number of its command, once it was ordered.
    pub(super) number: Option<u32>,
}

/// Knowledge that is not stored.
#[derive(Clone, Debug)]
pub(super) struct Volatile {
    /// Actions and reports that are to be returned.
    pub(super) out: Vec<EvacuationAction>,
    /// Commands whose moves are to be ordered, for the first time or again.
    pub(super) orders: BTreeSet<u32>,
    /// Hosts whose facts are known since they are connected.
    pub(super) fresh: BTreeSet<String>,
    /// Hosts that were asked for facts and have not answered.
    pub(super) asked: BTreeMap<String, Question>,
    /// Times of the last answers of hosts.
    pub(super) answered: BTreeMap<String, u64>,
    pub(super) contents: BTreeMap<String, HostContents>,
    pub(super) progress: BTreeMap<u32, KnownProgress>,
    /// Rates that agents were given.
    pub(super) rates: BTreeMap<u32, Option<u64>>,
    /// Reasons for which moves of the queue have not begun.
    pub(super) waits: BTreeMap<usize, WaitReason>,
    pub(super) needs_plan: bool,
    pub(super) times: Times,
    /// Hosts for which something was reported or ordered once: lost, empty, cordoned, services, what remains.
    pub(super) notes: BTreeSet<HostNote>,
    /// Time that the rest needs.
    pub(super) needs_ns: Option<Estimate>,
    /// Outlook for the deadline as it is now.
    pub(super) standing: Option<DeadlineStanding>,
}

/// Times of the last events of some kinds.
#[expect(clippy::struct_field_names, reason = "their unit")]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// Begin of this knowledge.
    pub(super) since_ns: u64,
    /// Plan.
    pub(super) planned_ns: u64,
    /// Progress of any kind.
    pub(super) progressed_ns: u64,
    /// Connection that was made or lost, to any host.
    pub(super) connections_ns: u64,
}

/// Question to a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    pub(super) at_ns: u64,
    /// Number of the last command then: the answer need not have later ones.
    pub(super) last_number: u32,
}

/// Fact about a host that is reported or ordered once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HostNote {
    Lost(String),
    Empty(String),
    Cordoned(String),
    Services(String),
    Remains(String),
}

/// Progress of a move, as far as it is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownProgress {
    pub(super) last: Option<MoveProgress>,
    /// Fewest bytes that were left so far.
    pub(super) least_left: u64,
    /// Time of the last progress: something was sent, the phase has changed, or fewer bytes were left than ever before.
    pub(super) since_ns: u64,
}

impl Default for Volatile {
    /// Knowledge of nothing, so that a plan has to be made.
    fn default() -> Self {
        Self {
            out: Vec::new(),
            orders: BTreeSet::new(),
            fresh: BTreeSet::new(),
            asked: BTreeMap::new(),
            answered: BTreeMap::new(),
            contents: BTreeMap::new(),
            progress: BTreeMap::new(),
            rates: BTreeMap::new(),
            waits: BTreeMap::new(),
            needs_plan: true,
            times: Times::default(),
            notes: BTreeSet::new(),
            needs_ns: None,
            standing: None,
        }
    }
}

impl Volatile {
    /// Returns the knowledge of a controller that begins now.
    pub(super) fn since(now_ns: u64) -> Self {
        let times = Times { since_ns: now_ns, progressed_ns: now_ns, ..Times::default() };
        Self { times, ..Self::default() }
    }
}

impl PartialEq for Volatile {
    /// Two evacuations are equal if what is stored of them is.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl MoveRecord {
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.state, MoveState::Ended { .. })
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        matches!(self.state, MoveState::InDoubt { .. })
    }

    /// Returns true if it uses links and processors, as far as is known.
    pub(super) fn is_active(&self) -> bool {
        !self.is_settled() && !self.is_in_doubt()
    }

    pub(super) fn has_moved(&self) -> bool {
        matches!(self.state, MoveState::Ended { end: MoveEnd::Moved, .. })
    }
}

impl VmRecord {
    pub(super) fn new(at: &str, standing: VmStanding) -> Self {
        Self {
            at: at.to_owned(),
            left: None,
            attempts: 0,
            pause_until_ns: 0,
            refused_by: BTreeMap::new(),
            failed_at: None,
            has_given_up: false,
            standing,
        }
    }

    /// Makes it wait again, with all attempts.
    pub(super) fn start_afresh(&mut self) {
        self.attempts = 0;
        self.pause_until_ns = 0;
        self.refused_by.clear();
        self.failed_at = None;
        self.has_given_up = false;
        self.standing = VmStanding::Waiting;
    }
}

impl Evacuation {
    /// Returns an evacuation that has not done anything.
    pub(super) fn new(id: EvacuationId, request: EvacuationRequest, now_ns: u64) -> Self {
        Self {
            id,
            request,
            phase: EvacuationPhase::AsksFacts,
            begun_ns: now_ns,
            last_number: 0,
            vms: BTreeMap::new(),
            moves: BTreeMap::new(),
            queue: Vec::new(),
            cordoned: BTreeSet::new(),
            departures: Vec::new(),
            waits_for: Vec::new(),
            deadline: None,
            outcome: None,
            volatile: Volatile::since(now_ns),
        }
    }

    /// Returns its id.
    pub fn id(&self) -> &EvacuationId {
        &self.id
    }

    /// Returns the request.
    pub fn request(&self) -> &EvacuationRequest {
        &self.request
    }

    /// Returns its outcome; none while it runs.
    pub fn outcome(&self) -> Option<&EvacuationOutcome> {
        self.outcome.as_ref()
    }

    /// Returns the VMs that have left their hosts, and have not been brought back.
    pub fn departures(&self) -> &[Departure] {
        &self.departures
    }

    pub(super) fn is_finished(&self) -> bool {
        self.phase == EvacuationPhase::Finished
    }

    /// Returns true if events can change it: it runs, or moves of it have not ended.
    pub(super) fn is_live(&self) -> bool {
        !self.is_finished() || self.unsettled().next().is_some()
    }

    /// Returns true if its first plan was made, and it has not ended.
    pub(super) fn has_begun(&self) -> bool {
        use EvacuationPhase::{Cancels, Moves, WaitsForEmpty};
        matches!(self.phase, Moves | WaitsForEmpty | Cancels)
    }

    /// Returns the hosts that are to be emptied, or to which VMs return.
    pub(super) fn goal_hosts(&self) -> &[String] {
        match &self.request.goal {
            EvacuationGoal::Empty { hosts, .. } => hosts,
            EvacuationGoal::Return { host, .. } => std::slice::from_ref(host),
        }
    }

    pub(super) fn is_emptied(&self, host: &str) -> bool {
        self.request.goal.emptied().iter().any(|emptied| emptied == host)
    }

    /// Returns true if a VM on this host is where it should be.
    pub(super) fn is_in_place(&self, vm: &str, at: &str) -> bool {
        match &self.request.goal {
            EvacuationGoal::Empty { .. } => !self.is_emptied(at),
            EvacuationGoal::Return { host, vms } => host == at || !vms.iter().any(|name| name == vm),
        }
    }

    pub(super) fn unsettled(&self) -> impl Iterator<Item = (u32, &MoveRecord)> {
        self.moves.iter().filter(|(_, one)| !one.is_settled()).map(|(number, one)| (*number, one))
    }

    /// Returns the move of a VM that has not ended.
    pub(super) fn unsettled_of(&self, vm: &str) -> Option<(u32, &MoveRecord)> {
        self.unsettled().find(|(_, one)| one.planned.vm == vm)
    }

    pub(super) fn command(&self, number: u32) -> CommandId {
        CommandId { evacuation: self.id.clone(), number }
    }

    pub(super) fn report(&mut self, report: EvacuationReport) {
        self.volatile.out.push(EvacuationAction::Report { evacuation: self.id.clone(), report });
    }

    /// Adds a note about a host; returns true if it is new.
    pub(super) fn note(&mut self, note: HostNote) -> bool {
        self.volatile.notes.insert(note)
    }

    /// Returns the number of VMs that have left, or come back.
    pub(super) fn moved_count(&self) -> u32 {
        let arrived = self
            .vms
            .values()
            .filter(|record| record.standing == VmStanding::Arrived && record.left.is_some());
        arrived.count() as u32
    }
}
