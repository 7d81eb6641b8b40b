//! Ends of an evacuation: all hosts empty, something in the way, or cancelled.

use super::action::EvacuationAction;
use super::contents::{HostContents, Remaining};
use super::outcome::{BlockedReason, BlockedVm, EvacuationOutcome, RemainsOnHost};
use super::report::EvacuationReport;
use super::state::{Evacuation, EvacuationPhase, HostNote, MoveRecord, MoveState, VmStanding};
use super::surroundings::Surroundings;

const SECOND_NS: u64 = 1_000_000_000;
/// Time for which a cancelled evacuation waits for hosts without connection, in intervals of questions.
const LOST_INTERVALS: u64 = 6;

impl Evacuation {
    /// Ends the evacuation if its goal is reached, if nothing more can be done, or if nothing has progressed for too
    /// long.
    pub(super) fn check_end(&mut self, around: &Surroundings<'_>) {
        let is_overdue = self.is_overdue(around);
        match self.phase {
            EvacuationPhase::Finished => {}
            EvacuationPhase::Cancels => self.check_cancelled(is_overdue, around),
            // The other one ends in a bounded time.
            EvacuationPhase::WaitsForEvacuation => self.progressed(around.now_ns),
            EvacuationPhase::AsksFacts => {
                if is_overdue {
                    self.finish(self.incomplete(around), around);
                }
            }
            EvacuationPhase::Moves | EvacuationPhase::WaitsForEmpty => self.check_goal(is_overdue, around),
        }
    }

    /// Returns true if nothing has progressed for too long.
    pub(super) fn is_overdue(&self, around: &Surroundings<'_>) -> bool {
        let patience_ns = self.request.retries.patience_s.saturating_mul(SECOND_NS);
        around.now_ns.saturating_sub(self.volatile.times.progressed_ns) >= patience_ns
    }

    fn check_cancelled(&mut self, is_overdue: bool, around: &Surroundings<'_>) {
        let waited_ns = around.now_ns.saturating_sub(self.volatile.times.progressed_ns);
        // A host that is lost may come back, and after a restart all have to.
        let is_late = waited_ns >= self.request.retries.ask_s.saturating_mul(LOST_INTERVALS * SECOND_NS);
        let can_settle = |host: &String| !is_late || around.connected.contains(host);
        let settles =
            |(_, record): (u32, &MoveRecord)| record.is_active() && can_settle(&record.planned.from);
        if is_overdue || !self.unsettled().any(settles) {
            let unsettled =
                self.unsettled().map(|(_, record)| blocked_by_move(&record.planned.vm, record, around));
            let outcome =
                EvacuationOutcome::Cancelled { moved: self.moved_count(), unsettled: unsettled.collect() };
            self.finish(outcome, around);
        }
    }

    fn check_goal(&mut self, is_overdue: bool, around: &Surroundings<'_>) {
        let waits =
            |standing: &VmStanding| matches!(standing, VmStanding::Waiting | VmStanding::Moving { .. });
        let is_blocked = |standing: &VmStanding| matches!(standing, VmStanding::Blocked { .. });
        let waiting = self.vms.values().filter(|record| waits(&record.standing)).count();
        let has_blocked = self.vms.values().any(|record| is_blocked(&record.standing));
        let is_queue_done = self.queue.iter().all(|queued| queued.number.is_some());
        if waiting > 0 || !is_queue_done {
            if is_overdue {
                self.finish(self.incomplete(around), around);
            }
            return;
        }
        if self.phase == EvacuationPhase::Moves && !has_blocked {
            self.phase = EvacuationPhase::WaitsForEmpty;
        } else if has_blocked {
            self.phase = EvacuationPhase::Moves;
        }
        self.ask_about_rest(around);
        let hosts = self.hosts_that_remain(around);
        let is_known = hosts.iter().all(|host| host.remaining.is_some());
        if !has_blocked && hosts.is_empty() {
            let late_by_ns = self.request.deadline_ns.and_then(|at| around.now_ns.checked_sub(at));
            let late_by_ns = late_by_ns.filter(|late| *late > 0);
            self.finish(EvacuationOutcome::Done { moved: self.moved_count(), late_by_ns }, around);
            return;
        }
        let may_change = |standing: &VmStanding| match standing {
            VmStanding::Blocked { why } => !why.is_final(),
            _ => false,
        };
        let blocked_waits = self.vms.values().any(|record| may_change(&record.standing));
        let blocked_waits = blocked_waits || (has_blocked && self.may_hosts_come(around));
        let others_run = has_blocked && around.others.iter().any(|reservations| reservations.is_running);
        let remaining = hosts.iter().filter_map(|host| host.remaining.as_ref()).flatten();
        let blocked_vms: Vec<&String> =
            self.vms.iter().filter(|(_, record)| is_blocked(&record.standing)).map(|(vm, _)| vm).collect();
        let mut rest = remaining.filter(|one| match one {
            Remaining::Vm { vm } => !blocked_vms.contains(&vm),
            _ => true,
        });
        let rest_ends = rest.any(Remaining::ends_by_itself);
        if is_overdue || (is_known && !blocked_waits && !others_run && !rest_ends) {
            self.finish(self.incomplete(around), around);
        }
    }

    /// Asks hosts again of which all VMs have left, until nothing remains.
    fn ask_about_rest(&mut self, around: &Surroundings<'_>) {
        let interval_ns = self.request.retries.ask_s.saturating_mul(SECOND_NS);
        for host in self.request.goal.emptied().to_vec() {
            let answered_ns = self.volatile.answered.get(&host).copied().unwrap_or(0);
            let remaining = self.volatile.contents.get(&host).map(HostContents::what_remains);
            // Without contents, its facts are older than the last move.
            let is_due = remaining.is_none() || around.now_ns.saturating_sub(answered_ns) >= interval_ns;
            let is_asked = self.volatile.asked.contains_key(&host);
            if is_due && !is_asked && around.connected.contains(&host) {
                self.ask(&host, around.now_ns);
            }
            let Some(remaining) = remaining else { continue };
            if remaining.is_empty() {
                if self.note(HostNote::Empty(host.clone())) {
                    self.report(EvacuationReport::HostEmpty { host });
                }
                continue;
            }
            self.volatile.notes.remove(&HostNote::Empty(host.clone()));
            let is_news = self.phase == EvacuationPhase::WaitsForEmpty;
            if is_news && self.note(HostNote::Remains(host.clone())) {
                self.report(EvacuationReport::Remains { host, remaining });
            }
        }
    }

    /// Returns what remains on hosts that should be empty: all that are not known to be empty.
    fn hosts_that_remain(&self, around: &Surroundings<'_>) -> Vec<RemainsOnHost> {
        let hosts = self.request.goal.emptied().iter().map(|host| {
            let contents = self.volatile.contents.get(host).filter(|_| around.connected.contains(host));
            RemainsOnHost { host: host.clone(), remaining: contents.map(HostContents::what_remains) }
        });
        hosts.filter(|host| host.remaining.as_ref().is_none_or(|remaining| !remaining.is_empty())).collect()
    }

    /// Returns the VMs that are not where they should be, and why.
    pub(super) fn blocked_vms(&self, around: &Surroundings<'_>) -> Vec<BlockedVm> {
        let blocked = self.vms.iter().filter_map(|(vm, record)| {
            if let Some((_, one)) = self.unsettled_of(vm) {
                return Some(blocked_by_move(vm, one, around));
            }
            let why = match &record.standing {
                VmStanding::Blocked { why } => why.clone(),
                VmStanding::Waiting => {
                    let queued = self.queue.iter().find(|queued| queued.planned.vm == *vm);
                    let of_move =
                        queued.into_iter().flat_map(|queued| [&queued.planned.from, &queued.planned.to]);
                    let lost = [&record.at]
                        .into_iter()
                        .chain(of_move)
                        .find(|host| !around.connected.contains(*host));
                    match (lost, queued) {
                        (Some(host), _) => BlockedReason::HostLost { host: host.clone() },
                        (None, Some(queued)) => BlockedReason::StillMoving { to: queued.planned.to.clone() },
                        (None, None) => return None,
                    }
                }
                VmStanding::Moving { .. } | VmStanding::Arrived | VmStanding::Gone => return None,
            };
            Some(BlockedVm { vm: vm.clone(), host: record.at.clone(), why })
        });
        blocked.collect()
    }

    fn incomplete(&self, around: &Surroundings<'_>) -> EvacuationOutcome {
        EvacuationOutcome::Incomplete { vms: self.blocked_vms(around), hosts: self.hosts_that_remain(around) }
    }

    /// Ends the evacuation. Moves under way are cancelled: nothing of it goes on afterwards.
    pub(super) fn finish(&mut self, outcome: EvacuationOutcome, around: &Surroundings<'_>) {
        let cancellable = self
            .unsettled()
            .filter(|(_, record)| matches!(record.state, MoveState::Ordered | MoveState::Underway));
        for number in cancellable.map(|(number, _)| number).collect::<Vec<_>>() {
            self.cancel_move(number, around);
        }
        if matches!(outcome, EvacuationOutcome::Cancelled { .. }) {
            for host in std::mem::take(&mut self.cordoned) {
                self.volatile.out.push(EvacuationAction::Uncordon { host });
            }
        }
        self.phase = EvacuationPhase::Finished;
        self.queue.clear();
        self.waits_for.clear();
        self.volatile.waits.clear();
        self.outcome = Some(outcome.clone());
        self.volatile.out.push(EvacuationAction::Finished { evacuation: self.id.clone(), outcome });
    }
}

/// Describes a VM that stays because of its last move.
fn blocked_by_move(vm: &str, record: &MoveRecord, around: &Surroundings<'_>) -> BlockedVm {
    let planned = &record.planned;
    let why = match &record.state {
        MoveState::InDoubt { reason } => {
            BlockedReason::InDoubt { to: planned.to.clone(), reason: reason.clone() }
        }
        _ if !around.connected.contains(&planned.from) => {
            BlockedReason::HostLost { host: planned.from.clone() }
        }
        _ => BlockedReason::StillMoving { to: planned.to.clone() },
    };
    BlockedVm { vm: vm.to_owned(), host: planned.from.clone(), why }
}
