//! Scheduler of passes: which pages are sent in which round.

use std::time::{Duration, Instant};

use ::memory::{FirstPass, OwedPages, PageCursor, PartBoundary, RoundStats, SentHistory, WrappedPart};
use engine::pre_copy::{Sampling, TracedStopPolicy};

use super::rounds::DirtyScan;
use crate::source::payload::Payload;

/// Scheduler that selects the pages of each round.
///
/// In the first pass, which sends all of memory, pages that the guest writes in the meantime are left for later:
/// otherwise they would have to be sent twice ([`FirstPass`]).
pub(super) struct PassScheduler {
    pub(super) policy: TracedStopPolicy,
    /// Number of completed passes over the dirty pages.
    pub(super) passes: u32,
    first_pass: FirstPass,
    /// Planned duration of the part of the first pass that is sent now.
    planned: Duration,
    /// Maximum number of pages in a round; none if unlimited.
    pub(super) most_pages: Option<u64>,
    /// True if the next round sends only pages that cannot be sent later.
    pub(super) must_precopy_only: bool,
    /// Factor by which parts are longer than usual, for a guest that suffers from dirty scans.
    pub(super) interval_factor: u32,
    /// Start of the next round that does not send everything.
    place: PageCursor,
    /// Start of the round after the present one, and true if the present one ends a pass; none if it sends everything.
    next: Option<(PageCursor, bool)>,
    recent: SentHistory,
}

/// Pages of a dirty scan that a round sends.
pub(super) struct RoundPages {
    pub(super) scanned: DirtyScan,
    /// Pages that wait for a later round.
    pub(super) later: Option<OwedPages>,
    /// Time at which sending stops; none to send all.
    pub(super) until: Option<Instant>,
}

impl PassScheduler {
    pub(super) fn new(policy: TracedStopPolicy, sampling: Sampling, passes: u32) -> Self {
        let history = if policy.has_history() { sampling.history } else { 0 };
        let interval_ns = if sampling.interval_ns > 0 { sampling.interval_ns } else { Sampling::LONGEST_NS };
        Self {
            policy,
            passes,
            first_pass: FirstPass::new(Duration::from_nanos(interval_ns)),
            planned: Duration::ZERO,
            most_pages: None,
            must_precopy_only: false,
            interval_factor: 1,
            place: PageCursor::default(),
            next: None,
            recent: SentHistory::new(history as usize),
        }
    }

    /// Records that the guest was asked for its free pages and has not answered.
    pub(super) fn set_hints_pending(&mut self, is_unknown: bool) {
        self.first_pass.set_hints_pending(is_unknown);
    }

    /// Handles a dirty scan in the first pass: pages that were written leave the pass. The pass ends when no pages
    /// remain.
    pub(super) fn record_scan(&mut self, scanned: &mut DirtyScan) {
        if self.passes > 0 {
            return;
        }
        if !self.first_pass.record_scan(scanned.readable.owed(), &std::mem::take(&mut scanned.found)) {
            self.passes = 1;
        }
    }

    /// Returns the pages to send now: in the first pass those that were not written, later up to the maximum number of
    /// pages.
    pub(super) fn select_pages(&mut self, scanned: DirtyScan, payload: &Payload) -> RoundPages {
        if self.passes == 0
            && let Some(part) = self.first_pass.next_part()
        {
            let (scanned, later) = scanned.divided(payload, |readable| readable.only(part));
            let least = Duration::from_micros(scanned.scan.duration_us) * Sampling::MIN_SCANS as u32;
            self.planned = self.first_pass.part(least) * self.interval_factor;
            return RoundPages { scanned, later: Some(later), until: Some(Instant::now() + self.planned) };
        }
        if std::mem::take(&mut self.must_precopy_only) {
            let mut must_precopy = scanned.readable.owed().blocks().to_vec();
            for may_wait in must_precopy.iter_mut().take(payload.ram_blocks()) {
                may_wait.clear(0..may_wait.pages());
            }
            self.next = Some((self.place, false));
            let (scanned, later) = scanned.divided(payload, |readable| readable.only(&must_precopy));
            return RoundPages { scanned, later: Some(later), until: None };
        }
        let most_pages = self.most_pages.map(|most| most.saturating_mul(self.interval_factor.into()));
        let Some(pages) = most_pages.filter(|most| *most < scanned.readable.pages()) else {
            self.next = None;
            return RoundPages { scanned, later: None, until: None };
        };
        let (scanned, later) = scanned.divided(payload, |readable| {
            let WrappedPart { readable, later, next, has_wrapped } =
                readable.part_wrapping(self.place, pages, PartBoundary::BetweenClusters);
            self.next = Some((next, has_wrapped));
            (readable, later)
        });
        RoundPages { scanned, later: Some(later), until: None }
    }

    /// Returns true if every page was sent once, including those that were written during the first pass.
    pub(super) fn has_sent_all(&self) -> bool {
        self.passes > 1
    }

    /// Returns how many of the present round's pages of memory were sent shortly before. In the first pass there are
    /// none.
    pub(super) fn count_resent(&mut self, scanned: &DirtyScan, payload: &Payload) -> u64 {
        if self.passes == 0 {
            return 0;
        }
        let blocks = scanned.readable.owed().blocks();
        self.recent.count(&blocks[..payload.ram_blocks().min(blocks.len())])
    }

    /// Records that a round was sent except for these pages; without stats it was cut off.
    pub(super) fn sent(&mut self, stats: Option<&RoundStats>, unsent: &OwedPages) {
        let Some(stats) = stats else {
            if self.passes == 0 {
                self.first_pass.cut(unsent);
            }
            return self.recent.forget();
        };
        if self.passes > 0 {
            let (place, is_pass) = self.next.take().unwrap_or((PageCursor::default(), true));
            self.place = place;
            self.passes += u32::from(is_pass);
        } else {
            let took = Duration::from_micros(stats.duration_us);
            let is_left = self.first_pass.sent(unsent, stats.contents.pages(), self.planned, took);
            self.passes = u32::from(!is_left);
        }
    }
}
