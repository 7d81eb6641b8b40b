//! Forecasts of migrations, and their record.

use engine::forecast::calibration::{Accuracy, CalibrationClass, CalibrationRecord};
use engine::forecast::facts::MigrationFacts;
use engine::forecast::history::LinkRate;
use engine::forecast::writes::WorkingSetCurve;
use engine::forecast::{ForecastWithAlternatives, MigrationForecast};
use proto::{HostId, MigrationId, VmName};
use serde::{Deserialize, Serialize};

/// Measurement of a VM: how it writes, and what its memory holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmMeasurement {
    /// Time of the measurement, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Process id of its QEMU.
    pub pid: u32,
    /// Start time of that process, in clock ticks since boot.
    pub start_time_ticks: u64,
    /// Size of its RAM, in bytes.
    pub memory_bytes: u64,
    /// Part of the RAM with content, from a sample, in bytes.
    pub used_bytes: u64,
    /// Length of that content after fast compression, in thousandths.
    pub compressed_permille: u32,
    /// Pages that it writes in intervals of several lengths.
    pub writes: WorkingSetCurve,
    /// Duration of the write tracking, in microseconds; 0 for a paused VM.
    pub tracked_us: u64,
    /// Page faults that the write tracking has caused.
    pub faults: u64,
    /// Cost of one of them, as it was measured on this host, in nanoseconds.
    pub fault_ns: u64,
    /// Processor time of each vCPU, in microseconds per second; empty if it is not known.
    #[serde(default)]
    pub vcpu_use_us_per_s: Vec<u64>,
    /// Rate at which it writes to its disks, in bytes per second; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes_per_s: Option<u64>,
}

impl VmMeasurement {
    /// Longest age of a measurement that is used again, in milliseconds: an hour.
    pub const LONGEST_AGE_MS: u64 = 3600 * 1000;

    /// Returns true if this is a measurement of that process, not older than `longest_ms` at `unix_ms`.
    pub fn is_of(&self, (pid, start_time_ticks): (u32, u64), unix_ms: u64, longest_ms: u64) -> bool {
        (self.pid, self.start_time_ticks) == (pid, start_time_ticks)
            && unix_ms.saturating_sub(self.unix_ms) <= longest_ms
    }

    /// Returns the cost of the measurement to the guest: its page faults, each with the measured cost, in microseconds.
    pub fn cost_us(&self) -> u64 {
        self.faults.saturating_mul(self.fault_ns) / 1000
    }
}

/// Forecast of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forecast {
    /// The VM.
    pub vm: VmName,
    /// Source host.
    pub from: HostId,
    /// Destination host.
    pub to: HostId,
    /// Time of the forecast (RFC 3339, UTC).
    pub made: String,
    /// The forecast as it is shown, and other ways if rounds are not expected to converge.
    #[serde(flatten)]
    pub found: ForecastWithAlternatives,
    /// The forecast as it was simulated, without the correction by earlier outcomes.
    pub simulated: MigrationForecast,
    /// Kind of the VM, by which earlier outcomes are chosen.
    pub kind: CalibrationClass,
    /// Measurement of the VM.
    pub measurement: VmMeasurement,
    /// Rate of the link, and its origin.
    pub link: LinkRate,
    /// Reason for which the link was not measured, if that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_problem: Option<String>,
    /// Facts from which the migration was simulated.
    pub facts: MigrationFacts,
    /// Record of earlier forecasts on this host.
    pub accuracy: Accuracy,
}

/// Forecast of a migration beside its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForecastOutcome {
    /// The migration.
    #[serde(flatten)]
    pub migration: MigrationId,
    /// Forecast and outcome.
    #[serde(flatten)]
    pub record: CalibrationRecord,
}

/// Record of the forecasts of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibrationReport {
    /// Summary.
    pub accuracy: Accuracy,
    /// Forecasts with their outcomes, the newest first.
    pub forecasts: Vec<ForecastOutcome>,
}
