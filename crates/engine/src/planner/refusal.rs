//! Reasons for which there is no plan.

use serde::{Deserialize, Serialize};

use super::obstacle::Obstacle;

/// Reason for which a request is refused. [`Refusal::advice`] is the way out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "refused", rename_all = "kebab-case")]
pub enum Refusal {
    /// A name is used twice.
    #[error("the inventory has two hosts or two VMs named {name}")]
    DuplicateName {
        /// Name.
        name: String,
    },
    /// A host is not in the inventory.
    #[error("host {host} is not in the inventory; {named_by} names it")]
    UnknownHost {
        /// Name of the host.
        host: String,
        /// The VM or the part of the request that names it.
        named_by: String,
    },
    /// A VM is not in the inventory.
    #[error("VM {vm} is not in the inventory; {named_by} names it")]
    UnknownVm {
        /// Name of the VM.
        vm: String,
        /// The VM or the part of the request that names it.
        named_by: String,
    },
    /// A platform is not in the inventory.
    #[error("platform {platform} is not in the inventory; {named_by} has it")]
    UnknownPlatform {
        /// Name of the platform.
        platform: String,
        /// The host or VM that has it.
        named_by: String,
    },
    /// A setting is out of its range.
    #[error("{setting} is out of its range")]
    Setting {
        /// Name of the setting.
        setting: String,
    },
    /// VMs follow each other in a circle, so that none of them can move first.
    #[error("the affinity is cyclic: {} follow each other", vms.join(", "))]
    CyclicAffinity {
        /// VMs of the circle.
        vms: Vec<String>,
    },
    /// VMs have to run on one host, and have to stay apart.
    #[error("VMs {vm} and {other} have to run on one host, and apart by the label {label}")]
    ContradictoryAffinity {
        /// One VM.
        vm: String,
        /// The other one.
        other: String,
        /// Label of both.
        label: String,
    },
    /// A VM that has to leave may not move.
    #[error("VM {vm} has to leave host {host}: {why}")]
    Immovable {
        /// VM.
        vm: String,
        /// Its host.
        host: String,
        /// Reason.
        why: Obstacle,
    },
    /// No host accepts VMs.
    #[error("no host is left that accepts VMs")]
    NoTargets,
    /// The targets have less free memory than the VMs need.
    #[error("{hosts} would be overfull: the VMs need {needs_mib} MiB, and {free_mib} are free")]
    Overfull {
        /// The only target, or the number of targets.
        hosts: String,
        /// Memory of the VMs, in MiB.
        needs_mib: u64,
        /// Free memory of all targets, in MiB.
        free_mib: u64,
    },
    /// A VM has no host to go to.
    #[error("VM {vm} of host {host} has no host to go to: {}", summary(obstacles))]
    NoTarget {
        /// VM.
        vm: String,
        /// Its host.
        host: String,
        /// Obstacles, each with the number of hosts where it is the first one, the most frequent first.
        obstacles: Vec<(Obstacle, u32)>,
    },
    /// Moves wait for each other's memory, and no third host has room.
    #[error("{} wait for each other's room, and no other host has room for one of them", vms.join(", "))]
    NoOrder {
        /// VMs.
        vms: Vec<String>,
    },
    /// The deadline cannot be kept.
    #[error(
        "the moves need {} s, and {} s are left: host {bottleneck} alone has to move {} MB over its link",
        needs_ns.div_ceil(1_000_000_000), has_ns / 1_000_000_000, bottleneck_bytes / 1_000_000
    )]
    Deadline {
        /// Expected time, in nanoseconds.
        needs_ns: u64,
        /// Time until the deadline, in nanoseconds.
        has_ns: u64,
        /// Host whose link is busy for longest.
        bottleneck: String,
        /// Bytes that it sends and receives.
        bottleneck_bytes: u64,
        /// VMs that are where they should be when the time has passed.
        in_time: usize,
        /// VMs that are not.
        late: usize,
    },
}

/// Returns the most frequent obstacles in a line.
fn summary(obstacles: &[(Obstacle, u32)]) -> String {
    let mut parts: Vec<String> = obstacles
        .iter()
        .take(3)
        .map(|(obstacle, hosts)| match hosts {
            1 => format!("{obstacle} (1 host)"),
            hosts => format!("{obstacle} ({hosts} hosts)"),
        })
        .collect();
    if parts.is_empty() {
        parts.push("there is no other host".to_owned());
    }
    parts.join("; ")
}

impl Refusal {
    /// Returns true if the inventory or the request is wrong in itself, and no fleet could make up for it.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::DuplicateName { .. }
            | Self::UnknownHost { .. }
            | Self::UnknownVm { .. }
            | Self::UnknownPlatform { .. }
            | Self::Setting { .. }
            | Self::CyclicAffinity { .. }
            | Self::ContradictoryAffinity { .. } => true,
            Self::Immovable { .. }
            | Self::NoTargets
            | Self::Overfull { .. }
            | Self::NoTarget { .. }
            | Self::NoOrder { .. }
            | Self::Deadline { .. } => false,
        }
    }

    /// Returns what to do.
    pub fn advice(&self) -> String {
        match self {
            Self::DuplicateName { .. } => "give each host and each VM a name of its own".to_owned(),
            Self::UnknownHost { .. } | Self::UnknownVm { .. } => {
                "correct the name, or add what it names to the inventory".to_owned()
            }
            Self::UnknownPlatform { .. } => "add it to host_platforms or vm_platforms".to_owned(),
            Self::Setting { .. } => "docs/operations/planning.md has the ranges".to_owned(),
            Self::CyclicAffinity { vms } => match vms.first() {
                Some(first) => format!("let one of them lead: remove `follows` from {first}"),
                None => "remove one `follows`".to_owned(),
            },
            Self::ContradictoryAffinity { vm, label, .. } => {
                format!("remove the label {label} from {vm}, or let it follow no VM")
            }
            Self::Immovable { why, .. } => why.advice().to_owned(),
            Self::NoTargets => "uncordon a host, or name other targets".to_owned(),
            Self::Overfull { .. } => {
                "name more targets, shut VMs down, or empty fewer hosts at once".to_owned()
            }
            Self::NoTarget { obstacles, .. } => match obstacles.first() {
                Some((obstacle, _)) => {
                    format!("{}; or plan with --partial, which leaves the VM where it is", obstacle.advice())
                }
                None => "add a host".to_owned(),
            },
            Self::NoOrder { .. } => {
                "free room for one of them on any host that all can reach for a moment".to_owned()
            }
            Self::Deadline { in_time, late, needs_ns, .. } => format!(
                "allow {} s; or begin with the {in_time} VMs that are there in time, and shut {late} down or leave \
                 them; or use a faster link",
                needs_ns.div_ceil(1_000_000_000)
            ),
        }
    }
}
