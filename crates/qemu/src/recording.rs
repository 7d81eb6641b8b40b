//! Which blocks of a running guest's disks are written, by QEMU's own dirty bitmaps; and the disks' contents, by QEMU's
//! own NBD server.
//!
//! Each disk has one bitmap that records. [`Recording::freeze`] puts an empty one in its place, in one transaction for all
//! disks, and serves the frozen one: a write that completes after the transaction is in the new bitmap, one that completed
//! before is in the frozen one and can be read. Nothing of ours stands in the way of the guest's writes.
//!
//! ```text
//! bitmap 0 records ── freeze ──► bitmap 1 records, 0 is served ── freeze ──► bitmap 2 records, 1 is served, 0 is gone …
//! ```
//!
//! All that is made in QEMU has a name that begins with [`PREFIX`], by which an agent finds what one before it left
//! ([`remove_leavings`]).

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// How names of exports, bitmaps and descriptors of ours begin.
pub const PREFIX: &str = "whimbrel-";

/// The unit in which writes are recorded, in bytes. Smaller ones send less of a disk that is written here and there, and
/// cost more memory: this one is 2 MiB for a disk of 1 TiB.
pub const GRANULARITY_BYTES: u64 = 64 << 10;

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
    /// QEMU refused, or its monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
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
    /// Top nodes of the disks.
    nodes: Vec<String>,
    /// Which bitmap records.
    turn: u64,
    /// Exports of the last frozen bitmaps, which are there until the next ones.
    frozen: Vec<Frozen>,
}

impl Recording {
    /// Begins to record writes to the disks with these top nodes, and serves the disks on `listener`, a unix socket that is
    /// bound and need not listen yet.
    ///
    /// # Errors
    /// When QEMU's NBD server is taken, or QEMU refuses. Nothing is left behind then.
    pub fn begin(qmp: &mut Qmp, listener: BorrowedFd<'_>, nodes: Vec<String>) -> Result<Self, RecordError> {
        let name = format!("{PREFIX}nbd");
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": name }), listener)?;
        let address = json!({ "addr": { "type": "fd", "data": { "str": name } } });
        if let Err(error) = qmp.run("nbd-server-start", address) {
            // The server would have closed it.
            let _ = qmp.run("closefd", json!({ "fdname": name }));
            return Err(match error {
                QmpError::CommandFailed { desc, .. } if desc.contains("already running") => {
                    RecordError::ServerTaken(desc)
                }
                error => error.into(),
            });
        }
        let recording = Self { nodes, turn: 0, frozen: Vec::new() };
        match recording.serve(qmp) {
            Ok(()) => Ok(recording),
            Err(error) => {
                let _ = recording.end(qmp);
                Err(error.into())
            }
        }
    }

    fn serve(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let add: Vec<Value> = self.nodes.iter().map(|node| add_bitmap(node, 0)).collect();
        qmp.run("transaction", json!({ "actions": add }))?;
        let exports = self.nodes.iter().enumerate().map(|(disk, node)| {
            let name = Self::data_export(disk);
            ("block-export-add", export(node, &name, json!({ "allocation-depth": true })))
        });
        all_done(qmp, exports)
    }

    /// The export that serves a disk as it is now, for reading and for what is allocated; it stays the same.
    pub fn data_export(disk: usize) -> String {
        format!("{PREFIX}disk-{disk}")
    }

    /// Puts an empty bitmap in the place of each that records, and serves those: what was written between the call before
    /// (or the beginning) and this one. Returns what was written only once: to lose it is to lose the migration.
    pub fn freeze(&mut self, qmp: &mut Qmp) -> Result<&[Frozen], QmpError> {
        self.thaw(qmp)?;
        let (old, new) = (self.turn, self.turn + 1);
        let mut actions = Vec::new();
        for node in &self.nodes {
            actions.push(add_bitmap(node, new));
            actions.push(bitmap_action("block-dirty-bitmap-disable", node, old));
            if let Some(older) = old.checked_sub(1) {
                actions.push(bitmap_action("block-dirty-bitmap-remove", node, older));
            }
        }
        // Both at once: between the two nobody has to wake up.
        let frozen: Vec<Frozen> = (0..self.nodes.len())
            .map(|disk| Frozen { export: format!("{PREFIX}written-{disk}-{old}"), bitmap: bitmap(old) })
            .collect();
        let exports = frozen.iter().zip(&self.nodes).map(|(frozen, node)| {
            ("block-export-add", export(node, &frozen.export, json!({ "bitmaps": [frozen.bitmap] })))
        });
        let swap = ("transaction", json!({ "actions": actions }));
        all_done(qmp, std::iter::once(swap).chain(exports))?;
        self.turn = new;
        self.frozen = frozen;
        Ok(&self.frozen)
    }

    /// Ends the serving of frozen bitmaps, which have been read. The next [`freeze`](Self::freeze) does so too, but then it
    /// takes longer.
    pub fn thaw(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let names: Vec<String> = self.frozen.drain(..).map(|frozen| frozen.export).collect();
        end_exports(qmp, &names)
    }

    /// Ends all of it.
    pub fn end(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        remove_leavings(qmp)?;
        qmp.run("nbd-server-stop", Value::Null)
    }
}

/// Removes exports and bitmaps that were made for a recording, by whomever. Returns whether there were any; whether the
/// server itself is ours, too, is not to be seen.
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
    Ok(found)
}

/// Ends a recording that an agent before this one left, with its server, unless somebody else uses that. Returns whether
/// there was one.
pub fn end_left(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let found = remove_leavings(qmp)?;
    if found && exports(qmp)?.is_empty() {
        qmp.run("nbd-server-stop", Value::Null)?;
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

fn add_bitmap(node: &str, turn: u64) -> Value {
    let data = json!({ "node": node, "name": bitmap(turn), "granularity": GRANULARITY_BYTES });
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
