//! Offer of a redirection: what the host that a guest leaves tells the other one, and the redirection that follows. The
//! result is the same data on both hosts; each computes its own plan from it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::kernel_names::{KernelNames, NUMBERS};
use super::model::{
    AddressPair, Attachment, GuestPlace, Lan, Leg, NewAddressMode, Prefix, Redirection, Subnet,
};
use super::next_move::{NetworkMove, next_redirection};
use super::preflight::{RedirectionFacts, RedirectionFinding, blocker, check, no_port, no_tunnel, warning};
use super::record::{RecordStage, RedirectionRecord};
use super::tunnel::{self, Key, Tunnel, TunnelKind, TunnelPath};
use crate::ethernet::Mac;

/// Most addresses of a guest in an offer.
pub const MOST_PAIRS: usize = 16;
/// Most networks and neighbours of a guest in an offer.
const MOST_NETWORKS: usize = 64;
/// Longest name of an interface.
const NAME_BYTES: usize = 15;

/// An address of the guest, with the one by which it is to be reached at its new host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedAddress {
    /// The addresses.
    pub pair: AddressPair,
    /// Number of bits that the addresses of the new network have in common, if the user has given it.
    pub length: Option<u8>,
}

/// Offer of the host that the guest leaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectionOffer {
    /// MAC address of the guest's card.
    pub card: Mac,
    /// Place that the guest leaves.
    pub place: GuestPlace,
    /// Addresses that it is to have.
    pub wanted: Vec<WantedAddress>,
    /// Number of the tunnel, which is free at that host.
    pub number: u32,
    /// Address of that host, as the tunnel's end.
    pub old_endpoint: IpAddr,
    /// Address of the other host, as that host reaches it.
    pub new_endpoint: IpAddr,
    /// True if the owner of that host says that only the hosts' owners can read or forge packets on the path.
    pub is_trusted: bool,
    /// Public key of that host for this tunnel, if it may be one of `WireGuard`.
    pub key: Option<Key>,
    /// Facts of that host.
    pub facts: RedirectionFacts,
    /// Redirection of the guest that is active there.
    pub former: Option<Redirection>,
}

/// The other host, where the guest is to be.
#[derive(Clone, Debug)]
pub struct ArrivalSide<'a> {
    /// Its name.
    pub host: &'a str,
    /// Interface behind which the guest's card is there.
    pub interface: &'a str,
    /// Network of that interface.
    pub lan: Lan,
    /// Facts of that host.
    pub facts: &'a RedirectionFacts,
    /// True if its owner trusts the path.
    pub is_trusted: bool,
    /// Records of its redirections.
    pub records: &'a [RedirectionRecord],
}

/// Name and epoch of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationRef<'a> {
    /// Name.
    pub migration: &'a str,
    /// Epoch.
    pub epoch: u64,
}

impl RedirectionOffer {
    /// Returns true if the offer of this host has no more and no longer parts than any has.
    pub fn is_valid(&self, host: &str) -> bool {
        let lan = &self.place.attachment.lan;
        let names = [Some(&self.place.interface), lan.bridge.as_ref()];
        let fits = |address: IpAddr, length: u8| length <= Prefix::host(address).length;
        let mut wanted =
            self.wanted.iter().map(|wanted| (wanted.pair.public, wanted.length.unwrap_or_default()));
        let mut subnets = lan.subnets.iter().map(|network| (network.prefix.address, network.prefix.length));
        self.place.host == host
            && names.into_iter().flatten().all(|name| !name.is_empty() && name.len() <= NAME_BYTES)
            && (1..=MOST_PAIRS).contains(&self.wanted.len())
            && self.place.attachment.pairs.len() <= MOST_PAIRS
            && lan.subnets.len() <= MOST_NETWORKS
            && lan.neighbours.len() <= MOST_NETWORKS
            && wanted.all(|(address, length)| fits(address, length))
            && subnets.all(|(address, length)| fits(address, length))
            && self.number < NUMBERS
            && self.old_endpoint.is_ipv4() == self.new_endpoint.is_ipv4()
    }

    /// Returns true if a redirection that the other host has computed is one of this offer: what this host makes by it
    /// is what it has offered.
    pub fn is_of(&self, redirection: &Redirection, of: MigrationRef<'_>, destination: &str) -> bool {
        let own = redirection.legs.iter().find(|leg| leg.host == self.place.host);
        let is_offered = |leg: &Leg| {
            leg.attachment == self.place.attachment
                && leg.number == self.number
                && self.is_offered(&leg.tunnel)
        };
        redirection.legs.len() == 1
            && own.is_some_and(is_offered)
            && (redirection.migration.as_str(), redirection.epoch) == (of.migration, of.epoch)
            && redirection.card == self.card
            && redirection.place.host == destination
    }
}

impl RedirectionOffer {
    /// Returns true if a tunnel is one that this host has offered: above all it is encrypted where others could read what
    /// passes it, whatever the other host says.
    fn is_offered(&self, tunnel: &Tunnel) -> bool {
        let [port, other_port] = tunnel.ports;
        let ports = &self.facts.ports;
        let has_its_port = match tunnel.kind {
            TunnelKind::Vxlan => Some(port) == ports.vxlan && other_port == port,
            TunnelKind::WireGuard => Some(port) == ports.wireguard && other_port != 0,
            TunnelKind::Gre | TunnelKind::Ipip => tunnel.ports == [0; 2],
        };
        let key = tunnel.keys.map(|[old, _]| old);
        (self.is_trusted || tunnel.kind.is_encrypted())
            && self.facts.tunnels.contains(&tunnel.kind)
            && (tunnel.old_endpoint, tunnel.new_endpoint) == (self.old_endpoint, self.new_endpoint)
            && tunnel.mtu <= tunnel::mtu(tunnel.kind, self.new_endpoint.is_ipv6(), self.facts.path_mtu)
            && has_its_port
            && key == self.key.filter(|_| tunnel.kind.is_encrypted())
    }
}

/// Returns the redirection of an offer, and what stands against it; none if there is no tunnel. Keys are added by
/// [`with_keys`].
pub fn agree(
    offer: &RedirectionOffer,
    of: MigrationRef<'_>,
    here: &ArrivalSide<'_>,
) -> (Option<Redirection>, Vec<RedirectionFinding>) {
    let mut findings = obstacles(offer, here);
    let kind = match choose(offer, here) {
        Ok(kind) => kind,
        Err(finding) => {
            findings.push(finding);
            return (None, findings);
        }
    };
    let path_mtu = offer.facts.path_mtu.min(here.facts.path_mtu);
    let tunnel = Tunnel {
        kind,
        old_endpoint: offer.old_endpoint,
        new_endpoint: offer.new_endpoint,
        mtu: tunnel::mtu(kind, offer.new_endpoint.is_ipv6(), path_mtu),
        ports: [&offer.facts, here.facts].map(|facts| port(kind, facts).unwrap_or(0)),
        keys: None,
    };
    // Only what this host knows itself: a former place of the guest names devices of this host.
    let is_known = |record: &&RedirectionRecord| {
        record.stage == RecordStage::Active && Some(&record.redirection) == offer.former.as_ref()
    };
    let known = here.records.iter().find(is_known).map(|record| &record.redirection);
    let next = NetworkMove {
        migration: of.migration.to_owned(),
        epoch: of.epoch,
        card: offer.card,
        addressing: NewAddressMode::Nat,
        from: offer.place.clone(),
        to: place(offer, here),
        tunnels: [(offer.place.host.clone(), (offer.number, tunnel))].into(),
    };
    let next = match next_redirection(known, next) {
        Ok(next) => next,
        Err(error) => {
            let advice = "ask the agent of the host where the VM is".to_owned();
            findings.push(blocker("redirection-foreign", error.to_string(), advice));
            return (None, findings);
        }
    };
    let before = offer.former.iter().filter(|_| known.is_none()).flat_map(|former| &former.legs);
    let dropped = before.map(|leg| &leg.host).chain(&next.dropped);
    findings.extend(dropped.filter(|host| *host != here.host).map(|host| ends(host)));
    if let Some(redirection) = &next.redirection {
        findings.extend(check(redirection, &offer.place.host, &offer.facts));
        findings.extend(check(redirection, here.host, here.facts));
    }
    (next.redirection, findings)
}

/// Returns the redirection with the public keys of both hosts.
#[must_use]
pub fn with_keys(mut redirection: Redirection, old: Key, new: Key) -> Redirection {
    for leg in &mut redirection.legs {
        leg.tunnel.keys = Some([old, new]);
    }
    redirection
}

/// Returns true if the tunnel of a redirection needs keys.
pub fn needs_keys(redirection: &Redirection) -> bool {
    redirection.legs.iter().any(|leg| leg.tunnel.kind == TunnelKind::WireGuard)
}

fn choose(offer: &RedirectionOffer, here: &ArrivalSide<'_>) -> Result<TunnelKind, RedirectionFinding> {
    let wanted = offer.wanted.iter().map(|wanted| &wanted.pair);
    let mut pairs = offer.place.attachment.pairs.iter().chain(wanted);
    let path = TunnelPath {
        is_trusted: offer.is_trusted && here.is_trusted,
        is_v6: offer.new_endpoint.is_ipv6(),
        carries_v6: pairs.any(|pair| pair.guest.is_ipv6()),
    };
    let hosts = [(offer.place.host.as_str(), &offer.facts), (here.host, here.facts)];
    let [there, own] = [usable(&offer.facts, here.facts), usable(here.facts, &offer.facts)];
    tunnel::choose(path, &own, &there).map_err(|missing| {
        // What both have, and cannot use, is nearer than what one of them does not have.
        match tunnel::choose(path, &here.facts.tunnels, &offer.facts.tunnels) {
            Ok(kind) => no_port(kind, hosts),
            Err(_) => no_tunnel(&missing, here.host, &offer.place.host),
        }
    })
}

/// Returns a host's port of UDP for a tunnel of this kind, if it needs and has one.
fn port(kind: TunnelKind, facts: &RedirectionFacts) -> Option<u16> {
    match kind {
        TunnelKind::Vxlan => facts.ports.vxlan,
        TunnelKind::WireGuard => facts.ports.wireguard,
        TunnelKind::Gre | TunnelKind::Ipip => None,
    }
}

/// Returns the kinds of tunnels that a host has, and for which it has a port.
fn usable(facts: &RedirectionFacts, other: &RedirectionFacts) -> BTreeSet<TunnelKind> {
    let has_port = |kind: &&TunnelKind| match kind {
        TunnelKind::Vxlan => facts.ports.vxlan.is_some() && facts.ports.vxlan == other.ports.vxlan,
        TunnelKind::WireGuard => facts.ports.wireguard.is_some(),
        TunnelKind::Gre | TunnelKind::Ipip => true,
    };
    facts.tunnels.iter().filter(has_port).copied().collect()
}

/// Returns the guest's place at the new host.
fn place(offer: &RedirectionOffer, here: &ArrivalSide<'_>) -> GuestPlace {
    let mut lan = here.lan.clone();
    for WantedAddress { pair, length } in &offer.wanted {
        let is_there = lan.subnets.iter().any(|network| network.prefix.contains(pair.public));
        // Where the host routes, no network belongs to the interface.
        let length = length.or_else(|| lan.bridge.is_none().then(|| Prefix::host(pair.public).length));
        if let Some(length) = length.filter(|_| !is_there) {
            let prefix = Prefix { address: pair.public, length };
            lan.subnets.push(Subnet { prefix, gateway: None });
        }
    }
    let pairs: Vec<_> = offer.wanted.iter().map(|wanted| wanted.pair).collect();
    let is_home = pairs.iter().all(|pair| pair.is_same());
    let mac = if is_home { offer.card } else { KernelNames(offer.number).proxy_mac() };
    GuestPlace {
        host: here.host.to_owned(),
        interface: here.interface.to_owned(),
        number: offer.number,
        attachment: Attachment { lan, mac, pairs },
    }
}

/// Finds obstacles that do not depend on the tunnel.
fn obstacles(offer: &RedirectionOffer, here: &ArrivalSide<'_>) -> Vec<RedirectionFinding> {
    let (source, host) = (&offer.place.host, here.host);
    let mut findings = Vec::new();
    let attachment = &offer.place.attachment;
    let known = |pair: &&AddressPair| {
        attachment.lan.subnets.iter().any(|network| network.prefix.contains(pair.public))
    };
    for pair in attachment.pairs.iter().filter(|pair| !known(pair)) {
        let place =
            attachment.lan.bridge.as_ref().map_or_else(String::new, |bridge| format!(" (bridge {bridge})"));
        let text = format!(
            "{source}{place} has no address in the network of {}, by which it would know it",
            pair.public
        );
        let advice = format!("give {source} an address there, or name the address that the VM has");
        findings.push(blocker("network-unknown", text, advice));
    }
    if !here.facts.own.iter().any(|own| own.address == offer.new_endpoint) {
        let text =
            format!("{source} reaches {host} by {}, which is no address of {host}", offer.new_endpoint);
        let advice = format!(
            "name an address of {host} itself under [hosts] on {source}: a tunnel passes no translation"
        );
        findings.push(blocker("tunnel-end-foreign", text, advice));
    }
    if here.facts.numbers.contains(&offer.number) {
        let text = format!("the number {} of the tunnel is in use on {host}", offer.number);
        findings.push(blocker(
            "tunnel-number",
            text,
            "try again: each migration has another number".to_owned(),
        ));
    }
    findings
}

fn ends(host: &str) -> RedirectionFinding {
    let text = format!("connections that the VM still has by way of {host} end");
    let advice = format!("wait until they have ended, or move the VM to {host} first");
    warning("connections-end", text, advice)
}

#[cfg(test)]
mod tests;
