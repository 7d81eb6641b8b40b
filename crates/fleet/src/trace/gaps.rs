//! Gaps: seconds for which requests were not recorded.

use std::ops::Range;

/// Seconds on either side of a run of zeros that show which rate is usual there.
const AROUND_S: usize = 3600;

/// Requests that the usual rate predicts for a run of zeros that is a gap. By chance a Poisson process misses as many
/// with a probability of e⁻³⁰, about 10⁻¹³.
const EXPECTED_REQUESTS: f64 = 30.0;

/// Returns the runs of zeros that are too long for the rate of the hour before and of the hour after them. The lower of
/// both rates counts, so that a quiet night is no gap.
pub(super) fn find_gaps(counts: &[u32]) -> Vec<Range<usize>> {
    zero_runs(counts).into_iter().filter(|run| is_gap(counts, run)).collect()
}

fn is_gap(counts: &[u32], run: &Range<usize>) -> bool {
    let before = rate(&counts[run.start.saturating_sub(AROUND_S)..run.start]);
    let after = rate(&counts[run.end..(run.end + AROUND_S).min(counts.len())]);
    // At the trace's ends only one side is known.
    let usual = match (before, after) {
        (Some(before), Some(after)) => before.min(after),
        (one, other) => one.or(other).unwrap_or(0.0),
    };
    usual * run.len() as f64 >= EXPECTED_REQUESTS
}

fn rate(counts: &[u32]) -> Option<f64> {
    let sum: f64 = counts.iter().map(|count| f64::from(*count)).sum();
    (!counts.is_empty()).then(|| sum / counts.len() as f64)
}

fn zero_runs(counts: &[u32]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    let mut start = None;
    for (at, count) in counts.iter().chain([&1]).enumerate() {
        match (start, *count) {
            (None, 0) => start = Some(at),
            (Some(first), 1..) => {
                runs.push(first..at);
                start = None;
            }
            _ => {}
        }
    }
    runs
}
