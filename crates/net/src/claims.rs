//! Addresses that a guest itself has claimed, by ARP or by neighbour discovery.
//!
//! Only these are announced in the guest's name. A frame that a guest merely sends from an address proves nothing: a
//! router forwards the packets of others, and with proxy ARP it even answers for them. So an address counts when the
//! guest asks or announces from it, with the MAC address of its card, and it no longer counts when another machine
//! claims it: a VRRP backup must not take an address away from the router that has it now.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::ethernet::{ARP, Frame, IPV6, Mac};

/// Most claims of one card that are remembered.
pub const MOST_CLAIMS: usize = 256;

/// Bytes of an ARP message for Ethernet and IPv4.
const ARP_BYTES: usize = 28;
/// Beginning of such a message: Ethernet, IPv4, lengths of both addresses.
const ARP_START: [u8; 6] = [0, 1, 8, 0, 6, 4];

/// Bytes of an IPv6 header.
pub(crate) const IPV6_BYTES: usize = 40;
/// Bytes of a neighbour advertisement without options.
const ADVERTISEMENT_BYTES: usize = 24;
/// Next header: `ICMPv6`.
pub(crate) const ICMPV6: u8 = 58;
/// Type of a neighbour advertisement.
pub(crate) const ADVERTISEMENT: u8 = 136;
/// Flag of an advertisement: the sender is a router.
pub(crate) const ROUTER: u8 = 0x80;
/// Flag of an advertisement: replaces what neighbours know. Absent if the sender answers for another machine.
pub(crate) const OVERRIDE: u8 = 0x20;
/// Option of an advertisement: the link-layer address of the target.
pub(crate) const TARGET_ADDRESS: u8 = 2;

/// An address that a guest has claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Claim {
    /// Number of the VLAN; none without a tag.
    pub vlan: Option<u16>,
    /// The address.
    pub address: IpAddr,
    /// True if the guest says that it is a router (IPv6). Neighbours would drop a router that denies it.
    pub is_router: bool,
}

/// Claims of the guest behind one network card.
#[derive(Clone, Debug)]
pub struct Claims {
    mac: Mac,
    /// For each VLAN and address: true if the guest is a router.
    known: BTreeMap<(Option<u16>, IpAddr), bool>,
}

impl Claims {
    /// Creates an empty record for the card with this MAC address.
    pub fn new(mac: Mac) -> Self {
        Self { mac, known: BTreeMap::new() }
    }

    /// Learns from a frame that passed the card's tap, from the guest or towards it.
    pub fn observe(&mut self, is_from_guest: bool, frame: &Frame<'_>) {
        let Some(statement) = Statement::of(frame) else { return };
        let key = (frame.vlan, statement.address);
        if statement.mac != self.mac {
            self.known.remove(&key);
            return;
        }
        // A switch may send the guest's own frames back to it; they say nothing new.
        let is_own = is_from_guest && frame.source == self.mac && statement.is_claim;
        if is_own && (self.known.len() < MOST_CLAIMS || self.known.contains_key(&key)) {
            self.known.insert(key, statement.is_router);
        }
    }

    /// Returns the card's MAC address.
    pub fn mac(&self) -> Mac {
        self.mac
    }

    /// Returns the claims that hold.
    pub fn all(&self) -> Vec<Claim> {
        let claim = |(&(vlan, address), &is_router): (&(_, _), &_)| Claim { vlan, address, is_router };
        self.known.iter().map(claim).collect()
    }
}

/// Statement that an address is at a MAC address.
struct Statement {
    address: IpAddr,
    mac: Mac,
    is_router: bool,
    /// True if no machine says this for another one.
    is_claim: bool,
}

impl Statement {
    fn of(frame: &Frame<'_>) -> Option<Self> {
        match frame.kind {
            ARP => Self::of_arp(frame.payload),
            IPV6 => Self::of_advertisement(frame.payload),
            _ => None,
        }
    }

    /// Reads the sender of an ARP message. An answer may be one for another machine, unless it announces itself.
    fn of_arp(payload: &[u8]) -> Option<Self> {
        let message: &[u8; ARP_BYTES] = payload.first_chunk()?;
        if !message.starts_with(&ARP_START) || !matches!(message[6..8], [0, 1 | 2]) {
            return None;
        }
        let (mac, address) = (message[8..].first_chunk()?, message[14..].first_chunk::<4>()?);
        let address = Ipv4Addr::from(*address);
        // A sender that only probes an address has none yet.
        let is_usable = !address.is_unspecified()
            && !address.is_loopback()
            && !address.is_multicast()
            && !address.is_broadcast();
        let is_claim = message[7] == 1 || message[14..18] == message[24..28];
        let (address, mac) = (address.into(), Mac(*mac));
        is_usable.then_some(Self { address, mac, is_router: false, is_claim })
    }

    /// Reads a neighbour advertisement. A solicitation claims nothing: its sender may still be finding out if the
    /// address is free, and it does not say if it is a router.
    fn of_advertisement(payload: &[u8]) -> Option<Self> {
        let (header, message) = payload.split_first_chunk::<IPV6_BYTES>()?;
        let message = message.get(..usize::from(u16::from_be_bytes([header[4], header[5]])))?;
        // Only frames of this link have the full hop limit.
        if header[6] != ICMPV6 || header[7] != 255 {
            return None;
        }
        let (fixed, options) = message.split_first_chunk::<ADVERTISEMENT_BYTES>()?;
        let flags = fixed[4];
        if fixed[..2] != [ADVERTISEMENT, 0] || flags & OVERRIDE == 0 {
            return None;
        }
        let address = Ipv6Addr::from(*fixed[8..].first_chunk::<16>()?);
        let is_usable = !address.is_unspecified() && !address.is_loopback() && !address.is_multicast();
        let mac = target_address(options).filter(|_| is_usable)?;
        let is_router = flags & ROUTER != 0;
        Some(Self { address: address.into(), mac, is_router, is_claim: true })
    }
}

/// Returns the target's link-layer address among the options of an advertisement.
fn target_address(mut options: &[u8]) -> Option<Mac> {
    while let [kind, eights, ..] = *options {
        let option = options.get(..usize::from(eights) * 8).filter(|option| !option.is_empty())?;
        if kind == TARGET_ADDRESS {
            return option[2..].first_chunk().map(|address| Mac(*address));
        }
        options = &options[option.len()..];
    }
    None
}

#[cfg(test)]
#[path = "claims/tests.rs"]
mod tests;
