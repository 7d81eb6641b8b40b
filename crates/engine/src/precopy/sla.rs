//! The policy of limits: whichever way is expected to keep what the user asked for.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::forecast::{FixedCost, Forecast};
use super::{Aim, ByPattern, Decision, GiveUp, Limit, OnLimit, Policy, RoundObservation};
use crate::throttle::processors::CpuDrain;

/// How a migration goes on, from what troubles the guest least to what it needs both hosts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Rounds, until what is left is little enough.
    PreCopy,
    /// The same, of a guest whose processors are slowed down.
    SlowedDown,
    /// What is left goes when the guest runs at the destination.
    PostCopy,
}

/// What can be done to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ways {
    /// Its processors can be slowed down.
    pub slow_down: bool,
    /// Pages can come after it.
    pub post_copy: bool,
}

/// What a way is expected to come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How long the guest stands still, in nanoseconds.
    pub downtime_ns: u64,
    /// From the request until all is at the destination, in nanoseconds.
    pub total_ns: u64,
}

/// What each way is expected to come to, and which was chosen. None for a way that is not open, or leads nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outlook {
    /// The way that is taken.
    pub chosen: Way,
    /// Whether it keeps both limits; none of the others does if it does not.
    pub is_kept: bool,
    /// Rounds as they are.
    pub pre_copy: Option<Outcome>,
    /// Rounds with slower processors.
    pub slowed_down: Option<Outcome>,
    /// Post-copy now.
    pub post_copy: Option<Outcome>,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PreCopy => "rounds",
            Self::SlowedDown => "rounds with slower processors",
            Self::PostCopy => "post-copy",
        })
    }
}

/// For a report: the way, and what each would come to.
impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.chosen)?;
        if !self.is_kept {
            f.write_str(", for as long as there is time: no way is expected to keep the limits")?;
        }
        let all = [
            (Way::PreCopy, self.pre_copy),
            (Way::SlowedDown, self.slowed_down),
            (Way::PostCopy, self.post_copy),
        ];
        for (number, (way, outcome)) in all.into_iter().enumerate() {
            f.write_str(if number == 0 { "; expected of " } else { ", of " })?;
            match outcome {
                None => write!(f, "{way} nothing")?,
                Some(Outcome { downtime_ns, total_ns }) => write!(
                    f,
                    "{way} {} ms of downtime and {}.{} s in all",
                    downtime_ns / 1_000_000,
                    total_ns / 1_000_000_000,
                    total_ns / 100_000_000 % 10
                )?,
            }
        }
        Ok(())
    }
}

/// Keeps two limits that a user gives: how long the guest may stand still, and when all has to be over. After each look
/// what each way would come to follows from the rates so far, and the first one that keeps both is taken: rounds, rounds of
/// a slower guest, post-copy.
///
/// ```text
/// share     = dirty rate / rate of sending            what a round leaves of what it sends
/// pre-copy  : rounds of pages, pages · share, pages · share², … until one fits into the downtime
/// slowed    : the same with half, or with a tenth of the share where that is more
/// post-copy : pages, once
/// ```
///
/// Within the downtime it goes on as [`ByPattern`] does, while there is time. One look may be chance: another way is taken
/// when two say so, or when there is no time for a second. Who is slowed down stays so. Where no way keeps both limits it
/// goes on, slowed down if that is possible, as long as there is time, for a guest may become calmer; then what the user
/// said to do at the limit is done, early enough for the time to be kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BySla {
    rounds: ByPattern,
    aim: Aim,
    ways: Ways,
    on_limit: OnLimit,
    fixed: FixedCost,
    // What was learnt. Not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    forecast: Forecast,
    /// The way that is taken.
    #[serde(skip)]
    way: Option<Way>,
    /// What the last look said to take in its place.
    #[serde(skip)]
    proposed: Option<Way>,
    #[serde(skip)]
    outlook: Option<Outlook>,
}

/// A round that leaves more than this share of what it sends, in thousandths, leads nowhere.
const MOST_SHARE: u128 = 900;
/// What a slowed guest dirties of what is sent, in thousandths ([`CpuDrain`]).
const SLOWED_SHARE: u128 = 500;
/// More rounds than that are no way.
const MOST_ROUNDS: u32 = 100;

impl BySla {
    /// A new policy. It keeps `aim.max_total_ns`, or has all the time there is where there is none.
    pub fn new(aim: Aim, ways: Ways, on_limit: OnLimit, fixed: FixedCost) -> Self {
        // The other policy is asked how rounds go, never when to give up.
        let rounds = ByPattern::new(patient(aim), OnLimit::Abort, fixed).with_patience(u32::MAX);
        let (forecast, way, proposed, outlook) = (Forecast::default(), None, None, None);
        Self { rounds, aim, ways, on_limit, fixed, forecast, way, proposed, outlook }
    }

    /// Has the guest looked at in this way.
    #[must_use]
    pub fn sampling(self, sampling: super::Sampling) -> Self {
        Self { rounds: self.rounds.sampling(sampling), ..self }
    }

    /// What was expected at the last look; none before all of memory went once, and where the guest can be stopped.
    pub fn outlook(&self) -> Option<Outlook> {
        self.outlook
    }

    fn max_total_ns(&self) -> u64 {
        self.aim.max_total_ns.unwrap_or(u64::MAX)
    }

    fn keeps(&self, outcome: Outcome) -> bool {
        outcome.downtime_ns <= self.aim.max_downtime_ns && outcome.total_ns <= self.max_total_ns()
    }

    /// What rounds come to that leave such a share of what they send, in thousandths; none if they lead nowhere.
    fn rounds_outcome(&self, observed: &RoundObservation, pages_ns: u64, share: u128) -> Option<Outcome> {
        if share > MOST_SHARE {
            return None;
        }
        let scans_ns = observed.scan_ns.saturating_mul(2);
        let beside_ns = observed.interval_ns.saturating_sub(observed.duration_ns);
        let (mut left_ns, mut total_ns) = (pages_ns, observed.elapsed_ns);
        for _ in 0..MOST_ROUNDS {
            let downtime_ns = self.fixed.downtime_ns(left_ns).saturating_add(scans_ns);
            if downtime_ns <= self.aim.max_downtime_ns {
                return Some(Outcome { downtime_ns, total_ns: total_ns.saturating_add(downtime_ns) });
            }
            let round_ns = left_ns.saturating_add(beside_ns);
            total_ns = total_ns.saturating_add(round_ns);
            left_ns = u64::try_from(u128::from(round_ns) * share / 1000).unwrap_or(u64::MAX);
        }
        None
    }

    /// What each way comes to, and which is to be taken.
    fn look_ahead(&self, observed: &RoundObservation, pages_ns: u64) -> Outlook {
        let written = u128::from(observed.dirty_pages.saturating_sub(observed.left_pages));
        let written_ns =
            (u128::from(pages_ns) * written).checked_div(observed.dirty_pages.into()).unwrap_or(0);
        let share = (written_ns * 1000).checked_div(observed.interval_ns.into()).unwrap_or(u128::MAX);
        let is_slowed = self.way == Some(Way::SlowedDown);
        // What a slowed guest writes is seen already.
        let slowed_share = if is_slowed {
            share
        } else {
            SLOWED_SHARE.max(share / u128::from(CpuDrain::LEAST_SHARE)).min(share)
        };
        let pre_copy = if is_slowed { None } else { self.rounds_outcome(observed, pages_ns, share) };
        let slowed_down =
            self.ways.slow_down.then(|| self.rounds_outcome(observed, pages_ns, slowed_share)).flatten();
        let downtime_ns = self.fixed.downtime_ns(0).saturating_add(observed.scan_ns.saturating_mul(2));
        let total_ns = observed.elapsed_ns.saturating_add(downtime_ns).saturating_add(pages_ns);
        let post_copy = self.ways.post_copy.then_some(Outcome { downtime_ns, total_ns });

        let all = [(Way::PreCopy, pre_copy), (Way::SlowedDown, slowed_down), (Way::PostCopy, post_copy)];
        let kept = all.into_iter().find(|(_, outcome)| outcome.is_some_and(|outcome| self.keeps(outcome)));
        let patient = if self.ways.slow_down { Way::SlowedDown } else { Way::PreCopy };
        let (chosen, is_kept) = kept.map_or((patient, false), |(way, _)| (way, true));
        Outlook { chosen, is_kept, pre_copy, slowed_down, post_copy }
    }

    /// Whether there is no time for another look before all that is left has to go.
    fn is_last_moment(&self, observed: &RoundObservation, rest_ns: u64) -> bool {
        [observed.interval_ns, rest_ns].into_iter().fold(observed.elapsed_ns, u64::saturating_add)
            > self.max_total_ns()
    }
}

/// As many rounds as it takes.
fn patient(aim: Aim) -> Aim {
    Aim { max_rounds: u32::MAX, ..aim }
}

impl Policy for BySla {
    fn aim(&mut self, aim: Aim) {
        self.aim = aim;
        self.rounds.aim(patient(aim));
    }

    fn slowed(&mut self) {
        self.rounds.slowed();
    }

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        self.forecast.learn(observed);
        self.outlook = None;
        let decision = self.rounds.decide(observed);
        let Decision::NextRound { expected_downtime_ns, most_pages, .. } = decision else { return decision };
        let pages_ns = self.forecast.pages_ns(observed);
        let is_last_moment = self.is_last_moment(observed, expected_downtime_ns);
        if observed.round == 0 {
            return decision;
        }
        let stop = Decision::StopAndCopy { expected_downtime_ns, pattern: None };
        let slow =
            |way| Decision::NextRound { expected_downtime_ns, most_pages, slow: way == Way::SlowedDown };
        if expected_downtime_ns <= self.aim.max_downtime_ns {
            // Another round would be worth it, where there is time for it.
            return if is_last_moment { stop } else { slow(self.way.unwrap_or(Way::PreCopy)) };
        }
        let mut outlook = self.look_ahead(observed, pages_ns);
        let is_certain = self.proposed == Some(outlook.chosen) || is_last_moment;
        self.proposed = Some(outlook.chosen);
        let before = self.way.unwrap_or(Way::PreCopy);
        if outlook.chosen != before && !is_certain {
            outlook.chosen = before;
        }
        self.way = Some(outlook.chosen);
        self.outlook = Some(outlook);
        let post_copy = Decision::PostCopy {
            expected_downtime_ns: self
                .fixed
                .downtime_ns(0)
                .saturating_add(observed.scan_ns.saturating_mul(2)),
        };
        if outlook.chosen == Way::PostCopy {
            return post_copy;
        }
        if outlook.is_kept || !is_last_moment {
            return slow(outlook.chosen);
        }
        match self.on_limit {
            OnLimit::Stop => stop,
            OnLimit::PostCopy => post_copy,
            OnLimit::Abort => Decision::GiveUp {
                reason: GiveUp {
                    limit: Limit::Total,
                    expected_downtime_ns,
                    fixed_ns: self.fixed.downtime_ns(0),
                    max_downtime_ns: self.aim.max_downtime_ns,
                },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::limits::PAGE_BYTES;

    use super::*;

    const MS: u64 = 1_000_000;
    const ALL: Ways = Ways { slow_down: true, post_copy: true };
    const NOTHING: Ways = Ways { slow_down: false, post_copy: false };

    /// A guest of 200,000 pages, on a link that carries 100 of them in a millisecond.
    #[derive(Clone, Copy)]
    struct Writer {
        /// To how many pages of its own it writes, one after the other.
        own_pages: u64,
        /// How many of them in a millisecond, while it is not slowed down.
        pages_per_ms: u64,
    }

    const PAGES: u64 = 200_000;
    const SENT_PER_MS: u64 = 100;

    /// How such a migration ends: the last decision, when, and whether the guest was slowed down on the way.
    fn moved(writer: Writer, policy: BySla) -> (Decision, u64, bool) {
        let mut policy = policy;
        let (mut round, mut left, mut elapsed_ms, mut was_slow) = (0, PAGES, 0, false);
        let mut slow = false;
        let mut pages = PAGES;
        loop {
            let took_ms = (pages / SENT_PER_MS).max(1);
            let rate = if slow { writer.pages_per_ms.min(SENT_PER_MS / 2) } else { writer.pages_per_ms };
            let written = (rate * took_ms).min(writer.own_pages);
            elapsed_ms += took_ms;
            let left_pages = left - pages;
            left = (left_pages + written).min(writer.own_pages.max(left_pages));
            round += u32::from(left_pages == 0);
            let observed = RoundObservation {
                round,
                dirty_pages: left,
                unknown_pages: left,
                pages_sent: pages,
                left_pages: left_pages.min(left),
                bytes_sent: pages * PAGE_BYTES,
                duration_ns: took_ms * MS,
                interval_ns: took_ms * MS,
                elapsed_ns: elapsed_ms * MS,
                ..RoundObservation::default()
            };
            match policy.decide(&observed) {
                Decision::NextRound { most_pages, slow: is_slow, .. } => {
                    pages = most_pages.unwrap_or(left).clamp(1, left.max(1));
                    left = left.max(1);
                    slow = is_slow;
                    was_slow |= slow;
                }
                end => return (end, elapsed_ms, was_slow),
            }
            assert!(elapsed_ms < 1_000_000, "it goes on for ever");
        }
    }

    fn sla(max_downtime_ms: u64, max_total_ms: u64, ways: Ways, on_limit: OnLimit) -> BySla {
        let max_total_ns = Some(max_total_ms * MS);
        let aim = Aim { max_downtime_ns: max_downtime_ms * MS, max_total_ns, ..Aim::default() };
        BySla::new(aim, ways, on_limit, FixedCost::default())
    }

    const CALM: Writer = Writer { own_pages: 100_000, pages_per_ms: 20 };
    const FAST: Writer = Writer { own_pages: 100_000, pages_per_ms: 150 };

    #[test]
    fn a_calm_guest_goes_by_rounds() {
        let (end, ms, was_slow) = moved(CALM, sla(100, 10_000, ALL, OnLimit::Abort));
        assert!(
            matches!(end, Decision::StopAndCopy { expected_downtime_ns, .. } if expected_downtime_ns <= 100 * MS)
        );
        assert!(!was_slow && ms <= 10_000, "{end:?} after {ms}");
    }

    #[test]
    fn one_that_writes_faster_than_the_link_carries_is_slowed_down_where_there_is_time() {
        let (end, ms, was_slow) = moved(FAST, sla(100, 20_000, ALL, OnLimit::Abort));
        assert!(
            matches!(end, Decision::StopAndCopy { expected_downtime_ns, .. } if expected_downtime_ns <= 100 * MS)
        );
        assert!(was_slow && ms <= 20_000, "{end:?} after {ms}");
    }

    /// 2 s are taken by the first pass, and 1 s by what it leaves; slowed down it would be 2 s.
    #[test]
    fn where_there_is_not_pages_come_after_it() {
        let (end, ms, was_slow) = moved(FAST, sla(100, 3_500, ALL, OnLimit::Abort));
        assert!(matches!(end, Decision::PostCopy { .. }), "{end:?} after {ms}");
        assert!(!was_slow && ms + 1_000 <= 3_500, "after {ms}");
        // Nor is there another way for a guest that must not be slowed down.
        let (end, ms, _) = moved(FAST, sla(100, 60_000, Ways { slow_down: false, ..ALL }, OnLimit::Abort));
        assert!(matches!(end, Decision::PostCopy { .. }), "{end:?} after {ms}");
    }

    #[test]
    fn where_nothing_keeps_the_limits_what_was_said_is_done_in_time() {
        let at_limit = |on_limit| moved(FAST, sla(100, 8_000, NOTHING, on_limit));
        let (end, ms, _) = at_limit(OnLimit::Abort);
        assert!(matches!(end, Decision::GiveUp { reason: GiveUp { limit: Limit::Total, .. } }), "{end:?}");
        assert!((6_000..8_000).contains(&ms), "after {ms}");
        let (end, ms, _) = at_limit(OnLimit::Stop);
        let Decision::StopAndCopy { expected_downtime_ns, .. } = end else { panic!("{end:?}") };
        assert!(expected_downtime_ns > 100 * MS && ms + expected_downtime_ns / MS <= 8_000, "after {ms}");
        assert!(matches!(at_limit(OnLimit::PostCopy).0, Decision::PostCopy { .. }));
    }

    #[test]
    fn there_may_be_all_the_time_there_is() {
        let aim = Aim { max_downtime_ns: 100 * MS, ..Aim::default() };
        let policy = BySla::new(aim, ALL, OnLimit::Abort, FixedCost::default());
        assert!(matches!(moved(FAST, policy), (Decision::StopAndCopy { .. }, _, true)));
    }

    /// One look in which a guest writes a lot is no reason to slow it down.
    #[test]
    fn one_look_may_be_chance() {
        let mut policy = sla(50, 60_000, ALL, OnLimit::Abort);
        let look = |round, dirty_pages, elapsed_ms| RoundObservation {
            elapsed_ns: elapsed_ms * MS,
            ..super::super::tests::round(round, dirty_pages, 100_000, 1_000)
        };
        let slow = |decision| matches!(decision, Decision::NextRound { slow: true, .. });
        assert!(!slow(policy.decide(&look(1, 150_000, 1_000))));
        assert_eq!(
            policy.outlook().map(|outlook| (outlook.chosen, outlook.pre_copy)),
            Some((Way::PreCopy, None))
        );
        assert!(!slow(policy.decide(&look(2, 10_000, 2_000))));
        assert!(!slow(policy.decide(&look(3, 150_000, 3_000))));
        assert!(slow(policy.decide(&look(4, 150_000, 4_000))));
        // And stays so.
        assert!(slow(policy.decide(&look(5, 50_000, 5_000))));
    }
}
