//! Tunnels between two hosts: their kinds, and the choice among them.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Least size of packets that every IPv6 path has to carry, in bytes (RFC 8200, 5).
pub const LEAST_V6_MTU: u32 = 1280;
/// Least size of packets that every IPv4 host accepts, in bytes (RFC 791).
pub const LEAST_V4_MTU: u32 = 576;

/// Public or private key of `WireGuard`.
pub type Key = [u8; 32];

/// Kind of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TunnelKind {
    /// Frames in UDP (RFC 7348).
    Vxlan,
    /// Packets in IP, with a key that distinguishes tunnels (RFC 2784, RFC 2890).
    Gre,
    /// IPv4 packets in IPv4 (RFC 2003); one tunnel between two addresses.
    Ipip,
    /// Encrypted packets in UDP, by the kernel.
    WireGuard,
}

impl TunnelKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Vxlan, Self::Gre, Self::Ipip, Self::WireGuard];

    /// Returns true if no host on the path can read or forge the packets that the tunnel carries.
    pub fn is_encrypted(self) -> bool {
        self == Self::WireGuard
    }

    /// Returns the bytes that its headers take of each packet.
    pub fn header_bytes(self, is_v6: bool) -> u32 {
        let ip = if is_v6 { 40 } else { 20 };
        match self {
            // UDP, VXLAN, Ethernet.
            Self::Vxlan => ip + 8 + 8 + 14,
            // With the key.
            Self::Gre => ip + 8,
            Self::Ipip => ip,
            // UDP, and a message's header and check.
            Self::WireGuard => ip + 8 + 32,
        }
    }

    /// Returns the module of the kernel that has it.
    pub fn module(self) -> &'static str {
        match self {
            Self::Vxlan => "vxlan",
            Self::Gre => "ip_gre",
            Self::Ipip => "ipip",
            Self::WireGuard => "wireguard",
        }
    }

    /// Returns what a firewall has to let pass, as nft writes it; `ports` are the first and the last one.
    pub fn as_match(self, [first, last]: [u16; 2]) -> String {
        match self {
            Self::Vxlan | Self::WireGuard if first == last => format!("udp dport {first}"),
            Self::Vxlan | Self::WireGuard => format!("udp dport {first}-{last}"),
            Self::Gre => "meta l4proto gre".to_owned(),
            Self::Ipip => "meta l4proto ipip".to_owned(),
        }
    }
}

impl fmt::Display for TunnelKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vxlan => "VXLAN",
            Self::Gre => "GRE",
            Self::Ipip => "IPIP",
            Self::WireGuard => "WireGuard",
        })
    }
}

/// Tunnel of a leg.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tunnel {
    /// Kind.
    pub kind: TunnelKind,
    /// Address of the host that the guest has left.
    pub old_endpoint: IpAddr,
    /// Address of the host where the guest is.
    pub new_endpoint: IpAddr,
    /// Largest packet that passes it, in bytes.
    pub mtu: u32,
    /// Ports of UDP, in the order of the ends; zero for kinds without.
    pub ports: [u16; 2],
    /// Public keys of both ends, in the same order; none for kinds without.
    pub keys: Option<[Key; 2]>,
}

/// Ports of UDP that a host has for tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelPorts {
    /// Port that all VXLANs share.
    pub vxlan: u16,
    /// First and last port of those of `WireGuard`, of which each tunnel has one.
    pub wireguard: [u16; 2],
}

/// Ports of UDP that a host has for the next tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreePorts {
    /// Port that all VXLANs share; none if something else has it.
    pub vxlan: Option<u16>,
    /// Port for a tunnel of `WireGuard`; none if something else has all of them.
    pub wireguard: Option<u16>,
    /// First and last port of those of `WireGuard`.
    pub range: [u16; 2],
}

/// Facts about the path between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelPath {
    /// True if only the hosts' owners can read or forge packets on it.
    pub is_trusted: bool,
    /// True if the hosts reach each other by IPv6.
    pub is_v6: bool,
    /// True if an address of the guest that is redirected is of IPv6.
    pub carries_v6: bool,
}

impl TunnelPath {
    /// Returns true if tunnels of this kind do on this path.
    fn suits(self, kind: TunnelKind) -> bool {
        match kind {
            TunnelKind::Ipip => self.is_trusted && !self.is_v6 && !self.carries_v6,
            kind => self.is_trusted || kind.is_encrypted(),
        }
    }
}

/// Error: no kind of tunnel does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no tunnel of a suitable kind is there on both hosts")]
pub struct NoTunnel {
    /// Suitable kinds that only the other host has.
    pub missing_here: Vec<TunnelKind>,
    /// Suitable kinds that only this host has.
    pub missing_there: Vec<TunnelKind>,
    /// Suitable kinds that neither has.
    pub missing_on_both: Vec<TunnelKind>,
}

/// Chooses the kind of a tunnel from what both hosts have. On a trusted path the cheapest one is taken, on others an
/// encrypted one.
///
/// # Errors
/// [`NoTunnel`] if the hosts have no suitable kind in common: it lists which host lacks which kind.
pub fn choose(
    path: TunnelPath,
    here: &BTreeSet<TunnelKind>,
    there: &BTreeSet<TunnelKind>,
) -> Result<TunnelKind, NoTunnel> {
    let suitable: Vec<_> = TunnelKind::ALL.into_iter().filter(|kind| path.suits(*kind)).collect();
    let on_both = |kind: &&TunnelKind| here.contains(kind) && there.contains(kind);
    if let Some(kind) = suitable.iter().find(on_both) {
        return Ok(*kind);
    }
    let with = |is_here: bool, is_there: bool| {
        let is_so = |kind: &TunnelKind| here.contains(kind) == is_here && there.contains(kind) == is_there;
        suitable.iter().copied().filter(is_so).collect()
    };
    Err(NoTunnel {
        missing_here: with(false, true),
        missing_there: with(true, false),
        missing_on_both: with(false, false),
    })
}

/// Returns the largest packet that passes a tunnel over a path with this largest packet.
pub fn mtu(kind: TunnelKind, is_v6: bool, path_mtu: u32) -> u32 {
    path_mtu.saturating_sub(kind.header_bytes(is_v6))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUSTED: TunnelPath = TunnelPath { is_trusted: true, is_v6: false, carries_v6: false };

    fn kinds(kinds: &[TunnelKind]) -> BTreeSet<TunnelKind> {
        kinds.iter().copied().collect()
    }

    #[test]
    fn the_cheapest_suitable_tunnel_of_both_hosts_is_chosen() {
        use TunnelKind::{Gre, Ipip, Vxlan, WireGuard};
        let all = kinds(&TunnelKind::ALL);
        assert_eq!(choose(TRUSTED, &all, &all), Ok(Vxlan));
        assert_eq!(choose(TRUSTED, &kinds(&[Gre, Ipip]), &all), Ok(Gre));
        assert_eq!(choose(TRUSTED, &kinds(&[Ipip, WireGuard]), &all), Ok(Ipip));
        for path in [TunnelPath { is_v6: true, ..TRUSTED }, TunnelPath { carries_v6: true, ..TRUSTED }] {
            assert_eq!(choose(path, &kinds(&[Ipip, WireGuard]), &all), Ok(WireGuard), "{path:?}");
        }
        let untrusted = TunnelPath { is_trusted: false, ..TRUSTED };
        assert_eq!(choose(untrusted, &all, &all), Ok(WireGuard));
        let error = choose(untrusted, &kinds(&[Vxlan]), &all).unwrap_err();
        assert_eq!((error.missing_here, error.missing_there), (vec![WireGuard], vec![]));
        let error = choose(TRUSTED, &kinds(&[Vxlan]), &kinds(&[Gre])).unwrap_err();
        assert_eq!((error.missing_here, error.missing_there), (vec![Gre], vec![Vxlan]));
        assert_eq!(error.missing_on_both, [Ipip, WireGuard]);
    }

    #[test]
    fn headers_reduce_the_largest_packet() {
        assert_eq!(mtu(TunnelKind::Vxlan, false, 1500), 1450);
        assert_eq!(mtu(TunnelKind::Gre, false, 1500), 1472);
        assert_eq!(mtu(TunnelKind::Ipip, false, 1500), 1480);
        assert_eq!(mtu(TunnelKind::WireGuard, true, 1500), 1420);
        assert_eq!(mtu(TunnelKind::WireGuard, false, 1500), 1440);
        assert_eq!(mtu(TunnelKind::Vxlan, true, 40), 0);
    }
}
