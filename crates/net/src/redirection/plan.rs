//! The plan of one host: the objects that its kernel needs for a redirection, in their order.
//!
//! Devices are made before the stop; of these only tunnels are in use. Everything that takes packets is made at the
//! switch.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::names::{
    FROM_PRIORITY, MARK_MASK, MARKED_PRIORITY, MOST_LEGS, NEXT_HOP_V4, NEXT_HOP_V6, NUMBERS, Names,
    TO_PRIORITY,
};
use super::objects::{
    DeviceKind, DeviceObject, KernelObject, PolicyRule, RouteObject, SettingObject, TunnelEnd,
};
use super::parts::{Leg, Prefix, Presence, Redirection};
use super::rules::{self, RuleChain, RuleFamily, RuleTable};
use super::tunnel::{Tunnel, TunnelKind};
use crate::ethernet::Mac;

/// Abilities of a host, as far as plans depend on them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAbilities {
    /// True if it has IPv6.
    pub has_v6: bool,
    /// True if single devices can forward packets of IPv6 (Linux 6.17).
    pub forwards_v6_by_device: bool,
    /// Value of `net.ipv6.conf.all.forwarding`, before any redirection.
    pub v6_forwarding: String,
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
pub fn plan(redirection: &Redirection, host: &str, abilities: &HostAbilities) -> Result<HostPlan, NoPlan> {
    check(redirection)?;
    let mut planner = Planner { redirection, abilities, plan: HostPlan::default() };
    if redirection.place.host == host {
        planner.new_host()?;
    } else {
        let leg = redirection.legs.iter().find(|leg| leg.host == host);
        planner.old_host(leg.ok_or_else(|| NoPlan::NotInvolved(host.to_owned()))?)?;
    }
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
    abilities: &'a HostAbilities,
    plan: HostPlan,
}

impl Planner<'_> {
    /// Plans a host that the guest has left.
    fn old_host(&mut self, leg: &Leg) -> Result<(), NoPlan> {
        let names = Names(leg.number);
        let addresses = addresses(&leg.presence);
        self.global_settings(&addresses);
        self.tunnel(leg, true, &addresses)?;
        for address in &addresses {
            self.route_by_tunnel(names.inner_table(), Prefix::host(*address), leg);
        }
        self.station(&leg.presence, names);
        self.lan(&leg.presence, names);
        self.policies(&leg.presence, names);
        let tunnel = (names.tunnel(), leg.tunnel.mtu);
        self.rules(names, RuleFamily::Inet, rules::at_old_host(&leg.presence, tunnel));
        let questions = self.questions(&leg.presence, names);
        self.rules(names, RuleFamily::Netdev, questions.into_iter().collect());
        Ok(())
    }

    /// Plans the host where the guest is.
    fn new_host(&mut self) -> Result<(), NoPlan> {
        let redirection = self.redirection;
        let (names, presence) = (Names(redirection.place.number), &redirection.place.presence);
        let guest = redirection.guest_addresses();
        let all: Vec<_> = guest.iter().copied().chain(addresses(presence)).collect();
        self.global_settings(&all);
        for leg in &redirection.legs {
            self.tunnel(leg, false, &all)?;
        }
        self.wire(names, &guest);
        let mut frames = rules::wire(redirection, names);
        if redirection.is_translated() {
            self.station(presence, names);
            self.lan(presence, names);
            if let Some(home) = redirection.home() {
                self.former_neighbours(home, names);
            }
            self.policies(presence, names);
            frames.extend(self.questions(presence, names));
            frames.extend(self.isolation());
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

    /// Rules by which a station asks; they need a hook that older kernels lack, where the pre-flight check refuses.
    fn questions(&self, presence: &Presence, names: Names) -> Option<RuleChain> {
        let has_station = presence.lan.bridge.is_some() && self.abilities.has_egress;
        has_station.then(|| rules::questions(presence, names)).flatten()
    }

    fn isolation(&self) -> Option<RuleChain> {
        let is_needed = !self.redirection.place.presence.is_home() && self.abilities.has_egress;
        is_needed.then(|| rules::isolation(self.redirection)).flatten()
    }

    fn rules(&mut self, names: Names, family: RuleFamily, chains: Vec<RuleChain>) {
        if !chains.is_empty() {
            let name = names.rules(&self.redirection.migration);
            self.plan.switched.push(KernelObject::Rules(RuleTable { family, name, chains }));
        }
    }

    /// Plans settings of the host as a whole: it has to forward packets of IPv6, and still learn its own routes.
    fn global_settings(&mut self, addresses: &[IpAddr]) {
        let abilities = self.abilities;
        let is_needed = addresses.iter().any(IpAddr::is_ipv6) && abilities.has_v6;
        if !is_needed || abilities.forwards_v6_by_device {
            return;
        }
        let setting = |path: String, value: &str, before: &str| {
            let (value, before) = (value.to_owned(), Some(before.to_owned()));
            KernelObject::Setting(SettingObject { path, value, before })
        };
        for device in &abilities.advertised_devices {
            self.plan.switched.push(setting(format!("net/ipv6/conf/{device}/accept_ra"), "2", "1"));
        }
        let path = "net/ipv6/conf/all/forwarding".to_owned();
        self.plan.switched.push(setting(path, "1", &abilities.v6_forwarding));
    }

    fn device(&mut self, name: String, station: Option<Mac>, mtu: u32, kind: DeviceKind) {
        let alias = self.redirection.migration.clone();
        self.plan.prepared.push(KernelObject::Device(DeviceObject { name, alias, station, mtu, kind }));
    }

    /// Plans settings of a device of our own, which are made before it is up.
    fn settings(&mut self, device: &str, v4: &[(&str, &str)], v6: &[(&str, &str)], addresses: &[IpAddr]) {
        let path = |family: &str, key: &str| {
            let group = if key == "proxy_delay" { "neigh" } else { "conf" };
            format!("net/{family}/{group}/{device}/{key}")
        };
        let mut values: Vec<_> = v4.iter().map(|(key, value)| (path("ipv4", key), *value)).collect();
        let wants_v6 = addresses.iter().any(IpAddr::is_ipv6);
        if self.abilities.has_v6 && wants_v6 {
            let forwards: &[(&str, &str)] =
                if self.abilities.forwards_v6_by_device { &[("force_forwarding", "1")] } else { &[] };
            let quiet =
                [("accept_ra", "0"), ("accept_dad", "0"), ("addr_gen_mode", "1"), ("disable_ipv6", "0")];
            for (key, value) in quiet.iter().chain(v6).chain(forwards) {
                values.push((path("ipv6", key), value));
            }
        } else if self.abilities.has_v6 {
            values.push((path("ipv6", "disable_ipv6"), "1"));
        }
        for (path, value) in values {
            let setting = SettingObject { path, value: value.to_owned(), before: None };
            self.plan.prepared.push(KernelObject::Setting(setting));
        }
    }

    /// Plans a tunnel's end, which is up from the beginning.
    fn tunnel(&mut self, leg: &Leg, is_old: bool, addresses: &[IpAddr]) -> Result<(), NoPlan> {
        let (names, tunnel) = (Names(leg.number), &leg.tunnel);
        let name = names.tunnel();
        let [old_mac, new_mac] = names.tunnel_macs();
        let (own_mac, other_mac) = if is_old { (old_mac, new_mac) } else { (new_mac, old_mac) };
        let has_frames = tunnel.kind == TunnelKind::Vxlan;
        let kind = tunnel_kind(tunnel, names, is_old)?;
        self.device(name.clone(), has_frames.then_some(own_mac), tunnel.mtu, kind);
        // A packet's mark counts when the way back to its sender is compared.
        let v4 = [("forwarding", "1"), ("src_valid_mark", "1"), ("rp_filter", "0")];
        self.settings(&name, &v4, &[("forwarding", "1")], addresses);
        self.plan.prepared.push(KernelObject::Up { device: name.clone() });
        let families: BTreeSet<_> = addresses.iter().map(IpAddr::is_ipv6).collect();
        for is_v6 in families.into_iter().filter(|_| has_frames) {
            let address = if is_v6 { NEXT_HOP_V6.into() } else { NEXT_HOP_V4.into() };
            let neighbour = KernelObject::Neighbour { device: name.clone(), address, station: other_mac };
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
        self.route(table, destination, Names(leg.number).tunnel(), next_hop);
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
    fn policies(&mut self, presence: &Presence, names: Names) {
        for address in addresses(presence) {
            self.policy(TO_PRIORITY, (None, Some(address)), None, names.inner_table());
            self.policy(FROM_PRIORITY, (Some(address), None), None, names.lan_table());
        }
    }

    /// Plans the device that stands for the guest in a network: it answers for the guest's address, and nothing else. Where
    /// the host routes, packets reach it without one.
    fn station(&mut self, presence: &Presence, names: Names) {
        let Some(bridge) = presence.lan.bridge.clone() else { return };
        let (station, port, mtu) = (names.station(), names.station_port(), presence.lan.mtu);
        let public: Vec<_> = presence.pairs.iter().map(|pair| pair.public).collect();
        self.device(station.clone(), Some(presence.station), mtu, pair(&port, names));
        // The host's own addresses are not answered for at the guest's station.
        let v4 = [("forwarding", "1"), ("arp_ignore", "8"), ("rp_filter", "0"), ("proxy_delay", "0")];
        self.settings(&station, &v4, &ANSWERING_V6, &public);
        self.settings(&port, &[], &[], &[]);
        for address in &public {
            let proxy = KernelObject::Proxy { device: station.clone(), address: *address };
            self.plan.switched.push(proxy);
        }
        self.link_local(&station, names, &public);
        let vlan = presence.lan.vlan;
        self.plan.switched.push(KernelObject::Port { device: port.clone(), bridge, vlan });
        for device in [port, station.clone()] {
            self.plan.switched.push(KernelObject::Up { device });
        }
        self.plan.announced = Some((station, presence.station, public));
    }

    /// Plans the routes into the network of a station.
    fn lan(&mut self, presence: &Presence, names: Names) {
        if presence.lan.bridge.is_none() {
            return;
        }
        let (station, table) = (names.station(), names.lan_table());
        for network in &presence.lan.networks {
            self.route(table, network.prefix, station.clone(), None);
            if let Some(gateway) = network.gateway {
                self.route(table, Prefix::all_like(gateway), station.clone(), Some(gateway));
            }
        }
    }

    /// Plans the routes to the neighbours in the guest's home network, which know it by its own address.
    fn former_neighbours(&mut self, home: &Leg, names: Names) {
        for network in &home.presence.lan.networks {
            self.route_by_tunnel(names.lan_table(), network.prefix, home);
        }
    }

    /// Plans the wire to the guest's tap. The host answers there for all that it can reach, as the guest's gateway and its
    /// neighbours would.
    fn wire(&mut self, names: Names, guest: &BTreeSet<IpAddr>) {
        let (wire, port, card) = (names.wire(), names.wire_port(), self.redirection.card);
        let addresses: Vec<_> = guest.iter().copied().collect();
        let mtu = self.redirection.place.presence.lan.mtu;
        self.device(wire.clone(), Some(names.wire_mac()), mtu, pair(&port, names));
        let v4 = [("forwarding", "1"), ("proxy_arp", "1"), ("rp_filter", "0"), ("proxy_delay", "0")];
        self.settings(&wire, &v4, &ANSWERING_V6, &addresses);
        self.settings(&port, &[], &[], &[]);
        for device in [port, wire.clone()] {
            self.plan.prepared.push(KernelObject::Up { device });
        }
        for address in guest {
            let neighbour =
                KernelObject::Neighbour { device: wire.clone(), address: *address, station: card };
            self.plan.prepared.push(neighbour);
            self.route(names.inner_table(), Prefix::host(*address), wire.clone(), None);
        }
        if self.redirection.is_translated() {
            let pairs = self.redirection.place.presence.pairs.iter();
            for pair in pairs.filter(|pair| !pair.is_same()) {
                // By this the host knows that it may answer for the address.
                self.route(names.inner_table(), Prefix::host(pair.public), wire.clone(), None);
            }
        }
        self.link_local(&wire, names, &addresses);
        self.v6_neighbours(&wire);
    }

    /// Plans an address from which a device can answer questions of IPv6.
    fn link_local(&mut self, device: &str, names: Names, addresses: &[IpAddr]) {
        if addresses.iter().any(IpAddr::is_ipv6) {
            let address = Prefix { address: names.link_local(), length: 64 };
            self.plan.prepared.push(KernelObject::Address { device: device.to_owned(), address });
        }
    }

    /// Plans answers for the gateways and neighbours of IPv6, which have to be named one by one.
    fn v6_neighbours(&mut self, wire: &str) {
        let Some(home) = &self.redirection.home_lan else { return };
        let gateways = home.networks.iter().filter_map(|network| network.gateway);
        let mut known: BTreeSet<_> = gateways.filter(IpAddr::is_ipv6).collect();
        known.extend(home.neighbours.iter().copied().map(IpAddr::from));
        for address in known {
            let device = wire.to_owned();
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
        let table = Names(leg.number).tunnel_table();
        let is_translated = self.redirection.is_translated();
        let mut families = BTreeSet::new();
        for pair in &leg.presence.pairs {
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

fn pair(peer: &str, names: Names) -> DeviceKind {
    DeviceKind::Pair { peer: peer.to_owned(), peer_station: names.port_mac() }
}

/// Returns what the kernel needs to know of one end of a tunnel.
fn tunnel_kind(tunnel: &Tunnel, names: Names, is_old: bool) -> Result<DeviceKind, NoPlan> {
    let (own, other) =
        if is_old { (tunnel.old_end, tunnel.new_end) } else { (tunnel.new_end, tunnel.old_end) };
    let identifier = names.network_identifier();
    let end = TunnelEnd { kind: tunnel.kind, identifier, own, other, port: tunnel.port };
    if tunnel.kind != TunnelKind::WireGuard {
        return Ok(DeviceKind::Tunnel(end));
    }
    let [old_key, new_key] = tunnel.keys.ok_or(NoPlan::NoKeys)?;
    Ok(DeviceKind::WireGuard { end, peer: if is_old { new_key } else { old_key } })
}

/// Returns the addresses of a presence: the guest's and the public ones.
fn addresses(presence: &Presence) -> Vec<IpAddr> {
    let both: BTreeSet<_> = presence.pairs.iter().flat_map(|pair| [pair.guest, pair.public]).collect();
    both.into_iter().collect()
}

#[cfg(test)]
mod tests;
