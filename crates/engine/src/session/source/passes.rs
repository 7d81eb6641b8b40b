//! Passes over the dirty pages, each of one round or of several: the pages that the next round sends.

use std::mem;

/// Pages of a dirty scan that a round sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageSelection {
    /// A part of the first pass: as many pages as time allows, of those that the guest has not written since the
    /// beginning.
    FirstPass,
    /// All pages that have to be sent before the guest runs at the destination, and none of the others.
    MustPreCopy,
    /// A part of the pages, from the end of the last such part on.
    Part {
        /// Maximum number of pages.
        pages: u64,
    },
    /// All pages.
    All,
}

/// Limits of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct RoundLimits {
    /// Maximum number of pages; none if unlimited.
    pub(super) most_pages: Option<u64>,
    /// True if the round sends only pages that have to be sent before the guest runs at the destination.
    pub(super) must_precopy_only: bool,
}

/// Completed passes, and the limits of the next round.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Passes {
    completed: u32,
    limits: RoundLimits,
    /// Pages of the present round.
    selection: PageSelection,
}

impl Passes {
    /// Continues after some passes, without limits.
    pub(super) fn after(completed: u32) -> Self {
        Self { completed, limits: RoundLimits::default(), selection: PageSelection::All }
    }

    /// Returns the number of completed passes.
    pub(super) fn completed(&self) -> u32 {
        self.completed
    }

    /// Returns the limits of the next round.
    pub(super) fn limits(&self) -> RoundLimits {
        self.limits
    }

    /// Sets the limits of the next round. The maximum number of pages holds for all rounds until it is set again.
    pub(super) fn limit(&mut self, limits: RoundLimits) {
        self.limits = limits;
    }

    /// Ends the first pass, because the guest has written all pages that were not sent yet.
    pub(super) fn end_first(&mut self) {
        self.completed = self.completed.max(1);
    }

    /// Selects the pages of the next round, of `dirty_pages`. A round is longer than usual by `interval_factor`.
    pub(super) fn select(&mut self, dirty_pages: u64, interval_factor: u32) -> PageSelection {
        self.selection = if self.completed == 0 {
            PageSelection::FirstPass
        } else if mem::take(&mut self.limits.must_precopy_only) {
            PageSelection::MustPreCopy
        } else {
            let most_pages = self.limits.most_pages.map(|most| most.saturating_mul(interval_factor.into()));
            match most_pages.filter(|most| *most < dirty_pages) {
                Some(pages) => PageSelection::Part { pages },
                None => PageSelection::All,
            }
        };
        self.selection
    }

    /// Records that the round was sent. `has_reached_end` is true if a part has reached the end of all pages.
    pub(super) fn sent(&mut self, has_reached_end: bool) {
        let ends_pass = match self.selection {
            PageSelection::All => true,
            PageSelection::MustPreCopy => false,
            PageSelection::FirstPass | PageSelection::Part { .. } => has_reached_end,
        };
        self.completed += u32::from(ends_pass);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRTY: u64 = 1000;

    fn limited(completed: u32, most_pages: Option<u64>, must_precopy_only: bool) -> Passes {
        let mut passes = Passes::after(completed);
        passes.limit(RoundLimits { most_pages, must_precopy_only });
        passes
    }

    #[test]
    fn first_pass_precedes_all_limits() {
        let mut passes = limited(0, Some(10), true);
        assert_eq!(passes.select(DIRTY, 1), PageSelection::FirstPass);
        passes.sent(false);
        assert_eq!(passes.select(DIRTY, 1), PageSelection::FirstPass);
        passes.sent(true);
        assert_eq!(passes.completed(), 1);
        // The limits of a round that was not reached yet still hold.
        assert_eq!(passes.select(DIRTY, 1), PageSelection::MustPreCopy);
    }

    #[test]
    fn a_scan_can_end_the_first_pass_and_no_other() {
        let (mut first, mut third) = (Passes::after(0), Passes::after(3));
        first.end_first();
        third.end_first();
        assert_eq!((first.completed(), third.completed()), (1, 3));
    }

    #[test]
    fn rounds_of_disks_alone_are_no_pass_and_hold_once() {
        let mut passes = limited(1, Some(10), true);
        assert_eq!(passes.select(DIRTY, 1), PageSelection::MustPreCopy);
        passes.sent(true);
        assert_eq!(passes.completed(), 1);
        assert_eq!(passes.select(DIRTY, 1), PageSelection::Part { pages: 10 });
        // The maximum holds until it is set again, even if a round was cut off.
        assert_eq!(passes.select(DIRTY, 1), PageSelection::Part { pages: 10 });
    }

    #[test]
    fn a_pass_ends_with_its_last_part_or_with_a_round_of_all() {
        let mut passes = limited(1, Some(DIRTY / 2), false);
        for (has_reached_end, completed) in [(false, 1), (true, 2), (false, 2)] {
            assert_eq!(passes.select(DIRTY, 1), PageSelection::Part { pages: DIRTY / 2 });
            passes.sent(has_reached_end);
            assert_eq!(passes.completed(), completed);
        }
        assert_eq!(passes.select(DIRTY / 2, 1), PageSelection::All);
        passes.sent(false);
        assert_eq!(passes.completed(), 3);
    }

    #[test]
    fn longer_intervals_make_longer_parts() {
        let mut passes = limited(1, Some(100), false);
        assert_eq!(passes.select(DIRTY, 4), PageSelection::Part { pages: 400 });
        assert_eq!(passes.select(DIRTY, 10), PageSelection::All);
        passes.limit(RoundLimits { most_pages: Some(u64::MAX), must_precopy_only: false });
        assert_eq!(passes.select(DIRTY, 4), PageSelection::All);
        passes.limit(RoundLimits::default());
        assert_eq!(passes.select(DIRTY, 1), PageSelection::All);
    }
}
