//! Traces of requests: the number of requests in each second, one a line.

use std::io::BufRead;
use std::ops::Range;

use super::error::{LineError, TraceError, number};
use super::gaps::find_gaps;

/// Most requests in a second that are believed: more is a damaged trace.
const MOST_PER_S: u64 = 10_000_000;

/// Requests in each second, and the gaps among the seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTrace {
    counts: Vec<u32>,
    gaps: Vec<Range<usize>>,
}

impl RequestTrace {
    /// Returns the trace with these numbers of requests; finds its gaps.
    pub fn new(counts: Vec<u32>) -> Result<Self, TraceError> {
        if counts.is_empty() {
            return Err(TraceError::Empty);
        }
        let gaps = find_gaps(&counts);
        Ok(Self { counts, gaps })
    }

    /// Reads a trace. Empty lines at its end are ignored; others are missing values, and refused.
    pub fn read(reader: impl BufRead) -> Result<Self, TraceError> {
        let mut counts = Vec::new();
        let mut missing = None;
        for (at, text) in reader.lines().enumerate() {
            let text = text.map_err(|source| TraceError::Read { line: at, source })?;
            let word = text.trim();
            if word.is_empty() {
                missing = missing.or(Some(at + 1));
                continue;
            }
            if let Some(line) = missing {
                return Err(LineError::Missing.at(line));
            }
            let count = number(word, MOST_PER_S).map_err(|what| what.at(at + 1))?;
            counts.push(count as u32);
        }
        Self::new(counts)
    }

    /// Returns the number of requests in each second. Seconds in gaps have 0.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// Returns the seconds that were not recorded, in ascending order.
    pub fn gaps(&self) -> &[Range<usize>] {
        &self.gaps
    }

    /// Fails at the first gap.
    pub fn refuse_gaps(&self) -> Result<(), TraceError> {
        match self.gaps.first() {
            Some(gap) => Err(LineError::Gap { seconds: gap.len() }.at(gap.start + 1)),
            None => Ok(()),
        }
    }
}

/// Returns the seconds of 0 to `seconds` that are not in `gaps`, as ranges in ascending order.
pub fn segments_between(seconds: usize, gaps: &[Range<usize>]) -> Vec<Range<usize>> {
    let starts = std::iter::once(0).chain(gaps.iter().map(|gap| gap.end));
    let ends = gaps.iter().map(|gap| gap.start).chain([seconds]);
    starts.zip(ends).map(|(start, end)| start..end).filter(|segment| !segment.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        RequestTrace::read(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_trace_is_one_number_a_line() {
        let trace = RequestTrace::read("3\n0\r\n 12 \n\n".as_bytes()).unwrap();
        assert_eq!(trace.counts(), [3, 0, 12]);
        assert!(trace.gaps().is_empty());
    }

    #[test]
    fn errors_name_the_line() {
        assert_eq!(refused("1\n-2\n"), "line 2: -2 is negative");
        assert_eq!(refused("1\n2\nmany\n"), "line 3: \"many\" is not a whole number");
        assert_eq!(refused("1.5\n"), "line 1: \"1.5\" is not a whole number");
        assert_eq!(refused("1\n- 2\n"), "line 2: \"- 2\" is not a whole number");
        assert!(refused("1\n\n\n4\n").starts_with("line 2: a value is missing"));
        assert!(refused("99999999\n").starts_with("line 1: 99999999 is more than"));
        assert!(refused("").starts_with("the trace is empty"));
        assert!(refused("\n\n").starts_with("the trace is empty"));
        let binary = RequestTrace::read(&b"1\n\xff\xfe\n"[..]).unwrap_err();
        assert!(matches!(binary, TraceError::Read { line: 1, .. }), "{binary}");
    }

    #[test]
    fn seconds_that_were_not_recorded_are_a_gap() {
        let mut counts = vec![2; 1000];
        counts[100..140].fill(0);
        counts[500..510].fill(0);
        let trace = RequestTrace::new(counts).unwrap();
        assert_eq!(trace.gaps(), std::slice::from_ref(&(100..140)));
        assert!(trace.refuse_gaps().unwrap_err().to_string().starts_with("line 101: a gap of 40 s"));
        assert_eq!(segments_between(1000, trace.gaps()), [0..100, 140..1000]);
    }

    /// An hour at night with few requests beside a busy one is no gap.
    #[test]
    fn a_quiet_night_is_no_gap() {
        let mut counts = vec![5; 3600];
        counts.extend((0..7200).map(|second| u32::from(second % 600 == 599)));
        assert!(RequestTrace::new(counts).unwrap().gaps().is_empty());
    }

    #[test]
    fn gaps_at_the_ends_are_found() {
        let mut counts = vec![0; 60];
        counts.extend([3; 100]);
        counts.extend([0; 60]);
        let trace = RequestTrace::new(counts).unwrap();
        assert_eq!(trace.gaps(), [0..60, 160..220]);
        assert_eq!(segments_between(220, trace.gaps()), vec![60..160; 1]);
    }
}
