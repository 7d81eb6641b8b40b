//! The controller under test, and agents that the test plays.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use api::fleet::{EvacuateRequest, FleetClient, FleetEvent, FleetHost};
use engine::evacuation::{CommandState, HostContents, HostFacts as MomentFacts, MoveEnd, QemuOnHost};
use link::{Connection, Endpoint, Incoming, Peer, Security};
use proto::message::{
    CommandAnswer, CommandVerb, CpuFacts, FleetChange, FleetReport, HostEvacuation, HostFacts, HostLoad,
    Message, VmFacts,
};
use proto::{CommandId, HostId, Purpose, VmName};
use whimbrel_controller::Controller;
use whimbrel_controller::config::ControllerConfig;

pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

/// A directory with a configuration, and the controllers that use it one after the other.
pub(crate) struct World {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) controller: Option<Controller>,
}

impl World {
    pub(crate) fn new() -> Self {
        let mut world = Self { folder: tempfile::tempdir().unwrap(), controller: None };
        world.start(0);
        world
    }

    pub(crate) fn start(&mut self, seen_term: u64) {
        let text = "name = \"control\"\nlisten = \"127.0.0.1:0\"\nstate_dir = \"state\"\napi_socket = \"api.sock\"\n\
                    [tls]\nplain = true\n[limits]\nmost_load_percent = 1000\n[retries]\nask_s = 1\npause_s = 0\n";
        let config = ControllerConfig::parse(&self.folder.path().join("controller.toml"), text).unwrap();
        self.controller = Some(Controller::start(config, seen_term).unwrap());
    }

    pub(crate) fn restart(&mut self) {
        self.controller = None;
        self.start(0);
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.controller.as_ref().unwrap().address()
    }

    pub(crate) fn client(&self) -> FleetClient {
        FleetClient::new(&self.folder.path().join("api.sock")).unwrap()
    }

    pub(crate) fn shown(&self, name: &str) -> FleetHost {
        self.client().hosts().unwrap().into_iter().find(|shown| shown.host.as_str() == name).unwrap()
    }

    pub(crate) fn is_connected(&self, name: &str) -> bool {
        let hosts = self.client().hosts().unwrap();
        hosts.iter().any(|shown| shown.host.as_str() == name && shown.connected)
    }

    pub(crate) fn events(&self) -> Vec<FleetEvent> {
        self.client().events(0, false).unwrap().map(Result::unwrap).collect()
    }

    #[track_caller]
    pub(crate) fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(Instant::now() < deadline, "in vain: {what}; {:#?}", self.events());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// An agent that the test plays.
pub(crate) struct Agent {
    pub(crate) name: &'static str,
    pub(crate) connection: Connection,
    pub(crate) seq: u64,
    pub(crate) term: u64,
    pub(crate) cordoned: bool,
    pub(crate) vms: BTreeSet<&'static str>,
    /// States of moves, as its journal has them.
    pub(crate) moves: BTreeMap<String, CommandState>,
}

impl Agent {
    pub(crate) fn connect(world: &World, name: &'static str, vms: &[&'static str]) -> Self {
        let endpoint = Endpoint::new(host(name), Security::Plain);
        let peer = Peer { host: host("control"), address: world.address().to_string() };
        let mut connection = endpoint.connect(&peer, Purpose::Controller, Instant::now() + PATIENCE).unwrap();
        let first = connection.recv(Some(Instant::now() + PATIENCE)).unwrap();
        let Incoming::Message(Message::ControllerTerm { term }) = first else { panic!("{first:?}") };
        let vms = vms.iter().copied().collect();
        Self { name, connection, seq: 0, term, cordoned: false, vms, moves: BTreeMap::new() }
    }

    /// Connects, and reports everything.
    pub(crate) fn up(world: &World, name: &'static str, vms: &[&'static str]) -> Self {
        let mut agent = Self::connect(world, name, vms);
        agent.snapshot();
        world.until("the agent is connected", |world| world.is_connected(name));
        agent
    }

    /// Connects anew to another controller, with what its journal has.
    pub(crate) fn reconnect(&mut self, world: &World) {
        let vms: Vec<_> = self.vms.iter().copied().collect();
        let (moves, cordoned) = (std::mem::take(&mut self.moves), self.cordoned);
        *self = Self { cordoned, moves, ..Self::connect(world, self.name, &vms) };
        self.snapshot();
        world.until("the agent is connected", |world| world.is_connected(self.name));
    }

    pub(crate) fn report(&mut self, report: FleetReport) {
        self.seq += 1;
        self.connection.send(&Message::FleetReport { seq: self.seq, report }).unwrap();
    }

    pub(crate) fn changed(&mut self, changes: Vec<FleetChange>) {
        self.report(FleetReport::Changed { changes });
    }

    pub(crate) fn facts(&self) -> HostFacts {
        HostFacts {
            version: "1".to_owned(),
            role: "host".to_owned(),
            address: "192.0.2.1:7740".to_owned(),
            boot_id: "b".to_owned(),
            peers: Vec::new(),
            cordoned: self.cordoned,
            cpu: CpuFacts { processors: 8, ..CpuFacts::default() },
            memory_bytes: 32 << 30,
            numa_bytes: Vec::new(),
            qemu_versions: vec!["10.0".to_owned()],
            kernel: "6.12".to_owned(),
            kernel_lacks: Vec::new(),
            kvm: true,
        }
    }

    pub(crate) fn contents(&self) -> HostContents {
        let qemus = self.vms.iter().map(|vm| QemuOnHost { vm: Some((*vm).to_owned()), pid: 7 }).collect();
        HostContents { qemus, ..HostContents::of_an_empty_host(self.name) }
    }

    pub(crate) fn vm(name: &str) -> FleetChange {
        FleetChange::Vm {
            vm: Box::new(VmFacts {
                vm: VmName::new(name).unwrap(),
                state: "running".to_owned(),
                memory_bytes: 1 << 30,
                vcpus: 1,
                busy_milli: 10,
                qemu_version: "10.0.2".to_owned(),
                machine_type: "pc-q35-10.0".to_owned(),
                cpu_model: String::new(),
                kvm: false,
                disk_bytes: 0,
                migration: None,
            }),
        }
    }

    pub(crate) fn snapshot(&mut self) {
        self.report(FleetReport::Begin { host: Box::new(self.facts()) });
        let load = HostLoad { busy_milli: 100, available_bytes: 30 << 30, pool_free_bytes: 0 };
        let contents = serde_json::to_value(self.contents()).unwrap();
        let mut changes = vec![FleetChange::Load { load }, FleetChange::Contents { contents }];
        changes.extend(self.vms.iter().map(|vm| Self::vm(vm)));
        self.changed(changes);
        self.report(FleetReport::Complete);
    }

    /// Receives the next message.
    pub(crate) fn next(&mut self) -> Message {
        match self.connection.recv(Some(Instant::now() + PATIENCE)).unwrap() {
            Incoming::Message(message) => message,
            Incoming::Blob(_) => panic!("not a message"),
        }
    }

    /// Asks for the evacuation of its host. Returns the answer.
    pub(crate) fn ask_for_evacuation(&mut self, request: u64) -> HostEvacuation {
        self.report(FleetReport::EvacuateHost { request, within_s: None });
        self.until_evacuation(|state| state.request == request)
    }

    /// Carries out commands until the controller reports a matching state of the evacuation of its host.
    pub(crate) fn until_evacuation(&mut self, is_wanted: impl Fn(&HostEvacuation) -> bool) -> HostEvacuation {
        loop {
            match self.next() {
                Message::HostEvacuation(state) if is_wanted(&state) => return state,
                Message::FleetCommand { id, command, .. } => self.carry_out(id, &command),
                _ => {}
            }
        }
    }

    /// Carries out commands until one begins a move, which is returned unanswered.
    pub(crate) fn until_move(&mut self) -> (CommandId, String) {
        loop {
            let Message::FleetCommand { term, id, command } = self.next() else { panic!("no command") };
            assert_eq!(term, self.term);
            match command {
                CommandVerb::Move(order) => return (id, order.to.to_string()),
                other => self.carry_out(id, &other),
            }
        }
    }

    pub(crate) fn carry_out(&mut self, id: CommandId, command: &CommandVerb) {
        let answer = match command {
            CommandVerb::Facts { commands } => {
                let state =
                    |id: &CommandId| self.moves.get(id.as_str()).cloned().unwrap_or(CommandState::Unknown);
                let commands = commands.iter().map(|id| (id.as_str().parse().unwrap(), state(id))).collect();
                let vms = self.vms.iter().map(|vm| (*vm).to_owned()).collect();
                let (host, contents) = (self.name.to_owned(), self.contents());
                let facts = MomentFacts { host, vms, commands, contents };
                CommandAnswer::Facts { facts: serde_json::to_value(facts).unwrap() }
            }
            CommandVerb::Cordon | CommandVerb::Uncordon => {
                self.cordoned = *command == CommandVerb::Cordon;
                CommandAnswer::Done
            }
            _ => CommandAnswer::Done,
        };
        self.report(FleetReport::Answer { id, answer });
    }

    /// Answers a command that begins a move.
    pub(crate) fn answer_move(&mut self, id: &CommandId, state: CommandState) {
        self.moves.insert(id.to_string(), state.clone());
        let answer = CommandAnswer::Move { state: serde_json::to_value(state).unwrap() };
        self.report(FleetReport::Answer { id: id.clone(), answer });
    }

    /// Lets a VM leave, and its move end.
    pub(crate) fn let_go(&mut self, vm: &'static str, id: &CommandId) {
        self.vms.remove(vm);
        let ended = CommandState::Ended { end: MoveEnd::Moved };
        self.moves.insert(id.to_string(), ended.clone());
        let contents = serde_json::to_value(self.contents()).unwrap();
        let state = serde_json::to_value(ended).unwrap();
        self.changed(vec![
            FleetChange::VmGone { vm: VmName::new(vm).unwrap() },
            FleetChange::Contents { contents },
            FleetChange::Move { command: id.clone(), state },
        ]);
    }
}

pub(crate) fn empty(name: &str) -> EvacuateRequest {
    EvacuateRequest { hosts: vec![host(name)], ..EvacuateRequest::default() }
}

/// Connects the hosts `a` and `b`, and begins to empty `a`: its only VM, `web`, moves. Returns both agents, the id of
/// the evacuation, and that of the command.
pub(crate) fn with_a_moving_vm(world: &World) -> (Agent, Agent, String, CommandId) {
    let mut a = Agent::up(world, "a", &["web"]);
    let b = Agent::up(world, "b", &[]);
    let id = world.client().evacuate(&empty("a")).unwrap().id;
    let (command, _) = a.until_move();
    a.answer_move(&command, CommandState::Underway { progress: None });
    (a, b, id, command)
}
