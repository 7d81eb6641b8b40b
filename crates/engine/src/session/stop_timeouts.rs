use std::time::Duration;

use super::time::Time;

/// Patience of a source with the destination while the guest is stopped: longer than everything should need, but not
/// for ever. An agent that hangs is no reason to keep the guest stopped, even if its host works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StopTimeouts {
    /// Downtime that the policy expected when it decided to stop.
    pub expected_downtime: Duration,
    /// Time for which a guest may be stopped beyond what is expected.
    pub standstill: Duration,
}

impl StopTimeouts {
    /// Returns the time until which the source waits for the next answer.
    pub fn answer_by(self, now: Time) -> Time {
        now.after(self.expected_downtime.saturating_mul(4)).after(self.standstill)
    }

    /// Returns the time until which the source waits for the results of a comparison, for which it needed `took`
    /// itself: the destination has as much to do.
    pub fn compared_by(self, now: Time, took: Duration) -> Time {
        self.answer_by(now).after(took.saturating_mul(4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(seconds: u64) -> Time {
        Time::since_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn a_stopped_guest_waits_longer_than_expected_but_not_for_ever() {
        let patience =
            StopTimeouts { expected_downtime: Duration::from_secs(2), standstill: Duration::from_secs(5) };
        assert_eq!(patience.answer_by(time(100)), time(113));
        assert_eq!(patience.compared_by(time(100), Duration::from_secs(3)), time(125));
        let endless = StopTimeouts { expected_downtime: Duration::MAX, ..patience };
        assert!(endless.answer_by(time(100)) > time(113), "it does not overflow");
    }
}
