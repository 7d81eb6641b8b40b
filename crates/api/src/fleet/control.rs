//! The implementation behind the controller's API.

use engine::evacuation::EvacuationPlan;
use engine::planner::Inventory;
use proto::{HostId, MigrationId};
use tokio::sync::watch;

use super::types::{
    EvacuateRequest, EvacuationInfo, FleetEvent, FleetHost, FleetInfo, FleetVm, ReturnRequest,
};
use crate::problem::Problem;

/// Signal of new events: the number of the last one.
#[derive(Clone, Debug)]
pub struct EventSignal(watch::Sender<u64>);

/// A watcher's end of an [`EventSignal`].
pub type EventWatcher = watch::Receiver<u64>;

impl EventSignal {
    /// Creates a signal; `last` is the number of the last event.
    pub fn new(last: u64) -> Self {
        Self(watch::Sender::new(last))
    }

    /// Signals an event. Never waits for watchers; needs no tokio runtime.
    pub fn set(&self, last: u64) {
        self.0.send_replace(last);
    }

    /// Returns a watcher.
    pub fn watch(&self) -> EventWatcher {
        self.0.subscribe()
    }
}

/// All requests of the controller's API. The calls may block; each runs on a thread where that is allowed.
pub trait FleetControl: Send + Sync + 'static {
    /// Returns the controller and its fleet.
    fn info(&self) -> Result<FleetInfo, Problem>;

    /// Returns all hosts, by name.
    fn hosts(&self) -> Result<Vec<FleetHost>, Problem>;

    /// Returns all VMs, by name.
    fn vms(&self) -> Result<Vec<FleetVm>, Problem>;

    /// Returns the fleet as the planner sees it.
    fn inventory(&self) -> Result<Inventory, Problem>;

    /// Returns up to `count` events after one with this number, oldest first.
    fn events(&self, after: u64, count: u32) -> Result<Vec<FleetEvent>, Problem>;

    /// Returns a watcher of events.
    fn watch_events(&self) -> EventWatcher;

    /// Lets a host accept no VMs, or accept them again.
    fn set_cordoned(&self, host: &HostId, cordoned: bool) -> Result<FleetHost, Problem>;

    /// Forgets a host that is not connected.
    fn forget_host(&self, host: &HostId) -> Result<FleetHost, Problem>;

    /// Returns the plan of an evacuation, and begins nothing.
    fn preview(&self, request: &EvacuateRequest) -> Result<EvacuationPlan, Problem>;

    /// Begins an evacuation.
    fn evacuate(&self, request: &EvacuateRequest) -> Result<EvacuationInfo, Problem>;

    /// Returns the plan of a return, and begins nothing.
    fn preview_return(&self, host: &HostId, request: &ReturnRequest) -> Result<EvacuationPlan, Problem>;

    /// Begins to bring back what left a host.
    fn return_vms(&self, host: &HostId, request: &ReturnRequest) -> Result<EvacuationInfo, Problem>;

    /// Returns all evacuations, newest first.
    fn evacuations(&self) -> Result<Vec<EvacuationInfo>, Problem>;

    /// Returns one evacuation.
    fn evacuation(&self, id: &str) -> Result<EvacuationInfo, Problem>;

    /// Cancels an evacuation; moves that are past their commit point end all the same.
    fn cancel(&self, id: &str) -> Result<EvacuationInfo, Problem>;

    /// Resumes an evacuation that was cancelled or is incomplete.
    fn resume(&self, id: &str) -> Result<EvacuationInfo, Problem>;

    /// Forgets an evacuation that has ended, and with it what `return` would bring back.
    fn forget(&self, id: &str) -> Result<EvacuationInfo, Problem>;

    /// Returns the report of a migration, from the agent of its source.
    fn report(&self, host: &HostId, migration: &MigrationId) -> Result<serde_json::Value, Problem>;

    /// Returns the metrics of the controller, in the text format of Prometheus.
    fn metrics(&self) -> Result<String, Problem>;
}
