//! Connections for pages and blocks: frames, and memory that the transport moves by itself.
//!
//! # Direct placement
//!
//! A frame's payload is bytes that the sender holds. A transport that reaches memory by itself (through the kernel, or
//! through a network card) need not get them: it moves ranges of a region of the source's memory into the same ranges
//! of the destination's. Such a payload is described by a layout, a list of [`Part`]s: bytes that the caller holds, and
//! names of ranges between them. Its concatenation is the payload that a transport without this ability would carry.
//!
//! ```text
//!  sender      DirectSender::send(bytes = head ++ fillings,
//!                                 layout = [Bytes(head), Memory(r, a..b), Bytes(8), Memory(r, c..d)])
//!  receiver    FrameSource::receive ─► head ─► checks ─► DirectReceiver::receive(layout) ─► memory, bytes = fillings
//! ```
//!
//! Regions are the blocks of the proposal, by number; ranges are in bytes from the region's begin. A transport learns
//! where a region is when it is created. Content that changes while it is moved may arrive in any state: the guest's
//! write marks the page, so that a later round moves it again.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use proto::frame::FrameKind;

use super::{ConnectionHandle, TransportError};

/// Part of a frame's payload.
///
/// A list of parts is a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The next bytes, this many, of those that the caller holds.
    Bytes(usize),
    /// A range of a region, in bytes.
    Memory {
        /// Number of the region.
        region: u16,
        /// Range in the region.
        bytes: Range<u64>,
    },
}

impl Part {
    /// Returns the length of the part in the payload.
    pub fn len_bytes(&self) -> usize {
        match self {
            Self::Bytes(bytes) => *bytes,
            Self::Memory { bytes, .. } => (bytes.end - bytes.start) as usize,
        }
    }
}

/// The sending half of a data stream.
///
/// After an error it sends no more. A half whose memory cannot be read leaves it to its user to close the connection:
/// otherwise the receiving half would report the end of the connection before the user has the reason for it.
pub trait FrameSink: Send {
    /// Sets a deadline for all sends from now on; a late one fails with [`TransportError::Deadline`].
    fn set_deadline(&mut self, deadline: Option<Instant>);

    /// Sends a frame, whose payload consists of at most two parts. Blocks while the peer does not read, or while a
    /// bandwidth limit holds it back. May keep the frame in a buffer until [`FrameSink::flush`].
    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError>;

    /// Passes all buffered frames to the network.
    fn flush(&mut self) -> Result<(), TransportError>;

    /// Returns the number of sent bytes that have not left this host; 0 if that is unknown.
    fn unsent_bytes(&self) -> u64;

    /// Returns the half's direct placement; none if this transport sends only bytes that its caller holds.
    fn direct(&mut self) -> Option<&mut dyn DirectSender>;
}

/// Direct placement, at the sender.
pub trait DirectSender {
    /// Returns true if the transport reaches this region.
    fn reaches(&self, region: u16) -> bool;

    /// Returns true if the sender should read memory before it names it, so that zeros need not be moved. Reading costs
    /// a tenth of what moving through a socket does, and may cost more than moving by a network card.
    fn omits_zeros(&self) -> bool;

    /// Sends a frame, in order with those of [`FrameSink::send`]. The memory is read at any time between this call and
    /// the return of the next [`FrameSink::flush`].
    fn send(&mut self, kind: FrameKind, bytes: &[u8], layout: &[Part]) -> Result<(), TransportError>;
}

/// The receiving half of a data stream.
pub trait FrameSource: Send {
    /// Receives the next frame: puts its payload into `payload` and returns its kind. Header and length are checked.
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, TransportError>;

    /// Returns true if at least a part of a further frame has arrived already. False is always a safe answer.
    fn has_more(&mut self) -> bool;

    /// Returns the direct placement of the frame received last: its payload has ended after the
    /// [runs](proto::pages), and the rest is received by the layout that they have. None if the payload is complete.
    fn direct(&mut self) -> Option<&mut dyn DirectReceiver>;

    /// Returns true if this transport may place memory directly.
    fn places_directly(&self) -> bool;
}

/// Direct placement, at the receiver.
pub trait DirectReceiver {
    /// Receives the rest of a frame: its bytes are appended to `bytes`, its memory has arrived in its ranges when this
    /// returns. A layout of another length than the rest is an error, and changes nothing; after another error the
    /// ranges may have changed.
    fn receive(&mut self, layout: &[Part], bytes: &mut Vec<u8>) -> Result<(), TransportError>;
}

/// One connection between the data planes.
pub struct DataStream {
    /// The half towards the peer.
    pub sink: Box<dyn FrameSink>,
    /// The half from the peer.
    pub source: Box<dyn FrameSource>,
    /// Handle that ends both.
    pub handle: Arc<dyn ConnectionHandle>,
}

impl fmt::Debug for DataStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataStream").finish_non_exhaustive()
    }
}
