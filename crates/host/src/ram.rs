//! A QEMU's RAM blocks as the data plane needs them.

use std::os::fd::OwnedFd;

use ::memory::ram::{RamError, RamRegion, open_destination, open_source};
use ::memory::{BlockReader, BlockWriter, DirtyLogError, DiscardMethod, TrackedRam};
use qemu::ram::{RamBlock, RamKind};
use serde::{Deserialize, Serialize};
use tracee::{Process, TrackerStart};

/// Returns the kind of a block's memory, human-readable.
pub(crate) fn kind(block: &RamBlock) -> String {
    let pages = match block.page_size_bytes {
        4096 => String::new(),
        bytes => format!(", pages of {} KiB", bytes >> 10),
    };
    let kind = match &block.kind {
        RamKind::Anonymous => "anonymous",
        RamKind::SharedFile(file) if file.path.to_string_lossy().starts_with("/memfd:") => "memfd",
        RamKind::SharedFile(_) => "shared file",
        RamKind::PrivateFile(_) => "private file",
    };
    format!("{kind}{pages}")
}

/// Location of a block, as it is journalled: a QEMU that is held cannot be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JournalledRegion {
    name: String,
    bytes: u64,
    page_bytes: u64,
    address: u64,
    /// True if zero pages are placed in it even if no thread waits for them.
    #[serde(default)]
    pub places_zeros: bool,
}

impl JournalledRegion {
    /// Returns the location of a block.
    pub fn of(region: &RamRegion) -> Self {
        let RamRegion { name, bytes, page_bytes, address } = region.clone();
        Self { name, bytes, page_bytes, address, places_zeros: false }
    }

    /// Returns the location of a block with missing pages.
    pub fn with_missing_pages(region: &RamRegion, writer: &dyn BlockWriter) -> Self {
        // In anonymous memory zero pages are mapped to the kernel's one page of zeros.
        let places_zeros = writer.is_preallocated() || writer.discard_method() == DiscardMethod::ByProcess;
        Self { places_zeros, ..Self::of(region) }
    }

    /// Returns the block at this location.
    pub fn region(&self) -> RamRegion {
        let Self { name, bytes, page_bytes, address, .. } = self.clone();
        RamRegion { name, bytes, page_bytes, address }
    }
}

/// Returns the locations of the blocks.
pub fn regions(blocks: &[RamBlock]) -> Vec<RamRegion> {
    let region = |block: &RamBlock| RamRegion {
        name: block.name.clone(),
        bytes: block.used_bytes,
        page_bytes: block.page_size_bytes,
        address: block.host_address,
    };
    blocks.iter().map(region).collect()
}

/// Returns readers of the blocks, in their order.
pub fn source(process: &Process, blocks: &[RamBlock]) -> Result<Vec<Box<dyn BlockReader>>, RamError> {
    open_source(process, &regions(blocks))
}

/// Returns writers of the blocks, in their order.
pub fn destination(process: &Process, blocks: &[RamBlock]) -> Result<Vec<Box<dyn BlockWriter>>, RamError> {
    open_destination(process, &regions(blocks))
}

/// Begins to track all writes to the blocks, in short steps; [`tracked`] completes it.
pub fn begin_tracking(
    process: &Process,
    userfaultfd: OwnedFd,
    blocks: &[RamBlock],
) -> Result<TrackerStart, DirtyLogError> {
    TrackedRam::begin(process, userfaultfd, &regions(blocks))
}

/// Returns the blocks for which [`begin_tracking`] was called.
pub fn tracked(
    start: TrackerStart,
    process: &Process,
    blocks: &[RamBlock],
) -> Result<TrackedRam, DirtyLogError> {
    TrackedRam::over(start.finish()?, process, &regions(blocks))
}
