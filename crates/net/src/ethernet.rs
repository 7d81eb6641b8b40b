//! Ethernet frames, as far as announcements need them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Length of a header without a VLAN tag, in bytes.
pub const HEADER_BYTES: usize = 14;
/// Length of a VLAN tag, in bytes.
pub const TAG_BYTES: usize = 4;
/// Shortest frame on a cable, without its checksum, in bytes.
const LEAST_BYTES: usize = 60;

/// Kind of a frame: IPv4.
pub const IPV4: u16 = 0x0800;
/// Kind of a frame: ARP.
pub const ARP: u16 = 0x0806;
/// Kind of a frame: reverse ARP.
pub const RARP: u16 = 0x8035;
/// Kind of a frame: IPv6.
pub const IPV6: u16 = 0x86dd;
/// Kind of a frame: a VLAN tag follows.
pub const VLAN: u16 = 0x8100;

/// MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Broadcast address.
    pub const BROADCAST: Self = Self([0xff; 6]);
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, rest @ ..] = self.0;
        write!(f, "{first:02x}")?;
        rest.iter().try_for_each(|byte| write!(f, ":{byte:02x}"))
    }
}

/// Returns the position of the card that another host names by this MAC address. A guest may have changed it: the QEMU
/// that runs it prints the present one, and a QEMU that was just started the original one. If there is one card only,
/// it is meant all the same.
pub fn position_of_card(cards: impl IntoIterator<Item = Mac>, named: Mac) -> Option<usize> {
    let cards: Vec<_> = cards.into_iter().collect();
    cards.iter().position(|card| *card == named).or((cards.len() == 1).then_some(0))
}

/// Error: a text is not a MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a MAC address")]
pub struct NotMac;

impl FromStr for Mac {
    type Err = NotMac;

    fn from_str(text: &str) -> Result<Self, NotMac> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or(NotMac)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| NotMac)?;
        }
        if parts.next().is_none() { Ok(Self(bytes)) } else { Err(NotMac) }
    }
}

/// A parsed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Receiver.
    pub destination: Mac,
    /// Sender.
    pub source: Mac,
    /// Number of the VLAN, 1 to 4094; none for a frame without a tag, or with a tag that has a priority only.
    pub vlan: Option<u16>,
    /// Kind of the payload.
    pub kind: u16,
    /// Payload, with padding.
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Parses a frame; none if it is too short. `tag` is the tag that the kernel has taken off, if there was one.
    pub fn parse(bytes: &'a [u8], tag: Option<u16>) -> Option<Self> {
        let (destination, rest) = bytes.split_first_chunk()?;
        let (source, rest) = rest.split_first_chunk()?;
        let (mut kind, mut payload) = word(rest)?;
        let mut tag = tag;
        if kind == VLAN && tag.is_none() {
            let (inner, rest) = word(payload)?;
            tag = Some(inner);
            (kind, payload) = word(rest)?;
        }
        let vlan = tag.map(|tag| tag & 0xfff).filter(|id| *id != 0);
        Some(Self { destination: Mac(*destination), source: Mac(*source), vlan, kind, payload })
    }
}

/// Takes a number of two bytes off.
fn word(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let (word, rest) = bytes.split_first_chunk()?;
    Some((u16::from_be_bytes(*word), rest))
}

/// Composes a frame, padded to the shortest length.
pub fn compose(destination: Mac, source: Mac, vlan: Option<u16>, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_BYTES + TAG_BYTES + payload.len());
    frame.extend_from_slice(&destination.0);
    frame.extend_from_slice(&source.0);
    if let Some(vlan) = vlan {
        frame.extend_from_slice(&VLAN.to_be_bytes());
        frame.extend_from_slice(&(vlan & 0xfff).to_be_bytes());
    }
    frame.extend_from_slice(&kind.to_be_bytes());
    frame.extend_from_slice(payload);
    // Whoever takes the tag off must not be left with a frame that is too short.
    let least = if vlan.is_some() { LEAST_BYTES + TAG_BYTES } else { LEAST_BYTES };
    frame.resize(frame.len().max(least), 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);

    #[test]
    fn frames_come_back_with_and_without_a_tag() {
        for vlan in [None, Some(1), Some(4094)] {
            let bytes = compose(Mac::BROADCAST, GUEST, vlan, ARP, &[7; 50]);
            let frame = Frame::parse(&bytes, None).unwrap();
            assert_eq!((frame.destination, frame.source), (Mac::BROADCAST, GUEST));
            assert_eq!((frame.vlan, frame.kind, frame.payload), (vlan, ARP, &[7; 50][..]));
        }
    }

    #[test]
    fn a_tag_that_the_kernel_took_off_counts() {
        let bytes = compose(Mac::BROADCAST, GUEST, None, ARP, &[]);
        assert_eq!(bytes.len(), LEAST_BYTES);
        assert_eq!(Frame::parse(&bytes, Some(0x6005)).unwrap().vlan, Some(5));
        assert_eq!(Frame::parse(&bytes, Some(0x6000)).unwrap().vlan, None, "a priority only");
        // A second tag stays in the payload.
        let twice = compose(Mac::BROADCAST, GUEST, Some(9), ARP, &[]);
        let frame = Frame::parse(&twice, Some(5)).unwrap();
        assert_eq!((frame.vlan, frame.kind), (Some(5), VLAN));
    }

    #[test]
    fn short_frames_are_none() {
        let bytes = compose(Mac::BROADCAST, GUEST, Some(3), ARP, &[]);
        assert!((0..HEADER_BYTES + TAG_BYTES).all(|len| Frame::parse(&bytes[..len], None).is_none()));
    }

    #[test]
    fn an_only_card_is_meant_by_any_address() {
        let other = Mac([0x52, 0x54, 0, 0, 0, 2]);
        assert_eq!(position_of_card([GUEST, other], other), Some(1));
        assert_eq!(position_of_card([GUEST, other], Mac([2; 6])), None);
        assert_eq!((position_of_card([GUEST], Mac([2; 6])), position_of_card([], GUEST)), (Some(0), None));
    }

    #[test]
    fn addresses_are_read_and_printed() {
        assert_eq!("52:54:00:00:00:01".parse(), Ok(GUEST));
        assert_eq!(GUEST.to_string(), "52:54:00:00:00:01");
        for wrong in ["", "52:54:00:00:00", "52:54:00:00:00:01:02", "52:54:00:00:00:1", "52:54:00:00:00:0g"] {
            assert_eq!(wrong.parse::<Mac>(), Err(NotMac), "{wrong}");
        }
    }
}
