//! The way through memory: what goes in which round.

use std::time::{Duration, Instant};

use ::memory::{Cut, FirstPass, Owed, PartAround, Place, Recent, RoundStats};
use engine::precopy::{Sampling, Traced};

use super::rounds::Looked;
use crate::source::memory::Cargo;

/// The way through memory, round by round.
///
/// In the first pass, in which all of it is to go, whatever the guest writes to meanwhile is left for later: it would have to
/// go twice ([`FirstPass`]).
pub(super) struct Course {
    pub(super) policy: Traced,
    /// How often all that was dirty has been sent.
    pub(super) passes: u32,
    first_pass: FirstPass,
    /// How long the part of it takes that is sent now.
    planned: Duration,
    /// So many pages at most go in a round.
    pub(super) most_pages: Option<u64>,
    /// Nothing of memory goes in the next round.
    pub(super) disks_alone: bool,
    /// Parts are so many times as long as they would be, for a guest that suffers from looks.
    pub(super) interval_factor: u32,
    /// Where the next round begins that is not to send all.
    place: Place,
    /// Where the one after the present one begins, and whether this one ends a pass; none if it sends all.
    next: Option<(Place, bool)>,
    recent: Recent,
}

/// What a round sends of what a look has found.
pub(super) struct Share {
    pub(super) looked: Looked,
    /// What waits.
    pub(super) later: Option<Owed>,
    /// Until when it is sent; none to send all.
    pub(super) until: Option<Instant>,
}

impl Course {
    pub(super) fn new(policy: Traced, sampling: Sampling, passes: u32) -> Self {
        let history = if policy.has_history() { sampling.history } else { 0 };
        let interval_ns = if sampling.interval_ns > 0 { sampling.interval_ns } else { Sampling::LONGEST_NS };
        Self {
            policy,
            passes,
            first_pass: FirstPass::new(Duration::from_nanos(interval_ns)),
            planned: Duration::ZERO,
            most_pages: None,
            disks_alone: false,
            interval_factor: 1,
            place: Place::default(),
            next: None,
            recent: Recent::new(history as usize),
        }
    }

    /// Whether the guest was asked which of its memory need not go, and has not answered.
    pub(super) fn free_is_unknown(&mut self, is_unknown: bool) {
        self.first_pass.free_is_unknown(is_unknown);
    }

    /// After a look in the first pass: what was written to is none of it any more. The pass ends when nothing is left.
    pub(super) fn see(&mut self, looked: &mut Looked) {
        if self.passes > 0 {
            return;
        }
        if !self.first_pass.see(looked.readable.owed(), &std::mem::take(&mut looked.found)) {
            self.passes = 1;
        }
    }

    /// What is sent now: in the first pass what was not written to, later no more than so many pages.
    pub(super) fn share(&mut self, looked: Looked, cargo: &Cargo) -> Share {
        if self.passes == 0
            && let Some(part) = self.first_pass.take_part()
        {
            let (looked, later) = looked.divided(cargo, |readable| readable.only(part));
            let least = Duration::from_micros(looked.scan.duration_us) * Sampling::SCANS as u32;
            self.planned = self.first_pass.part(least) * self.interval_factor;
            return Share { looked, later: Some(later), until: Some(Instant::now() + self.planned) };
        }
        if std::mem::take(&mut self.disks_alone) {
            let mut of_disks = looked.readable.owed().blocks().to_vec();
            for of_memory in of_disks.iter_mut().take(cargo.ram_blocks()) {
                of_memory.clear(0..of_memory.pages());
            }
            self.next = Some((self.place, false));
            let (looked, later) = looked.divided(cargo, |readable| readable.only(&of_disks));
            return Share { looked, later: Some(later), until: None };
        }
        let most_pages = self.most_pages.map(|most| most.saturating_mul(self.interval_factor.into()));
        let Some(pages) = most_pages.filter(|most| *most < looked.readable.pages()) else {
            self.next = None;
            return Share { looked, later: None, until: None };
        };
        let (looked, later) = looked.divided(cargo, |readable| {
            let PartAround { readable, later, next, is_around } =
                readable.part_around(self.place, pages, Cut::BetweenClusters);
            self.next = Some((next, is_around));
            (readable, later)
        });
        Share { looked, later: Some(later), until: None }
    }

    /// Whether every page had its turn once, those that were written to in the first pass included.
    pub(super) fn has_sent_all(&self) -> bool {
        self.passes > 1
    }

    /// How many pages of memory of the round that is sent now were sent shortly before. In the first pass there are none.
    pub(super) fn count_resent(&mut self, looked: &Looked, cargo: &Cargo) -> u64 {
        if self.passes == 0 {
            return 0;
        }
        let blocks = looked.readable.owed().blocks();
        self.recent.count(&blocks[..cargo.ram_blocks().min(blocks.len())])
    }

    /// The round was sent, but for these pages; or it was cut off, and there are no stats.
    pub(super) fn sent(&mut self, stats: Option<&RoundStats>, unsent: &Owed) {
        let Some(stats) = stats else {
            if self.passes == 0 {
                self.first_pass.cut(unsent);
            }
            return self.recent.forget();
        };
        if self.passes > 0 {
            let (place, is_pass) = self.next.take().unwrap_or((Place::default(), true));
            self.place = place;
            self.passes += u32::from(is_pass);
        } else {
            let took = Duration::from_micros(stats.duration_us);
            let is_left = self.first_pass.sent(unsent, stats.contents.pages(), self.planned, took);
            self.passes = u32::from(!is_left);
        }
    }
}
