//! Requests for evacuations: of users, and of hosts that are about to be shut down.

use std::collections::BTreeMap;

use api::fleet::{EvacuateRequest, EvacuationInfo, EvacuationPlan, MoveOptions, ReturnRequest};
use api::report::{rfc3339, unix_ms_now};
use engine::evacuation::{
    Evacuation, EvacuationGoal, EvacuationId, EvacuationOutcome, EvacuationRefusal, EvacuationRequest,
};
use proto::HostId;
use proto::message::{EvacuationStanding, HostEvacuation, Message};
use store::fleet::FleetStoreError;

use super::{Coordinator, KeptEvacuation};

/// Reason for which an evacuation does not begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BeginError {
    /// The request is refused.
    #[error(transparent)]
    Refused(#[from] EvacuationRefusal),
    /// The records cannot be written.
    #[error(transparent)]
    Store(#[from] FleetStoreError),
}

/// Nanoseconds of a millisecond.
const MS_NS: u64 = 1_000_000;

impl Coordinator {
    /// Returns the engine's form of a request.
    pub(crate) fn evacuation_request(&self, request: &EvacuateRequest) -> EvacuationRequest {
        let names = |hosts: &[HostId]| hosts.iter().map(ToString::to_string).collect();
        let goal = EvacuationGoal::Empty { hosts: names(&request.hosts), to: names(&request.to) };
        let mut made = self.request_of(goal, &request.moves);
        // The machine's clock may have been set since the start.
        let (unix_ms, now_ns) = (unix_ms_now(), self.now_ns());
        let on_clock = |ms: u64| now_ns.saturating_add(ms.saturating_sub(unix_ms).saturating_mul(MS_NS));
        made.deadline_ns = request.deadline_unix_ms.map(on_clock);
        made.accept_late = request.accept_late;
        made.partial = request.partial;
        made.priorities =
            request.priorities.iter().map(|(vm, priority)| (vm.to_string(), *priority)).collect();
        made
    }

    /// Returns the engine's form of a request to bring back what left a host.
    pub(crate) fn return_request(
        &mut self,
        host: &HostId,
        request: &ReturnRequest,
    ) -> Result<EvacuationRequest, EvacuationRefusal> {
        let inventory = self.inventory();
        let found = self.evacuations.return_request(host.as_str(), &inventory)?;
        let mut made = self.request_of(found.goal, &request.moves);
        made.partial = request.partial;
        Ok(made)
    }

    fn request_of(&self, goal: EvacuationGoal, moves: &MoveOptions) -> EvacuationRequest {
        let mut limits = self.config.limits;
        limits.bytes_per_s = moves.bandwidth_bytes_per_s.or(limits.bytes_per_s);
        limits.per_host = moves.per_host.unwrap_or(limits.per_host);
        EvacuationRequest {
            goal,
            deadline_ns: None,
            accept_late: false,
            partial: false,
            priorities: BTreeMap::new(),
            limits,
            retries: self.config.retries,
        }
    }

    /// Returns the plan that a request would have.
    pub(crate) fn preview(
        &mut self,
        request: &EvacuationRequest,
    ) -> Result<EvacuationPlan, EvacuationRefusal> {
        let inventory = self.inventory();
        self.evacuations.preview(request, &inventory, self.now_ns())
    }

    /// Begins an evacuation.
    pub(crate) fn begin(
        &mut self,
        request: EvacuationRequest,
        moves: MoveOptions,
        asked_by: BTreeMap<HostId, u64>,
    ) -> Result<EvacuationId, BeginError> {
        // Refused requests use no number.
        self.preview(&request)?;
        let number = self.store.next_evacuation()?;
        // With the term: other records may have given the number to another evacuation.
        let id = EvacuationId(format!("e{}.{number}", self.term));
        let kept = KeptEvacuation { number, created_unix_ms: unix_ms_now(), moves, asked_by };
        self.kept.insert(id.clone(), kept);
        let text = describe(&request);
        let inventory = self.inventory();
        let step = self
            .evacuations
            .begin(id.clone(), request, &inventory, self.now_ns())
            .inspect_err(|_| drop(self.kept.remove(&id)))?;
        self.event("evacuation-began", |event| {
            event.evacuation = Some(id.0.clone());
            event.text = format!("evacuation {id} has begun: {text}");
        });
        self.take_step(step);
        self.settle();
        Ok(id)
    }

    /// Cancels an evacuation.
    pub(crate) fn cancel(&mut self, id: &EvacuationId) -> Result<(), EvacuationRefusal> {
        let inventory = self.inventory();
        let step = self.evacuations.cancel(id, &inventory, self.now_ns())?;
        self.take_step(step);
        self.settle();
        Ok(())
    }

    /// Resumes an evacuation.
    pub(crate) fn resume(&mut self, id: &EvacuationId) -> Result<(), EvacuationRefusal> {
        let inventory = self.inventory();
        let step = self.evacuations.resume(id, &inventory, self.now_ns())?;
        self.take_step(step);
        self.settle();
        Ok(())
    }

    /// Forgets an evacuation that has ended. Returns false if it has not.
    pub(crate) fn forget(&mut self, id: &EvacuationId) -> bool {
        let forgotten = self.evacuations.forget(id);
        if forgotten {
            self.pending.evacuations.push(id.clone());
            self.pending.is_urgent = true;
            self.settle();
            self.kept.remove(id);
        }
        forgotten
    }

    /// Returns an evacuation, for users.
    pub(crate) fn evacuation_info(&self, evacuation: &Evacuation) -> EvacuationInfo {
        let kept = self.kept.get(evacuation.id()).cloned().unwrap_or_default();
        EvacuationInfo {
            id: evacuation.id().0.clone(),
            created: rfc3339(kept.created_unix_ms),
            request: evacuation.request().clone(),
            moves: kept.moves,
            status: evacuation.status(self.now_ns()),
            last_event: self.last_event,
        }
    }

    // ---- hosts that ask for themselves

    /// Evacuates the host of an agent that asks for it, or follows the evacuation that does so already. A request that is
    /// repeated is answered with the state of the evacuation that it has begun.
    pub(super) fn evacuate_for_host(&mut self, host: &HostId, number: u64, within_s: Option<u64>) {
        let known = self.kept.iter().find(|(_, kept)| kept.asked_by.get(host) == Some(&number));
        if let Some(id) = known.map(|(id, _)| id.clone()) {
            self.send_to_host(host, self.host_evacuation(&id, number));
            return;
        }
        let request = EvacuateRequest {
            hosts: vec![host.clone()],
            deadline_unix_ms: within_s.map(|s| unix_ms_now().saturating_add(s.saturating_mul(1000))),
            // The host is shut down in any case: what can leave it leaves.
            accept_late: true,
            partial: true,
            ..EvacuateRequest::default()
        };
        let request = self.evacuation_request(&request);
        let failed = |text: String| HostEvacuation {
            request: number,
            evacuation: None,
            standing: EvacuationStanding::Failed,
            text,
        };
        let asked_by = BTreeMap::from([(host.clone(), number)]);
        let answer = match self.begin(request, MoveOptions::default(), asked_by) {
            Ok(id) => self.host_evacuation(&id, number),
            Err(BeginError::Refused(EvacuationRefusal::Busy { by, .. })) if self.is_emptied_by(host, &by) => {
                if let Some(kept) = self.kept.get_mut(&by) {
                    kept.asked_by.insert(host.clone(), number);
                }
                if !self.pending.evacuations.contains(&by) {
                    self.pending.evacuations.push(by.clone());
                }
                self.pending.is_urgent = true;
                self.host_evacuation(&by, number)
            }
            // One by which VMs return to the host fills it.
            Err(BeginError::Refused(refusal)) => failed(format!("{refusal}; {}", refusal.advice())),
            Err(error) => failed(crate::chain(&error)),
        };
        self.send_to_host(host, answer);
    }

    /// Returns true if an evacuation empties a host.
    fn is_emptied_by(&self, host: &HostId, id: &EvacuationId) -> bool {
        let emptied = self.evacuations.get(id).map(|one| one.request().goal.emptied());
        emptied.is_some_and(|hosts| hosts.iter().any(|emptied| emptied == host.as_str()))
    }

    /// Sends the state of an evacuation to the hosts that have asked for it.
    pub(super) fn report_to_asking_hosts(&self, id: &EvacuationId) {
        for (host, number) in self.kept.get(id).into_iter().flat_map(|kept| &kept.asked_by) {
            self.send_to_host(host, self.host_evacuation(id, *number));
        }
    }

    fn host_evacuation(&self, id: &EvacuationId, request: u64) -> HostEvacuation {
        let (standing, text) = match self.evacuations.get(id).map(Evacuation::outcome) {
            None => (EvacuationStanding::Failed, "it was forgotten".to_owned()),
            Some(None) => (EvacuationStanding::Underway, format!("evacuation {id} goes on")),
            Some(Some(outcome @ EvacuationOutcome::Done { .. })) => {
                (EvacuationStanding::Done, outcome.to_string())
            }
            Some(Some(outcome)) => (EvacuationStanding::Failed, outcome.to_string()),
        };
        HostEvacuation { request, evacuation: Some(id.0.clone()), standing, text }
    }

    fn send_to_host(&self, host: &HostId, state: HostEvacuation) {
        if let Some(agent) = self.links.get(host) {
            // If the connection has ended, the agent asks again over the next one.
            let _ = agent.outgoing.send(Message::HostEvacuation(state));
        }
    }
}

/// Describes a request in a line.
fn describe(request: &EvacuationRequest) -> String {
    match &request.goal {
        EvacuationGoal::Empty { hosts, to } if to.is_empty() => format!("{} is emptied", hosts.join(", ")),
        EvacuationGoal::Empty { hosts, to } => {
            format!("{} is emptied, its VMs go to {}", hosts.join(", "), to.join(", "))
        }
        EvacuationGoal::Return { host, vms } => format!("{} return to {host}", vms.join(", ")),
    }
}
