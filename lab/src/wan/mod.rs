//! Migrations to a host in another network, far away: how long a client's open connection is silent, and how long its
//! answers take afterwards (Bradford et al., section 4.5, call the second the disruption).
//!
//! ```text
//! client ~~~ router ── a            ~~~ long way: half of the round-trip time in each direction
//!               ~                   a ~~~ b is the way of the migration, and of the tunnel: it has the limited rate
//!               ~~~~~~ b
//! ```
//!
//! Each turn moves the guest there and back, over one connection of the client that is never opened again. After each
//! move the guest verifies all of its memory.

mod case;
mod client;
mod measure;
mod page;

pub use case::{WanCase, cases, ocean};
pub use measure::{WanBench, WanMove, WanResult, WanResults};
pub use page::{plots, tables};

/// Name and version of the document.
pub const SCHEMA: &str = "whimbrel.wan/1";
