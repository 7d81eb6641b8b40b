//! The destination's half of the handover: the engine's effects, and the loop that takes what happens.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::destination::{DestinationEffect, DestinationEvent, DestinationState, destination};
use engine::handover::register::RegisterAnswer;
use engine::handover::{Found, Illegal, Role, Step};
use link::Incoming;
use proto::message::{Acceptance, Finding, Message, RegisterRequest, Severity, Verdict};
use proto::{Epoch, Purpose};
use tracing::{error, info, warn};

use super::Driver;
use super::arriving::ArriveError;
use super::inbox::Notice;
use super::receiving::Receiving;
use crate::cpu::CpuTime;
use crate::fault::Faults;
use crate::journal::{Durability, JournalError, NewMigration, State};
use crate::machine::Machine;
use crate::progress::Phase;
use crate::{owners, peers};

/// Why an effect could not be done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EffectError {
    /// The journal did not take the new state.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The state does not know the event.
    #[error(transparent)]
    Illegal(#[from] Illegal),
}

impl EffectError {
    /// The largest epoch that this journal has seen, where it is the epoch that was not taken.
    pub(crate) fn largest_epoch(&self) -> Option<Epoch> {
        match self {
            Self::Journal(JournalError::OldEpoch { largest, .. }) => Some(*largest),
            _ => None,
        }
    }
}

impl Machine for Driver {
    type State = DestinationState;
    type Event = DestinationEvent;
    type Effect = DestinationEffect;
    type Error = EffectError;

    const ROLE: Role = Role::Destination;

    fn names(state: &DestinationState, event: &DestinationEvent) -> (&'static str, &'static str) {
        (state.name(), event.name())
    }

    fn decide(&self, event: &DestinationEvent) -> Result<Step<DestinationState, DestinationEffect>, Illegal> {
        destination(&self.terms, &self.state, event)
    }

    fn effect_name(effect: &DestinationEffect) -> &'static str {
        effect.name()
    }

    fn is_journal(effect: &DestinationEffect) -> bool {
        matches!(effect, DestinationEffect::Journal { .. })
    }

    fn state(&self) -> &DestinationState {
        &self.state
    }

    fn enter(&mut self, state: DestinationState) {
        self.state = state;
    }

    fn faults(&self) -> &Faults {
        &self.context.faults
    }

    fn perform(&mut self, effect: &DestinationEffect) -> Result<(), EffectError> {
        let epoch = self.terms.epoch();
        match effect {
            DestinationEffect::Journal { state, durable } => self.journal(state, *durable)?,
            DestinationEffect::SendReady { incarnation } => {
                let (digest, load_us) = self.loaded.clone().unwrap_or_default();
                self.say(&Message::Ready { epoch, incarnation: incarnation.clone(), digest, load_us });
            }
            DestinationEffect::AskSource => self.ask_source(),
            DestinationEffect::Register { request, .. } => self.ask_register(request.clone()),
            DestinationEffect::Cont => self.cont(),
            DestinationEffect::Announce => {
                self.let_go();
                if let Some(vm) = &mut self.vm
                    && let Err(error) = vm.qmp().and_then(qemu::control::announce_self)
                {
                    warn!(
                        error = crate::chain(&error),
                        "QEMU does not announce the guest; switches learn by themselves"
                    );
                }
            }
            DestinationEffect::SendRunning => {
                let agent_cpu_us = self.cpu.map(CpuTime::used_us);
                let (since, took) = self.continued.map(|(at, took)| (at.elapsed(), took)).unwrap_or_default();
                let (since_us, continue_us) = (since.as_micros() as u64, took.as_micros() as u64);
                self.say(&Message::Running { epoch, continue_us, since_us, agent_cpu_us });
            }
            DestinationEffect::SendRefused => {
                let reason = self.reason.clone().unwrap_or_else(|| "this copy is gone".to_owned());
                self.say(&Message::Refused { epoch, reason });
            }
            DestinationEffect::SendCrashed => {
                let reason = "its QEMU is gone, and may have run the guest".to_owned();
                self.say(&Message::Crashed { epoch, reason });
            }
            DestinationEffect::Discard => self.discard(),
            DestinationEffect::Report(report) => self.tell_user(*report),
        }
        Ok(())
    }
}

impl Driver {
    /// Receives a VM whose migration is PREPARED, from the moment on at which the source was told so.
    pub(crate) fn run(self) -> DestinationState {
        self.publisher.update(|progress| progress.phase = Phase::PreCopy);
        self.settle()
    }

    /// A migration that an agent before this one left behind.
    pub(crate) fn run_on(mut self, found: Found) -> DestinationState {
        self.take(&DestinationEvent::Restarted(found));
        self.settle()
    }

    /// The QEMU that an agent before this one had started: how it stands.
    pub(crate) fn found(&mut self, mut vm: super::Arriving) -> Found {
        let found = vm.found();
        self.vm = Some(vm);
        self.watch_found();
        found
    }

    /// PREPARED: journalled, before anything is started.
    pub(crate) fn prepare(&mut self) -> Result<(), EffectError> {
        self.feed(&DestinationEvent::Prepare)
    }

    /// The waiting QEMU is there.
    pub(crate) fn started(&mut self, vm: super::Arriving) -> Result<(), ArriveError> {
        let migration = self.terms.migration.clone();
        let receiving =
            Receiving::new(&self.context, migration, self.proposal.streams, &vm, self.inbox.mailbox())?;
        receiving
            .begin(self.generation)
            .map_err(|source| ArriveError::Directory { path: vm.traces.directory.clone(), source })?;
        self.vm = Some(vm);
        self.watch_found();
        self.receiving = Some(receiving);
        Ok(())
    }

    /// The source's first control stream.
    pub(crate) fn meet(&mut self, connection: link::Connection) -> std::io::Result<()> {
        self.inbox.mailbox().connected(connection, Some(self.generation))?;
        if let Some(notice) = self.inbox.wait(Instant::now()) {
            self.notice(notice);
        }
        Ok(())
    }

    /// Tells the source that its VM may come.
    pub(crate) fn accept(&mut self, acceptance: Acceptance) {
        self.say(&Message::Accept(acceptance));
    }

    /// Nothing came of it: tells the source why, and undoes PREPARED.
    pub(crate) fn reject(mut self, findings: Vec<Finding>, largest_epoch: Option<Epoch>) {
        let blockers = findings.iter().filter(|finding| finding.severity == Severity::Blocker);
        let what = blockers.map(|finding| finding.what.as_str()).collect::<Vec<_>>().join("; ");
        warn!(migration = %self.terms.migration, what, "the VM cannot come");
        self.say(&Message::Reject { findings, largest_epoch });
        if self.state != DestinationState::Idle {
            self.reason = Some(what);
            self.take(&DestinationEvent::Failed);
            self.settle();
        }
    }

    /// Takes notices until the matter is settled.
    fn settle(mut self) -> DestinationState {
        let retry = Duration::from_millis(self.context.config.timeouts.retry_ms);
        // Whatever comes meanwhile: a source that says GO again and again must not put it off.
        let mut repeat_at = Instant::now() + retry;
        loop {
            if let Some(event) = self.follow_ups.pop_front() {
                self.take(&event);
                continue;
            }
            if self.state.is_final() {
                break;
            }
            if Instant::now() < repeat_at
                && let Some(notice) = self.inbox.wait(repeat_at)
            {
                self.notice(notice);
            } else {
                self.quiet();
                // However long that took, what has come meanwhile is looked at first.
                repeat_at = Instant::now() + retry;
            }
        }
        self.end();
        self.state
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Event(event) => {
                if let DestinationEvent::RegisterSays(answer) = &event {
                    let silence = self.register.silence(answer);
                    if let Some(request) = self.register.answered() {
                        self.send_to_register(request);
                    }
                    if silence >= Duration::from_millis(self.context.config.timeouts.reclaim_after_ms) {
                        self.tell_of_silent_register();
                    }
                }
                self.take(&event);
            }
            Notice::Connected { link, writer, handle, generation } => {
                self.heard = Instant::now();
                self.links.insert(link, (writer, handle));
                match generation {
                    Some(generation) if generation >= self.generation => {
                        if let Some(old) = self.control.replace(link) {
                            self.links.remove(&old);
                        }
                        self.generation = generation;
                    }
                    Some(_) => drop(self.links.remove(&link)),
                    None => {}
                }
            }
            Notice::Message { link, message } => {
                self.heard = Instant::now();
                self.message(link, message);
            }
            Notice::Blob { link, bytes } if self.control == Some(link) => self.blob(&bytes),
            Notice::Blob { link, .. } => self.does_not_belong(link, "device state"),
            Notice::Lost { link, error } => {
                self.links.remove(&link);
                if self.control == Some(link) {
                    self.control = None;
                    self.heard = Instant::now();
                    info!(migration = %self.terms.migration, error, "the control stream was lost");
                    if self.state.in_doubt() {
                        self.take(&DestinationEvent::Repeat);
                    }
                }
            }
            Notice::Broken { generation, error } if generation == self.generation => self.fail(&error),
            Notice::Broken { .. } => {}
        }
    }

    /// Some time has passed.
    fn quiet(&mut self) {
        if let Some(event) = self.not_taken.take() {
            return self.take(&event);
        }
        if std::mem::take(&mut self.look_again) {
            let found = self.vm.as_mut().map_or(Found::Gone, super::Arriving::found);
            return self.take(&DestinationEvent::Restarted(found));
        }
        let timeouts = &self.context.config.timeouts;
        let silence = self.heard.elapsed();
        if self.state == DestinationState::Prepared {
            // While a control stream is there, the link notices by itself whether the source is.
            if self.control.is_none() && silence >= Duration::from_millis(timeouts.give_up_after_ms) {
                self.reason = Some("the source was lost".to_owned());
                self.take(&DestinationEvent::PeerLost);
            }
        } else if silence >= Duration::from_millis(timeouts.reclaim_after_ms) {
            self.heard = Instant::now();
            self.take(&DestinationEvent::ContactLostForGood);
        } else {
            self.take(&DestinationEvent::Repeat);
        }
    }

    /// What concerns the handover names its epoch and holds on whatever connection it comes; the rest belongs to the
    /// control stream.
    fn message(&mut self, link: u64, message: Message) {
        let control = self.control == Some(link);
        let event = match message {
            Message::Go { epoch, incarnation, run } => {
                self.go_heard.get_or_insert_with(Instant::now);
                DestinationEvent::Go { epoch, incarnation, run }
            }
            Message::Abort { epoch, reason } => {
                self.reason.get_or_insert(reason);
                DestinationEvent::AbortReceived { epoch }
            }
            Message::Inquire { epoch } => DestinationEvent::Asked { epoch },
            Message::Verdict { epoch, verdict } => DestinationEvent::SourceSays { epoch, verdict },
            Message::Ping => return self.say(&Message::Pong),
            Message::Pong => return,
            Message::Resume if control => return self.resume(),
            Message::Verify { block, first_chunk, hashes } if control => {
                return self.verify(block, first_chunk, &hashes);
            }
            Message::DeviceState { bytes, digest } if control => return self.expect_state(bytes, digest),
            Message::Held { epoch } if control && epoch == self.terms.epoch() => return self.held(),
            other => return self.does_not_belong(link, &kind(&other)),
        };
        match self.feed(&event) {
            Err(EffectError::Illegal(illegal)) => self.broken_protocol(link, &illegal.to_string()),
            done => self.done(&event, done),
        }
    }

    /// Something came where it has no place. From a connection that has been replaced it comes late, and means nothing.
    fn does_not_belong(&mut self, link: u64, what: &str) {
        if self.links.contains_key(&link) {
            self.broken_protocol(link, &format!("the source sent `{what}` where it does not belong"));
        }
    }

    /// The source does not keep to the protocol: it is not listened to any more on that connection, and what nobody
    /// counts on yet ends.
    fn broken_protocol(&mut self, link: u64, what: &str) {
        warn!(migration = %self.terms.migration, what, "the source does not keep to the protocol");
        if let Some((_, handle)) = self.links.remove(&link) {
            handle.shutdown();
        }
        if self.state == DestinationState::Prepared {
            self.fail(what);
        }
    }

    pub(super) fn fail(&mut self, reason: &str) {
        warn!(migration = %self.terms.migration, reason, "the migration cannot go on");
        self.reason.get_or_insert_with(|| reason.to_owned());
        self.take(&DestinationEvent::Failed);
    }

    pub(super) fn take(&mut self, event: &DestinationEvent) {
        let done = self.feed(event);
        self.done(event, done);
    }

    fn done(&mut self, event: &DestinationEvent, done: Result<(), EffectError>) {
        let error = match done {
            Ok(()) => return,
            Err(EffectError::Illegal(illegal)) => return warn!(%illegal, "passed over"),
            Err(error) => error,
        };
        let reason = crate::chain(&error);
        error!(migration = %self.terms.migration, reason, "an effect failed");
        self.reason.get_or_insert(reason);
        if self.state == DestinationState::Prepared && *event != DestinationEvent::Failed {
            // What cannot be journalled is not begun.
            self.take(&DestinationEvent::Failed);
        } else {
            // What happened has happened: it is taken again until the journal takes it, too.
            self.not_taken = Some(event.clone());
        }
    }

    // ---- effects

    fn journal(&mut self, state: &DestinationState, durable: bool) -> Result<(), EffectError> {
        let id = &self.terms.migration;
        let journal = &self.context.journal;
        if self.state == DestinationState::Idle {
            let state = State::Destination(state.clone());
            let new = NewMigration { terms: &self.terms, state, proposal: &self.proposal };
            return Ok(journal.begin(&new)?);
        }
        let durability = if durable { Durability::Synced } else { Durability::Process };
        match journal.record_destination(id, state, durability) {
            // An agent that is started anew discards what was only PREPARED.
            Err(error) if matches!(state, DestinationState::Discarded) => {
                error!(migration = %id, error = crate::chain(&error), "DISCARDED is not in the journal");
                Ok(())
            }
            recorded => Ok(recorded?),
        }
    }

    /// Says something on all connections of the source: which of them it still reads is not known.
    pub(super) fn say(&mut self, message: &Message) {
        self.links.retain(|_, (writer, _)| writer.send(message).is_ok());
    }

    fn ask_source(&mut self) {
        if self.asking.swap(true, Ordering::AcqRel) {
            return;
        }
        let asking = Arc::clone(&self.asking);
        let (context, terms) = (Arc::clone(&self.context), self.terms.clone());
        let (mailbox, address) = (self.inbox.mailbox(), self.proposal.reply_to.clone());
        let ask = move || {
            let event = match question(&context, &terms, &address) {
                Ok(verdict) => DestinationEvent::SourceSays { epoch: terms.epoch(), verdict },
                Err(error) => {
                    warn!(source = %terms.source, error, "the source does not answer");
                    DestinationEvent::PeerLost
                }
            };
            asking.store(false, Ordering::Release);
            mailbox.put(Notice::Event(event));
        };
        if thread::Builder::new().name("ask-source".to_owned()).spawn(ask).is_err() {
            self.asking.store(false, Ordering::Release);
        }
    }

    fn ask_register(&mut self, request: RegisterRequest) {
        if let Some(request) = self.register.question(request) {
            self.send_to_register(request);
        }
    }

    fn send_to_register(&mut self, request: RegisterRequest) {
        let mailbox = self.inbox.mailbox();
        let context = Arc::clone(&self.context);
        let terms = self.terms.clone();
        let ask = move || {
            let answer = owners::ask(&context, &terms, &request);
            mailbox.put(Notice::Event(DestinationEvent::RegisterSays(answer)));
        };
        if let Err(error) = thread::Builder::new().name("register".to_owned()).spawn(ask) {
            warn!(%error, "cannot ask the register");
            self.follow_ups.push_back(DestinationEvent::RegisterSays(RegisterAnswer::Unreachable));
            // The state machine asks again; what waited is asked then.
            drop(self.register.answered());
        }
    }

    fn cont(&mut self) {
        let began = self.go_heard.unwrap_or_else(Instant::now);
        let Some(vm) = &mut self.vm else { return self.follow_ups.push_back(DestinationEvent::QemuDied) };
        // Gone before it was told anything: no vCPU has run.
        if !vm.process.is_alive() && matches!(self.state, DestinationState::Starting { again: false, .. }) {
            return self.follow_ups.push_back(DestinationEvent::ContFailed);
        }
        if let Err(error) = vm.release() {
            error!(error = crate::chain(&error), "QEMU is not let go");
        }
        let event = match vm.qmp().and_then(qemu::control::cont) {
            Ok(()) => {
                self.continued = Some((Instant::now(), began.elapsed()));
                DestinationEvent::Contd
            }
            // QEMU itself said no before any vCPU ran: `cont` takes the disks first.
            Err(error) if error.is_refusal() && vm.found() == Found::Paused => {
                self.reason = Some(format!("QEMU does not continue: {error}"));
                DestinationEvent::ContFailed
            }
            Err(_) if !vm.process.is_alive() => DestinationEvent::QemuDied,
            // Whether it ran is not known: after a while this looks again as a restarted agent would.
            Err(error) => {
                error!(error = crate::chain(&error), "`cont` was not answered");
                self.look_again = true;
                return;
            }
        };
        self.follow_ups.push_back(event);
    }

    /// Whoever has a VM that is this host's may do with it as he likes.
    pub(super) fn let_go(&self) {
        if let Some(vm) = &self.vm
            && let Err(error) = vm.release()
        {
            warn!(migration = %self.terms.migration, error = crate::chain(&error), "QEMU is not let go");
        }
    }

    pub(super) fn discard(&mut self) {
        if let Some(receiving) = self.receiving.take() {
            receiving.end();
        }
        match self.vm.take() {
            Some(vm) => vm.discard(),
            None => super::arriving::Traces::of(&self.context, &self.terms.migration).remove(),
        }
    }

    /// A QEMU that was found again is watched as one that was started.
    pub(crate) fn watch_found(&mut self) {
        let mailbox = self.inbox.mailbox();
        if let Some(vm) = &mut self.vm {
            vm.watch(mailbox);
        }
    }
}

/// A message's name in the protocol.
fn kind(message: &Message) -> String {
    let value = serde_json::to_value(message).unwrap_or_default();
    value["type"].as_str().unwrap_or_default().to_owned()
}

/// Asks the source's journal.
fn question(
    context: &crate::context::Context,
    terms: &engine::handover::Terms,
    address: &str,
) -> Result<Verdict, String> {
    let purpose = Purpose::Handover { migration: terms.migration.clone() };
    let patience = Duration::from_millis(context.config.timeouts.peer_silence_ms);
    let mut connection = peers::connect(context, &terms.source, Some(address), purpose)
        .map_err(|error| crate::chain(&error))?;
    connection.send(&Message::Ask { epoch: terms.epoch() }).map_err(|error| crate::chain(&error))?;
    let deadline = Instant::now() + patience;
    loop {
        match connection.recv(Some(deadline)).map_err(|error| crate::chain(&error))? {
            Incoming::Message(Message::Verdict { epoch, verdict }) if epoch == terms.epoch() => {
                return Ok(verdict);
            }
            Incoming::Message(_) => {}
            Incoming::Blob(_) => return Err("the source sent device state".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests;
