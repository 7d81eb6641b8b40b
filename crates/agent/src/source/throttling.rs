//! Write throttling: what the policy is shown of a guest's writes, and who keeps the cap that it finds.

use std::time::Instant;

use ::memory::RoundStats;
use engine::throttle::{Cap, Drain, Threshold, WriteObservation, WriteThrottle};
use engine::trace::Traced;
use proto::limits::PAGE_BYTES;
use qemu::qmp::{Qmp, QmpError};
use qemu::recording::{WriteCap, Written};

use crate::api::ThrottleWrites;
use crate::disks::DiskLog;

/// A part before the drain is known, and the least that tells of it: of a small one its beginning and end take the
/// time, unless it takes long.
const LEAST_PAGES: u64 = 4096;
const LONG_US: u64 = 500_000;

/// How fast the guest may write, from look to look.
#[derive(Debug)]
pub(crate) struct Throttling {
    policy: Traced<WriteThrottle>,
    /// What had been written when copying began.
    first: Option<Written>,
    last: Option<Look>,
    cap: Cap,
    drained: Drained,
}

/// How fast was sent lately, in bytes of the guest's per second, once that is known.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Drained(Option<u64>);

impl Drained {
    /// So many pages were sent, and so many of them that the destination had, or had in an earlier version: what the
    /// guest writes now will have to be sent.
    pub(crate) fn learn(&mut self, pages: u64, there: u64, duration_us: u64) {
        let pages = pages.saturating_sub(there);
        // Where most of it was there, the time tells nothing of the rest.
        let tells = pages >= LEAST_PAGES || (pages > 0 && duration_us >= LONG_US);
        if tells && pages >= there {
            let rate = pages.saturating_mul(PAGE_BYTES).saturating_mul(1_000_000) / duration_us.max(1);
            self.0 = Some(rate);
        }
    }

    pub(crate) fn bytes_per_s(self) -> Option<u64> {
        self.0
    }
}

/// What was found at one look.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    written_bytes: u64,
    dirtied_bytes: u64,
}

impl Throttling {
    /// None where nothing is to be capped.
    pub(crate) fn new(choice: ThrottleWrites) -> Option<Self> {
        let policy = match choice {
            ThrottleWrites::Off => return None,
            ThrottleWrites::Drain => WriteThrottle::Drain(Drain::default()),
            ThrottleWrites::Threshold => WriteThrottle::Threshold(Threshold::default()),
        };
        let policy = Traced::new(policy);
        Some(Self { policy, first: None, last: None, cap: Cap::default(), drained: Drained::default() })
    }

    /// Who says how fast it may write.
    pub(crate) fn policy(&self) -> &Traced<WriteThrottle> {
        &self.policy
    }

    /// A round, or a part of one, was sent.
    pub(crate) fn drained(&mut self, stats: &RoundStats) {
        let there = stats.contents.reference + stats.contents.delta;
        let pages = stats.contents.pages() - stats.contents.empty();
        self.drained.learn(pages, there, stats.duration_us);
    }

    /// How many of so many pages go between two looks: what takes two seconds, but not more parts than a report can
    /// have.
    pub(crate) fn part_pages(&self, all: u64) -> u64 {
        const MOST_PARTS: u64 = 100;
        let two_seconds = self.drained.bytes_per_s().map_or(0, |rate| rate.saturating_mul(2) / PAGE_BYTES);
        two_seconds.max(all / MOST_PARTS).max(LEAST_PAGES)
    }

    /// Looks at what was written since the last time, and has QEMU keep what follows from it. Returns the cap where it
    /// is another one than before.
    pub(crate) fn look(&mut self, disks: &mut DiskLog, qmp: &mut Qmp) -> Result<Option<Cap>, QmpError> {
        if disks.throttled_by_others().count() == disks.names().len() {
            return Ok(None);
        }
        let written = disks.written(qmp)?;
        let first = *self.first.get_or_insert(written);
        let now =
            Look { at: Instant::now(), written_bytes: written.bytes, dirtied_bytes: disks.dirtied_bytes() };
        let Some(last) = self.last.replace(now) else { return Ok(None) };
        let milliseconds = u64::try_from((now.at - last.at).as_millis()).unwrap_or(u64::MAX).max(1);
        let per_s = |now: u64, then: u64| now.saturating_sub(then).saturating_mul(1000) / milliseconds;
        let observed = WriteObservation {
            writes: written.writes.saturating_sub(first.writes),
            written_bytes_per_s: per_s(now.written_bytes, last.written_bytes),
            dirtied_bytes_per_s: per_s(now.dirtied_bytes, last.dirtied_bytes),
            drained_bytes_per_s: self.drained.bytes_per_s(),
        };
        let cap = self.policy.decide_on(observed);
        if cap == self.cap {
            return Ok(None);
        }
        let Cap { writes_per_s, bytes_per_s } = cap;
        disks.cap_writes(qmp, WriteCap { writes_per_s, bytes_per_s })?;
        self.cap = cap;
        Ok(Some(cap))
    }
}

#[cfg(test)]
mod tests {
    use ::memory::Contents;

    use super::*;

    /// Pages that the destination has in one way or the other go quicker than what the guest writes now will.
    #[test]
    fn what_was_there_is_not_drained() {
        let mut throttling = Throttling::new(ThrottleWrites::Drain).unwrap();
        let mut rate = |data, reference, delta| {
            let contents = Contents { data, reference, delta, ..Contents::default() };
            throttling.drained(&RoundStats { contents, duration_us: 1_000_000, ..RoundStats::default() });
            throttling.drained.bytes_per_s()
        };
        assert_eq!(rate(30_000, 0, 0), Some(30_000 * PAGE_BYTES));
        assert_eq!(rate(20_000, 5_000, 5_000), Some(20_000 * PAGE_BYTES));
        // On a slow link there are few in any time.
        assert_eq!(rate(1_000, 0, 0), Some(1_000 * PAGE_BYTES));
        assert_eq!(rate(20_000, 0, 0), Some(20_000 * PAGE_BYTES));
        // Mostly there: the rate before is still the best that is known.
        assert_eq!(rate(10_000, 0, 90_000), Some(20_000 * PAGE_BYTES));
        assert_eq!(rate(10_000, 90_000, 0), Some(20_000 * PAGE_BYTES));
    }
}
