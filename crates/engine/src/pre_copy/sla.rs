//! The policy of limits: it chooses the way that is expected to keep the user's limits.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::forecast::{FixedCost, Forecast};
use super::pattern::{PatternPolicy, Sampling};
use super::policy::{
    Decision, GiveUp, Limit, OnLimit, Policy, PreCopyGoals, RoundObservation, ThrottleChange,
};
use super::post_copy_start::{PostCopyStart, downtime_ns};
use crate::throttle::processors::CpuThrottlePolicy;

/// Strategies to continue a migration, in ascending order of the cost for the guest; the last one needs both hosts
/// while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationStrategy {
    /// Rounds until few enough pages remain.
    PreCopy,
    /// Rounds with a CPU throttle.
    SlowedDown,
    /// The remaining pages are sent when the guest runs at the destination.
    PostCopy,
}

/// Strategies that are available for a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AvailableStrategies {
    /// True if a CPU throttle is available.
    pub slow_down: bool,
    /// True if post-copy is available.
    pub post_copy: bool,
}

/// Expected outcome of a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedOutcome {
    /// Downtime, in nanoseconds.
    pub downtime_ns: u64,
    /// Time from the request until everything is at the destination, in nanoseconds.
    pub total_ns: u64,
}

/// Expected outcomes of all strategies, and the choice. None for a strategy that is not available, or does not
/// converge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outlook {
    /// The chosen strategy.
    pub chosen: MigrationStrategy,
    /// True if the chosen strategy keeps both limits; if false, none of the others does.
    pub is_feasible: bool,
    /// Rounds without a CPU throttle.
    pub pre_copy: Option<ExpectedOutcome>,
    /// Rounds with a CPU throttle.
    pub slowed_down: Option<ExpectedOutcome>,
    /// Post-copy now.
    pub post_copy: Option<ExpectedOutcome>,
}

impl fmt::Display for MigrationStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PreCopy => "rounds",
            Self::SlowedDown => "rounds with a CPU throttle",
            Self::PostCopy => "post-copy",
        })
    }
}

/// Text for a report: the chosen way, and the expected outcome of each.
impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.chosen)?;
        if !self.is_feasible {
            f.write_str(", until the time limit: no method is expected to keep the limits")?;
        }
        let all = [
            (MigrationStrategy::PreCopy, self.pre_copy),
            (MigrationStrategy::SlowedDown, self.slowed_down),
            (MigrationStrategy::PostCopy, self.post_copy),
        ];
        for (number, (way, outcome)) in all.into_iter().enumerate() {
            f.write_str(if number == 0 { "; expected for " } else { ", for " })?;
            match outcome {
                None => write!(f, "{way}: unknown")?,
                Some(ExpectedOutcome { downtime_ns, total_ns }) => write!(
                    f,
                    "{way}: {} ms of downtime and {}.{} s in all",
                    downtime_ns / 1_000_000,
                    total_ns / 1_000_000_000,
                    total_ns / 100_000_000 % 10
                )?,
            }
        }
        Ok(())
    }
}

/// Keeps two limits of the user: the downtime, and the total time. After each scan the expected outcome of each way
/// follows from the rates so far, and the first one that keeps both limits is chosen: rounds, rounds with a CPU
/// throttle, post-copy.
///
/// ```text
/// share     = dirty rate / rate of sending            what a round leaves of what it sends
/// pre-copy  : rounds of pages, pages · share, pages · share², … until one fits into the downtime
/// slowed    : the same with half, or with a sixth of the share where that is more
/// post-copy : pages, once
/// ```
///
/// The share is that of the pages written during the round. For pages that were left to a later round it is unknown
/// whether they were written; so where a round sent a part, the share of its pages that became dirty again is used,
/// doubled, because a page of it could be written for half of the time.
///
/// Where the round sent pages that are never written, as in the first pass, the share is not known, and rounds are not
/// expected to converge.
///
/// Within the downtime limit it continues as [`PatternPolicy`] does, while there is time. One scan may be chance: the
/// way changes when two scans agree, or when there is no time for a second. A CPU throttle stays on.
///
/// If no way keeps both limits it continues, with a CPU throttle if possible, as long as there is time and rounds
/// are allowed, because a guest may become calmer; then it applies the user's choice for the limit, early enough for
/// the time to be kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlaPolicy {
    rounds: PatternPolicy,
    goals: PreCopyGoals,
    ways: AvailableStrategies,
    on_limit: OnLimit,
    fixed: FixedCost,
    // Learned state. It is not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    forecast: Forecast,
    /// The present way.
    #[serde(skip)]
    way: Option<MigrationStrategy>,
    /// The way that the last scan proposed instead.
    #[serde(skip)]
    proposed: Option<MigrationStrategy>,
    #[serde(skip)]
    outlook: Option<Outlook>,
    /// True if the CPU throttle is on.
    #[serde(skip)]
    is_throttled: bool,
    /// True once a scan has shown the share of a round that becomes dirty again.
    #[serde(skip)]
    is_share_known: bool,
    #[serde(skip)]
    post_copy_start: PostCopyStart,
}

/// Highest share of dirty pages after a round, in thousandths of the pages sent, at which rounds converge.
const MAX_SHARE: u128 = 900;
/// Dirty rate of a throttled guest, in thousandths of the sending rate ([`CpuThrottlePolicy`]).
const THROTTLED_SHARE: u128 = 500;
/// Highest number of expected rounds of a way.
const MAX_ROUNDS: u32 = 100;

impl SlaPolicy {
    /// Creates the policy. It keeps `goals.max_total_ns`, or has no time limit if that is absent.
    pub fn new(goals: PreCopyGoals, ways: AvailableStrategies, on_limit: OnLimit, fixed: FixedCost) -> Self {
        // The inner policy decides on rounds, never on giving up.
        let rounds =
            PatternPolicy::new(without_round_limit(goals), OnLimit::Abort, fixed).with_patience(u32::MAX);
        Self {
            rounds,
            goals,
            ways,
            on_limit,
            fixed,
            forecast: Forecast::default(),
            way: None,
            proposed: None,
            outlook: None,
            is_throttled: false,
            is_share_known: false,
            post_copy_start: PostCopyStart::default(),
        }
    }

    /// Sets the sampling.
    #[must_use]
    pub fn sampling(self, sampling: Sampling) -> Self {
        Self { rounds: self.rounds.sampling(sampling), ..self }
    }

    /// Returns the outlook at the last scan; none before all of memory was sent once, and where the guest can be
    /// stopped.
    pub fn outlook(&self) -> Option<Outlook> {
        self.outlook
    }

    fn max_total_ns(&self) -> u64 {
        self.goals.max_total_ns.unwrap_or(u64::MAX)
    }

    fn is_within_limits(&self, outcome: ExpectedOutcome) -> bool {
        outcome.downtime_ns <= self.goals.max_downtime_ns && outcome.total_ns <= self.max_total_ns()
    }

    /// Returns the outcome of rounds that leave `share` of the pages they send, in thousandths; none if they do not
    /// converge.
    fn rounds_outcome(
        &self,
        observed: &RoundObservation,
        pages_ns: u64,
        share: u128,
    ) -> Option<ExpectedOutcome> {
        if share > MAX_SHARE {
            return None;
        }
        let scans_ns = observed.scan_ns.saturating_mul(2);
        let overhead_ns = observed.interval_ns.saturating_sub(observed.duration_ns);
        let (mut left_ns, mut total_ns) = (pages_ns, observed.elapsed_ns);
        for _ in 0..MAX_ROUNDS {
            let downtime_ns = self.fixed.downtime_ns(left_ns).saturating_add(scans_ns);
            if downtime_ns <= self.goals.max_downtime_ns {
                return Some(ExpectedOutcome { downtime_ns, total_ns: total_ns.saturating_add(downtime_ns) });
            }
            let round_ns = left_ns.saturating_add(overhead_ns);
            total_ns = total_ns.saturating_add(round_ns);
            left_ns = u64::try_from(u128::from(round_ns) * share / 1000).unwrap_or(u64::MAX);
        }
        None
    }

    /// Returns the share of the pages sent that is dirty after a round, in thousandths; none if it is not known.
    fn share(&self, observed: &RoundObservation, pages_ns: u64) -> Option<u128> {
        let written = u128::from(observed.dirty_pages.saturating_sub(observed.remaining_pages));
        let written_ns = (u128::from(pages_ns) * written).checked_div(observed.dirty_pages.into())?;
        let share = (written_ns * 1000).checked_div(observed.interval_ns.into())?;
        if observed.remaining_pages == 0 {
            return Some(share);
        }
        let redirtied =
            (written * 2000).checked_div(observed.pages_sent.into()).filter(|_| self.is_share_known)?;
        Some(share.max(redirtied))
    }

    /// Returns the expected outcomes of all ways, and the choice.
    fn compute_outlook(&self, observed: &RoundObservation, pages_ns: u64) -> Outlook {
        let share = self.share(observed, pages_ns);
        let of_disks = |share: u128| {
            let must_precopy_pages = u128::from(observed.must_precopy_pages.min(observed.dirty_pages));
            (share * must_precopy_pages).checked_div(observed.dirty_pages.into()).unwrap_or(0)
        };
        let slowed = |share: u128| {
            // Slower processors write less to memory; disks have a throttle of their own.
            let of_disks = of_disks(share);
            let without_disks = share - of_disks;
            of_disks
                + THROTTLED_SHARE
                    .max(without_disks / u128::from(CpuThrottlePolicy::MIN_SHARE_DIVISOR))
                    .min(without_disks)
        };
        let outcome = |share| self.rounds_outcome(observed, pages_ns, share);
        let pre_copy = share.filter(|_| !self.is_throttled).and_then(outcome);
        // The measured share already is that of a throttled guest.
        let slowed_share = if self.is_throttled { share } else { share.map(slowed) };
        let slowed_down = slowed_share.filter(|_| self.ways.slow_down).and_then(outcome);
        let downtime_ns = downtime_ns(observed, pages_ns, &self.fixed);
        let total_ns = observed.elapsed_ns.saturating_add(self.fixed.downtime_ns(0)).saturating_add(pages_ns);
        let post_copy = self.ways.post_copy.then_some(ExpectedOutcome { downtime_ns, total_ns });

        let all = [
            (MigrationStrategy::PreCopy, pre_copy),
            (MigrationStrategy::SlowedDown, slowed_down),
            (MigrationStrategy::PostCopy, post_copy),
        ];
        let kept = all
            .into_iter()
            .find(|(_, outcome)| outcome.is_some_and(|outcome| self.is_within_limits(outcome)));
        let (chosen, is_feasible) = kept.map_or((self.fallback_strategy(), false), |(way, _)| (way, true));
        Outlook { chosen, is_feasible, pre_copy, slowed_down, post_copy }
    }

    /// Returns the way for the case that none keeps the limits.
    fn fallback_strategy(&self) -> MigrationStrategy {
        if self.ways.slow_down { MigrationStrategy::SlowedDown } else { MigrationStrategy::PreCopy }
    }

    /// Starts post-copy, or sends the rounds of disks before it.
    fn start_post_copy(&mut self, observed: &RoundObservation, pages_ns: u64) -> Decision {
        self.post_copy_start.decide(observed, pages_ns, &self.fixed, self.goals.max_downtime_ns)
    }

    /// Returns true if there is no time for another scan before the remaining pages have to be sent.
    fn is_last_moment(&self, observed: &RoundObservation, rest_ns: u64) -> bool {
        [observed.interval_ns, rest_ns].into_iter().fold(observed.elapsed_ns, u64::saturating_add)
            > self.max_total_ns()
    }
}

/// Removes the limit of rounds.
fn without_round_limit(goals: PreCopyGoals) -> PreCopyGoals {
    PreCopyGoals { max_passes: u32::MAX, ..goals }
}

impl Policy for SlaPolicy {
    fn set_goals(&mut self, goals: PreCopyGoals) {
        self.goals = goals;
        self.rounds.set_goals(without_round_limit(goals));
    }

    fn throttle_changed(&mut self, change: ThrottleChange) {
        self.rounds.throttle_changed(change);
        // Two consecutive scans have to be of the same guest.
        (self.is_throttled, self.proposed) = (change == ThrottleChange::Slower, None);
        if change == ThrottleChange::Unavailable {
            self.ways.slow_down = false;
            self.way = self.way.filter(|way| *way != MigrationStrategy::SlowedDown);
        }
    }

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        self.forecast.learn(observed);
        self.outlook = None;
        let decision = self.rounds.decide(observed);
        let Decision::NextRound { expected_downtime_ns, most_pages, .. } = decision else { return decision };
        let (fixed_ns, max_downtime_ns) = (self.fixed.downtime_ns(0), self.goals.max_downtime_ns);
        let give_up = |limit| Decision::GiveUp {
            reason: GiveUp { limit, expected_downtime_ns, fixed_ns, max_downtime_ns },
        };
        if observed.pass == 0 {
            // Nothing after this pass would be in time.
            let is_over = self.on_limit == OnLimit::Abort && observed.elapsed_ns > self.max_total_ns();
            return if is_over { give_up(Limit::Total) } else { decision };
        }
        let pages_ns = self.forecast.pages_ns(observed);
        let is_last_moment = self.is_last_moment(observed, expected_downtime_ns);
        let stop = Decision::StopAndCopy { expected_downtime_ns, pattern: None };
        let slow = |way| Decision::NextRound {
            expected_downtime_ns,
            most_pages,
            slow: way == MigrationStrategy::SlowedDown,
            must_precopy_only: false,
        };
        if expected_downtime_ns <= self.goals.max_downtime_ns {
            // Another round would be worth it, if there is time for it.
            return if is_last_moment { stop } else { slow(self.way.unwrap_or(MigrationStrategy::PreCopy)) };
        }
        let mut outlook = self.compute_outlook(observed, pages_ns);
        self.is_share_known = true;
        if is_last_moment && outlook.post_copy.is_some_and(|outcome| self.is_within_limits(outcome)) {
            // The other ways need another scan, and that may find more pages.
            outlook.chosen = MigrationStrategy::PostCopy;
        }
        let is_certain = self.proposed == Some(outlook.chosen) || is_last_moment;
        self.proposed = Some(outlook.chosen);
        let before = self.way.unwrap_or(MigrationStrategy::PreCopy);
        let wanted = outlook.chosen;
        if outlook.chosen != before && !is_certain {
            outlook.chosen = before;
        }
        let mut kept_by_disks = None;
        if outlook.chosen == MigrationStrategy::PostCopy || self.post_copy_start.has_begun() {
            let left = self.start_post_copy(observed, pages_ns);
            if matches!(left, Decision::GiveUp { .. }) {
                // Its disks prevent post-copy: the migration continues without it as long as there is time.
                self.post_copy_start = PostCopyStart::default();
                (outlook.chosen, outlook.is_feasible) = match wanted {
                    MigrationStrategy::PostCopy => (self.fallback_strategy(), false),
                    other => (other, outlook.is_feasible),
                };
                kept_by_disks = Some(left);
            } else {
                (self.way, self.outlook) = (Some(outlook.chosen), Some(outlook));
                return left;
            }
        }
        (self.way, self.outlook) = (Some(outlook.chosen), Some(outlook));
        let is_last_pass = observed.pass >= self.goals.max_passes;
        if !is_last_pass && (outlook.is_feasible || !is_last_moment) {
            return slow(outlook.chosen);
        }
        match (self.on_limit, kept_by_disks) {
            (OnLimit::Stop, _) => stop,
            (_, Some(gave_up)) => gave_up,
            (OnLimit::PostCopy, None) => self.start_post_copy(observed, pages_ns),
            (OnLimit::Abort, None) => give_up(if is_last_pass { Limit::Passes } else { Limit::Total }),
        }
    }
}

#[cfg(test)]
mod tests;
