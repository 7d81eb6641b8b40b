//! Rounds of disks alone, before memory is prepared.

use std::time::Duration;

use crate::disks_first::{DiskRound, DisksFirstPolicy, NextPhase};
use crate::pre_copy::{OnLimit, PreCopyGoals};
use crate::trace::TracedPolicy;

/// Order in which the participants begin to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StartOrder {
    /// All of them are prepared before the streams are open, because that may need seconds, and begin together.
    Together,
    /// Some are sent first. The others, which would be written to in the meantime, are prepared when little of the
    /// first remains.
    DisksFirst,
}

impl StartOrder {
    /// Returns the order of a VM, some of whose participants are to be sent first if `is_any_first`.
    pub fn of(is_any_first: bool) -> Self {
        if is_any_first { Self::DisksFirst } else { Self::Together }
    }
}

/// Rounds of the participants that are sent first.
#[derive(Clone, Debug)]
pub struct DiskRounds {
    policy: TracedPolicy<DisksFirstPolicy>,
    /// Data of the present round, in bytes.
    round_bytes: u64,
    /// Data of the round before the present scan, in bytes; none if there was none, or if it was cut off.
    sent_bytes: Option<u64>,
}

impl DiskRounds {
    /// Begins; the others have at least `memory_bytes` to send.
    pub fn new(memory_bytes: u64) -> Self {
        let policy = TracedPolicy::new(DisksFirstPolicy { memory_bytes });
        Self { policy, round_bytes: 0, sent_bytes: None }
    }

    /// Decides after a dirty scan: without a whole round before it, a round follows.
    pub fn scanned(&mut self, dirty_bytes: u64) -> NextPhase {
        self.round_bytes = dirty_bytes;
        let observed = self.sent_bytes.take().map(|sent_bytes| DiskRound { dirty_bytes, sent_bytes });
        observed.map_or(NextPhase::Disks, |observed| self.policy.decide_on(observed))
    }

    /// Records that the round was sent; `is_whole` is false if a part of it was cut off.
    pub fn sent(&mut self, is_whole: bool) {
        self.sent_bytes = is_whole.then_some(self.round_bytes);
    }

    /// Returns the policy, once it has decided anything.
    pub fn policy(&self) -> Option<&TracedPolicy<DisksFirstPolicy>> {
        Some(&self.policy).filter(|policy| !policy.trace().entries.is_empty())
    }

    /// Returns true if the limit on the total time has passed and the action at the limit is to abort: there is nothing
    /// to wait for then.
    pub fn is_too_late(goals: &PreCopyGoals, on_limit: OnLimit, elapsed: Duration) -> bool {
        let limit = goals.max_total_ns.map(Duration::from_nanos);
        on_limit == OnLimit::Abort && limit.is_some_and(|limit| elapsed > limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_begins_after_a_whole_round_that_leaves_little() {
        let mut rounds = DiskRounds::new(GIB);
        assert_eq!(rounds.scanned(0), NextPhase::Disks, "nothing was sent yet");
        rounds.sent(false);
        assert_eq!(rounds.scanned(0), NextPhase::Disks, "the round was cut off");
        assert!(rounds.policy().is_none());
        rounds.sent(true);
        assert_eq!(rounds.scanned(0), NextPhase::Memory);
        assert_eq!(rounds.policy().map(|policy| policy.trace().entries.len()), Some(1));
    }

    /// 2 GiB are little of a round of 100 GiB, and much of a round of 3 GiB.
    #[test]
    fn each_round_is_compared_with_what_it_had_to_send() {
        for (sent, expected) in [(100, NextPhase::Disks), (3, NextPhase::Memory)] {
            let mut rounds = DiskRounds::new(GIB);
            rounds.scanned(sent * GIB);
            rounds.sent(true);
            assert_eq!(rounds.scanned(2 * GIB), expected);
        }
    }

    #[test]
    fn only_the_time_limit_of_an_abort_ends_them() {
        let limited = PreCopyGoals { max_total_ns: Some(1000), ..PreCopyGoals::default() };
        let is_too_late = |goals, on_limit, ns| {
            let elapsed = Duration::from_nanos(ns);
            DiskRounds::is_too_late(&goals, on_limit, elapsed)
        };
        assert!(!is_too_late(limited, OnLimit::Abort, 1000));
        assert!(is_too_late(limited, OnLimit::Abort, 1001));
        assert!(!is_too_late(limited, OnLimit::Stop, 1001));
        assert!(!is_too_late(limited, OnLimit::PostCopy, 1001));
        assert!(!is_too_late(PreCopyGoals::default(), OnLimit::Abort, u64::MAX));
    }

    #[test]
    fn only_disks_have_to_be_first() {
        assert_eq!([false, true].map(StartOrder::of), [StartOrder::Together, StartOrder::DisksFirst]);
    }
}
