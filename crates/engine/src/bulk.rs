//! Disks first, then memory: when the rounds of disks alone have done enough.
//!
//! A disk takes minutes to hours where memory takes seconds, and memory that was sent before the disk would have to be
//! sent again (Bradford et al. 2007, section 2.3). So disks go ahead by themselves, round by round, until what is left
//! of them is little beside the guest's memory, or does not get less. From there on both go together, and what remains
//! of both decides the stop ([`crate::precopy`]).

use serde::{Deserialize, Serialize};

use crate::trace::Decider;

/// What a round of disks alone has left: what was written meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRound {
    /// What the next round would have to send, in bytes.
    pub dirty_bytes: u64,
    /// What this round had to send, in bytes.
    pub sent_bytes: u64,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Next {
    /// Another round of disks alone.
    Disks,
    /// Memory begins; disks go along.
    Memory,
}

/// Says after each round of disks alone what comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ahead {
    /// What memory will have to send at least.
    pub memory_bytes: u64,
}

impl Decider for Ahead {
    type Observed = DiskRound;
    type Decision = Next;

    const KEPT: usize = 1000;

    fn decide(&mut self, observed: &DiskRound) -> Next {
        // What is left is little beside what is to come: it goes along.
        let is_little = observed.dirty_bytes <= self.memory_bytes / 16;
        // A round more would find as much again: the guest writes as fast as the link carries.
        let does_not_shrink = observed.dirty_bytes > observed.sent_bytes / 2;
        if is_little || does_not_shrink { Next::Memory } else { Next::Disks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn after(dirty_bytes: u64, sent_bytes: u64) -> Next {
        Ahead { memory_bytes: GIB }.decide(&DiskRound { dirty_bytes, sent_bytes })
    }

    #[test]
    fn memory_begins_when_little_is_left_or_it_gets_no_less() {
        assert_eq!(after(0, 0), Next::Memory);
        assert_eq!(after(GIB / 16, 100 * GIB), Next::Memory);
        assert_eq!(after(2 * GIB, 100 * GIB), Next::Disks);
        assert_eq!(after(2 * GIB, 3 * GIB), Next::Memory);
    }

    #[test]
    fn it_ends_whatever_the_guest_does() {
        for halving in [2, 3, 10] {
            let (mut sent, mut rounds) = (1 << 50, 0);
            while after(sent / halving, sent) == Next::Disks {
                sent /= halving;
                rounds += 1;
                assert!(rounds < 64);
            }
        }
    }
}
