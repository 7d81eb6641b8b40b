//! Pre-flight looks again when the destination's QEMU has been started, before the guest is touched: what only that
//! QEMU can tell (its devices, what its processor lacks, its RAM) ends the migration, and the guest goes on. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use common::{Cluster, Device, GuestSpec, Load, QemuVersion};
use serde_json::Value;

/// A guest that writes while it is moved.
fn busy() -> Load {
    Load { fill_mib: 16, wss_mib: 8, rate_mib_per_s: 10, ..Load::default() }
}

/// The second host starts its QEMUs with these words more where a guest is to arrive. QEMU takes the last word where
/// two say the same.
fn arrives_with(cluster: &mut Cluster, more: &str) {
    cluster.b.kill();
    let config = fs::read_to_string(cluster.b.config()).unwrap();
    let mut config: toml::Table = config.parse().unwrap();
    let binaries = config["qemu"]["binaries"].as_array_mut().unwrap();
    for (number, binary) in binaries.iter_mut().enumerate() {
        let path = cluster.b.directory.join(format!("other-qemu-{number}"));
        let program = binary.as_str().unwrap();
        let script = format!(
            "#!/bin/sh\ncase \" $* \" in\n*' -incoming '*) set -- \"$@\" {more};;\nesac\nexec {program} \"$@\"\n"
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        *binary = path.to_str().unwrap().into();
    }
    fs::write(cluster.b.config(), config.to_string()).unwrap();
    cluster.b.start();
}

/// The findings of a migration that was refused, by their codes; the guest runs at its source as if nothing had been.
#[track_caller]
fn refused(cluster: &Cluster, pid: u32) -> Vec<Value> {
    // Nobody has started a QEMU for the guest yet: no word of it.
    let check = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]).ok().json();
    assert_eq!(check["possible"], true, "{check:#}");

    let said = cluster.a.cli(&["migrate", "vm1", "--to", "b"]);
    assert_eq!(said.code, 1, "{said:?}");
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    let vm = cluster.a.vm("vm1").unwrap();
    assert_eq!((&vm["state"], vm["pid"].as_u64()), (&"running".into(), Some(u64::from(pid))));
    assert!(cluster.b.vm("vm1").is_none());
    assert!(common::entries(&cluster.b.directory.join("run/vms")).is_empty());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert!(report["rounds"].as_array().unwrap().is_empty(), "nothing was sent: {report:#}");
    let findings = report["findings"].as_array().unwrap().iter();
    findings.filter(|one| one["severity"] == "blocker").cloned().collect()
}

/// A destination whose QEMU is like the source's but for `more` refuses with such findings, and with nothing else.
fn is_refused(more: &str, code: &str, what: &str) {
    let mut cluster = Cluster::new();
    arrives_with(&mut cluster, more);
    for qemu in cluster.environment.qemu_versions() {
        let mut spec = GuestSpec { qemu, ..GuestSpec::tiny("vm1", busy()) };
        spec.devices.push(Device::Rng);
        // One that says by its name what it has; the last one on the command line counts.
        spec.extra = ["-cpu", "Nehalem"].map(str::to_owned).to_vec();
        let guest = cluster.guest(&spec);
        let findings = refused(&cluster, guest.pid());
        assert!(!findings.is_empty());
        for finding in &findings {
            assert_eq!(finding["code"], code, "{qemu:?}: {findings:#?}");
        }
        let found = findings.iter().any(|one| one["what"].as_str().unwrap().contains(what));
        assert!(found, "{what:?} is missing: {findings:#?}");
        // The same guest, and a destination without the difference.
        cluster.guest_is_whole("a", "vm1");
        lab::kill_pid(guest.pid()).unwrap();
        cluster.a.cli(&["vm", "forget", "vm1"]).ok();
        fs::remove_dir_all(guest.directory()).unwrap();
    }
}

/// The host there cannot do what the guest's processor has: what it would say of a model with a feature more than it
/// can provide.
#[test]
fn a_cpu_feature_that_is_not_there() {
    is_refused("-cpu Nehalem,+avx512f", "cpu-features", "avx512f");
}

/// A device that only the destination has loads nothing, and says nothing.
#[test]
fn a_device_that_only_the_destination_has() {
    is_refused("-device usb-ehci,id=late", "devices-differ", "late");
}

/// A device of the guest's that is another one there.
#[test]
fn a_device_that_has_other_properties() {
    is_refused("-global virtio-rng-device.max-bytes=4096", "devices-differ", "max-bytes");
}

/// Without the difference the same guest is let in: the newer QEMU's, and the installed one's.
#[test]
fn a_like_destination_is_none_the_worse_for_it() {
    let mut cluster = Cluster::new();
    arrives_with(&mut cluster, "");
    let extra = ["-cpu", "Nehalem"].map(str::to_owned).to_vec();
    let qemu = QemuVersion::Installed;
    let spec = GuestSpec { qemu, extra, ..GuestSpec::tiny("vm1", busy()).with_many_devices() };
    let _guest = cluster.guest(&spec);
    cluster.migrate("vm1", "a", "b", &[]);
    cluster.guest_is_whole("b", "vm1");
}
