//! Discarded pages that left no dirty mark.
//!
//! A page of shared memory that was punched out of its file is zero from then on, but the page
//! table does not show it: if the page was protected (clean), the kernel leaves a marker that means
//! "protected" in its place, and a clean page that was merely unmapped or swapped out looks the
//! same. The same applies to hugetlbfs and to private mappings of files.
//!
//! So the pages that are protected but not present are checked after each scan:
//!
//! - Shared memory whose file can be opened: the new ones among them are looked up in the file, and
//!   a hole that was not one before counts as written.
//! - Private mappings of files, and hugetlbfs, whose files do not report holes: all new ones among
//!   them (and not in swap) count as written.
//! - Anonymous memory leaves no marker; the scan finds such pages by itself.
//!
//! Remaining gaps:
//!
//! - A page with a file that is punched out and **read** again by its process between two scans is
//!   present again, zero, protected, and not detected. Only memory that a guest had released
//!   (balloon, free page reporting, virtio-mem) is punched out, and its content is undefined for
//!   the guest until it writes there.
//! - A page of hugetlbfs that was unmapped but stayed in its file, and is punched out later, is not
//!   detected. QEMU punches out huge pages without unmapping them first.

use std::ops::Range;

use crate::maps::{Backing, Mapping};
use crate::range::{AddressRange, PAGE_SIZE, intersect, merge_from, subtract};
use crate::{Process, RamFile, RamFileError};

/// Record of the discarded pages of a range.
#[derive(Debug)]
pub(crate) struct DiscardedPages {
    sign: DiscardSign,
    /// Pages that are known to be discarded; sorted and joined.
    known: Vec<AddressRange>,
}

/// Criterion that distinguishes a discarded page from others that are not present.
#[derive(Debug)]
enum DiscardSign {
    /// The page has no entry in the page table.
    NoEntry,
    /// The page is a hole in this file, in which the address `start` is at `offset`.
    Hole { file: RamFile, start: u64, offset: u64 },
    /// The page table has a marker, but neither the page nor an entry of swap.
    Marker,
}

impl DiscardedPages {
    /// Creates an empty record for a part of a mapping with pages of `page_size` bytes.
    pub(crate) fn new(process: &Process, mapping: &Mapping, page_size: u64) -> Result<Self, RamFileError> {
        let sign = match mapping.backing {
            Backing::Anonymous if page_size == PAGE_SIZE => DiscardSign::NoEntry,
            Backing::SharedFile(_) if page_size == PAGE_SIZE => {
                let file = RamFile::open(process, mapping)?;
                DiscardSign::Hole { file, start: mapping.range.start, offset: mapping.offset }
            }
            _ => DiscardSign::Marker,
        };
        Ok(Self { sign, known: Vec::new() })
    }

    /// Returns true if [`DiscardedPages::update`] is not needed, because the scan finds all discarded pages.
    pub(crate) fn is_unneeded(&self) -> bool {
        matches!(self.sign, DiscardSign::NoEntry)
    }

    /// Returns true if the caller must exclude pages in swap from the arguments of [`DiscardedPages::update`].
    pub(crate) fn is_marker_based(&self) -> bool {
        matches!(self.sign, DiscardSign::Marker)
    }

    /// Returns true if there is a file that reports holes.
    pub(crate) fn has_file(&self) -> bool {
        matches!(self.sign, DiscardSign::Hole { .. })
    }

    /// Returns the parts of `ranges` that are no holes in the file; nothing if no file reports holes.
    fn data_within(&self, ranges: &[AddressRange]) -> Result<Vec<AddressRange>, RamFileError> {
        self.ask_file(ranges, RamFile::data_runs)
    }

    /// Returns the parts of `ranges`, all of them within `slice`, that are no holes in the file and that it has in
    /// memory.
    pub(crate) fn resident_within(
        &self,
        slice: AddressRange,
        ranges: &[AddressRange],
    ) -> Result<Vec<AddressRange>, RamFileError> {
        // Both queries: where the kernel does not show this process which pages are in memory, it reports all of
        // them.
        let data = self.data_within(ranges)?;
        let in_memory =
            if data.is_empty() { data.clone() } else { self.ask_file(&[slice], RamFile::resident_runs)? };
        Ok(intersect(&data, &in_memory))
    }

    fn ask_file(
        &self,
        ranges: &[AddressRange],
        question: impl Fn(&RamFile, Range<u64>, &mut Vec<Range<u64>>) -> Result<(), RamFileError>,
    ) -> Result<Vec<AddressRange>, RamFileError> {
        let DiscardSign::Hole { file, start, offset } = &self.sign else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for run in ranges {
            question(file, run.start - start + offset..run.end - start + offset, &mut found)?;
        }
        let address =
            |run: &Range<u64>| AddressRange::new(run.start - offset + start, run.end - offset + start);
        Ok(found.iter().map(address).collect())
    }

    /// Records which pages of `range` were written and which are protected but not present (both
    /// sorted and joined), and appends to `dirty` those that were discarded since the last call.
    pub(crate) fn update(
        &mut self,
        range: AddressRange,
        written: &[AddressRange],
        absent: &[AddressRange],
        dirty: &mut Vec<AddressRange>,
    ) -> Result<(), RamFileError> {
        // A page that was written is data, even if it was unmapped again and is not present.
        let within = subtract(&intersect(&self.known, &[range]), written);
        let new = subtract(absent, &within);
        let discarded = match &self.sign {
            DiscardSign::NoEntry => return Ok(()),
            DiscardSign::Marker => new,
            DiscardSign::Hole { .. } => subtract(&new, &self.data_within(&new)?),
        };
        dirty.extend(&discarded);
        // Pages that are present again, or data again, are checked anew when they disappear.
        let still = intersect(&within, absent);
        self.known = subtract(&self.known, &[range]);
        self.known.extend(still);
        self.known.extend(discarded);
        merge_from(&mut self.known, 0);
        Ok(())
    }
}
