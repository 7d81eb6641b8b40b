//! Dependence of a migration's cost on working set, write rate, link, streams, buffer and cap, one after the other. The
//! points are cases of [`crate::bench`], measured in the same way; this module chooses them and presents the results.
//!
//! Two sets of points are figures of the literature:
//!
//! - **1**: Isci et al., *Improving server utilization using fast virtual machine migration*, Fig. 1: duration of a
//!   migration by active memory, for seven configurations of buffer, network, packets and cap;
//! - **5**: Ibrahim et al., *Optimized pre-copy live migration for memory intensive applications*, Fig. 5: the downtime
//!   of kernels of the NAS Parallel Benchmarks that are stopped after a number of iterations of pre-copy.
//!
//! Any others are a grid ([`Axes`]).

mod page;
mod plot;
mod point;

pub use page::tables;
pub use plot::plots;
pub use point::{Axes, Figure, Point, figures, is_measured, place};
