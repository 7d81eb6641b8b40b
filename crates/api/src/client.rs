//! Client of the agent's API.

use std::path::Path;

use proto::message::HostEvacuation;
use proto::{MigrationId, VmName};

use super::forecast::{CalibrationReport, Forecast};
use super::http_client::{ClientError, HttpClient, Lines};
use super::leftover_image::LeftoverImage;
use super::network_state::NetworkState;
use super::types::{
    AdoptRequest, Adopted, AgentInfo, CancelOutcome, CheckReport, ClaimReport, ClaimRequest, Cordon,
    EvacuateHostRequest, ForecastRequest, Forgotten, Limits, MigrateRequest, MigrationStatus, RecoverReport,
    RecoverRequest, RunRequest, VmDetail, VmSummary,
};
use crate::progress::ProgressLine;
use crate::report::Report;

/// A client of one agent. Its methods correspond to the paths of [the crate](crate).
#[derive(Debug)]
pub struct Client(HttpClient);

/// Selection of a VM's migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationSelector {
    /// The one with the largest epoch that the agent knows.
    Latest,
    /// The one with this epoch.
    Epoch(u64),
}

impl Client {
    /// Creates a client of the agent behind a socket. Sends nothing yet.
    pub fn new(socket: &Path) -> Result<Self, ClientError> {
        HttpClient::new(socket, false).map(Self)
    }

    /// `GET /v1/agent`.
    pub fn agent(&self) -> Result<AgentInfo, ClientError> {
        self.0.get("/v1/agent")
    }

    /// `GET /v1/vms`.
    pub fn vms(&self) -> Result<Vec<VmSummary>, ClientError> {
        self.0.get("/v1/vms")
    }

    /// `GET /v1/vms/{vm}`.
    pub fn vm(&self, vm: &VmName) -> Result<VmDetail, ClientError> {
        self.0.get(&format!("/v1/vms/{vm}"))
    }

    /// `POST /v1/vms`.
    pub fn adopt(&self, request: &AdoptRequest) -> Result<Adopted, ClientError> {
        self.0.post("/v1/vms", request)
    }

    /// `POST /v1/vms/run`.
    pub fn run(&self, request: &RunRequest) -> Result<Adopted, ClientError> {
        self.0.post("/v1/vms/run", request)
    }

    /// `DELETE /v1/vms/{vm}`.
    pub fn forget(&self, vm: &VmName) -> Result<Forgotten, ClientError> {
        self.0.delete(&format!("/v1/vms/{vm}"))
    }

    /// `POST /v1/vms/{vm}/claim`.
    pub fn claim(&self, vm: &VmName, request: &ClaimRequest) -> Result<ClaimReport, ClientError> {
        self.0.post(&format!("/v1/vms/{vm}/claim"), request)
    }

    /// `POST /v1/migrations` with `check_only`.
    pub fn check(&self, request: &MigrateRequest) -> Result<CheckReport, ClientError> {
        self.0.post("/v1/migrations", &MigrateRequest { check_only: true, ..request.clone() })
    }

    /// `POST /v1/forecasts`.
    pub fn forecast(&self, request: &ForecastRequest) -> Result<Forecast, ClientError> {
        self.0.post("/v1/forecasts", request)
    }

    /// `GET /v1/forecasts`.
    pub fn calibration(&self) -> Result<CalibrationReport, ClientError> {
        self.0.get("/v1/forecasts")
    }

    /// `POST /v1/migrations`.
    pub fn migrate(&self, request: &MigrateRequest) -> Result<MigrationStatus, ClientError> {
        self.0.post("/v1/migrations", &MigrateRequest { check_only: false, ..request.clone() })
    }

    /// `GET /v1/migrations`.
    pub fn migrations(&self) -> Result<Vec<MigrationStatus>, ClientError> {
        self.0.get("/v1/migrations")
    }

    /// `GET /v1/migrations/{vm}/{epoch}`.
    pub fn migration(&self, vm: &VmName, which: MigrationSelector) -> Result<MigrationStatus, ClientError> {
        self.0.get(&path(vm, which, ""))
    }

    /// `GET …/report`.
    pub fn report(&self, vm: &VmName, which: MigrationSelector) -> Result<Report, ClientError> {
        self.0.get(&path(vm, which, "/report"))
    }

    /// `POST …/cancel`.
    pub fn cancel(&self, vm: &VmName, which: MigrationSelector) -> Result<CancelOutcome, ClientError> {
        self.0.post(&path(vm, which, "/cancel"), &())
    }

    /// `POST …/recover`.
    pub fn recover(
        &self,
        vm: &VmName,
        which: MigrationSelector,
        request: &RecoverRequest,
    ) -> Result<RecoverReport, ClientError> {
        self.0.post(&path(vm, which, "/recover"), request)
    }

    /// `POST …/limits`.
    pub fn set_limits(
        &self,
        vm: &VmName,
        which: MigrationSelector,
        limits: &Limits,
    ) -> Result<Limits, ClientError> {
        self.0.post(&path(vm, which, "/limits"), limits)
    }

    /// `GET /v1/images`.
    pub fn images(&self) -> Result<Vec<LeftoverImage>, ClientError> {
        self.0.get("/v1/images")
    }

    /// `DELETE /v1/images/{vm}`, or `…/{epoch}`.
    pub fn remove_images(&self, vm: &VmName, epoch: Option<u64>) -> Result<Vec<LeftoverImage>, ClientError> {
        let epoch = epoch.map_or_else(String::new, |epoch| format!("/{epoch}"));
        self.0.delete(&format!("/v1/images/{vm}{epoch}"))
    }

    /// `DELETE /v1/images/{vm}/ended`.
    pub fn remove_ended_images(&self, vm: &VmName) -> Result<Vec<LeftoverImage>, ClientError> {
        self.0.delete(&format!("/v1/images/{vm}/ended"))
    }

    /// `GET /v1/network`.
    pub fn network(&self) -> Result<NetworkState, ClientError> {
        self.0.get("/v1/network")
    }

    /// `DELETE /v1/network/{vm}`, or `…/all`.
    pub fn release_network(&self, vm: &VmName, all: bool) -> Result<Vec<MigrationId>, ClientError> {
        self.0.delete(&format!("/v1/network/{vm}{}", if all { "/all" } else { "" }))
    }

    /// `POST /v1/cordon`, or `DELETE`.
    pub fn set_cordoned(&self, cordoned: bool) -> Result<Cordon, ClientError> {
        if cordoned { self.0.post("/v1/cordon", &()) } else { self.0.delete("/v1/cordon") }
    }

    /// `POST /v1/evacuation`.
    pub fn ask_for_evacuation(&self, request: &EvacuateHostRequest) -> Result<HostEvacuation, ClientError> {
        self.0.post("/v1/evacuation", request)
    }

    /// `GET /v1/evacuation`.
    pub fn evacuation(&self) -> Result<HostEvacuation, ClientError> {
        self.0.get("/v1/evacuation")
    }

    /// `GET …/progress`: progress line by line, until the migration is over or has no driver.
    pub fn progress(
        &self,
        vm: &VmName,
        which: MigrationSelector,
    ) -> Result<Lines<'_, ProgressLine>, ClientError> {
        self.0.lines(&path(vm, which, "/progress"))
    }
}

fn path(vm: &VmName, which: MigrationSelector, rest: &str) -> String {
    match which {
        MigrationSelector::Latest => format!("/v1/migrations/{vm}/latest{rest}"),
        MigrationSelector::Epoch(epoch) => format!("/v1/migrations/{vm}/{epoch}{rest}"),
    }
}
