//! Hinted pages (soft pages in the paper): memory that the guest reports as unused (Koto et al., `SonicMigration`,
//! section 3). It is not sent.
//!
//! # Condition for leaving a page out
//!
//! The guest is asked after the marks of a round were cleared ([`HintedPages::begin`], after
//! [`OwedPages::clear_marks`](crate::OwedPages::clear_marks)). A page that it reports as free was so at some moment
//! after that. If the page was written after that moment, it has a mark. If not, its content is unobserved: software
//! that allocates a free page writes it first.
//!
//! So a free page may have any content at the destination (docs/traps.md, trap 16), until a dirty scan finds a mark:
//! then it no longer counts as free, and that scan adds it to the pages owed.
//!
//! An answer may take as long as several rounds. Pages that scans have found since the request count as not free,
//! whatever the answer reports. When the answer is complete, the pages that it does not name stop being free, too
//! ([`HintedPages::end_answer`]): pages about which the guest was wrong, and which have not been sent by then, are
//! sent.
//!
//! A hinted page is not simply omitted but sent as a hole, which costs next to nothing and becomes zeros at the
//! destination: a kernel that fills freed pages with zeros, and relies on that, finds zeros. A kernel that fills them
//! with another pattern, and checks it, has to be left alone; its guest reports that.
//!
//! A guest that reports falsely changes its own memory, and no other's.
//!
//! # Page cache
//!
//! Clean page cache is in use, but the guest can give it back. It is put off ([`HintedPages::cache`],
//! [`ReadablePages::without`]) and stays owed. Before the stop the guest is asked to give it back, and a round sends
//! the pages that were put off: pages free by then as holes, all others as they are.
//!
//! [`ReadablePages::without`]: crate::ReadablePages::without

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::Mutex;

use crate::lock;
use crate::page_set::{ChunkPages, PageSet};

mod encoder;

/// Free page hints of the guest, shared by all streams and the thread that requests them.
pub struct HintedPages(Mutex<HintState>);

struct HintState {
    /// Number of the awaited answer. The remainder of an earlier answer does not count, because the pages written since
    /// its request are unknown.
    answer: u64,
    has_ended: bool,
    /// Pages that were free, without a mark since.
    free: Vec<PageSet>,
    /// Pages that the awaited answer has named free so far.
    named: Vec<PageSet>,
    /// Pages that scans have found since the answer was requested.
    written: Vec<PageSet>,
    cache: Vec<PageSet>,
    /// Pages that were sent as holes, and not as anything else since.
    left_out: Vec<PageSet>,
}

impl HintedPages {
    /// Creates an empty set. `block_bytes` are the lengths of the first blocks of a migration; no page of other blocks
    /// is left out.
    pub fn new(block_bytes: impl IntoIterator<Item = u64>) -> Self {
        let none: Vec<_> = block_bytes.into_iter().map(PageSet::new).collect();
        // A random start: an answer requested in another migration may still be under way in the guest, and arrive with
        // it.
        let answer = RandomState::new().hash_one(none.len());
        Self(Mutex::new(HintState {
            answer,
            has_ended: false,
            free: none.clone(),
            named: none.clone(),
            written: none.clone(),
            cache: none.clone(),
            left_out: none,
        }))
    }

    /// Starts a request, after the marks of a round were cleared. Returns the number of its answer. The remainder of an
    /// earlier answer does not count, nor does any page cache that it has named.
    pub fn begin(&self) -> u64 {
        let mut state = lock(&self.0);
        let HintState { answer, named, written, cache, .. } = &mut *state;
        named.iter_mut().chain(written).chain(cache).for_each(PageSet::clear_all);
        *answer = answer.wrapping_add(1);
        *answer
    }

    /// Records the pages of a block that a scan has found written. As long as pages are left out, every taker of
    /// memory's marks has to report them here ([`TrackedRam::report_to`](crate::TrackedRam::report_to)).
    pub(crate) fn written(&self, block: usize, found: &PageSet) {
        let mut state = lock(&self.0);
        let HintState { has_ended: false, free, written, .. } = &mut *state else { return };
        if let Some((free, written)) = free.get_mut(block).zip(written.get_mut(block)) {
            free.remove(found);
            written.insert(found);
        }
    }

    /// Records a free page hint: the guest does not use these pages of a block.
    pub fn add_free(&self, answer: u64, block: usize, pages: Range<u64>) {
        let mut state = lock(&self.0);
        if state.answer != answer || state.has_ended || block >= state.free.len() {
            return;
        }
        let HintState { free, named, written, .. } = &mut *state;
        let pages = within(pages, &free[block]);
        named[block].set(pages.clone());
        free[block].set(pages.clone());
        for not_free in written[block].runs_within(pages) {
            free[block].clear(not_free);
        }
    }

    /// Records a hint that the guest could give these pages of a block back.
    pub fn add_cache(&self, answer: u64, block: usize, pages: Range<u64>) {
        let mut state = lock(&self.0);
        if state.answer == answer
            && let Some(cache) = state.cache.get_mut(block)
        {
            cache.set(within(pages, cache));
        }
    }

    /// Ends an answer: pages that it has not named are in use. Returns true if it was the awaited answer.
    pub fn end_answer(&self, answer: u64) -> bool {
        let mut state = lock(&self.0);
        let is_waited_for = state.answer == answer;
        if is_waited_for {
            let HintState { free, named, .. } = &mut *state;
            free.iter_mut().zip(named).for_each(|(free, named)| free.retain(named));
        }
        is_waited_for
    }

    /// Forgets all hints, because the guest was interrupted or its answers were wrong.
    pub fn forget(&self) {
        let mut state = lock(&self.0);
        state.answer = state.answer.wrapping_add(1);
        let HintState { free, cache, .. } = &mut *state;
        free.iter_mut().chain(cache).for_each(PageSet::clear_all);
    }

    /// Returns the pages that the guest could give back.
    pub fn cache(&self) -> Vec<PageSet> {
        lock(&self.0).cache.clone()
    }

    /// Returns the number of free pages, and the number of page cache pages that could be given back.
    pub fn pages(&self) -> (u64, u64) {
        let state = lock(&self.0);
        let count = |blocks: &[PageSet]| blocks.iter().map(PageSet::count).sum();
        (count(&state.free), count(&state.cache))
    }

    /// Returns how many of these pages are free.
    pub fn count_free(&self, pages: &[PageSet]) -> u64 {
        let state = lock(&self.0);
        let both = |(free, pages): (&PageSet, &PageSet)| {
            pages
                .nonempty_chunks()
                .map(|chunk| pages.chunk(chunk).count_common(&free.chunk(chunk)))
                .sum::<u64>()
        };
        state.free.iter().zip(pages).map(both).sum()
    }

    /// Ends free page hints, because the guest is stopped: from now on every page is sent.
    pub fn end(&self) {
        lock(&self.0).has_ended = true;
        self.forget();
    }

    /// Returns the pages that are zeros at the destination, but may not be at the source.
    pub fn left_out(&self) -> Vec<PageSet> {
        lock(&self.0).left_out.clone()
    }

    /// Returns the pages of a chunk that need not be sent.
    pub(crate) fn chunk(&self, block: u16, chunk: u64) -> ChunkPages {
        lock(&self.0).free.get(usize::from(block)).map_or(ChunkPages::EMPTY, |free| free.chunk(chunk))
    }

    /// Records that `pages` of a chunk were sent, `hinted` of them as holes because they need not be sent.
    pub(crate) fn sent(&self, block: u16, chunk: u64, pages: &ChunkPages, hinted: &ChunkPages) {
        if let Some(left_out) = lock(&self.0).left_out.get_mut(usize::from(block)) {
            left_out.remove_from_chunk(chunk, pages);
            left_out.insert_into_chunk(chunk, hinted);
        }
    }
}

/// Cuts a range at the block's end, because a guest may report anything.
fn within(pages: Range<u64>, block: &PageSet) -> Range<u64> {
    let end = pages.end.min(block.pages());
    pages.start.min(end)..end
}

impl fmt::Debug for HintedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (free, cache) = self.pages();
        f.debug_struct("HintedPages").field("free", &free).field("cache", &cache).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 2 << 20;

    fn look(hinted: &HintedPages, found: Range<u64>) {
        let mut these = PageSet::new(2 * CHUNK);
        these.set(found);
        hinted.written(0, &these);
    }

    /// Returns true if exactly these pages are free.
    fn is_free(hinted: &HintedPages, pages: &[Range<u64>]) -> bool {
        let mut these = PageSet::new(2 * CHUNK);
        for pages in pages {
            these.set(pages.clone());
        }
        lock(&hinted.0).free[0] == these
    }

    #[test]
    fn free_pages_stay_free_until_a_scan_finds_them_written() {
        let hinted = HintedPages::new([2 * CHUNK]);
        let first = hinted.begin();
        hinted.add_free(first, 0, 500..520);
        hinted.add_cache(first, 0, 7..9);
        assert_eq!(
            (hinted.pages(), hinted.chunk(0, 0).count(), hinted.chunk(0, 1).count()),
            ((20, 2), 12, 8)
        );
        let mut some = PageSet::new(2 * CHUNK);
        some.set(510..600);
        assert_eq!(hinted.count_free(&[some]), 10);
        look(&hinted, 505..507);
        assert!(is_free(&hinted, &[500..505, 507..520]));
        // The guest's report about them may be older than the writes to them.
        hinted.add_free(first, 0, 500..521);
        assert!(is_free(&hinted, &[500..505, 507..521]));
        look(&hinted, 510..511);
        assert!(is_free(&hinted, &[500..505, 507..510, 511..521]));
        let second = hinted.begin();
        hinted.add_free(first, 0, 0..5);
        hinted.add_cache(first, 0, 0..5);
        assert!(is_free(&hinted, &[500..505, 507..510, 511..521]), "not asked for any more");
        hinted.add_free(second, 0, 505..508);
        assert!(is_free(&hinted, &[500..510, 511..521]), "free again since it was asked");
        assert_eq!(hinted.pages(), (20, 0));
        assert!(!hinted.end_answer(first) && is_free(&hinted, &[500..510, 511..521]));
        assert!(hinted.end_answer(second) && hinted.pages().0 == 3, "what is not named any more is in use");
        hinted.forget();
        assert_eq!(hinted.pages(), (0, 0));
        hinted.add_free(second, 0, 0..5);
        assert_eq!(hinted.pages(), (0, 0), "after one invalid answer no other counts");
    }

    #[test]
    fn no_two_migrations_ask_for_the_same_answer() {
        let first = || HintedPages::new([CHUNK]).begin();
        assert_ne!(first(), first());
    }

    #[test]
    fn a_guest_may_say_anything() {
        let hinted = HintedPages::new([CHUNK]);
        let answer = hinted.begin();
        hinted.add_free(answer, 0, 510..u64::MAX);
        hinted.add_free(answer, 0, u64::MAX - 1..u64::MAX);
        hinted.add_free(answer, 1, 0..5);
        assert_eq!(
            (hinted.pages(), hinted.chunk(1, 0), hinted.chunk(0, 9)),
            ((2, 0), ChunkPages::EMPTY, ChunkPages::EMPTY)
        );
    }

    #[test]
    fn while_the_guest_stands_still_nothing_is_left_out() {
        let hinted = HintedPages::new([CHUNK]);
        let answer = hinted.begin();
        hinted.add_free(answer, 0, 0..9);
        hinted.end();
        assert_eq!(hinted.pages(), (0, 0));
        hinted.add_free(answer.wrapping_add(1), 0, 0..9);
        assert_eq!(hinted.pages(), (0, 0));
    }

    #[test]
    fn what_was_left_out_is_so_until_it_is_sent() {
        let hinted = HintedPages::new([CHUNK]);
        let pages = |range| ChunkPages::from_range(range);
        hinted.sent(0, 0, &pages(0..100), &pages(10..50));
        hinted.sent(0, 0, &pages(20..30), &ChunkPages::EMPTY);
        hinted.sent(1, 0, &pages(0..5), &pages(0..5));
        assert_eq!(hinted.left_out()[0].runs().collect::<Vec<_>>(), [10..20, 30..50]);
    }
}
