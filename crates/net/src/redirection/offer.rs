//! Offer of a redirection: what the host that a guest leaves tells the other one, and the redirection that follows. The
//! result is the same data on both hosts; each computes its own plan from it.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::judge::{RedirectionFacts, RedirectionFinding, blocker, judge, no_tunnel, warning};
use super::names::{NUMBERS, Names};
use super::onward::{NetworkMove, moved};
use super::parts::{
    AddressPair, GuestAddressing, GuestPlace, Lan, LanNetwork, Leg, Prefix, Presence, Redirection,
};
use super::record::{RecordStage, RedirectionRecord};
use super::tunnel::{self, Key, PathFacts, Tunnel, TunnelKind};
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
    pub old_end: IpAddr,
    /// Address of the other host, as that host reaches it.
    pub new_end: IpAddr,
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
    /// Port of UDP for tunnels.
    pub port: u16,
    /// Records of its redirections.
    pub records: &'a [RedirectionRecord],
}

/// Name and epoch of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedirectedMove<'a> {
    /// Name.
    pub migration: &'a str,
    /// Epoch.
    pub epoch: u64,
}

impl RedirectionOffer {
    /// Returns true if the offer of this host has no more and no longer parts than any has.
    pub fn is_valid(&self, host: &str) -> bool {
        let lan = &self.place.presence.lan;
        let names = [Some(&self.place.interface), lan.bridge.as_ref()];
        let lengths = self.wanted.iter().map(|wanted| wanted.length.unwrap_or(0));
        self.place.host == host
            && names.into_iter().flatten().all(|name| !name.is_empty() && name.len() <= NAME_BYTES)
            && (1..=MOST_PAIRS).contains(&self.wanted.len())
            && self.place.presence.pairs.len() <= MOST_PAIRS
            && lan.networks.len() <= MOST_NETWORKS
            && lan.neighbours.len() <= MOST_NETWORKS
            && lengths.chain(lan.networks.iter().map(|network| network.prefix.length)).all(|bits| bits <= 128)
            && self.number < NUMBERS
            && self.old_end.is_ipv4() == self.new_end.is_ipv4()
    }

    /// Returns true if a redirection that the other host has computed is one of this offer: what this host makes by it
    /// is what it has offered.
    pub fn is_of(&self, redirection: &Redirection, of: RedirectedMove<'_>, destination: &str) -> bool {
        let own = redirection.legs.iter().find(|leg| leg.host == self.place.host);
        let is_offered = |leg: &Leg| {
            leg.presence == self.place.presence
                && leg.number == self.number
                && (leg.tunnel.old_end, leg.tunnel.new_end) == (self.old_end, self.new_end)
                && leg.tunnel.keys.is_none_or(|[old, _]| Some(old) == self.key)
        };
        own.is_some_and(is_offered)
            && (redirection.migration.as_str(), redirection.epoch) == (of.migration, of.epoch)
            && redirection.card == self.card
            && redirection.place.host == destination
    }
}

/// Returns the redirection of an offer, and what stands against it; none if there is no tunnel. Keys are added by
/// [`with_keys`].
pub fn agree(
    offer: &RedirectionOffer,
    of: RedirectedMove<'_>,
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
        old_end: offer.old_end,
        new_end: offer.new_end,
        mtu: tunnel::mtu(kind, offer.new_end.is_ipv6(), path_mtu),
        port: if matches!(kind, TunnelKind::Vxlan | TunnelKind::WireGuard) { here.port } else { 0 },
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
        addressing: GuestAddressing::Translated,
        from: offer.place.clone(),
        to: place(offer, here),
        tunnels: [(offer.place.host.clone(), (offer.number, tunnel))].into(),
    };
    let onward = match moved(known, next) {
        Ok(onward) => onward,
        Err(error) => {
            let remedy = "ask the agent of the host where the VM is".to_owned();
            findings.push(blocker("redirection-foreign", error.to_string(), remedy));
            return (None, findings);
        }
    };
    let before = offer.former.iter().filter(|_| known.is_none()).flat_map(|former| &former.legs);
    let left = before.map(|leg| &leg.host).chain(&onward.left);
    findings.extend(left.filter(|host| *host != here.host).map(|host| ends(host)));
    if let Some(redirection) = &onward.redirection {
        findings.extend(judge(redirection, &offer.place.host, &offer.facts));
        findings.extend(judge(redirection, here.host, here.facts));
    }
    (onward.redirection, findings)
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
    let mut pairs = offer.place.presence.pairs.iter().chain(wanted);
    let path = PathFacts {
        is_trusted: offer.is_trusted && here.is_trusted,
        is_v6: offer.new_end.is_ipv6(),
        carries_v6: pairs.any(|pair| pair.guest.is_ipv6()),
        has_ipip: false,
    };
    tunnel::choose(path, &here.facts.tunnels, &offer.facts.tunnels)
        .map_err(|missing| no_tunnel(&missing, here.host, &offer.place.host))
}

/// Returns the guest's place at the new host.
fn place(offer: &RedirectionOffer, here: &ArrivalSide<'_>) -> GuestPlace {
    let mut lan = here.lan.clone();
    for WantedAddress { pair, length } in &offer.wanted {
        let is_there = lan.networks.iter().any(|network| network.prefix.contains(pair.public));
        // Where the host routes, no network belongs to the interface.
        let length = length.or_else(|| lan.bridge.is_none().then(|| Prefix::host(pair.public).length));
        if let Some(length) = length.filter(|_| !is_there) {
            let prefix = Prefix { address: pair.public, length };
            lan.networks.push(LanNetwork { prefix, gateway: None });
        }
    }
    let pairs: Vec<_> = offer.wanted.iter().map(|wanted| wanted.pair).collect();
    let is_home = pairs.iter().all(|pair| pair.is_same());
    let station = if is_home { offer.card } else { Names(offer.number).station_mac() };
    GuestPlace {
        host: here.host.to_owned(),
        interface: here.interface.to_owned(),
        number: offer.number,
        presence: Presence { lan, station, pairs },
    }
}

/// Judges what does not depend on the tunnel.
fn obstacles(offer: &RedirectionOffer, here: &ArrivalSide<'_>) -> Vec<RedirectionFinding> {
    let (source, host) = (&offer.place.host, here.host);
    let mut findings = Vec::new();
    let presence = &offer.place.presence;
    let known = |pair: &&AddressPair| {
        presence.lan.networks.iter().any(|network| network.prefix.contains(pair.public))
    };
    for pair in presence.pairs.iter().filter(|pair| !known(pair)) {
        let place =
            presence.lan.bridge.as_ref().map_or_else(String::new, |bridge| format!(" (bridge {bridge})"));
        let text = format!(
            "{source}{place} has no address in the network of {}, by which it would know it",
            pair.public
        );
        let remedy = format!("give {source} an address there, or name the address that the VM has");
        findings.push(blocker("network-unknown", text, remedy));
    }
    if !here.facts.own.iter().any(|own| own.address == offer.new_end) {
        let text = format!("{source} reaches {host} by {}, which is no address of {host}", offer.new_end);
        let remedy = format!(
            "name an address of {host} itself under [hosts] on {source}: a tunnel passes no translation"
        );
        findings.push(blocker("tunnel-end-foreign", text, remedy));
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
    let remedy = format!("wait until they have ended, or move the VM to {host} first");
    warning("connections-end", text, remedy)
}

#[cfg(test)]
mod tests;
