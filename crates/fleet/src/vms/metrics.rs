//! Metrics of Beloglazov and Buyya 2012.

use serde::{Deserialize, Serialize};

/// Result of a day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Energy, in kWh.
    pub energy_kwh: f64,
    /// SLA violation time per active host: the mean over hosts of the share of their active time at 100% of CPU.
    pub slatah: f64,
    /// Performance degradation by migration: the mean over VMs of the MIPS lost to moves, over the MIPS asked for.
    pub pdm: f64,
    /// SLATAH × PDM.
    pub slav: f64,
    /// Energy × SLAV, with energy in kWh.
    pub esv: f64,
    /// Number of moves.
    pub moves: u64,
    /// Share of the MIPS asked for that hosts could not serve.
    pub unserved: f64,
    /// Mean number of hosts that were on.
    pub mean_hosts: f64,
    /// Number of times that a host was switched on.
    pub starts: u64,
}
