//! Fleets for tests, and a controller without agents: tests hand in the events themselves.

use std::collections::{BTreeMap, BTreeSet};

use crate::evacuation::*;
use crate::planner::inventory::{HostPlatform, HostSpec, LinkSpec, VmPlatform, VmSpec};
use crate::planner::{Inventory, MoveLimits};

pub(super) const GIB: u64 = 1024;
pub(super) const SECOND: u64 = 1_000_000_000;

/// A host of 16 processors and 64 GiB, with a link of a gigabyte a second.
pub(super) fn host(name: &str) -> HostSpec {
    HostSpec {
        name: name.to_owned(),
        platform: "new".to_owned(),
        processors: 16,
        memory_mib: 64 * GIB,
        links: vec![LinkSpec { network: "migration".to_owned(), bytes_per_s: 1_000_000_000 }],
        ..HostSpec::default()
    }
}

/// A VM of two processors.
pub(super) fn vm(name: &str, host: &str, gib: u64) -> VmSpec {
    VmSpec {
        name: name.to_owned(),
        host: host.to_owned(),
        platform: "old".to_owned(),
        vcpus: 2,
        busy_milli: 100,
        memory_mib: gib * GIB,
        ..VmSpec::default()
    }
}

pub(super) fn inventory(hosts: Vec<HostSpec>, vms: Vec<VmSpec>) -> Inventory {
    let new = HostPlatform { qemu: "8.2".to_owned(), kvm: true, ..HostPlatform::default() };
    let old = VmPlatform { qemu: "7.2".to_owned(), kvm: true, ..VmPlatform::default() };
    Inventory {
        hosts,
        vms,
        host_platforms: BTreeMap::from([("new".to_owned(), new)]),
        vm_platforms: BTreeMap::from([("old".to_owned(), old)]),
        cpu_models: Vec::new(),
    }
}

pub(super) fn empty_request(hosts: &[&str]) -> EvacuationRequest {
    EvacuationRequest {
        goal: EvacuationGoal::Empty {
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            to: Vec::new(),
        },
        deadline_ns: None,
        accept_late: false,
        partial: false,
        priorities: BTreeMap::new(),
        limits: MoveLimits::default(),
        retries: RetryLimits::default(),
    }
}

/// Contents of a host with these VMs and nothing else.
pub(super) fn contents(host: &str, vms: &[&str]) -> HostContents {
    let qemus = vms.iter().map(|vm| QemuOnHost { vm: Some((*vm).to_owned()), pid: 7 }).collect();
    HostContents { qemus, ..HostContents::of_an_empty_host(host) }
}

pub(super) fn id(name: &str) -> EvacuationId {
    EvacuationId(name.to_owned())
}

/// A controller, and the fleet as its agents have reported it.
pub(super) struct Bench {
    pub(super) evacuations: Evacuations,
    pub(super) inventory: Inventory,
    pub(super) now_ns: u64,
    /// Actions of the last call.
    pub(super) actions: Vec<EvacuationAction>,
    /// Reports and outcomes so far, as text.
    pub(super) texts: Vec<String>,
    /// Orders whose moves have not ended, by VM.
    pub(super) orders: BTreeMap<String, MoveOrder>,
    /// Rates that agents have been given.
    pub(super) rates: BTreeMap<String, Option<u64>>,
}

impl Bench {
    /// Returns a bench whose hosts are all connected.
    pub(super) fn new(hosts: Vec<HostSpec>, vms: Vec<VmSpec>) -> Self {
        let names: Vec<String> = hosts.iter().map(|host| host.name.clone()).collect();
        let mut bench = Self {
            evacuations: Evacuations::default(),
            inventory: inventory(hosts, vms),
            now_ns: 1000 * SECOND,
            actions: Vec::new(),
            texts: Vec::new(),
            orders: BTreeMap::new(),
            rates: BTreeMap::new(),
        };
        for host in names {
            bench.handle(&EvacuationEvent::HostConnected { host });
        }
        bench
    }

    pub(super) fn take(&mut self, step: EvacuationStep) {
        for action in &step.actions {
            match action {
                EvacuationAction::StartMove { order } => {
                    self.rates.insert(order.vm.clone(), order.bytes_per_s);
                    self.orders.insert(order.vm.clone(), order.clone());
                }
                EvacuationAction::SetBandwidth { command, bytes_per_s, .. } => {
                    let order = self.orders.values().find(|order| order.command == *command);
                    if let Some(vm) = order.map(|order| order.vm.clone()) {
                        self.rates.insert(vm, *bytes_per_s);
                    }
                }
                EvacuationAction::Report { report, .. } => self.texts.push(report.to_string()),
                EvacuationAction::Finished { outcome, .. } => self.texts.push(outcome.to_string()),
                EvacuationAction::Cordon { host } | EvacuationAction::Uncordon { host } => {
                    let spec = self.inventory.hosts.iter_mut().find(|spec| spec.name == *host);
                    spec.unwrap().cordoned = matches!(action, EvacuationAction::Cordon { .. });
                }
                EvacuationAction::AskFacts { .. } | EvacuationAction::CancelMove { .. } => {}
            }
        }
        self.actions = step.actions;
    }

    pub(super) fn handle(&mut self, event: &EvacuationEvent) {
        let step = self.evacuations.handle(event, &self.inventory, self.now_ns);
        self.take(step);
    }

    pub(super) fn tick(&mut self, seconds: u64) {
        self.now_ns += seconds * SECOND;
        self.handle(&EvacuationEvent::Tick);
    }

    /// Begins an evacuation, and answers its questions.
    pub(super) fn begin(&mut self, name: &str, request: EvacuationRequest) {
        let step = self.evacuations.begin(id(name), request, &self.inventory, self.now_ns).unwrap();
        self.take(step);
        self.answer();
    }

    /// Answers all questions of the last actions: agents know no command.
    pub(super) fn answer(&mut self) {
        let mut asked = self.questions();
        while let Some((host, commands)) = asked.pop() {
            let commands = commands.into_iter().map(|command| (command, CommandState::Unknown)).collect();
            self.answer_with(&host, commands, contents(&host, &self.vms_on(&host)));
            asked.extend(self.questions());
        }
    }

    /// Answers the question of the last actions to a host.
    pub(super) fn answer_with(
        &mut self,
        host: &str,
        commands: BTreeMap<CommandId, CommandState>,
        contents: HostContents,
    ) {
        let vms: BTreeSet<String> = self.vms_on(host).into_iter().map(str::to_owned).collect();
        let facts = HostFacts { host: host.to_owned(), vms, commands, contents };
        self.handle(&EvacuationEvent::Facts { facts });
    }

    /// Returns the questions of the last actions: hosts and commands.
    pub(super) fn questions(&self) -> Vec<(String, Vec<CommandId>)> {
        let asked = self.actions.iter().filter_map(|action| match action {
            EvacuationAction::AskFacts { host, commands } => Some((host.clone(), commands.clone())),
            _ => None,
        });
        asked.collect()
    }

    pub(super) fn vms_on(&self, host: &str) -> Vec<&'static str> {
        let here = self.inventory.vms.iter().filter(|spec| spec.host == host);
        // Names live as long as the test.
        here.map(|spec| &*Box::leak(spec.name.clone().into_boxed_str())).collect()
    }

    pub(super) fn spec(&mut self, vm: &str) -> &mut VmSpec {
        self.inventory.vms.iter_mut().find(|spec| spec.name == vm).unwrap()
    }

    /// Returns the moves that were ordered and have not ended, as `vm from>to`.
    pub(super) fn ordered(&self) -> Vec<String> {
        let text = |order: &MoveOrder| format!("{} {}>{}", order.vm, order.from, order.to);
        self.orders.values().map(text).collect()
    }

    /// Ends a move, and answers the questions that follow.
    pub(super) fn end(&mut self, vm: &str, end: MoveEnd) {
        let order = self.orders.remove(vm).unwrap();
        if end == MoveEnd::Moved {
            self.spec(vm).host = order.to.clone();
        }
        if let MoveEnd::InDoubt { .. } = end {
            self.orders.insert(vm.to_owned(), order.clone());
        }
        self.handle(&EvacuationEvent::MoveEnded { command: order.command, end });
        self.answer();
    }

    /// Lets all moves succeed until none is ordered any longer.
    pub(super) fn run(&mut self) {
        for _ in 0..100 {
            let Some(vm) = self.orders.keys().next().cloned() else {
                self.tick(60);
                self.answer();
                if self.orders.is_empty() {
                    return;
                }
                continue;
            };
            self.now_ns += 5 * SECOND;
            self.end(&vm, MoveEnd::Moved);
        }
        panic!("moves do not end: {:?}", self.texts);
    }

    pub(super) fn one(&self, name: &str) -> &Evacuation {
        self.evacuations.get(&id(name)).unwrap()
    }

    pub(super) fn outcome(&self, name: &str) -> &EvacuationOutcome {
        let one = self.one(name);
        one.outcome()
            .unwrap_or_else(|| panic!("{name} runs: {:#?} {:?}", one.status(self.now_ns), self.texts))
    }

    /// Returns true if a report or an outcome has this part.
    pub(super) fn has_text(&self, part: &str) -> bool {
        self.texts.iter().any(|text| text.contains(part))
    }

    /// Takes the place of the controller by one that has only what was stored.
    pub(super) fn restart(&mut self) {
        let stored: Vec<String> =
            self.evacuations.iter().map(|one| serde_json::to_string(one).unwrap()).collect();
        let stored = stored.iter().map(|text| serde_json::from_str(text).unwrap()).collect();
        self.evacuations = Evacuations::restore(stored);
        self.handle(&EvacuationEvent::Restarted);
    }

    pub(super) fn connect(&mut self, host: &str) {
        self.handle(&EvacuationEvent::HostConnected { host: host.to_owned() });
    }
}

/// Returns a failure of a kind.
pub(super) fn failed(kind: MoveFailure) -> MoveEnd {
    MoveEnd::Failed { kind, reason: format!("{kind:?}") }
}

/// Returns the number of actions that match.
pub(super) fn count(actions: &[EvacuationAction], is_one: impl Fn(&EvacuationAction) -> bool) -> usize {
    actions.iter().filter(|action| is_one(action)).count()
}
