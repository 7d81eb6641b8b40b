//! Compression at the beginning of a migration, when the link's capacity is still unknown.
//!
//! Measuring the capacity needs some samples, and until then a slow link's buffers would be full of uncompressed pages.
//! A worker knows at once whether its last frame has left this host when the next one is built. If it has, the link is
//! as fast as the worker, and little is spent on compression; if not, the link is the bottleneck.
//!
//! A link may accept the first megabyte at once, from a token bucket or into its queues, and be slow after that, and a
//! worker may have been late. So the link counts as fast only after some more data, and a link that was behind has to
//! carry more data first.

use proto::packed::Compression;

/// Minimum of data that is compressed in any case, in bytes; and minimum after the last frame that saw the link behind.
const LEAST_BYTES: u64 = 4 << 20;
const AFTERWARDS_BYTES: u64 = 1 << 20;
/// Unsent bytes below which the link counts as keeping up.
const LITTLE: u64 = 64 << 10;
/// Compression while the link keeps up, and while it does not.
const QUICK: Compression = Compression::Lz4;
const SLOW: Compression = Compression::Zstd(1);

/// State of the opening, for all streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InitialCompression {
    /// Data to be sent before the opening may end, in bytes.
    left_bytes: u64,
}

impl Default for InitialCompression {
    fn default() -> Self {
        Self { left_bytes: LEAST_BYTES }
    }
}

impl InitialCompression {
    /// Returns the compression of the next frame, from the length of its data and the unsent bytes of earlier frames on
    /// its stream; None when the opening is over, because the link keeps up.
    pub(super) fn next(&mut self, data_bytes: u64, unsent_bytes: u64) -> Option<Compression> {
        if unsent_bytes >= LITTLE {
            self.left_bytes = self.left_bytes.max(AFTERWARDS_BYTES);
            return Some(SLOW);
        }
        let goes_on = self.left_bytes > 0;
        self.left_bytes = self.left_bytes.saturating_sub(data_bytes);
        goes_on.then_some(QUICK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: u64 = 256 << 10;

    #[test]
    fn fast_link_gets_a_few_lz4_frames_and_then_none() {
        let mut opening = InitialCompression::default();
        let ways: Vec<_> = (0..20).map_while(|_| opening.next(FRAME, 0)).collect();
        assert_eq!(ways, vec![QUICK; 16]);
    }

    #[test]
    fn a_link_that_is_behind_gets_less_as_long_as_it_is() {
        let mut opening = InitialCompression::default();
        assert_eq!(opening.next(FRAME, LITTLE - 1), Some(QUICK));
        assert!((0..100).all(|_| opening.next(FRAME, FRAME) == Some(SLOW)));
        let ways: Vec<_> = (0..20).map_while(|_| opening.next(FRAME, 0)).collect();
        assert_eq!(ways, vec![QUICK; 15], "what did not see it behind counts");
    }

    #[test]
    fn one_frame_that_was_late_ends_nothing() {
        let mut opening = InitialCompression::default();
        while opening.left_bytes > 0 {
            opening.next(FRAME, 0);
        }
        for unsent_bytes in [FRAME, 0, 0, 0, FRAME, 0, 0, 0] {
            assert!(opening.next(FRAME, unsent_bytes).is_some());
        }
        assert_eq!((opening.next(FRAME, 0), opening.next(FRAME, 0)), (Some(QUICK), None));
    }
}
