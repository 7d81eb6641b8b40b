//! Post-copy: the list of missing pages, which arrive while the guest runs, and requests for single pages.
//!
//! After the stop the source lists the missing pages on the control stream, before the device state: `MissingPages`,
//! and in `Blob` frames an entry for each chunk of guest memory that has missing pages:
//!
//! ```text
//! block u16 | chunk u48 | a bit for each page of the chunk, the first page's lowest: 8 × u64
//! ```
//!
//! Before the stop, while the guest still runs, the source may list pages of which the destination has an outdated
//! version (`Discard`, with entries of the same kind). The destination discards them at once, because discarding many
//! pages takes time; the list after the stop contains them again.
//!
//! All numbers are little-endian. The pages travel over the data streams as in any round. A thread that touches a
//! missing page blocks until the page is placed. So the destination requests that page on the *page stream*, a data
//! stream of its own whose number is one more than that of the last data stream: the destination sends `RequestPages`,
//! and the source answers with a `Blob` frame for each page:
//!
//! ```text
//! block u16 | page u48 | 4096 bytes, or none for a page of zeros
//! ```
//!
//! The first message of the destination on the page stream is the list of missing pages: `MissingPages` and its
//! entries. The source sends no page before this list arrives, because a page that is placed before is discarded again
//! when the destination prepares to wait for its faults. After a cut the streams are opened anew, with the next
//! generation, and the destination sends the list again, so the source has to remember nothing.
//!
//! When all pages are present, the destination sends `PagesComplete` on the page stream and closes the page stream and
//! the data streams. So the source knows that the end of these streams is no loss. The migration is over when `Running`
//! arrives on the control stream.

use crate::limits::{CHUNK_PAGES, PAGE_BYTES};

/// Number of 64-bit words in the page bits of an entry.
const WORDS: usize = (CHUNK_PAGES / 64) as usize;

/// Bytes of the field that identifies a block and one of its chunks or pages.
const NAME_BYTES: usize = 8;

/// Length of an entry, in bytes.
pub const ENTRY_BYTES: usize = NAME_BYTES + 8 * WORDS;

/// Length of a blob with a page, in bytes; the blob of a zero page is shorter.
pub const PAGE_BLOB_BYTES: usize = NAME_BYTES + PAGE_BYTES as usize;

/// Missing pages of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingChunk {
    /// Index of the RAM block in the proposal.
    pub block: u16,
    /// Number of the chunk in the block.
    pub chunk: u64,
    /// One bit for each page of the chunk, set if the page is missing.
    pub pages: [u64; WORDS],
}

/// Error of the bytes of a list of missing pages or of a page blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMissingPages {
    /// The length is not a multiple of an entry's length.
    #[error("{0} bytes are not a whole number of entries of missing pages")]
    Entries(usize),
    /// The blob is neither a page nor a zero page.
    #[error("{0} bytes are not one page")]
    Page(usize),
}

/// Encodes a block index and a 48-bit number.
fn encode_name(block: u16, number: u64) -> [u8; NAME_BYTES] {
    (u64::from(block) | number << 16).to_le_bytes()
}

fn decode_name(name: [u8; NAME_BYTES]) -> (u16, u64) {
    let name = u64::from_le_bytes(name);
    (name as u16, name >> 16)
}

impl MissingChunk {
    /// Encodes the entry.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        let (name, bits) = entry.split_at_mut(NAME_BYTES);
        name.copy_from_slice(&encode_name(self.block, self.chunk));
        for (bytes, word) in bits.as_chunks_mut::<8>().0.iter_mut().zip(self.pages) {
            *bytes = word.to_le_bytes();
        }
        entry
    }

    /// Decodes all entries of a list.
    ///
    /// # Errors
    /// Fails if the length is not a multiple of an entry's length. The receiver checks that the blocks and pages
    /// exist.
    pub fn decode_all(bytes: &[u8]) -> Result<Vec<Self>, BadMissingPages> {
        let (entries, []) = bytes.as_chunks::<ENTRY_BYTES>() else {
            return Err(BadMissingPages::Entries(bytes.len()));
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

/// Encodes the blob of a page; empty `bytes` make a zero page.
pub fn encode_page(block: u16, page: u64, bytes: &[u8]) -> Vec<u8> {
    [&encode_name(block, page), bytes].concat()
}

/// Returns block, page and bytes of a page blob. Empty bytes stand for a zero page.
///
/// # Errors
/// Fails if the blob has not the length of a page or of a zero page.
pub fn decode_page(blob: &[u8]) -> Result<(u16, u64, &[u8]), BadMissingPages> {
    let (Some((name, bytes)), true) =
        (blob.split_first_chunk::<NAME_BYTES>(), [NAME_BYTES, PAGE_BLOB_BYTES].contains(&blob.len()))
    else {
        return Err(BadMissingPages::Page(blob.len()));
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
            |block, chunk| MissingChunk { block, chunk, pages: [1 << 63, 2, 3, 4, 5, 6, 7, u64::MAX] };
        let chunks = [chunk(0, 0), chunk(u16::MAX, (1 << 48) - 1)];
        let bytes: Vec<u8> = chunks.iter().flat_map(MissingChunk::encode).collect();
        assert_eq!(MissingChunk::decode_all(&bytes).unwrap(), chunks);
        assert_eq!(MissingChunk::decode_all(&bytes[1..]), Err(BadMissingPages::Entries(143)));
        assert_eq!(MissingChunk::decode_all(&[]), Ok(vec![]));

        for bytes in [vec![7; PAGE_BYTES as usize], vec![]] {
            assert_eq!(decode_page(&encode_page(3, 99, &bytes)), Ok((3, 99, &bytes[..])));
        }
        for len in [0, 7, 9, PAGE_BLOB_BYTES - 1, PAGE_BLOB_BYTES + 1] {
            assert_eq!(decode_page(&vec![0; len]), Err(BadMissingPages::Page(len)));
        }
    }
}
