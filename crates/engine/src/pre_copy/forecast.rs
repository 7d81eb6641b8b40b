//! Forecast of the downtime if the guest were stopped now.

use std::collections::VecDeque;

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

use super::policy::RoundObservation;

/// Parts of the downtime that do not depend on the number of remaining pages, as measured on this pair of hosts or,
/// before the first migration, estimated from those of small guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixedCost {
    /// QMP `stop`, in nanoseconds.
    pub stop_ns: u64,
    /// Saving the device state, which runs in parallel with the last pages, in nanoseconds.
    pub save_ns: u64,
    /// Sending and loading the device state, in nanoseconds.
    pub load_ns: u64,
    /// Time from READY to `cont`'s return, in nanoseconds: journals, GO, the ownership registry if there is one.
    pub continue_ns: u64,
}

impl Default for FixedCost {
    /// The upper half of a small guest's measurements: stop 1 ms, save 2 ms, load 8 ms, continue 4 ms.
    fn default() -> Self {
        Self { stop_ns: 1_000_000, save_ns: 2_000_000, load_ns: 8_000_000, continue_ns: 4_000_000 }
    }
}

impl FixedCost {
    /// Returns the downtime if sending the last pages takes `pages_ns`.
    pub fn downtime_ns(&self, pages_ns: u64) -> u64 {
        [self.stop_ns, pages_ns.max(self.save_ns), self.load_ns, self.continue_ns]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

/// Measured fixed costs of the last migrations.
///
/// A busy moment makes a part longer, nothing makes it shorter than it is, so the estimate is the smallest value of
/// each part, and the default is one of the values until two have been measured. A migration that gave up measures
/// nothing: if its estimate were kept, one bad moment could keep the objective out of reach for ever. So giving up
/// clears the history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CostHistory(VecDeque<FixedCost>);

impl CostHistory {
    const LENGTH: usize = 4;

    /// Records the measurements of a migration.
    pub fn learn(&mut self, measured: FixedCost) {
        self.0.truncate(Self::LENGTH - 1);
        self.0.push_front(measured);
    }

    /// Clears the history; the estimate is the default again.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// Returns the fixed cost that the next migration has to expect.
    pub fn estimate(&self) -> FixedCost {
        let smaller = |one: FixedCost, other: FixedCost| FixedCost {
            stop_ns: one.stop_ns.min(other.stop_ns),
            save_ns: one.save_ns.min(other.save_ns),
            load_ns: one.load_ns.min(other.load_ns),
            continue_ns: one.continue_ns.min(other.continue_ns),
        };
        let guess = (self.0.len() < 2).then(FixedCost::default);
        self.0.iter().copied().chain(guess).reduce(smaller).unwrap_or_default()
    }
}

/// Forecast of the time that pages take, from the rounds so far.
///
/// *Rate* is guest memory moved per second, without zero pages, which take next to no time: it already contains the
/// effects of compression, checksums and the destination's writing on the link.
///
/// It is the lower one of two: the last round's, which follows at once a link that has become slower; and a mean in
/// which each round weighs half of the next, which a single round that disappeared in buffers does not deceive. The
/// mean divides sums by sums, so that a round of ten pages, which is all latency, does not count as much as one of a
/// gigabyte.
///
/// Choosing the lower one errs towards another round, and that round measures again.
///
/// Rounds in which most pages were sent as deltas or references are many times as fast, and do not show how long full
/// pages take.
///
/// So the pages that have to be sent in full are expected to take as long as in the other rounds, and the estimate for
/// all pages is no less than that. Before there was any other round, they are expected to take as long as if the full
/// pages had used all of the time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Forecast {
    /// Sums of guest bytes and of nanoseconds, halved each round. u128 for sums of u64.
    sum_bytes: u128,
    sum_ns: u128,
    /// Sums for full pages, in rounds with mostly full pages.
    full_bytes: u128,
    full_ns: u128,
}

impl Forecast {
    /// Learns from a round.
    pub(super) fn learn(&mut self, observed: &RoundObservation) {
        let Some(pages) = informative_pages(observed) else { return };
        self.sum_bytes = self.sum_bytes / 2 + guest_bytes(pages);
        self.sum_ns = self.sum_ns / 2 + u128::from(observed.duration_ns);
        let is_full = observed.reduced_pages <= pages / 2;
        if is_full {
            self.full_bytes = self.full_bytes / 2 + guest_bytes(pages);
            self.full_ns = self.full_ns / 2 + u128::from(observed.duration_ns);
        } else if self.full_bytes == 0 {
            self.full_bytes = guest_bytes(pages.saturating_sub(observed.reduced_pages));
            self.full_ns = observed.duration_ns.into();
        }
    }

    /// Returns the time that the pages take which are dirty after the last learned round, in nanoseconds. `u64::MAX`
    /// before anything was measured.
    pub(super) fn pages_ns(&self, observed: &RoundObservation) -> u64 {
        let left = guest_bytes(observed.dirty_pages);
        let at = |bytes, ns| time_for(left, bytes, ns);
        let last =
            informative_pages(observed).and_then(|pages| at(guest_bytes(pages), observed.duration_ns.into()));
        let mean = at(self.sum_bytes, self.sum_ns);
        let full = time_for(guest_bytes(observed.full_pages), self.full_bytes, self.full_ns);
        let expected = match (last, mean) {
            (Some(last), Some(mean)) => last.max(mean),
            (one, other) => one.or(other).unwrap_or(if left == 0 { 0 } else { u64::MAX }),
        };
        expected.max(full.unwrap_or(0))
    }
}

/// Returns the pages of a round that show how fast pages are sent; none where nearly all were empty, because finding
/// that out took the time.
fn informative_pages(observed: &RoundObservation) -> Option<u64> {
    const INFORMATIVE_SHARE: u64 = 32;
    let pages = observed.pages_sent.saturating_sub(observed.empty_pages);
    (observed.empty_pages == 0 || pages >= observed.pages_sent / INFORMATIVE_SHARE).then_some(pages)
}

/// Returns the time by which the next round would shorten the sending of the last pages, which is now `pages_ns`.
pub(super) fn gain_ns(observed: &RoundObservation, pages_ns: u64) -> u64 {
    // A round takes some time beside sending: the drain before it, the scan after it.
    let overhead_ns = observed.interval_ns.saturating_sub(observed.duration_ns);
    let next_ns = u128::from(pages_ns.saturating_add(overhead_ns));
    // Pages that were left to a later round were not written during this one.
    let written = u128::from(observed.dirty_pages.saturating_sub(observed.remaining_pages));
    let written_ns =
        (u128::from(pages_ns) * written).checked_div(observed.dirty_pages.into()).unwrap_or(pages_ns.into());
    let left_ns = (written_ns * next_ns).checked_div(observed.interval_ns.into());
    let left_ns = left_ns.map_or(u64::MAX, |left| u64::try_from(left).unwrap_or(u64::MAX));
    pages_ns.saturating_sub(left_ns)
}

fn guest_bytes(pages: u64) -> u128 {
    u128::from(pages) * u128::from(PAGE_BYTES)
}

/// Returns the time for `left` if `bytes` took `ns`; none if these are no rate.
fn time_for(left: u128, bytes: u128, ns: u128) -> Option<u64> {
    if bytes == 0 || ns == 0 {
        return None;
    }
    // left and bytes are below 2^77, ns below 2^65: products may pass u128, then the time is beyond all limits.
    let time = left.checked_mul(ns).map_or(u128::MAX, |product| product.div_ceil(bytes));
    Some(u64::try_from(time).unwrap_or(u64::MAX))
}
