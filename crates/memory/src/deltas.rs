//! Pages that are sent again: what of them changed since they were sent last.
//!
//! Who would send differences keeps copies of pages, as QEMU's XBZRLE does. Here it is not the page that is kept but a
//! mark of each of its 64 [pieces](proto::delta): two bytes of a hash. So 32 times as many pages are known with the same
//! memory, and a page is compared without a second one being read. A piece whose mark is another one is sent. A piece that
//! changed has the same mark as before once in 65,536 times, and what was sent may not have arrived: therefore the
//! destination compares a hash of the whole page before it takes it, and asks for it where that is another one. A mark
//! that is wrong costs bytes and never a page.
//!
//! Memory is bounded. While there is room, what is sent is marked; after that, chunks of which nothing was sent in this
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

/// What is known of pages that were sent, shared by all streams and all generations of a migration.
pub struct Deltas {
    /// Blocks from this one on are sent as they are.
    blocks: usize,
    marking: Marking,
    table: Mutex<Table>,
    counters: Counters,
}

/// How pieces are marked.
#[derive(Clone, Copy, Default)]
struct Marking {
    /// Nobody can make pieces with the same mark who does not know it.
    seed: u64,
    /// Bits of a mark. All of them, but in tests, where pieces are to be mistaken for one another.
    bits: u16,
}

#[derive(Debug, Default)]
struct Counters {
    pages: AtomicU64,
    bytes: AtomicU64,
    mark_ns: AtomicU64,
}

/// What was counted since a migration began, all streams together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeltasCounted {
    /// Pages of which only what changed was sent.
    pub pages: u64,
    /// What went for them, before it was compressed, in bytes.
    pub bytes: u64,
    /// Processor time of marking pages and comparing marks, in nanoseconds.
    pub mark_ns: u64,
}

#[derive(Debug, Default)]
struct Table {
    is_on: bool,
    has_ended: bool,
    chunks: HashMap<Key, ChunkMarks>,
    /// The chunks, those that were not sent for longest first.
    by_age: BTreeSet<(u32, Key)>,
    /// Chunks that a worker has, and what of them is to be forgotten when it gives them back.
    lent: HashMap<Key, ChunkPages>,
    /// So many pages can still be marked.
    free_pages: usize,
    /// Counts how often everything was forgotten.
    era: u64,
}

/// What is known of a chunk's pages, in the hands of a worker.
#[derive(Clone, Default)]
pub(crate) struct ChunkMarks {
    marking: Marking,
    era: u64,
    /// The round in which it was last sent.
    round: u32,
    pages: ChunkPages,
    /// In the order of the pages.
    marks: Vec<Marks>,
    /// So many pages may be marked in all.
    room: usize,
}

impl Deltas {
    /// Nothing is known yet, and nothing is marked before that is [wanted](Self::set). Of a migration's blocks the first
    /// so many are looked at; marks may take so many bytes.
    pub fn new(blocks: usize, bytes: usize) -> Self {
        let table = Table { free_pages: bytes / MARKS_BYTES, ..Table::default() };
        let marking = Marking { seed: RandomState::new().hash_one(blocks), bits: u16::MAX };
        Self { blocks, marking, table: Mutex::new(table), counters: Counters::default() }
    }

    /// As [`new`](Self::new), with marks that have these bits and no others.
    #[cfg(test)]
    pub(crate) fn with_bits(blocks: usize, bytes: usize, bits: u16) -> Self {
        let deltas = Self::new(blocks, bytes);
        Self { marking: Marking { bits, ..deltas.marking }, ..deltas }
    }

    /// Whether pages are marked, and what changed of them is sent. What was marked is forgotten where it is not wanted
    /// any more: pages are sent that it does not know of.
    pub fn set(&self, on: bool) {
        let mut table = lock(&self.table);
        table.is_on = on && !table.has_ended;
        if !table.is_on {
            table.forget_all();
        }
    }

    /// From the next round on everything is sent in full: of the last one nothing may be missing.
    pub fn end(&self) {
        lock(&self.table).has_ended = true;
        self.set(false);
    }

    /// What was counted up to now.
    pub fn count(&self) -> DeltasCounted {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { pages, bytes, mark_ns } = &self.counters;
        DeltasCounted { pages: get(pages), bytes: get(bytes), mark_ns: get(mark_ns) }
    }

    /// Pages were put into a frame as what changed of them, so many pieces in all; marking and comparing took so long.
    pub(crate) fn sent(&self, pages: u64, pieces: u64, mark_ns: u64) {
        let bytes = pages * HEAD_BYTES as u64 + pieces * PIECE_BYTES as u64;
        self.counters.pages.fetch_add(pages, Ordering::Relaxed);
        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.mark_ns.fetch_add(mark_ns, Ordering::Relaxed);
    }

    /// What is known of a chunk of which pages are about to be sent; none where nothing is marked. To be
    /// [given back](Self::give_back).
    pub(crate) fn lend(&self, key: Key, wanted: &ChunkPages, round: u32) -> Option<ChunkMarks> {
        let mut table = lock(&self.table);
        if !table.is_on || usize::from(key.0) >= self.blocks {
            return None;
        }
        let mut chunk = table.take_out(key).unwrap_or_default();
        let mut new = *wanted;
        new.remove(&chunk.pages);
        let new = new.count() as usize;
        table.make_room(new, round);
        let granted = new.min(table.free_pages);
        table.free_pages -= granted;
        table.lent.insert(key, ChunkPages::EMPTY);
        chunk.marks.reserve_exact(granted);
        let room = chunk.room + granted;
        Some(ChunkMarks { marking: self.marking, era: table.era, round, room, ..chunk })
    }

    /// Takes back what was lent, as it is after the chunk was sent.
    pub(crate) fn give_back(&self, key: Key, mut chunk: ChunkMarks) {
        let mut table = lock(&self.table);
        let refused = table.lent.remove(&key).unwrap_or(ChunkPages::EMPTY);
        chunk.forget(&refused);
        if chunk.era != table.era {
            table.free_pages += chunk.room;
            return;
        }
        table.free_pages += chunk.give_room_back();
        if chunk.pages.is_empty() {
            return;
        }
        table.by_age.insert((chunk.round, key));
        table.chunks.insert(key, chunk);
    }

    /// The destination has not made of these pages what they have to be: they are sent in full.
    pub(crate) fn refuse(&self, key: Key, pages: &ChunkPages) {
        let mut table = lock(&self.table);
        if let Some(lent) = table.lent.get_mut(&key) {
            lent.insert(pages);
        } else if let Some(chunk) = table.chunks.get_mut(&key) {
            chunk.forget(pages);
            let freed = chunk.give_room_back();
            table.free_pages += freed;
        }
    }

    /// Some of these pages may not have arrived.
    pub(crate) fn forget(&self, owed: &[DirtyBitmap]) {
        let mut table = lock(&self.table);
        for (block, owed) in (0..).zip(owed) {
            for chunk in owed.dirty_chunks() {
                let removed = table.take_out((block, chunk as u32));
                table.free_pages += removed.map_or(0, |chunk| chunk.room);
            }
        }
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
        self.by_age.remove(&(chunk.round, key));
        Some(chunk)
    }

    /// Forgets chunks that were not sent in this round, until there is room for so many pages.
    fn make_room(&mut self, pages: usize, round: u32) {
        while self.free_pages < pages
            && let Some((age, key)) = self.by_age.first().copied()
            && age < round
        {
            self.free_pages += self.take_out(key).map_or(0, |chunk| chunk.room);
        }
    }

    fn forget_all(&mut self) {
        self.free_pages += self.chunks.drain().map(|(_, chunk)| chunk.room).sum::<usize>();
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
mod tests {
    use super::*;

    const PAGE: usize = PAGE_BYTES as usize;

    fn pages(range: std::ops::Range<u64>) -> ChunkPages {
        ChunkPages::from_range(range)
    }

    fn deltas(pages: usize) -> Deltas {
        let deltas = Deltas::new(2, pages * MARKS_BYTES);
        deltas.set(true);
        deltas
    }

    /// Sends pages of a chunk, all of them full of one byte, and says which were known.
    fn send(deltas: &Deltas, key: Key, wanted: std::ops::Range<u64>, round: u32, fill: u8) -> Vec<u64> {
        let mut chunk = deltas.lend(key, &pages(wanted.clone()), round).unwrap();
        let known = wanted.filter(|page| chunk.renew(*page, &[fill; PAGE]).is_some()).collect();
        deltas.give_back(key, chunk);
        known
    }

    #[test]
    fn it_tells_which_pieces_changed() {
        let deltas = deltas(100);
        let mut chunk = deltas.lend((1, 7), &pages(3..5), 1).unwrap();
        let mut page = vec![5; PAGE];
        assert_eq!(chunk.renew(4, &page), None);
        assert_eq!(chunk.renew(4, &page), Some(0));
        (page[0], page[127], page[4095]) = (6, 6, 6);
        assert_eq!(chunk.renew(4, &page), Some(1 << 63 | 0b11));
        // A page before it, and the one that was there already.
        assert_eq!(chunk.renew(3, &[9; PAGE]), None);
        assert_eq!((chunk.renew(4, &page), chunk.renew(3, &[8; PAGE])), (Some(0), Some(u64::MAX)));
        deltas.give_back((1, 7), chunk);
        assert_eq!(send(&deltas, (1, 7), 0..6, 2, 8), [3, 4]);
    }

    #[test]
    fn nothing_is_known_where_nobody_wants_it() {
        let off = Deltas::new(2, 1 << 20);
        assert!(off.lend((0, 0), &pages(0..1), 1).is_none());
        let deltas = deltas(100);
        // A disk.
        assert!(deltas.lend((2, 0), &pages(0..1), 1).is_none());
        send(&deltas, (0, 0), 0..5, 1, 1);
        let lent = deltas.lend((0, 1), &pages(0..5), 1).unwrap();
        deltas.set(false);
        assert!(deltas.lend((0, 0), &pages(0..1), 1).is_none());
        deltas.set(true);
        deltas.give_back((0, 1), lent);
        assert_eq!(send(&deltas, (0, 0), 0..5, 2, 1), [0; 0]);
        assert_eq!(send(&deltas, (0, 1), 0..5, 2, 1), [0; 0]);
        assert_eq!(lock(&deltas.table).free_pages, 90);
        deltas.end();
        deltas.set(true);
        assert!(deltas.lend((0, 0), &pages(0..1), 3).is_none());
        assert_eq!(lock(&deltas.table).free_pages, 100);
    }

    #[test]
    fn what_was_refused_or_may_not_have_arrived_is_sent_in_full() {
        let deltas = deltas(100);
        send(&deltas, (0, 0), 0..10, 1, 1);
        send(&deltas, (0, 1), 0..10, 1, 1);
        deltas.refuse((0, 0), &pages(3..5));
        assert_eq!(send(&deltas, (0, 0), 2..6, 2, 1), [2, 5]);
        // While a worker has them.
        let chunk = deltas.lend((0, 0), &pages(0..1), 3).unwrap();
        deltas.refuse((0, 0), &pages(0..5));
        deltas.give_back((0, 0), chunk);
        assert_eq!(send(&deltas, (0, 0), 0..10, 4, 1), [5, 6, 7, 8, 9]);
        let mut owed = DirtyBitmap::new(4 << 20);
        owed.set(512..513);
        deltas.forget(&[owed]);
        assert_eq!(send(&deltas, (0, 1), 0..10, 5, 1), [0; 0]);
        assert_eq!(send(&deltas, (0, 0), 0..10, 5, 1), (0..10).collect::<Vec<_>>());
        assert_eq!(lock(&deltas.table).free_pages, 80);
    }

    #[test]
    fn what_is_written_to_again_and_again_stays() {
        let deltas = deltas(100);
        // More than there is room for: the first that come are known.
        (0..10).for_each(|chunk| assert_eq!(send(&deltas, (0, chunk), 0..20, 1, 1), [0; 0]));
        assert_eq!(lock(&deltas.table).free_pages, 0);
        assert_eq!(send(&deltas, (0, 4), 0..20, 2, 2).len(), 20);
        assert_eq!(send(&deltas, (0, 7), 0..20, 2, 2).len(), 0);
        assert_eq!(send(&deltas, (0, 9), 0..20, 2, 2).len(), 0);
        for round in 3..6 {
            for chunk in [4, 7, 9] {
                assert_eq!(send(&deltas, (0, chunk), 0..20, round, 3).len(), 20, "{round} {chunk}");
            }
        }
        let table = lock(&deltas.table);
        let known: usize = table.chunks.values().map(|chunk| chunk.marks.len()).sum();
        assert_eq!((known, table.free_pages, table.chunks.len()), (100, 0, 5));
        assert_eq!(table.by_age.len(), 5);
        assert!(table.chunks.values().all(|chunk| chunk.marks.capacity() == 20));
    }

    /// Against a copy of everything that was sent.
    #[test]
    fn it_knows_what_a_copy_of_all_pages_would() {
        let mut dice = crate::tests::Dice(9);
        let deltas = deltas(700);
        let mut copies: HashMap<(Key, u64), Vec<u8>> = HashMap::new();
        let mut known_pages = 0;
        for round in 1..60 {
            for chunk in 0..4 {
                let key = (0, chunk);
                let first = dice.below(400);
                let wanted = first..first + 1 + dice.below(100);
                let mut lent = deltas.lend(key, &pages(wanted.clone()), round).unwrap();
                let dropped = wanted.start..wanted.start + dice.below(3);
                lent.forget(&pages(dropped.clone()));
                dropped.clone().for_each(|page| drop(copies.remove(&(key, page))));
                for page in dropped.end..wanted.end.max(dropped.end) {
                    let mut bytes = copies.get(&(key, page)).cloned().unwrap_or_else(|| vec![0; PAGE]);
                    (0..dice.below(5)).for_each(|_| bytes[dice.below(4096) as usize] = dice.next() as u8);
                    if let Some(changed) = lent.renew(page, &bytes) {
                        known_pages += 1;
                        let before = &copies[&(key, page)];
                        let differs = |at: usize| before[at * 64..][..64] != bytes[at * 64..][..64];
                        assert_eq!(changed, (0..64).map(|at| u64::from(differs(at)) << at).sum::<u64>());
                    }
                    copies.insert((key, page), bytes);
                }
                deltas.give_back(key, lent);
                let table = lock(&deltas.table);
                let known: usize = table.chunks.values().map(|chunk| chunk.marks.len()).sum();
                assert_eq!(known + table.free_pages, 700);
            }
        }
        assert!(known_pages > 1000, "{known_pages}");
    }
}
