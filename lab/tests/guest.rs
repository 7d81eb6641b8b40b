//! The laboratory's guests: they boot, detect a wrong page, read their disk, answer on the network, in both versions of
//! QEMU. Needs root.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

use whimbrel_guest_load::words;
use whimbrel_lab as lab;

use lab::bare::PassProgress;
use lab::{
    Accel, DEADLINE, Device, Disk, Environment, Error, Guest, GuestSpec, Lab, LabConfig, Load, LoadMode, Net,
    Pattern, QemuVersion, Ram, disk, vm_address,
};

fn laboratory() -> (Lab, Environment) {
    (Lab::up(&LabConfig::for_test()).unwrap(), Environment::discover())
}

/// Returns the address and length of the memory of a guest with [`Ram::Memfd`] in QEMU's address space.
fn guest_memory(pid: u32) -> (u64, usize) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = maps.lines().find(|line| line.contains("memfd:")).unwrap();
    let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
    let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
    (from, (to - from) as usize)
}

#[test]
fn a_planted_wrong_byte_is_told() {
    let (lab, environment) = laboratory();
    let load = Load { fill_mib: 16, wss_mib: 16, seed: 42, verify_mib_per_s: 0, ..Load::default() };
    let spec = GuestSpec { ram: Ram::Memfd, ..GuestSpec::tiny("vm1", load) };
    let guest = Guest::start_and_wait(&lab.a, &environment, &spec).unwrap();
    let check = guest.serial().check().unwrap();
    assert!(check.ok && check.pages == 16 * 256 && check.wrong == 0, "{check:?}");

    // The page is found in QEMU's memory by its expected content.
    let memory =
        OpenOptions::new().read(true).write(true).open(format!("/proc/{}/mem", guest.pid())).unwrap();
    let (base, length) = guest_memory(guest.pid());
    let mut bytes = vec![0; length];
    memory.read_exact_at(&mut bytes, base).unwrap();
    let page = 1234_u64;
    let content: Vec<u8> = words(42, page, 1).flat_map(u64::to_le_bytes).collect();
    let found: Vec<u64> = (0..length)
        .step_by(4096)
        .filter(|at| bytes[*at..*at + 4096] == content)
        .map(|at| at as u64)
        .collect();
    assert_eq!(found.len(), 1, "the page is in memory exactly once");
    memory.write_all_at(&[content[4095] ^ 0x80], base + found[0] + 4095).unwrap();

    let mut output = guest.serial().follow_from_now().unwrap();
    guest.serial().set("verify=64").unwrap();
    let line = output.wait_for_text("WRONG page").unwrap();
    assert!(line.starts_with("WRONG page 1234 word=511 "), "{line}");
    let check = guest.serial().check().unwrap();
    assert!(!check.ok && check.wrong == 1, "it is not forgotten: {check:?}");
    assert_eq!(guest.serial().next_tick().unwrap().wrong, 1);
}

#[test]
fn the_load_writes_in_every_mode_and_all_is_verified() {
    let (lab, environment) = laboratory();
    let load = Load { fill_mib: 16, wss_mib: 8, rate_mib_per_s: 20, ..Load::default() };
    let guest = Guest::start_and_wait(&lab.a, &environment, &GuestSpec::tiny("vm1", load)).unwrap();
    let mut output = guest.serial().follow().unwrap();
    for mode in ["few", "zero", "random"] {
        let before = guest.serial().next_tick().unwrap();
        guest.serial().set(&format!("mode={mode}")).unwrap();
        // Two whole passes of verification with the new mode.
        output.wait_for_tick(DEADLINE, |tick| tick.passes >= before.passes + 2).unwrap();
        assert!(guest.serial().next_tick().unwrap().writes > before.writes);
    }
    assert!(guest.serial().check().unwrap().ok);
    assert!(guest.serial().set("mode=loud").is_err());
}

#[test]
fn the_load_writes_in_every_pattern_and_all_is_verified() {
    let (lab, environment) = laboratory();
    let pattern = Pattern::HotSpot { writes_percent: 90, pages_percent: 10 };
    let load = Load { fill_mib: 16, wss_mib: 8, rate_mib_per_s: 20, pattern, ..Load::default() };
    let guest = Guest::start_and_wait(&lab.a, &environment, &GuestSpec::tiny("vm1", load)).unwrap();
    let mut output = guest.serial().follow().unwrap();
    for pattern in [None, Some("random"), Some("strided:64"), Some("sequential")] {
        let before = guest.serial().next_tick().unwrap();
        if let Some(pattern) = pattern {
            guest.serial().set(&format!("pattern={pattern}")).unwrap();
        }
        output.wait_for_tick(DEADLINE, |tick| tick.passes >= before.passes + 2).unwrap();
        assert!(guest.serial().next_tick().unwrap().writes > before.writes);
    }
    assert!(guest.serial().check().unwrap().ok);
    assert!(guest.serial().set("pattern=loud").is_err());
}

#[test]
fn the_newer_qemu_runs_a_guest_with_all_devices_and_numa() {
    let (lab, environment) = laboratory();
    for version in [QemuVersion::Newer, QemuVersion::Installed] {
        if let Err(Error::Missing { path }) = environment.qemu(version) {
            lab::not_tried(format!("a newer QEMU: {} is not here", path.display()));
            continue;
        }
        let load =
            Load { fill_mib: 32, wss_mib: 32, rate_mib_per_s: 20, mode: LoadMode::Few, ..Load::default() };
        let spec = GuestSpec {
            qemu: version,
            memory_mib: 256,
            numa_nodes: 2,
            vcpus: 2,
            ram: Ram::Memfd,
            second_monitor: true,
            ..GuestSpec::tiny("vm1", load).with_many_devices()
        };
        let mut guest = Guest::start_and_wait(&lab.a, &environment, &spec).unwrap();
        let mut monitor = guest.monitor().unwrap();
        let version = monitor.command("query-version", &serde_json::json!({})).unwrap();
        let balloon = 224_u64 << 20;
        monitor.command("balloon", &serde_json::json!({ "value": balloon })).unwrap();
        loop {
            let actual = monitor.command("query-balloon", &serde_json::json!({})).unwrap();
            if actual["actual"] == balloon {
                break;
            }
            guest.serial().next_tick().unwrap();
        }
        assert!(guest.serial().check().unwrap().ok, "{version}");
        assert!(monitor.command("nonsense", &serde_json::json!({})).is_err());
        guest.kill().unwrap();
    }
}

#[test]
fn the_guest_reads_its_disk_and_tells_wrong_blocks() {
    let (lab, environment) = laboratory();
    let qemu = environment.qemu(QemuVersion::Installed).unwrap();
    for (format, named_nodes, planted) in [("qcow2", false, false), ("raw", true, true)] {
        let image = lab.shared_directory().unwrap().join(format!("disk.{format}"));
        disk::known_content(&qemu, &image, format, 32).unwrap();
        if planted {
            // Every block of this MiB is wrong from its first byte.
            let file = OpenOptions::new().write(true).open(&image).unwrap();
            for block in 0..256 {
                file.write_all_at(b"?", (5 << 20) + block * 4096).unwrap();
            }
        }
        let load = Load { fill_mib: 4, disk_threads: 4, disk_mib: 8, ..Load::default() };
        let mut spec = GuestSpec::tiny(&format!("vm-{format}"), load);
        spec.devices.push(Device::Disk(Disk { named_nodes, ..Disk::new("disk0", &image, format) }));
        let guest = Guest::start_and_wait(&lab.a, &environment, &spec).unwrap();
        let mut output = guest.serial().follow().unwrap();
        if planted {
            let line = output.wait_for_text("WRONG block").unwrap();
            let block: u64 = line.split(' ').nth(2).unwrap().parse().unwrap();
            assert!((1280..1536).contains(&block), "{line}");
            assert!(!guest.serial().check().unwrap().ok);
        } else {
            output.wait_for_tick(DEADLINE, |tick| tick.disk_reads > 1000).unwrap();
            let check = guest.serial().check().unwrap();
            assert!(check.ok && check.disk_blocks >= 1024, "{check:?}");
        }
    }
}

#[test]
fn the_guest_writes_its_disk_and_tells_what_was_lost() {
    let (lab, environment) = laboratory();
    let qemu = environment.qemu(QemuVersion::Installed).unwrap();
    let image = lab.shared_directory().unwrap().join("disk.raw");
    disk::known_content(&qemu, &image, "raw", 8).unwrap();
    let load = Load { fill_mib: 4, disk_threads: 1, disk_writers: 2, disk_mib: 1, ..Load::default() };
    let mut spec = GuestSpec::tiny("vm1", load);
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "raw")));
    let guest = Guest::start_and_wait(&lab.a, &environment, &spec).unwrap();
    let mut output = guest.serial().follow().unwrap();
    output.wait_for_tick(DEADLINE, |tick| tick.disk_writes > 300).unwrap();
    let check = guest.serial().check().unwrap();
    // All of the second half at the least.
    assert!(check.ok && check.disk_blocks >= 1024, "{check:?}");

    // The host writes there, too: one block in each place.
    let file = OpenOptions::new().write(true).open(&image).unwrap();
    for place in 256..512 {
        file.write_all_at(b"?", place << 14).unwrap();
    }
    file.sync_all().unwrap();
    let line = output.wait_for_text("WRONG block").unwrap();
    let block: u64 = line.split(' ').nth(2).unwrap().parse().unwrap();
    assert!((1024..2048).contains(&block), "{line}");
    assert!(!guest.serial().check().unwrap().ok);
}

#[test]
fn a_client_behind_the_router_reaches_the_guest() {
    let (lab, environment) = laboratory();
    let load = Load { fill_mib: 4, address: Some(vm_address(5)), port: 7777, ..Load::default() };
    let mut spec = GuestSpec::tiny("vm1", load);
    spec.devices.push(Device::Net(Net::new(5)));
    let guest = Guest::start_and_wait(&lab.b, &environment, &spec).unwrap();
    let mut stream = lab
        .client
        .within(|| TcpStream::connect_timeout(&(vm_address(5), 7777).into(), Duration::from_secs(30)))
        .unwrap()
        .unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    for n in 0..20_u8 {
        stream.write_all(&[n; 100]).unwrap();
        let mut answer = [0; 100];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [n; 100]);
    }
    assert!(guest.serial().check().unwrap().ok);
}

#[test]
fn the_bare_guest_runs_on_one_and_two_processors() {
    let (lab, environment) = laboratory();
    for (accel, vcpus) in [(Accel::Tcg, 1), (Accel::Tcg, 2), (Accel::Kvm, 1), (Accel::Kvm, 2)] {
        if accel == Accel::Kvm && !environment.has_kvm() {
            lab::not_tried("guests under KVM: no /dev/kvm");
            continue;
        }
        let name = format!("{accel:?}{vcpus}").to_lowercase();
        let spec = GuestSpec { ram: Ram::Memfd, ..GuestSpec::bare(&name, accel, vcpus) };
        let mut guest = Guest::start(&lab.a, &environment, &spec).unwrap();
        let mut progress = PassProgress::default();
        let mut output = guest.serial().follow().unwrap();
        progress.wait(&mut output, vcpus as usize, 2, DEADLINE).unwrap();
        assert_eq!(progress.wrong, 0);
        assert_eq!(progress.lines[1] > 0, vcpus == 2);
        if accel == Accel::Tcg && vcpus == 2 {
            // The second processor's memory loses the written content of one page.
            let memory = OpenOptions::new().write(true).open(format!("/proc/{}/mem", guest.pid())).unwrap();
            let (base, _) = guest_memory(guest.pid());
            let mut monitor = guest.monitor().unwrap();
            monitor.command("stop", &serde_json::json!({})).unwrap();
            memory.write_all_at(&[0; 8], base + (100 << 20)).unwrap();
            monitor.command("cont", &serde_json::json!({})).unwrap();
            output.wait_for("a wrong page", DEADLINE, |line| line.contains('!')).unwrap();
        }
        guest.kill().unwrap();
    }
}

#[test]
fn the_bare_guests_bytes_are_what_its_source_says() {
    let directory = tempfile::tempdir().unwrap();
    let (object, binary) = (directory.path().join("o"), directory.path().join("b"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../guest/bare/bare.S");
    lab::run(Command::new("as").args(["--32", source, "-o"]).arg(&object)).unwrap();
    let link = ["-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-o"];
    lab::run(Command::new("ld").args(link).arg(&binary).arg(&object)).unwrap();
    assert!(fs::read(binary).unwrap() == lab::bare::image()[..512], "assemble guest/bare/bare.S again");
}

#[test]
fn a_qemu_that_cannot_start_says_why() {
    let (lab, environment) = laboratory();
    let mut spec = GuestSpec::tiny("vm1", Load::default());
    spec.extra = vec!["-device".into(), "nonesuch".into()];
    let error = Guest::start(&lab.a, &environment, &spec).unwrap_err().to_string();
    assert!(error.contains("nonesuch"), "{error}");
}

#[test]
fn a_guest_that_ends_ends_the_waiting() {
    let (lab, environment) = laboratory();
    let guest = Guest::start(&lab.a, &environment, &GuestSpec::tiny("vm1", Load::default())).unwrap();
    let mut output = guest.serial().follow().unwrap();
    lab::kill_pid(guest.pid()).unwrap();
    let error = output.wait_for_text("never said").unwrap_err();
    assert!(matches!(error, Error::Ended { .. }), "{error}");
}
