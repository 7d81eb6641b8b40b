//! Names of VMs that one operation locks for a while: a start of a migration, an adoption, or a removal. Checks then
//! still hold when they are acted on, and a VM whose QEMU does not answer delays no other.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use proto::VmName;

/// The locked names.
#[derive(Debug, Default)]
pub struct NameLocks {
    locked: Mutex<BTreeSet<VmName>>,
    freed: Condvar,
    /// Held while a QEMU is adopted under a name: one process has one name.
    adoption_lock: Mutex<()>,
}

impl NameLocks {
    /// Locks a name: no other thread begins a migration of this VM, or adopts or forgets it, while the result is held.
    /// Waits for the present holder; one thread must not lock a name twice.
    pub fn exclusive(&self, vm: &VmName) -> NameLock<'_> {
        let locked = self.locked();
        let mut locked = self
            .freed
            .wait_while(locked, |locked| locked.contains(vm))
            .unwrap_or_else(PoisonError::into_inner);
        locked.insert(vm.clone());
        NameLock { names: self, vm: vm.clone() }
    }

    /// Locks adoption: no other QEMU is adopted while the result is held. To be locked after the name.
    pub(crate) fn adoption_lock(&self) -> MutexGuard<'_, ()> {
        self.adoption_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn locked(&self) -> MutexGuard<'_, BTreeSet<VmName>> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A locked name, released when this is dropped.
#[derive(Debug)]
#[must_use]
pub struct NameLock<'a> {
    names: &'a NameLocks,
    vm: VmName,
}

impl Drop for NameLock<'_> {
    fn drop(&mut self) {
        self.names.locked().remove(&self.vm);
        self.names.freed.notify_all();
    }
}
