//! All policies on the days of a trace.

use serde::{Deserialize, Serialize};

use super::baseline::Baseline;
use super::metrics::Metrics;
use super::ours::Ours;
use super::plausibility::{Bounds, Finding, check};
use super::result::{PolicyResult, REFERENCE};
use super::setup::{BadSetup, MemoryRule, Setup};
use super::simulation::simulate;
use crate::planner::{BadSettings, Settings};
use crate::trace::Day;

/// Schema of the result.
pub const SCHEMA: &str = "whimbrel.energy.vms/1";

/// Name of the planner among the policies.
pub const OURS: &str = "whimbrel";

/// Results of a day.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DayResult {
    /// The day, as YYYYMMDD.
    pub day: String,
    /// Number of VMs.
    pub vms: usize,
    /// Bounds of the energy that any policy needs.
    pub bounds: Bounds,
    /// Results of all policies.
    pub policies: Vec<PolicyResult>,
    /// Implausible properties of them.
    pub findings: Vec<Finding>,
}

/// Means over all days for a factor of the time that moves take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepPoint {
    /// The factor.
    pub move_factor: f64,
    /// Mean time of a move of an average VM, in seconds.
    pub mean_move_s: f64,
    /// Means of all policies.
    pub policies: Vec<PolicyResult>,
}

/// Results of all days.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// [`SCHEMA`].
    pub schema: String,
    /// Human-readable name of the trace.
    pub trace: String,
    /// Number of hosts.
    pub hosts: usize,
    /// Rule about memory.
    pub memory: MemoryRule,
    /// Settings of the planner.
    pub settings: Settings,
    /// All days, with moves as long as they are.
    pub days: Vec<DayResult>,
    /// Means over the days, by the factor of the time that moves take.
    pub sweep: Vec<SweepPoint>,
}

/// The reason why an evaluation is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadEvaluation {
    /// The set-up.
    #[error(transparent)]
    Setup(#[from] BadSetup),
    /// Settings of the planner.
    #[error(transparent)]
    Settings(#[from] BadSettings),
}

/// Names of all policies.
pub const POLICIES: [&str; 5] = ["static", "THR-MMT", REFERENCE, "LR-MMT, waking counted", OURS];

/// Simulates a day under policies of [`POLICIES`].
pub fn evaluate_day(
    day: &Day,
    hosts: usize,
    memory: MemoryRule,
    move_factor: f64,
    settings: Settings,
    wanted: &[String],
) -> Result<DayResult, BadEvaluation> {
    let setup = Setup::new(day, hosts, memory, move_factor)?;
    let mut policies = Vec::new();
    for policy in POLICIES.into_iter().filter(|policy| wanted.iter().any(|one| one == policy)) {
        let metrics = match baseline(policy) {
            Some(mut baseline) => simulate(&setup, &mut baseline)?,
            None => simulate(&setup, &mut Ours::new(&setup, settings)?)?,
        };
        policies.push(PolicyResult { policy: policy.to_owned(), metrics });
    }
    let bounds = Bounds::new(&setup);
    let findings = check(&bounds, &policies);
    Ok(DayResult { day: day.name.clone(), vms: day.vms.len(), bounds, policies, findings })
}

/// Returns the baseline of a name; none if the name is ours.
fn baseline(policy: &str) -> Option<Baseline> {
    match policy {
        "static" => Some(Baseline::Static),
        "THR-MMT" => Some(Baseline::THR_MMT),
        REFERENCE => Some(Baseline::LR_MMT),
        OURS => None,
        _ => Some(Baseline::LR_MMT_WAKING),
    }
}

/// Returns the means over days, which have the same policies.
pub fn sum_up(days: &[DayResult]) -> Vec<PolicyResult> {
    let Some(first) = days.first() else { return Vec::new() };
    let mean = |at: usize, policy: &str| {
        let all: Vec<&Metrics> =
            days.iter().filter_map(|day| day.policies.get(at)).map(|one| &one.metrics).collect();
        let mean =
            |of: fn(&Metrics) -> f64| all.iter().map(|metrics| of(metrics)).sum::<f64>() / all.len() as f64;
        let metrics = Metrics {
            energy_kwh: mean(|one| one.energy_kwh),
            slatah: mean(|one| one.slatah),
            pdm: mean(|one| one.pdm),
            slav: mean(|one| one.slav),
            esv: mean(|one| one.esv),
            moves: mean(|one| one.moves as f64).round() as u64,
            unserved: mean(|one| one.unserved),
            mean_hosts: mean(|one| one.mean_hosts),
            starts: mean(|one| one.starts as f64).round() as u64,
        };
        PolicyResult { policy: policy.to_owned(), metrics }
    };
    first.policies.iter().enumerate().map(|(at, one)| mean(at, &one.policy)).collect()
}
