//! Pure state machines of a migration. Events and time go in, effects come out.
//!
//! Nothing here reads a clock, opens a file or draws a random number, so that the same code runs in the agent, under
//! the model checker and in a simulator, and any run can be replayed from its events.
//!
//! - [`handover`]: who owns the VM; the two roles' transition functions and the register's compare-and-set.
//! - [`bulk`]: when disks have gone ahead far enough for memory to begin.
//! - [`compression`]: which way to compress what is sent.
//! - [`naming`]: post-copy: how often pages are named before the guest is stopped.
//! - [`precopy`]: when to stop the guest.
//! - [`pressure`]: how far copying gives way to its guest on a busy host.
//! - [`push`]: post-copy: how much of what is left is sent at once.
//! - [`referring`]: whether it pays to refer memory to what the destination has.
//! - [`throttle`]: how fast a guest may write to disks that are copied.
//! - [`trace`]: what all of these were shown and decided, to decide it again.

pub mod bulk;
pub mod compression;
pub mod handover;
pub mod naming;
pub mod precopy;
pub mod pressure;
pub mod push;
pub mod referring;
pub mod throttle;
pub mod trace;
