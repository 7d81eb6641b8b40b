//! Reports: events of an evacuation, for people.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::command::{CommandId, EvacuationId};
use super::contents::Remaining;
use super::outcome::BlockedReason;
use crate::forecast::Estimate;
use crate::planner::MoveReason;

/// Event of an evacuation, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
pub enum EvacuationReport {
    /// A plan was made.
    Planned {
        /// Number of moves.
        moves: u32,
        /// Time that they need, in nanoseconds.
        duration_ns: Estimate,
        /// Bytes of all of them.
        bytes: u64,
    },
    /// The outlook for the deadline has changed.
    Deadline {
        /// The outlook.
        outlook: DeadlineStanding,
    },
    /// It waits until another evacuation has ended, which takes the room, or whose VMs arrive at its hosts.
    WaitsForEvacuation {
        /// The evacuations.
        ids: Vec<EvacuationId>,
    },
    /// A move was ordered.
    MoveOrdered {
        /// The command.
        command: CommandId,
        /// VM.
        vm: String,
        /// Its host.
        from: String,
        /// Its next host.
        to: String,
        /// Reason.
        why: MoveReason,
    },
    /// A VM has moved.
    Moved {
        /// VM.
        vm: String,
        /// Its new host.
        to: String,
        /// Time since the order, in nanoseconds.
        took_ns: u64,
    },
    /// A move has failed.
    MoveFailed {
        /// VM.
        vm: String,
        /// Its next host, where it did not arrive.
        to: String,
        /// Reason.
        reason: String,
        /// Time until the next attempt, in nanoseconds; none if there is none.
        next_in_ns: Option<u64>,
    },
    /// A VM is blocked: it will not be moved before something changes.
    Blocked {
        /// VM.
        vm: String,
        /// Reason.
        why: BlockedReason,
    },
    /// A VM that was in doubt is not any longer.
    DoubtEnded {
        /// VM.
        vm: String,
        /// Host that owns it.
        host: String,
    },
    /// A VM that was not there before is on a host that is to be empty.
    VmAppeared {
        /// VM.
        vm: String,
        /// Host.
        host: String,
    },
    /// A VM has left otherwise: its guest has shut down, or another request has moved it.
    VmVanished {
        /// VM.
        vm: String,
        /// Host.
        host: String,
    },
    /// A host that the evacuation needs has lost its connection.
    HostLost {
        /// Host.
        host: String,
    },
    /// It is connected again.
    HostBack {
        /// Host.
        host: String,
    },
    /// All VMs have left a host, and something else remains.
    Remains {
        /// Host.
        host: String,
        /// Remains.
        remaining: Vec<Remaining>,
    },
    /// A host is empty.
    HostEmpty {
        /// Host.
        host: String,
    },
    /// Messages of agents contradict each other; facts are asked for again.
    Contradiction {
        /// The command.
        command: CommandId,
        /// Contradiction.
        text: String,
    },
    /// The controller was restarted, and asks agents for facts.
    Restarted,
    /// A user has cancelled it.
    Cancelled,
    /// A user has resumed it.
    Resumed,
}

/// Outlook for the deadline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadlineStanding {
    /// Judgement.
    pub judgement: DeadlineJudgement,
    /// Time from now until the deadline, in nanoseconds; 0 once it has passed.
    pub has_ns: u64,
    /// Time from now until the last move has ended, in nanoseconds.
    pub needs_ns: Estimate,
    /// Time by which the deadline is expected to be missed, in nanoseconds; 0 if it is kept.
    pub late_by_ns: u64,
    /// Reason for the expected end: the last move, and what holds it up.
    pub because: String,
}

/// Judgement of the outlook for a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeadlineJudgement {
    /// It is kept even if all moves take as long as the upper ends of their intervals.
    Safe,
    /// It is expected to be kept.
    AtRisk,
    /// It is expected to be missed.
    Late,
    /// Something stands in the way whose end cannot be forecast.
    Blocked,
}

impl fmt::Display for EvacuationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Planned { moves, duration_ns, .. } => {
                write!(f, "{moves} moves are planned, which take {}", range(*duration_ns))
            }
            Self::Deadline { outlook } => write!(f, "{outlook}"),
            Self::WaitsForEvacuation { ids } => {
                let ids: Vec<&str> = ids.iter().map(|id| id.0.as_str()).collect();
                write!(f, "it waits until evacuation {} has ended, which needs the room", ids.join(", "))
            }
            Self::MoveOrdered { vm, from, to, why, .. } => {
                write!(f, "VM {vm} moves from host {from} to host {to}: {why}")
            }
            Self::Moved { vm, to, took_ns } => {
                write!(f, "VM {vm} is on host {to}, after {} s", seconds(*took_ns))
            }
            Self::MoveFailed { vm, to, reason, next_in_ns: Some(next_in_ns) } => write!(
                f,
                "VM {vm} did not move to host {to}: {reason}; the next attempt is in {} s",
                seconds(*next_in_ns)
            ),
            Self::MoveFailed { vm, to, reason, next_in_ns: None } => {
                write!(f, "VM {vm} did not move to host {to}: {reason}")
            }
            Self::Blocked { vm, why } => write!(f, "VM {vm} is blocked: {why}; {}", why.advice()),
            Self::DoubtEnded { vm, host } => write!(f, "VM {vm} is in doubt no longer: it is on host {host}"),
            Self::VmAppeared { vm, host } => write!(f, "VM {vm} has appeared on host {host}"),
            Self::VmVanished { vm, host } => {
                write!(
                    f,
                    "VM {vm} is not on host {host} any longer: it has ended, or another request has moved it"
                )
            }
            Self::HostLost { host } => {
                write!(f, "host {host} has lost its connection to the controller; its migrations go on")
            }
            Self::HostBack { host } => write!(f, "host {host} is connected again"),
            Self::Remains { host, remaining } => {
                write!(f, "on host {host} remains")?;
                for (at, one) in remaining.iter().enumerate() {
                    write!(f, "{} {one} ({})", if at == 0 { "" } else { "," }, one.advice())?;
                }
                Ok(())
            }
            Self::HostEmpty { host } => write!(f, "host {host} is empty"),
            Self::Contradiction { command, text } => {
                write!(f, "command {command} has ended in two ways: {text}; agents are asked again")
            }
            Self::Restarted => f.write_str("the controller was restarted, and asks agents for facts"),
            Self::Cancelled => f.write_str("it was cancelled; moves under way are cancelled"),
            Self::Resumed => f.write_str("it was resumed"),
        }
    }
}

impl fmt::Display for DeadlineStanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let needs = range(self.needs_ns);
        match self.judgement {
            DeadlineJudgement::Safe => {
                write!(
                    f,
                    "the deadline will be kept: {needs} are needed, {} s are left",
                    seconds(self.has_ns)
                )
            }
            DeadlineJudgement::AtRisk => write!(
                f,
                "the deadline is expected to be kept, but may be missed: {needs} are needed, {} s are left: {}",
                seconds(self.has_ns),
                self.because
            ),
            DeadlineJudgement::Late => {
                write!(f, "the deadline will be missed by {} s: {}", seconds(self.late_by_ns), self.because)
            }
            DeadlineJudgement::Blocked => {
                write!(f, "it is not known if the deadline will be kept: {}", self.because)
            }
        }
    }
}

fn seconds(ns: u64) -> u64 {
    ns.div_ceil(1_000_000_000)
}

/// Returns an estimate in seconds, with its interval.
fn range(estimate: Estimate) -> String {
    let Estimate { expected, low, high } = estimate;
    format!("{} s ({} to {})", seconds(expected), low / 1_000_000_000, seconds(high))
}
