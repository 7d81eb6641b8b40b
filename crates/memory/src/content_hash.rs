//! Short hashes by which the content of pages is found.

/// Bytes of a [`ContentHash`].
pub const CONTENT_HASH_BYTES: usize = 6;

/// The BLAKE3 of a page.
pub(crate) type FullHash = [u8; 32];

/// The beginning of a page's BLAKE3: enough to identify the page among some millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentHash(pub [u8; CONTENT_HASH_BYTES]);

impl ContentHash {
    /// Returns the hash of a page's bytes.
    pub fn of(page: &[u8]) -> Self {
        Self::from_full(&full_hash(page))
    }

    pub(crate) fn from_full(full: &FullHash) -> Self {
        let mut hash = [0; CONTENT_HASH_BYTES];
        hash.copy_from_slice(&full[..CONTENT_HASH_BYTES]);
        Self(hash)
    }

    /// Returns the hash as a number, for sorted tables.
    pub(crate) fn number(self) -> u64 {
        let mut bytes = [0; 8];
        bytes[..CONTENT_HASH_BYTES].copy_from_slice(&self.0);
        u64::from_le_bytes(bytes)
    }
}

pub(crate) fn full_hash(page: &[u8]) -> FullHash {
    *blake3::hash(page).as_bytes()
}
