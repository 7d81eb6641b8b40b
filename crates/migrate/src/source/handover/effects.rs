//! Effects that the engine demands on the source, and their use of the journal, of QEMU and of the ownership registry.

use host::{SourceVm, VmError};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use engine::handover::registry::{RegistryAnswer, RequestPurpose};
use engine::handover::source::{SourceEffect, SourceEvent, SourceState, source};
use engine::handover::{Illegal, Role, Step};
use proto::message::{Message, RegistryRequest};
use tracing::{error, warn};

use crate::source::SourceDriver;
use crate::source::answers::message_of;
use crate::source::cpu_throttle::CpuThrottle;
use crate::source::inbox::SourceNotice;
use crate::source::stages::SourceStage;
use crate::state_machine::StateMachine;
use host::fault::Faults;
use host::{ownership, vms};
use store::journal::{Durability, JournalError, NewMigration, State};

/// Error of an effect that failed.
#[derive(Debug, thiserror::Error)]
pub enum SourceEffectError {
    /// The journal did not record the new state.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// QEMU failed, or refused a command.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The event is illegal in the present state.
    #[error(transparent)]
    Illegal(#[from] Illegal),
    /// A migration without its proposal cannot begin.
    #[error("the migration has no proposal")]
    NoProposal,
}

impl StateMachine for SourceDriver {
    type State = SourceState;
    type Event = SourceEvent;
    type Effect = SourceEffect;
    type Error = SourceEffectError;

    const ROLE: Role = Role::Source;

    fn names(state: &SourceState, event: &SourceEvent) -> (&'static str, &'static str) {
        (state.name(), event.name())
    }

    fn decide(&self, event: &SourceEvent) -> Result<Step<SourceState, SourceEffect>, Illegal> {
        source(&self.terms, self.session.state(), event)
    }

    fn effect_name(effect: &SourceEffect) -> &'static str {
        effect.name()
    }

    fn is_journal(effect: &SourceEffect) -> bool {
        matches!(effect, SourceEffect::Journal { .. })
    }

    fn state(&self) -> &SourceState {
        self.session.state()
    }

    fn enter(&mut self, state: SourceState) {
        self.session.enter(state);
    }

    fn faults(&self) -> &Faults {
        &self.context.faults
    }

    fn perform(&mut self, effect: &SourceEffect) -> Result<(), SourceEffectError> {
        match effect {
            SourceEffect::Journal { state, durable } => self.journal(state, *durable)?,
            SourceEffect::CommitParticipants => self.resources.participants.commit(),
            SourceEffect::NotifyRunning => self.resources.participants.running(),
            SourceEffect::StopVm => self.stop_vm()?,
            SourceEffect::FreezeQemu => self.with_vm(SourceVm::freeze)?,
            SourceEffect::ThawQemu => self.with_vm(SourceVm::thaw)?,
            SourceEffect::ContinueVm => self.continue_vm(),
            SourceEffect::QuitQemu => self.quit_qemu(),
            SourceEffect::UndoAll => self.undo_all(),
            SourceEffect::SendGo { incarnation, run } => {
                let (epoch, incarnation) = (self.terms.epoch(), incarnation.clone());
                self.send_to_destination(&Message::Go { epoch, incarnation, run: *run });
            }
            SourceEffect::SendAbort => self.send_abort(),
            SourceEffect::Answer(_) | SourceEffect::AskDestination => self.answer(effect),
            SourceEffect::Registry { why, request } => self.ask_registry(*why, request.clone()),
            SourceEffect::Report(report) => self.report_to_user(*report),
        }
        Ok(())
    }
}

impl SourceDriver {
    /// Lifts the throttle of the guest's processors.
    pub(in crate::source) fn lift_cpu_throttle(&mut self) {
        if let Some(Err(error)) = self.resources.cpu_throttle.as_mut().map(CpuThrottle::lift) {
            warn!(
                vm = %self.terms.migration.vm,
                error = crate::chain(&error),
                "the guest's CPU throttle stays in effect"
            );
        }
    }

    fn with_vm<T>(&mut self, act: impl FnOnce(&mut SourceVm) -> Result<T, VmError>) -> Result<T, VmError> {
        self.resources.vm.as_mut().map_or(Err(VmError::Gone), act)
    }

    fn journal(&mut self, state: &SourceState, durable: bool) -> Result<(), SourceEffectError> {
        let id = &self.terms.migration;
        let journal = &self.context.journal;
        if *self.session.state() == SourceState::Idle {
            let proposal = self.agreement.proposal.as_ref().ok_or(SourceEffectError::NoProposal)?;
            let state = State::Source(state.clone());
            return Ok(journal.begin(&NewMigration { terms: &self.terms, state, proposal })?);
        }
        let durability = if durable { Durability::Synced } else { Durability::Process };
        match journal.record_source(id, state, durability) {
            // The destination is informed all the same: a copy that is discarded is one that cannot be started.
            Err(error) if self.session.entry_failed(state) => {
                error!(
                    migration = %id,
                    error = crate::chain(&error),
                    "cannot record ABORTED in the journal yet"
                );
                Ok(())
            }
            Err(error) => Err(error.into()),
            Ok(()) => {
                self.session.entry_made();
                if matches!(state, SourceState::Committed { .. }) {
                    self.resources.stage.commit();
                }
                Ok(())
            }
        }
    }

    fn stop_vm(&mut self) -> Result<(), VmError> {
        self.lift_cpu_throttle();
        self.reporter.stop_clock.stopped_at = Some(Instant::now());
        let until_stop_event = self.with_vm(SourceVm::stop)?;
        self.reporter.stop_clock.measured.stop_event_us =
            until_stop_event.map(|until| until.as_micros() as u64);
        Ok(())
    }

    fn continue_vm(&mut self) {
        let event = match self.with_vm(SourceVm::cont) {
            Ok(()) => SourceEvent::Continued,
            Err(_) if !self.resources.vm.as_ref().is_some_and(SourceVm::is_alive) => SourceEvent::QemuDied,
            Err(error) => {
                error!(
                    vm = %self.terms.migration.vm,
                    error = crate::chain(&error),
                    "QEMU does not resume the guest"
                );
                SourceEvent::ContinueFailed
            }
        };
        self.session.follow_up(event);
    }

    fn quit_qemu(&mut self) {
        self.resources.stage.end_serving();
        match self.resources.vm.take() {
            Some(vm) => vm.quit(),
            // An agent before this one may have died after it ended QEMU and before it removed QEMU's files.
            None => vms::remove_runtime_files(&self.context, &self.terms.migration.vm),
        }
        // The groups have no threads left.
        self.resources.cpu_throttle = None;
        self.resources.participants.finish();
    }

    fn undo_all(&mut self) {
        self.resources.cpu_throttle = None;
        self.resources.stage.roll_back().end();
        self.inbox.interrupt_nothing();
        let mut vm = self.resources.vm.as_mut().filter(|vm| vm.is_alive());
        if let Some(vm) = &mut vm {
            // It may be frozen for a handover that failed; a guest that is to run was let go by its `cont`.
            if let Err(error) = vm.thaw() {
                warn!(vm = %self.terms.migration.vm, error = crate::chain(&error), "cannot thaw QEMU");
            }
            vm.lift_leftover_limit();
            vm.forget_state_file();
        }
        let undone = self.resources.participants.undo(vm);
        self.resources.stage = SourceStage::Undone(undone);
    }

    /// Answers the destination's question, a verdict on the connection on which it was asked.
    fn answer(&mut self, effect: &SourceEffect) {
        let Some(message) = message_of(effect, self.terms.epoch()) else { return };
        let is_verdict = matches!(effect, SourceEffect::Answer(_));
        match self.connections.asker.take_if(|_| is_verdict) {
            // The asking peer may be gone; it will ask again.
            Some(asker) => drop(asker.try_send(message)),
            None => self.send_to_destination(&message),
        }
    }

    fn ask_registry(&mut self, why: RequestPurpose, request: RegistryRequest) {
        if why == RequestPurpose::Offer {
            self.offer(request);
        } else if let Some(request) = self.registry.client.submit(request) {
            self.send_to_registry(request);
        }
    }

    /// Sends an offer without waiting for its result. One offer is in progress at a time, and the state repeats it.
    fn offer(&mut self, request: RegistryRequest) {
        if self.registry.is_offering {
            return;
        }
        let (context, terms, mailbox) = (Arc::clone(&self.context), self.terms.clone(), self.inbox.mailbox());
        let offer = move || {
            ownership::ask(&context, &terms, &request);
            mailbox.put(SourceNotice::OfferEnded);
        };
        match thread::Builder::new().name("offer".to_owned()).spawn(offer) {
            Ok(_) => self.registry.is_offering = true,
            Err(error) => warn!(%error, "cannot offer the VM in the registry"),
        }
    }

    pub(super) fn send_to_registry(&mut self, request: RegistryRequest) {
        let mailbox = self.inbox.mailbox();
        let answered = move |answer| {
            mailbox.put(SourceNotice::Event(SourceEvent::RegistryAnswered(answer)));
        };
        if !ownership::ask_in_thread(&self.context, &self.terms, request, answered) {
            self.session.follow_up(SourceEvent::RegistryAnswered(RegistryAnswer::Unreachable));
            // The state machine asks again; a waiting question is sent then.
            drop(self.registry.client.answered());
        }
    }
}
