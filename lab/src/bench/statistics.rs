//! Measured values of a migration, beside durations and bytes.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::migrating::MigrationReport;

/// Parts of a downtime, ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DowntimeParts {
    /// QEMU's `stop`.
    pub stop_ms: f64,
    /// Transfer of the last pages.
    pub last_pages_ms: f64,
    /// Transfer of the devices' state.
    pub device_state_ms: f64,
    /// Loading the devices' state.
    pub load_ms: f64,
    /// Journals, and the messages GO and RUNNING.
    pub handover_ms: f64,
    /// QEMU's `cont`.
    pub continue_ms: f64,
}

impl DowntimeParts {
    /// Returns the parts in Whimbrel's report.
    pub(crate) fn of(migration: &MigrationReport) -> Result<Self> {
        let part = |name: &str| Ok::<_, Error>(migration.downtime(name)?.as_secs_f64() * 1e3);
        Ok(Self {
            stop_ms: part("stop_us")?,
            last_pages_ms: part("last_pages_us")?,
            device_state_ms: part("device_state_us")?,
            load_ms: part("load_us")?,
            handover_ms: part("handover_us")?,
            continue_ms: part("continue_us")?,
        })
    }
}

/// Statistics of compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CompressionStats {
    /// Data of pages to send, bytes.
    pub data_bytes: u64,
    /// Bytes sent for the data.
    pub wire_bytes: u64,
    /// Processor time of compressing, ms.
    pub cpu_ms: f64,
}

impl CompressionStats {
    /// Returns the bytes of data for each sent byte.
    pub fn ratio(self) -> f64 {
        self.data_bytes.max(1) as f64 / self.wire_bytes.max(1) as f64
    }
}

/// Circumstances of the guest's stop.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopCircumstances {
    /// Sampling intervals after the first pass over all of memory.
    pub intervals: u64,
    /// Dirty pages at the last dirty scan before the stop.
    pub remaining_pages: u64,
    /// Post-copy: pages that had to be sent: each once, and those written after their first send once more. Absent for
    /// other ways, and where it was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needed_pages: Option<u64>,
    /// The detected pattern, if any.
    pub pattern: Option<String>,
}

/// The performance that a migration cost a neighbour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Noise {
    /// Time from the request of the migration until the guest resumed at its destination, ms.
    pub span_ms: f64,
    /// Work that the neighbour did less in that time than right before, in ms of its usual work.
    pub lost_work_ms: f64,
    /// The longest time in which it did not run, ms.
    pub longest_stall_ms: f64,
}

/// The performance that a migration cost both neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Noises {
    /// The neighbour at the source.
    pub source: Noise,
    /// The neighbour at the destination.
    pub destination: Noise,
}

/// Observations of a client during a migration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientObservation {
    /// The longest time between two answers, ms.
    pub longest_silence_ms: f64,
    /// The median time between two answers, ms.
    pub usual_ms: f64,
}
