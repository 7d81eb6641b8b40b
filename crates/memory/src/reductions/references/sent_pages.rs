//! Content of disks as it was sent: for each page, the hash under which its bytes, or a reference to them, were sent
//! last. Stored by chunk, because later references need runs of neighbours, and single pages from all over a large disk
//! would use up the room.

use std::collections::BTreeMap;

use proto::limits::CHUNK_PAGES;

use crate::content_hash::{CONTENT_HASH_BYTES, ContentHash};

/// Hash of a page that was not sent.
const NONE: ContentHash = ContentHash([0; CONTENT_HASH_BYTES]);

/// The hashes of one chunk's pages.
type Hashes = Box<[ContentHash; CHUNK_PAGES as usize]>;

/// Hashes of the sent pages of all disks.
#[derive(Debug)]
pub(crate) struct SentPageIndex {
    /// Keyed by block and the chunk's number in it.
    chunks: BTreeMap<(u16, u64), Hashes>,
    most_chunks: usize,
}

impl SentPageIndex {
    /// Creates an empty index of at most `most_chunks` chunks; later chunks are not recorded.
    pub(crate) fn new(most_chunks: usize) -> Self {
        Self { chunks: BTreeMap::new(), most_chunks }
    }

    /// Records a page of a disk as sent.
    pub(crate) fn insert(&mut self, block: u16, page: u64, hash: ContentHash) {
        let chunk = (block, page / CHUNK_PAGES);
        if self.chunks.len() < self.most_chunks || self.chunks.contains_key(&chunk) {
            let hashes = self.chunks.entry(chunk).or_insert_with(|| Box::new([NONE; CHUNK_PAGES as usize]));
            hashes[(page % CHUNK_PAGES) as usize] = hash;
        }
    }

    /// Returns the recorded pages of a disk: number and hash, in the order of the numbers.
    pub(crate) fn of(&self, block: u16) -> Vec<(u64, ContentHash)> {
        let chunks = self.chunks.range((block, 0)..=(block, u64::MAX));
        let pages =
            chunks.flat_map(|((_, chunk), hashes)| (chunk * CHUNK_PAGES..).zip(hashes.iter().copied()));
        pages.filter(|(_, hash)| *hash != NONE).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u64) -> ContentHash {
        ContentHash::of(&number.to_le_bytes())
    }

    #[test]
    fn latest_name_of_each_page_is_kept_up_to_the_capacity() {
        let mut sent_pages = SentPageIndex::new(3);
        for (block, page, number) in [
            (1, 7, 1),
            (1, CHUNK_PAGES, 2),
            (2, 0, 3),
            (1, 7, 4),
            (1, 3, 5),
            // One chunk more than there is room for.
            (2, CHUNK_PAGES, 6),
            (2, CHUNK_PAGES - 1, 7),
        ] {
            sent_pages.insert(block, page, hash(number));
        }
        assert_eq!(sent_pages.of(1), [(3, hash(5)), (7, hash(4)), (CHUNK_PAGES, hash(2))]);
        assert_eq!(sent_pages.of(2), [(0, hash(3)), (CHUNK_PAGES - 1, hash(7))]);
        assert_eq!(sent_pages.of(3), []);
    }
}
