//! Evacuations: hosts are emptied before a deadline, and what left them comes back.
//!
//! [`Evacuations`] takes events of agents and the time, and orders actions. Its parts do no I/O; the controller stores
//! what has changed, carries the actions out, and reports their results.
//!
//! **Nothing is moved twice.** Each order to move a VM has a [`CommandId`], which is stored before it is sent. Agents
//! journal it. After a restart of the controller, or a lost connection, agents are asked what they know about each command
//! that has not ended. One that an agent has never seen is ordered again with the same id; no command is replaced by
//! another one before the agent has stated its end. So a repeated or late order begins nothing.
//!
//! **A VM in doubt blocks itself alone.** Room is kept for it on both hosts, and the others go on.
//!
//! **Everything ends.** Attempts are bounded, a move without progress is cancelled, and an evacuation without progress ends
//! and states what stands in its way. It can be resumed.
//!
//! **Room is reserved.** Evacuations see each other's moves, also planned ones, as if they were under way. One that needs
//! room which another one takes waits for it, or is refused if that does not help.
//!
//! A host is *empty* if [`HostContents::what_remains`] is nothing. There is no other definition.

mod action;
mod advance;
mod bandwidth;
mod command;
mod concurrency;
mod contents;
mod ending;
mod event;
mod explain;
mod outcome;
mod outlook;
mod planning;
mod report;
mod request;
mod set;
mod shares;
mod state;
mod status;
mod surroundings;
mod take;

pub use action::{EvacuationAction, MoveOrder};
pub use command::{
    CommandId, CommandState, EvacuationId, MoveEnd, MoveFailure, MoveProgress, WrongCommandId,
};
pub use contents::{HostContents, HostServices, QemuOnHost, Remaining};
pub use event::{EvacuationEvent, HostFacts};
pub use explain::{MoveExplanation, MoveStanding, WaitReason};
pub use outcome::{BlockedReason, BlockedVm, EvacuationOutcome, EvacuationRefusal, RemainsOnHost};
pub use report::{DeadlineJudgement, DeadlineStanding, EvacuationReport};
pub use request::{EvacuationGoal, EvacuationRequest, RetryLimits};
pub use set::{EvacuationStep, Evacuations};
pub use state::{Departure, Evacuation, EvacuationPhase};
pub use status::{EvacuationPlan, EvacuationStatus};

#[cfg(test)]
mod tests;
