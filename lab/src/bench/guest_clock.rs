use std::time::{Duration, SystemTime};

use crate::error::Result;
use crate::serial::Serial;

/// A guest's own clock, where its program reports it.
pub(super) struct GuestClock<'a> {
    pub(super) serial: &'a Serial,
    pub(super) is_reported: bool,
}

impl GuestClock<'_> {
    pub(super) fn now(&self) -> Result<Duration> {
        if self.is_reported { self.serial.now() } else { Ok(Duration::ZERO) }
    }

    /// Returns the clock's value at a moment that has just passed.
    pub(super) fn at(&self, moment: SystemTime) -> Result<Duration> {
        let elapsed = || moment.elapsed().unwrap_or_default();
        let before = elapsed();
        let now = self.now()?;
        // The answer needs time to arrive: half of the elapsed time is the best estimate of its age.
        Ok(now.saturating_sub((before + elapsed()) / 2))
    }

    /// Waits until a time of the guest's clock; without a reported clock, by the host's clock.
    pub(super) fn wait_until(&self, then: Duration) -> Result<()> {
        loop {
            let left = then.saturating_sub(self.now()?);
            if left.is_zero() {
                return Ok(());
            }
            // A measurement needs time to pass; there is no event to wait for.
            std::thread::sleep(left);
            if !self.is_reported {
                return Ok(());
            }
        }
    }
}
