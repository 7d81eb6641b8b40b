//! Requests and answers of the API.

use std::collections::BTreeMap;
use std::path::PathBuf;

use engine::handover::Role;
use proto::message::{DiskMode, Finding};
use proto::{HostId, MigrationId, VmName};
use serde::{Deserialize, Serialize};

use super::choices::{NetworkCheck, RamChoice};
use super::forecast::Forecast;
use super::options::{InvalidOption, MigrationOptions, MigrationSettings};
use crate::new_address::NewAddress;
use crate::progress::{Progress, Standing};

/// Identity of the agent and capabilities of its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentInfo {
    /// Version of the program.
    pub version: String,
    /// The host's name in the configuration.
    pub host: HostId,
    /// `host` or `witness`.
    pub role: String,
    /// Address for peers.
    pub listen: String,
    /// Names of its peers.
    pub peers: Vec<HostId>,
    /// The witness, if there is one.
    pub registry: Option<HostId>,
    /// Release of the running kernel.
    pub kernel: String,
    /// Kernel features that migrations need, and their presence.
    pub kernel_features: Vec<KernelFeature>,
    /// Process id of the agent.
    pub pid: u32,
    /// True if the host accepts no VMs.
    #[serde(default)]
    pub cordoned: bool,
    /// The controller; absent if none is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller: Option<ControllerInfo>,
    /// Images that arriving disks may have content in common with.
    #[serde(default)]
    pub templates: Vec<TemplateInfo>,
}

/// The controller of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControllerInfo {
    /// Name of the controller.
    pub name: HostId,
    /// True if the agent is connected to it.
    pub connected: bool,
}

/// State of the cordon of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cordon {
    /// The host.
    pub host: HostId,
    /// True if it accepts no VMs.
    pub cordoned: bool,
}

/// Request to evacuate the agent's own host, which is about to be shut down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvacuateHostRequest {
    /// Time that is left for it, in seconds; absent if there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_s: Option<u64>,
}

/// A template of the agent's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateInfo {
    /// Path of its file.
    pub path: PathBuf,
    /// State of the template.
    pub state: TemplateState,
    /// Bytes that are not zeros; absent until the template was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_bytes: Option<u64>,
    /// Reason for which it cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// State of a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TemplateState {
    /// It is being read, and cannot be used yet.
    Indexing,
    /// It is used for content that arriving disks have in common with it.
    Ready,
    /// It cannot be read.
    Failed,
}

/// A kernel feature that migrations need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFeature {
    /// Name of the feature, e.g. `PAGEMAP_SCAN`.
    pub name: String,
    /// True if the kernel has it.
    pub present: bool,
    /// Advice if it is missing.
    pub advice: String,
}

/// A VM in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSummary {
    /// Name of the VM.
    pub vm: VmName,
    /// Process id of its QEMU, if it runs here.
    pub pid: Option<u32>,
    /// QEMU's run state (`running`, `paused`, …), or `gone`, `unreachable`, `leaving`, `arriving`, `in-doubt`.
    pub state: String,
    /// Size of its RAM, in bytes.
    pub ram_bytes: u64,
    /// Version of its QEMU; empty if it is not known.
    pub qemu_version: String,
    /// Its migration that is not over, if there is one.
    pub migration: Option<MigrationId>,
}

/// All details of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmDetail {
    /// The VM's entry in the list.
    #[serde(flatten)]
    pub summary: VmSummary,
    /// Its QMP socket.
    pub qmp: Option<PathBuf>,
    /// Time at which the agent adopted it (RFC 3339, UTC).
    pub adopted: String,
    /// Kind of its RAM (`anonymous`, `memfd`, …).
    pub ram_kind: String,
    /// Its description, as `qemu::VmDescription`.
    pub description: serde_json::Value,
    /// The hosts that it needs at present; two while it is between them.
    pub needs_hosts: Vec<HostId>,
    /// Missing pages while it runs at its destination already, as far as this side knows: until the last one has
    /// arrived it needs both hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_pages: Option<u64>,
    /// Findings about it.
    pub findings: Vec<Finding>,
}

/// A running QEMU to be adopted, named by exactly one of `pid`, `qmp` and `qemu_name`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// Name for the VM; by default the name that QEMU was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<VmName>,
    /// Process id of QEMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Path of its QMP socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qmp: Option<PathBuf>,
    /// The name that QEMU was given (`-name`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_name: Option<String>,
    /// Unknown options of QEMU's command line that are copied unchanged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_options: Vec<String>,
}

/// A VM file from which a QEMU is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// Absolute path of the file: for error messages, and relative paths in it are relative to its directory.
    pub path: PathBuf,
    /// The file's contents (TOML).
    pub text: String,
    /// Leave the guest paused.
    #[serde(default)]
    pub paused: bool,
    /// Start it also where it may run on another host, or from images that a VM left behind.
    #[serde(default)]
    pub accept_risk: bool,
}

/// A VM that the agent has adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adopted {
    /// The VM.
    #[serde(flatten)]
    pub vm: VmSummary,
    /// Findings about it; none of them prevents adopting.
    pub findings: Vec<Finding>,
}

/// A VM that the agent does not manage any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forgotten {
    /// The VM.
    pub vm: VmName,
    /// Its QEMU, which goes on; absent if it had ended.
    pub pid: Option<u32>,
    /// True if the ownership registry has released it; absent if its QEMU goes on, or the registry has another owner or
    /// none.
    pub released: Option<bool>,
}

/// A correction of the ownership registry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimRequest {
    /// Carry it out; without this the answer only reports the risk.
    #[serde(default)]
    pub accept_risk: bool,
}

/// The ownership registry's entry of a VM, and the risk of correcting it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimReport {
    /// The VM.
    pub vm: VmName,
    /// Previous owner; absent if there was none.
    pub owner: Option<HostId>,
    /// Risks of making this host the owner, line by line; empty if there are none.
    pub risked: Vec<String>,
    /// True if this host is the owner now.
    pub done: bool,
}

/// A migration to be started or checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// The VM.
    pub vm: VmName,
    /// Destination: a name under `[hosts]` of the configuration.
    pub to: HostId,
    /// Run the pre-flight checks only.
    #[serde(default)]
    pub check_only: bool,
    /// With `check_only`: forecast the migration, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forecast: bool,
    /// Options; absent ones are taken from the configuration.
    #[serde(default)]
    pub options: MigrationOptions,
    /// Compare all of memory and of copied disks after the stop; makes the downtime much longer.
    #[serde(default)]
    pub verify: bool,
    /// Kind of RAM at the destination.
    #[serde(default)]
    pub ram: RamChoice,
    /// Unknown options of QEMU's command line that are copied unchanged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_options: Vec<String>,
    /// Choice between sharing and copying disks.
    #[serde(default)]
    pub disks: DiskMode,
    /// The choice for single disks, by their names in the description.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub disk: BTreeMap<String, DiskMode>,
    /// Copy disks without the internal snapshots of their images.
    #[serde(default)]
    pub drop_snapshots: bool,
    /// For a VM that moves to another network: its addresses, each with the one by which it is reached there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub new_addresses: Vec<NewAddress>,
}

impl MigrateRequest {
    /// Creates a request that leaves everything to the configuration.
    pub fn new(vm: VmName, to: HostId) -> Self {
        Self {
            vm,
            to,
            check_only: false,
            forecast: false,
            options: MigrationOptions::default(),
            verify: false,
            ram: RamChoice::Auto,
            allow_options: Vec::new(),
            disks: DiskMode::Auto,
            disk: BTreeMap::new(),
            drop_snapshots: false,
            new_addresses: Vec::new(),
        }
    }

    /// Refuses impossible options; `settings` are those of the configuration, replaced by those of this request.
    pub fn check_options(&self, settings: &MigrationSettings) -> Result<(), InvalidOption> {
        NewAddress::check_all(&self.new_addresses)?;
        if !self.new_addresses.is_empty() && self.options.network_check == Some(NetworkCheck::Require) {
            return Err(InvalidOption {
                option: "network_check",
                what: "a VM that gets new addresses moves to another network".to_owned(),
                advice: "omit --network-check require, or --new-address".to_owned(),
            });
        }
        settings.check_requested(&self.options, self.verify)
    }
}

/// Result of the pre-flight checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// The VM.
    pub vm: VmName,
    /// Source host.
    pub from: HostId,
    /// Destination host.
    pub to: HostId,
    /// True if there is no blocker.
    pub possible: bool,
    /// Kind of RAM that the VM would get; absent if the check did not reach that point.
    pub ram_kind: Option<String>,
    /// Findings of the source.
    pub source_findings: Vec<Finding>,
    /// Findings of the destination.
    pub destination_findings: Vec<Finding>,
    /// Forecast of the migration, if it was requested and the migration is possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Box<Forecast>>,
}

/// A migration to be forecast.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForecastRequest {
    /// The migration, as it would be requested.
    pub migration: MigrateRequest,
    /// Measure the VM and the link anew, also if measurements of the last hour and the last day are there.
    #[serde(default)]
    pub fresh: bool,
}

/// Status of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// Id of the migration.
    #[serde(flatten)]
    pub id: MigrationId,
    /// Role of this agent.
    pub role: Role,
    /// Source host.
    pub from: HostId,
    /// Destination host.
    pub to: HostId,
    /// The handover's state in the journal, by its name in docs/handover-table.md.
    pub state: String,
    /// Standing of the migration, in one of a few words.
    pub standing: Standing,
    /// Human-readable message: the reason of a failure, or the event that it waits for.
    pub message: Option<String>,
    /// Human-readable advice.
    pub advice: Option<String>,
    /// Time at which it began (RFC 3339, UTC).
    pub created: String,
    /// Time of its last change in the journal (RFC 3339, UTC).
    pub updated: String,
    /// Progress, if this agent drives it at present.
    pub progress: Option<Progress>,
}

/// Outcome of a request to cancel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum CancelOutcome {
    /// ABORTED is journalled; the VM is at its source and runs as before.
    Cancelled,
    /// The commit point had been passed; the migration goes on, or is in doubt.
    TooLate {
        /// Standing of the migration.
        standing: Standing,
        /// The handover's state in the journal.
        state: String,
    },
    /// It was over already.
    AlreadyOver {
        /// Standing of the migration.
        standing: Standing,
    },
}

/// An operator's request for a migration in doubt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecoverRequest {
    /// The action.
    pub action: RecoverAction,
    /// Use of the ownership registry in it.
    #[serde(default, skip_serializing_if = "RegistryUse::is_default")]
    pub registry: RegistryUse,
    /// The operator has read the risk and accepts it. Without it, an action that guesses is only described.
    #[serde(default)]
    pub accept_risk: bool,
}

/// An operator's action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecoverAction {
    /// Ask the peer and the ownership registry once more, and follow their answer. Risks nothing.
    Ask,
    /// Run the VM here: the operator knows that the peer does not run it and never will.
    RunHere,
    /// Discard this host's copy: the operator knows that the peer has the VM.
    DiscardCopy,
}

/// Use of the ownership registry in an operator's decision. Has no meaning if none is configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegistryUse {
    /// It is asked, and its answer is followed.
    #[default]
    Asked,
    /// It is changed, even if the peer is the owner there. To run the VM on the source only.
    Overridden,
    /// It is not asked: it is lost for good.
    None,
}

impl RegistryUse {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Known facts, risks, and the result of a recovery request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoverReport {
    /// Status of the migration now.
    pub status: MigrationStatus,
    /// Known facts, line by line.
    pub known: Vec<String>,
    /// Risks of the action, line by line; empty if there are none.
    pub risked: Vec<String>,
    /// True if the action was carried out, or there was nothing to do.
    pub done: bool,
    /// The result, or the next step.
    pub message: String,
}

/// Limits that can be changed while a migration runs. Values that are absent from a request do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Cap on the sending rate, in bytes per second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Longest downtime, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_downtime_ms: Option<u64>,
    /// Maximum number of passes over the dirty pages in pre-copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_passes: Option<u32>,
    /// Limit on the total time, in milliseconds since the request for the migration, with the policy
    /// [`StopPolicy::Sla`]; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total_ms: Option<u64>,
}

impl From<&Limits> for MigrationOptions {
    fn from(limits: &Limits) -> Self {
        Self {
            bandwidth_bytes_per_s: limits.bandwidth_bytes_per_s,
            max_downtime_ms: limits.max_downtime_ms,
            max_passes: limits.max_passes,
            max_total_ms: limits.max_total_ms,
            ..Self::default()
        }
    }
}
