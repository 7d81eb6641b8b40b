//! The guest that is migrated: booted once, saved, and started from the saved state for each measurement, so that all
//! contenders migrate the same guest with the same memory at the same moment of its life.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use super::case::{Case, Program};
use super::echo_client::ECHO_PORT;
use crate::debian_guest::debian_guest;
use crate::disk::{known_content, overlay};
use crate::environment::Environment;
use crate::error::{Context, Result};
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::{Lab, vm_address};
use crate::monitor::Monitor;
use crate::spec::{Device, Disk, GuestSpec, Load, LoadMode, Net, Ram};

/// QEMU's option that allocates all memory at the start.
const PREALLOCATE: &str = "-mem-prealloc";

/// Its name.
pub(crate) const VM: &str = "bench";

/// A saved guest.
#[derive(Debug)]
pub(crate) struct SavedGuest {
    spec: GuestSpec,
    /// The state file that QEMU saved.
    state: PathBuf,
    /// Its disk while it runs, and a copy from the time of saving.
    disk: Option<(PathBuf, PathBuf)>,
}

impl SavedGuest {
    /// Boots a guest, waits until it is ready, and saves it.
    pub(crate) fn save(
        lab: &Lab,
        environment: &Environment,
        spec: GuestSpec,
        is_ready: impl FnOnce(&Guest) -> Result<()>,
    ) -> Result<Self> {
        let state = lab.shared_directory()?.join(format!("{}.state", spec.name));
        let mut subject = Self { spec, state, disk: None };
        let disk = subject.spec.devices.iter().find_map(|device| match device {
            Device::Disk(disk) if !disk.read_only => Some(disk.path.clone()),
            _ => None,
        });
        for device in &subject.spec.devices {
            if let Device::Net(net) = device {
                lab.b.tap(&net.tap)?;
            }
        }
        let mut guest = Guest::start(&lab.a, environment, &subject.spec)?;
        is_ready(&guest)?;
        let mut monitor = guest.monitor()?;
        monitor.set_patience(Duration::from_mins(5))?;
        monitor.command("stop", &json!({}))?;
        let capabilities = json!([{"capability": "events", "state": true}]);
        monitor.command("migrate-set-capabilities", &json!({ "capabilities": capabilities }))?;
        monitor.command("migrate-set-parameters", &json!({"max-bandwidth": UNLIMITED}))?;
        monitor.command("migrate", &json!({"uri": format!("exec:cat > {}", subject.state.display())}))?;
        wait_for_status(&mut monitor, "completed")?;
        drop(monitor);
        guest.kill()?;
        if let Some(disk) = disk {
            let saved = disk.with_extension("saved");
            copy(&disk, &saved)?;
            subject.disk = Some((disk, saved));
        }
        Ok(subject)
    }

    /// Starts the guest from its saved state; it runs when this returns.
    pub(crate) fn start(&self, host: &Host, environment: &Environment) -> Result<Guest> {
        if let Some((disk, saved)) = &self.disk {
            copy(saved, disk)?;
        }
        let guest = self.start_waiting(host, environment)?;
        let mut monitor = guest.monitor()?;
        monitor.set_patience(Duration::from_mins(5))?;
        let capabilities = json!([{"capability": "events", "state": true}]);
        monitor.command("migrate-set-capabilities", &json!({ "capabilities": capabilities }))?;
        monitor.command("migrate-incoming", &json!({"uri": format!("exec:cat {}", self.state.display())}))?;
        wait_for_status(&mut monitor, "completed")?;
        let capabilities = json!([{"capability": "events", "state": false}]);
        monitor.command("migrate-set-capabilities", &json!({ "capabilities": capabilities }))?;
        monitor.command("cont", &json!({}))?;
        Ok(guest)
    }

    /// Starts a QEMU that waits for an incoming migration.
    pub(crate) fn start_waiting(&self, host: &Host, environment: &Environment) -> Result<Guest> {
        Guest::start(host, environment, &waiting(self.spec.clone()))
    }

    /// Returns the guest's description.
    pub(crate) fn spec(&self) -> &GuestSpec {
        &self.spec
    }

    /// Returns its disk as it was when it was saved.
    pub(crate) fn saved_disk(&self) -> Option<&Path> {
        self.disk.as_ref().map(|(_, saved)| saved.as_path())
    }

    /// Makes a QEMU allocate more memory than the guest has, write to it, and free it. A machine that is itself virtual
    /// may have to request memory from its host at the first touch, which needs several times as long as a migration,
    /// and hits the first contender. Not needed where QEMU itself allocates the memory beforehand.
    pub(crate) fn warm_memory(&self, host: &Host, environment: &Environment) -> Result<()> {
        if self.spec.extra.iter().any(|option| option == PREALLOCATE) {
            return Ok(());
        }
        let mut spec = GuestSpec::tiny("warm", Load::default());
        spec.memory_mib = self.spec.memory_mib + 128;
        spec.ram = self.spec.ram.clone();
        spec.extra = vec!["-S".to_owned(), PREALLOCATE.to_owned()];
        Guest::start(host, environment, &spec).map(drop)
    }
}

/// Returns the same guest with a QEMU that waits for an incoming migration.
pub(crate) fn waiting(mut spec: GuestSpec) -> GuestSpec {
    spec.extra.extend(["-incoming".to_owned(), "defer".to_owned()]);
    spec
}

/// Boots the guest of a case, and saves it when its program runs.
pub(super) fn boot(lab: &Lab, environment: &Environment, case: &Case) -> Result<SavedGuest> {
    SavedGuest::save(lab, environment, spec(lab, environment, case)?, |guest| match &case.program {
        Program::Load { fill_mib, .. } => guest.wait_for_load(*fill_mib).map(drop),
        Program::Debian => guest.serial().follow()?.wait_for_text("SERVING").map(drop),
        Program::Nas(_) => guest.serial().wait_for_nas(),
    })
}

/// More than any link carries, in bytes per second.
pub(crate) const UNLIMITED: u64 = 100_000_000_000;

/// Waits until QEMU reports a state of its migration, or a failure.
pub(crate) fn wait_for_status(monitor: &mut Monitor, wanted: &str) -> Result<()> {
    let event = monitor.wait_for_event(|event| {
        event.name == "MIGRATION" && [wanted, "failed"].map(Some).contains(&event.data["status"].as_str())
    })?;
    if event.data["status"] == wanted { Ok(()) } else { Err(failed(monitor)) }
}

/// Returns QEMU's reason for the failure of its migration.
pub(crate) fn failed(monitor: &mut Monitor) -> crate::Error {
    match monitor.command("query-migrate", &json!({})) {
        Ok(status) => crate::Error::Config(format!("QEMU's own migration has failed: {status}")),
        Err(error) => error,
    }
}

/// Removes the files of a measurement of a guest.
pub(crate) fn clear(hosts: [&Host; 2], vm: &str) -> Result<()> {
    for host in hosts {
        let directory = host.directory().join(vm);
        if directory.exists() {
            fs::remove_dir_all(&directory).context(|| format!("cannot remove {}", directory.display()))?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    // Data not yet written would be written during a measurement.
    let copy = || fs::copy(from, to).and_then(|_| fs::File::open(to)?.sync_all());
    copy().context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Returns the guest of a case.
fn spec(lab: &Lab, environment: &Environment, case: &Case) -> Result<GuestSpec> {
    let mut spec = match &case.program {
        Program::Debian => debian_guest(lab, environment, VM, 1)?,
        Program::Nas(nas) => {
            let idle = Load { fill_mib: 0, wss_mib: 0, verify_mib_per_s: 0, ..Load::default() };
            let spec = GuestSpec::tiny(VM, Load { nas: Some(nas.clone()), ..idle });
            GuestSpec { vcpus: nas.threads, ..spec }
        }
        Program::Load {
            fill_mib,
            wss_mib,
            rate_mib_per_s,
            verify_mib_per_s,
            few,
            pattern,
            noise_percent,
        } => {
            let mode = if *few { LoadMode::Few } else { LoadMode::Random };
            let load = Load {
                fill_mib: *fill_mib,
                wss_mib: *wss_mib,
                rate_mib_per_s: *rate_mib_per_s,
                verify_mib_per_s: *verify_mib_per_s,
                noise_percent: *noise_percent,
                mode,
                pattern: *pattern,
                address: (case.devices || case.client).then(|| vm_address(1)),
                port: if case.client { ECHO_PORT } else { 0 },
                cache_mib: case.cache_mib,
                ..Load::default()
            };
            GuestSpec::tiny(VM, load)
        }
    };
    if case.devices && case.has_load() {
        let disk = lab.shared_directory()?.join(format!("{VM}.qcow2"));
        overlay(&environment.qemu(case.qemu)?, &disk, &environment.debian_disk()?, "qcow2")?;
        spec.devices.extend([Device::Disk(Disk::new("disk0", &disk, "qcow2")), Device::Net(Net::new(1))]);
        spec = spec.with_many_devices();
    }
    if case.client && !case.devices {
        spec.devices.push(Device::Net(Net::new(1)));
    }
    if case.cache_mib > 0 {
        let disk = lab.shared_directory()?.join(format!("{VM}.img"));
        known_content(&environment.qemu(case.qemu)?, &disk, "raw", case.cache_mib)?;
        let disk = Disk { read_only: true, ..Disk::new("disk0", &disk, "raw") };
        spec.devices.extend([Device::Disk(disk), Device::GuestPort]);
    }
    spec.qemu = case.qemu;
    spec.memory_mib = case.memory_mib;
    spec.numa_nodes = case.regions;
    spec.ram = if case.memfd { Ram::Memfd } else { Ram::Anonymous };
    if case.preallocated {
        spec.extra.push(PREALLOCATE.to_owned());
    }
    // Whimbrel's agent holds the first monitor.
    spec.second_monitor = true;
    Ok(spec)
}
