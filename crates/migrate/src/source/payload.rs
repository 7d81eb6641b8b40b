//! Content that the data streams send, and rounds as the policy learns of them.

use ::memory::{BlockReader, OwedPages, PageSet, ReductionStage, Reductions, RoundStats, SourceRam};
use engine::pre_copy::{
    AvailableStrategies, FixedCost, HybridPolicy, OnLimit, PatternPolicy, PreCopyGoals, SlaPolicy,
    TracedStopPolicy,
};
#[cfg(feature = "comparison")]
use engine::pre_copy::{RoundCountPolicy, TargetPolicy};
use engine::session::SentRound;

use super::Goals;
use api::report::Round;
use api::{self, StopPolicy, ThrottleWrites};

/// Content that the data streams send: the blocks of all participants.
pub(crate) struct Payload {
    readers: SourceRam,
    /// Lengths of the blocks that may be sent after the guest runs at the destination, in bytes. The others follow
    /// them.
    ram_bytes: Vec<u64>,
    /// Reductions of the data that is sent.
    reductions: Reductions,
}

impl Payload {
    /// Creates the payload; the first `post_copied` blocks may be sent after the guest runs at the destination.
    pub(crate) fn new(readers: Vec<Box<dyn BlockReader>>, post_copied: usize) -> Self {
        let ram_bytes = readers.iter().take(post_copied).map(|reader| reader.bytes()).collect();
        Self { readers: readers.into(), ram_bytes, reductions: Reductions::default() }
    }

    pub(crate) fn readers(&self) -> SourceRam {
        SourceRam::clone(&self.readers)
    }

    /// Reduces the data that is sent from here on. The caller calls this before memory is prepared, because the log of
    /// memory has to report which of its pages are written.
    pub(crate) fn set_reductions(&mut self, reductions: Reductions) {
        self.reductions = reductions;
    }

    /// Ends the reductions that have to end at this stage.
    pub(crate) fn end_reductions(&self, stage: ReductionStage) {
        self.reductions.end(stage);
    }

    /// Informs the reductions that the destination discards these pages of memory.
    pub(crate) fn forget_versions(&self, pages: &[::memory::PageSet]) {
        self.reductions.discarded(pages);
    }

    /// Informs the reductions that these pages wait for a later round.
    pub(crate) fn keep_versions(&self, later: &OwedPages) {
        self.reductions.awaited(later.blocks(), later.round() + 1);
    }

    /// Returns how many of these pages will certainly be sent in full.
    pub(crate) fn full_pages(&self, owed: &OwedPages) -> u64 {
        self.reductions.full_pages(owed.blocks())
    }

    pub(crate) fn reductions(&self) -> Reductions {
        self.reductions.clone()
    }

    /// Returns the lengths of the RAM blocks, in bytes.
    pub(crate) fn ram_bytes(&self) -> &[u64] {
        &self.ram_bytes
    }

    pub(crate) fn ram_blocks(&self) -> usize {
        self.ram_bytes.len()
    }

    /// Returns how many pages are owed that have to be sent before the guest runs at the destination.
    pub(crate) fn must_precopy_pages(&self, owed: &OwedPages) -> u64 {
        owed.blocks().iter().skip(self.ram_bytes.len()).map(PageSet::count).sum()
    }
}

/// Returns the policy that decides when to stop the guest, for the actions (slowing down, post-copy) that are possible
/// with it.
pub(crate) fn policy(goals: &Goals, ways: AvailableStrategies, fixed: FixedCost) -> TracedStopPolicy {
    let (goal, on_limit) = (pre_copy_goals(goals), on_limit(goals));
    match goals.settings.policy {
        StopPolicy::Pattern => {
            let policy = PatternPolicy::new(goal, on_limit, fixed).sampling(goals.sampling);
            // With throttled writes, a guest may write less the longer the migration lasts.
            let is_throttled = goals.settings.throttle_writes != ThrottleWrites::Off;
            TracedStopPolicy::new(if is_throttled { policy.with_write_throttle() } else { policy })
        }
        StopPolicy::Hybrid => {
            TracedStopPolicy::new(HybridPolicy::new(goal, goals.settings.hybrid_passes, fixed))
        }
        StopPolicy::Sla => {
            TracedStopPolicy::new(SlaPolicy::new(goal, ways, on_limit, fixed).sampling(goals.sampling))
        }
        #[cfg(feature = "comparison")]
        StopPolicy::Target => TracedStopPolicy::new(TargetPolicy::new(goal, on_limit)),
        #[cfg(feature = "comparison")]
        StopPolicy::Rounds => TracedStopPolicy::new(RoundCountPolicy::default()),
    }
}

/// Returns the action at a limit.
pub(crate) fn on_limit(goals: &Goals) -> OnLimit {
    match goals.settings.on_limit {
        api::OnLimit::Stop => OnLimit::Stop,
        api::OnLimit::PostCopy => OnLimit::PostCopy,
        api::OnLimit::Abort => OnLimit::Abort,
    }
}

/// Returns the policy's present goals.
pub(crate) fn pre_copy_goals(goals: &Goals) -> PreCopyGoals {
    let ns = |ms: u64| ms.saturating_mul(1_000_000);
    PreCopyGoals {
        max_downtime_ns: ns(goals.settings.max_downtime_ms),
        max_passes: goals.settings.max_passes,
        max_total_ns: goals.max_total_ms().map(ns),
    }
}

/// Returns what a policy learns of a round from its statistics alone.
pub(crate) fn sent_round(stats: &RoundStats) -> SentRound {
    SentRound {
        pages_sent: stats.contents.pages(),
        empty_pages: stats.contents.empty(),
        reduced_pages: stats.contents.delta + stats.contents.reference + stats.contents.hinted,
        bytes_sent: stats.wire_bytes,
        duration_ns: stats.duration_us.saturating_mul(1000),
        ..SentRound::default()
    }
}

/// Converts a round's statistics for the report; fields that the sender does not know stay empty.
pub(crate) fn round_report(stats: &RoundStats) -> Round {
    let rate = stats.wire_bytes.saturating_mul(1_000_000).checked_div(stats.duration_us).unwrap_or(0);
    Round {
        round: stats.round,
        data_pages: stats.contents.data,
        zero_pages: stats.contents.zero,
        hole_pages: stats.contents.hole,
        filled_pages: stats.contents.filled,
        hinted_pages: stats.contents.hinted,
        reference_pages: stats.contents.reference,
        delta_pages: stats.contents.delta,
        refused_pages: stats.refused_pages,
        sent_bytes: stats.wire_bytes,
        duration_us: stats.duration_us,
        rate_bytes_per_s: rate,
        ..Round::default()
    }
}
