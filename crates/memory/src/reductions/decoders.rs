//! The decoders of all reductions, for one stream.

use std::fmt;
use std::sync::Arc;

use proto::frame::FrameKind;
use proto::pages::{BadPages, Content};

use super::compression::decoder::StreamDecompressor;
use super::decoding::{EncodedRun, FrameDecoder, RunDecoder};
use super::deltas::decoder::DeltaDecoder;
use super::references::Templates;
use super::references::decoder::ReferenceDecoder;
use crate::page_set::ChunkPages;

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
