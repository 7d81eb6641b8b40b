//! Measured facts from which a migration is forecast.

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

use super::writes::WorkingSetCurve;
use crate::pre_copy::{FixedCost, Sampling};

/// Guest whose migration is forecast.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestFacts {
    /// Guest memory, in bytes.
    pub memory_bytes: u64,
    /// Memory with content: allocated, and not all zeros, in bytes. The rest is sent as zero pages or holes.
    pub used_bytes: u64,
    /// Pages of memory that the guest writes in intervals of several lengths.
    pub writes: WorkingSetCurve,
    /// Copied disks, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<DiskFacts>,
    /// Processor time that each virtual processor uses, in microseconds per second; empty if it is not known.
    #[serde(default)]
    pub vcpu_use_us_per_s: Vec<u64>,
}

/// Disks that are copied, all together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFacts {
    /// Allocated data, in bytes.
    pub bytes: u64,
    /// Blocks that the guest writes in intervals of several lengths.
    pub writes: WorkingSetCurve,
}

/// Path from the source to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkFacts {
    /// Rate of the link, measured or remembered, in bytes per second; for one of several migrations its share.
    pub link_bytes_per_s: u64,
    /// Round trip time, in nanoseconds.
    pub rtt_ns: u64,
    /// Rate at which the hosts' processors read, check, encrypt and write pages, in bytes per second.
    pub copy_bytes_per_s: u64,
    /// Bytes on the wire for a thousand bytes of pages: below 1000 with compression, deltas or references.
    pub wire_permille: u32,
    /// Duration of a dirty scan, in nanoseconds.
    pub scan_ns: u64,
    /// Duration of the drain of block I/O after a scan, in nanoseconds.
    pub drain_ns: u64,
}

impl Default for LinkFacts {
    /// A link of 1 Gb/s in one room, before anything was measured.
    fn default() -> Self {
        Self {
            link_bytes_per_s: 117_000_000,
            rtt_ns: 200_000,
            copy_bytes_per_s: 1_000_000_000,
            wire_permille: 1000,
            scan_ns: 2_000_000,
            drain_ns: 1_000_000,
        }
    }
}

impl LinkFacts {
    /// Returns the rate at which pages with content are sent, in bytes of whole pages per second, at least 1.
    pub(super) fn pages_bytes_per_s(&self) -> f64 {
        let link = self.link_bytes_per_s as f64 * 1000.0 / f64::from(self.wire_permille.max(1));
        link.min(self.copy_bytes_per_s as f64).max(1.0)
    }

    /// Returns the time that pages take, in nanoseconds: with content, and empty ones.
    pub(super) fn pages_ns(&self, pages: f64, empty_pages: f64) -> f64 {
        let page = PAGE_BYTES as f64 * 1e9;
        pages * page / self.pages_bytes_per_s() + empty_pages * page / self.copy_bytes_per_s.max(1) as f64
    }

    /// Returns the bytes on the wire for pages with content.
    pub(super) fn wire_bytes(&self, pages: f64) -> f64 {
        pages * PAGE_BYTES as f64 * f64::from(self.wire_permille) / 1000.0
    }
}

/// Times of a migration that no policy decides, from the history of these hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverheadTimes {
    /// Time from the request to the first page: checks, and the start of the destination's QEMU, in nanoseconds.
    pub setup_ns: u64,
    /// Time from the guest's start at the destination to the end, if all pages are there, in nanoseconds.
    pub finish_ns: u64,
}

impl Default for OverheadTimes {
    /// Those of a small guest.
    fn default() -> Self {
        Self { setup_ns: 400_000_000, finish_ns: 50_000_000 }
    }
}

/// Uncertainty of measured facts, in hundredths of their values: the range in which eight of ten values lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FactUncertainty {
    /// Uncertainty of the link's rate.
    pub link_percent: u32,
    /// Uncertainty of the guest's write rate.
    pub writes_percent: u32,
}

impl Default for FactUncertainty {
    /// A link that others use a little, and a guest that was measured for some seconds.
    fn default() -> Self {
        Self { link_percent: 10, writes_percent: 25 }
    }
}

/// All facts about a migration that are known before it starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationFacts {
    /// The guest.
    pub guest: GuestFacts,
    /// The path.
    #[serde(default)]
    pub path: LinkFacts,
    /// Fixed parts of the downtime ([`crate::pre_copy::CostHistory::estimate`]).
    #[serde(default)]
    pub fixed: FixedCost,
    /// Times before and after.
    #[serde(default)]
    pub times: OverheadTimes,
    /// Sampling of the policy, which also sets the length of the parts of the first pass.
    #[serde(default)]
    pub sampling: Sampling,
    /// Uncertainty of the facts.
    #[serde(default)]
    pub spread: FactUncertainty,
    /// True if the user has requested a CPU throttle for the case that the downtime would be too long.
    #[serde(default)]
    pub throttle_requested: bool,
}
