//! Explanations: for each move the reason, the choice of its host, and what it waits for.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::command::{CommandId, EvacuationId};
use crate::forecast::Estimate;
use crate::planner::{MoveReason, Obstacle};

/// A move, explained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveExplanation {
    /// VM.
    pub vm: String,
    /// Its host.
    pub from: String,
    /// Its next host.
    pub to: String,
    /// Command, once it was ordered.
    pub command: Option<CommandId>,
    /// Reason of the move.
    pub why: MoveReason,
    /// Load of the next host when all moves have ended, in hundredths.
    pub target_load_percent: u32,
    /// Hosts that the VM does not use because moves to them failed, with the reasons.
    pub avoids: Vec<(String, String)>,
    /// Forecast of its total time, in nanoseconds.
    pub total_ns: Estimate,
    /// Forecast of its downtime, in nanoseconds.
    pub downtime_ns: u64,
    /// Forecast of its bytes on the wire.
    pub bytes: u64,
    /// Its standing, and what it waits for.
    pub standing: MoveStanding,
}

/// Standing of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "standing", rename_all = "kebab-case")]
pub enum MoveStanding {
    /// It waits.
    Waits {
        /// Reason for which it waits.
        reason: WaitReason,
    },
    /// It was ordered; the agent has not confirmed it.
    Ordered,
    /// It is under way.
    Underway {
        /// Bytes that are still to be sent, if that is known.
        bytes_left: Option<u64>,
        /// Rate that it may use, in bytes per second; none without a limit.
        bytes_per_s: Option<u64>,
    },
    /// It is being cancelled.
    Cancelling,
    /// It is in doubt.
    InDoubt,
}

/// Reason for which a move waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "for", rename_all = "kebab-case")]
pub enum WaitReason {
    /// No reason: it is to begin next.
    Nothing,
    /// Moves of other VMs, which make room, or with which it goes.
    Moves {
        /// The VMs.
        vms: Vec<String>,
    },
    /// A host has as many moves as the limit allows.
    Slot {
        /// Host.
        host: String,
    },
    /// The link of a host, or the budget, has no sufficient share left.
    Link {
        /// Host; none for the budget.
        host: Option<String>,
    },
    /// The processors of a host have no time for another copy.
    Processors {
        /// Host.
        host: String,
    },
    /// Something on its next host.
    Room {
        /// The obstacle.
        obstacle: Obstacle,
    },
    /// The pause after a failed attempt.
    Pause {
        /// End of the pause.
        until_ns: u64,
    },
    /// A host has no connection, or has not answered yet.
    Host {
        /// Host.
        host: String,
    },
    /// Another evacuation.
    Evacuation {
        /// The evacuation.
        id: EvacuationId,
    },
}

impl fmt::Display for MoveExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, from, to, why, .. } = self;
        write!(f, "VM {vm} from host {from} to host {to}: {why}")?;
        if !matches!(why, MoveReason::Placed | MoveReason::StepsAside { .. }) {
            write!(f, "; of the hosts that can take it, {to} has the lowest score of time and load")?;
        }
        for (host, reason) in &self.avoids {
            write!(f, "; host {host} has refused it: {reason}")?;
        }
        let seconds = |ns: u64| ns.div_ceil(1_000_000_000);
        let Estimate { expected, low, high } = self.total_ns;
        write!(
            f,
            "; {to} will be at {}%; {} s ({} to {}), {} MB, {} ms stopped; {}",
            self.target_load_percent,
            seconds(expected),
            low / 1_000_000_000,
            seconds(high),
            self.bytes / 1_000_000,
            self.downtime_ns.div_ceil(1_000_000),
            self.standing
        )
    }
}

impl fmt::Display for MoveStanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waits { reason } => write!(f, "{reason}"),
            Self::Ordered => f.write_str("it was ordered"),
            Self::Underway { bytes_left: Some(bytes_left), .. } => {
                write!(f, "it is under way, {} MB are left", bytes_left / 1_000_000)
            }
            Self::Underway { bytes_left: None, .. } => f.write_str("it is under way"),
            Self::Cancelling => f.write_str("it is being cancelled"),
            Self::InDoubt => f.write_str("it is in doubt"),
        }
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("it is next"),
            Self::Moves { vms } => write!(f, "it waits until {} have moved", vms.join(", ")),
            Self::Slot { host } => write!(f, "host {host} has as many moves as it may have"),
            Self::Link { host: Some(host) } => write!(f, "the link of host {host} has no share left"),
            Self::Link { host: None } => f.write_str("the bandwidth budget has no share left"),
            Self::Processors { host } => write!(f, "the processors of host {host} have no time for it"),
            Self::Room { obstacle } => write!(f, "its next host cannot take it yet: {obstacle}"),
            Self::Pause { .. } => f.write_str("it pauses after a failed attempt"),
            Self::Host { host } => write!(f, "host {host} has not answered"),
            Self::Evacuation { id } => write!(f, "evacuation {id} goes first"),
        }
    }
}
