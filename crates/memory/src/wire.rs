//! The interface that this crate needs of a connection: send frames, receive frames, hang up.
//!
//! [`DataStream::over`] creates a stream from a `link` connection; tests use sockets that break at chosen points.

use std::fmt;
use std::io::IoSlice;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use link::{Connection, Handle, LinkError, RateLimit, Reader, Writer};
use proto::frame::{FrameKind, Header};

/// The sending half of a data stream.
pub trait FrameSink: Send {
    /// Sets a deadline for all sends from now on; a late one fails with [`LinkError::TimedOut`].
    fn set_deadline(&mut self, deadline: Option<Instant>);

    /// Sends a frame, whose payload consists of at most two parts. Blocks while the peer does not read, or while a
    /// bandwidth limit holds it back. May keep the frame in a buffer until [`FrameSink::flush`].
    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), LinkError>;

    /// Passes all buffered frames to the network.
    fn flush(&mut self) -> Result<(), LinkError>;

    /// Returns the number of sent bytes that have not left this host; 0 if that is unknown.
    fn unsent_bytes(&self) -> u64 {
        0
    }
}

/// The receiving half of a data stream.
pub trait FrameSource: Send {
    /// Receives the next frame: puts its payload into `payload` and returns its kind. Header and length are checked.
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, LinkError>;

    /// Returns true if at least a part of a further frame has arrived already. False is always a safe answer.
    fn has_more(&mut self) -> bool;
}

/// Ends a connection from another thread: both halves fail or end at once, including blocked calls.
pub trait HangUp: Send + Sync {
    /// Ends the connection. A second call has no effect.
    fn hang_up(&self);
}

/// One connection between the data planes.
pub struct DataStream {
    /// The half towards the peer.
    pub sink: Box<dyn FrameSink>,
    /// The half from the peer.
    pub source: Box<dyn FrameSource>,
    /// Handle that ends both.
    pub hang_up: Box<dyn HangUp>,
}

impl DataStream {
    /// Creates a data stream over an open connection. Sent bytes count against the limit, which all streams share.
    pub fn over(connection: Connection, limit: Option<Arc<RateLimit>>) -> Self {
        let hang_up = Box::new(connection.handle());
        let (reader, mut writer) = connection.split();
        writer.set_rate_limit(limit);
        Self { sink: Box::new(writer), source: Box::new(reader), hang_up }
    }
}

impl fmt::Debug for DataStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataStream").finish_non_exhaustive()
    }
}

impl FrameSink for Writer {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        Self::set_deadline(self, deadline);
    }

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), LinkError> {
        let (first, second) = match *payload {
            [] => (&[][..], &[][..]),
            [one] => (one, &[][..]),
            [one, two, ..] => (one, two),
        };
        let header =
            Header::new(kind, payload.iter().map(|part| part.len()).sum()).map_err(LinkError::TooLong)?;
        self.write_frame(header, &[IoSlice::new(first), IoSlice::new(second)])
    }

    /// `link` does not buffer.
    fn flush(&mut self) -> Result<(), LinkError> {
        Ok(())
    }

    fn unsent_bytes(&self) -> u64 {
        tracee::unsent_bytes(self.as_fd()).unwrap_or(0)
    }
}

impl FrameSource for Reader {
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, LinkError> {
        Ok(self.read_frame(payload)?.kind)
    }

    fn has_more(&mut self) -> bool {
        Reader::has_more(self)
    }
}

impl HangUp for Handle {
    fn hang_up(&self) {
        self.shutdown();
    }
}

/// Returns true if a new connection may succeed: the network or the peer's program failed, not the content of the
/// peer's messages.
pub(crate) fn is_transient(error: &LinkError) -> bool {
    matches!(
        error,
        LinkError::Closed
            | LinkError::Ended
            | LinkError::Truncated
            | LinkError::Lost(_)
            | LinkError::TimedOut
            | LinkError::Tls(_)
    )
}
