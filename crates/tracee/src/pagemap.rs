//! Which pages of a process are there at all.
//!
//! For anonymous memory the page table is the only one who knows: a page that is neither present
//! nor swapped was never touched, or was given back (balloon, `MADV_DONTNEED`), and reads as
//! zeros. For a shared file ask the file ([`crate::RamFile::data_runs`]): a page may be in the
//! file that this process never looked at. For a private mapping of a file nobody knows; what is
//! not in the page table comes from the file, and holes cannot be told.

use std::fs::File;
use std::io;

use linux_raw_sys::general as raw;

use crate::abi::{self, ScanQuery, page_region};
use crate::range::{AddressRange, merge_from};
use crate::{Process, ProcessError};

/// Regions that one step of a scan can return: 384 KiB of buffer.
const REGIONS_PER_STEP: usize = 16 * 1024;

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

    /// Appends to `found` the parts of `range` whose pages are present or swapped, sorted and
    /// joined. For anonymous memory the rest are holes.
    pub fn populated(&mut self, range: AddressRange, found: &mut Vec<AddressRange>) -> io::Result<()> {
        let any_of = u64::from(raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED);
        let query = ScanQuery { flags: 0, inverted: 0, required: 0, any_of, returned: 0 };
        let from = found.len();
        self.scan(range, query, found)?;
        merge_from(found, from);
        Ok(())
    }

    /// Runs one query over a range, in as many steps as the buffer asks for; appends what it
    /// returns, cut to the range, in the order of the kernel.
    pub(crate) fn scan(
        &mut self,
        range: AddressRange,
        query: ScanQuery,
        found: &mut Vec<AddressRange>,
    ) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let (count, walked_to) =
                match abi::pagemap_scan(&self.file, query, at, range.end, &mut self.regions) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    result => result?,
                };
            let regions = self.regions.iter().take(count);
            found
                .extend(regions.filter_map(|one| AddressRange::new(one.start, one.end).intersection(&range)));
            if walked_to <= at {
                // A huge page that the range cuts in two stops the walk; see `WriteTracker`.
                return Err(io::Error::other("the kernel's scan does not move on"));
            }
            at = walked_to;
        }
        Ok(())
    }
}
