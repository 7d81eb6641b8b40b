//! Forecasts beside outcomes: the correction of forecasts by the record of earlier ones.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::facts::MigrationFacts;
use super::{Estimate, MigrationForecast};

/// Rate at which a guest writes, beside the rate at which its pages are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WriteHeat {
    /// Below a hundredth.
    Idle,
    /// Below a half.
    Warm,
    /// A half or more.
    Hot,
}

/// Kind of VM: VMs whose forecasts are expected to err in the same way.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CalibrationClass {
    /// Name of the policy.
    pub policy: String,
    /// Size of the memory: the power of two, in MiB, that it reaches.
    pub memory_octave: u32,
    /// Rate of writes.
    pub heat: WriteHeat,
}

impl CalibrationClass {
    /// Returns the kind of the VM of a forecast.
    pub fn of(policy: &str, facts: &MigrationFacts) -> Self {
        let writes = facts.guest.writes.bytes_per_s();
        let sends = facts.path.pages_bytes_per_s() as u64;
        let heat = match writes {
            writes if writes < sends / 100 => WriteHeat::Idle,
            writes if writes < sends / 2 => WriteHeat::Warm,
            _ => WriteHeat::Hot,
        };
        let memory_octave = (facts.guest.memory_bytes >> 20).max(1).ilog2();
        Self { policy: policy.to_owned(), memory_octave, heat }
    }
}

/// Outcome of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationOutcome {
    /// Time from the request to the end, in nanoseconds.
    pub total_ns: u64,
    /// Downtime, in nanoseconds; 0 if the guest continued at the source.
    pub downtime_ns: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// True if rounds alone brought the downtime below its limit.
    pub converged: bool,
}

/// Forecast beside its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibrationRecord {
    /// Kind of the VM.
    pub kind: CalibrationClass,
    /// The forecast as it was simulated, without a correction.
    pub simulated: MigrationForecast,
    /// The forecast as it was shown.
    pub shown: MigrationForecast,
    /// The outcome.
    pub outcome: MigrationOutcome,
}

/// Records of forecasts beside outcomes, and the corrections that follow from them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Calibration {
    /// The oldest first.
    records: Vec<CalibrationRecord>,
}

/// Quantity of a forecast.
#[derive(Clone, Copy, Debug)]
enum Quantity {
    Total,
    Downtime,
    Bytes,
}

impl Quantity {
    fn of_forecast(self, forecast: &MigrationForecast) -> Estimate {
        match self {
            Self::Total => forecast.total_ns,
            Self::Downtime => forecast.downtime_ns,
            Self::Bytes => forecast.bytes,
        }
    }

    fn of_outcome(self, outcome: &MigrationOutcome) -> u64 {
        match self {
            Self::Total => outcome.total_ns,
            Self::Downtime => outcome.downtime_ns,
            Self::Bytes => outcome.bytes,
        }
    }
}

/// Ratios of outcomes to forecasts, in millionths: the quantiles between which eight of ten lie, and the median.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RatioQuantiles {
    low: u64,
    median: u64,
    high: u64,
    /// True if the record is long enough for the quantiles to be an interval.
    is_interval: bool,
}

/// One, in millionths.
const UNIT: u64 = 1_000_000;

impl Calibration {
    /// Most records that are kept.
    pub const MOST_RECORDS: usize = 1000;
    /// Records of a kind from which on it is corrected by itself; until then all records of the policy count.
    pub const MIN_RECORDS: usize = 5;
    /// Records from which on the interval is that of the record: with fewer, none of them is outside of eight in ten.
    pub const MIN_INTERVAL_RECORDS: usize = 9;
    /// Newest records of a kind that count: hosts and guests change.
    const RECENT_RECORDS: usize = 64;

    /// Records an outcome.
    pub fn learn(&mut self, record: CalibrationRecord) {
        let excess = (self.records.len() + 1).saturating_sub(Self::MOST_RECORDS);
        self.records.drain(..excess);
        self.records.push(record);
    }

    /// Returns the records, the oldest first.
    pub fn records(&self) -> &[CalibrationRecord] {
        &self.records
    }

    /// Returns the forecast as the record corrects it: expected values by the median of the ratios of outcomes to
    /// forecasts, intervals by their quantiles once there are enough.
    pub fn correct(&self, kind: &CalibrationClass, simulated: &MigrationForecast) -> MigrationForecast {
        let corrected = |quantity: Quantity| {
            let estimate = quantity.of_forecast(simulated);
            self.quantiles(kind, simulated, quantity).map_or(estimate, |ratios| correct(estimate, ratios))
        };
        MigrationForecast {
            total_ns: corrected(Quantity::Total),
            downtime_ns: corrected(Quantity::Downtime),
            bytes: corrected(Quantity::Bytes),
            ..*simulated
        }
    }

    /// Returns the ratios of the kind, or of all VMs with the policy; none if there are too few.
    ///
    /// Records count whose migration ended in the way that is forecast: one that gave up has no downtime.
    fn quantiles(
        &self,
        kind: &CalibrationClass,
        simulated: &MigrationForecast,
        quantity: Quantity,
    ) -> Option<RatioQuantiles> {
        let ended_alike = |record: &&CalibrationRecord| {
            record.kind.policy == kind.policy
                && std::mem::discriminant(&record.simulated.end) == std::mem::discriminant(&simulated.end)
                && record.simulated.converges == record.outcome.converged
        };
        let ratios = |is_of: &dyn Fn(&&CalibrationRecord) -> bool| {
            let recent = self.records.iter().rev().filter(ended_alike).filter(is_of);
            let ratio = |record: &CalibrationRecord| {
                let expected = quantity.of_forecast(&record.simulated).expected;
                let outcome = u128::from(quantity.of_outcome(&record.outcome)) * u128::from(UNIT);
                outcome.checked_div(expected.into()).map(|ratio| u64::try_from(ratio).unwrap_or(u64::MAX))
            };
            recent.filter_map(ratio).take(Self::RECENT_RECORDS).collect::<Vec<_>>()
        };
        let own = ratios(&|record| record.kind == *kind);
        let mut ratios = if own.len() >= Self::MIN_RECORDS { own } else { ratios(&|_| true) };
        if ratios.len() < Self::MIN_RECORDS {
            return None;
        }
        ratios.sort_unstable();
        let count = ratios.len();
        // The ranks between which the next value lies in eight of ten cases, whatever the distribution is.
        let low = ((count + 1) / 10).max(1);
        let high = ((count + 1) * 9).div_ceil(10).min(count);
        Some(RatioQuantiles {
            low: ratios[low - 1],
            median: ratios[count / 2],
            high: ratios[high - 1],
            is_interval: count >= Self::MIN_INTERVAL_RECORDS,
        })
    }

    /// Returns how good the forecasts were.
    pub fn accuracy(&self) -> Accuracy {
        let mut accuracy = Accuracy { forecasts: self.records.len(), ..Accuracy::default() };
        for CalibrationRecord { shown, outcome, .. } in &self.records {
            let is_near = |estimate: Estimate, outcome: u64, percent: u128, least: u64| {
                let difference = estimate.expected.abs_diff(outcome);
                difference <= least || u128::from(difference) * 100 <= u128::from(outcome) * percent
            };
            accuracy.near_total += usize::from(is_near(shown.total_ns, outcome.total_ns, 20, 500_000_000));
            accuracy.near_downtime +=
                usize::from(is_near(shown.downtime_ns, outcome.downtime_ns, 50, 10_000_000));
            accuracy.total_in_interval += usize::from(shown.total_ns.contains(outcome.total_ns));
            accuracy.downtime_in_interval += usize::from(shown.downtime_ns.contains(outcome.downtime_ns));
            let (forecast, happened) = (!shown.converges, !outcome.converged);
            accuracy.stuck_forecast += usize::from(forecast);
            accuracy.stuck += usize::from(happened);
            accuracy.stuck_foreseen += usize::from(forecast && happened);
        }
        accuracy
    }
}

/// Corrects an estimate by ratios.
fn correct(estimate: Estimate, ratios: RatioQuantiles) -> Estimate {
    let by = |value: u64, ratio: u64| {
        u64::try_from(u128::from(value) * u128::from(ratio) / u128::from(UNIT)).unwrap_or(u64::MAX)
    };
    let expected = by(estimate.expected, ratios.median);
    let (low, high) = if ratios.is_interval {
        (by(estimate.expected, ratios.low), by(estimate.expected, ratios.high))
    } else {
        // What the facts leave open, and beside it all that has happened.
        let low = by(estimate.low, ratios.median).min(by(estimate.expected, ratios.low));
        (low, by(estimate.high, ratios.median).max(by(estimate.expected, ratios.high)))
    };
    Estimate { expected, low: low.min(expected), high: high.max(expected) }
}

/// Record of all forecasts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accuracy {
    /// Number of forecasts.
    pub forecasts: usize,
    /// Forecasts of the total time within 20% of the outcome, or half a second.
    pub near_total: usize,
    /// Forecasts of the downtime within 50% of the outcome, or 10 ms.
    pub near_downtime: usize,
    /// Outcomes within the interval of the total time.
    pub total_in_interval: usize,
    /// Outcomes within the interval of the downtime.
    pub downtime_in_interval: usize,
    /// Forecasts that rounds would not converge.
    pub stuck_forecast: usize,
    /// Migrations whose rounds did not converge.
    pub stuck: usize,
    /// Those of them that were forecast.
    pub stuck_foreseen: usize,
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { forecasts, near_total, near_downtime, total_in_interval, downtime_in_interval, .. } = self;
        if *forecasts == 0 {
            return f.write_str("no forecast has an outcome yet");
        }
        write!(
            f,
            "of {forecasts} forecasts {near_total} within ±20% of the total time and {near_downtime} within ±50% of \
             the downtime; {total_in_interval} and {downtime_in_interval} within their 80% intervals"
        )?;
        if self.stuck > 0 || self.stuck_forecast > 0 {
            write!(
                f,
                "; {} forecast not to converge, {} did not, {} of them as forecast",
                self.stuck_forecast, self.stuck, self.stuck_foreseen
            )?;
        }
        Ok(())
    }
}
