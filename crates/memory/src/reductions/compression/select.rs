//! Selection of data worth compressing: selective compression (Yang, Hong, *VM live migration speedup in Xen*).
//!
//! The compressibility of memory follows, somewhat, the principle of locality: data behind incompressible data is
//! incompressible, too. So after a ratio that was too small, the next `skip_bytes` of the stream are sent uncompressed
//! without a check. After that a sample is checked first, which costs a small part of compressing everything.

/// Sample of a frame: number and length of its pieces, which are spread over the frame.
const SAMPLE_PIECES: usize = 8;
const SAMPLE_PIECE_BYTES: usize = 512;

/// Criteria for compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressionCriteria {
    /// Minimum ratio of uncompressed to compressed length, in percent: the paper's y:1.
    pub least_ratio_percent: u32,
    /// Data sent uncompressed after a smaller ratio, in bytes of each stream: the paper's x MB.
    pub skip_bytes: u64,
}

impl Default for CompressionCriteria {
    /// The paper skips, because it has no sample to check. With a sample, skipping gains nothing: behind an
    /// incompressible megabyte there may be a compressible one.
    fn default() -> Self {
        Self { least_ratio_percent: 105, skip_bytes: 0 }
    }
}

impl CompressionCriteria {
    pub(super) fn is_met(self, data: usize, packed: usize) -> bool {
        data as u64 * 100 >= packed as u64 * u64::from(self.least_ratio_percent) && packed < data
    }
}

/// Experience of a stream with its data.
#[derive(Debug, Default)]
pub(super) struct Selector {
    /// Data that is still to be sent uncompressed, in bytes.
    skip_bytes: u64,
    /// True if the last compression was not worth it.
    is_sampling: bool,
    /// Number of samples since a whole frame was compressed.
    sampled: u32,
}

/// Number of samples after which a whole frame is compressed in any case, because a sample is not everything.
const ALL_AFTER_SAMPLES: u32 = 16;

impl Selector {
    /// Returns true if this data is to be compressed; `measure` returns the compressed length of a sample.
    pub(super) fn is_worth_trying(
        &mut self,
        worth: &CompressionCriteria,
        data: &[u8],
        measure: impl FnOnce(&[u8]) -> usize,
    ) -> bool {
        if self.skip_bytes > 0 {
            self.skip_bytes = self.skip_bytes.saturating_sub(data.len() as u64);
            return false;
        }
        if !self.is_sampling || self.sampled >= ALL_AFTER_SAMPLES {
            self.sampled = 0;
            return true;
        }
        self.sampled += 1;
        let mut sample = [0; SAMPLE_PIECES * SAMPLE_PIECE_BYTES];
        let mut filled = 0;
        let step = data.len().div_ceil(SAMPLE_PIECES).max(SAMPLE_PIECE_BYTES);
        for part in data.chunks(step) {
            let part = &part[..part.len().min(SAMPLE_PIECE_BYTES)];
            sample[filled..filled + part.len()].copy_from_slice(part);
            filled += part.len();
        }
        self.record_result(worth, filled, measure(&sample[..filled]))
    }

    /// Records the result of a compression; returns true if it was worth it.
    pub(super) fn record_result(&mut self, worth: &CompressionCriteria, data: usize, packed: usize) -> bool {
        let is_worth = worth.is_met(data, packed);
        self.is_sampling = !is_worth;
        if !is_worth {
            self.skip_bytes = worth.skip_bytes;
        }
        is_worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORTH: CompressionCriteria = CompressionCriteria { least_ratio_percent: 200, skip_bytes: 100_000 };

    #[test]
    fn behind_what_did_not_compress_nothing_is_tried_for_a_while() {
        let mut selector = Selector::default();
        let data = vec![7; 50_000];
        let unasked = |_: &[u8]| -> usize { panic!("nobody has to look") };
        assert!(selector.is_worth_trying(&WORTH, &data, unasked));
        assert!(selector.record_result(&WORTH, 50_000, 25_000));
        assert!(selector.is_worth_trying(&WORTH, &data, unasked));
        assert!(!selector.record_result(&WORTH, 50_000, 25_001));
        // Exactly the paper's x MB.
        assert!(!selector.is_worth_trying(&WORTH, &data, unasked));
        assert!(!selector.is_worth_trying(&WORTH, &data, unasked));
        // Then a sample decides: after a bad one the skipping continues, a good one ends it.
        assert!(!selector.is_worth_trying(&WORTH, &data, <[u8]>::len));
        assert!(!selector.is_worth_trying(&WORTH, &data, unasked));
        assert!(!selector.is_worth_trying(&WORTH, &data, unasked));
        assert!(selector.is_worth_trying(&WORTH, &data, |sample| sample.len() / 2));
        assert!(selector.is_worth_trying(&WORTH, &data, unasked));
    }

    #[test]
    fn a_sample_is_of_all_parts() {
        let mut selector = Selector { is_sampling: true, ..Selector::default() };
        let data: Vec<u8> = (0..64 * 4096_usize).map(|at| (at / (8 * 4096)) as u8).collect();
        let seen = |sample: &[u8]| {
            assert_eq!(sample, (0..8).flat_map(|part| [part; 512]).collect::<Vec<u8>>());
            1
        };
        assert!(selector.is_worth_trying(&WORTH, &data, seen));
        for short in [1, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 65_537] {
            selector.is_sampling = true;
            assert!(selector.is_worth_trying(&WORTH, &data[..short], |sample| {
                assert!((1..=short.min(4096)).contains(&sample.len()), "{short}");
                0
            }));
        }
    }

    #[test]
    fn bad_samples_are_not_believed_for_ever() {
        let mut selector = Selector { is_sampling: true, ..Selector::default() };
        let worth = CompressionCriteria { skip_bytes: 0, ..WORTH };
        let looks: Vec<bool> =
            (0..40).map(|_| selector.is_worth_trying(&worth, &[7; 5000], <[u8]>::len)).collect();
        let compressed: Vec<_> = (0..40).filter(|look| looks[*look]).collect();
        assert_eq!(compressed, [16, 33]);
    }

    #[test]
    fn what_grows_is_never_worth_it() {
        let any = CompressionCriteria { least_ratio_percent: 0, skip_bytes: 0 };
        assert!(any.is_met(100, 99) && !any.is_met(100, 100) && !any.is_met(100, 101));
    }
}
