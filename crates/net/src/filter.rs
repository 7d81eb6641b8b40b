//! Programs by which the kernel selects the frames that this crate reads, so that the rest costs hardly anything.

use tracee::FilterStep;

use crate::claims::{ADVERTISEMENT, ICMPV6, IPV6_BYTES};
use crate::conntrack::{ICMP, UDP};
use crate::ethernet::{ARP, HEADER_BYTES, IPV4, IPV6, Mac, TAG_BYTES, VLAN};
use crate::probe::PROBE;

/// Most bytes of a frame that are read: headers with a tag, and an advertisement with some options.
pub const FRAME_BYTES: usize = 192;

/// Operations of classic BPF: load a constant into the index, load from a fixed place, load from behind the index,
/// compare, end.
const SET_INDEX: u16 = 0x01;
const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_HALF_BEHIND: u16 = 0x48;
const LOAD_BYTE_BEHIND: u16 = 0x50;
const IF_EQUAL: u16 = 0x15;
const ACCEPT: u16 = 0x06;

const fn step(code: u16, operand: u32) -> FilterStep {
    FilterStep { code, if_true: 0, if_false: 0, operand }
}

const fn if_equal(operand: u32, if_true: u8, if_false: u8) -> FilterStep {
    FilterStep { code: IF_EQUAL, if_true, if_false, operand }
}

/// Selects what claims an address: ARP, and neighbour advertisements, with a VLAN tag or without.
pub fn claims() -> Vec<FilterStep> {
    of_kinds(&[ARP])
}

/// Selects frames of a probe, and what answers its questions: ARP and neighbour advertisements.
pub fn probe() -> Vec<FilterStep> {
    of_kinds(&[ARP, PROBE])
}

/// Selects frames of these kinds, and neighbour advertisements, with a VLAN tag or without.
fn of_kinds(kinds: &[u16]) -> Vec<FilterStep> {
    let (kind, payload) = (12, HEADER_BYTES as u32);
    let mut steps = vec![
        step(SET_INDEX, 0),
        step(LOAD_HALF, kind),
        if_equal(VLAN.into(), 0, 1),
        step(SET_INDEX, TAG_BYTES as u32),
        step(LOAD_HALF_BEHIND, kind),
    ];
    let advertisement = [
        if_equal(IPV6.into(), 0, 5),
        step(LOAD_BYTE_BEHIND, payload + 6),
        if_equal(ICMPV6.into(), 0, 3),
        step(LOAD_BYTE_BEHIND, payload + IPV6_BYTES as u32),
        if_equal(ADVERTISEMENT.into(), 0, 1),
    ];
    let after = (1..=kinds.len()).rev().map(|left| left - 1 + advertisement.len());
    steps.extend(kinds.iter().zip(after).map(|(kind, skipped)| if_equal((*kind).into(), skipped as u8, 0)));
    steps.extend(advertisement);
    steps.extend([step(ACCEPT, FRAME_BYTES as u32), step(ACCEPT, 0)]);
    steps
}

/// Selects the frames from and to one MAC address, as `ether host` of pcap-filter does.
pub fn ether_host(mac: Mac) -> [FilterStep; 10] {
    let number = mac.0.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let (high, low) = ((number >> 16) as u32, (number & 0xffff) as u32);
    [
        step(LOAD_WORD, 0),
        if_equal(high, 0, 2),
        step(LOAD_HALF, 4),
        if_equal(low, 4, 0),
        step(LOAD_WORD, 6),
        if_equal(high, 0, 3),
        step(LOAD_HALF, 10),
        if_equal(low, 0, 1),
        step(ACCEPT, FRAME_BYTES as u32),
        step(ACCEPT, 0),
    ]
}

/// Selects the frames from one MAC address, as `ether src` does.
pub fn ether_src(mac: Mac) -> [FilterStep; 6] {
    let [.., load_high, high, load_low, low, accept, refuse] = ether_host(mac);
    [load_high, high, load_low, low, accept, refuse]
}

/// Selects the frames from one MAC address that have datagrams: UDP and ICMP, without a VLAN tag.
pub fn datagrams_from(mac: Mac) -> [FilterStep; 16] {
    let [load_high, mut high, load_low, mut low, accept, refuse] = ether_src(mac);
    let kind = 12;
    let of_v4 = HEADER_BYTES as u32 + 9;
    let of_v6 = HEADER_BYTES as u32 + 6;
    // To the last step, which refuses.
    (high.if_false, low.if_false) = (13, 11);
    [
        load_high,
        high,
        load_low,
        low,
        step(SET_INDEX, 0),
        step(LOAD_HALF, kind),
        if_equal(IPV4.into(), 0, 3),
        step(LOAD_BYTE_BEHIND, of_v4),
        if_equal(UDP.into(), 5, 0),
        if_equal(ICMP.into(), 4, 5),
        if_equal(IPV6.into(), 0, 4),
        step(LOAD_BYTE_BEHIND, of_v6),
        if_equal(UDP.into(), 1, 0),
        if_equal(ICMPV6.into(), 0, 1),
        accept,
        refuse,
    ]
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::claims::Claim;
    use crate::ethernet::{Frame, compose};
    use crate::{announcement, probe};

    /// Runs a program as the kernel does.
    fn accepts(program: &[FilterStep], frame: &[u8]) -> bool {
        let (mut accumulator, mut index, mut at) = (0, 0, 0);
        let bytes = |from: u32, len: u32| {
            let part = frame.get(from as usize..(from + len) as usize)?;
            Some(part.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)))
        };
        loop {
            let FilterStep { code, if_true, if_false, operand } = program[at];
            at += 1;
            let loaded = match code {
                SET_INDEX => {
                    index = operand;
                    continue;
                }
                IF_EQUAL => {
                    at += usize::from(if accumulator == operand { if_true } else { if_false });
                    continue;
                }
                ACCEPT => return operand > 0,
                LOAD_WORD => bytes(operand, 4),
                LOAD_HALF => bytes(operand, 2),
                LOAD_HALF_BEHIND => bytes(index + operand, 2),
                LOAD_BYTE_BEHIND => bytes(index + operand, 1),
                other => panic!("no such operation: {other:x}"),
            };
            // Beyond the end of the frame the kernel ends the program, and does not accept.
            let Some(loaded) = loaded else { return false };
            accumulator = loaded;
        }
    }

    const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);
    const OTHER: Mac = Mac([0x52, 0x54, 0, 0, 0, 2]);

    #[test]
    fn what_claims_an_address_is_read() {
        for address in ["10.0.0.7", "fd00::7"] {
            for vlan in [None, Some(3)] {
                let address: IpAddr = address.parse().unwrap();
                let frames = announcement::frames(GUEST, &[Claim { vlan, address, is_router: false }]);
                assert!(accepts(&claims(), frames.last().unwrap()));
                // Other frames are not read: reverse ARP, IPv4, and all other IPv6.
                assert!(!accepts(&claims(), &frames[0]));
            }
        }
        for (kind, payload) in [(0x0800, [58; 80]), (IPV6, [58; 80]), (IPV6, [136; 80]), (0x88cc, [0; 80])] {
            let frame = compose(OTHER, GUEST, None, kind, &payload);
            assert!(!accepts(&claims(), &frame), "{kind:x}");
        }
    }

    #[test]
    fn probes_and_what_answers_them_are_read() {
        for vlan in [None, Some(3)] {
            assert!(accepts(&probe(), &probe::frame(7, GUEST, OTHER, vlan)));
            for address in ["10.0.0.7", "fd00::7"] {
                let address: IpAddr = address.parse().unwrap();
                let frames = announcement::frames(GUEST, &[Claim { vlan, address, is_router: false }]);
                assert!(accepts(&probe(), frames.last().unwrap()));
                assert!(!accepts(&probe(), &frames[0]), "reverse ARP");
            }
            for (kind, payload) in
                [(0x0800, [58; 80]), (IPV6, [58; 80]), (IPV6, [136; 80]), (0x88cc, [0; 80])]
            {
                assert!(!accepts(&probe(), &compose(OTHER, GUEST, vlan, kind, &payload)), "{kind:x}");
            }
        }
    }

    #[test]
    fn frames_of_a_mac_address_are_read_in_both_directions() {
        let other = Mac([0x52, 0x54, 0, 0, 1, 1]);
        for (destination, source, is_read) in [
            (GUEST, other, true),
            (other, GUEST, true),
            (Mac::BROADCAST, GUEST, true),
            (other, other, false),
            (Mac::BROADCAST, OTHER, false),
        ] {
            let frame = compose(destination, source, None, 0x0800, &[]);
            assert_eq!(accepts(&ether_host(GUEST), &frame), is_read, "{source} to {destination}");
        }
    }

    #[test]
    fn datagrams_of_a_guest_are_read() {
        let packet = |version: u8, at: usize, protocol: u8| {
            let mut packet = [0; 60];
            packet[0] = version;
            packet[at] = protocol;
            packet
        };
        let (v4, v6) = (|protocol| packet(0x45, 9, protocol), |protocol| packet(0x60, 6, protocol));
        for (source, kind, payload, is_read) in [
            (GUEST, IPV4, v4(UDP), true),
            (GUEST, IPV4, v4(ICMP), true),
            (GUEST, IPV4, v4(6), false),
            (GUEST, IPV6, v6(UDP), true),
            (GUEST, IPV6, v6(ICMPV6), true),
            (GUEST, IPV6, v6(6), false),
            (GUEST, IPV6, v6(ICMP), false),
            (GUEST, ARP, v4(UDP), false),
            (Mac([0x52, 0x54, 0, 0, 1, 1]), IPV4, v4(UDP), false),
            (OTHER, IPV4, v4(UDP), false),
        ] {
            let frame = compose(OTHER, source, None, kind, &payload);
            assert_eq!(accepts(&datagrams_from(GUEST), &frame), is_read, "{source} {kind:x} {payload:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_lead_out_of_a_program(frame in prop::collection::vec(any::<u8>(), 0..100)) {
            accepts(&claims(), &frame);
            accepts(&probe(), &frame);
            accepts(&datagrams_from(GUEST), &frame);
            let own = Frame::parse(&frame, None)
                .is_some_and(|frame| frame.source == GUEST || frame.destination == GUEST);
            prop_assert_eq!(accepts(&ether_host(GUEST), &frame), own);
        }
    }
}
