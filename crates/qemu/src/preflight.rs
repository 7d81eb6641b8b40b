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
mod input;
mod open_files;
pub mod ram;

pub use checks::run_state_refusal;
use facts::HostFacts;
pub use findings::{Finding, Severity};
pub use identity::FileIdentity;
pub use input::{DestinationFacts, DestinationFile, QemuInfo, SourceFacts};
pub use open_files::{MismatchedFile, OpenFiles};

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
