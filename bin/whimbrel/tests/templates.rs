//! Content that the destination has already: disks in its templates, and memory on the disks that were sent before it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::os::unix::fs::FileExt as _;
use std::process::Command;

use common::{Cluster, Device, Disk, GuestSpec, Load, QemuVersion, Setup, has_event, until};
use lab::disk;
use serde_json::Value;

/// Makes the destination read its template: it detects it when a VM arrives, and uses it for the next one.
fn template_is_read(cluster: &Cluster) {
    cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy", "--check"]).ok();
    let state = || cluster.b.cli(&["info", "--json"]).ok().json()["templates"][0]["state"].clone();
    until("the template was read", || state() == "ready");
}

/// The destination has the image from which the VM was made, under another name and in another format. Then the VM
/// returns to a host without it.
#[test]
fn what_is_in_a_template_is_not_sent() {
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let base = cluster.lab.shared_directory().unwrap().join("base.qcow2");
    disk::known_content(&qemu, &base, "qcow2", 256).unwrap();
    let image = base.with_file_name("disk.qcow2");
    disk::overlay(&qemu, &image, &base, "qcow2").unwrap();
    let template = cluster.lab.b.directory().join("templates/debian.img");
    let convert = ["convert", "-q", "-f", "qcow2", "-O", "raw"];
    assert!(Command::new("qemu-img").args(convert).args([&base, &template]).status().unwrap().success());
    // It only reads.
    let load = Load { fill_mib: 64, wss_mib: 16, rate_mib_per_s: 20, disk_threads: 2, ..Load::default() };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, memory_mib: 256, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "qcow2")));
    let _guest = cluster.guest(&spec);

    template_is_read(&cluster);
    let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    let all = |report: &Value, what: &str| {
        report["rounds"].as_array().unwrap().iter().map(|round| round[what].as_u64().unwrap()).sum::<u64>()
    };
    // Only of the disk; a slow link may be reason enough to check memory as well.
    let first = &report["rounds"][0];
    assert_eq!(first["reference_pages"], (256 << 20) / 4096, "{report:#}");
    assert_eq!(first["refused_pages"], 0, "{report:#}");
    assert!(first["sent_bytes"].as_u64().unwrap() < 1 << 20, "{report:#}");
    assert!(has_event(&report, "templates"), "{report:#}");
    cluster.assert_guest_whole("b", "vm1");

    let report = cluster.migrate("vm1", "b", "a", &["--disks", "copy", "--no-references"]);
    assert_eq!(all(&report, "reference_pages"), 0, "{report:#}");
    cluster.assert_guest_whole("a", "vm1");
}

/// Content that a VM has left at a host is not sent when it returns, also when the agent there was restarted by then.
/// After its removal it is sent again.
#[test]
fn a_vm_that_comes_back_does_not_bring_what_it_left() {
    let mut cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let shared = cluster.lab.shared_directory().unwrap();
    let (base, image) = (shared.join("base.qcow2"), shared.join("disk.qcow2"));
    disk::known_content(&qemu, &base, "qcow2", 128).unwrap();
    disk::overlay(&qemu, &image, &base, "qcow2").unwrap();
    // It only reads the disk, and writes to memory.
    let load = Load { fill_mib: 64, wss_mib: 16, rate_mib_per_s: 20, disk_threads: 2, ..Load::default() };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, memory_mib: 256, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "qcow2")));
    let _guest = cluster.guest(&spec);
    let of_the_disk = |report: &Value| {
        let first = &report["rounds"][0];
        ["reference_pages", "refused_pages", "sent_bytes"].map(|what| first[what].as_u64().unwrap())
    };
    let all_pages = (128 << 20) / 4096;

    let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    assert_eq!(of_the_disk(&report)[0], 0, "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
    cluster.a.kill();
    cluster.a.start();
    let report = cluster.migrate("vm1", "b", "a", &["--disks", "copy"]);
    let [referred, refused, sent_bytes] = of_the_disk(&report);
    assert!(referred == all_pages && refused == 0 && sent_bytes < 1 << 20, "{report:#}");
    assert!(has_event(&report, "templates"), "{report:#}");
    cluster.assert_guest_whole("a", "vm1");
    // The next time as well, though nothing was sent the last time.
    let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    assert_eq!(of_the_disk(&report)[..2], [all_pages, 0], "{report:#}");
    cluster.assert_guest_whole("b", "vm1");

    // Removed content is not advertised.
    cluster.a.cli(&["images", "remove", "vm1"]).ok();
    let report = cluster.migrate("vm1", "b", "a", &["--disks", "copy"]);
    assert_eq!(of_the_disk(&report)[0], 0, "{report:#}");
    cluster.assert_guest_whole("a", "vm1");
}

/// A guest that has read its disk into its memory, on a slow link: content that was sent with the disk is not sent
/// again.
#[test]
fn memory_that_came_from_a_disk_is_not_sent() {
    let link = lab::Link::Limited { rate_bytes_per_s: 12 << 20 };
    let cluster = Cluster::with(&Setup { pool: true, link, ..Setup::default() }.without_yielding());
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.img");
    disk::known_content(&qemu, &image, "raw", 64).unwrap();
    let load = Load { fill_mib: 32, disk_threads: 2, disk_mib: 32, ..Load::default() };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "raw")));
    let guest = cluster.guest(&spec);
    let serial = guest.serial();
    // All of the memory for reads is filled.
    until("the guest has read", || serial.next_tick().unwrap().disk_reads > 1000);

    let of_memory = |report: &Value, passes: std::ops::RangeInclusive<u64>| {
        let rounds = report["rounds"].as_array().unwrap().iter();
        let with_memory = rounds.filter(|round| passes.contains(&round["pass"].as_u64().unwrap()));
        with_memory.map(|round| round["reference_pages"].as_u64().unwrap()).sum::<u64>()
    };
    let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    // It keeps reading: pages read anew in the first pass are sent in the second.
    assert!(of_memory(&report, 1..=2) > (16 << 20) / 4096, "{report:#}");
    assert_eq!(of_memory(&report, 3..=u64::MAX), 0, "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
    let report = cluster.migrate("vm1", "b", "a", &["--disks", "copy", "--no-references"]);
    assert_eq!(of_memory(&report, 1..=u64::MAX), 0, "{report:#}");
    cluster.assert_guest_whole("a", "vm1");
}

/// A guest that has read from images that both hosts have, on a slow link: its page cache is not sent. The image below
/// its own one is read once, for all migrations.
#[test]
fn page_cache_of_shared_storage_is_not_sent() {
    let link = lab::Link::Limited { rate_bytes_per_s: 12 << 20 };
    let cluster = Cluster::with(&Setup { link, ..Setup::default() }.without_yielding());
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let shared = cluster.lab.shared_directory().unwrap();
    let (base, image) = (shared.join("base.qcow2"), shared.join("disk.qcow2"));
    disk::known_content(&qemu, &base, "qcow2", 64).unwrap();
    disk::overlay(&qemu, &image, &base, "qcow2").unwrap();
    // It writes to the second half, so that both images have a part of the disk.
    let load = Load { fill_mib: 128, disk_threads: 2, disk_writers: 1, disk_mib: 32, ..Load::default() };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "qcow2")));
    let guest = cluster.guest(&spec);
    let serial = guest.serial();
    until("the guest has read", || serial.next_tick().unwrap().disk_reads > 1000);

    let sum = |report: &Value, what: &str| {
        let rounds = report["rounds"].as_array().unwrap().iter();
        rounds.map(|round| round[what].as_u64().unwrap()).sum::<u64>()
    };
    // A little of its writes during the migration may be other pages by then.
    let referred = |report: &Value| {
        let (referred, refused) = (sum(report, "reference_pages"), sum(report, "refused_pages"));
        assert!(referred > (8 << 20) / 4096 && refused * 4 < referred, "{report:#}");
    };
    // MiB that are known, and MiB that were read for this.
    let learnt = |report: &Value| {
        let mut events = report["events"].as_array().unwrap().iter();
        let shared_images = events.find(|event| event["what"] == "shared-images").unwrap();
        let detail = shared_images["detail"].as_str().unwrap();
        assert!(detail.starts_with("2 of 2 images"), "{detail}");
        let numbers: Vec<u64> = detail.split(' ').filter_map(|word| word.parse().ok()).collect();
        (numbers[2], numbers[3])
    };
    let report = cluster.migrate("vm1", "a", "b", &[]);
    referred(&report);
    let (known, read) = learnt(&report);
    assert!(read >= 64 && known == read, "{known} and {read}");
    cluster.assert_guest_whole("b", "vm1");

    let report = cluster.migrate("vm1", "b", "a", &["--no-references"]);
    assert_eq!(sum(&report, "reference_pages"), 0, "{report:#}");
    assert!(!has_event(&report, "shared-images"), "{report:#}");
    cluster.assert_guest_whole("a", "vm1");

    // The base is known; of the guest's own image, 32 MiB at most, no content is assumed to be unchanged.
    let report = cluster.migrate("vm1", "a", "b", &[]);
    referred(&report);
    let (known, read) = learnt(&report);
    assert!(known >= read + 64, "{known} and {read}");
    cluster.assert_guest_whole("b", "vm1");
}

/// 20 GB of which 1 GB is in use, made from a template of 0.9 GB that the destination has: at most 120 MB are sent for
/// it (all figures of the requirement).
#[test]
fn a_large_sparse_disk_sends_little_more_than_its_changes() {
    const MB: u64 = 1_000_000;
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let shared = cluster.lab.shared_directory().unwrap();
    let template = cluster.lab.b.directory().join("templates/base.img");
    disk::known_content(&qemu, &template, "raw", (900 * MB) >> 20).unwrap();
    let image = shared.join("disk.qcow2");
    let qemu_img = |words: &[&str]| {
        let done = Command::new("qemu-img").args(words).arg(&image).arg("20G").output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", template.to_str().unwrap()]);
    // Later installed content is scattered, over the template and far behind it.
    let new = shared.join("new");
    let mut random = std::fs::File::open("/dev/urandom").unwrap();
    let piece = 2 * MB as usize / 4096 * 4096;
    std::io::copy(
        &mut std::io::Read::take(&mut random, piece as u64),
        &mut std::fs::File::create(&new).unwrap(),
    )
    .unwrap();
    let mut io = Command::new("qemu-io");
    for number in 0..50_u64 {
        let mut bytes = std::fs::read(&new).unwrap();
        // All different.
        bytes.chunks_mut(4096).for_each(|page| page[..8].copy_from_slice(&number.to_le_bytes()));
        let file = shared.join(format!("new-{number}"));
        std::fs::write(&file, bytes).unwrap();
        io.args(["-c", &format!("write -q -s {} {} {piece}", file.display(), number * (400 << 20))]);
    }
    assert!(io.args(["-f", "qcow2"]).arg(&image).status().unwrap().success());
    let load = Load { fill_mib: 16, wss_mib: 4, rate_mib_per_s: 4, ..Load::default() };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, memory_mib: 128, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "qcow2")));
    let _guest = cluster.guest(&spec);
    template_is_read(&cluster);
    let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    let rounds = report["rounds"].as_array().unwrap();
    let of_disks = rounds.iter().filter(|round| round["disk_pages"] == round["dirty_pages"]);
    let sent: u64 = of_disks.map(|round| round["sent_bytes"].as_u64().unwrap()).sum();
    assert!((100 * MB..120 * MB).contains(&sent), "{sent}: {report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

/// The catalogue of a template is wrong: that has no use, and does no harm.
#[test]
fn a_template_that_is_not_what_it_was_does_no_harm() {
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.raw");
    disk::known_content(&qemu, &image, "raw", 64).unwrap();
    let template = cluster.lab.b.directory().join("templates/base.raw");
    std::fs::copy(&image, &template).unwrap();
    let load = Load { disk_threads: 2, ..Load::default() };
    let mut spec = GuestSpec::tiny("vm1", load);
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "raw")));
    let _guest = cluster.guest(&spec);
    template_is_read(&cluster);
    // The catalogue's first run begins one page later.
    let catalogues = cluster.b.directory.join("state/catalogues");
    let catalogue = std::fs::read_dir(catalogues).unwrap().map(|entry| entry.unwrap().path());
    let catalogue =
        catalogue.into_iter().find(|path| path.extension().is_some_and(|word| word == "catalogue"));
    let file = std::fs::File::options().write(true).open(catalogue.unwrap()).unwrap();
    file.write_all_at(&1_u64.to_le_bytes(), 56).unwrap();
    let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    let refused = |round: &Value| round["refused_pages"].as_u64().unwrap();
    let rounds = report["rounds"].as_array().unwrap();
    assert!(rounds.iter().map(refused).sum::<u64>() > 0, "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
}
