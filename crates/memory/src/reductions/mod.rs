//! Reductions: ways to send fewer bytes, one folder each.
//!
//! | folder | reduction | encoder | decoder |
//! |---|---|---|---|
//! | [`hints`] | pages that the guest does not use are sent as holes | of pages | none: a hole is a hole |
//! | [`references`] | content that the destination has already is referred to | of pages | of runs |
//! | [`deltas`] | of pages that are sent again, only the changed pieces are sent | of pages | of runs |
//! | [`compression`] | the data of frames is compressed | of frames | of frames |
//!
//! A [`Reduction`] is shared by all streams and all generations of a migration, and learns what happens to the pages
//! that it has reduced. Each stream has encoders of its own ([`encoding`](crate::chunk::encoding)), and at the
//! destination decoders ([`decoding`]). A migration's reductions are a list ([`Reductions`]): of its encoders the first
//! that can reduce a page does so.

use std::sync::Arc;

use crate::chunk::encoding::Encoder;
use crate::meter::LinkMeter;
use crate::page_set::PageSet;

pub(crate) mod compression;
pub(crate) mod decoders;
pub(crate) mod decoding;
pub(crate) mod deltas;
pub(crate) mod hints;
pub(crate) mod reduction;
pub(crate) mod references;

pub use reduction::{Reduction, ReductionStage};

/// The reductions of a migration, the same for all its generations.
#[derive(Clone, Debug, Default)]
pub struct Reductions {
    list: Vec<Arc<dyn Reduction>>,
    meter: Option<Arc<LinkMeter>>,
}

impl Reductions {
    /// Creates a list: of two reductions that can reduce a page, the first one does. What is sent is counted by
    /// `meter`, if there is one. The destination must have announced that it accepts the reductions.
    pub fn new(list: Vec<Arc<dyn Reduction>>, meter: Option<Arc<LinkMeter>>) -> Self {
        Self { list, meter }
    }

    /// Returns those that encode whole frames, for pages that are sent after the switchover.
    #[must_use]
    pub fn of_frames(&self) -> Self {
        let is_of_frames = |one: &&Arc<dyn Reduction>| matches!(Arc::clone(one).encoder(), Encoder::Frame(_));
        Self { list: self.iter().filter(is_of_frames).map(Arc::clone).collect(), meter: self.meter.clone() }
    }

    /// Returns the meter of what is sent.
    pub(crate) fn meter(&self) -> Option<&LinkMeter> {
        self.meter.as_deref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Reduction>> {
        self.list.iter()
    }

    /// See [`Reduction::awaited`].
    pub fn awaited(&self, owed: &[PageSet], round: u32) {
        self.iter().for_each(|one| one.awaited(owed, round));
    }

    /// See [`Reduction::discarded`].
    pub fn discarded(&self, pages: &[PageSet]) {
        self.iter().for_each(|one| one.discarded(pages));
    }

    /// See [`Reduction::written`].
    pub(crate) fn written(&self, block: usize, found: &PageSet) {
        self.iter().for_each(|one| one.written(block, found));
    }

    /// Returns how many of these pages will certainly be sent in full.
    pub fn full_pages(&self, owed: &[PageSet]) -> u64 {
        let all = owed.iter().map(PageSet::count).sum();
        self.iter().map(|one| one.full_pages(owed)).fold(all, u64::min)
    }

    /// See [`Reduction::end`].
    pub fn end(&self, stage: ReductionStage) {
        self.iter().for_each(|one| one.end(stage));
    }
}
