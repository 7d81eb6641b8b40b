//! The destination's half of the handover: the loop that processes notices until the migration is over.
//!
//! [`effects`] performs the engine's effects; [`peer`] handles messages from and to the source.

mod effects;
mod peer;

use host::{ArrivalArtifacts, ArrivalError, ArrivingVm};
use std::time::Duration;

use engine::handover::QemuAtStart;
use engine::handover::destination::{DestinationEvent, DestinationState};
use engine::session::{DestinationRepetition, DriverStep, RepetitionContext, SilenceLimits};
use proto::message::Finding;
use tracing::{error, info, warn};

use self::effects::DestinationEffectError;
use super::DestinationDriver;
use super::inbox::DestinationNotice;
use super::participants::{ArrivalPlan, GuestRan};
use super::post_copy_receiver;
use super::receiving::PageReceiver;
use super::stages::{ArrivalStage, Receiving};
use crate::state_machine::StateMachine;
use api::progress::Phase;
use host::ownership;

impl DestinationDriver {
    /// Receives a VM whose migration is PREPARED, once the source has been informed of that.
    pub fn run(self) -> DestinationState {
        self.publisher.update(|progress| progress.phase = Phase::PreCopy);
        self.run_to_end()
    }

    /// Resumes a migration of a previous agent.
    pub fn run_on(mut self, found: QemuAtStart) -> DestinationState {
        self.take(&DestinationEvent::Restarted(found));
        self.run_to_end()
    }

    /// Takes over the QEMU that a previous agent had started, and returns its state.
    pub fn found(&mut self, mut vm: ArrivingVm) -> QemuAtStart {
        let found = vm.found();
        self.resources.vm = Some(vm);
        self.watch_found();
        self.resume_post_copy();
        found
    }

    /// Enters PREPARED in the journal, before anything is started.
    pub fn prepare(&mut self) -> Result<(), DestinationEffectError> {
        self.feed(&DestinationEvent::Prepare)
    }

    /// Refuses a plan that is impossible, before anything changes on this host.
    pub fn check(&mut self, plan: &ArrivalPlan) -> Result<(), ArrivalError> {
        self.resources.participants.check(&self.proposal, plan)
    }

    /// Makes what QEMU opens when it is started, and adds it to `artifacts`. After an error, and if QEMU does not
    /// start, the caller [undoes](Self::undo_start) it.
    pub fn prepare_start(&mut self, artifacts: &mut ArrivalArtifacts) -> Result<(), ArrivalError> {
        self.resources.participants.prepare(artifacts)
    }

    /// Removes what was made for a QEMU that did not start. What stays is tried again when the migration ends.
    pub fn undo_start(&mut self, artifacts: &ArrivalArtifacts) {
        self.resources.participants.abandon();
        drop(self.resources.participants.undo(artifacts, GuestRan::Never));
    }

    /// Begins to receive into the waiting QEMU. Returns the reason against post-copy, if that was proposed and is
    /// impossible.
    ///
    /// # Errors
    /// The QEMU has ended then: what was made for it can be removed.
    pub fn started(&mut self, mut vm: ArrivingVm) -> Result<Option<Finding>, ArrivalError> {
        match self.begin_receiving(&mut vm) {
            Ok((receiving, no_post_copy)) => {
                self.resources.vm = Some(vm);
                self.watch_found();
                self.resources.stage = ArrivalStage::Receiving(Receiving::new(receiving));
                Ok(no_post_copy)
            }
            Err(error) => {
                vm.destroy();
                Err(error)
            }
        }
    }

    fn begin_receiving(
        &mut self,
        vm: &mut ArrivingVm,
    ) -> Result<(PageReceiver, Option<Finding>), ArrivalError> {
        let migration = self.terms.migration.clone();
        let (proposal, mailbox) = (&self.proposal, self.inbox.mailbox());
        let blocks = self.resources.participants.open(vm)?;
        let receiving = PageReceiver::new(&self.context, migration, proposal, vm, blocks, mailbox);
        let tried = self.proposal.post_copy.then(|| {
            let (writers, _) = receiving.post_copied();
            post_copy_receiver::try_out(&self.context.injector, vm, writers)
        });
        let no_post_copy = tried.and_then(Result::err).as_ref().map(post_copy_receiver::finding);
        receiving
            .begin(self.connections.control.generation())
            .map_err(|source| ArrivalError::Directory { path: vm.artifacts.directory.clone(), source })?;
        Ok((receiving, no_post_copy))
    }

    /// Returns true if the source may send frames for the guest.
    pub fn takes_frames(&self) -> bool {
        self.inbox.mailbox().takes_frames()
    }

    /// Returns true if the source may send conntrack entries of the guest.
    pub fn takes_flows(&self) -> bool {
        self.inbox.mailbox().takes_flows()
    }

    /// Registers the source's first control stream.
    pub fn attach_control_stream(&mut self, connection: link::transport::Channel) -> std::io::Result<()> {
        self.inbox.mailbox().connected(connection, Some(self.connections.control.generation()))?;
        let now = self.clock.read();
        if let Some(notice) = self.inbox.wait(self.clock.instant(now)) {
            self.notice(notice);
        }
        Ok(())
    }

    /// Processes notices until the migration is over.
    fn run_to_end(mut self) -> DestinationState {
        let retry = self.retry();
        self.session.repeat_after(self.clock.read(), retry);
        loop {
            // Each step does one thing, at one time.
            let now = self.clock.read();
            if let Some(event) = self.session.take_follow_up() {
                self.take(&event);
                continue;
            }
            self.publish_missing_pages();
            self.check_unexpected_page();
            self.finish_post_copy_if_complete();
            match self.session.next_step(now) {
                DriverStep::Handle(event) => self.take(&event),
                DriverStep::End => break,
                DriverStep::Repeat => {
                    self.repeat();
                    // However long that took, notices that arrived in between are processed first.
                    self.session.repeat_after(self.clock.read(), retry);
                }
                DriverStep::Wait(until) => {
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

    fn notice(&mut self, notice: DestinationNotice) {
        match notice {
            DestinationNotice::Event(event) => {
                if let DestinationEvent::RegistryAnswered(answer) = &event {
                    let silence = self.questions.registry.record_answer(answer, self.clock.now());
                    if let Some(request) = self.questions.registry.answered() {
                        self.send_to_registry(request);
                    }
                    if silence >= self.reclaim_after() {
                        self.publisher.update(|progress| {
                            ownership::publish_silence(&self.terms.migration.vm, progress);
                        });
                    }
                }
                self.take(&event);
            }
            DestinationNotice::SourceReplied(event) => {
                self.questions.is_asking_source = false;
                self.take(&event);
            }
            DestinationNotice::Connected { connection_id, writer, handle, generation } => {
                self.session.record_contact(generation.is_some(), self.clock.now());
                self.connections.open.insert(connection_id, (writer, handle));
                if let Some(ended) = self.connections.control.connected(connection_id, generation) {
                    self.hang_up(ended);
                }
            }
            DestinationNotice::Message { connection_id, message } => {
                let is_on_control = self.connections.control.is_connection(connection_id);
                self.session.record_contact(is_on_control, self.clock.now());
                self.message(connection_id, message);
            }
            DestinationNotice::Reply(message) => self.send_message(&message),
            DestinationNotice::PageStream { generation, connection }
                if self.connections.control.is_present(generation) =>
            {
                self.attach(connection);
            }
            // The source notices the loss as well, and makes new connections.
            DestinationNotice::PageStreamLost { error } => {
                info!(migration = %self.terms.migration, error, "link lost");
            }
            DestinationNotice::Blob { connection_id, bytes }
                if self.session.is_arriving(self.connections.control.is_connection(connection_id)) =>
            {
                self.blob(&bytes);
            }
            DestinationNotice::Blob { connection_id, .. } => {
                self.handle_unexpected_message(connection_id, "device state");
            }
            DestinationNotice::Lost { connection_id, error } => {
                self.connections.open.remove(&connection_id);
                if self.connections.control.lost(connection_id) {
                    info!(migration = %self.terms.migration, error, "the control stream was lost");
                    let next = self.session.control_lost(self.clock.now());
                    self.take_next(next);
                }
            }
            DestinationNotice::Broken { generation, error }
                if self.connections.control.is_present(generation) =>
            {
                self.fail(&error);
            }
            // These belong to a replaced generation, or are checked in any case before the next notice.
            DestinationNotice::Broken { .. }
            | DestinationNotice::PageStream { .. }
            | DestinationNotice::MissingPages => {}
            DestinationNotice::ParticipantFailed { error } => self.fail(&error),
        }
    }

    fn hang_up(&mut self, connection_id: u64) {
        if let Some((_, handle)) = self.connections.open.remove(&connection_id) {
            handle.shutdown();
        }
    }

    /// Carries out the state's repetition.
    fn repeat(&mut self) {
        self.resume_post_copy();
        let facts = RepetitionContext {
            has_control: self.connections.control.connection_id().is_some(),
            is_cont_pending: self.resources.vm.as_ref().is_some_and(ArrivingVm::is_cont_pending),
        };
        let limits = SilenceLimits {
            give_up_after: Duration::from_millis(self.context.config.timeouts.give_up_after_ms),
            reclaim_after: self.reclaim_after(),
        };
        let now = self.clock.read();
        match self.session.repetition(now, facts, limits) {
            DestinationRepetition::Feed(event) => {
                if event == DestinationEvent::PeerLost {
                    self.reporter.reason = Some("the source was lost".to_owned());
                }
                self.take(&event);
            }
            DestinationRepetition::FindQemu => {
                let found = self.resources.vm.as_mut().map_or(QemuAtStart::Gone, ArrivingVm::found);
                self.take(&DestinationEvent::Restarted(found));
            }
            DestinationRepetition::CheckCont => self.process_cont_outcome(),
            DestinationRepetition::Nothing => {}
        }
    }

    pub(super) fn fail(&mut self, reason: &str) {
        warn!(migration = %self.terms.migration, reason, "the migration cannot continue");
        self.reporter.reason.get_or_insert_with(|| reason.to_owned());
        self.take(&DestinationEvent::Failed);
    }

    pub(super) fn take(&mut self, event: &DestinationEvent) {
        if self.admit(event) {
            let done = self.feed(event);
            self.done(event, done);
        }
    }

    /// Returns true if an event is handled now. Otherwise the journal has to accept an earlier one first.
    fn admit(&mut self, event: &DestinationEvent) -> bool {
        let is_admitted = self.session.admit(event);
        if !is_admitted {
            info!(migration = %self.terms.migration, event = event.name(), "the journal lacks an earlier event");
            self.report_dropped(event, "the journal does not accept an earlier event yet");
        }
        is_admitted
    }

    fn done(&mut self, event: &DestinationEvent, done: Result<(), DestinationEffectError>) {
        let error = match done {
            Ok(()) => return self.session.handled(event),
            Err(DestinationEffectError::Illegal(illegal)) => {
                warn!(%illegal, "event ignored");
                return self.session.handled(event);
            }
            Err(error) => error,
        };
        let reason = crate::chain(&error);
        error!(migration = %self.terms.migration, reason, "an action of the handover failed");
        self.report_dropped(event, &reason);
        self.reporter.reason.get_or_insert(reason);
        let next = self.session.effect_failed(event);
        self.take_next(next);
    }

    /// Informs an operator whose decision is dropped.
    fn report_dropped(&self, event: &DestinationEvent, reason: &str) {
        if matches!(event, DestinationEvent::OperatorDecided(_)) {
            let text = format!("the decision was not carried out and was discarded: {reason}; decide again");
            self.publisher.update(|progress| progress.message = Some(text));
        }
    }

    /// Handles the event that follows another one, if there is one.
    fn take_next(&mut self, event: Option<DestinationEvent>) {
        if let Some(event) = event {
            self.take(&event);
        }
    }

    /// Watches a QEMU that was found again like one that was started.
    pub(crate) fn watch_found(&mut self) {
        let mailbox = self.inbox.mailbox();
        if let Some(vm) = &mut self.resources.vm {
            vm.watch(mailbox.qemu_exit());
        }
    }
}

#[cfg(test)]
mod tests;
