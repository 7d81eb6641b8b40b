//! Frames that are held while a guest moves, and decisions about them; pure.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use tracee::VIRTIO_HEADER_BYTES;

use crate::ethernet::Mac;

/// Bytes of a held frame's header on the wire: card, virtio header, length.
const WIRE_BYTES: usize = 6 + VIRTIO_HEADER_BYTES + 4;

/// Flag of a virtio header: the checksum is still to be computed. The other flags do not matter to a guest.
const NEEDS_CHECKSUM: u8 = 1;

/// A frame on its way to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldFrame {
    /// MAC address of the guest's card.
    pub card: Mac,
    /// Work that the kernel left to the device: the checksum (`struct virtio_net_hdr`).
    pub header: [u8; VIRTIO_HEADER_BYTES],
    /// The frame.
    pub frame: Vec<u8>,
}

impl HeldFrame {
    /// Returns the header with which the frame can be sent.
    pub fn sendable_header(&self) -> [u8; VIRTIO_HEADER_BYTES] {
        let mut header = self.header;
        header[0] &= NEEDS_CHECKSUM;
        header
    }

    /// Returns true if the frame is a broadcast or a multicast, so that both hosts get it.
    pub fn is_for_many(&self) -> bool {
        self.frame.first().is_some_and(|first| first & 1 != 0)
    }

    /// Appends the frame as it is sent to the other host.
    pub fn encode(&self, into: &mut Vec<u8>) {
        into.extend(self.card.0);
        into.extend(self.header);
        into.extend((self.frame.len() as u32).to_le_bytes());
        into.extend(&self.frame);
    }

    /// Bytes of the frame as it is sent to the other host.
    pub fn encoded_bytes(&self) -> usize {
        WIRE_BYTES + self.frame.len()
    }
}

/// Error: bytes are not held frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("held frames are cut off")]
pub struct BadHeldFrames;

/// Decodes frames that another host has sent.
///
/// # Errors
/// If the bytes are cut off: none of the frames is returned then.
pub fn decode(mut bytes: &[u8]) -> Result<Vec<HeldFrame>, BadHeldFrames> {
    let mut frames = Vec::new();
    while !bytes.is_empty() {
        let (card, rest) = bytes.split_first_chunk().ok_or(BadHeldFrames)?;
        let (header, rest) = rest.split_first_chunk().ok_or(BadHeldFrames)?;
        let (length, rest) = rest.split_first_chunk().ok_or(BadHeldFrames)?;
        let (frame, rest) =
            rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or(BadHeldFrames)?;
        frames.push(HeldFrame { card: Mac(*card), header: *header, frame: frame.to_vec() });
        bytes = rest;
    }
    Ok(frames)
}

/// Time without a frame of the source after which frames that arrived here directly may follow.
const QUIET: Duration = Duration::from_millis(3);
/// Longest wait for frames of the source if no frame has arrived here directly.
const PATIENCE: Duration = Duration::from_millis(20);
/// Longest wait of direct frames for those of the source.
const MOST: Duration = Duration::from_millis(100);

/// Most bytes of frames that one queue keeps. Beyond that frames are lost, like those that a full queue drops.
pub(crate) const MOST_BYTES: usize = 64 << 20;

/// Order of the frames at the destination: those of the source first, then those that arrived here directly.
#[derive(Debug)]
pub struct FrameReorderer {
    /// Time at which the guest began to run here; before that nothing is due.
    ran: Option<Instant>,
    /// Time of the source's last frame.
    last: Instant,
    direct: Vec<HeldFrame>,
    direct_bytes: usize,
    /// Broadcasts and multicasts that the source sent: the same ones came here directly.
    for_many: HashSet<Vec<u8>>,
    for_many_bytes: usize,
}

impl FrameReorderer {
    /// Creates the order for a guest that is announced at this time.
    pub fn new(now: Instant) -> Self {
        Self {
            ran: None,
            last: now,
            direct: Vec::new(),
            direct_bytes: 0,
            for_many: HashSet::new(),
            for_many_bytes: 0,
        }
    }

    /// Records that the guest runs.
    pub fn runs(&mut self, now: Instant) {
        self.ran = Some(now);
    }

    /// Returns true if the guest runs.
    pub fn is_running(&self) -> bool {
        self.ran.is_some()
    }

    /// Learns of a frame of the source, which the guest gets at once.
    pub fn record_from_source(&mut self, now: Instant, frame: &HeldFrame) {
        self.last = now;
        if frame.is_for_many()
            && self.for_many_bytes + frame.frame.len() <= MOST_BYTES
            && self.for_many.insert(frame.frame.clone())
        {
            self.for_many_bytes += frame.frame.len();
        }
    }

    /// Keeps a frame that came here directly, if there is room.
    pub fn direct(&mut self, frame: HeldFrame) {
        if self.direct_bytes + frame.encoded_bytes() <= MOST_BYTES {
            self.direct_bytes += frame.encoded_bytes();
            self.direct.push(frame);
        }
    }

    /// Returns the time at which the direct frames are to be delivered, unless the source sends more until then; none
    /// if the guest does not run yet.
    pub fn due_at(&self) -> Option<Instant> {
        let ran = self.ran?;
        let quiet = if self.direct.is_empty() { PATIENCE } else { QUIET };
        Some((self.last + quiet).min(ran + MOST))
    }

    /// Returns true if the direct frames are to be delivered.
    pub fn is_due(&self, now: Instant) -> bool {
        self.due_at().is_some_and(|due| now >= due)
    }

    /// Takes the direct frames, without those that the source sent, too.
    pub fn take_direct(&mut self) -> Vec<HeldFrame> {
        self.direct_bytes = 0;
        let mut direct = std::mem::take(&mut self.direct);
        direct.retain(|frame| !self.for_many.contains(&frame.frame));
        direct
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(first: u8, number: u8) -> HeldFrame {
        HeldFrame {
            card: Mac([2, 0, 0, 0, 0, 1]),
            header: [number; VIRTIO_HEADER_BYTES],
            frame: vec![first, number, 7],
        }
    }

    #[test]
    fn frames_come_back() {
        let frames = [frame(0, 1), frame(0xff, 2), HeldFrame { frame: Vec::new(), ..frame(0, 3) }];
        let mut bytes = Vec::new();
        for frame in &frames {
            frame.encode(&mut bytes);
        }
        assert_eq!(bytes.len(), frames.iter().map(HeldFrame::encoded_bytes).sum::<usize>());
        assert_eq!(decode(&bytes).unwrap(), frames);
        let whole = [0, frames[0].encoded_bytes(), frames[0].encoded_bytes() + frames[1].encoded_bytes()];
        for cut in 0..bytes.len() {
            assert_eq!(decode(&bytes[..cut]).is_ok(), whole.contains(&cut), "{cut}");
        }
    }

    #[test]
    fn only_missing_checksums_are_passed_on() {
        assert_eq!(frame(0, 3).sendable_header()[..2], [1, 3]);
        assert_eq!(frame(0, 2).sendable_header()[..2], [0, 2]);
    }

    #[test]
    fn direct_frames_follow_those_of_the_source() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut order = FrameReorderer::new(start);
        assert!(!order.is_due(at(200)), "the guest does not run");
        order.runs(start);
        assert!(!order.is_due(at(19)));
        assert!(order.is_due(at(20)), "nothing comes from the source");
        order.direct(frame(0, 1));
        assert!(!order.is_due(at(2)) && order.is_due(at(3)), "the network knows the new place");
        order.record_from_source(at(2), &frame(0, 2));
        assert!(!order.is_due(at(4)) && order.is_due(at(5)));
        // A source that goes on for ever does not keep direct frames back.
        order.record_from_source(at(99), &frame(0, 3));
        assert!(!order.is_due(at(99)) && order.is_due(at(100)));
        assert_eq!(order.take_direct(), [frame(0, 1)]);
        assert_eq!(order.take_direct(), []);
        let mut late = FrameReorderer::new(start);
        late.runs(at(50));
        late.record_from_source(at(100), &frame(0, 4));
        assert!(!late.is_due(at(100)) && late.is_due(at(150)));
    }

    #[test]
    fn what_both_hosts_got_arrives_once() {
        let mut order = FrameReorderer::new(Instant::now());
        order.record_from_source(Instant::now(), &frame(0xff, 1));
        order.record_from_source(Instant::now(), &frame(0, 2));
        for direct in [frame(0xff, 1), frame(0xff, 3), frame(0, 2)] {
            order.direct(direct);
        }
        // Two equal frames for the guest alone are two frames.
        assert_eq!(order.take_direct(), [frame(0xff, 3), frame(0, 2)]);
    }

    /// An agent that cannot go on would keep them until the host has no memory.
    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let mut order = FrameReorderer::new(Instant::now());
        let large = |first| HeldFrame { frame: vec![first; MOST_BYTES / 4], ..frame(0, 1) };
        for number in 0..9 {
            order.direct(large(0));
            order.record_from_source(Instant::now(), &large(2 * number + 1));
        }
        assert_eq!((order.direct.len(), order.for_many.len()), (3, 4));
        order.direct(frame(0, 1));
        assert_eq!(order.take_direct().len(), 4);
        order.direct(large(0));
        assert_eq!(order.take_direct().len(), 1, "there is room again");
    }

    proptest! {
        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(frames) = decode(&bytes) {
                prop_assert_eq!(frames.iter().map(HeldFrame::encoded_bytes).sum::<usize>(), bytes.len());
            }
        }
    }
}
