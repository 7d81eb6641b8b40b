//! Addresses: a host's own, and those of a guest, as far as its connections need them.
//!
//! What a guest has claimed ([`Claims`](crate::Claims)) is announced in its name, and must be right. To copy entries of
//! connection tracking less is enough: an address from which the guest sends, or for which it answers a question.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tracee::{PacketSocket, VIRTIO_HEADER_BYTES};
use tracing::debug;

use crate::divert::{MARK, OWN_MAC};
use crate::ethernet::{ARP, Frame, IPV4, IPV6, Mac};
use crate::filter;
use crate::netlink::{DUMP, Requests, Socket, attribute};
use crate::probe::question;

/// Most addresses of a guest that are remembered: a router sends from those of others.
const MOST_ADDRESSES: usize = 256;

/// Numbers of `linux/rtnetlink.h`, `if_addr.h` and `neighbour.h`.
mod abi {
    pub(super) const GET_ADDRESS: u16 = 22;
    pub(super) const ADDRESS_BYTES: usize = 8;
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const LOCAL: u16 = 2;
    pub(super) const GET_NEIGHBOUR: u16 = 30;
    pub(super) const NEIGHBOUR_BYTES: usize = 12;
    pub(super) const DESTINATION: u16 = 1;
    pub(super) const LLADDR: u16 = 2;
}

/// Returns the addresses of this host.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn own(route: &Socket) -> io::Result<BTreeSet<IpAddr>> {
    let mut requests = Requests::default();
    requests.request(abi::GET_ADDRESS, DUMP, &[0; abi::ADDRESS_BYTES]);
    let mut addresses = BTreeSet::new();
    route.dump(requests, |body| {
        let listed = body.get(abi::ADDRESS_BYTES..).unwrap_or_default();
        // The other one is the peer's address where both are there.
        let own = attribute(listed, abi::LOCAL).or_else(|| attribute(listed, abi::ADDRESS));
        addresses.extend(own.and_then(address));
    })?;
    Ok(addresses)
}

/// Returns the addresses that this host knows as neighbours at these MAC addresses: it routes packets for them.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn neighbours(route: &Socket, macs: &[Mac]) -> io::Result<BTreeSet<IpAddr>> {
    let mut requests = Requests::default();
    requests.request(abi::GET_NEIGHBOUR, DUMP, &[0; abi::NEIGHBOUR_BYTES]);
    let mut addresses = BTreeSet::new();
    route.dump(requests, |body| {
        let listed = body.get(abi::NEIGHBOUR_BYTES..).unwrap_or_default();
        let mac = attribute(listed, abi::LLADDR);
        if mac.is_some_and(|mac| macs.iter().any(|known| known.0 == mac)) {
            addresses.extend(attribute(listed, abi::DESTINATION).and_then(address));
        }
    })?;
    Ok(addresses)
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(Ipv4Addr::from(*bytes.first_chunk::<4>()?).into()),
        16 => Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?).into()),
        _ => None,
    }
}

/// Samples of the addresses from which a guest sends. Between two looks the kernel keeps a few of its frames and drops
/// the others, so that this costs hardly anything.
#[derive(Debug)]
pub struct SourceAddressSampler {
    sockets: Vec<(PacketSocket, Mac)>,
    known: BTreeSet<IpAddr>,
    /// Sockets for questions to the guest.
    questions: Vec<PacketSocket>,
    asked: BTreeSet<IpAddr>,
}

impl SourceAddressSampler {
    /// Begins to sample the cards behind these interfaces, which are in the network namespace of this thread.
    ///
    /// # Errors
    /// If an interface does not exist, or this process may not open packet sockets.
    pub fn start<'a>(cards: impl IntoIterator<Item = (&'a str, Mac)>) -> io::Result<Self> {
        let socket = |(interface, mac): (&str, Mac)| -> io::Result<(PacketSocket, Mac)> {
            Ok((PacketSocket::listen(interface, &filter::ether_src(mac))?, mac))
        };
        let cards: Vec<_> = cards.into_iter().collect();
        let sockets = cards.iter().copied().map(socket).collect::<io::Result<_>>()?;
        let questions = cards.iter().map(|(interface, _)| PacketSocket::sender(interface, MARK));
        Ok(Self {
            sockets,
            known: BTreeSet::new(),
            questions: questions.collect::<io::Result<_>>()?,
            asked: BTreeSet::new(),
        })
    }

    /// Asks the guest alone, once, which of these addresses are its own. It answers as it does to everybody in its network, and
    /// learns no address by that. Its answers are seen by later [looks](Self::look).
    pub fn ask(&mut self, candidates: impl IntoIterator<Item = IpAddr>) {
        for candidate in candidates {
            if self.known.contains(&candidate) || self.asked.len() >= MOST_ADDRESSES {
                continue;
            }
            if !self.asked.insert(candidate) {
                continue;
            }
            for socket in &self.questions {
                let sent = socket.send([0; VIRTIO_HEADER_BYTES], &question(candidate, OWN_MAC));
                if let Err(error) = sent {
                    debug!(%candidate, %error, "the guest was not asked for an address");
                }
            }
        }
    }

    /// Returns the addresses that were seen until now.
    ///
    /// # Errors
    /// If an interface is gone.
    pub fn look(&mut self) -> io::Result<&BTreeSet<IpAddr>> {
        let mut buffer = [0; filter::FRAME_BYTES];
        for (socket, mac) in &self.sockets {
            while let Some(received) = socket.receive(&mut buffer)? {
                let bytes = buffer.get(..received.bytes).unwrap_or(&buffer);
                let frame = Frame::parse(bytes, received.vlan).filter(|frame| frame.source == *mac);
                let sender = frame.filter(|_| !received.is_outgoing).and_then(|frame| sender(&frame));
                if self.known.len() < MOST_ADDRESSES {
                    self.known.extend(sender);
                }
            }
        }
        Ok(&self.known)
    }
}

/// Returns the address of the sender of a packet or of an answer, if it is one machine's.
fn sender(frame: &Frame<'_>) -> Option<IpAddr> {
    let sender = match frame.kind {
        ARP => address(frame.payload.get(14..18)?),
        IPV4 => address(frame.payload.get(12..16)?),
        IPV6 => address(frame.payload.get(8..24)?),
        _ => None,
    };
    sender.filter(|sender| !sender.is_unspecified() && !sender.is_multicast() && !sender.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ethernet::compose;

    #[test]
    fn a_sender_is_read_from_packets_and_answers() {
        let of = |kind: u16, payload: &[u8]| {
            let frame = compose(Mac([1; 6]), Mac([2; 6]), Some(7), kind, payload);
            sender(&Frame::parse(&frame, None).unwrap())
        };
        let mut packet = [0; 40];
        assert_eq!(of(IPV4, &packet), None, "no address");
        packet[12..16].copy_from_slice(&[10, 0, 0, 7]);
        assert_eq!(of(IPV4, &packet), Some(Ipv4Addr::new(10, 0, 0, 7).into()));
        let mut message = [0; 28];
        assert_eq!(of(ARP, &message), None, "a probe for an address that the sender does not have yet");
        message[14..18].copy_from_slice(&[10, 0, 0, 8]);
        assert_eq!(of(ARP, &message), Some(Ipv4Addr::new(10, 0, 0, 8).into()));
        packet[8..24].copy_from_slice(&Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 7).octets());
        assert_eq!(of(IPV6, &packet), Some(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 7).into()));
        packet[8] = 0xff;
        assert_eq!(of(IPV6, &packet), None, "a group");
    }
}
