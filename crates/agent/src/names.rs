//! Names of VMs that somebody has to himself for a while: whoever begins a migration, or enters or forgets a VM. What
//! was looked at is then still so when it is acted on, and a VM whose QEMU does not answer holds up no other.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use proto::VmName;

/// The names that are taken at present.
#[derive(Debug, Default)]
pub(crate) struct Names {
    taken: Mutex<BTreeSet<VmName>>,
    freed: Condvar,
    /// Held while a QEMU is entered under a name: one process has one.
    entering: Mutex<()>,
}

impl Names {
    /// Nobody else begins a migration of this VM, or enters or forgets it, as long as this is held. Waits for whoever
    /// has it; not to be taken twice by one thread.
    pub(crate) fn alone(&self, vm: &VmName) -> Alone<'_> {
        let taken = self.taken();
        let mut taken =
            self.freed.wait_while(taken, |taken| taken.contains(vm)).unwrap_or_else(PoisonError::into_inner);
        taken.insert(vm.clone());
        Alone { names: self, vm: vm.clone() }
    }

    /// No other QEMU is entered as long as this is held. To be taken after the name.
    pub(crate) fn entering(&self) -> MutexGuard<'_, ()> {
        self.entering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn taken(&self) -> MutexGuard<'_, BTreeSet<VmName>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name that is given back when this is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Alone<'a> {
    names: &'a Names,
    vm: VmName,
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.names.taken().remove(&self.vm);
        self.names.freed.notify_all();
    }
}
