//! Client of the controller's API.

use std::path::Path;

use engine::evacuation::EvacuationPlan;
use engine::planner::Inventory;
use proto::HostId;

use super::types::{
    EvacuateRequest, EvacuationInfo, FleetEvent, FleetHost, FleetInfo, FleetVm, ReturnRequest,
};
use crate::http_client::{ClientError, HttpClient, Lines};

/// A client of one controller. Its methods correspond to the paths of [the module](super).
#[derive(Debug)]
pub struct FleetClient(HttpClient);

impl FleetClient {
    /// Creates a client of the controller behind a socket. Sends nothing yet.
    pub fn new(socket: &Path) -> Result<Self, ClientError> {
        HttpClient::new(socket, true).map(Self)
    }

    /// `GET /v1/fleet`.
    pub fn info(&self) -> Result<FleetInfo, ClientError> {
        self.0.get("/v1/fleet")
    }

    /// Returns the number of the last event.
    pub fn last_event(&self) -> Result<u64, ClientError> {
        self.info().map(|info| info.last_event)
    }

    /// `GET /v1/hosts`.
    pub fn hosts(&self) -> Result<Vec<FleetHost>, ClientError> {
        self.0.get("/v1/hosts")
    }

    /// `GET /v1/vms`.
    pub fn vms(&self) -> Result<Vec<FleetVm>, ClientError> {
        self.0.get("/v1/vms")
    }

    /// `GET /v1/inventory`.
    pub fn inventory(&self) -> Result<Inventory, ClientError> {
        self.0.get("/v1/inventory")
    }

    /// `GET /v1/events`: events after the one with this number; also those that are still to come, if they are followed.
    pub fn events(&self, after: u64, follow: bool) -> Result<Lines<'_, FleetEvent>, ClientError> {
        self.0.lines(&format!("/v1/events?after={after}&follow={follow}"))
    }

    /// `POST /v1/hosts/{host}/cordon`, or `DELETE`.
    pub fn set_cordoned(&self, host: &HostId, cordoned: bool) -> Result<FleetHost, ClientError> {
        let path = format!("/v1/hosts/{host}/cordon");
        if cordoned { self.0.post(&path, &()) } else { self.0.delete(&path) }
    }

    /// `DELETE /v1/hosts/{host}`.
    pub fn forget_host(&self, host: &HostId) -> Result<FleetHost, ClientError> {
        self.0.delete(&format!("/v1/hosts/{host}"))
    }

    /// `POST /v1/evacuations` with `dry_run`.
    pub fn preview(&self, request: &EvacuateRequest) -> Result<EvacuationPlan, ClientError> {
        self.0.post("/v1/evacuations", &EvacuateRequest { dry_run: true, ..request.clone() })
    }

    /// `POST /v1/evacuations`.
    pub fn evacuate(&self, request: &EvacuateRequest) -> Result<EvacuationInfo, ClientError> {
        self.0.post("/v1/evacuations", &EvacuateRequest { dry_run: false, ..request.clone() })
    }

    /// `POST /v1/hosts/{host}/return` with `dry_run`.
    pub fn preview_return(
        &self,
        host: &HostId,
        request: &ReturnRequest,
    ) -> Result<EvacuationPlan, ClientError> {
        let request = ReturnRequest { dry_run: true, ..request.clone() };
        self.0.post(&format!("/v1/hosts/{host}/return"), &request)
    }

    /// `POST /v1/hosts/{host}/return`.
    pub fn return_vms(&self, host: &HostId, request: &ReturnRequest) -> Result<EvacuationInfo, ClientError> {
        let request = ReturnRequest { dry_run: false, ..request.clone() };
        self.0.post(&format!("/v1/hosts/{host}/return"), &request)
    }

    /// `GET /v1/evacuations`.
    pub fn evacuations(&self) -> Result<Vec<EvacuationInfo>, ClientError> {
        self.0.get("/v1/evacuations")
    }

    /// `GET /v1/evacuations/{id}`.
    pub fn evacuation(&self, id: &str) -> Result<EvacuationInfo, ClientError> {
        self.0.get(&format!("/v1/evacuations/{id}"))
    }

    /// `POST /v1/evacuations/{id}/cancel`.
    pub fn cancel(&self, id: &str) -> Result<EvacuationInfo, ClientError> {
        self.0.post(&format!("/v1/evacuations/{id}/cancel"), &())
    }

    /// `POST /v1/evacuations/{id}/resume`.
    pub fn resume(&self, id: &str) -> Result<EvacuationInfo, ClientError> {
        self.0.post(&format!("/v1/evacuations/{id}/resume"), &())
    }

    /// `DELETE /v1/evacuations/{id}`.
    pub fn forget(&self, id: &str) -> Result<EvacuationInfo, ClientError> {
        self.0.delete(&format!("/v1/evacuations/{id}"))
    }
}
