//! The source's half of the handover: the loop that handles events until the handover is settled.
//!
//! The effects that the engine demands are in [`effects`], the messages to and from the destination in [`peer`].

mod effects;
mod peer;
mod postcopy;

use engine::handover::QemuAtStart;
use engine::handover::source::{SourceEvent, SourceState};
use engine::session::Timers;
use proto::message::Proposal;
use tracing::{error, info, warn};

use self::effects::EffectError;
use super::inbox::Notice;
use super::phases::Failure;
use super::{Details, Driver};
use crate::clock::Timer;
use crate::state_machine::StateMachine;
use api::progress::Phase;
use host::ownership;
use host::{SourceVm, VmError};

impl Driver {
    /// Enters PREPARED in the journal, before any peer learns of the migration.
    pub fn begin(&mut self, proposal: Proposal) -> Result<(), EffectError> {
        self.agreement.proposal = Some(proposal);
        let run = self.resources.vm.as_mut().map_or(Err(VmError::Gone), SourceVm::is_running)?;
        self.feed(&SourceEvent::Begin { run })
    }

    /// Runs a migration that has begun to its end.
    pub fn run(mut self) -> SourceState {
        let event = match self.reach_ready() {
            Ok(ready) => SourceEvent::Ready { epoch: self.terms.epoch(), incarnation: ready.incarnation },
            Err(failure) => {
                let failure = self.or_vm_ended(failure);
                info!(migration = %self.terms.migration, reason = failure.reason, "the migration ends");
                self.record_reason(&failure.reason);
                failure.event
            }
        };
        self.phases_ended(&event);
        self.settle()
    }

    /// Returns the VM's end as the failure if the VM has ended: it often causes a local failure a moment before it is
    /// noticed.
    fn or_vm_ended(&mut self, failure: Failure) -> Failure {
        if failure.event != SourceEvent::Failed || self.resources.vm.as_mut().is_none_or(SourceVm::is_there) {
            return failure;
        }
        Failure::new(SourceEvent::QemuDied, self.qemu_end_reason())
    }

    /// Handles the event that ended the phases: nothing more is sent.
    fn phases_ended(&mut self, event: &SourceEvent) {
        self.take(event);
        let waits_for_nothing = match self.handover.state {
            // A stopped guest must not wait for nothing.
            SourceState::Prepared { .. } | SourceState::Stopped { .. } => true,
            // Nor must a destination that lacks parts of a guest that is gone at the source: it has no reason to give
            // up while the source asks it again and again.
            _ => self.is_lost_everywhere(),
        };
        if waits_for_nothing {
            self.take(&SourceEvent::Failed);
        }
    }

    /// Returns true if the guest is gone at the source, and the destination cannot have all of its state either.
    fn is_lost_everywhere(&self) -> bool {
        matches!(self.handover.state, SourceState::QemuLost { incarnation: None, .. })
            && !self.handover.may_have_all
    }

    /// Ends a migration that has begun and that the source cannot continue.
    pub fn give_up(mut self, reason: &str) {
        self.record_reason(reason);
        self.take(&SourceEvent::Failed);
        self.settle();
    }

    /// Attaches the QEMU that an agent before this one was moving; returns its state.
    pub(crate) fn found(&mut self, mut vm: SourceVm) -> QemuAtStart {
        vm.watch(self.inbox.mailbox().qemu_exit());
        let found = vm.found();
        self.resources.vm = Some(vm);
        found
    }

    /// Records that the QEMU that an agent before this one was moving is gone, and if the destination may have all of
    /// its guest. Unless this host was rebooted, the journal has COMMITTED if it was ever written.
    pub fn found_gone(&mut self, found: QemuAtStart, details: Option<&Details>) -> QemuAtStart {
        self.handover.may_have_all =
            found != QemuAtStart::Gone || details.is_none_or(|details| details.later.is_none());
        found
    }

    /// Continues a migration that an agent before this one left behind.
    pub fn run_on(mut self, found: QemuAtStart) -> SourceState {
        if matches!(self.handover.state, SourceState::Prepared { .. } | SourceState::Stopped { .. }) {
            self.record_reason("the source's agent was restarted during the migration");
        }
        self.take(&SourceEvent::Restarted(found));
        if self.is_lost_everywhere() {
            self.take(&SourceEvent::Failed);
        }
        self.settle()
    }

    /// Handles events until the handover is over.
    fn settle(mut self) -> SourceState {
        let now = self.clock.read();
        self.handover.contact.record(now);
        let mut timers = Timers::default();
        timers.arm(Timer::Repeat, now.after(self.retry()));
        let mut arrived = None;
        loop {
            // Each pass does one thing, at one time.
            let now = self.clock.read();
            if let Some(notice) = arrived.take() {
                self.notice(notice);
            } else if let Some(event) = self.handover.follow_ups.pop_front() {
                self.take(&event);
            } else if self.handover.state.is_final() || self.handover.state == SourceState::Idle {
                break;
            } else if let Some(Timer::Repeat) = timers.due(now) {
                self.phase(self.waiting_phase());
                self.quiet();
                // No matter how long that lasted, notices that arrived in the meantime are handled first.
                timers.arm(Timer::Repeat, self.clock.read().after(self.retry()));
            } else {
                self.phase(self.waiting_phase());
                arrived = self.inbox.wait(self.clock.instant(timers.next().unwrap_or(now)));
            }
        }
        self.end();
        self.handover.state
    }

    /// Handles the passing of some time without a notice.
    fn quiet(&mut self) {
        self.reconnect_serving();
        let now = self.clock.read();
        if self.handover.contact.check_lost(self.reclaim_after(), now) {
            self.take(&SourceEvent::ContactLostForGood);
        } else if std::mem::take(&mut self.handover.effects_failed) {
            // As after a restart: QEMU is frozen before GO is sent.
            let found = self.resources.vm.as_mut().map_or(QemuAtStart::Gone, SourceVm::found);
            self.take(&SourceEvent::Restarted(found));
        } else {
            self.take(&SourceEvent::Repeat);
        }
    }

    /// Handles a notice once the phases are over.
    pub(super) fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Message { link, message } => self.message(link, message),
            Notice::Asked { epoch, reply } => {
                self.handover.contact.record(self.clock.now());
                self.asked(epoch, reply);
            }
            Notice::Event(event) => {
                if let SourceEvent::RegistryAnswered(answer) = &event {
                    let silence = self.handover.registry.silence(answer, self.clock.now());
                    if let Some(request) = self.handover.registry.answered() {
                        self.send_to_registry(request);
                    }
                    if silence >= self.reclaim_after() {
                        self.telemetry.update(|progress| {
                            ownership::publish_silence(&self.terms.migration.vm, progress);
                        });
                    }
                }
                self.take(&event);
            }
            Notice::Lost { link, error } => {
                if self.is_control(link) {
                    self.control_lost(error.unwrap_or_else(|| "the control stream was closed".to_owned()));
                }
            }
            Notice::ServingEnded { generation, error } if generation == self.connections.generation => {
                self.handle_serving_end(error);
            }
            Notice::ServingEnded { .. } => {}
            Notice::OfferEnded => self.handover.is_offering = false,
        }
    }

    /// Handles the loss of the control stream. Pages use the same link: the sender of pages need not detect the loss
    /// separately, which needs as long as the kernel waits for an answer.
    pub(super) fn control_lost(&mut self, error: String) {
        self.connections.control = None;
        self.handle_serving_end(Some(error));
        if let Some(later) = &mut self.resources.later {
            // That the handover is over can be said on a new control stream only.
            later.is_complete = false;
        }
    }

    fn waiting_phase(&self) -> Phase {
        match self.handover.state {
            SourceState::Committed { .. } if self.resources.later.is_some() => Phase::PostCopy,
            SourceState::Aborting | SourceState::Returning => Phase::Undoing,
            SourceState::QemuLost { .. } | SourceState::Reclaiming { .. } => Phase::InDoubt,
            _ => Phase::Handover,
        }
    }

    /// Handles an event; if an effect fails, the state's action is tried again later.
    fn take(&mut self, event: &SourceEvent) {
        let done = self.feed(event);
        self.done(event, done);
    }

    fn done(&mut self, event: &SourceEvent, done: Result<(), EffectError>) {
        let error = match done {
            Ok(()) => return,
            Err(EffectError::Illegal(illegal)) => return warn!(%illegal, "event ignored"),
            Err(error) => error,
        };
        let reason = crate::chain(&error);
        error!(migration = %self.terms.migration, reason, "an action of the handover failed");
        self.record_reason(&reason);
        self.handover.effects_failed = true;
        // The state is not COMMITTED, because that could not be journalled, or was never tried: the guest continues at
        // the source.
        if matches!(self.handover.state, SourceState::Prepared { .. } | SourceState::Stopped { .. })
            && *event != SourceEvent::Failed
        {
            self.take(&SourceEvent::Failed);
        }
    }
}

#[cfg(test)]
mod tests;
