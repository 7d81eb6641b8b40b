//! Encoder: pages that the destination has elsewhere are sent as references.

use std::ops::Range;
use std::sync::Arc;

use proto::limits::{CHUNK_PAGES, PAGE_BYTES};
use proto::pages::Content;
use proto::reference::{ContentSource, Reference};

use super::{ContentIndex, ContentLocation, RunHash};
use crate::chunk::encoding::{
    BufferedRun, ChunkTask, Encoder, FrameContent, PageEncoder, PageEncoders, PresumedPages,
};
use crate::chunk::{ChunkId, FrameBuilder};
use crate::content_hash::{ContentHash, full_hash};
use crate::page_set::{ChunkPages, PageSet};
use crate::reductions::reduction::{Reduction, ReductionStage};

/// Shortest run of pages that is sent as a reference: each reference costs the destination a query to a server and an
/// answer, and over a fast link a few pages arrive sooner.
const MIN_REFERENCE_PAGES: u64 = 4;

const PAGE: usize = PAGE_BYTES as usize;

impl Reduction for ContentIndex {
    fn encoder(self: Arc<Self>) -> Encoder {
        let (hashes, referred) = (Vec::new(), Vec::new());
        Encoder::Pages(Box::new(ReferenceEncoder { known: self, chunk: None, hashes, referred }))
    }

    fn awaited(&self, _: &[PageSet], _: u32) {}

    fn acknowledged(&self, chunk: ChunkId, presumed: &PresumedPages) {
        self.count_references_accepted(chunk.block, presumed.referred.count());
    }

    fn refused(&self, ChunkId { block, chunk }: ChunkId, refused: &PresumedPages) {
        self.refuse(block, chunk.into(), &refused.referred);
    }

    fn interrupted(&self, _: &[PageSet], _: u32) {
        self.interrupt();
    }

    /// No action: discarded pages are refused.
    fn discarded(&self, _: &[PageSet]) {}

    fn written(&self, _: usize, _: &PageSet) {}

    /// Pages that the guest has written are seldom anywhere else.
    fn full_pages(&self, owed: &[PageSet]) -> u64 {
        owed.iter().map(PageSet::count).sum()
    }

    /// Pages written after all of memory was sent are on no disk, and the speed of references does not predict the
    /// speed of pages.
    fn end(&self, stage: ReductionStage) {
        match stage {
            ReductionStage::MemorySent | ReductionStage::PostCopy => self.end(),
            ReductionStage::GuestStopped | ReductionStage::DevicesSaved => {}
        }
    }
}

struct ReferenceEncoder {
    known: Arc<ContentIndex>,
    /// The chunk, if pages of it may be sent as references.
    chunk: Option<ReferenceLookup>,
    /// Pages of the frame that are sent as data or as deltas, by their number in the chunk, and their hashes.
    hashes: Vec<(u64, ContentHash)>,
    /// Pages of the frame that are sent as references, and their hashes.
    referred: Vec<(u64, ContentHash)>,
}

/// Lookup of pages of a chunk that the destination may have already.
#[derive(Clone, Copy)]
struct ReferenceLookup {
    /// The block that is sent, and the chunk's first page in it.
    block: u16,
    base_page: u64,
    /// Pages of the chunk that may be looked up.
    allowed: ChunkPages,
}

/// A reference that may continue with the next page.
struct OpenReference {
    /// Pages so far, in the buffer until the reference is closed: one that is too short becomes data.
    pages: Range<u64>,
    from: usize,
    hashes: Vec<ContentHash>,
    content_source: ContentSource,
    first_page: u64,
    run_hash: RunHash,
}

impl OpenReference {
    /// Returns true if the page at this location continues the reference.
    fn is_continued_by(&self, page: u64, place: ContentLocation) -> bool {
        self.pages.end == page
            && self.content_source == place.content_source
            && self.first_page + (self.pages.end - self.pages.start) == place.page
    }
}

impl ReferenceEncoder {
    /// Adds the open reference to the frame, if there is one; a reference that is too short becomes data.
    fn close(
        &mut self,
        open: &mut Option<OpenReference>,
        frame: &mut FrameBuilder,
        rest: &mut PageEncoders<'_>,
    ) {
        let Some(open) = open.take() else { return };
        let OpenReference { pages, from, hashes, content_source, first_page, run_hash } = open;
        let count = pages.end - pages.start;
        rest.passed_by(&pages, frame.buffered(from..from + count as usize * PAGE));
        if count < MIN_REFERENCE_PAGES {
            self.hashes.extend(pages.clone().zip(hashes));
            frame.add_data(BufferedRun { pages, from, is_whole: false });
            return;
        }
        let reference = Reference { content_source, first_page, hash: run_hash.finish() };
        self.referred.extend(pages.clone().zip(hashes));
        frame.add(pages, Content::Reference, &reference.encode());
    }

    /// Returns the page's location at the destination, preferably the one that continues the open reference.
    fn look_up(
        &self,
        hash: ContentHash,
        page: u64,
        lookup: &ReferenceLookup,
        open: Option<&OpenReference>,
        is_there: &dyn Fn(u16, u64) -> bool,
    ) -> Option<ContentLocation> {
        let is_there = |place: &ContentLocation| match place.content_source {
            ContentSource::Template(_) => true,
            // The page was rewritten with its old content: the destination has it at the place to which it was sent.
            ContentSource::Block(block) if block == lookup.block && place.page == lookup.base_page + page => {
                true
            }
            ContentSource::Block(block) => is_there(block, place.page),
        };
        let is_next = |place: ContentLocation| open.is_some_and(|open| open.is_continued_by(page, place));
        let mut places = self.known.find(hash).filter(is_there);
        let first = places.next()?;
        if is_next(first) { Some(first) } else { places.find(|place| is_next(*place)).or(Some(first)) }
    }
}

impl PageEncoder for ReferenceEncoder {
    fn select(&mut self, task: &ChunkTask, _: &ChunkPages) -> ChunkPages {
        let ChunkId { block, chunk } = task.id;
        let allowed = if task.guest_runs { self.known.allowed(block, chunk.into()) } else { None };
        let base_page = u64::from(chunk) * CHUNK_PAGES;
        self.chunk = allowed.map(|allowed| ReferenceLookup { block, base_page, allowed });
        ChunkPages::EMPTY
    }

    fn begin_frame(&mut self) {
        self.hashes.clear();
        self.referred.clear();
    }

    /// A reference ends with the run: behind it are pages of another kind, or the frame ends.
    fn encode(&mut self, run: BufferedRun, frame: &mut FrameBuilder, mut rest: PageEncoders<'_>) {
        let Some(lookup) = self.chunk else { return rest.encode(run, frame) };
        let mut open: Option<OpenReference> = None;
        // Pages since the last reference.
        let mut others = run.pages.start..run.pages.start;
        let place_of = |page: u64| run.from + (page - run.pages.start) as usize * PAGE;
        let piece = |pages: Range<u64>| BufferedRun { from: place_of(pages.start), pages, is_whole: false };
        for page in run.pages.clone() {
            let from = place_of(page);
            let full = full_hash(frame.buffered(from..from + PAGE));
            let hash = ContentHash::from_full(&full);
            let place = if lookup.allowed.contains(page) {
                self.look_up(hash, page, &lookup, open.as_ref(), rest.is_there)
            } else {
                None
            };
            let Some(place) = place else {
                if open.is_some() {
                    self.close(&mut open, frame, &mut rest);
                    others = page..page;
                }
                others.end = page + 1;
                self.hashes.push((page, hash));
                continue;
            };
            if !open.as_ref().is_some_and(|open| open.is_continued_by(page, place)) {
                self.close(&mut open, frame, &mut rest);
                if !others.is_empty() {
                    rest.encode(piece(std::mem::replace(&mut others, page..page)), frame);
                }
                let ContentLocation { content_source, page: first_page } = place;
                let (hashes, run_hash) = (Vec::new(), RunHash::default());
                open = Some(OpenReference {
                    pages: page..page,
                    from,
                    hashes,
                    content_source,
                    first_page,
                    run_hash,
                });
            }
            if let Some(open) = &mut open {
                open.run_hash.add(&full);
                open.hashes.push(hash);
                open.pages.end = page + 1;
            }
        }
        self.close(&mut open, frame, &mut rest);
        if !others.is_empty() {
            rest.encode(piece(others), frame);
        }
    }

    fn passed_by(&mut self, _: Range<u64>, _: &[u8]) {}

    /// Before the frame is sent, because its acknowledgement may arrive before the sending call returns.
    fn end_frame(&mut self, content: &FrameContent) {
        if let Some(ReferenceLookup { block, .. }) = self.chunk {
            self.known.count_references_sent(block, content.presumed.referred.count());
        }
    }

    fn sent(&mut self, _: &FrameContent) {
        let Some(ReferenceLookup { block, base_page, .. }) = self.chunk else { return };
        let in_block = |(page, hash): &(u64, ContentHash)| (base_page + page, *hash);
        self.known.sent(block, self.hashes.iter().map(in_block));
        self.known.record_sent(block, self.hashes.iter().chain(&self.referred).map(in_block));
    }

    fn end_chunk(&mut self) {
        self.chunk = None;
    }
}
