//! Three hosts with agents, and a controller beside the third one.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::common::{
    CommandOutput, Environment, Guest, GuestSpec, Lab, LabConfig, Load, Serial, WHIMBREL, until, wrapper,
};

/// The controller's name.
pub(crate) const CONTROLLER: &str = "control";
const AGENT_PORT: u16 = 7740;
const CONTROLLER_PORT: u16 = 7742;

/// The hosts, by the names of their agents.
const HOSTS: [&str; 3] = ["a", "b", "c"];

/// Settings of agents: they do not give up on a busy machine.
const AGENT_SETTINGS: &str = "[timeouts]\nretry_ms = 100\ngive_up_after_ms = 600000\npeer_silence_ms = 2000\n\
     standstill_ms = 60000\nqmp_ms = 60000\n[migration]\non_limit = \"stop\"\n";

/// Settings of the controller: all hosts are one machine, whose processors count three times.
const CONTROLLER_SETTINGS: &str = "[fleet]\nreserved_mib = 64\n[limits]\nmost_load_percent = 1000\ncopy_milli = 10\n\
     [retries]\nattempts = 20\npause_s = 1\nask_s = 1\n";

/// A host with its agent.
pub(crate) struct Node {
    pub(crate) name: &'static str,
    pub(crate) host: lab::Host,
    directory: PathBuf,
    daemon: Option<lab::Daemon>,
}

/// The fleet.
pub(crate) struct Fleet {
    nodes: Vec<Node>,
    controller: Option<lab::Daemon>,
    directory: PathBuf,
    environment: Environment,
    pub(crate) pki: lab::Pki,
    lab: Lab,
}

impl Fleet {
    /// Starts three agents and a controller, and waits until they are connected.
    pub(crate) fn up() -> Self {
        let mut fleet = Self::without_controller();
        fleet.start_controller();
        for name in HOSTS {
            fleet.wait_connected(name);
        }
        fleet
    }

    /// Starts the agents alone.
    pub(crate) fn without_controller() -> Self {
        let lab = Lab::up(&LabConfig::for_test()).unwrap();
        let environment = Environment::discover();
        let pki = lab::Pki::new(&lab.shared_directory().unwrap().join("pki")).unwrap();
        let hosts = [&lab.a, &lab.b, &lab.witness];
        let directory = lab.witness.directory().join("controller");
        fs::create_dir_all(&directory).unwrap();
        let nodes = HOSTS.into_iter().zip(hosts).map(|(name, host)| {
            let directory = host.directory().join("agent");
            fs::create_dir_all(&directory).unwrap();
            Node { name, host: host.clone(), directory, daemon: None }
        });
        let mut fleet = Self { nodes: nodes.collect(), controller: None, directory, environment, pki, lab };
        for at in 0..HOSTS.len() {
            let config = fleet.agent_config(&fleet.nodes[at]);
            fs::write(fleet.nodes[at].config(), config).unwrap();
            fleet.nodes[at].start();
        }
        fleet
    }

    fn agent_config(&self, node: &Node) -> String {
        let address = |node: &Node| node.host.control_address().unwrap();
        let identity = self.pki.issue(node.name, &[address(node).into()]).unwrap();
        let mut config = format!(
            "host = {:?}\nlisten = \"{}:{AGENT_PORT}\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n",
            node.name,
            address(node)
        );
        config += &tls(&identity);
        for peer in &self.nodes {
            writeln!(config, "[hosts.{}]\naddress = \"{}:{AGENT_PORT}\"", peer.name, address(peer)).unwrap();
        }
        let versions = self.environment.qemu_versions();
        let qemus = versions.iter().map(|version| self.environment.qemu(*version).unwrap());
        let binaries: Vec<_> = qemus.map(|qemu| wrapper(&node.directory, &qemu)).collect();
        writeln!(config, "[qemu]\nbinaries = {binaries:?}").unwrap();
        config += &self.controller_table(CONTROLLER);
        config + AGENT_SETTINGS
    }

    /// Returns the table by which an agent finds the controller, under this name.
    pub(crate) fn controller_table(&self, name: &str) -> String {
        let address = self.lab.witness.control_address().unwrap();
        format!(
            "[controller]\nname = {name:?}\naddress = \"{address}:{CONTROLLER_PORT}\"\nnamespaces_are_hosts = true\n"
        )
    }

    /// Starts the controller and waits until it answers.
    pub(crate) fn start_controller(&mut self) {
        let host = &self.lab.witness;
        let address = host.control_address().unwrap();
        let path = self.directory.join("controller.toml");
        if !path.exists() {
            let identity = self.pki.issue(CONTROLLER, &[address.into()]).unwrap();
            let config = format!(
                "name = {CONTROLLER:?}\nlisten = \"{address}:{CONTROLLER_PORT}\"\nstate_dir = \"state\"\n\
                 api_socket = \"controller.sock\"\n{}{CONTROLLER_SETTINGS}",
                tls(&identity)
            );
            fs::write(&path, config).unwrap();
        }
        let mut command = host.command(WHIMBREL);
        command.arg("controller").arg("--config").arg(&path).env("RUST_LOG", "info");
        self.controller =
            Some(lab::Daemon::start(&mut command, &self.directory.join("controller.log")).unwrap());
        until("the controller answers", || self.run(&["fleet", "status"]).code == 0);
    }

    /// Kills the controller.
    pub(crate) fn kill_controller(&mut self) {
        self.controller.take().unwrap().kill().unwrap();
    }

    pub(crate) fn node(&self, name: &str) -> &Node {
        self.nodes.iter().find(|node| node.name == name).unwrap()
    }

    pub(crate) fn node_mut(&mut self, name: &str) -> &mut Node {
        self.nodes.iter_mut().find(|node| node.name == name).unwrap()
    }

    /// Returns the program as users call it about the fleet, with JSON output.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = self.lab.witness.command(WHIMBREL);
        command.arg("--controller").arg(self.controller_socket()).arg("--json").args(words);
        command
    }

    /// Runs it to its end.
    pub(crate) fn run(&self, words: &[&str]) -> CommandOutput {
        CommandOutput::by(&mut self.command(words))
    }

    /// Starts it; its output is kept for the caller.
    pub(crate) fn begin(&self, words: &[&str]) -> Child {
        self.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    pub(crate) fn controller_socket(&self) -> PathBuf {
        self.directory.join("controller.sock")
    }

    /// Returns a host as the controller shows it.
    pub(crate) fn host(&self, name: &str) -> Option<Value> {
        let hosts = self.run(&["fleet", "hosts"]).ok().json();
        hosts.as_array().unwrap().iter().find(|host| host["host"] == name).cloned()
    }

    pub(crate) fn wait_connected(&self, name: &str) {
        until(&format!("{name} is connected\n{}", self.log()), || {
            self.host(name).is_some_and(|host| host["connected"] == true)
        });
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.join("controller.log")).unwrap_or_default()
    }

    /// Returns all logs, for a test that has failed.
    pub(crate) fn logs(&self) -> String {
        let agents = self.nodes.iter().map(|node| format!("--- {}\n{}", node.name, node.log()));
        format!("--- controller\n{}\n{}", self.log(), agents.collect::<Vec<_>>().join("\n"))
    }

    /// Starts guests on the first host, waits until their loads run, and lets the agent adopt them.
    pub(crate) fn guests(&self, count: usize) -> Vec<Guest> {
        let load = |seed| Load { fill_mib: 24, wss_mib: 4, rate_mib_per_s: 2, seed, ..Load::default() };
        let node = self.node("a");
        let spec = |number: usize| GuestSpec::tiny(&format!("vm{number}"), load(number as u64));
        let guests: Vec<_> = (1..=count)
            .map(|number| Guest::start(&node.host, &self.environment, &spec(number)).unwrap())
            .collect();
        for guest in &guests {
            guest.wait_for_load(24).unwrap();
            node.run(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();
        }
        until("the controller knows all VMs", || {
            self.run(&["fleet", "vms"]).ok().json().as_array().unwrap().len() == count
        });
        guests
    }

    /// Returns the names of the hosts that have a VM, by their own agents.
    pub(crate) fn places(&self, vm: &str) -> Vec<&'static str> {
        self.nodes.iter().filter(|node| node.has(vm)).map(|node| node.name).collect()
    }

    /// Asserts that a VM runs on one host, which satisfies `is_right`, and that its guest finds every page as it wrote it.
    #[track_caller]
    pub(crate) fn assert_whole(&self, vm: &str, is_right: impl Fn(&str) -> bool) {
        let places = self.places(vm);
        let [place] = places[..] else { panic!("{vm} is on {places:?}\n{}", self.logs()) };
        assert!(is_right(place), "{vm} is on {place}\n{}", self.logs());
        let check = self.node(place).serial(vm).check().unwrap();
        assert!(check.ok && check.wrong == 0, "{vm} on {place}: {check:?}");
    }

    /// Asserts that a VM has moved from one of these hosts so many times in all, and that all of its memory was compared
    /// each time.
    #[track_caller]
    pub(crate) fn assert_moves(&self, vm: &str, count: usize) {
        let mut moved = 0;
        for node in &self.nodes {
            let migrations = node.run(&["migrations"]).ok().json();
            let of_vm =
                |one: &&Value| one["vm"] == vm && one["role"] == "source" && one["standing"] == "done";
            for migration in migrations.as_array().unwrap().iter().filter(of_vm) {
                moved += 1;
                let epoch = migration["epoch"].to_string();
                let report = node.run(&["report", vm, &epoch]).ok().json();
                assert_eq!(report["outcome"], "moved", "{report:#}");
                assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
                let blocks = report["ram_blocks"].as_array().unwrap().iter();
                let all: u64 = blocks.map(|block| block["bytes"].as_u64().unwrap()).sum();
                assert_eq!(
                    report["verification"]["compared_bytes"], all,
                    "all of it was compared: {report:#}"
                );
            }
        }
        assert_eq!(moved, count, "moves of {vm}\n{}", self.logs());
    }
}

impl Node {
    fn config(&self) -> PathBuf {
        self.directory.join("agent.toml")
    }

    /// Starts the agent and waits until it answers.
    pub(crate) fn start(&mut self) {
        let mut command = self.host.command(WHIMBREL);
        command.arg("agent").arg("--config").arg(self.config()).env("RUST_LOG", "info");
        self.daemon = Some(lab::Daemon::start(&mut command, &self.directory.join("agent.log")).unwrap());
        until(&format!("agent {} answers", self.name), || self.run(&["vm", "list"]).code == 0);
    }

    /// Kills the agent.
    pub(crate) fn kill(&mut self) {
        self.daemon.take().unwrap().kill().unwrap();
    }

    /// Runs the program as users of the agent call it, with JSON output.
    pub(crate) fn run(&self, words: &[&str]) -> CommandOutput {
        let mut command = self.host.command(WHIMBREL);
        CommandOutput::by(command.arg("--socket").arg(self.socket()).arg("--json").args(words))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("run/agent.sock")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.join("agent.log")).unwrap_or_default()
    }

    /// Returns true if a VM runs here, and is not about to leave or to arrive.
    fn has(&self, vm: &str) -> bool {
        let list = self.run(&["vm", "list"]).ok().json();
        list.as_array().unwrap().iter().any(|one| one["vm"] == vm && one["state"] == "running")
    }

    /// Returns the serial line of a guest on this host.
    fn serial(&self, vm: &str) -> Serial {
        let shown = self.run(&["vm", "show", vm]).ok().json();
        let qmp = PathBuf::from(shown["qmp"].as_str().unwrap());
        let directory = qmp.parent().unwrap();
        let pid = shown["pid"].as_u64().unwrap() as u32;
        Serial::new(&directory.join("serial.sock"), &directory.join("serial.log"), Some(pid))
    }

    /// Returns the process ids of the QEMUs on this host.
    pub(crate) fn qemus(&self) -> Vec<u32> {
        let is_qemu = |pid: &u32| {
            let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            program.to_string_lossy().contains("qemu-system")
        };
        self.host.processes().unwrap().into_iter().filter(is_qemu).collect()
    }
}

/// Returns the table of certificates.
pub(crate) fn tls(identity: &lab::Identity) -> String {
    let text = |path: &Path| format!("{:?}", path.display().to_string());
    format!(
        "[tls]\nca = {}\ncertificate = {}\nkey = {}\n",
        text(&identity.ca),
        text(&identity.certificate),
        text(&identity.key)
    )
}
