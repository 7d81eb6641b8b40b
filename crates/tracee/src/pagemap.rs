//! Which pages of a process are there at all.
//!
//! For anonymous memory the page table is the only one who knows: a page that is neither present
//! nor swapped was never touched, or was given back (balloon, `MADV_DONTNEED`), and reads as
//! zeros. For a shared file ask the file ([`crate::RamFile::data_runs`]): a page may be in the
//! file that this process never looked at. For a private mapping of a file nobody knows; what is
//! not in the page table comes from the file, and holes cannot be told.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use linux_raw_sys::general as raw;

use crate::abi::{self, ScanQuery, page_region};
use crate::range::{AddressRange, PAGE_SIZE, merge_from};
use crate::{Process, ProcessError};

/// Regions that one step of a scan can return: 384 KiB of buffer.
const REGIONS_PER_STEP: usize = 16 * 1024;
/// Entries of `/proc/PID/pagemap` that are read at once.
const ENTRIES_PER_STEP: u64 = 16 * 1024;

const PRESENT: u64 = raw::PAGE_IS_PRESENT as u64;
const SWAPPED: u64 = raw::PAGE_IS_SWAPPED as u64;

/// The page table of a process, opened for scans.
///
/// The descriptor belongs to the memory of the process as it was when this was opened: after an
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
        Ok(Self { file, regions: vec![page_region { start: 0, end: 0, categories: 0 }; REGIONS_PER_STEP] })
    }

    /// Appends to `found` the parts of `range` whose pages are present or in swap, sorted and
    /// joined. For anonymous memory the rest are holes, whether it is tracked or not.
    ///
    /// Needs `CAP_SYS_ADMIN` to see holes in memory that is tracked; without it they are taken
    /// for pages.
    pub fn populated(&mut self, range: AddressRange, found: &mut Vec<AddressRange>) -> io::Result<()> {
        let from = found.len();
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
            self.swapped(part, found)?;
        }
        merge_from(found, from);
        Ok(())
    }

    /// Appends the pages of `range` that are really in swap. Tracking puts a marker into the page
    /// table for each page that is not there, which scans cannot tell from one in swap.
    pub(crate) fn swapped(&self, range: AddressRange, found: &mut Vec<AddressRange>) -> io::Result<()> {
        /// Bits 0 to 4: number of the swap device; the last one stands for markers.
        const KIND: u64 = 31;
        const MARKER: u64 = 31;
        let mut bytes = vec![0; (range.len() / PAGE_SIZE).min(ENTRIES_PER_STEP) as usize * 8];
        let mut at = range.start;
        while at < range.end {
            let pages = ((range.end - at) / PAGE_SIZE).min(ENTRIES_PER_STEP);
            let bytes = &mut bytes[..pages as usize * 8];
            self.file.read_exact_at(bytes, at / PAGE_SIZE * 8)?;
            for entry in bytes.as_chunks::<8>().0 {
                if u64::from_le_bytes(*entry) & KIND != MARKER {
                    found.push(AddressRange::with_len(at, PAGE_SIZE));
                }
                at += PAGE_SIZE;
            }
        }
        Ok(())
    }

    /// Runs one query over a range, in as many steps as the buffer asks for; passes on what it
    /// returns, cut to the range, with the categories that were asked for.
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
                return Err(io::Error::other("the kernel's scan does not move on"));
            }
            at = walked_to;
        }
        Ok(())
    }
}
