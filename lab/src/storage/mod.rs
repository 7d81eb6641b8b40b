//! Costs of migrating a guest with its disk: the experiments of Bradford et al. 2007, section 4, with Whimbrel beside
//! QEMU's `blockdev-mirror` and beside copying a stopped guest.
//!
//! ```text
//! boot the guest once, save it with its disk
//! for each turn (the first is a warm-up and is not kept):
//!     for each mover:
//!         start the guest from what was saved ─► clients ─► undisturbed ─► move it ─► watch it go on
//!         ─► does it hold what it has to? ─► count what it holds ─► end it
//! ```
//!
//! - *clients* are real ones over connections that are never reopened ([`Workload`]); beside them one that requests a
//!   few bytes every 5 ms, so that a silence is detected at any time;
//! - the **disruption** is the longest silence for all of them from the request until the guest has arrived;
//! - in the warm-up the images of both sides are compared, by Whimbrel's own `--verify` or by `qemu-img compare` while
//!   the guest is stopped, and the guest compares the sums of its files; in every turn its database is checked, posts
//!   that were confirmed are counted, and fio's written data is read back;
//! - **overhead** is the bytes sent beyond the content of disk and memory when the guest has arrived.

mod bars;
mod case;
mod clients;
mod freeze;
mod guest;
mod io;
mod measure;
mod mirror;
mod mover;
mod ours;
mod overhead;
mod page;
mod player;
mod plot;
mod result;
mod robot;
mod sampler;
mod ssh;
mod tally;

pub use bars::bars;
pub use case::{DiskCase, Mover, Workload, cases};
pub use io::{DriverState, IoRate, IoTurn, StateRates};
pub use measure::{DiskBench, Measurement};
pub use page::tables;
pub use player::FilmReport;
pub use plot::plots;
pub use result::{
    ClientObservations, DiskCaseResult, DiskMeasured, DiskQuantity, DiskResults, DiskRun, SCHEMA,
};
pub use sampler::Timeline;
