//! States of machines that have booted, from which hosts start in seconds. They are kept in the cache, and made anew
//! when anything changes on which they depend.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use serde_json::json;

use super::TOOLS_BYTES;
use super::host::RackHost;
use super::machine::{Begin, HostSpec, Parts};
use crate::environment::Environment;
use crate::error::{Context, Error, Result};
use crate::host::Host;
use crate::monitor::Monitor;

/// The number of the machine whose state is written: no host of a rack has it.
const NUMBER: u8 = 50;
/// Drivers that tests use, loaded once. What a kernel does not have is left out.
const PREPARE: &str =
    "for module in kvm_amd vhost_net tun bridge vxlan nf_tables; do modprobe -q $module || true; done
    sync; echo 3 >/proc/sys/vm/drop_caches";

/// A state in the cache: a directory with the machine's memory and devices, and with its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Snapshot(PathBuf);

impl Snapshot {
    /// Returns the state of a machine of this kind. If the cache does not have it, a machine is booted for it, in the
    /// network namespace of a rack.
    pub(super) fn of(
        spec: &HostSpec,
        environment: &Environment,
        parts: &Parts,
        switch: &Host,
    ) -> Result<Self> {
        let directory = environment.cache().join("rack-states");
        let context = || format!("cannot make {}", directory.display());
        fs::create_dir_all(&directory).context(context)?;
        // Disks name the ones that they are made from: by no link, which may vanish.
        let directory = fs::canonicalize(&directory).context(context)?;
        // Several programs may need the same state at once: one of them makes it.
        let lock = directory.join("lock");
        let context = || format!("cannot lock {}", lock.display());
        let held = File::create(&lock).context(context)?;
        flock(&held, FlockOperation::LockExclusive).context(context)?;
        let kernel = spec.kernel.directory();
        let name = format!("{kernel}-{}-{}", spec.vcpus, spec.memory_mib);
        let (kept, new) = (Self(directory.join(&name)), directory.join(format!("{name}.new")));
        // Its disk is not written by any host: each has an overlay.
        let base = HostSpec { name: "base".to_owned(), durable: false, ..spec.clone() };
        let tools = switch.directory().join("base/tools.img");
        let mut machine = RackHost::new(&base, NUMBER, switch, &tools, parts);
        let fingerprint = machine.start_of("port", Begin::Boot).fingerprint(parts)?;
        if fs::read_to_string(kept.0.join("fingerprint")).is_ok_and(|kept| kept == fingerprint) {
            return Ok(kept);
        }
        for old in [&kept.0, &new] {
            match fs::remove_dir_all(old) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).context(|| format!("cannot remove {}", old.display()));
                }
                _ => {}
            }
        }
        fs::create_dir_all(&new).context(|| format!("cannot make {}", new.display()))?;
        boot_and_write(&mut machine, &tools, parts, &new)?;
        let context = || format!("cannot keep {}", new.display());
        fs::write(new.join("fingerprint"), fingerprint).context(context)?;
        fs::rename(&new, &kept.0).context(context)?;
        Ok(kept)
    }

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

/// Boots a machine, and writes its state and its disk to a directory.
fn boot_and_write(machine: &mut RackHost, tools: &Path, parts: &Parts, to: &Path) -> Result<()> {
    let directory = machine.directory().to_owned();
    fs::create_dir_all(&directory).context(|| format!("cannot make {}", directory.display()))?;
    let empty = File::create(tools).and_then(|file| file.set_len(TOOLS_BYTES));
    empty.context(|| format!("cannot make {}", tools.display()))?;
    machine.make_disk(&parts.image.join("root.qcow2"))?;
    machine.boot()?;
    machine.shell(PREPARE)?;
    // Otherwise the state would have the connection.
    machine.disconnect();
    Snapshot::write(&mut machine.monitor()?, &to.join("state"))?;
    machine.monitor()?.command("quit", &json!({}))?;
    machine.wait_for_end()?;
    let (from, to) = (directory.join("disk.qcow2"), to.join("disk.qcow2"));
    // They may be on different file systems.
    fs::copy(&from, &to).map(drop).context(|| format!("cannot copy {}", from.display()))
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
