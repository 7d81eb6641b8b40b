//! Selection of the pages of a round, as [`Rounds`](engine::session::Rounds) decides.

use std::time::{Duration, Instant};

use ::memory::{FirstPass, OwedPages, PageCursor, PartBoundary, RoundStats, SentHistory, WrappedPart};
use engine::pre_copy::{Sampling, TracedStopPolicy};
use engine::session::PageSelection;

use super::rounds::DirtyScan;
use crate::source::payload::Payload;

/// Selector of the pages of each round.
///
/// In the first pass, which sends all of memory, pages that the guest writes in the meantime are left for later:
/// otherwise they would have to be sent twice ([`FirstPass`]).
pub(super) struct PageSelector {
    /// Pages of the present round.
    selection: PageSelection,
    first_pass: FirstPass,
    /// Planned duration of the part of the first pass that is sent now.
    planned: Duration,
    /// Start of the next round that does not send everything.
    place: PageCursor,
    /// Start of such a round after the present one.
    next: PageCursor,
    /// True if the present part reaches the end of all pages.
    has_wrapped: bool,
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

impl RoundPages {
    fn all(scanned: DirtyScan) -> Self {
        Self { scanned, later: None, until: None }
    }
}

impl PageSelector {
    pub(super) fn new(policy: &TracedStopPolicy, sampling: Sampling) -> Self {
        let history = if policy.has_history() { sampling.history } else { 0 };
        let interval_ns = if sampling.interval_ns > 0 { sampling.interval_ns } else { Sampling::LONGEST_NS };
        Self {
            selection: PageSelection::All,
            first_pass: FirstPass::new(Duration::from_nanos(interval_ns)),
            planned: Duration::ZERO,
            place: PageCursor::default(),
            next: PageCursor::default(),
            has_wrapped: false,
            recent: SentHistory::new(history as usize),
        }
    }

    /// Records that the guest was asked for its free pages and has not answered.
    pub(super) fn set_hints_pending(&mut self, is_unknown: bool) {
        self.first_pass.set_hints_pending(is_unknown);
    }

    /// Handles a dirty scan in the first pass: pages that were written leave the pass. Returns true if pages of the
    /// pass remain.
    pub(super) fn record_scan(&mut self, scanned: &mut DirtyScan) -> bool {
        self.first_pass.record_scan(scanned.readable.owed(), &std::mem::take(&mut scanned.found))
    }

    /// Divides a dirty scan into the selected pages and the others. Parts are longer than usual by `interval_factor`.
    pub(super) fn select(
        &mut self,
        selection: PageSelection,
        interval_factor: u32,
        scanned: DirtyScan,
        payload: &Payload,
    ) -> RoundPages {
        self.selection = selection;
        match selection {
            PageSelection::FirstPass => self.select_of_first_pass(interval_factor, scanned, payload),
            PageSelection::MustPreCopy => {
                let mut must_precopy = scanned.readable.owed().blocks().to_vec();
                for may_wait in must_precopy.iter_mut().take(payload.ram_blocks()) {
                    may_wait.clear(0..may_wait.pages());
                }
                self.next = self.place;
                let (scanned, later) = scanned.divided(payload, |readable| readable.only(&must_precopy));
                RoundPages { scanned, later: Some(later), until: None }
            }
            PageSelection::Part { pages } => {
                let place = self.place;
                let (scanned, (later, next, has_wrapped)) = scanned.divided(payload, |readable| {
                    let WrappedPart { readable, later, next, has_wrapped } =
                        readable.part_wrapping(place, pages, PartBoundary::BetweenClusters);
                    (readable, (later, next, has_wrapped))
                });
                (self.next, self.has_wrapped) = (next, has_wrapped);
                RoundPages { scanned, later: Some(later), until: None }
            }
            PageSelection::All => {
                self.next = PageCursor::default();
                RoundPages::all(scanned)
            }
        }
    }

    /// Selects the pages of the next part of the first pass, which lasts as long as it is worth a dirty scan.
    fn select_of_first_pass(
        &mut self,
        interval_factor: u32,
        scanned: DirtyScan,
        payload: &Payload,
    ) -> RoundPages {
        let Some(part) = self.first_pass.next_part() else { return RoundPages::all(scanned) };
        let (scanned, later) = scanned.divided(payload, |readable| readable.only(part));
        let least = Duration::from_micros(scanned.scan.duration_us) * Sampling::MIN_SCANS as u32;
        self.planned = self.first_pass.part(least) * interval_factor;
        RoundPages { scanned, later: Some(later), until: Some(Instant::now() + self.planned) }
    }

    /// Returns how many of the selected pages of memory were sent shortly before. In the first pass there are none.
    pub(super) fn count_resent(&mut self, scanned: &DirtyScan, payload: &Payload) -> u64 {
        if self.selection == PageSelection::FirstPass {
            return 0;
        }
        let blocks = scanned.readable.owed().blocks();
        self.recent.count(&blocks[..payload.ram_blocks().min(blocks.len())])
    }

    /// Records that the selected pages were sent except for these. Returns true if a part has reached the end of all
    /// pages.
    pub(super) fn sent(&mut self, stats: &RoundStats, unsent: &OwedPages) -> bool {
        self.place = self.next;
        match self.selection {
            PageSelection::FirstPass => {
                let took = Duration::from_micros(stats.duration_us);
                !self.first_pass.sent(unsent, stats.contents.pages(), self.planned, took)
            }
            PageSelection::Part { .. } => self.has_wrapped,
            PageSelection::MustPreCopy | PageSelection::All => false,
        }
    }

    /// Records that the round was cut off; these of its pages did not arrive.
    pub(super) fn cut(&mut self, unsent: &OwedPages) {
        if self.selection == PageSelection::FirstPass {
            self.first_pass.cut(unsent);
        }
        self.recent.forget();
    }
}
