//! The way through memory: what goes in which round.

use std::time::{Duration, Instant};

use ::memory::{Cut, DirtyBitmap, Owed, PartAround, Place, Recent, RoundStats};
use engine::precopy::{Sampling, Traced};

use super::rounds::Looked;
use crate::source::memory::Cargo;

/// The way through memory, round by round.
///
/// In the first pass, in which all of it is to go, whatever the guest writes to meanwhile is left for later: it would have to
/// go twice. So a pass that takes longer than a look is worth is made in parts, and after each is looked at what was written.
pub(super) struct Course {
    pub(super) policy: Traced,
    /// How often all that was dirty has been sent.
    pub(super) passes: u32,
    /// What is left of the first pass: nothing that was sent in it comes back, or a guest that writes to its disks all the
    /// time would have it go on for ever. None before it.
    cold: Option<Vec<DirtyBitmap>>,
    /// So many pages at most go in a round.
    pub(super) most_pages: Option<u64>,
    /// Nothing of memory goes in the next round.
    pub(super) disks_alone: bool,
    /// Parts are so many times as long as they would be, for a guest that suffers from looks.
    pub(super) interval_factor: u32,
    /// How long the next part of it takes.
    part: Duration,
    shortest_part: Duration,
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
        let shortest_part = Duration::from_nanos(interval_ns);
        Self {
            policy,
            passes,
            cold: None,
            most_pages: None,
            disks_alone: false,
            interval_factor: 1,
            part: shortest_part,
            shortest_part,
            place: Place::default(),
            next: None,
            recent: Recent::new(history as usize),
        }
    }

    /// After a look in the first pass: what was written to is none of it any more. The pass ends when nothing is left.
    pub(super) fn see(&mut self, looked: &mut Looked) {
        if self.passes > 0 {
            return;
        }
        let cold = self.cold.get_or_insert_with(|| looked.readable.owed().blocks().to_vec());
        for (cold, found) in cold.iter_mut().zip(std::mem::take(&mut looked.found)) {
            cold.remove(&found);
        }
        if cold.iter().all(DirtyBitmap::is_empty) {
            self.end_first_pass();
        }
    }

    /// What is sent now: in the first pass what was not written to, later no more than so many pages.
    pub(super) fn share(&mut self, looked: Looked, cargo: &Cargo) -> Share {
        if let Some(cold) = self.cold.as_ref().filter(|_| self.passes == 0) {
            let least = Duration::from_micros(looked.scan.duration_us) * Sampling::SCANS as u32;
            let until = Some(Instant::now() + self.part.max(least) * self.interval_factor);
            let (looked, later) = looked.divided(cargo, |readable| readable.only(cold));
            return Share { looked, later: Some(later), until };
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

    fn end_first_pass(&mut self) {
        self.passes = 1;
        self.cold = None;
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
        if let Some(cold) = self.cold.as_mut().filter(|_| self.passes == 0) {
            unsent.blocks().clone_into(cold);
        }
        let unsent_pages = unsent.pages();
        let Some(stats) = stats else { return self.recent.forget() };
        if self.passes > 0 {
            let (place, is_pass) = self.next.take().unwrap_or((Place::default(), true));
            self.place = place;
            self.passes += u32::from(is_pass);
        } else if unsent_pages == 0 {
            self.end_first_pass();
        } else {
            // The more there is, the longer the parts: looks cost, and so do lines of the report.
            let sent_pages = stats.contents.pages().max(1);
            let left =
                Duration::from_micros(stats.duration_us).mul_f64(unsent_pages as f64 / sent_pages as f64);
            self.part = self.shortest_part.max(left / 4);
        }
    }
}
