//! Names of pages by their content.

/// Bytes of a [`PageName`].
pub const NAME_BYTES: usize = 6;

/// The BLAKE3 of a page.
pub(crate) type PageHash = [u8; 32];

/// The beginning of a page's BLAKE3: enough to identify the page among some millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageName(pub [u8; NAME_BYTES]);

impl PageName {
    /// Returns the name of a page's bytes.
    pub fn of(page: &[u8]) -> Self {
        Self::from_hash(&page_hash(page))
    }

    pub(crate) fn from_hash(hash: &PageHash) -> Self {
        let mut name = [0; NAME_BYTES];
        name.copy_from_slice(&hash[..NAME_BYTES]);
        Self(name)
    }

    /// Returns the name as a number, for sorted tables.
    pub(crate) fn number(self) -> u64 {
        let mut bytes = [0; 8];
        bytes[..NAME_BYTES].copy_from_slice(&self.0);
        u64::from_le_bytes(bytes)
    }
}

pub(crate) fn page_hash(page: &[u8]) -> PageHash {
    *blake3::hash(page).as_bytes()
}
