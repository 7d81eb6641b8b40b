//! What stands behind the API: the daemon, or a fake in tests.

use proto::{MigrationId, VmName};

use super::problem::Problem;
use super::types::{
    AdoptRequest, Adopted, AgentInfo, CancelOutcome, CheckReport, ClaimReport, ClaimRequest, Forgotten,
    LeftImage, Limits, MigrateRequest, MigrationStatus, RecoverReport, RecoverRequest, RunRequest, VmDetail,
    VmSummary,
};
use crate::progress::Watcher;
use crate::report::Report;

/// Everything that the API can ask for. The calls may block; each runs on a thread where that is allowed, several at
/// a time.
pub trait Control: Send + Sync + 'static {
    /// Who the agent is and what its host can do.
    fn agent(&self) -> AgentInfo;

    /// All VMs that the agent knows.
    fn vms(&self) -> Result<Vec<VmSummary>, Problem>;

    /// All that is known of one VM.
    fn vm(&self, vm: &VmName) -> Result<VmDetail, Problem>;

    /// Takes charge of a QEMU that runs already.
    fn adopt(&self, request: AdoptRequest) -> Result<Adopted, Problem>;

    /// Starts a QEMU from a VM file and takes charge of it.
    fn run(&self, request: RunRequest) -> Result<Adopted, Problem>;

    /// Forgets a VM; its QEMU goes on. Refused while a migration of it is open.
    fn forget(&self, vm: &VmName) -> Result<Forgotten, Problem>;

    /// Makes this host the owner of a VM in the register, or says what that risks.
    fn claim(&self, vm: &VmName, request: ClaimRequest) -> Result<ClaimReport, Problem>;

    /// Pre-flight alone, on both hosts. Changes nothing on either.
    fn check(&self, request: MigrateRequest) -> Result<CheckReport, Problem>;

    /// Starts a migration and returns once it has its epoch and pre-flight of this side has passed; the rest goes on by
    /// itself.
    fn migrate(&self, request: MigrateRequest) -> Result<MigrationStatus, Problem>;

    /// All migrations that the journal holds, newest first, of both roles.
    fn migrations(&self) -> Result<Vec<MigrationStatus>, Problem>;

    /// One migration.
    fn migration(&self, id: &MigrationId) -> Result<MigrationStatus, Problem>;

    /// A view of a migration's progress. Of one that is over, or that nobody drives just now, the last that is known.
    fn watch(&self, id: &MigrationId) -> Result<Watcher, Problem>;

    /// The report of a migration, also while it is under way.
    fn report(&self, id: &MigrationId) -> Result<Report, Problem>;

    /// Asks for a migration's end before COMMITTED, and waits until that is settled one way or the other.
    fn cancel(&self, id: &MigrationId) -> Result<CancelOutcome, Problem>;

    /// Settles a migration in doubt as far as can be done without a guess, or, where the request says so, by the
    /// operator's word.
    fn recover(&self, id: &MigrationId, request: RecoverRequest) -> Result<RecoverReport, Problem>;

    /// Changes limits of a migration under way; answers those in force.
    fn set_limits(&self, id: &MigrationId, limits: Limits) -> Result<Limits, Problem>;

    /// Images that VMs left behind: when they moved away with their disks, or when they ended here.
    fn images(&self) -> Result<Vec<LeftImage>, Problem>;

    /// Removes those that a VM left behind, in one migration or in all; answers them. Unless all of them may go, none
    /// does.
    fn remove_images(&self, vm: &VmName, epoch: Option<u64>) -> Result<Vec<LeftImage>, Problem>;

    /// Removes those of a VM that came here with its disks and ended here; answers them. Unless all of them may go, none
    /// does.
    fn remove_ended_images(&self, vm: &VmName) -> Result<Vec<LeftImage>, Problem>;
}
