//! What a block is made of: found in the process's own map, not taken from what anybody says.

use proto::limits::PAGE_BYTES;
use tracee::maps::{Backing, Mapping, mappings};
use tracee::{Process, RamFile, RamFileKind};

use super::{DropWatch, RamError, RamRegion};

/// What stands behind a block.
#[derive(Debug)]
pub(super) enum Place {
    /// A shared file, and where in it the block begins, in bytes.
    File(RamFile, u64),
    /// Anonymous memory.
    Anonymous,
    /// A private mapping of a file with small pages, and where in it the block begins, in bytes. What the process has
    /// neither in memory nor in swap is in the file.
    PrivateFile(RamFile, u64),
    /// Anything else: only the process can read it, and holes cannot be told. So it is with private mappings of
    /// hugetlbfs, because `/proc/PID/pagemap` does not tell a huge page that is being moved from none.
    Opaque,
}

/// Looks up every region in the map of the process.
pub(super) fn find(process: &Process, regions: &[RamRegion]) -> Result<Vec<Place>, RamError> {
    let map = mappings(process)?;
    regions.iter().map(|region| find_one(process, &map, region)).collect()
}

/// For each region what finds pages that were given back where their marks do not tell: shared files of small pages.
pub(crate) fn drop_watches(
    process: &Process,
    regions: &[RamRegion],
) -> Result<Vec<Option<DropWatch>>, RamError> {
    let watch = |place| match place {
        Place::File(file, offset) if file.kind() != RamFileKind::Hugetlbfs => {
            Some(DropWatch::new(file, offset))
        }
        _ => None,
    };
    Ok(find(process, regions)?.into_iter().map(watch).collect())
}

fn find_one(process: &Process, map: &[Mapping], region: &RamRegion) -> Result<Place, RamError> {
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
        Backing::SharedFile(_) if is_one => return Ok(Place::File(RamFile::open(process, first)?, offset)),
        Backing::PrivateFile(_) if is_one => {
            // For sparing memory alone: all of it can be read through the process.
            if let Ok(file) = RamFile::open_behind_private(process, first)
                && file.kind() != RamFileKind::Hugetlbfs
                && file.file().metadata().is_ok_and(|found| found.is_file())
            {
                return Ok(Place::PrivateFile(file, offset));
            }
        }
        _ => {}
    }
    if parts.iter().all(|one| one.backing == Backing::Anonymous) {
        return Ok(Place::Anonymous);
    }
    Ok(Place::Opaque)
}
