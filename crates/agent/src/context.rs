//! State that all parts of an agent share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use engine::precopy::CostHistory;
use link::Endpoint;
use proto::HostId;
use tracee::Injector;

use crate::arrivals::Reservations;
use crate::config::Config;
use crate::fault::Faults;
use crate::helper_program::HelperProgram;
use crate::names::NameLocks;
use crate::preflight::EmulatorCache;
use crate::templates::Templates;
use store::journal::Journal;
use store::register::Register;

/// State that all parts of an agent share.
pub(crate) struct Context {
    /// The configuration.
    pub(crate) config: Config,
    /// The journal.
    pub(crate) journal: Journal,
    /// The agent's identity towards its peers.
    pub(crate) endpoint: Endpoint,
    /// Expected data streams.
    pub(crate) router: link::Router,
    /// The ownership registry, if one is configured.
    pub(crate) register: Option<Arc<dyn Register>>,
    /// Runs system calls in other processes.
    pub(crate) injector: Arc<Injector>,
    /// Command that starts a guard for a throttled guest.
    pub(crate) guard: HelperProgram,
    /// Connection to the test harness for fault points.
    pub(crate) faults: Faults,
    /// Content of `/proc/sys/kernel/random/boot_id`.
    pub(crate) boot_id: String,
    /// Memory reserved for arriving VMs.
    pub(crate) arrivals: Arc<Reservations>,
    /// Held for writing while a trial QEMU is started, which uses resources that an arriving VM may need at the same
    /// time.
    pub(crate) starts: RwLock<()>,
    /// Names of VMs that are locked by one operation.
    pub(crate) names: NameLocks,
    /// Cached capabilities of this host's QEMU binaries.
    pub(crate) emulators: EmulatorCache,
    /// Templates of this host.
    pub(crate) templates: Arc<Templates>,
    /// Measured parts of the downtime that do not depend on memory, by destination, and by whether disks were copied,
    /// because the last writes of copied disks have to reach stable storage then.
    pub(crate) fixed_costs: Mutex<BTreeMap<(HostId, bool), CostHistory>>,
}

impl Context {
    /// Accesses the parts of the downtime that do not depend on memory, as measured by previous migrations to this
    /// destination, with copied disks or without.
    pub(crate) fn fixed_costs<T>(
        &self,
        destination: &HostId,
        copies_disks: bool,
        use_it: impl FnOnce(&mut CostHistory) -> T,
    ) -> T {
        let mut all = self.fixed_costs.lock().unwrap_or_else(PoisonError::into_inner);
        use_it(all.entry((destination.clone(), copies_disks)).or_default())
    }
}
