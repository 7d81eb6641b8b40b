//! Slot of a driver: its entry in the list of drivers, and a thread for it.

use std::collections::btree_map::Entry;
use std::sync::{Arc, mpsc};
use std::thread;

use proto::MigrationId;
use tracing::error;

use super::{Daemon, DriverHandle};
use api::{Problem, ProblemKind};

impl Daemon {
    /// Reserves an entry in the list of drivers, and a thread that waits for its work. It is reserved before the
    /// journal has anything that only a driver can end. Refused if the migration has a driver already, which must stay
    /// reachable.
    pub(super) fn driver_slot(
        self: &Arc<Self>,
        id: &MigrationId,
        driven: DriverHandle,
    ) -> Result<DriverSlot, Problem> {
        match self.drivers().entry(id.clone()) {
            Entry::Vacant(free) => drop(free.insert(driven)),
            Entry::Occupied(_) => {
                let error = format!("{id} is already under way");
                return Err(Problem::new(ProblemKind::Conflict, error, "wait until it ends"));
            }
        }
        let held = DriverEntry { daemon: Arc::clone(self), id: id.clone() };
        let (work, given) = mpsc::channel::<(DriverEntry, Work)>();
        let daemon = Arc::clone(self);
        let run = move || {
            if let Ok((held, work)) = given.recv() {
                let panic_guard = PanicGuard;
                work();
                drop((panic_guard, held));
                // Not while another VM is being moved: its driver would wait for the allocator.
                if daemon.drivers().is_empty() {
                    tracee::allocator::release_free_memory();
                }
            }
        };
        match thread::Builder::new().name(format!("driver-{}", id.vm)).spawn(run) {
            Ok(_) => Ok(DriverSlot { held, thread: work }),
            Err(error) => {
                Err(Problem::caused_by(ProblemKind::Internal, &error, "the system cannot start more threads"))
            }
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// A driver's entry in the list, and a thread for it. Dropping it without work frees both.
pub(super) struct DriverSlot {
    held: DriverEntry,
    thread: mpsc::Sender<(DriverEntry, Work)>,
}

impl DriverSlot {
    /// Runs `work` on the thread; the slot is freed when that is done.
    pub(super) fn work(self, work: impl FnOnce() + Send + 'static) {
        // The thread waits for nothing else.
        drop(self.thread.send((self.held, Box::new(work))));
    }
}

/// Guard of a running driver. A driver that panics leaves a migration without a driver: the agent aborts, as if it had
/// been killed there, and resumes the migration when it is started again.
struct PanicGuard;

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if thread::panicking() {
            error!("a driver panicked; the agent exits, and resumes the migration when it is restarted");
            std::process::abort();
        }
    }
}

/// An entry in the list of drivers.
struct DriverEntry {
    daemon: Arc<Daemon>,
    id: MigrationId,
}

impl Drop for DriverEntry {
    fn drop(&mut self) {
        self.daemon.drivers().remove(&self.id);
    }
}
