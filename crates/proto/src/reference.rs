//! Page references: content that need not be sent because the destination already has it.
//!
//! A run of pages with [`Content::Reference`](crate::pages::Content) carries a record in place of its contents: the
//! location of the pages at the destination, and their hash.
//!
//! ```text
//! of u16 (1 template, 2 block) | which u16 | zero u32 | first page u64 | hash 16 bytes
//! ```
//!
//! The hash is the beginning of the BLAKE3 of the BLAKE3s (32 bytes each) of the pages, one after the other. The
//! destination reads the pages, compares the hash, and only then uses them. If the hash differs (a template was
//! changed, or a page was sent anew in the meantime), the destination reports the pages as missing before it
//! acknowledges the frame, and the source sends them again:
//!
//! ```text
//! Missing: seq u64 | pages of the frame's chunk, a bit each, 64 bytes
//! ```

use crate::decode::{BadPages, Cursor};
use crate::limits::CHUNK_PAGES;

/// Length of a reference in a frame, in bytes.
pub const REFERENCE_BYTES: usize = 32;
/// Length of a `Missing` payload, in bytes.
pub const MISSING_BYTES: usize = 8 + CHUNK_WORDS * 8;
/// Number of 64-bit words with a bit for each page of a chunk.
pub const CHUNK_WORDS: usize = CHUNK_PAGES as usize / 64;
/// Length of the hash in a reference, in bytes.
pub const HASH_BYTES: usize = 16;

/// Location of content at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContentSource {
    /// A template, by its position in the list that the destination has advertised, or an image that both hosts have.
    Template(u16),
    /// A block of this migration, as far as it has been transferred.
    Block(u16),
}

/// Reference to pages that the destination already has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The template or block with the pages.
    pub content_source: ContentSource,
    /// First page in the template or block.
    pub first_page: u64,
    /// Hash of the pages.
    pub hash: [u8; HASH_BYTES],
}

impl Reference {
    /// Encodes the record.
    pub fn encode(&self) -> [u8; REFERENCE_BYTES] {
        let (of, which) = match self.content_source {
            ContentSource::Template(which) => (1_u16, which),
            ContentSource::Block(which) => (2, which),
        };
        let mut record = [0; REFERENCE_BYTES];
        record[..2].copy_from_slice(&of.to_le_bytes());
        record[2..4].copy_from_slice(&which.to_le_bytes());
        record[8..16].copy_from_slice(&self.first_page.to_le_bytes());
        record[16..].copy_from_slice(&self.hash);
        record
    }

    /// Decodes a record.
    pub fn decode(record: &[u8]) -> Result<Self, BadPages> {
        let mut at = Cursor(record);
        let (of, which) = (u16::from_le_bytes(at.take()?), u16::from_le_bytes(at.take()?));
        let content_source = match (of, at.take()?) {
            (1, [0, 0, 0, 0]) => ContentSource::Template(which),
            (2, [0, 0, 0, 0]) => ContentSource::Block(which),
            _ => return Err(BadPages::Reference),
        };
        let reference = Self { content_source, first_page: u64::from_le_bytes(at.take()?), hash: at.take()? };
        at.finish().map(|()| reference)
    }
}

/// Encodes the payload of a `Missing` frame: pages of the chunk of frame `seq` whose content could not be
/// reconstructed.
pub fn encode_missing(seq: u64, pages: &[u64; CHUNK_WORDS]) -> [u8; MISSING_BYTES] {
    let mut bytes = [0; MISSING_BYTES];
    let (head, words) = bytes.split_at_mut(8);
    head.copy_from_slice(&seq.to_le_bytes());
    for (bytes, word) in words.chunks_exact_mut(8).zip(pages) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Decodes sequence number and pages of a `Missing` payload.
pub fn decode_missing(payload: &[u8]) -> Result<(u64, [u64; CHUNK_WORDS]), BadPages> {
    let mut at = Cursor(payload);
    let seq = u64::from_le_bytes(at.take()?);
    let mut pages = [0; CHUNK_WORDS];
    for word in &mut pages {
        *word = u64::from_le_bytes(at.take()?);
    }
    at.finish().map(|()| (seq, pages))
}
