//! The implementation behind the API: the daemon, or a fake in tests.

use proto::message::HostEvacuation;
use proto::{MigrationId, VmName};

use super::forecast::{CalibrationReport, Forecast};
use super::leftover_image::LeftoverImage;
use super::network_state::NetworkState;
use super::problem::Problem;
use super::types::{
    AdoptRequest, Adopted, AgentInfo, CancelOutcome, CheckReport, ClaimReport, ClaimRequest, Cordon,
    EvacuateHostRequest, ForecastRequest, Forgotten, Limits, MigrateRequest, MigrationStatus, RecoverReport,
    RecoverRequest, RunRequest, VmDetail, VmSummary,
};
use crate::progress::Watcher;
use crate::report::Report;

/// All requests of the API. The calls may block; each runs on a thread where that is allowed, several at a time.
pub trait Control: Send + Sync + 'static {
    /// Returns the agent's identity and its host's capabilities.
    fn agent(&self) -> AgentInfo;

    /// Returns all VMs that the agent knows.
    fn vms(&self) -> Result<Vec<VmSummary>, Problem>;

    /// Returns all details of one VM.
    fn vm(&self, vm: &VmName) -> Result<VmDetail, Problem>;

    /// Adopts a QEMU that runs already.
    fn adopt(&self, request: AdoptRequest) -> Result<Adopted, Problem>;

    /// Starts a QEMU from a VM file and adopts it.
    fn run(&self, request: RunRequest) -> Result<Adopted, Problem>;

    /// Forgets a VM; its QEMU goes on. Refused while a migration of it is open.
    fn forget(&self, vm: &VmName) -> Result<Forgotten, Problem>;

    /// Makes this host the owner of a VM in the ownership registry, or reports the risk.
    fn claim(&self, vm: &VmName, request: ClaimRequest) -> Result<ClaimReport, Problem>;

    /// Forecasts a migration: checks it, tracks the VM's writes for some seconds, and measures the link, as far as that is
    /// needed. Refused while the VM is in a migration.
    fn forecast(&self, request: ForecastRequest) -> Result<Forecast, Problem>;

    /// Returns the record of the forecasts of this host.
    fn calibration(&self) -> Result<CalibrationReport, Problem>;

    /// Runs the pre-flight checks alone, on both hosts. Changes nothing on either.
    fn check(&self, request: MigrateRequest) -> Result<CheckReport, Problem>;

    /// Starts a migration and returns once it has its epoch and the pre-flight checks of this side have passed; the
    /// migration continues by itself.
    fn migrate(&self, request: MigrateRequest) -> Result<MigrationStatus, Problem>;

    /// Returns all migrations in the journal, newest first, of both roles.
    fn migrations(&self) -> Result<Vec<MigrationStatus>, Problem>;

    /// Returns the status of one migration.
    fn migration(&self, id: &MigrationId) -> Result<MigrationStatus, Problem>;

    /// Returns a view of a migration's progress; the last known one if the migration is over or has no driver at
    /// present.
    fn watch(&self, id: &MigrationId) -> Result<Watcher, Problem>;

    /// Returns the report of a migration, also while it is under way.
    fn report(&self, id: &MigrationId) -> Result<Report, Problem>;

    /// Requests a migration's end before COMMITTED, and waits for the outcome.
    fn cancel(&self, id: &MigrationId) -> Result<CancelOutcome, Problem>;

    /// Settles a migration in doubt as far as is possible without a guess, or, if the request has one, by the
    /// operator's decision.
    fn recover(&self, id: &MigrationId, request: RecoverRequest) -> Result<RecoverReport, Problem>;

    /// Changes limits of a migration under way; returns those in force.
    fn set_limits(&self, id: &MigrationId, limits: Limits) -> Result<Limits, Problem>;

    /// Returns the images that VMs left behind: when they moved away with their disks, or when they ended here.
    fn images(&self) -> Result<Vec<LeftoverImage>, Problem>;

    /// Removes the images that a VM left behind, in one migration or in all; returns them. If one of them must stay,
    /// none is removed.
    fn remove_images(&self, vm: &VmName, epoch: Option<u64>) -> Result<Vec<LeftoverImage>, Problem>;

    /// Removes the images of a VM that arrived with its disks and ended here; returns them. If one of them must stay,
    /// none is removed.
    fn remove_ended_images(&self, vm: &VmName) -> Result<Vec<LeftoverImage>, Problem>;

    /// Lets the agent's host accept no VMs, or accept them again.
    fn set_cordoned(&self, cordoned: bool) -> Result<Cordon, Problem>;

    /// Asks the controller to evacuate the agent's host.
    fn ask_for_evacuation(&self, request: &EvacuateHostRequest) -> Result<HostEvacuation, Problem>;

    /// Returns the state of the evacuation that was asked for.
    fn evacuation(&self) -> Result<HostEvacuation, Problem>;

    /// Returns the metrics of the agent, in the text format of Prometheus.
    fn metrics(&self) -> Result<String, Problem>;

    /// Returns what migrations have in the kernel of the agent's host.
    fn network(&self) -> Result<NetworkState, Problem>;

    /// Ends the redirections of a VM's old connections on the agent's host; these connections end with them. With `all`,
    /// ends the translation of its new addresses as well. Returns the migrations that had made them.
    fn release_network(&self, vm: &VmName, all: bool) -> Result<Vec<MigrationId>, Problem>;
}
