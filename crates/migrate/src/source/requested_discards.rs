//! Pages that the destination discards before the stop, so that post-copy can send them.

use std::time::Duration;

use ::memory::PageSet;
use engine::discards::DiscardPolicy;
use engine::session::PreStopDiscards;
use engine::trace::TracedPolicy;
use proto::Generation;

/// Pages that the destination was asked to discard while the guest ran at the source.
#[derive(Debug)]
pub(super) struct RequestedDiscards {
    series: PreStopDiscards,
    pages: Vec<PageSet>,
    /// Pages among them that no round can have sent again since.
    not_resent: Vec<PageSet>,
}

impl RequestedDiscards {
    pub(super) fn new() -> Self {
        Self { series: PreStopDiscards::default(), pages: Vec::new(), not_resent: Vec::new() }
    }

    /// Returns true if no pages of this generation are discarded.
    pub(super) fn has_none_over(&self, generation: Generation) -> bool {
        !self.series.is_of(generation) || self.not_resent.iter().all(PageSet::is_empty)
    }

    /// Records that a round sends memory: discarded pages may be present again, and have to be discarded again.
    pub(super) fn mark_resent(&mut self) {
        self.not_resent.iter_mut().for_each(PageSet::clear_all);
    }

    /// Returns the policy that decides whether pages are discarded before the stop.
    pub(super) fn policy(&self) -> &TracedPolicy<DiscardPolicy> {
        self.series.policy()
    }

    /// Begins a new series of discards, independent of earlier ones.
    pub(super) fn begin(&mut self) {
        self.series.begin();
    }

    /// Returns the pages of `owed` that the destination has not discarded, if they are to be announced now.
    pub(super) fn next(&mut self, owed: &[PageSet], generation: Generation) -> Option<Vec<PageSet>> {
        if self.series.renew(generation) {
            self.pages = owed.iter().map(PageSet::emptied).collect();
            self.not_resent = self.pages.clone();
        }
        let mut unnamed = owed.to_vec();
        unnamed.iter_mut().zip(&self.not_resent).for_each(|(unnamed, not_resent)| unnamed.remove(not_resent));
        let pages = unnamed.iter().map(PageSet::count).sum();
        self.series.discards(pages).then_some(unnamed)
    }

    /// Records pages that the destination has discarded, which lasted `took` there.
    pub(super) fn add(&mut self, pages: &[PageSet], took: Duration) {
        for known in [&mut self.pages, &mut self.not_resent] {
            known.iter_mut().zip(pages).for_each(|(known, pages)| known.insert(pages));
        }
        self.series.discarded(took);
    }

    /// Returns the pages for post-copy: `remaining`, and all pages that the destination was asked to discard. Rounds in
    /// between may have sent some of those again; they have not changed at the source, so to send them once more does
    /// no harm.
    pub(super) fn with(&self, remaining: &[PageSet], generation: Generation) -> Vec<PageSet> {
        let mut all = remaining.to_vec();
        if self.series.is_of(generation) {
            all.iter_mut().zip(&self.pages).for_each(|(all, discarded)| all.insert(discarded));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pages: &[u64]) -> Vec<PageSet> {
        let mut set = PageSet::new(1 << 20);
        for page in pages {
            set.set(*page..page + 1);
        }
        vec![set]
    }

    #[test]
    fn only_what_the_destination_does_not_know_of_is_named() {
        let (first, second) = (Generation(1), Generation(2));
        let mut discarded = RequestedDiscards::new();
        discarded.begin();
        let all = discarded.next(&set(&[1, 2, 3, 4]), first);
        assert_eq!(all, Some(set(&[1, 2, 3, 4])));
        discarded.add(&set(&[1, 2, 3, 4]), Duration::from_millis(10));
        assert_eq!(discarded.next(&set(&[1, 2, 3, 4, 5]), first), Some(set(&[5])));
        discarded.add(&set(&[5]), Duration::from_millis(2));
        assert_eq!(discarded.next(&set(&[1, 2, 3, 4, 5]), first), None, "nothing is new");
        discarded.begin();
        assert_eq!(
            discarded.next(&set(&[1, 2, 3, 4, 5, 9]), first),
            Some(set(&[9])),
            "the destination keeps what it has discarded"
        );
        assert_eq!(
            discarded.with(&set(&[2, 9]), first),
            set(&[1, 2, 3, 4, 5, 9]),
            "all that was discarded is sent"
        );
        assert_eq!((discarded.has_none_over(first), discarded.has_none_over(second)), (false, true));
        discarded.mark_resent();
        assert!(discarded.has_none_over(first));
        discarded.begin();
        assert_eq!(
            discarded.next(&set(&[2, 9]), first),
            Some(set(&[2, 9])),
            "a round may have sent it again"
        );
        assert_eq!(
            discarded.with(&set(&[2, 9]), first),
            set(&[1, 2, 3, 4, 5, 9]),
            "all that was ever discarded is sent"
        );
        discarded.begin();
        assert_eq!(
            discarded.next(&set(&[1, 9]), second),
            Some(set(&[1, 9])),
            "other connections know nothing"
        );
        assert_eq!(discarded.with(&set(&[1, 9]), second), set(&[1, 9]));
    }
}
