//! Encoder: pages whose changed pieces are known are sent as deltas.

use std::ops::Range;
use std::sync::Arc;

use proto::delta::{Delta, MAX_PIECES};
use proto::limits::PAGE_BYTES;
use proto::pages::Content;

use super::{ChunkMarks, Deltas, Key};
use crate::chunk::encoding::{
    BufferedRun, ChunkTask, Encoder, FrameContent, PageEncoder, PageEncoders, PresumedPages,
};
use crate::chunk::{ChunkId, FrameBuilder};
use crate::clock::measure;
use crate::page_set::{ChunkPages, PageSet};
use crate::reductions::reduction::{Reduction, ReductionStage};

/// Sampling of processor time: deltas of one frame in `TIMED` are measured, because reading the clock costs as much as
/// comparing a page.
const TIMED: u64 = 16;

const PAGE: usize = PAGE_BYTES as usize;

impl Reduction for Deltas {
    fn encoder(self: Arc<Self>) -> Encoder {
        let (delta, counts) = (Vec::new(), FrameCounts::default());
        Encoder::Pages(Box::new(DeltaEncoder { deltas: self, chunk: None, delta, frames: 0, counts }))
    }

    fn awaited(&self, owed: &[PageSet], round: u32) {
        self.keep(owed, round);
    }

    fn acknowledged(&self, _: ChunkId, _: &PresumedPages) {}

    fn refused(&self, ChunkId { block, chunk }: ChunkId, refused: &PresumedPages) {
        self.refuse((block, chunk), &refused.all(), refused.changed.count());
    }

    fn interrupted(&self, owed: &[PageSet], round: u32) {
        self.forget(owed, round);
    }

    fn discarded(&self, pages: &[PageSet]) {
        self.forget_discarded(pages);
    }

    fn written(&self, _: usize, _: &PageSet) {}

    fn full_pages(&self, owed: &[PageSet]) -> u64 {
        self.unknown(owed)
    }

    /// A delta that the destination refuses in the last round would be a missing page.
    fn end(&self, stage: ReductionStage) {
        match stage {
            ReductionStage::DevicesSaved | ReductionStage::PostCopy => self.end(),
            ReductionStage::MemorySent | ReductionStage::GuestStopped => {}
        }
    }
}

struct DeltaEncoder {
    deltas: Arc<Deltas>,
    /// The chunk's marks, if it has any.
    chunk: Option<(Key, ChunkMarks)>,
    /// Delta of a page, before its place is known to be free. Reused.
    delta: Vec<u8>,
    /// Number of frames of the stream.
    frames: u64,
    counts: FrameCounts,
}

/// Counts of a frame.
#[derive(Clone, Copy, Default)]
struct FrameCounts {
    pages: u64,
    pieces: u64,
    /// Processor time of finding the pieces, in nanoseconds: measured for some frames and extrapolated to all.
    mark_ns: u64,
}

impl DeltaEncoder {
    /// Encodes pages as deltas if their changed pieces are known and few enough; passes all others on.
    fn compare(&mut self, run: &BufferedRun, frame: &mut FrameBuilder, rest: &mut PageEncoders<'_>) {
        let Some((_, marks)) = &mut self.chunk else { return };
        // Pages since the last delta.
        let mut others = BufferedRun { is_whole: false, ..run.clone() };
        for page in run.pages.clone() {
            let from = run.from + (page - run.pages.start) as usize * PAGE;
            let bytes = frame.buffered(from..from + PAGE);
            let changed = marks.renew(page, bytes).filter(|changed| changed.count_ones() <= MAX_PIECES);
            let Some(changed) = changed else { continue };
            self.delta.clear();
            Delta::encode(bytes, self.deltas.page_hash(bytes), changed, &mut self.delta);
            others.pages.end = page;
            if !others.pages.is_empty() {
                rest.encode(others, frame);
            }
            frame.add(page..page + 1, Content::Delta { pieces: changed.count_ones() as u16 }, &self.delta);
            self.counts.pages += 1;
            self.counts.pieces += u64::from(changed.count_ones());
            let pages = page + 1..run.pages.end;
            others = BufferedRun { pages, from: from + PAGE, is_whole: false };
        }
        others.pages.end = run.pages.end;
        if !others.pages.is_empty() {
            rest.encode(others, frame);
        }
    }
}

impl PageEncoder for DeltaEncoder {
    fn select(&mut self, task: &ChunkTask, pages: &ChunkPages) -> ChunkPages {
        let key = (task.id.block, task.id.chunk);
        let marks = self.deltas.lend(key, pages, task.round, task.guest_runs);
        self.chunk = marks.map(|marks| (key, marks));
        ChunkPages::EMPTY
    }

    fn begin_frame(&mut self) {
        self.frames += 1;
        self.counts = FrameCounts::default();
    }

    fn encode(&mut self, run: BufferedRun, frame: &mut FrameBuilder, mut rest: PageEncoders<'_>) {
        if self.chunk.is_none() {
            rest.encode(run, frame);
        } else if run.is_whole && self.frames.is_multiple_of(TIMED) {
            let ((), took) = measure(|| self.compare(&run, frame, &mut rest));
            self.counts.mark_ns += took.cpu_ns * TIMED;
        } else {
            self.compare(&run, frame, &mut rest);
        }
    }

    /// Marks the pages: the destination has this version from here on.
    fn passed_by(&mut self, pages: Range<u64>, bytes: &[u8]) {
        if let Some((_, marks)) = &mut self.chunk {
            for (page, bytes) in pages.zip(bytes.chunks_exact(PAGE)) {
                marks.renew(page, bytes);
            }
        }
    }

    fn end_frame(&mut self, content: &FrameContent) {
        if let Some((_, marks)) = &mut self.chunk {
            marks.forget(&content.empty);
        }
    }

    fn sent(&mut self, _: &FrameContent) {
        if self.chunk.is_some() {
            let FrameCounts { pages, pieces, mark_ns } = self.counts;
            self.deltas.sent(pages, pieces, mark_ns);
        }
    }

    fn end_chunk(&mut self) {
        if let Some((key, marks)) = self.chunk.take() {
            self.deltas.give_back(key, marks);
        }
    }
}
