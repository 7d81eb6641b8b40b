//! Plans of an evacuation, beside those of others.

use std::collections::{BTreeMap, BTreeSet};

use super::command::EvacuationId;
use super::outcome::{BlockedReason, EvacuationRefusal};
use super::request::EvacuationGoal;
use super::state::{Evacuation, QueuedMove, VmRecord, VmStanding};
use super::surroundings::{FleetView, OthersView, Surroundings};
use crate::planner::{
    Hysteresis, Inventory, Obstacle, Placement, PlacementPlan, PlanGoal, PlanRequest, PlannedMove, Refusal,
    StayReason, plan,
};

/// Reason for which an evacuation does not begin now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NotNow {
    /// Others go first.
    Waits(Vec<EvacuationId>),
    Refused(EvacuationRefusal),
}

impl Evacuation {
    /// Returns the first plan, or the reason for which there is none.
    ///
    /// If another evacuation takes the room, and there would be room once it has ended, this one waits for it; it is
    /// refused if there would be none then either.
    pub(super) fn first_plan(&self, around: &Surroundings<'_>) -> Result<PlacementPlan, NotNow> {
        let arriving = around.others.iter().filter(|reservations| {
            reservations.is_running && reservations.moves.iter().any(|one| self.is_emptied(&one.to))
        });
        let arriving: Vec<EvacuationId> = arriving.map(|reservations| reservations.id.clone()).collect();
        if !arriving.is_empty() {
            return Err(NotNow::Waits(arriving));
        }
        // A resumed evacuation goes on with what is possible.
        let is_strict = !self.request.partial && self.moves.is_empty();
        let refusal = match self.plan_beside(around, OthersView::AsTheyAre, is_strict) {
            Ok(found) => return Ok(found),
            Err(refusal) => refusal,
        };
        let by: Vec<EvacuationId> = around
            .others
            .iter()
            .filter(|reservations| !reservations.moves.is_empty() || !reservations.closes.is_empty())
            .map(|reservations| reservations.id.clone())
            .collect();
        let is_of_others = !by.is_empty() && !refusal.is_bad_input();
        if is_of_others && self.plan_beside(around, OthersView::Ended, is_strict).is_ok() {
            let running = around
                .others
                .iter()
                .filter(|reservations| reservations.is_running && by.contains(&reservations.id));
            let running: Vec<EvacuationId> = running.map(|reservations| reservations.id.clone()).collect();
            if !running.is_empty() {
                return Err(NotNow::Waits(running));
            }
        }
        if is_of_others && self.plan_beside(around, OthersView::Absent, is_strict).is_ok() {
            return Err(NotNow::Refused(EvacuationRefusal::RoomTaken { by, refusal: Box::new(refusal) }));
        }
        // For the planner, VMs on hosts without connection are pinned.
        let is_lost = |record: &&VmRecord| {
            record.standing == VmStanding::Waiting && !around.connected.contains(&record.at)
        };
        let refusal = match self.vms.values().find(is_lost) {
            Some(record) if is_strict && !refusal.is_bad_input() => {
                EvacuationRefusal::NotConnected { host: record.at.clone() }
            }
            _ => EvacuationRefusal::Plan { refusal },
        };
        Err(NotNow::Refused(refusal))
    }

    /// Returns a plan of what has not moved yet, as far as it can be moved.
    ///
    /// VMs avoid the hosts to which their last attempts failed, unless that leaves them no other.
    pub(super) fn plan_rest(&self, around: &Surroundings<'_>) -> Result<PlacementPlan, Refusal> {
        let of = |avoids_failed: bool| {
            let view = FleetView::new(self, around, OthersView::AsTheyAre, avoids_failed);
            self.plan_in(&view.inventory(), around.now_ns, false)
        };
        let has_failed = self.vms.values().any(|record| record.failed_at.is_some() && !record.has_given_up);
        if !has_failed {
            return of(false);
        }
        let avoiding = of(true);
        let stays = |vm: &String| self.vms.get(vm).is_some_and(|record| record.failed_at.is_some());
        match &avoiding {
            Ok(found) if !found.stays.iter().any(|staying| stays(&staying.vm)) => avoiding,
            _ => of(false),
        }
    }

    pub(super) fn plan_beside(
        &self,
        around: &Surroundings<'_>,
        others: OthersView,
        is_strict: bool,
    ) -> Result<PlacementPlan, Refusal> {
        let view = FleetView::new(self, around, others, false);
        self.plan_in(&view.inventory(), around.now_ns, is_strict)
    }

    fn plan_in(&self, inventory: &Inventory, now_ns: u64, is_strict: bool) -> Result<PlacementPlan, Refusal> {
        let is_first = self.moves.is_empty();
        let deadline_ns = self.request.deadline_ns.filter(|_| is_first && !self.request.accept_late);
        let request = PlanRequest {
            goal: self.plan_goal(inventory),
            deadline_s: deadline_ns.map(|deadline_ns| deadline_ns.saturating_sub(now_ns) / 1_000_000_000),
            partial: !is_strict,
            limits: self.request.limits,
            hysteresis: Hysteresis::default(),
        };
        plan(inventory, &request)
    }

    fn plan_goal(&self, inventory: &Inventory) -> PlanGoal {
        let EvacuationGoal::Return { host, .. } = &self.request.goal else {
            return self.request.goal.plan_goal();
        };
        let is_to_move = |vm: &str| {
            let is_waiting = match self.vms.get(vm) {
                Some(record) => !record.has_given_up && may_be_planned(record),
                None => true,
            };
            is_waiting && !self.is_in_place(vm, host_of(inventory, vm).unwrap_or(host))
        };
        let PlanGoal::Place { mut placements } = self.request.goal.plan_goal() else {
            return self.request.goal.plan_goal();
        };
        placements.retain(|Placement { vm, .. }| is_to_move(vm));
        PlanGoal::Place { placements }
    }

    /// Adds VMs that the inventory has on hosts of the goal, and removes those that others have moved.
    pub(super) fn list_vms(&mut self, inventory: &Inventory) {
        for spec in &inventory.vms {
            let is_goal = match &self.request.goal {
                EvacuationGoal::Empty { .. } => self.is_emptied(&spec.host),
                EvacuationGoal::Return { vms, .. } => vms.contains(&spec.name),
            };
            let is_in_place = self.is_in_place(&spec.name, &spec.host);
            match self.vms.get_mut(&spec.name) {
                None if is_goal && spec.moving_to.is_none() => {
                    let standing = if is_in_place { VmStanding::Arrived } else { VmStanding::Waiting };
                    self.vms.insert(spec.name.clone(), VmRecord::new(&spec.host, standing));
                }
                Some(record) if may_be_planned(record) && record.left.as_ref() != Some(&spec.host) => {
                    record.at.clone_from(&spec.host);
                    if is_in_place {
                        record.standing = match &self.request.goal {
                            EvacuationGoal::Empty { .. } => VmStanding::Gone,
                            EvacuationGoal::Return { .. } => VmStanding::Arrived,
                        };
                    }
                }
                _ => {}
            }
        }
    }

    /// Forgets which hosts VMs have left: what the inventory has is newer than all moves that have ended. VMs on hosts that
    /// are to be emptied appear when these have answered.
    pub(super) fn forget_old_places(&mut self, inventory: &Inventory) {
        for spec in &inventory.vms {
            let is_kept = self.is_emptied(&spec.host) || self.unsettled_of(&spec.name).is_some();
            let record = self.vms.get_mut(&spec.name).filter(|_| !is_kept);
            if let Some(record) = record.filter(|record| record.left.as_ref() == Some(&spec.host)) {
                record.at.clone_from(&spec.host);
                record.left = None;
            }
        }
    }

    /// Makes a plan the present one.
    pub(super) fn adopt_plan(&mut self, found: &PlacementPlan, around: &Surroundings<'_>) {
        let inventory = around.inventory;
        let names: BTreeSet<&str> = found.moves.iter().map(|planned| planned.vm.as_str()).collect();
        let specs = inventory.vms.iter().filter(|spec| names.contains(spec.name.as_str()));
        let priorities: BTreeMap<&str, i32> =
            specs.map(|spec| (spec.name.as_str(), spec.rules.priority)).collect();
        let queued = found.moves.iter().map(|planned| {
            let of_request = self.request.priorities.get(&planned.vm).copied();
            let of_rules = priorities.get(planned.vm.as_str()).copied();
            let priority = of_request.or(of_rules).unwrap_or(0);
            QueuedMove { planned: planned.clone(), priority, number: None }
        });
        self.queue = queued.collect();
        for record in self.vms.values_mut().filter(|record| may_be_planned(record)) {
            record.standing = VmStanding::Waiting;
        }
        let lost_ways = if found.stays.is_empty() { BTreeMap::new() } else { self.lost_ways(around) };
        for staying in &found.stays {
            let goal = match &self.request.goal {
                EvacuationGoal::Return { host, .. } => host,
                EvacuationGoal::Empty { .. } => &staying.host,
            };
            let lost = [&staying.host, goal].into_iter().find(|host| !around.connected.contains(*host));
            let why = match lost.or(lost_ways.get(&staying.vm)) {
                Some(host) => BlockedReason::HostLost { host: host.clone() },
                None => BlockedReason::NoPlan { why: staying.why.clone() },
            };
            self.block(&staying.vm, why);
        }
        // A VM with neither move nor reason is not in the inventory, or on its way by another request.
        let waiting = self.vms.iter().filter(|(_, record)| record.standing == VmStanding::Waiting);
        let missing: Vec<String> =
            waiting.map(|(vm, _)| vm.clone()).filter(|vm| !names.contains(vm.as_str())).collect();
        for vm in missing {
            let why = if host_of(inventory, &vm).is_some() {
                BlockedReason::NoPlan { why: StayReason::Held { obstacle: Obstacle::IsMoving } }
            } else {
                let named_by = "an agent".to_owned();
                BlockedReason::Refused { refusal: Refusal::UnknownVm { vm: vm.clone(), named_by } }
            };
            self.block(&vm, why);
        }
    }

    /// Blocks all VMs that wait, because there is no plan for them.
    pub(super) fn block_all(&mut self, refusal: &Refusal, around: &Surroundings<'_>) {
        self.queue.clear();
        let lost_ways = self.lost_ways(around);
        let waiting = self.vms.iter().filter(|(_, record)| may_be_planned(record));
        for vm in waiting.map(|(vm, _)| vm.clone()).collect::<Vec<_>>() {
            let why = match lost_ways.get(&vm) {
                Some(host) => BlockedReason::HostLost { host: host.clone() },
                None => BlockedReason::Refused { refusal: refusal.clone() },
            };
            self.block(&vm, why);
        }
    }

    /// Returns the VMs that could move if all hosts were connected, each with a host without connection that its way, or
    /// else the way of another one, needs.
    fn lost_ways(&self, around: &Surroundings<'_>) -> BTreeMap<String, String> {
        let all = around.all_hosts();
        if all.is_subset(around.connected) {
            return BTreeMap::new();
        }
        let Ok(found) = self.plan_rest(&Surroundings { connected: &all, ..*around }) else {
            return BTreeMap::new();
        };
        let lost_of = |planned: &PlannedMove| {
            [&planned.to, &planned.from].into_iter().find(|host| !around.connected.contains(*host)).cloned()
        };
        let Some(any) = found.moves.iter().find_map(lost_of) else { return BTreeMap::new() };
        let of =
            |planned: &PlannedMove| (planned.vm.clone(), lost_of(planned).unwrap_or_else(|| any.clone()));
        found.moves.iter().map(of).collect()
    }

    fn block(&mut self, vm: &str, why: BlockedReason) {
        if let Some(record) = self.vms.get_mut(vm).filter(|record| may_be_planned(record)) {
            record.standing = VmStanding::Blocked { why };
        }
    }
}

/// Returns true if a plan may move a VM: it waits, or only the last plan had no way for it.
fn may_be_planned(record: &VmRecord) -> bool {
    match &record.standing {
        VmStanding::Waiting => true,
        VmStanding::Blocked { why } => {
            matches!(
                why,
                BlockedReason::NoPlan { .. } | BlockedReason::Refused { .. } | BlockedReason::HostLost { .. }
            )
        }
        VmStanding::Moving { .. } | VmStanding::Arrived | VmStanding::Gone => false,
    }
}

fn host_of<'a>(inventory: &'a Inventory, vm: &str) -> Option<&'a str> {
    inventory.vms.iter().find(|spec| spec.name == vm).map(|spec| spec.host.as_str())
}
