//! Redirections for tests.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::names::Names;
use super::onward::{NetworkMove, moved};
use super::parts::{
    AddressPair, GuestAddressing, GuestPlace, Lan, LanNetwork, Prefix, Presence, Redirection,
};
use super::tunnel::{Tunnel, TunnelKind};
use crate::ethernet::Mac;

pub(super) const CARD: Mac = Mac([0x52, 0x54, 0, 0, 0, 7]);
/// Host where the guest is at home.
pub(super) const HOME: u8 = 1;

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns the network with this number: hosts are .2 and the guest .5 in it, with IPv4 and IPv6.
pub(super) fn lan(network: u8) -> Lan {
    let prefix = |text: String, length| Prefix { address: ip(&text), length };
    Lan {
        bridge: Some("br0".to_owned()),
        vlan: None,
        mtu: 1500,
        networks: vec![
            LanNetwork {
                prefix: prefix(format!("10.{network}.0.1"), 24),
                gateway: Some(ip(&format!("10.{network}.0.1"))),
            },
            LanNetwork { prefix: prefix(format!("fd0{network}::1"), 64), gateway: Some(ip("fe80::1")) },
        ],
        neighbours: vec![format!("fd0{network}::9").parse().unwrap()],
    }
}

/// Returns the guest's place at the host with this number.
pub(super) fn place(network: u8, addressing: GuestAddressing) -> GuestPlace {
    let home = if addressing == GuestAddressing::Both { network } else { HOME };
    let pair = |guest: &str, public: &str| AddressPair { guest: ip(guest), public: ip(public) };
    let pairs = vec![
        pair(&format!("10.{home}.0.5"), &format!("10.{network}.0.5")),
        pair(&format!("fd0{home}::5"), &format!("fd0{network}::5")),
    ];
    let number = u32::from(network) * 10;
    let station = if network == HOME { CARD } else { Names(number).station_mac() };
    let presence = Presence { lan: lan(network), station, pairs };
    GuestPlace { host: format!("host{network}"), interface: "tap0".to_owned(), number, presence }
}

/// Returns a tunnel from one host to another.
pub(super) fn tunnel(from: u8, to: u8) -> Tunnel {
    let (old_end, new_end) = (ip(&format!("10.{from}.0.2")), ip(&format!("10.{to}.0.2")));
    Tunnel { kind: TunnelKind::Vxlan, old_end, new_end, mtu: 1450, port: 7741, keys: None }
}

/// Returns a move from one host to another with tunnels from these hosts.
pub(super) fn a_move(epoch: u64, from: u8, to: u8, tunnels: &[u8]) -> NetworkMove {
    let addressing = GuestAddressing::Translated;
    NetworkMove {
        migration: format!("web#{epoch}"),
        epoch,
        card: CARD,
        addressing,
        from: place(from, addressing),
        to: place(to, addressing),
        tunnels: tunnels
            .iter()
            .map(|host| {
                let number = epoch as u32 * 100 + u32::from(*host);
                (format!("host{host}"), (number, tunnel(*host, to)))
            })
            .collect::<BTreeMap<_, _>>(),
    }
}

/// Returns the redirection after the first move, from the first host to the second.
pub(super) fn first() -> Redirection {
    moved(None, a_move(3, 1, 2, &[1])).unwrap().redirection.unwrap()
}
