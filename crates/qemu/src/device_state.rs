//! Device state: saved by one QEMU, completed, loaded into another.
//!
//! `xen-save-devices-state` writes the state of everything but RAM, whatever the RAM is made of. Its output
//! lacks two things that a loading QEMU needs: the configuration section (the name of the machine type) and
//! the closing description. [`complete`] inserts them. The globals with which QEMU would not need them
//! (`migration.send-configuration=off`, `suppress-vmdesc=on`) would stay with the guest for ever.
//!
//! The stream, all numbers big-endian:
//!
//! ```text
//! "QEVM" | u32 3 | 0x07 u32 length, machine type | sections …                  | 0x00 | 0x06 u32 length, JSON
//! '--- header --'  '------ configuration ------'  '- as QEMU wrote them, EOF too -'   '--- description ---'
//! ```
//!
//! The guest must be stopped before ([`StateFile::capture`] refuses otherwise): then saving also releases the
//! disk images with their locks, and `cont` acquires them again. A QEMU before 10.0 that is asked to release
//! them a second time aborts (seen with 7.2), and a guest that stays paused keeps them released: after a
//! migration that failed, and after one that brought it here.
//!
//! So a caller that did not stop the guest itself asks first ([`disks`]). Saving may write guest memory, so
//! the caller runs a dirty scan once more afterwards.

mod incoming;

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use serde::Deserialize;
use serde_json::{Value, json};

pub use incoming::{Incoming, LoadError};

use crate::control;
use crate::qmp::{Qmp, QmpError, decode};

/// Maximum accepted length of a device state, in bytes; usual are tens to hundreds of KiB.
pub const MAX_STATE_BYTES: u64 = 256 << 20;

const HEADER: [u8; 8] = *b"QEVM\x00\x00\x00\x03";
const END_OF_SECTIONS: u8 = 0x00;
const SECTION_FULL: u8 = 0x04;
const DESCRIPTION: u8 = 0x06;
const CONFIGURATION: u8 = 0x07;

/// Error while a device state is saved or completed.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The monitor failed or QEMU refused.
    #[error("cannot save the device state")]
    Qmp(#[from] QmpError),
    /// The guest runs; it must be stopped before.
    #[error("the guest is {status}; its device state can be saved only when it is stopped")]
    NotStopped {
        /// QEMU's run state.
        status: String,
    },
    /// The file for the state could not be created or read.
    #[error("cannot {what} the file for the device state")]
    File {
        /// Attempted action.
        what: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
    /// QEMU's output is not a valid device state.
    #[error("QEMU's device state is invalid: {what}")]
    Format {
        /// Description of the error.
        what: String,
    },
}

/// Ownership of the disk images of a stopped guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskOwnership {
    /// This QEMU holds them, because the guest ran here.
    Held,
    /// An earlier save released them, or this QEMU never acquired them since the guest arrived; `cont` acquires them.
    Released,
}

/// Queries the ownership of the disk images of a guest that is stopped. A guest that ran until a moment
/// ago holds them ([`DiskOwnership::Held`]), and the query is not needed.
pub fn disks(qmp: &mut Qmp) -> Result<DiskOwnership, QmpError> {
    let nodes: Vec<BlockNode> = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    // QEMU reports it from 10.0 on.
    let mut reported = nodes.iter().filter_map(|node| node.active).peekable();
    if reported.peek().is_some() {
        return Ok(if reported.any(|active| active) { DiskOwnership::Held } else { DiskOwnership::Released });
    }
    let graph: PermissionGraph = qmp.execute("x-debug-query-block-graph", json!({}))?;
    Ok(graph.disks(&nodes))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct BlockNode {
    node_name: String,
    active: Option<bool>,
}

/// Permissions of users of block nodes. No user may write to a node that was released, or not acquired yet.
#[derive(Debug, Deserialize)]
struct PermissionGraph {
    nodes: Vec<PermissionNode>,
    edges: Vec<PermissionEdge>,
}

#[derive(Debug, Deserialize)]
struct PermissionNode {
    id: u64,
    r#type: String,
    name: String,
}

#[derive(Debug, Deserialize)]
struct PermissionEdge {
    parent: u64,
    child: u64,
    perm: Vec<String>,
}

impl PermissionEdge {
    fn can_write(&self) -> bool {
        self.perm.iter().any(|what| what == "write")
    }
}

impl PermissionGraph {
    /// Returns [`DiskOwnership::Held`] only if all images are proved to be held, because releasing them a second time
    /// kills QEMU. The other mistake only leaves locks until this QEMU ends, and a guest that is paused does not need
    /// them.
    ///
    /// So one released disk decides (others were plugged in since, or acquired again to be copied), and so does an
    /// image whose ownership cannot be determined, because it is only read, or no device uses it.
    fn disks(&self, nodes: &[BlockNode]) -> DiskOwnership {
        let node = |id: u64| self.nodes.iter().find(|node| node.id == id);
        // Exports for copied disks have no name.
        let is_device = |edge: &&PermissionEdge| {
            node(edge.parent).is_some_and(|node| node.r#type == "block-backend" && !node.name.is_empty())
        };
        let is_used = |image: &BlockNode| {
            let leads_to_it =
                |edge: &PermissionEdge| node(edge.child).is_some_and(|node| node.name == image.node_name);
            self.edges.iter().any(leads_to_it)
        };
        let mut devices = self.edges.iter().filter(is_device).peekable();
        let held =
            devices.peek().is_some() && devices.all(PermissionEdge::can_write) && nodes.iter().all(is_used);
        if held { DiskOwnership::Held } else { DiskOwnership::Released }
    }
}

/// File into which QEMU saves its device state. It is created, and passed to QEMU, before the guest is stopped, so that
/// only the saving itself is part of the downtime.
///
/// QEMU gets it through the monitor, so that it works without privileges and in a chroot. If it is not
/// [removed](StateFile::remove), QEMU drops it when the monitor's connection ends and the guest runs.
#[derive(Debug)]
pub struct StateFile {
    memory: File,
    /// QEMU's number of the file descriptor set.
    set: u64,
}

impl StateFile {
    /// Creates the file and passes it to QEMU.
    pub fn prepare(qmp: &mut Qmp) -> Result<Self, StateError> {
        #[derive(Deserialize)]
        struct Added {
            #[serde(rename = "fdset-id")]
            set: u64,
        }
        let failed = |what| move |source| StateError::File { what, source };
        let memory: OwnedFd =
            rustix::fs::memfd_create("whimbrel-device-state", rustix::fs::MemfdFlags::CLOEXEC)
                .map_err(|errno| failed("make")(errno.into()))?;
        // Open for writing only: QEMU compares the access mode.
        let write_only = OpenOptions::new()
            .write(true)
            .open(format!("/proc/self/fd/{}", memory.as_raw_fd()))
            .map_err(failed("reopen"))?;
        let added: Added = qmp.execute_with_fd("add-fd", json!({}), write_only.as_fd())?;
        Ok(Self { memory: File::from(memory), set: added.set })
    }

    /// Makes QEMU save the device state of the stopped guest, and returns it as QEMU wrote it.
    ///
    /// The guest is stopped during this time, so the command to save follows the status query without waiting for its
    /// answer. QEMU stops a running guest while it saves, and resumes it; a guest that is stopped for another reason
    /// has its disks released until its `cont`, although saving is refused.
    ///
    /// Afterwards the disks are released, whatever their ownership was before. QEMU itself does not detect in time that
    /// no `cont` has followed an earlier save.
    ///
    /// # Errors
    /// [`StateError::NotStopped`] if the guest runs, or if it is stopped for another reason than a `stop` command.
    pub fn capture(&mut self, qmp: &mut Qmp, disks: DiskOwnership) -> Result<Vec<u8>, StateError> {
        let failed = |what| move |source| StateError::File { what, source };
        let name = format!("/dev/fdset/{}", self.set);
        // "Live" means: release the disks.
        let order = json!({ "filename": name, "live": disks == DiskOwnership::Held });
        let answers = qmp.execute_all([("query-status", Value::Null), ("xen-save-devices-state", order)])?;
        let mut answers = answers.into_iter();
        let (Some(status), Some(saved)) = (answers.next(), answers.next()) else {
            return Err(StateError::Format { what: "QEMU did not answer".to_owned() });
        };
        let status: control::Status = decode("query-status", status?)?;
        if !status.is_paused() {
            return Err(StateError::NotStopped { status: status.status });
        }
        saved?;
        let length = self.memory.metadata().map_err(failed("measure"))?.len();
        if length > MAX_STATE_BYTES {
            return Err(StateError::Format { what: format!("it has {length} bytes") });
        }
        let mut raw = Vec::with_capacity(length as usize);
        self.memory.rewind().map_err(failed("read"))?;
        (&self.memory).take(MAX_STATE_BYTES).read_to_end(&mut raw).map_err(failed("read"))?;
        Ok(raw)
    }

    /// Removes the file from QEMU.
    pub fn remove(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        qmp.run("remove-fd", json!({ "fdset-id": self.set }))
    }
}

/// Saves the device state of a stopped guest, and returns it as QEMU wrote it: all steps of [`StateFile`].
pub fn capture(qmp: &mut Qmp, disks: DiskOwnership) -> Result<Vec<u8>, StateError> {
    let mut file = StateFile::prepare(qmp)?;
    let raw = file.capture(qmp, disks);
    // The file is removed whether saving worked or not, and the error of saving is returned first.
    let removed = file.remove(qmp);
    let raw = raw?;
    removed?;
    Ok(raw)
}

/// Makes a QEMU that has not run its guest save its device state, and discards the result. With some devices QEMU
/// ends during the save; a QEMU that runs a guest would end together with it.
///
/// # Errors
/// If QEMU refuses, or has ended.
pub fn try_save(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.run("xen-save-devices-state", json!({ "filename": "/dev/null", "live": false }))
}

/// Converts the output of `xen-save-devices-state` to a stream that a QEMU of that machine type
/// (the versioned name, e.g. `pc-q35-10.0`) loads.
///
/// # Errors
/// [`StateError::Format`] if `raw` is not such a state.
pub fn complete(raw: &[u8], machine_type: &str) -> Result<Vec<u8>, StateError> {
    let wrong = |what: &str| StateError::Format { what: what.to_owned() };
    if raw.len() as u64 > MAX_STATE_BYTES {
        return Err(wrong("it is too large"));
    }
    let sections =
        raw.strip_prefix(&HEADER).ok_or_else(|| wrong("it does not begin with QEVM, version 3"))?;
    match sections {
        [CONFIGURATION, ..] => return Err(wrong("it has a configuration section already")),
        [SECTION_FULL, .., END_OF_SECTIONS] => {}
        [SECTION_FULL, ..] => return Err(wrong("it is cut short")),
        _ => return Err(wrong("no section follows the header")),
    }
    if !(1..256).contains(&machine_type.len()) {
        return Err(wrong("the machine type's name is empty or too long"));
    }
    let mut out = state_prefix(machine_type);
    out.reserve_exact(sections.len() + 16);
    out.extend_from_slice(sections);
    out.push(DESCRIPTION);
    out.extend_from_slice(&2_u32.to_be_bytes());
    out.extend_from_slice(b"{}");
    Ok(out)
}

/// Returns the first bytes of the state of a machine of that type.
fn state_prefix(machine_type: &str) -> Vec<u8> {
    let mut out = HEADER.to_vec();
    out.push(CONFIGURATION);
    out.extend_from_slice(&(machine_type.len() as u32).to_be_bytes());
    out.extend_from_slice(machine_type.as_bytes());
    out
}

/// Returns the machine type that a completed state names.
fn machine_type_of(state: &[u8]) -> Option<&str> {
    let configuration = state.strip_prefix(&HEADER)?.strip_prefix(&[CONFIGURATION])?;
    let (length, rest) = configuration.split_first_chunk()?;
    std::str::from_utf8(rest.get(..u32::from_be_bytes(*length) as usize)?).ok()
}

/// Returns the versioned machine type of a running QEMU, e.g. `pc-q35-10.0`.
pub fn machine_type(qmp: &mut Qmp) -> Result<String, QmpError> {
    let kind: String = qmp.execute("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    Ok(kind.strip_suffix("-machine").unwrap_or(&kind).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_parts_are_put_in() {
        let raw = b"QEVM\x00\x00\x00\x03\x04section\x00";
        let whole = complete(raw, "pc-q35-7.2").unwrap();
        assert_eq!(
            whole,
            b"QEVM\x00\x00\x00\x03\x07\x00\x00\x00\x0apc-q35-7.2\x04section\x00\x06\x00\x00\x00\x02{}"
        );
        // A state cannot be completed twice.
        assert!(complete(&whole, "pc-q35-7.2").is_err());
    }

    /// Graphs as QEMU 7.2 shows them.
    #[test]
    fn permissions_show_the_ownership_of_disks() {
        const DISK: u64 = 0;
        const CD: u64 = 1;
        // Device or export to format, or format to file.
        let whose = |edges: &[(&str, u64, &[&str])]| {
            let names = ["disk", "cd", "file"];
            let nodes: Vec<_> = ["disk", "cd", ""]
                .map(|name| ("block-backend", name))
                .into_iter()
                .chain(names.map(|name| ("block-driver", name)))
                .enumerate()
                .map(|(id, (kind, name))| json!({"id": id, "type": kind, "name": name}))
                .collect();
            let edges: Vec<_> = edges
                .iter()
                .map(|(parent, node, perm)| match *parent {
                    "device" => json!({"parent": node, "child": node + 3, "perm": perm}),
                    "export" => json!({"parent": 2, "child": node + 3, "perm": perm}),
                    _ => json!({"parent": node + 3, "child": 5, "perm": perm}),
                })
                .collect();
            let graph: PermissionGraph =
                serde_json::from_value(json!({"nodes": nodes, "edges": edges})).unwrap();
            let nodes = names.map(|name| json!({ "node-name": name }));
            let nodes: Vec<BlockNode> = serde_json::from_value(json!(nodes)).unwrap();
            graph.disks(&nodes)
        };
        let (read, write) = (&["consistent-read"][..], &["resize", "write", "consistent-read"][..]);
        let files = [("format", DISK, write), ("format", CD, read)];
        let alone = [&[("device", DISK, write)], &files[..]].concat();
        let ran = [&[("device", CD, read)], &alone[..]].concat();
        // The ownership of a read-only image is unknown: it may have been released, and the disk acquired again to be
        // copied.
        assert_eq!(whose(&ran), DiskOwnership::Released);
        let saved =
            [("device", DISK, &[][..]), ("device", CD, &[]), ("format", DISK, read), ("format", CD, &[])];
        assert_eq!(whose(&saved), DiskOwnership::Released);
        let arrived = [("device", DISK, read), ("device", CD, read), ("format", DISK, read)];
        assert_eq!(whose(&arrived), DiskOwnership::Released);
        // Nor is that of an image that no device uses.
        assert_eq!(whose(&alone), DiskOwnership::Released);
        let disk = [("device", DISK, write), ("device", CD, write), ("format", DISK, write)];
        assert_eq!(whose(&disk), DiskOwnership::Held);
        // The disk is copied.
        assert_eq!(whose(&[&disk[..], &[("export", DISK, read)]].concat()), DiskOwnership::Held);
        // Another disk was plugged in since.
        assert_eq!(whose(&[&saved[..], &disk[..1]].concat()), DiskOwnership::Released);
        // There are no nodes.
        assert_eq!(whose(&[]), DiskOwnership::Released);
    }

    #[test]
    fn invalid_states_are_refused() {
        for raw in [
            &b""[..],
            b"QEVM",
            b"QEVM\x00\x00\x00\x03",
            b"QEVM\x00\x00\x00\x02\x04x\x00",
            b"MVEQ\x00\x00\x00\x03\x04x\x00",
            b"QEVM\x00\x00\x00\x03\x01x\x00",
            b"QEVM\x00\x00\x00\x03\x04x",
        ] {
            assert!(complete(raw, "pc").is_err(), "{raw:?}");
        }
        let raw = b"QEVM\x00\x00\x00\x03\x04x\x00";
        assert!(complete(raw, "").is_err());
        assert!(complete(raw, &"m".repeat(256)).is_err());
        assert!(complete(raw, "pc").is_ok());
    }
}
