//! Connections to the destination while the guest runs here: sets of them, one generation after the other. A cut ends a
//! generation as a whole.

use std::time::Duration;

use proto::Generation;

use crate::handover::source::SourceEvent;
use crate::session::time::Time;

/// Minimum time that a destination has between closing its data streams and sending its reason: it ends its QEMU in
/// between.
const MIN_REASON_WAIT: Duration = Duration::from_millis(300);

/// State of the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionFacts {
    /// True if the control stream exists.
    pub has_control: bool,
    /// The present generation.
    pub generation: Generation,
}

impl ConnectionFacts {
    /// Returns true if a round can be sent over the data streams of this generation. Without the control stream, the
    /// destination could not be informed of the round's end; over streams of an ended generation, nothing is applied.
    pub fn can_carry_round(self, streams: Generation) -> bool {
        self.has_control && streams == self.generation
    }

    /// Returns true if data streams can be opened in the present generation. Otherwise all connections are made anew
    /// ([`Reconnection`]).
    pub fn can_open_streams(self) -> bool {
        self.has_control
    }
}

/// Step of a reconnection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconnectStep {
    /// Wait so long for the reason of a destination that gives up, which it sends on the control stream, and close the
    /// control stream.
    AwaitReason(Duration),
    /// Make all connections of this generation.
    Connect(Generation),
    /// Close what was opened, and wait so long.
    Pause(Duration),
}

/// Attempts of a source to make new connections after a cut, while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reconnection {
    give_up_at: Time,
    pause: Duration,
    generation: Generation,
    stage: ReconnectStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ReconnectStage {
    /// The destination may have sent a reason.
    Reason,
    /// New connections are made.
    Connections,
    /// An attempt has failed.
    Failed,
}

impl Reconnection {
    /// Begins at a cut of the present connections. Attempts end after `patience`, no matter how many there were;
    /// between two of them is a pause.
    pub fn begin(connections: ConnectionFacts, patience: Duration, pause: Duration, now: Time) -> Self {
        let stage =
            if connections.has_control { ReconnectStage::Reason } else { ReconnectStage::Connections };
        Self { give_up_at: now.after(patience), pause, generation: connections.generation, stage }
    }

    /// Returns the next step. Each attempt has a generation of its own.
    pub fn next_step(&mut self) -> ReconnectStep {
        match self.stage {
            ReconnectStage::Reason => {
                self.stage = ReconnectStage::Connections;
                ReconnectStep::AwaitReason(self.pause.max(MIN_REASON_WAIT))
            }
            ReconnectStage::Connections => {
                self.generation = self.generation.next();
                ReconnectStep::Connect(self.generation)
            }
            ReconnectStage::Failed => {
                self.stage = ReconnectStage::Connections;
                ReconnectStep::Pause(self.pause)
            }
        }
    }

    /// Records that an attempt has failed. Returns true if another one follows: the failure is the link's or the
    /// destination's, and there is time left.
    pub fn tries_again(&mut self, failure: &SourceEvent, now: Time) -> bool {
        self.stage = ReconnectStage::Failed;
        matches!(failure, SourceEvent::PeerLost | SourceEvent::PeerSilent) && now < self.give_up_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(500);
    const OPEN: ConnectionFacts = ConnectionFacts { has_control: true, generation: Generation(4) };
    const CUT: ConnectionFacts = ConnectionFacts { has_control: false, ..OPEN };

    fn time(seconds: u64) -> Time {
        Time::since_origin(Duration::from_secs(seconds))
    }

    fn begin(connections: ConnectionFacts) -> Reconnection {
        Reconnection::begin(connections, Duration::from_secs(5), PAUSE, time(10))
    }

    #[test]
    fn rounds_need_streams_of_the_present_generation_and_control() {
        assert!(OPEN.can_carry_round(Generation(4)) && OPEN.can_open_streams());
        for ended in [3, 5] {
            assert!(!OPEN.can_carry_round(Generation(ended)));
        }
        assert!(!CUT.can_carry_round(Generation(4)) && !CUT.can_open_streams());
    }

    #[test]
    fn only_failures_of_the_link_are_tried_again_and_not_for_ever() {
        for (failure, at_s, expected) in [
            (SourceEvent::PeerLost, 10, true),
            (SourceEvent::PeerSilent, 14, true),
            (SourceEvent::PeerLost, 15, false),
            (SourceEvent::PeerSilent, 16, false),
            (SourceEvent::Failed, 10, false),
            (SourceEvent::Cancel, 10, false),
            (SourceEvent::QemuDied, 10, false),
        ] {
            assert_eq!(begin(OPEN).tries_again(&failure, time(at_s)), expected, "{failure:?} at {at_s} s");
        }
    }

    #[test]
    fn each_attempt_has_a_generation_and_a_pause_follows_a_failure() {
        let mut reconnection = begin(CUT);
        for generation in 5..8 {
            assert_eq!(reconnection.next_step(), ReconnectStep::Connect(Generation(generation)));
            assert!(reconnection.tries_again(&SourceEvent::PeerLost, time(11)));
            assert_eq!(reconnection.next_step(), ReconnectStep::Pause(PAUSE));
        }
    }

    #[test]
    fn reason_is_awaited_once_while_the_control_stream_exists() {
        let mut reconnection = begin(OPEN);
        assert_eq!(reconnection.next_step(), ReconnectStep::AwaitReason(PAUSE));
        assert_eq!(reconnection.next_step(), ReconnectStep::Connect(Generation(5)));
        let mut hasty = Reconnection::begin(OPEN, PAUSE, Duration::ZERO, time(10));
        assert_eq!(hasty.next_step(), ReconnectStep::AwaitReason(MIN_REASON_WAIT));
    }
}
