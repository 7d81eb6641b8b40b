//! Guests that write to their disks faster than the link carries.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use common::replay::assert_replayed;
use common::{
    Cluster, Device, Disk, Guest, GuestSpec, Load, QemuVersion, Setup, SmallFileSystem, has_event,
    per_second, until,
};
use lab::disk;
use serde_json::{Value, json};

/// Bytes of one write of the guest, with new content each time.
const WRITE_BYTES: u64 = 16 << 10;

/// Starts a guest that writes as fast as it can, and returns the options for a link that carries a quarter of that, at
/// any speed of the host.
fn diabolical() -> (Cluster, Guest, [String; 4], SmallFileSystem) {
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    // In memory: a machine's storage may block for a while.
    let directory = cluster.lab.shared_directory().unwrap().join("memory");
    std::fs::create_dir(&directory).unwrap();
    let storage = SmallFileSystem::mount(&directory, "64m");
    let image = directory.join("disk.raw");
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    disk::known_content(&qemu, &image, "raw", 32).unwrap();
    let load = Load { fill_mib: 16, wss_mib: 4, disk_threads: 0, disk_writers: 8, ..Load::default() };
    let mut spec = GuestSpec {
        qemu: QemuVersion::Newer,
        memory_mib: 128,
        second_monitor: true,
        ..GuestSpec::tiny("vm1", load)
    };
    spec.devices.push(Device::Disk(Disk { direct: false, ..Disk::new("disk0", &image, "raw") }));
    let guest = cluster.guest(&spec);
    let serial = guest.serial();
    serial.wait_for_disk_writes().unwrap();
    let writes_per_s = per_second(serial, |tick| tick.disk_writes);
    let bandwidth = (writes_per_s * WRITE_BYTES / 4).clamp(1_000_000, 10_000_000).to_string();
    (cluster, guest, ["--disks", "copy", "--bandwidth", &bandwidth].map(str::to_owned), storage)
}

#[test]
fn a_throttle_moves_a_guest_that_writes_faster_than_the_link() {
    let (cluster, _guest, slowly, _storage) = diabolical();
    let slowly = slowly.each_ref().map(String::as_str);
    let migrate = ["migrate", "vm1", "--to", "b", "--max-passes", "5"];
    let left_alone = cluster.a.cli(&[&migrate[..], &slowly].concat());
    assert_eq!(left_alone.code, 1, "{left_alone:?}");
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert!(report["reason"].as_str().unwrap().contains("passes"), "{report:#}");
    assert!(!has_event(&report, "writes-throttled"), "{report:#}");

    let report = cluster.migrate("vm1", "a", "b", &[&slowly[..], &["--throttle-writes", "drain"]].concat());
    assert!(has_event(&report, "writes-throttled"), "{report:#}");
    let writes = assert_replayed(&report).others.writes.unwrap();
    assert!(writes.decisions().any(|cap| cap.bytes_per_s.is_some()), "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
    cluster.serial("b", "vm1").wait_for_disk_writes().unwrap();
}

/// The paper's rule: the more the guest has written, the longer its next write takes.
#[test]
fn a_guest_is_throttled_by_what_it_has_written() {
    let (cluster, _guest, slowly, _storage) = diabolical();
    let slowly = slowly.each_ref().map(String::as_str);
    let report =
        cluster.migrate("vm1", "a", "b", &[&slowly[..], &["--throttle-writes", "threshold"]].concat());
    assert!(has_event(&report, "writes-throttled"), "{report:#}");
    let events = report["events"].as_array().unwrap().iter();
    let caps = events.filter(|event| event["what"] == "writes-throttled");
    assert!(
        caps.clone().all(|cap| cap["detail"].as_str().unwrap().contains("writes a second")),
        "{report:#}"
    );
    cluster.assert_guest_whole("b", "vm1");
}

/// Returns the limit on the guest's writes to all of its disks, bytes per second; 0 for no limit.
fn write_limit(guest: &Guest) -> u64 {
    let blocks = guest.monitor().unwrap().command("query-block", &json!({})).unwrap();
    let of = |block: &Value| block["inserted"]["bps_wr"].as_u64().unwrap_or(0);
    blocks.as_array().unwrap().iter().map(of).sum()
}

/// The throttle is lifted after every outcome of the migration.
#[test]
fn no_throttle_outlives_the_migration() {
    let (mut cluster, guest, slowly, _storage) = diabolical();
    let slowly = slowly.each_ref().map(String::as_str);
    let migrate = ["migrate", "vm1", "--to", "b", "--throttle-writes", "drain", "--detach"];
    for is_cancelled in [true, false] {
        cluster.a.cli(&[&migrate[..], &slowly].concat()).ok();
        until("the guest is throttled", || write_limit(&guest) > 0);
        if is_cancelled {
            cluster.a.cli(&["cancel", "vm1"]).ok();
        } else {
            cluster.a.kill();
            cluster.a.start();
        }
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        assert_eq!(write_limit(&guest), 0, "{is_cancelled}: {}", cluster.a.log());
    }
}

/// The agent is killed and not restarted.
#[test]
fn no_throttle_outlives_a_killed_agent() {
    let (mut cluster, guest, slowly, _storage) = diabolical();
    let slowly = slowly.each_ref().map(String::as_str);
    let migrate = ["migrate", "vm1", "--to", "b", "--throttle-writes", "drain", "--detach"];
    cluster.a.cli(&[&migrate[..], &slowly].concat()).ok();
    until("the guest is throttled", || write_limit(&guest) > 0);
    cluster.a.kill();
    until("the guest is let go", || write_limit(&guest) == 0);
    cluster.a.start();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    // It can be migrated, and is throttled and released again.
    cluster.migrate("vm1", "a", "b", &[&slowly[..], &["--throttle-writes", "drain"]].concat());
    cluster.assert_guest_whole("b", "vm1");
}

/// Without a copied disk a throttle has no effect, and so the rounds are limited.
#[test]
fn a_throttle_without_copied_disks_keeps_the_round_limit() {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let cluster = Cluster::with(&Setup { link, ..Setup::default() });
    let load = Load { fill_mib: 48, wss_mib: 32, rate_mib_per_s: 200, ..Load::default() };
    let guest = cluster.guest(&GuestSpec::tiny("vm1", load));
    let words = ["migrate", "vm1", "--to", "b", "--throttle-writes", "drain", "--on-limit", "abort"];
    let output = cluster.a.cli(&[&words[..], &["--max-downtime", "1"]].concat());
    assert_eq!(output.code, 1, "{output:?}");
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert!(report["reason"].as_str().unwrap().contains("passes"), "{report:#}");
    assert_eq!(report["settings"]["max_passes"], 30, "{report:#}");
    assert!(guest.serial().check().unwrap().ok);
}
