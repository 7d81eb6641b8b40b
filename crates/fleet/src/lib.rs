//! Energy of a fleet of hosts: the policy that places VMs and switches hosts, and the simulations that judge it.
//!
//! Everything here is pure: no clock, no thread, and random numbers only from a seed. The planner that runs in a
//! simulation is the one that runs live. Only [`trace::open`] touches the file system.
//!
//! - [`planner`]: placement and consolidation: forecasts, moves, hosts to wake and to put to sleep, each with its
//!   reason.
//! - [`queue`]: a bank of servers that follows the demand of a request trace (Isci et al. 2011, Fig. 4).
//! - [`vms`]: VMs with CPU traces on hosts with a power model (Beloglazov and Buyya 2012), and their policies.
//! - [`power_curve`]: watts of a host at a utilisation.
//! - [`trace`]: readers of traces, with errors that name the line.
//! - [`generator`]: a seeded request trace: days of a tournament.
//! - [`random`]: the generator of random numbers.

pub mod generator;
pub mod planner;
pub mod power_curve;
pub mod queue;
pub mod random;
pub mod trace;
pub mod vms;
