//! The bench: the same guest, with the same memory, over the same link, migrated by Whimbrel and by QEMU's own
//! migration.
//!
//! ```text
//! boot the guest once, save it
//! for each turn (the first is a warm-up and is not kept):
//!     for each contender:
//!         start the guest from what was saved ─► settle ─► move it ─► let it run on ─► note ─► end it
//! ```
//!
//! Contenders take turns, so that a noisy machine is noisy for all of them. Medians, and ratios within a turn, are
//! compared. Processor time is that of all processes on both sides, the guest's own work included; the start of the
//! destination's QEMU is counted for all. In the warm-up the guest verifies all its memory after each migration.
//!
//! A guest whose program comes to an end (a kernel of the NAS Parallel Benchmarks, [`crate::Nas`]) is watched until
//! then, on either host, and *no-migration* is the same run without a migration. Such a program verifies itself. Where
//! the hosts have other guests too, the work that each of those did during the migration is recorded ([`Noises`]).

mod bar;
mod bars;
mod case;
mod contender;
mod converging;
mod echo_client;
mod guest_clock;
mod machine;
mod measure;
mod mover;
mod nas;
mod neighbours;
mod ours;
mod packing;
pub(crate) mod page;
pub(crate) mod plot;
mod program;
mod program_run;
pub(crate) mod qemu;
pub(crate) mod result;
mod statistics;
pub(crate) mod subject;
pub(crate) mod suite;
mod tracked;
pub(crate) mod usage;

pub use bar::Bar;
pub use bars::bars;
pub use case::{Cap, Case, Program};
pub use contender::{Contender, Policy, QemuMode};
pub use measure::Bench;
pub use page::{put, tables};
pub use plot::plots;
pub use program::Disturbance;
pub use program_run::ProgramResult;
pub use result::{CaseResult, Measured, Provenance, Quantity, Results, Run, SCHEMA, Spread};
pub use statistics::{DowntimeParts, Noise, Noises, StopCircumstances};
pub use suite::{Suite, suites};
