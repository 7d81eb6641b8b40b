//! Frames whose data the transport moves by itself: the builder names the data instead of keeping a copy.
//!
//! Runs and their order are those of other frames, so that the concatenation of a frame's parts is the same payload. A
//! frame can name all pages of a chunk, because no buffer limits it.

use std::ops::Range;

use link::transport::Part;
use proto::limits::{CHUNK_BYTES, PAGE_BYTES};
use proto::pages::{Content, PagesHeader};

use super::encoding::FrameContent;
use super::{
    ASK_FIRST_PAGES, ChunkId, FRAME_PAGES, FrameBuilder, PAGE, PageCounts, PagePattern, PatternRuns,
    ReadFailed, first_present,
};
use crate::page_set::ChunkPages;
use crate::ram::BlockReader;

/// Data of a frame, as names of memory and the bytes between them.
#[derive(Debug, Default)]
pub(super) struct NamedData {
    layout: Vec<Part>,
    /// Fillings, in the order of their runs.
    fillings: Vec<u8>,
    /// Number of named bytes.
    memory_bytes: usize,
}

impl NamedData {
    /// Begins a frame, whose first part is its head.
    fn begin(&mut self) {
        self.layout.clear();
        self.layout.push(Part::Bytes(0));
        self.fillings.clear();
        self.memory_bytes = 0;
    }

    fn add_filling(&mut self, filling: &[u8]) {
        self.fillings.extend_from_slice(filling);
        if let Some(Part::Bytes(last)) = self.layout.last_mut() {
            *last += filling.len();
        } else {
            self.layout.push(Part::Bytes(filling.len()));
        }
    }

    fn add_memory(&mut self, region: u16, range: Range<u64>) {
        self.memory_bytes += (range.end - range.start) as usize;
        if let Some(Part::Memory { bytes, .. }) = self.layout.last_mut()
            && bytes.end == range.start
        {
            bytes.end = range.end;
        } else {
            self.layout.push(Part::Memory { region, bytes: range });
        }
    }
}

impl FrameBuilder {
    /// Names pages of a chunk, in ascending order. If zeros are to be omitted, reads the pages to find them, and what
    /// else needs no data; otherwise it does not touch them, and finds only holes at the beginning of runs.
    pub(crate) fn fill_named(
        &mut self,
        reader: &dyn BlockReader,
        id: ChunkId,
        wanted: &ChunkPages,
        omits_zeros: bool,
    ) -> Result<(FrameContent, PageCounts), ReadFailed> {
        self.runs.clear();
        self.filled = 0;
        self.named.begin();
        let base = u64::from(id.chunk) * CHUNK_BYTES;
        for run in wanted.runs() {
            let mut at = run.start;
            while at < run.end {
                if run.end - at >= ASK_FIRST_PAGES {
                    let present = first_present(reader, base, at..run.end)?;
                    self.push(at..present, Content::Hole);
                    at = present;
                }
                let end = run.end.min(at + FRAME_PAGES);
                if at == end {
                    break;
                }
                if omits_zeros {
                    self.inspect(reader, id, base, at..end)?;
                } else {
                    self.name(id, base, at..end);
                }
                at = end;
            }
        }
        Ok(self.content(*wanted))
    }

    /// Reads pages, and names those that need data.
    fn inspect(
        &mut self,
        reader: &dyn BlockReader,
        id: ChunkId,
        base: u64,
        pages: Range<u64>,
    ) -> Result<(), ReadFailed> {
        let offset = base + pages.start * PAGE_BYTES;
        let copy = &mut self.data[..(pages.end - pages.start) as usize * PAGE];
        reader.read(offset, copy).map_err(|source| ReadFailed { offset, source })?;
        let mut patterns = PatternRuns::begin(&self.data, pages);
        while let Some((page, end, pattern)) = patterns.next(&self.data) {
            match pattern {
                PagePattern::Zeros => {
                    let present = first_present(reader, base, page..end)?;
                    self.push(page..present, Content::Hole);
                    self.push(present..end, Content::Zero);
                }
                PagePattern::Filled(filling) => {
                    self.named.add_filling(&filling);
                    self.push(page..end, Content::Filled);
                }
                PagePattern::Other => self.name(id, base, page..end),
            }
        }
        Ok(())
    }

    fn name(&mut self, id: ChunkId, base: u64, pages: Range<u64>) {
        let range = base + pages.start * PAGE_BYTES..base + pages.end * PAGE_BYTES;
        self.named.add_memory(id.block, range);
        self.push(pages, Content::Data);
    }

    /// Returns the number of bytes that the last frame names.
    pub(crate) fn named_bytes(&self) -> usize {
        self.named.memory_bytes
    }

    /// Returns the named frame: its bytes, and the layout of its payload.
    pub(crate) fn named_payload(&mut self, header: &PagesHeader) -> (&[u8], &[Part]) {
        self.head.clear();
        header.encode(&self.runs, &mut self.head);
        if let Some(Part::Bytes(first)) = self.named.layout.first_mut() {
            *first += self.head.len();
        }
        self.head.extend_from_slice(&self.named.fillings);
        (&self.head, &self.named.layout)
    }
}
