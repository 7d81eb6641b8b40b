//! Settings of the planner.

use serde::{Deserialize, Serialize};

/// Settings of the planner.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Weight of the newest sample in a VM's smoothed level, above 0 and up to 1.
    pub smoothing: f32,
    /// Percentile of recent forecast errors that is kept free as headroom, from 0.5 to 1.
    pub headroom_percentile: f32,
    /// Headroom for a VM of which nothing is known, as a share of its size. It shrinks with each sample.
    pub unknown_share: f32,
    /// Share of a host's capacity up to which the need may fill it when VMs are placed.
    pub fill: f32,
    /// Margin below `fill` when hosts are emptied: what was packed today must not be moved again tomorrow.
    pub margin: f32,
    /// Share of a host's capacity that the forecast has to exceed for relief.
    pub watch: f32,
    /// Shortest time for which a host stays on, in seconds.
    pub min_run_s: f64,
    /// Shortest time between two moves of a VM for consolidation, in seconds.
    pub vm_rest_s: f64,
    /// Number of samples without which a VM is not moved for consolidation, at least 2.
    pub min_samples: u32,
    /// Power that copying a VM needs on both hosts together, in watts.
    pub move_watts: f64,
    /// Cost of a second in which a VM is slower because it moves, in joules for each busy unit of CPU capacity.
    pub slow_cost_j: f64,
    /// Energy of putting a host to sleep and waking it again, in joules.
    pub transition_j: f64,
    /// Time in which emptying a host has to save what it costs, in seconds.
    pub payback_s: f64,
    /// Most moves of one plan.
    pub max_moves: usize,
    /// Most hosts that one plan wakes, and most that it puts to sleep. Relief may wake more.
    pub max_transitions: usize,
}

impl Default for Settings {
    /// The settings that were tuned on five days of PlanetLab (docs/energy.md).
    fn default() -> Self {
        Self {
            smoothing: 0.5,
            headroom_percentile: 0.9,
            unknown_share: 0.05,
            fill: 1.0,
            margin: 0.1,
            watch: 0.8,
            min_run_s: 3600.0,
            vm_rest_s: 1800.0,
            min_samples: 2,
            move_watts: 30.0,
            slow_cost_j: 0.0,
            transition_j: 20_000.0,
            payback_s: 3600.0,
            max_moves: usize::MAX,
            max_transitions: usize::MAX,
        }
    }
}

/// The reason why settings are impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSettings {
    /// Outside of its range.
    #[error("{0} is out of its range")]
    Range(&'static str),
    /// A VM would be moved on the word of one sample.
    #[error("min_samples has to be at least 2: one sample is no forecast")]
    OneSample,
}

impl Settings {
    /// Returns an error if the settings are impossible.
    pub fn check(&self) -> Result<(), BadSettings> {
        let shares = [
            ("smoothing", self.smoothing, 0.01..=1.0),
            ("headroom_percentile", self.headroom_percentile, 0.5..=1.0),
            ("unknown_share", self.unknown_share, 0.0..=1.0),
            ("fill", self.fill, 0.05..=2.0),
            ("margin", self.margin, 0.0..=1.0),
            ("watch", self.watch, 0.0..=2.0),
        ];
        if let Some((name, ..)) = shares.iter().find(|(_, value, range)| !range.contains(value)) {
            return Err(BadSettings::Range(name));
        }
        let amounts = [
            ("min_run_s", self.min_run_s),
            ("vm_rest_s", self.vm_rest_s),
            ("move_watts", self.move_watts),
            ("slow_cost_j", self.slow_cost_j),
            ("transition_j", self.transition_j),
            ("payback_s", self.payback_s),
        ];
        if let Some((name, _)) = amounts.iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            return Err(BadSettings::Range(name));
        }
        if self.min_samples < 2 { Err(BadSettings::OneSample) } else { Ok(()) }
    }
}
