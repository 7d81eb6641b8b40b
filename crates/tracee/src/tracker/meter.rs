//! Count of the pages that were written since a moment, for a measurement.
//!
//! No page is protected again after its first write, so each page costs the process at most one page fault, however
//! long and however often its writes are counted. Pages that were dropped may count as written.
//!
//! In anonymous memory only the pages that exist are protected. To protect a missing page needs an entry in the page
//! table, which would stay after the measurement, and keep the kernel from giving the guest a huge page there. A page
//! that appears later counts as written; the page of zeros, which reading a missing page shows, does not.
//!
//! Files and huge pages (hugetlbfs) are protected as a whole: a missing page of theirs may have content, and reading it
//! would count as writing.
//!
//! **Undo.** Like that of a [`WriteTracker`](super::WriteTracker): dropping the meter, or the end of the process that
//! holds it, lifts the protection.

use std::hint::black_box;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::libc;

use super::start::slices;
use super::walkers::Walkers;
use super::{Area, IS_PRESENT, IS_SWAPPED, IS_WRITTEN, Registration, SCAN_FLAGS, TrackError, areas};
use crate::abi::{self, ScanQuery};
use crate::pagemap::Pagemap;
use crate::range::{AddressRange, PAGE_SIZE};
use crate::{Process, ProcessError};

/// Counts the pages of another process that were written since it was started, until it is dropped.
#[derive(Debug)]
pub struct WriteMeter {
    registered: Registration,
    pagemap: Pagemap,
    walkers: Walkers,
    process: Process,
}

/// Memory that was written at least once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenMemory {
    /// Bytes of whole pages.
    pub bytes: u64,
    /// Page faults by which the kernel has noticed the writes, at most: one for each page, however large it is. A page
    /// that was missing before needed its page fault anyway.
    pub faults: u64,
}

const IS_ZERO: u64 = linux_raw_sys::general::PAGE_IS_PFNZERO as u64;

/// Written pages; none is protected again, and a range that is not registered is an error.
const WRITTEN: ScanQuery = ScanQuery {
    flags: linux_raw_sys::general::PM_SCAN_CHECK_WPASYNC as u64,
    inverted: 0,
    required: IS_WRITTEN,
    any_of: 0,
    returned: IS_WRITTEN,
};
/// The same where missing pages are not protected. A scan for written pages alone would return them, too.
const WRITTEN_AND_THERE: ScanQuery = ScanQuery {
    inverted: IS_ZERO,
    required: IS_WRITTEN | IS_ZERO,
    any_of: IS_PRESENT | IS_SWAPPED,
    ..WRITTEN
};
/// Pages that exist, in memory or in swap, and are not protected; protects them.
const UNPROTECTED: ScanQuery = ScanQuery { flags: SCAN_FLAGS, ..WRITTEN_AND_THERE };

/// Pages that are touched to measure the cost of a page fault.
const TOUCHED_PAGES: usize = 1024;

impl WriteMeter {
    /// Initialises a fresh userfaultfd of `process` (see [`crate::Injector::create_userfaultfd`]) and counts the writes
    /// to `ranges` with it, from here on.
    ///
    /// # Errors
    /// The ranges are unregistered again.
    pub fn start(process: &Process, uffd: OwnedFd, ranges: &[AddressRange]) -> Result<Self, TrackError> {
        let mut meter = Self::register(process, uffd, ranges)?;
        meter.protect(|| false)?;
        Ok(meter)
    }

    /// Starts like [`WriteMeter::start`], in short steps. Returns none if `is_interrupted` returned true before the
    /// last one.
    ///
    /// # Errors
    /// The ranges are unregistered again.
    pub fn start_unless(
        process: &Process,
        uffd: OwnedFd,
        ranges: &[AddressRange],
        is_interrupted: impl Fn() -> bool,
    ) -> Result<Option<Self>, TrackError> {
        let mut meter = Self::register(process, uffd, ranges)?;
        Ok(meter.protect(is_interrupted)?.then_some(meter))
    }

    fn register(process: &Process, uffd: OwnedFd, ranges: &[AddressRange]) -> Result<Self, TrackError> {
        let pagemap = Pagemap::open(process)?;
        let mut found = Vec::new();
        for &range in ranges {
            found.extend(areas(process, range)?);
        }
        let mut registered = Registration::begin(uffd, ranges)?;
        found.into_iter().try_for_each(|area| registered.register(area))?;
        Ok(Self { registered, pagemap, walkers: Walkers::default(), process: process.try_clone()? })
    }

    /// Protects the memory, slice by slice. Returns false if it was interrupted.
    fn protect(&mut self, is_interrupted: impl Fn() -> bool) -> Result<bool, TrackError> {
        for area in &self.registered.areas {
            for slice in slices(area.range, area.page_size) {
                if is_interrupted() {
                    return Ok(false);
                }
                if is_protected_whole(area) {
                    self.registered.protect(slice)?;
                } else {
                    let protected = self.pagemap.scan(slice, UNPROTECTED, |_, _| {});
                    protected.map_err(|source| explain(&self.process, slice, source))?;
                }
            }
        }
        Ok(true)
    }

    /// Returns the memory that was written since the start.
    ///
    /// # Errors
    /// The process has ended, or has mapped its memory anew.
    pub fn count(&mut self) -> Result<WrittenMemory, TrackError> {
        let mut all = WrittenMemory::default();
        for area in &self.registered.areas {
            let range = area.range;
            let query = if is_protected_whole(area) { WRITTEN } else { WRITTEN_AND_THERE };
            let count = |pagemap: &mut Pagemap, part| count_part(pagemap, part, query);
            let counted = self.walkers.walk(&mut self.pagemap, range, count);
            let bytes = counted.into_iter().sum::<io::Result<u64>>();
            let bytes = bytes.map_err(|source| explain(&self.process, range, source))?;
            all.bytes += bytes;
            all.faults += bytes / area.page_size;
        }
        // The page table of a process that has ended is empty.
        self.process.check_alive()?;
        Ok(all)
    }

    /// Ends the measurement, and returns its error. Dropping does the same but ignores the error.
    pub fn stop(mut self) -> Result<(), TrackError> {
        match self.registered.unregister_from(0) {
            Err(_) if !self.process.is_alive() => Ok(()),
            result => result,
        }
    }
}

/// Returns true if missing pages of an area are protected, too: anonymous memory has nothing in them.
fn is_protected_whole(area: &Area) -> bool {
    !area.discarded.is_unneeded()
}

/// Returns the error of a scan.
fn explain(process: &Process, range: AddressRange, source: io::Error) -> TrackError {
    match source.raw_os_error() {
        Some(libc::EPERM) => TrackError::Lost { range },
        Some(libc::ESRCH) => ProcessError::Gone { pid: process.pid() }.into(),
        _ => TrackError::Io { action: "scan", range, source },
    }
}

fn count_part(pagemap: &mut Pagemap, range: AddressRange, query: ScanQuery) -> io::Result<u64> {
    let mut bytes = 0;
    pagemap.scan(range, query, |part, _| bytes += part.len())?;
    Ok(bytes)
}

/// Measures the time that the kernel needs for the first write to a protected page, in memory of this process.
///
/// # Errors
/// The kernel does not track writes.
pub fn write_fault_cost() -> Result<Duration, TrackError> {
    let process = Process::open(std::process::id())?;
    let page = PAGE_SIZE as usize;
    let mut memory = vec![1_u8; (TOUCHED_PAGES + 1) * page];
    let offset = memory.as_ptr().align_offset(page);
    let touched = memory.get_mut(offset..offset + TOUCHED_PAGES * page).unwrap_or_default();
    let range = AddressRange::with_len(touched.as_ptr() as u64, touched.len() as u64);
    let unprotected = touch(touched);
    let uffd = abi::own_userfaultfd();
    let uffd = uffd.map_err(|source| TrackError::Io { action: "use a userfaultfd for", range, source })?;
    let meter = WriteMeter::start(&process, uffd, &[range])?;
    let protected = touch(touched);
    meter.stop()?;
    Ok(protected.saturating_sub(unprotected) / TOUCHED_PAGES as u32)
}

/// Writes to each page; returns the duration.
fn touch(memory: &mut [u8]) -> Duration {
    let began = Instant::now();
    for page in memory.chunks_mut(PAGE_SIZE as usize) {
        if let Some(first) = black_box(page).first_mut() {
            *first = first.wrapping_add(1);
        }
    }
    began.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_written_page_counts_once() {
        let page = PAGE_SIZE as usize;
        let process = Process::open(std::process::id()).unwrap();
        let mut memory = vec![1_u8; 17 * page];
        let offset = memory.as_ptr().align_offset(page);
        let pages = &mut memory[offset..offset + 16 * page];
        let range = AddressRange::with_len(pages.as_ptr() as u64, pages.len() as u64);
        let mut meter = WriteMeter::start(&process, abi::own_userfaultfd().unwrap(), &[range]).unwrap();
        assert_eq!(meter.count().unwrap(), WrittenMemory::default());
        let mut write = |at: usize| *black_box(&mut pages[at * page]) += 1;
        (0..3).for_each(&mut write);
        assert_eq!(meter.count().unwrap(), WrittenMemory { bytes: 3 * PAGE_SIZE, faults: 3 });
        (1..5).for_each(&mut write);
        assert_eq!(meter.count().unwrap(), WrittenMemory { bytes: 5 * PAGE_SIZE, faults: 5 });
        meter.stop().unwrap();
        write(7);
        // Nothing remains that a second one would meet.
        let mut meter = WriteMeter::start(&process, abi::own_userfaultfd().unwrap(), &[range]).unwrap();
        assert_eq!(meter.count().unwrap(), WrittenMemory::default());
    }

    #[test]
    fn a_page_fault_costs_something() {
        assert!(write_fault_cost().unwrap() > Duration::ZERO);
    }
}
