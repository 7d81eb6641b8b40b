//! Connections and reports of agents.

use std::collections::BTreeSet;
use std::sync::mpsc::Sender;

use api::report::unix_ms_now;
use engine::evacuation::{
    CommandId as MoveId, CommandState, EvacuationEvent, HostContents, HostFacts as MomentFacts,
};
use link::Handle;
use proto::message::{
    CommandAnswer, FleetChange, FleetReport, HostFacts, Message, MigrationFacts, MigrationStanding,
};
use proto::{CommandId, HostId, MigrationId, VmName};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tracing::{error, warn};

use super::{AgentLink, Coordinator};

/// Names in a snapshot of a host.
#[derive(Debug, Default)]
pub(super) struct SnapshotNames {
    vms: BTreeSet<VmName>,
    migrations: BTreeSet<MigrationId>,
}

impl Coordinator {
    /// Enters the connection of an agent, in place of an earlier one. Returns its number.
    pub(crate) fn connect(&mut self, host: &HostId, outgoing: Sender<Message>, handle: Handle) -> u64 {
        if let Some(earlier) = self.links.remove(host) {
            earlier.handle.shutdown();
            self.disconnected(host, "the agent has connected anew");
        }
        self.commands.last_link += 1;
        let number = self.commands.last_link;
        // The channel is new: it has a receiver.
        let _ = outgoing.send(Message::ControllerTerm { term: self.term });
        self.links.insert(host.clone(), AgentLink { number, outgoing, handle, seq: 0, snapshot: None });
        number
    }

    /// Removes the connection with this number, if it is still the host's present one.
    pub(crate) fn disconnect(&mut self, host: &HostId, number: u64, why: &str) {
        if !self.is_ending && self.links.get(host).is_some_and(|agent| agent.number == number) {
            self.links.remove(host);
            self.disconnected(host, why);
            self.settle();
        }
    }

    fn disconnected(&mut self, host: &HostId, why: &str) {
        self.commands.cordons.remove(host);
        self.commands.waiting.retain(|_, (asked, _)| asked != host);
        if !self.fleet.change(host, |entry| std::mem::take(&mut entry.connected)) {
            return;
        }
        self.event("host-lost", |event| {
            event.host = Some(host.to_string());
            event.text = format!("host {host} has lost its connection: {why}; its VMs and migrations go on");
        });
        self.feed(&EvacuationEvent::HostLost { host: host.to_string() });
    }

    /// Takes a report. Returns an error if the connection has to end.
    pub(crate) fn report(
        &mut self,
        host: &HostId,
        number: u64,
        seq: u64,
        report: FleetReport,
    ) -> Result<(), String> {
        let Some(agent) = self.links.get_mut(host).filter(|agent| agent.number == number) else {
            return Err("the agent has connected anew".to_owned());
        };
        if seq != agent.seq + 1 {
            return Err(format!("report {seq} follows report {}", agent.seq));
        }
        agent.seq = seq;
        self.fleet.change_load(host, |entry| entry.last_report_unix_ms = unix_ms_now());
        match report {
            FleetReport::Begin { host: facts } => {
                if let Some(agent) = self.links.get_mut(host) {
                    agent.snapshot = Some(SnapshotNames::default());
                }
                self.take_facts(host, *facts);
            }
            FleetReport::Changed { changes } => {
                for change in changes {
                    self.take_change(host, change);
                }
            }
            FleetReport::Complete => self.complete(host),
            FleetReport::Answer { id, answer } => self.take_answer(host, &id, answer),
            FleetReport::EvacuateHost { request, within_s } => {
                self.evacuate_for_host(host, request, within_s);
            }
        }
        self.settle();
        Ok(())
    }

    fn take_facts(&mut self, host: &HostId, facts: HostFacts) {
        let cordoned = facts.cordoned;
        let is_ordered = self.commands.cordons.contains_key(host);
        let is_other = self.fleet.change(host, |entry| {
            entry.facts = Some(facts);
            // An order that is under way changes the state: its answer decides.
            !is_ordered && entry.cordon.take_report(cordoned)
        });
        if is_other {
            self.order_cordon(host);
        }
    }

    /// Ends a snapshot: what it has not named is gone.
    fn complete(&mut self, host: &HostId) {
        let Some(names) = self.links.get_mut(host).and_then(|agent| agent.snapshot.take()) else { return };
        let gone: Vec<VmName> = self.fleet.host(host).map_or_else(Vec::new, |entry| {
            entry.vms.keys().filter(|vm| !names.vms.contains(*vm)).cloned().collect()
        });
        for vm in &gone {
            self.vm_gone(host, vm);
        }
        self.fleet.change(host, |entry| {
            entry.migrations.retain(|id, _| names.migrations.contains(id));
            entry.connected = true;
        });
        let vms = self.fleet.host(host).map_or(0, |entry| entry.vms.len());
        self.event("host-connected", |event| {
            event.host = Some(host.to_string());
            event.text = format!("host {host} is connected, with {vms} VMs");
        });
        self.feed(&EvacuationEvent::HostConnected { host: host.to_string() });
    }

    fn take_change(&mut self, host: &HostId, change: FleetChange) {
        match change {
            FleetChange::Host { host: facts } => self.take_facts(host, *facts),
            FleetChange::Load { load } => self.fleet.change_load(host, |entry| entry.load = load),
            FleetChange::Contents { contents } => self.take_contents(host, contents),
            FleetChange::Vm { vm } => {
                let name = vm.vm.clone();
                if let Some(names) = self.snapshot(host) {
                    names.vms.insert(name.clone());
                }
                if self.fleet.put_vm(host, *vm) {
                    self.event("vm-appeared", |event| {
                        (event.host, event.vm) = (Some(host.to_string()), Some(name.to_string()));
                        event.text = format!("VM {name} is on host {host}");
                    });
                    self.feed(&EvacuationEvent::VmAppeared { vm: name.to_string(), host: host.to_string() });
                }
            }
            FleetChange::VmGone { vm } => self.vm_gone(host, &vm),
            FleetChange::Migration { migration } => self.take_migration(host, &migration),
            FleetChange::Move { command, state } => self.take_move(host, &command, state),
        }
    }

    fn snapshot(&mut self, host: &HostId) -> Option<&mut SnapshotNames> {
        self.links.get_mut(host)?.snapshot.as_mut()
    }

    fn vm_gone(&mut self, host: &HostId, vm: &VmName) {
        if self.fleet.remove_vm(host, vm) {
            self.event("vm-vanished", |event| {
                (event.host, event.vm) = (Some(host.to_string()), Some(vm.to_string()));
                event.text = format!("VM {vm} has left host {host}, or has ended");
            });
            self.feed(&EvacuationEvent::VmVanished { vm: vm.to_string(), host: host.to_string() });
        }
    }

    fn take_contents(&mut self, host: &HostId, contents: Value) {
        let Some(contents) = decoded::<HostContents>(host, "contents", contents) else { return };
        if contents.host != host.as_str() {
            warn!(%host, of = contents.host, "an agent reports the contents of another host");
            return;
        }
        self.fleet.change_load(host, |entry| entry.contents = Some(contents.clone()));
        self.feed(&EvacuationEvent::ContentsChanged { contents });
    }

    /// Takes the facts of a migration. Both of its hosts report it; events follow the source.
    fn take_migration(&mut self, host: &HostId, facts: &MigrationFacts) {
        if let Some(names) = self.snapshot(host) {
            names.migrations.insert(facts.migration.clone());
        }
        let before = self.fleet.put_migration(host, facts.clone());
        let is_news = facts.from == *host && before != Some(facts.standing);
        // Migrations that had ended before the controller knew of them are no news.
        if !is_news || (before.is_none() && facts.standing.is_over()) {
            return;
        }
        let MigrationFacts { migration, from, to, standing, message, .. } = facts;
        let reason = message.as_ref().map_or_else(String::new, |message| format!(": {message}"));
        let (kind, text) = match standing {
            MigrationStanding::Underway if before.is_none() => {
                ("migration-began", format!("migration {migration} from {from} to {to} has begun"))
            }
            MigrationStanding::Underway => {
                ("migration-settled", format!("migration {migration} is in doubt no longer"))
            }
            MigrationStanding::Done => {
                ("migration-ended", format!("VM {} has moved from {from} to {to}", migration.vm))
            }
            MigrationStanding::Failed => {
                ("migration-failed", format!("migration {migration} to {to} has failed{reason}"))
            }
            MigrationStanding::VmEnded => {
                ("migration-failed", format!("VM {} has ended before it was moved{reason}", migration.vm))
            }
            MigrationStanding::InDoubt => (
                "migration-in-doubt",
                format!("migration {migration} from {from} to {to} is in doubt{reason}"),
            ),
        };
        self.event(kind, |event| {
            (event.host, event.vm) = (Some(from.to_string()), Some(migration.vm.to_string()));
            event.text = text;
        });
    }

    /// Takes the state of a move.
    fn take_move(&mut self, host: &HostId, command: &CommandId, state: Value) {
        // Commands that are not of evacuations move no VMs.
        let Ok(command) = command.as_str().parse::<MoveId>() else { return };
        match self.evacuations.source_of(&command) {
            Some(source) if source == host.as_str() => {}
            Some(_) => {
                warn!(%host, %command, "an agent reports a move that it was not given");
                return;
            }
            // The evacuation was forgotten.
            None => return,
        }
        match decoded::<CommandState>(host, "state of a move", state) {
            None | Some(CommandState::Unknown) => {}
            Some(CommandState::Underway { progress }) => {
                self.feed(&EvacuationEvent::MoveStarted { command: command.clone() });
                if let Some(progress) = progress {
                    self.feed(&EvacuationEvent::MoveProgressed { command, progress });
                }
            }
            Some(CommandState::Ended { end }) => self.feed(&EvacuationEvent::MoveEnded { command, end }),
        }
    }

    fn take_answer(&mut self, host: &HostId, id: &CommandId, answer: CommandAnswer) {
        self.record_answer(host, id, &answer);
        let is_of_host = self.commands.waiting.get(id).is_some_and(|(asked, _)| asked == host);
        if is_of_host && let Some((_, waiting)) = self.commands.waiting.remove(id) {
            // Whoever has waited may have given up.
            let _ = waiting.send(answer);
            return;
        }
        if self.commands.cordons.get(host).is_some_and(|(ordered, _)| ordered == id) {
            self.cordon_answered(host, &answer);
            return;
        }
        match answer {
            CommandAnswer::Move { state } => self.take_move(host, id, state),
            CommandAnswer::Facts { facts } => {
                if let Some(mut facts) =
                    decoded::<MomentFacts>(host, "facts", facts).filter(|facts| facts.host == host.as_str())
                {
                    let is_own = |id: &MoveId| self.evacuations.source_of(id) == Some(host.as_str());
                    facts.commands.retain(|id, _| is_own(id));
                    self.feed(&EvacuationEvent::Facts { facts });
                }
            }
            CommandAnswer::Refused { problem } => {
                let text = problem["error"].as_str().unwrap_or("no reason was given").to_owned();
                warn!(%host, command = %id, error = text, "an agent has not carried out a command");
            }
            CommandAnswer::Stale { largest_term } => self.replaced(host, largest_term),
            CommandAnswer::Done | CommandAnswer::Checked { .. } | CommandAnswer::Report { .. } => {}
        }
    }

    /// Reports that an agent has seen a controller of a larger term.
    pub(crate) fn replaced(&mut self, host: &HostId, largest_term: u64) {
        let earlier = self.commands.replaced_by.insert(host.clone(), largest_term);
        if earlier == Some(largest_term) {
            // Its agent connects again and again.
            return;
        }
        let term = self.term;
        error!(%host, term, largest_term, "an agent has seen a controller of a larger term");
        self.event("controller-replaced", |event| {
            event.host = Some(host.to_string());
            event.text = format!(
                "host {host} has seen a controller of term {largest_term}, and this one has term {term}: another \
                 controller has replaced it, or its records are old. If no other one runs, start it with --least-term \
                 {largest_term}"
            );
        });
        self.settle();
    }
}

/// Decodes a document of an agent.
fn decoded<T: DeserializeOwned>(host: &HostId, what: &str, document: Value) -> Option<T> {
    serde_json::from_value(document)
        .inspect_err(|error| {
            warn!(%host, what, %error, "an agent has sent what is not understood; use the same version of whimbrel");
        })
        .ok()
}
