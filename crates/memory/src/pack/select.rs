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
pub struct Worth {
    /// Minimum ratio of uncompressed to compressed length, in percent: the paper's y:1.
    pub least_ratio_percent: u32,
    /// Data sent uncompressed after a smaller ratio, in bytes of each stream: the paper's x MB.
    pub skip_bytes: u64,
}

impl Default for Worth {
    /// The paper skips, because it has no sample to check. With a sample, skipping gains nothing: behind an
    /// incompressible megabyte there may be a compressible one.
    fn default() -> Self {
        Self { least_ratio_percent: 105, skip_bytes: 0 }
    }
}

impl Worth {
    pub(super) fn holds(self, data: usize, packed: usize) -> bool {
        data as u64 * 100 >= packed as u64 * u64::from(self.least_ratio_percent) && packed < data
    }
}

/// Experience of a stream with its data.
#[derive(Debug, Default)]
pub(super) struct Selector {
    /// Data that is still to be sent uncompressed, in bytes.
    skip_bytes: u64,
    /// True if the last compression was not worth it.
    is_wary: bool,
    /// Number of samples since a whole frame was compressed.
    sampled: u32,
}

/// Number of samples after which a whole frame is compressed in any case, because a sample is not everything.
const ALL_AFTER_SAMPLES: u32 = 16;

impl Selector {
    /// Returns true if this data is to be compressed; `measure` returns the compressed length of a sample.
    pub(super) fn wants(&mut self, worth: &Worth, data: &[u8], measure: impl FnOnce(&[u8]) -> usize) -> bool {
        if self.skip_bytes > 0 {
            self.skip_bytes = self.skip_bytes.saturating_sub(data.len() as u64);
            return false;
        }
        if !self.is_wary || self.sampled >= ALL_AFTER_SAMPLES {
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
        self.learn(worth, filled, measure(&sample[..filled]))
    }

    /// Records the result of a compression; returns true if it was worth it.
    pub(super) fn learn(&mut self, worth: &Worth, data: usize, packed: usize) -> bool {
        let is_worth = worth.holds(data, packed);
        self.is_wary = !is_worth;
        if !is_worth {
            self.skip_bytes = worth.skip_bytes;
        }
        is_worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORTH: Worth = Worth { least_ratio_percent: 200, skip_bytes: 100_000 };

    #[test]
    fn behind_what_did_not_compress_nothing_is_tried_for_a_while() {
        let mut selector = Selector::default();
        let data = vec![7; 50_000];
        let unasked = |_: &[u8]| -> usize { panic!("nobody has to look") };
        assert!(selector.wants(&WORTH, &data, unasked));
        assert!(selector.learn(&WORTH, 50_000, 25_000));
        assert!(selector.wants(&WORTH, &data, unasked));
        assert!(!selector.learn(&WORTH, 50_000, 25_001));
        // Exactly the paper's x MB.
        assert!(!selector.wants(&WORTH, &data, unasked));
        assert!(!selector.wants(&WORTH, &data, unasked));
        // Then a sample decides: after a bad one the skipping continues, a good one ends it.
        assert!(!selector.wants(&WORTH, &data, <[u8]>::len));
        assert!(!selector.wants(&WORTH, &data, unasked));
        assert!(!selector.wants(&WORTH, &data, unasked));
        assert!(selector.wants(&WORTH, &data, |sample| sample.len() / 2));
        assert!(selector.wants(&WORTH, &data, unasked));
    }

    #[test]
    fn a_sample_is_of_all_parts() {
        let mut selector = Selector { is_wary: true, ..Selector::default() };
        let data: Vec<u8> = (0..64 * 4096_usize).map(|at| (at / (8 * 4096)) as u8).collect();
        let seen = |sample: &[u8]| {
            assert_eq!(sample, (0..8).flat_map(|part| [part; 512]).collect::<Vec<u8>>());
            1
        };
        assert!(selector.wants(&WORTH, &data, seen));
        for short in [1, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 65_537] {
            selector.is_wary = true;
            assert!(selector.wants(&WORTH, &data[..short], |sample| {
                assert!((1..=short.min(4096)).contains(&sample.len()), "{short}");
                0
            }));
        }
    }

    #[test]
    fn bad_samples_are_not_believed_for_ever() {
        let mut selector = Selector { is_wary: true, ..Selector::default() };
        let worth = Worth { skip_bytes: 0, ..WORTH };
        let looks: Vec<bool> = (0..40).map(|_| selector.wants(&worth, &[7; 5000], <[u8]>::len)).collect();
        let compressed: Vec<_> = (0..40).filter(|look| looks[*look]).collect();
        assert_eq!(compressed, [16, 33]);
    }

    #[test]
    fn what_grows_is_never_worth_it() {
        let any = Worth { least_ratio_percent: 0, skip_bytes: 0 };
        assert!(any.holds(100, 99) && !any.holds(100, 100) && !any.holds(100, 101));
    }
}
