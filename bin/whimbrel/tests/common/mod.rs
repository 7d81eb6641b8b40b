//! Common parts of the end-to-end tests: two hosts and a witness in a laboratory, an agent on each, and the program as
//! users call it.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]
#![allow(
    missing_docs,
    unreachable_pub,
    unused_imports,
    clippy::unnecessary_debug_formatting,
    reason = "what tests share is seen by them alone"
)]

pub mod cuts;
pub mod draw;
pub mod faults;
pub mod networks;
pub mod replay;
mod silence;
pub mod storage;
pub mod two_networks;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub use lab::{
    Accel, Boot, CommandOutput, DEADLINE, Device, Disk, Environment, Guest, GuestSpec, Lab, LabConfig, Load,
    QemuVersion, Ram, Serial, Tick, entries, until,
};

pub use storage::{LoopDevice, SmallFileSystem};

/// The program under test.
pub const WHIMBREL: &str = env!("CARGO_BIN_EXE_whimbrel");

/// Returns a load that writes, and reads memory and disks as fast as it can, to find what is wrong for a moment only.
pub fn busy() -> Load {
    Load {
        fill_mib: 96,
        wss_mib: 24,
        rate_mib_per_s: 30,
        verify_mib_per_s: 32,
        disk_pause_ms: 0,
        ..Load::default()
    }
}

/// Differences of a cluster to the usual one.
#[derive(Clone, Debug)]
pub struct Setup {
    pub link: lab::Link,
    pub witness: bool,
    /// True if there is a third host, behind the router.
    pub third: bool,
    pub plain: bool,
    pub fault_harness: bool,
    /// True if disks can be copied, into a directory of each host.
    pub pool: bool,
    /// More lines for the agents' configuration.
    pub extra: String,
}

impl Setup {
    /// Returns a setup with agents that soon give up: for tests in which they have to. A pause of the machine of some
    /// seconds may make them give up, too.
    pub fn impatient() -> Self {
        let extra = "[timeouts]\nretry_ms = 100\ngive_up_after_ms = 3000\npeer_silence_ms = 2000\nconnect_ms = 2000\nreclaim_after_ms = 2000\n";
        Self { extra: extra.to_owned(), ..Self::default() }
    }
}

impl Setup {
    /// Turns off the yielding of copying to guests that wait for processors: the course then depends on the guest
    /// alone, also on a busy machine.
    pub fn without_yielding(self) -> Self {
        Self { extra: self.extra + "[tuning]\nguest_wait_percent = 0\n", ..self }
    }
}

impl Default for Setup {
    /// Returns a setup with agents that do not give up: with any length of a cut, and also on a busy machine.
    fn default() -> Self {
        Self {
            link: lab::Link::Fast,
            witness: false,
            third: false,
            plain: false,
            fault_harness: false,
            pool: false,
            extra: "[timeouts]\nretry_ms = 100\ngive_up_after_ms = 600000\npeer_silence_ms = 2000\nstandstill_ms = 60000\nqmp_ms = 60000\n"
                .to_owned(),
        }
    }
}

/// Returns the rate of one of the guest's counters per second, from three of its ticks.
pub fn per_second(serial: &Serial, count: impl Fn(&Tick) -> u64) -> u64 {
    let one = serial.next_tick().unwrap();
    let last = std::iter::repeat_with(|| serial.next_tick().unwrap()).nth(2).unwrap();
    (count(&last) - count(&one)) * 1000 / (last.uptime_ms - one.uptime_ms)
}

/// Two hosts with agents, a third one and a witness if requested.
pub struct Cluster {
    pub a: Agent,
    pub b: Agent,
    pub c: Option<Agent>,
    pub witness: Option<Agent>,
    pub environment: Environment,
    pub faults: Option<faults::FaultServer>,
    /// Migrations that were checked before.
    checked: Mutex<BTreeSet<String>>,
    pub lab: Lab,
}

/// One agent.
pub struct Agent {
    pub name: &'static str,
    pub directory: PathBuf,
    /// The program that starts the daemon, such as `nsenter` with its options; empty to start it directly.
    pub starter: Vec<String>,
    pub host: lab::Host,
    daemon: Option<lab::Daemon>,
}

impl Cluster {
    pub fn new() -> Self {
        Self::with(&Setup::default())
    }

    pub fn with(setup: &Setup) -> Self {
        let lab = Lab::up(&LabConfig::for_test().link(setup.link.clone())).unwrap();
        let third = setup.third.then(|| lab::two_networks::add_third(&lab).unwrap());
        let environment = Environment::discover();
        let pki = lab::Pki::new(&lab.shared_directory().unwrap().join("pki")).unwrap();
        let faults = setup.fault_harness.then(|| faults::FaultServer::new(&lab.shared_directory().unwrap()));
        let qemus = environment.qemu_versions();
        let agent = |host: &lab::Host, name: &'static str, role: &str, address: String| {
            let directory = host.directory().join("agent");
            fs::create_dir_all(&directory).unwrap();
            let mut config = format!(
                "host = \"{name}\"\nrole = \"{role}\"\nlisten = \"{address}\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n"
            );
            if setup.plain {
                config.push_str("[tls]\nplain = true\n");
            } else {
                let identity = pki.issue(name, &[host.address().into()]).unwrap();
                writeln!(
                    config,
                    "[tls]\nca = {:?}\ncertificate = {:?}\nkey = {:?}",
                    identity.ca, identity.certificate, identity.key
                )
                .unwrap();
            }
            let control = lab.witness.address();
            writeln!(config, "[hosts.a]\naddress = \"{}:7740\"", lab.a.address()).unwrap();
            writeln!(config, "[hosts.b]\naddress = \"{}:7740\"", lab.b.address()).unwrap();
            if let Some(third) = &third {
                writeln!(config, "[hosts.c]\naddress = \"{}:7740\"", third.address()).unwrap();
            }
            if setup.witness {
                writeln!(config, "[hosts.w]\naddress = \"{control}:7740\"").unwrap();
                if role == "host" {
                    config.push_str("[registry]\nhost = \"w\"\n");
                }
            }
            let qemu = |version: &QemuVersion| environment.qemu(*version).unwrap();
            let binaries: Vec<_> = qemus.iter().map(|version| wrapper(&directory, &qemu(version))).collect();
            writeln!(config, "[qemu]\nbinaries = {binaries:?}").unwrap();
            if let Some(faults) = &faults {
                writeln!(config, "[faults]\nsocket = {:?}", faults.socket(name)).unwrap();
            }
            if setup.pool {
                let images = host.directory().join("images");
                fs::create_dir_all(&images).unwrap();
                let templates = host.directory().join("templates");
                fs::create_dir_all(&templates).unwrap();
                writeln!(config, "[disks]\ntemplates = [{templates:?}]").unwrap();
                writeln!(config, "[disks.pool]\ndirectory = {images:?}").unwrap();
            }
            config.push_str(&setup.extra);
            fs::write(directory.join("agent.toml"), config).unwrap();
            Agent { name, directory, starter: Vec::new(), host: host.clone(), daemon: None }
        };
        let a = agent(&lab.a, "a", "host", format!("{}:7740", lab.a.address()));
        let b = agent(&lab.b, "b", "host", format!("{}:7740", lab.b.address()));
        let c = third.as_ref().map(|host| agent(host, "c", "host", format!("{}:7740", host.address())));
        let witness = setup
            .witness
            .then(|| agent(&lab.witness, "w", "witness", format!("{}:7740", lab.witness.address())));
        let mut cluster = Self { a, b, c, witness, environment, faults, checked: Mutex::default(), lab };
        if let Some(witness) = &mut cluster.witness {
            witness.start();
        }
        cluster.a.start();
        cluster.b.start();
        if let Some(third) = &mut cluster.c {
            third.start();
        }
        cluster
    }

    pub fn agent(&self, name: &str) -> &Agent {
        match name {
            "a" => &self.a,
            "b" => &self.b,
            _ => self.c.as_ref().unwrap(),
        }
    }

    pub fn agent_mut(&mut self, name: &str) -> &mut Agent {
        if name == "a" { &mut self.a } else { &mut self.b }
    }

    /// Starts a guest on the first host, waits until its load runs, and lets the agent adopt it.
    pub fn guest(&self, spec: &GuestSpec) -> Guest {
        let guest = Guest::start_and_wait(&self.lab.a, &self.environment, spec).unwrap();
        self.a.cli(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();
        guest
    }

    /// Migrates a VM with `--verify`, and returns the report. Nothing may differ, and all of memory and of the disks
    /// that were copied must have been compared.
    #[track_caller]
    pub fn migrate(&self, vm: &str, from: &str, to: &str, more: &[&str]) -> Value {
        let from = self.agent(from);
        let mut words = vec!["migrate", vm, "--to", to, "--verify", "--on-limit", "stop"];
        words.extend(more);
        // `--check` must permit every migration that is made.
        let is_new = self.checked.lock().unwrap().insert(words.join(" "));
        if is_new {
            let check = from.cli(&[&words[..], &["--check"]].concat());
            assert_eq!(check.code, 0, "{check:?}\n{}", from.log());
        }
        let output = from.cli(&words);
        assert_eq!(output.code, 0, "{output:?}\n{}", from.log());
        let report = from.cli(&["report", vm]).ok().json();
        self.assert_moved(from.name, &report);
        report
    }

    /// Asserts that a VM was migrated: nothing differs, and all of memory and of the copied disks was compared.
    #[track_caller]
    pub fn assert_moved(&self, from: &str, report: &Value) {
        assert_eq!(report["outcome"], "moved", "{report:#}\n{}", self.agent(from).log());
        assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
        let bytes = |block: &Value| block["bytes"].as_u64().unwrap();
        let sum = |of: &str| report[of].as_array().into_iter().flatten().map(bytes).sum::<u64>();
        let all = sum("ram_blocks") + sum("disks");
        assert_eq!(report["verification"]["compared_bytes"], all, "all of it was compared: {report:#}");
    }

    /// Migrates a VM from the first host to the second over a link that is cut in the middle of memory, and healed.
    /// Returns the report.
    #[track_caller]
    pub fn migrate_through_a_cut(&self, vm: &str, more: &[&str]) -> Value {
        let mut words = vec!["migrate", vm, "--to", "b", "--verify", "--on-limit", "stop"];
        words.extend(more);
        let migration = self.a.begin(&words);
        self.wait_for_sent(20 << 20);
        self.lab.cut(lab::Direction::AToB).unwrap();
        self.wait_for_progress(|progress| progress["phase"] == "reconnecting");
        self.lab.heal().unwrap();
        assert!(migration.wait_with_output().unwrap().status.success(), "{}", self.a.log());
        let report = self.a.cli(&["report", vm]).ok().json();
        assert!(report["reconnections"].as_u64().unwrap() >= 1, "{report:#}");
        assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
        report
    }

    /// Starts to migrate a VM from the first host to the second at this rate; it is compared in the end.
    pub fn migrate_slowly(&self, vm: &str, bandwidth: &str) -> Child {
        let words = ["migrate", vm, "--to", "b", "--verify", "--on-limit", "stop", "--bandwidth", bandwidth];
        let mut command = self.a.command(&words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Waits until the first host has sent this many bytes of a VM.
    #[track_caller]
    pub fn wait_for_sent(&self, bytes: u64) {
        self.wait_for_progress(|progress| progress["sent_bytes"].as_u64().is_some_and(|sent| sent >= bytes));
    }

    /// Waits until the progress of the first host's only migration satisfies `enough`.
    #[track_caller]
    pub fn wait_for_progress(&self, enough: impl Fn(&Value) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let list = self.a.cli(&["migrations"]).ok().json();
            if list[0]["progress"].is_object() && enough(&list[0]["progress"]) {
                return;
            }
            assert!(Instant::now() < deadline, "{list:#}\n{}", self.a.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asserts that the guest itself finds every page as it wrote it.
    #[track_caller]
    pub fn assert_guest_whole(&self, agent: &str, vm: &str) {
        let check = self.serial(agent, vm).check().unwrap_or_else(|error| {
            panic!("the guest at {agent} does not answer: {error}\n{}", self.describe_qemu(agent, vm))
        });
        assert!(check.ok && check.wrong == 0, "{check:?}");
    }

    /// Returns the serial line of a guest that has arrived at a host.
    pub fn serial(&self, agent: &str, vm: &str) -> Serial {
        let agent = self.agent(agent);
        let shown = agent.cli(&["vm", "show", vm]).ok().json();
        let qmp = PathBuf::from(shown["qmp"].as_str().unwrap());
        let pid = shown["pid"].as_u64().unwrap() as u32;
        let directory = qmp.parent().unwrap();
        Serial::new(&directory.join("serial.sock"), &directory.join("serial.log"), Some(pid))
    }
}

/// Makes a program that starts a QEMU with the arguments that it always needs here (its firmware directories).
pub fn wrapper(directory: &Path, qemu: &lab::Qemu) -> PathBuf {
    if qemu.arguments().is_empty() {
        return qemu.program.clone();
    }
    let path = directory.join("qemu-newer");
    let script =
        format!("#!/bin/sh\nexec {} {} \"$@\"\n", qemu.program.display(), qemu.arguments().join(" "));
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    path
}

impl Agent {
    pub fn config(&self) -> PathBuf {
        self.directory.join("agent.toml")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.join("run/agent.sock")
    }

    /// Starts the agent and waits until it answers.
    pub fn start(&mut self) {
        let whimbrel = WHIMBREL.to_owned();
        let mut words = self.starter.iter().chain([&whimbrel]);
        let mut command = self.host.command(words.next().unwrap());
        let logged = std::env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned());
        command.args(words).arg("agent").arg("--config").arg(self.config()).env("RUST_LOG", logged);
        let mut daemon = lab::Daemon::start(&mut command, &self.directory.join("agent.log")).unwrap();
        let deadline = Instant::now() + DEADLINE;
        while self.cli(&["vm", "list"]).code != 0 {
            assert!(daemon.is_running(), "agent {} ended: {}", self.name, self.log());
            assert!(Instant::now() < deadline, "agent {} does not answer: {}", self.name, self.log());
            thread::sleep(Duration::from_millis(20));
        }
        self.daemon = Some(daemon);
    }

    pub fn pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().pid()
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill().unwrap();
        }
    }

    /// Sends SIGSTOP: its host works and keeps its connections alive, but the agent does nothing.
    pub fn freeze(&self) {
        self.signal("-STOP");
        let pid = self.pid();
        until("the agent is stopped", || is_stopped(pid));
    }

    pub fn thaw(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        if let Some(daemon) = &self.daemon {
            Command::new("kill").args([signal, &daemon.pid().to_string()]).status().unwrap();
        }
    }

    pub fn is_running(&mut self) -> bool {
        self.daemon.as_mut().is_some_and(lab::Daemon::is_running)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("agent.log")).unwrap_or_default()
    }

    /// Returns the program as users call it, with JSON output.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = self.host.command(WHIMBREL);
        command.arg("--socket").arg(self.socket()).arg("--json").args(words);
        command
    }

    /// Starts the program; its output is kept for the caller.
    pub fn begin(&self, words: &[&str]) -> Child {
        self.command(words).stdout(Stdio::piped()).spawn().unwrap()
    }

    /// Runs the program to its end.
    pub fn cli(&self, words: &[&str]) -> CommandOutput {
        CommandOutput::by(&mut self.command(words))
    }

    /// Runs the program with text output.
    pub fn text(&self, words: &[&str]) -> CommandOutput {
        let mut command = self.host.command(WHIMBREL);
        CommandOutput::by(command.arg("--socket").arg(self.socket()).args(words))
    }

    /// Returns a VM as the agent shows it; `None` if the agent does not know it.
    pub fn vm(&self, vm: &str) -> Option<Value> {
        let list = self.cli(&["vm", "list"]).ok().json();
        list.as_array().unwrap().iter().find(|one| one["vm"] == vm).cloned()
    }

    /// Returns true if no migration of this agent is open.
    pub fn is_settled(&self) -> bool {
        let vms = self.cli(&["vm", "list"]).ok().json();
        vms.as_array().unwrap().iter().all(|vm| vm["migration"].is_null())
    }

    /// Waits until no migration of this agent is open.
    pub fn wait_settled(&self) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let vms = self.cli(&["vm", "list"]).ok().json();
            if vms.as_array().unwrap().iter().all(|vm| vm["migration"].is_null()) {
                return;
            }
            assert!(Instant::now() < deadline, "{} does not settle: {vms}\n{}", self.name, self.log());
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Returns true if a process is stopped by a signal.
pub fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
}

/// Returns true if a report contains this event.
pub fn has_event(report: &Value, what: &str) -> bool {
    report["events"].as_array().unwrap().iter().any(|event| event["what"] == what)
}
