//! An agent connects to its controller, with the purpose `Controller`. The controller never connects to an agent.
//!
//! ```text
//! agent                                                         controller
//!   Hello{controller}  ──────────────────────────────────────►
//!            ◄───────────────────────────────────  Welcome::Accepted
//!            ◄───────────────────────────────────  ControllerTerm{term}
//!   FleetReport{1, Begin{host}}  ────────────────────────────►   a snapshot begins
//!   FleetReport{2, Changed{VMs, migrations}} …  ─────────────►
//!   FleetReport{n, Complete}  ───────────────────────────────►   what was not named since Begin does not exist
//!   FleetReport{n + 1, Changed{…}} …  ───────────────────────►   from then on what has changed
//!            ◄───────────────────────────────────  FleetCommand{term, id, verb}
//!   FleetReport{m, Answer{id, answer}}  ─────────────────────►
//! ```
//!
//! Reports of a connection are numbered from 1 on, without a gap. An agent reports at least every ten seconds.
//!
//! A command keeps its id when it is sent again, over another connection or by the next controller. The agent journals the
//! ids of commands that it has begun: a command that is repeated is not carried out again, and is answered with its outcome,
//! or with the state of the move that it has begun. The agent journals the largest term, too, and refuses commands of a
//! smaller one: their sender has been replaced.
//!
//! The verbs are a closed list. None of them names a program, a file, or an option of QEMU.

use serde::{Deserialize, Serialize};

use crate::ids::{CommandId, HostId, MigrationId, VmName};

/// Report of an agent to its controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum FleetReport {
    /// Begins a snapshot. First report of a connection.
    Begin {
        /// The agent's host.
        host: Box<HostFacts>,
    },
    /// Facts that are new, or have changed.
    Changed {
        /// The changes.
        changes: Vec<FleetChange>,
    },
    /// Ends a snapshot: VMs and migrations that it has not named do not exist.
    Complete,
    /// Answers a command.
    Answer {
        /// The command.
        id: CommandId,
        /// The answer.
        answer: CommandAnswer,
    },
    /// Asks for the evacuation of the agent's own host, which is about to be shut down. Answered with
    /// [`Message::HostEvacuation`](super::Message::HostEvacuation).
    EvacuateHost {
        /// Number that the agent has chosen. A request that is repeated keeps it, and begins nothing new.
        request: u64,
        /// Time that is left for it, in seconds; absent if there is no limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        within_s: Option<u64>,
    },
}

/// State of the evacuation of a host, for its agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostEvacuation {
    /// Number of the request that it answers.
    pub request: u64,
    /// Id of the evacuation; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuation: Option<String>,
    /// Standing.
    pub standing: EvacuationStanding,
    /// Description for people: the latest event, or the reason for which the host is not empty.
    pub text: String,
}

/// Standing of the evacuation of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvacuationStanding {
    /// It goes on.
    Underway,
    /// The host is empty.
    Done,
    /// It has ended, or was refused, and the host is not empty.
    Failed,
}

/// Change of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum FleetChange {
    /// Facts of the host.
    Host {
        /// The facts.
        host: Box<HostFacts>,
    },
    /// Use of the host.
    Load {
        /// The use.
        load: HostLoad,
    },
    /// Everything on the host that keeps it from being empty.
    Contents {
        /// The contents, as `engine::evacuation::HostContents`.
        contents: serde_json::Value,
    },
    /// A VM of the host.
    Vm {
        /// The VM.
        vm: Box<VmFacts>,
    },
    /// A VM that has left the host, or has ended.
    VmGone {
        /// The VM.
        vm: VmName,
    },
    /// A migration from or to the host.
    Migration {
        /// The migration.
        migration: Box<MigrationFacts>,
    },
    /// A move that a command has begun.
    Move {
        /// The command.
        command: CommandId,
        /// Its state, as `engine::evacuation::CommandState`.
        state: serde_json::Value,
    },
}

/// Facts of a host that rarely change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Version of the agent.
    pub version: String,
    /// Role of the agent: `host` or `witness`.
    pub role: String,
    /// Address at which other agents reach it.
    pub address: String,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// Hosts that its configuration names: it can send VMs to these.
    pub peers: Vec<HostId>,
    /// True if it accepts no VMs.
    pub cordoned: bool,
    /// Processors.
    pub cpu: CpuFacts,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Memory of each NUMA node, in bytes; empty if there is one node.
    pub numa_bytes: Vec<u64>,
    /// Versions of its QEMUs for arriving VMs, the preferred one first.
    pub qemu_versions: Vec<String>,
    /// Release of its kernel.
    pub kernel: String,
    /// Features that its kernel lacks for VMs to leave.
    pub kernel_lacks: Vec<String>,
    /// True if it has /dev/kvm.
    pub kvm: bool,
}

/// Processors of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuFacts {
    /// Number of processors.
    pub processors: u32,
    /// Maker, as the kernel names it.
    pub vendor: String,
    /// Model, as the kernel names it.
    pub model: String,
    /// Features, as the kernel names them.
    pub features: Vec<String>,
}

/// Use of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostLoad {
    /// Processors in use, in thousandths of one.
    pub busy_milli: u64,
    /// Memory that new programs could have, in bytes.
    pub available_bytes: u64,
    /// Free space for copied disks, in bytes.
    pub pool_free_bytes: u64,
}

/// Facts of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmFacts {
    /// Name.
    pub vm: VmName,
    /// State, as `whimbrel vm list` shows it.
    pub state: String,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Virtual processors.
    pub vcpus: u32,
    /// Processors that its QEMU uses, in thousandths of one.
    pub busy_milli: u64,
    /// Version of its QEMU; empty if that is not known.
    pub qemu_version: String,
    /// Machine type; empty if that is not known.
    pub machine_type: String,
    /// CPU model, as it was requested; empty if it was not.
    pub cpu_model: String,
    /// True if it runs on KVM.
    pub kvm: bool,
    /// Disks that would be copied with it, in bytes.
    pub disk_bytes: u64,
    /// Its migration that is not over, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationId>,
}

/// Facts of a migration, as one of its hosts knows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationFacts {
    /// Id.
    pub migration: MigrationId,
    /// Source host.
    pub from: HostId,
    /// Destination host.
    pub to: HostId,
    /// State of the handover in the journal.
    pub state: String,
    /// Standing.
    pub standing: MigrationStanding,
    /// Reason of a failure, or the event that it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Progress, at its source while it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<MigrationProgress>,
}

/// Standing of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationStanding {
    /// It goes on by itself.
    Underway,
    /// The VM is at its destination.
    Done,
    /// The VM is at its source, unharmed.
    Failed,
    /// The VM ended at its source.
    VmEnded,
    /// It is not known which host has the VM.
    InDoubt,
}

impl MigrationStanding {
    /// Returns true if nothing more will happen without a request.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::VmEnded)
    }
}

/// Progress of a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationProgress {
    /// Present activity, as `whimbrel watch` names it.
    pub phase: String,
    /// Memory and disks that have to be sent in this round, in bytes.
    pub round_bytes: u64,
    /// The part of `round_bytes` that is still to be sent, in bytes.
    pub remaining_bytes: u64,
    /// Bytes sent since the beginning, on the wire.
    pub sent_bytes: u64,
    /// Sending rate, in bytes per second on the wire.
    pub rate_bytes_per_s: u64,
    /// Rate at which the guest writes pages, in bytes per second.
    pub dirty_rate_bytes_per_s: u64,
    /// Measured downtime, in microseconds; absent before it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_us: Option<u64>,
    /// Time since the request, in microseconds.
    pub elapsed_us: u64,
}

/// Action that a controller requests from an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "kebab-case")]
pub enum CommandVerb {
    /// Starts a migration from this host. Answered with the state of the move.
    Move(MoveOrder),
    /// Runs the pre-flight checks of a migration from this host.
    Check(MoveOrder),
    /// Cancels a move. If the agent has never seen its command, that command will never begin one.
    Cancel {
        /// Command that has begun the move.
        of: CommandId,
    },
    /// Changes limits of a move.
    Limit {
        /// Command that has begun the move.
        of: CommandId,
        /// Limit on the sending rate, in bytes per second; 0 for none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bandwidth_bytes_per_s: Option<u64>,
        /// Longest downtime, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_downtime_ms: Option<u64>,
    },
    /// Returns the report of a migration from this host.
    Report {
        /// The migration.
        migration: MigrationId,
    },
    /// States what the agent knows at this moment.
    Facts {
        /// Commands about which it states what it knows.
        commands: Vec<CommandId>,
    },
    /// Accepts no more VMs, until `uncordon`.
    Cordon,
    /// Accepts VMs again.
    Uncordon,
}

impl CommandVerb {
    /// Returns true if the command takes a moment only, and has to be carried out in the order in which it was sent.
    pub fn is_in_order(&self) -> bool {
        matches!(self, Self::Limit { .. } | Self::Cordon | Self::Uncordon)
    }
}

/// Order to move a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveOrder {
    /// The VM.
    pub vm: VmName,
    /// Destination.
    pub to: HostId,
    /// Limit on the sending rate, in bytes per second; absent for that of the source's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Policy for the stop; absent for that of the source's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<MovePolicy>,
    /// Compare all of memory and of copied disks after the stop.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verify: bool,
}

/// Policy for the stop of a VM, by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MovePolicy {
    /// When more rounds do not shorten the downtime any further.
    Pattern,
    /// After one pass over memory; the rest follows by post-copy.
    Hybrid,
    /// By whichever way is expected to keep the limits.
    Sla,
}

/// Answer to a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum CommandAnswer {
    /// State of a move, also where it could not begin.
    Move {
        /// The state, as `engine::evacuation::CommandState`.
        state: serde_json::Value,
    },
    /// Result of the pre-flight checks, as the API's `CheckReport`.
    Checked {
        /// The result.
        report: serde_json::Value,
    },
    /// The report of a migration, as the API's `Report`.
    Report {
        /// The report.
        report: serde_json::Value,
    },
    /// Facts about this moment, as `engine::evacuation::HostFacts`.
    Facts {
        /// The facts.
        facts: serde_json::Value,
    },
    /// Done.
    Done,
    /// The command was not carried out: the API's `Problem`.
    Refused {
        /// The problem.
        problem: serde_json::Value,
    },
    /// The command is of an older term than one that the agent has seen: its sender has been replaced.
    Stale {
        /// The largest term that it has seen.
        largest_term: u64,
    },
}
