//! The source's half of the handover: the loop that handles events until the handover is over.
//!
//! The effects that the engine demands are in [`effects`], the messages to and from the destination in [`peer`].

mod effects;
mod peer;
mod post_copy;

use engine::handover::QemuAtStart;
use engine::handover::source::{SourceEvent, SourceState};
use engine::session::{DriverStep, SourceRepetition};
use proto::message::Proposal;
use tracing::{error, info, warn};

use self::effects::SourceEffectError;
use super::failure::Failure;
use super::inbox::SourceNotice;
use super::{SourceDetails, SourceDriver};
use crate::state_machine::StateMachine;
use api::progress::Phase;
use host::ownership;
use host::{SourceVm, VmError};

impl SourceDriver {
    /// Enters PREPARED in the journal, before any peer learns of the migration.
    pub fn begin(&mut self, proposal: Proposal) -> Result<(), SourceEffectError> {
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
                if !matches!(failure.event, SourceEvent::Cancel | SourceEvent::QemuDied) {
                    self.controls.report(|report| report.failure = Some(failure.kind));
                }
                failure.event
            }
        };
        self.phases_ended(&event);
        self.run_to_end()
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
        self.take_next(self.session.after_phases());
    }

    /// Ends a migration that has begun and that the source cannot continue.
    pub fn give_up(mut self, reason: &str) {
        self.record_reason(reason);
        self.take(&SourceEvent::Failed);
        self.run_to_end();
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
    pub fn found_gone(&mut self, found: QemuAtStart, details: Option<&SourceDetails>) -> QemuAtStart {
        let has_no_remaining_pages = details.is_none_or(|details| details.post_copied_regions.is_none());
        self.session.set_destination_may_be_complete(found != QemuAtStart::Gone || has_no_remaining_pages);
        found
    }

    /// Continues a migration of an agent before this one.
    pub fn run_on(mut self, found: QemuAtStart) -> SourceState {
        if self.session.precedes_commit() {
            self.record_reason("the source's agent was restarted during the migration");
        }
        self.take(&SourceEvent::Restarted(found));
        self.take_next(self.session.after_restart());
        self.run_to_end()
    }

    /// Handles events until the handover is over.
    fn run_to_end(mut self) -> SourceState {
        let retry = self.retry();
        self.session.begin_steps(self.clock.read(), retry);
        loop {
            // Each step does one thing, at one time.
            let now = self.clock.read();
            match self.session.next_step(now) {
                DriverStep::Handle(event) => self.take(&event),
                DriverStep::End => break,
                DriverStep::Repeat => {
                    self.phase(self.waiting_phase());
                    self.repeat();
                    // No matter how long that lasted, notices that arrived in the meantime are handled first.
                    self.session.repeat_after(self.clock.read(), retry);
                }
                DriverStep::Wait(until) => {
                    self.phase(self.waiting_phase());
                    if let Some(notice) = self.inbox.wait(self.clock.instant(until)) {
                        self.clock.read();
                        self.notice(notice);
                    }
                }
            }
        }
        self.end();
        self.session.state().clone()
    }

    /// Carries out the state's repetition.
    fn repeat(&mut self) {
        self.reconnect_serving();
        let now = self.clock.read();
        match self.session.repetition(now, self.reclaim_after()) {
            SourceRepetition::Feed(event) => self.take(&event),
            SourceRepetition::FindQemu => {
                let found = self.resources.vm.as_mut().map_or(QemuAtStart::Gone, SourceVm::found);
                self.take(&SourceEvent::Restarted(found));
            }
        }
    }

    /// Handles a notice once the phases are over.
    pub(super) fn notice(&mut self, notice: SourceNotice) {
        match notice {
            SourceNotice::Message { connection_id, message } => self.message(connection_id, message),
            SourceNotice::Asked { epoch, reply } => {
                self.session.record_contact(self.clock.now());
                self.asked(epoch, reply);
            }
            SourceNotice::Event(event) => {
                if let SourceEvent::RegistryAnswered(answer) = &event {
                    let silence = self.registry.client.record_answer(answer, self.clock.now());
                    if let Some(request) = self.registry.client.answered() {
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
            SourceNotice::Lost { connection_id, error } => {
                if self.is_control(connection_id) {
                    self.control_lost(error.unwrap_or_else(|| "the control stream was closed".to_owned()));
                }
            }
            SourceNotice::ServingEnded { generation, error } if generation == self.connections.generation => {
                self.handle_serving_end(error);
            }
            SourceNotice::ServingEnded { .. } => {}
            SourceNotice::OfferEnded => self.registry.is_offering = false,
        }
    }

    /// Handles the loss of the control stream. Pages use the same link: the sender of pages need not detect the loss
    /// separately, which needs as long as the kernel waits for an answer.
    pub(super) fn control_lost(&mut self, error: String) {
        self.connections.control = None;
        self.handle_serving_end(Some(error));
        if let Some(server) = self.resources.stage.server_mut() {
            // Only a new control stream can report that the handover is over.
            server.is_complete = false;
        }
    }

    fn waiting_phase(&self) -> Phase {
        match self.session.state() {
            SourceState::Committed { .. } if self.resources.stage.server().is_some() => Phase::PostCopy,
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

    fn done(&mut self, event: &SourceEvent, done: Result<(), SourceEffectError>) {
        let error = match done {
            Ok(()) => return,
            Err(SourceEffectError::Illegal(illegal)) => return warn!(%illegal, "event ignored"),
            Err(error) => error,
        };
        let reason = crate::chain(&error);
        error!(migration = %self.terms.migration, reason, "an action of the handover failed");
        self.record_reason(&reason);
        let next = self.session.effect_failed(event);
        self.take_next(next);
    }

    /// Handles the event that follows another one, if there is one.
    fn take_next(&mut self, event: Option<SourceEvent>) {
        if let Some(event) = event {
            self.take(&event);
        }
    }
}

#[cfg(test)]
mod tests;
