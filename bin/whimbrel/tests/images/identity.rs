//! Images are identified by their files, and written by one host alone.

use std::os::unix::fs::FileExt as _;

use lab::disk;

use crate::common::{Cluster, DEADLINE, QemuVersion, Setup, entries, until};
use crate::{guest_with, pool, with_image};

/// Another file lies at the path of a running VM's image: it is neither migrated with it, nor removed in its stead.
#[test]
fn a_file_that_took_the_place_of_an_image_is_not_taken_for_it() {
    let (cluster, image) = with_image("raw", 16);
    let _guest = guest_with(&cluster, &image, "raw");
    let away = image.with_extension("away");
    std::fs::rename(&image, &away).unwrap();
    std::fs::write(&image, vec![0xbb; 16 << 20]).unwrap();
    for disks in ["shared", "copy", "auto"] {
        let output = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", disks, "--check"]);
        assert!(output.code != 0 && output.stdout.contains("file-replaced"), "{disks}: {output:?}");
        let refused = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", disks]);
        assert_eq!(refused.code, 1, "{refused:?}");
        cluster.a.wait_settled();
        cluster.b.wait_settled();
    }
    assert_ne!(cluster.a.cli(&["images", "remove", "vm1"]).code, 0);
    assert!(std::fs::read(&image).unwrap().iter().all(|byte| *byte == 0xbb));
    assert_eq!(entries(&pool(&cluster.lab.b)), [""; 0]);
    // The remedy in the message.
    std::fs::rename(&away, &image).unwrap();
    cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    cluster.assert_guest_whole("b", "vm1");
}

/// QEMU opens images by their paths before its guest runs: a file swapped during the migration is found before that.
#[test]
fn a_file_that_takes_the_place_of_an_image_on_the_way_is_found() {
    let (cluster, image) = with_image("raw", 16);
    let _guest = guest_with(&cluster, &image, "raw");
    let away = image.with_extension("away");
    let migration = cluster.migrate_slowly("vm1", "1M");
    cluster.wait_for_sent(1 << 20);
    std::fs::rename(&image, &away).unwrap();
    std::fs::copy(&away, &image).unwrap();
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "none"]).ok();
    assert_eq!(migration.wait_with_output().unwrap().status.code(), Some(1));
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert!(report["reason"].as_str().unwrap().contains("another file is there"), "{report:#}");
    std::fs::rename(&away, &image).unwrap();

    // The same with the image made for a copy.
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--on-limit", "stop", "--bandwidth", "1M"];
    let migration = cluster.a.begin(&words);
    cluster.wait_for_sent(1 << 20);
    let there = pool(&cluster.lab.b);
    let made = there.join(&entries(&there)[0]);
    std::fs::rename(&made, there.join("away")).unwrap();
    std::fs::copy(there.join("away"), &made).unwrap();
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "none"]).ok();
    assert_eq!(migration.wait_with_output().unwrap().status.code(), Some(1));
    cluster.a.wait_settled();
    until("the other host has tried to remove it", || {
        cluster.b.log().contains("was replaced by another file")
    });
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert!(report["reason"].as_str().unwrap().contains("was replaced by another file"), "{report:#}");
    assert!(made.exists(), "what was not made for it is removed");
    std::fs::remove_file(&made).unwrap();
    cluster.b.wait_settled();

    cluster.migrate("vm1", "a", "b", &["--disks", "shared"]);
    cluster.assert_guest_whole("b", "vm1");
}

/// QEMU clears unknown bits of a header when it begins to write: one of them shows whether it did.
#[test]
fn no_shared_image_is_written_before_the_guest_has_left() {
    let mut cluster = Cluster::with(&Setup { fault_harness: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.qcow2");
    disk::known_content(&qemu, &image, "qcow2", 16).unwrap();
    let _guest = guest_with(&cluster, &image, "qcow2");
    let mark = 88..96;
    let set_mark = || {
        let file = std::fs::File::options().write(true).open(&image).unwrap();
        file.write_all_at(&(1_u64 << 63).to_be_bytes(), 88).unwrap();
    };
    set_mark();
    let before = std::fs::read(&image).unwrap();

    cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]).ok();
    assert!(std::fs::read(&image).unwrap() == before, "--check wrote to it");

    // The destination is ready, and neither side has the guest. It will continue here, whose QEMU writes then.
    let faults = cluster.faults.as_ref().unwrap();
    faults.want("source/stopped/ready[no-registry]:before-effects");
    let migration = cluster.a.begin(&["migrate", "vm1", "--to", "b"]);
    let held = faults.held(DEADLINE).unwrap();
    assert!(std::fs::read(&image).unwrap() == before, "the destination wrote to it");
    cluster.a.kill();
    held.release();
    drop(migration.wait_with_output());
    cluster.a.start();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert!(cluster.b.vm("vm1").is_none(), "it is there");

    set_mark();
    cluster.migrate("vm1", "a", "b", &[]);
    cluster.assert_guest_whole("b", "vm1");
    assert!(std::fs::read(&image).unwrap()[mark] == [0; 8], "the mark shows nothing");
}
