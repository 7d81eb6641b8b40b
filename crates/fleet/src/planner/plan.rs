//! Decisions and their reasons.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// The VM.
    pub vm: u32,
    /// Its host.
    pub from: u32,
    /// Its next host.
    pub to: u32,
    /// The reason.
    pub reason: Reason,
}

/// A host whose power state changes, or stays although it might have changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostChange {
    /// The host.
    pub host: u32,
    /// The reason.
    pub reason: Reason,
}

/// Moves and switching that are worth their cost now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Moves, in an order in which each finds room.
    pub moves: Vec<Move>,
    /// Hosts to switch on before the moves to them.
    pub wake: Vec<HostChange>,
    /// Hosts to switch off once they are empty by their own word.
    pub sleep: Vec<HostChange>,
    /// Hosts that stay on although they have little to do.
    pub keep: Vec<HostChange>,
}

/// The reason of a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "why")]
pub enum Reason {
    /// The host has no processor time left, and the forecast agrees.
    Overload {
        /// Use by the newest samples, as a share of the host's capacity.
        used: f32,
        /// Use by the forecast.
        forecast: f32,
    },
    /// Emptying the host saves more than it costs.
    Saves {
        /// Power that the host needs with these VMs and that the others need without them less, in watts.
        watts: f64,
        /// Energy that this saves until the host may be woken again, in joules.
        saved_j: f64,
        /// Energy that the moves and the transition need, in joules.
        cost_j: f64,
    },
    /// No host that is on has room for a VM.
    NoRoom {
        /// The VM.
        vm: u32,
    },
    /// The host is empty.
    Empty,
    /// The host has not run for the minimum time.
    MinimumTime {
        /// Time until it has, in seconds.
        left_s: f64,
    },
    /// A VM has no room elsewhere, with the margin.
    NoRoomElsewhere {
        /// The VM.
        vm: u32,
    },
    /// A VM may not move: pinned, moving, moved a while ago, or known by too few samples.
    HeldBy {
        /// The VM.
        vm: u32,
    },
    /// The moves would cost more than they save.
    TooExpensive {
        /// Energy that emptying the host saves, in joules.
        saved_j: f64,
        /// Energy that it costs, in joules.
        cost_j: f64,
    },
    /// Without it the VMs of the fullest host would find no room if that host failed.
    RestartRoom {
        /// The fullest host.
        fullest: u32,
    },
    /// The plan has as many moves or transitions as the limits allow.
    Limit,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: &f32| f64::from(*share) * 100.0;
        match self {
            Self::Overload { used, forecast } => {
                write!(
                    f,
                    "its host uses {:.0}% of its processors, forecast {:.0}%",
                    percent(used),
                    percent(forecast)
                )
            }
            Self::Saves { watts, saved_j, cost_j } => {
                write!(f, "emptying its host saves {watts:.0} W: {saved_j:.0} J for a cost of {cost_j:.0} J")
            }
            Self::NoRoom { vm } => write!(f, "VM {vm} has room on no host that is on"),
            Self::Empty => write!(f, "the host is empty"),
            Self::MinimumTime { left_s } => write!(f, "the host has to run for {left_s:.0} s more"),
            Self::NoRoomElsewhere { vm } => write!(f, "VM {vm} has room on no other host"),
            Self::HeldBy { vm } => write!(f, "VM {vm} may not move now"),
            Self::TooExpensive { saved_j, cost_j } => {
                write!(f, "emptying it would save {saved_j:.0} J and cost {cost_j:.0} J")
            }
            Self::RestartRoom { fullest } => {
                write!(f, "without it the VMs of host {fullest} could not be restarted")
            }
            Self::Limit => write!(f, "the limit of moves or transitions is reached"),
        }
    }
}
