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
            let Ok(new) = self.all.placer.place(address, bytes) else {
                // Some of them may be there now: which, is found out one by one.
                self.place_singly(&mut sets, run, address, bytes)?;
                continue;
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
            let Ok(new) = self.all.placer.place_zeros(self.addresses(&run)) else {
                for page in run {
                    let page = page..page + 1;
                    self.all.placer.place_zeros(self.addresses(&page))?;
                    self.all.are_there(self.block, &mut sets, page)?;
                }
                continue;
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
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const PAGE: usize = PAGE_BYTES as usize;
    const BASE: u64 = 1 << 30;

    /// Pages by their addresses.
    #[derive(Default)]
    struct Memory(Mutex<BTreeMap<u64, Vec<u8>>>);

    impl Placer for Memory {
        fn place(&self, address: u64, pages: &[u8]) -> Result<u64, MissingError> {
            let mut memory = lock(&self.0);
            let before = memory.len();
            for (address, page) in (address..).step_by(PAGE).zip(pages.chunks(PAGE)) {
                memory.entry(address).or_insert_with(|| page.to_vec());
            }
            Ok((memory.len() - before) as u64)
        }

        fn place_zeros(&self, range: AddressRange) -> Result<u64, MissingError> {
            self.place(range.start, &vec![0; range.len() as usize])
        }
    }

    fn region(name: &str, address: u64, pages: u64) -> RamRegion {
        RamRegion { name: name.to_owned(), bytes: pages * PAGE_BYTES, page_bytes: PAGE_BYTES, address }
    }

    fn set(pages: u64, these: &[u64]) -> DirtyBitmap {
        let mut set = DirtyBitmap::new(pages * PAGE_BYTES);
        for page in these {
            set.set(*page..page + 1);
        }
        set
    }

    fn awaited() -> Arc<Awaited<Memory>> {
        let regions = vec![region("rom", BASE / 2, 4), region("ram", BASE, 1000)];
        Arc::new(Awaited::new(
            Memory::default(),
            regions,
            vec![set(4, &[]), set(1000, &[7, 8, 900, 901])],
            || (),
        ))
    }

    fn address(page: u64) -> u64 {
        BASE + page * PAGE_BYTES
    }

    #[test]
    fn what_is_to_come_is_asked_for_once_and_what_is_not_is_zeros() {
        let awaited = awaited();
        let page = |page| WantedPage { block: 1, page };
        assert_eq!(awaited.touched(address(7)).unwrap(), Some(page(7)));
        assert_eq!(awaited.touched(address(7)).unwrap(), None);
        assert_eq!(awaited.touched(address(900)).unwrap(), Some(page(900)));
        assert_eq!(awaited.touched(address(9)).unwrap(), None);
        assert_eq!(awaited.touched(BASE / 2).unwrap(), None);
        assert!(awaited.touched(12).is_err(), "nothing of the guest");
        let zeros: Vec<_> = lock(&awaited.placer().0).keys().copied().collect();
        assert_eq!(zeros, [BASE / 2, address(9)]);
        assert_eq!(awaited.asked(), [page(7), page(900)]);

        let writers = awaited.writers();
        writers[1].write(7 * PAGE_BYTES, &[5; 2 * PAGE]).unwrap();
        assert_eq!((awaited.asked(), awaited.pages()), (vec![page(900)], 2));
        // Zeros, whether somebody waits for them or not.
        writers[1].drop_pages(900 * PAGE_BYTES..903 * PAGE_BYTES).unwrap();
        assert_eq!((awaited.asked(), awaited.pages()), (Vec::new(), 0));
        let memory = || lock(&awaited.placer().0);
        assert_eq!([7, 8, 9, 900].map(|page| memory()[&address(page)][0]), [5, 5, 0, 0]);
        assert_eq!(memory()[&address(901)][0], 0);
        assert!(!memory().contains_key(&address(902)), "nobody awaits it");
        // Given back by the guest since: a second copy does not bring it back.
        memory().remove(&address(7));
        writers[1].write(7 * PAGE_BYTES, &[6; 3 * PAGE]).unwrap();
        assert!(!memory().contains_key(&address(7)));
        assert_eq!([8, 9].map(|page| memory()[&address(page)][0]), [5, 0]);
        assert_eq!(awaited.touched(address(7)).unwrap(), None);
        assert_eq!(memory()[&address(7)][0], 0);
        assert_eq!(awaited.untrusted(), None);
        assert!(writers[1].read(0, &mut [0]).is_err());
    }

    /// Somebody wrote to it from outside: it is told of at once, and nobody waits for the others in vain.
    #[test]
    fn an_awaited_page_that_is_there_is_told_of_and_holds_nothing_up() {
        for zeros in [false, true] {
            let told = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&told);
            let tell = move || {
                count.fetch_add(1, Ordering::Relaxed);
            };
            let sets = vec![set(1000, &[7, 8, 900])];
            let awaited = Awaited::new(Memory::default(), vec![region("ram", BASE, 1000)], sets, tell);
            let awaited = Arc::new(awaited);
            let writer = &awaited.writers()[0];
            lock(&awaited.placer().0).insert(address(8), vec![1; PAGE]);
            if zeros {
                writer.drop_pages(7 * PAGE_BYTES..9 * PAGE_BYTES).unwrap();
            } else {
                writer.write(7 * PAGE_BYTES, &[5; 2 * PAGE]).unwrap();
            }
            assert_eq!(awaited.untrusted(), Some(WantedPage { block: 0, page: 7 }));
            assert_eq!((awaited.pages(), told.load(Ordering::Relaxed)), (1, 1));
            assert_eq!(lock(&awaited.placer().0)[&address(8)][0], 1, "the guest may have written to it");
            writer.write(900 * PAGE_BYTES, &[5; PAGE]).unwrap();
            assert_eq!((awaited.pages(), told.load(Ordering::Relaxed)), (0, 2));
        }
    }

    /// It placed the page, and its ledger did not know yet.
    #[test]
    fn an_awaited_page_that_is_there_after_an_agent_that_died_is_right() {
        let awaited = Arc::new(Arc::into_inner(awaited()).unwrap().taken_over());
        lock(&awaited.placer().0).insert(address(8), vec![1; PAGE]);
        awaited.writers()[1].write(7 * PAGE_BYTES, &[5; 2 * PAGE]).unwrap();
        assert_eq!((awaited.pages(), awaited.untrusted()), (2, None));
        assert_eq!(lock(&awaited.placer().0)[&address(8)][0], 1, "the guest may have written to it");
    }

    #[test]
    fn the_last_page_is_told_of_and_the_ledger_knows_of_all() {
        let folder = tempfile::tempdir().unwrap();
        let (path, sets) = (folder.path().join("ledger"), vec![set(4, &[]), set(1000, &[7, 8, 900])]);
        let told = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&told);
        let regions = vec![region("rom", BASE / 2, 4), region("ram", BASE, 1000)];
        let awaited = Awaited::new(Memory::default(), regions, sets.clone(), move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let awaited = Arc::new(awaited.kept_in(Ledger::create(&path, &sets).unwrap()));
        let kept = || Ledger::open(&path, [4, 1000].map(|pages| pages * PAGE_BYTES)).unwrap().1;
        let writers = awaited.writers();
        writers[1].write(7 * PAGE_BYTES, &[5; PAGE]).unwrap();
        assert_eq!((kept(), told.load(Ordering::Relaxed)), (awaited.set(), 0));
        writers[1].drop_pages(8 * PAGE_BYTES..901 * PAGE_BYTES).unwrap();
        assert_eq!((kept(), told.load(Ordering::Relaxed)), (vec![set(4, &[]), set(1000, &[])], 1));
        writers[1].write(0, &vec![5; 9 * PAGE]).unwrap();
        assert_eq!((awaited.pages(), told.load(Ordering::Relaxed)), (0, 1));
    }

    #[test]
    fn zeros_that_nobody_waits_for_take_no_memory_where_they_would() {
        let awaited = Arc::new(Arc::into_inner(awaited()).unwrap().placing_zeros([true, false]));
        assert!(awaited.touched(address(8)).unwrap().is_some());
        awaited.writers()[1].drop_pages(0..901 * PAGE_BYTES).unwrap();
        let zeros: Vec<_> = lock(&awaited.placer().0).keys().copied().collect();
        assert_eq!((zeros, awaited.pages()), (vec![address(8)], 1));
    }

    /// Memory that has room for some new pages.
    struct Narrow(Memory, Mutex<u64>);

    impl Placer for Narrow {
        fn place(&self, address: u64, pages: &[u8]) -> Result<u64, MissingError> {
            let mut room = lock(&self.1);
            let mut placed = 0;
            for (address, page) in (address..).step_by(PAGE).zip(pages.chunks(PAGE)) {
                let is_there = lock(&self.0.0).contains_key(&address);
                if !is_there && *room == 0 {
                    return Err(MissingError::Ended);
                }
                let new = self.0.place(address, page)?;
                *room -= new;
                placed += new;
            }
            Ok(placed)
        }

        fn place_zeros(&self, range: AddressRange) -> Result<u64, MissingError> {
            self.place(range.start, &vec![0; range.len() as usize])
        }
    }

    #[test]
    fn what_was_placed_before_an_error_is_not_owed_again() {
        let narrow = Narrow(Memory::default(), Mutex::new(3));
        let sets = vec![set(1000, &[7, 8, 9, 10])];
        let awaited = Arc::new(Awaited::new(narrow, vec![region("ram", BASE, 1000)], sets, || ()));
        let writer = &awaited.writers()[0];
        assert!(writer.write(7 * PAGE_BYTES, &vec![5; 4 * PAGE]).is_err());
        assert_eq!(awaited.pages(), 1);
        *lock(&awaited.placer().1) = 9;
        writer.write(7 * PAGE_BYTES, &vec![6; 4 * PAGE]).unwrap();
        assert_eq!(awaited.pages(), 0);
        assert_eq!([7, 9, 10].map(|page| lock(&awaited.placer().0.0)[&address(page)][0]), [5, 5, 6]);
    }

    #[test]
    fn zeros_that_were_placed_before_an_error_are_nobody_elses() {
        let narrow = Narrow(Memory::default(), Mutex::new(3));
        let sets = vec![set(1000, &[7, 8, 20, 21])];
        let awaited = Arc::new(Awaited::new(narrow, vec![region("ram", BASE, 1000)], sets, || ()));
        let writer = &awaited.writers()[0];
        assert!(writer.drop_pages(7 * PAGE_BYTES..30 * PAGE_BYTES).is_err());
        assert_eq!(awaited.pages(), 1);
        *lock(&awaited.placer().1) = 9;
        writer.drop_pages(7 * PAGE_BYTES..30 * PAGE_BYTES).unwrap();
        assert_eq!((awaited.pages(), awaited.untrusted()), (0, None));
    }
}
