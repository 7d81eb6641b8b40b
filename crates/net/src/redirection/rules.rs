//! Rules of netfilter for a redirection.
//!
//! A table of the family `netdev` is the bypass between the guest's tap and a device of the host; one of the family `inet`
//! marks connections by the tunnel through which they came, translates addresses, and limits the segments of TCP.

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use super::kernel_names::{BYPASS_MARK, KernelNames};
use super::model::{AddressPair, Attachment, Prefix, Redirection};
use crate::divert::MARK;
use crate::ethernet::Mac;

/// Numbers of protocols.
const TCP: u8 = 6;
/// See [`TCP`].
const UDP: u8 = 17;
/// Port of DHCP servers.
const DHCP_SERVER: u16 = 67;
/// Flags of TCP: end, beginning, reset, acknowledgement; and those of the first packet of a connection.
const TCP_FLAGS: u8 = 0x17;
/// See [`TCP_FLAGS`].
const TCP_BEGINNING: u8 = 0x02;
/// States of connection tracking, as bits.
const INVALID: u32 = 1;
/// See [`INVALID`].
const NEW: u32 = 8;
/// Bytes of a packet of TCP that are no data, without options.
const TCP_HEADERS_V4: u32 = 40;
/// See [`TCP_HEADERS_V4`].
const TCP_HEADERS_V6: u32 = 60;

/// Family of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleFamily {
    /// Packets of IPv4 and IPv6.
    Inet,
    /// Frames at devices.
    Netdev,
}

/// A table of rules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleTable {
    /// Family.
    pub family: RuleFamily,
    /// Name.
    pub name: String,
    /// Chains.
    pub chains: Vec<RuleChain>,
}

/// Place where the kernel applies a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChainHook {
    /// Packets that arrive.
    Prerouting,
    /// Packets that pass through the host.
    Forward,
    /// Packets of the host's own.
    Output,
    /// Packets that leave.
    Postrouting,
    /// Frames that come in from a device.
    Ingress(String),
    /// Frames that the host sends on a device.
    Egress(String),
}

/// A chain of rules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleChain {
    /// Name.
    pub name: String,
    /// True if its rules translate addresses.
    pub translates: bool,
    /// Place.
    pub hook: ChainHook,
    /// Chains with a lower number come first.
    pub priority: i32,
    /// Rules: lists of conditions and actions.
    pub rules: Vec<Vec<RuleExpression>>,
}

/// A condition or an action of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleExpression {
    /// The packet came in from this device.
    In(String),
    /// It did not.
    NotIn(String),
    /// The packet leaves by this device.
    Out(String),
    /// It does not.
    NotOut(String),
    /// Sender.
    Source(IpAddr),
    /// Receiver.
    Destination(IpAddr),
    /// The packet is of IPv6, or of IPv4.
    IsV6(bool),
    /// Protocol in IP.
    Protocol(u8),
    /// Receiver's port, of UDP or TCP.
    DestinationPort(u16),
    /// These flags of TCP are as in the second number.
    TcpFlags(u8, u8),
    /// These flags of TCP are not as in the second number.
    NotTcpFlags(u8, u8),
    /// State of connection tracking, as bits.
    CtState(u32),
    /// The frame is for one MAC address.
    Unicast,
    /// The frame is for this MAC address.
    DestinationMac(Mac),
    /// The packet of IPv6 asks for a neighbour in this range.
    SolicitationFor(Prefix),
    /// The frame is an ARP message of the sender with this address.
    ArpOf(Ipv4Addr),
    /// The ARP message is not about an address in this range.
    NotArpFor(Prefix),
    /// The frame is an ARP message.
    Arp,
    /// The frame is an ARP request.
    ArpRequest,
    /// Mark of the packet.
    Mark(u32),
    /// The packet gets this mark in the bits of legs.
    SetMark(u32),
    /// The packet gets this mark as a whole.
    SetWholeMark(u32),
    /// The connection gets this mark in the bits of legs.
    SetCtMark(u32),
    /// The packet gets the mark of its connection, of which the bits of legs.
    RestoreCtMark,
    /// The packet is not tracked.
    Notrack,
    /// The connection's sender becomes this.
    Snat(IpAddr),
    /// The connection's receiver becomes this.
    Dnat(IpAddr),
    /// Segments of TCP are at most this long.
    ClampMss(u16),
    /// The frame goes to this MAC address.
    SetDestinationMac(Mac),
    /// The ARP message says that it comes from this address.
    SetArpSender(Ipv4Addr),
    /// The frame leaves by this device.
    Forward(String),
    /// The frame passes.
    Accept,
    /// The frame does not pass.
    Drop,
}

/// Returns a chain, unless it has no rules.
fn chain(
    name: &str,
    translates: bool,
    hook: ChainHook,
    priority: i32,
    rules: Vec<Vec<RuleExpression>>,
) -> Option<RuleChain> {
    (!rules.is_empty()).then(|| RuleChain { name: name.to_owned(), translates, hook, priority, rules })
}

/// Returns the rules of the bypass: what the guest sends goes to the host, and what the host sends there to the guest.
pub(super) fn bypass(redirection: &Redirection, names: KernelNames) -> Vec<RuleChain> {
    let tap = || redirection.place.interface.clone();
    let forward = || RuleExpression::Forward(names.bypass_port());
    let to_host = || [RuleExpression::SetDestinationMac(names.bypass_mac()), forward()];
    let from_guest = if redirection.is_translated() {
        vec![[vec![RuleExpression::Unicast], to_host().to_vec()].concat(), vec![forward()]]
    } else {
        let subnets = || redirection.place.attachment.lan.subnets.iter().map(|network| network.prefix);
        let (v4, v6): (Vec<_>, Vec<_>) = subnets().partition(|prefix| prefix.address.is_ipv4());
        let others: Vec<_> = v4.into_iter().map(RuleExpression::NotArpFor).collect();
        let passes = |range| vec![RuleExpression::SolicitationFor(range), RuleExpression::Accept];
        // What was once resolved here, whoever asks; and neighbours in the new network, which answer by themselves.
        let bypass = vec![RuleExpression::DestinationMac(names.bypass_mac()), forward()];
        let first = std::iter::once(bypass).chain(v6.into_iter().map(passes));
        let of = |address: &IpAddr| match address {
            IpAddr::V4(v4) => vec![
                [vec![RuleExpression::Source(*address)], to_host().to_vec()].concat(),
                // Neighbours in the new network answer by themselves.
                [vec![RuleExpression::ArpOf(*v4)], others.clone(), to_host().to_vec()].concat(),
            ],
            IpAddr::V6(_) => vec![
                [vec![RuleExpression::Source(*address), RuleExpression::Unicast], to_host().to_vec()]
                    .concat(),
                vec![RuleExpression::Source(*address), forward()],
            ],
        };
        first.chain(redirection.guest_addresses().iter().flat_map(of)).collect()
    };
    let to_guest = vec![vec![RuleExpression::SetWholeMark(BYPASS_MARK), RuleExpression::Forward(tap())]];
    let port = ChainHook::Ingress(names.bypass_port());
    [
        chain("from-guest", false, ChainHook::Ingress(tap()), 0, from_guest),
        chain("to-guest", false, port, 0, to_guest),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns the rules that keep the frames of the new network from the guest, which would learn from them: it has no
/// address there. Frames of the handover and of the bypass pass.
pub(super) fn tap_filter(redirection: &Redirection) -> Option<RuleChain> {
    let hook = ChainHook::Egress(redirection.place.interface.clone());
    let pass = |mark| vec![RuleExpression::Mark(mark), RuleExpression::Accept];
    // Behind the diversion of frames that are held, which takes all but its own.
    chain("to-tap", false, hook, 10, vec![pass(MARK), pass(BYPASS_MARK), vec![RuleExpression::Drop]])
}

/// Returns the rules by which a proxy device asks for its neighbours as the guest would: from its address. The host would ask
/// from an address of its own, and neighbours would look for the host at the guest's MAC address.
pub(super) fn arp_sender_rewrite(attachment: &Attachment, names: KernelNames) -> Option<RuleChain> {
    let of_v4 = |pair: &AddressPair| match pair.public {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    };
    let rules = attachment.pairs.iter().find_map(of_v4);
    // Its answers name the address that was asked for.
    let rules = rules.map(|address| vec![RuleExpression::ArpRequest, RuleExpression::SetArpSender(address)]);
    chain("questions", false, ChainHook::Egress(names.proxy_device()), 0, rules.into_iter().collect())
}

/// Returns the rules for packets of bridged frames, which a kernel with `bridge-nf-call-iptables` shows to netfilter
/// twice: they are not tracked in the bridge, where they cannot be translated.
fn bridged(attachment: &Attachment) -> Vec<Vec<RuleExpression>> {
    let Some(bridge) = &attachment.lan.bridge else { return Vec::new() };
    let both = |pair: &AddressPair| {
        [RuleExpression::Destination(pair.public), RuleExpression::Source(pair.public)]
            .map(|end| vec![RuleExpression::In(bridge.clone()), end, RuleExpression::Notrack])
    };
    attachment.pairs.iter().flat_map(both).collect()
}

/// Returns the rules that translate between the guest's addresses and the public ones. `inner` are the devices that lead
/// to the guest, and to hosts where it was: there nothing is translated.
fn translation(attachment: &Attachment, inner: &[String]) -> Vec<RuleChain> {
    let pairs: Vec<_> = attachment.pairs.iter().filter(|pair| !pair.is_same()).collect();
    let arriving = |pair: &&AddressPair| {
        let bridge = attachment.lan.bridge.iter().map(|bridge| RuleExpression::NotIn(bridge.clone()));
        let to = [RuleExpression::Destination(pair.public), RuleExpression::Dnat(pair.guest)];
        bridge.chain(to).collect::<Vec<_>>()
    };
    let own = |pair: &&AddressPair| {
        vec![RuleExpression::Destination(pair.public), RuleExpression::Dnat(pair.guest)]
    };
    let leaving = |pair: &&AddressPair| {
        let inner = inner.iter().map(|device| RuleExpression::NotOut(device.clone()));
        inner
            .chain([RuleExpression::Source(pair.guest), RuleExpression::Snat(pair.public)])
            .collect::<Vec<_>>()
    };
    [
        chain("arriving", true, ChainHook::Prerouting, -100, pairs.iter().map(arriving).collect()),
        chain("own", true, ChainHook::Output, -100, pairs.iter().map(own).collect()),
        chain("leaving", true, ChainHook::Postrouting, 100, pairs.iter().map(leaving).collect()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns the rules that limit segments of TCP to what passes these tunnels, which have a name and a largest packet.
fn segments(tunnels: &[(String, u32)]) -> Option<RuleChain> {
    let mut rules = Vec::new();
    for (device, mtu) in tunnels {
        for (is_v6, headers) in [(false, TCP_HEADERS_V4), (true, TCP_HEADERS_V6)] {
            for end in [RuleExpression::In(device.clone()), RuleExpression::Out(device.clone())] {
                let limit = u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX);
                rules.push(vec![
                    end,
                    RuleExpression::IsV6(is_v6),
                    RuleExpression::Protocol(TCP),
                    RuleExpression::TcpFlags(TCP_BEGINNING, TCP_BEGINNING),
                    RuleExpression::ClampMss(limit),
                ]);
            }
        }
    }
    chain("segments", false, ChainHook::Forward, -150, rules)
}

/// Returns a rule that does nothing: the kernel tracks connections only where a rule asks for their state, and they are
/// counted later.
fn tracking(tunnels: &[(String, u32)]) -> Option<RuleChain> {
    let asks =
        |(tunnel, _): &(String, u32)| vec![RuleExpression::In(tunnel.clone()), RuleExpression::CtState(NEW)];
    chain("tracking", false, ChainHook::Forward, -151, tunnels.iter().map(asks).collect())
}

/// Returns the rules for packets at a host that the guest has left.
pub(super) fn at_old_host(attachment: &Attachment, tunnel: (String, u32)) -> Vec<RuleChain> {
    let inner = [tunnel.0.clone()];
    let bridged = chain("bridged", false, ChainHook::Prerouting, -310, bridged(attachment));
    let chains = bridged.into_iter().chain(translation(attachment, &inner));
    let tunnels = [tunnel];
    chains.chain(tracking(&tunnels)).chain(segments(&tunnels)).collect()
}

/// Returns the rules for packets at the host where the guest is.
pub(super) fn at_new_host(redirection: &Redirection, names: KernelNames) -> Vec<RuleChain> {
    let tunnels: Vec<_> =
        redirection.legs.iter().map(|leg| (KernelNames(leg.number).tunnel(), leg.tunnel.mtu)).collect();
    if !redirection.is_translated() {
        return tracking(&tunnels).into_iter().chain(segments(&tunnels)).collect();
    }
    let attachment = &redirection.place.attachment;
    let bypass = || RuleExpression::In(names.bypass());
    let mut early = bridged(attachment);
    let mut connections = Vec::new();
    for leg in &redirection.legs {
        let tunnel = || RuleExpression::In(KernelNames(leg.number).tunnel());
        // Already before the kernel compares the way back (reverse-path filters).
        early.push(vec![tunnel(), RuleExpression::SetMark(leg.mark)]);
        connections.push(vec![tunnel(), RuleExpression::SetCtMark(leg.mark)]);
    }
    if let Some(leg) = redirection.usual_leg() {
        let tcp = |state| vec![bypass(), RuleExpression::CtState(state), RuleExpression::Protocol(TCP)];
        // A connection that this host sees for the first time in its middle began elsewhere.
        let middle =
            [RuleExpression::NotTcpFlags(TCP_FLAGS, TCP_BEGINNING), RuleExpression::SetCtMark(leg.mark)];
        connections.push([tcp(NEW), middle.to_vec()].concat());
        // A lease is renewed where it was granted.
        connections.push(vec![
            bypass(),
            RuleExpression::IsV6(false),
            RuleExpression::Protocol(UDP),
            RuleExpression::DestinationPort(DHCP_SERVER),
            RuleExpression::SetCtMark(leg.mark),
        ]);
        connections.push(vec![bypass(), RuleExpression::RestoreCtMark]);
        // Where strict tracking takes up no connection in its middle.
        connections.push([tcp(INVALID), vec![RuleExpression::SetMark(leg.mark)]].concat());
    } else {
        connections.push(vec![bypass(), RuleExpression::RestoreCtMark]);
    }
    let inner: Vec<_> = tunnels.iter().map(|(tunnel, _)| tunnel.clone()).chain([names.bypass()]).collect();
    let marks = [
        chain("early", false, ChainHook::Prerouting, -310, early),
        chain("connections", false, ChainHook::Prerouting, -150, connections),
    ];
    let chains = marks.into_iter().flatten().chain(translation(attachment, &inner));
    chains.chain(segments(&tunnels)).collect()
}
