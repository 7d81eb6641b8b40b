//! Post-copy: the number of discards before the guest is stopped.
//!
//! The destination has an outdated version of a page that was written since it was sent, and has to discard it before
//! a thread can wait for the page. Where a guest writes to scattered pages, discarding takes longer than all the rest
//! of the stop: some ten microseconds for each of many thousand pages.
//!
//! So the source lists these pages while the guest runs, and lists again those that the guest has written in the
//! meantime, until the discard of the remaining pages takes next to no time, or their number does not fall.

use serde::{Deserialize, Serialize};

use crate::trace::{Decider, NoParameters};

/// Policy that decides whether pages are discarded once more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "NoParameters", into = "NoParameters")]
pub struct DiscardPolicy {
    /// Number of pages in the last discard.
    last_pages: Option<u64>,
}

/// Result of a dirty scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingDiscard {
    /// Missing pages whose discard the source has not requested yet.
    pub pages: u64,
    /// Duration of the last discard at the destination, in nanoseconds, without the round trip.
    pub took_ns: u64,
}

/// Decision after a dirty scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiscardDecision {
    /// These pages are discarded while the guest runs.
    Discard,
    /// The guest is stopped, and these pages are discarded then.
    Stop,
}

impl Decider for DiscardPolicy {
    type Observed = PendingDiscard;
    type Decision = DiscardDecision;

    const MAX_ENTRIES: usize = 1000;

    fn decide(&mut self, pending: &PendingDiscard) -> DiscardDecision {
        let pages = pending.pages;
        let is_worth_it = self.last_pages.is_none_or(|last| {
            let expected_ns = u128::from(pending.took_ns) * u128::from(pages) / u128::from(last.max(1));
            expected_ns > u128::from(Self::SHORT_DISCARD_NS) && pages <= last - last / 4
        });
        if pages == 0 || !is_worth_it {
            return DiscardDecision::Stop;
        }
        self.last_pages = Some(pages);
        DiscardDecision::Discard
    }
}

impl DiscardPolicy {
    /// A discard that takes no longer than this, in nanoseconds, is not worth another scan.
    const SHORT_DISCARD_NS: u64 = 1_000_000;
}

impl From<NoParameters> for DiscardPolicy {
    fn from(_: NoParameters) -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of pages that remain for the stop, and the number of discards, where a page takes 30 µs, and
    /// the guest writes `new_per_ms` new pages in a millisecond, until it has written `most_pages` in all.
    fn left(first_pages: u64, new_per_ms: u64, most_pages: u64) -> (u64, u32) {
        let (mut policy, mut named, mut times) = (DiscardPolicy::default(), 0, 0);
        let mut pending = PendingDiscard { pages: first_pages, took_ns: 0 };
        while policy.decide(&pending) == DiscardDecision::Discard {
            times += 1;
            named += pending.pages;
            let took_ns = pending.pages * 30_000;
            let pages = (took_ns * new_per_ms / 1_000_000).min(most_pages - named);
            pending = PendingDiscard { pages, took_ns };
        }
        (pending.pages, times)
    }

    #[test]
    fn pages_are_named_until_little_is_left_for_the_stop() {
        assert_eq!(left(0, 0, 0), (0, 0), "nothing to name");
        assert_eq!(left(9_000, 0, 9_000), (0, 1), "a guest that does not write any more");
        let (pages, times) = left(9_000, 4, 32_768);
        assert!(
            pages * 30_000 <= DiscardPolicy::SHORT_DISCARD_NS && times < 5,
            "{pages} after {times} times"
        );
    }

    #[test]
    fn a_guest_that_writes_faster_than_discards_is_not_awaited() {
        assert_eq!(left(9_000, 40, 1 << 30), (10_800, 1), "it becomes no less");
        assert_eq!(left(30_000, 40, 32_768), (0, 2), "but it writes to no more than that");
    }
}
