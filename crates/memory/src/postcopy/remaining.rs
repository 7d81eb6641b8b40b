//! What the source has left to send.

use std::sync::Mutex;

use proto::limits::PAGE_BYTES;
use proto::message::WantedPage;

use crate::dirty::DirtyBitmap;
use crate::lock;
use crate::round::{Cut, Owed, Place, Readable};

/// What is left to be sent to a guest that runs elsewhere already. Taken from by several senders at a time.
#[derive(Debug)]
pub struct Remaining(Mutex<Left>);

#[derive(Debug)]
struct Left {
    /// None where nothing is left.
    pages: Option<Readable>,
    /// The last round that was taken.
    round: u32,
    place: Place,
}

impl Remaining {
    /// All of these. The guest stands still for good.
    pub fn new(pages: Readable) -> Self {
        let round = pages.owed.round;
        Self(Mutex::new(Left { pages: Some(pages), round, place: Place::default() }))
    }

    /// These pages of each block, as the other side says that has seen so many rounds.
    pub fn of(pages: Vec<DirtyBitmap>, round: u32) -> Self {
        Self::new(Readable { owed: Owed { blocks: pages, round } })
    }

    /// So many of them, from where somebody waited last on, as a round of its own; none if nothing is left.
    pub fn take(&self, most_pages: u64) -> Option<Readable> {
        let mut left = lock(&self.0);
        let pages = left.pages.take().filter(|pages| pages.pages() > 0)?;
        let part = pages.part_around(left.place, most_pages, Cut::Anywhere);
        left.place = part.next;
        left.pages = Some(Readable { owed: part.later });
        let mut readable = part.readable;
        readable.owed.round = left.round;
        left.round += 1;
        Some(readable)
    }

    /// Those of these pages that are left; the next ones will be those behind them. None if all of them are on their way
    /// or there.
    pub fn take_these(&self, wanted: &[WantedPage]) -> Option<Readable> {
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
    use super::*;

    fn set(pages: u64, these: &[u64]) -> DirtyBitmap {
        let mut set = DirtyBitmap::new(pages * PAGE_BYTES);
        for page in these {
            set.set(*page..page + 1);
        }
        set
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
        let wanted = [
            WantedPage { block: 1, page: 20 },
            WantedPage { block: 0, page: 1 },
            WantedPage { block: 1, page: 21 },
        ];
        assert_eq!(pages(remaining.take_these(&wanted)), [(1, 20)]);
        assert_eq!(pages(remaining.take_these(&wanted)), []);
        assert_eq!(pages(remaining.take(1)), [(1, 30)]);
        assert_eq!(pages(remaining.take_these(&[WantedPage { block: 7, page: 0 }])), []);
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
