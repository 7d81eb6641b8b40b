//! Migrations of a guest by QEMU or by Whimbrel: their common inputs and results.

use std::time::{Duration, SystemTime};

use super::case::Case;
use super::statistics::{CompressionStats, DowntimeParts, StopCircumstances};
use super::subject::SavedGuest;
use super::usage::{Meter, Used};
use crate::agents::Agents;
use crate::environment::Environment;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::run::kill_pid;
use crate::serial::Serial;

/// A guest that has been migrated.
#[derive(Debug)]
pub(super) struct Moved {
    /// Time from the request to the end of the source's QEMU, with the start of the destination's.
    pub(super) total: Duration,
    /// Time from the request until the destination's QEMU was ready.
    pub(super) start: Duration,
    pub(super) downtime: Duration,
    /// The part of the downtime from QEMU's event STOP to its event RESUME, where these were reported.
    pub(super) events: Option<Duration>,
    pub(super) parts: Option<DowntimeParts>,
    /// Duration of both dirty scans while the guest was stopped, where that is known.
    pub(super) last_scans: Option<Duration>,
    /// Processor time up to the end.
    pub(super) used: Used,
    /// Time at which the guest ran at its destination, by the host's calendar.
    pub(super) resumed: SystemTime,
    /// The first round's share of all sent bytes, and its duration, where they are known.
    pub(super) first_round: Option<(f64, Duration)>,
    /// Passes over memory, the last one included.
    pub(super) rounds: u64,
    /// Observations of the switchover policy, where it reported any.
    pub(super) stop: Option<StopCircumstances>,
    /// Post-copy: true if the guest resumed before all of its memory had arrived.
    pub(super) has_switched_to_post_copy: Option<bool>,
    /// Statistics of compression, where they were reported.
    pub(super) packing: Option<CompressionStats>,
    pub(super) serial: Serial,
    /// Held as long as the guest is watched.
    pub(super) _destination: Destination,
}

/// The QEMU that runs the guest now. Ends when this is dropped.
#[derive(Debug)]
pub(super) enum Destination {
    /// Started here.
    Guest { _guest: Guest },
    /// Started by an agent.
    Process(u32),
}

impl Drop for Destination {
    fn drop(&mut self) {
        if let Self::Process(pid) = self {
            // `Lab::down` kills remaining processes.
            let _ = kill_pid(*pid);
        }
    }
}

/// Outcome of a migration.
#[derive(Debug)]
pub(super) enum MoveOutcome {
    Moved(Box<Moved>),
    /// Given up, by the bench or by the migration itself: it did not converge.
    GivenUp,
}

/// Inputs of a migration.
pub(super) struct MoveInput<'a> {
    pub(super) lab: &'a Lab,
    pub(super) environment: &'a Environment,
    pub(super) agents: &'a Agents,
    pub(super) subject: &'a SavedGuest,
    pub(super) case: &'a Case,
    /// The guest to migrate.
    pub(super) source: &'a Guest,
    pub(super) meter: &'a Meter,
}
