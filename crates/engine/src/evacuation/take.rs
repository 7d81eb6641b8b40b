//! Events, as one evacuation takes them: they change what it knows, and order nothing new.

use std::collections::BTreeSet;

use super::action::EvacuationAction;
use super::command::{CommandId, CommandState, MoveEnd, MoveFailure, MoveProgress};
use super::contents::Remaining;
use super::event::{EvacuationEvent, HostFacts};
use super::outcome::BlockedReason;
use super::report::EvacuationReport;
use super::request::EvacuationGoal;
use super::state::{
    Departure, Evacuation, EvacuationPhase, HostNote, KnownProgress, MoveState, VmRecord, VmStanding,
    Volatile,
};

impl Evacuation {
    /// Takes an event. `connected` has the hosts that are connected after it.
    pub(super) fn take(&mut self, event: &EvacuationEvent, connected: &BTreeSet<String>, now_ns: u64) {
        match event {
            EvacuationEvent::Restarted => {
                self.volatile = Volatile::since(now_ns);
                self.volatile.times.connections_ns = now_ns;
                if !self.is_finished() {
                    self.report(EvacuationReport::Restarted);
                }
            }
            EvacuationEvent::HostConnected { host } => self.take_connection(host, now_ns),
            EvacuationEvent::HostLost { host } => self.take_loss(host, now_ns),
            EvacuationEvent::Facts { facts } => self.take_facts(facts, connected, now_ns),
            EvacuationEvent::MoveStarted { command } => self.take_start(command, None, now_ns),
            EvacuationEvent::MoveProgressed { command, progress } => {
                self.take_start(command, Some(*progress), now_ns);
            }
            EvacuationEvent::MoveEnded { command, end } => {
                if command.evacuation == self.id {
                    self.end_move(command.number, end, now_ns);
                }
                // Others may wait for the room.
                self.volatile.needs_plan = true;
            }
            EvacuationEvent::VmAppeared { vm, host } => self.take_appearance(vm, host, connected, now_ns),
            EvacuationEvent::VmVanished { vm, host } => self.take_vanishing(vm, host),
            EvacuationEvent::ContentsChanged { contents } => {
                if self.volatile.fresh.contains(&contents.host) {
                    self.volatile.contents.insert(contents.host.clone(), contents.clone());
                }
            }
            EvacuationEvent::Tick => {}
        }
    }

    pub(super) fn progressed(&mut self, now_ns: u64) {
        self.volatile.times.progressed_ns = now_ns;
    }

    /// Returns true if the evacuation depends on a host.
    fn needs_host(&self, host: &str) -> bool {
        let planned =
            self.queue.iter().filter(|queued| queued.number.is_none()).map(|queued| &queued.planned);
        let ordered = self.unsettled().map(|(_, one)| &one.planned);
        self.goal_hosts().iter().any(|name| name == host)
            || planned.chain(ordered).any(|one| one.from == host || one.to == host)
    }

    fn forget_host(&mut self, host: &str) {
        self.volatile.fresh.remove(host);
        self.volatile.asked.remove(host);
        self.volatile.contents.remove(host);
        self.volatile.needs_plan = true;
    }

    fn take_connection(&mut self, host: &str, now_ns: u64) {
        self.volatile.times.connections_ns = now_ns;
        // A new connection: what was answered over the old one may be out of date, and no progress was reported.
        self.forget_host(host);
        for (number, known) in &mut self.volatile.progress {
            if self.moves.get(number).is_some_and(|one| one.planned.from == host) {
                known.since_ns = now_ns;
            }
        }
        if self.volatile.notes.remove(&HostNote::Lost(host.to_owned())) {
            self.report(EvacuationReport::HostBack { host: host.to_owned() });
        }
    }

    fn take_loss(&mut self, host: &str, now_ns: u64) {
        self.volatile.times.connections_ns = now_ns;
        self.forget_host(host);
        if self.needs_host(host) && !self.is_finished() && self.note(HostNote::Lost(host.to_owned())) {
            self.report(EvacuationReport::HostLost { host: host.to_owned() });
        }
        // The source cannot report the end any longer, and the destination has reported that it has the VM.
        let arrived = self.unsettled().filter(|(_, one)| one.planned.from == host && one.appeared);
        for number in arrived.map(|(number, _)| number).collect::<Vec<_>>() {
            self.end_move(number, &MoveEnd::Moved, now_ns);
        }
    }

    fn take_start(&mut self, command: &CommandId, progress: Option<MoveProgress>, now_ns: u64) {
        if command.evacuation != self.id {
            return;
        }
        let Some(one) = self.moves.get_mut(&command.number).filter(|one| one.is_active()) else { return };
        if one.state == MoveState::Ordered {
            one.state = MoveState::Underway;
        }
        // The first sign of it, also after a restart: otherwise the evacuation would end before the move counts as stuck.
        if !self.volatile.progress.contains_key(&command.number) {
            self.progressed(now_ns);
        }
        let known = self.volatile.progress.entry(command.number).or_insert(KnownProgress {
            last: None,
            least_left: u64::MAX,
            since_ns: now_ns,
        });
        let Some(progress) = progress else { return };
        // Few bytes are left at the end of each round, and later rounds seldom have fewer.
        let goes_on = known
            .last
            .is_none_or(|last| (last.sent_bytes, last.phase) != (progress.sent_bytes, progress.phase));
        known.last = Some(progress);
        if goes_on || progress.bytes_left < known.least_left {
            known.least_left = known.least_left.min(progress.bytes_left);
            known.since_ns = now_ns;
            self.progressed(now_ns);
        }
    }

    fn take_facts(&mut self, facts: &HostFacts, connected: &BTreeSet<String>, now_ns: u64) {
        let host = &facts.host;
        // An answer that comes over a connection that has ended answers no question.
        let Some(question) = self.volatile.asked.get(host).copied().filter(|_| connected.contains(host))
        else {
            return;
        };
        let here = self.unsettled().filter(|(_, one)| one.planned.from == *host);
        let numbers: Vec<u32> = here.map(|(number, _)| number).collect();
        let mut is_complete = true;
        for number in numbers {
            match facts.commands.get(&self.command(number)) {
                Some(state) => self.take_command_state(number, state, now_ns),
                None => is_complete &= number > question.last_number,
            }
        }
        // Otherwise it is asked again after a while.
        if !is_complete {
            return;
        }
        self.volatile.asked.remove(host);
        self.volatile.fresh.insert(host.clone());
        self.volatile.answered.insert(host.clone(), now_ns);
        self.volatile.contents.insert(host.clone(), facts.contents.clone());
        self.volatile.needs_plan = true;
        let is_missing = |record: &VmRecord| {
            let waits = matches!(record.standing, VmStanding::Waiting | VmStanding::Blocked { .. });
            waits && record.at == *host
        };
        let missing = self.vms.iter().filter(|(vm, record)| is_missing(record) && !facts.vms.contains(*vm));
        for vm in missing.map(|(vm, _)| vm.clone()).collect::<Vec<_>>() {
            self.take_vanishing(&vm, host);
        }
        for vm in &facts.vms {
            self.take_appearance(vm, host, connected, now_ns);
        }
        self.warn_of_services(host);
    }

    /// Reports once, at the first facts, what will keep a host from being empty although all VMs leave it.
    fn warn_of_services(&mut self, host: &str) {
        let Some(contents) = self.volatile.contents.get(host).filter(|_| self.is_emptied(host)) else {
            return;
        };
        let mut remaining = contents.what_remains();
        remaining.retain(|one| !one.ends_by_itself() && !matches!(one, Remaining::Vm { .. }));
        if !remaining.is_empty() && !self.is_finished() && self.note(HostNote::Services(host.to_owned())) {
            self.report(EvacuationReport::Remains { host: host.to_owned(), remaining });
        }
    }

    fn take_command_state(&mut self, number: u32, state: &CommandState, now_ns: u64) {
        let Some(one) = self.moves.get(&number) else { return };
        match state {
            CommandState::Ended { end } => self.end_move(number, end, now_ns),
            _ if one.state == MoveState::Cancelling => {
                // The order to cancel may have been lost.
                let (command, from) = (self.command(number), one.planned.from.clone());
                self.volatile.out.push(EvacuationAction::CancelMove { command, from });
            }
            // In doubt, and the journal knows nothing of it: it stays in doubt.
            CommandState::Unknown if one.is_in_doubt() => {}
            CommandState::Unknown => {
                self.volatile.orders.insert(number);
            }
            CommandState::Underway { progress } => {
                let reported = self.moves.get_mut(&number).filter(|one| one.is_in_doubt());
                if let Some(one) = reported {
                    one.state = MoveState::Underway;
                }
                self.take_start(&self.command(number), *progress, now_ns);
                // The agent may have missed a rate.
                self.volatile.rates.remove(&number);
            }
        }
    }

    pub(super) fn take_appearance(
        &mut self,
        vm: &str,
        host: &str,
        connected: &BTreeSet<String>,
        now_ns: u64,
    ) {
        if let Some((number, one)) = self.unsettled_of(vm) {
            if one.planned.to != host {
                return;
            }
            let is_source_lost = !connected.contains(&one.planned.from);
            if let Some(one) = self.moves.get_mut(&number) {
                one.appeared = true;
            }
            if is_source_lost {
                self.end_move(number, &MoveEnd::Moved, now_ns);
            }
            return;
        }
        if self.is_finished() {
            return;
        }
        let (is_in_place, is_emptied) = (self.is_in_place(vm, host), self.is_emptied(host));
        match self.vms.get_mut(vm) {
            Some(record) if record.at == host && record.standing != VmStanding::Gone => {}
            Some(record) => {
                let was_waiting = matches!(record.standing, VmStanding::Waiting | VmStanding::Blocked { .. });
                let before = std::mem::replace(&mut record.at, host.to_owned());
                record.left = None;
                if !is_in_place {
                    record.start_afresh();
                    self.report(EvacuationReport::VmAppeared { vm: vm.to_owned(), host: host.to_owned() });
                } else if was_waiting {
                    record.standing = match &self.request.goal {
                        EvacuationGoal::Return { .. } => VmStanding::Arrived,
                        EvacuationGoal::Empty { .. } => VmStanding::Gone,
                    };
                    self.report(EvacuationReport::VmVanished { vm: vm.to_owned(), host: before });
                }
                self.volatile.needs_plan = true;
            }
            None if is_emptied => {
                self.vms.insert(vm.to_owned(), VmRecord::new(host, VmStanding::Waiting));
                if self.has_begun() {
                    self.report(EvacuationReport::VmAppeared { vm: vm.to_owned(), host: host.to_owned() });
                }
                self.volatile.needs_plan = true;
            }
            None => {}
        }
    }

    fn take_vanishing(&mut self, vm: &str, host: &str) {
        if self.unsettled_of(vm).is_some() || self.is_finished() {
            return;
        }
        let Some(record) = self.vms.get_mut(vm).filter(|record| record.at == host) else { return };
        if matches!(record.standing, VmStanding::Waiting | VmStanding::Blocked { .. }) {
            record.standing = VmStanding::Gone;
            self.volatile.needs_plan = true;
            self.report(EvacuationReport::VmVanished { vm: vm.to_owned(), host: host.to_owned() });
        }
    }

    /// Records the end of a move, once: a repeated end changes nothing.
    fn end_move(&mut self, number: u32, end: &MoveEnd, now_ns: u64) {
        let is_running = self.phase != EvacuationPhase::Cancels && !self.is_finished();
        let Some(one) = self.moves.get_mut(&number) else { return };
        let (vm, to, from) = (one.planned.vm.clone(), one.planned.to.clone(), one.planned.from.clone());
        if let MoveState::Ended { end: before, .. } = &one.state {
            if before != end {
                let text = format!("{before:?}, then {end:?}");
                self.take_contradiction(number, text, [&from, &to]);
            }
            return;
        }
        if let MoveEnd::InDoubt { reason } = end {
            if !one.is_in_doubt() {
                one.state = MoveState::InDoubt { reason: reason.clone() };
                let why = BlockedReason::InDoubt { to, reason: reason.clone() };
                self.report(EvacuationReport::Blocked { vm, why });
            }
            return;
        }
        let was_in_doubt = one.is_in_doubt();
        let was_cancelled = one.state == MoveState::Cancelling;
        let took_ns = now_ns.saturating_sub(one.ordered_ns);
        one.state = MoveState::Ended { end: end.clone(), at_ns: now_ns };
        self.volatile.progress.remove(&number);
        self.volatile.rates.remove(&number);
        self.volatile.orders.remove(&number);
        self.volatile.needs_plan = true;
        self.progressed(now_ns);
        if was_in_doubt {
            let host = if *end == MoveEnd::Moved { to.clone() } else { from.clone() };
            self.report(EvacuationReport::DoubtEnded { vm: vm.clone(), host });
        }
        match end {
            MoveEnd::Moved => self.arrive(&vm, &from, &to, took_ns, now_ns),
            MoveEnd::VmEnded => {
                self.vms
                    .entry(vm.clone())
                    .or_insert_with(|| VmRecord::new(&from, VmStanding::Gone))
                    .standing = VmStanding::Gone;
                self.report(EvacuationReport::VmVanished { vm, host: from });
            }
            MoveEnd::Cancelled if was_cancelled && !is_running => self.wait_again(&vm),
            MoveEnd::Cancelled => {
                let (kind, reason) = if was_cancelled {
                    (MoveFailure::NotConverging, "it made no progress, and was cancelled")
                } else {
                    (MoveFailure::Other, "another request has cancelled it")
                };
                self.fail(&vm, &to, kind, reason, now_ns);
            }
            MoveEnd::Failed { kind, reason } => self.fail(&vm, &to, *kind, reason, now_ns),
            MoveEnd::InDoubt { .. } => {}
        }
    }

    fn take_contradiction(&mut self, number: u32, text: String, hosts: [&str; 2]) {
        for host in hosts {
            self.forget_host(host);
        }
        let command = self.command(number);
        self.report(EvacuationReport::Contradiction { command, text });
    }

    fn wait_again(&mut self, vm: &str) {
        let at = self.vms.get(vm).map(|record| record.at.clone()).unwrap_or_default();
        let is_in_place = self.is_in_place(vm, &at);
        if let Some(record) = self.vms.get_mut(vm) {
            record.standing = if is_in_place { VmStanding::Arrived } else { VmStanding::Waiting };
        }
    }

    /// Records that a VM has arrived.
    fn arrive(&mut self, vm: &str, from: &str, to: &str, took_ns: u64, now_ns: u64) {
        let is_in_place = self.is_in_place(vm, to);
        let record = self.vms.entry(vm.to_owned()).or_insert_with(|| VmRecord::new(to, VmStanding::Waiting));
        record.start_afresh();
        to.clone_into(&mut record.at);
        record.left = Some(from.to_owned());
        if is_in_place {
            record.standing = VmStanding::Arrived;
        }
        // Its contents have changed.
        self.volatile.contents.remove(from);
        let is_emptied = self.is_emptied(from);
        match self.departures.iter_mut().find(|departure| departure.vm == vm) {
            Some(departure) => {
                to.clone_into(&mut departure.to);
                departure.at_ns = now_ns;
            }
            None if is_emptied => self.departures.push(Departure {
                vm: vm.to_owned(),
                from: from.to_owned(),
                to: to.to_owned(),
                at_ns: now_ns,
            }),
            None => {}
        }
        self.report(EvacuationReport::Moved { vm: vm.to_owned(), to: to.to_owned(), took_ns });
    }

    /// Records a failed attempt, and decides about the next one.
    fn fail(&mut self, vm: &str, to: &str, kind: MoveFailure, reason: &str, now_ns: u64) {
        let retries = self.request.retries;
        let is_over = self.is_finished() || self.phase == EvacuationPhase::Cancels;
        let at = self.vms.get(vm).map(|record| record.at.clone()).unwrap_or_default();
        // It was to make room, or to step aside.
        let is_in_place = self.is_in_place(vm, &at);
        let Some(record) = self.vms.get_mut(vm) else { return };
        record.attempts += 1;
        record.failed_at = Some(to.to_owned());
        if kind == MoveFailure::Refused {
            record.refused_by.insert(to.to_owned(), reason.to_owned());
        }
        let why = match kind {
            MoveFailure::Immovable => Some(BlockedReason::Immovable { reason: reason.to_owned() }),
            _ if record.attempts >= retries.attempts => {
                Some(BlockedReason::Failed { attempts: record.attempts, reason: reason.to_owned() })
            }
            _ => None,
        };
        let doublings = (record.attempts - 1).min(16);
        let pause_ns = retries.pause_s.saturating_mul(1_000_000_000).saturating_mul(1 << doublings);
        record.pause_until_ns = now_ns.saturating_add(pause_ns);
        let next_in_ns = (why.is_none() && !is_over).then_some(pause_ns);
        record.has_given_up = why.is_some();
        record.standing = if is_in_place { VmStanding::Arrived } else { VmStanding::Waiting };
        let (vm, to, reason) = (vm.to_owned(), to.to_owned(), reason.to_owned());
        self.report(EvacuationReport::MoveFailed { vm: vm.clone(), to, reason, next_in_ns });
        if let Some(why) = why {
            if let Some(record) = self.vms.get_mut(&vm).filter(|_| !is_in_place) {
                record.standing = VmStanding::Blocked { why: why.clone() };
            }
            self.report(EvacuationReport::Blocked { vm, why });
        }
    }
}
