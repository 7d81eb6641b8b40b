//! Frames that announce where a guest is now.
//!
//! A switch learns where a MAC address is from any frame that comes from it: a reverse ARP request is the frame that
//! no machine answers (QEMU sends the same one). Routers and fabrics that keep addresses instead of MAC addresses learn
//! from a gratuitous ARP request (RFC 5227) or an unsolicited neighbour advertisement (RFC 4861, 7.2.6), which are
//! composed only for addresses that the guest itself [has claimed](crate::claims).

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crate::claims::{ADVERTISEMENT, Claim, ICMPV6, OVERRIDE, ROUTER, TARGET_ADDRESS};
use crate::ethernet::{ARP, Frame, IPV6, Mac, RARP, compose};

/// Pauses between the repetitions of an announcement, any of which may be lost: those of QEMU's own announcement.
pub const PAUSES: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(250),
    Duration::from_millis(350),
];

/// Group of all nodes on a link, and the MAC address for it.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: Mac = Mac([0x33, 0x33, 0, 0, 0, 1]);

/// Returns the frames that announce the card with this MAC address: one for switches in each VLAN, and one for each
/// address that the guest has claimed.
pub fn frames(mac: Mac, claims: &[Claim]) -> Vec<Vec<u8>> {
    let vlans: BTreeSet<_> = claims.iter().map(|claim| claim.vlan).chain([None]).collect();
    let places = vlans.into_iter().map(|vlan| reverse_arp(mac, vlan));
    places.chain(claims.iter().map(|claim| of_address(mac, claim))).collect()
}

/// Returns the frame that announces an address of the machine with this MAC address.
pub(crate) fn of_address(mac: Mac, claim: &Claim) -> Vec<u8> {
    match claim.address {
        IpAddr::V4(address) => gratuitous_arp(mac, claim.vlan, address),
        IpAddr::V6(address) => advertisement(mac, claim.vlan, address, claim.is_router),
    }
}

/// Returns true if a frame is one that is sent for a guest, or that a guest sends by itself when its card reports a
/// migration: it shows that a device works, but not that a program in the guest does.
pub fn is_announcement(frame: &Frame<'_>) -> bool {
    let payload = frame.payload;
    match frame.kind {
        RARP => true,
        // Sender and target are the same address.
        ARP => payload.get(14..18).is_some_and(|sender| payload.get(24..28) == Some(sender)),
        IPV6 => {
            let to_all = payload.get(24..40) == Some(&ALL_NODES.octets()[..]);
            to_all && payload.get(6) == Some(&ICMPV6) && payload.get(40) == Some(&ADVERTISEMENT)
        }
        _ => false,
    }
}

/// Composes an ARP message for Ethernet and IPv4.
pub(crate) fn arp(operation: u8, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr)) -> Vec<u8> {
    let mut message = vec![0, 1, 8, 0, 6, 4, 0, operation];
    for (mac, address) in [sender, target] {
        message.extend_from_slice(&mac.0);
        message.extend_from_slice(&address.octets());
    }
    message
}

/// Composes a reverse ARP request of a machine for itself.
fn reverse_arp(mac: Mac, vlan: Option<u16>) -> Vec<u8> {
    let own = (mac, Ipv4Addr::UNSPECIFIED);
    compose(Mac::BROADCAST, mac, vlan, RARP, &arp(3, own, own))
}

fn gratuitous_arp(mac: Mac, vlan: Option<u16>, address: Ipv4Addr) -> Vec<u8> {
    let message = arp(1, (mac, address), (Mac([0; 6]), address));
    compose(Mac::BROADCAST, mac, vlan, ARP, &message)
}

/// Composes an unsolicited neighbour advertisement.
fn advertisement(mac: Mac, vlan: Option<u16>, address: Ipv6Addr, is_router: bool) -> Vec<u8> {
    let flags = if is_router { OVERRIDE | ROUTER } else { OVERRIDE };
    let mut message = vec![ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0];
    message.extend_from_slice(&address.octets());
    message.extend_from_slice(&[TARGET_ADDRESS, 1]);
    message.extend_from_slice(&mac.0);
    let length = message.len() as u16;
    let sum = checksum(address, ALL_NODES, &message).to_be_bytes();
    message[2..4].copy_from_slice(&sum);
    let [high, low] = length.to_be_bytes();
    let mut packet = vec![0x60, 0, 0, 0, high, low, ICMPV6, 255];
    packet.extend_from_slice(&address.octets());
    packet.extend_from_slice(&ALL_NODES.octets());
    packet.extend_from_slice(&message);
    compose(ALL_NODES_MAC, mac, vlan, IPV6, &packet)
}

/// Returns the checksum of an `ICMPv6` message (RFC 4443, 2.3).
pub(crate) fn checksum(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> u16 {
    let words = |bytes: &[u8]| -> u32 {
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| (*low).into())).sum()
    };
    let mut sum = words(&source.octets()) + words(&destination.octets()) + words(message);
    sum += message.len() as u32 + u32::from(ICMPV6);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
    }

    fn claim(vlan: Option<u16>, address: &str, is_router: bool) -> Claim {
        Claim { vlan, address: address.parse().unwrap(), is_router }
    }

    #[test]
    fn without_claims_only_switches_are_informed() {
        let frames = frames(GUEST, &[]);
        assert_eq!(frames.len(), 1);
        let expected = "ffffffffffff525400123456803500010800060400035254001234560000000052540012345600000000";
        assert_eq!(hex(&frames[0][..42]), expected);
        assert_eq!(frames[0].len(), 60);
    }

    #[test]
    fn each_address_is_announced_in_its_vlan() {
        let claims = [claim(None, "10.0.0.7", false), claim(Some(5), "10.5.0.7", false)];
        let frames = frames(GUEST, &claims);
        let kinds: Vec<_> = frames
            .iter()
            .map(|frame| Frame::parse(frame, None).unwrap())
            .map(|frame| (frame.kind, frame.vlan, is_announcement(&frame)))
            .collect();
        assert_eq!(
            kinds,
            [(RARP, None, true), (RARP, Some(5), true), (ARP, None, true), (ARP, Some(5), true)]
        );
        let expected = "ffffffffffff525400123456080600010800060400015254001234560a0000070000000000000a000007";
        assert_eq!(hex(&frames[2][..42]), expected);
        assert_eq!(frames[3].len(), 64, "not too short without its tag");
    }

    /// The sum of a correct message with its checksum is zero.
    #[test]
    fn advertisements_have_correct_checksums() {
        for address in ["fd00::7", "fe80::5054:ff:fe12:3456", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"] {
            let address: Ipv6Addr = address.parse().unwrap();
            let bytes = advertisement(GUEST, None, address, true);
            let frame = Frame::parse(&bytes, None).unwrap();
            assert!(is_announcement(&frame));
            assert_eq!(frame.destination, ALL_NODES_MAC);
            let message = &frame.payload[40..72];
            assert_eq!(checksum(address, ALL_NODES, message), 0);
            assert_eq!(hex(&message[4..8]), "a0000000");
        }
        // As another program computes it.
        let bytes = advertisement(GUEST, None, "fe80::1".parse().unwrap(), false);
        assert_eq!(hex(&bytes[14 + 40..14 + 44]), "8800d2df");
    }

    #[test]
    fn a_guests_own_traffic_is_no_announcement() {
        let ask = arp(1, (GUEST, Ipv4Addr::new(10, 0, 0, 7)), (Mac([0; 6]), Ipv4Addr::new(10, 0, 0, 254)));
        for (kind, payload) in [(ARP, &ask[..]), (0x0800, &[0x45; 40]), (IPV6, &[0x60; 80])] {
            let bytes = compose(Mac::BROADCAST, GUEST, None, kind, payload);
            assert!(!is_announcement(&Frame::parse(&bytes, None).unwrap()), "{kind:x}");
        }
    }
}
