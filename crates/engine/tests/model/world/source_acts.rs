//! Events of the source: the engine's functions are called, and their effects are performed.

use std::time::Duration;

use engine::handover::Step;
use engine::handover::source::{SourceEffect, SourceEvent, SourceReport, SourceState};
use engine::session::{SourceRepetition, Time};
use proto::message::Verdict;

use super::acts::found;

use super::*;
use crate::handover::{Cut, Interruption};
use crate::mutation::Rules;

impl World {
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
            Ok(Step::Transition(step)) => {
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

    /// Sends all of memory and device state, and FROZEN, without which the destination does not send READY.
    pub(crate) fn send_all(&mut self, rules: &Rules) {
        if rules.holds {
            if self.source_qemu != Qemu::Paused {
                return self.feed_source(rules, &SourceEvent::Failed, None);
            }
            self.held = true;
        }
        self.source.session.set_destination_may_be_complete(!self.budget.post_copy);
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
            SourceEffect::ThawQemu | SourceEffect::UndoAll => self.held = false,
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
            SourceEffect::CommitParticipants | SourceEffect::NotifyRunning | SourceEffect::Report(_) => {}
        }
    }
}
