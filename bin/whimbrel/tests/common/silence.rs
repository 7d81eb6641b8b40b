//! Diagnosis of a guest that does not answer.

use std::path::Path;

use lab::Monitor;
use serde_json::{Value, json};

use super::Cluster;

/// Lines of an answer that are printed.
const SHOWN_LINES: usize = 24;

impl Cluster {
    /// Describes how long a guest's disk has been idle, and QEMU's answers, twice, to show changes: whether it runs,
    /// the positions of its processors and the interrupts pending for them, the positions of its devices in their
    /// queues, and the first answer about which each driver wants to be notified.
    pub fn describe_qemu(&self, agent: &str, vm: &str) -> String {
        let shown = self.agent(agent).cli(&["vm", "show", vm]);
        let Ok(shown) = serde_json::from_str::<Value>(&shown.stdout) else { return shown.stderr };
        let ticks = self.serial(agent, vm).ticks().unwrap_or_default();
        let idle_since = ticks.iter().find(|tick| {
            ticks.last().is_some_and(|last| {
                (tick.disk_reads, tick.disk_writes) == (last.disk_reads, last.disk_writes)
            })
        });
        let ask = || query_state(Path::new(shown["qmp"].as_str().unwrap_or_default()));
        let events = self.a.cli(&["report", vm]).stdout;
        let source = self.ticks_at_source(vm);
        format!(
            "its disk does nothing since {idle_since:?}\n{:#?}\n{:#?}\n{events}\nat its source: {source:#?}",
            ask(),
            ask()
        )
    }

    /// Returns the last ticks of a guest before its first migration.
    fn ticks_at_source(&self, vm: &str) -> Vec<lab::Tick> {
        let directory = self.lab.a.directory().join(vm);
        let serial = lab::Serial::new(&directory.join("serial.sock"), &directory.join("serial.log"), None);
        let ticks = serial.ticks().unwrap_or_default();
        ticks.into_iter().rev().take(SHOWN_LINES).rev().collect()
    }
}

fn query_state(socket: &Path) -> lab::Result<Vec<String>> {
    let mut monitor = Monitor::connect(socket)?;
    let mut lines_of_state = vec![monitor.command("query-status", &json!({}))?.to_string()];
    for line in ["info registers", "info lapic", "info pic", "info block"] {
        lines_of_state.extend(human(&mut monitor, line)?);
    }
    let devices = monitor.command("x-query-virtio", &json!({}))?;
    for device in devices.as_array().into_iter().flatten() {
        let queue = json!({ "path": device["path"], "queue": 0 });
        let queue = monitor.command("x-query-virtio-queue-status", &queue)?;
        lines_of_state.push(format!("{} {queue}", device["name"]));
        // `used_event`, behind the driver's available entries (virtio 1.1, section 2.6.6).
        if let (Some(offered), Some(entries)) = (queue["vring-avail"].as_u64(), queue["vring-num"].as_u64()) {
            lines_of_state.extend(human(&mut monitor, &format!("xp /1hd {:#x}", offered + 4 + 2 * entries))?);
        }
    }
    Ok(lines_of_state)
}

/// Returns QEMU's answer to a line of its human monitor.
fn human(monitor: &mut Monitor, line: &str) -> lab::Result<Vec<String>> {
    let answer = monitor.command("human-monitor-command", &json!({ "command-line": line }))?;
    Ok(answer.as_str().unwrap_or_default().lines().take(SHOWN_LINES).map(str::to_owned).collect())
}
