//! Pages whose contents are compressed.
//!
//! A `Packed` frame has the meaning of a `Pages` frame ([`crate::pages`]), but the data of all its runs together is
//! compressed as one piece:
//!
//! ```text
//! codec u16 (1 LZ4 block, 2 Zstandard frame) | zero u16 | header and runs as in `Pages` | compressed data
//! ```
//!
//! The runs determine the length of the unpacked data; the compressed bytes never state it, so that no agent allocates
//! what a peer claims. Compressed data is shorter than the data that it replaces, or it is not sent. A destination
//! names the codecs that it can unpack when it accepts ([`crate::message::Acceptance`]); the source uses no other.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::decode::{BadPages, Cursor};
use crate::pages::{MAX_PAYLOAD_BYTES, PageRun, PagesHeader};

/// Bytes before the part that a `Pages` frame has, too.
pub const HEAD_BYTES: usize = 4;
/// Longest payload of a `Packed` frame, in bytes.
pub const MAX_PACKED_BYTES: usize = HEAD_BYTES + MAX_PAYLOAD_BYTES;

/// Format of compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
pub enum Codec {
    /// An LZ4 block, without a frame around it.
    Lz4 = 1,
    /// A Zstandard frame.
    Zstd = 2,
}

impl Codec {
    /// All codecs.
    pub const ALL: [Self; 2] = [Self::Lz4, Self::Zstd];

    /// Returns the codec's name in messages and in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// Returns the codec with a name; none if this program does not know it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.name() == name)
    }

    /// Encodes the first bytes of a frame's payload.
    pub fn encode(self) -> [u8; HEAD_BYTES] {
        let [low, high] = (self as u16).to_le_bytes();
        [low, high, 0, 0]
    }
}

/// Decoded payload of a `Packed` frame.
#[derive(Debug)]
pub struct Packed<'a> {
    /// Header of its pages: frame number, round, block and chunk.
    pub header: PagesHeader,
    /// Codec of the data.
    pub codec: Codec,
    /// The compressed data.
    pub bytes: &'a [u8],
    /// Length of the unpacked data of all runs, in bytes.
    pub data_bytes: usize,
}

impl<'a> Packed<'a> {
    /// Decodes and checks a payload: codec, header, runs (written to `runs`, which is cleared first).
    ///
    /// # Errors
    /// Fails if the payload is malformed, or its compressed data is empty or not shorter than the data that it
    /// replaces.
    pub fn decode(payload: &'a [u8], runs: &mut Vec<PageRun>) -> Result<Self, BadPages> {
        let mut at = Cursor(payload);
        let codec = u16::from_le_bytes(at.take()?);
        let codec = match (codec, at.take()?) {
            (1, [0, 0]) => Codec::Lz4,
            (2, [0, 0]) => Codec::Zstd,
            _ => return Err(BadPages::Codec(codec)),
        };
        let (header, bytes, data_bytes) = PagesHeader::decode_runs(at.0, runs)?;
        if bytes.is_empty() || bytes.len() >= data_bytes {
            return Err(BadPages::Packed);
        }
        Ok(Self { header, codec, bytes, data_bytes })
    }
}

/// Compression of data before it is sent: a codec and its level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// LZ4 ([`Codec::Lz4`]).
    Lz4,
    /// Zstandard ([`Codec::Zstd`]) at a level, 1 to 19.
    Zstd(u8),
}

impl Compression {
    /// Highest level of Zstandard.
    pub const MAX_LEVEL: u8 = 19;
    /// Level of Zstandard where none is specified.
    pub const DEFAULT_LEVEL: u8 = 3;

    /// Returns the format of the result; none without compression.
    pub fn codec(self) -> Option<Codec> {
        match self {
            Self::None => None,
            Self::Lz4 => Some(Codec::Lz4),
            Self::Zstd(_) => Some(Codec::Zstd),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

/// Result of compressing a sample of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressionTrial {
    /// The compression that was tried.
    pub way: Compression,
    /// Length of the sample, in bytes.
    pub data_bytes: u64,
    /// Length of the result, in bytes.
    pub compressed_bytes: u64,
    /// Processor time, in nanoseconds.
    pub pack_ns: u64,
}

/// Error of a name that no compression has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a compression method; use none, lz4, zstd or zstd:LEVEL with levels from 1 to {max}",
    max = Compression::MAX_LEVEL
)]
pub struct BadCompression(pub String);

impl FromStr for Compression {
    type Err = BadCompression;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadCompression(text.to_owned());
        match text.split_once(':') {
            None => match text {
                "none" => Ok(Self::None),
                "lz4" => Ok(Self::Lz4),
                "zstd" => Ok(Self::Zstd(Self::DEFAULT_LEVEL)),
                _ => Err(bad()),
            },
            Some(("zstd", level)) => level
                .parse()
                .ok()
                .filter(|level| (1..=Self::MAX_LEVEL).contains(level))
                .map(Self::Zstd)
                .ok_or_else(bad),
            Some(_) => Err(bad()),
        }
    }
}

impl TryFrom<String> for Compression {
    type Error = BadCompression;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Compression> for String {
    fn from(compression: Compression) -> Self {
        compression.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_found_by_their_names() {
        for way in [Compression::None, Compression::Lz4, Compression::Zstd(1), Compression::Zstd(19)] {
            assert_eq!(way.to_string().parse(), Ok(way));
        }
        assert_eq!("zstd".parse(), Ok(Compression::Zstd(3)));
        for wrong in ["", "gzip", "zstd:", "zstd:0", "zstd:20", "zstd:x", "lz4:1", "zstd:3:4"] {
            assert_eq!(wrong.parse::<Compression>(), Err(BadCompression(wrong.to_owned())));
        }
        for codec in Codec::ALL {
            assert_eq!(Codec::from_name(codec.name()), Some(codec));
        }
        assert_eq!(Codec::from_name("brotli"), None);
    }
}
