//! Effects that the engine requests on the destination, and their use of the journal, of QEMU and of the ownership
//! registry.

use host::ArrivalArtifacts;
use std::time::{Duration, Instant};

use engine::handover::destination::{DestinationEffect, DestinationEvent, DestinationState, destination};
use engine::handover::registry::RegistryAnswer;
use engine::handover::{Illegal, Role, Step};
use engine::session::DestinationSession;
use proto::Epoch;
use proto::message::{Message, RegistryRequest};
use tracing::{error, warn};

use crate::destination::answers::{CopyFacts, message_of};
use crate::destination::inbox::DestinationNotice;
use crate::destination::participants::GuestRan;
use crate::destination::stages::ArrivalStage;
use crate::destination::{Continued, DestinationDriver};
use crate::state_machine::StateMachine;
use host::ContOutcome;
use host::cpu::CpuTime;
use host::fault::Faults;
use host::ownership;
use store::journal::{Durability, JournalError, NewMigration, State};

/// Reason for which an effect could not be performed.
#[derive(Debug, thiserror::Error)]
pub enum DestinationEffectError {
    /// The journal did not accept the new state.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The event is not legal in this state.
    #[error(transparent)]
    Illegal(#[from] Illegal),
}

impl DestinationEffectError {
    /// Returns the largest epoch that this journal has seen, if the error is that the epoch was not accepted.
    pub fn largest_epoch(&self) -> Option<Epoch> {
        match self {
            Self::Journal(JournalError::OldEpoch { largest, .. }) => Some(*largest),
            _ => None,
        }
    }
}

impl StateMachine for DestinationDriver {
    type State = DestinationState;
    type Event = DestinationEvent;
    type Effect = DestinationEffect;
    type Error = DestinationEffectError;

    const ROLE: Role = Role::Destination;

    fn names(state: &DestinationState, event: &DestinationEvent) -> (&'static str, &'static str) {
        (state.name(), event.name())
    }

    fn decide(&self, event: &DestinationEvent) -> Result<Step<DestinationState, DestinationEffect>, Illegal> {
        destination(&self.terms, self.session.state(), event)
    }

    fn effect_name(effect: &DestinationEffect) -> &'static str {
        effect.name()
    }

    fn is_journal(effect: &DestinationEffect) -> bool {
        matches!(effect, DestinationEffect::Journal { .. })
    }

    fn state(&self) -> &DestinationState {
        self.session.state()
    }

    fn enter(&mut self, state: DestinationState) {
        self.session.enter(state);
    }

    fn faults(&self) -> &Faults {
        &self.context.faults
    }

    fn perform(&mut self, effect: &DestinationEffect) -> Result<(), DestinationEffectError> {
        let epoch = self.terms.epoch();
        match effect {
            DestinationEffect::Journal { state, durable } => self.journal(state, *durable)?,
            DestinationEffect::SendReady { incarnation } => {
                let (digest, load_us) = self.reporter.loaded.clone().unwrap_or_default();
                self.send_message(&Message::Ready {
                    epoch,
                    incarnation: incarnation.clone(),
                    digest,
                    load_us,
                });
            }
            DestinationEffect::AskSource => self.ask_source(),
            DestinationEffect::Registry { request, .. } => self.ask_registry(request.clone()),
            DestinationEffect::Cont => self.cont(),
            DestinationEffect::ThawQemu => self.thaw_qemu(),
            DestinationEffect::CommitParticipants => self.commit_participants(),
            DestinationEffect::Announce => self.announce(),
            DestinationEffect::SendIncomplete => self.send_incomplete(),
            DestinationEffect::SendRunning
            | DestinationEffect::SendRefused
            | DestinationEffect::SendCrashed => {
                if let Some(message) = message_of(effect, epoch, self.copy_facts()) {
                    self.send_message(&message);
                }
            }
            DestinationEffect::DestroyCopy => self.destroy_copy(),
            DestinationEffect::Report(report) => self.report_to_user(*report),
        }
        Ok(())
    }
}

impl DestinationDriver {
    /// Returns the time since `cont` had returned, the duration of `cont`, and the part of that after the guest was
    /// resumed, in microseconds; zeros if another agent sent it.
    fn since_continued(&self) -> (u64, u64, Option<u64>) {
        let us = |duration: Duration| duration.as_micros() as u64;
        self.reporter.continued.as_ref().map_or((0, 0, None), |continued| {
            let since = us(continued.returned.elapsed());
            (since, us(continued.took), continued.resumed.map(us))
        })
    }

    fn copy_facts(&self) -> CopyFacts {
        let (since_us, continue_us, resumed_us) = self.since_continued();
        CopyFacts {
            reason: self.reporter.reason.clone(),
            continue_us,
            since_us,
            resumed_us,
            agent_cpu_us: self.reporter.cpu.map(CpuTime::used_us),
            unexpected_page: self.unexpected_page().map(|unexpected_page| unexpected_page.page),
        }
    }

    pub(crate) fn send_incomplete(&mut self) {
        let (epoch, generation) = (self.terms.epoch(), self.connections.control.generation());
        let CopyFacts { continue_us, since_us, resumed_us, unexpected_page, .. } = self.copy_facts();
        self.send_message(&Message::Incomplete {
            epoch,
            generation,
            continue_us,
            since_us,
            resumed_us,
            unexpected_page,
        });
    }

    fn journal(&mut self, state: &DestinationState, durable: bool) -> Result<(), DestinationEffectError> {
        let id = &self.terms.migration;
        let journal = &self.context.journal;
        if *self.session.state() == DestinationState::Idle {
            let state = State::Destination(state.clone());
            let new = NewMigration { terms: &self.terms, state, proposal: &self.proposal };
            return Ok(journal.begin(&new)?);
        }
        let durability = if durable { Durability::Synced } else { Durability::Process };
        match journal.record_destination(id, state, durability) {
            Err(error) if DestinationSession::is_entered_unjournalled(state) => {
                error!(
                    migration = %id,
                    error = crate::chain(&error),
                    "cannot record in the journal that the copy is destroyed"
                );
                Ok(())
            }
            recorded => Ok(recorded?),
        }
    }

    fn ask_registry(&mut self, request: RegistryRequest) {
        if let Some(request) = self.questions.registry.submit(request) {
            self.send_to_registry(request);
        }
    }

    pub(super) fn send_to_registry(&mut self, request: RegistryRequest) {
        let mailbox = self.inbox.mailbox();
        let answered = move |answer| {
            mailbox.put(DestinationNotice::Event(DestinationEvent::RegistryAnswered(answer)));
        };
        if !ownership::ask_in_thread(&self.context, &self.terms, request, answered) {
            self.session.follow_up(DestinationEvent::RegistryAnswered(RegistryAnswer::Unreachable));
            // The state machine asks again; the waiting request is sent then.
            drop(self.questions.registry.answered());
        }
    }

    fn cont(&mut self) {
        self.check_unexpected_page();
        // No vCPU has run this copy yet: the source's memory is right.
        let is_first = matches!(self.session.state(), DestinationState::Starting { again: false, .. });
        let unexpected_page = self.unexpected_page_message().filter(|_| is_first);
        let Some(vm) = &mut self.resources.vm else {
            return self.session.follow_up(DestinationEvent::QemuDied);
        };
        // QEMU exited before it received a command: no vCPU has run.
        if !vm.process.is_alive() && is_first {
            return self.session.follow_up(DestinationEvent::ContFailed);
        }
        if let Some(page_message) = unexpected_page {
            self.reporter.reason = Some(page_message);
            return self.session.follow_up(DestinationEvent::ContFailed);
        }
        self.resources.participants.before_cont();
        if let Err(error) = vm.thaw() {
            error!(error = crate::chain(&error), "cannot thaw QEMU");
        }
        self.process_cont_outcome();
    }

    /// Processes the outcome of `cont`, as soon as it is known.
    pub(super) fn process_cont_outcome(&mut self) {
        let began = self.reporter.go_received_at.unwrap_or_else(Instant::now);
        let Some(vm) = &mut self.resources.vm else {
            return self.session.follow_up(DestinationEvent::QemuDied);
        };
        let event = match vm.cont() {
            Ok(ContOutcome::Pending) => return,
            Ok(ContOutcome::Runs { resumed }) => {
                self.reporter.continued =
                    Some(Continued { returned: Instant::now(), took: began.elapsed(), resumed });
                DestinationEvent::Continued { missing: vm.artifacts.missing_pages.is_some() }
            }
            // QEMU refused before any vCPU ran: `cont` acquires the disks first.
            Err(error) if error.is_refusal() && vm.is_reported_paused() => {
                self.reporter.reason = Some(format!("QEMU does not resume the guest: {error}"));
                DestinationEvent::ContFailed
            }
            Err(_) if !vm.process.is_alive() => DestinationEvent::QemuDied,
            // It is not known whether the guest ran: after a while this driver queries QEMU as a restarted agent would.
            Err(error) => {
                error!(error = crate::chain(&error), "`cont` was not answered");
                self.session.cont_not_answered();
                return;
            }
        };
        self.session.follow_up(event);
    }

    /// Informs the participants that the guest runs here, or stays paused here.
    fn commit_participants(&mut self) {
        let since =
            |continued: &Continued| continued.returned.elapsed() + continued.resumed.unwrap_or_default();
        let runs_for = self.reporter.continued.as_ref().map(since);
        if let Some(vm) = &mut self.resources.vm {
            self.resources.participants.commit(vm, runs_for);
        }
    }

    fn announce(&mut self) {
        let Some(vm) = &mut self.resources.vm else { return };
        if let Err(error) = vm.qmp().and_then(qemu::control::announce_self) {
            // A QEMU that waits for a page announces the guest once the page is there.
            warn!(
                error = crate::chain(&error),
                "QEMU does not announce the guest yet; switches learn its place from its traffic"
            );
        }
    }

    /// Releases QEMU, because the VM belongs to this host now, and its users may control it.
    pub(crate) fn thaw_qemu(&self) {
        if let Some(vm) = &self.resources.vm
            && let Err(error) = vm.thaw()
        {
            warn!(migration = %self.terms.migration, error = crate::chain(&error), "cannot thaw QEMU");
        }
    }

    pub(crate) fn destroy_copy(&mut self) {
        // Threads of QEMU wait for missing pages until it ends.
        let _waits = self.resources.stage.abandon().end();
        self.resources.participants.abandon();
        let artifacts = if let Some(vm) = self.resources.vm.take() {
            vm.destroy()
        } else {
            let artifacts = ArrivalArtifacts::of(&self.context, &self.terms.migration);
            artifacts.remove();
            artifacts
        };
        let execution = match self.session.state() {
            DestinationState::Crashed { .. } => GuestRan::Possibly,
            _ => GuestRan::Never,
        };
        let left = self.resources.participants.undo(&artifacts, execution);
        self.resources.stage = ArrivalStage::CopyDestroyed(left);
    }
}
