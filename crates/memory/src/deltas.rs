//! Pages that are sent again: what of them changed since they were sent last.
//!
//! Who would send differences keeps copies of pages, as QEMU's XBZRLE does. Here it is not the page that is kept but a
//! mark of each of its 64 [pieces](proto::delta): two bytes of a hash. So 32 times as many pages are known with the same
//! memory, and a page is compared without a second one being read. A piece whose mark is another one is sent. A piece that
//! changed has the same mark as before once in 65,536 times, and what was sent may not have arrived: therefore the
//! destination compares a hash of the whole page before it takes it, and asks for it where that is another one. A mark
//! that is wrong costs bytes and never a page.
//!
//! Memory is bounded. While there is room, what is sent is marked; after that, chunks of which nothing is sent in this
//! round make room for those that are. What is written to in every round stays.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::delta::{HEAD_BYTES, PIECE_BYTES, PIECES};
use proto::limits::PAGE_BYTES;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::dirty::{ChunkPages, DirtyBitmap};
use crate::lock;

/// Marks of a page.
type Marks = [u16; PIECES];

/// Block and chunk.
type Key = (u16, u32);

/// Bytes that are kept for a page.
pub(crate) const MARKS_BYTES: usize = size_of::<Marks>();

/// What is kept for a chunk beside the marks of its pages takes as much as those of so many pages.
const CHUNK_ROOM: usize = 3;

/// What is known of pages that were sent, shared by all streams and all generations of a migration.
pub struct Deltas {
    /// Blocks from this one on are sent as they are.
    blocks: usize,
    /// Of the hashes that the other side compares.
    page_seed: u64,
    marking: Marking,
    table: Mutex<Table>,
    counters: Counters,
}

/// How pieces are marked.
#[derive(Clone, Copy, Default)]
struct Marking {
    /// Known to nobody: who knew it could look for pieces with the same mark.
    seed: u64,
    /// Bits of a mark. All of them, but in tests, where pieces are to be mistaken for one another.
    bits: u16,
}

#[derive(Debug, Default)]
struct Counters {
    pages: AtomicU64,
    refused: AtomicU64,
    bytes: AtomicU64,
    mark_ns: AtomicU64,
}

/// What was counted since a migration began, all streams together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeltasCounted {
    /// Pages of which only what changed was sent, without those that the other side refused.
    pub pages: u64,
    /// What went for all of them, before it was compressed, in bytes.
    pub bytes: u64,
    /// Processor time of marking pages, comparing marks and putting together what changed, in nanoseconds: of one frame
    /// in sixteen, times sixteen.
    pub mark_ns: u64,
}

#[derive(Debug, Default)]
struct Table {
    is_on: bool,
    has_ended: bool,
    chunks: HashMap<Key, ChunkMarks>,
    /// The chunks, those that were not to be sent for longest first.
    by_age: BTreeSet<(u32, Key)>,
    /// Chunks that a worker has, and what of them is to be forgotten when it gives them back.
    lent: HashMap<Key, ChunkPages>,
    /// So many pages can still be marked.
    free_pages: usize,
    /// Counts how often everything was forgotten.
    era: u64,
}

/// What is known of a chunk's pages, in the table or in the hands of a worker.
#[derive(Clone, Default)]
pub(crate) struct ChunkMarks {
    marking: Marking,
    era: u64,
    /// The last round in which pages of it are sent, or are to be.
    age: u32,
    /// The last round in which pages of it were sent.
    round: u32,
    pages: ChunkPages,
    /// In the order of the pages.
    marks: Vec<Marks>,
    /// So many pages may be marked in all.
    room: usize,
}

impl Deltas {
    /// Nothing is known yet, and nothing is marked before that is [wanted](Self::set). Of a migration's blocks the first
    /// so many are looked at; marks may take so many bytes. The other side knows the seed.
    pub fn new(blocks: usize, bytes: usize, page_seed: u64) -> Self {
        let table = Table { free_pages: bytes / MARKS_BYTES, ..Table::default() };
        let marking = Marking { seed: RandomState::new().hash_one(blocks), bits: u16::MAX };
        Self { blocks, page_seed, marking, table: Mutex::new(table), counters: Counters::default() }
    }

    /// As [`new`](Self::new), with marks that have these bits and no others, and are the same each time.
    #[cfg(test)]
    pub(crate) fn with_bits(blocks: usize, bytes: usize, bits: u16) -> Self {
        Self { marking: Marking { seed: 7, bits }, ..Self::new(blocks, bytes, tests::PAGE_SEED) }
    }

    /// Whether pages are marked, and what changed of them is sent. What was marked is forgotten where it is not wanted
    /// any more: pages are sent that it does not know of.
    pub fn set(&self, on: bool) {
        let mut table = lock(&self.table);
        if !table.has_ended {
            table.is_on = on;
            if !on {
                table.forget_all();
            }
        }
    }

    /// From the next round on everything is sent in full: of the last one nothing may be missing. The guest stands still,
    /// and so nothing is tidied up.
    pub fn end(&self) {
        let mut table = lock(&self.table);
        (table.is_on, table.has_ended) = (false, true);
    }

    /// Of how many of these pages, which are to be sent, nothing is known.
    pub fn unknown(&self, owed: &[DirtyBitmap]) -> u64 {
        let table = lock(&self.table);
        let known = |block: u16, owed: &DirtyBitmap, chunk: u64| {
            let marks = table.chunks.get(&(block, chunk as u32)).filter(|_| table.is_on);
            marks.map_or(0, |marks| marks.pages.count_both(&owed.chunk(chunk)))
        };
        let of_block = |(block, owed): (u16, &DirtyBitmap)| {
            owed.count() - owed.dirty_chunks().map(|chunk| known(block, owed, chunk)).sum::<u64>()
        };
        (0..).zip(owed).map(of_block).sum()
    }

    /// What was counted up to now.
    pub fn count(&self) -> DeltasCounted {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { pages, refused, bytes, mark_ns } = &self.counters;
        let pages = get(pages).saturating_sub(get(refused));
        DeltasCounted { pages, bytes: get(bytes), mark_ns: get(mark_ns) }
    }

    /// Pages were put into a frame as what changed of them, so many pieces in all; marking and comparing took so long.
    pub(crate) fn sent(&self, pages: u64, pieces: u64, mark_ns: u64) {
        let bytes = pages * HEAD_BYTES as u64 + pieces * PIECE_BYTES as u64;
        self.counters.pages.fetch_add(pages, Ordering::Relaxed);
        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.mark_ns.fetch_add(mark_ns, Ordering::Relaxed);
    }

    /// Pages of these chunks are about to be sent in a round, or wait for one after it: they are not what makes room in it.
    pub fn keep(&self, owed: &[DirtyBitmap], round: u32) {
        let mut table = lock(&self.table);
        if !table.is_on || table.chunks.is_empty() {
            return;
        }
        for (block, owed) in (0..).zip(owed) {
            for key in owed.dirty_chunks().map(|chunk| (block, chunk as u32)) {
                if let Some(chunk) = table.take_out(key) {
                    table.put(key, ChunkMarks { age: round, ..chunk });
                }
            }
        }
    }

    /// What is known of a chunk of which pages are about to be sent; none where nothing is marked. To be
    /// [given back](Self::give_back). Pages that were not known are not marked either while the guest stands still: they
    /// are not sent again.
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
        let new = (wanted.count() - wanted.count_both(&chunk.pages)) as usize;
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

    /// Takes back what was lent, as it is after the chunk was sent.
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

    /// The destination has not got these pages: they are sent in full. Of so many of them what changed had been sent.
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

    /// Some of these pages may not have arrived, if they were sent in this round.
    pub(crate) fn forget(&self, owed: &[DirtyBitmap], round: u32) {
        let mut table = lock(&self.table);
        for (block, owed) in (0..).zip(owed) {
            for chunk in owed.dirty_chunks() {
                let key = (block, chunk as u32);
                if table.chunks.get(&key).is_some_and(|chunk| chunk.round == round) {
                    table.forget(key, &owed.chunk(chunk));
                }
            }
        }
    }

    /// The destination takes these pages away: of them nothing is known any more.
    pub fn withdraw(&self, pages: &[DirtyBitmap]) {
        let mut table = lock(&self.table);
        for (block, pages) in (0..).zip(pages) {
            for chunk in pages.dirty_chunks() {
                table.forget((block, chunk as u32), &pages.chunk(chunk));
            }
        }
    }

    /// The hash by which the other side knows that a page is what it has to be.
    pub(crate) fn page_hash(&self, page: &[u8]) -> u64 {
        xxh3_64_with_seed(page, self.page_seed)
    }
}

impl fmt::Debug for Deltas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deltas").field("counted", &self.count()).finish_non_exhaustive()
    }
}

impl Marking {
    fn of(self, page: &[u8]) -> impl Iterator<Item = u16> {
        debug_assert_eq!(page.len() as u64, PAGE_BYTES);
        let pieces = page.as_chunks::<PIECE_BYTES>().0.iter();
        pieces.map(move |piece| xxh3_64_with_seed(piece, self.seed) as u16 & self.bits)
    }
}

impl Table {
    fn take_out(&mut self, key: Key) -> Option<ChunkMarks> {
        let chunk = self.chunks.remove(&key)?;
        self.by_age.remove(&(chunk.age, key));
        Some(chunk)
    }

    /// Keeps a chunk, if anything is known of it; room that it does not use is free.
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

    /// Forgets chunks of which nothing is sent in this round, until there is room for so many pages.
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
    /// Marks a page anew. Returns which of its pieces are other ones than those that were sent last; none if that is
    /// not known.
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

    /// These are not known any more.
    pub(crate) fn forget(&mut self, pages: &ChunkPages) {
        if !pages.is_disjoint(&self.pages) {
            let mut known = self.pages.runs().flatten();
            self.marks.retain(|_| known.next().is_some_and(|page| !pages.contains(page)));
            self.pages.remove(pages);
        }
    }

    /// No more pages than there are will be marked; returns how many could have been, and frees their memory.
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
