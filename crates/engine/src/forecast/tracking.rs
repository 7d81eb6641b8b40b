//! Plan of a short write tracking before a forecast: the times at which written pages are counted, and its end.
//!
//! Written pages are counted since one moment, after intervals of which each is twice as long as the one before. A page
//! costs the guest one page fault, however often it is written. The tracking ends when more of it would show nothing
//! new: the guest writes no new pages; or when it has cost the guest enough. What the guest writes in longer intervals
//! is then not known, and the curve goes on as it ends ([`WorkingSetCurve`]).

use super::writes::{WorkingSetCurve, WorkingSetPoint};

/// Count of the pages that were written since the tracking began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteCount {
    /// Time since the beginning, in nanoseconds.
    pub elapsed_ns: u64,
    /// Bytes of whole pages that were written at least once.
    pub written_bytes: u64,
    /// Page faults that these writes have caused.
    pub faults: u64,
}

/// Plan of a write tracking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrackingPlan {
    /// Cost of a page fault to the guest, in nanoseconds.
    fault_ns: u64,
    counts: Vec<WriteCount>,
}

impl TrackingPlan {
    /// First interval, in nanoseconds.
    pub const FIRST_NS: u64 = 50_000_000;
    /// Longest interval, in nanoseconds: the whole tracking takes no longer.
    pub const LONGEST_NS: u64 = 3_200_000_000;
    /// Cost to the guest from which on the tracking ends, in nanoseconds of processor time. A guest with so many pages to
    /// write converges on no link that does not carry them within the longest downtime; and with one such tracking in an
    /// hour this is far below a thousandth of its time.
    pub const MOST_COST_NS: u64 = 100_000_000;
    /// Shortest interval after which a guest that writes no new pages is seen, in nanoseconds: timers of a second have
    /// expired by then.
    const LEVEL_NS: u64 = 1_600_000_000;
    /// Divisor of the written pages: an interval that adds less than this part of them adds nothing.
    const LEVEL_DIVISOR: u64 = 64;

    /// Creates the plan of a tracking in which a page fault costs the guest so much.
    pub fn new(fault_ns: u64) -> Self {
        Self { fault_ns, counts: Vec::new() }
    }

    /// Returns the time of the next count, in nanoseconds since the beginning; none if the tracking is over.
    pub fn next_count_ns(&self) -> Option<u64> {
        let next = Self::FIRST_NS << self.counts.len().min(16);
        let is_over = next > Self::LONGEST_NS || self.cost_ns() >= Self::MOST_COST_NS || self.is_level();
        (!is_over).then_some(next)
    }

    /// Records a count. One that comes late only makes its interval longer.
    pub fn counted(&mut self, count: WriteCount) {
        self.counts.push(count);
    }

    /// Returns the working set curve.
    pub fn curve(&self) -> WorkingSetCurve {
        let point = |count: &WriteCount| WorkingSetPoint {
            interval_ns: count.elapsed_ns,
            written_bytes: count.written_bytes,
        };
        WorkingSetCurve::new(self.counts.iter().map(point))
    }

    /// Returns the last count; none before the first.
    pub fn last(&self) -> Option<WriteCount> {
        self.counts.last().copied()
    }

    /// Returns the cost to the guest so far: its page faults, each with the measured cost, in nanoseconds.
    pub fn cost_ns(&self) -> u64 {
        self.last().map_or(0, |last| last.faults.saturating_mul(self.fault_ns))
    }

    fn is_level(&self) -> bool {
        let [.., before, last] = self.counts.as_slice() else { return false };
        let added = last.written_bytes.saturating_sub(before.written_bytes);
        last.elapsed_ns >= Self::LEVEL_NS && added <= last.written_bytes / Self::LEVEL_DIVISOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const PAGE: u64 = 4096;

    /// Tracks a guest that has written `pages(ms)` pages after so many milliseconds, with page faults of a microsecond.
    fn track(pages: impl Fn(u64) -> u64) -> TrackingPlan {
        let mut plan = TrackingPlan::new(1000);
        while let Some(at) = plan.next_count_ns() {
            let pages = pages(at / MS);
            plan.counted(WriteCount { elapsed_ns: at, written_bytes: pages * PAGE, faults: pages });
        }
        plan
    }

    fn ended_ms(plan: &TrackingPlan) -> u64 {
        plan.last().unwrap().elapsed_ns / MS
    }

    #[test]
    fn intervals_double_up_to_the_longest() {
        let plan = track(|ms| ms * 10);
        assert_eq!(ended_ms(&plan), 3200);
        let times: Vec<_> = plan.counts.iter().map(|count| count.elapsed_ns / MS).collect();
        assert_eq!(times, [50, 100, 200, 400, 800, 1600, 3200]);
        assert_eq!(plan.curve().bytes_per_s(), 10_000 * PAGE);
        assert_eq!(plan.cost_ns(), 32 * MS);
    }

    #[test]
    fn an_idle_guest_and_a_small_working_set_are_seen_early() {
        assert_eq!(ended_ms(&track(|_| 0)), 1600);
        let plan = track(|ms| (ms * 20).min(5000));
        assert_eq!(ended_ms(&plan), 1600);
        assert_eq!(plan.last().unwrap().written_bytes, 5000 * PAGE);
    }

    /// 310 MB/s of new pages.
    #[test]
    fn a_guest_that_writes_much_is_not_tracked_for_long() {
        let plan = track(|ms| ms * 75);
        assert_eq!(ended_ms(&plan), 1600);
        assert!(plan.cost_ns() <= 2 * TrackingPlan::MOST_COST_NS, "{plan:?}");
        let faster = track(|ms| ms * 1000);
        assert!(ended_ms(&faster) == 100, "{faster:?}");
    }

    #[test]
    fn a_late_count_makes_its_interval_longer() {
        let mut plan = TrackingPlan::new(1000);
        plan.counted(WriteCount { elapsed_ns: 70 * MS, written_bytes: 7 * PAGE, faults: 7 });
        assert_eq!(plan.next_count_ns(), Some(100 * MS));
        assert_eq!(plan.curve().bytes_per_s(), 100 * PAGE);
    }
}
