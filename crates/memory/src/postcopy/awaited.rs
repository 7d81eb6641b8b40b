//! The destination's pages that are to come.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use proto::limits::PAGE_BYTES;
use proto::message::WantedPage;
use tracee::{AddressRange, MissingError, MissingPages};
use tracing::warn;

use super::ledger::Ledger;
use crate::dirty::DirtyBitmap;
use crate::lock;
use crate::ram::{BlockWriter, RamError, RamRegion};

/// Puts pages where somebody may wait for them.
pub trait Placer: Send + Sync {
    /// Places whole pages; those that are there stay as they are.
    fn place(&self, address: u64, pages: &[u8]) -> Result<u64, MissingError>;

    /// Places zeros, in the same way.
    fn place_zeros(&self, range: AddressRange) -> Result<u64, MissingError>;
}

impl Placer for MissingPages {
    fn place(&self, address: u64, pages: &[u8]) -> Result<u64, MissingError> {
        Self::place(self, address, pages)
    }

    fn place_zeros(&self, range: AddressRange) -> Result<u64, MissingError> {
        Self::place_zeros(self, range)
    }
}

/// Pages that are to come while the guest runs.
pub struct Awaited<P> {
    placer: P,
    blocks: Vec<AwaitedBlock>,
    /// How many pages are to come.
    left: AtomicU64,
    /// What remembers them beside this.
    ledger: Option<Ledger>,
    /// Another agent began it.
    is_taken_over: bool,
    /// The first that was found there although it was to come.
    untrusted: OnceLock<WantedPage>,
    /// Is called when the last one has come, and when the first was found there.
    tell: Box<dyn Fn() + Send + Sync>,
}

struct AwaitedBlock {
    region: RamRegion,
    /// Whether its zeros are placed where nobody waits for them.
    places_zeros: bool,
    pages: Mutex<Pages>,
}

struct Pages {
    /// Not there yet.
    awaited: DirtyBitmap,
    /// Those of them that were asked for.
    asked: DirtyBitmap,
}

impl<P: Placer> Awaited<P> {
    /// These pages of each block are to come; none of them is there. All others are there, or are zeros. `tell` is called,
    /// on the thread that placed it, when the last one has come, but not if there is none; and when [`Self::untrusted`] is
    /// known.
    pub fn new(
        placer: P,
        regions: Vec<RamRegion>,
        awaited: Vec<DirtyBitmap>,
        tell: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let left = awaited.iter().map(DirtyBitmap::count).sum();
        let blocks = regions.into_iter().zip(awaited).map(|(region, awaited)| {
            let asked = DirtyBitmap::new(region.bytes);
            AwaitedBlock { region, places_zeros: true, pages: Mutex::new(Pages { awaited, asked }) }
        });
        let (blocks, left) = (blocks.collect(), AtomicU64::new(left));
        let (untrusted, tell) = (OnceLock::new(), Box::new(tell));
        Self { placer, blocks, left, ledger: None, is_taken_over: false, untrusted, tell }
    }

    /// The ledger is kept as well. It says what is said here.
    #[must_use]
    pub fn kept_in(self, ledger: Ledger) -> Self {
        Self { ledger: Some(ledger), ..self }
    }

    /// Whether in each of the blocks zeros are placed where nobody waits for them: that tells of one that is there already, and
    /// costs memory where that is of a file.
    #[must_use]
    pub fn placing_zeros(mut self, places_zeros: impl IntoIterator<Item = bool>) -> Self {
        for (block, places_zeros) in self.blocks.iter_mut().zip(places_zeros) {
            block.places_zeros = places_zeros;
        }
        self
    }

    /// Goes on where another agent died, which may have placed a page that its ledger still awaits.
    #[must_use]
    pub fn taken_over(self) -> Self {
        Self { is_taken_over: true, ..self }
    }

    /// Where pages wait to be placed.
    pub fn placer(&self) -> &P {
        &self.placer
    }

    /// What waits in memory, when nobody else has it.
    pub fn into_placer(self) -> P {
        self.placer
    }

    /// How many pages are to come.
    pub fn pages(&self) -> u64 {
        self.left.load(Ordering::Acquire)
    }

    /// Which pages of each block are to come.
    pub fn set(&self) -> Vec<DirtyBitmap> {
        self.blocks.iter().map(|block| lock(&block.pages).awaited.clone()).collect()
    }

    /// Somebody waits for the page at this address: which page is to be asked for. None where it was asked for before, or
    /// where nothing is to come: then it is zeros now.
    ///
    /// # Errors
    /// Where zeros cannot be placed, or the address is none of the guest's memory: then somebody waits for ever.
    pub fn touched(&self, address: u64) -> Result<Option<WantedPage>, MissingError> {
        let found = (0_u16..).zip(&self.blocks).find(|(_, block)| block.region.range().contains(address));
        let Some((number, block)) = found else {
            return Err(MissingError::Lost { range: AddressRange::with_len(address, PAGE_BYTES) });
        };
        let page = (address - block.region.address) / PAGE_BYTES;
        let mut pages = lock(&block.pages);
        if !pages.awaited.contains(page) {
            let there = AddressRange::with_len(block.region.address + page * PAGE_BYTES, PAGE_BYTES);
            return self.placer.place_zeros(there).map(|_| None);
        }
        let is_new = !pages.asked.contains(page);
        pages.asked.set(page..page + 1);
        Ok(is_new.then_some(WantedPage { block: number, page }))
    }

    /// What was asked for and has not come: to be asked for again when connections were made anew.
    pub fn asked(&self) -> Vec<WantedPage> {
        let of = |(number, block): (u16, &AwaitedBlock)| {
            let runs: Vec<_> = lock(&block.pages).asked.runs().collect();
            runs.into_iter().flatten().map(move |page| WantedPage { block: number, page })
        };
        (0_u16..).zip(&self.blocks).flat_map(of).collect()
    }

    /// A page that was to come and was there already, written by whoever it was: it stays as it is and is waited for no
    /// longer, but is not what it has to be. The first of those that came with it: it, or one of the next ones.
    pub fn untrusted(&self) -> Option<WantedPage> {
        self.untrusted.get().copied()
    }

    /// So many of these pages, all of which were to come, were not there.
    fn were_missing(&self, block: usize, pages: &Range<u64>, missing: u64) {
        // One that the agent before this one placed is right, and is not to be told from one that is not.
        if missing == pages.end - pages.start || self.is_taken_over {
            return;
        }
        let (name, there) = (&self.blocks[block].region.name, pages.end - pages.start - missing);
        warn!(block = name, first = pages.start, there, "a page that was to come was there");
        let first = WantedPage { block: block as u16, page: pages.start };
        if self.untrusted.set(first).is_ok() {
            (self.tell)();
        }
    }

    /// These pages are there, or are known to be zeros.
    fn are_there(&self, block: usize, sets: &mut Pages, pages: Range<u64>) -> Result<(), RamError> {
        let before: u64 = sets.awaited.runs_within(pages.clone()).map(|run| run.end - run.start).sum();
        sets.awaited.clear(pages.clone());
        sets.asked.clear(pages.clone());
        if before == 0 {
            return Ok(());
        }
        // After the page: one that is in the ledger still is asked for again, and one that is not would be missing.
        let kept = self.ledger.as_ref().map_or(Ok(()), |ledger| ledger.keep(block, &sets.awaited, pages));
        if self.left.fetch_sub(before, Ordering::AcqRel) == before {
            (self.tell)();
        }
        kept.map_err(RamError::Present)
    }

    /// A block was unmapped, as that of a device that was unplugged: none of it can be touched, and none has to come.
    fn is_gone(&self, block: usize, sets: &mut Pages) -> Result<(), RamError> {
        let region = &self.blocks[block].region;
        warn!(
            block = region.name,
            pages = sets.awaited.count(),
            "memory for which pages were to come was unmapped"
        );
        self.are_there(block, sets, 0..region.bytes.div_ceil(PAGE_BYTES))
    }

    /// The blocks as something to receive into.
    pub fn writers(self: &Arc<Self>) -> Vec<Box<dyn BlockWriter>>
    where
        P: 'static,
    {
        let writer = |block| Box::new(PlacingWriter { all: Arc::clone(self), block }) as Box<dyn BlockWriter>;
        (0..self.blocks.len()).map(writer).collect()
    }
}

/// A block of [`Awaited`].
struct PlacingWriter<P> {
    all: Arc<Awaited<P>>,
    block: usize,
}

impl<P: Placer> PlacingWriter<P> {
    /// Places pages of which some may have been placed a moment ago.
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
            self.all.are_there(self.block, sets, page..page + 1)?;
        }
        Ok(())
    }

    fn block(&self) -> &AwaitedBlock {
        &self.all.blocks[self.block]
    }

    fn addresses(&self, pages: &Range<u64>) -> AddressRange {
        let base = self.block().region.address;
        AddressRange::new(base + pages.start * PAGE_BYTES, base + pages.end * PAGE_BYTES)
    }
}

/// The pages of a range of bytes.
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

    /// Nothing that comes may refer to what is there: the guest writes to it.
    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), RamError> {
        Err(RamError::Present(io::Error::other("the guest is at work in it")))
    }

    /// Those that are awaited. One of them that is there already stays: it is told of, and no error, which would end the
    /// stream, come again on the next one, and have the guest wait without an end for all the others.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        let mut sets = lock(&self.block().pages);
        let runs: Vec<_> =
            sets.awaited.runs_within(pages_of(&(offset..offset + data.len() as u64))).collect();
        for run in runs {
            let (start, end) = (run.start * PAGE_BYTES, run.end * PAGE_BYTES);
            let bytes = &data[(start - offset) as usize..(end - offset) as usize];
            let address = self.block().region.address + start;
            let new = match self.all.placer.place(address, bytes) {
                Ok(new) => new,
                Err(MissingError::Unmapped { .. }) => return self.all.is_gone(self.block, &mut sets),
                Err(_) => {
                    // Some of them may be there now: which, is found out one by one.
                    self.place_singly(&mut sets, run, address, bytes)?;
                    continue;
                }
            };
            self.all.were_missing(self.block, &run, new);
            self.all.are_there(self.block, &mut sets, run)?;
        }
        Ok(())
    }

    /// Whoever waits gets zeros, and where that costs nothing or is asked for the others, too: that one of them is there already
    /// tells nobody else.
    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        let pages = pages_of(&range);
        let mut sets = lock(&self.block().pages);
        let placed = if self.block().places_zeros { &sets.awaited } else { &sets.asked };
        let runs: Vec<_> = placed.runs_within(pages.clone()).collect();
        for run in runs {
            let new = match self.all.placer.place_zeros(self.addresses(&run)) {
                Ok(new) => new,
                Err(MissingError::Unmapped { .. }) => return self.all.is_gone(self.block, &mut sets),
                Err(_) => {
                    for page in run {
                        let page = page..page + 1;
                        self.all.placer.place_zeros(self.addresses(&page))?;
                        self.all.are_there(self.block, &mut sets, page)?;
                    }
                    continue;
                }
            };
            self.all.were_missing(self.block, &run, new);
            self.all.are_there(self.block, &mut sets, run)?;
        }
        self.all.are_there(self.block, &mut sets, pages)
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests;
