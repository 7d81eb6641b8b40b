//! What this crate needs of a connection, and no more: frames out, frames in, a way to hang up.
//!
//! The real ones are `link`'s (see [`crate::glue`]); tests use sockets that break where they are told.

use std::fmt;
use std::io;

use proto::frame::Kind;

/// The sending half of a data stream.
pub trait FrameSink: Send {
    /// Sends a frame, whose payload is given in parts. Blocks while the other side does not take it, or while a
    /// limit of bandwidth does not let it through. May keep it in a buffer until [`FrameSink::flush`].
    fn send(&mut self, kind: Kind, payload: &[&[u8]]) -> io::Result<()>;

    /// Sees that everything is on its way.
    fn flush(&mut self) -> io::Result<()>;
}

/// The receiving half of a data stream.
pub trait FrameSource: Send {
    /// The next frame: its kind (header and length are checked) and its payload, which is put into `payload`, emptied
    /// first. None at the orderly end of the stream.
    fn receive(&mut self, payload: &mut Vec<u8>) -> io::Result<Option<Kind>>;

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

impl fmt::Debug for DataStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataStream").finish_non_exhaustive()
    }
}
