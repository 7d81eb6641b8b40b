//! Content that the data streams send, and the observations of rounds for the policy.

use std::time::{Duration, Instant};

use ::memory::{
    BlockReader, OwedPages, PageSet, ReductionStage, Reductions, RoundStats, ScanStats, SourceRam,
};
use engine::pre_copy::{
    AvailableStrategies, FixedCost, HybridPolicy, OnLimit, PatternPolicy, PreCopyGoals, RoundObservation,
    SlaPolicy, TracedStopPolicy,
};
#[cfg(feature = "comparison")]
use engine::pre_copy::{RoundCountPolicy, TargetPolicy};

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
    saving: Reductions,
}

impl Payload {
    /// Creates the payload; the first `post_copied` blocks may be sent after the guest runs at the destination.
    pub(crate) fn new(readers: Vec<Box<dyn BlockReader>>, post_copied: usize) -> Self {
        let ram_bytes = readers.iter().take(post_copied).map(|reader| reader.bytes()).collect();
        Self { readers: readers.into(), ram_bytes, saving: Reductions::default() }
    }

    pub(crate) fn readers(&self) -> SourceRam {
        SourceRam::clone(&self.readers)
    }

    /// Reduces the data that is sent from here on. The caller calls this before memory is prepared, because the log of
    /// memory has to report which of its pages are written.
    pub(crate) fn set_reductions(&mut self, reductions: Reductions) {
        self.saving = reductions;
    }

    /// Ends the reductions that have to end at this stage.
    pub(crate) fn end_reductions(&self, stage: ReductionStage) {
        self.saving.end(stage);
    }

    /// Informs the reductions that the destination discards these pages of memory.
    pub(crate) fn forget_versions(&self, pages: &[::memory::PageSet]) {
        self.saving.discarded(pages);
    }

    /// Informs the reductions that these pages wait for a later round.
    pub(crate) fn keep_versions(&self, later: &OwedPages) {
        self.saving.awaited(later.blocks(), later.round() + 1);
    }

    /// Returns how many of these pages will certainly be sent in full.
    pub(crate) fn full_pages(&self, owed: &OwedPages) -> u64 {
        self.saving.full_pages(owed.blocks())
    }

    pub(crate) fn saving(&self) -> Reductions {
        self.saving.clone()
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
    let goal = pre_copy_goals(goals);
    let on_limit = match goals.settings.on_limit {
        api::OnLimit::Stop => OnLimit::Stop,
        api::OnLimit::PostCopy => OnLimit::PostCopy,
        api::OnLimit::Abort => OnLimit::Abort,
    };
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

/// Returns the policy's present goals.
pub(crate) fn pre_copy_goals(goals: &Goals) -> PreCopyGoals {
    let ns = |ms: u64| ms.saturating_mul(1_000_000);
    PreCopyGoals {
        max_downtime_ns: ns(goals.settings.max_downtime_ms),
        max_rounds: goals.settings.max_rounds,
        max_total_ns: goals.max_total_ms().map(ns),
    }
}

/// A round that was sent, with the time of the scan before it.
pub(crate) struct SentRound {
    pub(crate) stats: RoundStats,
    pub(crate) scanned_at: Instant,
    /// Number of passes over the dirty pages, including this round's.
    pub(crate) pass: u32,
    /// Dirty pages that the round left to the next.
    pub(crate) remaining_pages: u64,
    /// Those of `remaining_pages` that have to be sent before the guest runs at the destination.
    pub(crate) remaining_must_precopy_pages: u64,
    /// Pages of the round that were sent shortly before, too.
    pub(crate) resent_pages: u64,
}

/// Pages that are dirty after a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirtyCounts {
    pub(crate) pages: u64,
    /// Dirty pages without any knowledge that would save the link a part of them.
    pub(crate) unknown: u64,
    /// Those of `pages` that have to be sent before the guest runs at the destination.
    pub(crate) must_precopy: u64,
}

/// Returns the policy's observation of a round and of the scan that followed it; `elapsed` is the time since the
/// migration was requested.
pub(crate) fn observe(
    sent: &SentRound,
    scan: ScanStats,
    dirty: DirtyCounts,
    scanned_at: Instant,
    elapsed: Duration,
) -> RoundObservation {
    let stats = &sent.stats;
    RoundObservation {
        round: sent.pass,
        dirty_pages: dirty.pages,
        full_pages: dirty.unknown,
        must_precopy_pages: dirty.must_precopy,
        pages_sent: stats.contents.pages(),
        empty_pages: stats.contents.empty(),
        reduced_pages: stats.contents.delta + stats.contents.reference + stats.contents.hinted,
        remaining_pages: sent.remaining_pages,
        remaining_must_precopy_pages: sent.remaining_must_precopy_pages,
        resent_pages: sent.resent_pages,
        bytes_sent: stats.wire_bytes,
        duration_ns: stats.duration_us.saturating_mul(1000),
        interval_ns: scanned_at.duration_since(sent.scanned_at).as_nanos() as u64,
        scan_ns: scan.duration_us.saturating_mul(1000),
        elapsed_ns: elapsed.as_nanos() as u64,
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
