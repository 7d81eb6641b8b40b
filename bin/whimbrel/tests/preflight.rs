//! Pre-flight checks between two unlike hosts. Properties that only a QEMU started at the destination can report (its
//! devices, missing features of its processor, its RAM) abort the migration before the guest is touched; so does a disk
//! that may be another one there, and a missing file. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod common;

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;

use common::{Cluster, Device, Disk, GuestSpec, Load, QemuVersion};
use lab::disk;
use serde_json::{Value, json};

/// Returns the load of a guest that writes during its migration.
fn busy() -> Load {
    Load { fill_mib: 16, wss_mib: 8, rate_mib_per_s: 10, ..Load::default() }
}

/// Makes the second host add these words to the arguments of arriving QEMUs. QEMU uses the last of two conflicting
/// words.
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

/// Returns the findings of a refused migration, by their codes; the guest runs at its source as if nothing had
/// happened.
#[track_caller]
fn refused(cluster: &Cluster, pid: u32) -> Vec<Value> {
    let check = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]);
    assert_eq!(check.code, 1, "{check:?}");
    let check = check.json();
    let found = ["source_findings", "destination_findings"].map(|of| check[of].as_array().unwrap().clone());
    let checked: Vec<_> = found.concat().into_iter().filter(|one| one["severity"] == "blocker").collect();
    assert!(common::entries(&cluster.b.directory.join("run/vms")).is_empty());

    let result = cluster.a.cli(&["migrate", "vm1", "--to", "b"]);
    assert_eq!(result.code, 1, "{result:?}");
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    let vm = cluster.a.vm("vm1").unwrap();
    assert_eq!((&vm["state"], vm["pid"].as_u64()), (&"running".into(), Some(u64::from(pid))));
    assert!(cluster.b.vm("vm1").is_none());
    assert!(common::entries(&cluster.b.directory.join("run/vms")).is_empty());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert!(report["rounds"].as_array().unwrap().is_empty(), "nothing was sent: {report:#}");
    let findings = report["findings"].as_array().unwrap().iter();
    let findings: Vec<_> = findings.filter(|one| one["severity"] == "blocker").cloned().collect();
    assert_eq!(checked, findings, "a question has the same answer");
    findings
}

/// Asserts that a destination whose QEMU differs only by `more` refuses with such findings, and no others.
fn assert_refused(more: &str, code: &str, what: &str) {
    let mut cluster = Cluster::new();
    arrives_with(&mut cluster, more);
    for qemu in cluster.environment.qemu_versions() {
        let mut spec = GuestSpec { qemu, ..GuestSpec::tiny("vm1", busy()) };
        spec.devices.push(Device::Rng);
        // A model with named features; the last one on the command line counts.
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
        cluster.assert_guest_whole("a", "vm1");
        lab::kill_pid(guest.pid()).unwrap();
        cluster.a.cli(&["vm", "forget", "vm1"]).ok();
        fs::remove_dir_all(guest.directory()).unwrap();
    }
}

/// The host there lacks a feature of the guest's processor: simulated by a model with a feature more than it can
/// provide.
#[test]
fn a_cpu_feature_that_is_not_there() {
    assert_refused("-cpu Nehalem,+avx512f", "cpu-features", "avx512f");
}

/// A device that only the destination has receives no state, and reports no error.
#[test]
fn a_device_that_only_the_destination_has() {
    assert_refused("-device usb-ehci,id=late", "devices-differ", "late");
}

/// A device of the guest that has other properties there.
#[test]
fn a_device_that_has_other_properties() {
    assert_refused("-global virtio-rng-device.max-bytes=4096", "devices-differ", "max-bytes");
}

/// Without the difference the same guest is accepted: by the newer QEMU, and by the installed one.
#[test]
fn a_guest_is_accepted_without_the_added_difference() {
    let mut cluster = Cluster::new();
    arrives_with(&mut cluster, "");
    let pid_file = cluster.lab.a.directory().join("vm1.pid");
    let extra = ["-cpu", "Nehalem", "-pidfile", pid_file.to_str().unwrap()].map(str::to_owned).to_vec();
    let qemu = QemuVersion::Installed;
    let spec = GuestSpec { qemu, extra, ..GuestSpec::tiny("vm1", busy()).with_many_devices() };
    let guest = cluster.guest(&spec);
    assert_eq!(fs::read_to_string(&pid_file).unwrap().trim(), guest.pid().to_string());
    cluster.migrate("vm1", "a", "b", &[]);
    cluster.assert_guest_whole("b", "vm1");
    assert!(!pid_file.exists(), "what the source's QEMU would have removed is left");
}

/// A device that only the destination has simulates an unknown one: QEMU ends when it saves its state.
#[test]
fn a_device_whose_state_ends_qemu_is_found_at_the_destination() {
    assert_refused("-device vmbus-bridge", "devices-differ", "vmbus-bridge");
    let cluster = Cluster::new();
    for device in ["vmbus-bridge", "pci-serial-2x"] {
        let mut spec = GuestSpec { qemu: QemuVersion::Installed, ..GuestSpec::tiny("vm1", busy()) };
        spec.extra = ["-device", device].map(str::to_owned).to_vec();
        let guest = cluster.guest(&spec);
        // These are known at the source.
        for more in [&["--check"][..], &[]] {
            let result = cluster.a.cli(&[&["migrate", "vm1", "--to", "b"], more].concat());
            assert!(result.code == 1 && result.stdout.contains(device), "{result:?}");
        }
        cluster.assert_guest_whole("a", "vm1");
        lab::kill_pid(guest.pid()).unwrap();
        cluster.a.cli(&["vm", "forget", "vm1"]).ok();
        fs::remove_dir_all(guest.directory()).unwrap();
    }
}

// ---- resources of another program at the destination

/// Ports and taps in use by another program are refused by `--check`, which starts a QEMU.
#[test]
fn ports_and_taps_in_use_at_the_destination_are_found() {
    let cluster = Cluster::new();
    for host in [&cluster.lab.a, &cluster.lab.b] {
        host.run(&["ip", "tuntap", "add", "held", "mode", "tap"]).unwrap();
        host.run(&["ip", "link", "set", "held", "up"]).unwrap();
    }
    for (has, wants) in [
        ("-vnc 127.0.0.1:7", "-vnc 127.0.0.1:7"),
        (
            "-netdev user,id=n,hostfwd=tcp:127.0.0.1:2222-:22",
            "-netdev user,id=n,hostfwd=tcp:127.0.0.1:2222-:22",
        ),
        (
            "-chardev socket,id=c,host=127.0.0.1,port=4444,server=on,wait=off",
            "-serial telnet:127.0.0.1:4444,server=on,wait=off",
        ),
        (
            "-netdev tap,id=n,ifname=held,script=no,downscript=no",
            "-netdev tap,id=n,ifname=held,script=no,downscript=no",
        ),
    ] {
        let monitor = cluster.b.directory.join("other.qmp");
        let ready = format!("-machine none -display none -qmp unix:{},server=on,wait=off", monitor.display());
        let words: Vec<_> =
            ["qemu-system-x86_64"].into_iter().chain(ready.split(' ')).chain(has.split(' ')).collect();
        let mut other = cluster.lab.b.spawn("other", &words).unwrap();
        common::until("the other program has it", || monitor.exists());
        let mut spec = GuestSpec { qemu: QemuVersion::Installed, ..GuestSpec::tiny("vm1", busy()) };
        spec.extra = wants.split(' ').map(str::to_owned).collect();
        let guest = cluster.guest(&spec);
        let findings = refused(&cluster, guest.pid());
        assert!(findings.len() == 1 && findings[0]["code"] == "qemu-start-failed", "{findings:#?}");
        other.kill().unwrap();
        fs::remove_file(&monitor).unwrap();
        cluster.migrate("vm1", "a", "b", &[]);
        cluster.assert_guest_whole("b", "vm1");
        lab::kill_pid(cluster.b.vm("vm1").unwrap()["pid"].as_u64().unwrap() as u32).unwrap();
        cluster.b.cli(&["vm", "forget", "vm1"]).ok();
        fs::remove_dir_all(guest.directory()).unwrap();
    }
}

/// Trial starts leave nothing behind, also when the destination's agent dies.
#[test]
fn nothing_is_left_of_a_trial() {
    let mut cluster = Cluster::with(&common::Setup { pool: true, ..common::Setup::default() });
    let image = cluster.lab.a.directory().join("own.raw");
    fs::write(&image, vec![7; 1 << 20]).unwrap();
    let mut spec = GuestSpec { qemu: QemuVersion::Installed, ..GuestSpec::tiny("vm1", busy()) };
    spec.extra =
        ["-drive".to_owned(), format!("file={},format=raw,if=virtio,cache=none", image.display())].into();
    let _guest = cluster.guest(&spec);
    let images = cluster.lab.b.directory().join("images");
    let check = || cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy", "--check"]);
    let result = check().ok().json();
    let destination = result["destination_findings"].as_array().unwrap();
    assert!(destination.iter().any(|one| one["code"] == "disk-copied"), "{result:#}");
    let run_dir = cluster.b.directory.join("run");
    let left = || common::entries(&run_dir).into_iter().filter(|name| name.starts_with("probe-")).count();
    assert_eq!((common::entries(&images), left()), (Vec::new(), 0));

    // A QEMU that never answers, while the agent ends.
    arrives_with(&mut cluster, "; kill -STOP $$");
    let waiting = cluster.a.begin(&["migrate", "vm1", "--to", "b", "--disks", "copy", "--check"]);
    common::until("the trial has begun", || left() == 1);
    cluster.b.kill();
    assert_eq!(common::entries(&images), Vec::<String>::new());
    cluster.b.start();
    assert_eq!(left(), 0);
    drop(waiting.wait_with_output().unwrap());
    assert!(cluster.b.vm("vm1").is_none());
}

// ---- a guest that waits for ever

/// The result of a missed interrupt: QEMU has answered, the driver waits for an interrupt, and nothing happens any
/// longer.
#[test]
fn a_disk_that_waits_for_ever_is_found() {
    let cluster = Cluster::new();
    let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk0.raw");
    disk::known_content(&qemu, &image, "raw", 1).unwrap();
    let mut spec = GuestSpec {
        qemu: QemuVersion::Installed,
        second_monitor: true,
        ..GuestSpec::tiny("vm1", Load::default())
    };
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "raw")));
    let guest = cluster.guest(&spec);
    let warned = || {
        let check = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]).ok().json();
        let found = check["destination_findings"].as_array().unwrap().clone();
        found.iter().any(|one| one["code"] == "disk-stuck")
    };
    assert!(!warned());

    let mut monitor = guest.monitor().unwrap();
    let devices = monitor.command("x-query-virtio", &json!({})).unwrap();
    let is_disk = |device: &&Value| device["name"] == "virtio-blk";
    let path = devices.as_array().unwrap().iter().find(is_disk).unwrap()["path"].clone();
    let of_queue = json!({"path": path, "queue": 0});
    let monitor = std::cell::RefCell::new(monitor);
    let ask = |command: &str, arguments: &Value| monitor.borrow_mut().command(command, arguments).unwrap();
    let queue = || ask("x-query-virtio-queue-status", &of_queue);
    common::until("the disk rests", || queue()["inuse"] == 0);
    let (queue, number) = (queue(), |of: &Value| of.as_u64().unwrap());
    // The driver's index of the last answer that it has seen, one before the last that QEMU gave.
    let used_event = number(&queue["vring-avail"]) + 4 + 2 * number(&queue["vring-num"]);
    let line = json!({"command-line": format!("gpa2hva {used_event:#x}")});
    let place = ask("human-monitor-command", &line);
    let (_, address) = place.as_str().unwrap().trim().rsplit_once(" is 0x").unwrap();
    let memory = fs::OpenOptions::new().write(true).open(format!("/proc/{}/mem", guest.pid())).unwrap();
    let before = (number(&queue["used-idx"]) as u16).wrapping_sub(1);
    memory.write_all_at(&before.to_le_bytes(), u64::from_str_radix(address, 16).unwrap()).unwrap();
    assert!(warned());
}

// ---- disks and files

/// A block device over an image, until this is dropped.
struct Loop(String);

impl Loop {
    /// Returns `None` where the kernel has no such devices.
    fn over(image: &Path) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(image).output().ok()?;
        if !made.status.success() {
            let why = String::from_utf8_lossy(&made.stderr);
            lab::not_tried(format!("block devices of another host: {why}"));
            return None;
        }
        Some(Self(String::from_utf8_lossy(&made.stdout).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        drop(Command::new("losetup").args(["--detach", &self.0]).status());
    }
}

/// Makes the second host another machine for its agent: another boot, and an empty directory in place of one.
fn another_machine(cluster: &mut Cluster, empty: &Path, disks: &str) {
    cluster.b.kill();
    let boot = cluster.b.directory.join("boot_id");
    fs::write(&boot, "00000000-1111-2222-3333-444444444444\n").unwrap();
    let instead = format!(
        "mount --bind {} /proc/sys/kernel/random/boot_id; mount -t tmpfs none {}; exec \"$@\"",
        boot.display(),
        empty.display()
    );
    cluster.b.starter = ["unshare", "--mount", "sh", "-ec", &instead, "sh"].map(str::to_owned).to_vec();
    let config = fs::read_to_string(cluster.b.config()).unwrap();
    fs::write(cluster.b.config(), format!("{config}\n{disks}\n")).unwrap();
    cluster.b.start();
}

/// A block device of the same name may be another volume there, and `localhost` is another server. Without certainty,
/// no agent reports that they are the same; then they are blockers. So is a missing key.
#[test]
fn equal_names_on_other_machines_are_not_the_same_disk() {
    let mut cluster = Cluster::new();
    let directory = cluster.lab.a.directory().join("disks");
    let keys = cluster.lab.shared_directory().unwrap().join("keys");
    fs::create_dir(&keys).unwrap();
    fs::create_dir(&directory).unwrap();
    fs::write(keys.join("master.key"), "secret").unwrap();
    let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap();
    let (volume, served) = (directory.join("volume.raw"), directory.join("served.raw"));
    for image in [&volume, &served] {
        disk::known_content(&qemu, image, "raw", 16).unwrap();
    }
    let Some(device) = Loop::over(&volume) else { return };
    let ready = directory.join("nbd.pid");
    let words = [
        "qemu-nbd",
        "--read-only",
        "--persistent",
        "--bind=127.0.0.1",
        "--format=raw",
        "--pid-file",
        ready.to_str().unwrap(),
        served.to_str().unwrap(),
    ];
    let mut server = cluster.lab.a.spawn("nbd", &words).unwrap();
    while !ready.exists() {
        assert!(server.is_running(), "{}", fs::read_to_string(server.log()).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let mut spec = GuestSpec::tiny("vm1", busy());
    spec.devices.push(Device::Disk(Disk::new("volume", Path::new(&device.0), "raw")));
    let address = "nbd://127.0.0.1:10809";
    let drive = format!("file={address},format=raw,if=none,id=served,read-only=on");
    let key = format!("secret,id=key,file={}", keys.join("master.key").display());
    let extra = ["-drive", &drive, "-device", "virtio-blk-pci,drive=served", "-object", &key];
    spec.extra = extra.map(str::to_owned).to_vec();
    let _guest = cluster.guest(&spec);
    let check = |cluster: &Cluster| {
        let check = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]).json();
        let found = check["destination_findings"].as_array().unwrap().clone();
        let blockers = found.into_iter().filter(|one| one["severity"] == "blocker");
        let mut all: Vec<_> = blockers.map(|one| format!("{}: {}", one["code"], one["what"])).collect();
        all.sort();
        all
    };
    // Two agents of one machine see the same device, but not the same `localhost`: they have a network of their own.
    let found = check(&cluster);
    assert!(
        found.len() == 1 && found[0].contains("disk-unidentified") && found[0].contains(address),
        "{found:#?}"
    );

    another_machine(&mut cluster, &keys, "");
    let found = check(&cluster);
    for (word, name) in [
        ("disk-unidentified", device.0.as_str()),
        ("disk-unidentified", address),
        ("file-missing", "master.key"),
    ] {
        let is_there = found.iter().any(|one| one.contains(word) && one.contains(name));
        assert!(is_there, "{word} of {name} is missing: {found:#?}");
    }
    assert_eq!(found.len(), 3, "{found:#?}");

    another_machine(&mut cluster, &keys, &format!("[disks]\nshared = [{:?}, {address:?}]", device.0));
    let found = check(&cluster);
    assert!(found.len() == 1 && found[0].contains("file-missing"), "{found:#?}");
}

// ---- memory

/// Free memory falls as pages arrive: memory promised to one VM is not free for the next one.
#[test]
fn two_that_arrive_at_once_are_not_promised_the_same_memory() {
    let mut cluster = Cluster::new();
    cluster.b.kill();
    // Enough for one of them with QEMU's own needs, not for both.
    let real = fs::read_to_string("/proc/meminfo").unwrap();
    let scarce: Vec<_> = real
        .lines()
        .map(|line| if line.starts_with("MemAvailable:") { "MemAvailable: 614400 kB" } else { line })
        .collect();
    let meminfo = cluster.b.directory.join("meminfo");
    fs::write(&meminfo, scarce.join("\n")).unwrap();
    let instead = format!("mount --bind {} /proc/meminfo; exec \"$@\"", meminfo.display());
    cluster.b.starter = ["unshare", "--mount", "sh", "-ec", &instead, "sh"].map(str::to_owned).to_vec();
    cluster.b.start();
    let guests = ["vm1", "vm2"].map(|name| cluster.guest(&GuestSpec::tiny(name, busy())));
    assert_ne!(guests[0].pid(), guests[1].pid());
    let possible = |vm: &str| {
        let check = cluster.a.cli(&["migrate", vm, "--to", "b", "--check"]).json();
        let found = check["destination_findings"].as_array().unwrap().clone();
        let short = found.iter().any(|one| one["code"] == "memory-short");
        assert_eq!(check["possible"].as_bool().unwrap(), !short, "{check:#}");
        !short
    };
    assert!(possible("vm1") && possible("vm2"), "a question is no promise");
    let first = cluster.migrate_slowly("vm1", "1MiB");
    cluster.wait_for_sent(1 << 20);
    assert!(!possible("vm2"));
    let result = cluster.a.cli(&["migrate", "vm2", "--to", "b"]);
    assert!(result.code == 1 && result.stdout.contains("reserved for other VMs"), "{result:#?}");
    cluster.a.cli(&["cancel", "vm1"]).ok();
    assert_eq!(first.wait_with_output().unwrap().status.code(), Some(1));
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    common::until("the promise ends with the migration", || possible("vm2"));
}

/// An agent is protected from the kernel's OOM killer (its unit sets -900); VMs that it starts have the value that they
/// had at their source. A value that every user may set simulates that here.
#[test]
fn an_arriving_vm_keeps_its_oom_score() {
    let cluster = Cluster::new();
    let guest = cluster.guest(&GuestSpec::tiny("vm1", busy()));
    let of = |pid: u32| format!("/proc/{pid}/oom_score_adj");
    fs::write(of(guest.pid()), "300").unwrap();
    for agent in [&cluster.a, &cluster.b] {
        fs::write(of(agent.pid()), "500").unwrap();
    }
    for (from, to) in [("a", "b"), ("b", "a")] {
        cluster.migrate("vm1", from, to, &[]);
        let pid = cluster.agent(to).vm("vm1").unwrap()["pid"].as_u64().unwrap() as u32;
        assert_eq!(fs::read_to_string(of(pid)).unwrap().trim(), "300");
    }
}

/// A destination that cannot connect to its source could not request the decision of an interrupted handover.
#[test]
fn a_destination_that_knows_no_way_back() {
    let mut cluster = Cluster::new();
    let spec = GuestSpec { second_monitor: true, ..GuestSpec::tiny("vm1", busy()) };
    let _guest = cluster.guest(&spec);
    let findings = |cluster: &Cluster| {
        let check = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]).ok().json();
        assert_eq!(check["possible"], true, "{check:#}");
        let findings = check["destination_findings"].as_array().unwrap().clone();
        assert!(
            findings.iter().any(|one| one["code"] == "path-changes"
                && one["what"].as_str().unwrap().starts_with("on b, socket ")),
            "nobody says where the monitors will be: {check:#}"
        );
        findings.into_iter().find(|one| one["code"] == "source-unreachable")
    };
    assert_eq!(findings(&cluster), None);
    cluster.b.kill();
    let config = fs::read_to_string(cluster.b.config()).unwrap();
    let mut config: toml::Table = config.parse().unwrap();
    config["hosts"]["a"]["address"] = format!("{}:7749", cluster.lab.a.address()).into();
    fs::write(cluster.b.config(), config.to_string()).unwrap();
    cluster.b.start();
    let finding = findings(&cluster).unwrap();
    assert_eq!(finding["severity"], "warning", "{finding:#}");
    assert!(finding["advice"].as_str().unwrap().contains("[hosts.a]"), "{finding:#}");
}
