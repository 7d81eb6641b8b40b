//! Discards before the stop: which pages for post-copy the destination discards while the guest still runs here.

use std::time::Duration;

use proto::Generation;

use crate::discards::{DiscardDecision, DiscardPolicy, PendingDiscard};
use crate::handover::source::SourceEvent;
use crate::trace::TracedPolicy;

/// Series of discards, each of the pages that the guest has written since the one before.
#[derive(Clone, Debug)]
pub struct PreStopDiscards {
    policy: TracedPolicy<DiscardPolicy>,
    /// Generation of the connections on which pages were announced; none before the first. Over new connections, the
    /// destination has forgotten them.
    generation: Option<Generation>,
    /// Duration of the last discard at the destination.
    took: Duration,
}

/// Consequence of a discard that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailedDiscard {
    /// The link is cut. This is mended like any other cut, before the next round.
    Cut {
        /// True if discards are tried again over new connections. A destination that needed too long would do so again.
        tries_again: bool,
    },
    /// The migration ends.
    End,
}

impl FailedDiscard {
    /// Returns the consequence of this failure.
    pub fn of(failure: &SourceEvent) -> Self {
        match failure {
            SourceEvent::PeerLost => Self::Cut { tries_again: true },
            SourceEvent::PeerSilent => Self::Cut { tries_again: false },
            _ => Self::End,
        }
    }
}

impl Default for PreStopDiscards {
    fn default() -> Self {
        Self { policy: TracedPolicy::new(DiscardPolicy::default()), generation: None, took: Duration::ZERO }
    }
}

impl PreStopDiscards {
    /// Returns the policy.
    pub fn policy(&self) -> &TracedPolicy<DiscardPolicy> {
        &self.policy
    }

    /// Begins a new series, independent of earlier ones.
    pub fn begin(&mut self) {
        self.policy.reset();
        self.took = Duration::ZERO;
    }

    /// Returns true if pages were announced over the connections of this generation.
    pub fn is_of(&self, generation: Generation) -> bool {
        self.generation == Some(generation)
    }

    /// Announces pages over the connections of this generation from now on. Returns true if these are new: all that was
    /// announced before is forgotten.
    pub fn renew(&mut self, generation: Generation) -> bool {
        self.generation.replace(generation) != Some(generation)
    }

    /// Returns true if the destination discards these pages now.
    pub fn discards(&mut self, pages: u64) -> bool {
        let took_ns = u64::try_from(self.took.as_nanos()).unwrap_or(u64::MAX);
        self.policy.decide_on(PendingDiscard { pages, took_ns }) == DiscardDecision::Discard
    }

    /// Records that the destination has discarded pages, which lasted `took` there.
    pub fn discarded(&mut self, took: Duration) {
        self.took = took;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_connections_forget_what_was_announced() {
        let mut series = PreStopDiscards::default();
        assert!(!series.is_of(Generation(0)) && !series.is_of(Generation(1)));
        assert!(series.renew(Generation(1)));
        assert!(!series.renew(Generation(1)));
        assert!(series.is_of(Generation(1)) && !series.is_of(Generation(2)));
        assert!(series.renew(Generation(2)));
        assert!(!series.is_of(Generation(1)));
    }

    #[test]
    fn a_series_ends_when_the_rest_takes_next_to_no_time() {
        let mut series = PreStopDiscards::default();
        series.begin();
        assert!(series.discards(100_000));
        series.discarded(Duration::from_secs(1));
        assert!(series.discards(10_000));
        series.discarded(Duration::ZERO);
        assert!(!series.discards(5_000));
        // The next series does not depend on this one.
        series.begin();
        assert!(series.discards(200_000));
        assert!(!series.discards(0));
    }

    #[test]
    fn only_a_link_that_was_cut_is_mended() {
        assert_eq!(FailedDiscard::of(&SourceEvent::PeerLost), FailedDiscard::Cut { tries_again: true });
        assert_eq!(FailedDiscard::of(&SourceEvent::PeerSilent), FailedDiscard::Cut { tries_again: false });
        for failure in [SourceEvent::Failed, SourceEvent::Cancel, SourceEvent::QemuDied] {
            assert_eq!(FailedDiscard::of(&failure), FailedDiscard::End);
        }
    }
}
