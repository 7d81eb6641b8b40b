//! Post-copy: how often pages are named to the destination before the guest is stopped.
//!
//! A page that was written since it was sent is at the destination as it was, and has to be taken away there before anybody
//! can wait for it. Where a guest writes here and there that takes longer than all the rest of the stop: some ten
//! microseconds for each of many thousand pages. So they are named while it runs, and again those that it has written to
//! meanwhile, until what is left for the stop is taken away in no time, or becomes no less.

use serde::{Deserialize, Serialize};

use crate::trace::{Blank, Decider};

/// Whether pages are named once more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Blank", into = "Blank")]
pub struct Naming {
    /// How many were named the last time.
    last_pages: Option<u64>,
}

/// What a look has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unnamed {
    /// Pages that are to come and that the destination does not know of.
    pub pages: u64,
    /// How long it took to take away those that were named last, in nanoseconds, without the way there and back.
    pub took_ns: u64,
}

/// What is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Next {
    /// They are named while the guest runs.
    Name,
    /// They are named when it stands still.
    Stop,
}

impl Decider for Naming {
    type Observed = Unnamed;
    type Decision = Next;

    const KEPT: usize = 1000;

    fn decide(&mut self, unnamed: &Unnamed) -> Next {
        let pages = unnamed.pages;
        let is_worth_it = self.last_pages.is_none_or(|last| {
            let expected_ns = u128::from(unnamed.took_ns) * u128::from(pages) / u128::from(last.max(1));
            expected_ns > u128::from(Self::LITTLE_NS) && pages <= last - last / 4
        });
        if pages == 0 || !is_worth_it {
            return Next::Stop;
        }
        self.last_pages = Some(pages);
        Next::Name
    }
}

impl Naming {
    /// What is taken away in that time is not worth another look, in nanoseconds.
    const LITTLE_NS: u64 = 1_000_000;
}

impl From<Blank> for Naming {
    fn from(_: Blank) -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many pages are left for the stop, and how often some were named, where a page takes 30 µs, and the guest writes
    /// to so many in a millisecond that are not known of, of no more than that altogether.
    fn left(first_pages: u64, new_per_ms: u64, most_pages: u64) -> (u64, u32) {
        let (mut naming, mut named, mut times) = (Naming::default(), 0, 0);
        let mut unnamed = Unnamed { pages: first_pages, took_ns: 0 };
        while naming.decide(&unnamed) == Next::Name {
            times += 1;
            named += unnamed.pages;
            let took_ns = unnamed.pages * 30_000;
            let pages = (took_ns * new_per_ms / 1_000_000).min(most_pages - named);
            unnamed = Unnamed { pages, took_ns };
        }
        (unnamed.pages, times)
    }

    #[test]
    fn pages_are_named_until_little_is_left_for_the_stop() {
        assert_eq!(left(0, 0, 0), (0, 0), "nothing to name");
        assert_eq!(left(9_000, 0, 9_000), (0, 1), "a guest that does not write any more");
        let (pages, times) = left(9_000, 4, 32_768);
        assert!(pages * 30_000 <= Naming::LITTLE_NS && times < 5, "{pages} after {times} times");
    }

    #[test]
    fn one_that_writes_faster_than_pages_are_taken_away_is_not_waited_for() {
        assert_eq!(left(9_000, 40, 1 << 30), (10_800, 1), "it becomes no less");
        assert_eq!(left(30_000, 40, 32_768), (0, 2), "but it writes to no more than that");
    }
}
