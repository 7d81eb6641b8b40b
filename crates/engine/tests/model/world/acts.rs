//! Events in the world around the agents: packets, failures, restarts, answers of the registry.

use engine::handover::QemuAtStart;
use engine::handover::destination::{DestinationEvent, DestinationState};
use engine::handover::recover::OperatorDecision;
use engine::handover::registry::{self, RegistryAnswer};
use engine::handover::source::{SourceEvent, SourceState};
use engine::session::{DestinationSession, SourceSession};
use proto::message::{RegistryReply, Verdict};

use super::*;
use crate::handover::Cut;
use crate::mutation::Rules;

impl World {
    pub(crate) fn send(&mut self, packet: Packet) {
        if let Err(place) = self.net.binary_search(&packet)
            && self.net.len() < usize::from(self.budget.in_flight)
        {
            self.net.insert(place, packet);
        } else if !self.net.contains(&packet) {
            self.lose(packet);
        }
    }

    /// Loses a packet. Data on the streams is lost only with them.
    pub(crate) fn lose(&mut self, packet: Packet) {
        self.net.retain(|other| *other != packet);
        if packet == Packet::Data(self.source.epoch) {
            self.streams = false;
        }
    }

    /// Feeds an event that reaches agents in any state, also before a migration.
    pub(crate) fn feed_source_if(&mut self, rules: &Rules, event: &SourceEvent, cut: Cut) {
        if *self.source.state() != SourceState::Idle {
            self.feed_source(rules, event, cut);
        }
    }

    /// Feeds an event that reaches agents in any state, also before a migration.
    pub(crate) fn feed_destination_if(&mut self, rules: &Rules, event: &DestinationEvent, cut: Cut) {
        if *self.destination.state() != DestinationState::Idle {
            self.feed_destination(rules, event, cut);
        }
    }

    /// Kills the agent, which loses its memory. Answers to its questions have no receiver.
    pub(crate) fn crash(&mut self, side: Side) {
        self.net.retain(|packet| !matches!(packet, Packet::Reply(to, ..) if *to == side));
        self.streams = false;
        match side {
            Side::Source => self.source.life = Life::Down,
            Side::Destination => {
                self.destination.life = Life::Down;
                self.ghost.destination.is_known_to_have_run = false;
            }
        }
    }

    /// Crashes the host, which loses its memory, its processes, and entries of the journal after the first `keep`.
    pub(crate) fn crash_host(&mut self, side: Side, keep: usize) {
        self.crash(side);
        match side {
            Side::Source => {
                self.source.journal.truncate(keep);
                self.source.rebooted = true;
                self.source_qemu = Qemu::Gone;
                self.source_cont = false;
                self.held = false;
                self.ghost.source.lost = true;
            }
            Side::Destination => {
                self.destination.journal.truncate(keep);
                self.destination.rebooted = true;
                self.kill_destination_qemu();
                self.ghost.destination.lost = true;
            }
        }
    }

    /// Kills the source's QEMU and notifies its agent.
    pub(crate) fn kill_source_qemu(&mut self, rules: &Rules, cut: Cut) {
        self.source_qemu = Qemu::Gone;
        self.source_cont = false;
        self.held = false;
        self.ghost.source.lost = true;
        let ends_phases = self.source.session.precedes_commit();
        self.feed_source_if(rules, &SourceEvent::QemuDied, cut);
        if ends_phases && let Some(next) = (rules.after_phases)(&self.source.session) {
            self.feed_source_if(rules, &next, cut);
        }
    }

    pub(crate) fn kill_destination_qemu(&mut self) {
        if self.destination_qemu != Qemu::Gone {
            self.ghost.destination.lost |= self.ghost.destination.cont_decided;
        }
        self.destination_qemu = Qemu::Gone;
        self.destination_cont = false;
    }

    pub(crate) fn restart(&mut self, rules: &Rules, side: Side, cut: Cut) {
        match side {
            Side::Source => {
                self.source.life = Life::Up;
                let state = self.source.journal.last().cloned().unwrap_or(SourceState::Idle);
                self.source.session = SourceSession::new(state);
                let found = found(self.source_qemu, self.source.rebooted, self.held);
                // Whether pages follow by post-copy is in the journal.
                self.source
                    .session
                    .set_destination_may_be_complete(found != QemuAtStart::Gone || !self.budget.post_copy);
                if *self.source.state() != SourceState::Idle {
                    self.feed_source(rules, &SourceEvent::Restarted(found), cut);
                    if let Some(next) = self.source.session.after_restart() {
                        self.feed_source(rules, &next, cut);
                    }
                }
            }
            Side::Destination => {
                self.destination.life = Life::Up;
                let state = self.destination.journal.last().cloned().unwrap_or(DestinationState::Idle);
                self.destination.session = DestinationSession::new(state);
                // Its connection is closed: the command was read or never will be.
                self.destination_cont = false;
                // A QEMU that lacks pages may not answer.
                let silent = self.ghost.destination.missing;
                let found = found(self.destination_qemu, self.destination.rebooted, silent);
                if *self.destination.state() != DestinationState::Idle {
                    self.feed_destination(rules, &DestinationEvent::Restarted(found), cut);
                }
            }
        }
    }

    /// Begins another attempt of the source's agent, if it may.
    pub(crate) fn begin(&mut self, rules: &Rules, cut: Cut) {
        let attempt = self.source.epoch + 1;
        self.source.epoch = attempt;
        self.source.base = self.registry.map_or(0, |record| record.epoch);
        self.source.session = SourceSession::new(SourceState::Idle);
        self.source.journal = vec![SourceState::Idle];
        self.source.rebooted = false;
        self.streams = false;
        self.net.retain(|packet| !matches!(packet, Packet::Reply(Side::Source, ..)));
        self.ghost.source = SourceGhost::default();
        self.feed_source(rules, &SourceEvent::Begin { run: true }, cut);
        if self.source.life == Life::Up {
            self.send(Packet::Propose(attempt));
        }
    }

    /// Delivers a packet that was removed from the network, or doubled.
    pub(crate) fn deliver(&mut self, rules: &Rules, packet: Packet, cut: Cut) {
        let epoch = |e: u8| Epoch(e.into());
        if let Packet::Go(e) | Packet::Committed(e) | Packet::AskDestination(e) = packet {
            self.meet_unknown(e);
        }
        self.answer_from_old_journal(packet);
        let to_source = |world: &mut Self, event| world.feed_source(rules, &event, cut);
        let to_destination = |world: &mut Self, event| world.feed_destination(rules, &event, cut);
        match packet {
            Packet::Propose(e) => {
                // An agent accepts no proposal while an older migration of the same VM has not ended.
                let idle = *self.destination.state() == DestinationState::Idle
                    || self.destination.state().is_final();
                if self.destination.life == Life::Up
                    && idle
                    && e > self.destination.epoch
                    && e == self.source.epoch
                {
                    let base = self.source.base;
                    self.destination = Agent { epoch: e, base, ..DestinationAgent::new() };
                    self.ghost.destination = DestinationGhost::default();
                    self.net.retain(|packet| !matches!(packet, Packet::Reply(Side::Destination, ..)));
                    self.destination_qemu = Qemu::Paused;
                    self.streams = self.source.life == Life::Up
                        && matches!(self.source.state(), SourceState::Prepared { .. });
                    to_destination(self, DestinationEvent::Prepare);
                }
            }
            Packet::Data(e) => {
                if e == self.destination.epoch && *self.destination.state() == DestinationState::Prepared {
                    self.ghost.destination.missing = self.budget.post_copy;
                    to_destination(self, DestinationEvent::Loaded { incarnation: incarnation(e), run: true });
                }
            }
            Packet::Ready(e) => {
                to_source(self, SourceEvent::Ready { epoch: epoch(e), incarnation: incarnation(e) });
            }
            Packet::Running(e) => to_source(self, SourceEvent::Running { epoch: epoch(e) }),
            Packet::Incomplete(e) => to_source(self, SourceEvent::Incomplete { epoch: epoch(e) }),
            Packet::Refused(e) => to_source(self, SourceEvent::Refused { epoch: epoch(e) }),
            Packet::Crashed(e) => to_source(self, SourceEvent::Crashed { epoch: epoch(e) }),
            Packet::AskSource(e) => to_source(self, SourceEvent::Asked { epoch: epoch(e) }),
            Packet::Go(e) => {
                let event = DestinationEvent::Go { epoch: epoch(e), incarnation: incarnation(e), run: true };
                to_destination(self, event);
            }
            Packet::Committed(e) => {
                let verdict = Verdict::Committed { incarnation: incarnation(e), run: true };
                to_destination(self, DestinationEvent::SourceAnswered { epoch: epoch(e), verdict });
            }
            Packet::Aborted(e) => {
                let verdict = Verdict::Aborted;
                to_destination(self, DestinationEvent::SourceAnswered { epoch: epoch(e), verdict });
            }
            Packet::Returned(e) => {
                let verdict = Verdict::Returned;
                to_destination(self, DestinationEvent::SourceAnswered { epoch: epoch(e), verdict });
            }
            Packet::Undecided(e) => {
                let verdict = Verdict::Undecided;
                to_destination(self, DestinationEvent::SourceAnswered { epoch: epoch(e), verdict });
            }
            Packet::Abort(e) => to_destination(self, DestinationEvent::AbortReceived { epoch: epoch(e) }),
            Packet::AskDestination(e) => to_destination(self, DestinationEvent::Asked { epoch: epoch(e) }),
            Packet::Request(from, e, op) => self.ask_registry(from, e, op),
            Packet::Reply(to, _, record) => {
                let answer = RegistryAnswer::Record(Some(large(record)));
                match to {
                    Side::Source => to_source(self, SourceEvent::RegistryAnswered(answer)),
                    Side::Destination => to_destination(self, DestinationEvent::RegistryAnswered(answer)),
                }
            }
        }
    }

    /// Delivers a message about an older attempt to that attempt's machine, which ended long ago: the source kept the
    /// guest, the destination refused or discarded it. (The present machines receive it too, and have to ignore it.)
    fn answer_from_old_journal(&mut self, packet: Packet) {
        let (source, destination) = (self.source.life == Life::Up, self.destination.life == Life::Up);
        match packet {
            Packet::Ready(e) | Packet::AskSource(e) if source && e < self.source.epoch => {
                self.send(Packet::Aborted(e));
            }
            Packet::Go(e) | Packet::AskDestination(e) if destination && e < self.destination.epoch => {
                self.send(Packet::Refused(e));
            }
            _ => {}
        }
    }

    /// Delivers a message about an attempt that is not in the destination's journal to a fresh machine.
    fn meet_unknown(&mut self, epoch: u8) {
        let free = *self.destination.state() == DestinationState::Idle || self.destination.state().is_final();
        if self.destination.life == Life::Up && epoch > self.destination.epoch && free {
            let base = self.source.base;
            self.destination = Agent { epoch, base, ..DestinationAgent::new() };
            self.ghost.destination = DestinationGhost::default();
        }
    }

    fn ask_registry(&mut self, from: Side, asked: u8, op: Op) {
        let Some(record) = self.registry.filter(|_| !self.registry_lost) else { return };
        let request = large_op(op);
        let (reply, new) = registry::apply(&request, Some(&large(record)));
        if let Some(new) = new {
            self.registry = Some(small(&new));
        }
        let answer = match reply {
            RegistryReply::Failed { .. } => RegistryAnswer::Unreachable,
            reply => RegistryAnswer::from_reply(&request, reply),
        };
        let (life, epoch) = match from {
            Side::Source => (self.source.life, self.source.epoch),
            Side::Destination => (self.destination.life, self.destination.epoch),
        };
        if let (RegistryAnswer::Record(Some(owned)), Life::Up, true) = (answer, life, epoch == asked) {
            self.send(Packet::Reply(from, epoch, small(&owned)));
        }
    }

    /// Performs a `cont` of QEMU, if it lives, and notifies the agents that live.
    pub(crate) fn source_cont_done(&mut self, rules: &Rules, cut: Cut) {
        self.source_cont = false;
        if self.source_qemu == Qemu::Gone {
            return self.feed_source(rules, &SourceEvent::QemuDied, cut);
        }
        self.source_qemu = Qemu::Running;
        self.ghost.source.ran_on = true;
        self.feed_source(rules, &SourceEvent::Continued, cut);
    }

    pub(crate) fn destination_cont_done(&mut self, rules: &Rules, cut: Cut) {
        self.destination_cont = false;
        self.destination_qemu = Qemu::Running;
        self.ghost.destination.ran = true;
        self.ghost.destination.is_known_to_have_run |= self.destination.life == Life::Up;
        let missing = self.ghost.destination.missing;
        self.feed_destination(rules, &DestinationEvent::Continued { missing }, cut);
    }

    /// Places the last missing page.
    pub(crate) fn complete(&mut self, rules: &Rules, cut: Cut) {
        self.ghost.destination.missing = false;
        self.feed_destination(rules, &DestinationEvent::Completed, cut);
    }

    pub(crate) fn decide(&mut self, rules: &Rules, side: Side, decision: OperatorDecision) {
        match side {
            Side::Source => self.feed_source(rules, &SourceEvent::OperatorDecided(decision), None),
            Side::Destination => {
                self.feed_destination(rules, &DestinationEvent::OperatorDecided(decision), None);
            }
        }
    }
}

pub(super) fn found(qemu: Qemu, rebooted: bool, held: bool) -> QemuAtStart {
    match qemu {
        Qemu::Gone if rebooted => QemuAtStart::Rebooted,
        Qemu::Gone => QemuAtStart::Gone,
        Qemu::Running if !held => QemuAtStart::Running,
        Qemu::Running | Qemu::Paused => QemuAtStart::Paused,
    }
}
