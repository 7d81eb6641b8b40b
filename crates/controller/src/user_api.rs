//! Requests of users to the controller.

use std::collections::BTreeMap;
use std::time::Duration;

use api::fleet::{
    EvacuateRequest, EvacuationInfo, EvacuationPlan, EventSignal, EventWatcher, FleetControl, FleetEvent,
    FleetHost, FleetInfo, FleetVm, Inventory, ReturnRequest,
};
use api::{Problem, ProblemKind};
use engine::evacuation::{EvacuationId, EvacuationRefusal};
use proto::message::{CommandAnswer, CommandVerb};
use proto::{HostId, MigrationId};

use crate::coordinator::{Coordinator, Shared, lock};
use crate::refusal::{cannot_begin, refused};
use crate::{metrics, views};

/// Longest wait for the answer of an agent.
const PATIENCE: Duration = Duration::from_secs(20);

/// Implementation of the API by the coordinator.
pub(crate) struct UserApi {
    shared: Shared,
    signal: EventSignal,
}

impl UserApi {
    pub(crate) fn new(shared: Shared, signal: EventSignal) -> Self {
        Self { shared, signal }
    }

    /// Runs a change of an evacuation, and returns the evacuation.
    fn change(
        &self,
        id: &str,
        change: impl FnOnce(&mut Coordinator, &EvacuationId) -> Result<(), EvacuationRefusal>,
    ) -> Result<EvacuationInfo, Problem> {
        let id = EvacuationId(id.to_owned());
        let mut coordinator = lock(&self.shared);
        change(&mut coordinator, &id).map_err(|refusal| refused(&refusal))?;
        found(&coordinator, &id)
    }
}

impl FleetControl for UserApi {
    fn info(&self) -> Result<FleetInfo, Problem> {
        Ok(views::info(&lock(&self.shared)))
    }

    fn hosts(&self) -> Result<Vec<FleetHost>, Problem> {
        Ok(views::hosts(&lock(&self.shared).fleet))
    }

    fn vms(&self) -> Result<Vec<FleetVm>, Problem> {
        Ok(views::vms(&lock(&self.shared).fleet))
    }

    fn inventory(&self) -> Result<Inventory, Problem> {
        Ok((*lock(&self.shared).inventory()).clone())
    }

    fn events(&self, after: u64, count: u32) -> Result<Vec<FleetEvent>, Problem> {
        let events = lock(&self.shared).events(after, count);
        let events = events
            .map_err(|error| Problem::caused_by(ProblemKind::Internal, &error, "see the controller's log"))?;
        Ok(events.into_iter().map(views::event).collect())
    }

    fn watch_events(&self) -> EventWatcher {
        self.signal.watch()
    }

    fn set_cordoned(&self, host: &HostId, cordoned: bool) -> Result<FleetHost, Problem> {
        let mut coordinator = lock(&self.shared);
        known_host(&coordinator, host)?;
        coordinator.cordon_for_user(host, cordoned);
        known_host(&coordinator, host)
    }

    fn forget_host(&self, host: &HostId) -> Result<FleetHost, Problem> {
        let mut coordinator = lock(&self.shared);
        let known = known_host(&coordinator, host)?;
        if known.connected {
            let error = format!("host {host} is connected");
            let advice = "remove `[controller]` from its configuration, and restart its agent";
            return Err(Problem::new(ProblemKind::Conflict, error, advice));
        }
        if let Some(id) = coordinator.evacuations.evacuation_with(host.as_str()) {
            let error = format!("evacuation {id} is about host {host}");
            let advice = format!("wait until it has ended, or run `whimbrel evacuation cancel {id}`");
            return Err(Problem::new(ProblemKind::Conflict, error, advice));
        }
        if let Some(open) = coordinator.fleet.unresolved_migration(host) {
            let error = format!("migration {} from {} to {} is not over", open.migration, open.from, open.to);
            let advice = "start the agents of both hosts, or run `whimbrel recover` on the one that is left";
            return Err(Problem::new(ProblemKind::Conflict, error, advice));
        }
        coordinator.fleet.remove(host);
        coordinator.settle();
        Ok(known)
    }

    fn preview(&self, request: &EvacuateRequest) -> Result<EvacuationPlan, Problem> {
        let mut coordinator = lock(&self.shared);
        let request = coordinator.evacuation_request(request);
        coordinator.preview(&request).map_err(|refusal| refused(&refusal))
    }

    fn evacuate(&self, request: &EvacuateRequest) -> Result<EvacuationInfo, Problem> {
        let mut coordinator = lock(&self.shared);
        let made = coordinator.evacuation_request(request);
        let begun = coordinator.begin(made, request.moves.clone(), BTreeMap::new());
        let id = begun.map_err(|error| cannot_begin(&error))?;
        found(&coordinator, &id)
    }

    fn preview_return(&self, host: &HostId, request: &ReturnRequest) -> Result<EvacuationPlan, Problem> {
        let mut coordinator = lock(&self.shared);
        known_host(&coordinator, host)?;
        let made = coordinator.return_request(host, request).map_err(|refusal| refused(&refusal))?;
        coordinator.preview(&made).map_err(|refusal| refused(&refusal))
    }

    fn return_vms(&self, host: &HostId, request: &ReturnRequest) -> Result<EvacuationInfo, Problem> {
        let mut coordinator = lock(&self.shared);
        known_host(&coordinator, host)?;
        let made = coordinator.return_request(host, request).map_err(|refusal| refused(&refusal))?;
        let begun = coordinator.begin(made, request.moves.clone(), BTreeMap::new());
        let id = begun.map_err(|error| cannot_begin(&error))?;
        found(&coordinator, &id)
    }

    fn evacuations(&self) -> Result<Vec<EvacuationInfo>, Problem> {
        let coordinator = lock(&self.shared);
        let mut all: Vec<_> =
            coordinator.evacuations.iter().map(|one| coordinator.evacuation_info(one)).collect();
        all.reverse();
        Ok(all)
    }

    fn evacuation(&self, id: &str) -> Result<EvacuationInfo, Problem> {
        found(&lock(&self.shared), &EvacuationId(id.to_owned()))
    }

    fn cancel(&self, id: &str) -> Result<EvacuationInfo, Problem> {
        self.change(id, Coordinator::cancel)
    }

    fn resume(&self, id: &str) -> Result<EvacuationInfo, Problem> {
        self.change(id, Coordinator::resume)
    }

    fn forget(&self, id: &str) -> Result<EvacuationInfo, Problem> {
        let id = EvacuationId(id.to_owned());
        let mut coordinator = lock(&self.shared);
        let known = found(&coordinator, &id)?;
        if coordinator.forget(&id) {
            return Ok(known);
        }
        let error = format!("evacuation {id} has not ended");
        Err(Problem::new(
            ProblemKind::Conflict,
            error,
            format!("run `whimbrel evacuation cancel {id}` first"),
        ))
    }

    fn report(&self, host: &HostId, migration: &MigrationId) -> Result<serde_json::Value, Problem> {
        let answer = {
            let mut coordinator = lock(&self.shared);
            known_host(&coordinator, host)?;
            coordinator.ask(host, CommandVerb::Report { migration: migration.clone() })
        };
        let away = || {
            let error = format!("the agent of host {host} does not answer");
            Problem::new(ProblemKind::Unavailable, error, "start it, or look at its log")
        };
        match answer.ok_or_else(away)?.recv_timeout(PATIENCE) {
            Ok(CommandAnswer::Report { report }) => Ok(report),
            Ok(CommandAnswer::Refused { problem }) => {
                Err(serde_json::from_value(problem).unwrap_or_else(|_| away()))
            }
            Ok(_) | Err(_) => Err(away()),
        }
    }

    fn metrics(&self) -> Result<String, Problem> {
        Ok(metrics::metrics(&lock(&self.shared)))
    }
}

fn found(coordinator: &Coordinator, id: &EvacuationId) -> Result<EvacuationInfo, Problem> {
    let evacuation = coordinator.evacuations.get(id);
    let unknown = || refused(&EvacuationRefusal::UnknownEvacuation { id: id.clone() });
    evacuation.map(|evacuation| coordinator.evacuation_info(evacuation)).ok_or_else(unknown)
}

fn known_host(coordinator: &Coordinator, host: &HostId) -> Result<FleetHost, Problem> {
    coordinator.fleet.host(host).map(|entry| views::host(host, entry)).ok_or_else(|| {
        let error = format!("no host {host} has ever connected to this controller");
        let advice = "`whimbrel fleet hosts` lists them; give its agent the table `[controller]`";
        Problem::new(ProblemKind::NotFound, error, advice)
    })
}
