//! Backing of a block: read from the process's own memory map, not from anyone's description.

use proto::limits::PAGE_BYTES;
use tracee::maps::{Backing, Mapping, mappings};
use tracee::{Process, RamFile, RamFileKind};

use super::block::{RamError, RamRegion};
use super::dropped::DropWatch;

/// Backing of a block.
#[derive(Debug)]
pub(super) enum BlockBacking {
    /// A shared file, and the start of the block in it, in bytes.
    File(RamFile, u64),
    /// Anonymous memory.
    Anonymous,
    /// A private mapping of a file with small pages, and the start of the block in it, in bytes. Pages that the process
    /// has neither in memory nor in swap are in the file.
    PrivateFile(RamFile, u64),
    /// Anything else: only the process can read it, and holes cannot be detected. Private mappings of hugetlbfs belong
    /// here, because `/proc/PID/pagemap` does not distinguish a huge page that is being moved from a missing one.
    Opaque,
}

/// Looks up every region in the map of the process.
pub(super) fn find(process: &Process, regions: &[RamRegion]) -> Result<Vec<BlockBacking>, RamError> {
    let map = mappings(process)?;
    regions.iter().map(|region| find_one(process, &map, region)).collect()
}

/// Returns for each region a watch for dropped pages, if its marks are incomplete: for shared files of small pages.
pub(crate) fn drop_watches(
    process: &Process,
    regions: &[RamRegion],
) -> Result<Vec<Option<DropWatch>>, RamError> {
    let watch = |place| match place {
        BlockBacking::File(file, offset) if file.kind() != RamFileKind::Hugetlbfs => {
            Some(DropWatch::new(file, offset))
        }
        _ => None,
    };
    Ok(find(process, regions)?.into_iter().map(watch).collect())
}

fn find_one(process: &Process, map: &[Mapping], region: &RamRegion) -> Result<BlockBacking, RamError> {
    if region.bytes == 0 || !region.bytes.is_multiple_of(PAGE_BYTES) {
        return Err(RamError::Length { block: region.name.clone(), bytes: region.bytes });
    }
    let range = region.range();
    let parts: Vec<&Mapping> = map.iter().filter(|one| one.range.intersection(&range).is_some()).collect();
    let covered: u64 =
        parts.iter().filter_map(|one| one.range.intersection(&range)).map(|part| part.len()).sum();
    let Some(first) = parts.first().filter(|_| covered == range.len()) else {
        return Err(RamError::NotThere { block: region.name.clone(), range });
    };
    // Advice (huge pages, NUMA) cuts one mapping into several; they have to continue one another.
    let base = first.offset.wrapping_sub(first.range.start);
    let is_one = parts
        .iter()
        .all(|one| one.backing == first.backing && one.offset.wrapping_sub(one.range.start) == base);
    let offset = region.address.wrapping_add(base);
    match first.backing {
        Backing::SharedFile(_) if is_one => {
            return Ok(BlockBacking::File(RamFile::open(process, first)?, offset));
        }
        Backing::PrivateFile(_) if is_one => {
            // Only to save memory: the whole block can be read through the process.
            if let Ok(file) = RamFile::open_behind_private(process, first)
                && file.kind() != RamFileKind::Hugetlbfs
                && file.file().metadata().is_ok_and(|found| found.is_file())
            {
                return Ok(BlockBacking::PrivateFile(file, offset));
            }
        }
        _ => {}
    }
    if parts.iter().all(|one| one.backing == Backing::Anonymous) {
        return Ok(BlockBacking::Anonymous);
    }
    Ok(BlockBacking::Opaque)
}
