//! Images of disks that are copied: properties that a copy cannot have, space that it needs, and the images that are
//! left behind.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

#[path = "../common/mod.rs"]
mod common;
mod identity;

use std::fs::{self, Permissions};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{
    Cluster, CommandOutput, DEADLINE, Device, Disk, Guest, GuestSpec, Load, LoopDevice, QemuVersion, Setup,
    SmallFileSystem, entries, until,
};
use lab::{Direction, disk};
use serde_json::{Value, json};

/// Runs one of QEMU's tools on an image, and returns its output.
#[track_caller]
fn qemu_img(words: &[&str], image: &Path) -> String {
    CommandOutput::by(Command::new("qemu-img").args(words).arg(image)).ok().stdout
}

fn two_hosts() -> Cluster {
    Cluster::with(&Setup { pool: true, ..Setup::default() })
}

/// Returns two hosts, and an image of known content for a guest.
fn with_image(format: &str, size_mib: u64) -> (Cluster, PathBuf) {
    let cluster = two_hosts();
    let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join(format!("disk.{format}"));
    disk::known_content(&qemu, &image, format, size_mib).unwrap();
    (cluster, image)
}

/// Starts a guest with that disk, which it does not use itself.
fn guest_with(cluster: &Cluster, image: &Path, format: &str) -> Guest {
    let load = Load { fill_mib: 8, wss_mib: 4, ..Load::default() };
    let mut spec = GuestSpec { memory_mib: 128, second_monitor: true, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::Disk(Disk::new("disk0", image, format)));
    cluster.guest(&spec)
}

fn pool(host: &lab::Host) -> PathBuf {
    host.directory().join("images")
}

fn image_of(report: &Value) -> PathBuf {
    assert_eq!(report["disks"].as_array().unwrap().len(), 1, "{report:#}");
    report["disks"][0]["path"].as_str().unwrap().into()
}

/// Returns true if two images are identical, by a program that had no part in copying.
fn are_identical(one: &Path, other: &Path) -> bool {
    qemu_img(&["compare", "-U", one.to_str().unwrap()], other).contains("identical")
}

/// Returns true if the copy would be possible, and the findings with this code.
fn checked(cluster: &Cluster, code: &str, more: &[&str]) -> (bool, Vec<Value>) {
    let output = cluster.a.cli(&[&["migrate", "vm1", "--to", "b", "--check"], more].concat());
    let report = output.json();
    let findings = report["destination_findings"].as_array().unwrap().iter();
    let found = findings.filter(|finding| finding["code"] == code).cloned().collect();
    (report["possible"].as_bool().unwrap(), found)
}

/// Properties of an image that its user may rely on are not lost without a finding.
#[test]
fn snapshots_and_bitmaps_in_an_image_are_not_lost_in_silence() {
    let (cluster, image) = with_image("qcow2", 32);
    qemu_img(&["snapshot", "-c", "before-the-upgrade"], &image);
    let bitmap = ["bitmap", "--add"].map(str::to_owned);
    CommandOutput::by(Command::new("qemu-img").args(bitmap).arg(&image).arg("backup-7")).ok();
    let _guest = guest_with(&cluster, &image, "qcow2");

    let (possible, found) = checked(&cluster, "disk-snapshots-copy", &["--disks", "copy"]);
    assert!(!possible && found.len() == 1, "{found:#?}");
    assert_eq!(found[0]["severity"], "blocker");
    assert!(found[0]["what"].as_str().unwrap().contains("before-the-upgrade"), "{found:#?}");
    let refused = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert_eq!(entries(&pool(&cluster.lab.b)), [""; 0]);
    // Both hosts see the same image, with all its content.
    assert_eq!(checked(&cluster, "disk-snapshots-copy", &["--disks", "shared"]), (true, vec![]));

    let accepted = ["--disks", "copy", "--without-snapshots"];
    let (possible, found) = checked(&cluster, "disk-bitmaps-copy", &accepted);
    assert!(possible && found.len() == 1, "{found:#?}");
    assert_eq!(found[0]["severity"], "warning");
    assert!(found[0]["what"].as_str().unwrap().contains("backup-7"), "{found:#?}");
    let report = cluster.migrate("vm1", "a", "b", &accepted);
    let found = |code: &str| {
        let findings = report["findings"].as_array().unwrap().iter();
        findings
            .filter(|finding| finding["code"] == code)
            .map(|finding| &finding["severity"])
            .collect::<Vec<_>>()
    };
    assert_eq!(found("disk-snapshots-copy"), ["warning"], "{report:#}");
    assert_eq!(found("disk-bitmaps-copy"), ["warning"], "{report:#}");
    assert!(qemu_img(&["snapshot", "-l", "-U"], &image).contains("before-the-upgrade"));
    assert_eq!(qemu_img(&["snapshot", "-l", "-U"], &image_of(&report)), "");
    // The bitmap made for copying belongs to no user.
    assert_eq!(checked_back(&cluster), [""; 0]);
}

/// Returns the codes of findings about snapshots and bitmaps on the way back.
fn checked_back(cluster: &Cluster) -> Vec<String> {
    let report = cluster.b.cli(&["migrate", "vm1", "--to", "a", "--check", "--disks", "copy"]).ok().json();
    let codes = report["destination_findings"].as_array().unwrap().iter();
    let codes = codes.map(|finding| finding["code"].as_str().unwrap().to_owned());
    codes.filter(|code| code.contains("snapshots") || code.contains("bitmaps")).collect()
}

/// Content that is compressed at the source is not compressed in the copy.
#[test]
fn an_image_that_is_compressed_needs_room_for_all_that_is_in_it() {
    let cluster = two_hosts();
    let [plain, compressed] =
        ["disk.raw", "disk.qcow2"].map(|name| cluster.lab.shared_directory().unwrap().join(name));
    fs::write(&plain, b"the same words again and again ".repeat(3 << 20)).unwrap();
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", plain.to_str().unwrap()], &compressed);
    let taken = fs::metadata(&compressed).unwrap().len();
    assert!(taken < 16 << 20, "{taken}");
    let _guest = guest_with(&cluster, &compressed, "qcow2");
    let copy = ["--disks", "copy"];
    {
        let _small = SmallFileSystem::mount(&pool(&cluster.lab.b), "64m");
        let (possible, found) = checked(&cluster, "disk-space", &copy);
        assert!(!possible && found.len() == 1, "{found:#?}");
    }
    let _larger = SmallFileSystem::mount(&pool(&cluster.lab.b), "112m");
    assert_eq!(checked(&cluster, "disk-space", &copy), (true, vec![]));
    let report = cluster.migrate("vm1", "a", "b", &copy);
    assert!(are_identical(&compressed, &image_of(&report)));
    assert_eq!(
        entries(&cluster.a.directory.join("run")).iter().filter(|name| name.ends_with("room")).count(),
        0
    );
}

/// Asserts that it is listed with the reason why it is kept, and not removed.
#[track_caller]
fn assert_kept(cluster: &Cluster, why: &str) {
    let listed = cluster.a.cli(&["images", "list"]).ok().json();
    assert!(listed[0]["blocked_by"].as_str().is_some_and(|output| output.contains(why)), "{listed:#}");
    let refused = cluster.a.cli(&["images", "remove", "vm1"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stdout.contains(why), "{refused:?}");
}

/// A VM is not started from what another one left when it moved away, and nothing is done to the image.
#[track_caller]
fn no_second_copy(cluster: &Cluster, image: &Path) {
    let file = cluster.a.directory.join("old.toml");
    let before = fs::metadata(image).unwrap();
    // By its name, by another one in a description that is not taken apart, and by one of a file that leads to it.
    let link = cluster.a.directory.join("link,raw");
    symlink(image, &link).unwrap();
    let linked = format!("file={},format=raw", link.display().to_string().replace(',', ",,"));
    for drive in [format!("file={},format=raw", image.display()), linked] {
        let args = ["-machine", "pc,accel=tcg", "-m", "64", "-display", "none", "-drive", &drive];
        fs::write(&file, format!("name = \"old\"\nargs = {args:?}\n")).unwrap();
        let refused = cluster.a.cli(&["vm", "run", file.to_str().unwrap()]);
        assert!(refused.code == 1 && refused.stdout.contains("an old state"), "{refused:?}");
        assert!(cluster.a.vm("old").is_none());
    }
    let after = fs::metadata(image).unwrap();
    assert_eq!((before.ctime(), before.ctime_nsec()), (after.ctime(), after.ctime_nsec()));
}

/// Returns the bytes of a file in the host's page cache.
fn cached_bytes(file: &Path) -> u64 {
    let output = CommandOutput::by(
        Command::new("fincore").args(["--bytes", "--noheadings", "--output", "RES"]).arg(file),
    );
    output.ok().stdout.trim().parse().unwrap()
}

/// Only a user's request removes it, and only as long as it is the file that was left.
#[test]
fn an_image_that_was_left_is_removed_on_demand() {
    let (cluster, image) = with_image("raw", 16);
    let guest = guest_with(&cluster, &image, "raw");
    let list = |agent: &common::Agent| agent.cli(&["images", "list"]).ok().json().as_array().unwrap().clone();
    assert!(cached_bytes(&image) > 0);
    // A failed migration leaves an image that is in use.
    let migration = cluster.a.begin(&["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "1M"]);
    cluster.wait_for_sent(1 << 20);
    cluster.a.cli(&["cancel", "vm1"]).ok();
    migration.wait_with_output().unwrap();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert_eq!(list(&cluster.a), [Value::Null; 0]);
    assert_ne!(cluster.a.cli(&["images", "remove", "vm1"]).code, 0);

    let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    cluster.a.wait_settled();
    // It is not needed in memory any longer, where it was in the page cache.
    until("the cache has let go of it", || cached_bytes(&image) == 0);
    let epoch = report["epoch"].as_u64().unwrap();
    let left = list(&cluster.a);
    assert_eq!((left.len(), left[0]["path"].as_str()), (1, image.to_str()), "{left:#?}");
    assert_eq!(
        (&left[0]["to"], &left[0]["epoch"], &left[0]["disk"]),
        (&"b".into(), &epoch.into(), &"disk0".into())
    );
    assert_eq!(left[0].get("blocked_by"), None, "{left:#?}");
    assert_eq!(list(&cluster.b), [Value::Null; 0], "what runs there was not left there");
    no_second_copy(&cluster, &image);

    let reader = fs::File::open(&image).unwrap();
    assert_kept(&cluster, &format!("process {}", std::process::id()));
    drop(reader);
    // No process has it open, but the kernel has.
    let over_it = LoopDevice::over(&image);
    assert_kept(&cluster, "/dev/loop");
    drop(over_it);
    // The loop device is removed when the host's device manager has closed it.
    until("the kernel has let go of it", || list(&cluster.a)[0].get("blocked_by").is_none());
    let earlier = (epoch - 1).to_string();
    let refused = cluster.a.cli(&["images", "remove", "vm1", &earlier]);
    let hint = format!("it left some in {epoch}");
    assert!(refused.code == 2 && refused.stdout.contains(&hint) && image.exists(), "{refused:?}");
    let removed = cluster.a.cli(&["images", "remove", "vm1"]).ok().json();
    assert_eq!(removed[0]["path"].as_str(), image.to_str());
    assert!(!image.exists());
    assert_eq!(list(&cluster.a), [Value::Null; 0]);
    cluster.assert_guest_whole("b", "vm1");
    drop(guest);

    // There is another file under the name of the image that it leaves there.
    let there = image_of(&report);
    cluster.migrate("vm1", "b", "a", &["--disks", "copy"]);
    cluster.b.wait_settled();
    assert_eq!(list(&cluster.b)[0].get("blocked_by"), None);
    fs::rename(&there, there.with_extension("away")).unwrap();
    fs::copy(there.with_extension("away"), &there).unwrap();
    let refused = cluster.b.cli(&["images", "remove", "vm1"]);
    assert!(refused.code == 1 && refused.stdout.contains("not the file that was left"), "{refused:?}");
    // The same file, but with changed content.
    fs::rename(there.with_extension("away"), &there).unwrap();
    let refused = cluster.b.cli(&["images", "remove", "vm1"]);
    assert!(refused.code == 1 && refused.stdout.contains("was changed"), "{refused:?}");
    assert!(there.exists());

    // The VM ends at a, with its disk there and nowhere else.
    let pid = cluster.a.vm("vm1").unwrap()["pid"].as_u64().unwrap() as u32;
    assert_eq!(list(&cluster.a), [Value::Null; 0]);
    // A failed attempt changes nothing about that.
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "1M", "--detach"];
    cluster.a.cli(&words).ok();
    cluster.wait_for_sent(1 << 20);
    cluster.a.cli(&["cancel", "vm1"]).ok();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    lab::kill_pid(pid).unwrap();
    let last = pool(&cluster.lab.a).join(&entries(&pool(&cluster.lab.a))[0]);
    assert!(list(&cluster.a)[0]["blocked_by"].as_str().unwrap().contains("it is a disk of"));
    let refused = cluster.a.cli(&["images", "remove", "vm1", "--ended"]);
    assert!(refused.code != 0 && last.exists(), "{refused:?}");
    cluster.a.cli(&["vm", "forget", "vm1"]).ok();
    let listed = list(&cluster.a);
    assert_eq!((&listed[0]["ended"], listed[0]["path"].as_str()), (&true.into(), last.to_str()));
    let refused = cluster.a.cli(&["images", "remove", "vm1"]);
    assert!(refused.code != 0 && refused.stdout.contains("--ended") && last.exists(), "{refused:?}");
    cluster.a.cli(&["images", "remove", "vm1", "--ended"]).ok();
    assert_eq!(entries(&pool(&cluster.lab.a)), [""; 0]);
}

/// Its image there is open for writing in QEMU while it is empty, and its end is within a block.
#[test]
fn a_disk_whose_length_is_no_multiple_of_a_block_moves() {
    let cluster = two_hosts();
    let image = cluster.lab.shared_directory().unwrap().join("odd.raw");
    let mut content = vec![0; (4 << 20) + 3 * 512];
    content[1 << 20..].fill(0x5a);
    fs::write(&image, &content).unwrap();
    let _guest = guest_with(&cluster, &image, "raw");
    let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    cluster.assert_guest_whole("b", "vm1");
    assert!(fs::read(image_of(&report)).unwrap() == content);
}

/// An agent that is restarted while the guest may be at the other host already knows both images: the operator gets
/// their paths, and the one that was left is listed.
#[test]
fn an_agent_that_was_started_anew_knows_the_images() {
    let mut cluster = Cluster::with(&Setup { pool: true, fault_harness: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.raw");
    disk::known_content(&qemu, &image, "raw", 16).unwrap();
    let _guest = guest_with(&cluster, &image, "raw");
    let faults = cluster.faults.as_ref().unwrap();
    faults.want("source/stopped/ready[no-registry]:after-1-journal");
    let migration = cluster.a.begin(&["migrate", "vm1", "--to", "b", "--disks", "copy"]);
    let held = faults.held(DEADLINE).unwrap();
    // GO does not arrive.
    cluster.lab.cut(Direction::AToB).unwrap();
    cluster.a.kill();
    held.release();
    drop(migration.wait_with_output());
    cluster.a.start();
    let [there] = &entries(&pool(&cluster.lab.b))[..] else { panic!("not one image") };
    let there = pool(&cluster.lab.b).join(there);
    let asked = cluster.a.cli(&["recover", "vm1", "--run-here"]).json();
    let known = asked["known"].as_array().unwrap();
    assert!(known.iter().any(|line| line.as_str().unwrap().contains(there.to_str().unwrap())), "{asked:#}");

    cluster.lab.heal().unwrap();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    cluster.assert_guest_whole("b", "vm1");
    let listed = cluster.a.cli(&["images", "list"]).ok().json();
    assert_eq!((&listed[0]["path"], &listed[0]["to"]), (&json!(image), &json!("b")), "{listed:#}");
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_eq!(image_of(&report), there);
}

/// Returns the bytes of data of an image in a range, by a program that had no part in copying.
fn data_bytes(image: &Path, range: &Range<u64>) -> u64 {
    let extents: Value = serde_json::from_str(&qemu_img(&["map", "-U", "--output=json"], image)).unwrap();
    let within = |extent: &Value| {
        let start = extent["start"].as_u64().unwrap();
        let end = start + extent["length"].as_u64().unwrap();
        end.min(range.end).saturating_sub(start.max(range.start))
    };
    extents.as_array().unwrap().iter().filter(|extent| extent["data"] == true).map(within).sum()
}

/// Discards as those of `fstrim`: ranges that have been sent are discarded there, others are not sent.
#[test]
fn what_is_discarded_while_it_is_copied_is_a_hole_there() {
    for format in ["raw", "qcow2"] {
        let (cluster, image) = with_image(format, 64);
        let load = Load { fill_mib: 8, wss_mib: 4, ..Load::default() };
        let mut spec = GuestSpec {
            qemu: QemuVersion::Newer,
            memory_mib: 128,
            second_monitor: true,
            ..GuestSpec::tiny("vm1", load)
        };
        let drive = format!("if=none,id=disk0,file={},format={format},discard=unmap", image.display());
        spec.extra = ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"].map(str::to_owned).to_vec();
        let guest = cluster.guest(&spec);
        let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--verify", "--compress", "none"];
        let migration = cluster.a.begin(&[&words[..], &["--on-limit", "stop", "--bandwidth", "8M"]].concat());
        cluster.wait_for_sent(20 << 20);
        cluster.wait_for_progress(|progress| {
            let disk = &progress["parts"][0];
            let number = |what: &str| disk[what].as_u64().unwrap();
            let (to_do, left) = (number("round_bytes"), number("remaining_bytes"));
            (&disk["kind"], &disk["name"]) == (&json!("disk"), &json!("disk0"))
                && number("bytes") == 64 << 20
                && to_do == 64 << 20
                && 0 < left
                && left < to_do
        });
        let discarded = [2 << 20..6 << 20, 52 << 20..60 << 20];
        let there = pool(&cluster.lab.b).join(&entries(&pool(&cluster.lab.b))[0]);
        // The writer of a qcow2 image keeps its tables in memory for a while.
        assert!(format == "qcow2" || data_bytes(&there, &discarded[0]) > 0, "some of it has been sent");
        let mut monitor = guest.monitor().unwrap();
        for Range { start, end } in &discarded {
            let command = format!("qemu-io disk0 \"discard {start} {}\"", end - start);
            let output =
                monitor.command("human-monitor-command", &json!({ "command-line": command })).unwrap();
            assert!(!output.as_str().unwrap().contains("rror"), "{output}");
        }
        drop(monitor);
        cluster.a.cli(&["limit", "vm1", "--bandwidth", "none"]).ok();
        let output = migration.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}\n{}", cluster.a.log());
        let report = cluster.a.cli(&["report", "vm1"]).ok().json();
        cluster.assert_moved("a", &report);
        for range in &discarded {
            assert_eq!(data_bytes(&image, range), 0, "{format}: the guest has discarded it");
            assert_eq!(data_bytes(&there, range), 0, "{format}: {range:?}");
        }
        assert_eq!(data_bytes(&there, &(6 << 20..52 << 20)), 46 << 20, "{format}: the rest is there");
        assert!(are_identical(&image, &there));
    }
}

/// QEMU reopens its image before the guest runs, and has only its user's rights by then.
#[test]
fn a_qemu_that_gives_its_rights_up_has_its_image() {
    const NOBODY: u32 = 65534;
    for drive in ["-drive", "-blockdev"] {
        let (cluster, image) = with_image("qcow2", 16);
        chown(&image, Some(NOBODY), None).unwrap();
        let load = Load { fill_mib: 8, wss_mib: 4, disk_threads: 1, ..Load::default() };
        let mut spec = GuestSpec { memory_mib: 128, ..GuestSpec::tiny("vm1", load) };
        let path = image.display();
        let words = match drive {
            "-drive" => format!("if=none,id=disk0,file={path},format=qcow2"),
            _ => format!(
                "driver=qcow2,node-name=disk0,auto-read-only=on,file.driver=file,file.auto-read-only=on,file.filename={path}"
            ),
        };
        spec.extra = [drive, &words, "-device", "virtio-blk-pci,drive=disk0", "-runas", "nobody"]
            .map(str::to_owned)
            .to_vec();
        let _guest = cluster.guest(&spec);
        // A directory without permission to pass.
        fs::set_permissions(pool(&cluster.lab.b), Permissions::from_mode(0o700)).unwrap();
        let refused = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy"]);
        assert!(refused.code == 1 && refused.stdout.contains("disk-user"), "{refused:?}");
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        assert_eq!(entries(&pool(&cluster.lab.b)), [""; 0]);
        fs::set_permissions(pool(&cluster.lab.b), Permissions::from_mode(0o711)).unwrap();
        let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
        assert_eq!(fs::metadata(image_of(&report)).unwrap().uid(), NOBODY, "{drive}");
        cluster.assert_guest_whole("b", "vm1");
        // And back.
        cluster.migrate("vm1", "b", "a", &["--disks", "copy"]);
        cluster.assert_guest_whole("a", "vm1");
    }
}
