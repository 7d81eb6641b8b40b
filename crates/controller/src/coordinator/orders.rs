//! Actions that evacuations order, cordons, and questions of users to agents.

use std::sync::mpsc::{self, Receiver};

use api::report::unix_ms_now;
use engine::evacuation::{EvacuationAction, EvacuationGoal, EvacuationId, EvacuationReport, MoveOrder};
use proto::message::{CommandAnswer, CommandVerb, MoveOrder as AgentOrder};
use proto::{CommandId, HostId, VmName};
use store::fleet::{StoredAnswer, StoredCommand};
use tracing::{error, warn};

use super::Coordinator;
use crate::fleet::HostEntry;

impl Coordinator {
    /// Carries out an action. What led to it is stored.
    pub(super) fn carry_out(&mut self, action: EvacuationAction) {
        match action {
            EvacuationAction::AskFacts { host, commands } => {
                let commands =
                    commands.into_iter().filter_map(|id| CommandId::new(id.to_string()).ok()).collect();
                self.send_new(&host, CommandVerb::Facts { commands });
            }
            EvacuationAction::Cordon { host } => self.cordon_for_evacuation(&host, true),
            EvacuationAction::Uncordon { host } => self.cordon_for_evacuation(&host, false),
            EvacuationAction::StartMove { order } => self.start_move(&order),
            EvacuationAction::SetBandwidth { command, from, bytes_per_s } => {
                let Ok(of) = CommandId::new(command.to_string()) else { return };
                let bandwidth_bytes_per_s = Some(bytes_per_s.unwrap_or(0));
                let limit = CommandVerb::Limit { of, bandwidth_bytes_per_s, max_downtime_ms: None };
                self.send_new(&from, limit);
            }
            EvacuationAction::CancelMove { command, from } => {
                let Ok(of) = CommandId::new(command.to_string()) else { return };
                self.send_new(&from, CommandVerb::Cancel { of });
            }
            EvacuationAction::Report { evacuation, report } => self.evacuation_event(&evacuation, &report),
            EvacuationAction::Finished { evacuation, outcome } => {
                self.event("evacuation-ended", |event| {
                    event.evacuation = Some(evacuation.0.clone());
                    event.text = format!("evacuation {evacuation} has ended: {outcome}");
                });
                self.report_to_asking_hosts(&evacuation);
            }
        }
    }

    fn start_move(&mut self, order: &MoveOrder) {
        let names = (
            HostId::new(order.from.as_str()),
            HostId::new(order.to.as_str()),
            VmName::new(order.vm.as_str()),
        );
        let (Ok(from), Ok(to), Ok(vm), Ok(id)) =
            (names.0, names.1, names.2, CommandId::new(order.command.to_string()))
        else {
            error!(command = %order.command, "a move has impossible names");
            return;
        };
        let options =
            self.kept.get(&order.command.evacuation).map(|kept| kept.moves.clone()).unwrap_or_default();
        let command = CommandVerb::Move(AgentOrder {
            vm,
            to,
            bandwidth_bytes_per_s: order.bytes_per_s,
            policy: options.policy,
            verify: options.verify,
        });
        self.record_command(&from, &id, &command);
        self.send(&from, id, command);
    }

    /// Sends a command with a new id.
    fn send_new(&mut self, host: &str, command: CommandVerb) {
        let (Ok(host), Some(id)) = (HostId::new(host), self.next_command()) else { return };
        if matches!(command, CommandVerb::Cancel { .. }) {
            self.record_command(&host, &id, &command);
        }
        self.send(&host, id, command);
    }

    /// Records a command that is sent.
    fn record_command(&mut self, host: &HostId, id: &CommandId, command: &CommandVerb) {
        self.pending.batch.commands.push(StoredCommand {
            id: id.to_string(),
            host: host.to_string(),
            command: serde_json::to_string(command).unwrap_or_default(),
            sent_unix_ms: unix_ms_now(),
        });
    }

    /// Records the answer to a command, if the command was recorded.
    pub(super) fn record_answer(&mut self, host: &HostId, id: &CommandId, answer: &CommandAnswer) {
        let is_of_question = matches!(
            answer,
            CommandAnswer::Facts { .. } | CommandAnswer::Checked { .. } | CommandAnswer::Report { .. }
        );
        if !is_of_question {
            let answer = serde_json::to_string(answer).unwrap_or_default();
            let (id, host) = (id.to_string(), host.to_string());
            self.pending.batch.answers.push(StoredAnswer { id, host, answer });
        }
    }

    /// Records a report of an evacuation as an event.
    fn evacuation_event(&mut self, id: &EvacuationId, report: &EvacuationReport) {
        let document = serde_json::to_value(report).unwrap_or_default();
        let name = |key: &str| document[key].as_str().map(str::to_owned);
        let kind = format!("evacuation-{}", document["report"].as_str().unwrap_or("event"));
        self.event(&kind, |event| {
            event.evacuation = Some(id.0.clone());
            event.vm = name("vm");
            event.host = name("host").or_else(|| name("to"));
            event.text = format!("evacuation {id}: {report}");
        });
        self.report_to_asking_hosts(id);
    }

    // ---- cordons

    fn cordon_for_evacuation(&mut self, host: &str, cordoned: bool) {
        let Ok(host) = HostId::new(host) else { return };
        let is_goal = |goal: &EvacuationGoal| match goal {
            EvacuationGoal::Return { host: to, .. } => to == host.as_str(),
            EvacuationGoal::Empty { .. } => false,
        };
        let returns =
            self.evacuations.iter().any(|one| one.outcome().is_none() && is_goal(&one.request().goal));
        let is_changed = self.fleet.change(&host, |entry| {
            let before = entry.cordon.is_wanted();
            entry.cordon.by_evacuation = cordoned;
            if returns {
                // VMs are to come back, whoever has cordoned the host.
                entry.cordon.by_user &= cordoned;
            }
            entry.cordon.is_wanted() != before
        });
        if is_changed {
            self.cordon_changed(&host);
        } else {
            // After a restart the order may have been lost.
            self.order_cordon(&host);
        }
    }

    /// Lets a host accept no VMs, or accept them again, for a user.
    pub(crate) fn cordon_for_user(&mut self, host: &HostId, cordoned: bool) {
        self.fleet.change(host, |entry| {
            entry.cordon.by_user = cordoned;
            entry.cordon.by_evacuation &= cordoned;
        });
        self.cordon_changed(host);
        self.settle();
    }

    fn cordon_changed(&mut self, host: &HostId) {
        let cordoned = self.fleet.host(host).is_some_and(|entry| entry.cordon.is_wanted());
        let (kind, text) = if cordoned {
            ("host-cordoned", format!("host {host} accepts no more VMs"))
        } else {
            ("host-uncordoned", format!("host {host} accepts VMs again"))
        };
        self.event(kind, |event| {
            event.host = Some(host.to_string());
            event.text = text;
        });
        self.order_cordon(host);
    }

    /// Lets the agent of a host do what is wanted, if it is connected and does otherwise.
    pub(super) fn order_cordon(&mut self, host: &HostId) {
        let Some(entry) = self.fleet.host(host) else { return };
        let wanted = entry.cordon.is_wanted();
        let ordered = self.commands.cordons.get(host).map(|(_, ordered)| *ordered);
        if ordered.or(entry.cordon.reported) == Some(wanted) || !self.links.contains_key(host) {
            return;
        }
        let Some(id) = self.next_command() else { return };
        let command = if wanted { CommandVerb::Cordon } else { CommandVerb::Uncordon };
        self.commands.cordons.insert(host.clone(), (id.clone(), wanted));
        self.record_command(host, &id, &command);
        self.send(host, id, command);
    }

    /// Orders again what agents have not done about their cordons.
    pub(super) fn order_cordons_again(&mut self) {
        let is_other =
            |entry: &HostEntry| entry.connected && entry.cordon.reported != Some(entry.cordon.is_wanted());
        let hosts = self.fleet.hosts().filter(|(_, entry)| is_other(entry));
        for host in hosts.map(|(host, _)| host.clone()).collect::<Vec<_>>() {
            self.order_cordon(&host);
        }
    }

    pub(super) fn cordon_answered(&mut self, host: &HostId, answer: &CommandAnswer) {
        let Some((id, ordered)) = self.commands.cordons.remove(host) else { return };
        if *answer != CommandAnswer::Done {
            warn!(%host, command = %id, ?answer, "the agent has not changed its cordon");
            return;
        }
        self.fleet.change(host, |entry| {
            entry.cordon.reported = Some(ordered);
            if let Some(facts) = &mut entry.facts {
                facts.cordoned = ordered;
            }
        });
        // A user may have changed their mind in the meantime.
        self.order_cordon(host);
    }

    // ---- questions of users

    /// Sends a question to an agent. Returns the receiver of the answer; none if the host is not connected.
    pub(crate) fn ask(&mut self, host: &HostId, question: CommandVerb) -> Option<Receiver<CommandAnswer>> {
        if !self.links.contains_key(host) {
            return None;
        }
        let id = self.next_command()?;
        let (answer, receiver) = mpsc::channel();
        self.commands.waiting.insert(id.clone(), (host.clone(), answer));
        self.send(host, id, question);
        Some(receiver)
    }
}
