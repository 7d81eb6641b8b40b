//! Relations that the results of all policies must have, whatever the trace: an error in a baseline must not make ours
//! look good.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::result::{PolicyResult, REFERENCE};
use super::setup::{MemoryRule, STEP_S, Setup};

/// Bounds of the energy of a day, in kWh.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bounds {
    /// All hosts fully busy all day: non-power-aware operation.
    pub all_full_kwh: f64,
    /// All hosts on, with the demand shared in proportion to their capacities.
    pub all_on_kwh: f64,
    /// All demand at the lowest power for each MIPS that any host has: perfect packing, which nothing can undercut.
    pub packed_kwh: f64,
}

impl Bounds {
    /// Returns the bounds of a set-up.
    pub fn new(setup: &Setup) -> Self {
        let kwh = |watts: f64, seconds: f64| watts * seconds / 3_600_000.0;
        let day_s = setup.steps() as f64 * STEP_S;
        let full = setup.hosts.iter().map(|host| host.power.peak()).sum();
        let mips: f64 = setup.hosts.iter().map(|host| host.mips).sum();
        let least =
            setup.hosts.iter().map(|host| host.power.peak() / host.mips).fold(f64::INFINITY, f64::min);
        let mut bounds = Self { all_full_kwh: kwh(full, day_s), all_on_kwh: 0.0, packed_kwh: 0.0 };
        let idle = setup.hosts.iter().map(|host| host.power.idle()).fold(f64::INFINITY, f64::min);
        for step in 0..setup.steps() {
            let demand: f64 = setup.demand(step).iter().map(|demand| f64::from(*demand)).sum();
            let shared = setup.hosts.iter().map(|host| host.power.watts(demand / mips)).sum();
            bounds.all_on_kwh += kwh(shared, STEP_S);
            bounds.packed_kwh += kwh((demand * least).max(hosts_for_memory(setup) * idle), STEP_S);
        }
        bounds
    }
}

/// Returns the number of hosts without which the memory of the VMs has no room.
fn hosts_for_memory(setup: &Setup) -> f64 {
    if setup.memory == MemoryRule::Ignored {
        return 1.0;
    }
    let largest = setup.hosts.iter().map(|host| host.memory_mb).fold(0.0, f64::max);
    (setup.vms.iter().map(|vm| vm.memory_mb).sum::<f64>() / largest).ceil()
}

/// A relation that does not hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "what")]
pub enum Finding {
    /// Less energy than perfect packing needs, at demand that was served.
    BelowPacking {
        /// The policy.
        policy: String,
    },
    /// More energy than all hosts need that are on all day.
    AboveAllOn {
        /// The policy.
        policy: String,
    },
    /// A policy that moves VMs needs more energy than none.
    AboveStatic {
        /// The policy.
        policy: String,
    },
    /// The static policy has moves or loses performance by them.
    StaticMoves,
    /// Moves without loss of performance, or the reverse; or a loss that is not that of so many moves.
    MovesAndLoss {
        /// The policy.
        policy: String,
    },
    /// A local regression packs hosts fuller than a threshold of 80%: it must need less energy than THR-MMT, and have
    /// more overload.
    RegressionAndThreshold {
        /// Energy of LR-MMT as a share of THR-MMT's.
        energy: f64,
    },
    /// A share outside of 0 to 1.
    NoShare {
        /// The policy.
        policy: String,
    },
    /// A policy leaves a larger part of the demand unserved than all others would tolerate.
    Unserved {
        /// The policy.
        policy: String,
        /// The share.
        share: f64,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BelowPacking { policy } => write!(f, "{policy} needs less energy than perfect packing"),
            Self::AboveAllOn { policy } => write!(f, "{policy} needs more energy than all hosts that are on"),
            Self::AboveStatic { policy } => write!(f, "{policy} needs more energy than the static policy"),
            Self::StaticMoves => write!(f, "the static policy moves VMs"),
            Self::MovesAndLoss { policy } => {
                write!(f, "{policy}: the loss by moves is not that of its moves")
            }
            Self::RegressionAndThreshold { energy } => {
                write!(
                    f,
                    "LR-MMT needs {energy:.3} of the energy of THR-MMT, or has less overload, which its rule excludes"
                )
            }
            Self::NoShare { policy } => write!(f, "{policy}: a share is not between 0 and 1"),
            Self::Unserved { policy, share } => {
                write!(f, "{policy} leaves {:.1}% of the demand unserved", share * 100.0)
            }
        }
    }
}

/// Energy of LR-MMT as a share of THR-MMT's that is plausible. The regression lets hosts be filled to 1 ÷ 1.2 = 83%
/// where the threshold is 80%, so it needs a little less, where processors are what fills hosts.
const REGRESSION_SHARE: std::ops::RangeInclusive<f64> = 0.75..=1.005;

/// Share of unserved demand above which a policy does not work.
const MOST_UNSERVED: f64 = 0.02;

/// Returns what is not plausible in the results of a day.
pub fn check(bounds: &Bounds, policies: &[PolicyResult]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let find = |name: &str| policies.iter().find(|one| one.policy == name).map(|one| one.metrics);
    let (stays, threshold, regression) = (find("static"), find("THR-MMT"), find(REFERENCE));
    for PolicyResult { policy, metrics } in policies {
        let policy = || policy.clone();
        if metrics.energy_kwh < bounds.packed_kwh * (1.0 - metrics.unserved) {
            findings.push(Finding::BelowPacking { policy: policy() });
        }
        if metrics.energy_kwh > bounds.all_full_kwh {
            findings.push(Finding::AboveAllOn { policy: policy() });
        }
        if stays.is_some_and(|stays| metrics.energy_kwh > stays.energy_kwh) {
            findings.push(Finding::AboveStatic { policy: policy() });
        }
        if (metrics.moves == 0) != (metrics.pdm == 0.0) {
            findings.push(Finding::MovesAndLoss { policy: policy() });
        }
        let shares = [metrics.slatah, metrics.pdm, metrics.unserved];
        if shares.iter().any(|share| !(0.0..=1.0).contains(share)) {
            findings.push(Finding::NoShare { policy: policy() });
        }
        if metrics.unserved > MOST_UNSERVED {
            findings.push(Finding::Unserved { policy: policy(), share: metrics.unserved });
        }
    }
    if stays.is_some_and(|stays| stays.moves > 0) {
        findings.push(Finding::StaticMoves);
    }
    if let Some((threshold, regression)) = threshold.zip(regression) {
        let energy = regression.energy_kwh / threshold.energy_kwh;
        if !REGRESSION_SHARE.contains(&energy) || regression.slatah < threshold.slatah {
            findings.push(Finding::RegressionAndThreshold { energy });
        }
    }
    findings
}
