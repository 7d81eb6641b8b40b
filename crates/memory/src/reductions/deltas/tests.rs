use super::*;

pub(crate) const PAGE_SEED: u64 = 11;

const PAGE: usize = PAGE_BYTES as usize;

impl Deltas {
    fn free_pages(&self) -> usize {
        lock(&self.table).free_pages
    }

    /// Returns true if all room is accounted for, and no chunk is lent.
    pub(crate) fn is_balanced(&self, all_pages: usize) -> bool {
        let table = lock(&self.table);
        let known = |chunk: &ChunkMarks| chunk.marks.len() + CHUNK_ROOM;
        let taken: usize = table.chunks.values().map(known).sum();
        table.lent.is_empty() && taken + table.free_pages == all_pages
    }
}

fn pages(range: std::ops::Range<u64>) -> ChunkPages {
    ChunkPages::from_range(range)
}

fn deltas(pages: usize) -> Deltas {
    let deltas = Deltas::with_bits(2, pages * MARKS_BYTES, u16::MAX);
    deltas.set(true);
    deltas
}

/// Sends pages of a chunk, all of them full of one byte, and returns the known ones.
fn send(deltas: &Deltas, key: Key, wanted: std::ops::Range<u64>, round: u32, fill: u8) -> Vec<u64> {
    let lent = deltas.lend(key, &pages(wanted.clone()), round, true);
    let Some(mut chunk) = lent else { return Vec::new() };
    let known = wanted.filter(|page| chunk.renew(*page, &[fill; PAGE]).is_some()).collect();
    deltas.give_back(key, chunk);
    known
}

#[test]
fn changed_pieces_of_a_page_are_found() {
    let deltas = deltas(100);
    let mut chunk = deltas.lend((1, 7), &pages(3..5), 1, true).unwrap();
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
    let off = Deltas::new(2, 1 << 20, 0);
    assert!(off.lend((0, 0), &pages(0..1), 1, true).is_none());
    let deltas = deltas(100);
    // A disk.
    assert!(deltas.lend((2, 0), &pages(0..1), 1, true).is_none());
    send(&deltas, (0, 0), 0..5, 1, 1);
    let lent = deltas.lend((0, 1), &pages(0..5), 1, true).unwrap();
    deltas.set(false);
    assert!(deltas.lend((0, 0), &pages(0..1), 1, true).is_none());
    deltas.set(true);
    deltas.give_back((0, 1), lent);
    assert_eq!(send(&deltas, (0, 0), 0..5, 2, 1), [0; 0]);
    assert_eq!(send(&deltas, (0, 1), 0..5, 2, 1), [0; 0]);
    assert_eq!(deltas.free_pages(), 90 - 2 * CHUNK_ROOM);
    deltas.end();
    deltas.set(true);
    assert!(deltas.lend((0, 0), &pages(0..1), 3, true).is_none());
}

#[test]
fn what_was_refused_or_may_not_have_arrived_is_sent_in_full() {
    let deltas = deltas(100);
    send(&deltas, (0, 0), 0..10, 1, 1);
    send(&deltas, (0, 1), 0..10, 1, 1);
    deltas.refuse((0, 0), &pages(3..5), 2);
    assert_eq!(send(&deltas, (0, 0), 2..6, 2, 1), [2, 5]);
    // While a worker has borrowed them.
    let chunk = deltas.lend((0, 0), &pages(0..1), 3, true).unwrap();
    deltas.refuse((0, 0), &pages(0..5), 5);
    deltas.give_back((0, 0), chunk);
    assert_eq!(send(&deltas, (0, 0), 0..10, 4, 1), [5, 6, 7, 8, 9]);
    let mut owed = PageSet::new(4 << 20);
    owed.set(512..513);
    deltas.forget(std::slice::from_ref(&owed), 4);
    assert_eq!(send(&deltas, (0, 1), 0..10, 5, 1).len(), 10, "it was not sent in that round");
    owed.set(515..1024);
    deltas.forget(&[owed], 5);
    assert_eq!(send(&deltas, (0, 1), 0..10, 6, 1), [1, 2]);
    assert_eq!(send(&deltas, (0, 0), 0..10, 6, 1), (0..10).collect::<Vec<_>>());
    assert_eq!(deltas.free_pages(), 80 - 2 * CHUNK_ROOM);
}

fn owed(chunks: &[u64]) -> [PageSet; 1] {
    let mut owed = PageSet::new(20 << 21);
    for chunk in chunks {
        owed.set(chunk * 512..chunk * 512 + 20);
    }
    [owed]
}

const EACH: usize = 20 + CHUNK_ROOM;

#[test]
fn what_is_written_to_again_and_again_stays() {
    let deltas = deltas(5 * EACH);
    // More than there is room for: the first ones are known.
    (0..10).for_each(|chunk| assert_eq!(send(&deltas, (0, chunk), 0..20, 1, 1), [0; 0]));
    assert_eq!(deltas.free_pages(), 0);
    assert_eq!(deltas.unknown(&owed(&[0, 3, 4, 5, 6])), 40);
    deltas.keep(&owed(&[4, 7, 9]), 2);
    assert_eq!(send(&deltas, (0, 4), 0..20, 2, 2).len(), 20);
    assert_eq!(send(&deltas, (0, 7), 0..20, 2, 2).len(), 0);
    assert_eq!(send(&deltas, (0, 9), 0..20, 2, 2).len(), 0);
    for round in 3..6 {
        deltas.keep(&owed(&[4, 7, 9]), round);
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

/// A new chunk does not evict those that are sent after it, one after the other.
#[test]
fn what_is_about_to_be_sent_makes_no_room() {
    let deltas = deltas(5 * EACH);
    (1..6).for_each(|chunk| assert_eq!(send(&deltas, (0, chunk), 0..20, 1, 1), [0; 0]));
    deltas.keep(&owed(&[0, 1, 2, 3, 4, 5]), 2);
    assert_eq!(send(&deltas, (0, 0), 0..20, 2, 2), [0; 0]);
    (1..6).for_each(|chunk| assert_eq!(send(&deltas, (0, chunk), 0..20, 2, 2).len(), 20));
}

#[test]
fn nothing_new_is_marked_while_the_guest_stands_still() {
    let deltas = deltas(100);
    send(&deltas, (0, 0), 0..5, 1, 1);
    assert!(deltas.lend((0, 1), &pages(0..5), 2, false).is_none());
    let mut chunk = deltas.lend((0, 0), &pages(0..9), 2, false).unwrap();
    assert_eq!((chunk.renew(4, &[1; PAGE]), chunk.renew(5, &[1; PAGE])), (Some(0), None));
    assert_eq!((chunk.marks.len(), chunk.marks.capacity()), (5, 5));
    deltas.give_back((0, 0), chunk);
    assert_eq!(deltas.free_pages(), 95 - CHUNK_ROOM);
}

/// Compares with a copy of everything that was sent.
#[test]
fn marks_find_the_same_changes_as_full_copies() {
    let mut dice = crate::tests::Dice(9);
    let deltas = deltas(700);
    let mut copies: HashMap<(Key, u64), Vec<u8>> = HashMap::new();
    let (mut known_pages, mut mistaken) = (0, 0);
    for round in 1..60 {
        for chunk in 0..4 {
            let key = (0, chunk);
            let first = dice.below(400);
            let wanted = first..first + 1 + dice.below(100);
            let Some(mut lent) = deltas.lend(key, &pages(wanted.clone()), round, true) else { continue };
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
                    let exact = (0..64).map(|at| u64::from(differs(at)) << at).sum::<u64>();
                    assert_eq!(changed & !exact, 0);
                    mistaken += (exact & !changed).count_ones();
                }
                copies.insert((key, page), bytes);
            }
            deltas.give_back(key, lent);
            assert!(deltas.is_balanced(700));
        }
    }
    // Some ten thousand pieces changed.
    assert!(known_pages > 1000 && mistaken < 4, "{known_pages} {mistaken}");
}
