//! Measurement of a guest's reachability: when the first frame reached it, and when it sent its first one.

use std::io;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracee::PacketSocket;

use crate::announcement::is_announcement;
use crate::ethernet::{Frame, Mac};
use crate::filter;

/// Longest wait for a frame of a guest that was reached: one that is idle may have no reason to send.
const ANSWER_PATIENCE: Duration = Duration::from_millis(100);

/// Times of the first frames of a card since the guest ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstFrames {
    /// MAC address of the card.
    pub mac: Mac,
    /// Time of the first frame for the card's own address; zero if it was there already.
    pub first_in: Option<Duration>,
    /// Time of the first frame that the guest sent, other than announcements.
    pub first_out: Option<Duration>,
}

impl FirstFrames {
    /// Creates an empty measurement.
    pub fn new(mac: Mac) -> Self {
        Self { mac, first_in: None, first_out: None }
    }

    /// Learns from a frame that passed the card's tap. A broadcast shows nothing: it is not sent because
    /// the guest is here.
    pub fn observe(&mut self, at: Duration, is_from_guest: bool, frame: &Frame<'_>) {
        if !is_from_guest && frame.destination == self.mac {
            self.first_in.get_or_insert(at);
        } else if is_from_guest && frame.source == self.mac && !is_announcement(frame) {
            self.first_out.get_or_insert(at);
        }
    }

    /// Returns true if nothing remains to be measured.
    pub fn is_complete(&self) -> bool {
        self.first_in.is_some() && self.first_out.is_some()
    }
}

/// Sockets at the taps of a guest's cards.
#[derive(Debug)]
pub struct FirstFramesWatch {
    /// Sockets, each with the index of its card.
    sockets: Vec<(PacketSocket, usize)>,
    cards: Vec<FirstFrames>,
}

impl FirstFramesWatch {
    /// Begins to record the frames of the cards behind these interfaces, which are in the network namespace of this
    /// thread. A card may have several. The kernel keeps the frames until [`measure`](Self::measure) reads them.
    ///
    /// # Errors
    /// If an interface does not exist, or this process may not open packet sockets.
    pub fn start<'a>(interfaces: impl IntoIterator<Item = (&'a str, Mac)>) -> io::Result<Self> {
        let (mut sockets, mut cards) = (Vec::new(), Vec::<FirstFrames>::new());
        for (interface, mac) in interfaces {
            let known = cards.iter().position(|card| card.mac == mac);
            let card = known.unwrap_or(cards.len());
            if known.is_none() {
                cards.push(FirstFrames::new(mac));
            }
            sockets.push((PacketSocket::listen(interface, &filter::ether_host(mac))?, card));
        }
        Ok(Self { sockets, cards })
    }

    /// Waits until each card has received and sent a frame, at most `patience`, and less if each card has received one.
    /// Returns the times of these frames after `ran`, by the kernel; frames before `since` do not count.
    pub fn measure(mut self, since: SystemTime, ran: SystemTime, patience: Duration) -> Vec<FirstFrames> {
        let mut deadline = Instant::now() + patience;
        let mut are_reached = false;
        loop {
            let cards = &mut self.cards;
            // An interface that is gone has no more frames.
            self.sockets.retain(|(socket, card)| {
                let Some(first) = cards.get_mut(*card) else { return false };
                read(socket, first, since, ran).is_ok() && !first.is_complete()
            });
            if !are_reached && self.cards.iter().all(|card| card.first_in.is_some()) {
                are_reached = true;
                deadline = deadline.min(Instant::now() + ANSWER_PATIENCE);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if self.sockets.is_empty() || left.is_zero() {
                return self.cards;
            }
            let mut waits: Vec<_> =
                self.sockets.iter().map(|(socket, _)| PollFd::new(socket, PollFlags::IN)).collect();
            // After an error the deadline ends this all the same.
            let _ = poll(&mut waits, Timespec::try_from(left).ok().as_ref());
        }
    }
}

/// Reads the frames that have passed.
fn read(
    socket: &PacketSocket,
    first: &mut FirstFrames,
    since: SystemTime,
    ran: SystemTime,
) -> io::Result<()> {
    let mut buffer = [0; filter::FRAME_BYTES];
    while !first.is_complete()
        && let Some(received) = socket.receive(&mut buffer)?
    {
        let at = received.at.unwrap_or_else(SystemTime::now);
        let bytes = buffer.get(..received.bytes).unwrap_or(&buffer);
        if let Some(frame) = Frame::parse(bytes, received.vlan).filter(|_| at >= since) {
            first.observe(at.duration_since(ran).unwrap_or_default(), !received.is_outgoing, &frame);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::announcement;
    use crate::ethernet::compose;

    const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);
    const OTHER: Mac = Mac([0x52, 0x54, 0, 0, 0, 2]);

    fn observe(first: &mut FirstFrames, at_ms: u64, is_from_guest: bool, bytes: &[u8]) {
        first.observe(Duration::from_millis(at_ms), is_from_guest, &Frame::parse(bytes, None).unwrap());
    }

    #[test]
    fn only_frames_that_prove_a_connection_count() {
        let mut first = FirstFrames::new(GUEST);
        let ip = |destination, source| compose(destination, source, None, 0x0800, &[0x45; 40]);
        for frame in announcement::frames(GUEST, &[]) {
            observe(&mut first, 1, true, &frame);
            observe(&mut first, 1, false, &frame);
        }
        observe(&mut first, 2, false, &ip(Mac::BROADCAST, OTHER));
        observe(&mut first, 2, true, &ip(OTHER, Mac([2; 6])));
        assert_eq!((first, first.is_complete()), (FirstFrames::new(GUEST), false));
        observe(&mut first, 3, false, &ip(GUEST, OTHER));
        assert!(!first.is_complete());
        observe(&mut first, 4, true, &ip(OTHER, GUEST));
        observe(&mut first, 5, false, &ip(GUEST, OTHER));
        observe(&mut first, 5, true, &ip(OTHER, GUEST));
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!((first.first_in, first.first_out), (ms(3), ms(4)));
        assert!(first.is_complete());
    }
}
