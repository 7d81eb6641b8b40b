//! Number of pages to handle by now, at a given rate.

use std::time::Instant;

/// Pages in a MiB.
pub(crate) const MIB: usize = 256;

/// Pages that may be handled by now at a given rate. It does not make up for time in which the program did not run.
pub(crate) struct Pace {
    from: Instant,
    done: u64,
}

impl Pace {
    /// Starts at `now`.
    pub(crate) fn new(now: Instant) -> Self {
        Self { from: now, done: 0 }
    }

    /// Records handled pages.
    pub(crate) fn done(&mut self, pages: usize) {
        self.done += pages as u64;
    }

    /// Returns true if more pages are due.
    pub(crate) fn is_due(&mut self, mib_per_s: u64, now: Instant) -> bool {
        let pages_per_s = mib_per_s * MIB as u64;
        if pages_per_s == 0 {
            return false;
        }
        let due = (now - self.from).as_micros() as u64 * pages_per_s / 1_000_000;
        if self.done + pages_per_s / 10 < due || self.done > due + pages_per_s {
            // More than a tenth of a second behind, or the rate was changed.
            *self = Self::new(now);
            return true;
        }
        self.done < due
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use whimbrel_guest_load::PAGE_BYTES;

    use super::*;

    const BATCH: usize = 4;

    /// Returns the bytes written in a time by a program that needs some time for each batch, and sleeps while nothing
    /// is due.
    fn bytes_in(pace: &mut Pace, mib_per_s: u64, from: Instant, time: Duration) -> u64 {
        let (mut now, mut pages) = (from, 0);
        while now < from + time {
            if pace.is_due(mib_per_s, now) {
                pace.done(BATCH);
                pages += BATCH;
                now += Duration::from_micros(9);
            } else {
                now += Duration::from_millis(1);
            }
        }
        (pages * PAGE_BYTES) as u64
    }

    #[test]
    fn a_rate_in_bytes_per_second_is_kept() {
        for mib_per_s in [1, 20, 150, 500] {
            let start = Instant::now();
            let mut pace = Pace::new(start);
            let bytes = bytes_in(&mut pace, mib_per_s, start, Duration::from_secs(10));
            let wanted = (mib_per_s << 20) * 10;
            assert!(
                bytes.abs_diff(wanted) <= wanted / 500 + (BATCH * PAGE_BYTES) as u64,
                "{bytes}, not {wanted}"
            );
        }
        let start = Instant::now();
        assert_eq!(bytes_in(&mut Pace::new(start), 0, start, Duration::from_secs(1)), 0);
    }

    #[test]
    fn missed_time_is_not_made_up_and_a_new_rate_is_kept() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        bytes_in(&mut pace, 100, start, Duration::from_secs(1));
        let later = start + Duration::from_mins(1);
        for (mib_per_s, from) in [(100, later), (10, later + Duration::from_secs(2))] {
            let bytes = bytes_in(&mut pace, mib_per_s, from, Duration::from_secs(2));
            let wanted = (mib_per_s << 20) * 2;
            assert!(bytes.abs_diff(wanted) <= wanted / 100, "{bytes}, not {wanted}");
        }
    }
}
