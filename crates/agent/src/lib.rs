//! The daemon: turns the engine's effects into calls on the crates below it, keeps the journal, and serves users.
//!
//! ```text
//!   whimbrel (command line) ──HTTP on a Unix socket──► api ──Control──► daemon
//!                                                                        │
//!      peers ──link──► register (witness), drivers ◄─────────────────────┤
//!                                                                        ▼
//!                                        journal (SQLite)   report   progress
//! ```
//!
//! Threads and blocking calls throughout; tokio lives in the API alone, on threads of its own, so that no request from
//! outside can delay a migration.

mod arrivals;
pub mod config;
mod context;
mod cpu;
pub mod daemon;
mod destination;
mod disks;
pub mod fault;
mod freeze;
mod guard;
mod helper_program;
mod left_images;
mod logs;
mod missing_pages_record;
mod names;
mod ownership;
mod peers;
mod pool;
mod preflight;
mod ram;
mod source;
mod state_machine;
mod templates;
#[cfg(test)]
mod testing;
mod verification;
mod vms;
mod watch;

pub(crate) use api::with_causes as chain;
pub use guard::guard_main;
