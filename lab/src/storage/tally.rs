//! Clients' observations of a service: arrival times of data, silences of all of them, and times of answers. All times
//! count from the clients' start.

use std::ops::Range;
use std::time::Duration;

/// Shorter silences are not kept.
const LEAST_GAP: Duration = Duration::from_millis(1);

/// All arrivals at all clients of a service.
#[derive(Debug, Default)]
pub(super) struct Tally {
    last: Duration,
    gaps: Vec<Span>,
    answers: Vec<Span>,
    /// Bytes that arrived in each second.
    seconds: Vec<u64>,
}

/// A duration with its end.
#[derive(Clone, Copy, Debug)]
struct Span {
    ended: Duration,
    took: Duration,
}

impl Span {
    fn overlaps(&self, window: &Range<Duration>) -> bool {
        self.ended >= window.start && self.ended.saturating_sub(self.took) < window.end
    }
}

impl Tally {
    /// Records that one of the clients received bytes.
    pub(super) fn arrived(&mut self, at: Duration, bytes: u64) {
        // Clients record in turn: one may be late to record an earlier arrival.
        let took = at.saturating_sub(self.last);
        if took >= LEAST_GAP {
            self.gaps.push(Span { ended: at, took });
        }
        self.last = self.last.max(at);
        let second = at.as_secs() as usize;
        if self.seconds.len() <= second {
            self.seconds.resize(second + 1, 0);
        }
        self.seconds[second] += bytes;
    }

    /// Records that one of the clients has a complete answer, with its duration.
    pub(super) fn answered(&mut self, at: Duration, took: Duration) {
        self.answers.push(Span { ended: at, took });
    }

    /// Returns the time of the last arrival.
    pub(super) fn last(&self) -> Duration {
        self.last
    }

    /// Returns the longest time, of those that touch the window, in which no client received data.
    pub(super) fn longest_gap(&self, window: &Range<Duration>) -> Duration {
        longest(&self.gaps, window)
    }

    /// Returns the begin and the end of that time.
    pub(super) fn longest_silence(&self, window: &Range<Duration>) -> Option<Range<Duration>> {
        let span = self.gaps.iter().filter(|gap| gap.overlaps(window)).max_by_key(|gap| gap.took)?;
        Some(span.ended.saturating_sub(span.took)..span.ended)
    }

    /// Returns the longest time of an answer that was awaited in the window.
    pub(super) fn slowest_answer(&self, window: &Range<Duration>) -> Duration {
        longest(&self.answers, window)
    }

    /// Returns the median time of the answers in the window; `None` if there are none.
    pub(super) fn median_answer(&self, window: &Range<Duration>) -> Option<Duration> {
        let mut times: Vec<Duration> = self
            .answers
            .iter()
            .filter(|answer| window.contains(&answer.ended))
            .map(|answer| answer.took)
            .collect();
        times.sort_unstable();
        times.get(times.len() / 2).copied()
    }

    /// Returns the complete answers that arrived in the window, per second.
    pub(super) fn answers_per_s(&self, window: &Range<Duration>) -> f64 {
        let answers = self.answers.iter().filter(|answer| window.contains(&answer.ended)).count();
        answers as f64 / (window.end.saturating_sub(window.start)).as_secs_f64().max(1e-3)
    }

    /// Returns the bytes in each whole second.
    pub(super) fn seconds(&self) -> &[u64] {
        &self.seconds
    }
}

fn longest(spans: &[Span], window: &Range<Duration>) -> Duration {
    spans.iter().filter(|span| span.overlaps(window)).map(|span| span.took).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn silence_is_what_no_client_hears() {
        let mut tally = Tally::default();
        for at in [10, 20, 30, 130, 125, 140, 2_500] {
            tally.arrived(ms(at), 100);
        }
        assert_eq!(tally.longest_gap(&(ms(0)..ms(1_000))), ms(2_360), "it began in it");
        assert_eq!(tally.longest_gap(&(ms(0)..ms(135))), ms(100));
        assert_eq!(tally.longest_gap(&(ms(200)..ms(300))), ms(2_360), "all of it is in the midst of one");
        assert_eq!(tally.longest_gap(&(ms(0)..ms(25))), ms(10));
        assert_eq!(tally.longest_gap(&(ms(2_600)..ms(2_700))), ms(0));
        assert_eq!((tally.seconds(), tally.last()), (&[600, 0, 100][..], ms(2_500)));
    }

    #[test]
    fn answers_count_at_their_end_and_wait_times_where_awaited() {
        let mut tally = Tally::default();
        for (at, took) in [(100, 10), (200, 20), (300, 30), (5_000, 4_000)] {
            tally.answered(ms(at), ms(took));
        }
        let window = ms(0)..ms(2_000);
        assert_eq!(tally.slowest_answer(&window), ms(4_000));
        assert_eq!(tally.median_answer(&window), Some(ms(20)));
        assert_eq!(tally.median_answer(&(ms(6_000)..ms(7_000))), None);
        assert!((tally.answers_per_s(&window) - 1.5).abs() < 1e-9);
    }
}
