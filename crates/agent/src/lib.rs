//! The daemon: starts and resumes migrations, answers peers, and serves users.
//!
//! ```text
//!   whimbrel (command line) ──HTTP on a Unix socket──► api ──Control──► daemon
//!                                                                        │
//!      peers ──link──► registry (witness), drivers ◄─────────────────────┤
//!                                                                        ▼
//!                                        journal (SQLite)   report   progress
//! ```
//!
//! Threads and blocking calls throughout; tokio lives in the API alone, on threads of its own, so that no request from
//! outside can delay a migration.

pub mod daemon;

pub(crate) use api::with_causes as chain;
