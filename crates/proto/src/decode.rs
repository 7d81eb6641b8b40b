//! Decoding of the binary payloads of data frames: what can be wrong with them.

/// Error of a data frame that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPages {
    /// The payload is shorter than its header announces.
    #[error("data frame is truncated")]
    Truncated,
    /// The payload is longer than its header announces.
    #[error("data frame with {0} surplus bytes")]
    Surplus(usize),
    /// The kind of content is unknown in this version.
    #[error("run with unknown content type {0}")]
    Content(u16),
    /// Runs are empty, overlap, are not in ascending order, or exceed the chunk.
    #[error("runs are not in ascending order within their chunk")]
    Runs,
    /// The codec is unknown in this version.
    #[error("pages compressed with unknown codec {0}")]
    Codec(u16),
    /// The compressed data is empty, or not shorter than the data that it replaces.
    #[error("compressed pages of invalid length")]
    Packed,
    /// A delta has too many pieces, or its length differs from that in its run.
    #[error("deltas of pages that do not match their run")]
    Delta,
    /// The kind of reference is unknown in this version.
    #[error("an invalid page reference")]
    Reference,
}

pub(crate) struct Cursor<'a>(pub(crate) &'a [u8]);

impl Cursor<'_> {
    pub(crate) fn take<const N: usize>(&mut self) -> Result<[u8; N], BadPages> {
        let (head, rest) = self.0.split_first_chunk().ok_or(BadPages::Truncated)?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn finish(&self) -> Result<(), BadPages> {
        if self.0.is_empty() { Ok(()) } else { Err(BadPages::Surplus(self.0.len())) }
    }
}
