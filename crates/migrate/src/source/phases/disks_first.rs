//! Rounds of the participants that are sent first: the others, which would be written to in the meantime, begin when
//! little of the first remains.

use std::time::Duration;

use ::memory::{OwedPages, PageCursor};
use engine::disks_first::{DiskRound, DisksFirstPolicy, NextPhase};
use engine::handover::source::SourceEvent;
use engine::trace::TracedPolicy;
use proto::limits::PAGE_BYTES;

use super::rounds::DirtyScan;
use crate::source::SourceDriver;
use crate::source::failure::Failure;
use crate::source::stages::Streaming;
use crate::source::streams::Streams;
use crate::source::telemetry::DeferredPages;
use api::OnLimit;

impl SourceDriver {
    /// Sends rounds of the participants that are sent first, until the policy lets the others begin.
    pub(super) fn send_disks_first(
        &mut self,
        streams: Streams,
        owed: OwedPages,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages), Failure> {
        let (mut streams, mut owed) = (streams, owed);
        let mut sent_bytes = None;
        let memory_bytes = self.resources.participants.waiting_bytes();
        let mut policy = TracedPolicy::new(DisksFirstPolicy { memory_bytes });
        loop {
            let scanned = self.scan(owed, &mut streaming.payload)?;
            let dirty_bytes = scanned.readable.pages() * PAGE_BYTES;
            if let Some(sent_bytes) = sent_bytes {
                let observed = DiskRound { dirty_bytes, sent_bytes };
                let next = policy.decide_on(observed);
                self.controls.report(|report| policy.update_report(&mut report.traces.others.disks));
                if next == NextPhase::Memory {
                    return Ok((streams, scanned.readable.give_up()));
                }
            }
            let sent = self.send_in_parts(streams, scanned, streaming)?;
            sent_bytes = sent.is_whole.then_some(dirty_bytes);
            (streams, owed) = (sent.streams, sent.owed);
            self.has_time_for_others()?;
        }
    }

    /// Fails if the limit on the total time has passed and the action at the limit is to abort: then there is nothing
    /// to wait for.
    fn has_time_for_others(&self) -> Result<(), Failure> {
        let goals = self.controls.goals();
        let limit = goals
            .max_total_ms()
            .filter(|_| goals.settings.on_limit == OnLimit::Abort)
            .map(Duration::from_millis);
        if limit.is_some_and(|limit| self.controls.requested.elapsed() > limit) {
            let reason = "the time limit is reached before all memory was sent: allow more time, or a higher \
                          bandwidth";
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        Ok(())
    }

    /// Sends a round, in parts if a participant has to act between them, because a guest can write much during a round
    /// of hours. A page that the guest writes during the round is sent in this round if the round has not reached it
    /// yet, otherwise in the next one.
    fn send_in_parts(
        &mut self,
        mut streams: Streams,
        mut scanned: DirtyScan,
        streaming: &mut Streaming,
    ) -> Result<SentInParts, Failure> {
        let all = scanned.readable.pages();
        let (mut place, mut is_whole) = (PageCursor::default(), true);
        loop {
            let pages = self.before_round(all)?;
            self.handle_notices()?;
            let (part, later, next) = scanned.part(place, pages);
            self.telemetry.begin_round(0, DeferredPages::of(&later));
            let sent = self.send_scanned(streams, part, None, streaming)?;
            is_whole &= sent.stats.is_some();
            self.resources.participants.after_round(sent.stats.as_ref());
            let mut owed = sent.owed;
            owed.take_back(&later);
            streams = sent.streams;
            let Some(next) = next else { return Ok(SentInParts { streams, owed, is_whole }) };
            place = next;
            scanned = self.scan(owed, &mut streaming.payload)?;
        }
    }
}

/// A round that was sent in parts.
struct SentInParts {
    streams: Streams,
    owed: OwedPages,
    /// True if no part was cut off.
    is_whole: bool,
}
