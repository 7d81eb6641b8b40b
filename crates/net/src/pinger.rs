//! Questions to a guest that has moved, from the host where it was. They reach it only if its new place is in the same
//! network, and if switches know that place: so an idle guest's reachability is proven within milliseconds, for which
//! others would have to send.
//!
//! A question is an ARP probe (RFC 5227) or a neighbour solicitation (RFC 4862) for an address of the guest, to the
//! guest's station alone. The frame's sender is a station that is thrown away, and takes no address.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use tracee::{PacketSocket, VIRTIO_HEADER_BYTES};
use tracing::debug;

use crate::divert::MARK;
use crate::ethernet::Mac;
use crate::probe::{Side, question_to, station};
use crate::repeater::{Pause, Repeater};

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
pub struct PingedCard {
    /// MAC address of the card.
    pub mac: Mac,
    /// Bridge of this host in which the card was.
    pub bridge: String,
    /// Known addresses of the guest.
    pub addresses: Vec<IpAddr>,
}

impl PingedCard {
    /// Returns the addresses for which the card is asked: those that are known, and the one that most systems derive
    /// from the card's MAC address.
    fn questions(&self) -> impl Iterator<Item = IpAddr> {
        let known = self.addresses.iter().copied().take(MOST_ADDRESSES);
        known.chain([link_local(self.mac).into()])
    }
}

/// Asks the cards of a guest again and again in a thread, until it is dropped.
#[derive(Debug)]
pub struct Pinger {
    _repeater: Repeater,
}

impl Pinger {
    /// Begins to ask these cards from bridges of this thread's network namespace.
    ///
    /// # Errors
    /// If a bridge is gone, or no thread starts.
    pub fn start(nonce: u64, cards: &[PingedCard]) -> io::Result<Self> {
        let mut frames = Vec::new();
        for (number, card) in cards.iter().enumerate() {
            // The mark keeps a frame that comes back to the guest's old tap from being held and sent after the guest,
            // which would prove nothing.
            let socket = PacketSocket::sender(&card.bridge, MARK)?;
            let from = station(nonce, number, Side::Source);
            let asked = card.questions().map(|address| question_to(card.mac, address, from));
            frames.push((socket, asked.collect()));
        }
        let repeater = Repeater::start("ping", move |pause| repeat(&frames, pause))?;
        Ok(Self { _repeater: repeater })
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

/// Returns the link-local address that is derived from a MAC address (RFC 4291, appendix A).
fn link_local(mac: Mac) -> Ipv6Addr {
    let Mac([first, second, third, fourth, fifth, sixth]) = mac;
    let mut octets = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0).octets();
    octets[8..].copy_from_slice(&[first ^ 2, second, third, 0xff, 0xfe, fourth, fifth, sixth]);
    octets.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ethernet::{ARP, Frame, IPV6};

    const GUEST: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);

    #[test]
    fn a_guest_is_asked_for_known_and_derived_addresses() {
        let addresses = (0..20).map(|number| std::net::Ipv4Addr::new(10, 0, 0, number).into()).collect();
        let card = PingedCard { mac: GUEST, bridge: "br0".to_owned(), addresses };
        let asked: Vec<_> = card.questions().collect();
        assert_eq!(asked.len(), MOST_ADDRESSES + 1);
        assert_eq!(asked.last(), Some(&"fe80::5054:ff:fe12:3456".parse().unwrap()));
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
