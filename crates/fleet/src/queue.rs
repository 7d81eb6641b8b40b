//! Simulation of a bank of servers that serves the requests of a trace, and that is switched on and off to follow them
//! (Isci et al. 2011, "Improving energy efficiency with low-latency VM migration", Fig. 4).
//!
//! The model is a G/M/k queue: arrivals from a trace, exponential service, one first-come-first-served queue, and a
//! number of servers k that a policy varies with two parameters, *headroom* and *minimum time to run*.
//!
//! - [`Workload`]: the arrivals of each second, scaled so that the busiest minute keeps the bank just busy.
//! - [`ServerBank`]: the queue itself, exact at every event.
//! - [`Capacity`]: the number of servers in each second, and the energy that they need.
//! - [`simulate`]: response times of all requests under a capacity.
//! - [`search`]: for a latency the cheapest pair that meets the limit on late requests.
//! - [`figure`]: the results of a trace: energy against latency.
//! - [`closed_form`]: waits of M/M/k, against which the simulation is checked.

mod capacity;
pub mod closed_form;
pub mod figure;
pub mod search;
mod server_bank;
mod simulation;
mod workload;

pub use capacity::{BadBank, Bank, Capacity, Energy, Pair};
pub use server_bank::{Observer, ServerBank};
pub use simulation::{Responses, poisson_arrivals, simulate};
pub use workload::{BadWorkload, Scale, Workload};
