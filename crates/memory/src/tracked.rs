//! The dirty log of a real QEMU: the kernel's write tracking, block by block.

use std::os::fd::OwnedFd;
use std::time::Instant;

use tracee::{AddressRange, Process, TrackError, WriteTracker};

use crate::dirty::DirtyBitmap;
use crate::ram::RamRegion;
use crate::round::{DirtyLog, ScanError, ScanStats};

/// RAM blocks whose writes are seen, until this is dropped.
#[derive(Debug)]
pub struct TrackedRam {
    tracker: WriteTracker,
    regions: Vec<RamRegion>,
    /// Reused.
    found: Vec<AddressRange>,
}

impl TrackedRam {
    /// From here on every write to the regions is seen; all of them have to be sent once. The userfaultfd is one of
    /// the process itself, see [`tracee::Injector::take_userfaultfd`].
    ///
    /// # Errors
    /// As [`WriteTracker::start`]; leaves nothing behind.
    pub fn start(process: &Process, userfaultfd: OwnedFd, regions: &[RamRegion]) -> Result<Self, TrackError> {
        let ranges: Vec<AddressRange> = regions.iter().map(RamRegion::range).collect();
        let tracker = WriteTracker::start(process, userfaultfd, &ranges)?;
        Ok(Self { tracker, regions: regions.to_vec(), found: Vec::new() })
    }

    /// Ends tracking, and says if that failed. Dropping does the same and keeps silent.
    pub fn stop(self) -> Result<(), TrackError> {
        self.tracker.stop()
    }
}

impl DirtyLog for TrackedRam {
    fn take(&mut self, into: &mut [DirtyBitmap]) -> Result<ScanStats, ScanError> {
        let started = Instant::now();
        let mut pages = 0;
        for (region, into) in self.regions.iter().zip(into) {
            self.found.clear();
            let result = self.tracker.take_dirty(region.range(), &mut self.found);
            // Also after an error: what was found will not be found again.
            for range in &self.found {
                into.set_bytes(range.start - region.address..range.end - region.address);
                pages += range.len() / tracee::PAGE_SIZE;
            }
            result.map_err(|source| ScanError { block: region.name.clone(), source })?;
        }
        Ok(ScanStats { pages, duration_us: started.elapsed().as_micros() as u64 })
    }
}
