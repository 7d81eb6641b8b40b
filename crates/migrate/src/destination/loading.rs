//! Messages of the control stream while a VM arrives: new connections, hashes to compare, the device state.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::handover::destination::{DestinationEvent, DestinationState};
use engine::session::{DestinationSession, NotReady, PayloadKind, RefusedPayload};
use link::transport::Channel;
use proto::limits::PAGE_BYTES;
use proto::message::Message;
use tracing::{error, info, warn};

use super::DestinationDriver;
use super::post_copy_receiver::{self, PostCopyReceiver};
use super::receiving::PageReceiver;
use super::stages::{ArrivalStage, Placing};
use crate::device_state;
use api::progress::Phase;
use host::missing_pages_record::MissingPagesRecord;
use store::journal::Durability;

/// A payload that is being received in pieces.
pub(crate) struct IncomingPayload {
    what: PayloadKind,
    bytes: u64,
    /// Length of the content, if it is compressed.
    content_bytes: Option<u64>,
    /// Digest of the content.
    digest: String,
    received: Vec<u8>,
}

impl IncomingPayload {
    /// Returns the content, once all is received; none if it is damaged.
    fn content(&self) -> Option<Cow<'_, [u8]>> {
        let is_whole = self.received.len() as u64 == self.bytes;
        let content = match self.content_bytes {
            None => Cow::Borrowed(&self.received[..]),
            Some(bytes) => Cow::Owned(device_state::decompress(&self.received, bytes)?),
        };
        (is_whole && blake3::hash(&content).to_hex().as_str() == self.digest).then_some(content)
    }
}

impl DestinationDriver {
    pub(super) fn resume(&mut self) {
        let Some(pages) = self.resources.stage.pages() else {
            return self.fail("nothing is being received");
        };
        let generation = self.connections.control.generation();
        match pages.begin(generation) {
            Ok(()) => {
                info!(migration = %self.terms.migration, %generation, "resumed");
                self.connections.incoming_payload = None;
                self.resources.stage.forget_discarded();
                self.send_message(&Message::Resumed);
            }
            Err(error) => self.fail(&format!("cannot start a thread for the data streams: {error}")),
        }
    }

    pub(super) fn verify(&mut self, block: u16, first_chunk: u64, hashes: &[String]) {
        let Some(vm) = &mut self.resources.vm else { return self.fail("there is nothing to compare") };
        match self.resources.participants.compare(vm, block.into(), first_chunk, hashes) {
            Ok(different_chunks) => self.send_message(&Message::Verified { different_chunks }),
            Err(error) => self.fail(&crate::chain(&error)),
        }
    }

    /// Begins to receive a payload in pieces, of `bytes` in all. If it is compressed, its content has `content_bytes`.
    pub(super) fn begin_payload(
        &mut self,
        what: PayloadKind,
        bytes: u64,
        content_bytes: Option<u64>,
        digest: String,
    ) {
        let can_begin_post_copy = self.proposal.post_copy && self.resources.stage.missing().is_none();
        match DestinationSession::admit_payload(what, bytes, can_begin_post_copy) {
            Ok(()) => {
                let payload = IncomingPayload { what, bytes, content_bytes, digest, received: Vec::new() };
                self.connections.incoming_payload = Some(payload);
            }
            Err(RefusedPayload::TooLarge) => {
                self.fail(&format!("a device state of {bytes} bytes is too large"));
            }
            Err(RefusedPayload::NoPostCopy) => {
                self.fail("the source listed missing pages, but post-copy is not possible here");
            }
        }
    }

    pub(super) fn blob(&mut self, blob: &[u8]) {
        let Some(payload) = &mut self.connections.incoming_payload else {
            return self.fail("received data that was not announced");
        };
        payload.received.extend_from_slice(blob);
        if (payload.received.len() as u64) < payload.bytes {
            return;
        }
        let Some(payload) = self.connections.incoming_payload.take() else { return };
        let Some(content) = payload.content() else {
            return self.fail("data received in pieces is damaged");
        };
        match payload.what {
            PayloadKind::Discard => self.discard_pages(&content),
            PayloadKind::MissingPages => self.begin_post_copy(&content),
            PayloadKind::Devices => self.load(&content, payload.digest.clone()),
        }
    }

    /// Discards these pages, which arrive after the guest; the guest still runs at the source.
    fn discard_pages(&mut self, set: &[u8]) {
        let began = Instant::now();
        let (ArrivalStage::Receiving(receiving), Some(vm)) = (&mut self.resources.stage, &self.resources.vm)
        else {
            return self.fail("nothing is being received");
        };
        let (writers, _) = receiving.pages.post_copied();
        match receiving.discarded.take(&self.context.injector, vm, writers, set) {
            Ok(()) => {
                self.context.faults.reach(|| "destination/discarded".to_owned());
                self.send_message(&Message::Discarded { duration_us: began.elapsed().as_micros() as u64 });
            }
            Err(error) => self.fail(&crate::chain(&error)),
        }
    }

    /// Begins post-copy of these pages: they arrive on page requests, and in the background.
    fn begin_post_copy(&mut self, set: &[u8]) {
        let began = Instant::now();
        let Some(vm) = &mut self.resources.vm else { return self.fail("nothing is being received") };
        let Some(receiving) = self.resources.stage.take_receiving() else {
            return self.fail("nothing is being received");
        };
        let (context, migration) = (Arc::clone(&self.context), self.terms.migration.clone());
        let mut artifacts = vm.artifacts.clone();
        let keep = |record: &MissingPagesRecord| {
            artifacts.missing_pages = Some(record.clone());
            artifacts.keep(&context, &migration, Durability::Process).map_err(std::io::Error::other)
        };
        let mailbox = self.inbox.mailbox();
        match PostCopyReceiver::begin(
            &self.context,
            vm,
            receiving.pages.post_copied(),
            set,
            &receiving.discarded,
            &mailbox,
            keep,
        ) {
            Ok(missing) => {
                vm.artifacts = artifacts;
                let (placing, page_stream) = receiving.place(missing);
                self.resources.stage = ArrivalStage::Placing(placing);
                let duration_us = began.elapsed().as_micros() as u64;
                info!(%migration, duration_us, "discarded pages that will be sent later");
                self.context.faults.reach(|| "destination/missing-pages".to_owned());
                if let Some(stream) = page_stream {
                    self.attach(stream);
                }
            }
            Err(error) => {
                self.resources.stage = ArrivalStage::Receiving(receiving);
                self.fail(&crate::chain(&error));
            }
        }
    }

    /// Attaches the source's connection for page requests.
    pub(super) fn attach(&mut self, stream: Channel) {
        let Some(stream) = self.resources.stage.keep_page_stream(stream) else { return };
        let Some(missing) = self.resources.stage.missing() else { return };
        let round = self.resources.stage.pages().map_or(0, PageReceiver::newest_round);
        if let Err(error) = missing.attach(stream, round) {
            warn!(
                migration = %self.terms.migration,
                error = crate::chain(&error),
                "the page stream cannot be used"
            );
        }
    }

    /// Resumes the post-copy of a previous agent.
    pub(super) fn resume_post_copy(&mut self) {
        let Some((vm, record)) =
            self.resources.vm.as_ref().and_then(|vm| Some((vm, vm.artifacts.missing_pages.as_ref()?)))
        else {
            return;
        };
        if !matches!(self.resources.stage, ArrivalStage::Idle) {
            return;
        }
        let (mailbox, migration) = (self.inbox.mailbox(), self.terms.migration.clone());
        match PostCopyReceiver::take_over(&vm.process, record, &mailbox) {
            Ok(None) => {
                match post_copy_receiver::end_leftover_waits(record, &self.context.injector, &vm.process) {
                    Ok(()) => self.resources.stage = ArrivalStage::FoundComplete,
                    Err(error) => {
                        let error = crate::chain(&error);
                        self.log_once("cannot end the waits of QEMU for missing pages", &error);
                    }
                }
            }
            Ok(Some(missing)) => {
                let (streams, writers) = (self.proposal.streams, missing.writers());
                let pages = PageReceiver::placing(&self.context, migration, streams, writers, mailbox);
                self.resources.stage = ArrivalStage::Placing(Placing { pages, missing });
            }
            Err(error) => {
                let error = crate::chain(&error);
                self.log_once("missing pages of the guest cannot be received", &error);
                self.reporter.reason.get_or_insert(error);
            }
        }
    }

    /// Logs an error of a repetition, but not again with every further one.
    fn log_once(&mut self, what: &'static str, error: &str) {
        let text = format!("{what}: {error}");
        if self.reporter.logged_error.as_ref() != Some(&text) {
            error!(migration = %self.terms.migration, error, what);
            self.reporter.logged_error = Some(text);
        }
    }

    /// Publishes the number of missing pages for users.
    pub(super) fn publish_missing_pages(&self) {
        let Some(left) = self.resources.stage.missing().map(PostCopyReceiver::remaining_pages) else {
            return;
        };
        let is_new = self.publisher.now().missing_pages != Some(left);
        if is_new && matches!(self.session.state(), DestinationState::Completing { .. }) {
            self.publisher.update(|progress| {
                progress.phase = Phase::PostCopy;
                progress.missing_pages = Some(left);
                progress.remaining_bytes = left * PAGE_BYTES;
            });
        }
    }

    /// Ends post-copy once all pages are present.
    pub(super) fn finish_post_copy_if_complete(&mut self) {
        if !self.session.ends_post_copy(self.resources.stage.is_complete(), self.is_to_be_stopped()) {
            return;
        }
        if let Some(missing) = self.resources.stage.missing() {
            missing.report_complete();
        }
        if let Some(pages) = self.resources.stage.finish_placing() {
            pages.end();
        }
        if let (ArrivalStage::Placed(placed), Some(vm)) = (&mut self.resources.stage, &self.resources.vm)
            && let Err(error) = placed.missing.end(&self.context.injector, &vm.process)
        {
            // Until this succeeds, threads that touch never allocated memory wait for ever: it is tried again.
            let error = crate::chain(&error);
            return error!(
                migration = %self.terms.migration,
                error,
                "cannot end the waits of QEMU for missing pages"
            );
        }
        self.resources.stage = ArrivalStage::Idle;
        self.take(&DestinationEvent::Completed);
    }

    /// Makes this host READY with the loaded state: the source is frozen, and can no longer go on by itself.
    pub(super) fn enter_ready(&mut self, run: bool) {
        let is_loaded = self.resources.vm.is_some() && self.reporter.loaded.is_some();
        let has_missing_pages = self.resources.stage.missing().is_some();
        let admitted = DestinationSession::admit_frozen(is_loaded, has_missing_pages, run);
        let vm = match (admitted, self.resources.vm.as_mut()) {
            (Ok(()), Some(vm)) => vm,
            (Err(NotReady::NotLoaded), _) | (Ok(()), None) => {
                return self.fail("the source reported that its QEMU is frozen before all pages had arrived");
            }
            (Err(NotReady::MissingForPaused), _) => {
                return self.fail("pages are missing for a guest that stays paused; please report this");
            }
        };
        match vm.freeze() {
            Ok(()) => {
                let generation = self.connections.control.generation();
                let incarnation = vm.incarnation(&self.context.boot_id, generation);
                self.take(&DestinationEvent::Loaded { incarnation, run });
            }
            Err(error) => self.fail(&crate::chain(&error)),
        }
    }

    pub(super) fn load(&mut self, state: &[u8], digest: String) {
        let began = Instant::now();
        // The arrival of missing pages goes on.
        let receiving = self.resources.stage.take_receiving();
        if let ArrivalStage::Placing(placing) = &self.resources.stage {
            placing.pages.end_complete_blocks();
        }
        if let Some(receiving) = &receiving {
            receiving.pages.shut();
        }
        let Some(vm) = &mut self.resources.vm else { return self.fail("QEMU is gone") };
        // Joining the threads needs time, which QEMU needs for loading anyway.
        let (participants, mut frozen) = (&mut self.resources.participants, Ok(()));
        let freeze = || {
            if let Some(receiving) = receiving {
                receiving.end();
            }
            frozen = participants.freeze();
        };
        let patience = Duration::from_millis(self.context.config.timeouts.qmp_ms);
        let loaded = vm.load(state, patience, freeze).and(frozen);
        match loaded.and_then(|()| participants.ready(vm)) {
            Ok(()) => self.reporter.loaded = Some((digest, began.elapsed().as_micros() as u64)),
            Err(error) => self.fail(&crate::chain(&error)),
        }
    }
}
