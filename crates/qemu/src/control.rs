//! Small questions and orders to a running QEMU that a migration needs.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// QEMU's own word for what the guest is doing.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// E.g. `running`, `paused`, `inmigrate`, `io-error`, `postmigrate`.
    pub status: String,
    /// Whether virtual CPUs run.
    pub running: bool,
}

/// Asks for the run state.
pub fn status(qmp: &mut Qmp) -> Result<Status, QmpError> {
    qmp.execute("query-status", Value::Null)
}

/// Lets all block I/O that is in flight complete, and changes nothing.
///
/// An empty transaction drains QEMU's whole block layer. Disk reads with `cache=none` are DMA into
/// the guest's memory: its pages are marked dirty when the read is submitted, not when the data
/// lands, so that marks are cleared first, then this is called, and only then pages are read.
pub fn drain(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.run("transaction", json!({ "actions": [] }))
}

/// Why QEMU itself would refuse to migrate this guest, in its words; empty when it would not.
/// `xen-save-devices-state` does not ask, so pre-flight must.
pub fn blocked_reasons(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Migrate {
        #[serde(default, rename = "blocked-reasons")]
        blocked_reasons: Vec<String>,
    }
    Ok(qmp.execute::<Migrate>("query-migrate", Value::Null)?.blocked_reasons)
}

/// Stops the virtual CPUs; returns when they stand and block I/O is drained.
pub fn stop(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.run("stop", Value::Null)
}

/// Lets the virtual CPUs run. Takes the images' locks first where they were given up.
pub fn cont(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.run("cont", Value::Null)
}

/// Announces the guest's MAC addresses to the network, as QEMU's own migration does when it ends:
/// five rounds, the first at once, the pause growing from 50 to 550 ms.
pub fn announce_self(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.run("announce-self", json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 }))
}
