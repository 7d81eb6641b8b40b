//! What need not be sent, because the destination has it.
//!
//! A run of pages with [`Content::Reference`](crate::pages::Content) carries a record in the place of its contents:
//! where the destination is to look, and what it has to find there.
//!
//! ```text
//! of u16 (1 template, 2 block) | which u16 | zero u32 | first page u64 | hash 16 bytes
//! ```
//!
//! The hash is the beginning of the BLAKE3 of the BLAKE3s (32 bytes each) of the pages, one after the other. The
//! destination reads, compares, and only then uses the pages. Where they are not what they should be (a template was
//! changed, a page was sent anew meanwhile) it says so before it acknowledges the frame, and they are owed again:
//!
//! ```text
//! Missing: seq u64 | pages of the frame's chunk, a bit each, 64 bytes
//! ```

use crate::limits::CHUNK_PAGES;
use crate::pages::{BadPages, Cursor};

/// Bytes of a reference in a frame.
pub const REFERENCE_BYTES: usize = 32;
/// Payload of a `Missing` frame, in bytes.
pub const MISSING_BYTES: usize = 8 + CHUNK_WORDS * 8;
/// Words of 64 bits that have a bit for each page of a chunk.
pub const CHUNK_WORDS: usize = CHUNK_PAGES as usize / 64;
/// Bytes of the hash in a reference.
pub const HASH_BYTES: usize = 16;

/// Where a destination keeps what it is referred to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// A template that it told of, by its place in that list, or an image that both hosts have.
    Template(u16),
    /// A block of this migration, as far as it has come.
    Block(u16),
}

/// Pages that the destination has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Where.
    pub library: Library,
    /// The first page there.
    pub first_page: u64,
    /// What they are.
    pub hash: [u8; HASH_BYTES],
}

impl Reference {
    /// The record.
    pub fn encode(&self) -> [u8; REFERENCE_BYTES] {
        let (of, which) = match self.library {
            Library::Template(which) => (1_u16, which),
            Library::Block(which) => (2, which),
        };
        let mut record = [0; REFERENCE_BYTES];
        record[..2].copy_from_slice(&of.to_le_bytes());
        record[2..4].copy_from_slice(&which.to_le_bytes());
        record[8..16].copy_from_slice(&self.first_page.to_le_bytes());
        record[16..].copy_from_slice(&self.hash);
        record
    }

    /// Reads a record.
    pub fn decode(record: &[u8]) -> Result<Self, BadPages> {
        let mut at = Cursor(record);
        let (of, which) = (u16::from_le_bytes(at.take()?), u16::from_le_bytes(at.take()?));
        let library = match (of, at.take()?) {
            (1, [0, 0, 0, 0]) => Library::Template(which),
            (2, [0, 0, 0, 0]) => Library::Block(which),
            _ => return Err(BadPages::Reference),
        };
        let reference = Self { library, first_page: u64::from_le_bytes(at.take()?), hash: at.take()? };
        at.finish().map(|()| reference)
    }
}

/// Bytes of a `Missing` payload: pages of the chunk of frame `seq`.
pub fn encode_missing(seq: u64, pages: &[u64; CHUNK_WORDS]) -> [u8; MISSING_BYTES] {
    let mut bytes = [0; MISSING_BYTES];
    let (head, words) = bytes.split_at_mut(8);
    head.copy_from_slice(&seq.to_le_bytes());
    for (bytes, word) in words.chunks_exact_mut(8).zip(pages) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Sequence number and pages of a `Missing` payload.
pub fn decode_missing(payload: &[u8]) -> Result<(u64, [u64; CHUNK_WORDS]), BadPages> {
    let mut at = Cursor(payload);
    let seq = u64::from_le_bytes(at.take()?);
    let mut pages = [0; CHUNK_WORDS];
    for word in &mut pages {
        *word = u64::from_le_bytes(at.take()?);
    }
    at.finish().map(|()| (seq, pages))
}
