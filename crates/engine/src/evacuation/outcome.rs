//! Outcomes of evacuations, and reasons for which VMs are where they should not be.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::command::EvacuationId;
use super::contents::Remaining;
use crate::planner::{Obstacle, Refusal, StayReason};

/// Outcome of an evacuation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum EvacuationOutcome {
    /// All hosts are empty, or all VMs are back.
    Done {
        /// VMs that were moved.
        moved: u32,
        /// Time by which the deadline was missed, in nanoseconds; none if it was kept, or there is none.
        late_by_ns: Option<u64>,
    },
    /// Refusal: nothing was moved.
    Refused {
        /// Reason.
        refusal: EvacuationRefusal,
    },
    /// Something stands in the way. The evacuation can be resumed.
    Incomplete {
        /// VMs that are not where they should be, with their reasons.
        vms: Vec<BlockedVm>,
        /// Remains on hosts beside VMs.
        hosts: Vec<RemainsOnHost>,
    },
    /// A user cancelled it. It can be resumed.
    Cancelled {
        /// VMs that had been moved before.
        moved: u32,
        /// VMs that are in doubt, or on hosts without connection.
        unsettled: Vec<BlockedVm>,
    },
}

/// VM that is not where it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockedVm {
    /// VM.
    pub vm: String,
    /// Its host, as far as is known.
    pub host: String,
    /// Reason.
    pub why: BlockedReason,
}

/// Remains on a host that should be empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemainsOnHost {
    /// Host.
    pub host: String,
    /// Remains; none if its agent did not answer.
    pub remaining: Option<Vec<Remaining>>,
}

/// Reason for which a VM is not where it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "blocked", rename_all = "kebab-case")]
pub enum BlockedReason {
    /// The planner finds no way.
    NoPlan {
        /// Reason.
        why: StayReason,
    },
    /// The plan of the rest is refused.
    Refused {
        /// Reason.
        refusal: Refusal,
    },
    /// All attempts have failed.
    Failed {
        /// Number of attempts.
        attempts: u32,
        /// Reason of the last one.
        reason: String,
    },
    /// The VM cannot be moved from its host.
    Immovable {
        /// Reason.
        reason: String,
    },
    /// It is not known which host owns it.
    InDoubt {
        /// Destination of its move.
        to: String,
        /// Reason.
        reason: String,
    },
    /// A host without connection has it, or a move of it, or would have a way for it.
    HostLost {
        /// Host.
        host: String,
    },
    /// Its move did not end.
    StillMoving {
        /// Destination of its move.
        to: String,
    },
}

/// Reason for which an evacuation does not begin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "evacuation", rename_all = "kebab-case")]
pub enum EvacuationRefusal {
    /// The planner refuses.
    #[error("{refusal}")]
    Plan {
        /// Reason.
        refusal: Refusal,
    },
    /// A host has no connection to the controller.
    #[error("host {host} has no connection to the controller")]
    NotConnected {
        /// Host.
        host: String,
    },
    /// A host is the subject of another evacuation.
    #[error("host {host} is the subject of evacuation {by} already")]
    Busy {
        /// Host.
        host: String,
        /// Evacuation.
        by: EvacuationId,
    },
    /// Another evacuation takes the room, also once it has ended.
    #[error("evacuation {} takes the room: {refusal}", list(by))]
    RoomTaken {
        /// Evacuations that take it.
        by: Vec<EvacuationId>,
        /// Reason for which there is no plan beside them.
        refusal: Box<Refusal>,
    },
    /// No VM that left the host is known.
    #[error("no evacuation of host {host} is known from which VMs could return")]
    NothingToReturn {
        /// Host.
        host: String,
    },
    /// The request names no host or no VM.
    #[error("the request names nothing to be moved")]
    NothingNamed,
    /// There is no such evacuation.
    #[error("there is no evacuation {id}")]
    UnknownEvacuation {
        /// The id.
        id: EvacuationId,
    },
    /// The evacuation is not in a state for this.
    #[error("evacuation {id} {state}")]
    WrongState {
        /// The id.
        id: EvacuationId,
        /// Its state.
        state: String,
    },
}

impl BlockedReason {
    /// Returns true if it lasts until something outside of the evacuation changes.
    pub fn is_final(&self) -> bool {
        match self {
            Self::NoPlan { why: StayReason::Held { obstacle: Obstacle::IsMoving } }
            | Self::InDoubt { .. }
            | Self::HostLost { .. }
            | Self::StillMoving { .. } => false,
            Self::NoPlan { .. } | Self::Refused { .. } | Self::Failed { .. } | Self::Immovable { .. } => true,
        }
    }

    /// Returns what to do.
    pub fn advice(&self) -> String {
        match self {
            // Its text has the advice.
            Self::NoPlan { .. } => "resume the evacuation then".to_owned(),
            Self::Refused { refusal } => refusal.advice(),
            Self::Failed { .. } => {
                "remove the reason, and resume the evacuation: all attempts are allowed again".to_owned()
            }
            Self::Immovable { .. } => {
                "shut the VM down, or remove the reason and resume the evacuation".to_owned()
            }
            Self::InDoubt { .. } => {
                "decide with `whimbrel recover` which host has it, and resume the evacuation".to_owned()
            }
            Self::HostLost { host } => format!("connect host {host}, and resume the evacuation"),
            Self::StillMoving { .. } => "look at its migration, and resume the evacuation".to_owned(),
        }
    }
}

impl EvacuationRefusal {
    /// Returns what to do.
    pub fn advice(&self) -> String {
        match self {
            Self::Plan { refusal } => refusal.advice(),
            Self::NotConnected { host } => format!("start the agent of host {host}, and look at its log"),
            Self::Busy { by, .. } => format!("follow evacuation {by}, or cancel it"),
            Self::RoomTaken { refusal, .. } => {
                format!("cancel the other one, or let its VMs return first; or else: {}", refusal.advice())
            }
            Self::NothingToReturn { .. } => "move VMs to it by name".to_owned(),
            Self::NothingNamed => "name a host".to_owned(),
            Self::UnknownEvacuation { .. } => "list evacuations with `whimbrel fleet status`".to_owned(),
            Self::WrongState { .. } => "begin another evacuation".to_owned(),
        }
    }
}

impl fmt::Display for BlockedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPlan { why } => write!(f, "{why}"),
            Self::Refused { refusal } => write!(f, "{refusal}"),
            Self::Failed { attempts, reason } => {
                write!(f, "{attempts} attempts have failed, the last one: {reason}")
            }
            Self::Immovable { reason } => write!(f, "it cannot be moved: {reason}"),
            Self::InDoubt { to, reason } => {
                write!(f, "it is not known whether it is on host {to} or has stayed: {reason}")
            }
            Self::HostLost { host } => write!(f, "host {host} has no connection"),
            Self::StillMoving { to } => write!(f, "its move to host {to} has not ended"),
        }
    }
}

impl fmt::Display for EvacuationOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done { moved, late_by_ns: None } => write!(f, "done: {moved} VMs moved"),
            Self::Done { moved, late_by_ns: Some(late_by_ns) } => {
                let late_s = late_by_ns.div_ceil(1_000_000_000);
                write!(f, "done: {moved} VMs moved, {late_s} s after the deadline")
            }
            Self::Refused { refusal } => write!(f, "refused: {refusal}; {}", refusal.advice()),
            Self::Incomplete { vms, hosts } => {
                f.write_str("incomplete")?;
                for BlockedVm { vm, host, why } in vms {
                    write!(f, "; VM {vm} on host {host}: {why}; {}", why.advice())?;
                }
                for RemainsOnHost { host, remaining } in hosts {
                    match remaining {
                        None => write!(f, "; host {host} did not answer; look at its agent")?,
                        Some(remaining) => {
                            for one in remaining {
                                write!(f, "; on host {host} remains {one}; {}", one.advice())?;
                            }
                        }
                    }
                }
                Ok(())
            }
            Self::Cancelled { moved, unsettled } => {
                write!(f, "cancelled: {moved} VMs had been moved")?;
                for BlockedVm { vm, why, .. } in unsettled {
                    write!(f, "; VM {vm}: {why}; {}", why.advice())?;
                }
                Ok(())
            }
        }
    }
}

fn list(ids: &[EvacuationId]) -> String {
    let names: Vec<&str> = ids.iter().map(|id| id.0.as_str()).collect();
    names.join(", ")
}
