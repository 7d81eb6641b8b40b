//! One round: the dirty scan before it, and its way over the streams.

use std::time::Instant;

use ::memory::{
    CompletedRound, InterruptedRound, OwedPages, PageCursor, PageSet, PartBoundary, ReadablePages,
    RoundStats, ScanStats, Sender,
};
use engine::session::{InterruptContext, Time};
use host::VmError;
use tracing::info;

use crate::source::cpu_throttle::CpuThrottle;
use crate::source::failure::{Failure, gone};
use crate::source::payload::Payload;
use crate::source::pressure::PressureMeter;
use crate::source::stages::Streaming;
use crate::source::streams::{OpenedStreams, Streams};
use crate::source::{SourceDriver, payload};
use api::report::Round;

/// Result of a dirty scan: the pages that a round has to send, ready to be read.
pub(super) struct DirtyScan {
    pub(super) readable: ReadablePages,
    /// Pages that have to be sent before the guest runs at the destination.
    pub(super) must_precopy_pages: u64,
    pub(super) scan: ScanStats,
    pub(super) scanned_at: Time,
    drain_us: u64,
    /// Pages of memory that were written since the scan before, if they were requested.
    pub(super) found: Vec<PageSet>,
}

impl DirtyScan {
    /// Splits the pages by `divide`; returns the part to send and the remaining pages.
    pub(super) fn divided<T>(
        self,
        payload: &Payload,
        divide: impl FnOnce(ReadablePages) -> (ReadablePages, T),
    ) -> (Self, T) {
        let (readable, left) = divide(self.readable);
        let must_precopy_pages = payload.must_precopy_pages(readable.owed());
        (Self { readable, must_precopy_pages, ..self }, left)
    }

    /// Splits off a part of `pages` pages that begins at `from`. Returns it, the pages that are left out, and the start
    /// of the next part. For a round without pages that may be sent later.
    pub(super) fn part(self, from: PageCursor, pages: u64) -> (Self, OwedPages, Option<PageCursor>) {
        let (readable, later, next) = self.readable.part(from, pages, PartBoundary::BetweenClusters);
        let must_precopy_pages = readable.pages();
        (Self { readable, must_precopy_pages, ..self }, later, next)
    }
}

/// A round that was sent, or cut off.
pub(super) struct RoundOutcome {
    pub(super) streams: Streams,
    pub(super) owed: OwedPages,
    /// Statistics of the round; none if it was cut off, and then the streams are new.
    pub(super) stats: Option<RoundStats>,
}

impl SourceDriver {
    /// Opens the data streams. If the control stream was lost, all connections are made anew. A link that is cut before
    /// the first stream opens is worth waiting for like any other.
    pub(in crate::source) fn open_streams(&mut self, payload: &Payload) -> Result<Streams, Failure> {
        self.handle_notices()?;
        if !self.connection_facts().can_open_streams() {
            return self.reconnect(payload, self.control_loss().reason);
        }
        match self.connect_streams() {
            Ok(opened) => self.start_sender(payload, opened),
            Err(error) => {
                self.reconnect(payload, Failure::peer("cannot open the data streams", &error).reason)
            }
        }
    }

    /// Starts a sender over streams that were just opened; the guest runs.
    pub(in crate::source) fn start_sender(
        &mut self,
        payload: &Payload,
        opened: OpenedStreams,
    ) -> Result<Streams, Failure> {
        let OpenedStreams { data, page_stream } = opened;
        let started = Sender::with_reductions(payload.readers(), payload.reductions(), data);
        let sender = started.map_err(|error| Failure::local("cannot start the sending threads", &error))?;
        let (epoch, generation) = (self.terms.epoch(), self.connections.generation);
        let facts = InterruptContext { epoch, generation, is_stopped: false };
        self.inbox.interrupt_rounds(sender.handle(), facts);
        self.telemetry.follow(Some(sender.handle()));
        Ok(Streams { generation: self.connections.generation, sender, page_stream })
    }

    /// Lets the participants act before a round of up to `pages` pages; returns the number of pages after which they
    /// want to act again.
    pub(super) fn before_round(&mut self, pages: u64) -> Result<u64, Failure> {
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        self.resources.participants.before_round(vm, pages)
    }

    /// Scans the logs for dirty pages, and waits until I/O in flight has completed.
    pub(super) fn scan(&mut self, owed: OwedPages, payload: &mut Payload) -> Result<DirtyScan, Failure> {
        self.scan_dirty(owed, false, payload)
    }

    /// Scans like [`scan`](Self::scan), and also returns the dirty pages of memory if `reports_pages` is true.
    pub(super) fn scan_dirty(
        &mut self,
        owed: OwedPages,
        reports_pages: bool,
        payload: &mut Payload,
    ) -> Result<DirtyScan, Failure> {
        let reported_blocks = if reports_pages { payload.ram_blocks() } else { 0 };
        let scanned_at = self.clock.read();
        let cannot_ask = |error: VmError| Failure::local("cannot query QEMU", &error);
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        let participants = &mut self.resources.participants;
        let monitor = vm.monitor().map_err(cannot_ask)?;
        let (cleared, found) = owed
            .clear_marks_and_report(&mut participants.log(Some(monitor)), reported_blocks)
            .map_err(|failed| Failure::local("cannot find the dirty pages", &failed))?;
        let scan = cleared.scan();
        let drain_began = Instant::now();
        let readable = cleared
            .drain(|| vm.drain())
            .map_err(|failed| Failure::local("cannot drain block I/O", &failed))?;
        let drain_us = drain_began.elapsed().as_micros() as u64;
        participants.after_scan(vm.monitor().map_err(cannot_ask)?)?;
        let must_precopy_pages = payload.must_precopy_pages(readable.owed());
        Ok(DirtyScan { readable, must_precopy_pages, scan, scanned_at, drain_us, found })
    }

    /// Sends a round, or as much as possible until `until`. If the link is cut, new connections are made; pages that
    /// did not arrive are owed.
    pub(super) fn send_scanned(
        &mut self,
        streams: Streams,
        scanned: DirtyScan,
        until: Option<Instant>,
        streaming: &mut Streaming,
    ) -> Result<RoundOutcome, Failure> {
        let Streaming { payload, records, .. } = streaming;
        let DirtyScan { readable, scan, drain_us, .. } = scanned;
        if !self.connection_facts().can_carry_round(streams.generation) {
            self.inbox.interrupt_nothing();
            drop(streams);
            let streams = self.open_streams(payload)?;
            return Ok(RoundOutcome { streams, owed: readable.give_up(), stats: None });
        }
        let mut pages = readable.pages();
        let mut participant_pages = self.resources.participants.pages_by_name(readable.owed());
        let Streams { generation, sender, page_stream } = streams;
        if let Some(pressure) = &mut records.pressure {
            pressure.restrain(&sender.handle());
        }
        let sent = match until {
            Some(until) => sender.send_round_until(readable, until),
            None => sender.send_round(readable),
        };
        match sent {
            Ok(CompletedRound { sender, owed, stats }) => {
                self.sample_pressure(records.pressure.as_mut());
                // For a part of a round, the pages that were sent count.
                if until.is_some() {
                    pages = stats.contents.pages();
                    for (name, left) in self.resources.participants.pages_by_name(&owed) {
                        if let Some(pages) = participant_pages.get_mut(&name) {
                            *pages = pages.saturating_sub(left);
                        }
                    }
                }
                let mut round = Round {
                    round: stats.round,
                    dirty_pages: pages,
                    scan_us: scan.duration_us,
                    drain_us,
                    ..payload::round_report(&stats)
                };
                round.set_participant_pages(participant_pages);
                self.controls.report(|report| report.rounds.push(round));
                let streams = Streams { generation, sender, page_stream };
                Ok(RoundOutcome { streams, owed, stats: Some(stats) })
            }
            Err(interrupted) => {
                let InterruptedRound { owed, cause, .. } = *interrupted;
                info!(%cause, "round interrupted");
                self.inbox.interrupt_nothing();
                self.handle_notices_after_cut(&cause)?;
                let streams = self.reconnect(payload, crate::chain(&cause))?;
                Ok(RoundOutcome { streams, owed, stats: None })
            }
        }
    }

    /// Adapts the sender's niceness and threads to the waiting times of the guest's processors.
    fn sample_pressure(&self, pressure: Option<&mut PressureMeter>) {
        let is_held = self.resources.cpu_throttle.as_ref().is_some_and(CpuThrottle::is_holding);
        let Some(pressure) = pressure else { return };
        let Some(waiting) = pressure.sample(is_held) else { return };
        self.controls.report(|report| {
            report.waiting = Some(waiting);
            if let Some(policy) = pressure.policy() {
                policy.update_report(&mut report.traces.others.pressure);
            }
        });
    }
}
