//! Deadlines in the form in which users write them.

use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Moment at which something has to have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Time from now.
    In(Duration),
    /// At this time.
    At(SystemTime),
}

/// Text that is no deadline.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("write a time from now as 45m or 1h30m, or a time in UTC as 2026-12-01T02:00:00Z")]
pub struct BadDeadline;

impl Deadline {
    /// Returns the deadline in milliseconds since 1970, given the present time.
    pub fn unix_ms(self, now_unix_ms: u64) -> u64 {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        match self {
            Self::In(time) => now_unix_ms.saturating_add(ms(time)),
            Self::At(time) => time.duration_since(UNIX_EPOCH).map_or(0, ms),
        }
    }
}

impl FromStr for Deadline {
    type Err = BadDeadline;

    fn from_str(text: &str) -> Result<Self, BadDeadline> {
        if let Ok(time) = humantime::parse_duration(text) {
            return Ok(Self::In(time));
        }
        humantime::parse_rfc3339_weak(text).map(Self::At).map_err(|_| BadDeadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_read() {
        let ms = |text: &str| text.parse().map(|deadline: Deadline| deadline.unix_ms(1_000));
        assert_eq!(ms("45m"), Ok(1_000 + 45 * 60_000));
        assert_eq!(ms("1h 30m"), Ok(1_000 + 90 * 60_000));
        assert_eq!(ms("1970-01-01T00:00:02Z"), Ok(2_000));
        assert_eq!(ms("1970-01-01 00:00:02"), Ok(2_000));
        for bad in ["", "soon", "45", "22:00", "-1h"] {
            assert_eq!(bad.parse::<Deadline>(), Err(BadDeadline), "{bad}");
        }
    }
}
