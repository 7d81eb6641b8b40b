//! The dirty log of a real QEMU: the kernel's write tracking, block by block.

use std::os::fd::OwnedFd;
use std::time::Instant;

use tracee::{AddressRange, Process, TrackError, TrackerStart, WriteTracker};

use crate::page_set::PageSet;
use crate::ram::{DropWatch, RamRegion, drop_watches};
use crate::reductions::Reductions;
use crate::round::{DirtyLog, DirtyLogError, ScanError, ScanStats};

/// RAM blocks whose writes are tracked, until this is dropped.
#[derive(Debug)]
pub struct TrackedRam {
    tracker: WriteTracker,
    /// True if both sides will be compared after the next scan.
    compared: bool,
    blocks: Vec<TrackedBlock>,
    /// Reductions, which learn of written pages.
    reductions: Reductions,
    /// Reused.
    found: Vec<AddressRange>,
}

#[derive(Debug)]
struct TrackedBlock {
    region: RamRegion,
    /// Watch for dropped pages, if the marks alone are incomplete.
    drops: Option<DropWatch>,
    /// Pages found by one scan. Reused.
    dirty: PageSet,
}

impl TrackedRam {
    /// Starts tracking every write to the regions; all of their pages have to be sent once. The userfaultfd has to be
    /// one of the process itself, see [`tracee::Injector::create_userfaultfd`].
    ///
    /// # Errors
    /// No tracking remains after an error.
    pub fn start(
        process: &Process,
        userfaultfd: OwnedFd,
        regions: &[RamRegion],
    ) -> Result<Self, DirtyLogError> {
        Self::over(Self::begin(process, userfaultfd, regions)?.finish()?, process, regions)
    }

    /// Begins [`TrackedRam::start`], in short steps; [`TrackedRam::over`] completes it.
    ///
    /// # Errors
    /// No tracking remains after an error.
    pub fn begin(
        process: &Process,
        userfaultfd: OwnedFd,
        regions: &[RamRegion],
    ) -> Result<TrackerStart, DirtyLogError> {
        let ranges: Vec<AddressRange> = regions.iter().map(RamRegion::range).collect();
        Ok(WriteTracker::begin(process, userfaultfd, &ranges)?)
    }

    /// Wraps a tracker that was begun for these regions.
    ///
    /// # Errors
    /// No tracking remains after an error.
    pub fn over(
        tracker: WriteTracker,
        process: &Process,
        regions: &[RamRegion],
    ) -> Result<Self, DirtyLogError> {
        let watches = drop_watches(process, regions)?;
        let block = |(region, drops): (&RamRegion, _)| TrackedBlock {
            region: region.clone(),
            drops,
            dirty: PageSet::new(region.bytes),
        };
        Ok(Self {
            tracker,
            compared: false,
            blocks: regions.iter().zip(watches).map(block).collect(),
            reductions: Reductions::default(),
            found: Vec::new(),
        })
    }

    /// Announces that the guest has stopped and both sides will be compared after the next scan. That scan then checks
    /// all of shared memory, which needs about 0.2 s for a GiB: a page that was given back and read again before a scan
    /// keeps its old contents at the destination. The guest expects nothing of such a page, but a comparison finds the
    /// difference.
    pub fn announce_comparison(&mut self) {
        self.compared = true;
    }

    /// Reports all pages found written to `reductions` from now on, in the order of the regions. Has to be called
    /// before any page is left out, because these marks cannot be obtained in another way.
    pub fn report_to(&mut self, reductions: Reductions) {
        self.reductions = reductions;
    }

    /// Ends tracking and returns an error if that fails. Dropping ends it, too, but ignores errors.
    pub fn stop(self) -> Result<(), TrackError> {
        self.tracker.stop()
    }
}

impl TrackedBlock {
    fn scan_dirty(
        &mut self,
        tracker: &mut WriteTracker,
        compared: bool,
        found: &mut Vec<AddressRange>,
    ) -> Result<u64, DirtyLogError> {
        found.clear();
        let scanned = tracker.take_dirty(self.region.range(), found);
        let mut pages = 0;
        // Also after an error, because the next scan will not find these pages again.
        for range in &*found {
            self.dirty.set_bytes(range.start - self.region.address..range.end - self.region.address);
            pages += range.len() / tracee::PAGE_SIZE;
        }
        scanned?;
        if let Some(drops) = self.drops.as_ref().filter(|_| compared) {
            pages += drops.find_zeros(&mut self.dirty)?;
        }
        Ok(pages)
    }
}

impl DirtyLog for TrackedRam {
    fn scan_dirty(&mut self, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        let started = Instant::now();
        let mut pages = 0;
        for (number, (block, into)) in self.blocks.iter_mut().zip(into).enumerate() {
            let result = block.scan_dirty(&mut self.tracker, self.compared, &mut self.found);
            // Also after an error, because the next scan will not find these pages again.
            self.reductions.written(number, &block.dirty);
            into.insert(&block.dirty);
            block.dirty.clear_all();
            pages += result.map_err(|source| ScanError { block: block.region.name.clone(), source })?;
        }
        self.compared = false;
        Ok(ScanStats { pages, duration_us: started.elapsed().as_micros() as u64 })
    }
}
