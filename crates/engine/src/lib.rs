//! Pure state machines of a migration. Their inputs are events and times, their outputs are effects.
//!
//! The crate reads no clock, opens no file and draws no random number, so that the same code runs in the agent, under
//! the model checker and in a simulator, and any run can be replayed from its events.
//!
//! - [`handover`]: ownership of the VM; the two roles' transition functions and the registry's compare-and-set.
//! - [`disks_first`]: the moment at which memory begins, after rounds of disks alone.
//! - [`compression`]: the choice of the compression level.
//! - [`discards`]: post-copy: the number of discards before the guest is stopped.
//! - [`evacuation`]: hosts that are emptied before a deadline, through failures and restarts.
//! - [`forecast`]: the forecast of a migration, before it starts and while it runs.
//! - [`planner`]: the placement of a fleet's VMs, and the order of their moves.
//! - [`pre_copy`]: the moment at which the guest is stopped.
//! - [`pressure`]: the restraint of copying on a busy host, for the sake of the guest.
//! - [`push`]: post-copy: size and rate of the parts in which the remaining pages are pushed.
//! - [`references`]: the decision to send page references, or pages.
//! - [`session`]: the next step of a role: retries, repetitions, lost contact, failed effects.
//! - [`throttle`]: the limits on the guest's write rate and processor time.
//! - [`trace`]: the observations and decisions of all these policies, for replay.

pub mod compression;
pub mod discards;
pub mod disks_first;
pub mod evacuation;
pub mod forecast;
pub mod handover;
pub mod planner;
pub mod pre_copy;
pub mod pressure;
pub mod push;
pub mod references;
pub mod session;
pub mod throttle;
pub mod trace;
pub mod traces;
