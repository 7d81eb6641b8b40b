use proptest::prelude::*;

use super::*;
use crate::announcement;
use crate::ethernet::compose;

const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);
const OTHER: Mac = Mac([0x52, 0x54, 0, 0, 0, 2]);
const V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 7);
const V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 7);

/// An ARP message from `sender` about another address.
fn arp(operation: u8, source: Mac, sender: Mac, address: Ipv4Addr) -> Vec<u8> {
    arp_about(operation, source, sender, address, Ipv4Addr::new(10, 0, 0, 254))
}

fn arp_about(operation: u8, source: Mac, sender: Mac, address: Ipv4Addr, about: Ipv4Addr) -> Vec<u8> {
    let mut message = ARP_START.to_vec();
    message.extend([0, operation]);
    message.extend(sender.0);
    message.extend(address.octets());
    message.extend([0; 6]);
    message.extend(about.octets());
    compose(Mac::BROADCAST, source, None, ARP, &message)
}

fn claim(vlan: Option<u16>, address: impl Into<IpAddr>, is_router: bool) -> Claim {
    Claim { vlan, address: address.into(), is_router }
}

/// Passes frames from the guest (`true`) or towards it; returns the claims.
fn after(frames: &[(bool, Vec<u8>)]) -> Vec<Claim> {
    let mut claims = Claims::new(GUEST);
    for (is_from_guest, frame) in frames {
        claims.observe(*is_from_guest, &Frame::parse(frame, None).unwrap());
    }
    claims.all()
}

#[test]
fn a_guest_claims_by_requests_and_announcements() {
    let expected = [claim(None, V4, false)];
    assert_eq!(after(&[(true, arp(1, GUEST, GUEST, V4))]), expected);
    assert_eq!(after(&[(true, arp_about(2, GUEST, GUEST, V4, V4))]), expected);
    // Again and again is once.
    assert_eq!(after(&vec![(true, arp(1, GUEST, GUEST, V4)); 1000]), expected);
}

#[test]
fn what_is_announced_is_what_was_claimed() {
    for claim in [claim(None, V4, false), claim(Some(7), V4, false), claim(Some(9), V6, true)] {
        let frames = announcement::frames(GUEST, &[claim]);
        assert_eq!(after(&frames.into_iter().map(|frame| (true, frame)).collect::<Vec<_>>()), [claim]);
    }
}

/// A router answers for others (proxy ARP), and bridges their frames.
#[test]
fn addresses_of_others_are_not_claimed() {
    assert_eq!(after(&[(true, arp(2, GUEST, GUEST, V4))]), [], "answered for another");
    assert_eq!(after(&[(true, arp(1, OTHER, OTHER, V4))]), [], "bridged");
    assert_eq!(after(&[(true, arp(1, GUEST, OTHER, V4))]), [], "in another's name");
    assert_eq!(after(&[(true, arp(1, OTHER, GUEST, V4))]), [], "by another");
    assert_eq!(after(&[(false, arp(1, GUEST, GUEST, V4))]), [], "towards the guest");
    assert_eq!(after(&[(true, arp(1, GUEST, GUEST, Ipv4Addr::UNSPECIFIED))]), [], "a probe");
    let ip = compose(OTHER, GUEST, None, 0x0800, &[0x45; 40]);
    assert_eq!(after(&[(true, ip)]), [], "forwarded");
}

/// An address that moved from the guest to another machine, as with VRRP, and back.
#[test]
fn an_address_that_another_machine_claims_is_lost() {
    let mut frames = vec![(true, arp(1, GUEST, GUEST, V4)), (false, arp(2, OTHER, OTHER, V4))];
    assert_eq!(after(&frames), []);
    frames.push((true, arp(1, GUEST, GUEST, V4)));
    assert_eq!(after(&frames), [claim(None, V4, false)]);
    // The same address in another VLAN is another machine's business.
    let tagged = announcement::frames(OTHER, &[claim(Some(3), V4, false)]);
    frames.extend(tagged.into_iter().map(|frame| (false, frame)));
    assert_eq!(after(&frames), [claim(None, V4, false)]);
    // The guest's own announcement, flooded back.
    frames.push((false, arp(1, GUEST, GUEST, V4)));
    assert_eq!(after(&frames), [claim(None, V4, false)]);
}

#[test]
fn only_an_advertisement_that_overrides_claims() {
    let frame = announcement::frames(GUEST, &[claim(None, V6, false)]).pop().unwrap();
    let flags = 14 + IPV6_BYTES + 4;
    for (at, value, why) in [
        (flags, 0, "an answer for another machine"),
        (14 + 7, 64, "forwarded by a router"),
        (14 + IPV6_BYTES, 135, "a solicitation"),
        (14 + IPV6_BYTES + 24, 1, "without the target's address"),
        (14 + IPV6_BYTES + 25, 0, "an option without a length"),
        (14 + IPV6_BYTES + 8, 0xff, "a multicast address"),
    ] {
        let mut changed = frame.clone();
        changed[at] = value;
        assert_eq!(after(&[(true, changed)]), [], "{why}");
    }
    assert_eq!(after(&[(true, frame)]), [claim(None, V6, false)]);
}

#[test]
fn a_guest_with_countless_addresses_is_bounded() {
    let address = |n: u32| Ipv4Addr::from(u32::from(V4) + n);
    let mut frames: Vec<_> = (0..1000).map(|n| (true, arp(1, GUEST, GUEST, address(n)))).collect();
    assert_eq!(after(&frames).len(), MOST_CLAIMS);
    // What is known can still be lost.
    frames.push((false, arp(1, OTHER, OTHER, V4)));
    assert_eq!(after(&frames).len(), MOST_CLAIMS - 1);
}

proptest! {
    /// Bytes close to a claim, cut and changed: at most other claims.
    #[test]
    fn hostile_frames_are_ignored(
        kind in 0..2_u8,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
        is_from_guest: bool,
    ) {
        let address: IpAddr = if kind == 0 { V4.into() } else { V6.into() };
        let mut frame = announcement::frames(GUEST, &[claim(None, address, true)]).pop().unwrap();
        for (at, byte) in changes {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        frame.truncate(cut.index(frame.len() + 1));
        let mut claims = Claims::new(GUEST);
        if let Some(parsed) = Frame::parse(&frame, None) {
            claims.observe(is_from_guest, &parsed);
        }
        prop_assert!(claims.all().len() <= usize::from(is_from_guest));
    }
}
