//! Events of the destination: the engine's functions are called, and their effects are performed.

use std::time::Duration;

use engine::handover::Step;
use engine::handover::destination::{DestinationEffect, DestinationEvent, DestinationState};
use engine::session::{DestinationRepetition, DestinationSession, RepetitionContext, SilenceLimits, Time};

use super::acts::found;

use super::*;
use crate::handover::{Cut, Interruption};
use crate::mutation::Rules;

impl World {
    /// Feeds an event to the destination.
    pub(crate) fn feed_destination(&mut self, rules: &Rules, event: &DestinationEvent, cut: Cut) {
        if self.destination.life != Life::Up
            || !(rules.destination_admits)(&mut self.destination.session, event)
        {
            return;
        }
        let terms = terms(self.destination.epoch, self.destination.base, self.registry.is_some());
        match (rules.destination)(&terms, self.destination.state(), event) {
            Err(illegal) => {
                self.destination.session.handled(event);
                self.ghost.illegal = Some(illegal.event);
            }
            Ok(Step::Ignored(_)) => self.destination.session.handled(event),
            Ok(Step::Transition(step)) => {
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
                self.destination.session.handled(event);
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
            return DestinationSession::is_entered_unjournalled(state);
        }
        self.destination.write(state, durable || self.budget.host_crashes == 0);
        true
    }

    /// Repeats what the destination's state demands.
    pub(crate) fn repeat_destination(&mut self, rules: &Rules, cut: Cut) {
        if self.destination.life != Life::Up || *self.destination.state() == DestinationState::Idle {
            return;
        }
        let facts = RepetitionContext { has_control: self.streams, is_cont_pending: self.destination_cont };
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
                    DestinationState::CopyDestroyed | DestinationState::Refusing | DestinationState::Refused
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
            DestinationEffect::DestroyCopy => {
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
            // The model's QEMU is held by the source alone, and it has no participants.
            DestinationEffect::ThawQemu
            | DestinationEffect::CommitParticipants
            | DestinationEffect::Announce
            | DestinationEffect::Report(_) => {}
        }
    }
}
