//! From pages of a chunk to the payload of a frame.
//!
//! One frame holds at most as much data as [`FRAME_PAGES`] pages have, so that the bytes are still in the processor's
//! cache when they go to the socket, and the far side applies the first part of a chunk while the second one is read. Buffers are
//! reused; nothing is allocated for a page or a frame.

use std::ops::Range;

use proto::delta::{Delta, MOST_PIECES};
use proto::frame::Kind;
use proto::limits::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES};
use proto::packed::Codec;
use proto::pages::{Content, PagesHeader, Run};
use proto::reference::{Library, REFERENCE_BYTES, Reference};

use crate::clock::timed;
use crate::deltas::{ChunkMarks, Deltas};
use crate::dirty::ChunkPages;
use crate::ram::zero::is_zero;
use crate::ram::{BlockReader, RamError};
use crate::references::{Known, PageHash, PageName, Place, RunHash, page_hash};

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
    /// Pages that were referred to, because the destination has them.
    pub reference: u64,
    /// Pages of which only what changed was sent.
    pub delta: u64,
}

impl Contents {
    /// All of them.
    pub fn pages(&self) -> u64 {
        self.data + self.zero + self.hole + self.reference + self.delta
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
    /// The last run, where that is a reference.
    open: Option<OpenReference>,
    /// Pages of data and their names, where references are looked for.
    names: Vec<(u64, PageName)>,
    /// Pages that the other side may not have, or not as is believed: those that are referred to, and those of which
    /// only what changed is sent.
    presumed: ChunkPages,
    /// What of a page changed, before its place is known to be free.
    delta: Vec<u8>,
    /// Frames that were put together.
    frames: u64,
    /// Processor time of looking for what changed, in nanoseconds: see [`TIMED`].
    mark_ns: u64,
}

/// Of one frame in so many it is measured how long looking for what changed takes: to ask for the time costs as much as
/// to look at a page.
const TIMED: u64 = 16;

/// What is known of a chunk's pages, so that less of them is sent.
pub(crate) enum Knowledge<'a> {
    Nothing,
    /// The destination may have them elsewhere.
    Refer(Refer<'a>),
    /// It may have an earlier version.
    Marks(&'a Deltas, ChunkMarks),
}

/// Shortest run of pages that is referred to: each costs the destination a question to a server and an answer, and on a
/// quick link a few pages are there sooner.
const LEAST_REFERRED: u64 = 4;

/// Where pages of a chunk may be at the destination already.
pub(crate) struct Refer<'a> {
    pub(crate) known: &'a Known,
    /// The block that is sent, and the chunk's first page in it.
    pub(crate) block: u16,
    pub(crate) base_page: u64,
    /// Pages of the chunk for which it is looked up.
    pub(crate) allowed: ChunkPages,
    /// Whether a page of a block is at the destination as it was sent last, as far as this round knows.
    pub(crate) is_there: &'a dyn Fn(u16, u64) -> bool,
}

/// A reference that may go on with the next page.
#[derive(Debug)]
struct OpenReference {
    /// Where its record goes in the frame's data.
    record: usize,
    /// Where its pages are in the buffer, and their names: it may be too short.
    from: usize,
    names: Vec<PageName>,
    library: Library,
    first_page: u64,
    /// So many pages so far.
    pages: u64,
    hash: RunHash,
}

/// Reading guest memory failed.
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
            presumed: ChunkPages::EMPTY,
            delta: Vec::new(),
            frames: 0,
            mark_ns: 0,
        }
    }

    /// Reads pages of a chunk, in ascending order, as many as fit. Returns which ones the frame holds now. Those that
    /// the destination has are referred to, and of those that it has in an earlier version what changed is taken, where
    /// that is known.
    pub(crate) fn fill(
        &mut self,
        reader: &dyn BlockReader,
        chunk: u64,
        wanted: &ChunkPages,
        knowledge: &mut Knowledge<'_>,
    ) -> Result<(ChunkPages, Contents), ReadFailed> {
        self.runs.clear();
        self.names.clear();
        self.presumed = ChunkPages::EMPTY;
        self.filled = 0;
        self.frames += 1;
        self.mark_ns = 0;
        let base = chunk * CHUNK_BYTES;
        let mut taken = ChunkPages::EMPTY;
        for run in wanted.runs() {
            let end = self.fill_run(reader, base, run.clone(), knowledge)?;
            taken.insert(&ChunkPages::from_range(run.start..end));
            if end < run.end || self.room() == 0 {
                break;
            }
        }
        self.close();
        let (mut contents, mut empty) = (Contents::default(), ChunkPages::EMPTY);
        for run in &self.runs {
            let count = match run.content {
                Content::Data => &mut contents.data,
                Content::Zero => &mut contents.zero,
                Content::Hole => &mut contents.hole,
                Content::Reference => &mut contents.reference,
                Content::Delta { .. } => &mut contents.delta,
            };
            *count += u64::from(run.pages);
            if matches!(run.content, Content::Zero | Content::Hole) {
                let first = u64::from(run.first_page);
                empty.insert(&ChunkPages::from_range(first..first + u64::from(run.pages)));
            }
        }
        if let Knowledge::Marks(_, marks) = knowledge {
            marks.forget(&empty);
        }
        Ok((taken, contents))
    }

    /// Whether any pages are in the frame with their bytes, or some of them.
    pub(crate) fn has_data(&self) -> bool {
        self.runs.iter().any(|run| matches!(run.content, Content::Data | Content::Delta { .. }))
    }

    /// How many pieces of pages are in the frame.
    pub(crate) fn pieces(&self) -> u64 {
        let pieces =
            |run: &Run| if let Content::Delta { pieces } = run.content { u64::from(pieces) } else { 0 };
        self.runs.iter().map(pieces).sum()
    }

    /// Processor time of finding them, in nanoseconds, as if it had been measured of every frame.
    pub(crate) fn mark_ns(&self) -> u64 {
        self.mark_ns
    }

    /// The data of all runs.
    pub(crate) fn data(&self) -> &[u8] {
        &self.data[..self.filled]
    }

    /// The frame: its kind, and the parts of its payload, header with runs, and data. Where that was compressed, this
    /// is sent in its place.
    pub(crate) fn payload<'a>(
        &'a mut self,
        header: &PagesHeader,
        packed: Option<(Codec, &'a [u8])>,
    ) -> (Kind, [&'a [u8]; 2]) {
        self.head.clear();
        if let Some((codec, _)) = packed {
            self.head.extend_from_slice(&codec.encode());
        }
        header.encode(&self.runs, &mut self.head);
        match packed {
            Some((_, packed)) => (Kind::Packed, [&self.head, packed]),
            None => (Kind::Pages, [&self.head, &self.data[..self.filled]]),
        }
    }

    /// The names of the pages that are in the frame as data, by their number in the chunk; none where no references
    /// were looked for.
    pub(crate) fn names(&self) -> &[(u64, PageName)] {
        &self.names
    }

    /// Which pages the other side may ask for, because their bytes are not in the frame, or not all of them.
    pub(crate) fn presumed(&self) -> ChunkPages {
        self.presumed
    }

    fn room(&self) -> u64 {
        ((self.data.len() - self.filled) / PAGE) as u64
    }

    /// Reads a run of pages until it ends or the frame is full; returns the first page that was left out.
    fn fill_run(
        &mut self,
        reader: &dyn BlockReader,
        base: u64,
        run: Range<u64>,
        knowledge: &mut Knowledge<'_>,
    ) -> Result<u64, ReadFailed> {
        let mut at = run.start;
        while at < run.end {
            // What is referred to may become data again, for which there has to be room.
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
        knowledge: &mut Knowledge<'_>,
    ) -> Result<(), ReadFailed> {
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
                match knowledge {
                    Knowledge::Nothing => self.keep(page..end, place(page)),
                    Knowledge::Refer(refer) => {
                        (page..end).for_each(|page| self.refer_or_keep(page, place(page), refer));
                    }
                    Knowledge::Marks(deltas, marks) => {
                        self.changes_or_keep(page..end, place(page), deltas, marks);
                    }
                }
            }
            page = end;
        }
        Ok(())
    }

    /// Puts pages that begin at `from` in the buffer behind those of the frame.
    fn keep(&mut self, pages: Range<u64>, from: usize) {
        self.close();
        let bytes = (pages.end - pages.start) as usize * PAGE;
        if from != self.filled {
            self.data.copy_within(from..from + bytes, self.filled);
        }
        self.filled += bytes;
        self.push(pages, Content::Data);
    }

    /// Takes of pages that begin at `from` in the buffer what changed since they were sent last.
    fn changes_or_keep(&mut self, pages: Range<u64>, from: usize, deltas: &Deltas, marks: &mut ChunkMarks) {
        let is_timed = self.frames.is_multiple_of(TIMED);
        let places = (from..).step_by(PAGE);
        let compare =
            || pages.zip(places).for_each(|(page, from)| self.change_or_keep(page, from, deltas, marks));
        if is_timed {
            let ((), took) = timed(compare);
            self.mark_ns += took.cpu_ns * TIMED;
        } else {
            compare();
        }
    }

    /// Takes of a page what changed, if that is known, and not all.
    fn change_or_keep(&mut self, page: u64, from: usize, deltas: &Deltas, marks: &mut ChunkMarks) {
        let bytes = &self.data[from..from + PAGE];
        let changed = marks.renew(page, bytes).filter(|changed| changed.count_ones() <= MOST_PIECES);
        let Some(changed) = changed else { return self.keep(page..page + 1, from) };
        self.delta.clear();
        Delta::encode(bytes, deltas.page_hash(bytes), changed, &mut self.delta);
        self.close();
        let end = self.filled + self.delta.len();
        self.data[self.filled..end].copy_from_slice(&self.delta);
        self.filled = end;
        self.presumed.insert(&ChunkPages::from_range(page..page + 1));
        self.push(page..page + 1, Content::Delta { pieces: changed.count_ones() as u16 });
    }

    /// Refers to the page at `from` in the buffer if the destination has it.
    fn refer_or_keep(&mut self, page: u64, from: usize, refer: &Refer<'_>) {
        let hash = page_hash(&self.data[from..from + PAGE]);
        let name = PageName::from_hash(&hash);
        let place = if refer.allowed.contains(page) { self.look_up(name, page, refer) } else { None };
        if let Some(place) = place {
            self.refer(page, from, place, name, &hash);
        } else {
            self.keep(page..page + 1, from);
            self.names.push((page, name));
        }
    }

    /// Where the destination has a page: behind the one before it, if it is there, too.
    fn look_up(&self, name: PageName, page: u64, refer: &Refer<'_>) -> Option<Place> {
        let is_there = |place: &Place| match place.library {
            Library::Template(_) => true,
            // It was written anew, with what it had: where it was sent to, it is.
            Library::Block(block) if block == refer.block && place.page == refer.base_page + page => true,
            Library::Block(block) => (refer.is_there)(block, place.page),
        };
        let mut places = refer.known.find(name).filter(is_there);
        let first = places.next()?;
        if self.goes_on(page, first) {
            Some(first)
        } else {
            places.find(|place| self.goes_on(page, *place)).or(Some(first))
        }
    }

    /// Whether the open reference goes on with this page at this place.
    fn goes_on(&self, page: u64, place: Place) -> bool {
        let next = self.runs.last().map(|run| u64::from(run.first_page + run.pages));
        next == Some(page)
            && self.open.as_ref().is_some_and(|open| {
                open.library == place.library && open.first_page + open.pages == place.page
            })
    }

    fn refer(&mut self, page: u64, from: usize, place: Place, name: PageName, hash: &PageHash) {
        if !self.goes_on(page, place) {
            self.close();
            let Place { library, page: first_page } = place;
            // The record takes the place of a page that was looked at already.
            let record = self.filled;
            self.filled += REFERENCE_BYTES;
            self.runs.push(Run { first_page: page as u16, pages: 0, content: Content::Reference });
            let (names, hash) = (Vec::new(), RunHash::default());
            self.open = Some(OpenReference { record, from, names, library, first_page, pages: 0, hash });
        }
        if let (Some(open), Some(run)) = (&mut self.open, self.runs.last_mut()) {
            open.hash.add(hash);
            open.names.push(name);
            open.pages += 1;
            run.pages += 1;
        }
    }

    /// Writes down what the last run refers to, if it does; one that is too short becomes data again.
    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        let OpenReference { record, from, names, library, first_page, pages, hash } = open;
        let Some(run) = self.runs.last().copied() else { return };
        let first = u64::from(run.first_page);
        if pages < LEAST_REFERRED {
            self.runs.pop();
            self.filled = record;
            self.keep(first..first + pages, from);
            self.names.extend((first..).zip(names));
            return;
        }
        let reference = Reference { library, first_page, hash: hash.finish() };
        self.data[record..record + REFERENCE_BYTES].copy_from_slice(&reference.encode());
        self.presumed.insert(&ChunkPages::from_range(first..first + pages));
    }

    /// Adds a run, or lengthens the last one.
    fn push(&mut self, pages: Range<u64>, content: Content) {
        if pages.is_empty() {
            return;
        }
        self.close();
        let count = (pages.end - pages.start) as u16;
        if let Some(last) = self.runs.last_mut()
            && let Some(content) = together(last.content, content)
            && u64::from(last.first_page + last.pages) == pages.start
        {
            last.pages += count;
            last.content = content;
            return;
        }
        self.runs.push(Run { first_page: pages.start as u16, pages: count, content });
    }
}

/// What two runs hold together, if one run can hold it.
fn together(one: Content, other: Content) -> Option<Content> {
    match (one, other) {
        (Content::Delta { pieces }, Content::Delta { pieces: more }) => {
            Some(Content::Delta { pieces: pieces + more })
        }
        _ => (one == other).then_some(one),
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
