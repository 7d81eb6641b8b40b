//! Pre-flight check: can a guest be moved to a host? It is made before anything is changed.
//!
//! [`check`] is a pure function over facts of both hosts. Facts of a host are gathered by [`facts`];
//! those of a started destination (its RAM blocks, its device tree, the CPU features it could not
//! provide) are `None` until there is one ([`gather::started`]), and then the check is made again.
//!
//! A [`Finding`] of severity `Blocker` forbids the migration; a `Warning` reports that something may
//! fail or be slow; an `Info` reports a difference. Each includes advice.

mod checks;
mod devices;
mod disks;
pub mod facts;
pub mod files;
mod findings;
pub mod gather;
mod identity;
mod open_files;
pub mod ram;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub use checks::run_state_refusal;

use crate::describe::{Problem, VmDescription};
use crate::ram::RamBlock;
use crate::restart_units::RestartRisk;
use crate::tree::Difference;
use facts::{HostFacts, Mappers};
pub use identity::FileIdentity;
pub use open_files::{MismatchedFile, OpenFiles};

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Something will be different.
    Info,
    /// Something may fail.
    Warning,
    /// The guest cannot be moved in this state.
    Blocker,
}

/// One result of the pre-flight check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Severity.
    pub severity: Severity,
    /// Identifier for programs, e.g. `machine-type-unknown`.
    pub code: String,
    /// Description of the finding.
    pub what: String,
    /// Advice.
    pub advice: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let severity = match self.severity {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Blocker => "blocker",
        };
        write!(f, "{severity}: {}; {} [{}]", self.what, self.advice, self.code)
    }
}

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
    /// Paths of its images that do not lead to the files that QEMU has open ([`files::files_not_open`]).
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

impl DestinationFacts {
    /// Returns the kind of memory that the guest needs on this host (the size of its huge pages, if it uses them), and
    /// the number of bytes.
    pub fn memory_needed(&self, source: &SourceFacts) -> (Option<u64>, u64) {
        (self.hugepage_bytes, checks::memory_needed_bytes(source, self.hugepage_bytes))
    }

    /// Reads the available memory anew and subtracts memory that is reserved for other guests, of the kind that this
    /// guest needs.
    pub fn refresh_memory(&mut self, owed_bytes: u64) {
        let now = HostFacts::gather();
        self.host = now;
        match self.hugepage_bytes {
            None => {
                let free = &mut self.host.memory_available_bytes;
                *free = free.saturating_sub(owed_bytes);
            }
            Some(size) => {
                if let Some(free) = self.host.hugepages_free_bytes.get_mut(&size) {
                    *free = free.saturating_sub(owed_bytes);
                }
            }
        }
    }
}

/// Returns findings that hold for every destination, the most severe first. [`check`] returns them, too.
pub fn check_source(source: &SourceFacts) -> Vec<Finding> {
    let mut findings = Vec::new();
    checks::problems(&source.vm.problems, &mut findings);
    checks::guest(source, &mut findings);
    checks::shared_memory(source, &mut findings);
    disks::check_source(source, &mut findings);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

/// Returns all findings, the most severe first.
pub fn check(source: &SourceFacts, destination: &DestinationFacts) -> Vec<Finding> {
    let mut findings = check_source(source);
    checks::problems(&destination.problems, &mut findings);
    checks::qemu(source, destination, &mut findings);
    checks::processor(source, destination, &mut findings);
    checks::memory(source, destination, &mut findings);
    disks::check(destination, &mut findings);
    checks::environment(source, destination, &mut findings);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings.dedup();
    findings
}

#[cfg(test)]
mod tests;
