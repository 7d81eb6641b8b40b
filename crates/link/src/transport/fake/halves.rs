//! The two halves of an end: frames and messages as bytes.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use proto::Message;
use proto::frame::{FrameKind, HEADER_BYTES, Header};
use proto::pages::{FIXED_BYTES, PagesHeader};

use super::line::Side;
use super::{Faults, Placement};
use crate::error::LinkError;
use crate::transport::{
    DirectReceiver, DirectSender, FrameSink, FrameSource, Incoming, MessageReceiver, MessageSender,
    TransportError,
};

/// Bytes that a sending half keeps until it is flushed.
const BUFFER: usize = 16 << 10;

/// First byte of a frame between ends that place memory one-sided: no data of it was placed, or all of it.
pub(super) const PLAIN: u8 = 0;
pub(super) const PLACED: u8 = 1;

/// Data in a sender's buffer that is read from memory only when the buffer is written.
#[derive(Debug)]
pub(super) struct LateData {
    /// Position in the buffer.
    pub(super) at: usize,
    pub(super) region: u16,
    pub(super) bytes: Range<u64>,
}

/// The sending half.
#[derive(Debug)]
pub(super) struct FrameWriter {
    pub(super) side: Arc<Side>,
    faults: Faults,
    pub(super) placement: Placement,
    pub(super) held: Vec<u8>,
    /// Data of `held` that is read when it is written.
    pub(super) late: Vec<LateData>,
    /// True once memory could not be read, so that the stream has a gap: nothing more is written.
    has_gap: bool,
    deadline: Option<Instant>,
}

impl FrameWriter {
    pub(super) fn new(side: Arc<Side>, faults: Faults, placement: Placement) -> Self {
        Self { side, faults, placement, held: Vec::new(), late: Vec::new(), has_gap: false, deadline: None }
    }

    /// Puts a frame into the buffer.
    fn hold(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        let bytes = payload.iter().map(|part| part.len()).sum();
        self.hold_header(kind, bytes, PLAIN)?;
        for part in payload {
            self.held.extend_from_slice(part);
        }
        Ok(())
    }

    /// Puts the header of a frame into the buffer.
    pub(super) fn hold_header(
        &mut self,
        kind: FrameKind,
        bytes: usize,
        mark: u8,
    ) -> Result<(), TransportError> {
        let mut header = Header::new(kind, bytes).map_err(LinkError::TooLong)?.encode();
        if self.faults.corrupt_after == Some(0) {
            header[0] ^= 0x80;
        }
        self.faults.corrupt_after = self.faults.corrupt_after.and_then(|frames| frames.checked_sub(1));
        if matches!(self.placement, Placement::OneSided { .. }) {
            self.held.push(mark);
        }
        self.held.extend_from_slice(&header);
        Ok(())
    }

    /// Writes the buffer if it is full.
    pub(super) fn write_full(&mut self) -> Result<(), TransportError> {
        if self.held.len() > BUFFER { self.write_held() } else { Ok(()) }
    }

    /// Writes the buffer, up to the cut.
    pub(super) fn write_held(&mut self) -> Result<(), TransportError> {
        if self.has_gap {
            return Err(TransportError::Closed);
        }
        self.read_late().inspect_err(|_| self.has_gap = true)?;
        let left = self.faults.cut_after.unwrap_or(u64::MAX);
        let now = (self.held.len() as u64).min(left) as usize;
        let written = self.side.write(&self.held[..now], self.deadline);
        let is_cut = now < self.held.len();
        self.faults.cut_after = self.faults.cut_after.map(|left| left - now as u64);
        self.held.clear();
        if is_cut || written.is_err() {
            self.side.shutdown();
        }
        written?;
        if is_cut { Err(LinkError::Lost(io::ErrorKind::ConnectionReset.into()).into()) } else { Ok(()) }
    }
}

impl FrameSink for FrameWriter {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        self.hold(kind, payload)?;
        self.write_full()
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        self.write_held()
    }

    fn unsent_bytes(&self) -> u64 {
        self.side.unread_bytes()
    }

    fn direct(&mut self) -> Option<&mut dyn DirectSender> {
        match self.placement {
            Placement::None => None,
            Placement::InOrder { .. } | Placement::OneSided { .. } => Some(self),
        }
    }
}

impl MessageSender for FrameWriter {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn send(&mut self, message: &Message) -> Result<(), TransportError> {
        let json = serde_json::to_vec(message).map_err(LinkError::Message)?;
        self.hold(FrameKind::Message, &[&json])?;
        self.write_held()
    }

    fn send_blob(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        self.hold(FrameKind::Blob, &[bytes])?;
        self.write_held()
    }

    fn finish(&mut self) -> Result<(), TransportError> {
        self.write_held()?;
        self.side.finish();
        Ok(())
    }
}

/// The receiving half.
#[derive(Debug)]
pub(super) struct FrameReader {
    pub(super) side: Arc<Side>,
    pub(super) placement: Placement,
    /// Received part of a frame, with its header.
    frame: Vec<u8>,
    /// Number of bytes of `frame` that were received.
    filled: usize,
    /// Rest of a frame whose data is placed.
    pub(super) rest: Rest,
}

/// Rest of a frame.
#[derive(Debug)]
pub(super) enum Rest {
    /// No rest: the frame is complete.
    None,
    /// This number of bytes, which follow.
    Follows(usize),
    /// Bytes that have arrived; all else is in its place.
    Arrived(Vec<u8>),
}

impl FrameReader {
    pub(super) fn new(side: Arc<Side>, placement: Placement) -> Self {
        Self { side, placement, frame: vec![0; HEADER_BYTES], filled: 0, rest: Rest::None }
    }

    /// Receives until `frame` is filled.
    fn fill(&mut self, deadline: Option<Instant>) -> Result<(), TransportError> {
        while self.filled < self.frame.len() {
            match self.side.read(&mut self.frame[self.filled..], deadline)? {
                0 if self.filled == 0 => return Err(LinkError::Ended.into()),
                0 => return Err(LinkError::Truncated.into()),
                bytes => self.filled += bytes,
            }
        }
        Ok(())
    }

    /// Receives a whole frame: returns its kind, and moves its payload to `payload`.
    fn next(
        &mut self,
        payload: &mut Vec<u8>,
        deadline: Option<Instant>,
    ) -> Result<FrameKind, TransportError> {
        if self.filled < HEADER_BYTES {
            self.fill(deadline)?;
        }
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&self.frame[..HEADER_BYTES]);
        let header =
            Header::decode(header).map_err(LinkError::Header).inspect_err(|_| self.side.shutdown())?;
        let mut bytes = header.payload_bytes as usize;
        if header.kind == FrameKind::Pages && matches!(self.placement, Placement::InOrder { .. }) {
            bytes = self.fill_head(bytes, deadline)?;
        }
        self.frame.resize(HEADER_BYTES + bytes, 0);
        self.fill(deadline)?;
        payload.clear();
        payload.extend_from_slice(&self.frame[HEADER_BYTES..]);
        self.frame.truncate(HEADER_BYTES);
        self.filled = 0;
        Ok(header.kind)
    }

    /// Receives the start of a payload of pages, `bytes` long, whose data is placed. Returns the length of its head.
    fn fill_head(&mut self, bytes: usize, deadline: Option<Instant>) -> Result<usize, TransportError> {
        self.frame.resize(HEADER_BYTES + bytes.min(FIXED_BYTES), 0);
        self.fill(deadline)?;
        let Some(fixed) = self.frame[HEADER_BYTES..].first_chunk() else { return Ok(bytes) };
        let head_bytes = PagesHeader::head_bytes(fixed).min(bytes);
        self.rest = Rest::Follows(bytes - head_bytes);
        Ok(head_bytes)
    }

    /// Returns the content of a frame of a channel.
    fn incoming(kind: FrameKind, payload: Vec<u8>) -> Result<Incoming, LinkError> {
        match kind {
            FrameKind::Message => {
                let message: Message = serde_json::from_slice(&payload).map_err(LinkError::Message)?;
                message.validate()?;
                Ok(Incoming::Message(message))
            }
            FrameKind::Blob => Ok(Incoming::Blob(payload)),
            kind => Err(LinkError::NotExpected(kind)),
        }
    }
}

impl FrameSource for FrameReader {
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, TransportError> {
        self.rest = Rest::None;
        if !matches!(self.placement, Placement::OneSided { .. }) {
            return self.next(payload, None);
        }
        let mut mark = [PLAIN];
        if self.side.read(&mut mark, None)? == 0 {
            return Err(LinkError::Ended.into());
        }
        let kind = self.next(payload, None)?;
        if mark == [PLACED]
            && let Some(fixed) = payload.first_chunk()
        {
            let head_bytes = PagesHeader::head_bytes(fixed).min(payload.len());
            self.rest = Rest::Arrived(payload.split_off(head_bytes));
        }
        Ok(kind)
    }

    fn has_more(&mut self) -> bool {
        self.filled > 0 || self.side.is_readable()
    }

    fn direct(&mut self) -> Option<&mut dyn DirectReceiver> {
        match self.rest {
            Rest::None => None,
            Rest::Follows(_) | Rest::Arrived(_) => Some(self),
        }
    }

    fn places_directly(&self) -> bool {
        !matches!(self.placement, Placement::None)
    }
}

impl MessageReceiver for FrameReader {
    fn recv(&mut self, deadline: Option<Instant>) -> Result<Incoming, TransportError> {
        let mut payload = Vec::new();
        let kind = self.next(&mut payload, deadline)?;
        Ok(Self::incoming(kind, payload).inspect_err(|_| self.side.shutdown())?)
    }
}
