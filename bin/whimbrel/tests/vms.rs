//! VMs from files, and separation of VMs on their host. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Agent, Cluster, GuestSpec};
use serde_json::{Value, json};

/// QEMUs that were started for a test, ended with it.
struct Qemus(Vec<u64>);

impl Drop for Qemus {
    fn drop(&mut self) {
        for pid in &self.0 {
            // Most have ended already.
            let _ = std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).output();
        }
    }
}

/// Writes the file of a VM with firmware alone, in the first host's directory.
fn file(cluster: &Cluster, name: &str) -> PathBuf {
    let path = cluster.a.directory.join(format!("{name}.toml"));
    let args = r#"["-machine", "pc-i440fx-7.2,accel=tcg", "-m", "64", "-display", "none"]"#;
    fs::write(&path, format!("name = {name:?}\nargs = {args}\n")).unwrap();
    path
}

/// Writes the file of a VM with firmware and a disk.
fn with_disk(cluster: &Cluster, name: &str, qemu: &lab::Qemu, image: &Path) -> PathBuf {
    let path = cluster.a.directory.join(format!("{name}.toml"));
    let drive = format!("file={},format=qcow2,if=virtio,cache=none", image.display());
    let mut args: Vec<String> =
        ["-machine", "pc-i440fx-7.2,accel=tcg", "-m", "64", "-display", "none", "-drive", &drive]
            .map(str::to_owned)
            .to_vec();
    for data in &qemu.data_dirs {
        args.extend(["-L".to_owned(), data.to_str().unwrap().to_owned()]);
    }
    let program = qemu.program.to_str().unwrap();
    fs::write(&path, format!("name = {name:?}\nqemu = {program:?}\nargs = {args:?}\n")).unwrap();
    path
}

fn run(agent: &Agent, file: &Path) -> Value {
    agent.cli(&["vm", "run", file.to_str().unwrap()]).ok().json()
}

fn pid(vm: &Value) -> u64 {
    vm["pid"].as_u64().unwrap()
}

fn qmp(agent: &Agent, vm: &str) -> PathBuf {
    agent.cli(&["vm", "show", vm]).ok().json()["qmp"].as_str().unwrap().into()
}

/// A QEMU that keeps running after its VM was forgotten keeps its monitor and its log, also if its name is used again.
#[test]
fn a_forgotten_vm_keeps_its_place() {
    let cluster = Cluster::new();
    let (a, file) = (&cluster.a, file(&cluster, "vm1"));
    let vm = run(a, &file);
    let mut qemus = Qemus(vec![pid(&vm)]);
    let monitor = qmp(a, "vm1");
    let log = monitor.with_file_name("whimbrel-qemu.log");
    fs::write(&log, "a line of the first one\n").unwrap();
    a.cli(&["vm", "forget", "vm1"]).ok();

    let second = a.cli(&["vm", "run", file.to_str().unwrap()]);
    assert_eq!((second.code, &second.json()["kind"]), (1, &"conflict".into()), "{second:?}");
    let text = second.json().to_string();
    for words in [format!("process {}", pid(&vm)), format!("vm adopt --pid {}", pid(&vm))] {
        assert!(text.contains(&words), "{words:?} is missing in {text}");
    }
    assert_eq!(fs::read_to_string(&log).unwrap(), "a line of the first one\n");
    assert!(a.vm("vm1").is_none());
    a.cli(&["vm", "adopt", "--pid", &pid(&vm).to_string()]).ok();
    assert_eq!((pid(&a.vm("vm1").unwrap()), qmp(a, "vm1")), (pid(&vm), monitor.clone()));
    assert_eq!(a.vm("vm1").unwrap()["state"], "running");

    // Once it is gone, its directory is free.
    lab::Monitor::connect(&monitor).unwrap().command("quit", &json!({})).unwrap();
    common::until("the VM is gone", || a.vm("vm1").unwrap()["state"] == "gone");
    let next = run(a, &file);
    qemus.0.push(pid(&next));
    assert_eq!((a.vm("vm1").unwrap()["state"].as_str(), qmp(a, "vm1")), (Some("running"), monitor));
}

/// A VM that arrives never takes another one's directory, with any name.
#[test]
fn an_arriving_vm_never_takes_another_directory() {
    let cluster = Cluster::new();
    let here = run(&cluster.a, &file(&cluster, "vm1"));
    let there = run(&cluster.b, &file(&cluster, "vm1-1"));
    let mut qemus = Qemus(vec![pid(&here), pid(&there)]);
    let monitor = qmp(&cluster.b, "vm1-1");
    let report = cluster.migrate("vm1", "a", "b", &[]);
    qemus.0.push(pid(&cluster.b.vm("vm1").unwrap()));
    assert_eq!(report["epoch"], 1);
    for vm in ["vm1", "vm1-1"] {
        assert_eq!(cluster.b.vm(vm).unwrap()["state"], "running", "{vm}");
    }
    assert!(monitor.exists() && qmp(&cluster.b, "vm1") != monitor);
}

/// A guest that has never run, with a disk: it stays paused there and back, and then it can be continued.
#[test]
fn one_that_was_started_paused_is_moved_paused() {
    let cluster = Cluster::new();
    for version in cluster.environment.qemu_versions() {
        let qemu = cluster.environment.qemu(version).unwrap();
        let image = cluster.lab.shared_directory().unwrap().join(format!("{version:?}.qcow2"));
        lab::disk::known_content(&qemu, &image, "qcow2", 16).unwrap();
        let name = format!("paused-{version:?}").to_lowercase();
        let file = with_disk(&cluster, &name, &qemu, &image);
        let vm = cluster.a.cli(&["vm", "run", file.to_str().unwrap(), "--paused"]).ok().json();
        let mut qemus = Qemus(vec![pid(&vm)]);
        assert_eq!(vm["state"], "prelaunch", "{version:?}");
        for (from, to) in [("a", "b"), ("b", "a")] {
            let report = cluster.migrate(&name, from, to, &[]);
            assert_eq!(report["verification"]["different_chunks"], 0, "{version:?}: {report:#}");
            let arrived = cluster.agent(to).vm(&name).unwrap();
            qemus.0.push(pid(&arrived));
            assert_eq!(arrived["state"], "paused", "{version:?}");
        }
        let mut monitor = lab::Monitor::connect(&qmp(&cluster.a, &name)).unwrap();
        monitor.command("cont", &json!({})).unwrap();
        drop(monitor);
        assert_eq!(cluster.a.vm(&name).unwrap()["state"], "running", "{version:?}");
    }
}

/// The example of the manual, except for parts that this machine does not support, starts and migrates.
#[test]
fn the_example_of_a_vm_file_runs_and_moves() {
    let cluster = Cluster::new();
    let image = cluster.lab.shared_directory().unwrap().join("web1.qcow2");
    let qemu = cluster.environment.qemu(common::QemuVersion::Installed).unwrap();
    lab::disk::known_content(&qemu, &image, "qcow2", 16).unwrap();
    for host in [&cluster.lab.a, &cluster.lab.b] {
        host.tap("web1").unwrap();
    }
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/vm.example.toml");
    let mut text = fs::read_to_string(example).unwrap();
    for (theirs, ours) in [
        ("accel=kvm", "accel=tcg"),
        ("\"2G\"", "\"256M\""),
        ("/srv/images/web1.qcow2", image.to_str().unwrap()),
    ] {
        assert!(text.contains(theirs), "{theirs}");
        text = text.replace(theirs, ours);
    }
    let file = cluster.a.directory.join("web1.toml");
    fs::write(&file, text).unwrap();
    let mut qemus = Qemus(vec![pid(&run(&cluster.a, &file))]);
    for (from, to) in [("a", "b"), ("b", "a")] {
        cluster.migrate("web1", from, to, &[]);
        let vm = cluster.agent(to).vm("web1").unwrap();
        qemus.0.push(pid(&vm));
        assert_eq!(vm["state"], "running");
    }
}

// ---- the ownership registry

/// Returns a cluster with a registry, and a guest that was migrated to `b` and has ended there.
fn ended_at_b() -> (Cluster, GuestSpec) {
    let cluster = Cluster::with(&common::Setup { witness: true, ..common::Setup::default() });
    let spec = GuestSpec::tiny("vm1", common::Load::default());
    let guest = cluster.guest(&spec);
    cluster.migrate("vm1", "a", "b", &[]);
    lab::kill_pid(pid(&cluster.b.vm("vm1").unwrap()) as u32).unwrap();
    fs::remove_dir_all(guest.directory()).unwrap();
    (cluster, spec)
}

/// Forgetting a VM that has ended releases it: it may be started again anywhere.
#[test]
fn a_vm_that_ended_and_was_forgotten_is_released() {
    let (cluster, spec) = ended_at_b();
    let forgotten = cluster.b.cli(&["vm", "forget", "vm1"]).ok().json();
    assert_eq!((&forgotten["released"], &forgotten["pid"]), (&true.into(), &Value::Null));
    let _guest = cluster.guest(&spec);
    cluster.migrate("vm1", "a", "b", &[]);
    cluster.assert_guest_whole("b", "vm1");
    cluster.migrate("vm1", "b", "a", &[]);
    // A VM that keeps running stays that host's.
    let goes_on = pid(&cluster.a.vm("vm1").unwrap());
    let forgotten = cluster.a.cli(&["vm", "forget", "vm1"]).ok().json();
    assert_eq!((&forgotten["released"], forgotten["pid"].as_u64()), (&Value::Null, Some(goes_on)));
}

/// A wrong owner is found by `--check`, and corrected by an operator who has read the risk.
#[test]
fn an_owner_that_is_wrong_is_corrected() {
    let (cluster, spec) = ended_at_b();
    let refused = cluster.a.cli(&["vm", "run", file(&cluster, "vm1").to_str().unwrap()]);
    assert!(refused.code == 1 && refused.stdout.contains("belongs to b"), "{refused:?}");
    let _guest = cluster.guest(&spec);
    let found = |words: &[&str]| {
        let result = cluster.a.cli(words);
        assert_eq!(result.code, 1, "{result:?}");
        let result = result.json();
        let of = |name: &str| result[name].as_array().cloned().unwrap_or_default();
        let all = [of("source_findings"), of("destination_findings"), of("findings")].concat();
        all.into_iter().filter(|one| one["severity"] == "blocker").collect::<Vec<_>>()
    };
    let check = found(&["migrate", "vm1", "--to", "b", "--check"]);
    let owner = check.iter().find(|one| one["code"] == "owned-elsewhere").unwrap();
    assert!(owner["advice"].as_str().unwrap().contains("vm claim vm1"), "{owner}");
    assert_eq!(found(&["migrate", "vm1", "--to", "b"]), std::slice::from_ref(owner));

    let result = cluster.a.cli(&["vm", "claim", "vm1"]);
    assert_eq!(result.code, 1, "{result:?}");
    assert!(!result.json()["risked"].as_array().unwrap().is_empty(), "{result:?}");
    assert!(!found(&["migrate", "vm1", "--to", "b"]).is_empty(), "nothing was done");
    let done = cluster.a.cli(&["vm", "claim", "vm1", "--accept-risk"]).ok().json();
    assert_eq!((&done["done"], &done["owner"]), (&true.into(), &"b".into()));
    // A VM that has ended there does not belong to the other host any longer.
    assert_eq!(cluster.b.cli(&["vm", "forget", "vm1"]).ok().json()["released"], Value::Null);
    assert!(cluster.a.cli(&["vm", "claim", "vm1"]).ok().json()["risked"].as_array().unwrap().is_empty());
    cluster.migrate("vm1", "a", "b", &[]);
    cluster.assert_guest_whole("b", "vm1");
    cluster.migrate("vm1", "b", "a", &[]);
}

// ---- VMs that end during a migration

/// Action by which a guest ends.
type End<'a> = &'a dyn Fn(&common::Guest);

/// The headline reports the VM's outcome, and its exit code is its own; the next VM of that name migrates.
#[test]
fn a_vm_that_ends_while_it_is_moved() {
    let cluster = Cluster::new();
    // Written to the port that the firmware has chosen for it, this is how a guest powers off (ACPI, S5).
    let power_off = json!({"command-line": "o /w 0x604 0x2000"});
    let monitor = |guest: &common::Guest| guest.monitor().unwrap();
    let ends: [(End<'_>, &str); 3] = [
        (&|guest| drop(monitor(guest).command("human-monitor-command", &power_off)), "shut itself down"),
        (&|guest| drop(monitor(guest).command("quit", &json!({}))), "a quit request"),
        (&|guest| lab::kill_pid(guest.pid()).unwrap(), "crashed, or was killed"),
    ];
    for (end, reason) in ends {
        let load = common::Load { fill_mib: 16, ..common::Load::default() };
        let spec = GuestSpec { second_monitor: true, ..GuestSpec::tiny("vm1", load) };
        let guest = cluster.guest(&spec);
        let migration = cluster.migrate_slowly("vm1", "4MiB");
        cluster.wait_for_sent(1 << 20);
        end(&guest);
        assert_eq!(migration.wait_with_output().unwrap().status.code(), Some(4), "{}", cluster.a.log());
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        let report = cluster.a.cli(&["report", "vm1"]).ok().json();
        assert_eq!(report["outcome"], "vm-ended", "{report:#}");
        assert!(report["reason"].as_str().unwrap().contains(reason), "{report:#}");
        let last = cluster.a.cli(&["migrations"]).ok().json();
        assert_eq!((&last[0]["standing"], &last[0]["state"]), (&"vm-ended".into(), &"aborted".into()));
        assert_eq!(cluster.a.vm("vm1").unwrap()["state"], "gone");
        assert!(cluster.b.vm("vm1").is_none());
        cluster.a.cli(&["vm", "forget", "vm1"]).ok();
        fs::remove_dir_all(guest.directory()).unwrap();
    }
}

// ---- human-readable output of QEMU

/// A log continues at the guest's host, and lines written at each host stay there.
#[test]
fn logs_stay_where_they_were_written() {
    let cluster = Cluster::new();
    let at_source = cluster.lab.a.directory().join("debug.log");
    let mut spec = GuestSpec::tiny("vm1", common::Load::default());
    spec.extra = [
        "-chardev".to_owned(),
        format!("file,id=debug,path={}", at_source.display()),
        "-device".to_owned(),
        "isa-debugcon,iobase=0x402,chardev=debug".to_owned(),
    ]
    .into();
    let _guest = cluster.guest(&spec);
    let say = |agent: &Agent, word: u8| {
        let write = json!({"command-line": format!("o /b 0x402 {word}")});
        let mut monitor = lab::Monitor::connect(&qmp(agent, "vm1")).unwrap();
        monitor.command("human-monitor-command", &write).unwrap();
    };
    let logs = |agent: &Agent, epoch: u64| agent.directory.join(format!("state/logs/vm1@{epoch}/debug.log"));
    let there = logs(&cluster.b, 1);
    let report = cluster.migrate("vm1", "a", "b", &[]);
    let is_named = |finding: &Value| finding["what"].as_str().unwrap().contains(there.to_str().unwrap());
    assert!(report["findings"].as_array().unwrap().iter().any(is_named), "{report:#}");
    say(&cluster.b, b'B');
    assert_eq!(fs::read_to_string(&there).unwrap(), "B");
    cluster.migrate("vm1", "b", "a", &[]);
    assert_eq!(fs::read_to_string(&there).unwrap(), "B", "it stays when the guest has left");
    say(&cluster.a, b'A');
    cluster.migrate("vm1", "a", "b", &[]);
    assert_eq!(fs::read_to_string(logs(&cluster.a, 2)).unwrap(), "A");
    // An empty one is not copied.
    cluster.migrate("vm1", "b", "a", &[]);
    assert!(!logs(&cluster.b, 3).exists());
    assert!(at_source.exists());
}
