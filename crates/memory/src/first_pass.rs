//! The first pass over memory, in parts, with hot pages last.
//!
//! All of memory has to be sent once. Pages that the guest writes in the meantime would have to be sent twice. So a
//! dirty scan follows each part, and pages that it finds are left to the rounds after the pass. In the beginning it is
//! unknown which pages are hot. Therefore
//!
//! - the first parts are short, and each is twice as long as the one before, since scans have a cost;
//! - as long as the guest writes to ever more pages, a part keeps away from the place of these writes: a program that
//!   writes through an array continues from there, and pages just ahead would be written as soon as they are sent.

use std::ops::Range;
use std::time::Duration;

use crate::page_set::PageSet;
use crate::round::OwedPages;

/// State of the first pass: its remaining pages, and the duration of its next part.
#[derive(Clone, Debug)]
pub struct FirstPass {
    /// Pages that were neither sent nor written. No page returns into this set, or a guest that writes all the time
    /// would make the pass endless. None before the first scan.
    cold: Option<Vec<PageSet>>,
    /// Pages of memory that were written.
    hot: Vec<PageSet>,
    /// True if the last scan found mostly pages that no scan had found before.
    is_spreading: bool,
    /// Number of pages of memory that were cold at the first scan.
    cold_first: u64,
    /// Pages of the current part, sent or in flight.
    part_pages: Vec<PageSet>,
    part: Duration,
    /// Duration to which parts grow at least.
    usual: Duration,
    /// True if parts do not keep away from any place.
    is_in_order: bool,
}

/// Consecutive chunks of memory that the guest does not write.
#[derive(Clone, Debug, Default)]
struct QuietRange {
    block: usize,
    chunks: Range<u64>,
    /// Number of cold pages in them.
    cold: u64,
}

impl FirstPass {
    /// The first part lasts `1 / FIRST` of the usual duration of parts.
    const FIRST: u32 = 8;
    /// A part lasts at least `BESIDE` times its time beside sending: the wait in buffers, the last page's transit and
    /// the answer's way back. Only in the last two of these nothing is sent.
    const BESIDE: u32 = 2;
    /// A part lasts at most `1 / OF_REST` of the remaining time, if that is longer than the usual duration: more
    /// remaining pages make longer parts, or there would be many scans.
    const OF_REST: u32 = 4;
    /// Number of hot pages from which on a chunk (2 MiB) counts as busy. A few hot pages are everywhere in the memory
    /// of a kernel.
    const BUSY_PAGES: u64 = 32;
    /// Parts keep away from the guest's writes if at least `1 / FAR` of the cold pages is far from there,
    const FAR: u64 = 4;
    /// and until `1 / NEARLY_ALL` of all pages remains: the space in between is halved each time.
    const NEARLY_ALL: u64 = 16;

    /// Creates a pass of which nothing was sent. `usual` is the usual duration of parts.
    pub fn new(usual: Duration) -> Self {
        Self {
            cold: None,
            hot: Vec::new(),
            is_spreading: false,
            cold_first: 0,
            part_pages: Vec::new(),
            part: usual / Self::FIRST,
            usual,
            is_in_order: false,
        }
    }

    /// Sets whether free page hints of the guest are still outstanding. Until they arrive, parts go through memory in
    /// order, because the regions far from the guest's writes are the free ones.
    pub fn set_hints_pending(&mut self, is_unknown: bool) {
        self.is_in_order = is_unknown;
    }

    /// Records a dirty scan: the pages found written in each block of memory (the first blocks), and the pages owed.
    /// Returns true if pages of the pass remain.
    pub fn record_scan(&mut self, owed: &OwedPages, found: &[PageSet]) -> bool {
        let is_first = self.cold.is_none();
        let cold = self.cold.get_or_insert_with(|| owed.blocks().to_vec());
        cold.iter_mut().zip(found).for_each(|(cold, found)| cold.remove(found));
        if is_first {
            self.hot = found.to_vec();
            self.is_spreading = true;
            self.cold_first = cold.iter().zip(found).map(|(cold, _)| cold.count()).sum();
        } else {
            let known: u64 = self.hot.iter().zip(found).map(|(hot, found)| hot.count_common(found)).sum();
            let all: u64 = found.iter().map(PageSet::count).sum();
            self.is_spreading = known < all / 2;
            self.hot.iter_mut().zip(found).for_each(|(hot, found)| hot.insert(found));
        }
        !cold.iter().all(PageSet::is_empty)
    }

    /// Returns the pages of each block that the next part sends as far as time allows; None before the first scan.
    pub fn next_part(&mut self) -> Option<&[PageSet]> {
        let cold = self.cold.as_deref()?;
        self.part_pages = self.farthest_pages(cold).unwrap_or_else(|| cold.to_vec());
        Some(&self.part_pages)
    }

    /// Duration of the next part, at least `least` to limit the frequency of scans.
    pub fn part(&self, least: Duration) -> Duration {
        self.part.max(least)
    }

    /// Records that a part was cut off; `unsent` are its pages that did not arrive.
    pub fn cut(&mut self, unsent: &OwedPages) {
        for ((cold, part), unsent) in
            self.cold.iter_mut().flatten().zip(&self.part_pages).zip(unsent.blocks())
        {
            cold.remove(part);
            cold.insert(unsent);
        }
    }

    /// Records a finished part: planned for `planned`, it sent `pages` pages in `took` and had no time for `unsent`.
    /// Returns true if pages remain.
    pub fn sent(&mut self, unsent: &OwedPages, pages: u64, planned: Duration, took: Duration) -> bool {
        self.cut(unsent);
        let remaining_pages: u64 = self.cold.iter().flatten().map(PageSet::count).sum();
        let left = took.mul_f64(remaining_pages as f64 / pages.max(1) as f64);
        let grown = (self.part * 2).min(self.usual.max(left / Self::OF_REST));
        let beside = took.saturating_sub(planned);
        self.part = grown.max(beside * Self::BESIDE);
        remaining_pages > 0
    }

    /// Returns the pages of memory farthest ahead of the guest's writes, if these move on and there are enough such
    /// pages: the second half of the longest quiet stretch.
    fn farthest_pages(&self, cold: &[PageSet]) -> Option<Vec<PageSet>> {
        let of_memory: u64 = cold.iter().zip(&self.hot).map(|(cold, _)| cold.count()).sum();
        let is_busy = |block: &PageSet, chunk| block.chunk(chunk).count() >= Self::BUSY_PAGES;
        if self.is_in_order
            || !self.is_spreading
            || of_memory < self.cold_first / Self::NEARLY_ALL
            || !self.hot.iter().any(|block| block.nonempty_chunks().any(|chunk| is_busy(block, chunk)))
        {
            return None;
        }
        let mut longest = QuietRange::default();
        for (number, (cold, hot)) in cold.iter().zip(&self.hot).enumerate() {
            let mut quiet = QuietRange { block: number, ..QuietRange::default() };
            for chunk in 0..cold.chunks() {
                if is_busy(hot, chunk) {
                    quiet = QuietRange { block: number, chunks: chunk + 1..chunk + 1, cold: 0 };
                    continue;
                }
                quiet.chunks.end = chunk + 1;
                quiet.cold += cold.chunk(chunk).count();
                if quiet.cold > longest.cold {
                    longest.clone_from(&quiet);
                }
            }
        }
        let mut far: Vec<_> = cold.iter().map(PageSet::emptied).collect();
        let (from, to) = (&cold[longest.block], &mut far[longest.block]);
        let mut taken = 0;
        for chunk in longest.chunks.rev() {
            if taken >= longest.cold / 2 {
                break;
            }
            let pages = from.chunk(chunk);
            to.insert_into_chunk(chunk, &pages);
            taken += pages.count();
        }
        (taken >= (of_memory / Self::FAR).max(1)).then_some(far)
    }
}

#[cfg(test)]
mod tests {
    use proto::limits::PAGE_BYTES;

    use super::*;

    const USUAL: Duration = Duration::from_secs(1);

    /// A guest that writes to some of its pages over and over, one after the other, and a link.
    struct Guest {
        pages: u64,
        hot: Range<u64>,
        written_per_s: u64,
        sent_per_s: f64,
        written: f64,
        marks: PageSet,
    }

    impl Guest {
        fn new(pages: u64, hot: Range<u64>, written_per_s: u64, sent_per_s: u64) -> Self {
            let marks = PageSet::new(pages * PAGE_BYTES);
            Self { pages, hot, written_per_s, sent_per_s: sent_per_s as f64, written: 0.0, marks }
        }

        fn runs_for(&mut self, time: Duration) {
            let from = self.written as u64;
            self.written += time.as_secs_f64() * self.written_per_s as f64;
            for page in
                (from..self.written as u64).map(|n| self.hot.start + n % (self.hot.end - self.hot.start))
            {
                self.marks.set(page..page + 1);
            }
        }

        fn look(&mut self) -> PageSet {
            let none = self.marks.emptied();
            std::mem::replace(&mut self.marks, none)
        }

        /// Returns the pages of each part of the first pass, and the number of dirty pages after it.
        fn move_it(mut self) -> (Vec<PageSet>, u64) {
            let mut pass = FirstPass::new(USUAL);
            let mut owed = PageSet::full(self.pages * PAGE_BYTES);
            let mut parts = Vec::new();
            // Before the first scan the guest writes as well.
            self.runs_for(Duration::from_millis(20));
            loop {
                let found = self.look();
                owed.insert(&found);
                if !pass.record_scan(&OwedPages::of(vec![owed.clone()]), &[found]) {
                    return (parts, owed.count());
                }
                let planned = pass.part(Duration::ZERO);
                let most = (planned.as_secs_f64() * self.sent_per_s) as usize;
                let mut unsent = pass.next_part().unwrap()[0].clone();
                let mut part = unsent.emptied();
                unsent.runs().flatten().take(most).for_each(|page| part.set(page..page + 1));
                unsent.remove(&part);
                owed.remove(&part);
                let took = Duration::from_secs_f64(part.count() as f64 / self.sent_per_s);
                self.runs_for(took);
                let is_left = pass.sent(&OwedPages::of(vec![unsent]), part.count(), planned, took);
                parts.push(part);
                if !is_left {
                    owed.insert(&self.look());
                    return (parts, owed.count());
                }
            }
        }
    }

    const MIB: u64 = 256;

    /// Quiet pages may be free, and are kept for later as long as that is unknown.
    #[test]
    fn parts_go_in_order_until_free_page_hints_arrive() {
        let mut pass = FirstPass::new(USUAL);
        let (mut owed, mut found) = (PageSet::full(1 << 30), PageSet::new(1 << 30));
        found.set(0..40);
        assert!(pass.record_scan(&OwedPages::of(vec![owed.clone()]), &[found.clone()]));
        owed.remove(&found);
        pass.set_hints_pending(true);
        assert_eq!(pass.next_part(), Some(&[owed.clone()][..]));
        pass.set_hints_pending(false);
        assert!(pass.next_part().is_some_and(|part| part[0].count() < owed.count()));
    }

    /// 128 of 528 MiB are written over and over, wherever they are, at 150 MiB a second: next to none of these pages is
    /// sent before they are known to be hot. All others are sent, and once.
    #[test]
    fn hot_pages_come_last() {
        for first in [0, 100, 200, 300, 400].map(|mib| mib * MIB) {
            let guest = Guest::new(528 * MIB, first..first + 128 * MIB, 150 * MIB, 118 * MIB);
            let (hot, pages) = (guest.hot.clone(), guest.pages);
            let (parts, left) = guest.move_it();
            let of =
                |part: &PageSet| part.runs_within(hot.clone()).map(|run| run.end - run.start).sum::<u64>();
            let of_hot: u64 = parts.iter().map(of).sum();
            let all: u64 = parts.iter().map(PageSet::count).sum();
            assert_eq!((all - of_hot, left), (pages - 128 * MIB, 128 * MIB), "{first}");
            assert!(of_hot < 8 * MIB, "{first}: {of_hot}");
            assert!(parts.len() < 16, "{}", parts.len());
        }
    }

    /// If the place of the guest's writes reveals nothing, the pass is an ordinary one.
    #[test]
    fn uniform_or_idle_guest_has_a_pass_of_few_parts() {
        let pages = 2048 * MIB;
        for (hot, written_per_s) in [(0..pages, 1000 * MIB), (0..pages, 100 * MIB), (0..1, 0), (7..8, 1)] {
            let (parts, left) = Guest::new(pages, hot, written_per_s, 118 * MIB).move_it();
            let mut all = PageSet::new(pages * PAGE_BYTES);
            for part in &parts {
                assert_eq!(all.count_common(part), 0, "a page is in two parts");
                all.insert(part);
            }
            assert!(all.count() + left >= pages, "a page is lost");
            assert!((1..24).contains(&parts.len()), "{}", parts.len());
        }
    }

    #[test]
    fn what_was_cut_off_has_its_turn_again() {
        let all = PageSet::full(4 * MIB * PAGE_BYTES);
        let mut pass = FirstPass::new(USUAL);
        assert!(pass.next_part().is_none());
        let mut found = all.emptied();
        found.set(0..2 * MIB);
        assert!(pass.record_scan(&OwedPages::of(vec![all.clone()]), &[found.clone()]));
        // The half that is farther from where the guest writes.
        let part = pass.next_part().unwrap()[0].clone();
        assert_eq!((part.count(), part.contains(4 * MIB - 1)), (2 * MIB, true));
        let mut unsent = all.emptied();
        unsent.set(4 * MIB - 3..4 * MIB);
        pass.cut(&OwedPages::of(vec![unsent.clone()]));
        found.clear_all();
        assert!(pass.record_scan(&OwedPages::of(vec![all]), &[found]));
        assert_eq!(pass.next_part().unwrap(), [unsent]);
    }

    #[test]
    fn parts_grow_with_remaining_pages_and_link_delay() {
        let owed = |pages| {
            let mut block = PageSet::new(8000 * PAGE_BYTES);
            block.set(0..pages);
            OwedPages::of(vec![block])
        };
        let mut pass = FirstPass::new(USUAL);
        assert!(pass.record_scan(&owed(8000), &[]));
        let mut next = |left: u64, beside_ms: u64| {
            let planned = pass.part(Duration::ZERO);
            assert!(pass.next_part().is_some());
            pass.sent(&owed(left), 1000, planned, planned + Duration::from_millis(beside_ms));
            (planned.as_millis() as u64, pass.part(Duration::ZERO).as_millis() as u64)
        };
        // 1000 pages a part, whatever its duration: 6000 remaining pages need six times as long.
        assert_eq!(next(100, 0), (125, 250));
        assert_eq!(next(100, 0), (250, 500));
        assert_eq!(next(100, 0), (500, 1000));
        assert_eq!(next(100, 0), (1000, 1000));
        assert_eq!(next(6000, 0), (1000, 1500));
        assert_eq!(next(100, 800), (1500, 1600));
        assert_eq!(pass.part(Duration::from_secs(2)), Duration::from_secs(2));
    }
}
