//! Forecast of a migration before it starts, and of the rest of one that is under way.
//!
//! The policies of [`crate::pre_copy`] decide about a simulated guest, so what is forecast is what the same code will
//! decide later. The guest is a model of measured facts: the pages that it writes as a function of the interval, the
//! rates of the link and of the processors, the costs that these hosts had before.
//!
//! Facts are uncertain. The migration is simulated with a slower and a faster link, and with a guest that writes less
//! and more; eight of ten outcomes lie in the interval of an [`Estimate`]. Once outcomes of earlier migrations are
//! known, [`Calibration`] corrects the forecast and replaces the interval by the one in which eight of ten of them lay.
//!
//! - [`facts`]: what has to be measured.
//! - [`writes`]: the working set curve, and [`tracking`], by which it is measured.
//! - [`history`]: what earlier migrations have shown.
//! - [`RestForecaster`]: the rest of a migration that is under way.
//! - [`calibration`]: forecasts beside outcomes.

mod alternatives;
pub mod calibration;
pub mod facts;
pub mod history;
mod pages;
mod rest;
mod simulation;
mod slowdown;
pub mod tracking;
pub mod writes;

use serde::{Deserialize, Serialize};

use crate::pre_copy::{AnyPolicy, PreCopyGoals, RoundObservation};
use facts::MigrationFacts;
use simulation::{SimulatedOutcome, Simulation};

pub use alternatives::{Alternative, ForecastWithAlternatives, ShownDuration, compare};
pub use calibration::Calibration;
pub use rest::RestForecaster;
pub use simulation::MigrationEnd;

/// Expected value, and the interval in which eight of ten outcomes are expected to lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Estimate {
    /// Expected value.
    pub expected: u64,
    /// Lower end of the interval.
    pub low: u64,
    /// Upper end of the interval.
    pub high: u64,
}

impl Estimate {
    /// Returns an estimate of a value that is certain.
    pub fn certain(value: u64) -> Self {
        Self { expected: value, low: value, high: value }
    }

    /// Returns true if an outcome lies in the interval.
    pub fn contains(&self, outcome: u64) -> bool {
        (self.low..=self.high).contains(&outcome)
    }
}

/// Forecast of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationForecast {
    /// Expected end of the migration.
    pub end: MigrationEnd,
    /// True if rounds alone are expected to bring the downtime below its limit.
    pub converges: bool,
    /// Share of the simulated cases in which they do, in hundredths.
    pub converging_percent: u32,
    /// Time from the request until everything is at the destination, in nanoseconds.
    pub total_ns: Estimate,
    /// Downtime, in nanoseconds; 0 if the guest continues at the source.
    pub downtime_ns: Estimate,
    /// Bytes on the wire.
    pub bytes: Estimate,
    /// Rounds.
    pub rounds: u32,
    /// Write rate of the guest to memory over the shortest interval that was measured, in bytes of whole pages per
    /// second.
    pub writes_bytes_per_s: u64,
    /// Rate of the link in bytes of whole pages per second, as far as the hosts' processors keep up with it.
    pub sends_bytes_per_s: u64,
    /// True if the guest's processors are expected to be slowed down.
    pub is_slowed: bool,
}

/// Cases of an uncertain fact, in the sign of its spread, with their weights.
const CASES: [(i64, u32); 3] = [(-1, 1), (0, 2), (1, 1)];
/// Share of the outcomes below the interval, and above it, in hundredths.
const TAIL_PERCENT: u32 = 10;

/// Forecasts a migration that has not started. `policy` is a policy that has seen nothing, with these goals.
pub fn forecast(facts: &MigrationFacts, policy: &AnyPolicy, goals: PreCopyGoals) -> MigrationForecast {
    forecast_cases(facts, goals, |facts| Simulation::of_request(facts).run(policy.clone(), goals))
}

/// Forecasts the rest of a migration. `policy` is as it was before it decided after `observed`, or has seen nothing.
/// All times count from the request; bytes are those still to be sent.
pub fn forecast_rest(
    facts: &MigrationFacts,
    policy: &AnyPolicy,
    goals: PreCopyGoals,
    observed: &RoundObservation,
) -> MigrationForecast {
    forecast_cases(facts, goals, |facts| Simulation::of_rest(facts, observed).run(policy.clone(), goals))
}

/// Simulates all cases, and sums them up.
fn forecast_cases(
    facts: &MigrationFacts,
    goals: PreCopyGoals,
    simulate: impl Fn(&MigrationFacts) -> SimulatedOutcome,
) -> MigrationForecast {
    let expected = simulate(facts);
    let mut outcomes = Vec::new();
    for (link, link_weight) in CASES {
        for (writes, writes_weight) in CASES {
            let outcome =
                if (link, writes) == (0, 0) { expected } else { simulate(&case(facts, link, writes)) };
            outcomes.push((outcome, link_weight * writes_weight));
        }
    }
    let converges = |outcome: &SimulatedOutcome| {
        outcome.end == MigrationEnd::StopAndCopy && outcome.downtime_ns <= goals.max_downtime_ns as f64
    };
    let estimate = |of: &dyn Fn(&SimulatedOutcome) -> f64| {
        let values = outcomes.iter().map(|(outcome, weight)| (of(outcome) as u64, *weight)).collect();
        interval(of(&expected) as u64, values)
    };
    let all: u32 = outcomes.iter().map(|(_, weight)| weight).sum();
    let converging: u32 =
        outcomes.iter().filter(|(outcome, _)| converges(outcome)).map(|(_, weight)| weight).sum();
    MigrationForecast {
        end: expected.end,
        converges: converges(&expected),
        converging_percent: converging * 100 / all,
        total_ns: estimate(&|outcome| outcome.total_ns),
        downtime_ns: estimate(&|outcome| outcome.downtime_ns),
        bytes: estimate(&|outcome| outcome.bytes),
        rounds: expected.rounds,
        writes_bytes_per_s: facts.guest.writes.bytes_per_s(),
        sends_bytes_per_s: facts.path.pages_bytes_per_s() as u64,
        is_slowed: expected.is_slowed,
    }
}

/// Returns the facts with a slower or faster link, and with a guest that writes less or more.
fn case(facts: &MigrationFacts, link: i64, writes: i64) -> MigrationFacts {
    let percent = |sign: i64, spread: u32| (100 + sign * i64::from(spread)).max(1) as u32;
    let mut case = facts.clone();
    let link_percent = u128::from(percent(link, facts.spread.link_percent));
    case.path.link_bytes_per_s =
        u64::try_from(u128::from(facts.path.link_bytes_per_s) * link_percent / 100).unwrap_or(u64::MAX);
    let writes_percent = percent(writes, facts.spread.writes_percent);
    case.guest.writes = facts.guest.writes.scaled(writes_percent);
    if let Some(disks) = &mut case.guest.disks {
        disks.writes = disks.writes.scaled(writes_percent);
    }
    case
}

/// Returns the estimate whose interval leaves a tail of the weighted values out on either side.
fn interval(expected: u64, mut values: Vec<(u64, u32)>) -> Estimate {
    values.sort_unstable();
    let all: u32 = values.iter().map(|(_, weight)| weight).sum();
    let quantile = |percent: u32| {
        let mut below = 0;
        let found = values.iter().find(|(_, weight)| {
            below += weight;
            below * 100 >= all * percent
        });
        found.map_or(expected, |(value, _)| *value)
    };
    Estimate {
        expected,
        low: quantile(TAIL_PERCENT).min(expected),
        high: quantile(100 - TAIL_PERCENT).max(expected),
    }
}

#[cfg(test)]
mod tests;
