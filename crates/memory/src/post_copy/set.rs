//! Encoding of sets of pages for messages.

use proto::limits::CHUNK_PAGES;
use proto::missing_pages::{BadMissingPages, MissingChunk};

use crate::page_set::{ChunkPages, PageSet};

/// Error of decoding a set of pages of these blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPageSet {
    /// The bytes are no valid entries.
    #[error(transparent)]
    Entries(#[from] BadMissingPages),
    /// Chunks that do not ascend.
    #[error("chunk {chunk} of block {block} is not in ascending order, or listed twice")]
    Order {
        /// Index of the block.
        block: u16,
        /// The chunk.
        chunk: u64,
    },
    /// A block, a chunk or a page that does not exist.
    #[error("chunk {chunk} of block {block} is incomplete")]
    Outside {
        /// Index of the block.
        block: u16,
        /// The chunk.
        chunk: u64,
    },
}

/// Encodes all chunks that have pages in the sets.
pub fn encode_set(blocks: &[PageSet]) -> Vec<u8> {
    let of_block = |(block, pages): (u16, &PageSet)| -> Vec<u8> {
        let entry = |chunk| MissingChunk { block, chunk, pages: *pages.chunk(chunk).words() }.encode();
        pages.nonempty_chunks().flat_map(entry).collect()
    };
    (0_u16..).zip(blocks).flat_map(of_block).collect()
}

/// Decodes the pages of blocks of these lengths, in bytes.
///
/// # Errors
/// If the bytes name pages that do not exist.
pub fn decode_set(bytes: &[u8], lengths: impl IntoIterator<Item = u64>) -> Result<Vec<PageSet>, BadPageSet> {
    let mut blocks: Vec<_> = lengths.into_iter().map(PageSet::new).collect();
    for (block, chunk, pages) in decode_chunks(bytes, &blocks)? {
        blocks[block].insert_into_chunk(chunk, &pages);
    }
    Ok(blocks)
}

/// Decodes the pages chunk by chunk, in order: block, chunk, and its pages. For a few pages of large blocks.
///
/// # Errors
/// If the bytes name pages that these blocks do not have.
pub fn decode_chunks(bytes: &[u8], blocks: &[PageSet]) -> Result<Vec<(usize, u64, ChunkPages)>, BadPageSet> {
    let mut last = None;
    let checked = |MissingChunk { block, chunk, pages }| {
        if last.replace((block, chunk)).is_some_and(|last| last >= (block, chunk)) {
            return Err(BadPageSet::Order { block, chunk });
        }
        let outside = BadPageSet::Outside { block, chunk };
        let set = blocks.get(usize::from(block)).filter(|set| chunk < set.chunks()).ok_or(outside)?;
        let pages = ChunkPages::from_words(pages);
        let all = ChunkPages::from_range(0..set.pages() - chunk * CHUNK_PAGES);
        if pages.is_within(&all) { Ok((usize::from(block), chunk, pages)) } else { Err(outside) }
    };
    MissingChunk::decode_all(bytes)?.into_iter().map(checked).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_comes_through_and_nothing_beyond_the_blocks() {
        let mut blocks = vec![PageSet::new(0), PageSet::new(3 << 20), PageSet::new(8 << 20)];
        blocks[1].set(511..768);
        blocks[2].set(5..6);
        blocks[2].set(1024..1536);
        let bytes = encode_set(&blocks);
        let decoded = |lengths: &[u64]| decode_set(&bytes, lengths.iter().copied());
        assert_eq!(decoded(&[0, 3 << 20, 8 << 20]).unwrap(), blocks);
        let outside = |block, chunk| Err(BadPageSet::Outside { block, chunk });
        assert_eq!(decoded(&[0, (3 << 20) - 4096, 8 << 20]), outside(1, 1));
        assert_eq!(decoded(&[0, 3 << 20, 4 << 20]), outside(2, 2));
        assert_eq!(decoded(&[0, 3 << 20]), outside(2, 0));
        assert!(matches!(decode_set(&bytes[1..], [1 << 30]), Err(BadPageSet::Entries(_))));
        let twice = [&bytes[..], &bytes[..]].concat();
        let decoded_twice = decode_set(&twice, [0, 3 << 20, 8 << 20]);
        assert_eq!(decoded_twice, Err(BadPageSet::Order { block: 1, chunk: 0 }));
    }
}
