//! Acknowledgements of one stream: which frames were applied, and when the source has to learn that.

use std::time::{Duration, Instant};

use proto::pages::Ack;

/// Acknowledgements are sent at the latest after this number of frames, or of bytes, even if more have arrived already:
/// unacknowledged frames are sent again when a connection breaks.
const ACK_FRAMES: u64 = 64;
const ACK_BYTES: u64 = 8 << 20;
/// Acknowledgements are also sent after this time, because they are the source's only knowledge of this host. In the
/// beginning the source needs them soon: the first frame is acknowledged at once, and the next acknowledgements are
/// more frequent.
const ACK_AFTER: Duration = Duration::from_millis(50);
const EARLY_ACK_AFTER: Duration = Duration::from_millis(10);
const EARLY_ACKS: u32 = 20;

/// Frames of a stream that were applied, and their acknowledgements.
#[derive(Debug, Default)]
pub(super) struct Acknowledger {
    /// Sequence number of the last frame that was applied.
    applied: u64,
    /// Sequence number of the last frame that was acknowledged.
    acked: u64,
    /// Bytes of frames since the last acknowledgement.
    bytes: u64,
    /// Time since the last acknowledgement for which there was nothing to apply.
    waited: Duration,
    acked_at: Option<Instant>,
    /// Number of acknowledgements sent.
    acks: u32,
}

impl Acknowledger {
    /// Returns the sequence number of the next frame.
    pub(super) fn expected(&self) -> u64 {
        self.applied + 1
    }

    /// Records that a frame was applied.
    pub(super) fn record_applied(&mut self, seq: u64) {
        self.applied = seq;
    }

    /// Records the bytes of a frame.
    pub(super) fn record_bytes(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Records time for which there was nothing to apply.
    pub(super) fn record_wait(&mut self, waited: Duration) {
        // The wait for the first frame says nothing about the link.
        if self.acks > 0 {
            self.waited += waited;
        }
    }

    /// Returns the acknowledgement that is to be sent now; none if nothing was applied, or if more frames can be applied
    /// at once.
    pub(super) fn due(&self, has_more: impl FnOnce() -> bool) -> Option<Ack> {
        let waiting = self.applied - self.acked;
        let after = if self.acks < EARLY_ACKS { EARLY_ACK_AFTER } else { ACK_AFTER };
        let soon = waiting < ACK_FRAMES
            && self.bytes < ACK_BYTES
            && self.acked_at.is_some_and(|at| at.elapsed() < after);
        if waiting == 0 || (soon && has_more()) {
            return None;
        }
        let waited_us = u32::try_from(self.waited.as_micros()).unwrap_or(u32::MAX);
        Some(Ack { seq: self.applied, waited_us })
    }

    /// Records that the acknowledgement was sent.
    pub(super) fn record_sent(&mut self) {
        self.acked = self.applied;
        (self.bytes, self.waited) = (0, Duration::ZERO);
        self.acked_at = Some(Instant::now());
        self.acks = self.acks.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an acknowledger that has just sent its `acks`th acknowledgement.
    fn after(acks: u32) -> Acknowledger {
        Acknowledger { acked_at: Some(Instant::now()), acks, ..Acknowledger::default() }
    }

    #[test]
    fn the_first_frame_is_acknowledged_at_once() {
        let mut first = Acknowledger::default();
        assert_eq!(first.due(|| true), None, "nothing was applied");
        first.record_wait(Duration::from_secs(9));
        first.record_applied(first.expected());
        assert_eq!(first.due(|| true), Some(Ack { seq: 1, waited_us: 0 }));
        first.record_sent();
        assert_eq!(first.due(|| false), None);
        first.record_wait(Duration::from_micros(7));
        first.record_applied(first.expected());
        assert_eq!(first.due(|| false), Some(Ack { seq: 2, waited_us: 7 }), "it would wait otherwise");
    }

    #[test]
    fn frames_and_bytes_limit_what_is_not_acknowledged() {
        let mut frames = after(EARLY_ACKS);
        frames.record_applied(ACK_FRAMES);
        assert!(frames.due(|| true).is_some());
        let mut bytes = after(EARLY_ACKS);
        bytes.record_bytes(ACK_BYTES as usize);
        bytes.record_applied(1);
        assert!(bytes.due(|| true).is_some());
        bytes.record_sent();
        assert_eq!((bytes.bytes, bytes.acks), (0, EARLY_ACKS + 1));
    }

    #[test]
    fn an_old_acknowledgement_is_followed_by_another() {
        let mut stream = after(EARLY_ACKS);
        stream.acked_at = Instant::now().checked_sub(ACK_AFTER);
        stream.record_applied(1);
        assert!(stream.due(|| true).is_some());
    }
}
