//! The envelope: eight bytes of header, then the payload.
//!
//! ```text
//!  0        1        2        3        4        5        6        7
//! +--------+--------+--------+--------+--------+--------+--------+--------+
//! |  kind  |       zero               |     payload length, LE            |
//! +--------+--------+--------+--------+--------+--------+--------+--------+
//! ```

use crate::{limits, packed, pages, reference};

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 8;

/// Kind of a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A JSON [`Message`](crate::Message).
    Message = 1,
    /// A part of the device state, of a list of missing pages, or a requested page.
    Blob = 2,
    /// Pages of guest memory, see [`pages`].
    Pages = 3,
    /// End of a round on this stream: all of its pages have been sent.
    RoundEnd = 4,
    /// Acknowledgement: all frames up to a sequence number have been applied.
    Ack = 5,
    /// Negative acknowledgement: pages of a frame, sent as references or deltas, whose content the destination could
    /// not reconstruct; they are sent again. See [`reference`].
    Missing = 6,
    /// Pages whose contents are compressed, see [`packed`].
    Packed = 7,
}

impl FrameKind {
    /// Returns the length limit of such a frame's payload, in bytes.
    pub const fn max_payload_bytes(self) -> usize {
        match self {
            Self::Message => limits::MESSAGE_BYTES,
            Self::Blob => limits::BLOB_BYTES,
            Self::Pages => pages::MAX_PAYLOAD_BYTES,
            Self::RoundEnd => pages::ROUND_END_BYTES,
            Self::Ack => pages::ACK_BYTES,
            Self::Missing => reference::MISSING_BYTES,
            Self::Packed => packed::MAX_PACKED_BYTES,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Message, Self::Blob, Self::Pages, Self::RoundEnd, Self::Ack, Self::Missing, Self::Packed]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// A checked header: the length is within the limit of the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the payload.
    pub kind: FrameKind,
    /// Length of the payload, in bytes.
    pub payload_bytes: u32,
}

/// Error of a header. The connection has to be closed: the position of the next frame is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadHeader {
    /// The kind of frame is unknown in this version.
    #[error("frame of unknown kind {0}")]
    FrameKind(u8),
    /// The reserved bytes are not zero.
    #[error("frame header with non-zero reserved bytes")]
    Reserved,
    /// The payload is longer than its kind allows.
    #[error("{kind:?} frame of {bytes} bytes; at most {max} are allowed", max = kind.max_payload_bytes())]
    TooLong {
        /// Claimed kind.
        kind: FrameKind,
        /// Claimed length, in bytes.
        bytes: u32,
    },
}

impl Header {
    /// Returns the header of a payload of the given length.
    ///
    /// # Errors
    /// If the length exceeds [`FrameKind::max_payload_bytes`].
    pub fn new(kind: FrameKind, payload_bytes: usize) -> Result<Self, BadHeader> {
        let bytes = u32::try_from(payload_bytes).unwrap_or(u32::MAX);
        if payload_bytes > kind.max_payload_bytes() {
            return Err(BadHeader::TooLong { kind, bytes });
        }
        Ok(Self { kind, payload_bytes: bytes })
    }

    /// Returns the bytes on the wire.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[4..].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes
    }

    /// Decodes and checks the bytes of a header.
    ///
    /// # Errors
    /// If the kind is unknown, a reserved byte is not zero, or the length exceeds the limit of the kind.
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Result<Self, BadHeader> {
        let [kind, z1, z2, z3, l0, l1, l2, l3] = bytes;
        let kind = FrameKind::from_byte(kind).ok_or(BadHeader::FrameKind(kind))?;
        if [z1, z2, z3] != [0; 3] {
            return Err(BadHeader::Reserved);
        }
        let payload_bytes = u32::from_le_bytes([l0, l1, l2, l3]);
        if payload_bytes as usize > kind.max_payload_bytes() {
            return Err(BadHeader::TooLong { kind, bytes: payload_bytes });
        }
        Ok(Self { kind, payload_bytes })
    }
}
