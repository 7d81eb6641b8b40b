//! The state of the devices: taken from one QEMU, completed, loaded into another.
//!
//! `xen-save-devices-state` writes the state of everything but RAM, whatever the RAM is made of.
//! What it writes lacks two things that a loading QEMU wants: the configuration section (the name
//! of the machine type) and the closing description. [`complete`] puts them in. The globals that
//! would make QEMU do without (`migration.send-configuration=off`, `suppress-vmdesc=on`) would stay
//! with the guest for ever.
//!
//! The stream, all numbers big-endian:
//!
//! ```text
//! "QEVM" | u32 3 | 0x07 u32 length, machine type | sections …                  | 0x00 | 0x06 u32 length, JSON
//! '--- header --'  '------ configuration ------'  '- as QEMU wrote them, EOF too -'   '--- description ---'
//! ```
//!
//! The guest must be stopped before ([`save`] refuses otherwise): then saving also gives up the
//! locks of the disk images, and `cont` takes them back. Saving may write guest memory, so the
//! caller scans it once more afterwards.

mod incoming;

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use serde::Deserialize;
use serde_json::{Value, json};

pub use incoming::{Incoming, LoadError};

use crate::control;
use crate::qmp::{Qmp, QmpError};

/// Most that is accepted as a device state, in bytes; usual are tens to hundreds of KiB.
pub const MAX_STATE_BYTES: u64 = 256 << 20;

const HEADER: [u8; 8] = *b"QEVM\x00\x00\x00\x03";
const END_OF_SECTIONS: u8 = 0x00;
const SECTION_FULL: u8 = 0x04;
const DESCRIPTION: u8 = 0x06;
const CONFIGURATION: u8 = 0x07;

/// Why a device state could not be saved or completed.
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
    /// The file that takes the state could not be made or read.
    #[error("cannot {what} the file for the device state")]
    File {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// What QEMU wrote is not what is expected.
    #[error("QEMU's device state is not understood: {what}")]
    Format {
        /// What is wrong.
        what: String,
    },
}

/// Saves the device state into `fd`, which must be open for writing **only** (QEMU compares the
/// access mode), e.g. the write end of a pipe or a file opened so. Works when QEMU runs without
/// privileges or in a chroot, because it gets the descriptor through the monitor.
///
/// # Errors
/// [`StateError::NotStopped`] when the guest runs.
pub fn save(qmp: &mut Qmp, fd: BorrowedFd<'_>) -> Result<(), StateError> {
    #[derive(Deserialize)]
    struct Added {
        #[serde(rename = "fdset-id")]
        set: u64,
    }
    let status = control::status(qmp)?;
    if status.running {
        return Err(StateError::NotStopped { status: status.status });
    }
    let added: Added = qmp.execute_with_fd("add-fd", json!({}), fd)?;
    let saved = qmp.run(
        "xen-save-devices-state",
        json!({ "filename": format!("/dev/fdset/{}", added.set), "live": true }),
    );
    // The set is taken away whether saving worked or not, and saving's own error comes first.
    let removed = qmp.run("remove-fd", json!({ "fdset-id": added.set }));
    saved?;
    removed?;
    Ok(())
}

/// Saves the device state and returns it, as QEMU wrote it.
pub fn capture(qmp: &mut Qmp) -> Result<Vec<u8>, StateError> {
    let failed = |what| move |source| StateError::File { what, source };
    let memory: OwnedFd = rustix::fs::memfd_create("whimbrel-device-state", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|errno| failed("make")(errno.into()))?;
    let write_only = OpenOptions::new()
        .write(true)
        .open(format!("/proc/self/fd/{}", memory.as_raw_fd()))
        .map_err(failed("reopen"))?;
    save(qmp, write_only.as_fd())?;
    let mut file = File::from(memory);
    let length = file.metadata().map_err(failed("measure"))?.len();
    if length > MAX_STATE_BYTES {
        return Err(StateError::Format { what: format!("it has {length} bytes") });
    }
    let mut raw = Vec::new();
    file.rewind().map_err(failed("read"))?;
    file.take(MAX_STATE_BYTES).read_to_end(&mut raw).map_err(failed("read"))?;
    Ok(raw)
}

/// Turns what `xen-save-devices-state` wrote into a stream that a QEMU of that machine type (the
/// versioned name, e.g. `pc-q35-10.0`) loads.
///
/// # Errors
/// [`StateError::Format`] when `raw` is no such state.
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
    let name = machine_type.as_bytes();
    let name_length = u32::try_from(name.len())
        .ok()
        .filter(|length| (1..256).contains(length))
        .ok_or_else(|| wrong("the machine type's name is empty or too long"))?;
    let mut out = Vec::with_capacity(raw.len() + name.len() + 16);
    out.extend_from_slice(&HEADER);
    out.push(CONFIGURATION);
    out.extend_from_slice(&name_length.to_be_bytes());
    out.extend_from_slice(name);
    out.extend_from_slice(sections);
    out.push(DESCRIPTION);
    out.extend_from_slice(&2_u32.to_be_bytes());
    out.extend_from_slice(b"{}");
    Ok(out)
}

/// The versioned machine type of a running QEMU, e.g. `pc-q35-10.0`.
pub fn machine_type(qmp: &mut Qmp) -> Result<String, QmpError> {
    let kind: String = qmp.execute("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    Ok(kind.strip_suffix("-machine").unwrap_or(&kind).to_owned())
}

/// Whether any block node is active, i.e. may take locks and write. `None` when this QEMU does not
/// tell (before 10.0).
pub fn any_block_node_active(qmp: &mut Qmp) -> Result<Option<bool>, QmpError> {
    let nodes: Vec<Value> = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let told: Vec<bool> =
        nodes.iter().filter_map(|node| node.get("active").and_then(Value::as_bool)).collect();
    Ok((!told.is_empty()).then(|| told.contains(&true)))
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
        // Not twice.
        assert!(complete(&whole, "pc-q35-7.2").is_err());
    }

    #[test]
    fn what_is_no_state_is_refused() {
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
