//! Probe of a network: frames that prove that two taps are in one layer-2 network, and that a gateway answers there.
//!
//! The source sends a frame with the number of this probe from the guest's tap as a broadcast, and looks for it at the
//! guest's tap at the destination: where it arrives with the same VLAN tag, the guest will be reached, and reach
//! others, as before. Gateways are asked as a machine asks that has no address yet: by an ARP probe (RFC 5227) or a
//! neighbour solicitation from the unspecified address (RFC 4862). So no address of another machine is used, and no
//! neighbour learns a wrong one. The MAC addresses are locally administered, and thrown away.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::announcement::{arp, checksum};
use crate::claims::{ADVERTISEMENT, ICMPV6, IPV6_BYTES};
use crate::ethernet::{ARP, Frame, IPV6, Mac, compose};

/// Kind of our frames: one that is kept free for experiments (IEEE 802), so that no machine answers.
pub(crate) const PROBE: u16 = 0x88b5;
/// Beginning of their payload.
const START: &[u8] = b"whimbrel";

/// Beginning of the MAC addresses from which a probe is sent.
const PROBE_MAC_START: [u8; 3] = [0x02, 0x57, 0x48];

/// Answer to an ARP request.
const ARP_REPLY: [u8; 2] = [0, 2];
/// Type of a neighbour solicitation.
const SOLICITATION: u8 = 135;
/// Bytes of a neighbour solicitation or advertisement up to the end of the target's address.
const TARGET_END: usize = 24;

/// Host from which frames of a probe are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The guest is there.
    Source,
    /// The guest is to go there.
    Destination,
}

/// Returns the MAC address from which one host sends on one of its taps.
pub fn probe_mac(nonce: u64, card: usize, side: Side) -> Mac {
    let number = nonce.wrapping_add(2 * card as u64 + u64::from(side == Side::Destination));
    let [.., high, middle, low] = number.to_be_bytes();
    let [first, second, third] = PROBE_MAC_START;
    Mac([first, second, third, high, middle, low])
}

/// Composes the frame that proves the network of a card in one VLAN; none without a tag.
pub fn frame(nonce: u64, card: Mac, from: Mac, vlan: Option<u16>) -> Vec<u8> {
    let payload = [START, &nonce.to_be_bytes(), &card.0].concat();
    compose(Mac::BROADCAST, from, vlan, PROBE, &payload)
}

/// Composes a frame without a tag for one MAC address alone, which does not answer it.
pub fn frame_to(to: Mac, nonce: u64, from: Mac) -> Vec<u8> {
    compose(to, from, None, PROBE, &[START, &nonce.to_be_bytes(), &to.0].concat())
}

/// Composes a question for the machine with an address.
pub fn question(address: IpAddr, from: Mac) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => {
            let message = arp(1, (from, Ipv4Addr::UNSPECIFIED), (Mac([0; 6]), address));
            compose(Mac::BROADCAST, from, None, ARP, &message)
        }
        IpAddr::V6(address) => solicitation(address, from),
    }
}

/// Composes the same question for one MAC address alone, which is asked if it has the address.
pub fn question_to(to: Mac, address: IpAddr, from: Mac) -> Vec<u8> {
    let mut frame = question(address, from);
    frame[..to.0.len()].copy_from_slice(&to.0);
    frame
}

/// Composes a neighbour solicitation from the unspecified address.
fn solicitation(address: Ipv6Addr, from: Mac) -> Vec<u8> {
    let [.., high, middle, low] = address.octets();
    let mut group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0).octets();
    group[13..].copy_from_slice(&[high, middle, low]);
    let mut message = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
    message.extend_from_slice(&address.octets());
    let sum = checksum(Ipv6Addr::UNSPECIFIED, group.into(), &message).to_be_bytes();
    message[2..4].copy_from_slice(&sum);
    let mut packet = vec![0x60, 0, 0, 0, 0, TARGET_END as u8, ICMPV6, 255];
    packet.extend_from_slice(&Ipv6Addr::UNSPECIFIED.octets());
    packet.extend_from_slice(&group);
    packet.extend_from_slice(&message);
    compose(Mac([0x33, 0x33, 0xff, high, middle, low]), from, None, IPV6, &packet)
}

/// Returns the address for which a frame answers.
fn answer(frame: &Frame<'_>) -> Option<IpAddr> {
    match frame.kind {
        ARP => {
            let is_reply = frame.payload.get(6..8) == Some(&ARP_REPLY[..]);
            let address = frame.payload.get(14..)?.first_chunk::<4>()?;
            is_reply.then(|| Ipv4Addr::from(*address).into())
        }
        IPV6 => {
            let is_icmp = frame.payload.get(6) == Some(&ICMPV6);
            let message = frame.payload.get(IPV6_BYTES..)?;
            let address = message.get(8..)?.first_chunk::<16>()?;
            (is_icmp && message[0] == ADVERTISEMENT).then(|| Ipv6Addr::from(*address).into())
        }
        _ => None,
    }
}

/// Proof of one card's network, as far as the destination's tap has shown it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkProof {
    nonce: u64,
    card: Mac,
    /// VLANs in which no frame has arrived; none for frames without a tag.
    missing: BTreeSet<Option<u16>>,
    /// Gateways that have not answered.
    silent: BTreeSet<IpAddr>,
}

impl NetworkProof {
    /// Creates an empty proof: frames are expected without a tag and in these VLANs, and answers of these gateways.
    pub fn new(nonce: u64, card: Mac, vlans: &[u16], gateways: &[IpAddr]) -> Self {
        let missing = vlans.iter().copied().map(Some).chain([None]).collect();
        Self { nonce, card, missing, silent: gateways.iter().copied().collect() }
    }

    /// Returns the MAC address of the card.
    pub fn card(&self) -> Mac {
        self.card
    }

    /// Learns from a frame that the host has sent towards the guest.
    pub fn observe(&mut self, frame: &Frame<'_>) {
        let rest = frame.payload.strip_prefix(START);
        let rest = rest.and_then(|rest| rest.strip_prefix(&self.nonce.to_be_bytes()));
        if frame.kind == PROBE && rest.is_some_and(|rest| rest.starts_with(&self.card.0)) {
            // A frame that arrives with another tag is in another VLAN for the guest.
            self.missing.remove(&frame.vlan);
        } else if let Some(address) = answer(frame) {
            self.silent.remove(&address);
        }
    }

    /// Returns true if nothing remains to be proven.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.silent.is_empty()
    }

    /// Returns the VLANs in which no frame has arrived; none for frames without a tag.
    pub fn missing(&self) -> impl Iterator<Item = Option<u16>> {
        self.missing.iter().copied()
    }

    /// Returns the gateways that have not answered.
    pub fn silent(&self) -> impl Iterator<Item = IpAddr> {
        self.silent.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::announcement;
    use crate::claims::{Claim, Claims};

    const NONCE: u64 = 0x0123_4567_89ab_cdef;
    const CARD: Mac = Mac([0x52, 0x54, 0, 0, 0, 7]);
    const OTHER: Mac = Mac([0x52, 0x54, 0, 0, 0, 8]);

    fn observe(proof: &mut NetworkProof, bytes: &[u8]) {
        proof.observe(&Frame::parse(bytes, None).unwrap());
    }

    fn from() -> Mac {
        probe_mac(NONCE, 0, Side::Source)
    }

    #[test]
    fn each_tap_of_a_probe_has_a_mac_address_of_its_own() {
        let macs: BTreeSet<_> = (0..10)
            .flat_map(|card| {
                [Side::Source, Side::Destination].map(|side| probe_mac(u64::MAX - 3, card, side))
            })
            .collect();
        assert_eq!(macs.len(), 20);
        // Locally administered, and of one machine.
        assert!(macs.iter().all(|Mac([first, ..])| first & 3 == 2));
    }

    #[test]
    fn only_the_frame_of_this_probe_and_card_proves() {
        let mut proof = NetworkProof::new(NONCE, CARD, &[], &[]);
        for other in [
            frame(NONCE + 1, CARD, from(), None),
            frame(NONCE, OTHER, from(), None),
            frame(NONCE, CARD, from(), Some(5)),
            compose(Mac::BROADCAST, from(), None, 0x0800, &frame(NONCE, CARD, from(), None)[14..]),
        ] {
            observe(&mut proof, &other);
            assert!(!proof.is_complete());
        }
        observe(&mut proof, &frame(NONCE, CARD, from(), None));
        assert!(proof.is_complete());
    }

    #[test]
    fn each_vlan_is_proven_by_its_own_tag() {
        let mut proof = NetworkProof::new(NONCE, CARD, &[5, 6], &[]);
        observe(&mut proof, &frame(NONCE, CARD, from(), Some(6)));
        assert_eq!(proof.missing().collect::<Vec<_>>(), [None, Some(5)]);
        // The kernel has taken the tag off.
        let bytes = frame(NONCE, CARD, from(), None);
        proof.observe(&Frame::parse(&bytes, Some(5)).unwrap());
        assert_eq!(proof.missing().collect::<Vec<_>>(), [None]);
    }

    #[test]
    fn gateways_answer_for_themselves() {
        let gateways: [IpAddr; 2] = ["10.0.0.254".parse().unwrap(), "fe80::fe".parse().unwrap()];
        let mut proof = NetworkProof::new(NONCE, CARD, &[], &gateways);
        observe(&mut proof, &frame(NONCE, CARD, from(), None));
        // Our own question, flooded back, and a request of the gateway are no answers.
        for address in gateways {
            observe(&mut proof, &question(address, from()));
        }
        let gateway = (OTHER, Ipv4Addr::new(10, 0, 0, 254));
        let other = (OTHER, Ipv4Addr::new(10, 0, 0, 253));
        let asking = (from(), Ipv4Addr::UNSPECIFIED);
        for (operation, sender) in [(1, gateway), (2, other)] {
            observe(&mut proof, &compose(from(), OTHER, None, ARP, &arp(operation, sender, asking)));
        }
        assert_eq!(proof.silent().collect::<Vec<_>>(), gateways);
        observe(&mut proof, &compose(from(), OTHER, None, ARP, &arp(2, gateway, asking)));
        let claim = Claim { vlan: None, address: gateways[1], is_router: true };
        observe(&mut proof, announcement::frames(OTHER, &[claim]).last().unwrap());
        assert!(proof.is_complete());
    }

    /// A question of ours takes no address: neighbours learn nothing, and the guest's claims are not touched.
    #[test]
    fn questions_claim_no_address() {
        for address in ["10.0.0.254", "fd00::1:2:fe"] {
            let bytes = question(address.parse().unwrap(), CARD);
            let mut claims = Claims::new(CARD);
            claims.observe(true, &Frame::parse(&bytes, None).unwrap());
            assert_eq!(claims.all(), []);
        }
        let bytes = question("fd00::1:2:fe".parse().unwrap(), CARD);
        let frame = Frame::parse(&bytes, None).unwrap();
        assert_eq!(frame.destination, Mac([0x33, 0x33, 0xff, 2, 0, 0xfe]));
        let group = *frame.payload[24..].first_chunk::<16>().unwrap();
        let message = &frame.payload[IPV6_BYTES..IPV6_BYTES + TARGET_END];
        assert_eq!(checksum(Ipv6Addr::UNSPECIFIED, group.into(), message), 0);
    }

    #[test]
    fn frames_that_are_cut_off_prove_nothing() {
        let mut proof = NetworkProof::new(NONCE, CARD, &[], &["::1".parse().unwrap()]);
        let own = frame(NONCE, CARD, from(), None);
        let claim = Claim { vlan: None, address: "::1".parse().unwrap(), is_router: true };
        let advertisement = announcement::frames(OTHER, &[claim]).pop().unwrap();
        for bytes in 14..14 + START.len() + 8 + 6 {
            observe(&mut proof, &own[..bytes]);
        }
        for bytes in 14..14 + IPV6_BYTES + TARGET_END {
            observe(&mut proof, &advertisement[..bytes]);
        }
        assert!(proof.missing().eq([None]) && proof.silent().count() == 1);
    }
}
