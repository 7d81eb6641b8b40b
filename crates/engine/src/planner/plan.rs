//! Plans: moves in their order, each with its times and its reason.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::obstacle::Obstacle;
use crate::forecast::Estimate;

/// Moves that reach a goal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementPlan {
    /// Moves, in the order in which they begin. Memory fits at every step.
    pub moves: Vec<PlannedMove>,
    /// VMs that stay although the goal concerns them.
    pub stays: Vec<StayingVm>,
    /// Time until the last move has ended, in nanoseconds.
    pub duration_ns: Estimate,
    /// Outlook for the deadline, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<DeadlineOutlook>,
    /// Bytes of all moves on the wire.
    pub bytes: u64,
    /// Downtimes of all moves, in nanoseconds.
    pub downtime_ns: u64,
    /// Highest load of a host before the moves, in hundredths of its capacity.
    pub highest_load_before_percent: u32,
    /// Highest load of a host after the moves.
    pub highest_load_after_percent: u32,
}

/// A planned move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedMove {
    /// VM.
    pub vm: String,
    /// Its host.
    pub from: String,
    /// Its next host.
    pub to: String,
    /// Expected begin, in nanoseconds after the begin of the plan. It begins later if a move that it waits for does.
    pub begins_ns: u64,
    /// Forecast of its total time, in nanoseconds, at the rate that is planned for it.
    pub total_ns: Estimate,
    /// Forecast of its downtime, in nanoseconds.
    pub downtime_ns: u64,
    /// Forecast of its bytes on the wire.
    pub bytes: u64,
    /// Rate that is planned for it, in bytes per second.
    pub bytes_per_s: u64,
    /// Earlier moves that have to have ended, by their places in the plan: they make room, lead, or are the same VM's.
    pub waits_for: Vec<u32>,
    /// Load of its next host with it, when all moves have ended, in hundredths.
    pub target_load_percent: u32,
    /// Reason.
    pub why: MoveReason,
}

/// Reason of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum MoveReason {
    /// Its host is to be emptied.
    Drained,
    /// The request names the host.
    Placed,
    /// It goes with another VM.
    Follows {
        /// The VM.
        vm: String,
    },
    /// Another VM needs the room.
    MakesRoom {
        /// The VM.
        vm: String,
    },
    /// It steps aside for a moment: it and others wait for each other's room.
    StepsAside {
        /// Host where it goes in the end.
        then_to: String,
    },
    /// Its host is busier than others.
    Levels {
        /// Load of its host with it, in hundredths.
        from_percent: u32,
        /// Load of the next host with it, in hundredths.
        to_percent: u32,
        /// Mean load of all hosts, in hundredths.
        mean_percent: u32,
    },
    /// Its zone has more VMs of its group than another one.
    Spreads {
        /// Label of the group.
        label: String,
        /// VMs of the group in its zone, with it.
        from: u32,
        /// VMs of the group in the next zone, without it.
        to: u32,
    },
}

/// A VM that stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StayingVm {
    /// VM.
    pub vm: String,
    /// Its host.
    pub host: String,
    /// Reason.
    pub why: StayReason,
}

/// Reason for which a VM stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stays", rename_all = "kebab-case")]
pub enum StayReason {
    /// It may not be moved.
    Held {
        /// Reason.
        obstacle: Obstacle,
    },
    /// No host can take it.
    NoTarget {
        /// Obstacles, each with the number of hosts where it is the first one, the most frequent first.
        obstacles: Vec<(Obstacle, u32)>,
    },
    /// A VM that it goes with stays.
    Follows {
        /// The VM.
        vm: String,
    },
    /// No move of it would make enough of a difference.
    TooLittleGain {
        /// Largest difference, in hundredths of the capacity of a host.
        gain_percent: u32,
    },
    /// Moving it would take longer than what it gains is worth.
    TooExpensive {
        /// Time of the move, in seconds.
        cost_s: u64,
        /// Time that the gain is worth, in seconds.
        worth_s: u64,
    },
    /// The plan has as many moves as its limit allows.
    Limit,
}

/// Outlook for a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadlineOutlook {
    /// Time until the deadline, in nanoseconds.
    pub has_ns: u64,
    /// True if it is kept even if all moves take as long as the upper ends of their intervals.
    pub is_safe: bool,
}

impl fmt::Display for MoveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drained => f.write_str("its host is to be emptied"),
            Self::Placed => f.write_str("the request names this host"),
            Self::Follows { vm } => write!(f, "it goes with {vm}"),
            Self::MakesRoom { vm } => write!(f, "it makes room for {vm}"),
            Self::StepsAside { then_to } => {
                write!(
                    f,
                    "it steps aside, because moves wait for each other's room, and goes to {then_to} then"
                )
            }
            Self::Levels { from_percent, to_percent, mean_percent } => write!(
                f,
                "its host is at {from_percent}%, the mean at {mean_percent}%; the next one will be at {to_percent}%"
            ),
            Self::Spreads { label, from, to } => {
                write!(f, "{from} VMs of {label} are in its zone, and {to} in the next one")
            }
        }
    }
}

impl fmt::Display for StayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held { obstacle } => write!(f, "{obstacle}; {}", obstacle.advice()),
            Self::NoTarget { obstacles } => match obstacles.first() {
                Some((obstacle, hosts)) => {
                    write!(f, "no host can take it: {obstacle} ({hosts} hosts); {}", obstacle.advice())
                }
                None => f.write_str("there is no other host"),
            },
            Self::Follows { vm } => write!(f, "it goes with {vm}, which stays"),
            Self::TooLittleGain { gain_percent } => {
                write!(f, "moving it would make a difference of {gain_percent}% of a host at most")
            }
            Self::TooExpensive { cost_s, worth_s } => {
                write!(f, "moving it would take {cost_s} s, and is worth {worth_s} s")
            }
            Self::Limit => f.write_str("the limit of moves is reached"),
        }
    }
}
