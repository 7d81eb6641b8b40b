//! Common parts of a session, which decides what a role of a migration does next: time as a value, timers, the queue of
//! requests to the ownership registry.
//!
//! The driver reads its clock once for each event and hands the time over with it, so that all decisions about one event
//! have the same time, and can be made again.

mod patience;
mod registry_client;

use std::collections::BTreeMap;
use std::time::Duration;

pub use patience::{Reconnect, StopPatience};
pub use registry_client::RegistryClient;

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

/// Timers that are armed, each once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Timers<T: Ord>(BTreeMap<T, Time>);

impl<T: Ord> Default for Timers<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord + Copy> Timers<T> {
    /// Arms a timer. A timer that is armed already gets the new time.
    pub fn arm(&mut self, timer: T, at: Time) {
        self.0.insert(timer, at);
    }

    /// Disarms the first timer, in the order of `T`, whose time has come, and returns it.
    pub fn due(&mut self, now: Time) -> Option<T> {
        let timer = *self.0.iter().find(|(_, at)| **at <= now)?.0;
        self.0.remove(&timer);
        Some(timer)
    }

    /// Returns the time of a timer, if it is armed.
    pub fn at(&self, timer: T) -> Option<Time> {
        self.0.get(&timer).copied()
    }

    /// Returns the earliest time of a timer, if one is armed.
    pub fn next(&self) -> Option<Time> {
        self.0.values().min().copied()
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

    /// Returns true if there was no sign of life for `patience`. The next call then waits for as long again.
    pub fn check_lost(&mut self, patience: Duration, now: Time) -> bool {
        let is_lost = self.silence(now) >= patience;
        if is_lost {
            self.record(now);
        }
        is_lost
    }
}

#[cfg(test)]
mod tests;
