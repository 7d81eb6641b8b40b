//! The policy of limits: whichever way is expected to keep what the user asked for.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::forecast::{FixedCost, Forecast};
use super::leaving::{Leaving, downtime_ns};
use super::{Aim, ByPattern, Decision, GiveUp, Held, Limit, OnLimit, Policy, RoundObservation};
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
/// slowed    : the same with half, or with a sixth of the share where that is more
/// post-copy : pages, once
/// ```
///
/// The share is that of what was written while the round went. Of pages that were left to a later round it is not seen
/// whether they were written to; so where a round sent a part, what came back of what it sent is taken, twice, because a
/// page of it was there to be written to for half of the time. Where what was sent is what nobody writes to, as in the first
/// pass, the share is not known, and rounds are not expected to lead anywhere.
///
/// Within the downtime it goes on as [`ByPattern`] does, while there is time. One look may be chance: another way is taken
/// when two say so, or when there is no time for a second. Who is slowed down stays so. Where no way keeps both limits it
/// goes on, slowed down if that is possible, as long as there is time and rounds are allowed, for a guest may become calmer;
/// then what the user said to do at the limit is done, early enough for the time to be kept.
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
    /// Whether the guest is slowed down already.
    #[serde(skip)]
    is_held: bool,
    /// What a round leaves of what it sends was seen once.
    #[serde(skip)]
    has_seen: bool,
    #[serde(skip)]
    leaving: Leaving,
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
        Self {
            rounds,
            aim,
            ways,
            on_limit,
            fixed,
            forecast: Forecast::default(),
            way: None,
            proposed: None,
            outlook: None,
            is_held: false,
            has_seen: false,
            leaving: Leaving::default(),
        }
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

    /// What a round leaves of what it sends, in thousandths; none where that was not seen.
    fn share(&self, observed: &RoundObservation, pages_ns: u64) -> Option<u128> {
        let written = u128::from(observed.dirty_pages.saturating_sub(observed.left_pages));
        let written_ns = (u128::from(pages_ns) * written).checked_div(observed.dirty_pages.into())?;
        let share = (written_ns * 1000).checked_div(observed.interval_ns.into())?;
        if observed.left_pages == 0 {
            return Some(share);
        }
        let came_back = (written * 2000).checked_div(observed.pages_sent.into()).filter(|_| self.has_seen)?;
        Some(share.max(came_back))
    }

    /// What each way comes to, and which is to be taken.
    fn look_ahead(&self, observed: &RoundObservation, pages_ns: u64) -> Outlook {
        let share = self.share(observed, pages_ns);
        let of_disks = |share: u128| {
            let disk_pages = u128::from(observed.disk_pages.min(observed.dirty_pages));
            (share * disk_pages).checked_div(observed.dirty_pages.into()).unwrap_or(0)
        };
        let slowed = |share: u128| {
            // Slower processors write less to memory; disks have a throttle of their own.
            let of_disks = of_disks(share);
            let of_memory = share - of_disks;
            of_disks + SLOWED_SHARE.max(of_memory / u128::from(CpuDrain::LEAST_SHARE)).min(of_memory)
        };
        let outcome = |share| self.rounds_outcome(observed, pages_ns, share);
        let pre_copy = share.filter(|_| !self.is_held).and_then(outcome);
        // What a slowed guest writes is seen already.
        let slowed_share = if self.is_held { share } else { share.map(slowed) };
        let slowed_down = slowed_share.filter(|_| self.ways.slow_down).and_then(outcome);
        let downtime_ns = downtime_ns(observed, pages_ns, &self.fixed);
        let total_ns = observed.elapsed_ns.saturating_add(self.fixed.downtime_ns(0)).saturating_add(pages_ns);
        let post_copy = self.ways.post_copy.then_some(Outcome { downtime_ns, total_ns });

        let all = [(Way::PreCopy, pre_copy), (Way::SlowedDown, slowed_down), (Way::PostCopy, post_copy)];
        let kept = all.into_iter().find(|(_, outcome)| outcome.is_some_and(|outcome| self.keeps(outcome)));
        let (chosen, is_kept) = kept.map_or((self.patient_way(), false), |(way, _)| (way, true));
        Outlook { chosen, is_kept, pre_copy, slowed_down, post_copy }
    }

    /// The way that is taken where none keeps the limits.
    fn patient_way(&self) -> Way {
        if self.ways.slow_down { Way::SlowedDown } else { Way::PreCopy }
    }

    /// The guest leaves what is left of its memory behind.
    fn leave(&mut self, observed: &RoundObservation, pages_ns: u64) -> Decision {
        self.leaving.decide(observed, pages_ns, &self.fixed, self.aim.max_downtime_ns)
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

    fn held(&mut self, held: Held) {
        self.rounds.held(held);
        // Two looks in a row have to be of the same guest.
        (self.is_held, self.proposed) = (held == Held::Slower, None);
        if held == Held::ForGood {
            self.ways.slow_down = false;
            self.way = self.way.filter(|way| *way != Way::SlowedDown);
        }
    }

    fn decide(&mut self, observed: &RoundObservation) -> Decision {
        self.forecast.learn(observed);
        self.outlook = None;
        let decision = self.rounds.decide(observed);
        let Decision::NextRound { expected_downtime_ns, most_pages, .. } = decision else { return decision };
        let (fixed_ns, max_downtime_ns) = (self.fixed.downtime_ns(0), self.aim.max_downtime_ns);
        let give_up = |limit| Decision::GiveUp {
            reason: GiveUp { limit, expected_downtime_ns, fixed_ns, max_downtime_ns },
        };
        if observed.round == 0 {
            // Whatever comes after it is too late.
            let is_over = self.on_limit == OnLimit::Abort && observed.elapsed_ns > self.max_total_ns();
            return if is_over { give_up(Limit::Total) } else { decision };
        }
        let pages_ns = self.forecast.pages_ns(observed);
        let is_last_moment = self.is_last_moment(observed, expected_downtime_ns);
        let stop = Decision::StopAndCopy { expected_downtime_ns, pattern: None };
        let slow = |way| Decision::NextRound {
            expected_downtime_ns,
            most_pages,
            slow: way == Way::SlowedDown,
            disks_alone: false,
        };
        if expected_downtime_ns <= self.aim.max_downtime_ns {
            // Another round would be worth it, where there is time for it.
            return if is_last_moment { stop } else { slow(self.way.unwrap_or(Way::PreCopy)) };
        }
        let mut outlook = self.look_ahead(observed, pages_ns);
        self.has_seen = true;
        if is_last_moment && outlook.post_copy.is_some_and(|outcome| self.keeps(outcome)) {
            // The others need another look, and that may find more.
            outlook.chosen = Way::PostCopy;
        }
        let is_certain = self.proposed == Some(outlook.chosen) || is_last_moment;
        self.proposed = Some(outlook.chosen);
        let before = self.way.unwrap_or(Way::PreCopy);
        let wanted = outlook.chosen;
        if outlook.chosen != before && !is_certain {
            outlook.chosen = before;
        }
        let mut kept_by_disks = None;
        if outlook.chosen == Way::PostCopy || self.leaving.has_begun() {
            let left = self.leave(observed, pages_ns);
            if matches!(left, Decision::GiveUp { .. }) {
                // Its disks keep it from leaving its memory behind: it goes on without that for as long as there is time.
                self.leaving = Leaving::default();
                (outlook.chosen, outlook.is_kept) = match wanted {
                    Way::PostCopy => (self.patient_way(), false),
                    other => (other, outlook.is_kept),
                };
                kept_by_disks = Some(left);
            } else {
                (self.way, self.outlook) = (Some(outlook.chosen), Some(outlook));
                return left;
            }
        }
        (self.way, self.outlook) = (Some(outlook.chosen), Some(outlook));
        let is_last_round = observed.round >= self.aim.max_rounds;
        if !is_last_round && (outlook.is_kept || !is_last_moment) {
            return slow(outlook.chosen);
        }
        match (self.on_limit, kept_by_disks) {
            (OnLimit::Stop, _) => stop,
            (_, Some(gave_up)) => gave_up,
            (OnLimit::PostCopy, None) => self.leave(observed, pages_ns),
            (OnLimit::Abort, None) => give_up(if is_last_round { Limit::Rounds } else { Limit::Total }),
        }
    }
}

#[cfg(test)]
mod tests;
