//! Connections over socket pairs that break after a number of bytes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use link::LinkError;
use proto::frame::{FrameKind, HEADER_BYTES, Header};

use crate::{DataStream, FrameSink, FrameSource, HangUp};

/// Never breaks by itself.
pub(super) const WHOLE: u64 = u64::MAX;

/// Bytes that a sink keeps until it is flushed.
const BUFFER: usize = 16 << 10;

pub(super) struct Sink {
    stream: UnixStream,
    held: Vec<u8>,
    /// The connection is cut after this number of further bytes.
    budget: u64,
    /// The frame after this number of others is of an unknown kind.
    corrupt_after: Option<u64>,
    deadline: Option<Instant>,
}

impl Sink {
    pub(super) fn new(stream: UnixStream, budget: u64) -> Self {
        Self { stream, held: Vec::new(), budget, corrupt_after: None, deadline: None }
    }

    /// Sends any bytes, including invalid frames.
    pub(super) fn send_bytes(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
        self.flush().unwrap();
    }
}

impl FrameSink for Sink {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), LinkError> {
        let len = payload.iter().map(|part| part.len()).sum();
        let mut header = Header::new(kind, len).map_err(LinkError::TooLong)?.encode();
        if self.corrupt_after == Some(0) {
            header[0] ^= 0x80;
        }
        self.corrupt_after = self.corrupt_after.and_then(|frames| frames.checked_sub(1));
        self.held.extend_from_slice(&header);
        for part in payload {
            self.held.extend_from_slice(part);
        }
        if self.held.len() > BUFFER { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), LinkError> {
        let now = (self.held.len() as u64).min(self.budget) as usize;
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // A timeout of zero cannot be set.
        self.stream.set_write_timeout(left.map(|left| left.max(Duration::from_micros(1)))).unwrap();
        let sent = self.stream.write_all(&self.held[..now]);
        let cut = now < self.held.len();
        self.budget -= now as u64;
        self.held.clear();
        sent.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => LinkError::TimedOut,
            _ => LinkError::Lost(error),
        })?;
        if cut {
            // The peer still receives the bytes in the buffers.
            self.stream.hang_up();
            return Err(LinkError::Lost(io::ErrorKind::ConnectionReset.into()));
        }
        Ok(())
    }

    /// No meaningful number.
    fn unsent_bytes(&self) -> u64 {
        self.budget % (128 << 10)
    }
}

pub(super) struct Source(BufReader<UnixStream>);

impl FrameSource for Source {
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, LinkError> {
        if self.0.fill_buf().map_err(LinkError::Lost)?.is_empty() {
            return Err(LinkError::Ended);
        }
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).map_err(LinkError::Lost)?;
        let header = Header::decode(header)?;
        payload.resize(header.payload_bytes as usize, 0);
        self.0.read_exact(payload).map_err(LinkError::Lost)?;
        Ok(header.kind)
    }

    fn has_more(&mut self) -> bool {
        !self.0.buffer().is_empty()
    }
}

impl HangUp for UnixStream {
    fn hang_up(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

/// Returns one end of a connection whose sending half breaks after `budget` bytes.
pub(super) fn end(stream: UnixStream, budget: u64) -> DataStream {
    DataStream {
        sink: Box::new(Sink::new(stream.try_clone().unwrap(), budget)),
        source: Box::new(Source(BufReader::with_capacity(BUFFER, stream.try_clone().unwrap()))),
        hang_up: Box::new(stream),
    }
}

/// Returns one whose sending half replaces the frame after `frames` others.
pub(super) fn corrupting_end(stream: UnixStream, frames: u64) -> DataStream {
    let mut sink = Sink::new(stream.try_clone().unwrap(), WHOLE);
    sink.corrupt_after = Some(frames);
    DataStream { sink: Box::new(sink), ..end(stream, WHOLE) }
}

/// Returns a connection: the source's end and the destination's. Pages break after `budget` bytes, acknowledgements
/// after `acks` bytes.
pub(super) fn connection(budget: u64, acks: u64) -> (DataStream, DataStream) {
    let (near, far) = UnixStream::pair().unwrap();
    (end(near, budget), end(far, acks))
}
