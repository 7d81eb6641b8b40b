//! Traps of `docs/traps.md` that need a whole QEMU and an unfavourable host: short of memory, with devices plugged at
//! the wrong time, with other processes in the guest's memory. Every migration compares all of memory by a path of its
//! own (`--verify`), and the guest itself checks every page that it wrote. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod common;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use common::{
    Accel, Cluster, CommandOutput, DEADLINE, Device, Guest, GuestSpec, Load, QemuVersion, Ram, Setup, busy,
    until,
};
use lab::{Monitor, Net, disk, not_tried};
use serde_json::{Value, json};
use tracee::maps::{Details, Mapping, detailed_mappings};
use tracee::{AddressRange, Process};

/// A user without any privilege.
const NOBODY: u32 = 65534;

/// Returns the largest mapping of a QEMU, except for its generated code: its guest's RAM.
fn ram_of(qemu: &Process) -> Mapping {
    let all = detailed_mappings(qemu).unwrap();
    let data = all.into_iter().filter(|one| one.readable && one.writable && !one.executable);
    data.max_by_key(|one| one.range.len()).unwrap()
}

fn details(qemu: &Process) -> Details {
    ram_of(qemu).details.unwrap()
}

/// Returns the process of a VM, on its present host.
fn qemu_of(cluster: &Cluster, agent: &str) -> Process {
    let shown = cluster.agent(agent).cli(&["vm", "show", "vm1"]).ok().json();
    Process::open(shown["pid"].as_u64().unwrap() as u32).unwrap()
}

/// Connects to the monitor of a VM that has arrived; the agent must have released it.
fn monitor_of(cluster: &Cluster, agent: &str) -> Monitor {
    let shown = cluster.agent(agent).cli(&["vm", "show", "vm1"]).ok().json();
    Monitor::connect(Path::new(shown["qmp"].as_str().unwrap())).unwrap()
}

fn result(migration: Child) -> CommandOutput {
    let output = migration.wait_with_output().unwrap();
    CommandOutput {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Asserts that the guest runs at its source as before, whole, and that nothing is left of the attempt.
#[track_caller]
fn assert_unharmed(cluster: &Cluster, guest: &Guest) {
    assert_nothing_left(cluster, guest);
    cluster.assert_guest_whole("a", "vm1");
}

/// Asserts that the guest runs at its source as before, and that nothing is left of the attempt, on either side.
#[track_caller]
fn assert_nothing_left(cluster: &Cluster, guest: &Guest) {
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    let vm = cluster.a.vm("vm1").unwrap();
    assert_eq!((&vm["state"], &vm["pid"]), (&json!("running"), &json!(guest.pid())));
    let qemu = Process::open(guest.pid()).unwrap();
    let tracked = detailed_mappings(&qemu).unwrap();
    assert!(
        !tracked.iter().any(|one| one.details.as_ref().unwrap().has_flag("uw")),
        "ranges are still tracked"
    );
    let open = qemu.descriptors().unwrap();
    assert!(!open.iter().any(|(_, file)| file.to_string_lossy().contains("userfaultfd")), "{open:?}");
    assert!(cluster.b.vm("vm1").is_none());
    assert!(common::entries(&cluster.b.directory.join("run/vms")).is_empty());
    let is_qemu = |pid: &u32| {
        fs::read_link(format!("/proc/{pid}/exe"))
            .is_ok_and(|exe| exe.to_string_lossy().contains("qemu-system"))
    };
    let left: Vec<u32> = cluster.lab.b.processes().unwrap().into_iter().filter(is_qemu).collect();
    assert!(left.is_empty(), "QEMUs {left:?} are left");
}

// ---- trap 3: a host that swaps

/// A swap file of the test's own, in use until this is dropped.
struct Swap(PathBuf);

impl Swap {
    /// Returns `None` where the kernel does not permit it.
    fn on(directory: &Path) -> Option<Self> {
        let path = directory.join("swap");
        let mut file = fs::File::create(&path).unwrap();
        // A file with holes would not be accepted.
        (0..384).for_each(|_| file.write_all(&vec![0; 1 << 20]).unwrap());
        drop(file);
        let run = |program: &str| Command::new(program).arg(&path).output().unwrap();
        assert!(run("mkswap").status.success(), "{}", path.display());
        let on = run("swapon");
        if on.status.success() {
            return Some(Self(path));
        }
        not_tried(format!("a host that swaps: {}", String::from_utf8_lossy(&on.stderr)));
        None
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let off = Command::new("swapoff").arg(&self.0).status();
        assert!(off.is_ok_and(|off| off.success()), "swap stays on: {}", self.0.display());
    }
}

/// The source's QEMU loses its memory to swap again and again, before the rounds and during them.
fn swapped_out(ram: Ram) {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let cluster = Cluster::with(&Setup { link, ..Setup::default() });
    let Some(_swap) = Swap::on(&cluster.lab.shared_directory().unwrap()) else { return };
    let guest = cluster.guest(&GuestSpec { ram, ..GuestSpec::tiny("vm1", busy()) });
    let qemu = Process::open(guest.pid()).unwrap();
    let ram = ram_of(&qemu).range;
    qemu.page_out(ram).unwrap();
    let before = details(&qemu).swapped;
    assert!(before > 0, "nothing is in swap before the rounds");

    let mut migration = cluster.migrate_slowly("vm1", "0");
    let in_rounds = || cluster.a.cli(&["migrations"]).ok().json()[0]["progress"]["phase"] == "pre-copy";
    let mut during = Vec::new();
    let part = 32 << 20;
    for start in (ram.start..ram.end).step_by(part as usize).cycle() {
        if migration.try_wait().unwrap().is_some() {
            break;
        }
        let was = in_rounds();
        // A part at a time, so that the guest makes progress. At the end this QEMU is gone.
        let part = AddressRange::new(start, ram.end.min(start + part));
        if qemu.page_out(part).is_err() {
            continue;
        }
        let Ok(all) = detailed_mappings(&qemu) else { continue };
        if was && in_rounds() {
            let swapped =
                all.iter().find(|one| one.range == ram).map(|one| one.details.as_ref().unwrap().swapped);
            during.extend(swapped);
        }
    }
    let result = result(migration);
    assert_eq!(result.code, 0, "{result:?}\n{}", cluster.a.log());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
    let least = during.iter().min().copied().unwrap_or(0);
    assert!(during.len() > 2 && least > 0, "not always in swap while rounds went on: {during:?}");
    cluster.assert_guest_whole("b", "vm1");
}

#[test]
fn anonymous_ram_on_a_host_that_swaps() {
    swapped_out(Ram::Anonymous);
}

#[test]
fn ram_in_a_memfd_on_a_host_that_swaps() {
    swapped_out(Ram::Memfd);
}

// ---- trap 12: hot-plug

/// A QMP command of the guest's user.
type UserCommand = (&'static str, Value);

/// The guest's user does that during the rounds: the migration ends with the reason, the guest keeps running at its
/// source, and a second attempt migrates it in its present state.
#[track_caller]
fn changed_during_the_rounds(cluster: &Cluster, guest: &Guest, orders: &[UserCommand], what: &str) {
    let migration = cluster.migrate_slowly("vm1", "4MiB");
    cluster.wait_for_sent(4 << 20);
    let mut monitor = guest.monitor().unwrap();
    for (command, arguments) in orders {
        monitor.command(command, arguments).unwrap();
    }
    drop(monitor);
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "0"]).ok();
    let result = result(migration);
    assert_eq!(result.code, 1, "{result:?}");
    let text = format!("{}{}", result.stdout, result.stderr);
    let reason = format!(
        "the guest's {what} changed during the migration: a device was plugged or unplugged; try again"
    );
    assert!(text.contains(&reason), "{reason:?} is missing: {result:#?}\n{}", cluster.a.log());
    assert_unharmed(cluster, guest);
}

/// Returns the names of plugged devices, from QEMU.
fn plugged(monitor: &mut Monitor) -> Vec<String> {
    let list = monitor.command("qom-list", &json!({ "path": "/machine/peripheral" })).unwrap();
    let names = list.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned());
    names.filter(|name| name != "type").collect()
}

#[test]
fn what_is_plugged_during_the_rounds_is_noticed() {
    let cluster = Cluster::new();
    let mut spec = GuestSpec { second_monitor: true, ..GuestSpec::tiny("vm1", busy()) };
    spec.devices.push(Device::Usb);
    // The guest's kernel keeps some of it for devices that could not reach plugged memory above 4 GiB.
    spec.memory_mib = 320;
    spec.extra = ["-m".to_owned(), format!("size={}M,slots=2,maxmem=1G", spec.memory_mib)].to_vec();
    let guest = cluster.guest(&spec);
    let tablet = json!({ "driver": "usb-tablet", "bus": "usb.0", "id": "late" });
    changed_during_the_rounds(&cluster, &guest, &[("device_add", tablet)], "devices");
    // An unplugged one is worse: the destination would load the state without an error, with a device that is not
    // there.
    changed_during_the_rounds(&cluster, &guest, &[("device_del", json!({ "id": "late" }))], "devices");
    let memory = json!({ "qom-type": "memory-backend-ram", "id": "more", "size": 128 << 20 });
    let dimm = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" });
    let orders = [("object-add", memory), ("device_add", dimm)];
    changed_during_the_rounds(&cluster, &guest, &orders, "memory");
    let there = plugged(&mut guest.monitor().unwrap());
    cluster.migrate("vm1", "a", "b", &[]);
    cluster.assert_guest_whole("b", "vm1");
    assert_eq!(plugged(&mut monitor_of(&cluster, "b")), there);
    assert!(there.contains(&"dimm".to_owned()));
}

// ---- trap 17: a guest that stops by itself

/// A guest that shuts down during the rounds is not migrated as if its user had paused it.
#[test]
fn a_guest_that_stops_by_itself_is_not_moved_as_a_paused_one() {
    let cluster = Cluster::new();
    let mut spec = GuestSpec { second_monitor: true, ..GuestSpec::tiny("vm1", busy()) };
    // A reset becomes the end of the guest, and QEMU keeps it.
    spec.extra = ["-no-reboot", "-no-shutdown"].map(str::to_owned).to_vec();
    let guest = cluster.guest(&spec);
    let migration = cluster.migrate_slowly("vm1", "4MiB");
    cluster.wait_for_sent(4 << 20);
    let mut monitor = guest.monitor().unwrap();
    monitor.command("system_reset", &json!({})).unwrap();
    let mut state = || monitor.command("query-status", &json!({})).unwrap()["status"].clone();
    while state() != "shutdown" {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "0"]).ok();
    let result = result(migration);
    assert_eq!(result.code, 1, "{result:?}");
    let text = format!("{}{}", result.stdout, result.stderr);
    assert!(text.contains("the guest is in run state shutdown; only running and paused"), "{result:#?}");
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert_eq!(state(), "shutdown");
    assert_eq!(cluster.a.vm("vm1").unwrap()["state"], "shutdown");
    assert!(cluster.b.vm("vm1").is_none());
}

// ---- trap 21: what QEMU keeps of a load for a reset

/// A guest whose network driver knows announcements boots anew at its new host, and moves on from there.
#[test]
fn a_guest_reboots_where_it_has_arrived() {
    for qemu in [QemuVersion::Installed, QemuVersion::Newer] {
        let cluster = Cluster::new();
        cluster.lab.b.tap(&Net::new(1).tap).unwrap();
        let mut spec = GuestSpec { qemu, ..GuestSpec::tiny("vm1", busy()) };
        spec.devices.push(Device::Net(Net::new(1)));
        let _guest = cluster.guest(&spec);
        for (from, to) in [("a", "b"), ("b", "a")] {
            cluster.migrate("vm1", from, to, &[]);
            let serial = cluster.serial(to, "vm1");
            let last = serial.next_tick().unwrap().n;
            monitor_of(&cluster, to).command("system_reset", &json!({})).unwrap();
            // Its ticks are counted from the boot.
            until("the guest has booted anew", || serial.next_tick().is_ok_and(|tick| tick.n < last));
            cluster.assert_guest_whole(to, "vm1");
        }
    }
}

// ---- trap 2: another process in the guest's memory

#[test]
fn a_vhost_user_back_end_is_found() {
    let cluster = Cluster::new();
    let directory = cluster.lab.shared_directory().unwrap();
    let (image, socket) = (directory.join("disk.raw"), directory.join("blk.sock"));
    let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap();
    disk::known_content(&qemu, &image, "raw", 64).unwrap();
    let words = [
        "qemu-storage-daemon".to_owned(),
        "--blockdev".to_owned(),
        format!("driver=file,node-name=disk0,filename={},read-only=on", image.display()),
        "--export".to_owned(),
        format!("type=vhost-user-blk,id=e,node-name=disk0,addr.type=unix,addr.path={}", socket.display()),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut daemon = cluster.lab.a.spawn("storage-daemon", &words).unwrap();
    // QEMU waits until its back end accepts connections.
    while !socket.exists() {
        assert!(daemon.is_running(), "{}", fs::read_to_string(daemon.log()).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let load = Load { disk_threads: 2, disk_mib: 16, ..busy() };
    let mut spec = GuestSpec { ram: Ram::Memfd, ..GuestSpec::tiny("vm1", load) };
    spec.extra =
        ["-chardev", &format!("socket,id=blk,path={}", socket.display())].map(str::to_owned).to_vec();
    spec.extra.extend(["-device", "vhost-user-blk-pci,id=vda,chardev=blk"].map(str::to_owned));
    let guest = cluster.guest(&spec);
    // The back end writes the data that the guest reads.
    guest.serial().wait_for_disk_reads().unwrap();

    let mapper = format!("qemu-storage-da (process {})", daemon.pid());
    for more in [&["--check"][..], &[]] {
        let result = cluster.a.cli(&[&["migrate", "vm1", "--to", "b"], more].concat());
        assert_eq!(result.code, 1, "{result:?}");
        let text = format!("{}{}", result.stdout, result.stderr);
        for word in ["other processes map the guest's memory", &mapper, "vhost-user"] {
            assert!(text.contains(word), "{word:?} is missing: {result:#?}");
        }
        assert_unharmed(&cluster, &guest);
    }
    assert!(daemon.is_running());
    let check = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]).json();
    let found = check["source_findings"].as_array().unwrap().iter();
    let codes: Vec<_> = found.map(|one| one["code"].clone()).collect();
    assert!(codes.contains(&json!("memory-shared")), "{check:#}");
}

// ---- trap 9: QEMUs without privileges

/// Asserts the user and the privileges of a process.
fn assert_unprivileged(qemu: &Process) {
    let status = qemu.read("status").unwrap();
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    let all = [NOBODY; 4].map(|user| user.to_string()).join("\t");
    assert_eq!((field("Uid:"), field("Gid:")), (all.clone(), all), "{status}");
    assert_eq!(field("CapEff:"), "0000000000000000");
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    if allowed.trim() != "0" {
        not_tried(
            "that user-mode faults are all that is asked for: this host permits every userfaultfd to everybody",
        );
    }
}

/// Makes space for the next guest: the one that was migrated ends, and files of the first QEMU are removed.
fn end(cluster: &Cluster, agent: &str, guest: &Guest) {
    lab::kill_pid(qemu_of(cluster, agent).pid()).unwrap();
    cluster.agent(agent).cli(&["vm", "forget", "vm1"]).ok();
    fs::remove_dir_all(guest.directory()).unwrap();
}

/// A QEMU that is started by a user of its own.
#[test]
fn a_qemu_of_an_unprivileged_user() {
    let cluster = Cluster::new();
    for ram in [Ram::Anonymous, Ram::Memfd] {
        let guest = cluster.guest(&GuestSpec { ram, user: Some(NOBODY), ..GuestSpec::tiny("vm1", busy()) });
        assert_unprivileged(&Process::open(guest.pid()).unwrap());
        cluster.migrate("vm1", "a", "b", &[]);
        cluster.assert_guest_whole("b", "vm1");
        end(&cluster, "b", &guest);
    }
}

/// A QEMU that drops its privileges after its start, by its arguments: they apply at the destination as well.
#[test]
fn a_qemu_that_drops_its_privileges() {
    let words = |version: &QemuVersion| match version {
        QemuVersion::Installed => ["-runas", "nobody"],
        QemuVersion::Newer => ["-run-with", "user=nobody"],
    };
    let cluster = Cluster::new();
    for qemu in cluster.environment.qemu_versions() {
        let extra = words(&qemu).map(str::to_owned).to_vec();
        let guest = cluster.guest(&GuestSpec { qemu, extra, ..GuestSpec::tiny("vm1", busy()) });
        for (from, to) in [("a", "b"), ("b", "a")] {
            assert_unprivileged(&qemu_of(&cluster, from));
            cluster.migrate("vm1", from, to, &[]);
            cluster.assert_guest_whole(to, "vm1");
        }
        assert_unprivileged(&qemu_of(&cluster, "a"));
        end(&cluster, "a", &guest);
    }
}

// ---- transparent huge pages

/// RAM that is really in huge pages is migrated there and back, and is in huge pages there, too.
#[test]
fn transparent_huge_pages() {
    let cluster = Cluster::new();
    let guest = cluster.guest(&GuestSpec::tiny("vm1", busy()));
    if details(&Process::open(guest.pid()).unwrap()).huge == 0 {
        not_tried("transparent huge pages: this host gives QEMU none");
        return;
    }
    for (from, to) in [("a", "b"), ("b", "a")] {
        let before = details(&qemu_of(&cluster, from));
        assert!(before.huge > 0, "{before:?}");
        cluster.migrate("vm1", from, to, &["--ram", "anonymous"]);
        cluster.assert_guest_whole(to, "vm1");
    }
}

// ---- trap 19: KVM that is there and does not work

/// The destination has a `/dev/kvm` that only can be opened, or not even that. The guest stays at the source.
#[test]
fn kvm_that_does_not_work_at_the_destination() {
    let mut cluster = Cluster::new();
    if !cluster.environment.has_kvm() {
        not_tried("KVM that does not work at the destination: there is none here to start from");
        return;
    }
    let guest =
        Guest::start(&cluster.lab.a, &cluster.environment, &GuestSpec::bare("vm1", Accel::Kvm, 1)).unwrap();
    let mut output = guest.serial().follow().unwrap();
    let mut progress = lab::bare::PassProgress::default();
    progress.wait(&mut output, 1, 1, DEADLINE).unwrap();
    cluster.a.cli(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();

    let closed = cluster.lab.b.directory().join("closed");
    let _listener = std::os::unix::net::UnixListener::bind(&closed).unwrap();
    for (kvm, words) in [
        (closed.to_str().unwrap(), ["kvm-missing", "no /dev/kvm that can be opened"]),
        ("/dev/null", ["QEMU does not start", "failed to initialize kvm"]),
    ] {
        cluster.b.kill();
        let instead = format!("mount --bind {kvm} /dev/kvm; exec \"$@\"");
        cluster.b.starter = ["unshare", "--mount", "sh", "-ec", &instead, "sh"].map(str::to_owned).to_vec();
        cluster.b.start();
        let result = cluster.a.cli(&["migrate", "vm1", "--to", "b"]);
        assert_eq!(result.code, 1, "{result:?}");
        let text = format!("{}{}", result.stdout, result.stderr);
        for word in words {
            assert!(text.contains(word), "{word:?} is missing: {result:#?}");
        }
        assert_nothing_left(&cluster, &guest);
        progress.wait(&mut output, 1, 1, DEADLINE).unwrap();
        assert_eq!(progress.wrong, 0);
    }
    cluster.b.kill();
    cluster.b.starter.clear();
    cluster.b.start();
    cluster.migrate("vm1", "a", "b", &[]);
}

// ---- trap 22: references that a look leaves

/// A device of a guest that was looked at, and has arrived, is freed once it is unplugged.
#[test]
fn a_device_can_be_unplugged_after_a_migration() {
    let cluster = Cluster::new();
    let devices = ["pcie-root-port,id=port1,chassis=1", "virtio-rng-pci,id=spare,bus=port1"];
    let extra = devices.iter().flat_map(|device| ["-device".to_owned(), (*device).to_owned()]).collect();
    let machine = "q35".to_owned();
    let _guest =
        cluster.guest(&GuestSpec { machine, second_monitor: true, extra, ..GuestSpec::tiny("vm1", busy()) });
    cluster.migrate("vm1", "a", "b", &[]);
    cluster.assert_guest_whole("b", "vm1");
    let mut monitor = monitor_of(&cluster, "b");
    monitor.set_patience(DEADLINE).unwrap();
    monitor.command("device_del", &json!({ "id": "spare" })).unwrap();
    let freed = |data: &Value| data["device"] == "spare";
    monitor.wait_for_event(|event| event.name == "DEVICE_DELETED" && freed(&event.data)).unwrap();
}
