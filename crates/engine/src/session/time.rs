//! Time as a value, and contact with the peer.

use std::time::Duration;

/// Time since an origin that the driver has chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(Duration);

impl Time {
    /// Returns the time at this distance from the origin.
    pub fn since_origin(distance: Duration) -> Self {
        Self(distance)
    }

    /// Returns the distance from the origin.
    pub fn from_origin(self) -> Duration {
        self.0
    }

    /// Returns the time `span` later.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }

    /// Returns the time that has passed since `earlier`; zero if that is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Contact with the peer: the time of its last sign of life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Contact(Time);

impl Contact {
    /// Records a sign of life.
    pub fn record(&mut self, now: Time) {
        self.0 = now;
    }

    /// Returns the time since the last sign of life.
    pub fn silence(&self, now: Time) -> Duration {
        now.since(self.0)
    }

    /// Returns true if there was no sign of life for as long as `limit`. The next call then waits for as long again.
    pub fn take_contact_loss(&mut self, limit: Duration, now: Time) -> bool {
        let is_lost = self.silence(now) >= limit;
        if is_lost {
            self.record(now);
        }
        is_lost
    }
}

#[cfg(test)]
mod tests;
