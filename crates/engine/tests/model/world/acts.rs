//! Events in the world: the engine's functions are called, and their effects are performed.

use std::time::Duration;

use engine::handover::destination::{DestinationEffect, DestinationEvent, DestinationState};
use engine::handover::recover::OperatorDecision;
use engine::handover::registry::{self, RegistryAnswer};
use engine::handover::source::{SourceEffect, SourceEvent, SourceReport, SourceState};
use engine::handover::{QemuAtStart, Step};
use proto::message::{RegistryReply, Verdict};

use engine::session::{
    DestinationRepetition, DestinationSession, RepetitionFacts, SilenceLimits, SourceRepetition,
    SourceSession, Time,
};

use super::*;
use crate::handover::{Cut, Interruption};
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

    /// Feeds an event to the source. With `cut`, the agent is killed after that many effects.
    pub(crate) fn feed_source(&mut self, rules: &Rules, event: &SourceEvent, cut: Cut) {
        if self.source.life != Life::Up {
            return;
        }
        let terms = terms(self.source.epoch, self.source.base, self.registry.is_some());
        match (rules.source)(&terms, self.source.state(), event) {
            Err(illegal) => {
                self.ghost.illegal = Some(illegal.event);
            }
            Ok(Step::Ignored(_)) => {}
            Ok(Step::Moved(step)) => {
                for (done, effect) in step.effects.iter().enumerate() {
                    if cut == Some(Interruption::Death(done)) {
                        return self.crash(Side::Source);
                    }
                    if let SourceEffect::Journal { state, durable } = effect {
                        if !self.write_source(rules, state, *durable, cut) {
                            let next = self.source.session.effect_failed(event);
                            return next.into_iter().for_each(|next| self.feed_source(rules, &next, None));
                        }
                        self.source.session.enter(step.to.clone());
                    }
                    self.do_source(effect);
                }
                self.source.session.enter(step.to);
                self.end_source();
            }
        }
    }

    /// Makes an entry in the source's journal. Returns false if that fails, and the state is not entered.
    fn write_source(&mut self, rules: &Rules, state: &SourceState, durable: bool, cut: Cut) -> bool {
        if cut == Some(Interruption::JournalFailure) && self.budget.journal_failures > 0 {
            self.budget.journal_failures -= 1;
            return (rules.enters_without_entry)(&mut self.source.session, state);
        }
        self.source.write(state, durable || self.budget.host_crashes == 0);
        self.source.session.entry_made();
        true
    }

    /// Makes the entry of a final state that was entered without one: before that, no migration of the VM begins.
    fn end_source(&mut self) {
        if self.source.state().is_final()
            && let Some(state) = self.source.session.take_unjournalled()
        {
            self.source.write(&state, true);
        }
    }

    /// Repeats what the source's state demands.
    pub(crate) fn repeat_source(&mut self, rules: &Rules, cut: Cut) {
        if self.source.life != Life::Up || *self.source.state() == SourceState::Idle {
            return;
        }
        // The time of the model stands still: the contact is lost by an action of its own.
        match self.source.session.repetition(Time::default(), Duration::MAX) {
            SourceRepetition::Feed(event) => self.feed_source(rules, &event, cut),
            SourceRepetition::FindQemu => {
                let found = found(self.source_qemu, self.source.rebooted, self.held);
                self.feed_source(rules, &SourceEvent::Restarted(found), cut);
            }
        }
    }

    /// Sends all of memory and device state, and HELD, without which the destination does not send READY.
    pub(crate) fn send_all(&mut self, rules: &Rules) {
        if rules.holds {
            if self.source_qemu != Qemu::Paused {
                return self.feed_source(rules, &SourceEvent::Failed, None);
            }
            self.held = true;
        }
        self.source.session.set_may_have_all(!self.budget.post_copy);
        self.send(Packet::Data(self.source.epoch));
    }

    fn do_source(&mut self, effect: &SourceEffect) {
        let epoch = self.source.epoch;
        match effect {
            SourceEffect::Journal { state, .. } => {
                self.ghost.source.reclaimed |= matches!(state, SourceState::Reclaiming { .. });
                self.ghost.source.kept |= matches!(
                    state,
                    SourceState::Aborting
                        | SourceState::Aborted
                        | SourceState::Returning
                        | SourceState::Returned
                );
            }
            SourceEffect::StopVm => {
                if self.source_qemu == Qemu::Running {
                    self.source_qemu = Qemu::Paused;
                }
            }
            SourceEffect::FreezeQemu => self.held = self.source_qemu != Qemu::Gone,
            SourceEffect::ReleaseQemu | SourceEffect::UndoAll => self.held = false,
            SourceEffect::ContinueVm => {
                // After GO only the destination's REFUSED, the registry or an operator can have decided this.
                let refused = self.ghost.destination.gave_up && self.same_attempt();
                let is_justified = refused || self.registry_says_source() || self.ghost.word;
                self.ghost.decided_alone |= self.ghost.source.go_sent && !is_justified;
                self.held = false;
                self.source_cont = true;
            }
            SourceEffect::QuitQemu => {
                self.source_qemu = Qemu::Gone;
                self.held = false;
                self.ghost.source.quit = true;
            }
            SourceEffect::SendGo { .. } => {
                self.ghost.source.go_sent = true;
                self.send(Packet::Go(epoch));
            }
            SourceEffect::SendAbort => {
                self.send(Packet::Abort(epoch));
                // The streams end with it.
                self.streams = false;
            }
            SourceEffect::Answer(Verdict::Committed { .. }) => {
                self.ghost.source.go_sent = true;
                self.send(Packet::Committed(epoch));
            }
            SourceEffect::Answer(Verdict::Aborted) => self.send(Packet::Aborted(epoch)),
            SourceEffect::Answer(Verdict::Returned) => self.send(Packet::Returned(epoch)),
            SourceEffect::Answer(Verdict::Undecided) => self.send(Packet::Undecided(epoch)),
            SourceEffect::AskDestination => self.send(Packet::AskDestination(epoch)),
            SourceEffect::Registry { request, .. } => {
                self.send(Packet::Request(Side::Source, epoch, small_op(request)));
            }
            // Only true alarms count: an outdated RUNNING of a host that has crashed since may cause a false one.
            SourceEffect::Report(SourceReport::Contradiction) if !self.ghost.source.lost => {
                self.ghost.illegal = Some("contradiction");
            }
            SourceEffect::Report(_) => {}
        }
    }

    /// Feeds an event to the destination.
    pub(crate) fn feed_destination(&mut self, rules: &Rules, event: &DestinationEvent, cut: Cut) {
        if self.destination.life != Life::Up {
            return;
        }
        let terms = terms(self.destination.epoch, self.destination.base, self.registry.is_some());
        match (rules.destination)(&terms, self.destination.state(), event) {
            Err(illegal) => {
                self.ghost.illegal = Some(illegal.event);
            }
            Ok(Step::Ignored(_)) => {}
            Ok(Step::Moved(step)) => {
                for (done, effect) in step.effects.iter().enumerate() {
                    if cut == Some(Interruption::Death(done)) {
                        return self.crash(Side::Destination);
                    }
                    if let DestinationEffect::Journal { state, durable } = effect {
                        if !self.write_destination(state, *durable, cut) {
                            let next = (rules.destination_failed)(&mut self.destination.session, event);
                            return next
                                .into_iter()
                                .for_each(|next| self.feed_destination(rules, &next, None));
                        }
                        self.destination.session.enter(step.to.clone());
                    }
                    self.do_destination(effect);
                }
                self.destination.session.enter(step.to);
                while let Some(next) = self.destination.session.take_follow_up() {
                    self.feed_destination(rules, &next, None);
                }
            }
        }
    }

    /// Fails to send `cont`: no vCPU has run, unless an agent before this one may have sent it.
    fn cont_without_qemu(&mut self) {
        let is_first = matches!(self.destination.state(), DestinationState::Starting { again: false, .. });
        self.ghost.destination.cont_failed |= is_first;
        let event = if is_first { DestinationEvent::ContFailed } else { DestinationEvent::QemuDied };
        self.destination.session.follow_up(event);
    }

    /// Makes an entry in the destination's journal. Returns false if that fails, and the state is not entered.
    fn write_destination(&mut self, state: &DestinationState, durable: bool, cut: Cut) -> bool {
        if cut == Some(Interruption::JournalFailure) && self.budget.journal_failures > 0 {
            self.budget.journal_failures -= 1;
            return DestinationSession::is_entered_without_entry(state);
        }
        self.destination.write(state, durable || self.budget.host_crashes == 0);
        true
    }

    /// Repeats what the destination's state demands.
    pub(crate) fn repeat_destination(&mut self, rules: &Rules, cut: Cut) {
        if self.destination.life != Life::Up || *self.destination.state() == DestinationState::Idle {
            return;
        }
        let facts = RepetitionFacts { has_control: self.streams, is_cont_pending: self.destination_cont };
        // The time of the model stands still: without streams it has always been long enough, and the contact is lost
        // by an action of its own.
        let limits = SilenceLimits { give_up_after: Duration::ZERO, reclaim_after: Duration::MAX };
        match self.destination.session.repetition(Time::default(), facts, limits) {
            DestinationRepetition::Feed(event) => self.feed_destination(rules, &event, cut),
            DestinationRepetition::FindQemu => {
                let silent = self.ghost.destination.missing;
                let found = found(self.destination_qemu, self.destination.rebooted, silent);
                self.feed_destination(rules, &DestinationEvent::Restarted(found), cut);
            }
            DestinationRepetition::CheckCont | DestinationRepetition::Nothing => {}
        }
    }

    fn do_destination(&mut self, effect: &DestinationEffect) {
        let epoch = self.destination.epoch;
        match effect {
            DestinationEffect::Journal { state, .. } => {
                self.ghost.destination.cont_decided |= matches!(state, DestinationState::Starting { .. });
                self.ghost.destination.gave_up |= matches!(
                    state,
                    DestinationState::Discarded | DestinationState::Refusing | DestinationState::Refused
                );
            }
            DestinationEffect::SendReady { .. } => {
                self.ghost.destination.ready_sent = true;
                self.send(Packet::Ready(epoch));
            }
            DestinationEffect::AskSource => self.send(Packet::AskSource(epoch)),
            DestinationEffect::Registry { request, .. } => {
                self.send(Packet::Request(Side::Destination, epoch, small_op(request)));
            }
            DestinationEffect::Cont => {
                self.ghost.ran_discarded |= self.ghost.destination.gave_up;
                if self.destination_qemu == Qemu::Gone {
                    // The journal had not accepted the end of QEMU before.
                    self.cont_without_qemu();
                } else {
                    self.destination_cont = true;
                }
            }
            DestinationEffect::SendRunning => self.send(Packet::Running(epoch)),
            DestinationEffect::SendIncomplete => self.send(Packet::Incomplete(epoch)),
            DestinationEffect::SendRefused => self.send(Packet::Refused(epoch)),
            DestinationEffect::SendCrashed => self.send(Packet::Crashed(epoch)),
            DestinationEffect::Discard => {
                // In doubt, a complete copy is discarded only if the source has the guest, or the copy cannot run. (A
                // source that has begun another attempt has the guest.)
                let kept = self.ghost.source.kept || !self.same_attempt() || self.ghost.word;
                let is_justified = kept || self.registry_says_source() || self.ghost.destination.cont_failed;
                let whole = self.destination_qemu != Qemu::Gone && self.ghost.destination.ready_sent;
                self.ghost.decided_alone |= whole && !is_justified;
                // Where disks were copied, the data that the guest wrote since is in images that are removed with it.
                self.ghost.threw_away |= self.ghost.destination.ran;
                self.destination_qemu = Qemu::Gone;
                self.destination_cont = false;
            }
            DestinationEffect::Announce | DestinationEffect::Report(_) => {}
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
            Side::Destination => self.destination.life = Life::Down,
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
                self.source.session.set_may_have_all(found != QemuAtStart::Gone || !self.budget.post_copy);
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

fn found(qemu: Qemu, rebooted: bool, held: bool) -> QemuAtStart {
    match qemu {
        Qemu::Gone if rebooted => QemuAtStart::Rebooted,
        Qemu::Gone => QemuAtStart::Gone,
        Qemu::Running if !held => QemuAtStart::Running,
        Qemu::Running | Qemu::Paused => QemuAtStart::Paused,
    }
}
