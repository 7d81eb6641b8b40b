//! Decisions of an evacuation after an event: questions, plans, and moves that begin.

use std::collections::BTreeSet;

use super::action::EvacuationAction;
use super::command::EvacuationId;
use super::concurrency::{MoveCandidate, obstacle_to_begin};
use super::explain::WaitReason;
use super::outcome::{BlockedReason, EvacuationOutcome};
use super::planning::NotNow;
use super::report::{DeadlineStanding, EvacuationReport};
use super::request::EvacuationGoal;
use super::state::{
    Evacuation, EvacuationPhase, HostNote, MoveRecord, MoveState, Question, QueuedMove, VmRecord, VmStanding,
};
use super::surroundings::{ActiveMove, Capacities, FleetView, OthersView, Surroundings, link_between};
use crate::planner::{Obstacle, PlacementPlan, matrix};

/// Change of the time by which a deadline is missed that is reported again, in nanoseconds.
const LATENESS_STEP_NS: u64 = 10_000_000_000;
const SECOND_NS: u64 = 1_000_000_000;
/// Time after a change of connections in which others may follow, in intervals of questions.
const CONNECTION_INTERVALS: u64 = 4;

impl Evacuation {
    /// Decides what to do next.
    pub(super) fn advance(&mut self, around: &Surroundings<'_>) {
        if self.volatile.times.progressed_ns == 0 {
            self.progressed(around.now_ns);
        }
        self.ask_for_facts(around);
        match self.phase {
            EvacuationPhase::Finished => return,
            EvacuationPhase::AsksFacts | EvacuationPhase::WaitsForEvacuation => self.start(around),
            EvacuationPhase::Moves | EvacuationPhase::WaitsForEmpty => self.go_on(around),
            EvacuationPhase::Cancels => {}
        }
        self.check_end(around);
    }

    /// Asks the hosts on which something depends, once for each connection, and again if they do not answer.
    fn ask_for_facts(&mut self, around: &Surroundings<'_>) {
        let mut hosts: BTreeSet<String> = self.unsettled().map(|(_, one)| one.planned.from.clone()).collect();
        if !self.is_finished() {
            hosts.extend(self.goal_hosts().iter().cloned());
        }
        for host in hosts {
            let is_due = match self.volatile.asked.get(&host) {
                Some(question) => around.now_ns.saturating_sub(question.at_ns) >= self.ask_interval_ns(),
                None => !self.volatile.fresh.contains(&host),
            };
            if is_due && around.connected.contains(&host) {
                self.ask(&host, around.now_ns);
            }
        }
    }

    fn ask_interval_ns(&self) -> u64 {
        self.request.retries.ask_s.saturating_mul(SECOND_NS)
    }

    pub(super) fn ask(&mut self, host: &str, now_ns: u64) {
        let here = self.unsettled().filter(|(_, one)| one.planned.from == host);
        let commands = here.map(|(number, _)| self.command(number)).collect();
        let question = Question { at_ns: now_ns, last_number: self.last_number };
        self.volatile.asked.insert(host.to_owned(), question);
        self.volatile.out.push(EvacuationAction::AskFacts { host: host.to_owned(), commands });
    }

    /// Plans for the first time, once the facts about all hosts of the goal are known.
    fn start(&mut self, around: &Surroundings<'_>) {
        let is_known = |host: &String| self.volatile.fresh.contains(host);
        let has_ended = |id: &EvacuationId| {
            around.others.iter().any(|reservations| reservations.id == *id && !reservations.is_running)
        };
        let since_plan_ns = around.now_ns.saturating_sub(self.volatile.times.planned_ns);
        let is_time = since_plan_ns >= self.ask_interval_ns() || self.is_overdue(around);
        let is_due = (self.phase == EvacuationPhase::AsksFacts && is_time)
            || self.volatile.needs_plan
            || (self.waits_for.iter().any(has_ended) && is_time);
        if !is_due || !self.goal_hosts().iter().all(is_known) {
            return;
        }
        self.volatile.needs_plan = false;
        self.volatile.times.planned_ns = around.now_ns;
        self.list_vms(around.inventory);
        match self.first_plan(around) {
            Ok(found) => {
                self.phase = EvacuationPhase::Moves;
                self.waits_for.clear();
                self.report_plan(&found);
                self.adopt_plan(&found, around);
                self.report_blocked();
                self.go_on(around);
            }
            Err(NotNow::Waits(ids)) => {
                self.phase = EvacuationPhase::WaitsForEvacuation;
                if self.waits_for != ids {
                    self.waits_for.clone_from(&ids);
                    self.report(EvacuationReport::WaitsForEvacuation { ids });
                }
            }
            // Not a longer wait for others: this one is bounded.
            Err(NotNow::Refused(_)) if self.waits_for_connections(around) => {
                self.phase = EvacuationPhase::AsksFacts;
                self.waits_for.clear();
            }
            Err(NotNow::Refused(refusal)) => self.finish(EvacuationOutcome::Refused { refusal }, around),
        }
    }

    fn report_plan(&mut self, found: &PlacementPlan) {
        self.report(EvacuationReport::Planned {
            moves: found.moves.len() as u32,
            duration_ns: found.duration_ns,
            bytes: found.bytes,
        });
    }

    fn report_blocked(&mut self) {
        let blocked = self.vms.iter().filter_map(|(vm, record)| match &record.standing {
            VmStanding::Blocked { why } => Some((vm.clone(), why.clone())),
            _ => None,
        });
        for (vm, why) in blocked.collect::<Vec<_>>() {
            self.report(EvacuationReport::Blocked { vm, why });
        }
    }

    /// Cordons, plans anew if something has changed, and begins moves.
    fn go_on(&mut self, around: &Surroundings<'_>) {
        self.set_cordons(around);
        self.cancel_stuck(around);
        let since_plan_ns = around.now_ns.saturating_sub(self.volatile.times.planned_ns);
        let is_time = since_plan_ns >= self.ask_interval_ns();
        // Moves that were planned go on as planned; all else needs the facts about the hosts that are connected.
        let is_known = |host: &String| self.volatile.fresh.contains(host) || !around.connected.contains(host);
        let may_plan = self.goal_hosts().iter().all(is_known);
        let is_due = self.is_plan_broken(around) || (is_time && self.is_blocked_vm_due());
        if may_plan && is_due {
            self.plan_again(around);
        }
        let has_changed = self.begin_moves(around);
        if has_changed && may_plan && is_time {
            self.plan_again(around);
            self.begin_moves(around);
        }
    }

    /// Returns true if another plan may have a way for a VM for which the last one had none.
    fn is_blocked_vm_due(&self) -> bool {
        let is_due = |record: &VmRecord| match &record.standing {
            VmStanding::Blocked { why } if !record.has_given_up => {
                let is_moving = matches!(why, BlockedReason::NoPlan { .. }) && !why.is_final();
                self.volatile.needs_plan || is_moving
            }
            _ => false,
        };
        self.vms.values().any(is_due)
    }

    /// Returns true if hosts without connection may be about to connect: connections have changed a moment ago.
    pub(super) fn may_hosts_come(&self, around: &Surroundings<'_>) -> bool {
        let since_ns = around.now_ns.saturating_sub(self.volatile.times.connections_ns);
        let moment_ns = self.ask_interval_ns().saturating_mul(CONNECTION_INTERVALS);
        since_ns < moment_ns
            && around.inventory.hosts.iter().any(|spec| !around.connected.contains(&spec.name))
    }

    /// Returns true if a first plan may come with hosts that have no connection: they may be about to connect, or there
    /// would be a plan with them, and they are waited for as patiently as later.
    fn waits_for_connections(&self, around: &Surroundings<'_>) -> bool {
        let is_possible = || {
            let all = around.all_hosts();
            let found = self.first_plan(&Surroundings { connected: &all, ..*around });
            matches!(found, Ok(_) | Err(NotNow::Waits(_)))
        };
        self.may_hosts_come(around) || (!self.is_overdue(around) && is_possible())
    }

    /// Returns true if the plan lacks a VM that has to be moved, if one of its moves has failed, or if a target is lost.
    fn is_plan_broken(&self, around: &Surroundings<'_>) -> bool {
        let waiting = || self.queue.iter().filter(|queued| queued.number.is_none());
        let is_planned = |vm: &String| waiting().any(|queued| queued.planned.vm == *vm);
        let has_failed = |queued: &QueuedMove| {
            let record = queued.number.and_then(|number| self.moves.get(&number));
            record.is_some_and(|record| record.is_settled() && !record.has_moved())
        };
        let is_lost = |queued: &QueuedMove| !around.connected.contains(&queued.planned.to);
        let is_elsewhere = |at: usize| {
            let planned = &self.queue[at].planned;
            // A VM that has to step aside before is not there yet.
            let steps_aside = self.queue[..at].iter().any(|earlier| earlier.planned.vm == planned.vm);
            let record = self.vms.get(&planned.vm).filter(|_| !steps_aside);
            record.is_some_and(|record| {
                record.at != planned.from || matches!(record.standing, VmStanding::Gone)
            })
        };
        let mut places = (0..self.queue.len()).filter(|at| self.queue[*at].number.is_none());
        let lacks =
            |(vm, record): (&String, &VmRecord)| record.standing == VmStanding::Waiting && !is_planned(vm);
        self.vms.iter().any(lacks)
            || self.queue.iter().any(has_failed)
            || (!self.may_hosts_come(around) && waiting().any(is_lost))
            || places.any(is_elsewhere)
    }

    fn plan_again(&mut self, around: &Surroundings<'_>) {
        self.volatile.needs_plan = false;
        self.volatile.times.planned_ns = around.now_ns;
        self.volatile.waits.clear();
        self.list_vms(around.inventory);
        match self.plan_rest(around) {
            Ok(found) => self.adopt_plan(&found, around),
            Err(refusal) => self.block_all(&refusal, around),
        }
    }

    /// Cordons the hosts that are to be emptied, or lets the one accept VMs to which they return. After a restart the
    /// order may have been lost.
    fn set_cordons(&mut self, around: &Surroundings<'_>) {
        let is_return = matches!(self.request.goal, EvacuationGoal::Return { .. });
        for host in self.goal_hosts().to_vec() {
            let spec = around.inventory.hosts.iter().find(|spec| spec.name == host);
            let is_cordoned = spec.is_some_and(|spec| spec.cordoned);
            if is_cordoned != is_return || !self.note(HostNote::Cordoned(host.clone())) {
                continue;
            }
            if is_return {
                self.volatile.out.push(EvacuationAction::Uncordon { host });
            } else {
                self.cordoned.insert(host.clone());
                self.volatile.out.push(EvacuationAction::Cordon { host });
            }
        }
    }

    /// Cancels moves that have made no progress for too long.
    fn cancel_stuck(&mut self, around: &Surroundings<'_>) {
        let patience_ns = self.request.retries.patience_s.saturating_mul(SECOND_NS);
        let stuck = self.unsettled().filter(|(number, record)| {
            let is_cancellable = matches!(record.state, MoveState::Ordered | MoveState::Underway);
            let begun_ns = record.ordered_ns.max(self.volatile.times.since_ns);
            let since_ns = self.volatile.progress.get(number).map_or(begun_ns, |known| known.since_ns);
            let is_overdue = around.now_ns.saturating_sub(since_ns) >= patience_ns;
            is_cancellable && is_overdue && self.volatile.fresh.contains(&record.planned.from)
        });
        for number in stuck.map(|(number, _)| number).collect::<Vec<_>>() {
            self.cancel_move(number, around);
            // Its end, and the next attempt, have their own time. Each move is cancelled once.
            self.progressed(around.now_ns);
        }
    }

    pub(super) fn cancel_move(&mut self, number: u32, around: &Surroundings<'_>) {
        let command = self.command(number);
        let Some(record) = self.moves.get_mut(&number) else { return };
        record.state = MoveState::Cancelling;
        let from = record.planned.from.clone();
        self.volatile.orders.remove(&number);
        // Otherwise it is ordered when the agent has stated what it knows.
        if around.connected.contains(&from) && self.volatile.fresh.contains(&from) {
            self.volatile.out.push(EvacuationAction::CancelMove { command, from });
        }
    }

    /// Begins all moves that can begin. Returns true if the fleet has changed so that a planned one cannot.
    fn begin_moves(&mut self, around: &Surroundings<'_>) -> bool {
        let mut has_changed = false;
        if self.queue.iter().all(|queued| queued.number.is_some()) {
            self.volatile.waits.clear();
            return false;
        }
        let planned: Vec<QueuedMove> = self.queue.clone();
        let hosts: BTreeSet<&str> =
            planned.iter().flat_map(|queued| [queued.planned.from.as_str(), &queued.planned.to]).collect();
        let capacities = FleetView::new(self, around, OthersView::AsTheyAre, false).capacities(&hosts);
        for (at, queued) in planned.iter().enumerate().filter(|(_, queued)| queued.number.is_none()) {
            if let Some(reason) = self.wait_reason(queued, &capacities, around) {
                has_changed |= matches!(reason, WaitReason::Room { .. });
                self.volatile.waits.insert(at, reason);
            } else {
                self.volatile.waits.remove(&at);
                let link = link_between(&capacities, &queued.planned.from, &queued.planned.to);
                self.begin_move(at, queued, link, around.now_ns);
            }
        }
        has_changed
    }

    /// Returns what a move waits for; none if it can begin.
    fn wait_reason(
        &self,
        queued: &QueuedMove,
        capacities: &Capacities<'_>,
        around: &Surroundings<'_>,
    ) -> Option<WaitReason> {
        let planned = &queued.planned;
        let has_moved = |before: &&QueuedMove| {
            let record = before.number.and_then(|number| self.moves.get(&number));
            record.is_some_and(MoveRecord::has_moved)
        };
        let before = planned.waits_for.iter().filter_map(|before| self.queue.get(*before as usize));
        let missing: Vec<String> =
            before.filter(|before| !has_moved(before)).map(|before| before.planned.vm.clone()).collect();
        if !missing.is_empty() {
            return Some(WaitReason::Moves { vms: missing });
        }
        if self.unsettled_of(&planned.vm).is_some() {
            return Some(WaitReason::Moves { vms: vec![planned.vm.clone()] });
        }
        for (host, is_ready) in [
            (&planned.from, self.volatile.fresh.contains(&planned.from) || !self.is_goal_host(&planned.from)),
            (&planned.to, true),
        ] {
            if !is_ready || !around.connected.contains(host) {
                return Some(WaitReason::Host { host: host.clone() });
            }
        }
        let record = self.vms.get(&planned.vm);
        if let Some(until_ns) =
            record.map(|record| record.pause_until_ns).filter(|until| *until > around.now_ns)
        {
            return Some(WaitReason::Pause { until_ns });
        }
        let of_others = around.others.iter().flat_map(|reservations| &reservations.moves);
        let mut active: Vec<ActiveMove> = of_others.filter_map(|one| one.active.clone()).collect();
        active.extend(self.active_moves().map(|(_, one)| one));
        let candidate = MoveCandidate {
            from: &planned.from,
            to: &planned.to,
            priority: queued.priority,
            link_bytes_per_s: link_between(capacities, &planned.from, &planned.to),
        };
        obstacle_to_begin(candidate, &active, capacities, &self.request.limits)
            .or_else(|| self.obstacle_at_target(queued, around).map(|obstacle| WaitReason::Room { obstacle }))
    }

    fn is_goal_host(&self, host: &str) -> bool {
        self.goal_hosts().iter().any(|goal| goal == host)
    }

    /// Returns what keeps a VM from its next host as the fleet is now, which may have changed since the plan was made.
    fn obstacle_at_target(&self, queued: &QueuedMove, around: &Surroundings<'_>) -> Option<Obstacle> {
        let planned = &queued.planned;
        let view = FleetView::new(self, around, OthersView::AsTheyAre, false);
        let two = view.two_hosts(&planned.vm, &planned.from, &planned.to);
        let limits = &self.request.limits;
        let Ok(found) = matrix(&two, std::slice::from_ref(&planned.vm), limits.most_load_percent) else {
            return Some(Obstacle::NoLink);
        };
        // It is where the plan has it, or else the plan is out of date.
        let row = found.rows.into_iter().next().filter(|row| row.host == planned.from);
        let Some(row) = row else { return Some(Obstacle::IsMoving) };
        let cell = row.cells.into_iter().find(|cell| cell.host == planned.to);
        cell.map_or(Some(Obstacle::NoLink), |cell| cell.obstacles.into_iter().next())
    }

    fn begin_move(&mut self, at: usize, queued: &QueuedMove, link_bytes_per_s: u64, now_ns: u64) {
        self.last_number += 1;
        let number = self.last_number;
        let planned = queued.planned.clone();
        let record = MoveRecord {
            planned: planned.clone(),
            link_bytes_per_s,
            priority: queued.priority,
            ordered_ns: now_ns,
            appeared: false,
            state: MoveState::Ordered,
        };
        self.moves.insert(number, record);
        self.queue[at].number = Some(number);
        let vm = self.vms.entry(planned.vm.clone());
        vm.or_insert_with(|| VmRecord::new(&planned.from, VmStanding::Waiting)).standing =
            VmStanding::Moving { number };
        self.volatile.orders.insert(number);
        self.progressed(now_ns);
        self.report(EvacuationReport::MoveOrdered {
            command: self.command(number),
            vm: planned.vm,
            from: planned.from,
            to: planned.to,
            why: planned.why,
        });
    }

    /// Judges the deadline anew, and reports a changed judgement.
    pub(super) fn look_out(&mut self, around: &Surroundings<'_>) {
        use EvacuationPhase::{Moves, WaitsForEmpty, WaitsForEvacuation};
        if !matches!(self.phase, Moves | WaitsForEmpty | WaitsForEvacuation) {
            return;
        }
        self.volatile.needs_ns = self.needs(around).map(|(needs_ns, _)| needs_ns);
        let Some(standing) = self.deadline_standing(around) else { return };
        self.volatile.standing = Some(standing.clone());
        let has_changed = |before: &DeadlineStanding| {
            let step_ns = LATENESS_STEP_NS.max(before.late_by_ns / 5);
            before.judgement != standing.judgement
                || before.late_by_ns.abs_diff(standing.late_by_ns) >= step_ns
        };
        if self.deadline.as_ref().is_none_or(has_changed) {
            self.deadline = Some(standing.clone());
            self.report(EvacuationReport::Deadline { outlook: standing });
        }
    }
}
