//! State that all parts of an agent share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use engine::pre_copy::CostHistory;
use link::transport::Transport;
use net::redirection::RedirectionKeeper;
use proto::HostId;
use tracee::Injector;

use crate::HelperProgram;
use crate::arrivals::Reservations;
use crate::config::Config;
use crate::dns_keeper::DnsKeeper;
use crate::emulators::EmulatorCache;
use crate::fault::Faults;
use crate::name_locks::NameLocks;
use crate::templates::Templates;
use store::journal::Journal;
use store::registry::Registry;

/// Transport of migrations.
pub struct MigrationTransport {
    /// Opens and expects their connections.
    pub connections: Arc<dyn Transport>,
    /// Passes connections that peers open to the transport.
    pub router: link::Router,
}

/// State that all parts of an agent share.
pub struct Context {
    /// The configuration.
    pub config: Config,
    /// The journal.
    pub journal: Journal,
    /// Connections of migrations.
    pub transport: MigrationTransport,
    /// The ownership registry, if one is configured.
    pub registry: Option<Arc<dyn Registry>>,
    /// Runs system calls in other processes.
    pub injector: Arc<Injector>,
    /// Command that starts a guard for a throttled guest.
    pub guard: HelperProgram,
    /// Connection to the test harness for fault points.
    pub faults: Faults,
    /// Content of `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// Memory reserved for arriving VMs, and starts of QEMUs for them.
    pub arrivals: Arc<Reservations>,
    /// Names of VMs that are locked by one operation.
    pub names: NameLocks,
    /// Names of VMs that move to another network.
    pub dns_keeper: DnsKeeper,
    /// Redirections of connections of VMs that have moved from here, or to here, between networks.
    pub redirections: RedirectionKeeper,
    /// Cached capabilities of this host's QEMU binaries.
    pub emulators: EmulatorCache,
    /// Templates of this host.
    pub templates: Arc<Templates>,
    /// Measured parts of the downtime that do not depend on memory, by destination, and by whether disks were copied,
    /// because the last writes of copied disks have to reach stable storage then.
    pub fixed_costs: Mutex<BTreeMap<(HostId, bool), CostHistory>>,
}

impl Context {
    /// Accesses the parts of the downtime that do not depend on memory, as measured by previous migrations to this
    /// destination, with copied disks or without.
    pub fn fixed_costs<T>(
        &self,
        destination: &HostId,
        copies_disks: bool,
        use_it: impl FnOnce(&mut CostHistory) -> T,
    ) -> T {
        let mut all = self.fixed_costs.lock().unwrap_or_else(PoisonError::into_inner);
        use_it(all.entry((destination.clone(), copies_disks)).or_default())
    }
}
