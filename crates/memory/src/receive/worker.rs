//! One data stream: its frames are read, checked, applied in their order, and acknowledged.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use link::transport::{FrameSink, FrameSource};
use proto::frame::FrameKind;
use proto::limits::{CHUNK_BYTES, PAGE_BYTES};
use proto::pages::{Content, PageRun, PagesHeader, decode_round_end};
use proto::reference::encode_missing;

use super::acknowledger::Acknowledger;
use super::frame_data::FrameData;
use super::placement::{Placement, Target};
use super::{Gate, Guard, ReceiveError, ReceiverEvent, ReceiverState};
use crate::clock::waited;
use crate::lock;
use crate::page_set::ChunkPages;
use crate::priority::Niceness;
use crate::ram::{BlockWriter, RamError};
use crate::reductions::decoders::Decoders;
use crate::reductions::decoding::EncodedRun;
use crate::send::stream_of;

const PAGE: usize = PAGE_BYTES as usize;

pub(super) struct StreamWorker {
    pub(super) guard: Guard,
    pub(super) source: Box<dyn FrameSource>,
    pub(super) sink: Box<dyn FrameSink>,
    /// The lowest round that may arrive.
    pub(super) round: u32,
    /// The newest round of which a frame has arrived on this stream.
    pub(super) seen: u32,
    pub(super) acknowledger: Acknowledger,
    /// Destination ranges of the frame's data. Reused.
    pub(super) written: Vec<Range<u64>>,
    /// Content of referenced, changed or filled pages. Reused.
    pub(super) found: Vec<u8>,
    pub(super) decoders: Decoders,
    /// Placement of the frame's data by the transport. Reused.
    pub(super) placement: Placement,
    /// Lowered priority, in rounds of disks alone and the first of memory (or its first part), which are long. In a
    /// later round the guest may be stopped, which is unknown here.
    pub(super) niceness: Option<Niceness>,
    /// True if a page of memory has arrived on this stream.
    pub(super) brought_ram: bool,
}

impl StreamWorker {
    /// Runs until the stream ends; returns the reason.
    pub(super) fn run(&mut self) -> ReceiveError {
        let mut payload = Vec::new();
        let mut runs = Vec::new();
        loop {
            let result = self.acknowledge().and_then(|()| {
                let (kind, waited) = waited(|| self.source.receive(&mut payload));
                self.acknowledger.record_wait(waited);
                match kind.map_err(ReceiveError::Stream)? {
                    FrameKind::Pages if self.source.direct().is_some() => self.place(&payload, &mut runs),
                    FrameKind::Pages => {
                        let (header, data) = PagesHeader::decode(&payload, &mut runs)?;
                        self.apply(header, &runs, data, payload.len())
                    }
                    FrameKind::RoundEnd => self.end_round(&payload),
                    kind => {
                        let decoder = self.decoders.of_frames(kind);
                        let decoder = decoder.ok_or(ReceiveError::UnexpectedFrame(kind))?;
                        let (header, data) = decoder.decode(&payload, &mut runs)?;
                        let applied = self.apply(header, &runs, &data, payload.len());
                        if let Some(decoder) = self.decoders.of_frames(kind) {
                            decoder.take_back(data);
                        }
                        applied
                    }
                }
            });
            if let Err(cause) = result {
                return cause;
            }
        }
    }

    /// Acknowledges applied frames, unless more can be applied at once.
    fn acknowledge(&mut self) -> Result<(), ReceiveError> {
        let Some(ack) = self.acknowledger.due(|| self.source.has_more()) else { return Ok(()) };
        let sent = self.sink.send(FrameKind::Ack, &[&ack.encode()]);
        sent.and_then(|()| self.sink.flush()).map_err(ReceiveError::Stream)?;
        self.acknowledger.record_sent();
        Ok(())
    }

    /// Applies a frame of `frame_bytes` bytes, whose data is that of the runs.
    fn apply(
        &mut self,
        header: PagesHeader,
        runs: &[PageRun],
        data: &[u8],
        frame_bytes: usize,
    ) -> Result<(), ReceiveError> {
        let shared = Arc::clone(&self.guard.shared);
        let target = self.check(&shared, header, runs)?;
        let gate = shared.gate.read().unwrap_or_else(PoisonError::into_inner);
        if *gate == Gate::Shut {
            return Err(ReceiveError::Shut);
        }
        self.apply_runs(&shared, target, header, runs, data)?;
        self.acknowledger.record_bytes(frame_bytes);
        Ok(())
    }

    /// Receives the data of a frame to its place, and applies the frame. The transport changes memory only here, under
    /// the gate.
    fn place(&mut self, head: &[u8], runs: &mut Vec<PageRun>) -> Result<(), ReceiveError> {
        let (header, data_bytes) = PagesHeader::decode_head(head, runs)?;
        let shared = Arc::clone(&self.guard.shared);
        let target = self.check(&shared, header, runs)?;
        let gate = shared.gate.read().unwrap_or_else(PoisonError::into_inner);
        if *gate == Gate::Shut {
            return Err(ReceiveError::Shut);
        }
        self.placement.plan(target, header.block, runs);
        let Some(direct) = self.source.direct() else { return Err(ReceiveError::Shut) };
        let Placement { layout, bytes } = &mut self.placement;
        direct.receive(layout, bytes).map_err(ReceiveError::Stream)?;
        let bytes = std::mem::take(bytes);
        let applied = self.apply_runs(&shared, target, header, runs, &bytes);
        self.placement.bytes = bytes;
        self.acknowledger.record_bytes(head.len() + data_bytes);
        applied
    }

    /// Checks that a frame is allowed at this point. Returns the place to which it belongs.
    fn check<'a>(
        &mut self,
        shared: &'a ReceiverState,
        header: PagesHeader,
        runs: &[PageRun],
    ) -> Result<Target<'a>, ReceiveError> {
        let PagesHeader { seq, round, block, chunk } = header;
        self.check_order(seq, round)?;
        let outside = ReceiveError::Outside { block, chunk };
        let Some(writer) = shared.ram.get(usize::from(block)) else { return Err(outside) };
        let base = chunk.checked_mul(CHUNK_BYTES).filter(|base| *base < writer.bytes());
        let Some(base) = base else { return Err(outside) };
        // Runs ascend, so checking the last one is enough.
        if runs.last().is_some_and(|run| base + run.offset_bytes() + run.len_bytes() > writer.bytes()) {
            return Err(outside);
        }
        let stream = self.guard.stream;
        if stream_of(block, chunk, shared.streams) != stream {
            return Err(ReceiveError::WrongStream { block, chunk, stream });
        }
        Ok(Target { writer: writer.as_ref(), base })
    }

    /// Applies the runs of a checked frame. The gate is open.
    fn apply_runs(
        &mut self,
        shared: &ReceiverState,
        Target { writer, base }: Target<'_>,
        PagesHeader { seq, round, .. }: PagesHeader,
        runs: &[PageRun],
        data: &[u8],
    ) -> Result<(), ReceiveError> {
        self.written.clear();
        let mut missing = ChunkPages::EMPTY;
        let mut data = FrameData::new(data);
        // Runs do not overlap, so their order does not matter.
        for run in runs {
            let offset = base + run.offset_bytes();
            let place = offset..offset + run.len_bytes();
            match run.content {
                Content::Data => {
                    data.pass(run.data_bytes());
                    self.written.push(place);
                }
                Content::Zero | Content::Hole => {
                    writer.drop_pages(place).map_err(|source| failed(writer, offset, source))?;
                }
                Content::Filled | Content::Reference | Content::Delta { .. } => {
                    // One write needs contiguous data of the frame.
                    self.write(writer, data.take_passed())?;
                    let mine = data.take(run.data_bytes());
                    self.found.resize(run.len_bytes() as usize, 0);
                    if run.content == Content::Filled {
                        let pieces = self.found.chunks_exact_mut(mine.len());
                        pieces.for_each(|bytes| bytes.copy_from_slice(mine));
                        let written = writer.write(offset, &self.found);
                        written.map_err(|source| failed(writer, offset, source))?;
                    } else {
                        missing.insert(&self.decode_run(shared, writer, *run, offset, mine)?);
                    }
                }
            }
        }
        self.write(writer, data.take_passed())?;
        if runs.iter().any(|run| run.content == Content::Reference) {
            lock(&shared.rounds).referred = true;
        }
        if !missing.is_empty() {
            let payload = encode_missing(seq, missing.words());
            self.sink.send(FrameKind::Missing, &[&payload]).map_err(ReceiveError::Stream)?;
        }
        self.record_ram(shared, writer, round);
        self.acknowledger.record_applied(seq);
        Ok(())
    }

    /// Decodes a run, whose pages begin at `offset` in the block, and writes what was found. Returns the pages whose
    /// content is missing. `found` has the run's length.
    fn decode_run(
        &mut self,
        shared: &ReceiverState,
        writer: &dyn BlockWriter,
        run: PageRun,
        offset: u64,
        data: &[u8],
    ) -> Result<ChunkPages, ReceiveError> {
        let first = u64::from(run.first_page);
        let pages = first..first + u64::from(run.pages);
        let read = |block, page, into: &mut [u8]| shared.read(block, page, into);
        let encoded = EncodedRun { pages: pages.clone(), data, offset, writer, read: &read };
        let found = self.decoders.decode_run(run.content, &encoded, &mut self.found)?;
        for run in found.runs() {
            let part = (run.start - first) as usize * PAGE..(run.end - first) as usize * PAGE;
            let at = offset + part.start as u64;
            writer.write(at, &self.found[part]).map_err(|source| failed(writer, at, source))?;
        }
        let mut missing = ChunkPages::from_range(pages);
        missing.remove(&found);
        Ok(missing)
    }

    /// Writes data to the collected ranges, and clears them.
    fn write(&mut self, writer: &dyn BlockWriter, data: &[u8]) -> Result<(), ReceiveError> {
        let first = self.written.first().map(|run| run.start);
        let written = first.map_or(Ok(()), |at| {
            writer.write_runs(&self.written, data).map_err(|source| failed(writer, at, source))
        });
        self.written.clear();
        written
    }

    /// Records the first round with a page of memory.
    fn record_ram(&mut self, shared: &ReceiverState, writer: &dyn BlockWriter, round: u32) {
        if writer.is_ram() && !self.brought_ram {
            self.brought_ram = true;
            let mut rounds = lock(&shared.rounds);
            if rounds.first_of_ram == 0 {
                rounds.first_of_ram = round;
            }
        }
    }

    fn end_round(&mut self, payload: &[u8]) -> Result<(), ReceiveError> {
        let (seq, round) = decode_round_end(payload)?;
        self.check_order(seq, round)?;
        self.acknowledger.record_applied(seq);
        self.round = round.saturating_add(1);
        let mut rounds = lock(&self.guard.shared.rounds);
        rounds.ended[usize::from(self.guard.stream)] = round;
        let complete = rounds.ended.iter().copied().min().unwrap_or(0);
        let news = complete > rounds.complete;
        rounds.complete = complete.max(rounds.complete);
        let (ram_round, took) = (rounds.of_ram(complete), rounds.began.elapsed());
        let referred = news && std::mem::take(&mut rounds.referred);
        drop(rounds);
        if news {
            self.guard.shared.notify(ReceiverEvent::RoundEnded {
                round: complete,
                ram_round,
                took,
                referred,
            });
        }
        Ok(())
    }

    /// Checks that a frame is allowed at this point, and notes its round.
    fn check_order(&mut self, seq: u64, round: u32) -> Result<(), ReceiveError> {
        let expected = self.acknowledger.expected();
        if seq != expected {
            return Err(ReceiveError::WrongSeq { expected, found: seq });
        }
        if round < self.round || round == 0 {
            return Err(ReceiveError::WrongRound { at_least: self.round.max(1), found: round });
        }
        if self.niceness.is_some()
            && lock(&self.guard.shared.rounds).of_ram(round) > 1
            && let Some(mut niceness) = self.niceness.take()
        {
            niceness.end();
        }
        self.round = round;
        if round > self.seen {
            self.seen = round;
            let mut rounds = lock(&self.guard.shared.rounds);
            if round > rounds.newest {
                (rounds.newest, rounds.began) = (round, Instant::now());
            }
        }
        Ok(())
    }
}

/// Returns the error of a write to a block.
fn failed(writer: &dyn BlockWriter, offset: u64, source: RamError) -> ReceiveError {
    ReceiveError::Memory { block: writer.description(), offset, source }
}
