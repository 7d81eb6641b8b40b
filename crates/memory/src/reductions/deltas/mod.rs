//! Deltas of pages that are sent again: the pieces that changed since they were sent last.
//!
//! Senders of deltas usually keep copies of pages, as QEMU's XBZRLE does. This module keeps only a mark of each of a
//! page's 64 [pieces](proto::delta): two bytes of a hash. So the same memory covers 32 times as many pages, and a page
//! is compared without a second one being read. A piece whose mark differs is sent.
//!
//! A piece that changed has the same mark as before once in 65,536 times, and earlier pages may not have arrived.
//! Therefore the destination compares a hash of the whole page before it applies a delta, and requests the page if the
//! hash differs. A wrong mark costs bytes and never a page.
//!
//! Memory is bounded. While there is room, every page that is sent is marked; after that, chunks without pages in this
//! round are evicted for those that have some. Pages that are written in every round stay.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::delta::{HEAD_BYTES, PIECE_BYTES, PIECES};
use proto::limits::PAGE_BYTES;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::lock;
use crate::page_set::{ChunkPages, PageSet};

pub(crate) mod decoder;
mod encoder;

/// Marks of a page.
type Marks = [u16; PIECES];

/// Block and chunk.
type Key = (u16, u32);

/// Bytes that are kept for a page.
pub(crate) const MARKS_BYTES: usize = size_of::<Marks>();

/// Cost of a chunk beside the marks of its pages, in pages of marks.
const CHUNK_ROOM: usize = 3;

/// Marks of pages that were sent, shared by all streams and all generations of a migration.
pub struct Deltas {
    /// Number of blocks with deltas; later blocks are sent as they are.
    blocks: usize,
    /// Seed of the hashes that the destination compares.
    page_seed: u64,
    marking: MarkParameters,
    table: Mutex<MarkTable>,
    counters: AtomicDeltaCounters,
}

/// Parameters of the marks.
#[derive(Clone, Copy, Default)]
struct MarkParameters {
    /// Secret: anyone who knows the seed could search for pieces with the same mark.
    seed: u64,
    /// Bits of a mark. All of them, except in tests that need pieces to be mistaken for one another.
    bits: u16,
}

#[derive(Debug, Default)]
struct AtomicDeltaCounters {
    pages: AtomicU64,
    refused: AtomicU64,
    bytes: AtomicU64,
    mark_ns: AtomicU64,
}

/// Counters of deltas since the migration began, all streams together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeltaCounters {
    /// Pages sent as deltas, without those that the destination refused.
    pub pages: u64,
    /// Size of all deltas before compression, in bytes.
    pub bytes: u64,
    /// Processor time of marking pages, comparing marks and building deltas, in nanoseconds: of one frame in sixteen,
    /// times sixteen.
    pub mark_ns: u64,
}

#[derive(Debug, Default)]
struct MarkTable {
    is_on: bool,
    has_ended: bool,
    chunks: HashMap<Key, ChunkMarks>,
    /// The chunks by age: first the one that was due to be sent least recently.
    by_age: BTreeSet<(u32, Key)>,
    /// Chunks that a worker has borrowed, with the pages to forget when it returns them.
    lent: HashMap<Key, ChunkPages>,
    /// Number of pages that can still be marked.
    free_pages: usize,
    /// Counts how often everything was forgotten.
    era: u64,
}

/// Marks of a chunk's pages, in the table or borrowed by a worker.
#[derive(Clone, Default)]
pub(crate) struct ChunkMarks {
    marking: MarkParameters,
    era: u64,
    /// The last round in which pages of this chunk are sent, or are to be.
    age: u32,
    /// The last round in which pages of this chunk were sent.
    round: u32,
    pages: ChunkPages,
    /// In the order of the pages.
    marks: Vec<Marks>,
    /// Maximum number of marked pages.
    room: usize,
}

impl Deltas {
    /// Creates an empty table; nothing is marked until deltas are [switched on](Self::set). Deltas apply to the first
    /// `blocks` blocks of a migration; marks may use `bytes` bytes. The destination knows the seed.
    pub fn new(blocks: usize, bytes: usize, page_seed: u64) -> Self {
        let table = MarkTable { free_pages: bytes / MARKS_BYTES, ..MarkTable::default() };
        let marking = MarkParameters { seed: RandomState::new().hash_one(blocks), bits: u16::MAX };
        Self {
            blocks,
            page_seed,
            marking,
            table: Mutex::new(table),
            counters: AtomicDeltaCounters::default(),
        }
    }

    /// Creates a table as [`new`](Self::new) does, with marks that have these bits and no others, and are the same each
    /// time.
    #[cfg(test)]
    pub(crate) fn with_bits(blocks: usize, bytes: usize, bits: u16) -> Self {
        Self { marking: MarkParameters { seed: 7, bits }, ..Self::new(blocks, bytes, tests::PAGE_SEED) }
    }

    /// Switches marking and deltas on or off. Off forgets all marks, because pages are then sent without updating them.
    pub fn set(&self, on: bool) {
        let mut table = lock(&self.table);
        if !table.has_ended {
            table.is_on = on;
            if !on {
                table.forget_all();
            }
        }
    }

    /// Ends deltas: from the next round on every page is sent in full, because no page of the last round may be
    /// missing. The guest is stopped, so no time is spent on freeing memory.
    pub fn end(&self) {
        let mut table = lock(&self.table);
        (table.is_on, table.has_ended) = (false, true);
    }

    /// Returns how many of these pages, which are to be sent, have no marks.
    pub fn unknown(&self, owed: &[PageSet]) -> u64 {
        let table = lock(&self.table);
        let known = |block: u16, owed: &PageSet, chunk: u64| {
            let marks = table.chunks.get(&(block, chunk as u32)).filter(|_| table.is_on);
            marks.map_or(0, |marks| marks.pages.count_common(&owed.chunk(chunk)))
        };
        let of_block = |(block, owed): (u16, &PageSet)| {
            owed.count() - owed.nonempty_chunks().map(|chunk| known(block, owed, chunk)).sum::<u64>()
        };
        (0..).zip(owed).map(of_block).sum()
    }

    /// Returns the counters up to now.
    pub fn count(&self) -> DeltaCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let AtomicDeltaCounters { pages, refused, bytes, mark_ns } = &self.counters;
        let pages = get(pages).saturating_sub(get(refused));
        DeltaCounters { pages, bytes: get(bytes), mark_ns: get(mark_ns) }
    }

    /// Counts pages that were put into a frame as deltas, with the number of pieces and the processor time of marking
    /// and comparing.
    pub(crate) fn sent(&self, pages: u64, pieces: u64, mark_ns: u64) {
        let bytes = pages * HEAD_BYTES as u64 + pieces * PIECE_BYTES as u64;
        self.counters.pages.fetch_add(pages, Ordering::Relaxed);
        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.mark_ns.fetch_add(mark_ns, Ordering::Relaxed);
    }

    /// Protects the marks of these chunks from eviction in a round: pages of them are about to be sent in it, or wait
    /// for a later one.
    pub fn keep(&self, owed: &[PageSet], round: u32) {
        let mut table = lock(&self.table);
        if !table.is_on || table.chunks.is_empty() {
            return;
        }
        for (block, owed) in (0..).zip(owed) {
            for key in owed.nonempty_chunks().map(|chunk| (block, chunk as u32)) {
                if let Some(chunk) = table.take_out(key) {
                    table.put(key, ChunkMarks { age: round, ..chunk });
                }
            }
        }
    }

    /// Lends the marks of a chunk whose pages are about to be sent; None if nothing is marked. The caller has to
    /// [return them](Self::give_back). While the guest is stopped, no pages are added to the marks, because pages are
    /// not sent again.
    pub(crate) fn lend(
        &self,
        key: Key,
        wanted: &ChunkPages,
        round: u32,
        guest_runs: bool,
    ) -> Option<ChunkMarks> {
        let mut table = lock(&self.table);
        if !table.is_on || usize::from(key.0) >= self.blocks {
            return None;
        }
        let known = table.take_out(key);
        let own = if known.is_some() { 0 } else { CHUNK_ROOM };
        let chunk = known.unwrap_or_default();
        let new = (wanted.count() - wanted.count_common(&chunk.pages)) as usize;
        let mut granted = 0;
        if guest_runs && new > 0 {
            table.make_room(new + own, round);
            granted = new.min(table.free_pages.saturating_sub(own));
        }
        if own > 0 && granted == 0 {
            return None;
        }
        table.free_pages -= granted + own;
        let before = table.lent.insert(key, ChunkPages::EMPTY);
        debug_assert!(before.is_none(), "a chunk is sent by one worker");
        let (era, room) = (table.era, chunk.room + granted);
        drop(table);
        let mut chunk = ChunkMarks { marking: self.marking, era, age: round, round, room, ..chunk };
        chunk.marks.reserve_exact(granted);
        Some(chunk)
    }

    /// Accepts lent marks back, in their state after the chunk was sent.
    pub(crate) fn give_back(&self, key: Key, mut chunk: ChunkMarks) {
        let mut table = lock(&self.table);
        let refused = table.lent.remove(&key).unwrap_or(ChunkPages::EMPTY);
        if chunk.era == table.era {
            chunk.forget(&refused);
            table.put(key, chunk);
        } else {
            table.free_pages += chunk.room + CHUNK_ROOM;
        }
    }

    /// Records that the destination lacks these pages, so that they are sent in full. `changed` of them had been sent
    /// as deltas.
    pub(crate) fn refuse(&self, key: Key, pages: &ChunkPages, changed: u64) {
        if usize::from(key.0) >= self.blocks {
            return;
        }
        self.counters.refused.fetch_add(changed, Ordering::Relaxed);
        let mut table = lock(&self.table);
        match table.lent.get_mut(&key) {
            Some(lent) => lent.insert(pages),
            None => table.forget(key, pages),
        }
    }

    /// Forgets the marks of these pages if they were sent in this round, because some of them may not have arrived.
    pub(crate) fn forget(&self, owed: &[PageSet], round: u32) {
        let mut table = lock(&self.table);
        for (block, owed) in (0..).zip(owed) {
            for chunk in owed.nonempty_chunks() {
                let key = (block, chunk as u32);
                if table.chunks.get(&key).is_some_and(|chunk| chunk.round == round) {
                    table.forget(key, &owed.chunk(chunk));
                }
            }
        }
    }

    /// Forgets the marks of pages that the destination discards.
    pub fn forget_discarded(&self, pages: &[PageSet]) {
        let mut table = lock(&self.table);
        for (block, pages) in (0..).zip(pages) {
            for chunk in pages.nonempty_chunks() {
                table.forget((block, chunk as u32), &pages.chunk(chunk));
            }
        }
    }

    /// Returns the hash by which the destination verifies a page.
    pub(crate) fn page_hash(&self, page: &[u8]) -> u64 {
        xxh3_64_with_seed(page, self.page_seed)
    }
}

impl fmt::Debug for Deltas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deltas").field("counted", &self.count()).finish_non_exhaustive()
    }
}

impl MarkParameters {
    fn of(self, page: &[u8]) -> impl Iterator<Item = u16> {
        debug_assert_eq!(page.len() as u64, PAGE_BYTES);
        let pieces = page.as_chunks::<PIECE_BYTES>().0.iter();
        pieces.map(move |piece| xxh3_64_with_seed(piece, self.seed) as u16 & self.bits)
    }
}

impl MarkTable {
    fn take_out(&mut self, key: Key) -> Option<ChunkMarks> {
        let chunk = self.chunks.remove(&key)?;
        self.by_age.remove(&(chunk.age, key));
        Some(chunk)
    }

    /// Stores a chunk, if any page is marked, and frees the room that it does not use.
    fn put(&mut self, key: Key, mut chunk: ChunkMarks) {
        self.free_pages += chunk.give_room_back();
        if chunk.pages.is_empty() {
            self.free_pages += CHUNK_ROOM;
            return;
        }
        self.by_age.insert((chunk.age, key));
        self.chunks.insert(key, chunk);
    }

    fn forget(&mut self, key: Key, pages: &ChunkPages) {
        if let Some(mut chunk) = self.take_out(key) {
            chunk.forget(pages);
            self.put(key, chunk);
        }
    }

    /// Evicts chunks of which nothing is sent in this round, until there is room for `pages` pages.
    fn make_room(&mut self, pages: usize, round: u32) {
        while self.free_pages < pages
            && let Some((age, key)) = self.by_age.first().copied()
            && age < round
        {
            self.free_pages += self.take_out(key).map_or(0, |chunk| chunk.room + CHUNK_ROOM);
        }
    }

    fn forget_all(&mut self) {
        self.free_pages += self.chunks.drain().map(|(_, chunk)| chunk.room + CHUNK_ROOM).sum::<usize>();
        self.by_age.clear();
        self.era += 1;
    }
}

impl ChunkMarks {
    /// Renews the marks of a page. Returns its pieces that differ from those that were sent last; None if it had no
    /// marks.
    pub(crate) fn renew(&mut self, page: u64, bytes: &[u8]) -> Option<u64> {
        let at = self.pages.count_before(page) as usize;
        if self.pages.contains(page) {
            let mut changed = 0;
            for (piece, (mark, new)) in self.marks[at].iter_mut().zip(self.marking.of(bytes)).enumerate() {
                changed |= u64::from(*mark != new) << piece;
                *mark = new;
            }
            return Some(changed);
        }
        if self.marks.len() < self.room {
            let mut new = [0; PIECES];
            new.iter_mut().zip(self.marking.of(bytes)).for_each(|(mark, new)| *mark = new);
            self.pages.insert(&ChunkPages::from_range(page..page + 1));
            self.marks.insert(at, new);
        }
        None
    }

    /// Forgets the marks of these pages.
    pub(crate) fn forget(&mut self, pages: &ChunkPages) {
        if !pages.is_disjoint(&self.pages) {
            let mut known = self.pages.runs().flatten();
            self.marks.retain(|_| known.next().is_some_and(|page| !pages.contains(page)));
            self.pages.remove(pages);
        }
    }

    /// Limits the chunk to the pages marked now; returns how many more could have been marked, and frees their memory.
    fn give_room_back(&mut self) -> usize {
        if self.marks.capacity() > self.marks.len() + self.marks.len() / 8 {
            self.marks.shrink_to_fit();
        }
        let known = self.marks.len();
        std::mem::replace(&mut self.room, known) - known
    }
}

impl fmt::Debug for ChunkMarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkMarks").field("pages", &self.pages.count()).finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests;
