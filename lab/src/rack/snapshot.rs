//! States of machines: written to files, and loaded into a QEMU that waits for them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use crate::error::{Error, Result};
use crate::monitor::Monitor;

/// A state in the cache: a directory with the machine's memory and devices, and with its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Snapshot(pub(super) PathBuf);

impl Snapshot {
    /// Returns its disk.
    pub(super) fn disk(&self) -> PathBuf {
        self.0.join("disk.qcow2")
    }

    /// Loads it into a QEMU that waits for it, and lets the machine run.
    pub(super) fn load(&self, monitor: &mut Monitor) -> Result<()> {
        Self::load_file(monitor, &self.0.join("state"))
    }

    /// Loads a state from a file.
    pub(super) fn load_file(monitor: &mut Monitor, file: &Path) -> Result<()> {
        enable_events(monitor)?;
        let uri = format!("file:{}", file.display());
        monitor.command("migrate-incoming", &json!({ "uri": uri }))?;
        wait_for_end(monitor)?;
        // It was stopped when its state was written, and is so again.
        monitor.command("cont", &json!({})).map(drop)
    }

    /// Stops a machine and writes its state to a file.
    pub(super) fn write(monitor: &mut Monitor, file: &Path) -> Result<()> {
        enable_events(monitor)?;
        monitor.command("stop", &json!({}))?;
        monitor.command("migrate", &json!({ "uri": format!("file:{}", file.display()) }))?;
        wait_for_end(monitor)
    }
}

fn enable_events(monitor: &mut Monitor) -> Result<()> {
    monitor.set_patience(Duration::from_mins(5))?;
    let on = json!({ "capabilities": [{ "capability": "events", "state": true }] });
    monitor.command("migrate-set-capabilities", &on).map(drop)
}

fn wait_for_end(monitor: &mut Monitor) -> Result<()> {
    let ends = ["completed", "failed", "cancelled"];
    let end = monitor.wait_for_event(|event| {
        event.name == "MIGRATION" && ends.iter().any(|end| event.data["status"] == *end)
    })?;
    if end.data["status"] == "completed" {
        return Ok(());
    }
    Err(Error::Config(format!("QEMU could not write or load a machine's state: {}", end.data)))
}
