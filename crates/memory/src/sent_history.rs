//! Recently sent pages: the share of a round that is sent again shows the guest's write pattern (Ibrahim et al.,
//! section VII, pattern c, and Algorithm 2, line 9).

use std::collections::VecDeque;

use crate::page_set::PageSet;

/// The pages of the last rounds. A set takes 32 KiB for each GiB.
#[derive(Clone, Debug)]
pub struct SentHistory {
    /// The oldest round first.
    rounds: VecDeque<Vec<PageSet>>,
    history: usize,
}

impl SentHistory {
    /// Creates a record of the last `history` rounds.
    pub fn new(history: usize) -> Self {
        Self { rounds: VecDeque::new(), history }
    }

    /// Records the pages that a round sends of each block. Returns how many of them were sent in the recorded rounds.
    pub fn count(&mut self, blocks: &[PageSet]) -> u64 {
        if self.history == 0 {
            return 0;
        }
        let before = self.rounds.iter().cloned().reduce(|mut all, round| {
            all.iter_mut().zip(&round).for_each(|(all, one)| all.insert(one));
            all
        });
        let resent = before
            .map_or(0, |before| blocks.iter().zip(&before).map(|(one, other)| one.count_common(other)).sum());
        self.rounds.push_back(blocks.to_vec());
        self.rounds.drain(..self.rounds.len().saturating_sub(self.history));
        resent
    }

    /// Forgets all rounds, because pages of a round that was cut off may not have been sent.
    pub fn forget(&mut self) {
        self.rounds.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_the_rounds_remembered_are_counted_once() {
        let pages = |range| {
            let mut block = PageSet::new(4 << 20);
            block.set(range);
            vec![PageSet::new(1 << 20), block]
        };
        let (mut one, mut two) = (SentHistory::new(1), SentHistory::new(2));
        let rounds = [0..100, 50..150, 0..150, 0..150].map(pages);
        assert_eq!(rounds.each_ref().map(|blocks| one.count(blocks)), [0, 50, 100, 150]);
        assert_eq!(rounds.each_ref().map(|blocks| two.count(blocks)), [0, 50, 150, 150]);
        two.forget();
        assert_eq!(two.count(&rounds[0]), 0);
        assert_eq!(SentHistory::new(0).count(&rounds[0]), 0);
    }
}
