//! Post-copy: the guest runs at the destination already, and some of its pages are still to come.
//!
//! At the destination [`Awaited`] knows which. Whoever touches a page that is not there waits ([`tracee::MissingPages`]);
//! such a wait is either for a page that is to come, which is asked for, or for one that nobody will send, because there
//! is nothing in it: that is zeros at once. Pages come as in any round, and are placed instead of written.
//!
//! At the source, where the guest stands still for good, [`Remaining`] has what is left to be sent: what was asked for
//! goes first, the rest from there on, because who needs one page needs the next.
//!
//! # Why no page is lost
//!
//! A page is placed once, when it is awaited: a second copy of it changes nothing, so it does not matter how often a page
//! is sent, on which stream, or in which order; nor does it come back where the guest has given it back since. And nobody
//! looks at the set of those that are awaited while one is placed, so nobody takes it for one that will not come.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use proto::limits::PAGE_BYTES;
use tracee::{AddressRange, MissingError, MissingPages};

use crate::dirty::DirtyBitmap;
use crate::lock;
use crate::ram::{BlockWriter, RamError, RamRegion};
use crate::round::{Owed, Place, Readable};

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

/// A page of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageOf {
    /// Index of the block.
    pub block: u16,
    /// Its number in the block.
    pub page: u64,
}

/// Pages that are to come while the guest runs.
pub struct Awaited<P> {
    placer: P,
    blocks: Vec<AwaitedBlock>,
}

struct AwaitedBlock {
    region: RamRegion,
    pages: Mutex<Pages>,
}

struct Pages {
    /// Not there yet.
    awaited: DirtyBitmap,
    /// Those of them that were asked for.
    asked: DirtyBitmap,
}

impl Pages {
    fn is_there(&mut self, pages: Range<u64>) {
        self.awaited.clear(pages.clone());
        self.asked.clear(pages);
    }
}

impl<P: Placer> Awaited<P> {
    /// These pages of each block are to come; none of them is there. All others are there, or are zeros.
    pub fn new(placer: P, regions: Vec<RamRegion>, awaited: Vec<DirtyBitmap>) -> Self {
        let blocks = regions.into_iter().zip(awaited).map(|(region, awaited)| {
            let asked = DirtyBitmap::new(region.bytes);
            AwaitedBlock { region, pages: Mutex::new(Pages { awaited, asked }) }
        });
        Self { placer, blocks: blocks.collect() }
    }

    /// Where pages wait to be placed.
    pub fn placer(&self) -> &P {
        &self.placer
    }

    /// How many pages are to come.
    pub fn pages(&self) -> u64 {
        self.blocks.iter().map(|block| lock(&block.pages).awaited.count()).sum()
    }

    /// Somebody waits for the page at this address: which page is to be asked for. None where it was asked for before, or
    /// where nothing is to come: then it is zeros now.
    ///
    /// # Errors
    /// Where zeros cannot be placed, or the address is none of the guest's memory: then somebody waits for ever.
    pub fn touched(&self, address: u64) -> Result<Option<PageOf>, MissingError> {
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
        Ok(is_new.then_some(PageOf { block: number, page }))
    }

    /// What was asked for and has not come: to be asked for again when connections were made anew.
    pub fn asked(&self) -> Vec<PageOf> {
        let of = |(number, block): (u16, &AwaitedBlock)| {
            let runs: Vec<_> = lock(&block.pages).asked.runs().collect();
            runs.into_iter().flatten().map(move |page| PageOf { block: number, page })
        };
        (0_u16..).zip(&self.blocks).flat_map(of).collect()
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
    fn block(&self) -> &AwaitedBlock {
        &self.all.blocks[self.block]
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

    /// Those that are awaited. That one of them is there already is an error: it is not what it has to be.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        let mut sets = lock(&self.block().pages);
        let runs: Vec<_> =
            sets.awaited.runs_within(pages_of(&(offset..offset + data.len() as u64))).collect();
        for run in runs {
            let (start, end) = (run.start * PAGE_BYTES, run.end * PAGE_BYTES);
            let bytes = &data[(start - offset) as usize..(end - offset) as usize];
            let new = self.all.placer.place(self.block().region.address + start, bytes)?;
            if new < run.end - run.start {
                let what = format!("of {} pages from {start:#x} on {new} were missing", run.end - run.start);
                return Err(RamError::Present(io::Error::new(io::ErrorKind::AlreadyExists, what)));
            }
            sets.is_there(run);
        }
        Ok(())
    }

    /// Whoever waits gets zeros; for all others there is no need of memory.
    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        let pages = pages_of(&range);
        let mut sets = lock(&self.block().pages);
        let asked: Vec<_> = sets.asked.runs_within(pages.clone()).collect();
        for run in asked {
            let address = self.block().region.address;
            let there = AddressRange::new(address + run.start * PAGE_BYTES, address + run.end * PAGE_BYTES);
            self.all.placer.place_zeros(there)?;
        }
        sets.is_there(pages);
        Ok(())
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

/// What is left to be sent to a guest that runs elsewhere already. Taken from by several senders at a time.
#[derive(Debug)]
pub struct Remaining(Mutex<Left>);

#[derive(Debug)]
struct Left {
    /// None where nothing is left.
    pages: Option<Readable>,
    place: Place,
}

impl Remaining {
    /// All of these. The guest stands still for good.
    pub fn new(pages: Readable) -> Self {
        Self(Mutex::new(Left { pages: Some(pages), place: Place::default() }))
    }

    /// So many of them, from where somebody waited last on; none if nothing is left.
    pub fn take(&self, most_pages: u64) -> Option<Readable> {
        let mut left = lock(&self.0);
        let pages = left.pages.take().filter(|pages| pages.pages() > 0)?;
        let part = pages.part_around(left.place, most_pages);
        left.place = part.next;
        left.pages = Some(Readable { owed: part.later });
        Some(part.readable)
    }

    /// Those of these pages that are left; the next ones will be those behind them. None if all of them are on their way
    /// or there.
    pub fn take_these(&self, wanted: &[PageOf]) -> Option<Readable> {
        let mut left = lock(&self.0);
        let pages = left.pages.take()?;
        let mut sets: Vec<_> =
            pages.owed.blocks.iter().map(|block| DirtyBitmap::new(block.pages() * PAGE_BYTES)).collect();
        for page in wanted {
            if let Some(set) = sets.get_mut(usize::from(page.block)) {
                set.set(page.page..page.page + 1);
                left.place = Place::at(page.block, page.page);
            }
        }
        let (others, these) = pages.without(&sets);
        left.pages = Some(others);
        (these.pages() > 0).then_some(Readable { owed: these })
    }

    /// What was taken and did not arrive.
    pub fn give_back(&self, owed: &Owed) {
        let mut left = lock(&self.0);
        left.pages = Some(match left.pages.take() {
            Some(pages) => pages.and(owed),
            None => Readable { owed: owed.clone() },
        });
    }

    /// How many pages are left, those on their way apart.
    pub fn pages(&self) -> u64 {
        lock(&self.0).pages.as_ref().map_or(0, Readable::pages)
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
        Arc::new(Awaited::new(Memory::default(), regions, vec![set(4, &[]), set(1000, &[7, 8, 900, 901])]))
    }

    fn address(page: u64) -> u64 {
        BASE + page * PAGE_BYTES
    }

    #[test]
    fn what_is_to_come_is_asked_for_once_and_what_is_not_is_zeros() {
        let awaited = awaited();
        let page = |page| PageOf { block: 1, page };
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
        // Zeros, for the one that somebody waits for.
        writers[1].drop_pages(900 * PAGE_BYTES..902 * PAGE_BYTES).unwrap();
        assert_eq!((awaited.asked(), awaited.pages()), (Vec::new(), 0));
        let memory = || lock(&awaited.placer().0);
        assert_eq!([7, 8, 9, 900].map(|page| memory()[&address(page)][0]), [5, 5, 0, 0]);
        assert!(!memory().contains_key(&address(901)));
        // Given back by the guest since: a second copy does not bring it back.
        memory().remove(&address(7));
        writers[1].write(7 * PAGE_BYTES, &[6; 3 * PAGE]).unwrap();
        assert!(!memory().contains_key(&address(7)));
        assert_eq!([8, 9].map(|page| memory()[&address(page)][0]), [5, 0]);
        assert_eq!(awaited.touched(address(7)).unwrap(), None);
        assert_eq!(memory()[&address(7)][0], 0);
        assert!(writers[1].read(0, &mut [0]).is_err());
    }

    /// What was to be taken away before the guest ran on, and is there still, would be taken for what it has to be.
    #[test]
    fn an_awaited_page_that_is_there_is_an_error() {
        let awaited = awaited();
        lock(&awaited.placer().0).insert(address(8), vec![1; PAGE]);
        let error = awaited.writers()[1].write(7 * PAGE_BYTES, &[5; 2 * PAGE]).unwrap_err();
        assert!(matches!(error, RamError::Present(_)), "{error:?}");
        assert_eq!(awaited.pages(), 4);
    }

    #[test]
    fn who_asks_is_served_first_and_what_lies_behind_next() {
        let owed = Owed::of(vec![set(100, &[1, 2, 3]), set(1000, &[10, 20, 30, 40])]);
        let remaining = Remaining::new(Readable { owed });
        let pages = |readable: Option<Readable>| {
            let owed = readable.map_or_else(|| Owed::of(Vec::new()), Readable::give_up);
            let of = |(number, block): (usize, &DirtyBitmap)| {
                block.runs().flatten().map(move |page| (number, page)).collect::<Vec<_>>()
            };
            owed.blocks().iter().enumerate().flat_map(of).collect::<Vec<_>>()
        };
        assert_eq!(pages(remaining.take(2)), [(0, 1), (0, 2)]);
        let wanted =
            [PageOf { block: 1, page: 20 }, PageOf { block: 0, page: 1 }, PageOf { block: 1, page: 21 }];
        assert_eq!(pages(remaining.take_these(&wanted)), [(1, 20)]);
        assert_eq!(pages(remaining.take_these(&wanted)), []);
        assert_eq!(pages(remaining.take(1)), [(1, 30)]);
        assert_eq!(pages(remaining.take_these(&[PageOf { block: 7, page: 0 }])), []);
        assert_eq!(remaining.pages(), 3);
        // A cut: what was on its way is left again.
        remaining.give_back(&Owed::of(vec![set(100, &[1]), set(1000, &[20, 30])]));
        assert_eq!(pages(remaining.take(4)), [(0, 1), (0, 3), (1, 10), (1, 40)]);
        assert_eq!(pages(remaining.take(9)), [(1, 20), (1, 30)]);
        assert_eq!((pages(remaining.take(9)), remaining.pages()), (Vec::new(), 0));
        remaining.give_back(&Owed::of(vec![set(100, &[]), set(1000, &[20])]));
        assert_eq!(pages(remaining.take(9)), [(1, 20)]);
    }
}
