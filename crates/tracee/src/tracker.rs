//! Which pages a process wrote since we last asked.
//!
//! The kernel does the work: the ranges are registered with a userfaultfd of the process in mode
//! "asynchronous write protection", all their pages are protected, and the first write to a page
//! lifts its protection without anybody waiting. `PAGEMAP_SCAN` finds the pages that are not
//! protected any more and protects them again **in the same step**; a write in between two steps
//! would be lost otherwise.
//!
//! Two passes are needed for each scan. The first finds pages marked as written. The second finds
//! pages that have no entry in the page table at all: after a whole range was protected every
//! page has one, if only a marker, so one without was dropped since (hole punch, balloon,
//! reclaim), and its mark with it. Such a page counts as written.
//!
//! The order for a reader is: scan, let DMA that was in flight land, then read. What is read
//! after the scan is at least as new as the scan; what is written after it is in the next one.
//!
//! **Undo.** Dropping a [`WriteTracker`] unregisters what it registered and closes the
//! userfaultfd; ranges that fail half-way in [`WriteTracker::start`] are given back at once. When
//! the process that holds the tracker is killed, the kernel closes its userfaultfd, which
//! unregisters everything as well: nobody else holds that descriptor.

use std::io;
use std::os::fd::OwnedFd;

use linux_raw_sys::general as raw;

use crate::abi::{self, ScanQuery};
use crate::maps;
use crate::pagemap::Pagemap;
use crate::range::{AddressRange, merge_from};
use crate::{Process, ProcessError};

/// Why writes cannot be tracked.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// The process could not be looked at.
    #[error("cannot track writes")]
    Process(#[from] ProcessError),
    /// Nothing is mapped in the range, or only in a part of it.
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
        /// Size in bytes of the pages there.
        page_size: u64,
    },
    /// Another userfaultfd has this range.
    #[error(
        "{range} is watched by another userfaultfd: end the migration or the snapshot that QEMU itself runs"
    )]
    Taken {
        /// The range.
        range: AddressRange,
    },
    /// The kernel does not track this kind of memory.
    #[error("the kernel cannot track writes to {range} (memory of a device, or a file on a disk)")]
    Unsupported {
        /// The range.
        range: AddressRange,
    },
    /// The range is not tracked any more: it was unmapped and mapped anew since the start.
    #[error("{range} is not tracked any more: it was mapped anew")]
    Lost {
        /// The range.
        range: AddressRange,
    },
    /// Any other error.
    #[error("cannot {action} {range}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The range.
        range: AddressRange,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
}

/// Tracks writes to memory of another process until it is dropped.
#[derive(Debug)]
pub struct WriteTracker {
    registered: Registered,
    pagemap: Pagemap,
    process: Process,
}

/// Undo guard: the ranges that are registered, and the only descriptor that keeps them so.
#[derive(Debug)]
struct Registered {
    uffd: OwnedFd,
    /// With the size of their pages, in bytes.
    ranges: Vec<(AddressRange, u64)>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        // Errors are of no use here: when the process has ended there is nothing to undo, and
        // closing the descriptor undoes the rest.
        let _ = self.unregister();
    }
}

impl Registered {
    fn unregister(&mut self) -> Result<(), TrackError> {
        let mut result = Ok(());
        for (range, _) in self.ranges.drain(..) {
            let done = abi::uffd_unregister(&self.uffd, range.start, range.len());
            if let Err(source) = done
                && result.is_ok()
            {
                result = Err(TrackError::Io { action: "stop tracking", range, source });
            }
        }
        result
    }
}

impl WriteTracker {
    /// Takes a fresh userfaultfd of `process` (see [`crate::Injector::take_userfaultfd`]) into use
    /// and tracks `ranges` with it. From here on the first scan returns every page that was
    /// written since; that everything has to be sent once is the caller's affair.
    ///
    /// # Errors
    /// Leaves nothing behind.
    pub fn start(process: &Process, uffd: OwnedFd, ranges: &[AddressRange]) -> Result<Self, TrackError> {
        let pagemap = Pagemap::open(process)?;
        let mut sized = Vec::new();
        for &range in ranges {
            sized.push((range, page_size(process, range)?));
        }
        let whole = AddressRange::default();
        abi::uffd_api(&uffd, abi::TRACKING_FEATURES).map_err(|source| TrackError::Io {
            action: "use a userfaultfd for",
            range: whole,
            source,
        })?;
        let mut registered = Registered { uffd, ranges: Vec::new() };
        for (range, page_size) in sized {
            registered.add(range, page_size)?;
        }
        Ok(Self { registered, pagemap, process: process.try_clone()? })
    }

    /// The ranges that are tracked.
    pub fn ranges(&self) -> impl Iterator<Item = AddressRange> + '_ {
        self.registered.ranges.iter().map(|&(range, _)| range)
    }

    /// Tracks one more range, from now on.
    ///
    /// # Errors
    /// Leaves this range as it was and the others tracked.
    pub fn add(&mut self, range: AddressRange) -> Result<(), TrackError> {
        let page_size = page_size(&self.process, range)?;
        self.registered.add(range, page_size)
    }

    /// Appends to `dirty` the parts of `range` that were written (or dropped) since the last call,
    /// and protects them again. Sorted, joined, within `range`; a huge page counts as a whole.
    ///
    /// `range` has to be within what is tracked and to begin and end at its pages: 4 KiB, or the
    /// page size of hugetlbfs.
    ///
    /// # Errors
    /// What was found before an error is in `dirty`, because it will not be found again.
    pub fn take_dirty(
        &mut self,
        range: AddressRange,
        dirty: &mut Vec<AddressRange>,
    ) -> Result<(), TrackError> {
        if range.is_empty() {
            return Ok(());
        }
        self.check_tracked(range)?;
        let written = u64::from(raw::PAGE_IS_WRITTEN);
        let there = u64::from(raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED);
        let flags = u64::from(raw::PM_SCAN_WP_MATCHING | raw::PM_SCAN_CHECK_WPASYNC);
        let passes = [
            ScanQuery { flags, inverted: 0, required: written, any_of: 0, returned: written },
            ScanQuery { flags, inverted: there, required: there, any_of: 0, returned: 0 },
        ];
        let from = dirty.len();
        let result = passes.iter().try_for_each(|&query| self.pagemap.scan(range, query, dirty));
        merge_from(dirty, from);
        result.map_err(|source| match source.raw_os_error() {
            Some(nix::libc::EPERM) => TrackError::Lost { range },
            Some(nix::libc::ESRCH) => ProcessError::Gone { pid: self.process.pid() }.into(),
            _ => TrackError::Io { action: "scan", range, source },
        })?;
        // The page table of a process that has ended is empty, which looks like "nothing written".
        Ok(self.process.check_alive()?)
    }

    /// Ends tracking, and says if that failed. Dropping does the same and keeps silent.
    pub fn stop(mut self) -> Result<(), TrackError> {
        match self.registered.unregister() {
            Err(_) if !self.process.is_alive() => Ok(()),
            result => result,
        }
    }

    fn check_tracked(&self, range: AddressRange) -> Result<(), TrackError> {
        // Ranges may touch, so what is asked for may lie in several of them.
        let mut parts: Vec<AddressRange> = self.ranges().filter_map(|one| one.intersection(&range)).collect();
        merge_from(&mut parts, 0);
        if parts != [range] {
            return Err(TrackError::NotMapped { range });
        }
        let touched = self.registered.ranges.iter().filter(|(one, _)| one.intersection(&range).is_some());
        let page_size = touched.map(|&(_, page_size)| page_size).max().unwrap_or(crate::PAGE_SIZE);
        if range.is_aligned(page_size) { Ok(()) } else { Err(TrackError::Unaligned { range, page_size }) }
    }
}

impl Registered {
    fn add(&mut self, range: AddressRange, page_size: u64) -> Result<(), TrackError> {
        abi::uffd_register_wp(&self.uffd, range.start, range.len()).map_err(|source| {
            match source.raw_os_error() {
                Some(nix::libc::EBUSY) => TrackError::Taken { range },
                Some(nix::libc::EINVAL) => TrackError::Unsupported { range },
                _ => TrackError::Io { action: "track writes to", range, source },
            }
        })?;
        self.ranges.push((range, page_size));
        loop {
            match abi::uffd_write_protect(&self.uffd, range.start, range.len()) {
                Ok(()) => return Ok(()),
                // The process is changing its map at this moment.
                Err(error) if error.raw_os_error() == Some(nix::libc::EAGAIN) => std::thread::yield_now(),
                Err(source) => {
                    self.ranges.pop();
                    let _ = abi::uffd_unregister(&self.uffd, range.start, range.len());
                    return Err(TrackError::Io { action: "protect", range, source });
                }
            }
        }
    }
}

/// Size of the pages in a range, which has to be mapped as a whole and to fit them.
fn page_size(process: &Process, range: AddressRange) -> Result<u64, TrackError> {
    let parts = maps::page_sizes(process, range)?;
    let mut mapped: Vec<AddressRange> = parts.iter().map(|&(part, _)| part).collect();
    merge_from(&mut mapped, 0);
    if mapped != [range] {
        return Err(TrackError::NotMapped { range });
    }
    let page_size = parts.iter().map(|&(_, page_size)| page_size).max().unwrap_or(crate::PAGE_SIZE);
    if range.is_aligned(page_size) { Ok(page_size) } else { Err(TrackError::Unaligned { range, page_size }) }
}
