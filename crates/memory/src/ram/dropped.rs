//! Pages of shared files that were given back without leaving a mark.
//!
//! When a hole is punched into a shared file (balloon), the kernel takes the pages out of the page table, but where a
//! page was protected it leaves a marker behind that keeps the protection. To the scan such a page is neither written
//! nor gone, so its second pass (trap 3) does not find it, as it does for anonymous memory and huge pages. Its contents
//! have changed all the same, to zeros, and the destination still has the old ones (trap 5).
//!
//! **After each scan** the file is asked, but only about pages that have no memory in the page table and that the
//! destination may have: those that were never touched, or are holes there already, cost nothing. What is asked about
//! and is no hole was swapped out or is not mapped at the moment. Whether a page is in the page table is read from
//! `/proc/PID/pagemap`, 8 bytes for a page: about 3 ms for a GiB.
//!
//! **When told that memory was given back** (the balloon has moved), every page that the destination may have is
//! looked at. A page that was given back and then read by the guest before the scan is there again, protected as
//! before, and nothing but its zeros tells. A guest cannot rely on the contents of such a page; a comparison of both
//! sides sees it. Looking costs as much as reading the memory once, about 0.2 s for a GiB.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use proto::limits::PAGE_BYTES;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use tracee::{Process, RamFile};

use super::zero::is_zero;
use super::{RamError, RamRegion};
use crate::dirty::DirtyBitmap;

/// Bytes of one page's entry.
const ENTRY_BYTES: usize = 8;
/// Bit 63 of an entry, in its last byte: the page is there.
const PRESENT: u8 = 0x80;
/// Pages looked at in one read.
const STEP_PAGES: u64 = 8192;
/// Longest run that is asked about page by page; for longer ones it pays to ask where the data end.
const SHORT_PAGES: u64 = 32;

/// Watches one block for pages given back.
#[derive(Debug)]
pub(crate) struct DropWatch {
    table: File,
    file: RamFile,
    /// Where the block begins in the file, in bytes.
    offset: u64,
    address: u64,
    /// Pages that the destination may have contents of.
    known: DirtyBitmap,
    entries: Vec<u8>,
}

impl DropWatch {
    /// Watches a block from its first scan on; all of it counts as known, because all of it is sent once.
    pub(crate) fn new(
        process: &Process,
        region: &RamRegion,
        file: RamFile,
        offset: u64,
    ) -> Result<Self, RamError> {
        let table = File::open(process.path("pagemap")).map_err(RamError::Present)?;
        process.check_alive()?;
        let known = DirtyBitmap::full(region.bytes);
        let entries = vec![0; STEP_PAGES as usize * ENTRY_BYTES];
        Ok(Self { table, file, offset, address: region.address, known, entries })
    }

    /// Adds pages that were given back to `dirty`, which holds what the scan before found; returns how many. To be
    /// called after each scan. With `all`, also finds those that are there again.
    ///
    /// A page that is given back after it was looked at is found the next time, and there always is a next time until
    /// the guest has stopped.
    pub(crate) fn take(&mut self, dirty: &mut DirtyBitmap, all: bool) -> Result<u64, RamError> {
        let mut gone = Vec::new();
        if all {
            self.find_zeros(&mut gone)?;
        } else {
            let mut absent = Vec::new();
            self.find_absent(&mut absent).map_err(RamError::Present)?;
            let mut data_until = 0;
            for run in absent {
                self.find_holes(run, &mut data_until, &mut gone).map_err(RamError::Present)?;
            }
        }
        // What was found written is going to be sent, as whatever it is then.
        self.known.insert(dirty);
        let before = dirty.count();
        for run in gone {
            self.known.clear(run.clone());
            dirty.set(run);
        }
        Ok(dirty.count() - before)
    }

    /// Known pages that are holes or all zero.
    fn find_zeros(&self, gone: &mut Vec<Range<u64>>) -> Result<(), RamError> {
        let mut bytes = vec![0; (SHORT_PAGES * PAGE_BYTES) as usize];
        for run in self.known.runs() {
            let mut at = run.start;
            while at < run.end {
                let data = self.seek(SeekFrom::Data, at, run.end).map_err(RamError::Present)?;
                if at < data {
                    gone.push(at..data);
                }
                let end = run.end.min(data + SHORT_PAGES);
                let bytes = &mut bytes[..((end - data) * PAGE_BYTES) as usize];
                self.file.read_at(self.offset + data * PAGE_BYTES, bytes)?;
                let pages = (data..end).zip(bytes.chunks_exact(PAGE_BYTES as usize));
                gone.extend(pages.filter(|(_, page)| is_zero(page)).map(|(page, _)| page..page + 1));
                at = end;
            }
        }
        Ok(())
    }

    /// Known pages that are not in the page table, as runs, ascending.
    fn find_absent(&mut self, found: &mut Vec<Range<u64>>) -> io::Result<()> {
        let mut at = 0;
        while at < self.known.pages() {
            let end = self.known.pages().min(at + STEP_PAGES);
            if self.known.runs_within(at..end).next().is_some() {
                let entries = &mut self.entries[..(end - at) as usize * ENTRY_BYTES];
                let first = self.address / PAGE_BYTES + at;
                self.table.read_exact_at(entries, first * ENTRY_BYTES as u64)?;
                for run in self.known.runs_within(at..end) {
                    for page in run {
                        let last_byte = (page - at + 1) as usize * ENTRY_BYTES - 1;
                        if entries[last_byte] & PRESENT != 0 {
                            continue;
                        }
                        match found.last_mut() {
                            Some(last) if last.end == page => last.end += 1,
                            _ => found.push(page..page + 1),
                        }
                    }
                }
            }
            at = end;
        }
        Ok(())
    }

    /// The holes within a run of pages. `data_until` is the page up to which everything is known to be data.
    fn find_holes(
        &self,
        run: Range<u64>,
        data_until: &mut u64,
        holes: &mut Vec<Range<u64>>,
    ) -> io::Result<()> {
        let mut at = run.start.max(*data_until);
        while at < run.end {
            let data = self.seek(SeekFrom::Data, at, run.end)?;
            if at < data {
                holes.push(at..data);
            }
            at = data + 1;
            if run.end.saturating_sub(data) > SHORT_PAGES {
                // Walks all data from here to the next hole, however far that is; so never twice.
                *data_until = self.seek(SeekFrom::Hole, data, self.known.pages())?;
                at = at.max(*data_until);
            }
        }
        Ok(())
    }

    /// Asks the file; `end` if what is looked for is not before it. In pages of the block.
    fn seek(&self, whence: fn(u64) -> SeekFrom, page: u64, end: u64) -> io::Result<u64> {
        match seek(self.file.file(), whence(self.offset + page * PAGE_BYTES)) {
            Ok(found) => Ok((found.saturating_sub(self.offset) / PAGE_BYTES).clamp(page, end)),
            Err(Errno::NXIO) => Ok(end),
            Err(errno) => Err(errno.into()),
        }
    }
}
