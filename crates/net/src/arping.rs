//! Frames to a guest that has moved, from the host where it was. They reach it only if its new place is in the same
//! network, and if switches know that place: so an idle guest's reachability is proven within milliseconds, for which
//! others would have to send.
//!
//! One frame is of a kind that no machine answers. Others are questions for addresses that the guest is known to use, by
//! an ARP probe (RFC 5227) or a neighbour solicitation (RFC 4862): for an address that a guest is only about to use, they
//! would mean that another machine has it. All are for the guest's MAC address alone, from one that is thrown away.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tracee::{PacketSocket, VIRTIO_HEADER_BYTES};
use tracing::debug;

use crate::divert::MARK;
use crate::ethernet::Mac;
use crate::loop_thread::{LoopThread, Pause};
use crate::probe::{Side, frame_to, probe_mac, question_to};

/// Pause after the first questions; it is doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Longest pause: switches may learn the guest's place a while later.
const LONGEST_PAUSE: Duration = Duration::from_millis(160);
/// Time after which the questions end by themselves.
const LONGEST: Duration = Duration::from_secs(2);
/// Most addresses of a card for which it is asked.
const MOST_ADDRESSES: usize = 8;

/// Card that is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArpingTarget {
    /// MAC address of the card.
    pub mac: Mac,
    /// Bridge of this host in which the card was.
    pub bridge: String,
    /// Addresses that the guest uses, the most certain ones first.
    pub addresses: Vec<IpAddr>,
}

impl ArpingTarget {
    /// Composes the frames for the card.
    fn frames(&self, nonce: u64, from: Mac) -> Vec<Vec<u8>> {
        let known = self.addresses.iter().take(MOST_ADDRESSES);
        let questions = known.map(|address| question_to(self.mac, *address, from));
        [frame_to(self.mac, nonce, from)].into_iter().chain(questions).collect()
    }
}

/// Asks the cards of a guest again and again in a thread, until it is dropped.
#[derive(Debug)]
pub struct Arping {
    _loop_thread: LoopThread,
}

impl Arping {
    /// Begins to ask these cards from bridges of this thread's network namespace.
    ///
    /// # Errors
    /// If a bridge is gone, or no thread starts.
    pub fn start(nonce: u64, cards: &[ArpingTarget]) -> io::Result<Self> {
        let mut frames = Vec::new();
        for (number, card) in cards.iter().enumerate() {
            // The mark keeps a frame that comes back to the guest's old tap from being held and sent after the guest,
            // which would prove nothing.
            let socket = PacketSocket::sender(&card.bridge, MARK)?;
            let from = probe_mac(nonce, number, Side::Source);
            frames.push((socket, card.frames(nonce, from)));
        }
        let loop_thread = LoopThread::start("ping", move |pause| repeat(&frames, pause))?;
        Ok(Self { _loop_thread: loop_thread })
    }
}

fn repeat(frames: &[(PacketSocket, Vec<Vec<u8>>)], pause: &Pause) {
    let (began, mut next) = (Instant::now(), FIRST_PAUSE);
    loop {
        for (socket, frames) in frames {
            for frame in frames {
                if let Err(error) = socket.send([0; VIRTIO_HEADER_BYTES], frame) {
                    debug!(%error, "the guest was not asked at its new place");
                }
            }
        }
        if !pause.wait(next) || began.elapsed() > LONGEST {
            return;
        }
        next = (next * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ethernet::{ARP, Frame, IPV6};
    use crate::probe::PROBE;

    const GUEST: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);

    #[test]
    fn a_guest_is_asked_for_no_address_that_it_may_not_use_yet() {
        let card = |count| ArpingTarget {
            mac: GUEST,
            bridge: "br0".to_owned(),
            addresses: (0..count).map(|number| std::net::Ipv4Addr::new(10, 0, 0, number).into()).collect(),
        };
        let kinds = |frames: Vec<Vec<u8>>| -> Vec<_> {
            let parse =
                |bytes: &Vec<u8>| Frame::parse(bytes, None).map(|frame| (frame.destination, frame.kind));
            frames.iter().filter_map(parse).collect()
        };
        assert_eq!(kinds(card(0).frames(7, Mac([2; 6]))), [(GUEST, PROBE)]);
        assert_eq!(card(20).frames(7, Mac([2; 6])).len(), 1 + MOST_ADDRESSES);
    }

    #[test]
    fn questions_go_to_the_guest_alone() {
        for (address, kind) in [("10.0.0.7", ARP), ("fd00::7", IPV6)] {
            let bytes = question_to(GUEST, address.parse().unwrap(), Mac([2; 6]));
            let frame = Frame::parse(&bytes, None).unwrap();
            assert_eq!((frame.destination, frame.source, frame.kind), (GUEST, Mac([2; 6]), kind));
        }
    }
}
