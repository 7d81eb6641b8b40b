//! Deltas: the changes of a page of which the destination holds an earlier version.
//!
//! A run of pages with [`Content::Delta`](crate::pages::Content) carries the following for each of its pages, in place
//! of the page's contents:
//!
//! ```text
//! hash u64 | changed u64 | the 64 bytes of each piece that changed ...
//! ```
//!
//! A page is 64 pieces of 64 bytes, one cache line each; bit *n* of *changed* is set if piece *n* has changed. The
//! destination writes the pieces into the version that it holds. *hash* is XXH3 (64 bits) of the resulting page, with
//! the seed of the proposal, which no guest knows.
//!
//! A different hash means that the destination held something else than the source believed: it then leaves the page
//! as it was and reports it as missing, as it does for a page that was [referred to](crate::reference). The run states
//! how many pieces it has in all, so that its length is known before any of it is read. Disks have no deltas.

use crate::decode::BadPages;
use crate::limits::PAGE_BYTES;

/// Bytes of a piece.
pub const PIECE_BYTES: usize = 64;
/// Pieces of a page.
pub const PIECES: usize = PAGE_BYTES as usize / PIECE_BYTES;
/// Bytes before the pieces of a page.
pub const HEAD_BYTES: usize = 16;
/// Highest number of changed pieces of a delta; a page with more changed pieces is sent as it is.
pub const MAX_PIECES: u32 = PIECES as u32 - 1;

/// Changes of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta<'a> {
    /// Hash of the page after the changes.
    pub hash: u64,
    /// One bit for each piece, set if it has changed.
    pub changed: u64,
    /// Bytes of the changed pieces, one after the other.
    pub pieces: &'a [u8],
}

impl<'a> Delta<'a> {
    /// Appends the delta of a page: its hash, the bits of the changed pieces, and their bytes.
    ///
    /// # Panics
    /// If `page` is shorter than a page.
    pub fn encode(page: &[u8], hash: u64, changed: u64, out: &mut Vec<u8>) {
        out.extend_from_slice(&hash.to_le_bytes());
        out.extend_from_slice(&changed.to_le_bytes());
        for piece in places(changed) {
            out.extend_from_slice(&page[piece..piece + PIECE_BYTES]);
        }
    }

    /// Reads the delta of a page from the front of `rest`, the unread data of a run, and advances `rest` past it.
    ///
    /// # Errors
    /// Fails if the delta is longer than `rest`, or has more than [`MAX_PIECES`] pieces.
    pub fn take(rest: &mut &'a [u8]) -> Result<Self, BadPages> {
        let (head, behind) = rest.split_first_chunk::<HEAD_BYTES>().ok_or(BadPages::Delta)?;
        let [hash, changed] = [0, 8].map(|at| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(bytes)
        });
        if changed.count_ones() > MAX_PIECES {
            return Err(BadPages::Delta);
        }
        let pieces = behind.split_at_checked(changed.count_ones() as usize * PIECE_BYTES);
        let (pieces, behind) = pieces.ok_or(BadPages::Delta)?;
        *rest = behind;
        Ok(Self { hash, changed, pieces })
    }

    /// Writes the changed pieces into a page. The caller compares the hash of the result.
    ///
    /// # Panics
    /// If `page` is shorter than a page.
    pub fn apply_to(&self, page: &mut [u8]) {
        for (place, piece) in places(self.changed).zip(self.pieces.chunks_exact(PIECE_BYTES)) {
            page[place..place + PIECE_BYTES].copy_from_slice(piece);
        }
    }
}

/// Returns the offsets in the page, in bytes, of the pieces in a set.
fn places(changed: u64) -> impl Iterator<Item = usize> {
    let mut left = changed;
    std::iter::from_fn(move || {
        let piece = (left != 0).then(|| left.trailing_zeros() as usize)?;
        left &= left - 1;
        Some(piece * PIECE_BYTES)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(of: u8) -> Vec<u8> {
        (0..PAGE_BYTES).map(|at| (at as u8).wrapping_mul(of)).collect()
    }

    #[test]
    fn what_changed_makes_the_new_page_of_the_old_one() {
        let (old, new) = (page(3), page(3).iter().map(|byte| byte ^ 0xff).collect::<Vec<_>>());
        for changed in [0, 1, 1 << 63, 0x8000_0000_0000_0001, 0xaaaa_5555_aaaa_5555, u64::MAX >> 1] {
            let mut now = old.clone();
            places(changed)
                .for_each(|at| now[at..at + PIECE_BYTES].copy_from_slice(&new[at..at + PIECE_BYTES]));
            let mut encoded = Vec::new();
            Delta::encode(&now, 77, changed, &mut encoded);
            assert_eq!(encoded.len(), HEAD_BYTES + changed.count_ones() as usize * PIECE_BYTES);
            encoded.extend_from_slice(b"behind");
            let mut rest = &encoded[..];
            let delta = Delta::take(&mut rest).unwrap();
            assert_eq!((rest, delta.hash, delta.changed), (&b"behind"[..], 77, changed));
            let mut there = old.clone();
            delta.apply_to(&mut there);
            assert_eq!(there, now);
        }
    }

    #[test]
    fn what_is_no_delta_is_not_read() {
        let mut encoded = Vec::new();
        Delta::encode(&page(5), 1, 0b101, &mut encoded);
        for length in 0..encoded.len() {
            let mut rest = &encoded[..length];
            assert_eq!(Delta::take(&mut rest), Err(BadPages::Delta));
            assert_eq!(rest.len(), length);
        }
        // A delta of all pieces.
        let mut whole = vec![0xff; HEAD_BYTES + PAGE_BYTES as usize];
        assert_eq!(Delta::take(&mut &whole[..]), Err(BadPages::Delta));
        whole[15] = 0x7f;
        assert!(Delta::take(&mut &whole[..]).is_ok());
    }
}
