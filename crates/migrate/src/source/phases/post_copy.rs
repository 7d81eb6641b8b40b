//! The stop with post-copy, in which the remaining pages are sent while the guest runs at the destination.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::{CompletedRound, OwedPages, PageSet, ReadablePages, ReductionStage, Sender, encode_set};
use engine::handover::source::SourceEvent;
use engine::session::FailedDiscard;
use proto::limits::DISCARD_BYTES;
use proto::message::Message;

use super::rounds::DirtyScan;
use super::switchover::cannot_save;
use crate::source::failure::{Failure, gone, unexpected};
use crate::source::participants::Comparison;
use crate::source::payload::Payload;
use crate::source::post_copy_server::PostCopyServer;
use crate::source::stages::{Stopped, Streaming, StreamingRecords};
use crate::source::streams::Streams;
use crate::source::{SourceDetails, SourceDriver};
use api::report::PostCopy;
use host::ram::{self, JournalledRegion};
use store::journal::Durability;

/// Maximum number of lists of pages without an answer, for 2 GiB in all: more than any link needs to be fully used, and
/// less than would fill the buffers between the two drivers while both only send.
const MAX_UNANSWERED_LISTS: usize = 16;

impl SourceDriver {
    /// Lets the destination discard the pages for post-copy while the guest runs at the source, for as long as that
    /// shortens the guest's stop. If the link is cut in the meantime, it is mended like any other cut, before the next
    /// round; if the destination needs too long, no further discard is tried.
    pub(super) fn discard_before_stop(
        &mut self,
        scanned: DirtyScan,
        streaming: &mut Streaming,
    ) -> Result<DirtyScan, Failure> {
        let mut scanned = scanned;
        let Streaming { payload, records, .. } = streaming;
        let StreamingRecords { discards, writes, .. } = records;
        discards.begin();
        while self.connections.control.is_some() && self.agreement.can_discard {
            let owed = &scanned.readable.owed().blocks()[..payload.ram_blocks()];
            let unnamed = discards.next(owed, self.connections.generation);
            self.controls
                .report(|report| discards.policy().update_report(&mut report.traces.others.discards));
            let Some(unnamed) = unnamed else { break };
            payload.forget_versions(&unnamed);
            match self.discard(&unnamed) {
                Ok(took) => discards.add(&unnamed, took),
                Err(failure) => match FailedDiscard::of(&failure.event) {
                    FailedDiscard::Cut { tries_again } => {
                        self.agreement.can_discard &= tries_again;
                        self.connections.control = None;
                        self.connections.control_lost = Some(failure.reason);
                        break;
                    }
                    FailedDiscard::End => return Err(failure),
                },
            }
            self.context.faults.reach(|| "source/discarded".to_owned());
            scanned = self.scan_dirty(scanned.readable.give_up(), true, payload)?;
            writes.note(std::mem::take(&mut scanned.found));
        }
        Ok(scanned)
    }

    /// Lets the destination discard its versions of these pages; returns how long that lasted there.
    fn discard(&mut self, pages: &[PageSet]) -> Result<Duration, Failure> {
        let set = encode_set(pages);
        let mut took = Duration::ZERO;
        let mut unanswered = 0;
        for list in set.chunks(DISCARD_BYTES as usize) {
            if unanswered == MAX_UNANSWERED_LISTS {
                took += self.receive_discarded()?;
                unanswered -= 1;
            }
            let digest = blake3::hash(list).to_hex().to_string();
            self.send_message(&Message::Discard { bytes: list.len() as u64, digest })?;
            self.send("cannot encode the list of discarded pages", |writer| writer.send_blob(list))?;
            unanswered += 1;
        }
        for _ in 0..unanswered {
            took += self.receive_discarded()?;
        }
        Ok(took)
    }

    fn receive_discarded(&mut self) -> Result<Duration, Failure> {
        let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
        match self.receive_message(Instant::now() + patience)? {
            Message::Discarded { duration_us } => Ok(Duration::from_micros(duration_us)),
            other => Err(unexpected(&other)),
        }
    }

    /// Saves the device state, sends the remaining pages of disks, and announces the remaining pages of memory: they
    /// are sent from here on, those first that are requested. Saving may write guest memory, so the scan for the pages
    /// follows it.
    pub(super) fn announce_pages(
        &mut self,
        streams: Streams,
        owed: OwedPages,
        stopped: &mut Stopped,
        records: &mut StreamingRecords,
    ) -> Result<Vec<u8>, Failure> {
        let began = Instant::now();
        let Streams { generation, sender, page_stream } = streams;
        let payload = &stopped.payload;
        payload.end_reductions(ReductionStage::PostCopy);
        let mut owed = owed;
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        self.resources.participants.freeze(vm, Comparison::NotCompared, &mut owed)?;
        let saving = Instant::now();
        let state = vm.save_devices().map_err(|error| cannot_save(&error))?;
        self.reporter.stop_clock.measured.save_us = saving.elapsed().as_micros() as u64;
        let ram_blocks = payload.ram_blocks();
        let (cleared, found) = owed
            .clear_marks_and_report(&mut self.resources.participants.log(None), ram_blocks)
            .map_err(|failed| Failure::local("cannot scan for dirty pages", &failed))?;
        records.writes.note(found);
        self.reporter.stop_clock.measured.last_scans_us += cleared.scan().duration_us;
        let (sender, remaining) = self.send_must_precopy(sender, cleared.skip_drain(), payload)?;
        self.handle_last_notices()?;
        if remaining.pages() > 0 {
            let streams = Streams { generation, sender, page_stream };
            self.announce_and_serve(streams, &remaining, stopped, records)?;
        }
        self.reporter.stop_clock.measured.last_pages_us = began.elapsed().as_micros() as u64;
        Ok(state)
    }

    /// Sends the remaining pages that have to precede the guest; returns the others.
    fn send_must_precopy(
        &mut self,
        sender: Sender,
        readable: ReadablePages,
        payload: &Payload,
    ) -> Result<(Sender, OwedPages), Failure> {
        let memory: Vec<_> = payload.ram_bytes().iter().map(|bytes| PageSet::full(*bytes)).collect();
        let (disks, remaining) = readable.without(&memory);
        if disks.pages() == 0 {
            return Ok((sender, remaining));
        }
        let CompletedRound { sender, owed: mut unsent, .. } = sender
            .send_round_by(disks, self.switchover_deadline())
            .map_err(|interrupted| self.lost_while_stopped(&interrupted.cause))?;
        if unsent.pages() > 0 {
            let reason = format!("{} pages of disks were not sent in the last round", unsent.pages());
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        unsent.take_back(&remaining);
        Ok((sender, unsent))
    }

    /// Announces these pages to the destination, and begins to send them.
    fn announce_and_serve(
        &mut self,
        streams: Streams,
        remaining: &OwedPages,
        stopped: &mut Stopped,
        records: &mut StreamingRecords,
    ) -> Result<(), Failure> {
        let Streams { sender, page_stream, .. } = streams;
        let payload = &stopped.payload;
        let remaining_memory = &remaining.blocks()[..payload.ram_blocks()];
        let blocks = records.discards.with(remaining_memory, self.connections.generation);
        let set = encode_set(&blocks);
        let vm = self.resources.vm.as_ref().ok_or_else(gone)?;
        let regions = ram::regions(&vm.blocks).iter().map(JournalledRegion::of).collect();
        // An agent that restarts must be able to continue.
        let details = SourceDetails {
            post_copied_regions: Some(regions),
            ..SourceDetails::of(&self.context, Some(vm), true)
        };
        self.context
            .journal
            .set_details(&self.terms.migration, &details, Durability::Process)
            .map_err(|error| Failure::local("cannot record that pages are left to send", &error))?;
        let sent_by = self.switchover_deadline();
        self.set_control_deadline(Some(sent_by));
        let digest = blake3::hash(&set).to_hex().to_string();
        self.send_message(&Message::MissingPages {
            bytes: set.len() as u64,
            digest,
            round: remaining.round(),
        })?;
        for piece in set.chunks(proto::limits::BLOB_BYTES) {
            self.send("cannot encode the list of missing pages", |writer| writer.send_blob(piece))?;
        }
        self.inbox.interrupt_nothing();
        let Some(page_stream) = page_stream else {
            return Err(Failure::new(SourceEvent::PeerLost, "there is no page stream"));
        };
        let pages = blocks.iter().map(PageSet::count).sum();
        self.controls.report(|report| {
            report.post_copy = Some(PostCopy { remaining_pages: pages, ..PostCopy::default() });
        });
        self.note("post-copy", format!("{pages} pages are sent after the guest runs there"));
        // The guest has left this host; at the destination it waits.
        sender.handle().set_niceness(0);
        sender.handle().limit_copying_threads(u16::MAX);
        sender.handle().stop_direct_placement();
        let mut server = PostCopyServer::new(
            payload.readers(),
            std::mem::take(&mut records.writes),
            self.telemetry.remaining(),
            Arc::clone(&self.controls.rate),
        );
        server.reductions = payload.reductions().of_frames();
        server
            .serve(self.connections.generation, sender, page_stream, self.inbox.mailbox())
            .map_err(|error| Failure::local("cannot start a thread to send pages", &error))?;
        stopped.server = Some(server);
        self.context.faults.reach(|| "source/missing-pages".to_owned());
        Ok(())
    }
}
