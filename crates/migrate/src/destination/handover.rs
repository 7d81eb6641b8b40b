//! The destination's half of the handover: the loop that processes notices until the migration is settled.
//!
//! [`effects`] performs the engine's effects; [`peer`] handles messages from and to the source.

mod effects;
mod peer;

use host::{ArrivalError, ArrivingVm};
use std::time::Duration;

use engine::handover::QemuAtStart;
use engine::handover::destination::{DestinationEvent, DestinationState};
use engine::session::Timers;
use proto::message::Finding;
use tracing::{error, info, warn};

use self::effects::EffectError;
use super::Driver;
use super::inbox::Notice;
use super::post_copy_receiver;
use super::receiving::MemoryReceiver;
use crate::clock::Timer;
use crate::state_machine::StateMachine;
use api::progress::Phase;
use host::disks::CopiedImages;
use host::ownership;

impl Driver {
    /// Receives a VM whose migration is PREPARED, once the source has been informed of that.
    pub fn run(self) -> DestinationState {
        self.publisher.update(|progress| progress.phase = Phase::PreCopy);
        self.settle()
    }

    /// Resumes a migration that a previous agent left behind.
    pub fn run_on(mut self, found: QemuAtStart) -> DestinationState {
        self.take(&DestinationEvent::Restarted(found));
        self.settle()
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
    pub fn prepare(&mut self) -> Result<(), EffectError> {
        self.feed(&DestinationEvent::Prepare)
    }

    /// Begins to receive into the waiting QEMU. Returns the reason against post-copy, if that was proposed and is
    /// impossible.
    pub fn started(&mut self, vm: ArrivingVm, images: CopiedImages) -> Result<Option<Finding>, ArrivalError> {
        let migration = self.terms.migration.clone();
        let (proposal, mailbox) = (&self.proposal, self.inbox.mailbox());
        let receiving = MemoryReceiver::new(&self.context, migration, proposal, &vm, &images, mailbox)?;
        let tried = self.proposal.post_copy.then(|| {
            let (writers, _) = receiving.blocks();
            post_copy_receiver::try_out(&self.context.injector, &vm, writers)
        });
        let no_post_copy = tried.and_then(Result::err).as_ref().map(post_copy_receiver::finding);
        self.resources.images = images;
        receiving
            .begin(self.connections.generation)
            .map_err(|source| ArrivalError::Directory { path: vm.artifacts.directory.clone(), source })?;
        self.resources.vm = Some(vm);
        self.watch_found();
        self.resources.receiving = Some(receiving);
        Ok(no_post_copy)
    }

    /// Registers the source's first control stream.
    pub fn attach_control_stream(&mut self, connection: link::Connection) -> std::io::Result<()> {
        self.inbox.mailbox().connected(connection, Some(self.connections.generation))?;
        let now = self.clock.read();
        if let Some(notice) = self.inbox.wait(self.clock.instant(now)) {
            self.notice(notice);
        }
        Ok(())
    }

    /// Processes notices until the migration is settled.
    fn settle(mut self) -> DestinationState {
        let mut timers = Timers::default();
        timers.arm(Timer::Repeat, self.clock.read().after(self.retry()));
        let mut arrived = None;
        loop {
            // Each pass does one thing, at one time.
            let now = self.clock.read();
            if let Some(notice) = arrived.take() {
                self.notice(notice);
                continue;
            }
            if let Some(event) = self.handover.follow_ups.pop_front() {
                self.take(&event);
                continue;
            }
            self.publish_missing_pages();
            self.check_untrusted_page();
            self.finish_post_copy_if_complete();
            if self.handover.state.is_final() {
                break;
            }
            if let Some(Timer::Repeat) = timers.due(now) {
                self.on_idle();
                // However long that took, notices that arrived in between are processed first.
                timers.arm(Timer::Repeat, self.clock.read().after(self.retry()));
            } else {
                arrived = self.inbox.wait(self.clock.instant(timers.next().unwrap_or(now)));
            }
        }
        self.end();
        self.handover.state
    }

    /// Records a sign of life of the source. Until this host is ready only the control stream counts, because the VM
    /// arrives there or not at all: a source that only asks will not send the remaining state. After that every sign
    /// counts.
    fn record_contact(&mut self, on_control: bool) {
        if on_control || self.handover.state != DestinationState::Prepared {
            self.handover.contact.record(self.clock.now());
        }
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Event(event) => {
                if let DestinationEvent::RegistryAnswered(answer) = &event {
                    let silence = self.handover.registry.silence(answer, self.clock.now());
                    if let Some(request) = self.handover.registry.answered() {
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
            Notice::SourceReplied(event) => {
                self.handover.is_asking = false;
                self.take(&event);
            }
            Notice::Connected { link, writer, handle, generation } => {
                self.record_contact(generation.is_some());
                self.connections.links.insert(link, (writer, handle));
                match generation {
                    Some(generation) if generation >= self.connections.generation => {
                        if let Some(old) = self.connections.control.replace(link) {
                            self.hang_up(old);
                        }
                        self.connections.generation = generation;
                    }
                    // The source notices the closed connection, and makes a newer one.
                    Some(_) => self.hang_up(link),
                    None => {}
                }
            }
            Notice::Message { link, message } => {
                self.record_contact(self.connections.control == Some(link));
                self.message(link, message);
            }
            Notice::Reply(message) => self.send_message(&message),
            Notice::PageStream { generation, connection } if generation == self.connections.generation => {
                self.attach(*connection);
            }
            // The source notices the loss as well, and makes new connections.
            Notice::PageStreamLost { error } => info!(migration = %self.terms.migration, error, "link lost"),
            Notice::Blob { link, bytes }
                if self.connections.control == Some(link)
                    && self.handover.state == DestinationState::Prepared =>
            {
                self.blob(&bytes);
            }
            Notice::Blob { link, .. } => self.handle_unexpected_message(link, "device state"),
            Notice::Lost { link, error } => {
                self.connections.links.remove(&link);
                if self.connections.control == Some(link) {
                    self.connections.control = None;
                    self.handover.contact.record(self.clock.now());
                    info!(migration = %self.terms.migration, error, "the control stream was lost");
                    if self.handover.state.is_in_doubt() {
                        self.take(&DestinationEvent::Repeat);
                    }
                }
            }
            Notice::Broken { generation, error } if generation == self.connections.generation => {
                self.fail(&error);
            }
            // These belong to a replaced generation, or are checked in any case before the next notice.
            Notice::Broken { .. } | Notice::PageStream { .. } | Notice::MissingPages => {}
            Notice::StorageFailed { error } => self.fail(&error),
        }
    }

    fn hang_up(&mut self, link: u64) {
        if let Some((_, handle)) = self.connections.links.remove(&link) {
            handle.shutdown();
        }
    }

    /// Does periodic work after a time without notices.
    fn on_idle(&mut self) {
        self.resume_post_copy();
        if let Some(event) = self.handover.unrecorded_event.take() {
            return self.take(&event);
        }
        if self.resources.vm.as_ref().is_some_and(ArrivingVm::is_cont_pending) {
            return self.process_cont_outcome();
        }
        if std::mem::take(&mut self.handover.must_query_qemu) {
            let found = self.resources.vm.as_mut().map_or(QemuAtStart::Gone, ArrivingVm::found);
            return self.take(&DestinationEvent::Restarted(found));
        }
        let now = self.clock.read();
        if self.handover.state == DestinationState::Prepared {
            // While a control stream exists, the link itself detects the loss of the source.
            let give_up_after = Duration::from_millis(self.context.config.timeouts.give_up_after_ms);
            if self.connections.control.is_none() && self.handover.contact.silence(now) >= give_up_after {
                self.reporter.reason = Some("the source was lost".to_owned());
                self.take(&DestinationEvent::PeerLost);
            }
        } else if self.handover.contact.check_lost(self.reclaim_after(), now) {
            self.take(&DestinationEvent::ContactLostForGood);
        } else {
            self.take(&DestinationEvent::Repeat);
        }
    }

    pub(super) fn fail(&mut self, reason: &str) {
        warn!(migration = %self.terms.migration, reason, "the migration cannot continue");
        self.reporter.reason.get_or_insert_with(|| reason.to_owned());
        self.take(&DestinationEvent::Failed);
    }

    pub(super) fn take(&mut self, event: &DestinationEvent) {
        let done = self.feed(event);
        self.done(event, done);
    }

    fn done(&mut self, event: &DestinationEvent, done: Result<(), EffectError>) {
        let error = match done {
            Ok(()) => return,
            Err(EffectError::Illegal(illegal)) => return warn!(%illegal, "event ignored"),
            Err(error) => error,
        };
        let reason = crate::chain(&error);
        error!(migration = %self.terms.migration, reason, "an action of the handover failed");
        if matches!(event, DestinationEvent::OperatorDecided(_)) {
            let text = format!("the decision was not carried out and was discarded: {reason}; decide again");
            self.publisher.update(|progress| progress.message = Some(text));
        }
        self.reporter.reason.get_or_insert(reason);
        if self.handover.state == DestinationState::Prepared && *event != DestinationEvent::Failed {
            // A migration that cannot be journalled is not begun.
            self.take(&DestinationEvent::Failed);
        } else if !event.is_statement() {
            // An event that happened cannot be dropped: it is repeated until the journal accepts it, too.
            self.handover.unrecorded_event = Some(event.clone());
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
