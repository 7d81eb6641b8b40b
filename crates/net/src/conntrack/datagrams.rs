//! Entries of flows that connection tracking has not seen, as in a bridge: they are read from a packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{ConntrackEntry, Tuple, TupleParts, abi};
use crate::claims::{ICMPV6, IPV6_BYTES};
use crate::ethernet::{Frame, IPV4, IPV6};
use crate::netlink::Requests;

/// Families of addresses, as netfilter numbers them.
const FAMILY_V4: u8 = 2;
/// See [`FAMILY_V4`].
const FAMILY_V6: u8 = 10;
/// Protocols.
pub(crate) const UDP: u8 = 17;
/// See [`UDP`].
pub(crate) const ICMP: u8 = 1;
/// Types of ICMP: request and answer of an echo.
const ECHO: [u8; 2] = [8, 0];
/// See [`ECHO`].
const ECHO_V6: [u8; 2] = [128, 129];
/// Bits of the place of a fragment.
const FRAGMENT_MASK: u16 = 0x1fff;
/// Time after which an entry ends without packets: that of the kernel for flows in both directions.
const TIMEOUT_S: u32 = 120;

/// A packet of IPv4 or IPv6.
struct Packet<'a> {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    /// Its content, with the headers of the protocol.
    content: &'a [u8],
}

impl ConntrackEntry {
    /// Returns the entry of the flow to which the packet in a frame belongs: of UDP, or of an echo request (`ping`). None
    /// for all other packets, among them fragments behind the first, and those to many receivers.
    pub fn of_datagram(frame: &Frame<'_>) -> Option<Self> {
        let packet = match frame.kind {
            IPV4 => packet_v4(frame.payload),
            IPV6 => packet_v6(frame.payload),
            _ => None,
        }?;
        let Packet { source, destination, protocol, content } = packet;
        if source.is_unspecified() || destination.is_multicast() || destination == Ipv4Addr::BROADCAST {
            return None;
        }
        let [original, reply] = parts(protocol, source.is_ipv6(), content)?;
        let original = Tuple { source, destination, protocol, parts: original };
        let reply = Tuple { source: destination, destination: source, protocol, parts: reply };
        let mut kept = Requests::default();
        for (kind, tuple) in [(abi::ORIGINAL, &original), (abi::REPLY, &reply)] {
            kept.nest(kind);
            tuple.compose(&mut kept);
            kept.end();
        }
        kept.number(abi::STATUS, abi::SEEN_REPLY).number(abi::TIMEOUT, TIMEOUT_S);
        let family = if source.is_ipv6() { FAMILY_V6 } else { FAMILY_V4 };
        Some(Self([&[family, 0, 0, 0], &kept.finish()[..]].concat()))
    }
}

fn packet_v4(bytes: &[u8]) -> Option<Packet<'_>> {
    let header = bytes.first_chunk::<20>()?;
    let place = u16::from_be_bytes([header[6], header[7]]) & FRAGMENT_MASK;
    let header_bytes = usize::from(header[0] & 0xf) * 4;
    let is_whole = header[0] >> 4 == 4 && place == 0 && header_bytes >= header.len();
    let end = |at: usize| header.get(at..).and_then(<[u8]>::first_chunk::<4>).map(|end| Ipv4Addr::from(*end));
    Some(Packet {
        source: end(12)?.into(),
        destination: end(16)?.into(),
        protocol: header[9],
        content: bytes.get(header_bytes..).filter(|_| is_whole)?,
    })
}

/// Reads a packet of IPv6 whose content follows its header at once: datagrams hardly ever have other headers between.
fn packet_v6(bytes: &[u8]) -> Option<Packet<'_>> {
    let (header, content) = bytes.split_at_checked(IPV6_BYTES)?;
    let end =
        |at: usize| header.get(at..).and_then(<[u8]>::first_chunk::<16>).map(|end| Ipv6Addr::from(*end));
    Some(Packet {
        source: end(8)?.into(),
        destination: end(24)?.into(),
        protocol: *header.get(6)?,
        content: Some(content).filter(|_| header.first().is_some_and(|first| first >> 4 == 6))?,
    })
}

/// Returns what distinguishes the flow from others between the same addresses, in both directions.
fn parts(protocol: u8, is_v6: bool, content: &[u8]) -> Option<[TupleParts; 2]> {
    match (protocol, is_v6) {
        (UDP, _) => {
            let (source, destination) = (content.get(..2)?.to_vec(), content.get(2..4)?.to_vec());
            let ports = |from, to| vec![(abi::SOURCE_PORT, from), (abi::DESTINATION_PORT, to)];
            Some([ports(source.clone(), destination.clone()), ports(destination, source)])
        }
        (ICMP, false) => echo(abi::ICMP, ECHO, content),
        (ICMPV6, true) => echo(abi::ICMPV6, ECHO_V6, content),
        _ => None,
    }
}

fn echo(kinds: [u16; 3], [request, answer]: [u8; 2], content: &[u8]) -> Option<[TupleParts; 2]> {
    let identifier = content.get(4..6)?;
    let [of_identifier, of_type, of_code] = kinds;
    let part =
        |number: u8| vec![(of_identifier, identifier.to_vec()), (of_type, vec![number]), (of_code, vec![0])];
    (content.first_chunk() == Some(&[request, 0])).then(|| [part(request), part(answer)])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ethernet::{Mac, compose};

    const SOURCE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
    const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 7);

    /// Composes a packet of IPv4 with 24 bytes of header.
    fn v4(destination: Ipv4Addr, protocol: u8, place: u16, content: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x46; 24];
        packet[6..8].copy_from_slice(&place.to_be_bytes());
        packet[9] = protocol;
        packet[12..16].copy_from_slice(&SOURCE.octets());
        packet[16..20].copy_from_slice(&destination.octets());
        [packet, content.to_vec()].concat()
    }

    fn v6(protocol: u8, content: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x60; 40];
        packet[6] = protocol;
        packet[8..24].copy_from_slice(&SOURCE.to_ipv6_mapped().octets());
        packet[24..40].copy_from_slice(&GUEST.to_ipv6_mapped().octets());
        [packet, content.to_vec()].concat()
    }

    fn entry(kind: u16, payload: &[u8]) -> Option<ConntrackEntry> {
        let frame = compose(Mac([1; 6]), Mac([2; 6]), None, kind, payload);
        ConntrackEntry::of_datagram(&Frame::parse(&frame, None)?)
    }

    const PORTS: [u8; 8] = [0x1f, 0x90, 0, 53, 0, 8, 0, 0];

    #[test]
    fn flows_are_read_with_both_directions() {
        for (kind, packet) in [(IPV4, v4(GUEST, UDP, 0x2000, &PORTS)), (IPV6, v6(UDP, &PORTS))] {
            let (original, reply) = entry(kind, &packet).unwrap().tuples().unwrap();
            assert_eq!((original.source, original.destination), (reply.destination, reply.source));
            assert_eq!(
                (original.source_port(), original.destination_port()),
                (Some(&PORTS[..2]), Some(&PORTS[2..4]))
            );
            assert_eq!(original.answer(&reply), reply);
        }
        let entry = entry(IPV4, &v4(GUEST, UDP, 0, &PORTS)).unwrap();
        assert_eq!(entry.to_string(), "udp 192.0.2.9:8080 → 10.0.0.7:53");
        assert_eq!((entry.mark(), entry.timeout_s(), entry.translated_to()), (0, TIMEOUT_S, vec![]));
    }

    #[test]
    fn an_echo_has_another_type_in_each_direction() {
        let request = |number: u8| [number, 0, 1, 2, 3, 4, 0, 0];
        for (kind, packet, types) in
            [(IPV4, v4(GUEST, ICMP, 0, &request(8)), ECHO), (IPV6, v6(ICMPV6, &request(128)), ECHO_V6)]
        {
            let (original, reply) = entry(kind, &packet).unwrap().tuples().unwrap();
            let values =
                |tuple: &Tuple| tuple.parts.iter().map(|(_, value)| value.clone()).collect::<Vec<_>>();
            assert_eq!(values(&original), [vec![3, 4], vec![types[0]], vec![0]]);
            assert_eq!(values(&reply), [vec![3, 4], vec![types[1]], vec![0]]);
        }
        assert_eq!(entry(IPV4, &v4(GUEST, ICMP, 0, &request(0))), None, "an answer");
        assert_eq!(entry(IPV6, &v6(ICMPV6, &request(136))), None, "an advertisement");
    }

    #[test]
    fn other_packets_have_no_flow() {
        for packet in [
            v4(GUEST, 6, 0, &PORTS),
            v4(GUEST, UDP, 7, &PORTS),
            v4(GUEST, UDP, 0, &PORTS[..3])[..27].to_vec(),
            v4(Ipv4Addr::BROADCAST, UDP, 0, &PORTS),
            v4(Ipv4Addr::new(224, 0, 0, 251), UDP, 0, &PORTS),
        ] {
            let frame = Frame {
                destination: Mac([1; 6]),
                source: Mac([2; 6]),
                vlan: None,
                kind: IPV4,
                payload: &packet,
            };
            assert_eq!(ConntrackEntry::of_datagram(&frame), None, "{packet:?}");
        }
        assert_eq!(entry(IPV6, &v6(0, &PORTS)), None, "options first");
        assert_eq!(entry(0x0806, &v4(GUEST, UDP, 0, &PORTS)), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_flow_or_none(kind in prop::sample::select(vec![IPV4, IPV6]),
                                        bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(entry) = entry(kind, &bytes) {
                prop_assert!(entry.tuples().is_some());
            }
        }
    }
}
