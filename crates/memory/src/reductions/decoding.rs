//! Traits of decoders: the part of a reduction that one stream's thread uses at the destination.

use std::io;
use std::ops::Range;

use proto::frame::FrameKind;
use proto::packed::Codec;
use proto::pages::{BadPages, Content, PageRun, PagesHeader};

use crate::page_set::ChunkPages;
use crate::ram::{BlockWriter, RamError};

/// Error of compressed data.
#[derive(Debug, thiserror::Error)]
pub enum BadPacked {
    /// The data is invalid for its codec, or longer than announced.
    #[error("data that {codec} cannot decompress", codec = codec.name())]
    Codec {
        /// The announced codec.
        codec: Codec,
        /// Error of the codec.
        source: io::Error,
    },
    /// The data is shorter than announced.
    #[error("compressed data of {found} bytes instead of {expected}")]
    Length {
        /// Length of the runs' data, in bytes.
        expected: usize,
        /// Length of the decompressed data, in bytes.
        found: usize,
    },
}

/// Error of a frame that cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadFrame {
    #[error(transparent)]
    Pages(#[from] BadPages),
    #[error(transparent)]
    Packed(#[from] BadPacked),
}

/// A run of pages that the destination has to complete.
pub(crate) struct EncodedRun<'a> {
    /// Pages of the chunk.
    pub(crate) pages: Range<u64>,
    /// Data of the run in the frame.
    pub(crate) data: &'a [u8],
    /// Offset of the first page in its block, in bytes.
    pub(crate) offset: u64,
    /// The block.
    pub(crate) writer: &'a dyn BlockWriter,
    /// Reads pages of any block in their current state, from a page on.
    pub(crate) read: &'a ReadPages<'a>,
}

/// Reads pages of a block, by its number and that of the first page.
pub(crate) type ReadPages<'a> = dyn Fn(u16, u64, &mut [u8]) -> Result<(), RamError> + 'a;

/// Decoder of one kind of runs.
pub(crate) trait RunDecoder: Send {
    /// Returns true if it decodes runs of this content.
    fn decodes(&self, content: Content) -> bool;

    /// Decodes a run into `into`. Returns the pages whose content is right; the others are missing.
    fn decode(&mut self, run: &EncodedRun<'_>, into: &mut [u8]) -> Result<ChunkPages, BadPages>;
}

/// Decoder of one kind of frames.
pub(crate) trait FrameDecoder: Send {
    /// Returns true if it decodes frames of this kind.
    fn decodes(&self, kind: FrameKind) -> bool;

    /// Decodes a frame: its header, its runs and their data. The buffer is returned with
    /// [`take_back`](Self::take_back).
    fn decode(&mut self, payload: &[u8], runs: &mut Vec<PageRun>)
    -> Result<(PagesHeader, Vec<u8>), BadFrame>;

    /// Accepts the buffer of [`decode`](Self::decode) for reuse.
    fn take_back(&mut self, data: Vec<u8>);
}
