//! A QEMU's RAM blocks as the data plane wants them.

use std::os::fd::OwnedFd;

use ::memory::ram::{RamError, RamRegion, open_destination, open_source};
use ::memory::{BlockReader, BlockWriter, LogError, TakesAway, TrackedRam};
use qemu::ram::{RamBlock, RamKind};
use serde::{Deserialize, Serialize};
use tracee::{Process, TrackerStart};

/// What a block is made of, for people.
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

/// Where a block is, as the journal keeps it: a QEMU that is held cannot be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct KeptRegion {
    name: String,
    bytes: u64,
    page_bytes: u64,
    address: u64,
    /// Whether zeros are placed there where nobody waits for them.
    #[serde(default)]
    pub(crate) places_zeros: bool,
}

impl KeptRegion {
    pub(crate) fn of(region: &RamRegion) -> Self {
        let RamRegion { name, bytes, page_bytes, address } = region.clone();
        Self { name, bytes, page_bytes, address, places_zeros: false }
    }

    /// Where pages are awaited.
    pub(crate) fn awaiting(region: &RamRegion, writer: &dyn BlockWriter) -> Self {
        // In anonymous memory they are the kernel's one page of zeros.
        let places_zeros = writer.keeps_all() || writer.takes_away() == TakesAway::ByProcess;
        Self { places_zeros, ..Self::of(region) }
    }

    pub(crate) fn region(&self) -> RamRegion {
        let Self { name, bytes, page_bytes, address, .. } = self.clone();
        RamRegion { name, bytes, page_bytes, address }
    }
}

/// Where the blocks are.
pub(crate) fn regions(blocks: &[RamBlock]) -> Vec<RamRegion> {
    let region = |block: &RamBlock| RamRegion {
        name: block.name.clone(),
        bytes: block.used_bytes,
        page_bytes: block.page_size_bytes,
        address: block.host_address,
    };
    blocks.iter().map(region).collect()
}

/// Readers of the blocks, in their order.
pub(crate) fn source(process: &Process, blocks: &[RamBlock]) -> Result<Vec<Box<dyn BlockReader>>, RamError> {
    open_source(process, &regions(blocks))
}

/// Writers of the blocks, in their order.
pub(crate) fn destination(
    process: &Process,
    blocks: &[RamBlock],
) -> Result<Vec<Box<dyn BlockWriter>>, RamError> {
    open_destination(process, &regions(blocks))
}

/// Begins to see every write to the blocks, in steps none of which takes long; [`tracked`] is the end of it.
pub(crate) fn begin_tracking(
    process: &Process,
    userfaultfd: OwnedFd,
    blocks: &[RamBlock],
) -> Result<TrackerStart, LogError> {
    TrackedRam::begin(process, userfaultfd, &regions(blocks))
}

/// The blocks that [`begin_tracking`] was called for.
pub(crate) fn tracked(
    start: TrackerStart,
    process: &Process,
    blocks: &[RamBlock],
) -> Result<TrackedRam, LogError> {
    TrackedRam::over(start.finish()?, process, &regions(blocks))
}
