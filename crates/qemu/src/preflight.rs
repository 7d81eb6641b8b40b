//! Whether a guest can be moved to a host, decided before anything is done.
//!
//! [`check`] is a pure function over facts of both sides. Facts of a host are gathered by
//! [`facts`]; those that come from a started destination (its RAM blocks, its device tree, the CPU
//! features it could not provide) are `None` until there is one ([`gather::started`]), and then the
//! check is made again.
//!
//! A [`Finding`] of severity `Blocker` means no; a `Warning` that something may go wrong or slow; an
//! `Info` what will be different. Each says what to do.

mod checks;
mod devices;
mod disks;
pub mod facts;
pub mod files;
pub mod gather;
mod identity;
mod open_files;
pub mod ram;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub use checks::run_state_refusal;

use crate::describe::{Problem, VmDescription};
use crate::ram::RamBlock;
use crate::tree::Difference;
use crate::units::StartsAgain;
use facts::{HostFacts, Mappers};
pub use identity::FileIdentity;
pub use open_files::{OpenFiles, StrayFile};

/// How grave a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Something will be different.
    Info,
    /// Something may go wrong.
    Warning,
    /// The guest cannot be moved so.
    Blocker,
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// How grave it is.
    pub severity: Severity,
    /// A word for programs, e.g. `machine-type-unknown`.
    pub code: String,
    /// What was found.
    pub what: String,
    /// What can be done about it.
    pub what_to_do: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let severity = match self.severity {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Blocker => "blocker",
        };
        write!(f, "{severity}: {}; {} [{}]", self.what, self.what_to_do, self.code)
    }
}

/// What is known of the guest and its host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceFacts {
    /// The guest.
    pub vm: VmDescription,
    /// Its host.
    pub host: HostFacts,
    /// QEMU's run state.
    pub run_state: String,
    /// Why QEMU itself would not migrate it ([`crate::control::blocked_reasons`]).
    pub blocked_reasons: Vec<String>,
    /// Its RAM blocks.
    pub ram_blocks: Vec<RamBlock>,
    /// Processes other than QEMU that map its memory.
    pub other_mappers: Mappers,
    /// The process that debugs QEMU, 0 for none (`TracerPid`).
    pub tracer_pid: u32,
    /// CPU features that were asked for and that the guest does not have.
    pub cpu_unavailable: Vec<String>,
    /// Whether guests of the guest have run (KVM's `nested_run`); `None` when that is not known.
    pub nested_guests: Option<bool>,
    /// The user that its QEMU runs as.
    #[serde(default)]
    pub user: Option<u32>,
    /// How readily the kernel ends its QEMU when memory is short.
    #[serde(default)]
    pub oom_score_adj: i32,
    /// Queues of disks at which the guest waits for ever.
    #[serde(default)]
    pub stuck_queues: Vec<String>,
    /// What would start the guest a second time.
    pub starts_again: Vec<StartsAgain>,
    /// Paths of its images at which there are not the files that QEMU has open ([`files::files_not_open`]).
    #[serde(default)]
    pub files_not_open: Vec<StrayFile>,
}

/// A disk, or something else that the guest needs of its host, as the destination sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSight {
    /// Its path on the source, or a network disk's address.
    pub path: String,
    /// The option that names it, for what has only to be there; none for a disk.
    pub option: Option<String>,
    /// What the source sees there; `None` when it cannot tell (an address).
    pub source: Option<FileIdentity>,
    /// Its path on the destination.
    pub path_there: String,
    /// Whether something is there.
    pub exists: bool,
    /// What it is.
    pub destination: Option<FileIdentity>,
    /// Whether somebody said in so many words that both are the same.
    pub marked_shared: bool,
    /// Whether it is opened past the page cache.
    pub direct: bool,
    /// Whether QEMU locks it.
    pub locked: bool,
}

/// What a QEMU says of itself without a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emulator {
    /// Its version, `major.minor.micro`.
    pub version: String,
    /// The machine types that it knows.
    pub machine_types: BTreeSet<String>,
}

/// What is known of the destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DestinationFacts {
    /// The host.
    pub host: HostFacts,
    /// The user that starts QEMUs here.
    pub user: u32,
    /// Its QEMU's version, `major.minor.micro`.
    pub qemu_version: String,
    /// The machine types that its QEMU knows.
    pub machine_types: BTreeSet<String>,
    /// Size of the huge pages that memory is to be made of.
    pub hugepage_bytes: Option<u64>,
    /// Disks.
    pub disks: Vec<DiskSight>,
    /// Interfaces that the guest's networks want and that are not there.
    pub missing_interfaces: Vec<String>,
    /// What [`crate::command::build`] refused.
    pub problems: Vec<Problem>,
    /// RAM blocks of the started QEMU.
    pub ram_blocks: Option<Vec<RamBlock>>,
    /// How its device tree differs.
    pub device_differences: Option<Vec<Difference>>,
    /// CPU features that it could not provide.
    pub cpu_unavailable: Option<Vec<String>>,
}

impl DestinationFacts {
    /// The kind of memory that the guest takes here (the size of its huge pages, if it is of them), and how much of it.
    pub fn memory_needed(&self, source: &SourceFacts) -> (Option<u64>, u64) {
        (self.hugepage_bytes, checks::memory_needed_bytes(source, self.hugepage_bytes))
    }

    /// Looks at what memory there is now, and takes from it what was promised to others: of the kind that this guest
    /// takes.
    pub fn look_at_memory(&mut self, owed_bytes: u64) {
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

/// What speaks against moving the guest wherever it goes, the gravest first. [`check`] finds it, too.
pub fn check_source(source: &SourceFacts) -> Vec<Finding> {
    let mut findings = Vec::new();
    checks::problems(&source.vm.problems, &mut findings);
    checks::guest(source, &mut findings);
    checks::shared_memory(source, &mut findings);
    disks::check_source(source, &mut findings);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

/// Everything that speaks against moving the guest, the gravest first.
pub fn check(source: &SourceFacts, destination: &DestinationFacts) -> Vec<Finding> {
    let mut findings = check_source(source);
    checks::problems(&destination.problems, &mut findings);
    checks::qemu(source, destination, &mut findings);
    checks::processor(source, destination, &mut findings);
    checks::memory(source, destination, &mut findings);
    disks::check(destination, &mut findings);
    checks::surroundings(source, destination, &mut findings);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings.dedup();
    findings
}

/// Whether nothing stands in the way.
pub fn is_possible(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.severity != Severity::Blocker)
}

#[cfg(test)]
mod tests;
