//! One stream of a sender: its output, and its unacknowledged frames.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

use link::transport::{ConnectionHandle, DirectSender, FrameSink, TransportError};
use proto::frame::{FrameKind, HEADER_BYTES};
use proto::pages::PagesHeader;

use crate::chunk::encoding::{Encoder, FrameEncoder, PageEncoder, PresumedPages};
use crate::chunk::{ChunkId, FrameBuilder};
use crate::lock;
use crate::meter::LinkMeter;
use crate::page_set::ChunkPages;
use crate::reductions::Reductions;
use crate::send::AckRange;

/// Maximum number of pages in unanswered references: 16 MiB. References are short, so that neither the link nor the
/// window shows when the destination falls behind; and reads that it has to do cannot be revoked.
const MAX_UNANSWERED_PAGES: u64 = 4096;

/// Content of a frame in flight. Pages that are presumed to be at the destination may turn out to be missing there.
#[derive(Clone, Copy, Debug)]
pub(super) enum InFlight {
    Pages { chunk: ChunkId, pages: ChunkPages, presumed: PresumedPages },
    RoundEnd,
}

impl InFlight {
    fn referred_pages(&self) -> u64 {
        match self {
            Self::Pages { presumed, .. } => presumed.referred.count(),
            Self::RoundEnd => 0,
        }
    }
}

/// State of the sending thread alone.
pub(super) struct FrameOutput {
    pub(super) sink: Box<dyn FrameSink>,
    pub(super) builder: FrameBuilder,
    /// Encoders of pages, in the order of the reductions.
    pub(super) page_encoders: Vec<Box<dyn PageEncoder>>,
    frame_encoder: Option<Box<dyn FrameEncoder>>,
    /// True if the transport can move memory by itself. Encoders need a copy of their own.
    can_place: bool,
}

impl FrameOutput {
    fn new(mut sink: Box<dyn FrameSink>, reductions: &Reductions) -> Self {
        let (mut page_encoders, mut frame_encoder) = (Vec::new(), None);
        for reduction in reductions.iter() {
            match Arc::clone(reduction).encoder() {
                Encoder::Pages(encoder) => page_encoders.push(encoder),
                Encoder::Frame(encoder) => frame_encoder = Some(encoder),
            }
        }
        let can_place = page_encoders.is_empty() && frame_encoder.is_none() && sink.direct().is_some();
        Self { sink, builder: FrameBuilder::new(), page_encoders, frame_encoder, can_place }
    }

    /// Returns the transport's direct placement, if it reaches a block and nothing needs a copy of the pages.
    pub(super) fn direct(&mut self, block: u16) -> Option<&mut dyn DirectSender> {
        if !self.can_place {
            return None;
        }
        self.sink.direct().filter(|direct| direct.reaches(block))
    }

    /// Sends the last frame that names its data. Returns the length of the frame, in bytes.
    pub(super) fn send_named(
        &mut self,
        header: &PagesHeader,
        meter: Option<&LinkMeter>,
    ) -> Result<usize, TransportError> {
        let Self { sink, builder, .. } = self;
        let named_bytes = builder.named_bytes();
        if let Some(meter) = meter.filter(|_| named_bytes > 0) {
            meter.record_data(named_bytes, named_bytes);
        }
        let (head, layout) = builder.named_payload(header);
        let bytes = HEADER_BYTES + head.len() + named_bytes;
        let Some(direct) = sink.direct() else { return Err(TransportError::Closed) };
        let mut send = || direct.send(FrameKind::Pages, head, layout);
        match meter {
            Some(meter) => meter.count_send(send),
            None => send(),
        }?;
        Ok(bytes)
    }

    /// Sends the pages of the last frame built, encoded if that is configured and worth it. Returns the length of the
    /// frame, in bytes.
    pub(super) fn send_pages(
        &mut self,
        header: &PagesHeader,
        meter: Option<&LinkMeter>,
        guest_runs: bool,
    ) -> Result<usize, TransportError> {
        let Self { sink, builder, frame_encoder, .. } = self;
        // References consist mostly of hashes.
        let has_data = builder.has_data();
        let packed = frame_encoder
            .as_mut()
            .filter(|_| has_data)
            .and_then(|encoder| encoder.encode(builder.data(), guest_runs, &|| sink.unsent_bytes()));
        if let Some(meter) = meter.filter(|_| has_data) {
            let data_bytes = builder.data().len();
            meter.record_data(data_bytes, packed.map_or(data_bytes, |(_, packed)| packed.len()));
        }
        let (kind, payload) = builder.payload(header, packed);
        let bytes = HEADER_BYTES + payload.iter().map(|part| part.len()).sum::<usize>();
        let mut send = || sink.send(kind, &payload);
        match meter {
            Some(meter) => meter.count_send(send),
            None => send(),
        }?;
        Ok(bytes)
    }
}

pub(super) struct Stream {
    pub(super) outlet: Mutex<FrameOutput>,
    pub(super) handle: Arc<dyn ConnectionHandle>,
    flight: Mutex<Flight>,
    room: Condvar,
    window: usize,
}

#[derive(Default)]
struct Flight {
    frames: VecDeque<InFlight>,
    /// Sequence number of the last frame that was acknowledged; those in `frames` follow it.
    acked: u64,
    closed: bool,
    /// Number of pages that the frames reference.
    referred_pages: u64,
}

impl Flight {
    fn has_room(&self, window: usize) -> bool {
        self.frames.len() < window && self.referred_pages < MAX_UNANSWERED_PAGES
    }
}

impl Stream {
    pub(super) fn new(
        sink: Box<dyn FrameSink>,
        handle: Arc<dyn ConnectionHandle>,
        window: usize,
        reductions: &Reductions,
    ) -> Self {
        let outlet = Mutex::new(FrameOutput::new(sink, reductions));
        Self { outlet, handle, flight: Mutex::default(), room: Condvar::new(), window }
    }

    /// Returns true if another frame may be sent without waiting for acknowledgements.
    pub(super) fn has_room(&self) -> bool {
        lock(&self.flight).has_room(self.window)
    }

    /// Records a frame that is about to be sent and returns its number. Waits for room; None when the stream is closed.
    ///
    /// Called before the frame is sent, because its acknowledgement may arrive before the sending call returns.
    pub(super) fn register_frame(&self, frame: InFlight) -> Option<u64> {
        let mut flight = lock(&self.flight);
        while !flight.has_room(self.window) && !flight.closed {
            flight = self.room.wait(flight).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        if flight.closed {
            return None;
        }
        flight.referred_pages += frame.referred_pages();
        flight.frames.push_back(frame);
        Some(flight.acked + flight.frames.len() as u64)
    }

    /// Acknowledges all frames up to a sequence number: moves them to `done`.
    pub(super) fn acknowledge(&self, seq: u64, done: &mut Vec<InFlight>) -> Result<(), AckRange> {
        let mut flight = lock(&self.flight);
        let expected = AckRange { from: flight.acked, to: flight.acked + flight.frames.len() as u64 };
        if seq < expected.from || seq > expected.to {
            return Err(expected);
        }
        let before = done.len();
        done.extend(flight.frames.drain(..(seq - expected.from) as usize));
        flight.referred_pages -= done[before..].iter().map(InFlight::referred_pages).sum::<u64>();
        flight.acked = seq;
        self.room.notify_one();
        Ok(())
    }

    /// Records that pages which an unacknowledged frame presumed to be at the destination are missing there: they stay
    /// owed. Returns their chunk, and how they were sent; None if there is no such frame that presumed them, or they
    /// were reported before.
    pub(super) fn missing(&self, seq: u64, missing: &ChunkPages) -> Option<(ChunkId, PresumedPages)> {
        let mut flight = lock(&self.flight);
        let index = seq.checked_sub(flight.acked + 1)?;
        match flight.frames.get_mut(usize::try_from(index).ok()?)? {
            InFlight::Pages { chunk, pages, presumed } => {
                let refused = presumed.take(missing)?;
                pages.remove(missing);
                let chunk = *chunk;
                flight.referred_pages -= refused.referred.count();
                Some((chunk, refused))
            }
            InFlight::RoundEnd => None,
        }
    }

    /// Ends the connection and wakes threads that wait for room.
    pub(super) fn close(&self) {
        lock(&self.flight).closed = true;
        self.room.notify_all();
        self.handle.shutdown();
    }
}
