//! The stop with post-copy, in which the remaining pages are sent while the guest runs at the destination.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::{CompletedRound, DirtyBitmap, Owed, Readable, Sender, encode_set};
use engine::handover::source::SourceEvent;
use engine::naming::{DiscardDecision, DiscardPolicy, PendingDiscard};
use engine::trace::TracedPolicy;
use proto::Generation;
use proto::limits::DISCARD_BYTES;
use proto::message::Message;

use super::rounds::Looked;
use super::standstill::{cannot_save, look_at_disks};
use super::{Failure, gone, unexpected};
use crate::journal::Durability;
use crate::ram::{self, KeptRegion};
use crate::report::PostCopy;
use crate::source::memory::Cargo;
use crate::source::serving::Later;
use crate::source::{Details, Driver};

/// Maximum number of lists of pages without an answer, for 2 GiB in all: more than any link needs to be fully used, and
/// less than would fill the buffers between the two drivers while both only send.
const LISTS: usize = 16;

/// Pages that the destination was asked to discard while the guest ran at the source.
#[derive(Debug)]
pub(in crate::source) struct Named {
    policy: TracedPolicy<DiscardPolicy>,
    pages: Vec<DirtyBitmap>,
    /// Pages among them that no round can have sent again since.
    away: Vec<DirtyBitmap>,
    /// Generation of the connections on which they were announced. Over new connections, the destination has forgotten
    /// the list.
    generation: Generation,
    /// Duration of the last discard at the destination.
    took: Duration,
}

impl Named {
    pub(in crate::source) fn none() -> Self {
        let policy = TracedPolicy::new(DiscardPolicy::default());
        Self { policy, pages: Vec::new(), away: Vec::new(), generation: Generation(0), took: Duration::ZERO }
    }

    /// Returns true if no pages of this generation are discarded.
    pub(super) fn is_none(&self, generation: Generation) -> bool {
        self.generation != generation || self.away.iter().all(DirtyBitmap::is_empty)
    }

    /// Records that a round sends memory: discarded pages may be present again, and have to be discarded again.
    pub(super) fn may_be_back(&mut self) {
        self.away.iter_mut().for_each(DirtyBitmap::clear_all);
    }

    /// Begins a new series of discards, independent of earlier ones.
    fn begin(&mut self) {
        self.policy.reset();
        self.took = Duration::ZERO;
    }

    /// Returns the pages of `owed` that the destination has not discarded, if they are to be announced now.
    fn next(&mut self, owed: &[DirtyBitmap], generation: Generation) -> Option<Vec<DirtyBitmap>> {
        if self.generation != generation {
            self.pages = owed.iter().map(DirtyBitmap::emptied).collect();
            (self.away, self.generation) = (self.pages.clone(), generation);
        }
        let mut unnamed = owed.to_vec();
        unnamed.iter_mut().zip(&self.away).for_each(|(unnamed, away)| unnamed.remove(away));
        let pages = unnamed.iter().map(DirtyBitmap::count).sum();
        let took_ns = u64::try_from(self.took.as_nanos()).unwrap_or(u64::MAX);
        (self.policy.decide_on(PendingDiscard { pages, took_ns }) == DiscardDecision::Name).then_some(unnamed)
    }

    fn add(&mut self, pages: &[DirtyBitmap], took: Duration) {
        for known in [&mut self.pages, &mut self.away] {
            known.iter_mut().zip(pages).for_each(|(known, pages)| known.insert(pages));
        }
        self.took = took;
    }

    /// Returns the pages for post-copy: `left`, and all pages that the destination was asked to discard. Rounds in
    /// between may have sent some of those again; they have not changed at the source, so to send them once more does
    /// no harm.
    fn with(&self, left: &[DirtyBitmap], generation: Generation) -> Vec<DirtyBitmap> {
        let mut all = left.to_vec();
        if self.generation == generation {
            all.iter_mut().zip(&self.pages).for_each(|(all, named)| all.insert(named));
        }
        all
    }
}

impl Driver {
    /// Lets the destination discard the pages for post-copy while the guest runs at the source, for as long as that
    /// shortens the guest's stop. If the link is cut in the meantime, it is mended like any other cut, before the next
    /// round; if the destination needs too long, no further discard is tried.
    pub(super) fn name_ahead(&mut self, looked: Looked, cargo: &mut Cargo) -> Result<Looked, Failure> {
        let mut looked = looked;
        self.named.begin();
        while self.control.is_some() && self.can_discard {
            let owed = &looked.readable.owed().blocks()[..cargo.ram_blocks()];
            let unnamed = self.named.next(owed, self.generation);
            self.controls.report(|report| self.named.policy.update_report(&mut report.traces.others.naming));
            let Some(unnamed) = unnamed else { break };
            cargo.withdraw_marks(&unnamed);
            match self.have_taken_away(&unnamed) {
                Ok(took) => self.named.add(&unnamed, took),
                Err(Failure { event: event @ (SourceEvent::PeerLost | SourceEvent::PeerSilent), reason }) => {
                    self.can_discard &= event != SourceEvent::PeerSilent;
                    self.control = None;
                    self.control_lost = Some(reason);
                    break;
                }
                Err(failure) => return Err(failure),
            }
            self.context.faults.reach(|| "source/named".to_owned());
            looked = self.look_at(looked.readable.give_up(), true, cargo)?;
            self.written.note(std::mem::take(&mut looked.found));
        }
        Ok(looked)
    }

    /// Lets the destination discard its versions of these pages; returns how long that lasted there.
    fn have_taken_away(&mut self, pages: &[DirtyBitmap]) -> Result<Duration, Failure> {
        let set = encode_set(pages);
        let mut took = Duration::ZERO;
        let mut unanswered = 0;
        for list in set.chunks(DISCARD_BYTES as usize) {
            if unanswered == LISTS {
                took += self.hear_taken_away()?;
                unanswered -= 1;
            }
            let digest = blake3::hash(list).to_hex().to_string();
            self.say(&Message::Discard { bytes: list.len() as u64, digest })?;
            self.send("cannot name pages", |writer| writer.send_blob(list))?;
            unanswered += 1;
        }
        for _ in 0..unanswered {
            took += self.hear_taken_away()?;
        }
        Ok(took)
    }

    fn hear_taken_away(&mut self) -> Result<Duration, Failure> {
        let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
        match self.hear(Instant::now() + patience)? {
            Message::Discarded { duration_us } => Ok(Duration::from_micros(duration_us)),
            other => Err(unexpected(&other)),
        }
    }

    /// Saves the device state, sends the remaining pages of disks, and announces the remaining pages of memory: they
    /// are sent from here on, those first that are requested. Saving may write guest memory, so the scan for the pages
    /// follows it.
    pub(super) fn name_pages(
        &mut self,
        sender: Sender,
        owed: Owed,
        cargo: &mut Cargo,
    ) -> Result<Vec<u8>, Failure> {
        let began = Instant::now();
        cargo.end_leaving_out();
        cargo.end_references();
        cargo.end_deltas();
        let mut owed = owed;
        let vm = self.vm.as_mut().ok_or_else(gone)?;
        look_at_disks(vm, cargo, &mut owed)?;
        let saving = Instant::now();
        let state = vm.save_devices().map_err(|error| cannot_save(&error))?;
        self.clock.measured.save_us = saving.elapsed().as_micros() as u64;
        let ram_blocks = cargo.ram_blocks();
        let (cleared, found) = owed
            .clear_marks_and_report(&mut cargo.ram_log(), ram_blocks)
            .map_err(|failed| Failure::local("cannot scan for dirty pages", &failed))?;
        self.written.note(found);
        self.clock.measured.last_scans_us += cleared.scan().duration_us;
        let (sender, left) = self.send_disks_alone(sender, cleared.skip_drain(), cargo)?;
        self.take_last_notices()?;
        if left.pages() > 0 {
            self.name_and_serve(sender, &left, cargo)?;
        }
        self.clock.measured.last_pages_us = began.elapsed().as_micros() as u64;
        Ok(state)
    }

    /// Sends the remaining pages of disks; returns the remaining pages of memory.
    fn send_disks_alone(
        &mut self,
        sender: Sender,
        readable: Readable,
        cargo: &Cargo,
    ) -> Result<(Sender, Owed), Failure> {
        let memory: Vec<_> = cargo.ram_bytes().iter().map(|bytes| DirtyBitmap::full(*bytes)).collect();
        let (disks, left) = readable.without(&memory);
        if disks.pages() == 0 {
            return Ok((sender, left));
        }
        let CompletedRound { sender, owed: mut unsent, .. } = sender
            .send_round_by(disks, self.standstill_ends())
            .map_err(|interrupted| self.lost_while_stopped(&interrupted.cause))?;
        if unsent.pages() > 0 {
            let reason = format!("{} pages of disks are owed after the last round", unsent.pages());
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        unsent.take_back(&left);
        Ok((sender, unsent))
    }

    /// Announces these pages to the destination, and begins to send them.
    fn name_and_serve(&mut self, sender: Sender, left: &Owed, cargo: &Cargo) -> Result<(), Failure> {
        let blocks = self.named.with(&left.blocks()[..cargo.ram_blocks()], self.generation);
        let set = encode_set(&blocks);
        let vm = self.vm.as_ref().ok_or_else(gone)?;
        let regions = ram::regions(&vm.blocks).iter().map(KeptRegion::of).collect();
        // An agent that restarts must be able to continue.
        let details = Details { later: Some(regions), ..Details::of(&self.context, Some(vm), true) };
        self.context
            .journal
            .set_details(&self.terms.migration, &details, Durability::Process)
            .map_err(|error| Failure::local("cannot note that pages are left", &error))?;
        self.say_by(Some(self.standstill_ends()));
        let digest = blake3::hash(&set).to_hex().to_string();
        self.say(&Message::MissingPages { bytes: set.len() as u64, digest, round: left.round() })?;
        for piece in set.chunks(proto::limits::BLOB_BYTES) {
            self.send("cannot name the pages that are left", |writer| writer.send_blob(piece))?;
        }
        self.inbox.interrupts(None);
        let Some(page_stream) = self.page_stream.take() else {
            return Err(Failure::new(SourceEvent::PeerLost, "there is no page stream"));
        };
        let pages = blocks.iter().map(DirtyBitmap::count).sum();
        self.controls.report(|report| {
            report.post_copy = Some(PostCopy { left_pages: pages, ..PostCopy::default() });
        });
        self.note("post-copy", format!("{pages} pages go when the guest runs there"));
        // The guest has left this host; at the destination it waits.
        sender.handle().set_niceness(0);
        sender.handle().limit_copying_threads(u16::MAX);
        let written = std::mem::take(&mut self.written);
        let mut later =
            Later::new(cargo.readers(), written, self.telemetry.left(), Arc::clone(&self.controls.rate));
        later.packing = cargo.saving().packing;
        later
            .serve(self.generation, sender, page_stream, self.inbox.mailbox())
            .map_err(|error| Failure::local("no thread to send pages in", &error))?;
        self.later = Some(later);
        self.context.faults.reach(|| "source/awaited".to_owned());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pages: &[u64]) -> Vec<DirtyBitmap> {
        let mut set = DirtyBitmap::new(1 << 20);
        for page in pages {
            set.set(*page..page + 1);
        }
        vec![set]
    }

    #[test]
    fn only_what_the_destination_does_not_know_of_is_named() {
        let (first, second) = (Generation(1), Generation(2));
        let mut named = Named::none();
        named.begin();
        let all = named.next(&set(&[1, 2, 3, 4]), first);
        assert_eq!(all, Some(set(&[1, 2, 3, 4])));
        named.add(&set(&[1, 2, 3, 4]), Duration::from_millis(10));
        assert_eq!(named.next(&set(&[1, 2, 3, 4, 5]), first), Some(set(&[5])));
        named.add(&set(&[5]), Duration::from_millis(2));
        assert_eq!(named.next(&set(&[1, 2, 3, 4, 5]), first), None, "nothing is new");
        named.begin();
        assert_eq!(named.next(&set(&[1, 2, 3, 4, 5, 9]), first), Some(set(&[9])), "what was said holds");
        assert_eq!(named.with(&set(&[2, 9]), first), set(&[1, 2, 3, 4, 5, 9]), "what was said comes");
        assert_eq!((named.is_none(first), named.is_none(second)), (false, true));
        named.may_be_back();
        assert!(named.is_none(first));
        named.begin();
        assert_eq!(named.next(&set(&[2, 9]), first), Some(set(&[2, 9])), "a round may have brought it back");
        assert_eq!(named.with(&set(&[2, 9]), first), set(&[1, 2, 3, 4, 5, 9]), "and what was said comes");
        named.begin();
        assert_eq!(named.next(&set(&[1, 9]), second), Some(set(&[1, 9])), "other connections know nothing");
        assert_eq!(named.with(&set(&[1, 9]), second), set(&[1, 9]));
    }
}
