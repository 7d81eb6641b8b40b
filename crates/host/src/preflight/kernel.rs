//! Features of the kernel that migrations need.

use api::KernelFeature;
use proto::message::{Finding, Severity};
use tracee::{Feature, Kernel};

/// Kernel features that migrations need.
const FEATURES: [Feature; 5] = [
    Feature::Userfaultfd,
    Feature::WriteProtectAsync,
    Feature::WriteProtectUnpopulated,
    Feature::WriteProtectSharedMemory,
    Feature::PagemapScan,
];

/// Returns the kernel's release, and the presence of each feature that migrations need, for users.
pub fn kernel() -> (String, Vec<KernelFeature>) {
    let (release, missing) = match Kernel::probe() {
        Ok(kernel) => (kernel.release().to_owned(), Vec::new()),
        Err(missing) => (missing.release.clone(), missing.missing),
    };
    let feature = |feature: Feature| KernelFeature {
        name: feature.to_string(),
        present: !missing.contains(&feature),
        advice: "Linux 6.7 or later has it; VMs can still arrive here".to_owned(),
    };
    (release, FEATURES.map(feature).to_vec())
}

/// Returns a finding if the kernel lacks one of them.
pub(super) fn kernel_finding() -> Option<Finding> {
    Kernel::probe().err().map(|missing| Finding {
        severity: Severity::Blocker,
        code: "kernel-feature-missing".to_owned(),
        what: missing.to_string(),
        advice: "run Linux 6.7 or later on the source, with CONFIG_USERFAULTFD".to_owned(),
    })
}
