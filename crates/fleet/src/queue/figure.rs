//! The paper's Fig. 4 for one trace: energy against latency, beside a static baseline.

use serde::{Deserialize, Serialize};

use super::capacity::{Bank, Pair};
use super::search::{Best, Goal, Met, Static};
use super::workload::Workload;

/// Latencies of the figure, in seconds.
pub const LATENCIES_S: [u32; 9] = [30, 60, 120, 150, 180, 300, 330, 600, 900];

/// Headrooms that the search tries, in percent.
pub const HEADROOMS_PERCENT: [u32; 17] =
    [0, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 130, 160, 200, 250, 300];

/// Minimum times to run that the search tries, in seconds: 15 minutes to 24 hours.
pub const MIN_RUNS_S: [u32; 8] = [900, 1800, 3600, 7200, 14_400, 28_800, 43_200, 86_400];

/// Savings that the paper reports: of the first latency against the second, as a share.
const PAPER_SAVINGS: [(u32, u32, f64); 2] = [(30, 180, 0.23), (150, 330, 0.17)];

/// Schema of the result.
pub const SCHEMA: &str = "whimbrel.energy.queue/1";

/// A trace as it was simulated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceSummary {
    /// Human-readable name.
    pub name: String,
    /// Seconds that were simulated.
    pub seconds: usize,
    /// Requests that were simulated.
    pub requests: u64,
    /// Number of gaps.
    pub gaps: usize,
    /// Seconds in gaps.
    pub gap_s: usize,
    /// Factor by which the rate was scaled up.
    pub factor: f64,
    /// Seconds over which a rate that was scaled up was smoothed.
    pub smoothing_s: usize,
    /// Mean time of service, in seconds.
    pub service_s: f64,
    /// Mean requests per second.
    pub mean_per_s: f64,
    /// Mean requests per second of the busiest minute.
    pub peak_per_s: f64,
}

impl TraceSummary {
    /// Describes a workload.
    pub fn new(name: String, workload: &Workload) -> Self {
        Self {
            name,
            seconds: workload.seconds(),
            requests: workload.requests(),
            gaps: workload.gaps.len(),
            gap_s: workload.gaps.iter().map(ExactSizeIterator::len).sum(),
            factor: workload.factor,
            smoothing_s: workload.smoothing_s,
            service_s: workload.service_s,
            mean_per_s: workload.mean_per_s(),
            peak_per_s: workload.peak_per_s,
        }
    }
}

/// One point of the figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Latency, in seconds.
    pub latency_s: u32,
    /// The best pair; none if no pair meets the goal.
    pub best: Option<Best>,
    /// Its energy as a share of the static baseline's.
    pub of_static: Option<f64>,
    /// Its energy as a share of that of the whole bank, always on.
    pub of_whole_bank: Option<f64>,
}

/// Saving of a short latency against a long one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saving {
    /// The short latency, in seconds.
    pub latency_s: u32,
    /// The long latency, in seconds.
    pub against_s: u32,
    /// Share of the energy that the short latency saves; none if a latency has no pair.
    pub share: Option<f64>,
    /// The share that the paper reports for its trace.
    pub paper: f64,
}

/// The figure of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// [`SCHEMA`].
    pub schema: String,
    /// The trace.
    pub trace: TraceSummary,
    /// The servers.
    pub bank: Bank,
    /// The limit on late requests.
    pub goal: Goal,
    /// Seed of arrivals and services.
    pub seed: u64,
    /// Number of pairs that the search had.
    pub pairs: usize,
    /// The smallest bank that meets the goal without switching; none if the whole bank does not.
    pub static_baseline: Option<Static>,
    /// Energy of the whole bank, always on, in joules; none if it does not meet the goal.
    pub whole_bank: Option<Met>,
    /// Energy against latency.
    pub points: Vec<Point>,
    /// Savings beside the paper's.
    pub savings: Vec<Saving>,
}

/// Baselines, to which energy is related.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Baselines {
    /// The smallest constant bank.
    pub static_baseline: Option<Static>,
    /// The whole bank.
    pub whole_bank: Option<Met>,
}

impl Figure {
    /// Puts the results of a search together.
    pub fn new(
        trace: TraceSummary,
        bank: Bank,
        goal: Goal,
        seed: u64,
        pairs: usize,
        baselines: Baselines,
        results: Vec<(u32, Option<Best>)>,
    ) -> Self {
        let relative = |best: &Option<Best>, to: Option<f64>| Some(best.as_ref()?.met.energy_j / to?);
        let static_j = baselines.static_baseline.as_ref().map(|one| one.met.energy_j);
        let whole_j = baselines.whole_bank.as_ref().map(|met| met.energy_j);
        let point = |(latency_s, best): (u32, Option<Best>)| {
            let (of_static, of_whole_bank) = (relative(&best, static_j), relative(&best, whole_j));
            Point { latency_s, best, of_static, of_whole_bank }
        };
        let points: Vec<Point> = results.into_iter().map(point).collect();
        let savings = savings(&points);
        let Baselines { static_baseline, whole_bank } = baselines;
        let schema = SCHEMA.to_owned();
        Self { schema, trace, bank, goal, seed, pairs, static_baseline, whole_bank, points, savings }
    }
}

fn savings(points: &[Point]) -> Vec<Saving> {
    let energy = |latency_s: u32| {
        let point = points.iter().find(|point| point.latency_s == latency_s)?;
        Some(point.best.as_ref()?.met.energy_j)
    };
    let has = |latency_s: u32| points.iter().any(|point| point.latency_s == latency_s);
    PAPER_SAVINGS
        .into_iter()
        .filter(|(short, long, _)| has(*short) && has(*long))
        .map(|(latency_s, against_s, paper)| {
            let share = energy(latency_s).zip(energy(against_s)).map(|(short, long)| 1.0 - short / long);
            Saving { latency_s, against_s, share, paper }
        })
        .collect()
}

/// Returns all pairs of these headrooms and minimum times.
pub fn pairs(headrooms_percent: &[u32], min_runs_s: &[u32]) -> Vec<Pair> {
    let pair = |headroom_percent: u32| {
        min_runs_s.iter().map(move |min_run_s| Pair { headroom_percent, min_run_s: *min_run_s })
    };
    headrooms_percent.iter().flat_map(|headroom| pair(*headroom)).collect()
}
