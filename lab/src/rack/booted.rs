//! States of machines that have booted, from which hosts start in seconds. They are kept in the cache, and made anew
//! when anything changes on which they depend.

use std::fs::{self, File};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use serde_json::json;

use super::TOOLS_BYTES;
use super::host::RackHost;
use super::machine::{Begin, HostSpec, Parts};
use super::snapshot::Snapshot;
use crate::environment::Environment;
use crate::error::{Context, Result};
use crate::host::Host;

/// The number of the machine whose state is written: no host of a rack has it.
const NUMBER: u8 = 50;
/// Drivers that tests use, loaded once. What a kernel does not have is left out.
const PREPARE: &str =
    "for module in kvm_amd vhost_net tun bridge vxlan nf_tables; do modprobe -q $module || true; done
    sync; echo 3 >/proc/sys/vm/drop_caches";

/// Returns the state of a machine of this kind. If the cache does not have it, a machine is booted for it, in the
/// network namespace of a rack.
pub(super) fn booted_state(
    spec: &HostSpec,
    environment: &Environment,
    parts: &Parts,
    switch: &Host,
) -> Result<Snapshot> {
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
    let (kept, new) = (Snapshot(directory.join(&name)), directory.join(format!("{name}.new")));
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
