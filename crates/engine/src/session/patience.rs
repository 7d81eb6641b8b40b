use std::time::Duration;

use super::Time;
use crate::handover::source::SourceEvent;

/// Attempts of a source to make new connections after a cut, while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reconnect {
    give_up_at: Time,
}

impl Reconnect {
    /// Begins at the cut. Attempts end after `patience`, no matter how many there were.
    pub fn begin(now: Time, patience: Duration) -> Self {
        Self { give_up_at: now.after(patience) }
    }

    /// Returns true if another attempt follows one that failed: its failure is the link's or the destination's, and
    /// there is time left.
    pub fn tries_again(&self, failure: &SourceEvent, now: Time) -> bool {
        matches!(failure, SourceEvent::PeerLost | SourceEvent::PeerSilent) && now < self.give_up_at
    }
}

/// Patience of a source with the destination while the guest is stopped: longer than everything should need, but not
/// for ever. An agent that hangs is no reason to keep the guest stopped, even if its host works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StopPatience {
    /// Downtime that the policy expected when it decided to stop.
    pub expected_downtime: Duration,
    /// Time for which a guest may be stopped beyond what is expected.
    pub standstill: Duration,
}

impl StopPatience {
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
    fn only_failures_of_the_link_are_tried_again_and_not_for_ever() {
        let reconnect = Reconnect::begin(time(10), Duration::from_secs(5));
        for (failure, at_s, expected) in [
            (SourceEvent::PeerLost, 10, true),
            (SourceEvent::PeerSilent, 14, true),
            (SourceEvent::PeerLost, 15, false),
            (SourceEvent::PeerSilent, 16, false),
            (SourceEvent::Failed, 10, false),
            (SourceEvent::Cancel, 10, false),
            (SourceEvent::QemuDied, 10, false),
        ] {
            assert_eq!(reconnect.tries_again(&failure, time(at_s)), expected, "{failure:?} at {at_s} s");
        }
    }

    #[test]
    fn a_stopped_guest_waits_longer_than_expected_but_not_for_ever() {
        let patience =
            StopPatience { expected_downtime: Duration::from_secs(2), standstill: Duration::from_secs(5) };
        assert_eq!(patience.answer_by(time(100)), time(113));
        assert_eq!(patience.compared_by(time(100), Duration::from_secs(3)), time(125));
        let endless = StopPatience { expected_downtime: Duration::MAX, ..patience };
        assert!(endless.answer_by(time(100)) > time(113), "it does not overflow");
    }
}
