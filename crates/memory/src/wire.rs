//! What this crate needs of a connection, and no more: frames out, frames in, a way to hang up.
//!
//! [`DataStream::over`] makes one of a `link` connection; tests use sockets that break where they are told.

use std::fmt;
use std::io::IoSlice;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

use link::{Connection, Handle, LinkError, RateLimit, Reader, Writer};
use proto::frame::{Header, Kind};

/// The sending half of a data stream.
pub trait FrameSink: Send {
    /// From now on nothing here waits longer than until then; what is late fails with [`LinkError::TimedOut`].
    fn set_deadline(&mut self, deadline: Option<Instant>);

    /// Sends a frame, whose payload is given in at most two parts. Blocks while the other side does not take it, or
    /// while a limit of bandwidth does not let it through. May keep it in a buffer until [`FrameSink::flush`].
    fn send(&mut self, kind: Kind, payload: &[&[u8]]) -> Result<(), LinkError>;

    /// Sees that everything is on its way.
    fn flush(&mut self) -> Result<(), LinkError>;

    /// How much of what was sent is still on this side, in bytes; 0 where that is not known.
    fn unsent_bytes(&self) -> u64 {
        0
    }
}

/// The receiving half of a data stream.
pub trait FrameSource: Send {
    /// The next frame: its kind (header and length are checked) and its payload, which is put into `payload`.
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<Kind, LinkError>;

    /// Whether at least a part of a further frame has arrived already. False is always a safe answer.
    fn has_more(&mut self) -> bool;
}

/// Ends a connection from another thread: both halves fail or end at once, also calls that are blocked in them.
pub trait HangUp: Send + Sync {
    /// Ends it. Doing so again changes nothing.
    fn hang_up(&self);
}

/// One connection between the data planes.
pub struct DataStream {
    /// Towards the other side.
    pub sink: Box<dyn FrameSink>,
    /// From the other side.
    pub source: Box<dyn FrameSource>,
    /// Ends both.
    pub hang_up: Box<dyn HangUp>,
}

impl DataStream {
    /// A data stream over an open connection. What is sent counts against the limit, which all streams share.
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

    fn send(&mut self, kind: Kind, payload: &[&[u8]]) -> Result<(), LinkError> {
        let (first, second) = match *payload {
            [] => (&[][..], &[][..]),
            [one] => (one, &[][..]),
            [one, two, ..] => (one, two),
        };
        let header =
            Header::new(kind, payload.iter().map(|part| part.len()).sum()).map_err(LinkError::TooLong)?;
        self.write_frame(header, &[IoSlice::new(first), IoSlice::new(second)])
    }

    /// `link` keeps nothing back.
    fn flush(&mut self) -> Result<(), LinkError> {
        Ok(())
    }

    fn unsent_bytes(&self) -> u64 {
        tracee::unsent_bytes(self.as_fd()).unwrap_or(0)
    }
}

impl FrameSource for Reader {
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<Kind, LinkError> {
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

/// Whether a new connection may do better: the network or the peer's program failed, not what the peer says.
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
