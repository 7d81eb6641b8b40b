//! The source's half of the handover: the engine's effects, and the loop that takes events until the matter is settled.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::register::{RegisterAnswer, Use};
use engine::handover::source::{SourceEffect, SourceEvent, SourceState, source};
use engine::handover::{Found, Illegal, Role, Step};
use engine::precopy::FixedCost;
use link::{Incoming, LinkError};
use proto::message::{Message, Proposal, RegisterRequest};
use proto::{Epoch, Purpose};
use tracing::{error, info, warn};

use super::Driver;
use super::inbox::{Notice, Reply};
use super::phases::{Control, unexpected};
use super::vm::{SourceVm, VmError};
use crate::config::Timeouts;
use crate::fault::Faults;
use crate::journal::{Durability, JournalError, NewMigration, State};
use crate::machine::Machine;
use crate::progress::Phase;
use crate::report::Downtime;
use crate::{owners, peers, vms};

/// Why an effect could not be done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EffectError {
    /// The journal did not take the new state.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// QEMU did not do what it was told.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The state does not know the event.
    #[error(transparent)]
    Illegal(#[from] Illegal),
    /// A migration without its proposal cannot begin.
    #[error("the migration has no proposal")]
    NoProposal,
}

/// When the destination was last heard of.
#[derive(Debug)]
pub(crate) struct Contact {
    heard: Instant,
    patience: Duration,
    pub(super) retry: Duration,
}

impl Contact {
    pub(crate) fn new(timeouts: &Timeouts) -> Self {
        Self {
            heard: Instant::now(),
            patience: Duration::from_millis(timeouts.reclaim_after_ms),
            retry: Duration::from_millis(timeouts.retry_ms),
        }
    }

    /// Says once in every span of patience that it has passed.
    fn lost_for_good(&mut self) -> bool {
        let lost = self.heard.elapsed() >= self.patience;
        if lost {
            self.heard = Instant::now();
        }
        lost
    }
}

impl Machine for Driver {
    type State = SourceState;
    type Event = SourceEvent;
    type Effect = SourceEffect;
    type Error = EffectError;

    const ROLE: Role = Role::Source;

    fn names(state: &SourceState, event: &SourceEvent) -> (&'static str, &'static str) {
        (state.name(), event.name())
    }

    fn decide(&self, event: &SourceEvent) -> Result<Step<SourceState, SourceEffect>, Illegal> {
        source(&self.terms, &self.state, event)
    }

    fn effect_name(effect: &SourceEffect) -> &'static str {
        effect.name()
    }

    fn is_journal(effect: &SourceEffect) -> bool {
        matches!(effect, SourceEffect::Journal { .. })
    }

    fn state(&self) -> &SourceState {
        &self.state
    }

    fn enter(&mut self, state: SourceState) {
        self.state = state;
    }

    fn faults(&self) -> &Faults {
        &self.context.faults
    }

    fn perform(&mut self, effect: &SourceEffect) -> Result<(), EffectError> {
        match effect {
            SourceEffect::Journal { state, durable } => self.journal(state, *durable)?,
            SourceEffect::StopVm => self.with_vm(SourceVm::stop)?,
            SourceEffect::PauseQemu => self.with_vm(SourceVm::hold)?,
            SourceEffect::ResumeQemu => self.with_vm(SourceVm::release)?,
            SourceEffect::ContinueVm => {
                let event = match self.with_vm(SourceVm::cont) {
                    Ok(()) => SourceEvent::Continued,
                    Err(_) if !self.vm.as_ref().is_some_and(SourceVm::is_alive) => SourceEvent::QemuDied,
                    Err(error) => {
                        error!(vm = %self.terms.migration.vm, error = crate::chain(&error), "QEMU does not continue");
                        SourceEvent::ContinueFailed
                    }
                };
                self.follow_ups.push_back(event);
            }
            SourceEffect::QuitQemu => match self.vm.take() {
                Some(vm) => vm.quit(),
                // An agent before this one may have died between ending QEMU and tidying up after it.
                None => vms::remove_leavings(&self.context, &self.terms.migration.vm),
            },
            SourceEffect::UndoAll => {
                self.tracked = None;
                self.inbox.interrupts(None);
                // Held for a handover that did not come about; a guest that is to run was let go by its `cont`.
                if let Err(error) = self.with_vm(SourceVm::release) {
                    warn!(vm = %self.terms.migration.vm, error = crate::chain(&error), "QEMU is not let go");
                }
            }
            SourceEffect::SendGo { incarnation, run } => {
                let (epoch, incarnation) = (self.terms.epoch(), incarnation.clone());
                self.tell(&Message::Go { epoch, incarnation, run: *run });
            }
            SourceEffect::SendAbort => self.send_abort(),
            SourceEffect::Answer(verdict) => {
                let message = Message::Verdict { epoch: self.terms.epoch(), verdict: verdict.clone() };
                match self.asker.take() {
                    // Whoever asked may be gone; it will ask again.
                    Some(asker) => drop(asker.try_send(message)),
                    None => self.tell(&message),
                }
            }
            SourceEffect::AskDestination => self.tell(&Message::Inquire { epoch: self.terms.epoch() }),
            SourceEffect::Register { why, request } => self.ask_register(*why, request.clone()),
            SourceEffect::Report(report) => self.tell_user(*report),
        }
        Ok(())
    }
}

impl Driver {
    /// PREPARED: journalled, before anybody else hears of it.
    pub(crate) fn begin(&mut self, proposal: Proposal) -> Result<(), EffectError> {
        self.proposal = Some(proposal);
        let run = self.vm.as_mut().map_or(Err(VmError::Gone), SourceVm::is_running)?;
        self.feed(&SourceEvent::Begin { run })
    }

    /// A migration that has begun, to its end.
    pub(crate) fn run(mut self) -> SourceState {
        let event = match self.reach_ready() {
            Ok(ready) => SourceEvent::Ready { epoch: self.terms.epoch(), incarnation: ready.incarnation },
            Err(failure) => {
                info!(migration = %self.terms.migration, reason = failure.reason, "the migration ends");
                self.because(&failure.reason);
                failure.event
            }
        };
        self.take(&event);
        // Whatever it was that ended the phases: nobody sends any more, and a stopped guest must not wait for nothing.
        if matches!(self.state, SourceState::Prepared { .. } | SourceState::Stopped { .. }) {
            self.take(&SourceEvent::Failed);
        }
        self.settle()
    }

    /// The migration has begun, and this side cannot go on with it: its last word.
    pub(crate) fn give_up(mut self, reason: &str) {
        self.because(reason);
        self.take(&SourceEvent::Failed);
        self.settle();
    }

    /// The QEMU that an agent before this one was moving: how it stands.
    pub(crate) fn found(&mut self, mut vm: SourceVm) -> Found {
        vm.watch(self.inbox.mailbox());
        let found = vm.found();
        self.vm = Some(vm);
        found
    }

    /// A migration that an agent before this one left behind.
    pub(crate) fn run_on(mut self, found: Found) -> SourceState {
        self.take(&SourceEvent::Restarted(found));
        self.settle()
    }

    /// Takes events until the handover is over.
    fn settle(mut self) -> SourceState {
        self.contact.heard = Instant::now();
        // Whatever comes meanwhile: a peer that says something again and again must not put it off.
        let mut repeat_at = Instant::now() + self.contact.retry;
        loop {
            if let Some(event) = self.follow_ups.pop_front() {
                self.take(&event);
                continue;
            }
            if self.state.is_final() || self.state == SourceState::Idle {
                break;
            }
            self.phase(self.waiting_phase());
            let notice = (Instant::now() < repeat_at).then(|| self.inbox.wait(repeat_at)).flatten();
            let quiet = notice.is_none();
            match notice {
                Some(Notice::Message { link, message }) => self.message(link, message),
                Some(Notice::Asked { epoch, reply }) => {
                    self.contact.heard = Instant::now();
                    self.asked(epoch, reply);
                }
                Some(Notice::Event(event)) => {
                    if let SourceEvent::RegisterSays(answer) = &event {
                        let silence = self.register.silence(answer);
                        if let Some(request) = self.register.answered() {
                            self.send_to_register(request);
                        }
                        if silence >= self.contact.patience {
                            self.tell_of_silent_register();
                        }
                    }
                    self.take(&event);
                }
                Some(Notice::Lost { link, .. }) => {
                    if self.is_control(link) {
                        self.control = None;
                    }
                }
                None if self.contact.lost_for_good() => self.take(&SourceEvent::ContactLostForGood),
                // As after a restart: that QEMU is held comes before GO goes out.
                None if std::mem::take(&mut self.effects_failed) => {
                    let found = self.vm.as_mut().map_or(Found::Gone, SourceVm::found);
                    self.take(&SourceEvent::Restarted(found));
                }
                None => self.take(&SourceEvent::Repeat),
            }
            if quiet {
                // However long that took, what has come meanwhile is looked at first.
                repeat_at = Instant::now() + self.contact.retry;
            }
        }
        self.end();
        self.state
    }

    fn waiting_phase(&self) -> Phase {
        match self.state {
            SourceState::Aborting | SourceState::Returning => Phase::Undoing,
            SourceState::Bereft { .. } | SourceState::Reclaiming { .. } => Phase::InDoubt,
            _ => Phase::Handover,
        }
    }

    /// Takes an event; if an effect fails, what the state waits for is tried again later.
    fn take(&mut self, event: &SourceEvent) {
        let done = self.feed(event);
        self.done(event, done);
    }

    fn done(&mut self, event: &SourceEvent, done: Result<(), EffectError>) {
        let error = match done {
            Ok(()) => return,
            Err(EffectError::Illegal(illegal)) => return warn!(%illegal, "passed over"),
            Err(error) => error,
        };
        let reason = crate::chain(&error);
        error!(migration = %self.terms.migration, reason, "an effect failed");
        self.because(&reason);
        self.effects_failed = true;
        // Not COMMITTED, because that could not be journalled, or never tried: the guest goes on here.
        if matches!(self.state, SourceState::Prepared { .. } | SourceState::Stopped { .. })
            && *event != SourceEvent::Failed
        {
            self.take(&SourceEvent::Failed);
        }
    }

    /// The destination asks on a connection of its own, on which it waits for the answer.
    pub(super) fn asked(&mut self, epoch: Epoch, reply: Reply) {
        self.asker = Some(reply);
        self.take(&SourceEvent::Asked { epoch });
        self.asker = None;
    }

    /// What concerns the handover names its epoch and holds on whatever connection it comes.
    fn message(&mut self, link: Option<u64>, message: Message) {
        self.contact.heard = Instant::now();
        let own = self.terms.epoch();
        let event = match message {
            Message::Running { epoch, continue_us, since_us, agent_cpu_us } => {
                if epoch == own {
                    self.controls.report(|report| {
                        let known = &mut report.destination.agent_cpu_us;
                        *known = known.or(agent_cpu_us);
                    });
                    self.running(continue_us, since_us);
                }
                SourceEvent::Running { epoch }
            }
            Message::Refused { epoch, reason } => {
                if epoch == own {
                    self.because(&format!("the destination could not run the guest: {reason}"));
                }
                SourceEvent::Refused { epoch }
            }
            Message::Crashed { epoch, reason } => {
                if epoch == own {
                    self.because(&reason);
                }
                SourceEvent::Crashed { epoch }
            }
            Message::Ready { epoch, incarnation, .. } => SourceEvent::Ready { epoch, incarnation },
            Message::Ask { epoch } => SourceEvent::Asked { epoch },
            Message::Ping => return self.tell(&Message::Pong),
            Message::Pong => return,
            other => return self.broken_protocol(link, &unexpected(&other).reason),
        };
        match self.feed(&event) {
            Err(EffectError::Illegal(illegal)) => self.broken_protocol(link, &illegal.to_string()),
            done => self.done(&event, done),
        }
    }

    /// The destination does not keep to the protocol: it is not listened to any more on that connection, and what is not
    /// committed ends.
    fn broken_protocol(&mut self, link: Option<u64>, what: &str) {
        warn!(migration = %self.terms.migration, what, "the destination does not keep to the protocol");
        if link.is_some_and(|link| self.is_control(link)) {
            self.control = None;
        }
        if matches!(self.state, SourceState::Prepared { .. } | SourceState::Stopped { .. }) {
            self.because(what);
            self.take(&SourceEvent::Failed);
        }
    }

    /// RUNNING came: what the guest's standstill was made of.
    fn running(&mut self, continue_us: u64, since_us: u64) {
        if self.clock.stopped_at.is_none() || self.clock.measured.total_us > 0 {
            return;
        }
        self.clock.measured.total_us = self.since_stop_us().saturating_sub(since_us);
        self.clock.measured.continue_us = continue_us;
        let measured = self.clock.measured;
        let downtime = Downtime::from_measured(measured);
        let known =
            downtime.stop_us + downtime.last_pages_us + downtime.verify_us + measured.save_to_ready_us;
        self.context.fixed_costs().learn(FixedCost {
            stop_ns: downtime.stop_us * 1000,
            // Saving runs beside the last pages; what it adds to them is not measured apart.
            save_ns: FixedCost::default().save_ns,
            load_ns: measured.save_to_ready_us * 1000,
            continue_ns: downtime.total_us.saturating_sub(known) * 1000,
        });
        self.controls.report(|report| report.downtime = Some(downtime));
        self.telemetry.update(|progress| progress.downtime_us = Some(downtime.total_us));
        self.note("running", "");
    }

    // ---- effects

    fn with_vm(&mut self, act: impl FnOnce(&mut SourceVm) -> Result<(), VmError>) -> Result<(), VmError> {
        self.vm.as_mut().map_or(Err(VmError::Gone), act)
    }

    fn journal(&mut self, state: &SourceState, durable: bool) -> Result<(), EffectError> {
        let id = &self.terms.migration;
        let journal = &self.context.journal;
        if self.state == SourceState::Idle {
            let proposal = self.proposal.as_ref().ok_or(EffectError::NoProposal)?;
            let state = State::Source(state.clone());
            return Ok(journal.begin(&NewMigration { terms: &self.terms, state, proposal })?);
        }
        let durability = if durable { Durability::Synced } else { Durability::Process };
        match journal.record_source(id, state, durability) {
            // Room for it was kept, so that it is not a full disk but a broken one. The journal has no COMMITTED, so that
            // a restart aborts too: going on without the entry risks nothing but a host that fails before the entry can
            // be made. A guest that stands still for ever is worse. The destination is told all the same: a copy that
            // is thrown away is one that nobody can start.
            Err(error) if matches!(state, SourceState::Aborting | SourceState::Aborted) => {
                error!(migration = %id, error = crate::chain(&error), "ABORTED is not in the journal yet");
                self.unjournalled = Some(state.clone());
                Ok(())
            }
            Err(error) => Err(error.into()),
            // It stands above what was to be entered before it.
            Ok(()) => {
                self.unjournalled = None;
                Ok(())
            }
        }
    }

    /// Says something to the destination, over the control stream or, when that is gone, over a connection of its own.
    /// If there is no way, the state's repetition will find one.
    fn tell(&mut self, message: &Message) {
        if self.control.is_none() {
            match self.connect(Purpose::Handover { migration: self.terms.migration.clone() }) {
                Ok(control) => self.control = Some(control),
                Err(error) => {
                    warn!(to = %self.terms.destination, error = crate::chain(&error), "cannot reach the destination");
                    return;
                }
            }
        }
        let Some(control) = &mut self.control else { return };
        if let Err(error) = control.writer.send(message) {
            warn!(to = %self.terms.destination, error = crate::chain(&error), "cannot send to the destination");
            self.control = None;
        }
    }

    /// Opens a connection to the destination; a thread reads from it into the inbox.
    pub(crate) fn connect(&mut self, purpose: Purpose) -> Result<Control, peers::PeerError> {
        let connection = peers::connect(&self.context, &self.terms.destination, None, purpose)?;
        let handle = connection.handle();
        self.telemetry.count(handle.clone());
        let (mut reader, writer) = connection.split();
        let mailbox = self.inbox.mailbox();
        let link = self.inbox.next_link();
        let read = move || loop {
            let notice = match reader.recv(None) {
                Ok(Incoming::Message(message)) => Notice::Message { link: Some(link), message },
                Ok(Incoming::Blob(_)) => {
                    Notice::Lost { link, error: Some("the destination sent device state".to_owned()) }
                }
                Err(LinkError::Closed) => Notice::Lost { link, error: None },
                Err(error) => Notice::Lost { link, error: Some(crate::chain(&error)) },
            };
            let last = matches!(notice, Notice::Lost { .. });
            if !mailbox.put(notice) || last {
                return;
            }
        };
        thread::Builder::new().name("control".to_owned()).spawn(read).map_err(peers::PeerError::Thread)?;
        Ok(Control { writer, handle, link })
    }

    /// Tells the destination that this epoch is aborted. A thread goes on trying for a while if it cannot be reached:
    /// it would find out by itself, but later.
    fn send_abort(&mut self) {
        let reason = self.telemetry.now().message.unwrap_or_default();
        let message = Message::Abort { epoch: self.terms.epoch(), reason };
        if let Some(mut control) = self.control.take()
            && control.writer.send(&message).and_then(|()| control.writer.finish()).is_ok()
        {
            // The reading thread ends when the destination has closed its side.
            self.parting = Some(control);
            return;
        }
        let (context, terms) = (Arc::clone(&self.context), self.terms.clone());
        let patience = Duration::from_millis(context.config.timeouts.give_up_after_ms);
        let retry = self.contact.retry;
        let send = move || {
            let until = Instant::now() + patience;
            let purpose = Purpose::Handover { migration: terms.migration.clone() };
            while Instant::now() < until {
                let sent = peers::connect(&context, &terms.destination, None, purpose.clone())
                    .is_ok_and(|mut connection| connection.send(&message).is_ok());
                if sent {
                    return;
                }
                thread::sleep(retry);
            }
        };
        if let Err(error) = thread::Builder::new().name("abort".to_owned()).spawn(send) {
            warn!(%error, "cannot tell the destination now that the migration is aborted; it will ask");
        }
    }

    fn ask_register(&mut self, why: Use, request: RegisterRequest) {
        if why == Use::Offer {
            self.offer(request);
        } else if let Some(request) = self.register.question(request) {
            self.send_to_register(request);
        }
    }

    /// Nobody waits for what becomes of an offer; one is on its way at a time, and the state repeats it.
    fn offer(&mut self, request: RegisterRequest) {
        if self.offering.swap(true, Ordering::AcqRel) {
            return;
        }
        let (offering, terms) = (Arc::clone(&self.offering), self.terms.clone());
        let context = Arc::clone(&self.context);
        let offer = move || {
            owners::ask(&context, &terms, &request);
            offering.store(false, Ordering::Release);
        };
        if let Err(error) = thread::Builder::new().name("offer".to_owned()).spawn(offer) {
            warn!(%error, "cannot offer in the register");
            self.offering.store(false, Ordering::Release);
        }
    }

    fn send_to_register(&mut self, request: RegisterRequest) {
        let mailbox = self.inbox.mailbox();
        let context = Arc::clone(&self.context);
        let terms = self.terms.clone();
        let ask = move || {
            let answer = owners::ask(&context, &terms, &request);
            mailbox.put(Notice::Event(SourceEvent::RegisterSays(answer)));
        };
        if let Err(error) = thread::Builder::new().name("register".to_owned()).spawn(ask) {
            warn!(%error, "cannot ask the register");
            self.follow_ups.push_back(SourceEvent::RegisterSays(RegisterAnswer::Unreachable));
            // The state machine asks again; what waited is asked then.
            drop(self.register.answered());
        }
    }
}

#[cfg(test)]
mod tests;
