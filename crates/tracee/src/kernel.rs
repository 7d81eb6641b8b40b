//! Features of this host's kernel.
//!
//! Dirty pages are found with asynchronous write protection (`UFFD_FEATURE_WP_ASYNC`) and
//! `PAGEMAP_SCAN`, both in Linux since 6.7. Features that a host lacks are reported at start, by
//! name, and not in the middle of a migration.

use std::fmt;
use std::fs::{self, File};

use linux_raw_sys::general as raw;

use crate::abi::{self, ScanQuery};

/// A feature of the kernel without which RAM cannot be tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// The system call `userfaultfd`, also for processes without privileges.
    Userfaultfd,
    /// `UFFD_FEATURE_WP_ASYNC`: the kernel records a write by itself, and no thread waits.
    WriteProtectAsync,
    /// `UFFD_FEATURE_WP_UNPOPULATED`: missing pages can be protected.
    WriteProtectUnpopulated,
    /// `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`: shared memory and huge pages can be protected.
    WriteProtectSharedMemory,
    /// `PAGEMAP_SCAN`: written pages are read and protected again in one step.
    PagemapScan,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Userfaultfd => "userfaultfd",
            Self::WriteProtectAsync => "UFFD_FEATURE_WP_ASYNC",
            Self::WriteProtectUnpopulated => "UFFD_FEATURE_WP_UNPOPULATED",
            Self::WriteProtectSharedMemory => "UFFD_FEATURE_WP_HUGETLBFS_SHMEM",
            Self::PagemapScan => "PAGEMAP_SCAN",
        })
    }
}

/// The kernel cannot track RAM.
#[derive(Debug, thiserror::Error)]
#[error("Linux {release} lacks {}: Linux 6.7 or newer is needed, with CONFIG_USERFAULTFD and CONFIG_PROC_PAGE_MONITOR", list(.missing))]
pub struct MissingFeatures {
    /// Release of the kernel that runs, as `uname -r` prints it.
    pub release: String,
    /// Features that it lacks.
    pub missing: Vec<Feature>,
}

fn list(features: &[Feature]) -> String {
    features.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A kernel that has all features that tracking needs.
#[derive(Clone, Debug)]
pub struct Kernel {
    release: String,
}

impl Kernel {
    /// Probes the running kernel by using its features.
    ///
    /// # Errors
    /// Names every missing feature.
    pub fn probe() -> Result<Self, MissingFeatures> {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let release = release.trim_end().to_owned();
        let features =
            abi::own_userfaultfd().and_then(|uffd| abi::uffd_api(&uffd, 0)).map(|api| api.features).ok();
        let missing = missing(features, has_pagemap_scan());
        if missing.is_empty() { Ok(Self { release }) } else { Err(MissingFeatures { release, missing }) }
    }

    /// Returns the release of the kernel, as `uname -r` prints it.
    pub fn release(&self) -> &str {
        &self.release
    }
}

/// Returns the missing features, from the features of userfaultfd (`None`: no such call) and the
/// existence of `PAGEMAP_SCAN`.
fn missing(features: Option<u64>, pagemap_scan: bool) -> Vec<Feature> {
    let mut missing = Vec::new();
    match features {
        None => missing.push(Feature::Userfaultfd),
        Some(features) => missing.extend(
            [
                (raw::UFFD_FEATURE_WP_ASYNC, Feature::WriteProtectAsync),
                (raw::UFFD_FEATURE_WP_UNPOPULATED, Feature::WriteProtectUnpopulated),
                (raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM, Feature::WriteProtectSharedMemory),
            ]
            .into_iter()
            .filter(|(bit, _)| features & u64::from(*bit) == 0)
            .map(|(_, feature)| feature),
        ),
    }
    if !pagemap_scan {
        missing.push(Feature::PagemapScan);
    }
    missing
}

/// Scans the page that holds a variable of this function.
fn has_pagemap_scan() -> bool {
    let here = 0u8;
    let page = std::ptr::from_ref(&here) as u64 & !(crate::PAGE_SIZE - 1);
    let present = u64::from(raw::PAGE_IS_PRESENT);
    let query = ScanQuery { flags: 0, inverted: 0, required: present, any_of: 0, returned: present };
    let Ok(pagemap) = File::open("/proc/self/pagemap") else { return false };
    let mut found = [raw::page_region { start: 0, end: 0, categories: 0 }];
    abi::pagemap_scan(&pagemap, query, page, page + crate::PAGE_SIZE, &mut found).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_of_the_tests_has_everything() {
        assert!(Kernel::probe().unwrap().release().starts_with(|c: char| c.is_ascii_digit()));
    }

    #[test]
    fn each_missing_feature_is_named() {
        // Linux 6.1, as in Debian 12: WP_UNPOPULATED and WP_ASYNC are missing.
        let debian_12 = Some(0x1fff);
        let missing = missing(debian_12, false);
        assert_eq!(
            missing,
            [Feature::WriteProtectAsync, Feature::WriteProtectUnpopulated, Feature::PagemapScan]
        );
        let error = MissingFeatures { release: "6.1.0".into(), missing };
        let text = error.to_string();
        assert!(text.starts_with("Linux 6.1.0 lacks UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_UNPOPULATED, PAGEMAP_SCAN: Linux 6.7"), "{text}");
        assert_eq!(super::missing(None, true), [Feature::Userfaultfd]);
        assert_eq!(super::missing(Some(u64::MAX), true), []);
    }
}
