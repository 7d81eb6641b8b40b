//! Encoder: pages that the guest does not use are left out.

use std::ops::Range;
use std::sync::Arc;

use super::HintedPages;
use crate::chunk::encoding::{
    BufferedRun, ChunkTask, Encoder, FrameContent, PageEncoder, PageEncoders, PresumedPages,
};
use crate::chunk::{ChunkId, FrameBuilder};
use crate::page_set::{ChunkPages, PageSet};
use crate::reductions::reduction::{Reduction, ReductionStage};

impl Reduction for HintedPages {
    fn encoder(self: Arc<Self>) -> Encoder {
        Encoder::Pages(Box::new(HintEncoder { hinted: self, chunk: None }))
    }

    fn awaited(&self, _: &[PageSet], _: u32) {}

    /// A hole is never refused.
    fn acknowledged(&self, _: ChunkId, _: &PresumedPages) {}

    fn refused(&self, _: ChunkId, _: &PresumedPages) {}

    /// Pages that were left out are still unused, or a dirty scan finds them.
    fn interrupted(&self, _: &[PageSet], _: u32) {}

    fn discarded(&self, _: &[PageSet]) {}

    fn written(&self, block: usize, found: &PageSet) {
        self.written(block, found);
    }

    /// Pages that were written are in use.
    fn full_pages(&self, owed: &[PageSet]) -> u64 {
        owed.iter().map(PageSet::count).sum()
    }

    fn end(&self, stage: ReductionStage) {
        match stage {
            ReductionStage::GuestStopped | ReductionStage::PostCopy => self.end(),
            ReductionStage::MemorySent | ReductionStage::DevicesSaved => {}
        }
    }
}

struct HintEncoder {
    hinted: Arc<HintedPages>,
    /// The chunk, and the pages of it that are left out.
    chunk: Option<(ChunkId, ChunkPages)>,
}

impl PageEncoder for HintEncoder {
    fn select(&mut self, task: &ChunkTask, pages: &ChunkPages) -> ChunkPages {
        let ChunkId { block, chunk } = task.id;
        let mut left_out =
            if task.guest_runs { self.hinted.chunk(block, chunk.into()) } else { ChunkPages::EMPTY };
        left_out.retain(pages);
        self.chunk = Some((task.id, left_out));
        left_out
    }

    fn begin_frame(&mut self) {}

    fn encode(&mut self, run: BufferedRun, frame: &mut FrameBuilder, mut rest: PageEncoders<'_>) {
        rest.encode(run, frame);
    }

    fn passed_by(&mut self, _: Range<u64>, _: &[u8]) {}

    fn end_frame(&mut self, _: &FrameContent) {}

    fn sent(&mut self, content: &FrameContent) {
        if let Some((ChunkId { block, chunk }, mut left_out)) = self.chunk {
            left_out.retain(&content.pages);
            self.hinted.sent(block, chunk.into(), &content.pages, &left_out);
        }
    }

    fn end_chunk(&mut self) {
        self.chunk = None;
    }
}
