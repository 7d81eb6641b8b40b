//! The controller of a fleet.
//!
//! ```text
//!   agents ──link──► sessions ─┐                               ┌─► commands ──link──► agents
//!                              ▼                               │
//!   users ──HTTP──► user_api ─► Coordinator: fleet, evacuations ┼─► events, metrics
//!                              ▲            │                  │
//!   ticker ────────────────────┘            ▼                  └─► state of evacuations
//!                                     store (SQLite)
//! ```
//!
//! All state is in one [`coordinator::Coordinator`], behind one lock. An input changes it, the changes are stored, and then the actions
//! that follow are carried out: `engine::evacuation` decides, and its decisions are stored before anything is ordered.
//!
//! The controller is needed for what users request from it alone: agents move VMs without it, and it learns from their
//! next snapshots what has happened.

pub mod config;
mod coordinator;
mod daemon;
mod fleet;
mod inventory;
mod metrics;
mod refusal;
mod sessions;
mod user_api;
mod views;

pub(crate) use api::with_causes as chain;
pub use daemon::{Controller, ControllerError, check_identity};
