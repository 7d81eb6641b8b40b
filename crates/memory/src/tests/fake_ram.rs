//! Guest RAM in vectors.
//!
//! Each page has contents (None: a hole) and an entry in the page table, in which the kernel keeps its marks: a dropped
//! entry loses its mark. `FakeLog` queries as the real log does, for written or absent pages.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use proto::limits::PAGE_BYTES;

use super::Dice;
use crate::{
    BlockReader, BlockWriter, DirtyLog, OwedPages, PageSet, RamError, ScanError, ScanStats, SourceRam, lock,
};

pub(super) const PAGE: usize = PAGE_BYTES as usize;
pub(super) type Page = [u8; PAGE];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    /// Never touched, or dropped since it was last protected.
    None,
    /// Protected, without a page.
    Marker,
    Present {
        written: bool,
    },
}

pub(super) struct FakePage {
    pub(super) contents: Option<Box<Page>>,
    entry: Entry,
    /// True if the guest does not use the page: its content does not matter until it is written.
    pub(super) is_free: bool,
}

pub(super) type BeforeWrite = Box<dyn FnMut(u64) + Send>;

pub(super) struct FakeBlock {
    name: String,
    pub(super) pages: Vec<Mutex<FakePage>>,
    /// Page whose reading fails, as when guest memory is unmapped.
    pub(super) unreadable: Mutex<Option<u64>>,
    /// Called with a page before it is written by the receiver.
    pub(super) before_write: Mutex<Option<BeforeWrite>>,
    /// A broken writer that leaves memory unchanged where a hole should be.
    pub(super) never_drops: bool,
    /// False if a transport must not write to it.
    pub(super) allows_direct: bool,
}

#[derive(Clone)]
pub(super) struct FakeRam(pub(super) Vec<Arc<FakeBlock>>);

impl FakeRam {
    /// Creates blocks of these numbers of pages, all holes.
    pub(super) fn new(blocks: &[u64]) -> Self {
        let block = |(index, pages): (usize, &u64)| {
            let page = || Mutex::new(FakePage { contents: None, entry: Entry::None, is_free: false });
            Arc::new(FakeBlock {
                name: format!("ram{index}"),
                pages: std::iter::repeat_with(page).take(*pages as usize).collect(),
                unreadable: Mutex::new(None),
                before_write: Mutex::new(None),
                never_drops: false,
                allows_direct: true,
            })
        };
        Self(blocks.iter().enumerate().map(block).collect())
    }

    pub(super) fn readers(&self) -> SourceRam {
        self.0.iter().map(|block| Box::new(Arc::clone(block)) as Box<dyn BlockReader>).collect()
    }

    pub(super) fn writers(&self) -> crate::DestinationRam {
        self.0.iter().map(|block| Box::new(Arc::clone(block)) as Box<dyn BlockWriter>).collect()
    }

    pub(super) fn log(&self) -> FakeLog {
        FakeLog { ram: self.clone(), asks_for_absent: true }
    }

    pub(super) fn everything(&self) -> OwedPages {
        OwedPages::everything(self.0.iter().map(BlockReader::bytes))
    }

    /// Returns a random page.
    pub(super) fn any_page(&self, dice: &mut Dice) -> (&FakeBlock, u64) {
        let block = &self.0[dice.below(self.0.len() as u64) as usize];
        (block, dice.below(block.pages.len() as u64))
    }

    /// Does to a page what a guest and its host may do at any time.
    pub(super) fn touch(&self, dice: &mut Dice) {
        let (block, first) = self.any_page(dice);
        let run = if dice.one_in(8) { dice.below(600) } else { dice.below(4) } + 1;
        if dice.one_in(12) {
            // Content that exists already: a file is read again, or copied.
            let (other, page) = self.any_page(dice);
            // Page by page, or the same one again and again.
            let step = dice.below(2);
            let last = block.pages.len() as u64;
            for (index, to) in (first..(first + run).min(last)).enumerate() {
                let from = page + index as u64 * step;
                if from < other.pages.len() as u64
                    && let Some(contents) = other.contents(from)
                {
                    block.guest_fills(to, &contents);
                }
            }
            return;
        }
        let what = dice.below(14);
        for page in first..(first + run).min(block.pages.len() as u64) {
            match what {
                0..=5 => block.guest_writes(page, dice.next(), (dice.next() % 4096) as usize),
                6 => block.guest_zeroes(page),
                7 => block.guest_writes_last_word(page, dice.next() as u8 | 1),
                8 | 9 => block.is_punched(page),
                10 => block.is_reclaimed(page),
                // Content that no codec can shorten.
                12 => block.guest_fills(page, &std::array::from_fn(|_| dice.next() as u8)),
                13 => block.guest_fills(page, &[first as u8 | 1; PAGE]),
                _ => block.guest_reads(page),
            }
        }
    }

    /// Returns the first page whose bytes differ, or which is no hole although it is all zero at the source.
    pub(super) fn first_difference(&self, other: &Self) -> Option<(usize, u64)> {
        for (index, (mine, theirs)) in self.0.iter().zip(&other.0).enumerate() {
            for page in 0..mine.pages.len() {
                let (mine, theirs) = (lock(&mine.pages[page]), lock(&theirs.pages[page]));
                let mine = mine.contents.as_ref().filter(|contents| contents.iter().any(|byte| *byte != 0));
                if mine != theirs.contents.as_ref() {
                    return Some((index, page as u64));
                }
            }
        }
        None
    }
}

impl FakeBlock {
    fn change(&self, page: u64, change: impl FnOnce(&mut Page)) {
        let mut page = lock(&self.pages[page as usize]);
        page.entry = Entry::Present { written: true };
        page.is_free = false;
        change(page.contents.get_or_insert_with(|| Box::new([0; PAGE])));
    }

    pub(super) fn guest_writes(&self, page: u64, value: u64, at: usize) {
        let at = at.min(PAGE - 8);
        self.change(page, |bytes| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes()));
    }

    pub(super) fn contents(&self, page: u64) -> Option<Page> {
        lock(&self.pages[page as usize]).contents.as_deref().copied()
    }

    pub(super) fn guest_fills(&self, page: u64, contents: &Page) {
        self.change(page, |bytes| *bytes = *contents);
    }

    /// All zero but for the very end.
    pub(super) fn guest_writes_last_word(&self, page: u64, value: u8) {
        self.change(page, |bytes| {
            bytes.fill(0);
            bytes[PAGE - 1] = value;
        });
    }

    pub(super) fn guest_zeroes(&self, page: u64) {
        self.change(page, |bytes| bytes.fill(0));
    }

    /// Frees the page: its content is of no use any more.
    pub(super) fn guest_frees(&self, page: u64) {
        lock(&self.pages[page as usize]).is_free = true;
    }

    /// Balloon: the memory is given back, and the mark is lost with the entry.
    pub(super) fn is_punched(&self, page: u64) {
        let mut page = lock(&self.pages[page as usize]);
        page.contents = None;
        page.entry = Entry::None;
    }

    /// The entry is dropped, the contents stay (in the file, or in swap).
    pub(super) fn is_reclaimed(&self, page: u64) {
        lock(&self.pages[page as usize]).entry = Entry::None;
    }

    /// A new entry is not protected, and so counts as written.
    pub(super) fn guest_reads(&self, page: u64) {
        let mut page = lock(&self.pages[page as usize]);
        if page.entry == Entry::None {
            page.entry = Entry::Present { written: true };
        }
    }

    /// A disk read is submitted: the page is marked now.
    pub(super) fn dma_begins(&self, page: u64) {
        self.change(page, |_| {});
    }

    /// Its data lands; no mark is made.
    pub(super) fn dma_lands(&self, page: u64, value: u64) {
        let mut page = lock(&self.pages[page as usize]);
        page.is_free = false;
        page.contents.get_or_insert_with(|| Box::new([0; PAGE]))[..8].copy_from_slice(&value.to_le_bytes());
    }
}

impl BlockReader for Arc<FakeBlock> {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE_BYTES
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        let first = offset as usize / PAGE;
        for (page, bytes) in (first..).zip(into.chunks_exact_mut(PAGE)) {
            if *lock(&self.unreadable) == Some(page as u64) {
                return Err(RamError::Present(io::Error::from_raw_os_error(14)));
            }
            match &lock(&self.pages[page]).contents {
                Some(contents) => bytes.copy_from_slice(contents.as_slice()),
                None => bytes.fill(0),
            }
        }
        Ok(())
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        let mut pages = range.start / PAGE_BYTES..range.end / PAGE_BYTES;
        let found = pages.find(|page| lock(&self.pages[*page as usize]).contents.is_some());
        Ok(found.map_or(range.end, |page| page * PAGE_BYTES))
    }
}

impl BlockWriter for Arc<FakeBlock> {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        BlockReader::bytes(self)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        BlockReader::read(self, offset, into)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        let first = offset as usize / PAGE;
        for (page, bytes) in (first..).zip(data.chunks_exact(PAGE)) {
            if let Some(before) = lock(&self.before_write).as_mut() {
                before(page as u64);
            }
            let contents = bytes.to_vec().into_boxed_slice().try_into().unwrap();
            lock(&self.pages[page]).contents = Some(contents);
        }
        Ok(())
    }

    fn allow_direct_placement(&self, _: Range<u64>) -> bool {
        self.allows_direct
    }

    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        if !self.never_drops {
            for page in range.start / PAGE_BYTES..range.end / PAGE_BYTES {
                lock(&self.pages[page as usize]).contents = None;
            }
        }
        Ok(())
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

/// The kernel's marks of a [`FakeRam`].
pub(super) struct FakeLog {
    ram: FakeRam,
    /// If false, pages without an entry are forgotten, and so are their earlier contents.
    pub(super) asks_for_absent: bool,
}

impl DirtyLog for FakeLog {
    fn scan_dirty(&mut self, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        let mut pages = 0;
        for (block, into) in self.ram.0.iter().zip(into) {
            for (index, page) in (0_u64..).zip(&block.pages) {
                let mut page = lock(page);
                page.entry = match page.entry {
                    Entry::Present { written: true } => Entry::Present { written: false },
                    Entry::None if self.asks_for_absent => Entry::Marker,
                    _ => continue,
                };
                into.set(index..index + 1);
                pages += 1;
            }
        }
        Ok(ScanStats { pages, duration_us: 0 })
    }
}
