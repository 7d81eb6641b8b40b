//! Write throttling: the policy's observations of a guest's writes, and the application of the cap that it decides.

use std::time::Instant;

use ::memory::RoundStats;
use engine::throttle::{DiskWriteLimit, Drain, Threshold, WriteObservation, WriteThrottle};
use engine::trace::TracedPolicy;
use proto::limits::PAGE_BYTES;
use qemu::qmp::{Qmp, QmpError};
use qemu::recording::{WriteCap, Written};

use crate::source::sending_rate::{LEAST_PAGES, SendingRate};
use api::ThrottleWrites;
use host::disks::DiskLog;

/// Throttle of the guest's writes, adapted at every sample.
#[derive(Debug)]
pub(super) struct DiskWriteThrottle {
    policy: TracedPolicy<WriteThrottle>,
    /// Writes before copying began.
    first: Option<Written>,
    last: Option<WriteSample>,
    cap: DiskWriteLimit,
    sending_rate: SendingRate,
}

/// Counters of one sample.
#[derive(Clone, Copy, Debug)]
struct WriteSample {
    at: Instant,
    written_bytes: u64,
    dirtied_bytes: u64,
}

impl DiskWriteThrottle {
    /// Creates the throttle; returns none if nothing is to be capped.
    pub(super) fn new(choice: ThrottleWrites) -> Option<Self> {
        let policy = match choice {
            ThrottleWrites::Off => return None,
            ThrottleWrites::Drain => WriteThrottle::Drain(Drain::default()),
            ThrottleWrites::Threshold => WriteThrottle::Threshold(Threshold::default()),
        };
        let policy = TracedPolicy::new(policy);
        Some(Self {
            policy,
            first: None,
            last: None,
            cap: DiskWriteLimit::default(),
            sending_rate: SendingRate::default(),
        })
    }

    /// Returns the policy that decides the cap.
    pub(super) fn policy(&self) -> &TracedPolicy<WriteThrottle> {
        &self.policy
    }

    /// Records a round, or a part of one, that was sent.
    pub(super) fn record_sent(&mut self, stats: &RoundStats) {
        let there = stats.contents.reference + stats.contents.delta;
        let pages = stats.contents.pages() - stats.contents.empty();
        self.sending_rate.learn(pages, there, stats.duration_us);
    }

    /// Returns how many of `all` pages are sent between two samples: as many as are sent in two seconds, but not more
    /// parts than a report can have.
    pub(super) fn part_pages(&self, all: u64) -> u64 {
        const MOST_PARTS: u64 = 100;
        let two_seconds =
            self.sending_rate.bytes_per_s().map_or(0, |rate| rate.saturating_mul(2) / PAGE_BYTES);
        two_seconds.max(all / MOST_PARTS).max(LEAST_PAGES)
    }

    /// Samples the writes since the last call, and has QEMU apply the policy's decision. Returns the cap if it has
    /// changed.
    pub(super) fn sample(
        &mut self,
        disks: &mut DiskLog,
        qmp: &mut Qmp,
    ) -> Result<Option<DiskWriteLimit>, QmpError> {
        if disks.throttled_by_others().count() == disks.names().len() {
            return Ok(None);
        }
        let written = disks.written(qmp)?;
        let first = *self.first.get_or_insert(written);
        let now = WriteSample {
            at: Instant::now(),
            written_bytes: written.bytes,
            dirtied_bytes: disks.dirtied_bytes(),
        };
        let Some(last) = self.last.replace(now) else { return Ok(None) };
        let milliseconds = u64::try_from((now.at - last.at).as_millis()).unwrap_or(u64::MAX).max(1);
        let per_s = |now: u64, then: u64| now.saturating_sub(then).saturating_mul(1000) / milliseconds;
        let observed = WriteObservation {
            writes: written.writes.saturating_sub(first.writes),
            written_bytes_per_s: per_s(now.written_bytes, last.written_bytes),
            dirtied_bytes_per_s: per_s(now.dirtied_bytes, last.dirtied_bytes),
            sent_bytes_per_s: self.sending_rate.bytes_per_s(),
        };
        let cap = self.policy.decide_on(observed);
        if cap == self.cap {
            return Ok(None);
        }
        let DiskWriteLimit { writes_per_s, bytes_per_s } = cap;
        disks.cap_writes(qmp, WriteCap { writes_per_s, bytes_per_s })?;
        self.cap = cap;
        Ok(Some(cap))
    }
}

#[cfg(test)]
mod tests {
    use ::memory::PageCounts;

    use super::*;

    /// Pages that the destination has in some form are sent faster than new writes of the guest will be.
    #[test]
    fn pages_already_present_do_not_count_as_sent() {
        let mut write_throttle = DiskWriteThrottle::new(ThrottleWrites::Drain).unwrap();
        let mut rate = |data, reference, delta| {
            let contents = PageCounts { data, reference, delta, ..PageCounts::default() };
            write_throttle.record_sent(&RoundStats {
                contents,
                duration_us: 1_000_000,
                ..RoundStats::default()
            });
            write_throttle.sending_rate.bytes_per_s()
        };
        assert_eq!(rate(30_000, 0, 0), Some(30_000 * PAGE_BYTES));
        assert_eq!(rate(20_000, 5_000, 5_000), Some(20_000 * PAGE_BYTES));
        // On a slow link there are few pages in any interval.
        assert_eq!(rate(1_000, 0, 0), Some(1_000 * PAGE_BYTES));
        assert_eq!(rate(20_000, 0, 0), Some(20_000 * PAGE_BYTES));
        // The destination had most pages: the earlier rate is still the best known.
        assert_eq!(rate(10_000, 0, 90_000), Some(20_000 * PAGE_BYTES));
        assert_eq!(rate(10_000, 90_000, 0), Some(20_000 * PAGE_BYTES));
    }
}
