//! Encoders: the part of a reduction that one stream's thread uses.
//!
//! Encoders are made with their stream, so that nothing is allocated for a chunk or a frame. They are called once for
//! each run of pages, never for each page.

use std::ops::Range;

use proto::packed::Codec;

use super::{ChunkId, FrameBuilder};
use crate::page_set::ChunkPages;

/// Encoder of one stream.
pub enum Encoder {
    /// Encoder of the pages of a chunk.
    Pages(Box<dyn PageEncoder>),
    /// Encoder of the data of a frame.
    Frame(Box<dyn FrameEncoder>),
}

/// A chunk whose pages are about to be sent.
#[derive(Clone, Copy, Debug)]
pub struct ChunkTask {
    /// The chunk.
    pub(crate) id: ChunkId,
    /// Number of the round.
    pub(crate) round: u32,
    /// False while the guest is stopped: a page that is refused then costs another round.
    pub(crate) guest_runs: bool,
}

/// Neighbouring pages in the buffer of a frame.
#[derive(Clone, Debug)]
pub struct BufferedRun {
    /// Pages of the chunk.
    pub(crate) pages: Range<u64>,
    /// Position of the first one in the buffer.
    pub(crate) from: usize,
    /// False for a piece of a run that an earlier encoder has left. A piece may be short.
    pub(crate) is_whole: bool,
}

/// Content of a frame that was built.
#[derive(Clone, Copy, Debug)]
pub struct FrameContent {
    /// Pages of the frame.
    pub(crate) pages: ChunkPages,
    /// The pages without data of their own: zeros, holes, fillings.
    pub(crate) empty: ChunkPages,
    /// The pages that the destination has to complete.
    pub(crate) presumed: PresumedPages,
}

/// Encoder of the pages of a chunk. Between [`select`](Self::select) and [`end_chunk`](Self::end_chunk) it may hold a
/// part of the reduction's state.
pub trait PageEncoder: Send {
    /// Prepares for `pages` of a chunk. Returns the ones that are left out, whatever their content.
    fn select(&mut self, task: &ChunkTask, pages: &ChunkPages) -> ChunkPages;

    /// Begins a frame, of this chunk or of one in which it has no part.
    fn begin_frame(&mut self);

    /// Encodes pages that are neither left out nor empty, in their order. Passes all that it does not encode to `rest`.
    fn encode(&mut self, run: BufferedRun, frame: &mut FrameBuilder, rest: PageEncoders<'_>);

    /// Learns that an earlier encoder has encoded these pages.
    fn passed_by(&mut self, pages: Range<u64>, bytes: &[u8]);

    /// Completes a frame, before it is sent.
    fn end_frame(&mut self, content: &FrameContent);

    /// Learns that the frame was passed to the connection.
    fn sent(&mut self, content: &FrameContent);

    /// Ends the chunk, whether or not all of it was sent.
    fn end_chunk(&mut self);
}

/// The encoders of a stream that may encode a run, the first one first.
pub struct PageEncoders<'a> {
    pub(crate) encoders: &'a mut [Box<dyn PageEncoder>],
    /// Returns true if a page of a block is at the destination as it was sent last, as far as this round knows.
    pub(crate) is_there: &'a dyn Fn(u16, u64) -> bool,
}

impl PageEncoders<'_> {
    /// Encodes pages, as data if no encoder is left.
    pub(crate) fn encode(&mut self, run: BufferedRun, frame: &mut FrameBuilder) {
        match self.encoders.split_first_mut() {
            Some((first, rest)) => first.encode(run, frame, PageEncoders { encoders: rest, ..*self }),
            None => frame.add_data(run),
        }
    }

    /// Informs all encoders about pages that are encoded already.
    pub(crate) fn passed_by(&mut self, pages: &Range<u64>, bytes: &[u8]) {
        self.encoders.iter_mut().for_each(|encoder| encoder.passed_by(pages.clone(), bytes));
    }
}

/// Encoder of the data of a frame.
pub trait FrameEncoder: Send {
    /// Encodes the data of a frame; None if it is to be sent as it is. `unsent_bytes` returns how many bytes of earlier
    /// frames have not left this host.
    fn encode(
        &mut self,
        data: &[u8],
        guest_runs: bool,
        unsent_bytes: &dyn Fn() -> u64,
    ) -> Option<(Codec, &[u8])>;
}

/// Pages that are sent on the assumption that the destination has them, or an earlier version, which may prove wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PresumedPages {
    /// Pages sent as references.
    pub(crate) referred: ChunkPages,
    /// Pages sent as deltas.
    pub(crate) changed: ChunkPages,
}

impl PresumedPages {
    pub(crate) const NONE: Self = Self { referred: ChunkPages::EMPTY, changed: ChunkPages::EMPTY };

    /// Returns all of them.
    pub(crate) fn all(&self) -> ChunkPages {
        let mut all = self.referred;
        all.insert(&self.changed);
        all
    }

    /// Removes pages, if all of them are in the set; returns them.
    pub(crate) fn take(&mut self, pages: &ChunkPages) -> Option<Self> {
        if !pages.is_within(&self.all()) {
            return None;
        }
        let (mut referred, mut changed) = (*pages, *pages);
        referred.retain(&self.referred);
        changed.remove(&self.referred);
        self.referred.remove(pages);
        self.changed.remove(pages);
        Some(Self { referred, changed })
    }
}
