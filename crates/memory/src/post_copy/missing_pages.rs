//! The destination's missing pages.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use proto::limits::PAGE_BYTES;
use proto::message::PageRequest;
use tracee::{AddressRange, PageFaultError, PageFaultHandler};
use tracing::warn;

use super::missing_pages_file::MissingPagesFile;
use crate::lock;
use crate::page_set::PageSet;
use crate::ram::{BlockWriter, RamError, RamRegion};

/// Places pages for which threads may wait.
pub trait Placer: Send + Sync {
    /// Places whole pages; pages that are present stay as they are. Returns the number of pages that were missing.
    fn place(&self, address: u64, pages: &[u8]) -> Result<u64, PageFaultError>;

    /// Places zeros, in the same way.
    fn place_zeros(&self, range: AddressRange) -> Result<u64, PageFaultError>;
}

impl Placer for PageFaultHandler {
    fn place(&self, address: u64, pages: &[u8]) -> Result<u64, PageFaultError> {
        Self::place(self, address, pages)
    }

    fn place_zeros(&self, range: AddressRange) -> Result<u64, PageFaultError> {
        Self::place_zeros(self, range)
    }
}

/// Pages that are still missing while the guest runs.
pub struct MissingPages<P> {
    placer: P,
    blocks: Vec<MissingBlock>,
    /// Number of missing pages.
    count: AtomicU64,
    /// File that records the missing pages, too.
    file: Option<MissingPagesFile>,
    /// True if another agent began this post-copy phase.
    is_taken_over: bool,
    /// The first page that was found present although it was missing.
    unexpected_page: OnceLock<PageRequest>,
    /// Callback for the arrival of the last page, and for the first page that was found present.
    notify: Box<dyn Fn() + Send + Sync>,
}

struct MissingBlock {
    region: RamRegion,
    /// True if zeros are placed even if no thread waits for them.
    places_zeros: bool,
    pages: Mutex<Pages>,
}

struct Pages {
    /// Pages that are missing.
    missing: PageSet,
    /// Missing pages that were requested.
    requested: PageSet,
}

impl<P: Placer> MissingPages<P> {
    /// Creates the set of missing pages of each block; none of them is present. All others are present, or are zeros.
    /// `notify` is called on the thread that placed the last missing page, but not if no page was missing; and when
    /// [`Self::unexpected_page`] is known.
    pub fn new(
        placer: P,
        regions: Vec<RamRegion>,
        missing: Vec<PageSet>,
        notify: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let count = missing.iter().map(PageSet::count).sum();
        let blocks = regions.into_iter().zip(missing).map(|(region, missing)| {
            let requested = PageSet::new(region.bytes);
            MissingBlock { region, places_zeros: true, pages: Mutex::new(Pages { missing, requested }) }
        });
        let (blocks, count) = (blocks.collect(), AtomicU64::new(count));
        let (unexpected_page, notify) = (OnceLock::new(), Box::new(notify));
        Self { placer, blocks, count, file: None, is_taken_over: false, unexpected_page, notify }
    }

    /// Records the missing pages in the file as well, which has to hold the same set now.
    #[must_use]
    pub fn with_file(self, file: MissingPagesFile) -> Self {
        Self { file: Some(file), ..self }
    }

    /// Sets for each block whether zeros are placed even if no thread waits for them: that detects a page that is
    /// present already, and costs memory if the block is a file.
    #[must_use]
    pub fn placing_zeros(mut self, places_zeros: impl IntoIterator<Item = bool>) -> Self {
        for (block, places_zeros) in self.blocks.iter_mut().zip(places_zeros) {
            block.places_zeros = places_zeros;
        }
        self
    }

    /// Continues after another agent died, which may have placed a page that its file still lists as missing.
    #[must_use]
    pub fn taken_over(self) -> Self {
        Self { is_taken_over: true, ..self }
    }

    /// Returns the placer of the pages.
    pub fn placer(&self) -> &P {
        &self.placer
    }

    /// Returns the number of missing pages.
    pub fn pages(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the missing pages of each block.
    pub fn set(&self) -> Vec<PageSet> {
        self.blocks.iter().map(|block| lock(&block.pages).missing.clone()).collect()
    }

    /// Handles a page fault at this address: returns the page to request. None if it was requested before, or if no
    /// page will arrive: then it is filled with zeros.
    ///
    /// # Errors
    /// If zeros cannot be placed, or the address is outside the guest's memory: then a thread waits for ever.
    pub fn handle_fault(&self, address: u64) -> Result<Option<PageRequest>, PageFaultError> {
        let found = (0_u16..).zip(&self.blocks).find(|(_, block)| block.region.range().contains(address));
        let Some((number, block)) = found else {
            return Err(PageFaultError::Lost { range: AddressRange::with_len(address, PAGE_BYTES) });
        };
        let page = (address - block.region.address) / PAGE_BYTES;
        let mut pages = lock(&block.pages);
        if !pages.missing.contains(page) {
            let there = AddressRange::with_len(block.region.address + page * PAGE_BYTES, PAGE_BYTES);
            return self.placer.place_zeros(there).map(|_| None);
        }
        let is_new = !pages.requested.contains(page);
        pages.requested.set(page..page + 1);
        Ok(is_new.then_some(PageRequest { block: number, page }))
    }

    /// Returns the requested pages that are still missing, to be requested again over new connections.
    pub fn requested(&self) -> Vec<PageRequest> {
        let of = |(number, block): (u16, &MissingBlock)| {
            let runs: Vec<_> = lock(&block.pages).requested.runs().collect();
            runs.into_iter().flatten().map(move |page| PageRequest { block: number, page })
        };
        (0_u16..).zip(&self.blocks).flat_map(of).collect()
    }

    /// Returns the first page that was found present although it was missing, written by an unknown party: this page or
    /// one of those that arrived with it. It stays as it is and is no longer waited for, but its content is wrong.
    pub fn unexpected_page(&self) -> Option<PageRequest> {
        self.unexpected_page.get().copied()
    }

    /// Checks how many of these pages, all of which were missing, the placer found missing.
    fn check_missing(&self, block: usize, pages: &Range<u64>, missing: u64) {
        // A page that the previous agent placed is correct, and looks the same as one that is not.
        if missing == pages.end - pages.start || self.is_taken_over {
            return;
        }
        let (name, there) = (&self.blocks[block].region.name, pages.end - pages.start - missing);
        warn!(block = name, first = pages.start, there, "a missing page was present before it arrived");
        let first = PageRequest { block: block as u16, page: pages.start };
        if self.unexpected_page.set(first).is_ok() {
            (self.notify)();
        }
    }

    /// Marks pages as present, or as zeros.
    fn mark_present(&self, block: usize, sets: &mut Pages, pages: Range<u64>) -> Result<(), RamError> {
        let before: u64 = sets.missing.runs_within(pages.clone()).map(|run| run.end - run.start).sum();
        sets.missing.clear(pages.clone());
        sets.requested.clear(pages.clone());
        if before == 0 {
            return Ok(());
        }
        // After the page: a page that the file still lists is requested again, but one that it lacks would be lost.
        let kept = self.file.as_ref().map_or(Ok(()), |file| file.update(block, &sets.missing, pages));
        if self.count.fetch_sub(before, Ordering::AcqRel) == before {
            (self.notify)();
        }
        kept.map_err(RamError::Present)
    }

    /// Marks all pages of a block as present, because it was unmapped, as with an unplugged device: none can be
    /// touched, and none has to arrive.
    fn mark_unmapped(&self, block: usize, sets: &mut Pages) -> Result<(), RamError> {
        let region = &self.blocks[block].region;
        warn!(block = region.name, pages = sets.missing.count(), "memory with missing pages was unmapped");
        self.mark_present(block, sets, 0..region.bytes.div_ceil(PAGE_BYTES))
    }

    /// Returns the blocks as writers for the receiver.
    pub fn writers(self: &Arc<Self>) -> Vec<Box<dyn BlockWriter>>
    where
        P: 'static,
    {
        let writer = |block| Box::new(PlacingWriter { all: Arc::clone(self), block }) as Box<dyn BlockWriter>;
        (0..self.blocks.len()).map(writer).collect()
    }
}

/// Writer of one block of [`MissingPages`].
struct PlacingWriter<P> {
    all: Arc<MissingPages<P>>,
    block: usize,
}

impl<P: Placer> PlacingWriter<P> {
    /// Places pages of which some may have been placed by an attempt before.
    fn place_singly(
        &self,
        sets: &mut Pages,
        run: Range<u64>,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), RamError> {
        let addresses = (address..).step_by(PAGE_BYTES as usize);
        for ((page, address), bytes) in run.zip(addresses).zip(bytes.chunks(PAGE_BYTES as usize)) {
            self.all.placer.place(address, bytes)?;
            self.all.mark_present(self.block, sets, page..page + 1)?;
        }
        Ok(())
    }

    fn block(&self) -> &MissingBlock {
        &self.all.blocks[self.block]
    }

    fn addresses(&self, pages: &Range<u64>) -> AddressRange {
        let base = self.block().region.address;
        AddressRange::new(base + pages.start * PAGE_BYTES, base + pages.end * PAGE_BYTES)
    }
}

/// Returns the pages of a range of bytes.
fn pages_of(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES)
}

impl<P: Placer> BlockWriter for PlacingWriter<P> {
    fn name(&self) -> &str {
        &self.block().region.name
    }

    fn bytes(&self) -> u64 {
        self.block().region.bytes
    }

    /// References to present pages are refused, because the guest writes to them.
    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), RamError> {
        Err(RamError::Present(io::Error::other("the guest is at work in it")))
    }

    /// Places the missing pages. One that is present already stays: it is reported, but not as an error. An error would
    /// end the stream and recur on the next one, and the guest would wait without end for all the others.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        let mut sets = lock(&self.block().pages);
        let runs: Vec<_> =
            sets.missing.runs_within(pages_of(&(offset..offset + data.len() as u64))).collect();
        for run in runs {
            let (start, end) = (run.start * PAGE_BYTES, run.end * PAGE_BYTES);
            let bytes = &data[(start - offset) as usize..(end - offset) as usize];
            let address = self.block().region.address + start;
            let new = match self.all.placer.place(address, bytes) {
                Ok(new) => new,
                Err(PageFaultError::Unmapped { .. }) => return self.all.mark_unmapped(self.block, &mut sets),
                Err(_) => {
                    // Some of them may be present now: placing them one by one shows which.
                    self.place_singly(&mut sets, run, address, bytes)?;
                    continue;
                }
            };
            self.all.check_missing(self.block, &run, new);
            self.all.mark_present(self.block, &mut sets, run)?;
        }
        Ok(())
    }

    /// A page has to be placed by the kernel, so that threads that wait for it go on.
    fn allow_direct_placement(&self, _: Range<u64>) -> bool {
        false
    }

    /// Places zeros for waiting threads, and, if that costs nothing or is configured, for the other pages, too: only
    /// that detects a page that is present already.
    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        let pages = pages_of(&range);
        let mut sets = lock(&self.block().pages);
        let placed = if self.block().places_zeros { &sets.missing } else { &sets.requested };
        let runs: Vec<_> = placed.runs_within(pages.clone()).collect();
        for run in runs {
            let new = match self.all.placer.place_zeros(self.addresses(&run)) {
                Ok(new) => new,
                Err(PageFaultError::Unmapped { .. }) => return self.all.mark_unmapped(self.block, &mut sets),
                Err(_) => {
                    for page in run {
                        let page = page..page + 1;
                        self.all.placer.place_zeros(self.addresses(&page))?;
                        self.all.mark_present(self.block, &mut sets, page)?;
                    }
                    continue;
                }
            };
            self.all.check_missing(self.block, &run, new);
            self.all.mark_present(self.block, &mut sets, run)?;
        }
        self.all.mark_present(self.block, &mut sets, pages)
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests;
