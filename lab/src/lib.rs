//! Whimbrel's laboratory: hosts, links, guests and clients on one machine, for tests and for people who want to try by
//! hand.
//!
//! - [`Lab`]: two hosts, a witness, a router and a client as network namespaces ([`lab`] draws them); links that can be
//!   slowed, cut and healed.
//! - [`Emulator`]: a link with delay, jitter and loss, in user space.
//! - [`Guest`] from a [`GuestSpec`]: QEMU in two versions, all kinds of memory and devices, with the tiny guest (boots
//!   in seconds, knows the expected content of every page of its memory) or the [`bare`]-metal one (runs under any
//!   KVM).
//! - [`Nas`]: a benchmark kernel that a guest computes during a migration.
//! - [`Serial`]: a guest's serial line: its output, and commands typed to it.
//! - [`Pki`]: certificates for agents; [`Agents`]: their configurations and daemons.
//! - [`name_server()`]: a server of DNS, for names of VMs.
//! - [`Client`]: watches a service from outside; [`sessions`]: connections that stay open; [`demo`]: all of these together.
//! - [`bench`](mod@bench) and [`storage`]: costs of a migration, without disks and with them; [`sweep`]: their
//!   dependence on parameters.
//! - [`two_networks`]: a second network of VMs, behind a router; [`wan`](mod@wan): moves to it, from far away.
//! - [`rack`]: the same with whole machines, which QEMU emulates, for what namespaces of one kernel do not have.
//! - [`Environment`]: the files that `scripts/setup` has made.
//!
//! Needs root, and Linux with network namespaces, veth, bridge, tun, tbf and nftables. It touches nothing but
//! namespaces whose names begin with its prefix, what runs in them, and its directory; it opens no connection to the
//! outside.
//!
//! ```no_run
//! use lab::{Environment, Guest, GuestSpec, Lab, LabConfig, Load};
//! # use whimbrel_lab as lab;
//! # fn main() -> lab::Result<()> {
//! let lab = Lab::up(&LabConfig::for_test())?;
//! let load = Load { fill_mib: 64, wss_mib: 32, rate_mib_per_s: 50, ..Load::default() };
//! let guest = Guest::start_and_wait(&lab.a, &Environment::discover(), &GuestSpec::tiny("vm1", load))?;
//! assert!(guest.serial().check()?.ok);
//! # Ok(())
//! # }
//! ```

mod addresses;
mod agents;
pub mod bare;
pub mod bench;
pub mod client;
pub mod configurations;
pub mod database;
pub mod debian_guest;
pub mod demo;
pub mod disk;
pub mod emulator;
pub mod energy;
mod environment;
mod error;
mod follow;
mod guest;
pub mod guest_shell;
mod host;
mod http;
pub mod lab;
mod migrating;
mod monitor;
mod name_server;
mod nas;
mod pki;
pub mod rack;
mod run;
mod serial;
pub mod sessions;
mod spec;
pub mod storage;
pub mod sweep;
mod testing;
mod traffic;
pub mod two_networks;
pub mod wan;

pub use self::host::Host;
pub use agents::Agents;
pub use client::{Client, ClientReport, ConnectionReport};
pub use emulator::{Emulator, Settings};
pub use environment::{Environment, Qemu, QemuVersion, not_tried};
pub use error::{Error, Result};
pub use follow::{DEADLINE, LogFollower};
pub use guest::Guest;
pub use lab::{Direction, Lab, LabConfig, Link, Packets, vm_address};
pub use monitor::Monitor;
pub use name_server::name_server;
pub use nas::{Nas, NasEnd, Peer};
pub use pki::{Identity, Pki};
pub use run::{Daemon, kill_pid, run};
pub use serial::{Check, Serial, Tick};
pub use spec::{Accel, Boot, Device, Disk, GuestSpec, Load, LoadMode, Net, Pattern, Ram};
pub use testing::{CommandOutput, entries, until};
