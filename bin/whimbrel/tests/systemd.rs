//! Guests on a host that systemd runs (trap 18). The systemd is a real one: it is the first process of namespaces of
//! its own, knows no units but those of the test, and sees no other process; QEMU, its unit and the agent are below it.
//! Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use common::{Cluster, DEADLINE, GuestSpec, Load, QemuVersion, Serial};
use lab::Host;

/// Actions of the first process of the namespaces before it becomes systemd. It must not change settings of the kernel,
/// and its runtime directory and cgroups are its own.
const BEGINNING: &str = r#"
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t tmpfs tmpfs /run
mount -t cgroup2 none /sys/fs/cgroup
export container=lab SYSTEMD_UNIT_PATH="$1" SYSTEMD_LOG_TARGET=console
exec /lib/systemd/systemd --system
"#;

/// A systemd that runs on a host of the laboratory; everything below it ends with it.
struct Systemd {
    host: Host,
    directory: PathBuf,
    cgroup: PathBuf,
    /// Its process id outside of its namespace.
    pid: u32,
    daemon: lab::Daemon,
}

impl Systemd {
    /// Starts it on a host, and waits until it answers. Returns `None` where there is no systemd.
    fn start(host: &Host) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let cgroups = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"));
        let (true, Some(cgroups)) = (Path::new("/lib/systemd/systemd").exists(), cgroups) else {
            lab::not_tried("units of systemd: it is not installed");
            return None;
        };
        let cgroup = Path::new(cgroups.split(' ').nth(1).unwrap()).join(host.namespace());
        fs::create_dir(&cgroup).unwrap();
        let directory = host.directory().join("systemd");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("default.target"), "[Unit]\nDefaultDependencies=no\n").unwrap();
        fs::write(directory.join("begin"), BEGINNING).unwrap();
        let enter = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", cgroup.display());
        let (begin, units) = (directory.join("begin"), directory.display().to_string());
        let mut words = vec!["sh", "-ec", enter.as_str(), "sh"];
        words.extend(["unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--cgroup", "--kill-child"]);
        words.extend(["sh", "-e", begin.to_str().unwrap(), &units]);
        let daemon = host.spawn("systemd", &words).unwrap();
        let mut systemd = Self { host: host.clone(), directory, cgroup, pid: 0, daemon };
        let deadline = Instant::now() + DEADLINE;
        while systemd.pid == 0 || systemd.ctl(&["is-system-running"]).trim() != "running" {
            let log = fs::read_to_string(systemd.daemon.log()).unwrap();
            assert!(
                systemd.daemon.is_running() && Instant::now() < deadline,
                "systemd does not start: {log}"
            );
            let children = format!("/proc/{0}/task/{0}/children", systemd.daemon.pid());
            let children = fs::read_to_string(children).unwrap_or_default();
            systemd.pid = children.split(' ').next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
            thread::sleep(Duration::from_millis(20));
        }
        Some(systemd)
    }

    /// Returns the command that starts a program below it.
    fn starter(&self) -> Vec<String> {
        let target = format!("--target={}", self.pid);
        ["nsenter", &target, "--mount", "--pid", "--cgroup", "--"].map(str::to_owned).to_vec()
    }

    /// Returns the output of `systemctl`; it may fail.
    fn ctl(&self, words: &[&str]) -> String {
        let starter = self.starter();
        let mut command = self.host.command(&starter[0]);
        let output = command.args(&starter[1..]).arg("systemctl").args(words).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Writes a file of a unit, and makes systemd read it.
    fn unit(&self, name: &str, text: &str) {
        let path = self.directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self.ctl(&["daemon-reload"]);
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // The first process of the namespace: all others end with it.
        let _ = lab::kill_pid(self.pid);
        let _ = self.daemon.kill();
        let removed =
            Command::new("find").arg(&self.cgroup).args(["-depth", "-type", "d", "-delete"]).status();
        assert!(removed.is_ok_and(|removed| removed.success()), "{} is left", self.cgroup.display());
    }
}

/// Returns the codes of the blockers.
fn blockers(cluster: &Cluster) -> Vec<String> {
    let check = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]).json();
    let findings = |side: &str| check[side].as_array().unwrap().clone();
    let all = [findings("source_findings"), findings("destination_findings")].concat();
    let blockers = all.iter().filter(|one| one["severity"] == "blocker");
    let codes: Vec<_> = blockers.map(|one| one["code"].as_str().unwrap().to_owned()).collect();
    assert_eq!(check["possible"], codes.is_empty(), "{check:#}");
    codes
}

#[test]
fn a_restarting_unit_is_refused_and_an_arrival_has_a_scope() {
    let mut cluster = Cluster::new();
    let Some(systemd) = Systemd::start(&cluster.lab.a) else { return };
    cluster.a.kill();
    cluster.a.starter = systemd.starter();
    cluster.a.start();

    // A guest as an administrator would have one: its unit, and in it QEMU.
    let directory = cluster.lab.a.directory().join("vm1");
    fs::create_dir(&directory).unwrap();
    let load = Load { fill_mib: 32, wss_mib: 8, rate_mib_per_s: 10, ..Load::default() };
    let arguments = GuestSpec::tiny("vm1", load).arguments(&cluster.environment, &directory).unwrap();
    let arguments: Vec<_> = arguments.iter().map(|word| format!("{word:?}")).collect();
    let arguments = arguments.join(" ");
    let qemu = cluster.environment.qemu(QemuVersion::Installed).unwrap().program;
    let service = format!("ExecStart={} {arguments}\nRestart=always\n", qemu.display());
    systemd.unit("web1.service", &format!("[Unit]\nDefaultDependencies=no\n[Service]\n{service}"));
    systemd.ctl(&["start", "web1.service"]);
    let state = || systemd.ctl(&["show", "--property=ActiveState,NRestarts", "--value", "web1.service"]);
    assert_eq!(state().split_whitespace().collect::<Vec<_>>(), ["0", "active"], "{}", state());
    // Process numbers are those of its namespace: the test could not check whether it still runs.
    let serial =
        |directory: &Path| Serial::new(&directory.join("serial.sock"), &directory.join("serial.log"), None);
    serial(&directory).next_tick().unwrap();

    let warning = "systemd unit web1.service has Restart=always and would restart the guest";
    let adopted = cluster.a.cli(&["vm", "adopt", "vm1"]).ok();
    assert!(adopted.stdout.contains(warning), "{adopted:?}");
    assert_eq!(blockers(&cluster), ["unit-restarts"]);
    assert_eq!(cluster.a.cli(&["migrate", "vm1", "--to", "b"]).code, 1);

    // Units at boot start it, too.
    let wants = systemd.directory.join("default.target.wants");
    fs::create_dir(&wants).unwrap();
    std::os::unix::fs::symlink(systemd.directory.join("web1.service"), wants.join("web1.service")).unwrap();
    systemd.unit("web1.service.d/moved.conf", "[Service]\nRestart=no\n");
    assert_eq!(blockers(&cluster), ["unit-starts-at-boot"]);
    // A timer does so as well.
    fs::remove_dir_all(&wants).unwrap();
    systemd.unit("web1.timer", "[Unit]\nDefaultDependencies=no\n[Timer]\nOnBootSec=3000\n");
    systemd.ctl(&["start", "web1.timer"]);
    assert_eq!(blockers(&cluster), ["unit-starts-at-boot"]);
    systemd.ctl(&["stop", "web1.timer"]);
    fs::remove_file(systemd.directory.join("web1.timer")).unwrap();
    systemd.ctl(&["daemon-reload"]);

    // There is no blocker any longer, and the unit starts no second guest.
    assert_eq!(blockers(&cluster), Vec::<String>::new());
    cluster.migrate("vm1", "a", "b", &[]);
    cluster.assert_guest_whole("b", "vm1");
    let deadline = Instant::now() + DEADLINE;
    while state().contains("active\n") {
        assert!(Instant::now() < deadline, "its QEMU still runs: {}", state());
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        state().split_whitespace().collect::<Vec<_>>(),
        ["0", "failed"],
        "killed, and not started again"
    );

    // VMs that arrive on such a host are in scopes of their own, which do not end with the agent's unit.
    cluster.migrate("vm1", "b", "a", &[]);
    assert_eq!(systemd.ctl(&["is-active", "whimbrel-vm-vm1.scope"]).trim(), "active");
    let shown = cluster.a.cli(&["vm", "show", "vm1"]).ok().json();
    let check = serial(Path::new(shown["qmp"].as_str().unwrap()).parent().unwrap()).check().unwrap();
    assert!(check.ok && check.wrong == 0, "{check:?}");
}
