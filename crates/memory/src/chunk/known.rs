//! Pages of which the other side has something already: elsewhere, or as they were. Less of them is sent.

use std::ops::Range;

use proto::delta::{Delta, MOST_PIECES};
use proto::pages::{Content, Run};
use proto::reference::{Library, REFERENCE_BYTES, Reference};

use super::{FrameBuilder, PAGE};
use crate::clock::timed;
use crate::deltas::{ChunkMarks, Deltas};
use crate::dirty::ChunkPages;
use crate::references::{Known, PageHash, PageName, Place, RunHash, page_hash};

/// Of one frame in so many it is measured how long looking for what changed takes: to ask for the time costs as much as
/// to look at a page.
const TIMED: u64 = 16;

/// What is known of a chunk's pages, so that less of them is sent.
pub(crate) struct Knowledge<'a> {
    /// The guest does not use these.
    pub(crate) soft: ChunkPages,
    /// The destination may have them elsewhere.
    pub(crate) refer: Option<Refer<'a>>,
    /// It may have an earlier version.
    pub(crate) marks: Option<(&'a Deltas, ChunkMarks)>,
}

/// Pages that the other side may not have, or not as is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Presumed {
    /// Those that are referred to.
    pub(crate) referred: ChunkPages,
    /// Those of which only what changed is sent.
    pub(crate) changed: ChunkPages,
}

impl Presumed {
    pub(crate) const NONE: Self = Self { referred: ChunkPages::EMPTY, changed: ChunkPages::EMPTY };

    /// Takes pages out, if they are all in it; returns those of them of which only what changed was sent.
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
pub(super) struct OpenReference {
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

impl FrameBuilder {
    /// Takes of pages that begin at `from` in the buffer what changed since they were sent last.
    pub(super) fn changes_or_keep(
        &mut self,
        pages: Range<u64>,
        from: usize,
        (deltas, marks): (&Deltas, &mut ChunkMarks),
    ) {
        let is_timed = self.frames.is_multiple_of(TIMED);
        let places = (from..).step_by(PAGE);
        let compare =
            || pages.zip(places).for_each(|(page, from)| self.change_or_keep(page, from, (deltas, marks)));
        if is_timed {
            let ((), took) = timed(compare);
            self.mark_ns += took.cpu_ns * TIMED;
        } else {
            compare();
        }
    }

    /// Takes of a page what changed, if that is known, and not all.
    fn change_or_keep(&mut self, page: u64, from: usize, (deltas, marks): (&Deltas, &mut ChunkMarks)) {
        let bytes = &self.data[from..from + PAGE];
        let changed = marks.renew(page, bytes).filter(|changed| changed.count_ones() <= MOST_PIECES);
        let Some(changed) = changed else { return self.keep(page..page + 1, from) };
        self.delta.clear();
        Delta::encode(bytes, deltas.page_hash(bytes), changed, &mut self.delta);
        self.close();
        let end = self.filled + self.delta.len();
        self.data[self.filled..end].copy_from_slice(&self.delta);
        self.filled = end;
        self.presumed.changed.insert(&ChunkPages::from_range(page..page + 1));
        self.push(page..page + 1, Content::Delta { pieces: changed.count_ones() as u16 });
    }

    /// Refers to the page at `from` in the buffer if the destination has it. Where changes are looked for, too, it is
    /// marked either way.
    pub(super) fn refer_or_keep(
        &mut self,
        page: u64,
        from: usize,
        refer: &Refer<'_>,
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
                    Some(marks) => self.change_or_keep(page, from, marks),
                    None => self.keep(page..page + 1, from),
                }
                self.names.push((page, name));
            }
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
    pub(super) fn close(&mut self) {
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
        self.presumed.referred.insert(&ChunkPages::from_range(first..first + pages));
        self.referred.extend((first..).zip(names));
    }
}
