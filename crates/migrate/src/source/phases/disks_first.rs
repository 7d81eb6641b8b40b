//! Rounds of the participants that are sent first: the others, which would be written to in the meantime, begin when
//! little of the first remains.

use ::memory::{OwedPages, PageCursor};
use engine::disks_first::NextPhase;
use engine::handover::source::SourceEvent;
use engine::session::DiskRounds;
use proto::limits::PAGE_BYTES;

use super::rounds::DirtyScan;
use crate::source::failure::Failure;
use crate::source::stages::Streaming;
use crate::source::streams::Streams;
use crate::source::telemetry::DeferredPages;
use crate::source::{SourceDriver, payload};

impl SourceDriver {
    /// Sends rounds of the participants that are sent first, until the policy lets the others begin.
    pub(super) fn send_disks_first(
        &mut self,
        streams: Streams,
        owed: OwedPages,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages), Failure> {
        let (mut streams, mut owed) = (streams, owed);
        let mut rounds = DiskRounds::new(self.resources.participants.waiting_bytes());
        loop {
            let scanned = self.scan(owed, &mut streaming.payload)?;
            let next = rounds.scanned(scanned.readable.pages() * PAGE_BYTES);
            if let Some(policy) = rounds.policy() {
                self.controls.report(|report| policy.update_report(&mut report.traces.others.disks));
            }
            if next == NextPhase::Memory {
                return Ok((streams, scanned.readable.give_up()));
            }
            let sent = self.send_in_parts(streams, scanned, streaming)?;
            rounds.sent(sent.is_whole);
            (streams, owed) = (sent.streams, sent.owed);
            self.has_time_for_others()?;
        }
    }

    /// Fails if there is no time left for the others.
    fn has_time_for_others(&self) -> Result<(), Failure> {
        let goals = self.controls.goals();
        let (limits, on_limit) = (payload::pre_copy_goals(&goals), payload::on_limit(&goals));
        if DiskRounds::is_too_late(&limits, on_limit, self.controls.requested.elapsed()) {
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
