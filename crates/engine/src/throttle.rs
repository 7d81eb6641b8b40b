//! Throttling: limits on the guest, so that copying ends. Writes to copied disks are limited here, writes to memory in
//! [`processors`].
//!
//! Policy is separate from enforcement (Bradford et al. 2007, section 3.2). The policy computes a cap on the guest's
//! writes; the caller has QEMU enforce it, and lifts it at the end.
//!
//! Copying a disk of S bytes at D bytes a second while the guest writes at most f·D sends S + f·S + f²·S + …, which is
//! S / (1 − f). [`Drain`] holds a guest that writes steadily to f = ⅖, which makes one and two thirds of the disk.

pub mod processors;

use serde::{Deserialize, Serialize};

use crate::trace::Decider;

/// Limit on the guest's write rate to a disk; an absent field is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskWriteLimit {
    /// Writes a second.
    pub writes_per_s: Option<u64>,
    /// Bytes a second.
    pub bytes_per_s: Option<u64>,
}

/// Measurements of all copied disks together, since copying began or over the last interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteObservation {
    /// Number of writes of the guest since copying began.
    pub writes: u64,
    /// Recent write rate of the guest, in bytes per second.
    pub written_bytes_per_s: u64,
    /// Recent dirty rate that follows from these writes, in bytes per second: above the write rate where small
    /// scattered parts are written, below it where the same parts are written again.
    pub dirtied_bytes_per_s: u64,
    /// Recent rate at which guest data was sent, in bytes per second; absent until it is known.
    pub sent_bytes_per_s: Option<u64>,
}

/// Policy for the cap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "kebab-case")]
pub enum WriteThrottle {
    /// The weakest cap that the measured drain needs.
    Drain(Drain),
    /// A cap that becomes stricter the more was written.
    Threshold(Threshold),
}

impl Decider for WriteThrottle {
    type Observed = WriteObservation;
    type Decision = DiskWriteLimit;

    const MAX_ENTRIES: usize = 1000;

    fn decide(&mut self, observed: &WriteObservation) -> DiskWriteLimit {
        match self {
            Self::Drain(policy) => policy.decide(observed),
            Self::Threshold(policy) => policy.decide(observed),
        }
    }
}

/// Lowest cap, in writes a second, which the paper does not have: with only a few writes a second a file system gives
/// up its disk.
const MIN_WRITES_PER_S: u64 = 32;

/// The paper's rule: when the guest has reached a number of writes, each further write is delayed; both number and
/// delay double when the guest has reached the new threshold. A delay of each write is a cap on the number of writes
/// in a second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Threshold {
    threshold_writes: u64,
    delay_us: u64,
}

impl Default for Threshold {
    /// The values of the paper.
    fn default() -> Self {
        Self { threshold_writes: 16_384, delay_us: 2_048 }
    }
}

impl Threshold {
    fn decide(&mut self, observed: &WriteObservation) -> DiskWriteLimit {
        let (mut threshold, mut delay_us, mut cap) =
            (self.threshold_writes, self.delay_us, DiskWriteLimit::default());
        while observed.writes >= threshold {
            cap.writes_per_s = Some((1_000_000 / delay_us).max(MIN_WRITES_PER_S));
            (threshold, delay_us) = (threshold.saturating_mul(2), delay_us.saturating_mul(2));
            if threshold == u64::MAX {
                break;
            }
        }
        cap
    }
}

/// The weakest cap that the measured drain needs. A guest whose dirty rate exceeds two fifths of the sending rate is
/// limited to a write rate at which it does not exceed them, as long as its pattern of writes stays the same. When its
/// dirty rate is far lower for a while, the cap is raised step by step, and lifted in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    // Learned state. It is not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    adaptive_cap: AdaptiveCap,
}

/// Lowest cap, in bytes a second: below it, the guest's driver would take the disk for a broken one.
const MIN_BYTES_PER_S: u64 = 1 << 20;
/// A write of one sector dirties eight, because the unit in which writes are recorded is a page. A higher ratio (from
/// a discard, which is no write) is no reason for a stricter cap.
const MAX_DIRTIED_PER_WRITTEN: u64 = 8;

impl Drain {
    fn decide(&mut self, observed: &WriteObservation) -> DiskWriteLimit {
        let Some(sent_per_s) = observed.sent_bytes_per_s else { return self.cap() };
        let share = sent_per_s / 5 * 2;
        let (written, dirtied) = (observed.written_bytes_per_s, observed.dirtied_bytes_per_s);
        let least = (share / MAX_DIRTIED_PER_WRITTEN).max(MIN_BYTES_PER_S);
        // A guest that writes at its cap may have the cap raised; one that does not needs none beyond the sending
        // rate.
        self.adaptive_cap.update(&CapInput { used: written, dirtied, share, least, most: sent_per_s });
        self.cap()
    }

    fn cap(&self) -> DiskWriteLimit {
        DiskWriteLimit { bytes_per_s: self.adaptive_cap.cap, ..DiskWriteLimit::default() }
    }
}

/// Cap on a guest's use of a resource, as long as the guest dirties more than its share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct AdaptiveCap {
    /// Cap on the use, per second.
    cap: Option<u64>,
    /// Consecutive samples in which the guest dirtied far less than its share.
    calm: u32,
}

/// Measurements of a guest, and the limits that apply to it.
struct CapInput {
    /// Recent use of the resource, per second.
    used: u64,
    /// Dirty rate that follows from this use, in bytes per second.
    dirtied: u64,
    /// Dirty rate that the guest may have, in bytes per second.
    share: u64,
    /// Lowest cap.
    least: u64,
    /// Highest cap; a higher one is lifted.
    most: u64,
}

/// Number of calm samples after which a cap is raised.
const CALM_SAMPLES: u32 = 3;

impl AdaptiveCap {
    fn update(&mut self, seen: &CapInput) {
        let &CapInput { used, dirtied, share, least, most } = seen;
        if dirtied > share {
            // Use at which the guest would dirty its share.
            let fitting = u128::from(used) * u128::from(share) / u128::from(dirtied);
            let fitting = u64::try_from(fitting).unwrap_or(u64::MAX).max(least);
            // One sample is not conclusive: a cap falls by at most half from one sample to the next.
            self.cap = Some(self.cap.map_or(fitting, |cap| fitting.clamp(cap / 2, cap).max(least)));
            self.calm = 0;
        } else if dirtied <= share / 2 {
            self.calm += 1;
            if self.calm >= CALM_SAMPLES {
                self.calm = 0;
                self.cap = self.cap.map(|cap| cap.saturating_mul(2)).filter(|cap| *cap <= most);
            }
        } else {
            self.calm = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paper_s_thresholds_and_delays() {
        let mut policy = Threshold::default();
        let mut cap =
            |writes| policy.decide(&WriteObservation { writes, ..WriteObservation::default() }).writes_per_s;
        assert_eq!((cap(0), cap(16_383)), (None, None));
        // 2,048 µs each, then 4,096, then 8,192.
        assert_eq!((cap(16_384), cap(32_767)), (Some(488), Some(488)));
        assert_eq!((cap(32_768), cap(65_536), cap(200_000)), (Some(244), Some(122), Some(61)));
        assert_eq!(cap(u64::MAX), Some(32));
    }

    /// Simulates a disk that takes a hundred ticks to be sent, and a guest that writes as much as it may; each byte
    /// written dirties `dirties` bytes. Returns the bytes sent in all.
    fn sent_in_all(
        mut decide: impl FnMut(&WriteObservation) -> DiskWriteLimit,
        wants: u64,
        dirties: u64,
    ) -> Option<u64> {
        const DRAIN: u64 = 100 << 20;
        let (mut left, mut sent, mut cap) = (100 * DRAIN, 0_u64, DiskWriteLimit::default());
        for _ in 0..1_000 {
            let written = cap.bytes_per_s.map_or(wants, |cap| cap.min(wants));
            let sent_per_s = left.min(DRAIN);
            // At most all of the disk is dirty.
            left = (left - sent_per_s + written * dirties).min(100 * DRAIN);
            sent += sent_per_s;
            if left <= DRAIN {
                return Some(sent);
            }
            cap = decide(&WriteObservation {
                writes: 0,
                written_bytes_per_s: written,
                dirtied_bytes_per_s: written * dirties,
                sent_bytes_per_s: Some(DRAIN),
            });
        }
        None
    }

    #[test]
    fn a_guest_that_writes_steadily_is_held_to_its_share() {
        let disk = 100 * (100 << 20);
        for wants in [0, 1 << 20, 45 << 20, 99 << 20, 10 << 30] {
            for dirties in [1, 8] {
                let mut policy = Drain::default();
                let sent = sent_in_all(|observed| policy.decide(observed), wants, dirties).unwrap();
                // Data that it dirtied before the first sample was not limited.
                let unheld = (2 * wants * dirties).min(disk);
                assert!(sent <= (disk + unheld) / 3 * 5, "{wants}, {dirties}: {sent}");
            }
        }
        assert_eq!(sent_in_all(|_| DiskWriteLimit::default(), 10 << 30, 1), None);
    }

    #[test]
    fn a_guest_is_held_only_while_it_writes_fast() {
        let mut policy = Drain::default();
        let mut cap = |written_bytes_per_s| {
            let observed = WriteObservation {
                writes: 0,
                written_bytes_per_s,
                dirtied_bytes_per_s: written_bytes_per_s,
                sent_bytes_per_s: Some(100 << 20),
            };
            policy.decide(&observed).bytes_per_s
        };
        assert_eq!(cap(40 << 20), None);
        assert_eq!(cap(60 << 20), Some(40 << 20));
        // At its cap it stays held.
        assert_eq!((cap(40 << 20), cap(35 << 20)), (Some(40 << 20), Some(40 << 20)));
        // A pause is no reason to lift the cap at once.
        assert_eq!((cap(1), cap(1), cap(30 << 20)), (Some(40 << 20), Some(40 << 20), Some(40 << 20)));
        assert_eq!((cap(1), cap(1), cap(1)), (Some(40 << 20), Some(40 << 20), Some(80 << 20)));
        assert_eq!((cap(1), cap(1), cap(1)), (Some(80 << 20), Some(80 << 20), None));
    }

    #[test]
    fn no_harmful_cap_is_set_where_no_cap_helps() {
        let observed = |written: u64, dirtied: u64, sent_per_s| WriteObservation {
            writes: 0,
            written_bytes_per_s: written,
            dirtied_bytes_per_s: dirtied,
            sent_bytes_per_s: sent_per_s,
        };
        let decide = |observed| Drain::default().decide(&observed).bytes_per_s;
        // A discard of much; a link that carries next to nothing; nothing sent yet; numbers beyond all bounds.
        assert_eq!(decide(observed(0, 10 << 30, Some(1000 << 20))), Some(50 << 20));
        assert_eq!(decide(observed(1 << 30, 1 << 30, Some(0))), Some(MIN_BYTES_PER_S));
        assert_eq!(decide(observed(1 << 30, 1 << 30, None)), None);
        let much = observed(u64::MAX, (40 << 20) + 1, Some(100 << 20));
        assert!(decide(much).is_some_and(|cap| cap > u64::MAX / 2));
    }

    /// One sample for each burst.
    #[test]
    fn a_guest_that_writes_in_bursts_stays_held() {
        let mut policy = Drain::default();
        let mut look = |dirtied: u64| {
            let observed = WriteObservation {
                writes: 0,
                written_bytes_per_s: dirtied,
                dirtied_bytes_per_s: dirtied,
                sent_bytes_per_s: Some(100 << 20),
            };
            policy.decide(&observed).bytes_per_s
        };
        let first = look(1 << 30).unwrap();
        assert!(first <= 40 << 20);
        for _ in 0..10 {
            assert!(look(1 << 20).is_some() && look(1 << 20).is_some());
            assert!(look(80 << 20).is_some_and(|cap| cap <= 40 << 20));
        }
    }
}
