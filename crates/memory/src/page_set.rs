//! Sets of pages: a bitmap for each RAM block, kept chunk by chunk.
//!
//! The unit is the 4 KiB page whatever page size the host uses, the unit of order is the chunk of 2 MiB
//! ([`proto::limits`]). A chunk's pages are 512 bits, eight words: small enough to be copied, so that a frame in flight
//! is remembered by value ([`ChunkPages`]) and no list of runs has to be allocated for it.
//!
//! Pure data: nothing here does I/O or knows the writer of a page.

use std::ops::Range;

use proto::limits::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES};

const WORDS: usize = (CHUNK_PAGES / 64) as usize;

/// A set of pages within one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkPages([u64; WORDS]);

impl ChunkPages {
    /// The empty set.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// All pages of a chunk.
    pub const ALL: Self = Self([u64::MAX; WORDS]);

    /// Creates a set from a bit for each page.
    pub fn from_words(words: [u64; WORDS]) -> Self {
        Self(words)
    }

    /// Returns a bit for each page.
    pub fn words(&self) -> &[u64; WORDS] {
        &self.0
    }

    /// Creates a set of a range of pages, which is cut at the chunk's end.
    pub fn from_range(pages: Range<u64>) -> Self {
        let mut set = Self::EMPTY;
        set.for_words(&pages, |word, mask| *word = mask);
        set
    }

    /// Calls `each` for the words in which the range has pages, with their bits. A scan mostly finds single pages, so
    /// the other words are not visited.
    fn for_words(&mut self, pages: &Range<u64>, mut each: impl FnMut(&mut u64, u64)) {
        let (start, end) = (pages.start, pages.end.min(CHUNK_PAGES));
        if start >= end {
            return;
        }
        let (first, last) = ((start / 64) as usize, ((end - 1) / 64) as usize);
        let (from, to) = (u64::MAX << (start % 64), u64::MAX >> (63 - (end - 1) % 64));
        if first == last {
            return each(&mut self.0[first], from & to);
        }
        each(&mut self.0[first], from);
        self.0[first + 1..last].iter_mut().for_each(|word| each(word, u64::MAX));
        each(&mut self.0[last], to);
    }

    /// Returns true if the set has no page.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// Returns the number of pages in the set.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Returns true if a page, counted from the chunk's beginning, is in the set.
    pub fn contains(&self, page: u64) -> bool {
        self.0.get((page / 64) as usize).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// Adds all pages of another set.
    pub fn insert(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(word, bits)| *word |= bits);
    }

    /// Removes all pages of another set.
    pub fn remove(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(word, bits)| *word &= !bits);
    }

    /// Removes all pages that are not in another set.
    pub fn retain(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(word, bits)| *word &= bits);
    }

    /// Returns true if all pages of this set are in another set, too.
    pub fn is_within(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).all(|(mine, theirs)| mine & !theirs == 0)
    }

    /// Returns true if no page of this set is in another set.
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).all(|(mine, theirs)| mine & theirs == 0)
    }

    /// Returns the number of pages that are in both sets.
    pub fn count_common(&self, other: &Self) -> u64 {
        self.0.iter().zip(other.0).map(|(mine, theirs)| u64::from((mine & theirs).count_ones())).sum()
    }

    /// Returns the number of pages before `page`.
    pub fn count_before(&self, page: u64) -> u64 {
        let (word, bit) = ((page / 64) as usize, page % 64);
        let whole: u32 = self.0.iter().take(word).map(|word| word.count_ones()).sum();
        let part = self.0.get(word).map_or(0, |word| (word & ((1 << bit) - 1)).count_ones());
        u64::from(whole + part)
    }

    /// Returns neighbouring pages as ranges, ascending and maximal.
    pub fn runs(&self) -> PageRuns {
        PageRuns { left: *self, from: 0 }
    }

    /// Returns the first page at or after `from` that is in the set (or, with `present` false, is not).
    fn find(&self, from: u64, present: bool) -> Option<u64> {
        let mut page = from;
        while page < CHUNK_PAGES {
            let word = self.0[(page / 64) as usize];
            let word = if present { word } else { !word } >> (page % 64);
            if word != 0 {
                return Some(page + u64::from(word.trailing_zeros()));
            }
            page = (page / 64 + 1) * 64;
        }
        None
    }
}

/// Runs of a [`ChunkPages`], see [`ChunkPages::runs`].
#[derive(Clone, Debug)]
pub struct PageRuns {
    left: ChunkPages,
    from: u64,
}

impl Iterator for PageRuns {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let start = self.left.find(self.from, true)?;
        let end = self.left.find(start, false).unwrap_or(CHUNK_PAGES);
        self.from = end;
        Some(start..end)
    }
}

/// A set of pages of one RAM block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    chunks: Vec<ChunkPages>,
    pages: u64,
}

impl PageSet {
    /// Creates an empty set for a block of `bytes` bytes. A last piece that is shorter than a page counts as a page.
    pub fn new(bytes: u64) -> Self {
        let chunks = vec![ChunkPages::EMPTY; bytes.div_ceil(CHUNK_BYTES) as usize];
        Self { chunks, pages: bytes.div_ceil(PAGE_BYTES) }
    }

    /// Creates a set of every page of a block of `bytes` bytes.
    pub fn full(bytes: u64) -> Self {
        let mut all = Self::new(bytes);
        all.set(0..all.pages);
        all
    }

    /// Returns an empty set for the same block.
    #[must_use]
    pub fn emptied(&self) -> Self {
        Self { chunks: vec![ChunkPages::EMPTY; self.chunks.len()], pages: self.pages }
    }

    /// Number of pages of the block.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of chunks of the block; the last one may be shorter.
    pub fn chunks(&self) -> u64 {
        self.chunks.len() as u64
    }

    /// Adds a range of pages; pages beyond the block's end are ignored.
    pub fn set(&mut self, pages: Range<u64>) {
        self.for_parts(pages, |chunk, part| chunk.for_words(&part, |word, mask| *word |= mask));
    }

    /// Removes a range of pages; pages beyond the block's end are ignored.
    pub fn clear(&mut self, pages: Range<u64>) {
        self.for_parts(pages, |chunk, part| chunk.for_words(&part, |word, mask| *word &= !mask));
    }

    /// Removes all pages.
    pub fn clear_all(&mut self) {
        self.chunks.fill(ChunkPages::EMPTY);
    }

    /// Adds every page that a range of bytes touches.
    pub fn set_bytes(&mut self, bytes: Range<u64>) {
        if bytes.start < bytes.end {
            self.set(bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES));
        }
    }

    /// Returns true if a page is in the set.
    pub fn contains(&self, page: u64) -> bool {
        self.chunk(page / CHUNK_PAGES).contains(page % CHUNK_PAGES)
    }

    /// Returns the number of pages in the set.
    pub fn count(&self) -> u64 {
        self.chunks.iter().map(ChunkPages::count).sum()
    }

    /// Returns true if no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.chunks.iter().all(ChunkPages::is_empty)
    }

    /// Removes all pages of another set.
    pub fn remove(&mut self, other: &Self) {
        self.chunks.iter_mut().zip(&other.chunks).for_each(|(mine, theirs)| mine.remove(theirs));
    }

    /// Removes all pages that are not in another set of the same block.
    pub fn retain(&mut self, other: &Self) {
        self.chunks.iter_mut().zip(&other.chunks).for_each(|(mine, theirs)| mine.retain(theirs));
    }

    /// Returns the number of pages that are in both sets.
    pub fn count_common(&self, other: &Self) -> u64 {
        self.chunks.iter().zip(&other.chunks).map(|(mine, theirs)| mine.count_common(theirs)).sum()
    }

    /// Returns the pages of one chunk; none for a chunk beyond the end.
    pub fn chunk(&self, chunk: u64) -> ChunkPages {
        self.chunks.get(chunk as usize).copied().unwrap_or_default()
    }

    /// Removes pages of one chunk.
    pub fn remove_from_chunk(&mut self, chunk: u64, pages: &ChunkPages) {
        if let Some(mine) = self.chunks.get_mut(chunk as usize) {
            mine.remove(pages);
        }
    }

    /// Adds pages of one chunk, none of them beyond the end.
    pub fn insert_into_chunk(&mut self, chunk: u64, pages: &ChunkPages) {
        if let Some(mine) = self.chunks.get_mut(chunk as usize) {
            mine.insert(pages);
        }
    }

    /// Returns the chunks that have pages in the set, ascending.
    pub fn nonempty_chunks(&self) -> impl Iterator<Item = u64> + '_ {
        (0_u64..).zip(&self.chunks).filter(|(_, pages)| !pages.is_empty()).map(|(chunk, _)| chunk)
    }

    /// Returns neighbouring pages as ranges of the block, ascending, cut at chunk borders.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        (0_u64..).zip(&self.chunks).flat_map(|(chunk, pages)| {
            let base = chunk * CHUNK_PAGES;
            pages.runs().map(move |run| base + run.start..base + run.end)
        })
    }

    /// Returns the runs within a range of pages, cut at its ends and at chunk borders.
    pub fn runs_within(&self, pages: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = pages.start / CHUNK_PAGES;
        let last = pages.end.div_ceil(CHUNK_PAGES).min(self.chunks());
        (first..last).flat_map(move |chunk| {
            let (base, pages) = (chunk * CHUNK_PAGES, pages.clone());
            let cut =
                move |run: Range<u64>| (base + run.start).max(pages.start)..(base + run.end).min(pages.end);
            self.chunk(chunk).runs().map(cut).filter(|run| run.start < run.end)
        })
    }

    /// Adds all pages of another set of the same block.
    pub fn insert(&mut self, other: &Self) {
        self.chunks.iter_mut().zip(&other.chunks).for_each(|(mine, theirs)| mine.insert(theirs));
    }

    fn for_parts(&mut self, pages: Range<u64>, mut each: impl FnMut(&mut ChunkPages, Range<u64>)) {
        let end = pages.end.min(self.pages);
        let mut at = pages.start;
        while at < end {
            let base = at / CHUNK_PAGES * CHUNK_PAGES;
            let part_end = end.min(base + CHUNK_PAGES);
            each(&mut self.chunks[(at / CHUNK_PAGES) as usize], at - base..part_end - base);
            at = part_end;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Set(Range<u64>),
        Clear(Range<u64>),
        ClearAll,
        SetBytes(Range<u64>),
        Insert(Vec<Range<u64>>),
        RemoveChunk(u64, Range<u64>),
    }

    fn ranges(max: u64) -> impl Strategy<Value = Range<u64>> {
        // Mistakes are likely at the borders of words and chunks.
        let near =
            prop_oneof![0..=max, (0..=max / 64).prop_map(|n| n * 64), (0..=max / 512).prop_map(|n| n * 512)];
        (near, prop_oneof![0_u64..70, 0..=max]).prop_map(|(start, len)| start..start + len)
    }

    fn ops(pages: u64) -> impl Strategy<Value = Op> {
        let max = pages + 100;
        prop_oneof![
            ranges(max).prop_map(Op::Set),
            ranges(max).prop_map(Op::Clear),
            Just(Op::ClearAll),
            ranges(max * PAGE_BYTES).prop_map(Op::SetBytes),
            prop::collection::vec(ranges(max), 0..4).prop_map(Op::Insert),
            (0..pages / 512 + 2, ranges(600)).prop_map(|(chunk, range)| Op::RemoveChunk(chunk, range)),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_set_of_page_numbers(
            (pages, ops) in (1_u64..2000).prop_flat_map(|pages| (Just(pages), prop::collection::vec(ops(pages), 1..20)))
        ) {
            let mut bitmap = PageSet::new(pages * PAGE_BYTES);
            let mut oracle = BTreeSet::new();
            for op in ops {
                match op {
                    Op::Set(range) => {
                        bitmap.set(range.clone());
                        oracle.extend(range.filter(|page| *page < pages));
                    }
                    Op::Clear(range) => {
                        bitmap.clear(range.clone());
                        oracle.retain(|page| !range.contains(page));
                    }
                    Op::ClearAll => {
                        bitmap.clear_all();
                        oracle.clear();
                    }
                    Op::SetBytes(range) => {
                        bitmap.set_bytes(range.clone());
                        oracle.extend((0..pages).filter(|page| {
                            page * PAGE_BYTES < range.end.max(range.start) && (page + 1) * PAGE_BYTES > range.start
                                && range.start < range.end
                        }));
                    }
                    Op::Insert(ranges) => {
                        let mut other = PageSet::new(pages * PAGE_BYTES);
                        for range in ranges {
                            other.set(range.clone());
                            oracle.extend(range.filter(|page| *page < pages));
                        }
                        bitmap.insert(&other);
                    }
                    Op::RemoveChunk(chunk, range) => {
                        bitmap.remove_from_chunk(chunk, &ChunkPages::from_range(range.clone()));
                        oracle.retain(|page| page / 512 != chunk || !range.contains(&(page % 512)));
                    }
                }
                prop_assert_eq!(bitmap.count(), oracle.len() as u64);
                prop_assert_eq!(bitmap.is_empty(), oracle.is_empty());
                let listed: Vec<u64> = bitmap.runs().flatten().collect();
                prop_assert_eq!(&listed, &oracle.iter().copied().collect::<Vec<_>>());
                prop_assert!((0..pages + 600).all(|page| bitmap.contains(page) == oracle.contains(&page)));
                let part = pages / 3..pages / 2 + 1;
                let within: Vec<u64> = bitmap.runs_within(part.clone()).flatten().collect();
                prop_assert_eq!(&within, &oracle.iter().copied().filter(|page| part.contains(page)).collect::<Vec<_>>());
                let chunks: BTreeSet<u64> = oracle.iter().map(|page| page / 512).collect();
                prop_assert!(bitmap.nonempty_chunks().eq(chunks));
            }
        }

        #[test]
        fn runs_are_maximal_and_ascending(ranges in prop::collection::vec(ranges(512), 0..12)) {
            let mut set = ChunkPages::EMPTY;
            for range in ranges {
                set.insert(&ChunkPages::from_range(range));
            }
            let runs: Vec<_> = set.runs().collect();
            prop_assert!(runs.iter().all(|run| run.start < run.end && run.end <= CHUNK_PAGES));
            prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
            prop_assert_eq!(runs.iter().map(|run| run.end - run.start).sum::<u64>(), set.count());
        }
    }

    #[test]
    fn full_has_every_page_and_none_beyond() {
        for bytes in
            [PAGE_BYTES, CHUNK_BYTES - PAGE_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 8192]
        {
            let all = PageSet::full(bytes);
            assert_eq!(all.count(), bytes.div_ceil(PAGE_BYTES));
            assert_eq!(all.chunks(), bytes.div_ceil(CHUNK_BYTES));
            assert!(!all.contains(all.pages()));
        }
    }
}
