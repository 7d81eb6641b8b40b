//! A guest that runs and writes is migrated between two hosts. Every migration compares all of memory by a path of its
//! own (`--verify`), and the guest itself checks every page that it wrote. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod common;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{
    Accel, Cluster, DEADLINE, Device, Disk, Environment, GuestSpec, Load, QemuVersion, Ram, Setup, busy,
    until,
};
use lab::{Direction, Net, disk, not_tried};

fn newest(environment: &Environment) -> QemuVersion {
    *environment.qemu_versions().last().unwrap()
}

/// Migrates there and back until all pairs of RAM kinds have occurred at source and destination.
fn there_and_back(version: QemuVersion, ram: Ram, moves: usize) {
    let cluster = Cluster::new();
    let spec = GuestSpec { qemu: version, ram, ..GuestSpec::tiny("vm1", busy()) };
    let _guest = cluster.guest(&spec);
    let hosts = ["a", "b"];
    let mut came_as = "";
    for turn in 0..moves {
        let (from, to) = (hosts[turn % 2], hosts[(turn + 1) % 2]);
        let kind = ["memfd", "anonymous", "anonymous"][turn % 3];
        let report = cluster.migrate("vm1", from, to, &["--ram", kind]);
        assert_eq!(report["destination"]["ram_kind"], kind);
        // By QEMU's actual memory map.
        if turn > 0 {
            assert_eq!(report["source"]["ram_kind"], came_as, "as it was promised");
        }
        came_as = kind;
        cluster.assert_guest_whole(to, "vm1");
        assert!(cluster.agent(from).vm("vm1").is_none(), "it is on one side only");
        // A guest that has left again leaves nothing open: no memory of it, no process.
        for host in hosts {
            let held = || held_of_others(cluster.agent(host).pid());
            until(&format!("{host} holds nothing of a QEMU that is gone: {:?}", held()), || {
                held().is_empty()
            });
        }
    }
}

/// Returns descriptors of a process for processes and memory of others that have ended, or were not released.
fn held_of_others(pid: u32) -> Vec<String> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let held = |entry: std::fs::DirEntry| {
        let target = std::fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned();
        let info =
            std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", entry.file_name().to_str()?)).ok()?;
        let of_ended = info.lines().any(|line| line == "Pid:\t-1");
        (of_ended || target.starts_with("/memfd:")).then_some(target)
    };
    descriptors.filter_map(held).collect()
}

#[test]
fn there_and_back_ten_times() {
    there_and_back(QemuVersion::Installed, Ram::Anonymous, 10);
}

#[test]
fn a_newer_qemu_with_ram_in_a_file_there_and_back() {
    there_and_back(newest(&Environment::discover()), Ram::File("/dev/shm".into()), 3);
}

#[test]
fn a_newer_qemu_with_anonymous_ram_there_and_back() {
    there_and_back(newest(&Environment::discover()), Ram::Anonymous, 4);
}

/// Without an option for the kind of memory, no property of the guest's memory is lost: anonymous memory stays so where
/// shared memory has no transparent huge pages; shared memory stays shared.
#[test]
fn the_destination_chooses_the_kind_of_ram() {
    let folder = Path::new("/sys/kernel/mm/transparent_hugepage");
    let (Some(_anonymous), Some(shared)) =
        (Setting::of(folder.join("enabled"), "madvise"), Setting::of(folder.join("shmem_enabled"), "never"))
    else {
        not_tried(
            "the kind of RAM that the destination chooses: settings of transparent huge pages cannot be changed",
        );
        return;
    };
    let cluster = Cluster::new();
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", busy()));
    for (turn, (huge_pages_of_shared_memory, kind)) in
        [("never", "anonymous"), ("advise", "memfd"), ("never", "memfd")].into_iter().enumerate()
    {
        let (from, to) = [("a", "b"), ("b", "a")][turn % 2];
        shared.set(huge_pages_of_shared_memory);
        let check = cluster.agent(from).cli(&["migrate", "vm1", "--to", to, "--check"]).ok().json();
        let report = cluster.migrate("vm1", from, to, &["--ram", "auto"]);
        let found = cluster.agent(to).cli(&["vm", "show", "vm1"]).ok().json();
        for reported in [&check["ram_kind"], &report["destination"]["ram_kind"], &found["ram_kind"]] {
            assert_eq!(reported, kind, "shared memory: {huge_pages_of_shared_memory}");
        }
        cluster.assert_guest_whole(to, "vm1");
    }
}

/// A setting of the kernel, restored in the end.
struct Setting(PathBuf, String);

impl Setting {
    fn of(path: PathBuf, word: &str) -> Option<Self> {
        let words = std::fs::read_to_string(&path).ok()?;
        let before = words.split_once('[')?.1.split_once(']')?.0.to_owned();
        std::fs::write(&path, word).ok()?;
        Some(Self(path, before))
    }

    fn set(&self, word: &str) {
        std::fs::write(&self.0, word).unwrap();
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.0, &self.1);
    }
}

/// Data that only one side knows is in the other side's report too: from an older QEMU to a newer one, where there are
/// two.
#[test]
fn the_report_tells_of_both_sides() {
    let mut cluster = Cluster::new();
    cluster.b.kill();
    let config = std::fs::read_to_string(cluster.b.config()).unwrap();
    let mut config: toml::Table = config.parse().unwrap();
    config["qemu"]["binaries"].as_array_mut().unwrap().drain(..cluster.environment.qemu_versions().len() - 1);
    std::fs::write(cluster.b.config(), config.to_string()).unwrap();
    cluster.b.start();
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", busy()));
    let version = |agent: &common::Agent| agent.vm("vm1").unwrap()["qemu_version"].clone();

    let left = version(&cluster.a);
    let report = cluster.migrate("vm1", "a", "b", &[]);
    let (source, destination) = (&report["source"], &report["destination"]);
    assert_eq!((&source["qemu_version"], &destination["qemu_version"]), (&left, &version(&cluster.b)));
    assert_eq!(left == version(&cluster.b), cluster.environment.qemu_versions().len() == 1);

    let text = cluster.a.text(&["report", "vm1"]).ok().stdout;
    let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap().to_owned();
    let versions = [source, destination].map(|side| side["qemu_version"].as_str().unwrap());
    assert!(line("QEMU").ends_with(&versions.join(" → ")), "{text}");
    let used = [source, destination].map(|side| side["agent_cpu_us"].as_u64().unwrap());
    for (used_us, agent) in used.into_iter().zip([&cluster.a, &cluster.b]) {
        assert!(used_us > 0 && used_us <= cpu_us(agent.pid()), "{report:#}");
    }
    let used = used.map(|us| format!("{:.3} s", us as f64 / 1e6));
    assert!(line("agents' CPU").ends_with(&used.join(" → ")), "{text}");
}

/// Returns all CPU time of a process, rounded up to a clock tick for each of its two parts, in microseconds.
fn cpu_us(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap() + 1).sum();
    ticks * 10_000
}

/// Devices of all kinds, a disk that is read and written with `O_DIRECT` all the time (trap 1), a network card, two
/// NUMA nodes. Data that the disk has acknowledged is there on either host, and the image is sound in the end.
fn with_everything(version: QemuVersion) {
    let cluster = Cluster::new();
    let qemu = cluster.environment.qemu(version).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.qcow2");
    disk::known_content(&qemu, &image, "qcow2", 64).unwrap();
    let load = Load { disk_threads: 4, disk_writers: 2, disk_mib: 16, ..busy() };
    let mut spec =
        GuestSpec { qemu: version, numa_nodes: 2, ..GuestSpec::tiny("vm1", load) }.with_many_devices();
    spec.memory_mib = 256;
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "qcow2")));
    spec.devices.push(Device::Net(Net::new(1)));
    cluster.lab.b.tap("vm1").unwrap();
    let _guest = cluster.guest(&spec);
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = cluster.migrate("vm1", from, to, &[]);
        assert!(report["ram_blocks"].as_array().unwrap().len() > 4, "VGA and ROMs are there: {report:#}");
        cluster.assert_guest_whole(to, "vm1");
        let serial = cluster.serial(to, "vm1");
        serial.wait_for_disk_reads().unwrap();
        serial.wait_for_disk_writes().unwrap();
    }
    let pid = cluster.a.vm("vm1").unwrap()["pid"].as_u64().unwrap() as u32;
    lab::kill_pid(pid).unwrap();
    disk::is_sound(&qemu, &image).unwrap();
}

#[test]
fn all_devices_and_a_busy_disk() {
    with_everything(QemuVersion::Installed);
}

#[test]
fn all_devices_and_a_busy_disk_with_a_newer_qemu() {
    with_everything(newest(&Environment::discover()));
}

/// From a file of hugetlbfs into a memfd of huge pages, and from that into another. Before it, an attempt that is aborted
/// gives its huge pages back: there are too few for a third copy. One test for all versions, because they share the host's
/// huge pages.
#[test]
fn huge_pages_of_hugetlbfs_there_and_back() {
    let Some(_pages) = HugePages::reserve(300) else {
        not_tried("huge pages of hugetlbfs: none to be had");
        return;
    };
    for version in Environment::discover().qemu_versions() {
        let cluster = Cluster::new();
        let load = GuestSpec::tiny("vm1", busy());
        let _guest = cluster.guest(&GuestSpec { qemu: version, ram: Ram::Hugetlb, memory_mib: 256, ..load });
        let hybrid = ["migrate", "vm1", "--to", "b", "--policy", "hybrid", "--on-limit", "post-copy"];
        let report = cluster.a.cli(&hybrid).last_json();
        assert_eq!(report["outcome"], "aborted", "{report:#}");
        cluster.b.wait_settled();
        for (from, to) in [("a", "b"), ("b", "a")] {
            let report = cluster.migrate("vm1", from, to, &[]);
            assert_eq!(report["destination"]["ram_kind"], "memfd, pages of 2048 KiB", "{version:?}");
            cluster.assert_guest_whole(to, "vm1");
        }
    }
}

/// Huge pages that are reserved for a test, and released after it.
struct HugePages(String);

impl HugePages {
    const PATH: &str = "/proc/sys/vm/nr_hugepages";

    fn reserve(count: u64) -> Option<Self> {
        let before = std::fs::read_to_string(Self::PATH).ok()?;
        std::fs::write(Self::PATH, count.to_string()).ok()?;
        let pages = Self(before);
        let now: u64 = std::fs::read_to_string(Self::PATH).ok()?.trim().parse().ok()?;
        (now >= count).then_some(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::PATH, self.0.trim());
    }
}

/// A guest whose user has paused it stays paused (trap 17), there, back and there again, also after an attempt that was
/// aborted when its device state had been saved. Its disk, released at the first of these, is acquired again when it
/// resumes; for a copy QEMU acquires it alone, and not the image beside it that is only read.
fn paused_all_the_while(version: QemuVersion) {
    let cluster = Cluster::with(&Setup { fault_harness: true, pool: true, ..Setup::default() });
    let qemu = cluster.environment.qemu(version).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.qcow2");
    disk::known_content(&qemu, &image, "qcow2", 64).unwrap();
    let load = Load { disk_threads: 2, disk_mib: 8, ..busy() };
    let mut spec = GuestSpec { qemu: version, second_monitor: true, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "qcow2")));
    let read_only = image.with_file_name("read-only.raw");
    disk::known_content(&qemu, &read_only, "raw", 1).unwrap();
    let drive = format!("if=none,id=read-only,file={},format=raw,readonly=on", read_only.display());
    spec.extra = ["-drive", &drive, "-device", "virtio-blk-pci,drive=read-only"].map(str::to_owned).to_vec();
    let guest = cluster.guest(&spec);
    guest.monitor().unwrap().command("stop", &serde_json::json!({})).unwrap();

    let faults = cluster.faults.as_ref().unwrap();
    faults.want("destination/prepared/loaded:before-effects");
    let migration = cluster.migrate_slowly("vm1", "0");
    let held = faults.held(DEADLINE).unwrap();
    cluster.a.cli(&["cancel", "vm1"]).ok();
    assert_eq!(migration.wait_with_output().unwrap().status.code(), Some(1));
    held.release();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert_eq!(cluster.a.vm("vm1").unwrap()["state"], "paused", "{}", cluster.a.log());

    let moves = [("a", "b", "shared"), ("b", "a", "shared"), ("a", "b", "shared"), ("b", "a", "copy")];
    for (number, (from, to, disks)) in moves.into_iter().enumerate() {
        if number == 2 {
            let words = ["migrate", "vm1", "--to", to, "--disks", "copy", "--bandwidth", "1M"];
            let migration = cluster.a.begin(&words);
            cluster.wait_for_sent(1 << 20);
            cluster.a.cli(&["cancel", "vm1"]).ok();
            assert_eq!(migration.wait_with_output().unwrap().status.code(), Some(1));
            cluster.a.wait_settled();
            cluster.b.wait_settled();
        }
        let report = cluster.migrate("vm1", from, to, &["--disks", disks]);
        assert_eq!(
            (&report["run_state_before"], &cluster.agent(to).vm("vm1").unwrap()["state"]),
            (&"paused".into(), &"paused".into())
        );
    }
    let shown = cluster.a.cli(&["vm", "show", "vm1"]).ok().json();
    let mut monitor = lab::Monitor::connect(Path::new(shown["qmp"].as_str().unwrap())).unwrap();
    monitor.command("cont", &serde_json::json!({})).unwrap();
    drop(monitor);
    cluster.assert_guest_whole("a", "vm1");
    cluster.serial("a", "vm1").wait_for_disk_reads().unwrap();
}

#[test]
fn a_paused_guest_stays_paused() {
    paused_all_the_while(QemuVersion::Installed);
}

#[test]
fn a_paused_guest_stays_paused_with_a_newer_qemu() {
    paused_all_the_while(newest(&Environment::discover()));
}

/// The balloon inflates and deflates during the rounds (traps 3 and 5).
#[test]
fn a_balloon_that_moves_during_the_rounds() {
    let cluster =
        Cluster::with(&Setup { link: lab::Link::Limited { rate_bytes_per_s: 30 << 20 }, ..Setup::default() });
    let mut spec = GuestSpec { second_monitor: true, memory_mib: 320, ..GuestSpec::tiny("vm1", busy()) };
    spec.devices.push(Device::Balloon);
    let guest = cluster.guest(&spec);
    let mut monitor = guest.monitor().unwrap();
    let migration = cluster.a.begin(&["migrate", "vm1", "--to", "b", "--verify", "--on-limit", "stop"]);
    let in_rounds = || cluster.a.cli(&["migrations"]).ok().json()[0]["progress"]["phase"] == "pre-copy";
    cluster.wait_for_progress(|progress| progress["phase"] == "pre-copy");
    let mut during = Vec::new();
    'rounds: for mib in [200_u64, 320, 180, 300, 210, 320] {
        let size = serde_json::json!({ "value": mib << 20 });
        if monitor.command("balloon", &size).is_err() {
            break;
        }
        // Until the guest has done it.
        loop {
            let Ok(now) = monitor.command("query-balloon", &serde_json::json!({})) else { break 'rounds };
            if !in_rounds() {
                break 'rounds;
            }
            let actual = now["actual"].as_u64().unwrap();
            if during.last() != Some(&actual) {
                during.push(actual);
            }
            if actual == mib << 20 {
                break;
            }
        }
    }
    assert!(during.len() > 2, "it has not moved while rounds went on: {during:?}");
    assert!(migration.wait_with_output().unwrap().status.success(), "{}", cluster.a.log());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

/// A guest that reports its free pages: QEMU punches holes for them into the RAM by itself, all the time (traps 3 and
/// 20).
#[test]
fn a_guest_that_reports_its_free_pages_there_and_back() {
    let cluster = Cluster::new();
    let mut spec = GuestSpec {
        second_monitor: true,
        ram: Ram::Memfd,
        memory_mib: 320,
        ..GuestSpec::tiny("vm1", busy())
    };
    spec.extra =
        ["-device", "virtio-balloon-pci,id=reporter,free-page-reporting=on"].map(str::to_owned).to_vec();
    let guest = cluster.guest(&spec);
    let mut monitor = guest.monitor().unwrap();
    let path = serde_json::json!({ "path": "/machine/peripheral/reporter/virtio-backend" });
    let status = monitor.command("x-query-virtio-status", &path).unwrap();
    let agreed = status["guest-features"].to_string();
    assert!(agreed.contains("VIRTIO_BALLOON_F_REPORTING"), "the guest reports nothing: {status:#}");
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = cluster.migrate("vm1", from, to, &["--ram", "memfd"]);
        assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
        cluster.assert_guest_whole(to, "vm1");
    }
}

/// A cut in the middle of pre-copy: new connections, and unacknowledged pages once more (trap 7).
fn cut_and_resumed(plain: bool) {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let cluster = Cluster::with(&Setup { link, plain, ..Setup::default() });
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", busy()));
    cluster.migrate_through_a_cut("vm1", &[]);
    cluster.assert_guest_whole("b", "vm1");
}

#[test]
fn a_cut_link_is_mended_and_the_migration_goes_on() {
    cut_and_resumed(false);
}

#[test]
fn a_cut_link_is_mended_without_tls() {
    cut_and_resumed(true);
}

/// Between continents: answers are late, packets are lost and reordered. There and back.
#[test]
fn over_a_link_with_delay_and_loss() {
    let link = lab::Link::Emulated(lab::Settings {
        delay: Duration::from_millis(20),
        jitter: Duration::from_millis(2),
        loss: 0.001,
        ..lab::Settings::default()
    });
    let cluster = Cluster::with(&Setup { link, ..Setup::default() });
    let load = Load { fill_mib: 8, wss_mib: 2, rate_mib_per_s: 1, ..Load::default() };
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", load));
    for (from, to) in [("a", "b"), ("b", "a")] {
        cluster.migrate("vm1", from, to, &[]);
        cluster.assert_guest_whole(to, "vm1");
    }
    let lost = |direction| cluster.lab.emulator().unwrap().counts(direction).lost;
    assert!(lost(Direction::AToB) > 0 && lost(Direction::BToA) > 0, "nothing was lost");
}

/// A link that is too slow, then the cap is lifted during the migration; before that, a migration is cancelled.
#[test]
fn a_migration_is_cancelled_and_the_next_one_is_sped_up() {
    let cluster = Cluster::new();
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", busy()));
    let slow = ["migrate", "vm1", "--to", "b", "--verify", "--on-limit", "stop", "--bandwidth", "4MiB"];
    let migration = cluster.a.begin(&slow);
    cluster.wait_for_sent(4 << 20);
    let sizes = [&cluster.a, &cluster.b]
        .map(|agent| agent.cli(&["migrations"]).ok().json()[0]["progress"]["ram_bytes"].as_u64().unwrap());
    cluster.a.cli(&["cancel", "vm1"]).ok();
    assert_eq!(migration.wait_with_output().unwrap().status.code(), Some(1));
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    let bytes = |block: &serde_json::Value| block["bytes"].as_u64().unwrap();
    assert_eq!(sizes, [report["ram_blocks"].as_array().unwrap().iter().map(bytes).sum::<u64>(); 2]);
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert!(cluster.b.vm("vm1").is_none(), "nothing is left there");
    assert_eq!(cluster.a.vm("vm1").unwrap()["state"], "running");

    let migration = cluster.a.begin(&slow);
    cluster.wait_for_sent(4 << 20);
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "0"]).ok();
    assert!(migration.wait_with_output().unwrap().status.success(), "{}", cluster.a.log());
    cluster.assert_guest_whole("b", "vm1");
}

/// Real KVM where it works: a bare-metal guest that counts its passes, with one and with two processors.
#[test]
fn real_kvm() {
    if !Environment::discover().has_kvm() {
        not_tried("real KVM: no /dev/kvm");
        return;
    }
    for vcpus in [1, 2] {
        let cluster = Cluster::new();
        let guest = lab::Guest::start(
            &cluster.lab.a,
            &cluster.environment,
            &GuestSpec::bare("vm1", Accel::Kvm, vcpus),
        )
        .unwrap();
        let mut progress = lab::bare::PassProgress::default();
        let mut output = guest.serial().follow().unwrap();
        progress.wait(&mut output, vcpus as usize, 5, DEADLINE).unwrap();
        cluster.a.cli(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();
        cluster.migrate("vm1", "a", "b", &[]);
        let mut output = cluster.serial("b", "vm1").follow_from_now().unwrap();
        progress.wait(&mut output, vcpus as usize, 5, DEADLINE).unwrap();
        assert_eq!(progress.wrong, 0);
    }
}
