//! Throttling: how fast a guest may write, so that copying comes to an end; to a disk that is copied here, to its
//! memory in [`processors`].
//!
//! Policy apart from enforcement (Bradford et al. 2007, section 3.2). What is found here is a cap on the guest's
//! writes; whoever asks has QEMU keep it, and lift it at the end.
//!
//! Copying a disk of S bytes at D bytes a second while the guest writes at most f·D sends S + f·S + f²·S + …, which is
//! S / (1 − f): with f = ⅖, to which [`Drain`] holds a guest that writes steadily, one and two thirds of the disk.

pub mod processors;

use serde::{Deserialize, Serialize};

use crate::trace::Decider;

/// How fast a guest may write to a disk; what is absent is not capped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cap {
    /// Writes a second.
    pub writes_per_s: Option<u64>,
    /// Bytes a second.
    pub bytes_per_s: Option<u64>,
}

/// What was seen of all disks that are copied since copying began, or in the last while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteObservation {
    /// Writes of the guest since copying began.
    pub writes: u64,
    /// How fast the guest wrote lately, in bytes per second.
    pub written_bytes_per_s: u64,
    /// How fast there came to be more to send by that, in bytes per second: more than was written where little parts
    /// here and there are written, less where the same ones are written again.
    pub dirtied_bytes_per_s: u64,
    /// How fast was sent lately, in bytes of the guest's per second; absent until that is known.
    pub drained_bytes_per_s: Option<u64>,
}

/// Decides on a cap again and again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "kebab-case")]
pub enum WriteThrottle {
    /// As little as the drain needs.
    Drain(Drain),
    /// The slower the more was written.
    Threshold(Threshold),
}

impl Decider for WriteThrottle {
    type Observed = WriteObservation;
    type Decision = Cap;

    const KEPT: usize = 1000;

    fn decide(&mut self, observed: &WriteObservation) -> Cap {
        match self {
            Self::Drain(policy) => policy.decide(observed),
            Self::Threshold(policy) => policy.decide(observed),
        }
    }
}

/// No guest is held to less, which the paper does not say: with a few writes a second a file system gives its disk up.
const LEAST_WRITES_PER_S: u64 = 32;

/// The paper's: when the guest has reached so many writes, each further one is delayed; both double when it has reached
/// the new threshold. A delay of each write is a cap on how many there are in a second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Threshold {
    threshold_writes: u64,
    delay_us: u64,
}

impl Default for Threshold {
    /// The paper's values.
    fn default() -> Self {
        Self { threshold_writes: 16_384, delay_us: 2_048 }
    }
}

impl Threshold {
    fn decide(&mut self, observed: &WriteObservation) -> Cap {
        let (mut threshold, mut delay_us, mut cap) = (self.threshold_writes, self.delay_us, Cap::default());
        while observed.writes >= threshold {
            cap.writes_per_s = Some((1_000_000 / delay_us).max(LEAST_WRITES_PER_S));
            (threshold, delay_us) = (threshold.saturating_mul(2), delay_us.saturating_mul(2));
            if threshold == u64::MAX {
                break;
            }
        }
        cap
    }
}

/// As little as the measured drain needs: a guest that dirties its disks faster than two fifths of what is sent may
/// write only so much that it does not, as long as it writes as it does. When it dirties far less for a while, the cap
/// is raised step by step, and lifted in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    // What was learnt. Not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    held: Held,
}

/// No guest is held to less: its driver would take a disk that does next to nothing for a broken one.
const LEAST_BYTES_PER_S: u64 = 1 << 20;
/// A write of one sector dirties eight, by the unit in which writes are recorded, a page. What dirties more (a discard,
/// which is no write) is no reason to write less.
const MOST_DIRTIED_BY_WRITTEN: u64 = 8;

impl Drain {
    fn decide(&mut self, observed: &WriteObservation) -> Cap {
        let Some(drained) = observed.drained_bytes_per_s else { return self.cap() };
        let share = drained / 5 * 2;
        let (written, dirtied) = (observed.written_bytes_per_s, observed.dirtied_bytes_per_s);
        let least = (share / MOST_DIRTIED_BY_WRITTEN).max(LEAST_BYTES_PER_S);
        // A guest that writes at its cap gets more of it; one that does not needs none beyond what is sent.
        self.held.hold(&Seen { used: written, dirtied, share, least, most: drained });
        self.cap()
    }

    fn cap(&self) -> Cap {
        Cap { bytes_per_s: self.held.cap, ..Cap::default() }
    }
}

/// A guest that is held to so much of something, as long as it dirties more than its share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Held {
    /// How much it may use, per second.
    cap: Option<u64>,
    /// How many times in a row it dirtied far less than its share.
    calm: u32,
}

/// What was seen of it.
struct Seen {
    /// What it used lately, per second.
    used: u64,
    /// What it dirtied by that, in bytes per second.
    dirtied: u64,
    /// What it may dirty.
    share: u64,
    /// It is held to no less.
    least: u64,
    /// Beyond that it need not be held.
    most: u64,
}

/// How many calm looks it takes to raise a cap.
const CALM_LOOKS: u32 = 3;

impl Held {
    fn hold(&mut self, seen: &Seen) {
        let &Seen { used, dirtied, share, least, most } = seen;
        if dirtied > share {
            // What may be used for its share to be dirtied.
            let fitting = u128::from(used) * u128::from(share) / u128::from(dirtied);
            let fitting = u64::try_from(fitting).unwrap_or(u64::MAX).max(least);
            // One look does not tell everything: from a cap to the next one at most half as much.
            self.cap = Some(self.cap.map_or(fitting, |cap| fitting.clamp(cap / 2, cap).max(least)));
            self.calm = 0;
        } else if dirtied <= share / 2 {
            self.calm += 1;
            if self.calm >= CALM_LOOKS {
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

    /// A disk that takes a hundred ticks to be sent, and a guest that writes as much as it may; each byte dirties so
    /// many.
    fn sent_in_all(
        mut decide: impl FnMut(&WriteObservation) -> Cap,
        wants: u64,
        dirties: u64,
    ) -> Option<u64> {
        const DRAIN: u64 = 100 << 20;
        let (mut left, mut sent, mut cap) = (100 * DRAIN, 0_u64, Cap::default());
        for _ in 0..1_000 {
            let written = cap.bytes_per_s.map_or(wants, |cap| cap.min(wants));
            let drained = left.min(DRAIN);
            // More than all of it is never left.
            left = (left - drained + written * dirties).min(100 * DRAIN);
            sent += drained;
            if left <= DRAIN {
                return Some(sent);
            }
            cap = decide(&WriteObservation {
                writes: 0,
                written_bytes_per_s: written,
                dirtied_bytes_per_s: written * dirties,
                drained_bytes_per_s: Some(DRAIN),
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
                // What it dirtied before the first look was not held.
                let unheld = (2 * wants * dirties).min(disk);
                assert!(sent <= (disk + unheld) / 3 * 5, "{wants}, {dirties}: {sent}");
            }
        }
        assert_eq!(sent_in_all(|_| Cap::default(), 10 << 30, 1), None);
    }

    #[test]
    fn a_guest_is_held_only_while_it_writes_fast() {
        let mut policy = Drain::default();
        let mut cap = |written_bytes_per_s| {
            let observed = WriteObservation {
                writes: 0,
                written_bytes_per_s,
                dirtied_bytes_per_s: written_bytes_per_s,
                drained_bytes_per_s: Some(100 << 20),
            };
            policy.decide(&observed).bytes_per_s
        };
        assert_eq!(cap(40 << 20), None);
        assert_eq!(cap(60 << 20), Some(40 << 20));
        // At its cap it stays held.
        assert_eq!((cap(40 << 20), cap(35 << 20)), (Some(40 << 20), Some(40 << 20)));
        // A pause is no reason to let it go at once.
        assert_eq!((cap(1), cap(1), cap(30 << 20)), (Some(40 << 20), Some(40 << 20), Some(40 << 20)));
        assert_eq!((cap(1), cap(1), cap(1)), (Some(40 << 20), Some(40 << 20), Some(80 << 20)));
        assert_eq!((cap(1), cap(1), cap(1)), (Some(80 << 20), Some(80 << 20), None));
    }

    #[test]
    fn what_no_cap_can_help_against_is_no_reason_for_one_that_hurts() {
        let observed = |written: u64, dirtied: u64, drained| WriteObservation {
            writes: 0,
            written_bytes_per_s: written,
            dirtied_bytes_per_s: dirtied,
            drained_bytes_per_s: drained,
        };
        let decide = |observed| Drain::default().decide(&observed).bytes_per_s;
        // A discard of much; a link that carries next to nothing; nothing sent yet; numbers beyond all bounds.
        assert_eq!(decide(observed(0, 10 << 30, Some(1000 << 20))), Some(50 << 20));
        assert_eq!(decide(observed(1 << 30, 1 << 30, Some(0))), Some(LEAST_BYTES_PER_S));
        assert_eq!(decide(observed(1 << 30, 1 << 30, None)), None);
        let much = observed(u64::MAX, (40 << 20) + 1, Some(100 << 20));
        assert!(decide(much).is_some_and(|cap| cap > u64::MAX / 2));
    }

    /// As many looks as it has bursts.
    #[test]
    fn a_guest_that_writes_in_bursts_stays_held() {
        let mut policy = Drain::default();
        let mut look = |dirtied: u64| {
            let observed = WriteObservation {
                writes: 0,
                written_bytes_per_s: dirtied,
                dirtied_bytes_per_s: dirtied,
                drained_bytes_per_s: Some(100 << 20),
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
