//! Post-copy: which pages are to come while the guest runs, and pages that somebody waits for.
//!
//! After the stop the source names them on the control stream, before the device state: `Awaited`, and in `Blob` frames an
//! entry for each chunk of guest memory that has any:
//!
//! ```text
//! block u16 | chunk u48 | a bit for each page of the chunk, the first page's lowest: 8 × u64
//! ```
//!
//! Before it, while the guest still runs, it may name pages that the destination has as they were before (`TakeAway`, with
//! entries of the same kind): those are taken away then, which takes time for many of them, and named again with the rest.
//!
//! All numbers are little-endian. The pages go over the data streams as in any round. Whoever touches one that is not
//! there waits for it, and so it is asked for on the *page stream*, a data stream of its own whose number is one more than
//! that of the last: `Want` from the destination, and from the source a `Blob` frame for each page:
//!
//! ```text
//! block u16 | page u48 | 4096 bytes, or none for a page of zeros
//! ```
//!
//! What the destination says first on the page stream is what is to come: `Awaited` and its entries. Nothing is sent before:
//! it would be in a place where somebody is to wait, and be taken away. After a cut the streams are opened anew, with the
//! next generation, and it is said again, so that the source has to remember nothing.

use crate::limits::{CHUNK_PAGES, PAGE_BYTES};

/// Words of an entry's bits.
const WORDS: usize = (CHUNK_PAGES / 64) as usize;

/// Bytes that name a block and a chunk or a page of it.
const NAME_BYTES: usize = 8;

/// Length of an entry, in bytes.
pub const ENTRY_BYTES: usize = NAME_BYTES + 8 * WORDS;

/// Length of the blob with a page, in bytes; one of zeros is shorter.
pub const PAGE_BLOB_BYTES: usize = NAME_BYTES + PAGE_BYTES as usize;

/// Pages of a chunk that are to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwaitedChunk {
    /// Index of the RAM block in the proposal.
    pub block: u16,
    /// The chunk in the block.
    pub chunk: u64,
    /// A bit for each page.
    pub pages: [u64; WORDS],
}

/// Bytes that are no entries, or no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAwaited {
    /// Not a whole number of entries.
    #[error("{0} bytes are not whole entries of pages to come")]
    Entries(usize),
    /// Neither a page nor one of zeros.
    #[error("{0} bytes are not one page")]
    Page(usize),
}

/// Block, and a number of 48 bits.
fn encode_name(block: u16, number: u64) -> [u8; NAME_BYTES] {
    (u64::from(block) | number << 16).to_le_bytes()
}

fn decode_name(name: [u8; NAME_BYTES]) -> (u16, u64) {
    let name = u64::from_le_bytes(name);
    (name as u16, name >> 16)
}

impl AwaitedChunk {
    /// As an entry.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        let (name, bits) = entry.split_at_mut(NAME_BYTES);
        name.copy_from_slice(&encode_name(self.block, self.chunk));
        for (bytes, word) in bits.as_chunks_mut::<8>().0.iter_mut().zip(self.pages) {
            *bytes = word.to_le_bytes();
        }
        entry
    }

    /// Of all entries.
    ///
    /// # Errors
    /// If they are not whole. Whether there are such blocks and pages is for the receiver.
    pub fn decode_all(bytes: &[u8]) -> Result<Vec<Self>, BadAwaited> {
        let (entries, []) = bytes.as_chunks::<ENTRY_BYTES>() else {
            return Err(BadAwaited::Entries(bytes.len()));
        };
        let decode = |entry: &[u8; ENTRY_BYTES]| {
            let words = entry.as_chunks::<8>().0;
            let (block, chunk) = decode_name(words[0]);
            let mut pages = [0; WORDS];
            for (page, word) in pages.iter_mut().zip(&words[1..]) {
                *page = u64::from_le_bytes(*word);
            }
            Self { block, chunk, pages }
        };
        Ok(entries.iter().map(decode).collect())
    }
}

/// The blob with a page; without `bytes` it is one of zeros.
pub fn encode_page(block: u16, page: u64, bytes: &[u8]) -> Vec<u8> {
    [&encode_name(block, page), bytes].concat()
}

/// Block, page and bytes of a blob. No bytes are a page of zeros.
///
/// # Errors
/// If it is not one page.
pub fn decode_page(blob: &[u8]) -> Result<(u16, u64, &[u8]), BadAwaited> {
    let (Some((name, bytes)), true) =
        (blob.split_first_chunk::<NAME_BYTES>(), [NAME_BYTES, PAGE_BLOB_BYTES].contains(&blob.len()))
    else {
        return Err(BadAwaited::Page(blob.len()));
    };
    let (block, page) = decode_name(*name);
    Ok((block, page, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let chunk =
            |block, chunk| AwaitedChunk { block, chunk, pages: [1 << 63, 2, 3, 4, 5, 6, 7, u64::MAX] };
        let chunks = [chunk(0, 0), chunk(u16::MAX, (1 << 48) - 1)];
        let bytes: Vec<u8> = chunks.iter().flat_map(AwaitedChunk::encode).collect();
        assert_eq!(AwaitedChunk::decode_all(&bytes).unwrap(), chunks);
        assert_eq!(AwaitedChunk::decode_all(&bytes[1..]), Err(BadAwaited::Entries(143)));
        assert_eq!(AwaitedChunk::decode_all(&[]), Ok(vec![]));

        for bytes in [vec![7; PAGE_BYTES as usize], vec![]] {
            assert_eq!(decode_page(&encode_page(3, 99, &bytes)), Ok((3, 99, &bytes[..])));
        }
        for len in [0, 7, 9, PAGE_BLOB_BYTES - 1, PAGE_BLOB_BYTES + 1] {
            assert_eq!(decode_page(&vec![0; len]), Err(BadAwaited::Page(len)));
        }
    }
}
