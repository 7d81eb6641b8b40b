//! Pages of shared files that were given back and read again.
//!
//! When a hole is punched into a shared file (balloon), the scan finds the dropped pages, including those that kept a
//! mark of being clean: it queries the file for absent pages (see [`tracee::WriteTracker`]).
//!
//! But a page that the guest **reads** before the scan is present again, protected as before, and only its zeros reveal
//! the drop; the destination still has the old contents (trap 20). A guest cannot rely on the content of such a page,
//! but a comparison of both sides finds the difference.
//!
//! So before a comparison every page of the file is checked. The check costs as much as reading the memory once, about
//! 0.2 s for a GiB, with the guest stopped; without a comparison it is not needed (ADR 0008).

use proto::limits::PAGE_BYTES;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use tracee::RamFile;

use super::block::RamError;
use super::zero::is_zero;
use crate::page_set::PageSet;

/// Number of pages that are read at once.
const STEP_PAGES: u64 = 32;

/// Finds the pages of one block that are zero.
#[derive(Debug)]
pub(crate) struct DropWatch {
    file: RamFile,
    /// Start of the block in the file, in bytes.
    offset: u64,
}

impl DropWatch {
    pub(crate) fn new(file: RamFile, offset: u64) -> Self {
        Self { file, offset }
    }

    /// Adds all pages that are holes or all zero to `dirty`, which holds the result of the scan before; returns how
    /// many are new. If the guest runs, a page that is given back after its check is not found.
    pub(crate) fn find_zeros(&self, dirty: &mut PageSet) -> Result<u64, RamError> {
        let before = dirty.count();
        let mut bytes = vec![0; (STEP_PAGES * PAGE_BYTES) as usize];
        let (mut at, end) = (0, dirty.pages());
        while at < end {
            let data = self.next_data(at, end)?;
            dirty.set(at..data);
            at = end.min(data + STEP_PAGES);
            let bytes = &mut bytes[..((at - data) * PAGE_BYTES) as usize];
            self.file.read_at(self.offset + data * PAGE_BYTES, bytes)?;
            for (page, bytes) in (data..at).zip(bytes.chunks_exact(PAGE_BYTES as usize)) {
                if is_zero(bytes) {
                    dirty.set(page..page + 1);
                }
            }
        }
        Ok(dirty.count() - before)
    }

    /// Returns the first page at or after `page` that is no hole; `end` if there is none before it.
    fn next_data(&self, page: u64, end: u64) -> Result<u64, RamError> {
        match seek(self.file.file(), SeekFrom::Data(self.offset + page * PAGE_BYTES)) {
            Ok(found) => Ok((found.saturating_sub(self.offset) / PAGE_BYTES).clamp(page, end)),
            Err(Errno::NXIO) => Ok(end),
            Err(errno) => Err(RamError::Present(errno.into())),
        }
    }
}
