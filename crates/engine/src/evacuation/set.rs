//! All evacuations of a controller: each takes what concerns it, sees what the others reserved, and shares links with
//! them.

use std::collections::{BTreeMap, BTreeSet};

use super::action::EvacuationAction;
use super::bandwidth::rates;
use super::command::{CommandId, EvacuationId};
use super::event::EvacuationEvent;
use super::outcome::{EvacuationOutcome, EvacuationRefusal};
use super::planning::NotNow;
use super::report::EvacuationReport;
use super::request::{EvacuationGoal, EvacuationRequest, RetryLimits};
use super::state::{Evacuation, EvacuationPhase, MoveRecord, MoveState, VmStanding, Volatile};
use super::status::EvacuationPlan;
use super::surroundings::{OthersView, Reservations, Surroundings, links_of};
use crate::planner::{Inventory, MoveLimits, Refusal};

/// All evacuations of a controller.
#[derive(Clone, Debug, Default)]
pub struct Evacuations {
    /// In the order in which they began.
    list: Vec<Evacuation>,
    connected: BTreeSet<String>,
}

/// Result of a call: what to store, and what to do.
///
/// The controller first stores all evacuations that have changed, and then carries out the actions in their order. If it
/// acted first, a restarted controller could give the id of a command to another move.
#[must_use]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvacuationStep {
    /// Evacuations that have changed.
    pub changed: Vec<EvacuationId>,
    /// Actions.
    pub actions: Vec<EvacuationAction>,
}

/// Occasion on which evacuations decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Occasion {
    /// Time has passed, or a user has decided: all of them decide, and look out.
    Decision,
    /// Something has happened: all of them decide.
    Change,
    /// A fleet has many of these events: only those decide that have changed by it.
    Progress,
}

impl Occasion {
    fn of(event: &EvacuationEvent) -> Self {
        match event {
            EvacuationEvent::Tick => Self::Decision,
            EvacuationEvent::Restarted
            | EvacuationEvent::HostConnected { .. }
            | EvacuationEvent::HostLost { .. }
            | EvacuationEvent::Facts { .. }
            | EvacuationEvent::MoveEnded { .. }
            | EvacuationEvent::ContentsChanged { .. } => Self::Change,
            EvacuationEvent::MoveStarted { .. }
            | EvacuationEvent::MoveProgressed { .. }
            | EvacuationEvent::VmAppeared { .. }
            | EvacuationEvent::VmVanished { .. } => Self::Progress,
        }
    }
}

impl Evacuations {
    /// Returns evacuations as they were stored. [`EvacuationEvent::Restarted`] and the connections of agents have to
    /// follow; nothing is ordered before.
    pub fn restore(stored: Vec<Evacuation>) -> Self {
        let mut list = stored;
        list.sort_by(|one, other| (one.begun_ns, &one.id).cmp(&(other.begun_ns, &other.id)));
        Self { list, connected: BTreeSet::new() }
    }

    /// Lets all evacuations use only larger numbers for their next commands. Records that were restored from a backup
    /// may lack commands that agents have journaled.
    pub fn skip_numbers(&mut self, last: u32) {
        for one in &mut self.list {
            one.last_number = one.last_number.max(last);
        }
    }

    /// Returns the host to whose agent a command was sent; none for a command that is not known.
    pub fn source_of(&self, command: &CommandId) -> Option<&str> {
        let record = self.get(&command.evacuation)?.moves.get(&command.number)?;
        Some(&record.planned.from)
    }

    /// Returns an evacuation that has not ended, and is about a host: that is to be emptied or filled, or a move from or
    /// to it has not ended.
    pub fn evacuation_with(&self, host: &str) -> Option<&EvacuationId> {
        let found = self.list.iter().filter(|one| !one.is_finished()).find(|one| {
            one.goal_hosts().iter().any(|goal| goal == host)
                || one.unsettled().any(|(_, record)| record.planned.from == host || record.planned.to == host)
        });
        found.map(|one| &one.id)
    }

    /// Returns the latest time in the records of evacuations; 0 if there are none. Later events have later times.
    pub fn latest_ns(&self) -> u64 {
        let of_move = |record: &MoveRecord| match record.state {
            MoveState::Ended { at_ns, .. } => at_ns.max(record.ordered_ns),
            _ => record.ordered_ns,
        };
        let times = |one: &Evacuation| one.moves.values().map(of_move).max().unwrap_or(0).max(one.begun_ns);
        self.list.iter().map(times).max().unwrap_or(0)
    }

    /// Returns an evacuation.
    pub fn get(&self, id: &EvacuationId) -> Option<&Evacuation> {
        self.list.iter().find(|one| one.id == *id)
    }

    /// Returns all evacuations, in the order in which they began.
    pub fn iter(&self) -> impl Iterator<Item = &Evacuation> {
        self.list.iter()
    }

    /// Returns the plan that a request would have now, explained; or why it would be refused. Changes nothing.
    pub fn preview(
        &self,
        request: &EvacuationRequest,
        inventory: &Inventory,
        now_ns: u64,
    ) -> Result<EvacuationPlan, EvacuationRefusal> {
        self.check(request, inventory)?;
        let id = EvacuationId("preview".to_owned());
        let mut one = Evacuation::new(id, request.clone(), now_ns);
        // It comes after all others.
        one.begun_ns = u64::MAX;
        one.list_vms(inventory);
        let others: Vec<Reservations> = self.list.iter().map(|other| Reservations::of(other, &one)).collect();
        let around = Surroundings { inventory, connected: &self.connected, others: &others, now_ns };
        let (plan, waits_for) = match one.first_plan(&around) {
            Ok(plan) => (plan, Vec::new()),
            Err(NotNow::Refused(refusal)) => return Err(refusal),
            Err(NotNow::Waits(ids)) => {
                let plan = one.plan_beside(&around, OthersView::Ended, !request.partial);
                (plan.map_err(|refusal| EvacuationRefusal::Plan { refusal })?, ids)
            }
        };
        one.adopt_plan(&plan, &around);
        let deadline = one.deadline_standing(&around);
        Ok(EvacuationPlan { plan, moves: one.explain(), deadline, waits_for })
    }

    /// Begins an evacuation: asks its hosts for facts, and plans and acts once they are known. The same request again
    /// changes nothing.
    pub fn begin(
        &mut self,
        id: EvacuationId,
        request: EvacuationRequest,
        inventory: &Inventory,
        now_ns: u64,
    ) -> Result<EvacuationStep, EvacuationRefusal> {
        if let Some(known) = self.get(&id) {
            if known.request == request {
                return Ok(EvacuationStep::default());
            }
            return Err(EvacuationRefusal::WrongState { id, state: "has another request".to_owned() });
        }
        self.preview(&request, inventory, now_ns)?;
        // Times order evacuations, also if the clock has gone back.
        let last_ns = self.list.last().map_or(0, |one| one.begun_ns);
        let mut one = Evacuation::new(id.clone(), request, now_ns);
        one.begun_ns = now_ns.max(last_ns.saturating_add(1));
        self.list.push(one);
        let mut step = self.step(&BTreeMap::new(), inventory, now_ns, Occasion::Decision);
        if !step.changed.contains(&id) {
            step.changed.push(id);
        }
        Ok(step)
    }

    /// Cancels an evacuation: moves under way are cancelled, and VMs stay where they are then.
    pub fn cancel(
        &mut self,
        id: &EvacuationId,
        inventory: &Inventory,
        now_ns: u64,
    ) -> Result<EvacuationStep, EvacuationRefusal> {
        let at = self.position(id)?;
        if self.list[at].is_finished() {
            return Err(EvacuationRefusal::WrongState { id: id.clone(), state: "has ended".to_owned() });
        }
        let before = self.before();
        let others = self.reservations(at);
        let around = Surroundings { inventory, connected: &self.connected, others: &others, now_ns };
        let one = &mut self.list[at];
        one.phase = EvacuationPhase::Cancels;
        one.queue.clear();
        one.waits_for.clear();
        one.progressed(now_ns);
        one.report(EvacuationReport::Cancelled);
        let active = one.unsettled().filter(|(_, record)| record.is_active());
        for number in active.map(|(number, _)| number).collect::<Vec<_>>() {
            one.cancel_move(number, &around);
        }
        Ok(self.step(&before, inventory, now_ns, Occasion::Decision))
    }

    /// Resumes an evacuation that was cancelled, or is incomplete. All attempts are allowed again.
    pub fn resume(
        &mut self,
        id: &EvacuationId,
        inventory: &Inventory,
        now_ns: u64,
    ) -> Result<EvacuationStep, EvacuationRefusal> {
        let at = self.position(id)?;
        let wrong = |state: &str| EvacuationRefusal::WrongState { id: id.clone(), state: state.to_owned() };
        match &self.list[at].outcome {
            None => return Err(wrong("is running")),
            Some(EvacuationOutcome::Done { .. }) => return Err(wrong("is done")),
            Some(EvacuationOutcome::Refused { .. }) => return Err(wrong("was refused")),
            Some(EvacuationOutcome::Incomplete { .. } | EvacuationOutcome::Cancelled { .. }) => {}
        }
        self.check(&self.list[at].request, inventory)?;
        let before = self.before_all(at);
        let one = &mut self.list[at];
        one.forget_old_places(inventory);
        for record in one.vms.values_mut() {
            if matches!(record.standing, VmStanding::Waiting | VmStanding::Blocked { .. }) {
                record.start_afresh();
            }
        }
        one.phase = EvacuationPhase::AsksFacts;
        one.outcome = None;
        one.deadline = None;
        one.volatile = Volatile::since(now_ns);
        one.report(EvacuationReport::Resumed);
        Ok(self.step(&before, inventory, now_ns, Occasion::Decision))
    }

    /// Returns the request that brings back what has left a host.
    pub fn return_request(
        &self,
        host: &str,
        inventory: &Inventory,
    ) -> Result<EvacuationRequest, EvacuationRefusal> {
        let left =
            self.list.iter().flat_map(|one| &one.departures).filter(|departure| departure.from == host);
        let left: BTreeSet<&str> = left.map(|departure| departure.vm.as_str()).collect();
        let elsewhere = inventory.vms.iter().filter(|spec| spec.host != host);
        let vms: Vec<String> =
            elsewhere.map(|spec| spec.name.clone()).filter(|vm| left.contains(vm.as_str())).collect();
        if vms.is_empty() {
            return Err(EvacuationRefusal::NothingToReturn { host: host.to_owned() });
        }
        Ok(EvacuationRequest {
            goal: EvacuationGoal::Return { host: host.to_owned(), vms },
            deadline_ns: None,
            accept_late: false,
            partial: false,
            priorities: BTreeMap::new(),
            limits: MoveLimits::default(),
            retries: RetryLimits::default(),
        })
    }

    /// Takes an event.
    pub fn handle(&mut self, event: &EvacuationEvent, inventory: &Inventory, now_ns: u64) -> EvacuationStep {
        match event {
            EvacuationEvent::Restarted => self.connected.clear(),
            EvacuationEvent::HostConnected { host } => {
                self.connected.insert(host.clone());
            }
            EvacuationEvent::HostLost { host } => {
                self.connected.remove(host);
            }
            _ => {}
        }
        let before = self.before();
        for one in self.list.iter_mut().filter(|one| one.is_live()) {
            one.take(event, &self.connected, now_ns);
        }
        self.tell_arrivals(&before, now_ns);
        self.step(&before, inventory, now_ns, Occasion::of(event))
    }

    /// Informs all evacuations of where the moves of others have ended. The destination reports that, too, but its
    /// message may be lost; and what an evacuation knows of its own moves takes the place of what the inventory has.
    fn tell_arrivals(&mut self, before: &BTreeMap<usize, Evacuation>, now_ns: u64) {
        let mut arrivals: Vec<(usize, String, String)> = Vec::new();
        for (at, was) in before {
            let ended = was.unsettled().filter_map(|(number, _)| self.list[*at].moves.get(&number));
            let moved = ended.filter(|record| record.has_moved()).map(|record| &record.planned);
            arrivals.extend(moved.map(|planned| (*at, planned.vm.clone(), planned.to.clone())));
        }
        for (of, vm, to) in arrivals {
            let others = self.list.iter_mut().enumerate().filter(|(at, one)| *at != of && one.is_live());
            for (_, one) in others {
                one.take_appearance(&vm, &to, &self.connected, now_ns);
            }
        }
    }

    /// Forgets an evacuation that has ended, with what `return` would bring back. Returns false, and changes nothing, if
    /// it is not known, or if moves of it have not ended.
    pub fn forget(&mut self, id: &EvacuationId) -> bool {
        let before = self.list.len();
        self.list.retain(|one| one.id != *id || one.is_live());
        self.list.len() < before
    }

    fn position(&self, id: &EvacuationId) -> Result<usize, EvacuationRefusal> {
        let found = self.list.iter().position(|one| one.id == *id);
        found.ok_or_else(|| EvacuationRefusal::UnknownEvacuation { id: id.clone() })
    }

    /// Checks what a request needs beside a plan.
    fn check(&self, request: &EvacuationRequest, inventory: &Inventory) -> Result<(), EvacuationRefusal> {
        let (hosts, is_nothing) = match &request.goal {
            EvacuationGoal::Empty { hosts, .. } => (hosts.as_slice(), hosts.is_empty()),
            EvacuationGoal::Return { host, vms } => (std::slice::from_ref(host), vms.is_empty()),
        };
        if is_nothing {
            return Err(EvacuationRefusal::NothingNamed);
        }
        for host in hosts {
            if !inventory.hosts.iter().any(|spec| spec.name == *host) {
                let refusal = Refusal::UnknownHost { host: host.clone(), named_by: "the request".to_owned() };
                return Err(EvacuationRefusal::Plan { refusal });
            }
            let mut running = self.list.iter().filter(|one| !one.is_finished());
            if let Some(by) = running.find(|one| one.goal_hosts().contains(host)) {
                return Err(EvacuationRefusal::Busy { host: host.clone(), by: by.id.clone() });
            }
            if !self.connected.contains(host) {
                return Err(EvacuationRefusal::NotConnected { host: host.clone() });
            }
        }
        Ok(())
    }

    /// Returns the evacuations that events can change, by their places.
    fn before(&self) -> BTreeMap<usize, Evacuation> {
        let live = self.list.iter().enumerate().filter(|(_, one)| one.is_live());
        live.map(|(at, one)| (at, one.clone())).collect()
    }

    fn before_all(&self, also: usize) -> BTreeMap<usize, Evacuation> {
        let mut before = self.before();
        before.insert(also, self.list[also].clone());
        before
    }

    /// Returns the reservations of all evacuations but one.
    fn reservations(&self, but: usize) -> Vec<Reservations> {
        let others = self.list.iter().enumerate().filter(|(at, one)| *at != but && one.is_live());
        others.map(|(_, one)| Reservations::of(one, &self.list[but])).collect()
    }

    /// Lets all evacuations decide, and shares bandwidth. `before` has those that may have changed, as they were.
    fn step(
        &mut self,
        before: &BTreeMap<usize, Evacuation>,
        inventory: &Inventory,
        now_ns: u64,
        occasion: Occasion,
    ) -> EvacuationStep {
        let mut step = EvacuationStep::default();
        for at in 0..self.list.len() {
            if !self.list[at].is_live() && !before.contains_key(&at) {
                continue;
            }
            let is_changed = before.get(&at) != Some(&self.list[at]);
            if occasion == Occasion::Progress && !is_changed {
                continue;
            }
            let others = self.reservations(at);
            let around = Surroundings { inventory, connected: &self.connected, others: &others, now_ns };
            let one = &mut self.list[at];
            one.advance(&around);
            if occasion == Occasion::Decision || before.get(&at) != Some(&*one) {
                one.look_out(&around);
            }
        }
        let returned = self.record_returns();
        self.share_bandwidth(inventory);
        for (at, one) in self.list.iter_mut().enumerate() {
            step.actions.append(&mut one.volatile.out);
            let is_changed = before.get(&at).is_some_and(|before| *before != *one);
            if is_changed || returned.contains(&at) {
                step.changed.push(one.id.clone());
            }
        }
        step
    }

    /// Removes the departures of VMs that have come back. Returns the evacuations that this has changed.
    fn record_returns(&mut self) -> BTreeSet<usize> {
        let mut back = BTreeSet::new();
        for one in &self.list {
            if let EvacuationGoal::Return { host, .. } = &one.request.goal {
                let moved =
                    one.moves.values().filter(|record| record.has_moved() && record.planned.to == *host);
                back.extend(moved.filter_map(|record| {
                    let MoveState::Ended { at_ns, .. } = &record.state else { return None };
                    Some((record.planned.vm.clone(), host.clone(), *at_ns))
                }));
            }
        }
        let mut changed = BTreeSet::new();
        for (at, one) in self.list.iter_mut().enumerate() {
            let count = one.departures.len();
            one.departures.retain(|departure| {
                let is_back = |(vm, host, at_ns): &(String, String, u64)| {
                    *vm == departure.vm && *host == departure.from && *at_ns >= departure.at_ns
                };
                !back.iter().any(is_back)
            });
            if one.departures.len() < count {
                changed.insert(at);
            }
        }
        changed
    }

    fn share_bandwidth(&mut self, inventory: &Inventory) {
        let moves: Vec<_> = self
            .list
            .iter()
            .map(|one| (one.request.limits.bytes_per_s, one.active_moves().collect::<Vec<_>>()))
            .collect();
        let ends = moves.iter().flat_map(|(_, moves)| moves).flat_map(|(_, one)| [&one.from, &one.to]);
        let hosts: BTreeSet<&str> = ends.map(String::as_str).collect();
        if hosts.is_empty() {
            return;
        }
        let given = rates(&moves, &links_of(inventory, &hosts));
        let connected = &self.connected;
        for (one, given) in self.list.iter_mut().zip(given) {
            let actions = one.apply_rates(&given, |host| connected.contains(host));
            one.volatile.out.extend(actions);
        }
    }
}
