//! Number of pages that a sampling interval can send (Ibrahim et al., Algorithm 2, lines 25–37).

use std::collections::VecDeque;

use proto::limits::{CHUNK_PAGES, PAGE_BYTES};

use super::policy::RoundObservation;

/// Linear regression of the rounds' durations against their numbers of pages.
///
/// The line's height at zero pages is the time that a round takes beside sending: the round trip of its last page and
/// the acknowledgement. A mean alone would attribute this time to the pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pace {
    /// Pages and nanoseconds of the last rounds, the oldest first.
    samples: VecDeque<(u64, u64)>,
    pages: Option<u64>,
}

impl Pace {
    /// Number of rounds for the regression: a link's rate of some seconds ago has little meaning.
    const SAMPLES: usize = 8;

    /// Learns from a round, and returns the number of pages for an interval; none if nothing is known. The first round
    /// is the last one of the first pass, during which the link had the rate `link_bytes_per_s`.
    pub(super) fn learn(
        &mut self,
        observed: &RoundObservation,
        link_bytes_per_s: u64,
        interval_ns: u64,
    ) -> Option<u64> {
        if self.pages.is_none() {
            // Many pages of all of memory are zero pages and take no time. Pages that are written are not: their
            // number follows from the link's rate.
            let pages = u128::from(link_bytes_per_s) * u128::from(interval_ns)
                / 1_000_000_000
                / u128::from(PAGE_BYTES);
            self.pages = (pages > 0).then(|| at_least_a_chunk(pages as f64));
            return self.pages;
        }
        if observed.pages_sent > 0 {
            self.samples.drain(..(self.samples.len() + 1).saturating_sub(Self::SAMPLES));
            self.samples.push_back((observed.pages_sent, observed.duration_ns));
            let mean = self.by_mean(interval_ns);
            // Rounds of nearly the same length make a line of arbitrary slope.
            let line = self.line().map(|line| line.at(interval_ns)).zip(mean);
            let now = line.map(|(line, mean)| line.clamp(mean / 2.0, mean * 2.0)).or(mean);
            // Line 37 of the algorithm.
            let smoothed = |before: u64, now: f64| at_least_a_chunk((before as f64 + 3.0 * now) / 4.0);
            self.pages = self.pages.zip(now).map(|(before, now)| smoothed(before, now)).or(self.pages);
        }
        self.pages
    }

    /// Returns the time that a round takes beside sending, in nanoseconds; 0 as long as that is not known. Rounds of
    /// nearly the same length do not reveal it.
    pub(super) fn overhead_ns(&self) -> u64 {
        let pages = || self.samples.iter().map(|(pages, _)| *pages);
        let (least, most) = (pages().min().unwrap_or(0), pages().max().unwrap_or(0));
        let line = self.line().filter(|_| most - least >= most / 4);
        line.map_or(0, |line| line.overhead_ns as u64)
    }

    /// Returns the line through the samples; none if its slope or height is impossible.
    fn line(&self) -> Option<Line> {
        let count = self.samples.len() as f64;
        let (pages, times): (Vec<f64>, Vec<f64>) =
            self.samples.iter().map(|(pages, ns)| (*pages as f64, *ns as f64)).unzip();
        let (pages_mean, ns_mean) = (pages.iter().sum::<f64>() / count, times.iter().sum::<f64>() / count);
        let both =
            |of: &dyn Fn(f64, f64) -> f64| pages.iter().zip(&times).map(|(x, y)| of(*x, *y)).sum::<f64>();
        let variance = both(&|x, _| (x - pages_mean) * (x - pages_mean));
        let covariance = both(&|x, y| (x - pages_mean) * (y - ns_mean));
        let ns_per_page = covariance / variance;
        let overhead_ns = ns_mean - ns_per_page * pages_mean;
        let is_sound = variance > 0.0 && ns_per_page > 0.0 && overhead_ns >= 0.0;
        is_sound.then_some(Line { overhead_ns, ns_per_page })
    }

    fn by_mean(&self, interval_ns: u64) -> Option<f64> {
        let (pages, ns) = self
            .samples
            .iter()
            .fold((0.0, 0.0), |(pages, ns), sample| (pages + sample.0 as f64, ns + sample.1 as f64));
        (ns > 0.0).then(|| pages / ns * interval_ns as f64)
    }
}

/// Line of the duration of rounds.
#[derive(Clone, Copy, Debug)]
struct Line {
    /// Duration of a round without pages, in nanoseconds.
    overhead_ns: f64,
    ns_per_page: f64,
}

impl Line {
    /// Returns the number of pages of a round that takes `ns`.
    fn at(self, ns: u64) -> f64 {
        (ns as f64 - self.overhead_ns).max(0.0) / self.ns_per_page
    }
}

/// Rounds down, but to a chunk at least: an interval that sends nothing would stop all progress.
fn at_least_a_chunk(pages: f64) -> u64 {
    (pages as u64).max(CHUNK_PAGES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn sent(pages_sent: u64, duration_ns: u64) -> RoundObservation {
        RoundObservation { pages_sent, duration_ns, ..RoundObservation::default() }
    }

    #[test]
    fn the_first_interval_follows_bytes_and_later_ones_pages() {
        let mut pace = Pace::default();
        // A million pages in ten seconds, most of them zeros: the link carried 10,000 a second.
        let first = pace.learn(&sent(1_000_000, 10 * SECOND), 10_000 * PAGE_BYTES, SECOND);
        assert_eq!(first, Some(10_000));
        // One round makes no line: 20,000 a second.
        assert_eq!(pace.learn(&sent(10_000, SECOND / 2), 0, SECOND), Some((10_000 + 3 * 20_000) / 4));
    }

    /// A quarter of a second is spent beside sending, and 10,000 pages take a second.
    #[test]
    fn overhead_of_rounds_is_not_attributed_to_pages() {
        let mut pace = Pace::default();
        pace.learn(&sent(10_000, SECOND), 10_000 * PAGE_BYTES, SECOND);
        assert_eq!(pace.overhead_ns(), 0);
        let time = |pages: u64| SECOND / 4 + pages * 100_000;
        let mut rate = 0;
        for pages in [3_000, 9_000, 4_000, 5_000, 8_000, 6_000, 9_000, 7_000] {
            rate = pace.learn(&sent(pages, time(pages)), 0, SECOND).unwrap();
        }
        assert!((7_400..=7_600).contains(&rate), "{rate}");
        assert!(
            (pace.overhead_ns() as i64 - (SECOND / 4) as i64).abs() < 1_000_000,
            "{}",
            pace.overhead_ns()
        );
    }

    /// The regression of rounds that differ by chance would attribute all of their time to the part beside sending.
    #[test]
    fn rounds_of_nearly_equal_length_do_not_reveal_overhead() {
        let mut pace = Pace::default();
        pace.learn(&sent(10_000, SECOND), 10_000 * PAGE_BYTES, SECOND);
        for (more_pages, more_ns) in [(0, 0), (100, 1), (50, 2), (120, 3), (10, 0), (90, 4), (30, 1), (70, 2)]
        {
            pace.learn(&sent(10_000 + more_pages, SECOND + more_ns * 1_000_000), 0, SECOND);
        }
        assert!(pace.line().is_some_and(|line| line.overhead_ns > 0.5e9), "{pace:?}");
        assert_eq!(pace.overhead_ns(), 0);
    }

    #[test]
    fn nonsense_makes_no_line() {
        let mut pace = Pace::default();
        assert_eq!(pace.learn(&sent(5, 0), 0, SECOND), None);
        pace.learn(&sent(10_000, SECOND), 10_000 * PAGE_BYTES, SECOND);
        // The more pages the less time.
        for (pages, ns) in [(1_000, SECOND), (10_000, SECOND / 10), (0, 7), (20_000, SECOND / 20)] {
            pace.learn(&sent(pages, ns), 0, SECOND);
        }
        assert_eq!(pace.overhead_ns(), 0);
        assert!(pace.learn(&sent(1, u64::MAX), 0, SECOND).unwrap() >= CHUNK_PAGES);
        assert!(pace.learn(&sent(u64::MAX, 1), 0, SECOND).is_some());
    }
}
