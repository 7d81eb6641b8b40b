//! Small questions and orders to a running QEMU that a migration needs.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::qmp::{Asked, Qmp, QmpError};

/// QEMU's own word for what the guest is doing.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// E.g. `running`, `paused`, `inmigrate`, `io-error`, `postmigrate`.
    pub status: String,
    /// Whether virtual CPUs run.
    pub running: bool,
}

impl Status {
    /// Whether the guest stands still because somebody wants that. One that was started with `-S` has not run yet;
    /// nothing else tells it from a paused one.
    pub fn is_paused(&self) -> bool {
        ["paused", "prelaunch"].contains(&self.status.as_str())
    }
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

/// CPU features that were asked for and that this QEMU cannot give its guest.
pub fn cpu_unavailable_features(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Cpu {
        #[serde(rename = "qom-path")]
        path: String,
    }
    let cpus: Vec<Cpu> = qmp.execute("query-cpus-fast", Value::Null)?;
    let Some(cpu) = cpus.first() else { return Ok(Vec::new()) };
    qmp.execute("qom-get", json!({ "path": cpu.path, "property": "unavailable-features" }))
}

/// The threads in which the virtual processors run, by the numbers that they have for QEMU.
pub fn cpu_threads(qmp: &mut Qmp) -> Result<Vec<u32>, QmpError> {
    #[derive(Deserialize)]
    struct Cpu {
        #[serde(rename = "thread-id")]
        thread: u32,
    }
    let cpus: Vec<Cpu> = qmp.execute("query-cpus-fast", Value::Null)?;
    let threads: BTreeSet<u32> = cpus.into_iter().map(|cpu| cpu.thread).collect();
    Ok(threads.into_iter().collect())
}

/// The machine types that this QEMU knows, with their short names (`q35`).
pub fn machine_types(qmp: &mut Qmp) -> Result<BTreeSet<String>, QmpError> {
    let machines: Vec<Value> = qmp.execute("query-machines", Value::Null)?;
    let names = |machine: &Value| {
        ["name", "alias"].map(|key| machine.get(key).and_then(Value::as_str).map(str::to_owned))
    };
    Ok(machines.iter().flat_map(names).flatten().collect())
}

/// Files and devices of the host that block nodes have open, one for each node.
pub fn open_files(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Node {
        #[serde(rename = "drv")]
        driver: String,
        file: String,
    }
    let nodes: Vec<Node> = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let is_file = |node: &Node| ["file", "host_device"].contains(&node.driver.as_str());
    Ok(nodes.into_iter().filter(is_file).map(|node| node.file).collect())
}

/// Stops the virtual CPUs; returns when they stand and block I/O is drained, how long that took until QEMU's event
/// STOP. It comes when both is done; from it to RESUME is the downtime of which QEMU's own migration tells.
pub fn stop(qmp: &mut Qmp) -> Result<Option<Duration>, QmpError> {
    let began = SystemTime::now();
    qmp.run("stop", Value::Null)?;
    Ok(qmp.last_said("STOP").and_then(|stopped| stopped.duration_since(began).ok()))
}

/// Lets the virtual CPUs run. Takes the images' locks first where they were given up. Returns how long that took from
/// QEMU's event RESUME on, which comes before the devices go on, and they before the virtual CPUs.
pub fn cont(qmp: &mut Qmp) -> Result<Option<Duration>, QmpError> {
    let asked = ask_to_cont(qmp)?;
    let deadline = Instant::now() + qmp.timeout();
    hear_of_cont(qmp, &asked, deadline)
}

/// The same without waiting for the answer: QEMU may have to wait for something before it gives one, and whoever asks
/// has to bring it.
pub fn ask_to_cont(qmp: &mut Qmp) -> Result<Asked, QmpError> {
    qmp.ask("cont", Value::Null)
}

/// The answer to [`ask_to_cont`], as [`cont`] returns it.
///
/// # Errors
/// [`QmpError::Timeout`] after the deadline, where the answer may still come.
pub fn hear_of_cont(qmp: &mut Qmp, asked: &Asked, deadline: Instant) -> Result<Option<Duration>, QmpError> {
    qmp.hear::<Value>(asked, deadline)?;
    let resumed = qmp.last_said("RESUME").filter(|resumed| *resumed >= asked.at());
    Ok(resumed.and_then(|resumed| resumed.elapsed().ok()))
}

/// Announces the guest's MAC addresses to the network, as QEMU's own migration does when it ends:
/// five rounds, the first at once, the pause growing from 50 to 550 ms.
pub fn announce_self(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.run("announce-self", json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 }))
}
