//! The plan of one host: the objects that its kernel needs for a redirection, in their order.
//!
//! Devices are made before the stop; of these only tunnels are in use. Everything that takes packets is made at the
//! switch.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::kernel_names::{
    FROM_PRIORITY, KernelNames, MARK_MASK, MARKED_PRIORITY, MOST_LEGS, NEXT_HOP_V4, NEXT_HOP_V6, NUMBERS,
    TO_PRIORITY,
};
use super::model::{Attachment, Leg, Prefix, Redirection};
use super::objects::{
    DeviceKind, DeviceObject, KernelObject, PolicyRule, RouteObject, Sysctl, TunnelEndpoint,
};
use super::rules::{self, RuleChain, RuleFamily, RuleTable};
use super::tunnel::{Tunnel, TunnelKind};
use crate::ethernet::Mac;

/// Abilities of a host, as far as plans depend on them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFeatures {
    /// True if it has IPv6.
    pub has_v6: bool,
    /// True if single devices can forward packets of IPv6 (Linux 6.17).
    pub forwards_v6_by_device: bool,
    /// Value of `net.ipv6.conf.all.forwarding`, before any redirection.
    pub v6_forwarding: String,
    /// Value of `net.ipv4.conf.all.send_redirects`, before any redirection.
    pub send_redirects: String,
    /// Devices that learn routes from router advertisements as long as the host forwards nothing.
    pub advertised_devices: Vec<String>,
    /// True if rules can be applied to frames that the host sends (Linux 5.16).
    pub has_egress: bool,
}

/// Objects of one host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPlan {
    /// Those that are made before the guest is stopped.
    pub prepared: Vec<KernelObject>,
    /// Those that are made when the guest runs at its new place.
    pub switched: Vec<KernelObject>,
    /// Device from which the guest's public addresses are announced, its MAC address, and these addresses.
    pub announced: Option<(String, Mac, Vec<IpAddr>)>,
}

impl HostPlan {
    /// Returns all objects, in the order in which they are made.
    pub fn objects(&self) -> impl DoubleEndedIterator<Item = &KernelObject> {
        self.prepared.iter().chain(&self.switched)
    }
}

/// Error: there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlan {
    /// The host has no part in it.
    #[error("host {0} has no part in this redirection")]
    NotInvolved(String),
    /// A redirection leads from somewhere.
    #[error("a redirection has from 1 to {MOST_LEGS} hosts that the VM has left, not {0}, or it translates")]
    Legs(usize),
    /// Numbers are limited, and differ.
    #[error("the numbers of the tunnels are not distinct, or not below {NUMBERS}")]
    Numbers,
    /// Keys are missing.
    #[error("a tunnel of WireGuard needs the public keys of both hosts")]
    NoKeys,
}

/// Computes the plan of a host.
///
/// # Errors
/// [`NoPlan`] if the host has no part in the redirection, or the redirection is not one that can be made.
pub fn plan(
    redirection: &Redirection,
    host: &str,
    kernel_features: &KernelFeatures,
) -> Result<HostPlan, NoPlan> {
    check(redirection)?;
    let mut planner = Planner { redirection, kernel_features, plan: HostPlan::default(), port: None };
    if redirection.place.host == host {
        planner.new_host()?;
    } else {
        let leg = redirection.legs.iter().find(|leg| leg.host == host);
        planner.old_host(leg.ok_or_else(|| NoPlan::NotInvolved(host.to_owned()))?)?;
    }
    planner.plan.switched.extend(planner.port);
    Ok(planner.plan)
}

fn check(redirection: &Redirection) -> Result<(), NoPlan> {
    let legs = &redirection.legs;
    if legs.is_empty() && !redirection.is_needed_for_all() || legs.len() > MOST_LEGS {
        return Err(NoPlan::Legs(legs.len()));
    }
    let numbers: BTreeSet<_> = legs.iter().map(|leg| leg.number).filter(|number| *number < NUMBERS).collect();
    let are_good = numbers.len() == legs.len() && redirection.place.number < NUMBERS;
    if are_good { Ok(()) } else { Err(NoPlan::Numbers) }
}

/// Settings of devices that answer for addresses of IPv6.
const ANSWERING_V6: [(&str, &str); 3] = [("forwarding", "1"), ("proxy_ndp", "1"), ("proxy_delay", "0")];

struct Planner<'a> {
    redirection: &'a Redirection,
    kernel_features: &'a KernelFeatures,
    plan: HostPlan,
    /// Port by which a proxy device joins its bridge. It comes last: a packet that arrives before its route is lost.
    port: Option<KernelObject>,
}

impl Planner<'_> {
    /// Plans a host that the guest has left.
    fn old_host(&mut self, leg: &Leg) -> Result<(), NoPlan> {
        let names = KernelNames(leg.number);
        let addresses = addresses(&leg.attachment);
        self.global_settings(&addresses);
        self.tunnel(leg, true, &addresses)?;
        for address in &addresses {
            self.route_by_tunnel(names.inner_table(), Prefix::host(*address), leg);
        }
        self.proxy_device(&leg.attachment, names);
        self.lan(&leg.attachment, names);
        self.policies(&leg.attachment, names);
        let tunnel = (names.tunnel(), leg.tunnel.mtu);
        self.rules(names, RuleFamily::Inet, rules::at_old_host(&leg.attachment, tunnel));
        let arp_sender_rewrite = self.arp_sender_rewrite(&leg.attachment, names);
        self.rules(names, RuleFamily::Netdev, arp_sender_rewrite.into_iter().collect());
        Ok(())
    }

    /// Plans the host where the guest is.
    fn new_host(&mut self) -> Result<(), NoPlan> {
        let redirection = self.redirection;
        let (names, attachment) = (KernelNames(redirection.place.number), &redirection.place.attachment);
        let guest = redirection.guest_addresses();
        let all: Vec<_> = guest.iter().copied().chain(addresses(attachment)).collect();
        self.global_settings(&all);
        for leg in &redirection.legs {
            self.tunnel(leg, false, &all)?;
        }
        self.bypass(names, &guest);
        let mut frames = rules::bypass(redirection, names);
        if redirection.is_translated() {
            self.proxy_device(attachment, names);
            self.lan(attachment, names);
            if let Some(home) = redirection.home() {
                self.former_neighbours(home, names);
            }
            self.policies(attachment, names);
            frames.extend(self.arp_sender_rewrite(attachment, names));
            frames.extend(self.tap_filter());
        } else {
            for address in &guest {
                self.policy(TO_PRIORITY, (None, Some(*address)), None, names.inner_table());
            }
        }
        for leg in &redirection.legs {
            self.ways_back(leg, &guest);
        }
        self.rules(names, RuleFamily::Inet, rules::at_new_host(redirection, names));
        self.rules(names, RuleFamily::Netdev, frames);
        Ok(())
    }

    /// Rules by which a proxy device asks; they need a hook that older kernels lack, where the pre-flight check refuses.
    fn arp_sender_rewrite(&self, attachment: &Attachment, names: KernelNames) -> Option<RuleChain> {
        let has_device = attachment.lan.bridge.is_some() && self.kernel_features.has_egress;
        has_device.then(|| rules::arp_sender_rewrite(attachment, names)).flatten()
    }

    fn tap_filter(&self) -> Option<RuleChain> {
        let is_needed = !self.redirection.place.attachment.is_home() && self.kernel_features.has_egress;
        is_needed.then(|| rules::tap_filter(self.redirection)).flatten()
    }

    fn rules(&mut self, names: KernelNames, family: RuleFamily, chains: Vec<RuleChain>) {
        if !chains.is_empty() {
            let name = names.rules(&self.redirection.migration);
            self.plan.switched.push(KernelObject::Rules(RuleTable { family, name, chains }));
        }
    }

    /// Plans sysctls of the host as a whole: it has to forward packets of IPv6, and still learn its own routes.
    fn global_settings(&mut self, addresses: &[IpAddr]) {
        let kernel_features = self.kernel_features;
        let is_needed = addresses.iter().any(IpAddr::is_ipv6) && kernel_features.has_v6;
        if !is_needed || kernel_features.forwards_v6_by_device {
            return;
        }
        for device in &kernel_features.advertised_devices {
            self.plan.switched.push(shared_sysctl(format!("net/ipv6/conf/{device}/accept_ra"), "2", "1"));
        }
        let path = "net/ipv6/conf/all/forwarding".to_owned();
        self.plan.switched.push(shared_sysctl(path, "1", &kernel_features.v6_forwarding));
    }

    fn device(&mut self, name: String, mac: Option<Mac>, mtu: u32, kind: DeviceKind) {
        let alias = self.redirection.migration.clone();
        self.plan.prepared.push(KernelObject::Device(DeviceObject { name, alias, mac, mtu, kind }));
    }

    /// Plans sysctls of a device of our own, which are made before it is up.
    fn settings(&mut self, device: &str, v4: &[(&str, &str)], v6: &[(&str, &str)], addresses: &[IpAddr]) {
        let path = |family: &str, key: &str| {
            let group = if key == "proxy_delay" { "neigh" } else { "conf" };
            format!("net/{family}/{group}/{device}/{key}")
        };
        let mut values: Vec<_> = v4.iter().map(|(key, value)| (path("ipv4", key), *value)).collect();
        let wants_v6 = addresses.iter().any(IpAddr::is_ipv6);
        if self.kernel_features.has_v6 && wants_v6 {
            let forwards: &[(&str, &str)] =
                if self.kernel_features.forwards_v6_by_device { &[("force_forwarding", "1")] } else { &[] };
            let quiet =
                [("accept_ra", "0"), ("accept_dad", "0"), ("addr_gen_mode", "1"), ("disable_ipv6", "0")];
            for (key, value) in quiet.iter().chain(v6).chain(forwards) {
                values.push((path("ipv6", key), value));
            }
        } else if self.kernel_features.has_v6 {
            values.push((path("ipv6", "disable_ipv6"), "1"));
        }
        for (path, value) in values {
            let setting = Sysctl { path, value: value.to_owned(), before: None };
            self.plan.prepared.push(KernelObject::Sysctl(setting));
        }
    }

    /// Plans a tunnel's end, which is up from the beginning.
    fn tunnel(&mut self, leg: &Leg, is_old: bool, addresses: &[IpAddr]) -> Result<(), NoPlan> {
        let (names, tunnel) = (KernelNames(leg.number), &leg.tunnel);
        let name = names.tunnel();
        let [old_mac, new_mac] = names.tunnel_macs();
        let (own_mac, other_mac) = if is_old { (old_mac, new_mac) } else { (new_mac, old_mac) };
        let has_frames = tunnel.kind == TunnelKind::Vxlan;
        let kind = tunnel_kind(tunnel, names, is_old)?;
        // The kernel clears it for the whole host when such a device comes up, and does not set it again.
        if tunnel.kind == TunnelKind::WireGuard {
            let path = "net/ipv4/conf/all/send_redirects".to_owned();
            self.plan.prepared.push(shared_sysctl(path, "0", &self.kernel_features.send_redirects));
        }
        self.device(name.clone(), has_frames.then_some(own_mac), tunnel.mtu, kind);
        // A packet's mark counts when the way back to its sender is compared.
        let v4 = [("forwarding", "1"), ("src_valid_mark", "1"), ("rp_filter", "0")];
        self.settings(&name, &v4, &[("forwarding", "1")], addresses);
        self.plan.prepared.push(KernelObject::Up { device: name.clone() });
        let families: BTreeSet<_> = addresses.iter().map(IpAddr::is_ipv6).collect();
        for is_v6 in families.into_iter().filter(|_| has_frames) {
            let address = if is_v6 { NEXT_HOP_V6.into() } else { NEXT_HOP_V4.into() };
            let neighbour = KernelObject::Neighbour { device: name.clone(), address, mac: other_mac };
            self.plan.prepared.push(neighbour);
        }
        Ok(())
    }

    fn route(&mut self, table: u32, destination: Prefix, device: String, next_hop: Option<IpAddr>) {
        let destination = destination.first();
        self.plan.switched.push(KernelObject::Route(RouteObject { table, destination, device, next_hop }));
    }

    fn route_by_tunnel(&mut self, table: u32, destination: Prefix, leg: &Leg) {
        let next_hop: IpAddr =
            if destination.address.is_ipv6() { NEXT_HOP_V6.into() } else { NEXT_HOP_V4.into() };
        let next_hop = (leg.tunnel.kind == TunnelKind::Vxlan).then_some(next_hop);
        self.route(table, destination, KernelNames(leg.number).tunnel(), next_hop);
    }

    fn policy(
        &mut self,
        priority: u32,
        (from, to): (Option<IpAddr>, Option<IpAddr>),
        mark: Option<(u32, u32)>,
        table: u32,
    ) {
        self.plan.switched.push(KernelObject::Policy(PolicyRule { priority, from, to, mark, table }));
    }

    /// Plans the choice of routing tables: packets for the guest lead to it, packets of the guest into the network. Where
    /// the host routes, the latter table has no way out, and the host's own follows.
    fn policies(&mut self, attachment: &Attachment, names: KernelNames) {
        for address in addresses(attachment) {
            self.policy(TO_PRIORITY, (None, Some(address)), None, names.inner_table());
            self.policy(FROM_PRIORITY, (Some(address), None), None, names.lan_table());
        }
    }

    /// Plans the device that stands for the guest in a network: it answers for the guest's address, and nothing else. Where
    /// the host routes, packets reach it without one.
    fn proxy_device(&mut self, attachment: &Attachment, names: KernelNames) {
        let Some(bridge) = attachment.lan.bridge.clone() else { return };
        let (device, port, mtu) = (names.proxy_device(), names.proxy_port(), attachment.lan.mtu);
        let public: Vec<_> = attachment.pairs.iter().map(|pair| pair.public).collect();
        self.device(device.clone(), Some(attachment.mac), mtu, veth(&port, names));
        // The host's own addresses are not answered for at the proxy device.
        let v4 = [("forwarding", "1"), ("arp_ignore", "8"), ("rp_filter", "0"), ("proxy_delay", "0")];
        self.settings(&device, &v4, &ANSWERING_V6, &public);
        self.settings(&port, &[], &[], &[]);
        for address in &public {
            let proxy = KernelObject::Proxy { device: device.clone(), address: *address };
            self.plan.switched.push(proxy);
        }
        self.link_local(&device, names, &public);
        for device in [port.clone(), device.clone()] {
            self.plan.switched.push(KernelObject::Up { device });
        }
        self.port = Some(KernelObject::Port { device: port, bridge, vlan: attachment.lan.vlan });
        self.plan.announced = Some((device, attachment.mac, public));
    }

    /// Plans the routes into the network of a proxy device.
    fn lan(&mut self, attachment: &Attachment, names: KernelNames) {
        if attachment.lan.bridge.is_none() {
            return;
        }
        let (device, table) = (names.proxy_device(), names.lan_table());
        for network in &attachment.lan.subnets {
            self.route(table, network.prefix, device.clone(), None);
            if let Some(gateway) = network.gateway {
                self.route(table, Prefix::all_like(gateway), device.clone(), Some(gateway));
            }
        }
    }

    /// Plans the routes to the neighbours in the guest's home network, which know it by its own address.
    fn former_neighbours(&mut self, home: &Leg, names: KernelNames) {
        for network in &home.attachment.lan.subnets {
            self.route_by_tunnel(names.lan_table(), network.prefix, home);
        }
    }

    /// Plans the bypass to the guest's tap. The host answers there for all that it can reach, as the guest's gateway and its
    /// neighbours would.
    fn bypass(&mut self, names: KernelNames, guest: &BTreeSet<IpAddr>) {
        let (bypass, port, card) = (names.bypass(), names.bypass_port(), self.redirection.card);
        let addresses: Vec<_> = guest.iter().copied().collect();
        let mtu = self.redirection.place.attachment.lan.mtu;
        self.device(bypass.clone(), Some(names.bypass_mac()), mtu, veth(&port, names));
        let v4 = [("forwarding", "1"), ("proxy_arp", "1"), ("rp_filter", "0"), ("proxy_delay", "0")];
        self.settings(&bypass, &v4, &ANSWERING_V6, &addresses);
        self.settings(&port, &[], &[], &[]);
        for device in [port, bypass.clone()] {
            self.plan.prepared.push(KernelObject::Up { device });
        }
        for address in guest {
            let neighbour = KernelObject::Neighbour { device: bypass.clone(), address: *address, mac: card };
            self.plan.prepared.push(neighbour);
            self.route(names.inner_table(), Prefix::host(*address), bypass.clone(), None);
        }
        if self.redirection.is_translated() {
            let pairs = self.redirection.place.attachment.pairs.iter();
            for pair in pairs.filter(|pair| !pair.is_same()) {
                // By this the host knows that it may answer for the address.
                self.route(names.inner_table(), Prefix::host(pair.public), bypass.clone(), None);
            }
        }
        self.link_local(&bypass, names, &addresses);
        self.v6_neighbours(&bypass);
    }

    /// Plans an address from which a device can answer questions of IPv6.
    fn link_local(&mut self, device: &str, names: KernelNames, addresses: &[IpAddr]) {
        if addresses.iter().any(IpAddr::is_ipv6) {
            let address = Prefix { address: names.link_local(), length: 64 };
            self.plan.prepared.push(KernelObject::Address { device: device.to_owned(), address });
        }
    }

    /// Plans answers for the gateways and neighbours of IPv6, which have to be named one by one.
    fn v6_neighbours(&mut self, bypass: &str) {
        let redirection = self.redirection;
        // A guest that has all addresses itself knows the neighbours of each.
        let left = redirection.legs.iter().filter(|_| !redirection.is_translated());
        let lans = left.map(|leg| &leg.attachment.lan).chain(&redirection.home_lan);
        let mut known: BTreeSet<IpAddr> = BTreeSet::new();
        for lan in lans {
            let gateways = lan.subnets.iter().filter_map(|network| network.gateway);
            known.extend(gateways.filter(IpAddr::is_ipv6));
            known.extend(lan.neighbours.iter().copied().map(IpAddr::from));
        }
        for address in known {
            let device = bypass.to_owned();
            let is_link_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
            let object = if is_link_local {
                KernelObject::Address { device, address: Prefix { address, length: 64 } }
            } else {
                KernelObject::Proxy { device, address }
            };
            self.plan.prepared.push(object);
        }
    }

    /// Plans the ways by which answers return to a host that the guest has left.
    fn ways_back(&mut self, leg: &Leg, guest: &BTreeSet<IpAddr>) {
        let table = KernelNames(leg.number).tunnel_table();
        let is_translated = self.redirection.is_translated();
        let mut families = BTreeSet::new();
        for pair in &leg.attachment.pairs {
            families.insert(Prefix::all_like(pair.guest));
            if !is_translated {
                self.policy(FROM_PRIORITY, (Some(pair.guest), None), None, table);
            }
        }
        for destination in families {
            self.route_by_tunnel(table, destination, leg);
        }
        for address in guest.iter().filter(|_| is_translated) {
            let mark = Some((leg.mark, MARK_MASK));
            self.policy(MARKED_PRIORITY, (Some(*address), None), mark, table);
        }
    }
}

fn veth(peer: &str, names: KernelNames) -> DeviceKind {
    DeviceKind::Veth { peer: peer.to_owned(), peer_mac: names.port_mac() }
}

/// Returns a sysctl that is not of a device of our own, with the value that is restored.
fn shared_sysctl(path: String, value: &str, before: &str) -> KernelObject {
    let (value, before) = (value.to_owned(), Some(before.to_owned()));
    KernelObject::Sysctl(Sysctl { path, value, before })
}

/// Returns what the kernel needs to know of one end of a tunnel.
fn tunnel_kind(tunnel: &Tunnel, names: KernelNames, is_old: bool) -> Result<DeviceKind, NoPlan> {
    let ends = [(tunnel.old_endpoint, tunnel.ports[0]), (tunnel.new_endpoint, tunnel.ports[1])];
    let [(local, port), (remote, other_port)] = if is_old { ends } else { [ends[1], ends[0]] };
    let identifier = names.network_identifier();
    let end = TunnelEndpoint { kind: tunnel.kind, identifier, local, remote, port, other_port };
    if tunnel.kind != TunnelKind::WireGuard {
        return Ok(DeviceKind::Tunnel(end));
    }
    let [old_key, new_key] = tunnel.keys.ok_or(NoPlan::NoKeys)?;
    Ok(DeviceKind::WireGuard { end, peer: if is_old { new_key } else { old_key } })
}

/// Returns the addresses of an attachment: the guest's and the public ones.
fn addresses(attachment: &Attachment) -> Vec<IpAddr> {
    let both: BTreeSet<_> = attachment.pairs.iter().flat_map(|pair| [pair.guest, pair.public]).collect();
    both.into_iter().collect()
}

#[cfg(test)]
mod tests;
