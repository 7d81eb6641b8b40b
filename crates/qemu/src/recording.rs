//! Which blocks of a running guest's disks are written, by QEMU's own dirty bitmaps; and the disks' contents, by QEMU's
//! own NBD server.
//!
//! Each disk has one bitmap that records. [`Recording::freeze`] puts an empty one in its place, in one transaction for
//! all disks, and serves the frozen one: a write that completes after the transaction is in the new bitmap, one that
//! completed before is in the frozen one and can be read. Nothing of ours stands in the way of the guest's writes.
//!
//! ```text
//! bitmap 0 records ── freeze ──► bitmap 1 records, 0 is served ── freeze ──► bitmap 2 records, 1 is served, 0 is gone …
//! ```
//!
//! All that is made in QEMU has a name that begins with [`PREFIX`], by which an agent finds what one before it left
//! ([`remove_leavings`]).

mod throttle;

use std::iter;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::drives::{self, Drive, Medium, QUERY_BLOCK};
use crate::qmp::{Qmp, QmpError, decoded};
use throttle::Throttle;
pub use throttle::{WriteCap, Written};

/// How names of exports, bitmaps and descriptors of ours begin.
pub const PREFIX: &str = "whimbrel-";

/// The unit in which writes to a disk of that length are recorded, in bytes: a page, so that a write here and there
/// sends no more than it has to. A bitmap takes 32 MiB then for a disk of 1 TiB, and no more for longer ones: the
/// unit grows with them.
#[must_use]
pub fn granularity_bytes(disk_bytes: u64) -> u64 {
    const PAGE_BYTES: u64 = 4 << 10;
    const MOST_UNITS: u64 = 1 << 28;
    (disk_bytes / MOST_UNITS).next_power_of_two().max(PAGE_BYTES)
}

/// How long QEMU may take to end an export whose client is gone.
const EXPORT_PATIENCE: Duration = Duration::from_secs(10);

/// Why writes are not recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// QEMU has one NBD server, and somebody else has it.
    #[error(
        "this QEMU's NBD server is in use (a backup, a mirror): {0}; wait until that is done, or end it with nbd-server-stop"
    )]
    ServerTaken(String),
    /// A disk is not what it was: what was written to it since is not all recorded.
    #[error("disk {node} {what}")]
    Changed {
        /// Its top node.
        node: String,
        /// What became of it.
        what: String,
    },
    /// QEMU refused, or its monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// A disk whose writes are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedDisk {
    /// Its top node: what its device uses.
    pub node: String,
    /// Its length, in bytes.
    pub bytes: u64,
}

/// What is served after a [`freeze`](Recording::freeze), one for each disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The export that has the bitmap.
    pub export: String,
    /// The bitmap.
    pub bitmap: String,
}

/// Writes to some disks are recorded, until [`end`](Recording::end).
#[derive(Debug)]
pub struct Recording {
    disks: Vec<RecordedDisk>,
    /// Which bitmap records.
    turn: u64,
    /// Exports of the last frozen bitmaps, which are there until the next ones.
    frozen: Vec<Frozen>,
    throttle: Throttle,
}

impl Recording {
    /// Begins to record writes to the disks, and serves them on `listener`, a unix socket that is bound and need not
    /// listen yet.
    ///
    /// # Errors
    /// When QEMU's NBD server is taken, a disk is not as it is said to be, or QEMU refuses. Nothing is left behind then.
    pub fn begin(
        qmp: &mut Qmp,
        listener: BorrowedFd<'_>,
        disks: Vec<RecordedDisk>,
    ) -> Result<Self, RecordError> {
        // Bitmaps before anything else: by them it is found whatever an agent that dies has left.
        let add: Vec<Value> = disks.iter().map(|disk| add_bitmap(disk, 0)).collect();
        qmp.run("transaction", json!({ "actions": add }))?;
        let mut recording = Self { disks, turn: 0, frozen: Vec::new(), throttle: Throttle::default() };
        if let Err(error) = start_server(qmp, listener) {
            // The server may be somebody else's, so it is not stopped. The first error is the one to tell.
            let _ = remove_leavings(qmp);
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
            ("block-export-add", export(&disk.node, &name, json!({ "allocation-depth": true })))
        });
        all_done(qmp, exports)?;
        self.throttle = Throttle::find(qmp, self.disks.iter().map(|disk| disk.node.as_str()))?;
        self.check(drives::ask(qmp)?)
    }

    /// What the guest has written to the disks since its start.
    pub fn written(&self, qmp: &mut Qmp) -> Result<Written, QmpError> {
        self.throttle.written(qmp)
    }

    /// Whether the disk with this number is held to a cap, and its writes counted: nobody else has throttled it.
    pub fn holds(&self, disk: usize) -> bool {
        self.throttle.holds(disk)
    }

    /// From now on the guest writes no faster than this to all of the disks together, until the recording ends. A disk
    /// that somebody else has throttled keeps the caps that it has.
    pub fn cap_writes(&mut self, qmp: &mut Qmp, cap: WriteCap) -> Result<(), QmpError> {
        self.throttle.keep(qmp, cap)
    }

    /// Compares the disks with what devices use now. A snapshot puts another node above the one that is recorded, a
    /// change of medium puts another in its place, and a disk that has grown has more than was proposed.
    fn check(&self, drives: Vec<Drive>) -> Result<(), RecordError> {
        let media: Vec<Medium> = drives.into_iter().filter_map(|drive| drive.medium).collect();
        self.disks.iter().try_for_each(|disk| {
            let changed = |what| Err(RecordError::Changed { node: disk.node.clone(), what });
            match media.iter().find(|medium| medium.node == disk.node) {
                None => changed(
                    "is not what its device uses any more: somebody made a snapshot, changed the medium, or began a backup or a mirror"
                        .to_owned(),
                ),
                Some(medium) if medium.image.bytes != disk.bytes => changed(format!(
                    "has {} bytes and had {}: somebody has changed its length",
                    medium.image.bytes, disk.bytes
                )),
                Some(_) => Ok(()),
            }
        })
    }

    /// The export that serves a disk as it is now, for reading and for what is allocated; it stays the same.
    pub fn data_export(disk: usize) -> String {
        format!("{PREFIX}disk-{disk}")
    }

    /// Puts an empty bitmap in the place of each that records, and serves those: what was written between the call
    /// before (or the beginning) and this one. Returns what was written only once: to lose it is to lose the migration.
    ///
    /// # Errors
    /// When a disk is not what it was at the beginning, or QEMU refuses.
    pub fn freeze(&mut self, qmp: &mut Qmp) -> Result<&[Frozen], RecordError> {
        self.thaw(qmp)?;
        let (old, new) = (self.turn, self.turn + 1);
        let mut actions = Vec::new();
        for disk @ RecordedDisk { node, .. } in &self.disks {
            actions.push(add_bitmap(disk, new));
            actions.push(bitmap_action("block-dirty-bitmap-disable", node, old));
            if let Some(older) = old.checked_sub(1) {
                actions.push(bitmap_action("block-dirty-bitmap-remove", node, older));
            }
        }
        // All at once: between them nobody has to wake up. What the disks are is asked last, so that it holds for all
        // that was recorded.
        let frozen: Vec<Frozen> = (0..self.disks.len())
            .map(|disk| Frozen { export: format!("{PREFIX}written-{disk}-{old}"), bitmap: bitmap(old) })
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
        self.turn = new;
        if let Some(looked) = looked {
            self.check(decoded(QUERY_BLOCK, looked?)?)?;
        }
        Ok(&self.frozen)
    }

    /// Ends the serving of frozen bitmaps, which have been read. The next [`freeze`](Self::freeze) does so too, but
    /// then it takes longer.
    pub fn thaw(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let names: Vec<String> = self.frozen.drain(..).map(|frozen| frozen.export).collect();
        end_exports(qmp, &names)
    }

    /// Ends all of it: first what the guest feels, then the server, which is known to be ours as long as the bitmaps
    /// are there. What fails does not keep the rest from being done; the first error is returned.
    pub fn end(mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let lifted = self.throttle.lift(qmp);
        let stopped = qmp.run("nbd-server-stop", Value::Null);
        let removed = remove_leavings(qmp).map(drop);
        lifted.and(stopped).and(removed)
    }
}

fn start_server(qmp: &mut Qmp, listener: BorrowedFd<'_>) -> Result<(), RecordError> {
    let name = format!("{PREFIX}nbd");
    qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": name }), listener)?;
    // As many connections as there are streams and disks: none at all is QEMU's word for any number.
    let address = json!({ "addr": { "type": "fd", "data": { "str": name } }, "max-connections": 0 });
    let Err(error) = qmp.run("nbd-server-start", address) else { return Ok(()) };
    // The server would have closed it.
    let _ = qmp.run("closefd", json!({ "fdname": name }));
    Err(match error {
        QmpError::CommandFailed { desc, .. } if desc.contains("already running") => {
            RecordError::ServerTaken(desc)
        }
        error => error.into(),
    })
}

/// Lifts caps, and removes exports and bitmaps, that were made for a recording, by whomever. Returns whether there were
/// any; whether the server itself is ours, too, is not to be seen.
pub fn remove_leavings(qmp: &mut Qmp) -> Result<bool, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Node {
        node_name: String,
        #[serde(default)]
        dirty_bitmaps: Vec<Bitmap>,
    }
    #[derive(Deserialize)]
    struct Bitmap {
        #[serde(default)]
        name: String,
    }
    // If it fails, the rest is done nevertheless.
    let lifted = throttle::lift_all(qmp);
    let ours = |name: &String| name.starts_with(PREFIX);
    let names: Vec<String> = exports(qmp)?.into_iter().filter(ours).collect();
    end_exports(qmp, &names)?;
    let nodes: Vec<Node> = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
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

/// Lifts caps on writes that were set for a recording, by whomever. Returns whether there were any.
pub fn lift_caps(qmp: &mut Qmp) -> Result<bool, QmpError> {
    throttle::lift_all(qmp)
}

/// Ends a recording that an agent before this one left, with its server, unless somebody else uses that. Returns
/// whether there was one.
pub fn end_left(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let found = remove_leavings(qmp)?;
    if found && exports(qmp)?.is_empty() {
        match qmp.run("nbd-server-stop", Value::Null) {
            // It died before it had started the server, or after it had stopped it.
            Err(error) if error.is_refusal() => {}
            stopped => stopped?,
        }
    }
    Ok(found)
}

/// Ends exports, with whoever still uses them, and waits until they are gone.
fn end_exports(qmp: &mut Qmp, names: &[String]) -> Result<(), QmpError> {
    let orders = names.iter().map(|name| ("block-export-del", json!({ "id": name, "mode": "hard" })));
    // That one is gone already, or going, is no failure.
    qmp.execute_all(orders)?;
    let deadline = Instant::now() + EXPORT_PATIENCE;
    while exports(qmp)?.iter().any(|left| names.contains(left)) {
        // QEMU says when one is gone; what it says of others' is no matter here.
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

fn bitmap(turn: u64) -> String {
    format!("{PREFIX}{turn}")
}

fn add_bitmap(RecordedDisk { node, bytes }: &RecordedDisk, turn: u64) -> Value {
    let data = json!({ "node": node, "name": bitmap(turn), "granularity": granularity_bytes(*bytes) });
    json!({ "type": "block-dirty-bitmap-add", "data": data })
}

fn bitmap_action(kind: &str, node: &str, turn: u64) -> Value {
    json!({ "type": kind, "data": { "node": node, "name": bitmap(turn) } })
}

fn export(node: &str, name: &str, more: Value) -> Value {
    let mut export = json!({ "type": "nbd", "id": name, "node-name": node, "name": name });
    if let (Some(export), Value::Object(more)) = (export.as_object_mut(), more) {
        export.extend(more);
    }
    export
}

/// Runs all of them; the first refusal is the error.
fn all_done<'a>(qmp: &mut Qmp, commands: impl IntoIterator<Item = (&'a str, Value)>) -> Result<(), QmpError> {
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
