//! Page references of memory: whether they pay.
//!
//! On a slow link a reference arrives long before the page would, but then the destination has to read the page, from
//! storage that may be slower than the link, or be reached over the very same link. So the policy watches the rate at
//! which pages pass, both referred and sent. Where this rate is below that of the link alone, and the destination is
//! the bottleneck, all pages are sent from there on.

use serde::{Deserialize, Serialize};

use crate::trace::Decider;

/// Share of the link's rate that has to pass.
const MIN_RATE_SHARE: f64 = 0.8;
/// Consecutive samples below that share before references end. The destination reports its idle time in bursts.
const MAX_SLOW_SAMPLES: u32 = 6;
/// Refused data, in bytes, at which references end if more was refused than accepted: the destination then has other
/// content than was assumed.
const MANY_REFUSED: u64 = 4 << 20;

/// Counters of an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReferenceObservation {
    /// Length of the interval, in nanoseconds.
    pub interval_ns: u64,
    /// Data of the pages that were sent, in bytes before compression.
    pub data_bytes: u64,
    /// Length of the pages that the destination has accepted by reference, in bytes.
    pub referred_bytes: u64,
    /// Length of the referred pages that the destination did not have after all, in bytes.
    pub refused_bytes: u64,
    /// True if the destination has yet to answer references, and nothing else passes.
    pub is_awaited: bool,
    /// Estimated rate of the link, in bytes per second; absent as long as no worker has waited for it.
    pub link_bytes_per_s: Option<u64>,
    /// True if the destination's workers are never idle.
    pub peer_is_busy: bool,
}

/// Policy that watches whether page references pay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReferencePolicy {
    // Learned state. It is not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    slow_samples: u32,
    #[serde(skip)]
    accepted_bytes: u64,
    #[serde(skip)]
    refused_bytes: u64,
}

impl Decider for ReferencePolicy {
    type Observed = ReferenceObservation;
    /// True to continue with references; once they do not pay, it stays false.
    type Decision = bool;

    const MAX_ENTRIES: usize = 600;

    fn decide(&mut self, passed: &ReferenceObservation) -> bool {
        self.accepted_bytes += passed.referred_bytes;
        self.refused_bytes += passed.refused_bytes;
        if self.refused_bytes >= MANY_REFUSED && self.refused_bytes > self.accepted_bytes {
            self.slow_samples = MAX_SLOW_SAMPLES;
        }
        if self.slow_samples < MAX_SLOW_SAMPLES {
            let passed_bytes = (passed.data_bytes + passed.referred_bytes) as f64;
            let sent_bytes_per_s = passed.link_bytes_per_s.unwrap_or(0) as f64;
            let sent_bytes = sent_bytes_per_s * passed.interval_ns as f64 / 1e9;
            let is_by_references = passed.is_awaited || (passed.peer_is_busy && passed.referred_bytes > 0);
            let is_slow = is_by_references && passed_bytes < sent_bytes * MIN_RATE_SHARE;
            self.slow_samples = if is_slow { self.slow_samples + 1 } else { 0 };
        }
        self.slow_samples < MAX_SLOW_SAMPLES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sample of 50 ms on a link of 118 MB/s.
    const SAMPLE: ReferenceObservation = ReferenceObservation {
        interval_ns: 50_000_000,
        data_bytes: 0,
        referred_bytes: 3_000_000,
        refused_bytes: 0,
        is_awaited: false,
        link_bytes_per_s: Some(118_000_000),
        peer_is_busy: true,
    };

    fn samples(referring: &mut ReferencePolicy, passed: &ReferenceObservation, samples: u32) -> Vec<bool> {
        (0..samples).map(|_| referring.decide(passed)).collect()
    }

    #[test]
    fn what_is_read_slower_than_it_could_be_sent_is_sent() {
        let mut referring = ReferencePolicy::default();
        assert_eq!(
            samples(&mut referring, &SAMPLE, MAX_SLOW_SAMPLES + 1)[MAX_SLOW_SAMPLES as usize - 2..],
            [true, false, false]
        );
        // For good: the rate may only look well because no references are sent any more.
        assert!(!referring.decide(&ReferenceObservation {
            data_bytes: 9_000_000,
            referred_bytes: 0,
            ..SAMPLE
        }));
    }

    #[test]
    fn a_destination_that_says_nothing_is_not_referred_to() {
        let mut referring = ReferencePolicy::default();
        let silent =
            ReferenceObservation { referred_bytes: 0, is_awaited: true, peer_is_busy: false, ..SAMPLE };
        assert!(!samples(&mut referring, &silent, MAX_SLOW_SAMPLES)[MAX_SLOW_SAMPLES as usize - 1]);
    }

    #[test]
    fn a_destination_that_has_other_things_is_not_referred_to() {
        let refused = ReferenceObservation {
            referred_bytes: 1 << 20,
            refused_bytes: 2 << 20,
            peer_is_busy: false,
            ..SAMPLE
        };
        assert_eq!(samples(&mut ReferencePolicy::default(), &refused, 3), [true, false, false]);
        let few = ReferenceObservation { referred_bytes: 3 << 20, ..refused };
        assert_eq!(samples(&mut ReferencePolicy::default(), &few, 9), [true; 9]);
    }

    #[test]
    fn what_passes_quicker_or_is_held_up_elsewhere_is_referred_to() {
        let well = [
            ReferenceObservation { referred_bytes: 5_000_000, ..SAMPLE },
            ReferenceObservation { data_bytes: 2_000_000, ..SAMPLE },
            // The source or the link is the bottleneck.
            ReferenceObservation { peer_is_busy: false, ..SAMPLE },
            ReferenceObservation { link_bytes_per_s: None, ..SAMPLE },
            // It is busy for another reason than references.
            ReferenceObservation { data_bytes: 3_000_000, referred_bytes: 0, ..SAMPLE },
        ];
        for passed in well {
            let mut referring = ReferencePolicy::default();
            assert_eq!(
                samples(&mut referring, &SAMPLE, MAX_SLOW_SAMPLES - 1),
                [true; MAX_SLOW_SAMPLES as usize - 1]
            );
            assert_eq!(samples(&mut referring, &passed, 1), [true], "{passed:?}");
            assert_eq!(
                samples(&mut referring, &SAMPLE, MAX_SLOW_SAMPLES - 1),
                [true; MAX_SLOW_SAMPLES as usize - 1]
            );
        }
    }
}
