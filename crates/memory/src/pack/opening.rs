//! How compression begins, when nobody knows yet what the link carries.
//!
//! To find that out takes some looks, and until then a slow link's buffers would be full of pages as they are. What a
//! worker sees at once is whether its last frame has left this host when the next one is put together. If it has, the link
//! is as quick as the worker, and little is spent on compressing; if not, it is the link that is waited for. A link may
//! take the first megabyte at once, from a bucket of tokens or into its queues, and be slow after that: so it is not
//! believed before some more has gone.

use proto::packed::Compression;

/// Data that goes compressed whatever is seen, in bytes.
const LEAST_BYTES: u64 = 4 << 20;
/// Less is on its way, in bytes.
const LITTLE: u64 = 64 << 10;
/// As long as the link follows; and where it does not.
const QUICK: Compression = Compression::Lz4;
const SLOW: Compression = Compression::Zstd(1);

/// The first frames of all streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Opening {
    data_bytes: u64,
}

impl Opening {
    /// The way of the next frame, of so much data, when so much of those before it on its stream is unsent; none when the
    /// opening is over, because the link follows.
    pub(super) fn next(&mut self, data_bytes: u64, unsent_bytes: u64) -> Option<Compression> {
        let is_behind = unsent_bytes >= LITTLE;
        if self.data_bytes >= LEAST_BYTES && !is_behind {
            return None;
        }
        self.data_bytes += data_bytes;
        Some(if is_behind { SLOW } else { QUICK })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: u64 = 256 << 10;

    #[test]
    fn a_link_that_follows_gets_some_frames_compressed_quickly_and_then_none() {
        let mut opening = Opening::default();
        let ways: Vec<_> = (0..20).map_while(|_| opening.next(FRAME, 0)).collect();
        assert_eq!(ways, vec![QUICK; 16]);
    }

    #[test]
    fn a_link_that_is_behind_gets_less_as_long_as_it_is() {
        let mut opening = Opening::default();
        assert_eq!(opening.next(FRAME, LITTLE - 1), Some(QUICK));
        assert!((0..100).all(|_| opening.next(FRAME, FRAME) == Some(SLOW)));
        assert_eq!(opening.next(FRAME, 0), None);
    }
}
