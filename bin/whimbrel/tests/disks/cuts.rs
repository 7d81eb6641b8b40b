//! The link is cut, in every phase of a migration that copies disks.

use lab::Direction;

use crate::common::{self, QemuVersion, Serial, Setup, has_event, until};
use crate::{assert_guest_works, with_disk_and};

/// Asserts that the guest's clock advances and that it writes to its disk, as long as a cut lasts: a minute in `make
/// soak`.
#[track_caller]
fn assert_works_while_cut(serial: &Serial) {
    let cut_ms = if std::env::var_os("WHIMBREL_SOAK").is_some() { 60_000 } else { 2_000 };
    let until_ms = serial.next_tick().unwrap().uptime_ms + cut_ms;
    while serial.next_tick().unwrap().uptime_ms < until_ms {
        serial.wait_for_disk_writes().unwrap();
    }
}

/// The link is cut while a disk is sent, and once more when memory is sent too: a minute each in `make soak`. The guest
/// keeps writing, also by its own clock; data that was sent and not acknowledged is resent.
#[test]
fn a_link_that_is_cut_while_a_disk_and_memory_are_sent() {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let (cluster, guest, _image) =
        with_disk_and(QemuVersion::Installed, "raw", Setup { link, ..Setup::default() });
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--verify", "--on-limit", "stop"];
    let migration = cluster.a.begin(&words);
    let serial = guest.serial();
    // The second is more than any round of the disk alone.
    for round_bytes in [16_u64 << 20, 66 << 20] {
        cluster.wait_for_progress(|progress| {
            let left = progress["remaining_bytes"].as_u64().unwrap();
            progress["phase"] == "pre-copy"
                && progress["round_bytes"].as_u64().unwrap() >= round_bytes
                && left > 8 << 20
        });
        cluster.lab.cut(Direction::AToB).unwrap();
        cluster.wait_for_progress(|progress| progress["phase"] == "reconnecting");
        assert_works_while_cut(serial);
        cluster.lab.heal().unwrap();
        cluster.wait_for_progress(|progress| progress["phase"] == "pre-copy");
    }
    assert!(migration.wait_with_output().unwrap().status.success(), "{}", cluster.a.log());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert!(report["reconnections"].as_u64().unwrap() >= 2, "{report:#}");
    assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
    assert_guest_works(&cluster.serial("b", "vm1"));
}

/// Cuts the link when a migration is at a fault point; the guest is at that host then, and keeps working.
fn a_cut_at(point: &str, host: &str) {
    let extra = "[timeouts]\nretry_ms = 100\ngive_up_after_ms = 600000\npeer_silence_ms = 2000\nstandstill_ms = 3000\n";
    let setup = Setup { fault_harness: true, extra: extra.to_owned(), ..Setup::default() };
    let (cluster, guest, _image) = with_disk_and(QemuVersion::Installed, "raw", setup);
    let faults = cluster.faults.as_ref().unwrap();
    faults.want(point);
    let migration = cluster.a.begin(&["migrate", "vm1", "--to", "b", "--disks", "copy", "--verify"]);
    let held = faults.held(common::DEADLINE).unwrap();
    cluster.lab.cut_both().unwrap();
    held.release();
    if host == "a" {
        assert_works_while_cut(guest.serial());
    } else {
        until("the destination has it", || cluster.b.vm("vm1").is_some_and(|vm| vm["state"] == "running"));
        assert_works_while_cut(&cluster.serial("b", "vm1"));
    }
    cluster.lab.heal().unwrap();
    let output = migration.wait_with_output().unwrap();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    let is_noticed = report["outcome"] == "aborted" || has_event(&report, "link-lost") || host == "b";
    assert!(is_noticed, "{point}: {report:#}");
    if cluster.b.vm("vm1").is_none() {
        assert_eq!(host, "a", "{point}: {output:?}\n{}", cluster.a.log());
        assert_eq!(report["outcome"], "aborted", "{point}: {report:#}");
        assert_guest_works(guest.serial());
        cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    }
    cluster.assert_guest_whole("b", "vm1");
    assert_guest_works(&cluster.serial("b", "vm1"));
}

#[test]
fn a_link_that_is_cut_while_the_destination_prepares() {
    a_cut_at("destination/idle/prepare:before-effects", "a");
}

/// It is stopped at the source until the source detects the cut.
#[test]
fn a_link_that_is_cut_while_the_guest_stands_still() {
    a_cut_at("destination/prepared/loaded:before-effects", "a");
}

#[test]
fn a_link_that_is_cut_when_the_guest_has_arrived() {
    a_cut_at("destination/starting/continued:before-effects", "b");
}
