//! Conversion of a chunk's pages to the payload of a frame.
//!
//! One frame holds at most as much data as [`FRAME_PAGES`] pages have, so that the bytes are still in the processor's
//! cache when they are written to the socket, and the destination applies the first part of a chunk while the second
//! one is read. Buffers are reused; nothing is allocated for a page or a frame.

use std::ops::Range;

use proto::frame::FrameKind;
use proto::limits::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES};
use proto::packed::Codec;
use proto::pages::{Content, FILLING_BYTES, PageRun, PagesHeader};

use crate::page_set::ChunkPages;
use crate::ram::zero::{filling, is_zero};
use crate::ram::{BlockReader, RamError};

mod direct;
pub(crate) mod encoding;

use direct::NamedData;
use encoding::{BufferedRun, FrameContent, PageEncoders, PresumedPages};

/// Maximum number of pages of data in one frame: 256 KiB.
pub const FRAME_PAGES: u64 = 64;

/// Shortest run for which it pays to query where memory is before reading: the query costs as much as reading a few
/// pages.
const ASK_FIRST_PAGES: u64 = 16;

const PAGE: usize = PAGE_BYTES as usize;

/// A chunk of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkId {
    pub(crate) block: u16,
    /// 64 TiB of RAM are 2²⁵ chunks.
    pub(crate) chunk: u32,
}

/// Number of pages by content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages with data.
    pub data: u64,
    /// Pages of zeros.
    pub zero: u64,
    /// Unmapped pages.
    pub hole: u64,
    /// Pages sent as references, because the destination has their content.
    pub reference: u64,
    /// Pages of which only the changed pieces were sent, as deltas.
    pub delta: u64,
    /// Pages that repeat the same few bytes, other than zeros.
    pub filled: u64,
    /// Pages that were sent as holes, whatever their content, because the guest does not use them.
    pub hinted: u64,
}

impl PageCounts {
    /// Returns the number of all pages.
    pub fn pages(&self) -> u64 {
        self.data + self.zero + self.hole + self.reference + self.delta + self.filled + self.hinted
    }

    /// Returns the number of pages that need only a few bytes at any destination: it indicates nothing about the link.
    pub fn empty(&self) -> u64 {
        self.zero + self.hole + self.filled
    }
}

/// Reused memory in which frames are built, one after the other.
#[derive(Debug)]
pub struct FrameBuilder {
    runs: Vec<PageRun>,
    head: Vec<u8>,
    data: Vec<u8>,
    /// Number of bytes of `data` that belong to the frame.
    filled: usize,
    /// Data of a frame that the transport moves by itself.
    named: NamedData,
}

/// Pages of a chunk that are to be sent.
pub(crate) struct WantedPages {
    /// All of them.
    pub(crate) pages: ChunkPages,
    /// Those that are sent as holes, whatever their content.
    pub(crate) left_out: ChunkPages,
}

/// Error of reading guest memory.
#[derive(Debug)]
pub(crate) struct ReadFailed {
    pub(crate) offset: u64,
    pub(crate) source: RamError,
}

impl FrameBuilder {
    pub(crate) fn new() -> Self {
        let data = vec![0; FRAME_PAGES as usize * PAGE];
        Self { runs: Vec::new(), head: Vec::new(), data, filled: 0, named: NamedData::default() }
    }

    /// Reads pages of a chunk, in ascending order, as many as fit. Returns the content of the frame, with the counts of
    /// its pages. Encoders may encode pages that are not empty.
    pub(crate) fn fill(
        &mut self,
        reader: &dyn BlockReader,
        chunk: u64,
        wanted: &WantedPages,
        encoders: &mut PageEncoders<'_>,
    ) -> Result<(FrameContent, PageCounts), ReadFailed> {
        self.runs.clear();
        self.filled = 0;
        encoders.encoders.iter_mut().for_each(|encoder| encoder.begin_frame());
        let base = chunk * CHUNK_BYTES;
        let mut taken = ChunkPages::EMPTY;
        let mut left_out = wanted.pages;
        left_out.retain(&wanted.left_out);
        let mut used = wanted.pages;
        used.remove(&left_out);
        for run in used.runs() {
            // Runs ascend in a frame.
            taken.insert(&self.add_holes(&left_out, &taken, run.start));
            let end = self.fill_run(reader, base, run.clone(), encoders)?;
            taken.insert(&ChunkPages::from_range(run.start..end));
            if end < run.end || self.room() == 0 {
                break;
            }
        }
        if used.is_within(&taken) {
            taken.insert(&self.add_holes(&left_out, &taken, CHUNK_PAGES));
        }
        left_out.retain(&taken);
        let (content, mut counts) = self.content(taken);
        counts.hinted = left_out.count();
        counts.hole -= counts.hinted;
        encoders.encoders.iter_mut().for_each(|encoder| encoder.end_frame(&content));
        Ok((content, counts))
    }

    /// Returns the content of the frame, which holds the pages `taken`, and the counts by the kinds of runs.
    fn content(&self, taken: ChunkPages) -> (FrameContent, PageCounts) {
        let mut counts = PageCounts::default();
        let mut content =
            FrameContent { pages: taken, empty: ChunkPages::EMPTY, presumed: PresumedPages::NONE };
        for run in &self.runs {
            let first = u64::from(run.first_page);
            let pages = || ChunkPages::from_range(first..first + u64::from(run.pages));
            let count = match run.content {
                Content::Data => &mut counts.data,
                Content::Reference => {
                    content.presumed.referred.insert(&pages());
                    &mut counts.reference
                }
                Content::Delta { .. } => {
                    content.presumed.changed.insert(&pages());
                    &mut counts.delta
                }
                Content::Zero | Content::Hole | Content::Filled => {
                    content.empty.insert(&pages());
                    match run.content {
                        Content::Zero => &mut counts.zero,
                        Content::Hole => &mut counts.hole,
                        _ => &mut counts.filled,
                    }
                }
            };
            *count += u64::from(run.pages);
        }
        (content, counts)
    }

    /// Adds pages that are left out as holes: those before page `before` that are not yet in the frame. Returns them.
    fn add_holes(&mut self, left_out: &ChunkPages, taken: &ChunkPages, before: u64) -> ChunkPages {
        let mut pages = ChunkPages::from_range(0..before);
        pages.retain(left_out);
        pages.remove(taken);
        pages.runs().for_each(|run| self.push(run, Content::Hole));
        pages
    }

    /// Returns true if the frame holds the bytes of any page, or some of them.
    pub(crate) fn has_data(&self) -> bool {
        self.runs.iter().any(|run| matches!(run.content, Content::Data | Content::Delta { .. }))
    }

    /// Returns the data of all runs.
    pub(crate) fn data(&self) -> &[u8] {
        &self.data[..self.filled]
    }

    /// Returns the frame: its kind, and the parts of its payload, header with runs, and data. If the data was
    /// compressed, the compressed bytes replace it.
    pub(crate) fn payload<'a>(
        &'a mut self,
        header: &PagesHeader,
        packed: Option<(Codec, &'a [u8])>,
    ) -> (FrameKind, [&'a [u8]; 2]) {
        self.head.clear();
        if let Some((codec, _)) = packed {
            self.head.extend_from_slice(&codec.encode());
        }
        header.encode(&self.runs, &mut self.head);
        match packed {
            Some((_, packed)) => (FrameKind::Packed, [&self.head, packed]),
            None => (FrameKind::Pages, [&self.head, &self.data[..self.filled]]),
        }
    }

    /// Returns a part of the buffer.
    pub(crate) fn buffered(&self, range: Range<usize>) -> &[u8] {
        &self.data[range]
    }

    fn room(&self) -> u64 {
        ((self.data.len() - self.filled) / PAGE) as u64
    }

    /// Reads a run of pages until it ends or the frame is full; returns the first page that was not read.
    fn fill_run(
        &mut self,
        reader: &dyn BlockReader,
        base: u64,
        run: Range<u64>,
        encoders: &mut PageEncoders<'_>,
    ) -> Result<u64, ReadFailed> {
        let mut at = run.start;
        while at < run.end {
            if self.room() == 0 {
                break;
            }
            if run.end - at >= ASK_FIRST_PAGES {
                let present = first_present(reader, base, at..run.end)?;
                self.push(at..present, Content::Hole);
                at = present;
            }
            let end = run.end.min(at + self.room());
            if at < end {
                self.read(reader, base, at..end, encoders)?;
            }
            at = end;
        }
        Ok(at)
    }

    /// Reads pages to the end of the data, and closes the gaps that zero pages leave there.
    fn read(
        &mut self,
        reader: &dyn BlockReader,
        base: u64,
        pages: Range<u64>,
        encoders: &mut PageEncoders<'_>,
    ) -> Result<(), ReadFailed> {
        let offset = base + pages.start * PAGE_BYTES;
        let start = self.filled;
        let copy = &mut self.data[start..start + (pages.end - pages.start) as usize * PAGE];
        reader.read(offset, copy).map_err(|source| ReadFailed { offset, source })?;

        let place = |page: u64| start + (page - pages.start) as usize * PAGE;
        let mut patterns = PatternRuns::begin(&self.data[start..], pages.clone());
        while let Some((page, end, pattern)) = patterns.next(&self.data[start..]) {
            if pattern == PagePattern::Zeros {
                // One query for the whole run, so a hole behind zeros may be sent as zeros, but never zeros as a hole.
                let present = first_present(reader, base, page..end)?;
                self.push(page..present, Content::Hole);
                self.push(present..end, Content::Zero);
            } else if let PagePattern::Filled(filling) = pattern {
                self.add(page..end, Content::Filled, &filling);
            } else {
                encoders.encode(BufferedRun { pages: page..end, from: place(page), is_whole: true }, self);
            }
        }
        Ok(())
    }

    /// Appends encoded pages. Overwrites pages in the buffer that were encoded already.
    pub(crate) fn add(&mut self, pages: Range<u64>, content: Content, bytes: &[u8]) {
        let end = self.filled + bytes.len();
        self.data[self.filled..end].copy_from_slice(bytes);
        self.filled = end;
        self.push(pages, content);
    }

    /// Moves pages in the buffer behind those of the frame.
    pub(crate) fn add_data(&mut self, BufferedRun { pages, from, .. }: BufferedRun) {
        let bytes = (pages.end - pages.start) as usize * PAGE;
        if from != self.filled {
            self.data.copy_within(from..from + bytes, self.filled);
        }
        self.filled += bytes;
        self.push(pages, Content::Data);
    }

    /// Adds a run, or lengthens the last one.
    fn push(&mut self, pages: Range<u64>, content: Content) {
        if pages.is_empty() {
            return;
        }
        let count = (pages.end - pages.start) as u16;
        if let Some(last) = self.runs.last_mut()
            && let Some(content) = merge_contents(last.content, content)
            && u64::from(last.first_page + last.pages) == pages.start
        {
            last.pages += count;
            last.content = content;
            return;
        }
        self.runs.push(PageRun { first_page: pages.start as u16, pages: count, content });
    }
}

/// Pattern of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PagePattern {
    Zeros,
    Filled([u8; FILLING_BYTES]),
    Other,
}

impl PagePattern {
    fn at(page: &[u8]) -> Self {
        if is_zero(page) {
            return Self::Zeros;
        }
        // A page that begins with zeros and is not all zero needs no second check.
        let filling = if page.starts_with(&[0; FILLING_BYTES]) { None } else { filling(page) };
        filling.map_or(Self::Other, Self::Filled)
    }
}

/// The runs of pages of one pattern in a buffer that begins with the first page. Each page is checked once: the one
/// that ends a run is the first of the next run.
struct PatternRuns {
    first: u64,
    rest: Range<u64>,
    next: PagePattern,
}

impl PatternRuns {
    fn begin(data: &[u8], pages: Range<u64>) -> Self {
        Self { first: pages.start, rest: pages, next: PagePattern::at(&data[..PAGE]) }
    }

    /// Returns the first page of the next run, the page behind it, and its pattern. The pages before it in the buffer
    /// may have changed.
    #[inline]
    fn next(&mut self, data: &[u8]) -> Option<(u64, u64, PagePattern)> {
        let (page, pattern) = (self.rest.start, self.next);
        if page >= self.rest.end {
            return None;
        }
        let mut end = page + 1;
        while end < self.rest.end {
            let at = (end - self.first) as usize * PAGE;
            self.next = PagePattern::at(&data[at..at + PAGE]);
            if self.next != pattern {
                break;
            }
            end += 1;
        }
        self.rest.start = end;
        Some((page, end, pattern))
    }
}

/// Returns the content of two runs joined, if one run can hold both.
fn merge_contents(one: Content, other: Content) -> Option<Content> {
    match (one, other) {
        (Content::Delta { pieces }, Content::Delta { pieces: more }) => {
            Some(Content::Delta { pieces: pieces + more })
        }
        // The fillings differ, or it would have been one run; each reference has a record of its own.
        (Content::Filled | Content::Reference, _) => None,
        _ => (one == other).then_some(one),
    }
}

/// Returns [`BlockReader::first_present`] in pages of a chunk.
fn first_present(reader: &dyn BlockReader, base: u64, pages: Range<u64>) -> Result<u64, ReadFailed> {
    let offset = base + pages.start * PAGE_BYTES;
    let present = reader
        .first_present(offset..base + pages.end * PAGE_BYTES)
        .map_err(|source| ReadFailed { offset, source })?;
    // A page with memory behind any of its bytes is no hole.
    Ok((present.saturating_sub(base) / PAGE_BYTES).clamp(pages.start, pages.end).min(CHUNK_PAGES))
}
