//! Pages of a process that exist.
//!
//! For anonymous memory only the page table has this information: a page that is neither present
//! nor swapped was never touched, or was discarded (balloon, `MADV_DONTNEED`), and reads as zeros.
//! For a shared file use the file ([`crate::RamFile::data_runs`]): it may have a page that this
//! process never accessed. For a private mapping of a file there is no source; a page that is not
//! in the page table is read from the file, and holes cannot be detected.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use linux_raw_sys::general as raw;
use rustix::io::Errno;

use crate::abi::{self, ScanQuery, page_region};
use crate::range::{AddressRange, PAGE_SIZE, merge_from};
use crate::{Process, ProcessError};

/// Maximum number of regions that one step of a scan returns: 384 KiB of buffer.
const REGIONS_PER_STEP: usize = 16 * 1024;
/// Number of entries of `/proc/PID/pagemap` that are read at once.
const ENTRIES_PER_STEP: u64 = 16 * 1024;

const PRESENT: u64 = raw::PAGE_IS_PRESENT as u64;
const SWAPPED: u64 = raw::PAGE_IS_SWAPPED as u64;

/// Page table of a process, opened for scans.
///
/// The descriptor belongs to the memory that the process had when this was opened: after an
/// `execve` or its end, scans find nothing.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    regions: Vec<page_region>,
}

impl Pagemap {
    /// Opens the page table of a process.
    pub fn open(process: &Process) -> Result<Self, ProcessError> {
        let file = File::open(process.path("pagemap"))
            .map_err(|source| process.explain("open the page table of", source))?;
        process.check_alive()?;
        Ok(Self::over(file))
    }

    /// Duplicates the page table, for another thread.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self::over(self.file.try_clone()?))
    }

    fn over(file: File) -> Self {
        Self { file, regions: vec![page_region { start: 0, end: 0, categories: 0 }; REGIONS_PER_STEP] }
    }

    /// Appends to `found` the parts of `range` whose pages are present or in swap, sorted and
    /// joined. For anonymous memory the rest are holes, whether it is tracked or not.
    ///
    /// Needs `CAP_SYS_ADMIN` to detect holes in memory that is tracked; without it they count as
    /// pages.
    ///
    /// Linux before 6.7 has no scans: the entries of the page table are read one by one there.
    pub fn populated(&mut self, range: AddressRange, found: &mut Vec<AddressRange>) -> io::Result<()> {
        let from = found.len();
        match self.scan_populated(range, found) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTTY) => {
                found.truncate(from);
                self.entries(range, &[PageEntry::Present, PageEntry::Swapped], found)?;
            }
            scanned => scanned?,
        }
        merge_from(found, from);
        Ok(())
    }

    fn scan_populated(&mut self, range: AddressRange, found: &mut Vec<AddressRange>) -> io::Result<()> {
        let mut absent = Vec::new();
        let query =
            ScanQuery { flags: 0, inverted: 0, required: 0, any_of: PRESENT | SWAPPED, returned: PRESENT };
        self.scan(range, query, |part, categories| {
            if categories & PRESENT != 0 {
                found.push(part);
            } else {
                absent.push(part);
            }
        })?;
        for part in absent {
            // A page that was swapped in since the scan exists as well.
            self.entries(part, &[PageEntry::Present, PageEntry::Swapped], found)?;
        }
        Ok(())
    }

    /// Appends the pages of `range` whose entry is one of the `wanted` ones. Tracking puts a marker into the page table
    /// for each missing page, which scans cannot distinguish from one in swap.
    pub(crate) fn entries(
        &self,
        range: AddressRange,
        wanted: &[PageEntry],
        found: &mut Vec<AddressRange>,
    ) -> io::Result<()> {
        let mut bytes = vec![0; (range.len() / PAGE_SIZE).min(ENTRIES_PER_STEP) as usize * 8];
        let mut at = range.start;
        while at < range.end {
            let pages = ((range.end - at) / PAGE_SIZE).min(ENTRIES_PER_STEP);
            let bytes = &mut bytes[..pages as usize * 8];
            self.file.read_exact_at(bytes, at / PAGE_SIZE * 8)?;
            for entry in bytes.as_chunks::<8>().0 {
                if wanted.contains(&PageEntry::of(u64::from_le_bytes(*entry))) {
                    found.push(AddressRange::with_len(at, PAGE_SIZE));
                }
                at += PAGE_SIZE;
            }
        }
        Ok(())
    }

    /// Runs one query over a range, in as many steps as the buffer needs; passes on the results,
    /// cut to the range, with the requested categories.
    pub(crate) fn scan(
        &mut self,
        range: AddressRange,
        query: ScanQuery,
        mut each: impl FnMut(AddressRange, u64),
    ) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let (count, walked_to) =
                match abi::pagemap_scan(&self.file, query, at, range.end, &mut self.regions) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    result => result?,
                };
            for region in self.regions.iter().take(count) {
                if let Some(part) = AddressRange::new(region.start, region.end).intersection(&range) {
                    each(part, region.categories);
                }
            }
            if walked_to <= at {
                // A huge page that the range cuts in two would stop the walk for ever.
                return Err(io::Error::other("the kernel's scan does not advance"));
            }
            at = walked_to;
        }
        Ok(())
    }
}

/// State of a page in an entry of `/proc/PID/pagemap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageEntry {
    /// Never touched, or discarded.
    Nothing,
    /// Never touched, or discarded, under protection.
    Marker,
    /// In swap, or being migrated.
    Swapped,
    /// In memory.
    Present,
}

impl PageEntry {
    fn of(entry: u64) -> Self {
        const PRESENT: u64 = 1 << 63;
        const SWAPPED: u64 = 1 << 62;
        /// Bits 0 to 4 of a page that is not present: number of the swap device; the last number stands for markers.
        /// For a page that is present the same bits are part of its frame number.
        const KIND: u64 = 31;
        const MARKER: u64 = 31;
        match entry {
            entry if entry & PRESENT != 0 => Self::Present,
            entry if entry & SWAPPED == 0 => Self::Nothing,
            entry if entry & KIND == MARKER => Self::Marker,
            _ => Self::Swapped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries as Linux 6.18 writes them; bits 56 and 57 mean "mapped by this process alone" and "protected".
    #[test]
    fn entries_are_distinguished() {
        const ALONE: u64 = 1 << 56;
        const PROTECTED: u64 = 1 << 57;
        for (raw, entry) in [
            (0, PageEntry::Nothing),
            (1 << 62 | PROTECTED | 31, PageEntry::Marker),
            (1 << 62 | PROTECTED, PageEntry::Swapped),
            (1 << 62 | 77 << 5 | 3, PageEntry::Swapped),
            (1 << 63 | ALONE, PageEntry::Present),
            (1 << 63 | ALONE | PROTECTED | 0x12_3456, PageEntry::Present),
            // One page in 32 has such a frame number.
            (1 << 63 | ALONE | 0x12_345f, PageEntry::Present),
            (1 << 63 | PROTECTED | 31, PageEntry::Present),
        ] {
            assert_eq!(PageEntry::of(raw), entry, "{raw:#x}");
        }
    }

    /// A kernel without scans: a file with the entries of this process, which does not support the request.
    #[test]
    fn pages_are_found_where_the_kernel_cannot_scan() {
        const PAGES: u64 = 64;
        let mut memory = vec![0_u8; ((PAGES + 1) * PAGE_SIZE) as usize];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE_SIZE);
        let range = AddressRange::with_len(start, PAGES * PAGE_SIZE);
        let shift = (start - memory.as_ptr() as u64) as usize;
        for page in 8..24 {
            memory[shift + page * PAGE_SIZE as usize] = 1;
        }
        let process = Process::open(std::process::id()).unwrap();
        let mut pagemap = Pagemap::open(&process).unwrap();
        let mut entries = vec![0; PAGES as usize * 8];
        let at = start / PAGE_SIZE * 8;
        pagemap.file.read_exact_at(&mut entries, at).unwrap();
        let copy = tempfile::tempfile().unwrap();
        copy.write_all_at(&entries, at).unwrap();

        let mut scanned = vec![AddressRange::with_len(0, PAGE_SIZE)];
        pagemap.populated(range, &mut scanned).unwrap();
        let mut read = vec![AddressRange::with_len(0, PAGE_SIZE)];
        Pagemap::over(copy).populated(range, &mut read).unwrap();
        assert_eq!(read, scanned);
        let written = AddressRange::with_len(start + 8 * PAGE_SIZE, 16 * PAGE_SIZE);
        assert!(read.iter().any(|part| part.intersection(&written) == Some(written)), "{read:?}");
    }

    /// Every page of this test's own memory exists, whatever its frame.
    #[test]
    fn existing_pages_are_found_one_by_one() {
        const PAGES: u64 = 1024;
        let memory = vec![1_u8; ((PAGES + 1) * PAGE_SIZE) as usize];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE_SIZE);
        let range = AddressRange::with_len(start, PAGES * PAGE_SIZE);
        let pagemap = Pagemap::open(&Process::open(std::process::id()).unwrap()).unwrap();
        let mut found = Vec::new();
        pagemap.entries(range, &[PageEntry::Present, PageEntry::Swapped], &mut found).unwrap();
        merge_from(&mut found, 0);
        assert_eq!(found, [range]);
    }
}
