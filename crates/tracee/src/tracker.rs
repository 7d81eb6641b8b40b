//! Dirty scans: the pages that a process wrote since the previous scan.
//!
//! The kernel does the work: the ranges are registered with a userfaultfd of the process in mode
//! "asynchronous write protection", all their pages are protected, and the first write to a page
//! lifts its protection without any thread waiting. `PAGEMAP_SCAN` finds the pages that are not
//! protected any more and protects them again **in the same step**; a write in between two steps
//! would be lost otherwise.
//!
//! A scan selects pages that are marked as written **or** not present. After a whole range was
//! protected, every page has an entry in the page table, at least a marker; so a page without one
//! was dropped since (balloon, reclaim), and its mark with it, and counts as written. Discarded
//! pages that kept a mark of being clean are found among the others that are not present: see
//! `discarded`.
//!
//! One query covers both, so that the page table is walked once.
//!
//! The order for a reader is: scan, let DMA that was in flight land, then read. The content that is
//! read after the scan is at least as new as the scan; later writes are in the next one.
//!
//! **Undo.** Dropping a [`WriteTracker`], or a [`TrackerStart`], unregisters its ranges and closes
//! the userfaultfd; ranges that fail half-way are unregistered at once. When the process that holds
//! the tracker is killed, the kernel closes its userfaultfd, which unregisters everything as well:
//! no other process holds that descriptor.

use std::io;
use std::os::fd::OwnedFd;

use linux_raw_sys::general as raw;

use crate::abi::{self, ScanQuery};
use crate::discarded::DiscardedPages;
use crate::maps;
use crate::pagemap::{PageEntry, Pagemap};
use crate::range::{AddressRange, PAGE_SIZE, intersect, merge_from, subtract};
use crate::{Process, ProcessError, RamFileError, RemoteMemory};

mod meter;
mod start;
mod walkers;

pub use meter::{WriteMeter, WrittenMemory, write_fault_cost};
use start::RemainingSteps;
pub use start::TrackerStart;
use walkers::Walkers;

/// Error: writes cannot be tracked.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// The process could not be inspected.
    #[error("cannot track writes")]
    Process(#[from] ProcessError),
    /// The holes of the file behind shared memory could not be queried.
    #[error("cannot track writes")]
    RamFile(#[from] RamFileError),
    /// The process has no mapping in the range, or only in a part of it.
    #[error("{range} is not (wholly) mapped")]
    NotMapped {
        /// The range.
        range: AddressRange,
    },
    /// A range cuts a page in two.
    #[error("{range} does not begin and end at pages of {page_size} bytes")]
    Unaligned {
        /// The range.
        range: AddressRange,
        /// Page size of that memory in bytes.
        page_size: u64,
    },
    /// Another userfaultfd has registered this range.
    #[error(
        "{range} is watched by another userfaultfd: end the migration or the snapshot that QEMU itself runs"
    )]
    Taken {
        /// The range.
        range: AddressRange,
    },
    /// The kernel does not track this kind of memory.
    #[error("the kernel cannot track writes to {range} (memory of a device, or that can never be written)")]
    Unsupported {
        /// The range.
        range: AddressRange,
    },
    /// The range is not tracked any more: it was unmapped and mapped anew since the start.
    #[error("{range} is not tracked any more: it was mapped again")]
    Lost {
        /// The range.
        range: AddressRange,
    },
    /// Any other error.
    #[error("cannot {action} {range}")]
    Io {
        /// Attempted action.
        action: &'static str,
        /// The range.
        range: AddressRange,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
}

/// Tracks writes to memory of another process until it is dropped.
#[derive(Debug)]
pub struct WriteTracker {
    registered: Registration,
    pagemap: Pagemap,
    walkers: Walkers,
    memory: RemoteMemory,
    process: Process,
}

/// Undo guard: the registered ranges, and the only descriptor that keeps them registered.
#[derive(Debug)]
struct Registration {
    uffd: OwnedFd,
    areas: Vec<Area>,
}

/// A range, or the part of one that lies in one mapping.
#[derive(Debug)]
struct Area {
    range: AddressRange,
    /// Page size in bytes.
    page_size: u64,
    discarded: DiscardedPages,
}

impl WriteTracker {
    /// Initialises a fresh userfaultfd of `process` (see [`crate::Injector::create_userfaultfd`]) and
    /// tracks `ranges` with it. From here on the first scan returns every page that was written
    /// since. The caller has to send all pages once, and must not read them (nor query holes)
    /// before this call.
    ///
    /// Needs seconds for a large guest that arrived by a migration: [`WriteTracker::begin`] does
    /// the same in steps.
    ///
    /// # Errors
    /// The tracker unregisters the ranges again.
    pub fn start(process: &Process, uffd: OwnedFd, ranges: &[AddressRange]) -> Result<Self, TrackError> {
        Self::begin(process, uffd, ranges)?.finish()
    }

    /// Starts tracking like [`WriteTracker::start`], but in short steps.
    ///
    /// # Errors
    /// The tracker unregisters the ranges again.
    pub fn begin(
        process: &Process,
        uffd: OwnedFd,
        ranges: &[AddressRange],
    ) -> Result<TrackerStart, TrackError> {
        let pagemap = Pagemap::open(process)?;
        let registered = Registration::begin(uffd, ranges)?;
        let mut found = Vec::new();
        for &range in ranges {
            found.extend(areas(process, range)?);
        }
        let memory = RemoteMemory::new(process)?;
        let walkers = Walkers::default();
        let tracker = Self { registered, pagemap, walkers, memory, process: process.try_clone()? };
        Ok(TrackerStart::new(tracker, found))
    }

    /// Returns the tracked ranges, cut at the boundaries of their mappings.
    pub fn ranges(&self) -> impl Iterator<Item = AddressRange> + '_ {
        self.registered.areas.iter().map(|area| area.range)
    }

    /// Tracks one more range, from now on.
    ///
    /// # Errors
    /// This range is unchanged, and the others stay tracked.
    pub fn add(&mut self, range: AddressRange) -> Result<(), TrackError> {
        let mut work = RemainingSteps::new(areas(&self.process, range)?);
        let before = self.registered.areas.len();
        loop {
            match work.step(self) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    let _ = self.registered.unregister_from(before);
                    return Err(error);
                }
            }
        }
    }

    /// Returns the parts of `range` that are not present in the page table.
    fn absent(&mut self, range: AddressRange) -> Result<Vec<AddressRange>, TrackError> {
        let mut absent = Vec::new();
        let scanned = self.pagemap.scan(range, ABSENT, |part, _| absent.push(part));
        scanned.map_err(|source| TrackError::Io { action: "scan", range, source })?;
        merge_from(&mut absent, 0);
        Ok(absent)
    }

    /// Appends to `dirty` the parts of `range` that were written (or discarded) since the last
    /// call, and protects them again. Sorted, joined, within `range`; a huge page counts as a
    /// whole.
    ///
    /// `range` has to be within the tracked ranges and to begin and end at page boundaries: 4 KiB,
    /// or the page size of hugetlbfs.
    ///
    /// # Errors
    /// Pages that were found before an error are in `dirty`, because they will not be found again.
    pub fn take_dirty(
        &mut self,
        range: AddressRange,
        dirty: &mut Vec<AddressRange>,
    ) -> Result<(), TrackError> {
        if range.is_empty() {
            return Ok(());
        }
        self.check_tracked(range)?;
        let from = dirty.len();
        let mut found = Vec::new();
        let result = self.scan(range, &mut found);
        dirty.append(&mut found);
        merge_from(dirty, from);
        result?;
        // The page table of a process that has ended is empty, which is indistinguishable from "nothing
        // written".
        Ok(self.process.check_alive()?)
    }

    /// Scans `range`; `dirty` is empty at first, and in no order at the end.
    fn scan(&mut self, range: AddressRange, dirty: &mut Vec<AddressRange>) -> Result<(), TrackError> {
        let mut absent = Vec::new();
        let mut result = Ok(());
        for part in self.walkers.walk(&mut self.pagemap, range, scan_part) {
            dirty.extend(part.dirty);
            absent.extend(part.absent);
            result = result.and(part.result);
        }
        result.map_err(|source| match source.raw_os_error() {
            Some(nix::libc::EPERM) => TrackError::Lost { range },
            Some(nix::libc::ESRCH) => ProcessError::Gone { pid: self.process.pid() }.into(),
            _ => TrackError::Io { action: "scan", range, source },
        })?;
        merge_from(&mut absent, 0);
        merge_from(dirty, 0);
        let mut discarded = Vec::new();
        let areas = self.registered.areas.iter_mut();
        let mut parts = areas.filter_map(|area| Some((area.range.intersection(&range)?, area)));
        let result = parts.try_for_each(|(part, area)| {
            area.update_discarded(&self.pagemap, part, dirty, &absent, &mut discarded)
        });
        dirty.append(&mut discarded);
        result
    }

    /// Ends tracking, and returns its error. Dropping does the same but ignores the error.
    pub fn stop(mut self) -> Result<(), TrackError> {
        match self.registered.unregister_from(0) {
            Err(_) if !self.process.is_alive() => Ok(()),
            result => result,
        }
    }

    fn check_tracked(&self, range: AddressRange) -> Result<(), TrackError> {
        // The range may span several areas.
        let mut parts: Vec<AddressRange> = self.ranges().filter_map(|one| one.intersection(&range)).collect();
        merge_from(&mut parts, 0);
        if parts != [range] {
            return Err(TrackError::NotMapped { range });
        }
        let touched = self.registered.areas.iter().filter(|area| area.range.intersection(&range).is_some());
        let page_size = touched.map(|area| area.page_size).max().unwrap_or(PAGE_SIZE);
        if range.is_aligned(page_size) { Ok(()) } else { Err(TrackError::Unaligned { range, page_size }) }
    }
}

/// Results of a walk over a part of the page table; also before an error, because they will not be found
/// again.
struct Taken {
    dirty: Vec<AddressRange>,
    absent: Vec<AddressRange>,
    result: io::Result<()>,
}

fn scan_part(pagemap: &mut Pagemap, range: AddressRange) -> Taken {
    let (mut dirty, mut absent) = (Vec::new(), Vec::new());
    let result = pagemap.scan(range, WRITTEN_OR_ABSENT, |part, categories| {
        // A page that is neither present nor in swap (nor has a marker) has no entry, so it was dropped.
        if categories != IS_SWAPPED {
            dirty.push(part);
        }
        if categories & IS_PRESENT == 0 {
            absent.push(part);
        }
    });
    Taken { dirty, absent, result }
}

impl Area {
    /// Calls [`DiscardedPages::update`]; `absent` may go beyond the range.
    fn update_discarded(
        &mut self,
        pagemap: &Pagemap,
        range: AddressRange,
        written: &[AddressRange],
        absent: &[AddressRange],
        dirty: &mut Vec<AddressRange>,
    ) -> Result<(), TrackError> {
        if self.discarded.is_unneeded() {
            return Ok(());
        }
        let absent = intersect(absent, &[range]);
        let mut swapped = Vec::new();
        if self.discarded.is_marker_based() && self.page_size == PAGE_SIZE {
            let read =
                absent.iter().try_for_each(|&run| pagemap.entries(run, &[PageEntry::Swapped], &mut swapped));
            read.map_err(|source| TrackError::Io { action: "scan", range, source })?;
            merge_from(&mut swapped, 0);
        }
        let absent = subtract(&absent, &swapped);
        Ok(self.discarded.update(range, written, &absent, dirty)?)
    }
}

const IS_WRITTEN: u64 = raw::PAGE_IS_WRITTEN as u64;
const IS_SWAPPED: u64 = raw::PAGE_IS_SWAPPED as u64;
const IS_PRESENT: u64 = raw::PAGE_IS_PRESENT as u64;
/// Flags: protect the found pages in the same step; return an error if a page is not tracked.
const SCAN_FLAGS: u64 = (raw::PM_SCAN_WP_MATCHING | raw::PM_SCAN_CHECK_WPASYNC) as u64;

/// Pages that were written, and pages that are not in the page table.
const WRITTEN_OR_ABSENT: ScanQuery = ScanQuery {
    flags: SCAN_FLAGS,
    inverted: IS_PRESENT,
    required: 0,
    any_of: IS_WRITTEN | IS_PRESENT,
    returned: IS_WRITTEN | IS_PRESENT | IS_SWAPPED,
};
/// Pages that are not in the page table, without protecting them.
const ABSENT: ScanQuery =
    ScanQuery { flags: 0, inverted: IS_PRESENT, required: IS_PRESENT, any_of: 0, returned: IS_SWAPPED };

impl Drop for Registration {
    fn drop(&mut self) {
        // Errors are of no use here: when the process has ended there is nothing to undo, and
        // closing the descriptor undoes the rest.
        let _ = self.unregister_from(0);
    }
}

impl Registration {
    /// Initialises a userfaultfd, with which these ranges are to be registered.
    fn begin(uffd: OwnedFd, ranges: &[AddressRange]) -> Result<Self, TrackError> {
        let range = ranges.first().copied().unwrap_or_default();
        let api = abi::uffd_api(&uffd, abi::TRACKING_FEATURES);
        api.map_err(|source| TrackError::Io { action: "use a userfaultfd for", range, source })?;
        Ok(Self { uffd, areas: Vec::new() })
    }

    /// Registers an area, and protects all of it, also pages that are missing.
    fn add(&mut self, area: Area) -> Result<(), TrackError> {
        let range = area.range;
        self.register(area)?;
        self.protect(range)
    }

    fn register(&mut self, area: Area) -> Result<(), TrackError> {
        let range = area.range;
        abi::uffd_register_wp(&self.uffd, range.start, range.len()).map_err(|source| {
            match source.raw_os_error() {
                Some(nix::libc::EBUSY) => TrackError::Taken { range },
                Some(nix::libc::EINVAL | nix::libc::EPERM) => TrackError::Unsupported { range },
                _ => TrackError::Io { action: "track writes to", range, source },
            }
        })?;
        self.areas.push(area);
        Ok(())
    }

    /// Protects a range that is registered, also pages that are missing.
    fn protect(&self, range: AddressRange) -> Result<(), TrackError> {
        loop {
            match abi::uffd_write_protect(&self.uffd, range.start, range.len()) {
                // The process is changing its memory map at this moment.
                Err(error) if error.raw_os_error() == Some(nix::libc::EAGAIN) => std::thread::yield_now(),
                result => {
                    return result.map_err(|source| TrackError::Io { action: "protect", range, source });
                }
            }
        }
    }

    /// Unregisters the areas from this index on.
    fn unregister_from(&mut self, index: usize) -> Result<(), TrackError> {
        let mut result = Ok(());
        for Area { range, .. } in self.areas.drain(index..) {
            let done = abi::uffd_unregister(&self.uffd, range.start, range.len());
            let done = done.map_err(|source| TrackError::Io { action: "stop tracking", range, source });
            result = result.and(done);
        }
        result
    }
}

/// Cuts a range at the boundaries of its mappings. It has to be mapped as a whole and to fit their
/// pages.
fn areas(process: &Process, range: AddressRange) -> Result<Vec<Area>, TrackError> {
    let mut areas = Vec::new();
    let mut reached = range.start;
    for (mapping, page_size) in maps::mappings_in(process, range)? {
        let Some(part) = mapping.range.intersection(&range).filter(|part| part.start == reached) else {
            break;
        };
        if !part.is_aligned(page_size) {
            return Err(TrackError::Unaligned { range, page_size });
        }
        let discarded = DiscardedPages::new(process, &mapping, page_size)?;
        areas.push(Area { range: part, page_size, discarded });
        reached = part.end;
    }
    if reached == range.end && !range.is_empty() { Ok(areas) } else { Err(TrackError::NotMapped { range }) }
}
