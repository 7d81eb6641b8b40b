//! Facts of both hosts, on which the pre-flight check decides.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::facts::{HostFacts, Mappers};
use super::identity::FileIdentity;
use super::open_files::MismatchedFile;
use crate::describe::{Problem, VmDescription};
use crate::ram::RamBlock;
use crate::restart_units::RestartRisk;
use crate::tree::Difference;

/// Facts of the guest and its host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceFacts {
    /// The guest.
    pub vm: VmDescription,
    /// Host of the guest.
    pub host: HostFacts,
    /// QEMU's run state.
    pub run_state: String,
    /// QEMU's own reasons for refusing to migrate the guest ([`crate::control::blocked_reasons`]).
    pub blocked_reasons: Vec<String>,
    /// RAM blocks of the guest.
    pub ram_blocks: Vec<RamBlock>,
    /// Processes other than QEMU that map the guest's memory.
    pub other_mappers: Mappers,
    /// Process that debugs QEMU, 0 for none (`TracerPid`).
    pub tracer_pid: u32,
    /// CPU features that were requested and that the guest does not have.
    pub cpu_unavailable: Vec<String>,
    /// True if nested guests have run in the guest (KVM's `nested_run`); `None` if that is unknown.
    pub nested_guests: Option<bool>,
    /// User id of the QEMU process.
    #[serde(default)]
    pub user: Option<u32>,
    /// OOM score adjustment of the QEMU process.
    #[serde(default)]
    pub oom_score_adj: i32,
    /// Queues of disks for which the guest waits for ever.
    #[serde(default)]
    pub stuck_queues: Vec<String>,
    /// Units that would start the guest a second time.
    pub starts_again: Vec<RestartRisk>,
    /// Paths of its images that do not lead to the files that QEMU has open ([`files_not_open`](super::files::files_not_open)).
    #[serde(default)]
    pub files_not_open: Vec<MismatchedFile>,
}

/// A disk or another file that the guest needs of its host, as the destination sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DestinationFile {
    /// Path on the source, or address of a network disk.
    pub path: String,
    /// Option that names it, if it only has to exist; none for a disk.
    pub option: Option<String>,
    /// Identity on the source; `None` if the source cannot determine it (an address).
    pub source: Option<FileIdentity>,
    /// Path on the destination.
    pub path_there: String,
    /// True if a file exists at that path.
    pub exists: bool,
    /// Identity on the destination.
    pub destination: Option<FileIdentity>,
    /// True if a user has explicitly marked both as the same.
    pub marked_shared: bool,
    /// True if it is opened past the page cache.
    pub direct: bool,
    /// True if QEMU locks it.
    pub locked: bool,
}

/// Properties of a QEMU program, reported without a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuInfo {
    /// Version, `major.minor.micro`.
    pub version: String,
    /// Machine types that it supports.
    pub machine_types: BTreeSet<String>,
}

/// Facts of the destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DestinationFacts {
    /// The host.
    pub host: HostFacts,
    /// User id that starts QEMUs on this host.
    pub user: u32,
    /// Version of its QEMU, `major.minor.micro`.
    pub qemu_version: String,
    /// Machine types that its QEMU supports.
    pub machine_types: BTreeSet<String>,
    /// Size in bytes of the huge pages for the guest's memory.
    pub hugepage_bytes: Option<u64>,
    /// Disks and needed files, as this host sees them.
    pub disks: Vec<DestinationFile>,
    /// Interfaces that the guest's networks need and that do not exist.
    pub missing_interfaces: Vec<String>,
    /// Problems with which [`crate::command::build`] refuses the guest.
    pub problems: Vec<Problem>,
    /// RAM blocks of the started QEMU.
    pub ram_blocks: Option<Vec<RamBlock>>,
    /// Differences of its device tree.
    pub device_differences: Option<Vec<Difference>>,
    /// CPU features that it could not provide.
    pub cpu_unavailable: Option<Vec<String>>,
}
