//! Objects of a host's kernel of which a redirection consists.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::model::Prefix;
use super::rules::RuleTable;
use super::tunnel::Key;
use crate::ethernet::Mac;

/// An object of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelObject {
    /// A network device, which is not up yet.
    Device(DeviceObject),
    /// A value of `/proc/sys`.
    Sysctl(Sysctl),
    /// Membership of a device in a bridge.
    Port {
        /// The device.
        device: String,
        /// The bridge.
        bridge: String,
        /// VLAN of frames without a tag; none if the bridge knows no VLANs.
        vlan: Option<u16>,
    },
    /// A device is up.
    Up {
        /// The device.
        device: String,
    },
    /// Address of a device, to which no route is made and which is not tested for duplicates.
    Address {
        /// The device.
        device: String,
        /// The address, and the range that is reached directly.
        address: Prefix,
    },
    /// A neighbour whose MAC address is known.
    Neighbour {
        /// The device behind which it is.
        device: String,
        /// Its address.
        address: IpAddr,
        /// Its MAC address.
        mac: Mac,
    },
    /// An address for which the host answers at a device.
    Proxy {
        /// The device.
        device: String,
        /// The address.
        address: IpAddr,
    },
    /// A route.
    Route(RouteObject),
    /// A policy rule, which chooses a routing table.
    Policy(PolicyRule),
    /// A table of rules of netfilter.
    Rules(RuleTable),
}

impl KernelObject {
    /// Returns true if it is a sysctl of the host as a whole, or of a device that is not ours.
    pub fn is_shared_sysctl(&self) -> bool {
        matches!(self, Self::Sysctl(setting) if setting.before.is_some())
    }
}

impl fmt::Display for KernelObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(device) => write!(f, "device {}", device.name),
            Self::Sysctl(setting) => write!(f, "sysctl {}", setting.path),
            Self::Port { device, bridge, .. } => write!(f, "port {device} of bridge {bridge}"),
            Self::Up { device } => write!(f, "device {device} up"),
            Self::Address { device, address } => write!(f, "address {} of {device}", address.address),
            Self::Neighbour { device, address, .. } => write!(f, "neighbour {address} behind {device}"),
            Self::Proxy { device, address } => write!(f, "answers for {address} at {device}"),
            Self::Route(RouteObject { destination, device, .. }) => {
                write!(f, "a route to {}/{} by {device}", destination.address, destination.length)
            }
            Self::Policy(rule) => write!(f, "policy rule {} to table {}", rule.priority, rule.table),
            Self::Rules(table) => write!(f, "table {}", table.name),
        }
    }
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceObject {
    /// Name.
    pub name: String,
    /// Name of the migration, which the device bears as its alias.
    pub alias: String,
    /// MAC address; the kernel's choice, or nothing, if absent.
    pub mac: Option<Mac>,
    /// Largest packet, in bytes.
    pub mtu: u32,
    /// Kind of device.
    pub kind: DeviceKind,
}

/// Kind of a network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// One of two devices that are connected with each other.
    Veth {
        /// Name of the other one.
        peer: String,
        /// Its MAC address.
        peer_mac: Mac,
    },
    /// End of a tunnel that the kernel configures at once.
    Tunnel(TunnelEndpoint),
    /// End of a tunnel of `WireGuard`. Its private key is in a file of its own.
    WireGuard {
        /// The end.
        end: TunnelEndpoint,
        /// Public key of the other end.
        peer: Key,
    },
}

/// One end of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunnelEndpoint {
    /// Kind.
    pub kind: super::tunnel::TunnelKind,
    /// Number that distinguishes tunnels between the same hosts.
    pub identifier: u32,
    /// This host's address.
    pub local: IpAddr,
    /// The other host's address.
    pub remote: IpAddr,
    /// This host's port of UDP; zero for kinds without.
    pub port: u16,
    /// The other host's port of UDP; zero for kinds without.
    pub other_port: u16,
}

/// A value of `/proc/sys`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sysctl {
    /// Path below `/proc/sys`.
    pub path: String,
    /// Value.
    pub value: String,
    /// Value before any redirection, which is restored; absent for devices of our own, which end with their sysctls.
    pub before: Option<String>,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteObject {
    /// Routing table.
    pub table: u32,
    /// Range of addresses to which it leads.
    pub destination: Prefix,
    /// Device.
    pub device: String,
    /// Next hop, which is reached directly by this device; none if all addresses are.
    pub next_hop: Option<IpAddr>,
}

/// A policy rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRule {
    /// Rules with a lower number come first.
    pub priority: u32,
    /// Sender of the packets.
    pub from: Option<IpAddr>,
    /// Receiver of the packets.
    pub to: Option<IpAddr>,
    /// Mark of the packets, and the bits of it that count.
    pub mark: Option<(u32, u32)>,
    /// Routing table that is used.
    pub table: u32,
}

impl PolicyRule {
    /// Returns true if it is a rule of IPv6.
    pub fn is_v6(&self) -> bool {
        self.from.or(self.to).is_some_and(|address| address.is_ipv6())
    }
}
