//! A guest's network cards in messages.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Addresses that the guest has claimed on one of its network cards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardClaims {
    /// MAC address of the card, as `52:54:00:12:34:56`.
    pub mac: String,
    /// The addresses.
    pub addresses: Vec<ClaimedAddress>,
}

/// An address that a guest has claimed by ARP or neighbour discovery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimedAddress {
    /// The address.
    pub address: IpAddr,
    /// Number of the VLAN; absent if the guest sends without a tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// True if the guest says that it is a router (IPv6).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub router: bool,
}

/// Times of the first frames of one network card, since the guest ran at the destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardFrames {
    /// MAC address of the card, as `52:54:00:12:34:56`.
    pub mac: String,
    /// Interface at the destination.
    pub interface: String,
    /// Time until the first frame for the card's own address, in microseconds; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_in_us: Option<u64>,
    /// Time until the guest sent its first frame other than an announcement, in microseconds; absent if it sent none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_out_us: Option<u64>,
}

/// A tracked connection that the destination could not install.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedFlow {
    /// The flow, as `tcp 10.0.0.9:40000 → 10.0.0.7:80`.
    pub flow: String,
    /// Reason.
    pub reason: String,
}

/// Probe of the guest's networks: the source sends frames with this number from the guest's taps until the proposal is
/// answered, and the destination looks for them at the taps of its QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkProbe {
    /// Number of this probe, which the frames bear.
    pub nonce: u64,
    /// True if the VM is to be rejected where a network is not proven.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub required: bool,
    /// The guest's network cards whose taps are in bridges.
    pub cards: Vec<ProbedCard>,
}

/// A network card of the guest, and the place of its tap at the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbedCard {
    /// MAC address of the card, as `52:54:00:12:34:56`.
    pub mac: String,
    /// The tap.
    pub interface: String,
    /// The tap's bridge.
    pub bridge: String,
    /// VLAN of the bridge in which frames without a tag are; absent if the bridge knows no VLANs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// VLANs in which frames with a tag are sent, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tagged: Vec<u16>,
    /// Gateways that answer at the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateways: Vec<IpAddr>,
}
