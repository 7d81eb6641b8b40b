//! Disks first, then memory: the end of the rounds that send disks alone.
//!
//! A disk takes minutes to hours where memory takes seconds, and memory that was sent before the disk would have to be
//! sent again (Bradford et al. 2007, section 2.3). So disks are sent alone first, round by round, until their
//! remaining pages are few beside the guest's memory, or do not become fewer. From there on disks and memory are sent
//! together, and the remaining pages of both decide the stop ([`crate::pre_copy`]).

use serde::{Deserialize, Serialize};

use crate::trace::Decider;

/// Result of a round of disks alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRound {
    /// Data that was written during the round, and that the next round would have to send, in bytes.
    pub dirty_bytes: u64,
    /// Data that this round had to send, in bytes.
    pub sent_bytes: u64,
}

/// Decision after a round of disks alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NextPhase {
    /// Another round of disks alone.
    Disks,
    /// Memory begins; disks are sent with it.
    Memory,
}

/// Decides after each round of disks alone whether another one follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisksFirstPolicy {
    /// Lower bound of the memory that has to be sent, in bytes.
    pub memory_bytes: u64,
}

impl Decider for DisksFirstPolicy {
    type Observed = DiskRound;
    type Decision = NextPhase;

    const MAX_ENTRIES: usize = 1000;

    fn decide(&mut self, observed: &DiskRound) -> NextPhase {
        // The remaining disk data is little beside the memory: both are sent together.
        let is_little = observed.dirty_bytes <= self.memory_bytes / 16;
        // Another round would leave as much again: the guest writes as fast as the link carries.
        let does_not_shrink = observed.dirty_bytes > observed.sent_bytes / 2;
        if is_little || does_not_shrink { NextPhase::Memory } else { NextPhase::Disks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn after(dirty_bytes: u64, sent_bytes: u64) -> NextPhase {
        DisksFirstPolicy { memory_bytes: GIB }.decide(&DiskRound { dirty_bytes, sent_bytes })
    }

    #[test]
    fn memory_begins_when_little_is_left_or_it_gets_no_less() {
        assert_eq!(after(0, 0), NextPhase::Memory);
        assert_eq!(after(GIB / 16, 100 * GIB), NextPhase::Memory);
        assert_eq!(after(2 * GIB, 100 * GIB), NextPhase::Disks);
        assert_eq!(after(2 * GIB, 3 * GIB), NextPhase::Memory);
    }

    #[test]
    fn rounds_of_disks_alone_end_with_any_guest() {
        for halving in [2, 3, 10] {
            let (mut sent, mut rounds) = (1 << 50, 0);
            while after(sent / halving, sent) == NextPhase::Disks {
                sent /= halving;
                rounds += 1;
                assert!(rounds < 64);
            }
        }
    }
}
