//! Agents of a simulated fleet: they carry commands out, journal them, and answer questions.

use super::fleet::{SECOND, contents, vm};
use super::world::{Dice, Migration, World};
use crate::evacuation::*;

impl World {
    pub(super) fn agent_takes(&mut self, name: &str, action: EvacuationAction) {
        match action {
            EvacuationAction::StartMove { order } => self.start(name, order),
            EvacuationAction::CancelMove { command, .. } => {
                let known = self.hosts[name].journal.get(&command).cloned();
                match known {
                    Some(Some(end)) => self.send_event(name, EvacuationEvent::MoveEnded { command, end }),
                    // Near its end it is too late.
                    Some(None) if self.migrations[&command].is_in_doubt || self.dice.is_one_of(3) => {}
                    None | Some(None) => self.end(name, &command, MoveEnd::Cancelled),
                }
            }
            EvacuationAction::SetBandwidth { command, bytes_per_s, .. } => {
                if let Some(one) = self.migrations.get_mut(&command) {
                    one.bytes_per_s = bytes_per_s;
                }
            }
            EvacuationAction::AskFacts { host, commands } => {
                let facts = self.facts(&host, commands);
                self.send_event(name, EvacuationEvent::Facts { facts });
            }
            _ => {}
        }
    }

    fn start(&mut self, name: &str, order: MoveOrder) {
        let command = order.command.clone();
        match self.hosts[name].journal.get(&command).cloned() {
            Some(None) => return self.send_event(name, EvacuationEvent::MoveStarted { command }),
            Some(Some(end)) => return self.send_event(name, EvacuationEvent::MoveEnded { command, end }),
            None => {}
        }
        if self.vms.get(&order.vm).is_none_or(|at| at != name) {
            let reason = "the VM is not here".to_owned();
            return self.end(name, &command, MoveEnd::Failed { kind: MoveFailure::Other, reason });
        }
        let bytes_left = self.specs[&order.vm].memory_mib << 20;
        let migration = Migration {
            vm: order.vm,
            from: order.from,
            to: order.to.clone(),
            bytes_left,
            bytes_per_s: order.bytes_per_s,
            is_in_doubt: false,
        };
        let other = self.migrations.iter().find(|(id, one)| {
            one.vm == migration.vm && self.hosts[&one.from].journal.get(*id) == Some(&None)
        });
        if let Some((other, _)) = other {
            self.violate(format!("{} moves by {other}, and now by {command}", migration.vm));
        }
        self.migrations.insert(command.clone(), migration);
        self.hosts.get_mut(name).unwrap().journal.insert(command.clone(), None);
        self.check_memory(&order.to);
        self.send_event(name, EvacuationEvent::MoveStarted { command });
    }

    /// Ends a migration, or refuses one.
    fn end(&mut self, name: &str, command: &CommandId, end: MoveEnd) {
        self.hosts.get_mut(name).unwrap().journal.insert(command.clone(), Some(end.clone()));
        if end == MoveEnd::Moved {
            let (vm, to) = self.moved(command);
            self.vms.insert(vm.clone(), to.clone());
            if self.dice.is_one_of(4) {
                let until_ns = self.now_ns + self.dice.below(60) * SECOND;
                self.hosts.get_mut(name).unwrap().redirections.insert(vm.clone(), until_ns);
            }
            let vanished = EvacuationEvent::VmVanished { vm: vm.clone(), host: name.to_owned() };
            self.send_event(&to.clone(), EvacuationEvent::VmAppeared { vm, host: to });
            self.send_event(name, vanished);
        }
        self.send_event(name, EvacuationEvent::MoveEnded { command: command.clone(), end });
    }

    fn facts(&self, name: &str, commands: Vec<CommandId>) -> HostFacts {
        let host = &self.hosts[name];
        let state = |command: &CommandId| match host.journal.get(command) {
            None => CommandState::Unknown,
            Some(Some(end)) => CommandState::Ended { end: end.clone() },
            Some(None) if self.migrations[command].is_in_doubt => {
                CommandState::Ended { end: MoveEnd::InDoubt { reason: "cut".to_owned() } }
            }
            Some(None) => CommandState::Underway { progress: None },
        };
        let commands = commands.into_iter().map(|command| (command.clone(), state(&command))).collect();
        let vms = self.vms.iter().filter(|(_, at)| *at == name).map(|(vm, _)| vm.clone()).collect();
        HostFacts { host: name.to_owned(), vms, commands, contents: self.contents(name) }
    }

    pub(super) fn contents(&self, name: &str) -> HostContents {
        let vms: Vec<&str> =
            self.vms.iter().filter(|(_, at)| *at == name).map(|(vm, _)| vm.as_str()).collect();
        let running = self
            .migrations
            .iter()
            .filter(|(id, one)| one.to == name && self.hosts[&one.from].journal.get(*id) == Some(&None));
        let redirections = self.hosts[name].redirections.iter();
        HostContents {
            redirections: redirections
                .filter(|(_, until_ns)| **until_ns > self.now_ns)
                .map(|(vm, _)| vm.clone())
                .collect(),
            arrivals: running.map(|(_, one)| one.vm.clone()).collect(),
            ..contents(name, &vms)
        }
    }

    /// Lets time pass: migrations progress, end, and fail if `fails` allows it.
    pub(super) fn pass(&mut self, span_ns: u64, fails: bool) {
        self.now_ns += span_ns;
        let active: Vec<CommandId> = self
            .migrations
            .iter()
            .filter(|(id, one)| self.hosts[&one.from].journal.get(*id) == Some(&None))
            .map(|(id, _)| id.clone())
            .collect();
        for command in active {
            let one = self.migrations.get_mut(&command).unwrap();
            let rate = one.bytes_per_s.unwrap_or(1_000_000_000).min(1_000_000_000);
            let from = one.from.clone();
            if one.is_in_doubt {
                if !fails || self.dice.is_one_of(40) {
                    one.is_in_doubt = false;
                    let end = if self.dice.is_one_of(2) { MoveEnd::Moved } else { failure(&mut self.dice) };
                    self.end(&from, &command, end);
                }
                continue;
            }
            one.bytes_left = one.bytes_left.saturating_sub(rate / 1000 * (span_ns / 1_000_000));
            let progress =
                MoveProgress { bytes_left: one.bytes_left, bytes_per_s: rate, ..MoveProgress::default() };
            let is_done = one.bytes_left == 0;
            if fails && self.dice.is_one_of(120) {
                one.is_in_doubt = true;
                let end = MoveEnd::InDoubt { reason: "cut".to_owned() };
                self.send_event(&from, EvacuationEvent::MoveEnded { command, end });
            } else if fails && self.dice.is_one_of(60) {
                let end = failure(&mut self.dice);
                self.end(&from, &command, end);
            } else if is_done {
                self.end(&from, &command, MoveEnd::Moved);
            } else {
                self.send_event(&from, EvacuationEvent::MoveProgressed { command, progress });
            }
        }
    }

    /// Starts a VM, as a user does.
    pub(super) fn start_up(&mut self, host: &str) {
        let name = format!("new{}", self.specs.len());
        self.specs.insert(name.clone(), vm(&name, host, 1));
        self.vms.insert(name.clone(), host.to_owned());
        self.send_event(host, EvacuationEvent::VmAppeared { vm: name, host: host.to_owned() });
    }

    /// Ends a VM, as its guest shuts down: also while it moves.
    pub(super) fn shut_down(&mut self, vm: &str) {
        let mut moving = self
            .migrations
            .iter()
            .filter(|(id, one)| one.vm == vm && self.hosts[&one.from].journal.get(*id) == Some(&None));
        let moving = moving.next().map(|(id, one)| (id.clone(), one.is_in_doubt));
        if matches!(moving, Some((_, true))) {
            return;
        }
        if let Some(host) = self.vms.remove(vm) {
            // The inventory of the controller has it for some time.
            if let Some((command, _)) = moving {
                self.end(&host, &command, MoveEnd::VmEnded);
            }
            self.send_event(&host, EvacuationEvent::VmVanished { vm: vm.to_owned(), host: host.clone() });
        }
    }
}

/// Returns a failure of any kind.
fn failure(dice: &mut Dice) -> MoveEnd {
    let kinds = [
        MoveFailure::Refused,
        MoveFailure::Connection,
        MoveFailure::NotConverging,
        MoveFailure::Other,
        MoveFailure::Other,
        MoveFailure::Immovable,
    ];
    let kind = *dice.pick(&kinds).unwrap_or(&MoveFailure::Other);
    MoveEnd::Failed { kind, reason: "as the dice fell".to_owned() }
}
