//! Names of VMs that one operation locks for a while: a start of a migration, an adoption, or a removal. Checks then
//! still hold when they are acted on, and a VM whose QEMU does not answer delays no other.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use proto::VmName;

/// The locked names.
#[derive(Debug, Default)]
pub(crate) struct Names {
    taken: Mutex<BTreeSet<VmName>>,
    freed: Condvar,
    /// Held while a QEMU is adopted under a name: one process has one name.
    entering: Mutex<()>,
}

impl Names {
    /// Locks a name: no other thread begins a migration of this VM, or adopts or forgets it, while the result is held.
    /// Waits for the present holder; one thread must not lock a name twice.
    pub(crate) fn alone(&self, vm: &VmName) -> Alone<'_> {
        let taken = self.taken();
        let mut taken =
            self.freed.wait_while(taken, |taken| taken.contains(vm)).unwrap_or_else(PoisonError::into_inner);
        taken.insert(vm.clone());
        Alone { names: self, vm: vm.clone() }
    }

    /// Locks adoption: no other QEMU is adopted while the result is held. To be locked after the name.
    pub(crate) fn entering(&self) -> MutexGuard<'_, ()> {
        self.entering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn taken(&self) -> MutexGuard<'_, BTreeSet<VmName>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A locked name, released when this is dropped.
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
