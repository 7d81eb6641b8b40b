//! Requests and answers of the API.

use std::collections::BTreeMap;
use std::path::PathBuf;

use engine::handover::Role;
use proto::message::{DiskWish, Finding, Severity};
use proto::{HostId, MigrationId, VmName};
use serde::{Deserialize, Serialize};

use super::choices::{
    Compress, Deltas, OnLimit, RamChoice, SoftPages, StopPolicy, ThrottleCpu, ThrottleWrites,
};
use crate::progress::{Progress, Standing};

/// Who the agent is and what its host can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentInfo {
    /// Version of the program.
    pub version: String,
    /// The host's name in the configuration.
    pub host: HostId,
    /// `host` or `witness`.
    pub role: String,
    /// Where peers reach it.
    pub listen: String,
    /// Its peers' names.
    pub peers: Vec<HostId>,
    /// The witness, where there is one.
    pub register: Option<HostId>,
    /// Release of the running kernel.
    pub kernel: String,
    /// What migrations need of the kernel, and whether it is there.
    pub kernel_features: Vec<KernelFeature>,
    /// Process id of the agent.
    pub pid: u32,
    /// Images that arriving disks may have something in common with.
    #[serde(default)]
    pub templates: Vec<TemplateInfo>,
}

/// A template of the agent's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateInfo {
    /// Its file.
    pub path: PathBuf,
    /// Whether anything is taken from it.
    pub state: TemplateState,
    /// How much of it is not zeros, in bytes, once it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_bytes: Option<u64>,
    /// Why nothing is taken from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Whether anything is taken from a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TemplateState {
    /// Not yet: what is in it is being found out.
    BeingRead,
    /// What arriving disks have in common with it.
    Ready,
    /// It cannot be read.
    Failed,
}

/// Something that migrations need of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFeature {
    /// Its name, e.g. `PAGEMAP_SCAN`.
    pub name: String,
    /// Whether it is there.
    pub present: bool,
    /// What to do if it is not.
    pub advice: String,
}

/// A VM in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSummary {
    /// Its name.
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

/// All that is known of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmDetail {
    /// What a list says of it.
    #[serde(flatten)]
    pub summary: VmSummary,
    /// Its QMP socket.
    pub qmp: Option<PathBuf>,
    /// When the agent took charge of it (RFC 3339, UTC).
    pub adopted: String,
    /// Kind of its RAM (`anonymous`, `memfd`, …).
    pub ram_kind: String,
    /// Its description, as `qemu::VmDescription`.
    pub description: serde_json::Value,
    /// The hosts that it needs at present; two while it is between them.
    pub needs_hosts: Vec<HostId>,
    /// Pages that it lacks while it runs at its destination already, as far as this side knows: until the last one has come
    /// it needs both hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_pages: Option<u64>,
    /// What is worth knowing about it.
    pub findings: Vec<Finding>,
}

/// Which running QEMU to take charge of. Exactly one of `pid`, `qmp` and `qemu_name` names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// What to call the VM; by default the name that QEMU was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<VmName>,
    /// By process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// By its QMP socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qmp: Option<PathBuf>,
    /// By the name that QEMU was given (`-name`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_name: Option<String>,
    /// Options of QEMU's command line that are not known and are carried over as they stand.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_options: Vec<String>,
}

/// A VM file to start a QEMU from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// Where the file lies, absolute: for error messages, and relative paths in it are relative to its directory.
    pub path: PathBuf,
    /// The file's contents (TOML).
    pub text: String,
    /// Leave the guest paused.
    #[serde(default)]
    pub paused: bool,
    /// Start it also where it may run on another host, or from images that a VM left behind.
    #[serde(default)]
    pub i_know_the_risk: bool,
}

/// A VM that the agent has taken charge of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adopted {
    /// The VM.
    #[serde(flatten)]
    pub vm: VmSummary,
    /// What is worth knowing about it; none of it stands in the way of adopting.
    pub findings: Vec<Finding>,
}

/// A VM that the agent takes care of no longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forgotten {
    /// The VM.
    pub vm: VmName,
    /// Its QEMU, which goes on; absent if it had ended.
    pub pid: Option<u32>,
    /// Whether the register has released it; absent where its QEMU goes on, or the register has another owner or none.
    pub released: Option<bool>,
}

/// A correction of the register of owners.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimRequest {
    /// Carry it out; without this the answer only says what it risks.
    #[serde(default)]
    pub i_know_the_risk: bool,
}

/// What the register says of a VM, and what correcting it risks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimReport {
    /// The VM.
    pub vm: VmName,
    /// Who was its owner; absent if none was.
    pub owner: Option<HostId>,
    /// What making this host the owner would risk, or risked, line by line; empty if nothing.
    pub risked: Vec<String>,
    /// Whether this host is the owner now.
    pub done: bool,
}

/// A migration to be started or checked. What is absent is taken from the agent's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// The VM.
    pub vm: VmName,
    /// Where to: a name under `[hosts]` of the configuration.
    pub to: HostId,
    /// Only pre-flight.
    #[serde(default)]
    pub check_only: bool,
    /// When the guest is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<StopPolicy>,
    /// Longest downtime, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_downtime_ms: Option<u64>,
    /// Most rounds of pre-copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rounds: Option<u32>,
    /// How often all that is dirty goes before the rest comes after the guest, with the policy [`StopPolicy::Hybrid`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hybrid_passes: Option<u32>,
    /// How long all of it may take, in milliseconds, with the policy [`StopPolicy::Sla`]; 0 for as long as it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total_ms: Option<u64>,
    /// What to do when no more rounds are to be made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_limit: Option<OnLimit>,
    /// Cap on the sending rate, in bytes per second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Number of data streams.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<u16>,
    /// Compare all of memory and of copied disks after the stop; makes the downtime much longer.
    #[serde(default)]
    pub verify: bool,
    /// How fast the guest may write to disks that are copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle_writes: Option<ThrottleWrites>,
    /// How fast the guest's processors may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle_cpu: Option<ThrottleCpu>,
    /// Whether pages of disks that the destination has already are referred to, and not sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub references: Option<bool>,
    /// How pages are compressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compress>,
    /// Whether only what changed is sent of pages that are sent again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deltas: Option<Deltas>,
    /// Which of the guest's memory is not sent because it can do without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soft_pages: Option<SoftPages>,
    /// Kind of RAM at the destination.
    #[serde(default)]
    pub ram: RamChoice,
    /// Options of QEMU's command line that are not known and are carried over as they stand.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_options: Vec<String>,
    /// Whether disks are shared or copied.
    #[serde(default)]
    pub disks: DiskWish,
    /// The same for single disks, by their names in the description.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub disk: BTreeMap<String, DiskWish>,
    /// Copy disks without the internal snapshots of their images.
    #[serde(default)]
    pub leave_snapshots: bool,
}

impl MigrateRequest {
    /// A request that leaves everything to the configuration.
    pub fn new(vm: VmName, to: HostId) -> Self {
        Self {
            vm,
            to,
            check_only: false,
            policy: None,
            max_downtime_ms: None,
            max_rounds: None,
            hybrid_passes: None,
            max_total_ms: None,
            on_limit: None,
            bandwidth_bytes_per_s: None,
            streams: None,
            verify: false,
            throttle_writes: None,
            throttle_cpu: None,
            references: None,
            compression: None,
            deltas: None,
            soft_pages: None,
            ram: RamChoice::Auto,
            allow_options: Vec::new(),
            disks: DiskWish::Auto,
            disk: BTreeMap::new(),
            leave_snapshots: false,
        }
    }
}

/// What pre-flight found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// The VM.
    pub vm: VmName,
    /// Where from.
    pub from: HostId,
    /// Where to.
    pub to: HostId,
    /// Nothing stands in the way.
    pub possible: bool,
    /// Kind of RAM that the VM would get; absent if that was not reached.
    pub ram_kind: Option<String>,
    /// What this side found.
    pub source_findings: Vec<Finding>,
    /// What the other side found.
    pub destination_findings: Vec<Finding>,
}

impl CheckReport {
    /// Whether findings hold a blocker.
    pub fn blocked(findings: &[Finding]) -> bool {
        findings.iter().any(|finding| finding.severity == Severity::Blocker)
    }
}

/// How a migration stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// Which migration.
    #[serde(flatten)]
    pub id: MigrationId,
    /// Which side this agent is on.
    pub role: Role,
    /// Where from.
    pub from: HostId,
    /// Where to.
    pub to: HostId,
    /// The handover's state in the journal, by its name in docs/handover-table.md.
    pub state: String,
    /// The same in one of four words.
    pub standing: Standing,
    /// What there is to say: why it failed, what it waits for.
    pub message: Option<String>,
    /// What can be done about it.
    pub advice: Option<String>,
    /// When it began (RFC 3339, UTC).
    pub created: String,
    /// When the journal last changed it (RFC 3339, UTC).
    pub updated: String,
    /// How far it is, if this agent drives it right now.
    pub progress: Option<Progress>,
}

/// An image that a VM has left behind: when it moved away with its disks, or when it ended here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftImage {
    /// The migration in which it was left.
    #[serde(flatten)]
    pub migration: MigrationId,
    /// The destination of that migration; this host where the VM ended here.
    pub to: HostId,
    /// True where the VM ended here; its disk may be nowhere else.
    #[serde(default)]
    pub ended: bool,
    /// The disk, by its name in the description.
    pub disk: String,
    /// The image's file.
    pub path: PathBuf,
    /// What it takes on this host, in bytes.
    pub taken_bytes: u64,
    /// Why it is not removed; absent where nothing speaks against it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_because: Option<String>,
}

/// What became of a request to cancel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum CancelOutcome {
    /// ABORTED is journalled; the VM is at its source and runs as before.
    Cancelled,
    /// The point of no return had been passed; it goes on, or is in doubt.
    TooLate {
        /// How it stands.
        standing: Standing,
        /// The handover's state in the journal.
        state: String,
    },
    /// It was over already.
    AlreadyOver {
        /// How it ended.
        standing: Standing,
    },
}

/// What an operator wants done about a migration in doubt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecoverRequest {
    /// What to do.
    pub action: RecoverAction,
    /// What the register of owners has to say in it.
    #[serde(default, skip_serializing_if = "RegisterSay::is_default")]
    pub register: RegisterSay,
    /// The operator has read what is risked and takes it upon himself. Without it, an action that guesses is only
    /// described.
    #[serde(default)]
    pub i_know_the_risk: bool,
}

/// What an operator wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecoverAction {
    /// Ask the peer and the register once more, and do what they say. Risks nothing.
    Ask,
    /// Run the VM here: the operator knows that the other side does not run it and never will.
    RunHere,
    /// Give this side's copy up: the operator knows that the other side has the VM.
    GiveUpHere,
}

/// What the register of owners has to say in an operator's decision. Means nothing where none is configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegisterSay {
    /// It is asked, and what it says is done.
    #[default]
    Asked,
    /// It is changed, even if the other side has won there. To run the VM on the source only.
    Overruled,
    /// It is not asked: it is lost for good.
    None,
}

impl RegisterSay {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// What is known, what is risked, and what was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoverReport {
    /// How the migration stands now.
    pub status: MigrationStatus,
    /// What is known, line by line.
    pub known: Vec<String>,
    /// What the action would risk, line by line; empty if nothing.
    pub risked: Vec<String>,
    /// Whether the action was carried out, or nothing was left to do.
    pub done: bool,
    /// What was done, or what to do next.
    pub message: String,
}

/// Limits that can be changed while a migration runs. In a request, what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Cap on the sending rate, in bytes per second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Longest downtime, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_downtime_ms: Option<u64>,
    /// Most rounds of pre-copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rounds: Option<u32>,
    /// How long all of it may take, in milliseconds from its request on, with the policy [`StopPolicy::Sla`]; 0 for as long
    /// as it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total_ms: Option<u64>,
}
