//! A simulated fleet: hosts with agents and journals, connections that lose messages, and a controller that stores what
//! it has to. All that happens follows from a seed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::fleet::{GIB, SECOND, host, inventory, vm};
use super::planted::Planted;
use crate::evacuation::*;
use crate::planner::Inventory;
use crate::planner::inventory::VmSpec;

/// Numbers that follow from a seed.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    /// Returns a number below a limit (`SplitMix64`).
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    pub(super) fn is_one_of(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        if list.is_empty() { None } else { Some(&list[self.below(list.len() as u64) as usize]) }
    }
}

/// A migration that its hosts carry out.
#[derive(Clone, Debug)]
pub(super) struct Migration {
    pub(super) vm: String,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) bytes_left: u64,
    pub(super) bytes_per_s: Option<u64>,
    /// True while neither host knows which one has the VM.
    pub(super) is_in_doubt: bool,
}

/// A host and its agent.
#[derive(Clone, Debug)]
pub(super) struct SimulatedHost {
    pub(super) is_connected: bool,
    /// Commands that the agent has seen: none while a migration is under way.
    pub(super) journal: BTreeMap<CommandId, Option<MoveEnd>>,
    pub(super) to_controller: VecDeque<EvacuationEvent>,
    pub(super) to_agent: VecDeque<EvacuationAction>,
    /// Times at which redirections end, by VM.
    pub(super) redirections: BTreeMap<String, u64>,
}

/// The fleet and its controller.
pub(super) struct World {
    pub(super) dice: Dice,
    pub(super) now_ns: u64,
    pub(super) hosts: BTreeMap<String, SimulatedHost>,
    /// VMs with their true hosts.
    pub(super) vms: BTreeMap<String, String>,
    pub(super) migrations: BTreeMap<CommandId, Migration>,
    /// All VMs that ever were.
    pub(super) specs: BTreeMap<String, VmSpec>,
    /// Hosts, and VMs with their hosts, as the controller knows them.
    pub(super) known: Inventory,
    pub(super) evacuations: Evacuations,
    stored: BTreeMap<EvacuationId, String>,
    /// All commands that were ever sent, by VM.
    sent: BTreeMap<String, BTreeSet<CommandId>>,
    /// VM and hosts of each command that was ever sent.
    meanings: BTreeMap<CommandId, [String; 3]>,
    pub(super) planted: Planted,
    /// Violations that were seen.
    pub(super) violations: Vec<String>,
    pub(super) texts: Vec<String>,
}

impl World {
    pub(super) fn new(seed: u64, planted: Planted) -> Self {
        let mut dice = Dice(seed);
        let count = 3 + dice.below(3);
        let names: Vec<String> = (0..count).map(|at| format!("h{at}")).collect();
        let mut vms = Vec::new();
        let mut hosts = Vec::new();
        for name in &names {
            // Half of the fleets are almost full.
            let most = if dice.is_one_of(2) { 14 } else { 28 };
            let mut used = 0;
            for _ in 0..dice.below(5) {
                let gib = 1 + dice.below(most);
                if used + gib <= 64 {
                    used += gib;
                    vms.push(vm(&format!("v{}", vms.len()), name, gib));
                }
            }
            let mut spec = host(name);
            if dice.is_one_of(3) {
                spec.memory_mib = spec.memory_mib.min((used + 2) * GIB).max(8 * GIB);
            }
            hosts.push(spec);
        }
        let new_host = |name: &String| {
            let simulated = SimulatedHost {
                is_connected: false,
                journal: BTreeMap::new(),
                to_controller: VecDeque::new(),
                to_agent: VecDeque::new(),
                redirections: BTreeMap::new(),
            };
            (name.clone(), simulated)
        };
        let mut world = Self {
            dice,
            now_ns: 5000 * SECOND,
            hosts: names.iter().map(new_host).collect(),
            vms: vms.iter().map(|spec| (spec.name.clone(), spec.host.clone())).collect(),
            migrations: BTreeMap::new(),
            known: inventory(hosts, vms.clone()),
            specs: vms.into_iter().map(|spec| (spec.name.clone(), spec)).collect(),
            evacuations: Evacuations::default(),
            stored: BTreeMap::new(),
            sent: BTreeMap::new(),
            meanings: BTreeMap::new(),
            planted,
            violations: Vec::new(),
            texts: Vec::new(),
        };
        for name in &names {
            world.connect(name);
        }
        world
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.hosts.keys().cloned().collect()
    }

    pub(super) fn violate(&mut self, text: String) {
        self.violations.push(text);
    }

    // The controller.

    /// Begins an evacuation if it is not refused.
    pub(super) fn begin(&mut self, name: &str, request: EvacuationRequest) -> bool {
        let begun = self.evacuations.begin(EvacuationId(name.to_owned()), request, &self.known, self.now_ns);
        match begun {
            Ok(step) => self.carry_out(step),
            Err(refusal) => self.texts.push(format!("{name}: {refusal}")),
        }
        self.evacuations.get(&EvacuationId(name.to_owned())).is_some()
    }

    pub(super) fn handle(&mut self, event: &EvacuationEvent) {
        let step = self.evacuations.handle(event, &self.known, self.now_ns);
        self.carry_out(step);
    }

    /// Stores, and then acts. The controller may die at any moment in between.
    pub(super) fn carry_out(&mut self, step: EvacuationStep) {
        let odds = if self.planted == Planted::ActsBeforeItStores { 30 } else { 150 };
        let dies_at = if self.dice.is_one_of(odds) { Some(self.dice.below(4)) } else { None };
        if dies_at == Some(0) && self.planted != Planted::ActsBeforeItStores {
            return self.restart();
        }
        if !(dies_at.is_some() && self.planted == Planted::ActsBeforeItStores) {
            for id in &step.changed {
                let one = self.evacuations.get(id).unwrap();
                self.stored.insert(id.clone(), serde_json::to_string(one).unwrap());
            }
        }
        for (at, action) in step.actions.into_iter().enumerate() {
            if dies_at == Some(at as u64 + 1) {
                break;
            }
            self.act(action);
        }
        if dies_at.is_some() {
            self.restart();
        }
    }

    fn act(&mut self, action: EvacuationAction) {
        let action = self.planted.change_action(action, &self.sent);
        let host = match &action {
            EvacuationAction::AskFacts { host, .. } => host.clone(),
            EvacuationAction::StartMove { order } => {
                self.check_start(order);
                order.from.clone()
            }
            EvacuationAction::SetBandwidth { from, .. } | EvacuationAction::CancelMove { from, .. } => {
                from.clone()
            }
            EvacuationAction::Cordon { host } | EvacuationAction::Uncordon { host } => {
                let spec = self.known.hosts.iter_mut().find(|spec| spec.name == *host).unwrap();
                spec.cordoned = matches!(action, EvacuationAction::Cordon { .. });
                return;
            }
            EvacuationAction::Report { evacuation, report } => {
                return self.texts.push(format!("{} s, {evacuation}: {report}", self.now_ns / SECOND));
            }
            EvacuationAction::Finished { evacuation, outcome } => {
                self.texts.push(format!("{} s, {evacuation}: {outcome}", self.now_ns / SECOND));
                return self.check_outcome(&evacuation.clone(), outcome);
            }
        };
        let host = self.hosts.get_mut(&host).unwrap();
        if host.is_connected {
            host.to_agent.push_back(action);
        }
    }

    /// Takes the place of the controller by one that knows only what was stored.
    pub(super) fn restart(&mut self) {
        let stored = self.stored.values().map(|text| self.planted.change_stored(text));
        self.evacuations = Evacuations::restore(stored.collect());
        for name in self.names() {
            self.disconnect(&name);
        }
        self.texts.push(format!("{} s: the controller restarts", self.now_ns / SECOND));
        let step = self.evacuations.handle(&EvacuationEvent::Restarted, &self.known, self.now_ns);
        // It does not die while it starts: the next event is soon enough.
        for id in &step.changed {
            let one = self.evacuations.get(id).unwrap();
            self.stored.insert(id.clone(), serde_json::to_string(one).unwrap());
        }
        for action in step.actions {
            self.act(action);
        }
    }

    /// Hands an event of an agent to the controller, which first learns from it where VMs are.
    fn deliver(&mut self, event: &EvacuationEvent) {
        match event {
            EvacuationEvent::VmAppeared { vm, host } => self.learn(vm, host),
            EvacuationEvent::Facts { facts } => {
                for vm in &facts.vms {
                    self.learn(vm, &facts.host);
                }
            }
            EvacuationEvent::MoveEnded { command, end: MoveEnd::Moved } => {
                let (vm, to) = self.moved(command);
                self.learn(&vm, &to);
            }
            EvacuationEvent::VmVanished { vm, host } => {
                self.known
                    .vms
                    .retain(|spec| spec.name != *vm || spec.host != *host || self.vms.contains_key(vm));
            }
            _ => {}
        }
        self.handle(event);
    }

    fn learn(&mut self, vm: &str, host: &str) {
        match self.known.vms.iter_mut().find(|spec| spec.name == vm) {
            Some(spec) => host.clone_into(&mut spec.host),
            None => self.known.vms.push(VmSpec { host: host.to_owned(), ..self.specs[vm].clone() }),
        }
    }

    pub(super) fn moved(&self, command: &CommandId) -> (String, String) {
        let one = &self.migrations[command];
        (one.vm.clone(), one.to.clone())
    }

    // Connections.

    pub(super) fn disconnect(&mut self, name: &str) {
        let host = self.hosts.get_mut(name).unwrap();
        host.is_connected = false;
        host.to_controller.clear();
        host.to_agent.clear();
    }

    pub(super) fn lose(&mut self, name: &str) {
        if self.hosts[name].is_connected {
            self.disconnect(name);
            for event in self.planted.at_loss(name, &self.evacuations) {
                self.handle(&event);
            }
            self.handle(&EvacuationEvent::HostLost { host: name.to_owned() });
        }
    }

    pub(super) fn connect(&mut self, name: &str) {
        if self.hosts[name].is_connected {
            return;
        }
        self.hosts.get_mut(name).unwrap().is_connected = true;
        // An agent begins with what its host has.
        let vms: Vec<String> =
            self.vms.iter().filter(|(_, at)| *at == name).map(|(vm, _)| vm.clone()).collect();
        for vm in vms {
            self.learn(&vm, name);
        }
        let vms = &self.vms;
        self.known.vms.retain(|spec| spec.host != name || vms.contains_key(&spec.name));
        self.handle(&EvacuationEvent::HostConnected { host: name.to_owned() });
    }

    pub(super) fn send_event(&mut self, host: &str, event: EvacuationEvent) {
        let host = self.hosts.get_mut(host).unwrap();
        if host.is_connected {
            host.to_controller.push_back(event);
        }
    }

    /// Delivers a message, if there is one, in one direction of a host's connection.
    pub(super) fn deliver_one(&mut self, name: &str, is_to_agent: bool) {
        let host = self.hosts.get_mut(name).unwrap();
        if is_to_agent {
            if let Some(action) = host.to_agent.pop_front() {
                self.agent_takes(name, action);
            }
        } else if let Some(event) = host.to_controller.pop_front() {
            let event = self.planted.change_event(event);
            self.deliver(&event);
            // Messages may come twice.
            let is_repeated = !matches!(event, EvacuationEvent::Facts { .. }) && self.dice.is_one_of(10);
            if is_repeated && self.hosts[name].is_connected {
                self.deliver(&event);
            }
        }
    }

    // Checks.

    /// Checks that no earlier command for the VM can still do anything.
    fn check_start(&mut self, order: &MoveOrder) {
        let meaning = [&order.vm, &order.from, &order.to].map(String::clone);
        let before = self.meanings.insert(order.command.clone(), meaning.clone());
        if let Some(before) = before.filter(|before| *before != meaning) {
            self.violate(format!("{} means {before:?}, and now {meaning:?}", order.command));
            return;
        }
        let sent = self.sent.entry(order.vm.clone()).or_default();
        let hosts = &self.hosts;
        let is_open = |command: &&CommandId| {
            **command != order.command
                && !hosts.values().any(|host| matches!(host.journal.get(*command), Some(Some(_))))
        };
        let open = sent.iter().find(is_open).cloned();
        sent.insert(order.command.clone());
        if let Some(open) = open {
            self.violate(format!("{} is ordered for {}, and {open} is open", order.command, order.vm));
        }
    }

    pub(super) fn check_memory(&mut self, name: &str) {
        let at = self.vms.iter().filter(|(_, at)| *at == name).map(|(vm, _)| vm);
        let arriving = self
            .migrations
            .iter()
            .filter(|(id, one)| one.to == name && self.hosts[&one.from].journal.get(*id) == Some(&None));
        let all: BTreeSet<&String> = at.chain(arriving.map(|(_, one)| &one.vm)).collect();
        let sum: u64 = all.iter().map(|vm| self.specs[*vm].memory_mib).sum();
        // VMs that users have started since take room that was promised to others.
        let of_users = all.iter().filter(|vm| vm.starts_with("new")).map(|vm| self.specs[*vm].memory_mib);
        let has = self.known.hosts.iter().find(|spec| spec.name == name).unwrap().guest_mib()
            + of_users.sum::<u64>();
        if sum > has {
            self.violate(format!("host {name} has {has} MiB, and {sum} are used"));
        }
    }

    fn check_outcome(&mut self, evacuation: &EvacuationId, outcome: &EvacuationOutcome) {
        let one = self.evacuations.get(evacuation).unwrap();
        match (outcome, &one.request().goal) {
            (EvacuationOutcome::Done { .. }, EvacuationGoal::Empty { hosts, .. }) => {
                for host in hosts.clone() {
                    let mut remaining = self.contents(&host).what_remains();
                    // Users start VMs at any moment; what an agent has reported of that is still on its way.
                    let is_on_its_way = |vm: &String| {
                        self.hosts[&host].to_controller.iter().any(
                            |event| matches!(event, EvacuationEvent::VmAppeared { vm: new, .. } if new == vm),
                        )
                    };
                    remaining.retain(|one| match one {
                        Remaining::Vm { vm } => !(vm.starts_with("new") && is_on_its_way(vm)),
                        _ => true,
                    });
                    // A VM that fails to arrive elsewhere is not here; redirections end by themselves.
                    if !remaining.is_empty() {
                        self.violate(format!("host {host} counts as empty, and has {remaining:?}"));
                    }
                }
            }
            (EvacuationOutcome::Incomplete { vms, hosts }, _) if vms.is_empty() && hosts.is_empty() => {
                self.violate(format!("{evacuation} is incomplete without a reason"));
            }
            _ => {}
        }
    }
}
