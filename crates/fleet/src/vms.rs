//! Simulation of VMs on hosts with a power model, in the set-up of Beloglazov and Buyya 2012 (Concurrency and
//! Computation 24(13), 1397–1420), as CloudSim's examples have it.
//!
//! - [`Setup`]: hosts, VMs, their demand, and the time that a move takes.
//! - [`simulate`]: a day in steps of five minutes, exact at the end of every move.
//! - [`Metrics`]: energy, SLATAH, PDM, SLAV, ESV, moves.
//! - [`Baseline`]: static, THR-MMT and LR-MMT. [`Ours`]: the planner of this crate.
//! - [`plausibility`]: relations that results of the baselines must have.

mod baseline;
mod evaluation;
mod metrics;
mod ours;
mod placement;
pub mod plausibility;
mod regression;
mod result;
mod setup;
mod simulation;

pub use baseline::{Baseline, Overload, WakePower};
pub use evaluation::{
    BadEvaluation, DayResult, Evaluation, OURS, POLICIES, SCHEMA, SweepPoint, evaluate_day, sum_up,
};
pub use metrics::Metrics;
pub use ours::Ours;
pub use result::{PolicyResult, REFERENCE};
pub use setup::{BadSetup, HostSpec, MemoryRule, Setup, VmSpec};
pub use simulation::{Policy, Snapshot, simulate};
