//! Pages of shared files that were given back and read again.
//!
//! When a hole is punched into a shared file (balloon), the scan finds the pages that went, also those that kept a mark
//! of being clean: it asks the file about what is not present (see [`tracee::WriteTracker`]). But a page that the guest
//! **reads** before the scan is there again, protected as before, and nothing but its zeros tells; the destination still
//! has the old contents (trap 20). A guest cannot rely on what it reads there; a comparison of both sides sees it.
//!
//! So when memory was given back (the balloon has moved), every page that the destination may have contents of is
//! looked at. Looking costs as much as reading the memory once, about 0.2 s for a GiB.

use proto::limits::PAGE_BYTES;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use tracee::RamFile;

use super::zero::is_zero;
use super::{RamError, RamRegion};
use crate::dirty::DirtyBitmap;

/// Pages that are read at once.
const STEP_PAGES: u64 = 32;

/// Watches one block for pages given back and read again.
#[derive(Debug)]
pub(crate) struct DropWatch {
    file: RamFile,
    /// Where the block begins in the file, in bytes.
    offset: u64,
    /// Pages that the destination may have contents of.
    known: DirtyBitmap,
}

impl DropWatch {
    /// Watches a block from its first scan on; all of it counts as known, because all of it is sent once.
    pub(crate) fn new(region: &RamRegion, file: RamFile, offset: u64) -> Self {
        Self { file, offset, known: DirtyBitmap::full(region.bytes) }
    }

    /// Learns what a scan found written, and that will be sent as whatever it is then.
    pub(crate) fn written(&mut self, dirty: &DirtyBitmap) {
        self.known.insert(dirty);
    }

    /// Adds known pages that are holes or all zero to `dirty`, which holds what the scan before found; returns how many
    /// are new in it.
    ///
    /// A page that is given back after it was looked at is found the next time, and there always is a next time until
    /// the guest has stopped.
    pub(crate) fn find_zeros(&mut self, dirty: &mut DirtyBitmap) -> Result<u64, RamError> {
        let mut gone = Vec::new();
        let mut bytes = vec![0; (STEP_PAGES * PAGE_BYTES) as usize];
        for run in self.known.runs() {
            let mut at = run.start;
            while at < run.end {
                let data = self.next_data(at, run.end)?;
                if at < data {
                    gone.push(at..data);
                }
                let end = run.end.min(data + STEP_PAGES);
                let bytes = &mut bytes[..((end - data) * PAGE_BYTES) as usize];
                self.file.read_at(self.offset + data * PAGE_BYTES, bytes)?;
                let pages = (data..end).zip(bytes.chunks_exact(PAGE_BYTES as usize));
                gone.extend(pages.filter(|(_, page)| is_zero(page)).map(|(page, _)| page..page + 1));
                at = end;
            }
        }
        let before = dirty.count();
        for run in gone {
            self.known.clear(run.clone());
            dirty.set(run);
        }
        Ok(dirty.count() - before)
    }

    /// The first page at or after `page` that is no hole; `end` if there is none before it.
    fn next_data(&self, page: u64, end: u64) -> Result<u64, RamError> {
        match seek(self.file.file(), SeekFrom::Data(self.offset + page * PAGE_BYTES)) {
            Ok(found) => Ok((found.saturating_sub(self.offset) / PAGE_BYTES).clamp(page, end)),
            Err(Errno::NXIO) => Ok(end),
            Err(errno) => Err(RamError::Present(errno.into())),
        }
    }
}
