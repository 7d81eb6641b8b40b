//! Simple queries and commands to a running QEMU that a migration needs.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::qmp::{PendingCommand, Qmp, QmpError};

/// Run state of the guest as QEMU reports it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// Name of the state, e.g. `running`, `paused`, `inmigrate`, `io-error`, `postmigrate`.
    pub status: String,
    /// True if virtual CPUs run.
    pub running: bool,
}

impl Status {
    /// Returns true if the guest is stopped because a user or program has requested that. A guest that was started
    /// with `-S` has not run yet; nothing else distinguishes it from a paused one.
    pub fn is_paused(&self) -> bool {
        ["paused", "prelaunch"].contains(&self.status.as_str())
    }
}

/// Queries the run state.
pub fn status(qmp: &mut Qmp) -> Result<Status, QmpError> {
    qmp.execute("query-status", Value::Null)
}

/// Waits until all block I/O in flight has completed, and changes nothing.
///
/// An empty transaction drains QEMU's whole block layer. Disk reads with `cache=none` are DMA into
/// the guest's memory: its pages are marked dirty when the read is submitted, not when the data
/// arrive. So the caller clears the dirty marks first, then calls this, and only then reads pages.
pub fn drain(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.run("transaction", json!({ "actions": [] }))
}

/// Returns QEMU's own reasons for refusing to migrate this guest; empty if there are none.
/// `xen-save-devices-state` does not check them, so pre-flight must.
pub fn blocked_reasons(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Migrate {
        #[serde(default, rename = "blocked-reasons")]
        blocked_reasons: Vec<String>,
    }
    Ok(qmp.execute::<Migrate>("query-migrate", Value::Null)?.blocked_reasons)
}

/// Returns the CPU features that were requested and that this QEMU cannot provide to its guest.
pub fn cpu_unavailable_features(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct CpuPath {
        #[serde(rename = "qom-path")]
        path: String,
    }
    let cpus: Vec<CpuPath> = qmp.execute("query-cpus-fast", Value::Null)?;
    let Some(cpu) = cpus.first() else { return Ok(Vec::new()) };
    qmp.execute("qom-get", json!({ "path": cpu.path, "property": "unavailable-features" }))
}

/// Returns the ids of the threads that run the virtual CPUs, as QEMU's own PID namespace numbers them.
pub fn cpu_threads(qmp: &mut Qmp) -> Result<Vec<u32>, QmpError> {
    #[derive(Deserialize)]
    struct CpuThread {
        #[serde(rename = "thread-id")]
        thread: u32,
    }
    let cpus: Vec<CpuThread> = qmp.execute("query-cpus-fast", Value::Null)?;
    let threads: BTreeSet<u32> = cpus.into_iter().map(|cpu| cpu.thread).collect();
    Ok(threads.into_iter().collect())
}

/// Returns the bytes that the guest has written to its disks since QEMU was started.
pub fn written_to_disks(qmp: &mut Qmp) -> Result<u64, QmpError> {
    #[derive(Deserialize)]
    struct DiskStats {
        stats: WriteStats,
    }
    #[derive(Deserialize)]
    struct WriteStats {
        wr_bytes: u64,
    }
    let disks: Vec<DiskStats> = qmp.execute("query-blockstats", Value::Null)?;
    Ok(disks.iter().map(|disk| disk.stats.wr_bytes).fold(0, u64::saturating_add))
}

/// Returns the machine types that this QEMU supports, with their short names (`q35`).
pub fn machine_types(qmp: &mut Qmp) -> Result<BTreeSet<String>, QmpError> {
    let machines: Vec<Value> = qmp.execute("query-machines", Value::Null)?;
    let names = |machine: &Value| {
        ["name", "alias"].map(|key| machine.get(key).and_then(Value::as_str).map(str::to_owned))
    };
    Ok(machines.iter().flat_map(names).flatten().collect())
}

/// Returns the files and devices of the host that block nodes have open, one for each node.
pub fn open_files(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct OpenNode {
        #[serde(rename = "drv")]
        driver: String,
        file: String,
    }
    let nodes: Vec<OpenNode> = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let is_file = |node: &OpenNode| ["file", "host_device"].contains(&node.driver.as_str());
    Ok(nodes.into_iter().filter(is_file).map(|node| node.file).collect())
}

/// Stops the virtual CPUs. Returns when they are stopped and block I/O is drained, with the time until QEMU's
/// event STOP. QEMU sends it when both are done; the downtime that QEMU's own migration reports lasts from it to
/// RESUME.
pub fn stop(qmp: &mut Qmp) -> Result<Option<Duration>, QmpError> {
    let began = SystemTime::now();
    qmp.run("stop", Value::Null)?;
    Ok(qmp.last_event_time("STOP").and_then(|stopped| stopped.duration_since(began).ok()))
}

/// Resumes the virtual CPUs. QEMU first acquires the images' locks if it had released them. Returns the time since
/// QEMU's event RESUME, which QEMU sends before the devices resume, and they resume before the virtual CPUs.
pub fn cont(qmp: &mut Qmp) -> Result<Option<Duration>, QmpError> {
    let asked = send_cont(qmp)?;
    let deadline = Instant::now() + qmp.timeout();
    wait_cont(qmp, &asked, deadline)
}

/// Sends `cont` without waiting for the answer: QEMU may have to wait for something before it answers, and the caller
/// has to provide that.
pub fn send_cont(qmp: &mut Qmp) -> Result<PendingCommand, QmpError> {
    qmp.send_command("cont", Value::Null)
}

/// Waits for the answer to [`send_cont`], and returns what [`cont`] returns.
///
/// # Errors
/// [`QmpError::Timeout`] after the deadline; the answer may still arrive later.
pub fn wait_cont(
    qmp: &mut Qmp,
    asked: &PendingCommand,
    deadline: Instant,
) -> Result<Option<Duration>, QmpError> {
    qmp.wait_answer::<Value>(asked, deadline)?;
    let resumed = qmp.last_event_time("RESUME").filter(|resumed| *resumed >= asked.at());
    Ok(resumed.and_then(|resumed| resumed.elapsed().ok()))
}

/// Announces the guest's MAC addresses to the network, as QEMU's own migration does when it ends:
/// five rounds, the first at once, the pause growing from 50 to 550 ms.
pub fn announce_self(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.run("announce-self", json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 }))
}
