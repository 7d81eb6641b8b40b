//! Record of the blocks that a running guest writes to its disks, by QEMU's own dirty bitmaps; and the disks' contents,
//! by QEMU's own NBD server.
//!
//! Each disk has one bitmap that records. [`Recording::freeze`] replaces it with an empty one, in one transaction for
//! all disks, and serves the frozen one: a write that completes after the transaction is in the new bitmap, one that
//! completed before is in the frozen one and can be read. The guest's writes do not pass through our code.
//!
//! ```text
//! bitmap 0 records ── freeze ──► bitmap 1 records, 0 is served ── freeze ──► bitmap 2 records, 1 is served, 0 is gone …
//! ```
//!
//! Every object that is created in QEMU has a name that begins with [`PREFIX`], by which an agent finds the objects of
//! an earlier one ([`remove_leftovers`]).

mod throttle;

use std::iter;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::drives::{self, Drive, Medium, QUERY_BLOCK};
use crate::qmp::{Qmp, QmpError, decode};
use throttle::Throttle;
pub use throttle::{WriteCap, Written};

/// Prefix of the names of our exports, bitmaps and descriptors.
pub const PREFIX: &str = "whimbrel-";

/// Returns the granularity in bytes at which writes to a disk of that length are recorded: a page, so that
/// scattered writes send no more than they have to. A bitmap then needs 32 MiB for a disk of 1 TiB, and not more
/// for longer ones: the granularity grows with them.
#[must_use]
pub fn granularity_bytes(disk_bytes: u64) -> u64 {
    const PAGE_BYTES: u64 = 4 << 10;
    const MAX_BITS: u64 = 1 << 28;
    (disk_bytes / MAX_BITS).next_power_of_two().max(PAGE_BYTES)
}

/// Maximum time for QEMU to end an export whose client has closed its connection.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Error: writes are not recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Another client uses QEMU's only NBD server.
    #[error(
        "this QEMU's NBD server is in use (a backup, a mirror): {0}; wait until that has finished, or stop the server (nbd-server-stop)"
    )]
    ServerInUse(String),
    /// A disk has changed, so not all writes to it are recorded.
    #[error("disk {node} {what}")]
    Changed {
        /// Top node of the disk.
        node: String,
        /// Description of the change.
        what: String,
    },
    /// QEMU refused, or its monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// A disk whose writes are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedDisk {
    /// Top node: the node that the device uses.
    pub node: String,
    /// Length in bytes.
    pub bytes: u64,
}

/// Export and bitmap that are served after a [`freeze`](Recording::freeze), one for each disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenBitmap {
    /// Name of the export that serves the bitmap.
    pub export: String,
    /// Name of the bitmap.
    pub bitmap: String,
}

/// Record of writes to some disks, until [`end`](Recording::end).
#[derive(Debug)]
pub struct Recording {
    disks: Vec<RecordedDisk>,
    /// Number of the bitmap that records.
    bitmap_number: u64,
    /// Exports of the last frozen bitmaps, which exist until the next freeze.
    frozen: Vec<FrozenBitmap>,
    throttle: Throttle,
}

impl Recording {
    /// Begins to record writes to the disks, and serves them on `listener`, a unix socket that is bound and need not
    /// listen yet.
    ///
    /// # Errors
    /// If QEMU's NBD server is in use, a disk differs from its description, or QEMU refuses. No objects are left then.
    pub fn begin(
        qmp: &mut Qmp,
        listener: BorrowedFd<'_>,
        disks: Vec<RecordedDisk>,
    ) -> Result<Self, RecordError> {
        // Bitmaps before anything else: by them an agent finds everything that an agent that dies has left.
        let add: Vec<Value> = disks.iter().map(|disk| add_bitmap(disk, 0)).collect();
        qmp.run("transaction", json!({ "actions": add }))?;
        let mut recording =
            Self { disks, bitmap_number: 0, frozen: Vec::new(), throttle: Throttle::default() };
        if let Err(error) = start_server(qmp, listener) {
            // The server may belong to another client, so it is not stopped. The first error is returned.
            let _ = remove_leftovers(qmp);
            return Err(error);
        }
        match recording.serve(qmp) {
            Ok(()) => Ok(recording),
            Err(error) => {
                let _ = recording.end(qmp);
                Err(error)
            }
        }
    }

    fn serve(&mut self, qmp: &mut Qmp) -> Result<(), RecordError> {
        let exports = self.disks.iter().enumerate().map(|(number, disk)| {
            let name = Self::data_export(number);
            ("block-export-add", export(&disk.node, &name, json!({})))
        });
        run_all(qmp, exports)?;
        self.throttle = Throttle::find(qmp, self.disks.iter().map(|disk| disk.node.as_str()))?;
        self.check(drives::query(qmp)?)
    }

    /// Returns the number of writes and bytes that the guest has written to the disks since its start.
    pub fn written(&self, qmp: &mut Qmp) -> Result<Written, QmpError> {
        self.throttle.written(qmp)
    }

    /// Returns true if the disk with this index is capped, and its writes counted: no other client has throttled it.
    pub fn is_capped(&self, disk: usize) -> bool {
        self.throttle.is_capped(disk)
    }

    /// Limits the guest's writes to all of the disks together, until the recording ends. A disk that another client
    /// has throttled keeps its caps.
    pub fn cap_writes(&mut self, qmp: &mut Qmp, cap: WriteCap) -> Result<(), QmpError> {
        self.throttle.apply(qmp, cap)
    }

    /// Compares the disks with those that devices use now. A snapshot puts another node above the one that is
    /// recorded, a change of medium replaces it, and a disk that has grown has more than was proposed.
    fn check(&self, drives: Vec<Drive>) -> Result<(), RecordError> {
        let media: Vec<Medium> = drives.into_iter().filter_map(|drive| drive.medium).collect();
        self.disks.iter().try_for_each(|disk| {
            let changed = |what| Err(RecordError::Changed { node: disk.node.clone(), what });
            match media.iter().find(|medium| medium.node == disk.node) {
                None => changed(
                    "is no longer used by its device: a snapshot was made, the medium was changed, or a \
                     backup or mirror was started"
                        .to_owned(),
                ),
                Some(medium) if medium.image.bytes != disk.bytes => changed(format!(
                    "has {} bytes and had {}: its length was changed",
                    medium.image.bytes, disk.bytes
                )),
                Some(_) => Ok(()),
            }
        })
    }

    /// Returns the name of the export that serves a disk's current content and its allocation; it stays the same.
    pub fn data_export(disk: usize) -> String {
        format!("{PREFIX}disk-{disk}")
    }

    /// Replaces each bitmap that records with an empty one, and serves the old ones: the writes between the previous
    /// call (or the beginning) and this one. Returns each write only once: to lose the result is to lose the migration.
    ///
    /// # Errors
    /// If a disk has changed since the beginning, or QEMU refuses.
    pub fn freeze(&mut self, qmp: &mut Qmp) -> Result<&[FrozenBitmap], RecordError> {
        self.thaw(qmp)?;
        let (old, new) = (self.bitmap_number, self.bitmap_number + 1);
        let mut actions = Vec::new();
        for disk @ RecordedDisk { node, .. } in &self.disks {
            actions.push(add_bitmap(disk, new));
            actions.push(bitmap_action("block-dirty-bitmap-disable", node, old));
            if let Some(older) = old.checked_sub(1) {
                actions.push(bitmap_action("block-dirty-bitmap-remove", node, older));
            }
        }
        // All commands at once, so that no process has to wake up in between. The disks' state is queried last, so
        // that it holds for everything that was recorded.
        let frozen: Vec<FrozenBitmap> = (0..self.disks.len())
            .map(|disk| FrozenBitmap { export: format!("{PREFIX}written-{disk}-{old}"), bitmap: bitmap(old) })
            .collect();
        let exports = frozen.iter().zip(&self.disks).map(|(frozen, disk)| {
            ("block-export-add", export(&disk.node, &frozen.export, json!({ "bitmaps": [frozen.bitmap] })))
        });
        let swap = ("transaction", json!({ "actions": actions }));
        let look = (QUERY_BLOCK, Value::Null);
        let mut answers = qmp.execute_all(iter::once(swap).chain(exports).chain([look]))?;
        let looked = answers.pop();
        self.frozen = frozen;
        answers.into_iter().try_for_each(|answer| answer.map(drop))?;
        self.bitmap_number = new;
        if let Some(looked) = looked {
            self.check(decode(QUERY_BLOCK, looked?)?)?;
        }
        Ok(&self.frozen)
    }

    /// Ends the serving of frozen bitmaps, which have been read. The next [`freeze`](Self::freeze) does so too, but
    /// then it takes longer.
    pub fn thaw(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let names: Vec<String> = self.frozen.drain(..).map(|frozen| frozen.export).collect();
        end_exports(qmp, &names)
    }

    /// Ends the recording: first the caps that the guest notices, then the server, which is known to be ours as long
    /// as the bitmaps exist. An error does not prevent the remaining steps; the first error is returned.
    pub fn end(mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let lifted = self.throttle.lift(qmp);
        let stopped = qmp.run("nbd-server-stop", Value::Null);
        let removed = remove_leftovers(qmp).map(drop);
        lifted.and(stopped).and(removed)
    }
}

fn start_server(qmp: &mut Qmp, listener: BorrowedFd<'_>) -> Result<(), RecordError> {
    let name = format!("{PREFIX}nbd");
    qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": name }), listener)?;
    // There are as many connections as streams and disks: 0 means any number to QEMU.
    let address = json!({ "addr": { "type": "fd", "data": { "str": name } }, "max-connections": 0 });
    let Err(error) = qmp.run("nbd-server-start", address) else { return Ok(()) };
    // The server would have closed the descriptor.
    let _ = qmp.run("closefd", json!({ "fdname": name }));
    Err(match error {
        QmpError::CommandFailed { desc, .. } if desc.contains("already running") => {
            RecordError::ServerInUse(desc)
        }
        error => error.into(),
    })
}

/// Lifts caps, and removes exports and bitmaps, that any agent made for a recording. Returns true if there were any;
/// whether the server itself is ours, too, cannot be determined.
pub fn remove_leftovers(qmp: &mut Qmp) -> Result<bool, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct RecordedNode {
        node_name: String,
        #[serde(default)]
        dirty_bitmaps: Vec<Bitmap>,
    }
    #[derive(Deserialize)]
    struct Bitmap {
        #[serde(default)]
        name: String,
    }
    // An error does not prevent the remaining steps.
    let lifted = throttle::lift_all(qmp);
    let ours = |name: &String| name.starts_with(PREFIX);
    let names: Vec<String> = exports(qmp)?.into_iter().filter(ours).collect();
    end_exports(qmp, &names)?;
    let nodes: Vec<RecordedNode> = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let mut removals = Vec::new();
    for node in &nodes {
        for bitmap in node.dirty_bitmaps.iter().filter(|bitmap| ours(&bitmap.name)) {
            let which = json!({ "node": node.node_name, "name": bitmap.name });
            removals.push(json!({ "type": "block-dirty-bitmap-remove", "data": which }));
        }
    }
    let found = !names.is_empty() || !removals.is_empty();
    if !removals.is_empty() {
        qmp.run("transaction", json!({ "actions": removals }))?;
    }
    Ok(lifted? || found)
}

/// Lifts caps on writes that any agent set for a recording. Returns true if there were any.
pub fn lift_caps(qmp: &mut Qmp) -> Result<bool, QmpError> {
    throttle::lift_all(qmp)
}

/// Ends a recording that an earlier agent left, with its server, unless another client uses that. Returns true
/// if there was one.
pub fn end_leftover(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let found = remove_leftovers(qmp)?;
    if found && exports(qmp)?.is_empty() {
        match qmp.run("nbd-server-stop", Value::Null) {
            // The earlier agent died before it had started the server, or after it had stopped it.
            Err(error) if error.is_refusal() => {}
            stopped => stopped?,
        }
    }
    Ok(found)
}

/// Ends exports, disconnects their clients, and waits until they are gone.
fn end_exports(qmp: &mut Qmp, names: &[String]) -> Result<(), QmpError> {
    let orders = names.iter().map(|name| ("block-export-del", json!({ "id": name, "mode": "hard" })));
    // An export that is gone already, or being removed, is no failure.
    qmp.execute_all(orders)?;
    let deadline = Instant::now() + EXPORT_TIMEOUT;
    while exports(qmp)?.iter().any(|left| names.contains(left)) {
        // QEMU sends an event when one is gone; events of other exports do not matter here.
        qmp.wait_event("BLOCK_EXPORT_DELETED", deadline)?;
    }
    Ok(())
}

fn exports(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Export {
        id: String,
    }
    let exports: Vec<Export> = qmp.execute("query-block-exports", Value::Null)?;
    Ok(exports.into_iter().map(|export| export.id).collect())
}

fn bitmap(bitmap_number: u64) -> String {
    format!("{PREFIX}{bitmap_number}")
}

fn add_bitmap(RecordedDisk { node, bytes }: &RecordedDisk, bitmap_number: u64) -> Value {
    let data =
        json!({ "node": node, "name": bitmap(bitmap_number), "granularity": granularity_bytes(*bytes) });
    json!({ "type": "block-dirty-bitmap-add", "data": data })
}

fn bitmap_action(kind: &str, node: &str, bitmap_number: u64) -> Value {
    json!({ "type": kind, "data": { "node": node, "name": bitmap(bitmap_number) } })
}

fn export(node: &str, name: &str, more: Value) -> Value {
    let mut export = json!({ "type": "nbd", "id": name, "node-name": node, "name": name });
    if let (Some(export), Value::Object(more)) = (export.as_object_mut(), more) {
        export.extend(more);
    }
    export
}

/// Runs all commands; the first refusal is the error.
fn run_all<'a>(qmp: &mut Qmp, commands: impl IntoIterator<Item = (&'a str, Value)>) -> Result<(), QmpError> {
    qmp.execute_all(commands)?.into_iter().try_for_each(|answer| answer.map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_grows_with_the_disk() {
        const TIB: u64 = 1 << 40;
        assert_eq!([0, 1, TIB, TIB + 1].map(granularity_bytes), [4 << 10; 4]);
        assert_eq!([2 * TIB, 3 * TIB, 16 * TIB].map(granularity_bytes), [8 << 10, 16 << 10, 64 << 10]);
    }
}
