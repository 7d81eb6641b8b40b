//! The policy of patterns: it detects from how a guest writes that rounds do not help any more.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::forecast::{FixedCost, Forecast, gain_ns};
use super::pace::Pace;
use super::policy::{
    Decision, GiveUp, Limit, OnLimit, Pattern, Policy, PreCopyGoals, RoundObservation, ThrottleChange,
};
use super::post_copy_start::PostCopyStart;

/// Sampling of the guest's writes, and thresholds of the patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampling {
    /// Longest time between two scans once all of memory was sent, in nanoseconds; 0 to derive it from the link's rate
    /// ([`Self::INTERVAL_BYTES`]).
    pub interval_ns: u64,
    /// Pattern a: number of scans over which the number of modified pages is averaged, at least 1.
    pub window: u32,
    /// Pattern a: largest change of that average from scan to scan, in hundredths of the pages sent in between.
    pub stable_percent: u32,
    /// Pattern c: share of the pages sent that had been sent shortly before, in hundredths.
    pub resent_percent: u32,
    /// Pattern c: number of earlier intervals that count as shortly before. The counter has to keep as many sets of
    /// pages.
    pub history: u32,
}

impl Sampling {
    /// Data that an interval sends, in bytes, as far as that takes no longer than [`Self::LONGEST_NS`] and no less
    /// than [`Self::SHORTEST_NS`].
    ///
    /// It is what the link of the paper carries in its interval of a second. On a faster link the same amount is sent
    /// sooner: enough to detect how a guest writes, whereas in a second it could be all of its memory. On a slower
    /// link the interval stays at a second, because a guest's pattern does not become slower with its link.
    pub const INTERVAL_BYTES: u64 = 125_000_000;
    /// The paper's interval: shorter ones make the number of modified pages vary more.
    pub const LONGEST_NS: u64 = 1_000_000_000;
    /// A scan costs some milliseconds: the scan itself, the drain, the last pages' round trip to the destination.
    pub const SHORTEST_NS: u64 = 100_000_000;
    /// Shortest interval, in scans: a guest of a TiB takes a second for one.
    pub const MIN_SCANS: u64 = 16;
    /// Shortest interval, as a multiple of the time that a round takes beside sending.
    pub const MIN_OVERHEADS: u64 = 8;

    /// Returns the interval for a link's rate. It is longer for a guest so large that scans take long, and on a link
    /// so long that a round waits a while for its last acknowledgement.
    fn interval_ns(&self, link_bytes_per_s: u64, scan_ns: u64, overhead_ns: u64) -> u64 {
        let by_rate = || {
            let ns = (u128::from(Self::INTERVAL_BYTES) * 1_000_000_000).checked_div(link_bytes_per_s.into());
            ns.and_then(|ns| u64::try_from(ns).ok())
                .unwrap_or(Self::LONGEST_NS)
                .clamp(Self::SHORTEST_NS, Self::LONGEST_NS)
        };
        let wanted = if self.interval_ns > 0 { self.interval_ns } else { by_rate() };
        wanted
            .max(scan_ns.saturating_mul(Self::MIN_SCANS))
            .max(overhead_ns.saturating_mul(Self::MIN_OVERHEADS))
    }
}

impl Default for Sampling {
    /// The values of the paper: one interval of history, nine tenths; the average is of two scans.
    fn default() -> Self {
        Self { interval_ns: 0, window: 2, stable_percent: 10, resent_percent: 90, history: 1 }
    }
}

/// Divisor of the downtime: a round that shortens the downtime by less than this part is not worth it.
const MIN_GAIN_DIVISOR: u64 = 8;
/// Number of scans that show pattern b or c: a single one may be chance.
const CERTAIN_SCANS: u32 = 2;
/// Longest downtime, as a multiple of the time for which a pattern was seen.
const MAX_DOWNTIME_PER_SEEN: u64 = 2;

/// Stops when the expected downtime is within the limit and another round would not make it much shorter; beyond the
/// limit, when the pattern of the guest's writes shows that rounds will not reach it.
///
/// ```text
/// pages    = dirty pages · page size / rate
/// expected = stop + max(pages, saving) + loading + continuing + 2 scans
/// gain     = pages · (1 − length of the next round / length of the last one)
///
/// stop if expected ≤ limit and gain < expected / 8
///      or a pattern has been seen long enough, and the user chose to stop then
/// ```
///
/// (One scan after the stop, one after the device state was saved, which may write guest memory. The rate is that of
/// `Forecast`.)
///
/// *Gain*: KVM's rule stops as soon as the limit is kept, which makes the limit the downtime: with a limit of 300 ms
/// the guest stands still for nearly that long, although a round of 100 ms, in which the guest runs, would have left a
/// tenth of the pages. In the next round, which lasts as long as its pages take, the guest writes as many pages as in
/// the last one, in proportion to the time.
///
/// So a round costs `pages` of running on at the source, and saves the same share of that whatever the size of the
/// guest. If it saves less than an eighth of the downtime, it is not worth it: the rest is fixed, or the guest writes
/// nearly as fast as the link carries.
///
/// *Patterns* are detected from scan to scan, once all of memory was sent. For that no round takes much longer than a
/// sampling interval: of more dirty pages than an interval can send, only as many are sent as linear regression of
/// time against pages yields (Algorithm 2, lines 25–37), and the others stay dirty.
///
/// The next interval begins behind the last page of this one, so that every page is sent eventually, and a page that
/// is written several times while it waits is sent once.
///
/// Differences from the paper: the number of modified pages has to be stable *beside pages sent*, or to grow, so that
/// a slow link's pass through much memory, which leaves only a little less each second, is not taken for a standstill.
///
/// After pattern b rounds continue as long as they pay or, beyond the limit, as long as they leave fewer pages: they
/// are short. And a pattern has to be seen for a while, twice at least, and for half as long as the guest would have
/// to stand still.
///
/// A migration is given up when rounds have not helped for as long as six passes over the dirty pages take: a new
/// attempt costs all of memory, so a guest gets some time to become calmer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatternPolicy {
    goals: PreCopyGoals,
    on_limit: OnLimit,
    fixed: FixedCost,
    patience_rounds: u32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    throttles_writes: bool,
    sampling: Sampling,
    // Learned state. It is not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    forecast: Forecast,
    #[serde(skip)]
    pace: Pace,
    /// Highest rate of the link during the first pass, in bytes per second.
    #[serde(skip)]
    link_bytes_per_s: u64,
    #[serde(skip)]
    scans: ScanHistory,
    /// Fewest dirty pages at the end of a pass.
    #[serde(skip)]
    fewest_dirty: Option<u64>,
    /// Number of passes at the last scan.
    #[serde(skip)]
    passes: u32,
    /// Scans after rounds that did not help, and the duration of these rounds, since the last progress.
    #[serde(skip)]
    stuck_rounds: u32,
    #[serde(skip)]
    stuck_ns: u64,
    #[serde(skip)]
    post_copy_start: PostCopyStart,
}

impl PatternPolicy {
    /// Number of rounds without progress before a migration is given up, each of the length of a pass over the dirty
    /// pages.
    pub const PATIENCE_ROUNDS: u32 = 6;

    /// Creates the policy.
    pub fn new(goals: PreCopyGoals, on_limit: OnLimit, fixed: FixedCost) -> Self {
        Self {
            goals,
            on_limit,
            fixed,
            patience_rounds: Self::PATIENCE_ROUNDS,
            throttles_writes: false,
            sampling: Sampling::default(),
            forecast: Forecast::default(),
            pace: Pace::default(),
            link_bytes_per_s: 0,
            scans: ScanHistory::default(),
            fewest_dirty: None,
            passes: 0,
            stuck_rounds: 0,
            stuck_ns: 0,
            post_copy_start: PostCopyStart::default(),
        }
    }

    /// Expects a throttle on the guest's writes to disks, which becomes stricter as long as necessary: rounds in which
    /// most dirty pages belong to disks make progress in the end.
    #[must_use]
    pub fn with_write_throttle(self) -> Self {
        Self { throttles_writes: true, ..self }
    }

    /// Sets the patience, in rounds.
    #[must_use]
    pub fn with_patience(self, patience_rounds: u32) -> Self {
        Self { patience_rounds, ..self }
    }

    /// Sets the sampling.
    #[must_use]
    pub fn sampling(self, sampling: Sampling) -> Self {
        Self { sampling, ..self }
    }

    /// Returns the present goals.
    #[cfg(test)]
    pub(super) fn current_goals(&self) -> PreCopyGoals {
        self.goals
    }

    /// Returns true if a pass has left fewer dirty pages than the ones before; none if the pass has not ended.
    fn has_progressed(&mut self, observed: &RoundObservation) -> Option<bool> {
        if observed.pass == self.passes {
            return None;
        }
        self.passes = observed.pass;
        // An eighth less is progress; less than that is noise.
        let is_less = self.fewest_dirty.is_none_or(|fewest| observed.dirty_pages < fewest - fewest / 8);
        if is_less {
            self.fewest_dirty = Some(observed.dirty_pages);
        }
        Some(is_less)
    }

    /// Counts for how long rounds have not helped.
    fn count_stuck(&mut self, is_stuck: bool, progress: Option<bool>, interval_ns: u64) {
        if is_stuck {
            self.stuck_rounds = self.stuck_rounds.saturating_add(1);
            self.stuck_ns = self.stuck_ns.saturating_add(interval_ns);
        } else if progress == Some(true) {
            (self.stuck_rounds, self.stuck_ns) = (0, 0);
        }
    }
}

impl Policy for PatternPolicy {
    fn set_goals(&mut self, goals: PreCopyGoals) {
        self.goals = goals;
    }

    fn throttle_changed(&mut self, change: ThrottleChange) {
        if change != ThrottleChange::Slower {
            return;
        }
        (self.scans, self.fewest_dirty) = (ScanHistory::default(), None);
        (self.stuck_rounds, self.stuck_ns) = (0, 0);
    }

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        self.forecast.learn(observed);
        let pages_ns = self.forecast.pages_ns(observed);
        let scans_ns = observed.scan_ns.saturating_mul(2);
        let expected_downtime_ns = self.fixed.downtime_ns(pages_ns).saturating_add(scans_ns);
        if self.passes == 0 {
            self.link_bytes_per_s = self.link_bytes_per_s.max(observed.link_rate_bytes_per_s());
        }
        if observed.pass == 0 {
            return Decision::NextRound {
                expected_downtime_ns,
                most_pages: None,
                slow: false,
                must_precopy_only: false,
            };
        }
        let sampling = self.sampling;
        let interval =
            |overhead_ns| sampling.interval_ns(self.link_bytes_per_s, observed.scan_ns, overhead_ns);
        let interval_ns = interval(self.pace.overhead_ns());
        let pace_pages = self.pace.learn(observed, self.link_bytes_per_s, interval_ns);
        let most_pages = pace_pages.filter(|pages| *pages < observed.dirty_pages);
        let progress = self.has_progressed(observed);
        let pattern = self.scans.recognise(observed, interval_ns, &sampling);

        let is_last = observed.pass >= self.goals.max_passes;
        let is_worth_it = !is_last
            && progress != Some(false)
            && gain_ns(observed, pages_ns) >= (expected_downtime_ns / MIN_GAIN_DIVISOR).max(1);
        let has_settled = matches!(pattern, Some(Pattern::Stable | Pattern::Resent));
        let is_stuck = has_settled || progress == Some(false);
        self.count_stuck(is_stuck, progress, observed.interval_ns);
        let is_certain = pattern == Some(Pattern::Stable) || self.stuck_rounds >= CERTAIN_SCANS;
        let was_seen = self.stuck_ns.saturating_mul(MAX_DOWNTIME_PER_SEEN) >= pages_ns;
        let is_over = is_stuck && pattern.is_some() && is_certain && was_seen;
        let waits_for_disks =
            self.throttles_writes && observed.must_precopy_pages >= observed.dirty_pages / 2;
        let has_patience = waits_for_disks
            || self.stuck_rounds < self.patience_rounds
            || self.stuck_ns / u64::from(self.patience_rounds.max(1)) < pages_ns;
        let limit = if is_last {
            Some(Limit::Passes)
        } else {
            (is_stuck && !has_patience).then_some(Limit::NotShrinking)
        };

        let next =
            Decision::NextRound { expected_downtime_ns, most_pages, slow: false, must_precopy_only: false };
        let stop = Decision::StopAndCopy { expected_downtime_ns, pattern };
        if expected_downtime_ns <= self.goals.max_downtime_ns {
            return if is_worth_it { next } else { stop };
        }
        match (self.on_limit, limit) {
            (OnLimit::Stop, limit) if is_over || limit.is_some() => stop,
            (OnLimit::PostCopy, limit) if is_over || limit.is_some() || self.post_copy_start.has_begun() => {
                self.post_copy_start.decide(observed, pages_ns, &self.fixed, self.goals.max_downtime_ns)
            }
            (OnLimit::Abort, Some(limit)) => Decision::GiveUp {
                reason: GiveUp {
                    limit,
                    expected_downtime_ns,
                    fixed_ns: self.fixed.downtime_ns(0),
                    max_downtime_ns: self.goals.max_downtime_ns,
                },
            },
            _ => next,
        }
    }
}

/// The last scans, the oldest first: the number of modified pages, and the pages sent before each scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ScanHistory(VecDeque<(u64, u64)>);

impl ScanHistory {
    fn recognise(
        &mut self,
        observed: &RoundObservation,
        interval_ns: u64,
        sampling: &Sampling,
    ) -> Option<Pattern> {
        // Two averages, of which one begins a scan later than the other.
        let window = sampling.window.max(1) as usize;
        self.0.push_back((observed.dirty_pages, observed.pages_sent));
        self.0.drain(..self.0.len().saturating_sub(window + 1));
        let hundredths = |part: u64, of: u64| (u128::from(part) * 100).checked_div(of.into());

        if observed.remaining_pages == 0 && observed.duration_ns < interval_ns {
            return Some(Pattern::Drained);
        }
        if self.0.len() > window && self.is_stable(sampling.stable_percent) {
            return Some(Pattern::Stable);
        }
        hundredths(observed.resent_pages, observed.pages_sent)
            .is_some_and(|percent| percent >= sampling.resent_percent.into())
            .then_some(Pattern::Resent)
    }

    /// Compares the two averages. They have all scans in common but one each, so they differ by the first and the last
    /// one. The pages sent before the first scan do not count. Where dirty pages become more, rounds help even less.
    fn is_stable(&self, percent: u32) -> bool {
        let (Some((first, _)), Some((last, _))) = (self.0.front(), self.0.back()) else { return false };
        let sent: u128 = self.0.iter().skip(1).map(|(_, sent)| u128::from(*sent)).sum();
        u128::from(first.saturating_sub(*last)) * 100 <= sent * u128::from(percent)
    }
}

#[cfg(test)]
mod tests;
