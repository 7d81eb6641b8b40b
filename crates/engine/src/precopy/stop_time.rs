//! The policy of the stop-time objective.

use std::collections::VecDeque;

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

use super::{Aim, Decision, GiveUp, Limit, Policy, RoundObservation};

/// Parts of the downtime that do not depend on how many pages are left, as measured on this pair of hosts or, before
/// the first migration, guessed from those of small guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixedCost {
    /// QMP `stop`.
    pub stop_ns: u64,
    /// Saving the device state, which runs beside the last pages.
    pub save_ns: u64,
    /// Sending and loading the device state.
    pub load_ns: u64,
    /// From READY to `cont`'s return: journals, GO, the register where there is one.
    pub continue_ns: u64,
}

impl Default for FixedCost {
    /// The upper half of what a small guest showed: stop 1 ms, save 2 ms, load 8 ms, continue 4 ms.
    fn default() -> Self {
        Self { stop_ns: 1_000_000, save_ns: 2_000_000, load_ns: 8_000_000, continue_ns: 4_000_000 }
    }
}

impl FixedCost {
    /// The downtime if sending the last pages takes so long.
    fn downtime_ns(&self, pages_ns: u64) -> u64 {
        [self.stop_ns, pages_ns.max(self.save_ns), self.load_ns, self.continue_ns]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

/// The fixed parts that the last migrations measured.
///
/// A busy moment makes a part longer, nothing makes it shorter than it is, so the estimate is the smallest of each
/// part, and the guess is one of them until two have been measured. And a migration that gave up measures nothing: were
/// its estimate kept, one bad moment could keep the objective out of reach for ever. So giving up forgets it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CostHistory(VecDeque<FixedCost>);

impl CostHistory {
    const LENGTH: usize = 4;

    /// Remembers what a migration measured.
    pub fn learn(&mut self, measured: FixedCost) {
        self.0.truncate(Self::LENGTH - 1);
        self.0.push_front(measured);
    }

    /// Begins anew, with the guess.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// What the next migration has to reckon with.
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

/// A round that takes less than this part of the downtime off it is not worth it.
const LEAST_GAIN: u64 = 8;

/// What to do when a limit is reached and the objective is not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnLimit {
    /// Stop the guest for longer than was asked for.
    Stop,
    /// Give up; the guest runs on where it is.
    #[default]
    Abort,
}

/// Stops when the expected downtime is within the limit and another round would not make it much shorter.
///
/// ```text
/// pages    = dirty pages · page size / rate
/// expected = stop + max(pages, saving) + loading + continuing + 2 scans
/// gain     = pages · (1 − length of the next round / length of the last one)
///
/// stop if expected ≤ limit and gain < expected / 8
/// ```
///
/// (One scan after the stop, one after the device state was saved, which may write guest memory.)
///
/// *Rate* is guest memory moved per second, pages of zeros included: it already contains what compression, checksums
/// and the other side's writing make of the link. It is the lower one of two: the last round's, which follows a link
/// that has become slower at once; and a mean in which each round weighs half of the next, which a single round that
/// went into buffers (or was all zeros, as first rounds often are) does not deceive. The mean divides sums by sums, so
/// that a round of ten pages, which is all latency, does not count as much as one of a gigabyte.
///
/// Choosing the lower one errs towards another round, and that round measures again.
///
/// Rounds in which most pages were spared, because only what changed of them was sent or the destination had them already,
/// are many times as fast, and tell nothing of pages that have to be sent in full. So these are expected to go as they did
/// in the other rounds, and what is expected of all of them is no less than that. Before there was any other round they
/// are expected to go as if those that were sent in full had taken all of the time.
///
/// *Gain*: KVM's rule stops as soon as the limit is kept, which makes the limit the downtime: whoever allows 300 ms has
/// the guest stand still for nearly that long, although a round of 100 ms, in which the guest runs, would have left a
/// tenth of the pages. In the next round, which lasts as long as its pages take, the guest writes to as many pages as it
/// did in the last one, in proportion to the time. So a round costs `pages` of running on at the source, and saves the
/// same share of that whatever the size of the guest. Where it saves less than an eighth of the downtime, it is not worth
/// it: what is left is fixed, or the guest writes nearly as fast as the link carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopTime {
    aim: Aim,
    on_limit: OnLimit,
    fixed: FixedCost,
    patience_rounds: u32,
    // What was learnt. Not part of a trace, which begins with a policy that has seen nothing.
    /// Sums of guest bytes and of nanoseconds, halved each round. u128 for sums of u64.
    #[serde(skip)]
    sum_bytes: u128,
    #[serde(skip)]
    sum_ns: u128,
    /// The same of what went in full, in rounds in which most did.
    #[serde(skip)]
    full_bytes: u128,
    #[serde(skip)]
    full_ns: u128,
    #[serde(skip)]
    fewest_dirty: Option<u64>,
    #[serde(skip)]
    rounds_not_shrinking: u32,
}

impl StopTime {
    /// Rounds without progress before it is called none.
    pub const PATIENCE_ROUNDS: u32 = 6;

    /// A new policy.
    pub fn new(aim: Aim, on_limit: OnLimit, fixed: FixedCost) -> Self {
        Self {
            aim,
            on_limit,
            fixed,
            patience_rounds: Self::PATIENCE_ROUNDS,
            sum_bytes: 0,
            sum_ns: 0,
            full_bytes: 0,
            full_ns: 0,
            fewest_dirty: None,
            rounds_not_shrinking: 0,
        }
    }

    /// Takes another patience, in rounds.
    #[must_use]
    pub fn with_patience(self, patience_rounds: u32) -> Self {
        Self { patience_rounds, ..self }
    }

    /// What is aimed at now.
    pub fn aim_of(&self) -> Aim {
        self.aim
    }

    fn learn(&mut self, observed: &RoundObservation) {
        self.sum_bytes = self.sum_bytes / 2 + guest_bytes(observed.pages_sent);
        self.sum_ns = self.sum_ns / 2 + u128::from(observed.duration_ns);
        let is_full = observed.spared_pages <= observed.pages_sent / 2;
        if is_full {
            self.full_bytes = self.full_bytes / 2 + guest_bytes(observed.pages_sent);
            self.full_ns = self.full_ns / 2 + u128::from(observed.duration_ns);
        } else if self.full_bytes == 0 {
            self.full_bytes = guest_bytes(observed.pages_sent.saturating_sub(observed.spared_pages));
            self.full_ns = observed.duration_ns.into();
        }
        // An eighth less is progress; less than that is noise.
        let progress = self.fewest_dirty.is_none_or(|fewest| observed.dirty_pages < fewest - fewest / 8);
        if progress {
            self.fewest_dirty = Some(observed.dirty_pages);
            self.rounds_not_shrinking = 0;
        } else {
            self.rounds_not_shrinking = self.rounds_not_shrinking.saturating_add(1);
        }
    }

    /// How long the dirty pages would take.
    fn pages_ns(&self, observed: &RoundObservation) -> u64 {
        let left = guest_bytes(observed.dirty_pages);
        let at = |bytes, ns| time_for(left, bytes, ns);
        let last = at(guest_bytes(observed.pages_sent), observed.duration_ns.into());
        let mean = at(self.sum_bytes, self.sum_ns);
        let full = time_for(guest_bytes(observed.unknown_pages), self.full_bytes, self.full_ns);
        let expected = match (last, mean) {
            (Some(last), Some(mean)) => last.max(mean),
            (one, other) => one.or(other).unwrap_or(if left == 0 { 0 } else { u64::MAX }),
        };
        expected.max(full.unwrap_or(0))
    }

    fn is_worth_another_round(&self, observed: &RoundObservation, pages_ns: u64, expected_ns: u64) -> bool {
        observed.round < self.aim.max_rounds
            && self.rounds_not_shrinking == 0
            && gain_ns(observed, pages_ns) >= (expected_ns / LEAST_GAIN).max(1)
    }
}

impl Policy for StopTime {
    fn aim(&mut self, aim: Aim) {
        self.aim = aim;
    }

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        self.learn(observed);
        let pages_ns = self.pages_ns(observed);
        let scans_ns = observed.scan_ns.saturating_mul(2);
        let expected_downtime_ns = self.fixed.downtime_ns(pages_ns).saturating_add(scans_ns);
        if observed.round == 0 {
            return Decision::NextRound { expected_downtime_ns };
        }
        if expected_downtime_ns <= self.aim.max_downtime_ns {
            return if self.is_worth_another_round(observed, pages_ns, expected_downtime_ns) {
                Decision::NextRound { expected_downtime_ns }
            } else {
                Decision::StopAndCopy { expected_downtime_ns }
            };
        }
        let limit = if observed.round >= self.aim.max_rounds {
            Limit::Rounds
        } else if self.rounds_not_shrinking >= self.patience_rounds {
            Limit::NotShrinking
        } else {
            return Decision::NextRound { expected_downtime_ns };
        };
        let (fixed_ns, max_downtime_ns) = (self.fixed.downtime_ns(0), self.aim.max_downtime_ns);
        match self.on_limit {
            OnLimit::Stop => Decision::StopAndCopy { expected_downtime_ns },
            OnLimit::Abort => {
                Decision::GiveUp { reason: GiveUp { limit, expected_downtime_ns, fixed_ns, max_downtime_ns } }
            }
        }
    }
}

/// What the next round would take off the time for the last pages.
fn gain_ns(observed: &RoundObservation, pages_ns: u64) -> u64 {
    // A round takes some time beside sending: the drain before it, the scan after it.
    let beside_ns = observed.interval_ns.saturating_sub(observed.duration_ns);
    let next_ns = u128::from(pages_ns.saturating_add(beside_ns));
    let left_ns = (u128::from(pages_ns) * next_ns).checked_div(observed.interval_ns.into());
    let left_ns = left_ns.map_or(u64::MAX, |left| u64::try_from(left).unwrap_or(u64::MAX));
    pages_ns.saturating_sub(left_ns)
}

fn guest_bytes(pages: u64) -> u128 {
    u128::from(pages) * u128::from(PAGE_BYTES)
}

/// How long `left` takes if `bytes` took `ns`; none if that says nothing about a rate.
fn time_for(left: u128, bytes: u128, ns: u128) -> Option<u64> {
    if bytes == 0 || ns == 0 {
        return None;
    }
    // left and bytes are below 2^77, ns below 2^65: products may pass u128, then the time is beyond all limits.
    let time = left.checked_mul(ns).map_or(u128::MAX, |product| product.div_ceil(bytes));
    Some(u64::try_from(time).unwrap_or(u64::MAX))
}
