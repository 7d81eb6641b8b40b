//! Connections in the memory of one process, for tests: no sockets, no threads, and faults at chosen points.
//!
//! [`connection`] returns both ends of one. Each [`End`] becomes a [`DataStream`] or a [`Channel`]; its sending half
//! may be cut after a number of bytes, or may corrupt a frame. The bytes between the ends are those of TCP without TLS.
//!
//! [`FakeTransport`] opens such connections between agents. An end may place memory directly, in one of two ways
//! ([`Placement`]). In order: the sender reads the regions when it is flushed, and the receiver writes the data to its
//! regions; each end may do so alone. One-sided: the sender writes the destination's regions itself, and then notifies
//! the receiver.

mod direct;
mod halves;
mod in_process;
mod line;

use std::fmt;
use std::io;
use std::sync::Arc;

use proto::HostId;

use super::{Channel, DataStream, TransportError};
use halves::{FrameReader, FrameWriter};
pub use in_process::FakeTransport;
use line::{Side, SideHandle};

/// Faults of a sending half.
#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    /// Number of bytes after which the connection is cut.
    cut_after: Option<u64>,
    /// Number of frames after which one has a header that is not allowed.
    corrupt_after: Option<u64>,
}

/// Memory that a fake transport reaches by itself.
pub trait Regions: fmt::Debug + Send + Sync {
    /// Returns true if a region of this number can be reached.
    fn reaches(&self, region: u16) -> bool;

    /// Reads a part of a region.
    fn read(&self, region: u16, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes a part of a region.
    fn write(&self, region: u16, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Way in which an end places memory directly.
#[derive(Clone, Debug, Default)]
pub enum Placement {
    /// Not at all.
    #[default]
    None,
    /// Within the stream of bytes.
    InOrder {
        /// Regions of this end.
        regions: Arc<dyn Regions>,
        /// True if the sender has to leave out zeros.
        omits_zeros: bool,
    },
    /// By writes of the sender. Both ends need the same.
    OneSided {
        /// Regions of the sender.
        from: Arc<dyn Regions>,
        /// Regions of the receiver.
        to: Arc<dyn Regions>,
    },
}

/// One end of a connection that is not used yet.
#[derive(Debug)]
pub struct End {
    side: Arc<Side>,
    faults: Faults,
    placement: Placement,
}

/// Returns the two ends of a new connection.
pub fn connection() -> (End, End) {
    let (near, far) = Side::pair();
    let end = |side| End { side, faults: Faults::default(), placement: Placement::None };
    (end(near), end(far))
}

impl End {
    /// Cuts the connection after this end has sent a number of bytes. The peer still receives them.
    #[must_use]
    pub fn cut_after(mut self, bytes: u64) -> Self {
        self.faults.cut_after = Some(bytes);
        self
    }

    /// Corrupts the frame that this end sends after a number of others.
    #[must_use]
    pub fn corrupt_after(mut self, frames: u64) -> Self {
        self.faults.corrupt_after = Some(frames);
        self
    }

    /// Places memory directly.
    #[must_use]
    pub fn placing(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Returns a second use of this end, which reads and writes any bytes.
    pub fn raw(&self) -> RawEnd {
        RawEnd(Arc::clone(&self.side))
    }

    /// Uses the end for frames.
    pub fn into_stream(self) -> DataStream {
        let handle = Arc::new(SideHandle::new(&self.side));
        let source = FrameReader::new(Arc::clone(&self.side), self.placement.clone());
        let sink = FrameWriter::new(self.side, self.faults, self.placement);
        DataStream { sink: Box::new(sink), source: Box::new(source), handle }
    }

    /// Uses the end for messages to and from `peer`.
    pub fn into_channel(self, peer: HostId) -> Channel {
        let handle = Arc::new(SideHandle::new(&self.side));
        let receiver = FrameReader::new(Arc::clone(&self.side), Placement::None);
        let sender = FrameWriter::new(self.side, self.faults, Placement::None);
        Channel::new(peer, Box::new(receiver), Box::new(sender), handle)
    }
}

/// One end of a connection, as bytes. The end is open for as long as this exists.
#[derive(Debug)]
pub struct RawEnd(Arc<Side>);

impl RawEnd {
    /// Writes bytes, for instance frames that are not allowed.
    pub fn write(&self, bytes: &[u8]) -> Result<(), TransportError> {
        self.0.write(bytes, None)
    }

    /// Reads at least one byte; returns how many, 0 at the connection's end.
    pub fn read(&self, into: &mut [u8]) -> Result<usize, TransportError> {
        self.0.read(into, None)
    }
}
