//! Errors of traces.

use std::io;

/// The reason why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line has no meaning.
    #[error("line {line}: {what}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The reason.
        what: LineError,
    },
    /// Trace without any value.
    #[error("the trace is empty: it needs at least one line with a value")]
    Empty,
    /// The trace cannot be read.
    #[error("the trace cannot be read after line {line}")]
    Read {
        /// Number of the last line that was read.
        line: usize,
        /// The cause.
        source: io::Error,
    },
}

/// The reason why a line has no meaning.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// A line without a value, between others.
    #[error("a value is missing; write 0 for a second without requests")]
    Missing,
    /// A number below zero.
    #[error("{0} is negative")]
    Negative(String),
    /// A word that is no whole number.
    #[error("{0:?} is not a whole number")]
    NotANumber(String),
    /// A number beyond what a second or a processor can have.
    #[error("{value} is more than {most}, the most that is possible here")]
    TooLarge {
        /// The number.
        value: u64,
        /// Its limit.
        most: u64,
    },
    /// A day with missing or superfluous values.
    #[error("{found} values instead of {expected}, one each five minutes")]
    NotADay {
        /// Number of values.
        found: usize,
        /// Number that a day has.
        expected: usize,
    },
    /// VMs before the first day.
    #[error("values before the first line with a day; a day starts with \"# YYYYMMDD\"")]
    NoDay,
    /// A heading that is not a day.
    #[error("{0:?} is not a day; write \"# YYYYMMDD\"")]
    BadDay(String),
    /// The same day twice.
    #[error("day {0} is there twice")]
    DayTwice(String),
    /// A day without a VM.
    #[error("day {0} has no VM")]
    EmptyDay(String),
    /// A gap, where gaps are refused.
    #[error(
        "a gap of {seconds} s begins here: as many seconds without a request are no accident in this trace"
    )]
    Gap {
        /// Length of the gap, in seconds.
        seconds: usize,
    },
}

impl LineError {
    /// Adds the number of the line, from 1.
    pub(super) fn at(self, line: usize) -> TraceError {
        TraceError::Line { line, what: self }
    }
}

/// Reads a whole number from 0 to `most`.
pub(super) fn number(word: &str, most: u64) -> Result<u64, LineError> {
    let shown = || word.chars().take(40).collect::<String>();
    if word.strip_prefix('-').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit())) {
        return Err(LineError::Negative(shown()));
    }
    let value = word.parse().map_err(|_| LineError::NotANumber(shown()))?;
    if value > most { Err(LineError::TooLarge { value, most }) } else { Ok(value) }
}
