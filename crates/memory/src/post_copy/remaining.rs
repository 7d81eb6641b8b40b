//! The source's remaining pages, and their order.
//!
//! A thread that goes through memory sequentially will request the pages behind its last request, and pages that the
//! guest wrote last are needed again soon. So pages behind a requested page are sent first, the more the more often
//! that prediction was right, as in readahead of a file; then the pages that the guest wrote last, scan by scan; then
//! the rest.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;

use proto::message::PageRequest;

use crate::lock;
use crate::page_set::PageSet;
use crate::round::{OwedPages, ReadablePages};

/// Pages that the guest wrote recently, which determine the order of sending.
#[derive(Clone, Debug, Default)]
pub struct RecentWrites {
    /// Pages found by each scan, the latest first.
    scans: VecDeque<Vec<PageSet>>,
}

impl RecentWrites {
    /// Number of scans that are remembered. A set takes 32 KiB for each GiB.
    const SCANS: usize = 4;

    /// Records the pages of each block that a scan has found written.
    pub fn note(&mut self, found: Vec<PageSet>) {
        self.scans.truncate(Self::SCANS - 1);
        self.scans.push_front(found);
    }
}

/// Pages that remain to be sent to a guest that runs at the destination already. Several senders take from it at a
/// time.
#[derive(Debug)]
pub struct RemainingPages(Mutex<RemainingState>);

#[derive(Debug)]
struct RemainingState {
    /// Pages of each block, in order of priority. A page is in one tier only.
    tiers: Vec<Vec<PageSet>>,
    /// The last round that was taken.
    round: u32,
    /// Start of the next part: a block and a page of that block.
    place: (usize, u64),
    /// Predicted pages behind requested ones, the last request first.
    ahead: VecDeque<Prefetch>,
}

/// Pages behind a requested page.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Prefetch {
    block: usize,
    pages: Range<u64>,
}

impl Prefetch {
    /// Number of pages behind the first request: 256 KiB.
    const FIRST_PAGES: u64 = 64;
    /// Maximum number of pages: 32 MiB.
    const MOST_PAGES: u64 = 1 << 13;
    /// Maximum number of sequential readers tracked at a time.
    const MOST: usize = 8;

    fn length(&self) -> u64 {
        self.pages.end - self.pages.start
    }

    /// Returns true if the prediction was right: the next requested page is one of these or lies not far behind them.
    fn foretold(&self, block: usize, page: u64) -> bool {
        self.block == block
            && (self.pages.start..self.pages.end.saturating_add(self.length())).contains(&page)
    }
}

impl RemainingPages {
    /// Creates the set from the missing pages of each block, as the destination reported them after `round` rounds.
    pub fn of(pages: Vec<PageSet>, round: u32, recency: &RecentWrites) -> Self {
        let mut rest = pages;
        let mut tiers: Vec<Vec<PageSet>> = Vec::new();
        for scan in &recency.scans {
            let mut tier: Vec<_> = rest.iter().map(PageSet::emptied).collect();
            for ((tier, rest), found) in tier.iter_mut().zip(&mut rest).zip(scan) {
                tier.insert(found);
                tier.retain(rest);
                rest.remove(tier);
            }
            tiers.push(tier);
        }
        tiers.push(rest);
        Self(Mutex::new(RemainingState { tiers, round, place: (0, 0), ahead: VecDeque::new() }))
    }

    /// Takes up to `most_pages` pages, in order of priority, as a round of its own; None if no page remains.
    pub fn take(&self, most_pages: u64) -> Option<ReadablePages> {
        let mut left = lock(&self.0);
        let left = &mut *left;
        let mut part = Part { pages: left.none(), wanted: most_pages };
        for Prefetch { block, pages } in &left.ahead {
            part.take(&mut left.tiers, *block, pages.clone(), &mut left.place);
        }
        for tier in left.tiers.chunks_mut(1) {
            let (first, page) = left.place;
            let whole = |block| (block, 0..u64::MAX);
            let behind = (first + 1..tier[0].len()).map(whole);
            let around = (0..first).map(whole).chain([(first, 0..page)]);
            for (block, pages) in [(first, page..u64::MAX)].into_iter().chain(behind).chain(around) {
                part.take(tier, block, pages, &mut left.place);
            }
        }
        if part.wanted == most_pages {
            return None;
        }
        let readable = ReadablePages { owed: OwedPages { blocks: part.pages, round: left.round } };
        left.round += 1;
        Some(readable)
    }

    /// Removes pages that are sent on request; those behind them are next.
    pub fn remove_requested(&self, asked: &[PageRequest]) {
        let mut left = lock(&self.0);
        for &PageRequest { block, page } in asked {
            let block = usize::from(block);
            let Some(pages) = left.tiers.first().and_then(|tier| tier.get(block)).map(PageSet::pages) else {
                continue;
            };
            left.tiers.iter_mut().for_each(|tier| tier[block].clear(page..page + 1));
            left.place = (block, page + 1);
            let foretold = left.ahead.iter().position(|ahead| ahead.foretold(block, page));
            let length = match foretold.and_then(|index| left.ahead.remove(index)) {
                Some(ahead) => (ahead.length() * 2).min(Prefetch::MOST_PAGES),
                None => Prefetch::FIRST_PAGES,
            };
            left.ahead.truncate(Prefetch::MOST - 1);
            let behind = page + 1..(page + 1 + length).min(pages.max(page + 1));
            left.ahead.push_front(Prefetch { block, pages: behind });
        }
    }

    /// Returns pages that were taken and did not arrive.
    pub fn give_back(&self, owed: &OwedPages) {
        if let Some(tier) = lock(&self.0).tiers.last_mut() {
            tier.iter_mut().zip(&owed.blocks).for_each(|(tier, owed)| tier.insert(owed));
        }
    }

    /// Returns the number of remaining pages, without those in flight.
    pub fn pages(&self) -> u64 {
        lock(&self.0).tiers.iter().flatten().map(PageSet::count).sum()
    }
}

impl RemainingState {
    fn none(&self) -> Vec<PageSet> {
        self.tiers.first().into_iter().flatten().map(PageSet::emptied).collect()
    }
}

/// Pages that are being taken.
struct Part {
    pages: Vec<PageSet>,
    /// Number of pages still wanted.
    wanted: u64,
}

impl Part {
    /// Takes the given pages of a block that remain in any of the tiers, in ascending order. Moves the place behind
    /// them.
    fn take(
        &mut self,
        tiers: &mut [Vec<PageSet>],
        block: usize,
        pages: Range<u64>,
        place: &mut (usize, u64),
    ) {
        if self.wanted == 0 {
            return;
        }
        // More runs than wanted pages are never needed.
        let most_runs = usize::try_from(self.wanted).unwrap_or(usize::MAX);
        let of_block = tiers.iter().filter_map(|tier| tier.get(block));
        let mut runs: Vec<_> = of_block
            .flat_map(|left| {
                let range = pages.start.min(left.pages())..pages.end.min(left.pages());
                left.runs_within(range).take(most_runs)
            })
            .collect();
        runs.sort_unstable_by_key(|run| run.start);
        for run in runs {
            let taken = run.start..run.end.min(run.start + self.wanted);
            self.wanted -= taken.end - taken.start;
            for tier in tiers.iter_mut() {
                tier[block].clear(taken.clone());
            }
            *place = (block, taken.end);
            self.pages[block].set(taken);
            if self.wanted == 0 {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::limits::PAGE_BYTES;

    use super::*;

    fn set(pages: u64, these: &[u64]) -> PageSet {
        let mut set = PageSet::new(pages * PAGE_BYTES);
        for page in these {
            set.set(*page..page + 1);
        }
        set
    }

    fn pages(readable: Option<ReadablePages>) -> Vec<(usize, u64)> {
        let owed = readable.map_or_else(|| OwedPages::of(Vec::new()), ReadablePages::give_up);
        let of = |(number, block): (usize, &PageSet)| {
            block.runs().flatten().map(move |page| (number, page)).collect::<Vec<_>>()
        };
        owed.blocks().iter().enumerate().flat_map(of).collect()
    }

    fn wanted(block: u16, page: u64) -> PageRequest {
        PageRequest { block, page }
    }

    #[test]
    fn requested_pages_come_first_and_those_behind_next() {
        let left = vec![set(100, &[1, 2, 3]), set(1000, &[10, 20, 30, 40])];
        let remaining = RemainingPages::of(left, 0, &RecentWrites::default());
        assert_eq!(pages(remaining.take(2)), [(0, 1), (0, 2)]);
        remaining.remove_requested(&[wanted(1, 20), wanted(0, 1), wanted(1, 21)]);
        assert_eq!(remaining.pages(), 4);
        assert_eq!(pages(remaining.take(1)), [(1, 30)]);
        remaining.remove_requested(&[wanted(7, 0), wanted(1, 5000)]);
        assert_eq!(remaining.pages(), 3);
        // A cut: pages in flight remain again.
        remaining.give_back(&OwedPages::of(vec![set(100, &[1]), set(1000, &[20, 30])]));
        remaining.remove_requested(&[wanted(1, 35)]);
        assert_eq!(pages(remaining.take(4)), [(0, 3), (1, 10), (1, 20), (1, 40)]);
        assert_eq!(pages(remaining.take(9)), [(0, 1), (1, 30)]);
        assert_eq!((pages(remaining.take(9)), remaining.pages()), (Vec::new(), 0));
        remaining.give_back(&OwedPages::of(vec![set(100, &[]), set(1000, &[20])]));
        assert_eq!(pages(remaining.take(9)), [(1, 20)]);
    }

    #[test]
    fn what_was_written_last_comes_before_the_rest() {
        let all: Vec<u64> = (0..200).collect();
        let mut recency = RecentWrites::default();
        for found in [&[7, 8, 9][..], &[50, 51], &[8, 90], &[91]] {
            recency.note(vec![set(200, found)]);
        }
        let remaining = RemainingPages::of(vec![set(200, &all)], 3, &recency);
        let taken = [1, 2, 2, 3]
            .map(|most| pages(remaining.take(most)).into_iter().map(|page| page.1).collect::<Vec<_>>());
        assert_eq!(taken, [vec![91], vec![8, 90], vec![50, 51], vec![7, 9, 10]]);
        // Requested pages precede these, and so do the pages behind them, of any age.
        let remaining = RemainingPages::of(vec![set(200, &all)], 3, &recency);
        remaining.remove_requested(&[wanted(0, 48)]);
        assert_eq!(pages(remaining.take(4)), [49, 50, 51, 52].map(|page| (0, page)));
        // Scans cover memory only, and disks follow it.
        let remaining = RemainingPages::of(vec![set(200, &all), set(9, &[1])], 3, &recency);
        assert_eq!((remaining.pages(), pages(remaining.take(1))), (201, vec![(0, 91)]));
    }

    /// Sequential access makes ever more pages arrive before their request, with several readers at once as well;
    /// random access causes little prediction.
    #[test]
    fn the_more_often_it_was_right_the_more_goes_ahead() {
        let mut recency = RecentWrites::default();
        recency.note(vec![PageSet::full(PAGE_BYTES << 16)]);
        let ahead = |asked: &[u64]| {
            let remaining = RemainingPages::of(vec![PageSet::full(PAGE_BYTES << 16)], 1, &recency);
            for page in asked {
                remaining.remove_requested(&[wanted(0, *page)]);
            }
            lock(&remaining.0).ahead.iter().map(Prefetch::length).collect::<Vec<_>>()
        };
        assert_eq!(ahead(&[0, 65, 194, 451]), [512]);
        assert_eq!(ahead(&[0, 30_000, 65, 30_065]), [128, 128]);
        assert_eq!(ahead(&[0, 1000, 2000, 500]), [64; 4]);
        assert_eq!(ahead(&(0..60_000).step_by(64).collect::<Vec<_>>()), [(1 << 16) - 59_969]);
        assert_eq!(ahead(&(0..60_000).step_by(1000).collect::<Vec<_>>()).len(), Prefetch::MOST);
    }

    proptest! {
        /// Each page is sent once, for any sequence of scans, requests and returned pages.
        #[test]
        fn every_page_goes_once(
            left in proptest::collection::vec(0_u64..3000, 0..400),
            scans in proptest::collection::vec(proptest::collection::vec(0_u64..3000, 0..100), 0..6),
            steps in proptest::collection::vec((1_u64..200, proptest::option::of(0_u64..3000)), 0..40),
        ) {
            let mut recency = RecentWrites::default();
            for scan in scans {
                recency.note(vec![set(10, &[]), set(3000, &scan)]);
            }
            let all = set(3000, &left);
            let remaining = RemainingPages::of(vec![set(10, &[]), all.clone()], 1, &recency);
            let mut gone = all.emptied();
            let rest = std::iter::repeat_n((4096, None), 2);
            for (most, asked) in steps.into_iter().chain(rest) {
                if let Some(page) = asked {
                    remaining.remove_requested(&[wanted(1, page)]);
                    gone.set(page..page + 1);
                }
                let taken = pages(remaining.take(most));
                prop_assert!(taken.len() as u64 <= most);
                for (block, page) in taken {
                    prop_assert!(block == 1 && all.contains(page) && !gone.contains(page));
                    gone.set(page..page + 1);
                }
            }
            prop_assert_eq!(remaining.pages(), 0);
            let mut both = all.clone();
            both.remove(&gone);
            prop_assert!(both.is_empty());
        }
    }
}
