//! Pages of which the destination has the content, or an earlier version, already. They are sent as references or
//! deltas.

use std::ops::Range;

use proto::delta::{Delta, MAX_PIECES};
use proto::pages::{Content, PageRun};
use proto::reference::{ContentSource, REFERENCE_BYTES, Reference};

use super::{FrameBuilder, PAGE};
use crate::clock::measure;
use crate::dirty::ChunkPages;
use crate::page_name::{PageHash, PageName, page_hash};
use crate::reductions::deltas::{ChunkMarks, Deltas};
use crate::reductions::references::{ContentIndex, ContentLocation, RunHash};

/// Sampling of processor time: deltas of one frame in `TIMED` are measured, because reading the clock costs as much as
/// comparing a page.
const TIMED: u64 = 16;

/// Knowledge about a chunk's pages that reduces the bytes sent.
pub(crate) struct ChunkKnowledge<'a> {
    /// Pages that the guest does not use.
    pub(crate) hinted: ChunkPages,
    /// Lookup of pages that the destination may have elsewhere.
    pub(crate) refer: Option<ReferenceLookup<'a>>,
    /// Marks of pages of which the destination may have an earlier version.
    pub(crate) marks: Option<(&'a Deltas, ChunkMarks)>,
}

/// Pages that are sent on the assumption that the destination has them, or an earlier version, which may prove wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PresumedPages {
    /// Pages sent as references.
    pub(crate) referred: ChunkPages,
    /// Pages sent as deltas.
    pub(crate) changed: ChunkPages,
}

impl PresumedPages {
    pub(crate) const NONE: Self = Self { referred: ChunkPages::EMPTY, changed: ChunkPages::EMPTY };

    /// Removes pages, if all of them are in the set; returns those that were sent as deltas.
    pub(crate) fn take(&mut self, pages: &ChunkPages) -> Option<ChunkPages> {
        let mut all = self.referred;
        all.insert(&self.changed);
        if !pages.is_within(&all) {
            return None;
        }
        let mut changed = *pages;
        changed.remove(&self.referred);
        self.referred.remove(pages);
        self.changed.remove(pages);
        Some(changed)
    }
}

/// Shortest run of pages that is sent as a reference: each reference costs the destination a query to a server and an
/// answer, and over a fast link a few pages arrive sooner.
const MIN_REFERENCE_PAGES: u64 = 4;

/// Lookup of pages of a chunk that the destination may have already.
pub(crate) struct ReferenceLookup<'a> {
    pub(crate) known: &'a ContentIndex,
    /// The block that is sent, and the chunk's first page in it.
    pub(crate) block: u16,
    pub(crate) base_page: u64,
    /// Pages of the chunk that may be looked up.
    pub(crate) allowed: ChunkPages,
    /// Returns true if a page of a block is at the destination as it was sent last, as far as this round knows.
    pub(crate) is_there: &'a dyn Fn(u16, u64) -> bool,
}

/// A reference that may continue with the next page.
#[derive(Debug)]
pub(super) struct OpenReference {
    /// Position of the reference's record in the frame's data.
    record: usize,
    /// Position of the pages in the buffer, and their names, because a reference that is too short becomes data again.
    from: usize,
    names: Vec<PageName>,
    content_source: ContentSource,
    first_page: u64,
    /// Number of pages so far.
    pages: u64,
    hash: RunHash,
}

impl FrameBuilder {
    /// Encodes pages that begin at `from` in the buffer as deltas, or keeps them as data.
    pub(super) fn add_deltas_or_data(
        &mut self,
        pages: Range<u64>,
        from: usize,
        (deltas, marks): (&Deltas, &mut ChunkMarks),
    ) {
        let is_timed = self.frames.is_multiple_of(TIMED);
        let places = (from..).step_by(PAGE);
        let compare =
            || pages.zip(places).for_each(|(page, from)| self.add_delta_or_data(page, from, (deltas, marks)));
        if is_timed {
            let ((), took) = measure(compare);
            self.mark_ns += took.cpu_ns * TIMED;
        } else {
            compare();
        }
    }

    /// Encodes a page as a delta if its changed pieces are known and few enough; otherwise keeps it as data.
    fn add_delta_or_data(&mut self, page: u64, from: usize, (deltas, marks): (&Deltas, &mut ChunkMarks)) {
        let bytes = &self.data[from..from + PAGE];
        let changed = marks.renew(page, bytes).filter(|changed| changed.count_ones() <= MAX_PIECES);
        let Some(changed) = changed else { return self.add_data(page..page + 1, from) };
        self.delta.clear();
        Delta::encode(bytes, deltas.page_hash(bytes), changed, &mut self.delta);
        self.close();
        let end = self.filled + self.delta.len();
        self.data[self.filled..end].copy_from_slice(&self.delta);
        self.filled = end;
        self.presumed.changed.insert(&ChunkPages::from_range(page..page + 1));
        self.push(page..page + 1, Content::Delta { pieces: changed.count_ones() as u16 });
    }

    /// Sends the page at `from` in the buffer as a reference if the destination has it. If deltas are in use, it is
    /// marked either way.
    pub(super) fn add_reference_or_data(
        &mut self,
        page: u64,
        from: usize,
        refer: &ReferenceLookup<'_>,
        marks: Option<(&Deltas, &mut ChunkMarks)>,
    ) {
        let hash = page_hash(&self.data[from..from + PAGE]);
        let name = PageName::from_hash(&hash);
        let place = if refer.allowed.contains(page) { self.look_up(name, page, refer) } else { None };
        match (place, marks) {
            (Some(place), marks) => {
                if let Some((_, marks)) = marks {
                    marks.renew(page, &self.data[from..from + PAGE]);
                }
                self.refer(page, from, place, name, &hash);
            }
            (None, marks) => {
                match marks {
                    Some(marks) => self.add_delta_or_data(page, from, marks),
                    None => self.add_data(page..page + 1, from),
                }
                self.names.push((page, name));
            }
        }
    }

    /// Returns the page's location at the destination, preferably the one that continues the open reference.
    fn look_up(&self, name: PageName, page: u64, refer: &ReferenceLookup<'_>) -> Option<ContentLocation> {
        let is_there = |place: &ContentLocation| match place.content_source {
            ContentSource::Template(_) => true,
            // The page was rewritten with its old content: the destination has it at the place to which it was sent.
            ContentSource::Block(block) if block == refer.block && place.page == refer.base_page + page => {
                true
            }
            ContentSource::Block(block) => (refer.is_there)(block, place.page),
        };
        let mut places = refer.known.find(name).filter(is_there);
        let first = places.next()?;
        if self.can_extend_reference(page, first) {
            Some(first)
        } else {
            places.find(|place| self.can_extend_reference(page, *place)).or(Some(first))
        }
    }

    /// Returns true if the page at this location continues the open reference.
    fn can_extend_reference(&self, page: u64, place: ContentLocation) -> bool {
        let next = self.runs.last().map(|run| u64::from(run.first_page + run.pages));
        next == Some(page)
            && self.open.as_ref().is_some_and(|open| {
                open.content_source == place.content_source && open.first_page + open.pages == place.page
            })
    }

    fn refer(&mut self, page: u64, from: usize, place: ContentLocation, name: PageName, hash: &PageHash) {
        if !self.can_extend_reference(page, place) {
            self.close();
            let ContentLocation { content_source, page: first_page } = place;
            // The record overwrites a page that was checked already.
            let record = self.filled;
            self.filled += REFERENCE_BYTES;
            self.runs.push(PageRun { first_page: page as u16, pages: 0, content: Content::Reference });
            let (names, hash) = (Vec::new(), RunHash::default());
            self.open =
                Some(OpenReference { record, from, names, content_source, first_page, pages: 0, hash });
        }
        if let (Some(open), Some(run)) = (&mut self.open, self.runs.last_mut()) {
            open.hash.add(hash);
            open.names.push(name);
            open.pages += 1;
            run.pages += 1;
        }
    }

    /// Writes the record of the open reference, if there is one; a reference that is too short becomes data again.
    pub(super) fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        let OpenReference { record, from, names, content_source, first_page, pages, hash } = open;
        let Some(run) = self.runs.last().copied() else { return };
        let first = u64::from(run.first_page);
        if pages < MIN_REFERENCE_PAGES {
            self.runs.pop();
            self.filled = record;
            self.add_data(first..first + pages, from);
            self.names.extend((first..).zip(names));
            return;
        }
        let reference = Reference { content_source, first_page, hash: hash.finish() };
        self.data[record..record + REFERENCE_BYTES].copy_from_slice(&reference.encode());
        self.presumed.referred.insert(&ChunkPages::from_range(first..first + pages));
        self.referred.extend((first..).zip(names));
    }
}
