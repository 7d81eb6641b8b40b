//! A guest that is moved, by QEMU's own migration or by Whimbrel: what either needs, and what it tells of what it did.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::case::Case;
use super::result::{Packed, Stop};
use super::subject::Subject;
use super::usage::{Meter, Used};
use crate::agents::Agents;
use crate::environment::Environment;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::run::kill_pid;
use crate::serial::Serial;

/// Parts of a downtime, ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DowntimeParts {
    /// QEMU's `stop`.
    pub stop_ms: f64,
    /// The last pages.
    pub last_pages_ms: f64,
    /// The state of the devices on its way.
    pub device_state_ms: f64,
    /// Loading it.
    pub load_ms: f64,
    /// Journals, GO and RUNNING.
    pub handover_ms: f64,
    /// QEMU's `cont`.
    pub continue_ms: f64,
}

/// A guest that has been moved.
#[derive(Debug)]
pub(super) struct Moved {
    /// From the request to the end of the source's QEMU, with the start of the destination's.
    pub(super) total: Duration,
    /// From the request until the destination's QEMU was there.
    pub(super) start: Duration,
    pub(super) downtime: Duration,
    /// The part of it from QEMU's event STOP to its event RESUME, where they were told.
    pub(super) events: Option<Duration>,
    pub(super) parts: Option<DowntimeParts>,
    /// Both scans for dirty pages while the guest stood still, where that is known.
    pub(super) last_scans: Option<Duration>,
    /// Processor time up to the end.
    pub(super) used: Used,
    /// When the guest ran at its destination, by the host's calendar.
    pub(super) resumed: SystemTime,
    /// The first round's share of all bytes that were sent, and how long it took, where that is known.
    pub(super) first_round: Option<(f64, Duration)>,
    /// Passes over memory, the last one included.
    pub(super) rounds: u64,
    /// What the policy of the stop saw, where it told.
    pub(super) stop: Option<Stop>,
    /// Of post-copy: whether the guest ran on before all was there.
    pub(super) has_switched: Option<bool>,
    /// What compression did, where that was told.
    pub(super) packing: Option<Packed>,
    pub(super) serial: Serial,
    /// Held for as long as the guest is looked at.
    pub(super) _destination: Destination,
}

/// The QEMU that has the guest now. Ends when this is dropped.
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
            // `Lab::down` kills what is left.
            let _ = kill_pid(*pid);
        }
    }
}

/// Whether it has ended in time.
#[derive(Debug)]
pub(super) enum End {
    Moved(Box<Moved>),
    /// Given up, by us or by itself: it did not converge.
    GivenUp,
}

/// What a move needs.
pub(super) struct Stage<'a> {
    pub(super) lab: &'a Lab,
    pub(super) environment: &'a Environment,
    pub(super) agents: &'a Agents,
    pub(super) subject: &'a Subject,
    pub(super) case: &'a Case,
    /// The guest that is moved.
    pub(super) source: &'a Guest,
    pub(super) meter: &'a Meter,
}
