//! The forecast of a migration beside those of the other ways: what a user sees before starting one.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::facts::MigrationFacts;
use super::simulation::MigrationEnd;
use super::{Estimate, MigrationForecast, forecast};
use crate::pre_copy::{
    AnyPolicy, AvailableStrategies, HybridPolicy, MigrationStrategy, OnLimit, PatternPolicy, PreCopyGoals,
};

/// Forecast of a way that the request does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alternative {
    /// The way.
    pub way: MigrationStrategy,
    /// Its forecast.
    pub forecast: MigrationForecast,
}

/// Forecast of a request, and of the other ways if it is not expected to converge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForecastWithAlternatives {
    /// Name of the policy of the request.
    pub policy: String,
    /// Forecast of the request.
    pub forecast: MigrationForecast,
    /// Downtime limit, in nanoseconds.
    pub max_downtime_ns: u64,
    /// Other ways that end within the downtime limit, the fastest first.
    pub alternatives: Vec<Alternative>,
}

/// Forecasts a request, and the ways that are available beside it if rounds alone are not expected to converge.
pub fn compare(
    facts: &MigrationFacts,
    policy: &AnyPolicy,
    goals: PreCopyGoals,
    ways: AvailableStrategies,
) -> ForecastWithAlternatives {
    let requested = forecast(facts, policy, goals);
    let mut alternatives = Vec::new();
    if !requested.converges {
        if ways.slow_down && !requested.is_slowed {
            let slowed = MigrationFacts { throttle_requested: true, ..facts.clone() };
            let policy = PatternPolicy::new(goals, OnLimit::Abort, facts.fixed).sampling(facts.sampling);
            alternatives.push((MigrationStrategy::SlowedDown, forecast(&slowed, &policy.into(), goals)));
        }
        if ways.post_copy && requested.end != MigrationEnd::PostCopy {
            let policy = HybridPolicy::new(goals, 1, facts.fixed);
            alternatives.push((MigrationStrategy::PostCopy, forecast(facts, &policy.into(), goals)));
        }
    }
    let is_within = |forecast: &MigrationForecast| {
        let arrives = matches!(forecast.end, MigrationEnd::StopAndCopy | MigrationEnd::PostCopy);
        arrives && forecast.downtime_ns.expected <= goals.max_downtime_ns
    };
    let mut alternatives: Vec<_> = alternatives
        .into_iter()
        .filter(|(_, forecast)| is_within(forecast))
        .map(|(way, forecast)| Alternative { way, forecast })
        .collect();
    alternatives.sort_by_key(|other| other.forecast.total_ns.expected);
    ForecastWithAlternatives {
        policy: policy.name().to_owned(),
        forecast: requested,
        max_downtime_ns: goals.max_downtime_ns,
        alternatives,
    }
}

/// A duration in nanoseconds, shown in a unit in which it has two or three digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShownDuration(pub u64);

impl fmt::Display for ShownDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ns @ 0..1_000_000_000 => write!(f, "{} ms", ns.div_ceil(1_000_000)),
            ns @ 1_000_000_000..10_000_000_000 => {
                write!(f, "{}.{} s", ns / 1_000_000_000, ns / 100_000_000 % 10)
            }
            ns => write!(f, "{} s", ns / 1_000_000_000),
        }
    }
}

/// An expected duration with its interval.
struct ShownEstimate(Estimate);

impl fmt::Display for ShownEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Estimate { expected, low, high } = self.0;
        write!(f, "{} ({} to {})", ShownDuration(expected), ShownDuration(low), ShownDuration(high))
    }
}

/// Returns a rate in MB/s.
fn megabytes(bytes_per_s: u64) -> u64 {
    bytes_per_s / 1_000_000
}

/// Text for users: whether it converges, what it takes, and what would work instead.
impl fmt::Display for ForecastWithAlternatives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MigrationForecast { end, total_ns, downtime_ns, bytes, .. } = self.forecast;
        if self.forecast.converges {
            f.write_str("will converge")?;
        } else if end == MigrationEnd::PostCopy {
            f.write_str("will end in post-copy")?;
        } else {
            write!(
                f,
                "will not converge: writes {} MB/s, link carries {} MB/s",
                megabytes(self.forecast.writes_bytes_per_s),
                megabytes(self.forecast.sends_bytes_per_s)
            )?;
        }
        match end {
            MigrationEnd::StopAndCopy | MigrationEnd::PostCopy => write!(
                f,
                "; {} in all, downtime {}, {} MB on the wire",
                ShownEstimate(total_ns),
                ShownEstimate(downtime_ns),
                megabytes(bytes.expected)
            )?,
            MigrationEnd::GivesUp { .. } => write!(f, "; gives up after {}", ShownEstimate(total_ns))?,
            MigrationEnd::Endless => f.write_str("; rounds would go on for ever")?,
        }
        for Alternative { way, forecast } in &self.alternatives {
            let name = match way {
                MigrationStrategy::PreCopy => "rounds",
                MigrationStrategy::SlowedDown => "a CPU throttle",
                MigrationStrategy::PostCopy => "hybrid",
            };
            let (total, downtime) = (ShownEstimate(forecast.total_ns), ShownEstimate(forecast.downtime_ns));
            write!(f, "; {name} would take {total}, downtime {downtime}")?;
        }
        let percent = self.forecast.converging_percent;
        if (20..=80).contains(&percent) {
            write!(f, "; uncertain: rounds converge in {percent}% of the cases that the measurements allow")?;
        }
        Ok(())
    }
}
