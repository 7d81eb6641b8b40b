//! From pages of a chunk to the payload of a frame.
//!
//! One frame holds at most [`FRAME_PAGES`] pages of data, so that the bytes are still in the processor's cache when
//! they go to the socket, and the far side applies the first part of a chunk while the second one is read. Buffers are
//! reused; nothing is allocated for a page or a frame.

use std::ops::Range;

use proto::limits::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES};
use proto::pages::{Content, PagesHeader, Run};

use crate::dirty::ChunkPages;
use crate::ram::zero::is_zero;
use crate::ram::{BlockReader, RamError};

/// Most pages of data in one frame: 256 KiB.
pub const FRAME_PAGES: u64 = 64;

/// Shortest run for which it pays to ask where memory is before reading: asking costs as much as reading a few pages.
const ASK_FIRST_PAGES: u64 = 16;

const PAGE: usize = PAGE_BYTES as usize;

/// Pages by what they held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Pages with data.
    pub data: u64,
    /// Pages of zeros.
    pub zero: u64,
    /// Pages without memory behind them.
    pub hole: u64,
}

impl Contents {
    /// All of them.
    pub fn pages(&self) -> u64 {
        self.data + self.zero + self.hole
    }
}

/// Reused memory in which one frame after the other is built.
#[derive(Debug)]
pub(crate) struct FrameBuilder {
    runs: Vec<Run>,
    head: Vec<u8>,
    data: Vec<u8>,
    /// How much of `data` belongs to the frame, in bytes.
    filled: usize,
}

/// Reading guest memory failed.
#[derive(Debug)]
pub(crate) struct ReadFailed {
    pub(crate) offset: u64,
    pub(crate) source: RamError,
}

impl FrameBuilder {
    pub(crate) fn new() -> Self {
        Self { runs: Vec::new(), head: Vec::new(), data: vec![0; FRAME_PAGES as usize * PAGE], filled: 0 }
    }

    /// Reads pages of a chunk, in ascending order, as many as fit. Returns which ones the frame holds now.
    pub(crate) fn fill(
        &mut self,
        reader: &dyn BlockReader,
        chunk: u64,
        wanted: &ChunkPages,
    ) -> Result<(ChunkPages, Contents), ReadFailed> {
        self.runs.clear();
        self.filled = 0;
        let base = chunk * CHUNK_BYTES;
        let mut taken = ChunkPages::EMPTY;
        for run in wanted.runs() {
            let end = self.fill_run(reader, base, run.clone())?;
            taken.insert(&ChunkPages::from_range(run.start..end));
            if end < run.end || self.room() == 0 {
                break;
            }
        }
        let mut contents = Contents::default();
        for run in &self.runs {
            let count = match run.content {
                Content::Data => &mut contents.data,
                Content::Zero => &mut contents.zero,
                Content::Hole => &mut contents.hole,
            };
            *count += u64::from(run.pages);
        }
        Ok((taken, contents))
    }

    /// The parts of the payload: header with runs, and data.
    pub(crate) fn payload(&mut self, header: &PagesHeader) -> [&[u8]; 2] {
        self.head.clear();
        header.encode(&self.runs, &mut self.head);
        [&self.head, &self.data[..self.filled]]
    }

    fn room(&self) -> u64 {
        ((self.data.len() - self.filled) / PAGE) as u64
    }

    /// Reads a run of pages until it ends or the frame is full; returns the first page that was left out.
    fn fill_run(&mut self, reader: &dyn BlockReader, base: u64, run: Range<u64>) -> Result<u64, ReadFailed> {
        let mut at = run.start;
        while at < run.end && self.room() > 0 {
            if run.end - at >= ASK_FIRST_PAGES {
                let present = first_present(reader, base, at..run.end)?;
                self.push(at..present, Content::Hole);
                at = present;
            }
            let end = run.end.min(at + self.room());
            if at < end {
                self.read(reader, base, at..end)?;
            }
            at = end;
        }
        Ok(at)
    }

    /// Reads pages to the end of the data, and closes the gaps that zero pages leave there.
    fn read(&mut self, reader: &dyn BlockReader, base: u64, pages: Range<u64>) -> Result<(), ReadFailed> {
        let offset = base + pages.start * PAGE_BYTES;
        let start = self.filled;
        let copy = &mut self.data[start..start + (pages.end - pages.start) as usize * PAGE];
        reader.read(offset, copy).map_err(|source| ReadFailed { offset, source })?;

        let place = |page: u64| start + (page - pages.start) as usize * PAGE;
        let mut page = pages.start;
        // Each page is looked at once: the one that ends a run is the next one's first.
        let mut next_is_zero = is_zero(&self.data[place(page)..place(page + 1)]);
        while page < pages.end {
            let zero = next_is_zero;
            let mut end = page + 1;
            while end < pages.end {
                next_is_zero = is_zero(&self.data[place(end)..place(end + 1)]);
                if next_is_zero != zero {
                    break;
                }
                end += 1;
            }
            if zero {
                // One question for the whole run, so zeros may be said of a hole behind them; never the other way.
                let present = first_present(reader, base, page..end)?;
                self.push(page..present, Content::Hole);
                self.push(present..end, Content::Zero);
            } else {
                if place(page) != self.filled {
                    self.data.copy_within(place(page)..place(end), self.filled);
                }
                self.filled += (end - page) as usize * PAGE;
                self.push(page..end, Content::Data);
            }
            page = end;
        }
        Ok(())
    }

    /// Adds a run, or lengthens the last one.
    fn push(&mut self, pages: Range<u64>, content: Content) {
        if pages.is_empty() {
            return;
        }
        let count = (pages.end - pages.start) as u16;
        if let Some(last) = self.runs.last_mut()
            && last.content == content
            && u64::from(last.first_page + last.pages) == pages.start
        {
            last.pages += count;
            return;
        }
        self.runs.push(Run { first_page: pages.start as u16, pages: count, content });
    }
}

/// [`BlockReader::first_present`] in pages of a chunk.
fn first_present(reader: &dyn BlockReader, base: u64, pages: Range<u64>) -> Result<u64, ReadFailed> {
    let offset = base + pages.start * PAGE_BYTES;
    let present = reader
        .first_present(offset..base + pages.end * PAGE_BYTES)
        .map_err(|source| ReadFailed { offset, source })?;
    // A page of which any byte has memory behind it is no hole.
    Ok((present.saturating_sub(base) / PAGE_BYTES).clamp(pages.start, pages.end).min(CHUNK_PAGES))
}
