//! Memory that was present before the first page arrived: the user made QEMU allocate all of it at once
//! (`prealloc=on`).
//!
//! It has to be present when the guest runs, so that no first touch has to wait for a page, and none can fail. Pages
//! that are empty at the source are filled with zeros here unless they are zero already, and no memory is given back;
//! pages that are discarded for post-copy are sent again, including zeros.

use std::ops::Range;

use proto::limits::PAGE_BYTES;

use super::block::{BlockWriter, DiscardMethod, RamError};
use super::zero::{ZEROS, is_zero};

/// A block whose pages all stay allocated.
pub(super) struct Preallocated(pub(super) Box<dyn BlockWriter>);

impl BlockWriter for Preallocated {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        self.0.read(offset, into)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        self.0.write(offset, data)
    }

    fn write_runs(&self, runs: &[Range<u64>], data: &[u8]) -> Result<(), RamError> {
        self.0.write_runs(runs, data)
    }

    fn allow_direct_placement(&self, range: Range<u64>) -> bool {
        self.0.allow_direct_placement(range)
    }

    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        let mut bytes = vec![0; ZEROS.len().min((range.end - range.start) as usize)];
        let mut at = range.start;
        while at < range.end {
            let len = bytes.len().min((range.end - at) as usize);
            let bytes = &mut bytes[..len];
            self.read(at, bytes)?;
            let pages = bytes.chunks(PAGE_BYTES as usize);
            let filled = pages.enumerate().filter(|(_, page)| !is_zero(page));
            let runs: Vec<Range<u64>> = filled
                .map(|(nth, page)| {
                    at + nth as u64 * PAGE_BYTES..at + nth as u64 * PAGE_BYTES + page.len() as u64
                })
                .collect();
            if !runs.is_empty() {
                let filled = runs.iter().map(|run| (run.end - run.start) as usize).sum::<usize>();
                self.write_runs(&runs, &ZEROS[..filled])?;
            }
            at += len as u64;
        }
        Ok(())
    }

    fn discard_method(&self) -> DiscardMethod {
        self.0.discard_method()
    }

    fn discard_range(&self, range: Range<u64>) -> Result<(), RamError> {
        self.0.discard_range(range)
    }

    fn is_preallocated(&self) -> bool {
        true
    }

    fn mapped_ranges(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, RamError> {
        self.0.mapped_ranges(range)
    }

    fn first_mapped(&self, range: Range<u64>) -> Result<Option<u64>, RamError> {
        self.0.first_mapped(range)
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}
