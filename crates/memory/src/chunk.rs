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

use crate::dirty::ChunkPages;
use crate::page_name::PageName;
use crate::ram::zero::{filling, is_zero};
use crate::ram::{BlockReader, RamError};

mod encodings;

use encodings::OpenReference;
pub(crate) use encodings::{ChunkKnowledge, PresumedPages, ReferenceLookup};

/// Maximum number of pages of data in one frame: 256 KiB.
pub const FRAME_PAGES: u64 = 64;

/// Shortest run for which it pays to query where memory is before reading: the query costs as much as reading a few
/// pages.
const ASK_FIRST_PAGES: u64 = 16;

const PAGE: usize = PAGE_BYTES as usize;

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
pub(crate) struct FrameBuilder {
    runs: Vec<PageRun>,
    head: Vec<u8>,
    data: Vec<u8>,
    /// Number of bytes of `data` that belong to the frame.
    filled: usize,
    /// The last run, if that is a reference.
    open: Option<OpenReference>,
    /// Pages that are sent and their names, if references are searched for.
    names: Vec<(u64, PageName)>,
    /// Pages that are sent as references, and their names.
    referred: Vec<(u64, PageName)>,
    presumed: PresumedPages,
    /// Delta of a page, before its place is known to be free.
    delta: Vec<u8>,
    /// Number of frames built.
    frames: u64,
    /// Processor time of computing deltas, in nanoseconds: measured for some frames and extrapolated to all.
    mark_ns: u64,
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
        Self {
            runs: Vec::new(),
            head: Vec::new(),
            data,
            filled: 0,
            open: None,
            names: Vec::new(),
            referred: Vec::new(),
            presumed: PresumedPages::NONE,
            delta: Vec::new(),
            frames: 0,
            mark_ns: 0,
        }
    }

    /// Reads pages of a chunk, in ascending order, as many as fit. Returns the pages that the frame holds now. Pages
    /// whose content the destination has become references; pages of which it has an earlier version become deltas, if
    /// their marks are known.
    pub(crate) fn fill(
        &mut self,
        reader: &dyn BlockReader,
        chunk: u64,
        wanted: &ChunkPages,
        knowledge: &mut ChunkKnowledge<'_>,
    ) -> Result<(ChunkPages, PageCounts), ReadFailed> {
        self.runs.clear();
        self.names.clear();
        self.referred.clear();
        self.presumed = PresumedPages::NONE;
        self.filled = 0;
        self.frames += 1;
        self.mark_ns = 0;
        let base = chunk * CHUNK_BYTES;
        let mut taken = ChunkPages::EMPTY;
        let mut hinted = *wanted;
        hinted.retain(&knowledge.hinted);
        let mut used = *wanted;
        used.remove(&hinted);
        for run in used.runs() {
            // Runs ascend in a frame.
            taken.insert(&self.add_hinted_holes(&hinted, &taken, run.start));
            let end = self.fill_run(reader, base, run.clone(), knowledge)?;
            taken.insert(&ChunkPages::from_range(run.start..end));
            if end < run.end || self.room() == 0 {
                break;
            }
        }
        if used.is_within(&taken) {
            taken.insert(&self.add_hinted_holes(&hinted, &taken, CHUNK_PAGES));
        }
        self.close();
        hinted.retain(&taken);
        let mut contents = PageCounts { hinted: hinted.count(), ..PageCounts::default() };
        let mut empty = ChunkPages::EMPTY;
        for run in &self.runs {
            let count = match run.content {
                Content::Data => &mut contents.data,
                Content::Zero => &mut contents.zero,
                Content::Hole => &mut contents.hole,
                Content::Reference => &mut contents.reference,
                Content::Delta { .. } => &mut contents.delta,
                Content::Filled => &mut contents.filled,
            };
            *count += u64::from(run.pages);
            if matches!(run.content, Content::Zero | Content::Hole | Content::Filled) {
                let first = u64::from(run.first_page);
                empty.insert(&ChunkPages::from_range(first..first + u64::from(run.pages)));
            }
        }
        contents.hole -= contents.hinted;
        if let Some((_, marks)) = &mut knowledge.marks {
            marks.forget(&empty);
        }
        Ok((taken, contents))
    }

    /// Adds hinted pages as holes, whatever their content: those before page `before` that are not yet in the frame.
    /// Returns them.
    fn add_hinted_holes(&mut self, hinted: &ChunkPages, taken: &ChunkPages, before: u64) -> ChunkPages {
        let mut pages = ChunkPages::from_range(0..before);
        pages.retain(hinted);
        pages.remove(taken);
        pages.runs().for_each(|run| self.push(run, Content::Hole));
        pages
    }

    /// Returns true if the frame holds the bytes of any page, or some of them.
    pub(crate) fn has_data(&self) -> bool {
        self.runs.iter().any(|run| matches!(run.content, Content::Data | Content::Delta { .. }))
    }

    /// Returns the number of delta pieces in the frame.
    pub(crate) fn pieces(&self) -> u64 {
        let pieces =
            |run: &PageRun| if let Content::Delta { pieces } = run.content { u64::from(pieces) } else { 0 };
        self.runs.iter().map(pieces).sum()
    }

    /// Returns the processor time of finding the pieces, in nanoseconds, extrapolated as if it had been measured for
    /// every frame.
    pub(crate) fn mark_ns(&self) -> u64 {
        self.mark_ns
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

    /// Returns the names of the pages that are in the frame as data or as deltas, by their number in the chunk; none if
    /// no references were searched for.
    pub(crate) fn names(&self) -> &[(u64, PageName)] {
        &self.names
    }

    /// Returns the names of the pages that are sent as references, by their number in the chunk.
    pub(crate) fn referred(&self) -> &[(u64, PageName)] {
        &self.referred
    }

    /// Returns the pages that the destination may request, because their bytes are not in the frame, or not all of
    /// them.
    pub(crate) fn presumed(&self) -> PresumedPages {
        self.presumed
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
        knowledge: &mut ChunkKnowledge<'_>,
    ) -> Result<u64, ReadFailed> {
        let mut at = run.start;
        while at < run.end {
            // A reference may become data again, for which there has to be room.
            self.close();
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
                self.read(reader, base, at..end, knowledge)?;
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
        knowledge: &mut ChunkKnowledge<'_>,
    ) -> Result<(), ReadFailed> {
        let offset = base + pages.start * PAGE_BYTES;
        let start = self.filled;
        let copy = &mut self.data[start..start + (pages.end - pages.start) as usize * PAGE];
        reader.read(offset, copy).map_err(|source| ReadFailed { offset, source })?;

        let place = |page: u64| start + (page - pages.start) as usize * PAGE;
        let mut page = pages.start;
        // Each page is checked once: the one that ends a run is the first of the next run.
        let mut next = PagePattern::at(&self.data[place(page)..place(page + 1)]);
        while page < pages.end {
            let pattern = next;
            let mut end = page + 1;
            while end < pages.end {
                next = PagePattern::at(&self.data[place(end)..place(end + 1)]);
                if next != pattern {
                    break;
                }
                end += 1;
            }
            if pattern == PagePattern::Zeros {
                // One query for the whole run, so a hole behind zeros may be sent as zeros, but never zeros as a hole.
                let present = first_present(reader, base, page..end)?;
                self.push(page..present, Content::Hole);
                self.push(present..end, Content::Zero);
            } else if let PagePattern::Filled(filling) = pattern {
                self.add_filling(page..end, filling);
            } else {
                let ChunkKnowledge { refer, marks, .. } = knowledge;
                let marks = marks.as_mut().map(|(deltas, marks)| (*deltas, marks));
                match (refer, marks) {
                    (None, None) => self.add_data(page..end, place(page)),
                    (None, Some(marks)) => self.add_deltas_or_data(page..end, place(page), marks),
                    (Some(refer), mut marks) => {
                        for page in page..end {
                            let marks = marks.as_mut().map(|(deltas, marks)| (*deltas, &mut **marks));
                            self.add_reference_or_data(page, place(page), refer, marks);
                        }
                    }
                }
            }
            page = end;
        }
        Ok(())
    }

    /// Appends the filling of pages. Overwrites pages in the buffer that were checked already.
    fn add_filling(&mut self, pages: Range<u64>, filling: [u8; FILLING_BYTES]) {
        self.close();
        self.data[self.filled..self.filled + FILLING_BYTES].copy_from_slice(&filling);
        self.filled += FILLING_BYTES;
        self.push(pages, Content::Filled);
    }

    /// Moves pages that begin at `from` in the buffer behind those of the frame.
    fn add_data(&mut self, pages: Range<u64>, from: usize) {
        self.close();
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
        self.close();
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

/// Returns the content of two runs joined, if one run can hold both.
fn merge_contents(one: Content, other: Content) -> Option<Content> {
    match (one, other) {
        (Content::Delta { pieces }, Content::Delta { pieces: more }) => {
            Some(Content::Delta { pieces: pieces + more })
        }
        // The fillings differ, or it would have been one run.
        (Content::Filled, _) => None,
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
