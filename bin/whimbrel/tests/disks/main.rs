//! Disks that migrate with their VM.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

#[path = "../common/mod.rs"]
mod common;
mod cuts;
mod faults;

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use common::replay::{assert_replayed, decisions};
use common::{
    Cluster, Device, Disk, Guest, GuestSpec, Load, LoopDevice, QemuVersion, Serial, Setup, SmallFileSystem,
    entries, until,
};
use engine::pre_copy::Decision;
use lab::disk;
use serde_json::{Value, json};

/// Returns a guest that reads and writes its disk all the time, and knows its expected content.
fn busy(version: QemuVersion) -> GuestSpec {
    let load = Load {
        fill_mib: 64,
        wss_mib: 16,
        rate_mib_per_s: 20,
        disk_threads: 2,
        disk_writers: 2,
        disk_mib: 16,
        ..Load::default()
    };
    GuestSpec { qemu: version, memory_mib: 256, second_monitor: true, ..GuestSpec::tiny("vm1", load) }
}

/// Returns two hosts, and a guest at the first one with a disk of known content.
fn with_disk(version: QemuVersion, format: &str) -> (Cluster, Guest, PathBuf) {
    with_disk_and(version, format, Setup::default())
}

fn with_disk_and(version: QemuVersion, format: &str, setup: Setup) -> (Cluster, Guest, PathBuf) {
    let cluster = Cluster::with(&Setup { pool: true, ..setup });
    let qemu = cluster.environment.qemu(version).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join(format!("disk.{format}"));
    disk::known_content(&qemu, &image, format, 64).unwrap();
    let mut spec = busy(version);
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, format)));
    let guest = cluster.guest(&spec);
    (cluster, guest, image)
}

fn pool(cluster: &Cluster, host: &str) -> PathBuf {
    let host = if host == "a" { &cluster.lab.a } else { &cluster.lab.b };
    host.directory().join("images")
}

fn image_of(report: &Value) -> PathBuf {
    assert_eq!(report["disks"].as_array().unwrap().len(), 1, "{report:#}");
    report["disks"][0]["path"].as_str().unwrap().into()
}

/// Returns true if two images have the same content, by a program that had no part in copying.
fn same(one: &Path, other: &Path) -> bool {
    let compared =
        Command::new("qemu-img").args(["compare", "-q", "-U"]).args([one, other]).status().unwrap();
    assert!(compared.code().is_some_and(|code| code < 2), "{compared}");
    compared.success()
}

/// Asserts that the guest keeps reading and writing, and finds all that it wrote.
fn assert_guest_works(serial: &Serial) {
    serial.wait_for_disk_reads().unwrap();
    serial.wait_for_disk_writes().unwrap();
    assert!(serial.check().unwrap().ok);
}

/// Returns the report of a failed migration, once both agents have cleaned up.
#[track_caller]
fn report_of_failed(cluster: &Cluster, migration: Child) -> Value {
    let result = migration.wait_with_output().unwrap();
    assert_eq!(result.status.code(), Some(1), "{result:?}");
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    serde_json::from_slice(&result.stdout).unwrap()
}

/// Migrates there and back, with a guest that knows the expected content of its disk, in any format.
fn a_busy_disk(version: QemuVersion, format: &str) {
    let (cluster, _guest, first) = with_disk(version, format);
    let qemu = cluster.environment.qemu(version).unwrap();
    let mut before = first;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = cluster.migrate("vm1", from, to, &["--disks", "copy"]);
        let image = image_of(&report);
        assert!(image.starts_with(pool(&cluster, to)), "{}", image.display());
        assert_eq!(report["disks"][0]["format"], format);
        cluster.assert_guest_whole(to, "vm1");
        let serial = cluster.serial(to, "vm1");
        serial.wait_for_disk_reads().unwrap();
        serial.wait_for_disk_writes().unwrap();
        // It has kept writing since, and not into the old one.
        assert!(before.exists() && !same(&before, &image));
        before = image;
    }
    let pid = cluster.a.vm("vm1").unwrap()["pid"].as_u64().unwrap() as u32;
    lab::kill_pid(pid).unwrap();
    if format == "qcow2" {
        disk::is_sound(&qemu, &before).unwrap();
    }
}

#[test]
fn a_busy_raw_disk_there_and_back() {
    a_busy_disk(QemuVersion::Installed, "raw");
}

#[test]
fn a_busy_qcow2_disk_there_and_back_with_a_newer_qemu() {
    a_busy_disk(QemuVersion::Newer, "qcow2");
}

/// Its disk is complete when it runs; the rest of its memory follows.
#[test]
fn the_disk_arrives_before_the_guest_and_memory_after_it() {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let setup = Setup { link, ..Setup::default() }.without_yielding();
    let (cluster, guest, _) = with_disk_and(QemuVersion::Newer, "qcow2", setup);
    guest.serial().set("rate=200").unwrap();
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--policy", "hybrid"];
    let result = cluster.a.cli(&words);
    let report = result.last_json();
    assert_eq!(report["outcome"], "moved", "{report:#}\n{}", cluster.b.log());
    assert!(report["post_copy"]["remaining_pages"].as_u64() > Some(1000), "{report:#}");
    // Collected writes to disks were sent in rounds without memory, while the guest ran.
    let sent_first = report["rounds"].as_array().unwrap().iter().filter(|round| {
        round["pass"].as_u64() >= Some(1)
            && round["stopped"] == false
            && round["dirty_pages"] != 0
            && round["disk_pages"] == round["dirty_pages"]
            && round["participant_pages"]["disks"] == round["disk_pages"]
    });
    // If the host's storage was blocked all the time, no writes were collected.
    let had_gathered = report["traces"][0]["entries"].as_array().unwrap().iter().any(|entry| {
        let seen = |name: &str| entry["observed"][name].as_u64();
        seen("pass") >= Some(1) && seen("must_precopy_pages") > Some(200)
    });
    let decisions = decisions(&assert_replayed(&report));
    let is_sent_first =
        decisions.iter().any(|one| matches!(one, Decision::NextRound { must_precopy_only: true, .. }));
    assert!(is_sent_first || !had_gathered, "{report:#}");
    assert!(sent_first.count() >= 1 || !is_sent_first, "{report:#}");
    cluster.b.wait_settled();
    assert_guest_works(&cluster.serial("b", "vm1"));
    cluster.serial("b", "vm1").set("rate=10").unwrap();
    cluster.migrate("vm1", "b", "a", &["--disks", "copy"]);
    assert_guest_works(&cluster.serial("a", "vm1"));
}

/// Byte for byte, compared by a program that had no part in it: the guest is stopped before and after.
#[test]
fn the_disk_is_the_one_that_it_left() {
    for version in [QemuVersion::Installed, QemuVersion::Newer] {
        let (cluster, guest, image) = with_disk(version, "qcow2");
        // It has written to the disk.
        let serial = guest.serial();
        let writes = serial.next_tick().unwrap().disk_writes;
        until("the guest has written more", || serial.next_tick().unwrap().disk_writes > writes + 10);
        guest.monitor().unwrap().command("stop", &json!({})).unwrap();
        let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
        assert!(same(&image, &image_of(&report)));
        let show = || cluster.b.cli(&["vm", "show", "vm1"]).ok().json();
        let shown = show();
        assert_eq!(shown["state"], "paused");
        // A scan after its end still finds its disk.
        let mut monitor = lab::Monitor::connect(Path::new(shown["qmp"].as_str().unwrap())).unwrap();
        monitor.command("quit", &json!({})).unwrap();
        until("it has ended", || show()["state"] == "gone");
        let shown = show();
        let disk = &shown["description"]["disks"][0];
        assert_eq!(disk["file"], image_of(&report).to_str().unwrap(), "{disk}");
    }
}

/// The test writes into the image at the destination, as a fault of Whimbrel would.
#[test]
fn a_disk_that_differs_is_not_handed_over() {
    let (cluster, guest, _image) = with_disk(QemuVersion::Newer, "raw");
    let slowly = ["--bandwidth", "24M", "--on-limit", "stop"];
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--verify", "--json"];
    let words = [&words[..], &slowly].concat();
    let migration = cluster.a.begin(&words);
    // The disk is complete except for the present writes, which are in its second half.
    cluster.wait_for_progress(|progress| progress["phase"] == "pre-copy");
    let image = pool(&cluster, "b").join(&entries(&pool(&cluster, "b"))[0]);
    let there = std::fs::OpenOptions::new().write(true).open(&image).unwrap();
    there.write_all_at(&[0xaa; 512], 8 << 20).unwrap();
    there.sync_all().unwrap();
    let report = report_of_failed(&cluster, migration);
    assert_eq!(report["verification"]["different_chunks"], 1, "{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("differ"), "{report:#}");
    assert_eq!(entries(&pool(&cluster, "b")), [""; 0]);
    assert_guest_works(guest.serial());
}

/// Makes the guest write to another image from here on, above its present one.
fn make_a_snapshot(guest: &Guest, image: &Path) {
    let snapshot = json!({
        "device": "disk0",
        "snapshot-file": image.with_extension("snapshot"),
        "format": "qcow2",
    });
    guest.monitor().unwrap().command("blockdev-snapshot-sync", &snapshot).unwrap();
}

/// Writes after a snapshot would be missed: no migration is better than a wrong one.
#[test]
fn a_snapshot_of_a_disk_that_is_copied_ends_the_migration() {
    let (cluster, guest, image) = with_disk(QemuVersion::Installed, "qcow2");
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "8M", "--json"];
    let migration = cluster.a.begin(&words);
    cluster.wait_for_sent(4 << 20);
    make_a_snapshot(&guest, &image);
    let report = report_of_failed(&cluster, migration);
    assert!(report["reason"].as_str().unwrap().contains("snapshot"), "{report:#}");
    assert_eq!(entries(&pool(&cluster, "b")), [""; 0]);
    guest.serial().wait_for_disk_writes().unwrap();
    // It is migrated in its present state, with the image below the snapshot.
    cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    cluster.assert_guest_whole("b", "vm1");
}

/// After the abort the guest keeps running, and nothing is left on either side.
#[test]
fn a_cancelled_migration_leaves_no_image_and_no_bitmap() {
    for version in [QemuVersion::Installed, QemuVersion::Newer] {
        let (cluster, guest, _image) = with_disk(version, "qcow2");
        let mut migration = {
            let mut command = cluster.a.command(&[
                "migrate",
                "vm1",
                "--to",
                "b",
                "--disks",
                "copy",
                "--bandwidth",
                "2M",
                "--json",
            ]);
            command.stdout(std::process::Stdio::null()).spawn().unwrap()
        };
        cluster.wait_for_sent(1 << 20);
        assert_eq!(entries(&pool(&cluster, "b")).len(), 1, "an image is being written");
        let cancelled = cluster.a.cli(&["cancel", "vm1"]);
        assert_eq!(cancelled.code, 0, "{cancelled:?}");
        migration.wait().unwrap();
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        assert_eq!(entries(&pool(&cluster, "b")), [""; 0], "{}", cluster.b.log());
        let mut monitor = guest.monitor().unwrap();
        assert_eq!(monitor.command("query-block-exports", &json!({})).unwrap(), json!([]));
        let nodes = monitor.command("query-named-block-nodes", &json!({ "flat": true })).unwrap();
        assert!(!nodes.to_string().contains("dirty-bitmaps"), "{nodes:#}");
        // The monitor belongs to the agent.
        drop(monitor);
        guest.serial().wait_for_disk_writes().unwrap();
        // And it can be migrated now.
        let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
        assert_eq!(image_of(&report).parent(), Some(pool(&cluster, "b").as_path()));
        cluster.assert_guest_whole("b", "vm1");
    }
}

/// The guest stays at the source, unharmed, and space is freed.
#[test]
fn a_destination_that_is_full_gets_no_disk() {
    let (cluster, guest, _image) = with_disk(QemuVersion::Newer, "raw");
    let images = pool(&cluster, "b");
    let small = SmallFileSystem::mount(&images, "32m");
    let refused = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stdout.contains("disk-space"), "{refused:?}");
    assert_eq!(entries(&images), [""; 0]);
    drop(small);

    // Space that was there when it began.
    let _small = SmallFileSystem::mount(&images, "100m");
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "8M", "--json"];
    let migration = cluster.a.begin(&words);
    cluster.wait_for_sent(1 << 20);
    let filled = std::fs::write(images.join("somebody's"), vec![1; 90 << 20]);
    let report = report_of_failed(&cluster, migration);
    let reason = report["reason"].as_str().unwrap();
    assert!(reason.contains("disk disk0") && reason.contains("No space left"), "{filled:?}: {reason}");
    assert_eq!(entries(&images), ["somebody's"]);
    assert_guest_works(guest.serial());
}

/// An impossible copy is reported before anything is begun.
#[test]
fn an_impossible_copy_is_reported_first() {
    let (cluster, _guest, _image) = with_disk(QemuVersion::Installed, "raw");
    let unknown = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disk", "sda=copy"]);
    assert_ne!(unknown.code, 0);
    assert!(unknown.stdout.contains("disk0") || unknown.stderr.contains("disk0"), "{unknown:?}");
    let wrong = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disk", "disk0=move"]);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    std::fs::remove_dir(pool(&cluster, "b")).unwrap();
    let refused = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy"]);
    assert_ne!(refused.code, 0);
    let result = format!("{}{}", refused.stdout, refused.stderr);
    assert!(result.contains("disk-pool") || result.contains("cannot be used"), "{result}");
    // Shared, as the two hosts of a laboratory see it.
    let report = cluster.migrate("vm1", "a", "b", &[]);
    assert!(report.get("disks").is_none(), "{report:#}");
}

/// One has a template below it, one stays on storage that both hosts see, one is a block device.
#[test]
fn several_disks_go_each_as_it_was_asked_for() {
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let file = |name: &str| cluster.lab.shared_directory().unwrap().join(name);
    let [base, first, shared, device] = ["base.raw", "first.qcow2", "shared.raw", "device.raw"].map(file);
    for image in [&base, &shared, &device] {
        disk::known_content(&qemu, image, "raw", 32).unwrap();
    }
    disk::overlay(&qemu, &first, &base, "raw").unwrap();
    let loop_device = LoopDevice::over(&device);
    let mut spec = busy(QemuVersion::Newer);
    for (name, path, format) in
        [("disk0", &first, "qcow2"), ("disk1", &shared, "raw"), ("disk2", &loop_device.0, "raw")]
    {
        spec.devices.push(Device::Disk(Disk::new(name, path, format)));
    }
    let guest = cluster.guest(&spec);
    let words = ["--disk", "disk0=copy", "--disk", "disk1=shared", "--disk", "disk2=copy"];
    let report = cluster.migrate("vm1", "a", "b", &words);
    let copied = report["disks"].as_array().unwrap();
    let names: Vec<_> = copied.iter().map(|disk| disk["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["disk0", "disk2"], "{report:#}");
    let paths: Vec<PathBuf> = copied.iter().map(|disk| disk["path"].as_str().unwrap().into()).collect();
    assert!(paths.iter().all(|path| path.starts_with(pool(&cluster, "b"))), "{paths:?}");
    // That disk was not written to.
    assert!(same(&device, &paths[1]));
    cluster.assert_guest_whole("b", "vm1");
    assert_guest_works(&cluster.serial("b", "vm1"));
    drop(guest);
    let back = cluster.migrate("vm1", "b", "a", &["--disk", "disk1=shared", "--disks", "copy"]);
    assert_eq!(back["disks"].as_array().unwrap().len(), 2, "{back:#}");
    cluster.assert_guest_whole("a", "vm1");
    assert_guest_works(&cluster.serial("a", "vm1"));
}

/// The destination's QEMU was started with the image that was the top one when the migration began.
#[test]
fn a_snapshot_of_a_disk_that_both_sides_see_ends_the_migration() {
    let (cluster, guest, image) = with_disk(QemuVersion::Newer, "qcow2");
    let words = ["migrate", "vm1", "--to", "b", "--disks", "shared", "--bandwidth", "16M", "--json"];
    let migration = cluster.a.begin(&words);
    cluster.wait_for_sent(4 << 20);
    make_a_snapshot(&guest, &image);
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "none"]).ok();
    let report = report_of_failed(&cluster, migration);
    assert!(report["reason"].as_str().unwrap().contains("snapshot"), "{report:#}");
    assert_guest_works(guest.serial());
    cluster.migrate("vm1", "a", "b", &["--disks", "shared"]);
    cluster.assert_guest_whole("b", "vm1");
}

/// Its plain text would be written to the copy.
#[test]
fn an_encrypted_disk_is_not_copied() {
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.luks");
    let secret = "secret,id=key,data=a-word-of-some-length";
    let words = ["create", "-q", "-f", "luks", "-o", "key-secret=key,iter-time=10", "--object", secret];
    let made = Command::new(&qemu.img).args(words).arg(&image).arg("16M").output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let mut spec = GuestSpec {
        qemu: QemuVersion::Newer,
        memory_mib: 128,
        ..GuestSpec::tiny("vm1", Load { fill_mib: 8, wss_mib: 4, ..Load::default() })
    };
    let blockdev = format!(
        "driver=luks,node-name=crypt,key-secret=key,file.driver=file,file.filename={}",
        image.display()
    );
    let more = ["-object", secret, "-blockdev", &blockdev, "-device", "virtio-blk-pci,drive=crypt"];
    spec.extra = more.map(str::to_owned).to_vec();
    let _guest = cluster.guest(&spec);
    let refused = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stdout.contains("plain text"), "{refused:?}");
    assert_eq!(entries(&pool(&cluster, "b")), [""; 0]);

    // Both hosts have its key on a command line, and nowhere else.
    cluster.migrate("vm1", "a", "b", &["--disks", "shared"]);
    cluster.assert_guest_whole("b", "vm1");
    for agent in [&cluster.a, &cluster.b] {
        let state = agent.directory.join("state");
        for name in entries(&state) {
            let kept = std::fs::read(state.join(&name)).unwrap_or_default();
            let key = b"a-word-of-some-length";
            assert!(!kept.windows(key.len()).any(|words| words == key), "{name} of {} has it", agent.name);
        }
    }
}

/// Writes to a disk from below its guest, through QEMU's own block layer, as no program in the guest can.
fn qemu_io(guest: &Guest, disk: &str, what: &str) {
    let command = json!({ "command-line": format!("qemu-io {disk} \"{what}\"") });
    let result = guest.monitor().unwrap().command("human-monitor-command", &command).unwrap();
    assert!(!result.to_string().contains("failed"), "{what}: {result}");
}

/// A range that is zeroed or discarded during the copy is zeros there, and uses no space.
#[test]
fn ranges_zeroed_during_the_copy_are_holes_there() {
    for format in ["raw", "qcow2"] {
        let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
        let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap();
        let image = |name: &str| cluster.lab.shared_directory().unwrap().join(format!("{name}.{format}"));
        let mut spec = busy(QemuVersion::Installed);
        // The guest works on the first of them, and does not use the other one.
        for name in ["disk0", "disk1"] {
            disk::known_content(&qemu, &image(name), format, 64).unwrap();
            let drive =
                format!("file={},format={format},if=none,id={name},discard=unmap", image(name).display());
            let device = format!("virtio-blk-pci,drive={name}");
            spec.extra.extend(["-drive", &drive, "-device", &device].map(str::to_owned));
        }
        let guest = cluster.guest(&spec);
        let words =
            ["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "24M", "--on-limit", "stop"];
        let migration = cluster.a.begin(&words);
        // All of the disks has been sent once.
        cluster.wait_for_sent(129 << 20);
        let holes: [(u64, u64); 2] = [(8 << 20, 3 << 20), (40 << 20, 5 << 20)];
        qemu_io(&guest, "disk1", &format!("write -z -u {} {}", holes[0].0, holes[0].1));
        qemu_io(&guest, "disk1", &format!("discard {} {}", holes[1].0, holes[1].1));
        assert_eq!(cluster.a.cli(&["limit", "vm1", "--bandwidth", "1G"]).code, 0);
        let result = migration.wait_with_output().unwrap();
        assert!(result.status.success(), "{result:?}\n{}", cluster.a.log());
        cluster.assert_guest_whole("b", "vm1");
        assert_guest_works(&cluster.serial("b", "vm1"));
        let report = cluster.a.cli(&["report", "vm1"]).ok().json();
        let copied = report["disks"].as_array().unwrap();
        let there = copied.iter().find(|copied| copied["name"] == "disk1").unwrap()["path"].as_str().unwrap();
        assert!(same(&image("disk1"), Path::new(there)));
        let map = Command::new("qemu-img").args(["map", "-U", "--output=json", there]).output().unwrap();
        let map: Value = serde_json::from_slice(&map.stdout).unwrap();
        for (start, length) in holes {
            let is_in_it = |part: &&Value| {
                let (from, bytes) = (part["start"].as_u64().unwrap(), part["length"].as_u64().unwrap());
                from < start + length && start < from + bytes
            };
            for part in map.as_array().unwrap().iter().filter(is_in_it) {
                assert!(part["zero"] == true && part["data"] == false, "{format}: {part} in {map:#}");
            }
        }
    }
}

/// A disk with a thread of its own. QEMU 7.2 would crash if it were read through it, so it is not.
#[test]
fn a_disk_with_an_iothread_is_copied_where_qemu_survives_it() {
    for version in [QemuVersion::Installed, QemuVersion::Newer] {
        let mut cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
        let qemu = cluster.environment.qemu(version).unwrap();
        let image = cluster.lab.shared_directory().unwrap().join("disk.qcow2");
        disk::known_content(&qemu, &image, "qcow2", 64).unwrap();
        let mut spec = busy(version);
        let drive = format!("file={},format=qcow2,if=none,id=disk0", image.display());
        let device = "virtio-blk-pci,drive=disk0,iothread=io0";
        let words = ["-object", "iothread,id=io0", "-drive", &drive, "-device", device];
        spec.extra = words.map(str::to_owned).to_vec();
        let guest = cluster.guest(&spec);
        if version == QemuVersion::Installed {
            let refused = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy"]);
            assert_eq!(refused.code, 1, "{refused:?}");
            assert!(refused.stdout.contains("iothread"), "{refused:?}");
            assert_guest_works(guest.serial());
            cluster.migrate("vm1", "a", "b", &["--disks", "shared"]);
        } else {
            // All connections are lost at once, and the guest is unharmed.
            faults::lose_the_source_agent(&mut cluster, &guest);
            let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
            assert_eq!(image_of(&report).parent(), Some(pool(&cluster, "b").as_path()));
        }
        cluster.assert_guest_whole("b", "vm1");
        assert_guest_works(&cluster.serial("b", "vm1"));
    }
}
