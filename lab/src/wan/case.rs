//! Cases: a way between two hosts.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::emulator::Settings;

/// A way between two hosts, and a guest that is moved over it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WanCase {
    /// Its name.
    pub name: String,
    /// The rate of the way in each direction, Mb/s.
    pub megabits_per_s: u64,
    /// Time that a packet and its answer are on their way, ms.
    pub round_trip_ms: u64,
    /// Packets that are lost, of a million.
    pub lost_per_million: u32,
    /// Random content in the guest's memory, MiB.
    pub fill_mib: u64,
}

impl WanCase {
    /// Returns the time for which a packet is on its way in one direction.
    pub fn delay(&self) -> Duration {
        Duration::from_millis(self.round_trip_ms) / 2
    }

    /// Returns the way between both hosts.
    pub fn settings(&self) -> Settings {
        let rate = self.megabits_per_s * 1_000_000 / 8;
        Settings {
            rate_bytes_per_s: Some(rate),
            delay: self.delay(),
            loss: f64::from(self.lost_per_million) / 1e6,
            // Of a router: what it sends in a tenth of a second.
            queue_bytes: (rate / 10).max(64 << 10) as usize,
            ..Settings::default()
        }
    }

    /// Describes the case, human-readable.
    pub fn describe(&self) -> String {
        let Self { megabits_per_s, round_trip_ms, lost_per_million, fill_mib, .. } = self;
        let loss = match lost_per_million {
            0 => String::new(),
            lost => format!(", {}% of the packets lost", f64::from(*lost) / 1e4),
        };
        format!(
            "{megabits_per_s} Mb/s, {round_trip_ms} ms{loss}; guest with {fill_mib} MiB of random content"
        )
    }
}

/// Returns the way across an ocean.
pub fn ocean() -> WanCase {
    case("50m-80ms", 50, 80, 0, 32)
}

fn case(
    name: &str,
    megabits_per_s: u64,
    round_trip_ms: u64,
    lost_per_million: u32,
    fill_mib: u64,
) -> WanCase {
    WanCase { name: name.to_owned(), megabits_per_s, round_trip_ms, lost_per_million, fill_mib }
}

/// Returns all cases.
pub fn cases() -> Vec<WanCase> {
    vec![
        ocean(),
        case("50m-80ms-0.1%", 50, 80, 1_000, 32),
        case("50m-80ms-1%", 50, 80, 10_000, 32),
        case("5m-100ms", 5, 100, 0, 8),
        case("1g-20ms", 1_000, 20, 0, 256),
    ]
}
