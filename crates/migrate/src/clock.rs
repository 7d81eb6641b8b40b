//! The drivers' clock: it turns the system's time into values for decisions.

use std::time::Instant;

use engine::session::Time;

/// The clock of a driver. It is read once for each event, so that all decisions about one event have the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    origin: Instant,
    now: Time,
}

impl Clock {
    /// Starts a clock, at the origin of its times.
    pub(crate) fn start() -> Self {
        Self { origin: Instant::now(), now: Time::default() }
    }

    /// Reads the system's time, and returns it.
    pub(crate) fn read(&mut self) -> Time {
        self.now = Time::since_origin(self.origin.elapsed());
        self.now
    }

    /// Returns the time of the last reading.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Returns the instant of a time, for calls that wait until then.
    pub(crate) fn instant(&self, time: Time) -> Instant {
        self.origin + time.from_origin()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn clock_stands_still_between_readings() {
        let mut clock = Clock::start();
        let first = clock.read();
        while clock.origin.elapsed() == first.from_origin() {}
        assert_eq!(clock.now(), first);
        assert!(clock.read() > first);
        let later = first.after(Duration::from_secs(1));
        assert_eq!(clock.instant(later) - clock.instant(first), Duration::from_secs(1));
    }
}
