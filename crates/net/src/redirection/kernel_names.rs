//! Names and numbers of what a redirection has in a kernel.
//!
//! Each leg has a number, the same on both of its hosts, from which everything else follows: names of devices, routing
//! tables, MAC addresses. What can have a name bears that of its migration; routes and policy rules have the number of
//! our protocol, and lead through a device that has a name.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::divert::{OWN_NAME_START, TABLE_START};
use crate::ethernet::Mac;
use crate::own_objects::{REDIRECTION_PROTOCOL, REDIRECTION_TABLE};

/// Most numbers.
pub const NUMBERS: u32 = 100_000;
/// Number of our protocol in routes and policy rules.
pub const PROTOCOL: u8 = REDIRECTION_PROTOCOL;

/// First number in a device's name: names of hold taps have a few digits only.
const FIRST_NAME: u32 = 1_000_000;
/// First routing table.
const FIRST_TABLE: u32 = 1_460_000_000;

/// Pattern of the names of our devices, as nft writes it: those of hold taps have fewer digits.
pub(super) const OWN_DEVICES: &str = "whimbrel1*";

/// Priorities of policy rules: behind the host's own addresses, before all usual ones.
pub(super) const MARKED_PRIORITY: u32 = 5700;
/// See [`MARKED_PRIORITY`].
pub(super) const FROM_PRIORITY: u32 = 5701;
/// See [`MARKED_PRIORITY`].
pub(super) const TO_PRIORITY: u32 = 5702;

/// Bits of marks of packets and connections that name a leg.
pub const MARK_MASK: u32 = 0x0f00_0000;
/// Most legs, which is what these bits can name.
pub const MOST_LEGS: usize = 15;

/// Mark of frames that come from the bypass.
pub(super) const BYPASS_MARK: u32 = 0x5748_4d43;

/// Next hop in tunnels that carry frames: the other end, by static neighbour entries.
pub(super) const NEXT_HOP_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 87, 72);
/// See [`NEXT_HOP_V4`].
pub(super) const NEXT_HOP_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x5748, 0x4d42);

/// Returns the mark of a leg by its place in the list.
pub fn mark(leg: usize) -> u32 {
    (leg as u32 + 1) << MARK_MASK.trailing_zeros() & MARK_MASK
}

/// Returns a number for a leg of this migration that neither host uses, if there is one.
pub fn free_number(migration: &str, used: &BTreeSet<u32>) -> Option<u32> {
    // FNV-1a, 32 bits: the same name gives the same number on every host, and others mostly another one.
    let hash = migration
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (0..NUMBERS).map(|step| (hash % NUMBERS + step) % NUMBERS).find(|number| !used.contains(number))
}

/// Returns the number in a name of a device of ours, if the device is of a redirection.
pub fn number_of_device(name: &str) -> Option<u32> {
    let number: u32 = name.strip_prefix(OWN_NAME_START)?.parse().ok()?;
    let number = number.checked_sub(FIRST_NAME)? / 10;
    (number < NUMBERS).then_some(number)
}

/// Names that follow from the number of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelNames(pub u32);

impl KernelNames {
    fn device(self, role: u32) -> String {
        format!("{OWN_NAME_START}{}", FIRST_NAME + self.0 * 10 + role)
    }

    /// Returns the name of the tunnel's end.
    pub fn tunnel(self) -> String {
        self.device(0)
    }

    /// Returns the name of the device that stands for the guest in a network.
    pub fn proxy_device(self) -> String {
        self.device(1)
    }

    /// Returns the name of the far end of that device, which is a port of the bridge.
    pub fn proxy_port(self) -> String {
        self.device(2)
    }

    /// Returns the name of the device by which the host reaches the guest.
    pub fn bypass(self) -> String {
        self.device(3)
    }

    /// Returns the name of the far end of that device, whose frames are those of the guest's tap.
    pub fn bypass_port(self) -> String {
        self.device(4)
    }

    /// Returns the routing table that leads to the guest.
    pub fn inner_table(self) -> u32 {
        FIRST_TABLE + self.0 * 4
    }

    /// Returns the routing table that leads from the guest into the network.
    pub fn lan_table(self) -> u32 {
        FIRST_TABLE + self.0 * 4 + 1
    }

    /// Returns the routing table that leads from the guest into the tunnel.
    pub fn tunnel_table(self) -> u32 {
        FIRST_TABLE + self.0 * 4 + 2
    }

    /// Returns the name of the tables of rules.
    pub fn rules(self, migration: &str) -> String {
        format!("{TABLE_START}{migration}{REDIRECTION_TABLE}{}", self.0)
    }

    fn mac(self, role: u32) -> Mac {
        let [_, high, middle, low] = (self.0 * 8 + role).to_be_bytes();
        Mac([0x02, 0x57, 0x49, high, middle, low])
    }

    /// Returns the MAC address of the bypass.
    pub fn bypass_mac(self) -> Mac {
        self.mac(0)
    }

    /// Returns the MAC address of the far end of a pair. It is high: a bridge takes the lowest one of its ports.
    pub fn port_mac(self) -> Mac {
        let Mac([_, rest @ ..]) = self.mac(4);
        let [second, third, high, middle, low] = rest;
        Mac([0xfe, second, third, high, middle, low])
    }

    /// Returns a MAC address at which a guest's new address can be: not that of its card, for which a bridge may have a
    /// fixed port.
    pub fn proxy_mac(self) -> Mac {
        self.mac(1)
    }

    /// Returns the MAC addresses of a tunnel's ends: at the host that the guest has left, and at the one where it is.
    pub fn tunnel_macs(self) -> [Mac; 2] {
        [self.mac(2), self.mac(3)]
    }

    /// Returns the link-local address of proxy devices and bypasses.
    pub fn link_local(self) -> IpAddr {
        let [high, low] = [(self.0 >> 16) as u16, self.0 as u16];
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0x0257, 0x49ff, 0xfe00 | high, low).into()
    }

    /// Returns the network identifier of a VXLAN, and the key of a GRE tunnel.
    pub fn network_identifier(self) -> u32 {
        0x57_0000 + self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_free_and_found_again() {
        let first = free_number("web#3", &BTreeSet::new()).unwrap();
        assert_eq!(free_number("web#3", &BTreeSet::new()), Some(first), "the same on every host");
        let next = free_number("web#3", &BTreeSet::from([first])).unwrap();
        assert_eq!(next, (first + 1) % NUMBERS);
        assert_ne!(free_number("web#4", &BTreeSet::new()), Some(first));
        assert_eq!(free_number("web#3", &(0..NUMBERS).collect()), None);
        let (numbers, mut tables_seen) = ([0, 1, 7, NUMBERS - 1], BTreeSet::new());
        for number in numbers {
            let names = KernelNames(number);
            for name in [names.tunnel(), names.proxy_port(), names.bypass_port()] {
                assert!(name.len() <= 15, "{name}");
                assert_eq!(number_of_device(&name), Some(number));
            }
            let tables = [names.inner_table(), names.lan_table(), names.tunnel_table()];
            assert_eq!(BTreeSet::from(tables).len(), tables.len(), "different tables");
            tables_seen.extend(tables);
            assert!(names.network_identifier() < 1 << 24);
        }
        for name in ["whimbrel0", "whimbrel12", "whimbrelx", "tap0", "whimbrel2000000"] {
            assert_eq!(number_of_device(name), None, "{name}");
        }
        assert_eq!(tables_seen.len(), 3 * numbers.len(), "each leg has tables of its own");
        assert!(tables_seen.first() > Some(&255), "none of the kernel's own");
    }

    #[test]
    fn marks_of_legs_differ_and_leave_other_bits_alone() {
        let marks: BTreeSet<_> = (0..MOST_LEGS).map(mark).collect();
        assert_eq!(marks.len(), MOST_LEGS);
        assert!(marks.iter().all(|mark| *mark != 0 && mark & !MARK_MASK == 0));
    }
}
