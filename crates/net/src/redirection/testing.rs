//! Redirections, and a kernel in memory, for tests.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "helpers of tests")]

mod fake_kernel;

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::kernel_names::KernelNames;
use super::model::{AddressPair, Attachment, GuestPlace, Lan, NewAddressMode, Prefix, Redirection, Subnet};
use super::next_move::{NetworkMove, next_redirection};
use super::tunnel::{Tunnel, TunnelKind};
use crate::ethernet::Mac;
pub use fake_kernel::FakeKernel;

/// MAC address of the guest's card.
pub const CARD: Mac = Mac([0x52, 0x54, 0, 0, 0, 7]);
/// Host where the guest is at home.
pub const HOME: u8 = 1;

/// Returns the address that a text names.
pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns the network with this number: hosts are .2 and the guest .5 in it, with IPv4 and IPv6.
pub fn lan(network: u8) -> Lan {
    let prefix = |text: String, length| Prefix { address: ip(&text), length };
    Lan {
        bridge: Some("br0".to_owned()),
        vlan: None,
        mtu: 1500,
        subnets: vec![
            Subnet {
                prefix: prefix(format!("10.{network}.0.1"), 24),
                gateway: Some(ip(&format!("10.{network}.0.1"))),
            },
            Subnet { prefix: prefix(format!("fd0{network}::1"), 64), gateway: Some(ip("fe80::1")) },
        ],
        neighbours: vec![format!("fd0{network}::9").parse().unwrap()],
    }
}

/// Returns the guest's place at the host with this number.
pub fn place(network: u8, addressing: NewAddressMode) -> GuestPlace {
    let home = if addressing == NewAddressMode::Configured { network } else { HOME };
    let pair = |guest: &str, public: &str| AddressPair { guest: ip(guest), public: ip(public) };
    let pairs = vec![
        pair(&format!("10.{home}.0.5"), &format!("10.{network}.0.5")),
        pair(&format!("fd0{home}::5"), &format!("fd0{network}::5")),
    ];
    let number = u32::from(network) * 10;
    let mac = if network == HOME { CARD } else { KernelNames(number).proxy_mac() };
    let attachment = Attachment { lan: lan(network), mac, pairs };
    GuestPlace { host: format!("host{network}"), interface: "tap0".to_owned(), number, attachment }
}

/// Returns a tunnel from one host to another.
pub fn tunnel(from: u8, to: u8) -> Tunnel {
    let (old_endpoint, new_endpoint) = (ip(&format!("10.{from}.0.2")), ip(&format!("10.{to}.0.2")));
    Tunnel { kind: TunnelKind::Vxlan, old_endpoint, new_endpoint, mtu: 1450, ports: [7741; 2], keys: None }
}

/// Returns a move from one host to another with tunnels from these hosts.
pub fn a_move(epoch: u64, from: u8, to: u8, tunnels: &[u8]) -> NetworkMove {
    let addressing = NewAddressMode::Nat;
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
pub fn first() -> Redirection {
    next_redirection(None, a_move(3, 1, 2, &[1])).unwrap().redirection.unwrap()
}

/// Returns the redirection without the leg of a host.
pub fn without(redirection: &Redirection, host: &str) -> Redirection {
    let legs = redirection.legs.iter().filter(|leg| leg.host != host).cloned().collect();
    Redirection { legs, ..redirection.clone() }
}
