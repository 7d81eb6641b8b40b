//! Pages that were given back without leaving a mark.
//!
//! A page of shared memory that was punched out of its file is zero from then on, but the page
//! table says nothing: if the page was protected (clean), the kernel leaves a marker that says
//! "protected" in its place, and a clean page that was merely unmapped or swapped out looks the
//! same. The same goes for hugetlbfs and for private mappings of files. So the pages that are
//! protected but not present are looked at after each scan:
//!
//! - Shared memory whose file can be opened: those that are new among them are looked up in the
//!   file, and a hole that was not one before counts as written.
//! - Private mappings of files, and hugetlbfs, whose files do not tell holes: all that are new
//!   among them (and not in swap) count as written.
//! - Anonymous memory leaves no marker; the scan finds such pages by themselves.
//!
//! What remains:
//!
//! - A page with a file that is punched out and **read** again by its process between two scans is
//!   there again, zero, protected, and not seen. Only memory that a guest had given away (balloon,
//!   free page reporting, virtio-mem) is punched out, and what it reads there is undefined for it
//!   until it writes.
//! - A page of hugetlbfs that was unmapped but stayed in its file, and is punched out later, is
//!   not seen. QEMU punches out huge pages without unmapping them first.

use std::ops::Range;

use crate::maps::{Backing, Mapping};
use crate::range::{AddressRange, PAGE_SIZE, intersect, merge_from, subtract};
use crate::{Process, RamFile, RamFileError};

/// Remembers which pages of a range were given back.
#[derive(Debug)]
pub(crate) struct GivenBack {
    sign: Sign,
    /// Pages that are known to be given back; sorted and joined.
    known: Vec<AddressRange>,
}

/// How a page that was given back is told from others that are not present.
#[derive(Debug)]
enum Sign {
    /// It has no entry in the page table.
    NoEntry,
    /// It is a hole in this file, in which the address `start` is at `offset`.
    Hole { file: RamFile, start: u64, offset: u64 },
    /// There is a marker in the page table, but neither the page nor an entry of swap.
    Marker,
}

impl GivenBack {
    /// For a part of a mapping with pages of so many bytes.
    pub(crate) fn new(process: &Process, mapping: &Mapping, page_size: u64) -> Result<Self, RamFileError> {
        let sign = match mapping.backing {
            Backing::Anonymous if page_size == PAGE_SIZE => Sign::NoEntry,
            Backing::SharedFile(_) if page_size == PAGE_SIZE => {
                let file = RamFile::open(process, mapping)?;
                Sign::Hole { file, start: mapping.range.start, offset: mapping.offset }
            }
            _ => Sign::Marker,
        };
        Ok(Self { sign, known: Vec::new() })
    }

    /// Whether [`GivenBack::update`] has nothing to find, because the scan finds all.
    pub(crate) fn needs_nothing(&self) -> bool {
        matches!(self.sign, Sign::NoEntry)
    }

    /// Whether pages in swap have to be left out of what [`GivenBack::update`] is told.
    pub(crate) fn looks_at_markers(&self) -> bool {
        matches!(self.sign, Sign::Marker)
    }

    /// Whether there is a file that tells holes.
    pub(crate) fn has_file(&self) -> bool {
        matches!(self.sign, Sign::Hole { .. })
    }

    /// The parts of `ranges` that are no holes in the file; nothing where there is no file that tells.
    fn data_within(&self, ranges: &[AddressRange]) -> Result<Vec<AddressRange>, RamFileError> {
        self.ask_file(ranges, RamFile::data_runs)
    }

    /// The parts of `ranges`, all of them within `slice`, that are no holes in the file and that it has in memory.
    pub(crate) fn in_memory_within(
        &self,
        slice: AddressRange,
        ranges: &[AddressRange],
    ) -> Result<Vec<AddressRange>, RamFileError> {
        // Both questions: where the kernel does not tell this process what is in memory, it says "all".
        let data = self.data_within(ranges)?;
        let in_memory =
            if data.is_empty() { data.clone() } else { self.ask_file(&[slice], RamFile::runs_in_memory)? };
        Ok(intersect(&data, &in_memory))
    }

    fn ask_file(
        &self,
        ranges: &[AddressRange],
        question: impl Fn(&RamFile, Range<u64>, &mut Vec<Range<u64>>) -> Result<(), RamFileError>,
    ) -> Result<Vec<AddressRange>, RamFileError> {
        let Sign::Hole { file, start, offset } = &self.sign else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for run in ranges {
            question(file, run.start - start + offset..run.end - start + offset, &mut found)?;
        }
        let address =
            |run: &Range<u64>| AddressRange::new(run.start - offset + start, run.end - offset + start);
        Ok(found.iter().map(address).collect())
    }

    /// Learns which pages of `range` were written and which are protected but not present (both
    /// sorted and joined), and appends to `dirty` those that were given back since the last time.
    pub(crate) fn update(
        &mut self,
        range: AddressRange,
        written: &[AddressRange],
        absent: &[AddressRange],
        dirty: &mut Vec<AddressRange>,
    ) -> Result<(), RamFileError> {
        // One that was written is data, even if it was unmapped again and is not present.
        let within = subtract(&intersect(&self.known, &[range]), written);
        let new = subtract(absent, &within);
        let given_back = match &self.sign {
            Sign::NoEntry => return Ok(()),
            Sign::Marker => new,
            Sign::Hole { .. } => subtract(&new, &self.data_within(&new)?),
        };
        dirty.extend(&given_back);
        // Pages that are back, or data again, are looked at anew when they go.
        let still = intersect(&within, absent);
        self.known = subtract(&self.known, &[range]);
        self.known.extend(still);
        self.known.extend(given_back);
        merge_from(&mut self.known, 0);
        Ok(())
    }
}
