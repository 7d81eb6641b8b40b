//! Parts of a redirection, the same for all hosts that take part.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use super::tunnel::Tunnel;
use crate::ethernet::Mac;

/// A range of addresses: those that have their first bits in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Prefix {
    /// An address in it.
    pub address: IpAddr,
    /// Number of bits in common.
    pub length: u8,
}

impl Prefix {
    /// Returns the range of one address.
    pub fn host(address: IpAddr) -> Self {
        Self { address, length: if address.is_ipv4() { 32 } else { 128 } }
    }

    /// Returns the range of all addresses of the family of this one.
    pub fn all_like(address: IpAddr) -> Self {
        let address = match address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self { address, length: 0 }
    }

    /// Returns the same range, named by its first address, as the kernel wants it.
    #[must_use]
    pub fn first(self) -> Self {
        let bits = |width: u32, all: u128| {
            let free = width.saturating_sub(u32::from(self.length));
            all.checked_shl(free).unwrap_or(0)
        };
        let address = match self.address {
            IpAddr::V4(address) => {
                let mask = bits(32, u32::MAX.into()) as u32;
                Ipv4Addr::from_bits(address.to_bits() & mask).into()
            }
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & bits(128, u128::MAX)).into(),
        };
        Self { address, ..self }
    }

    /// Returns true if the address is in the range.
    pub fn contains(self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4()
            && Self { address, ..self }.first().address == self.first().address
    }
}

/// An address of the guest, and the address by which others reach it in one network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AddressPair {
    /// Address that the guest has configured.
    pub guest: IpAddr,
    /// Address in this network; the same where nothing is translated.
    pub public: IpAddr,
}

impl AddressPair {
    /// Returns true if others reach the guest by the address that it has itself.
    pub fn is_same(self) -> bool {
        self.guest == self.public
    }
}

/// Addresses of one network, and the way out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subnet {
    /// Addresses that are reached without a gateway.
    pub prefix: Prefix,
    /// Gateway to all others; none if the host itself is the gateway.
    pub gateway: Option<IpAddr>,
}

/// Most networks, and most neighbours, of a [`Lan`].
pub const MOST_NETWORKS: usize = 64;

/// Network of a host to which a guest's tap belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lan {
    /// Bridge of the host; none if the host routes what belongs to the guest, and is reached by its own means.
    pub bridge: Option<String>,
    /// VLAN of the guest's frames in that bridge; none if the bridge knows no VLANs.
    pub vlan: Option<u16>,
    /// Largest packet in it, in bytes.
    pub mtu: u32,
    /// Its addresses.
    pub subnets: Vec<Subnet>,
    /// IPv6 neighbours that the guest may ask for, as far as the host knows them, with its own addresses. Those of IPv4
    /// need no list.
    pub neighbours: Vec<Ipv6Addr>,
}

/// Attachment of the guest to the network of one host: where, and by which addresses, it is reached there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The network.
    pub lan: Lan,
    /// MAC address at which the guest's public addresses are.
    pub mac: Mac,
    /// The guest's addresses.
    pub pairs: Vec<AddressPair>,
}

impl Attachment {
    /// Returns true if the guest is reached here by its own addresses.
    pub fn is_home(&self) -> bool {
        self.pairs.iter().all(|pair| pair.is_same())
    }
}

/// Host where the guest is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestPlace {
    /// Name of the host.
    pub host: String,
    /// Interface of the host behind which the guest's card is: a tap.
    pub interface: String,
    /// Number that distinguishes what the guest needs there; it may be that of the first leg.
    pub number: u32,
    /// Its attachment to the network there.
    pub attachment: Attachment,
}

/// Connection of a host that the guest has left with the host where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leg {
    /// Name of the host that the guest has left.
    pub host: String,
    /// Its attachment to the network there.
    pub attachment: Attachment,
    /// Number that distinguishes it on both hosts, see [`kernel_names`](super::kernel_names).
    pub number: u32,
    /// Mark of its connections at the host where the guest is.
    pub mark: u32,
    /// The tunnel.
    pub tunnel: Tunnel,
}

/// Owner of the guest's address in the new network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NewAddressMode {
    /// The host translates it: nothing changes in the guest.
    #[default]
    Nat,
    /// The guest itself, beside its old one (the paper's way, section 3.3). Something in the guest adds it.
    Configured,
}

/// Redirection for one card of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redirection {
    /// Name of the migration that makes it, which everything of it bears.
    pub migration: String,
    /// Epoch of the guest's ownership after that migration.
    pub epoch: u64,
    /// MAC address of the guest's card.
    pub card: Mac,
    /// Owner of the new address.
    pub addressing: NewAddressMode,
    /// Place of the guest.
    pub place: GuestPlace,
    /// Hosts that it has left and whose networks its old connections come from; none when these have ended, and only the
    /// new addresses are still translated.
    pub legs: Vec<Leg>,
    /// Network whose addresses the guest has configured, as far as it is known.
    #[serde(default)]
    pub home_lan: Option<Lan>,
}

impl Redirection {
    /// Returns the name of the guest, of which the name of a migration consists together with the epoch.
    pub fn guest(&self) -> &str {
        self.migration.rsplit_once('#').map_or(self.migration.as_str(), |(guest, _)| guest)
    }

    /// Returns true if the host translates the guest's new addresses, or is the guest's home again.
    pub fn is_translated(&self) -> bool {
        self.addressing == NewAddressMode::Nat
    }

    /// Returns the addresses that the guest has configured, as far as they are redirected or translated.
    pub fn guest_addresses(&self) -> BTreeSet<IpAddr> {
        let here = self.place.attachment.pairs.iter().filter(|_| self.is_translated());
        let elsewhere = self.legs.iter().flat_map(|leg| &leg.attachment.pairs);
        here.chain(elsewhere).map(|pair| pair.guest).collect()
    }

    /// Returns the leg to the network whose addresses the guest has configured, if there is one.
    pub fn home(&self) -> Option<&Leg> {
        self.legs.iter().find(|leg| leg.attachment.is_home())
    }

    /// Returns the leg through which packets of unknown connections went before: that to the home, unless the guest is
    /// there, otherwise the first one.
    pub fn usual_leg(&self) -> Option<&Leg> {
        let first = self.legs.first().filter(|_| !self.place.attachment.is_home());
        self.home().or(first)
    }

    /// Returns true if the guest needs the host where it is for its new connections, too.
    pub fn is_needed_for_all(&self) -> bool {
        self.is_translated() && !self.place.attachment.is_home()
    }

    /// Returns the hosts that take part, that of the guest first.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.place.host.as_str()).chain(self.legs.iter().map(|leg| leg.host.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_contains_addresses_with_its_first_bits() {
        let prefix = |text: &str, length| Prefix { address: text.parse().unwrap(), length };
        for (range, inside, outside) in [
            (prefix("10.1.2.3", 24), "10.1.2.255", "10.1.3.0"),
            (prefix("10.1.2.3", 32), "10.1.2.3", "10.1.2.2"),
            (prefix("0.0.0.0", 0), "255.0.0.1", "::1"),
            (prefix("fd00::1", 64), "fd00::ffff:0:0:1", "fd00:0:0:1::1"),
            (prefix("fd00::1", 128), "fd00::1", "fd00::2"),
            (prefix("::", 0), "fd00::1", "10.0.0.1"),
        ] {
            assert!(range.contains(inside.parse().unwrap()), "{range:?} {inside}");
            assert!(!range.contains(outside.parse().unwrap()), "{range:?} {outside}");
        }
        assert_eq!(prefix("10.1.2.3", 20).first(), prefix("10.1.0.0", 20));
        assert_eq!(prefix("fd00::7", 64).first(), prefix("fd00::", 64));
        assert_eq!(Prefix::host("10.1.2.3".parse().unwrap()), prefix("10.1.2.3", 32));
        assert_eq!(Prefix::all_like("fd00::7".parse().unwrap()), prefix("::", 0));
    }
}
