//! Content that the destination has already, found by its hash: such pages are sent as references instead of data.
//!
//! The source keeps for each page of known content a short hash, the beginning of its BLAKE3, and its location: in a
//! template that the destination advertised ([`ContentIndex::learn`]), or in a block of this migration, if the page was
//! sent before ([`ContentIndex::sent`]). A page with the same hash is sent as a [`Reference`]. The destination compares
//! a longer hash before it uses the page, and so detects equal hashes of different pages and pages that are no longer
//! there.
//!
//! Therefore a wrong hash, or a forgotten one, costs bytes and never a page; a page whose reference was refused once is
//! sent.
//!
//! Memory is bounded: twelve bytes for each known page, half as much again kept free. Of the pages sent, no more are
//! kept than room was reserved for, and of memory at most 512 MiB. In addition, six bytes for each page of the chunks
//! that [`ContentIndex::sent_pages_of`] covers.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proto::limits::{CHUNK_BYTES, PAGE_BYTES};
use proto::reference::{ContentSource, HASH_BYTES, Reference};

use crate::content_hash::{ContentHash, FullHash, full_hash};
use crate::lock;
use crate::page_set::{ChunkPages, PageSet};
use crate::ram::RamError;

pub(crate) mod decoder;
mod encoder;
mod sent_pages;
mod table;

use sent_pages::SentPageIndex;
use table::LocationTable;

/// Maximum number of chunks of disks whose sent pages are recorded: 4 GiB, for 6 MiB.
const MAX_RECORDED_CHUNKS: usize = ((4 << 30) / CHUNK_BYTES) as usize;

/// Maximum number of pages of memory that are remembered as targets of references: 512 MiB, for 2.25 MiB.
const MEMORY_PAGES: u64 = (512 << 20) / PAGE_BYTES;

/// Builder of a reference's hash, from those of its pages.
#[derive(Debug, Default)]
pub(crate) struct RunHash(blake3::Hasher);

impl RunHash {
    pub(crate) fn add(&mut self, page: &FullHash) {
        self.0.update(page);
    }

    pub(crate) fn finish(&self) -> [u8; HASH_BYTES] {
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&self.0.finalize().as_bytes()[..HASH_BYTES]);
        hash
    }
}

/// Returns true if the pages have the hash that the reference states.
pub(crate) fn has_expected_hash(reference: &Reference, pages: &[u8]) -> bool {
    let mut hash = RunHash::default();
    pages.chunks_exact(PAGE_BYTES as usize).for_each(|page| hash.add(&full_hash(page)));
    hash.finish() == reference.hash
}

/// Content that the destination has beside the blocks of a migration.
pub trait Templates: Send + Sync {
    /// Reads pages of the template with this number, as advertised to the source. Called from several threads at once.
    ///
    /// # Errors
    /// If there is no such template, or reading it is not allowed; the pages are sent then.
    fn read(&self, template: u16, first_page: u64, into: &mut [u8]) -> Result<(), RamError>;
}

/// Location of a page at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContentLocation {
    pub(crate) content_source: ContentSource,
    pub(crate) page: u64,
}

/// Outcome of references to pages of memory, in bytes of these pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReferenceOutcome {
    /// Pages that the destination had.
    pub taken_bytes: u64,
    /// Pages that the destination lacked; they are sent.
    pub refused_bytes: u64,
    /// Pages that the destination has not answered yet.
    pub awaited_bytes: u64,
    /// Number of lost connections, each with its unanswered references.
    pub interruptions: u64,
}

/// Known content of the destination, shared by all streams and all generations of a migration, until it
/// [ends](ContentIndex::end).
#[derive(Debug)]
pub struct ContentIndex {
    ended: AtomicBool,
    /// The first block that is a disk; blocks of memory precede it.
    first_disk: usize,
    /// Number of pages of memory for which room is reserved.
    memory_pages: usize,
    /// True if pages of memory are looked up, too.
    is_memory_lookup_enabled: AtomicBool,
    /// Pages of memory to which a reference was sent; those whose reference the destination accepted; and those whose
    /// reference it refused.
    referring: AtomicU64,
    taken: AtomicU64,
    declined: AtomicU64,
    interruptions: AtomicU64,
    tables: Mutex<Tables>,
    /// Content of the disks as it was sent.
    sent_pages: Mutex<SentPageIndex>,
    /// Pages to which a reference was refused, for each block.
    refused: Mutex<Vec<PageSet>>,
}

#[derive(Debug)]
struct Tables {
    templates: LocationTable,
    /// Pages of disks that were sent.
    sent: LocationTable,
    /// Pages of memory that were sent, in a table of their own, because they would evict those of disks.
    memory: LocationTable,
}

impl Tables {
    fn empty() -> Self {
        Self { templates: LocationTable::new(0), sent: LocationTable::new(0), memory: LocationTable::new(0) }
    }
}

impl ContentIndex {
    /// Creates an empty index. `block_bytes` are the lengths of the blocks; content of blocks from `first_disk` on is
    /// looked up. Reserves room for `template_capacity` pages of templates and `sent_capacity` pages that were sent.
    pub fn new(
        block_bytes: impl IntoIterator<Item = u64>,
        first_disk: usize,
        template_capacity: usize,
        sent_capacity: usize,
    ) -> Self {
        let templates = LocationTable::new(template_capacity);
        let tables = Tables { templates, sent: LocationTable::new(sent_capacity), ..Tables::empty() };
        let refused: Vec<_> = block_bytes.into_iter().map(PageSet::new).collect();
        let memory_pages = refused.iter().take(first_disk).map(PageSet::pages).sum();
        Self {
            ended: AtomicBool::new(false),
            first_disk,
            memory_pages: MEMORY_PAGES.min(memory_pages) as usize,
            is_memory_lookup_enabled: AtomicBool::new(false),
            referring: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            declined: AtomicU64::new(0),
            interruptions: AtomicU64::new(0),
            tables: Mutex::new(tables),
            sent_pages: Mutex::new(SentPageIndex::new(MAX_RECORDED_CHUNKS)),
            refused: Mutex::new(refused),
        }
    }

    /// Records that a template of the destination has these consecutive pages. If a page has several locations, the
    /// first one recorded counts: templates in use are reported first.
    pub fn learn(&self, template: u16, first_page: u64, hashes: impl IntoIterator<Item = ContentHash>) {
        let mut tables = lock(&self.tables);
        for (page, hash) in (first_page..).zip(hashes) {
            if tables.templates.find(hash).is_none() {
                tables.templates.insert(hash, template, page);
            }
        }
    }

    /// Reserves room for `pages` more pages of templates, beside those known already.
    pub fn make_room(&self, pages: usize) {
        let mut tables = lock(&self.tables);
        if !self.has_ended() {
            let known = tables.templates.places().count();
            let larger = LocationTable::new(known + pages);
            let smaller = std::mem::replace(&mut tables.templates, larger);
            smaller.places().for_each(|(hash, place)| tables.templates.put(hash, place));
        }
    }

    /// Returns true if nothing is looked up any more.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Starts looking up pages of memory as well: many of them were read by the guest from its disks, and some exist
    /// twice. A lookup costs a hash of each page, and the destination a read for each run of them, so that it pays on a
    /// slow link.
    pub fn enable_memory_lookup(&self) {
        let memory = LocationTable::new(self.memory_pages);
        let mut tables = lock(&self.tables);
        if !self.has_ended() && !self.is_memory_lookup_enabled.swap(true, Ordering::AcqRel) {
            tables.memory = memory;
        }
    }

    /// Stops looking up pages of memory, because the destination reads them more slowly than they could be sent.
    pub fn disable_memory_lookup(&self) {
        self.is_memory_lookup_enabled.store(false, Ordering::Release);
        lock(&self.tables).memory = LocationTable::new(0);
    }

    /// Returns true if pages of memory are looked up.
    pub fn is_memory_lookup_enabled(&self) -> bool {
        self.is_memory_lookup_enabled.load(Ordering::Acquire) && !self.has_ended()
    }

    /// Returns the outcome of references to memory.
    pub fn referred(&self) -> ReferenceOutcome {
        let [taken, declined, all] = [&self.taken, &self.declined, &self.referring]
            .map(|pages| pages.load(Ordering::Acquire) * PAGE_BYTES);
        let awaited_bytes = all.saturating_sub(taken + declined);
        let interruptions = self.interruptions.load(Ordering::Acquire);
        ReferenceOutcome { taken_bytes: taken, refused_bytes: declined, awaited_bytes, interruptions }
    }

    /// Records that connections are lost: references sent over them will not be answered. No stream sends during this
    /// call.
    pub(crate) fn interrupt(&self) {
        let answered = self.taken.load(Ordering::Acquire) + self.declined.load(Ordering::Acquire);
        self.referring.store(answered, Ordering::Release);
        self.interruptions.fetch_add(1, Ordering::AcqRel);
    }

    /// Ends references: from the next round on every page is sent. The record of sent pages stays, for
    /// [`Self::sent_pages_of`].
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        *lock(&self.tables) = Tables::empty();
    }

    /// Returns the content of a disk as it was sent, including references: pages by number and hash, in the order of
    /// the numbers. Pages sent after [`Self::end`] are missing.
    pub fn sent_pages_of(&self, block: u16) -> Vec<(u64, ContentHash)> {
        lock(&self.sent_pages).of(block)
    }

    /// Records pages that were passed to a stream. Of disks, the pages sent last are remembered; of memory, those sent
    /// first: eviction page by page would leave no neighbours, and only neighbours are referenced.
    pub(crate) fn sent(&self, block: u16, pages: impl Iterator<Item = (u64, ContentHash)>) {
        let mut tables = lock(&self.tables);
        let Tables { sent, memory, .. } = &mut *tables;
        if usize::from(block) >= self.first_disk {
            pages.for_each(|(page, hash)| sent.insert(hash, block, page));
        } else if memory.inserted() < self.memory_pages {
            pages.for_each(|(page, hash)| memory.insert(hash, block, page));
        }
    }

    /// Counts references to `pages` pages of a block as sent.
    pub(crate) fn count_references_sent(&self, block: u16, pages: u64) {
        self.count(&self.referring, block, pages);
    }

    /// Counts `pages` pages of a block as present at the destination by references.
    pub(crate) fn count_references_accepted(&self, block: u16, pages: u64) {
        self.count(&self.taken, block, pages);
    }

    fn count(&self, what: &AtomicU64, block: u16, pages: u64) {
        if usize::from(block) < self.first_disk {
            what.fetch_add(pages, Ordering::AcqRel);
        }
    }

    /// Records pages of a disk that were passed to a stream, as data or as references.
    pub(crate) fn record_sent(&self, block: u16, pages: impl Iterator<Item = (u64, ContentHash)>) {
        if usize::from(block) < self.first_disk {
            return;
        }
        let mut sent_pages = lock(&self.sent_pages);
        pages.for_each(|(page, hash)| sent_pages.insert(block, page, hash));
    }

    /// Returns the locations at which the destination may have pages with that hash: in a template, or in one of the
    /// migration's blocks.
    pub(crate) fn find(&self, hash: ContentHash) -> impl Iterator<Item = ContentLocation> {
        let tables = lock(&self.tables);
        let place = |content_source: fn(u16) -> ContentSource| {
            move |(which, page)| ContentLocation { content_source: content_source(which), page }
        };
        let template = tables.templates.find(hash).map(place(ContentSource::Template));
        let [sent, memory] =
            [&tables.sent, &tables.memory].map(|table| table.find(hash).map(place(ContentSource::Block)));
        template.into_iter().chain(sent).chain(memory)
    }

    /// Returns the pages of a chunk that may be sent as references; None if references are not searched for.
    pub(crate) fn allowed(&self, block: u16, chunk: u64) -> Option<ChunkPages> {
        let is_looked_up =
            usize::from(block) >= self.first_disk || self.is_memory_lookup_enabled.load(Ordering::Acquire);
        if !is_looked_up || self.has_ended() {
            return None;
        }
        let mut allowed = ChunkPages::ALL;
        allowed.remove(&lock(&self.refused).get(usize::from(block))?.chunk(chunk));
        Some(allowed)
    }

    /// Records refused references: their pages are sent from now on.
    pub(crate) fn refuse(&self, block: u16, chunk: u64, pages: &ChunkPages) {
        self.count(&self.declined, block, pages.count());
        if let Some(refused) = lock(&self.refused).get_mut(usize::from(block)) {
            refused.insert_into_chunk(chunk, pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u64) -> ContentHash {
        ContentHash::of(&number.to_le_bytes())
    }

    #[test]
    fn what_was_learnt_is_found() {
        let known = ContentIndex::new([4 << 20, 4 << 20], 1, 100, 100);
        known.learn(3, 7, [hash(1), hash(2)]);
        known.learn(4, 70, [hash(2)]);
        let sent = |pages: &[(u64, u64)]| {
            let named = || pages.iter().map(|(page, number)| (*page, hash(*number)));
            known.sent(1, named());
            known.record_sent(1, named());
        };
        sent(&[(500, 2), (600, 5)]);
        sent(&[(601, 5)]);
        let all = |number| {
            known.find(hash(number)).map(|place| (place.content_source, place.page)).collect::<Vec<_>>()
        };
        assert_eq!(all(1), [(ContentSource::Template(3), 7)]);
        assert_eq!(all(2), [(ContentSource::Template(3), 8), (ContentSource::Block(1), 500)]);
        assert_eq!(all(5), [(ContentSource::Block(1), 601)]);
        assert_eq!(all(9), []);
        sent(&[(500, 6), (7, 8)]);
        known.record_sent(1, [(8, hash(1))].into_iter());
        known.record_sent(0, [(8, hash(1))].into_iter());
        known.end();
        assert_eq!((all(1), all(5), known.allowed(1, 0)), (Vec::new(), Vec::new(), None));
        let sent = [(7, 8), (8, 1), (500, 6), (600, 5), (601, 5)].map(|(page, number)| (page, hash(number)));
        assert_eq!(known.sent_pages_of(1), sent);
        assert_eq!(known.sent_pages_of(0), []);
    }

    #[test]
    fn room_is_made_while_pages_are_known() {
        let known = ContentIndex::new([4 << 20], 1, 100, 0);
        known.learn(3, 7, (0..100).map(hash));
        known.make_room(2000);
        known.learn(9, 0, (1000..3000).map(hash));
        let found = |number| known.find(hash(number)).next().map(|place| (place.content_source, place.page));
        assert_eq!(
            (found(5), found(2999)),
            (Some((ContentSource::Template(3), 12)), Some((ContentSource::Template(9), 1999)))
        );
        let all = (1000..3000).filter(|number| found(*number).is_some()).count();
        assert!(all >= 1996, "{all}");
        known.end();
        known.make_room(10);
        known.learn(9, 0, [hash(1)]);
        assert!(known.has_ended() && found(1).is_none());
    }

    #[test]
    fn what_was_lost_with_a_connection_is_not_awaited() {
        let known = ContentIndex::new([4 << 20, 4 << 20], 1, 0, 0);
        known.count_references_sent(0, 10);
        known.count_references_accepted(0, 4);
        let referred = |awaited: u64, interruptions| ReferenceOutcome {
            taken_bytes: 4 * PAGE_BYTES,
            refused_bytes: 0,
            awaited_bytes: awaited * PAGE_BYTES,
            interruptions,
        };
        assert_eq!(known.referred(), referred(6, 0));
        known.interrupt();
        known.count_references_sent(0, 3);
        assert_eq!(known.referred(), referred(3, 1));
    }

    #[test]
    fn pages_that_were_refused_are_not_looked_up_again() {
        let known = ContentIndex::new([4 << 20, 4 << 20], 1, 0, 0);
        assert_eq!(known.allowed(0, 0), None);
        assert_eq!(known.allowed(2, 0), None);
        known.refuse(1, 1, &ChunkPages::from_range(3..5));
        assert_eq!(known.allowed(1, 0), Some(ChunkPages::ALL));
        let mut rest = ChunkPages::ALL;
        rest.remove(&ChunkPages::from_range(3..5));
        assert_eq!(known.allowed(1, 1), Some(rest));
    }
}
