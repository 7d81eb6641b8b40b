//! Status of an evacuation, for people and programs: its moves with their explanations, and what stands in the way.

use serde::{Deserialize, Serialize};

use super::command::EvacuationId;
use super::contents::HostContents;
use super::explain::{MoveExplanation, MoveStanding, WaitReason};
use super::outcome::{BlockedVm, EvacuationOutcome, RemainsOnHost};
use super::report::DeadlineStanding;
use super::state::{Evacuation, EvacuationPhase, MoveRecord, MoveState, VmStanding};
use crate::forecast::Estimate;
use crate::planner::{PlacementPlan, PlannedMove};

/// Plan of an evacuation that has not begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvacuationPlan {
    /// The plan.
    pub plan: PlacementPlan,
    /// Its moves, explained.
    pub moves: Vec<MoveExplanation>,
    /// Outlook for the deadline, if there is one.
    pub deadline: Option<DeadlineStanding>,
    /// Evacuations that go first.
    pub waits_for: Vec<EvacuationId>,
}

/// Status of an evacuation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvacuationStatus {
    /// Id.
    pub id: EvacuationId,
    /// Phase.
    pub phase: EvacuationPhase,
    /// Evacuations that go first.
    pub waits_for: Vec<EvacuationId>,
    /// VMs that were moved.
    pub moved: u32,
    /// Moves under way, and those that are planned.
    pub moves: Vec<MoveExplanation>,
    /// VMs that are blocked.
    pub blocked: Vec<BlockedVm>,
    /// Remains on hosts that should be empty, as far as their agents have answered.
    pub hosts: Vec<RemainsOnHost>,
    /// Time until the last move has ended, in nanoseconds; none if it cannot be forecast.
    pub needs_ns: Option<Estimate>,
    /// Outlook for the deadline, if there is one.
    pub deadline: Option<DeadlineStanding>,
    /// Outcome; none while it runs.
    pub outcome: Option<EvacuationOutcome>,
}

impl Evacuation {
    /// Returns the status at a time.
    pub fn status(&self, now_ns: u64) -> EvacuationStatus {
        let standing = self.volatile.standing.as_ref().or(self.deadline.as_ref());
        let has_ns = self.request.deadline_ns.map_or(0, |deadline_ns| deadline_ns.saturating_sub(now_ns));
        let deadline = standing.map(|standing| DeadlineStanding { has_ns, ..standing.clone() });
        let blocked = self.vms.iter().filter_map(|(vm, record)| match &record.standing {
            VmStanding::Blocked { why } => {
                Some(BlockedVm { vm: vm.clone(), host: record.at.clone(), why: why.clone() })
            }
            _ => None,
        });
        let hosts = self.request.goal.emptied().iter().map(|host| {
            let remaining = self.volatile.contents.get(host).map(HostContents::what_remains);
            RemainsOnHost { host: host.clone(), remaining }
        });
        EvacuationStatus {
            id: self.id.clone(),
            phase: self.phase,
            waits_for: self.waits_for.clone(),
            moved: self.moved_count(),
            moves: self.explain(),
            blocked: blocked.collect(),
            hosts: hosts.collect(),
            needs_ns: self.volatile.needs_ns,
            deadline,
            outcome: self.outcome.clone(),
        }
    }

    /// Explains the moves that are under way, and those that are planned.
    pub(super) fn explain(&self) -> Vec<MoveExplanation> {
        let unsettled = self.unsettled().map(|(number, record)| MoveExplanation {
            command: Some(self.command(number)),
            standing: self.standing(number, record),
            ..self.explain_planned(&record.planned)
        });
        let waiting = self.queue.iter().enumerate().filter(|(_, queued)| queued.number.is_none());
        let planned = waiting.map(|(at, queued)| MoveExplanation {
            standing: MoveStanding::Waits { reason: self.reason(at, &queued.planned) },
            ..self.explain_planned(&queued.planned)
        });
        unsettled.chain(planned).collect()
    }

    fn reason(&self, at: usize, planned: &PlannedMove) -> WaitReason {
        let of_plan = || {
            let vms = planned.waits_for.iter().filter_map(|before| self.queue.get(*before as usize));
            let vms: Vec<String> = vms.map(|before| before.planned.vm.clone()).collect();
            if vms.is_empty() { WaitReason::Nothing } else { WaitReason::Moves { vms } }
        };
        self.volatile.waits.get(&at).cloned().unwrap_or_else(of_plan)
    }

    fn standing(&self, number: u32, record: &MoveRecord) -> MoveStanding {
        match &record.state {
            MoveState::Ordered => MoveStanding::Ordered,
            MoveState::Cancelling => MoveStanding::Cancelling,
            MoveState::InDoubt { .. } => MoveStanding::InDoubt,
            MoveState::Underway | MoveState::Ended { .. } => MoveStanding::Underway {
                bytes_left: self
                    .volatile
                    .progress
                    .get(&number)
                    .and_then(|known| known.last)
                    .map(|progress| progress.bytes_left),
                bytes_per_s: self.volatile.rates.get(&number).copied().flatten(),
            },
        }
    }

    fn explain_planned(&self, planned: &PlannedMove) -> MoveExplanation {
        let avoids = self.vms.get(&planned.vm).map(|record| record.refused_by.clone()).unwrap_or_default();
        MoveExplanation {
            vm: planned.vm.clone(),
            from: planned.from.clone(),
            to: planned.to.clone(),
            command: None,
            why: planned.why.clone(),
            target_load_percent: planned.target_load_percent,
            avoids: avoids.into_iter().collect(),
            total_ns: planned.total_ns,
            downtime_ns: planned.downtime_ns,
            bytes: planned.bytes,
            standing: MoveStanding::Waits { reason: WaitReason::Nothing },
        }
    }
}
