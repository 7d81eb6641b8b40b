//! What all parts of an agent share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use engine::precopy::CostHistory;
use link::Endpoint;
use proto::HostId;
use tracee::Injector;

use crate::arrivals::Arrivals;
use crate::config::Config;
use crate::daemon::HelperProgram;
use crate::fault::Faults;
use crate::journal::Journal;
use crate::names::Names;
use crate::preflight::Emulators;
use crate::register::Register;
use crate::templates::Templates;

/// What all parts of an agent share.
pub(crate) struct Context {
    /// The configuration.
    pub(crate) config: Config,
    /// The journal.
    pub(crate) journal: Journal,
    /// Who we are to our peers.
    pub(crate) endpoint: Endpoint,
    /// Expected data streams.
    pub(crate) router: link::Router,
    /// The register of owners, where one is configured.
    pub(crate) register: Option<Arc<dyn Register>>,
    /// Makes other processes call the kernel.
    pub(crate) injector: Arc<Injector>,
    /// How a guard of a guest that is throttled is started.
    pub(crate) guard: HelperProgram,
    /// Where fault points are told to.
    pub(crate) faults: Faults,
    /// `/proc/sys/kernel/random/boot_id`.
    pub(crate) boot_id: String,
    /// Memory promised to VMs on their way in.
    pub(crate) arrivals: Arc<Arrivals>,
    /// Held for writing while a QEMU is started on trial, which takes what a VM's may need at the same time.
    pub(crate) starts: RwLock<()>,
    /// Names of VMs that somebody has to himself.
    pub(crate) names: Names,
    /// What the QEMUs of this host have said of themselves.
    pub(crate) emulators: Emulators,
    /// Templates of this host.
    pub(crate) templates: Arc<Templates>,
    /// Parts of the downtime that do not depend on memory, as measured here: by destination, and whether disks were copied,
    /// whose last writes have to reach stable storage then.
    pub(crate) fixed_costs: Mutex<BTreeMap<(HostId, bool), CostHistory>>,
}

impl Context {
    /// Parts of the downtime that do not depend on memory, as measured by the migrations before to this destination, with
    /// disks that were copied or without.
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
