//! Requests and answers of the controller's API.

use std::collections::BTreeMap;

use engine::evacuation::{EvacuationRequest, EvacuationStatus};
use proto::message::{HostLoad, MovePolicy};
use proto::{HostId, MigrationId, VmName};
use serde::{Deserialize, Serialize};

/// The controller and its fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetInfo {
    /// Name of the controller.
    pub controller: HostId,
    /// Version of the program.
    pub version: String,
    /// Term of the controller: larger than those of all controllers before it.
    pub term: u64,
    /// Address for agents.
    pub listen: String,
    /// Process id of the controller.
    pub pid: u32,
    /// Hosts that are known.
    pub hosts: u32,
    /// Hosts that are connected.
    pub connected: u32,
    /// Hosts that accept no VMs.
    pub cordoned: u32,
    /// VMs of all hosts.
    pub vms: u32,
    /// Migrations that are under way.
    pub migrations: u32,
    /// Migrations in doubt.
    pub in_doubt: u32,
    /// Evacuations that have not ended.
    pub evacuations: Vec<String>,
    /// Number of the last event.
    pub last_event: u64,
}

/// A host of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetHost {
    /// Name.
    pub host: HostId,
    /// True if its agent is connected.
    pub connected: bool,
    /// Time of the last report of its agent (RFC 3339, UTC).
    pub last_report: Option<String>,
    /// Role of its agent: `host` or `witness`.
    pub role: String,
    /// Version of its agent.
    pub version: String,
    /// Address at which other agents reach it.
    pub address: String,
    /// True if it accepts no VMs.
    pub cordoned: bool,
    /// Number of its processors.
    pub processors: u32,
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// Its use.
    pub load: HostLoad,
    /// Versions of its QEMUs for arriving VMs.
    pub qemu_versions: Vec<String>,
    /// Release of its kernel.
    pub kernel: String,
    /// VMs that it owns and runs.
    pub vms: Vec<VmName>,
    /// Everything that keeps it from being empty; absent if that is not known.
    pub remains: Option<Vec<String>>,
}

/// A VM of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetVm {
    /// Name.
    pub vm: VmName,
    /// Host that owns it.
    pub host: HostId,
    /// True if the agent of its host is connected: what follows is its last report otherwise.
    pub connected: bool,
    /// State, as `whimbrel vm list` shows it.
    pub state: String,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Virtual processors.
    pub vcpus: u32,
    /// Processors that it uses, in thousandths of one.
    pub busy_milli: u64,
    /// Version of its QEMU.
    pub qemu_version: String,
    /// Its migration that is not over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<FleetMigration>,
}

/// Migration of a VM of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetMigration {
    /// Id.
    pub migration: MigrationId,
    /// Destination.
    pub to: HostId,
    /// Bytes that are left of the present round.
    pub remaining_bytes: u64,
    /// Sending rate, in bytes per second.
    pub rate_bytes_per_s: u64,
}

/// Event of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetEvent {
    /// Number, in the order of events, without a gap.
    pub number: u64,
    /// Time (RFC 3339, UTC).
    pub time: String,
    /// Kind, for programs: `host-connected`, `vm-appeared`, `migration-ended`, `evacuation`, …
    pub kind: String,
    /// The host, if the event is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostId>,
    /// The VM, if the event is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmName>,
    /// The evacuation to which the event belongs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuation: Option<String>,
    /// Description for people.
    pub text: String,
}

/// Way in which VMs are moved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MoveOptions {
    /// Rate of all moves together, in bytes per second; absent for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Most moves of a host at the same time; absent for the planner's own limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_host: Option<u32>,
    /// Policy for the stop; absent for that of each source's configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<MovePolicy>,
    /// Compare all of memory and of copied disks after each stop.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub verify: bool,
}

/// Request to empty hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvacuateRequest {
    /// The hosts.
    pub hosts: Vec<HostId>,
    /// Hosts to which their VMs go; empty for all others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub to: Vec<HostId>,
    /// Deadline, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_unix_ms: Option<u64>,
    /// Begin although the deadline is not expected to be kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_late: bool,
    /// Move what can be moved where some VMs cannot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// Priorities of VMs: those with a higher one move earlier, and get more of the links.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub priorities: BTreeMap<VmName, i32>,
    /// Way in which VMs are moved.
    #[serde(default)]
    pub moves: MoveOptions,
    /// Only show the plan.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// Request to bring back what left a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReturnRequest {
    /// Way in which VMs are moved.
    pub moves: MoveOptions,
    /// Move what can be moved where some VMs cannot.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// Only show the plan.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// An evacuation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvacuationInfo {
    /// Id.
    pub id: String,
    /// Time at which it was requested (RFC 3339, UTC).
    pub created: String,
    /// The request.
    pub request: EvacuationRequest,
    /// Way in which VMs are moved.
    pub moves: MoveOptions,
    /// Its state.
    pub status: EvacuationStatus,
    /// Number of the last event when this was written: later ones are still to come.
    pub last_event: u64,
}
