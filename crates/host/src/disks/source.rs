//! Disks of a leaving VM: readers, and the log of writes.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ::memory::ram::RamError;
use ::memory::{BlockReader, DirtyLogError, PageSet, ScanError, ScanStats};
use block::nbd::{ALLOCATION, Client, DIRTY, Extent, HOLE, NbdError, ZERO, dirty_bitmap};
use proto::limits::PAGE_BYTES;
use qemu::qmp::{Qmp, QmpError};
use qemu::recording::{FrozenBitmap, RecordError, Recording, WriteCap, Written};

use super::served::{Connections, ServedDisk, failed};
use super::{display_name, whole_pages};
use crate::throttle_guard::ThrottleGuard;

/// A disk that is read while the guest writes to it.
#[derive(Debug)]
pub struct LeavingDisk(ServedDisk);

impl LeavingDisk {
    /// Opens disk `disk` of a [`Recording`], whose server listens on `socket`.
    pub fn open(name: &str, number: usize, socket: &Path, patience: Duration) -> Result<Self, NbdError> {
        let socket = socket.to_owned();
        let connect =
            move || Client::connect(&socket, &Recording::data_export(number), Some(ALLOCATION), patience);
        let connections = Connections::new(connect);
        let bytes = connections.with(|client| Ok(client.size_bytes()))?;
        Ok(Self(ServedDisk::new(name, bytes, connections)))
    }

    /// Returns the disk's length in bytes.
    pub(super) fn disk_bytes(&self) -> u64 {
        self.0.bytes
    }

    fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, NbdError> {
        self.0.with(|client| client.status(range))
    }
}

/// Returns the pages of a disk that have to be sent first: those that do not read as zeros, since the new image does,
/// or all of them.
pub fn first_pages(disk: &LeavingDisk, send_zeros: bool) -> Result<PageSet, NbdError> {
    if send_zeros {
        return Ok(PageSet::full(disk.bytes()));
    }
    let mut pages = PageSet::new(disk.bytes());
    for extent in disk.status(0..disk.disk_bytes())? {
        if extent.status & ZERO == 0 {
            pages.set_bytes(extent.bytes);
        }
    }
    Ok(pages)
}

impl BlockReader for LeavingDisk {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn description(&self) -> String {
        display_name(&self.0.name)
    }

    fn bytes(&self) -> u64 {
        whole_pages(self.0.bytes)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        self.0.read(offset, into)
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        let there = self.0.on_disk(range.clone());
        if there.is_empty() {
            return Ok(range.end);
        }
        let extents = match self.status(there) {
            Ok(extents) => extents,
            // Skipping holes is only an optimisation. A QEMU that has released its disks at the stop may refuse to
            // report what is allocated.
            Err(NbdError::Failed { .. }) => return Ok(range.start),
            Err(error) => return Err(failed(error)),
        };
        let is_hole = |extent: &&Extent| extent.status & (HOLE | ZERO) == HOLE | ZERO;
        let present = extents.iter().find(|extent| !is_hole(extent));
        Ok(present.map_or(range.end, |extent| extent.bytes.start))
    }
}

/// The log of writes to all copied disks.
#[derive(Debug)]
pub struct DiskLog {
    recording: Recording,
    socket: SocketPath,
    names: Vec<String>,
    patience: Duration,
    /// Lifts caps on writes after this process's end.
    guard: Option<ThrottleGuard>,
    /// Sum of the newly dirtied bytes of all scans, over those disks that can be capped.
    dirtied_bytes: u64,
}

/// Reason for which the written parts are not known.
#[derive(Debug, thiserror::Error)]
enum DiskLogError {
    #[error("QEMU does not update its bitmaps")]
    Record(#[from] RecordError),
    #[error("QEMU does not report the content of its bitmap")]
    Nbd(#[from] NbdError),
}

impl DiskLog {
    /// Creates the log of a recording whose server listens on `socket`; `names` are those of its disks, and `guard`
    /// lifts caps on writes if this process does not.
    pub fn new(
        recording: Recording,
        socket: SocketPath,
        names: Vec<String>,
        patience: Duration,
        guard: Option<ThrottleGuard>,
    ) -> Self {
        Self { recording, socket, names, patience, guard, dirtied_bytes: 0 }
    }

    /// Returns the names of its disks, in their order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Adds to `into`, which has a set for each disk, everything that was written since the last call, and clears the
    /// log. After an error part of the log is lost: the migration cannot go on.
    pub fn take(&mut self, qmp: &mut Qmp, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        let began = Instant::now();
        let before: u64 = into.iter().map(PageSet::count).sum();
        let failed = |name: &String, error: DiskLogError| ScanError {
            block: display_name(name),
            source: DirtyLogError::Other(Box::new(error)),
        };
        let all = self.names.join(", ");
        let frozen = self.recording.freeze(qmp).map_err(|error| failed(&all, error.into()))?.to_vec();
        for (disk, (frozen, into)) in frozen.iter().zip(into.iter_mut()).enumerate() {
            let had = into.count();
            written(&self.socket.0, frozen, self.patience, into)
                .map_err(|error| failed(&self.names[disk], error.into()))?;
            // Disks that are throttled by others have those others' caps.
            if self.recording.is_capped(disk) {
                self.dirtied_bytes += (into.count() - had) * PAGE_BYTES;
            }
        }
        let pages = into.iter().map(PageSet::count).sum::<u64>().saturating_sub(before);
        Ok(ScanStats { pages, duration_us: began.elapsed().as_micros() as u64 })
    }

    /// Returns those disks that another program has throttled: they keep its caps.
    pub fn throttled_by_others(&self) -> impl Iterator<Item = &str> {
        let names = self.names.iter().enumerate();
        names.filter(|(disk, _)| !self.recording.is_capped(*disk)).map(|(_, name)| name.as_str())
    }

    /// Returns the bytes dirtied by the guest's writes to the other disks since the recording began.
    pub fn dirtied_bytes(&self) -> u64 {
        self.dirtied_bytes
    }

    /// Returns the guest's writes to the disks since its start.
    pub fn written(&self, qmp: &mut Qmp) -> Result<Written, QmpError> {
        self.recording.written(qmp)
    }

    /// Limits the rate of the guest's writes to the disks from now on.
    pub fn cap_writes(&mut self, qmp: &mut Qmp, cap: WriteCap) -> Result<(), QmpError> {
        self.recording.cap_writes(qmp, cap)
    }

    /// Releases the frozen bitmaps, to be called when there is time after a [`take`](Self::take): the next one is
    /// faster then.
    pub fn tidy(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.recording.thaw(qmp)
    }

    /// Ends the recording, and removes everything that it has made in QEMU.
    pub fn end(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let Self { recording, socket, guard, .. } = self;
        drop(socket);
        recording.end(qmp)?;
        if let Some(guard) = guard {
            guard.dismiss();
        }
        Ok(())
    }
}

/// Path of a socket, which is removed when this is dropped.
#[derive(Debug)]
pub struct SocketPath(pub PathBuf);

impl Drop for SocketPath {
    fn drop(&mut self) {
        // It may be gone.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Adds the contents of a frozen bitmap.
fn written(
    socket: &Path,
    frozen: &FrozenBitmap,
    patience: Duration,
    into: &mut PageSet,
) -> Result<(), NbdError> {
    let context = dirty_bitmap(&frozen.bitmap);
    let mut client = Client::connect(socket, &frozen.export, Some(&context), patience)?;
    let whole = 0..client.size_bytes();
    for extent in client.status(whole)? {
        if extent.status & DIRTY != 0 {
            into.set_bytes(extent.bytes);
        }
    }
    Ok(())
}
