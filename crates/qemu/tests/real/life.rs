//! Start and search of QEMUs, and pre-flight checks of real ones.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use whimbrel_qemu::cmdline;
use whimbrel_qemu::command::{HostRules, build, monitor};
use whimbrel_qemu::device_state::try_save;
use whimbrel_qemu::find::{FindError, Selector, connect, connect_at, find, list};
use whimbrel_qemu::preflight::{Finding, Severity, check, check_source, files, gather};
use whimbrel_qemu::process::{Launch, StartError, start};
use whimbrel_qemu::qmp::{Qmp, QmpError};
use whimbrel_qemu::ram::ram_blocks;
use whimbrel_qemu::tree::compare;
use whimbrel_qemu::vmfile::VmFile;

use crate::support::{Vm, args, deadline, launch, qcow2, ticker_disk, until, versions};

fn is_blocker(finding: &Finding) -> bool {
    finding.severity == Severity::Blocker
}

/// The error names the directory, and not the programs, which exist.
#[test]
fn a_directory_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let gone = dir.path().join("gone");
    let launch = Launch {
        argv: vec!["qemu-system-x86_64".into()],
        env: Vec::new(),
        cwd: Some(gone.clone()),
        log: dir.path().join("log"),
        qmp: dir.path().join("qmp"),
        scope: None,
        oom_score_adj: 0,
    };
    let error = start(&launch, deadline()).unwrap_err();
    assert!(matches!(&error, StartError::Directory { path, .. } if *path == gone), "{error}");
    assert!(error.to_string().contains(gone.to_str().unwrap()), "{error}");
}

/// A process that ends with its test.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A QEMU without a guest shows the effect of an unlisted device on one with a guest.
#[test]
fn a_device_that_ends_qemu_when_it_is_saved_is_found_out() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        for (device, is_saved) in [("e1000", true), ("pci-serial-2x", false), ("vmbus-bridge", false)] {
            let words = format!("-machine pc -m 32 -S -incoming defer -device {device}");
            let mut waiting = version.start(dir.path(), device, &args(&words));
            assert_eq!(try_save(&mut waiting.qmp).is_ok(), is_saved, "{device}");
        }
    }
}

/// Two QEMUs, each with a monitor of the same path.
#[test]
fn a_monitor_of_another_qemu_is_not_taken_for_the_guests() {
    let Some(version) = versions().into_iter().next() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("same.qmp");
    let monitor = format!("unix:{},server=on,wait=off", path.display());
    let of = |name: &str| args(&format!("-machine none -name {name} -qmp {monitor}"));
    let first = version.start(dir.path(), "first", &of("first"));
    let name = |qmp: &mut Qmp| qmp.execute::<Value>("query-name", Value::Null).unwrap()["name"].clone();

    // In a mount namespace of its own the path is another file.
    let mut argv = vec!["-m".to_owned(), "sh".to_owned(), "-c".to_owned()];
    argv.push(format!("mount -t tmpfs none {} && exec \"$@\"", dir.path().display()));
    argv.push("sh".to_owned());
    argv.extend(version.argv().into_iter().map(|word| word.into_string().unwrap()));
    argv.extend(args(&format!("-accel tcg -display none -machine none -name elsewhere -qmp {monitor}")));
    let mut child = Killed(Command::new("unshare").args(argv).spawn().unwrap());
    let pid = child.0.id();
    let listening = || {
        let found = find(&Selector::Pid(pid)).ok()?;
        found.monitors.iter().any(|monitor| monitor.listening).then_some(found)
    };
    let elsewhere = loop {
        assert!(child.0.try_wait().unwrap().is_none(), "QEMU has ended");
        if let Some(found) = listening() {
            break found;
        }
        std::thread::yield_now();
    };
    let mut qmp = connect(&elsewhere, Duration::from_secs(20)).unwrap();
    assert_eq!(name(&mut qmp), "elsewhere");
    let error = connect_at(pid, &path, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, QmpError::WrongProcess { pid, .. } if pid == first.pid()), "{error}");
    drop(child);

    // A socket that has replaced the first one's. (This test holds the first one's other monitor.)
    std::fs::remove_file(&path).unwrap();
    let second = version.start(dir.path(), "second", &of("second"));
    let process = find(&Selector::Pid(first.pid())).unwrap();
    let error = connect(&process, Duration::from_millis(50)).unwrap_err();
    let FindError::Held { source, .. } = error else { panic!("{error}") };
    let theirs = matches!(source, QmpError::WrongProcess { pid, .. } if pid == second.pid());
    assert!(theirs || matches!(source, QmpError::Busy { .. }), "{source}");
    let error = connect_at(first.pid(), &path, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, QmpError::WrongProcess { pid, .. } if pid == second.pid()), "{error}");
    let mut qmp = connect_at(second.pid(), &path, Duration::from_secs(20)).unwrap();
    assert_eq!(name(&mut qmp), "second");
}

#[test]
fn a_guest_is_found_by_process_socket_and_name() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        let name = format!("find-{}-{}", version.name, std::process::id());
        let second = dir.path().join("second.qmp");
        let mut vm = version.start(
            dir.path(),
            "a",
            &args(&format!(
                "-machine none -name guest={name},debug-threads=on -chardev socket,id=m,path=second.qmp,server=on,wait=off
                 -mon chardev=m,mode=control -monitor unix:human,server=on,wait=off"
            )),
        );
        let by_name = find(&Selector::Name(name.clone())).unwrap();
        assert_eq!(by_name, find(&Selector::Pid(vm.pid())).unwrap());
        assert_eq!(by_name, find(&Selector::Socket(second.clone())).unwrap());
        assert!(list().contains(&by_name));
        assert!(
            by_name.binary.is_absolute() && by_name.binary.ends_with(version.binary.file_name().unwrap())
        );
        assert_eq!(by_name.start_time_ticks, vm.started.start_time_ticks);
        // The human monitor is not listed; the test holds the first one.
        let monitors: Vec<_> =
            by_name.monitors.iter().map(|m| (m.path.clone(), m.listening, m.held)).collect();
        assert_eq!(monitors, [(dir.path().join("a.qmp"), true, true), (second.clone(), true, false)]);
        let held = connect(&by_name, Duration::from_secs(20)).unwrap();
        assert_eq!(held.path(), second);
        let now = find(&Selector::Pid(vm.pid())).unwrap();
        let error = connect(&now, Duration::from_secs(20)).unwrap_err();
        assert!(matches!(error, FindError::Held { source: QmpError::Busy { .. }, .. }), "{error}");

        let twin = version.start(dir.path(), "b", &args(&format!("-machine none -name {name}")));
        let error = find(&Selector::Name(name.clone())).unwrap_err();
        assert!(
            matches!(&error, FindError::Several { which, .. } if which.contains(&twin.pid().to_string()))
        );
        vm.command("quit", Value::Null);
        until("its process has gone", || find(&Selector::Pid(vm.pid())).is_err());
    }
    let error = find(&Selector::Name("no such guest".to_owned())).unwrap_err();
    assert!(matches!(error, FindError::None { .. }));
    assert!(matches!(find(&Selector::Pid(std::process::id())), Err(FindError::None { .. })));
}

#[test]
fn guests_of_libvirt_are_recognised() {
    let Some(version) = versions().pop() else { return };
    let dir = tempfile::tempdir().unwrap();
    // A monitor with libvirt's name.
    let path = dir.path().join("monitor.sock");
    let argv = version
        .argv()
        .into_iter()
        .chain(
            args("-machine none -display none -mon chardev=charmonitor,mode=control")
                .into_iter()
                .map(Into::into),
        )
        .chain([
            "-chardev".into(),
            format!("socket,id=charmonitor,path={},server=on,wait=off", path.display()).into(),
        ])
        .collect();
    let vm = launch(dir.path(), "a", argv, path);
    let process = find(&Selector::Pid(vm.pid())).unwrap();
    let error = connect(&process, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, FindError::HeldByLibvirt { .. }), "{error}");
    let without = version.start(dir.path(), "b", &args("-machine none"));
    let mut process = find(&Selector::Pid(without.pid())).unwrap();
    process.monitors.clear();
    assert!(matches!(connect(&process, Duration::from_secs(1)), Err(FindError::NoMonitor { .. })));
}

#[test]
fn errors_at_the_start_are_reported() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        for (options, reason) in [
            (
                format!("-machine pc -nodefaults -netdev user,id=n,hostfwd=tcp:127.0.0.1:{port}-:22"),
                "host forwarding",
            ),
            ("-frobnicate".to_owned(), "invalid option"),
            ("-machine pc -drive file=/nonexistent/disk.img".to_owned(), "/nonexistent/disk.img"),
        ] {
            let mut argv = version.argv();
            argv.extend(args(&options).into_iter().map(Into::into));
            argv.extend(["-display", "none", "-qmp", "unix:q,server=on,wait=off"].map(Into::into));
            let launch = Launch {
                argv,
                env: Vec::new(),
                cwd: Some(dir.path().to_owned()),
                log: dir.path().join("log"),
                qmp: dir.path().join("q"),
                scope: None,
                oom_score_adj: 0,
            };
            let error = start(&launch, deadline()).unwrap_err();
            assert!(matches!(&error, StartError::Ended { log, .. } if log.contains(reason)), "{error}");
        }
    }
}

#[test]
fn a_guest_from_a_file_leads_its_own_session() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        let options: Vec<String> = version.argv()[1..]
            .iter()
            .map(|word| word.to_str().unwrap().to_owned())
            .chain(args("-machine none -display none"))
            .collect();
        let text = format!(
            "name = \"from-file\"\nqemu = {:?}\nargs = {options:?}\n[env]\nWHIMBREL_TEST = \"yes\"\n",
            version.binary
        );
        let file = VmFile::parse(&text, &PathBuf::from("a.toml")).unwrap();
        let launch = file.launch(dir.path());
        let (started, qmp) = start(&launch, deadline()).unwrap();
        let vm = Vm { qmp, started, dir: dir.path().to_owned() };
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", vm.pid())).unwrap();
        let session: u32 =
            stat.rsplit_once(')').unwrap().1.split_whitespace().nth(3).unwrap().parse().unwrap();
        assert_eq!(session, vm.pid(), "it outlives whoever started it");
        let environment = std::fs::read(format!("/proc/{}/environ", vm.pid())).unwrap();
        assert!(String::from_utf8_lossy(&environment).contains("WHIMBREL_TEST=yes"));
        let process = find(&Selector::Pid(vm.pid())).unwrap();
        assert_eq!(process.name.as_deref(), Some("from-file"));
        assert_eq!(process.monitors.len(), 1);
    }
}

#[test]
fn every_option_of_qemus_help_is_in_the_table() {
    for version in versions() {
        let output = Command::new(&version.binary).arg("-help").output().unwrap();
        let help = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut seen = 0;
        for line in help.lines().filter(|line| line.starts_with('-') && !line.starts_with("--")) {
            // E.g. `-h or -help     display this help and exit`, `-fda/-fdb file  use …`.
            let first = line.split(['\t', ' ']).next().unwrap_or_default();
            for name in first.split('/').map(|name| name.trim_start_matches('-')) {
                if ["h", "help", "version", "audio-help"].contains(&name) || name.is_empty() {
                    continue;
                }
                seen += 1;
                let option_spec = cmdline::parse(&[format!("-{name}"), "VALUE".to_owned()]);
                assert!(
                    cmdline::option_spec(&option_spec[0].name).is_some(),
                    "-{name} of {line:?} is not in the table"
                );
            }
        }
        assert!(seen > 70, "{seen}");
    }
}

/// A blocker that saving the device state does not check (trap 13): an image format that QEMU itself does not
/// migrate.
#[test]
fn qemus_own_migration_blockers_are_blockers() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("d.vdi");
        let made =
            Command::new("qemu-img").args(["create", "-q", "-f", "vdi"]).arg(&image).arg("1M").status();
        assert!(made.unwrap().success());
        let drive = "-machine q35 -drive file=d.vdi,format=vdi,if=virtio";
        let mut source = version.start(dir.path(), "a", &args(drive));
        let process = find(&Selector::Pid(source.pid())).unwrap();
        let facts = gather::source(&mut source.qmp, &process, Vec::new()).unwrap();
        let found = check_source(&facts);
        let blocked = found.iter().find(|finding| finding.code == "qemu-refuses");
        let blocked = blocked.unwrap_or_else(|| panic!("{found:#?}"));
        assert_eq!(blocked.severity, Severity::Blocker);
        assert!(blocked.what.contains("vdi format"), "{blocked}");
    }
}

#[test]
fn preflight_of_a_real_guest() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        let boot = ticker_disk(dir.path());
        qcow2(&dir.path().join("d.qcow2"), "1M");
        let mut source = version.start(
            dir.path(),
            "a",
            &args(&format!(
                "-machine q35 -smp 1,maxcpus=2 -m 64 -usb -drive file={boot},format=raw,if=ide -drive file=d.qcow2,if=virtio,cache=none,file.locking=off
                 -netdev tap,id=t0,ifname=whq-none,script=/bin/true,downscript=no -device virtio-net-pci,netdev=t0"
            )),
        );
        let process = find(&Selector::Pid(source.pid())).unwrap();
        let run_dir = dir.path().join("run");
        std::fs::create_dir(&run_dir).unwrap();
        let rules = HostRules {
            data_dirs: version.data.clone(),
            tap: [("whq-none".to_owned(), "whq-other".to_owned())].into(),
            ..HostRules::new(&version.binary, &run_dir)
        };
        let blocks = ram_blocks(&mut source.qmp, process.pid).unwrap();
        let facts = gather::source(&mut source.qmp, &process, blocks).unwrap();
        let files = files::needed_files(&facts.vm);
        assert_eq!(files.len(), 2);
        let mut probe = version.start(dir.path(), "probe", &args("-machine none"));
        let emulator = gather::emulator(&mut probe.qmp).unwrap();
        let mut there = gather::destination(&emulator, &facts.vm, &files, &rules, &[], Vec::new());
        let findings = check(&facts, &there);
        let codes: Vec<&str> = findings.iter().map(|finding| finding.code.as_str()).collect();
        assert!(!findings.iter().any(is_blocker), "{findings:#?}");
        assert_eq!(codes, ["disk-unlocked"], "{findings:#?}");

        // A started destination provides more facts.
        let built = build(&facts.vm, &rules).unwrap();
        let mut destination = launch(&run_dir, "q", built.argv, built.qmp);
        let pid = destination.pid();
        there.ram_blocks = Some(ram_blocks(&mut destination.qmp, pid).unwrap());
        there.device_differences = Some(compare(&mut source.qmp, &mut destination.qmp).unwrap());
        there.cpu_unavailable =
            Some(whimbrel_qemu::control::cpu_unavailable_features(&mut destination.qmp).unwrap());
        assert!(!check(&facts, &there).iter().any(is_blocker));

        // A device that is plugged in the meantime is detected.
        source
            .command("device_add", json!({"driver": "usb-tablet", "id": "late"}))
            .as_null()
            .unwrap_or_default();
        let changed = compare(&mut source.qmp, &mut destination.qmp).unwrap();
        assert_eq!(changed.len(), 1, "{changed:#?}");
        there.device_differences = Some(changed);
        let findings = check(&facts, &there);
        assert_eq!(findings[0].code, "devices-differ");
        assert_eq!(findings[0].severity, Severity::Blocker);
    }
}

#[test]
fn a_stopped_qemu_is_a_timeout_and_not_a_hang() {
    let Some(version) = versions().pop() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut vm = version.start(dir.path(), "a", &args("-machine none -qmp unix:second,server=on,wait=off"));
    let pid = rustix::process::Pid::from_raw(vm.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    // The signal is only queued: each thread stops when it leaves the kernel.
    rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED).unwrap();
    vm.qmp.set_timeout(Duration::from_millis(50));
    let error = vm.qmp.execute::<Value>("query-status", Value::Null).unwrap_err();
    assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
    let error = Qmp::connect(&dir.path().join("second"), Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, QmpError::Busy { .. }), "{error}");
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    vm.qmp.set_timeout(Duration::from_secs(20));
    assert!(vm.command("query-status", Value::Null)["status"].is_string());
}

/// A monitor of ours greets once and answers, however busy the host is: QEMUs share one processor with two programs
/// that compute.
#[test]
fn a_monitor_of_ours_answers_on_a_busy_host() {
    const STARTS: usize = 40;
    /// A process that is killed on drop.
    struct Busy(std::process::Child);
    impl Drop for Busy {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let busy = || {
        Busy(Command::new("taskset").args(["-c", "0", "sh", "-c", "while :; do :; done"]).spawn().unwrap())
    };
    let _load = [busy(), busy()];
    for version in versions() {
        for start in 0..STARTS {
            let dir = tempfile::tempdir().unwrap();
            let qmp = dir.path().join("m.sock");
            let mut argv: Vec<_> = ["taskset", "-c", "0"].map(Into::into).into();
            argv.extend(version.argv());
            argv.extend(["-machine", "none", "-nodefaults", "-display", "none"].map(Into::into));
            argv.extend(monitor(&qmp).map(Into::into));
            let mut vm = launch(dir.path(), "busy", argv, qmp);
            // A second greeting would arrive before the answer.
            let status: Value = vm.qmp.execute("query-status", Value::Null).unwrap();
            assert_eq!(status["running"], true, "start {start}");
        }
    }
}
