//! Connections without sockets that break after a number of bytes.

use std::time::Instant;

use link::transport::fake::{self, End};
use link::transport::{DataStream, DirectSender, FrameSink, TransportError};
use proto::frame::FrameKind;

/// Never breaks by itself.
pub(super) const WHOLE: u64 = u64::MAX;

/// A sink of a link that is now and then behind.
struct UnsteadySink {
    inner: Box<dyn FrameSink>,
    bytes: u64,
}

impl FrameSink for UnsteadySink {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.inner.set_deadline(deadline);
    }

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        self.bytes += payload.iter().map(|part| part.len() as u64).sum::<u64>();
        self.inner.send(kind, payload)
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        self.inner.flush()
    }

    fn unsent_bytes(&self) -> u64 {
        self.bytes % (128 << 10)
    }

    fn direct(&mut self) -> Option<&mut dyn DirectSender> {
        self.inner.direct()
    }
}

/// Returns a stream over one end of a connection.
pub(super) fn stream(end: End) -> DataStream {
    let stream = end.into_stream();
    DataStream { sink: Box::new(UnsteadySink { inner: stream.sink, bytes: 0 }), ..stream }
}

/// Returns a connection: the source's end and the destination's. Pages break after `budget` bytes, acknowledgements
/// after `acks` bytes.
pub(super) fn connection(budget: u64, acks: u64) -> (DataStream, DataStream) {
    let (near, far) = breaking_ends(budget, acks);
    (stream(near), stream(far))
}

/// Returns the ends of such a connection.
pub(super) fn breaking_ends(budget: u64, acks: u64) -> (End, End) {
    let (near, far) = fake::connection();
    (near.cut_after(budget), far.cut_after(acks))
}

/// Returns the ends of a connection whose near end corrupts the frame after `frames` others.
pub(super) fn corrupting_ends(frames: u64) -> (End, End) {
    let (near, far) = fake::connection();
    (near.corrupt_after(frames), far)
}
