//! Offer of a redirection: what the host that a guest leaves tells the other one, and the redirection that follows. The
//! result is the same data on all hosts that take part; each computes its own plan from it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::kernel_names::{KernelNames, MOST_LEGS};
use super::model::{
    AddressPair, Attachment, GuestPlace, Lan, Leg, MOST_NETWORKS, NewAddressMode, Prefix, Redirection, Subnet,
};
use super::next_move::{NetworkMove, next_redirection};
pub use super::offered_end::ArrivalSide;
use super::offered_end::OfferedEnd;
use super::preflight::{FindingSeverity, RedirectionFinding, blocker, check, warning};
use super::record::{RecordStage, RedirectionRecord};
use super::tunnel::{Key, Tunnel, TunnelKind};
use crate::ethernet::Mac;

/// Most cards of a guest that are redirected.
const MOST_CARDS: usize = 16;
/// Most addresses of a guest in an offer.
pub const MOST_PAIRS: usize = 16;
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
    /// Owner of the addresses that it is to have.
    #[serde(default)]
    pub addressing: NewAddressMode,
    /// End of a tunnel at that host.
    pub end: OfferedEnd,
    /// Redirection of the guest that is active there.
    pub former: Option<Redirection>,
    /// Ends of hosts that the guest has left before, by their names: connections that come from there go on.
    #[serde(default)]
    pub earlier: BTreeMap<String, OfferedEnd>,
    /// Hosts that it has left before and that offer nothing, each with the reason.
    #[serde(default)]
    pub lost: BTreeMap<String, String>,
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
        let fits = |address: IpAddr, length: u8| length <= Prefix::host(address).length;
        let mut wanted =
            self.wanted.iter().map(|wanted| (wanted.pair.public, wanted.length.unwrap_or_default()));
        let is_former_valid = |former: &Redirection| {
            former.place == self.place
                && former.legs.len() <= MOST_LEGS
                && former.legs.iter().all(|leg| is_attachment_valid(&leg.attachment))
                && former.home_lan.as_ref().is_none_or(is_lan_valid)
        };
        let interface = &self.place.interface;
        self.place.host == host
            && !interface.is_empty()
            && interface.len() <= NAME_BYTES
            && (1..=MOST_PAIRS).contains(&self.wanted.len())
            && is_attachment_valid(&self.place.attachment)
            && wanted.all(|(address, length)| fits(address, length))
            && self.end.is_valid()
            && self.earlier.len() <= MOST_LEGS
            && self.earlier.values().all(OfferedEnd::is_valid)
            && self.former.as_ref().is_none_or(is_former_valid)
    }

    /// Returns true if a redirection that the other host has computed is one of this offer: what this host makes by it
    /// is what it has offered, and what others make is what they have.
    pub fn is_of(&self, redirection: &Redirection, of: MigrationRef<'_>, destination: &str) -> bool {
        let hosts: BTreeSet<_> = redirection.legs.iter().map(|leg| leg.host.as_str()).collect();
        let is_offered = |leg: &Leg| {
            let attachment = self.attachment_at(&leg.host);
            let end = self.end_at(&leg.host);
            attachment == Some(&leg.attachment) && end.is_some_and(|end| end.has_offered(leg))
        };
        hosts.len() == redirection.legs.len()
            && hosts.contains(self.place.host.as_str())
            && redirection.legs.iter().all(is_offered)
            && (redirection.migration.as_str(), redirection.epoch) == (of.migration, of.epoch)
            && (redirection.card, redirection.addressing) == (self.card, self.addressing)
            && redirection.place.host == destination
    }

    /// Returns the end of a tunnel that a host has offered.
    fn end_at(&self, host: &str) -> Option<&OfferedEnd> {
        if host == self.place.host { Some(&self.end) } else { self.earlier.get(host) }
    }

    /// Returns the guest's attachment at a host that it leaves, or has left before.
    fn attachment_at(&self, host: &str) -> Option<&Attachment> {
        let mut before = self.former.iter().flat_map(|former| &former.legs);
        if host == self.place.host {
            return Some(&self.place.attachment);
        }
        before.find(|leg| leg.host == host).map(|leg| &leg.attachment)
    }
}

fn is_attachment_valid(attachment: &Attachment) -> bool {
    attachment.pairs.len() <= MOST_PAIRS && is_lan_valid(&attachment.lan)
}

fn is_lan_valid(lan: &Lan) -> bool {
    let mut lengths = lan.subnets.iter().map(|network| (network.prefix.address, network.prefix.length));
    lan.bridge.as_ref().is_none_or(|name| !name.is_empty() && name.len() <= NAME_BYTES)
        && lan.subnets.len() <= MOST_NETWORKS
        && lan.neighbours.len() <= MOST_NETWORKS
        && lengths.all(|(address, length)| length <= Prefix::host(address).length)
}

/// Returns the redirection of an offer, and what stands against it; none if there is no tunnel. Keys are added by
/// [`with_keys`].
pub fn agree(
    offer: &RedirectionOffer,
    of: MigrationRef<'_>,
    here: &ArrivalSide<'_>,
) -> (Option<Redirection>, Vec<RedirectionFinding>) {
    let mut findings = obstacles(offer, here);
    let source = &offer.place.host;
    let tunnel = match offer.end.tunnel(source, here, here.facts.ports.wireguard, carries_v6(offer)) {
        Ok(tunnel) => tunnel,
        Err(finding) => {
            findings.push(finding);
            return (None, findings);
        }
    };
    let former = known_former(offer, here);
    let next = |tunnels: &Tunnels| {
        let next = NetworkMove {
            migration: of.migration.to_owned(),
            epoch: of.epoch,
            card: offer.card,
            addressing: offer.addressing,
            from: offer.place.clone(),
            to: place(offer, here),
            tunnels: tunnels.clone(),
        };
        next_redirection(former.as_ref(), next)
    };
    let (mut tunnels, mut lost) = earlier_tunnels(offer, here, former.as_ref());
    tunnels.insert(source.clone(), (offer.end.number, tunnel));
    // A host that the guest has left before cannot keep it from moving on.
    if let Ok(whole) = next(&tunnels)
        && let Some(whole) = whole.redirection
    {
        for (host, end) in &offer.earlier {
            let mut blockers = check(&whole, host, &end.facts).into_iter();
            if let Some(found) = blockers.find(|found| found.severity == FindingSeverity::Blocker) {
                tunnels.remove(host);
                lost.insert(host.clone(), found.text);
            }
        }
    }
    let next = match next(&tunnels) {
        Ok(next) => next,
        Err(error) => {
            let advice = "ask the agent of the host where the VM is".to_owned();
            findings.push(blocker("redirection-superseded", error.to_string(), advice));
            return (None, findings);
        }
    };
    findings.extend(next.dropped.iter().map(|host| ends(host, lost.get(host))));
    if let Some(redirection) = &next.redirection {
        for (host, end) in [(source, &offer.end)].into_iter().chain(&offer.earlier) {
            findings.extend(check(redirection, host, &end.facts));
        }
        findings.extend(check(redirection, here.host, here.facts));
    }
    (next.redirection, findings)
}

/// Returns what [`agree`] returns for each card of a guest.
pub fn agree_on_all(
    offers: &[RedirectionOffer],
    of: MigrationRef<'_>,
    here: &[ArrivalSide<'_>],
) -> Vec<(Option<Redirection>, Vec<RedirectionFinding>)> {
    let mut has_ipip = false;
    let agree_on_one = |(offer, side): (&RedirectionOffer, &ArrivalSide<'_>)| {
        let mut facts = side.facts.clone();
        if has_ipip {
            // The kernel has one of these between two addresses.
            facts.tunnels.remove(&TunnelKind::Ipip);
        }
        let agreed = agree(offer, of, &ArrivalSide { facts: &facts, ..side.clone() });
        let mut legs = agreed.0.iter().flat_map(|redirection| &redirection.legs);
        has_ipip |= legs.any(|leg| leg.tunnel.kind == TunnelKind::Ipip);
        agreed
    };
    offers.iter().zip(here).map(agree_on_one).collect()
}

/// Returns true if the offers of a host are for different cards, and by different numbers.
pub fn are_valid(offers: &[RedirectionOffer], host: &str) -> bool {
    let cards: BTreeSet<_> = offers.iter().map(|offer| offer.card).collect();
    let numbers: BTreeSet<_> = offers.iter().map(|offer| offer.end.number).collect();
    (1..=MOST_CARDS).contains(&offers.len())
        && [cards.len(), numbers.len()] == [offers.len(); 2]
        && offers.iter().all(|offer| offer.is_valid(host))
}

/// Returns the redirection with the public keys of all hosts, as far as tunnels need them; none if one is missing.
#[must_use]
pub fn with_keys(mut redirection: Redirection, offer: &RedirectionOffer, new: Key) -> Option<Redirection> {
    for leg in redirection.legs.iter_mut().filter(|leg| leg.tunnel.kind.is_encrypted()) {
        leg.tunnel.keys = Some([offer.end_at(&leg.host)?.key?, new]);
    }
    Some(redirection)
}

/// Returns true if a tunnel of a redirection needs keys.
pub fn needs_keys(redirection: &Redirection) -> bool {
    redirection.legs.iter().any(|leg| leg.tunnel.kind == TunnelKind::WireGuard)
}

/// Tunnels by the names of the hosts that the guest has left, each with its number.
type Tunnels = BTreeMap<String, (u32, Tunnel)>;

/// Returns the tunnels to hosts that the guest has left before, and the reasons of those hosts to which there is none.
fn earlier_tunnels(
    offer: &RedirectionOffer,
    here: &ArrivalSide<'_>,
    former: Option<&Redirection>,
) -> (Tunnels, BTreeMap<String, String>) {
    let (mut tunnels, mut lost) = (Tunnels::new(), offer.lost.clone());
    let mut numbers = BTreeSet::from([offer.end.number]);
    let mut ports = here.more_ports.iter().copied();
    let has_left = |host: &str| former.is_some_and(|former| former.legs.iter().any(|leg| leg.host == host));
    for (host, end) in offer.earlier.iter().filter(|(host, _)| *host != here.host && has_left(host)) {
        let obstacle = end.obstacles(host, here).into_iter().next();
        let tunnel = match obstacle {
            Some(found) => Err(found.text),
            None if !numbers.insert(end.number) => Err("two tunnels have the same number".to_owned()),
            None => {
                let port = end.facts.ports.wireguard.and_then(|_| ports.next());
                end.tunnel(host, here, port, carries_v6(offer)).map_err(|found| found.text)
            }
        };
        match tunnel {
            Ok(tunnel) => drop(tunnels.insert(host.clone(), (end.number, tunnel))),
            Err(reason) => drop(lost.insert(host.clone(), reason)),
        }
    }
    (tunnels, lost)
}

/// Returns the former redirection, as far as this host believes it: what it says about this host's own devices has to be
/// in this host's own records.
fn known_former(offer: &RedirectionOffer, here: &ArrivalSide<'_>) -> Option<Redirection> {
    let former = offer.former.as_ref()?;
    let is_known =
        |record: &RedirectionRecord| record.stage == RecordStage::Active && record.redirection == *former;
    if here.records.iter().any(is_known) {
        return Some(former.clone());
    }
    let mut elsewhere = former.clone();
    elsewhere.legs.retain(|leg| leg.host != here.host);
    Some(elsewhere)
}

/// Returns true if addresses of IPv6 are redirected.
fn carries_v6(offer: &RedirectionOffer) -> bool {
    let wanted = offer.wanted.iter().map(|wanted| &wanted.pair);
    let mut pairs = offer.place.attachment.pairs.iter().chain(wanted);
    pairs.any(|pair| pair.guest.is_ipv6())
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
    let owned = |pair: AddressPair| match offer.addressing {
        NewAddressMode::Nat => pair,
        NewAddressMode::Configured => AddressPair { guest: pair.public, ..pair },
    };
    let pairs: Vec<_> = offer.wanted.iter().map(|wanted| owned(wanted.pair)).collect();
    let is_home = pairs.iter().all(|pair| pair.is_same());
    let mac = if is_home { offer.card } else { KernelNames(offer.end.number).proxy_mac() };
    GuestPlace {
        host: here.host.to_owned(),
        interface: here.interface.to_owned(),
        number: offer.end.number,
        attachment: Attachment { lan, mac, pairs },
    }
}

/// Finds obstacles that do not depend on the tunnel's kind.
fn obstacles(offer: &RedirectionOffer, here: &ArrivalSide<'_>) -> Vec<RedirectionFinding> {
    let source = &offer.place.host;
    let attachment = &offer.place.attachment;
    let known = |pair: &&AddressPair| {
        attachment.lan.subnets.iter().any(|network| network.prefix.contains(pair.public))
    };
    let unknown = |pair: &AddressPair| {
        let place =
            attachment.lan.bridge.as_ref().map_or_else(String::new, |bridge| format!(" (bridge {bridge})"));
        let text = format!(
            "{source}{place} has no address in the network of {}, by which it would know it",
            pair.public
        );
        let advice = format!("give {source} an address there, or name the address that the VM has");
        blocker("network-unknown", text, advice)
    };
    let findings = attachment.pairs.iter().filter(|pair| !known(pair)).map(unknown);
    findings.chain(offer.end.obstacles(source, here)).chain(addressing_obstacles(offer, here)).collect()
}

/// Finds what stands against the owner of the new addresses.
fn addressing_obstacles(offer: &RedirectionOffer, here: &ArrivalSide<'_>) -> Vec<RedirectionFinding> {
    let mut findings = Vec::new();
    let owner = |addressing| match addressing {
        NewAddressMode::Nat => "its host",
        NewAddressMode::Configured => "the VM itself",
    };
    if let Some(former) = offer.former.as_ref().filter(|former| former.addressing != offer.addressing) {
        let text = format!(
            "{} has the VM's addresses in the network of {}, and {} is to have those in the next one",
            owner(former.addressing),
            offer.place.host,
            owner(offer.addressing)
        );
        let advice = "omit --new-address-owner, or end the present redirection: `whimbrel net release --all`";
        findings.push(blocker("address-owner-differs", text, advice.to_owned()));
    }
    if offer.addressing == NewAddressMode::Configured && here.lan.bridge.is_none() {
        let text = format!(
            "{} of {} is in no bridge: nothing there reaches an address of the VM",
            here.interface, here.host
        );
        let advice = "put it into a bridge, or choose --new-address-owner host".to_owned();
        findings.push(blocker("bridge-missing", text, advice));
    }
    findings
}

/// Returns the addresses of a guest that returns to a host which it has left: those that it has now, with those by which it
/// is reached there.
pub fn returning_addresses(redirection: &Redirection, host: &str) -> Vec<AddressPair> {
    let leg = redirection.legs.iter().find(|leg| leg.host == host);
    let pairs = leg.map(|leg| leg.attachment.pairs.clone()).unwrap_or_default();
    if redirection.is_translated() {
        return pairs;
    }
    // Those of one family, in their order.
    let here = &redirection.place.attachment.pairs;
    let mut now: Vec<_> = here.iter().map(|pair| pair.public).collect();
    let paired = |there: AddressPair| {
        let place = now.iter().position(|now| now.is_ipv4() == there.public.is_ipv4());
        AddressPair { guest: place.map_or(there.guest, |place| now.remove(place)), public: there.public }
    };
    pairs.into_iter().map(paired).collect()
}

fn ends(host: &str, reason: Option<&String>) -> RedirectionFinding {
    let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
    let text = format!("connections that the VM still has by way of {host} end{reason}");
    let advice = format!("remove the reason, wait until they have ended, or move the VM to {host} first");
    warning("connections-end", text, advice)
}

#[cfg(test)]
mod tests;
