//! Memory, and space for images, that is reserved for arriving VMs.
//!
//! A host's free memory falls as an arriving VM's pages are received, not when the VM is accepted: two that arrive at
//! once would both find the same memory free (docs/traps.md, trap 14). So each one's whole need is recorded when it is
//! accepted, and the part that it has not used yet is not free for the next one. The kernel's own count is used for the
//! part that it has used.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Resources that a VM will use on this host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Needs {
    /// Memory, in bytes.
    pub(crate) memory_bytes: u64,
    /// Size of huge pages, if its memory is made of them.
    pub(crate) hugepage_bytes: Option<u64>,
    /// Images that are made for it, with their final sizes.
    pub(crate) images: Vec<ImageNeed>,
}

/// Space that an image will use in its pool.
#[derive(Clone, Debug)]
pub(crate) struct ImageNeed {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// True if it grows as it is written; false if it has its full size when it is made.
    pub(crate) grows: bool,
}

/// Reservation of one VM.
#[derive(Clone, Debug)]
struct Reservation {
    needs: Needs,
    /// Process id of its QEMU, once that runs.
    pid: Option<u32>,
}

/// All reservations of this host. A check of free memory holds the lock until the reservation is made.
#[derive(Debug, Default)]
pub struct Reservations {
    reservations: Mutex<ReservationTable>,
    /// Held for writing while a trial QEMU is started, which uses resources that an arriving VM may need at the same
    /// time.
    pub starts: RwLock<()>,
}

#[derive(Debug, Default)]
struct ReservationTable {
    last: u64,
    open: BTreeMap<u64, Reservation>,
}

impl Reservations {
    fn table(&self) -> MutexGuard<'_, ReservationTable> {
        self.reservations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the reservations: no other VM gets a reservation while the result is held.
    pub(crate) fn lock_reservations(self: &Arc<Self>) -> LockedReservations<'_> {
        LockedReservations { arrivals: self, table: self.table() }
    }
}

/// The locked reservations, for a comparison with free resources.
pub(crate) struct LockedReservations<'a> {
    arrivals: &'a Arc<Reservations>,
    table: MutexGuard<'a, ReservationTable>,
}

impl LockedReservations<'_> {
    /// Returns the normal memory, or the huge pages of that size, that others will still use, in bytes. It must be
    /// called before free memory is read: memory that they allocate in between then counts twice, rather than not at
    /// all.
    pub(crate) fn reserved_bytes(&self, hugepage_bytes: Option<u64>) -> u64 {
        let of_kind =
            self.table.open.values().filter(|reservation| reservation.needs.hugepage_bytes == hugepage_bytes);
        of_kind.map(|reservation| reservation.reserved_bytes(Path::new("/proc"))).sum()
    }

    /// Returns the space that images of others will still use, in bytes; also to be called before free space is read.
    pub(crate) fn reserved_image_bytes(&self) -> u64 {
        let images = self.table.open.values().flat_map(|reservation| &reservation.needs.images);
        images.map(|need| need.bytes.saturating_sub(need.used_bytes())).fold(0, u64::saturating_add)
    }

    /// Reserves resources until the result is dropped.
    pub(crate) fn reservation(mut self, needs: Needs) -> ReservationGuard {
        self.table.last += 1;
        let number = self.table.last;
        self.table.open.insert(number, Reservation { needs, pid: None });
        ReservationGuard { arrivals: Arc::clone(self.arrivals), number }
    }
}

/// A reservation. Dropped when the VM has arrived, or will not arrive.
#[derive(Debug)]
pub struct ReservationGuard {
    arrivals: Arc<Reservations>,
    number: u64,
}

impl ReservationGuard {
    /// Records that the VM's QEMU runs now, and uses the reservation step by step.
    pub fn set_pid(&self, pid: u32) {
        if let Some(reservation) = self.arrivals.table().open.get_mut(&self.number) {
            reservation.pid = Some(pid);
        }
    }
}

impl Drop for ReservationGuard {
    fn drop(&mut self) {
        self.arrivals.table().open.remove(&self.number);
    }
}

impl Reservation {
    fn reserved_bytes(&self, proc: &Path) -> u64 {
        let bytes = self.needs.memory_bytes;
        match (self.pid, self.needs.hugepage_bytes) {
            // QEMU has reserved its huge pages when it mapped them.
            (Some(_), Some(_)) => 0,
            (Some(pid), None) => bytes.saturating_sub(used_bytes(&proc.join(pid.to_string()))),
            (None, _) => bytes,
        }
    }
}

/// Returns the memory that a QEMU uses: anonymous pages, and those of its memfds, whichever process wrote them.
fn used_bytes(process: &Path) -> u64 {
    let status = std::fs::read_to_string(process.join("status")).unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.split_whitespace().next());
    let anonymous = kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10;
    anonymous + memfd_bytes(process)
}

fn memfd_bytes(process: &Path) -> u64 {
    let descriptors = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let is_memfd = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:"))
    };
    // One file may be open twice.
    let files: BTreeMap<(u64, u64), u64> = descriptors
        .map(|entry| entry.path())
        .filter(is_memfd)
        .filter_map(|path| std::fs::metadata(path).ok())
        .map(|meta| ((meta.dev(), meta.ino()), meta.blocks() * 512))
        .collect();
    files.values().sum()
}

impl ImageNeed {
    /// Returns the bytes that the image uses in its pool so far. A thin volume counts as using none, because a query
    /// needs a program and may be slow: its whole need is reserved until the VM has arrived.
    fn used_bytes(&self) -> u64 {
        let taken = |image: Metadata| if self.grows { image.blocks() * 512 } else { u64::MAX };
        std::fs::metadata(&self.path).map_or(0, taken)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn what_is_promised_is_not_free_until_it_is_taken_or_given_up() {
        let arrivals = Arc::new(Reservations::default());
        let memory = |memory_bytes, hugepage_bytes| Needs { memory_bytes, hugepage_bytes, images: vec![] };
        let first = arrivals.lock_reservations().reservation(memory(100 << 20, None));
        let huge = arrivals.lock_reservations().reservation(memory(64 << 20, Some(2 << 20)));
        let owed = |kind| arrivals.lock_reservations().reserved_bytes(kind);
        assert_eq!((owed(None), owed(Some(2 << 20)), owed(Some(1 << 30))), (100 << 20, 64 << 20, 0));
        let second = arrivals.lock_reservations().reservation(memory(50 << 20, None));
        assert_eq!(owed(None), 150 << 20);
        drop(second);
        huge.set_pid(std::process::id());
        assert_eq!((owed(None), owed(Some(2 << 20))), (100 << 20, 0));
        drop((first, huge));
        assert_eq!((owed(None), owed(Some(2 << 20))), (0, 0));
    }

    #[test]
    fn what_an_image_will_take_is_not_free_for_another() {
        let folder = tempfile::tempdir().unwrap();
        let arrivals = Arc::new(Reservations::default());
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        let need = |path, bytes, grows| ImageNeed { path, bytes, grows };
        let images = vec![need(one.clone(), 3 << 20, true), need(other, 1 << 20, true)];
        let reserved = arrivals.lock_reservations().reservation(Needs { images, ..Needs::default() });
        assert_eq!(arrivals.lock_reservations().reserved_image_bytes(), 4 << 20);
        std::fs::write(&one, vec![1; 2 << 20]).unwrap();
        std::fs::File::open(&one).unwrap().sync_all().unwrap();
        assert!(arrivals.lock_reservations().reserved_image_bytes() <= 2 << 20);
        drop(reserved);
        assert_eq!(arrivals.lock_reservations().reserved_image_bytes(), 0);
    }

    #[test]
    fn what_a_memfd_has_is_taken() {
        let me = PathBuf::from("/proc/self");
        let file = rustix::fs::memfd_create("taken", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(file);
        let duplicate = file.try_clone().unwrap();
        let memfds = || memfd_bytes(&me);
        let before = memfds();
        file.write_all(&vec![1; 8 << 20]).unwrap();
        assert!(memfds().abs_diff(before + (8 << 20)) < 4 << 20, "not counted, or counted twice");
        drop((file, duplicate));
    }
}
