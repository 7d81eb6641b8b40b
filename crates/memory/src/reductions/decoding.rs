//! Decoders: the part of a reduction that one stream's thread uses at the destination.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use proto::frame::FrameKind;
use proto::pages::{BadPages, Content, PageRun, PagesHeader};

use super::compression::decoder::{BadPacked, StreamDecompressor};
use super::deltas::decoder::DeltaDecoder;
use super::references::Templates;
use super::references::decoder::ReferenceDecoder;
use crate::dirty::ChunkPages;
use crate::ram::{BlockWriter, RamError};

/// Abilities of the destination on which a source may rely.
#[derive(Default)]
pub struct AcceptedReductions {
    /// Further content that references may name.
    pub templates: Option<Arc<dyn Templates>>,
    /// Seed of the page hashes in deltas; None if deltas are not accepted.
    pub delta_seed: Option<u64>,
}

impl AcceptedReductions {
    /// Creates the decoders of one stream.
    pub(crate) fn decoders(&self) -> Decoders {
        let Self { templates, delta_seed } = self;
        Decoders {
            of_runs: vec![
                Box::new(ReferenceDecoder::new(templates.clone())),
                Box::new(DeltaDecoder::new(*delta_seed)),
            ],
            of_frames: vec![Box::new(StreamDecompressor::default())],
        }
    }
}

impl fmt::Debug for AcceptedReductions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcceptedReductions").finish_non_exhaustive()
    }
}

/// The decoders of one stream.
pub(crate) struct Decoders {
    of_runs: Vec<Box<dyn RunDecoder>>,
    of_frames: Vec<Box<dyn FrameDecoder>>,
}

impl Decoders {
    /// Decodes a run into `into`. Returns the pages whose content is right; the others are missing.
    pub(crate) fn decode_run(
        &mut self,
        content: Content,
        run: &EncodedRun<'_>,
        into: &mut [u8],
    ) -> Result<ChunkPages, BadPages> {
        let decoder = self.of_runs.iter_mut().find(|decoder| decoder.decodes(content));
        decoder.ok_or(BadPages::Runs)?.decode(run, into)
    }

    /// Returns the decoder of frames of a kind; None if such frames are not allowed.
    pub(crate) fn of_frames(&mut self, kind: FrameKind) -> Option<&mut Box<dyn FrameDecoder>> {
        self.of_frames.iter_mut().find(|decoder| decoder.decodes(kind))
    }
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
