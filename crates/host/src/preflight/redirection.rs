//! Redirection of connections for a VM that moves to another network: what the source offers, and what the destination
//! finds when the QEMU that waits for the VM has its taps.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use engine::handover::MigrationTerms;
use net::addresses;
use net::announcer::Card;
use net::netlink::Socket;
use net::redirection::kernel_names::free_number;
use net::redirection::offer::{self, ArrivalSide, MigrationRef, RedirectionOffer, WantedAddress};
use net::redirection::preflight::{FindingSeverity, RedirectionFacts, RedirectionFinding};
use net::redirection::tunnel::Key;
use net::redirection::{
    AddressPair, Attachment, GuestPlace, Lan, NewAddressMode, OfferedEnd, Redirection, RedirectionKeeper,
    RedirectionRecord, TunnelKind, host_facts,
};
use proto::message::{Finding, Proposal, Severity, is_blocked};
use proto::{HostId, MigrationId};
use qemu::qmp::Qmp;
use tracee::Process;

use super::network_probe::reachable_cards;
use super::redirected_cards::{self, RedirectedCard};
use crate::config::RedirectionConfig;
use crate::redirections::{self, AgreedRedirections};
use crate::repointing;
use crate::{Context, SourceVm};
use api::{NewAddress, NewAddressOwner};

/// Returns the addresses that a VM gets without being named: those of a network to which it returns.
pub fn returning_addresses(context: &Context, request: &api::MigrateRequest) -> Vec<NewAddress> {
    let here = redirections::of_vm_here(&context.redirections, &context.config.host, &request.vm);
    let address = |pair: AddressPair| NewAddress { old: pair.guest, new: pair.public, prefix: None };
    let pairs = here.into_iter().flatten();
    let pairs = pairs.flat_map(|one| offer::returning_addresses(&one, request.to.as_str()));
    pairs.map(address).collect()
}

/// Describes what this host has for the redirection of a VM that leaves with new addresses, for each of its cards; the result
/// is for its proposal. A check makes nothing.
pub fn offer_redirection(
    context: &Context,
    vm: &mut SourceVm,
    (id, to): (&MigrationId, &HostId),
    request: &api::MigrateRequest,
    is_check: bool,
) -> Result<Option<serde_json::Value>, Finding> {
    let wanted = &request.new_addresses;
    let keeper = &context.redirections;
    let formers = redirections::of_vm_here(keeper, &context.config.host, &id.vm)
        .map_err(|error| impossible(&crate::chain(&error)))?;
    if wanted.is_empty() {
        return formers.first().map_or(Ok(None), |former| Err(still_redirected(former, id)));
    }
    let offered = find_cards(vm, formers, wanted).and_then(|cards| try_offer(context, (id, to), cards));
    let mut offered = offered.map_err(|reason| impossible(&reason))?;
    for offer in &mut offered {
        offer.addressing = addressing(context, request, offer);
        let end = &mut offer.end;
        if !is_check && end.facts.tunnels.contains(&TunnelKind::WireGuard) {
            let ports = context.config.redirection.ports();
            let reserved = keeper.reserve(&id.to_string(), end.number, ports);
            let reserved = reserved.map_err(|error| impossible(&crate::chain(&error)))?;
            (end.key, end.facts.ports.wireguard) = reserved.unzip();
        }
        (offer.earlier, offer.lost) = ask_earlier(context, offer, (id, to), is_check);
    }
    serde_json::to_value(offered).map(Some).map_err(|error| impossible(&crate::chain(&error)))
}

/// Returns the owner of new addresses. What is not requested stays as it is.
fn addressing(
    context: &Context,
    request: &api::MigrateRequest,
    offered: &RedirectionOffer,
) -> NewAddressMode {
    let usual = context.config.migration.new_address_owner;
    match (request.options.new_address_owner, &offered.former) {
        (None, Some(former)) => former.addressing,
        (requested, _) => match requested.unwrap_or(usual) {
            NewAddressOwner::Host => NewAddressMode::Nat,
            NewAddressOwner::Vm => NewAddressMode::Configured,
        },
    }
}

/// Asks the hosts that the VM has left before for their ends of tunnels to its next host. Returns those that offer one, and
/// the reasons of the others.
fn ask_earlier(
    context: &Context,
    offered: &RedirectionOffer,
    (id, to): (&MigrationId, &HostId),
    is_check: bool,
) -> (BTreeMap<String, OfferedEnd>, BTreeMap<String, String>) {
    let (mut earlier, mut lost) = (BTreeMap::new(), BTreeMap::new());
    let legs = offered.former.iter().flat_map(|former| &former.legs);
    for host in legs.map(|leg| &leg.host).filter(|host| *host != to.as_str()) {
        match repointing::ask_end(context, id, (host, offered.card), to, is_check) {
            Ok(end) => drop(earlier.insert(host.clone(), end)),
            Err(reason) => drop(lost.insert(host.clone(), reason)),
        }
    }
    (earlier, lost)
}

/// Returns the cards that have these addresses.
fn find_cards(
    vm: &mut SourceVm,
    formers: Vec<Redirection>,
    wanted: &[NewAddress],
) -> Result<Vec<RedirectedCard>, String> {
    let process = vm.process.try_clone().map_err(|error| crate::chain(&error))?;
    let qmp = vm.monitor().map_err(|error| crate::chain(&error))?;
    let cards = reachable_cards(qmp, &process)?;
    let seen = |mac| {
        let seen = Socket::route().and_then(|route| addresses::neighbours(&route, &[mac]));
        seen.map_err(|error| crate::chain(&error))
    };
    redirected_cards::distribute(&cards, formers, wanted, seen)
}

fn try_offer(
    context: &Context,
    (id, to): (&MigrationId, &HostId),
    cards: Vec<RedirectedCard>,
) -> Result<Vec<RedirectionOffer>, String> {
    let io = |error: io::Error| crate::chain(&error);
    let mut used = host_facts::numbers().map_err(io)?;
    let records = context.redirections.records().map_err(|error| crate::chain(&error))?;
    used.extend(records.iter().map(|record| record.names().0));
    let address = context.config.peer(to).ok_or_else(|| format!("{to} has no address"))?;
    let ends = repointing::tunnel_ends(address);
    let (own, other) = ends.map_err(|error| format!("no way to {address}: {error}"))?;
    let ports = context.redirections.free_ports(context.config.redirection.ports());
    let ports = ports.map_err(|error| crate::chain(&error))?;
    let mut offers = Vec::new();
    for RedirectedCard { interface, mac, wanted, former } in cards {
        let number = free_number(&id.to_string(), &used).ok_or("too many redirections are active")?;
        used.insert(number);
        let mut facts = host_facts::read_facts(Some(&interface), number, [own, other], &[]).map_err(io)?;
        facts.ports = ports;
        let is_trusted = context.config.redirection.trusted_path;
        let end = OfferedEnd { number, old_endpoint: own, new_endpoint: other, is_trusted, key: None, facts };
        let pairs = wanted.iter().map(|address| AddressPair { guest: address.old, public: address.old });
        let place = if let Some(former) = &former {
            former.place.clone()
        } else {
            let lan = host_facts::lan(&interface, mac).map_err(io)?;
            let attachment = Attachment { lan, mac, pairs: pairs.collect() };
            GuestPlace { host: context.config.host.to_string(), interface, number, attachment }
        };
        let wanted = wanted.iter().map(|address| WantedAddress {
            pair: AddressPair { guest: address.old, public: address.new },
            length: address.prefix,
        });
        offers.push(RedirectionOffer {
            card: mac,
            place,
            wanted: wanted.collect(),
            end,
            addressing: NewAddressMode::Nat,
            former,
            earlier: BTreeMap::new(),
            lost: BTreeMap::new(),
        });
    }
    Ok(offers)
}

/// Redirections that a source offers, one for each card.
pub(super) struct ExpectedRedirections {
    offers: Vec<RedirectionOffer>,
    migration: MigrationId,
    host: HostId,
    config: RedirectionConfig,
    keeper: RedirectionKeeper,
    is_check: bool,
    agreed: AgreedRedirections,
}

impl ExpectedRedirections {
    /// Returns the redirections of a proposal, if it has any. Their facts are those of the QEMU that is started later.
    pub(super) fn of(
        context: &Context,
        terms: &MigrationTerms,
        proposal: &Proposal,
    ) -> Result<Option<Self>, Finding> {
        let Some(offered) = proposal.redirection.clone() else { return Ok(None) };
        let offers: Result<Vec<RedirectionOffer>, _> = serde_json::from_value(offered);
        let offers = offers.map_err(|error| unreadable(&crate::chain(&error)))?;
        if !offer::are_valid(&offers, terms.source.as_str()) {
            return Err(unreadable("it is not one of the source"));
        }
        Ok(Some(Self {
            offers,
            migration: terms.migration.clone(),
            host: context.config.host.clone(),
            config: context.config.redirection.clone(),
            keeper: context.redirections.clone(),
            is_check: proposal.check_only,
            agreed: AgreedRedirections::default(),
        }))
    }

    /// Returns where the redirections are found after [`look`](Self::look).
    pub(super) fn agreed(&self) -> AgreedRedirections {
        Arc::clone(&self.agreed)
    }

    /// Looks at the networks of the waiting QEMU's taps, and computes the redirections.
    pub(super) fn look(&self, qmp: &mut Qmp, pid: u32) -> Vec<Finding> {
        self.try_look(qmp, pid).unwrap_or_else(|reason| vec![impossible(&reason)])
    }

    fn try_look(&self, qmp: &mut Qmp, pid: u32) -> Result<Vec<Finding>, String> {
        let process = Process::open(pid).map_err(|error| crate::chain(&error))?;
        let cards = reachable_cards(qmp, &process)?;
        let records = self.keeper.records().map_err(|error| crate::chain(&error))?;
        let places = self.offers.iter().map(|offer| self.place(offer, &cards, &records));
        let places = places.collect::<Result<Vec<_>, _>>()?;
        let sides: Vec<_> = places.iter().map(|place| self.side(place, &records)).collect();
        let migration = self.migration.to_string();
        let of = MigrationRef { migration: &migration, epoch: self.migration.epoch.0 };
        let (mut agreed, mut findings) = (Vec::new(), Vec::new());
        for (redirection, found) in offer::agree_on_all(&self.offers, of, &sides) {
            agreed.extend(redirection);
            findings.extend(found.into_iter().map(finding));
        }
        if is_blocked(&findings) {
            agreed.clear();
        }
        let key = places.iter().find_map(|place| place.key);
        if key.is_some() && !agreed.iter().any(offer::needs_keys) {
            self.keeper.forget_key(&migration).map_err(|error| crate::chain(&error))?;
        }
        findings.extend(agreed.iter().map(redirected));
        if !self.is_check {
            let each = agreed.into_iter().zip(&self.offers);
            let with_keys = each.map(|(redirection, offer)| Self::with_keys(redirection, offer, key));
            agreed = with_keys.collect::<Result<_, _>>()?;
        }
        if !agreed.is_empty() {
            self.agreed.get_or_init(|| agreed);
        }
        Ok(findings)
    }

    /// Looks at the network of one card.
    fn place(
        &self,
        offer: &RedirectionOffer,
        cards: &[Card],
        records: &[RedirectionRecord],
    ) -> Result<CardPlace, String> {
        let io = |error: io::Error| crate::chain(&error);
        let interface = cards.iter().find(|card| card.mac == offer.card).and_then(Card::interface);
        let interface = interface.ok_or_else(|| format!("the VM has no tap for card {} here", offer.card))?;
        let ends = [offer.end.new_endpoint, offer.end.old_endpoint];
        let asked = self.unserved(offer, records);
        let mut facts =
            host_facts::read_facts(Some(interface), offer.end.number, ends, &asked).map_err(io)?;
        facts.numbers.extend(records.iter().map(|record| record.names().0));
        let (key, more_ports) = self.reserve_ports(offer, &mut facts)?;
        let lan = host_facts::lan(interface, offer.card).map_err(io)?;
        Ok(CardPlace { interface: interface.to_owned(), lan, facts, key, more_ports })
    }

    fn side<'a>(&'a self, place: &'a CardPlace, records: &'a [RedirectionRecord]) -> ArrivalSide<'a> {
        ArrivalSide {
            host: self.host.as_str(),
            interface: &place.interface,
            lan: place.lan.clone(),
            facts: &place.facts,
            more_ports: &place.more_ports,
            is_trusted: self.config.trusted_path,
            records,
        }
    }

    /// Returns the new addresses for which no proxy device of this VM answers here: one does where it was before.
    fn unserved(&self, offer: &RedirectionOffer, records: &[RedirectionRecord]) -> Vec<IpAddr> {
        let own = records.iter().filter(|record| record.redirection.guest() == self.migration.vm.as_str());
        let own = own.filter_map(|record| record.plan.announced.as_ref());
        let served: Vec<_> = own.flat_map(|(_, _, addresses)| addresses.iter().copied()).collect();
        let wanted = offer.wanted.iter().map(|wanted| wanted.pair.public);
        wanted.filter(|address| !served.contains(address)).collect()
    }

    /// Finds ports, and reserves one for each tunnel that may need it alone. Returns the public key for these tunnels, and
    /// the ports of those to hosts that the VM has left before.
    fn reserve_ports(
        &self,
        offer: &RedirectionOffer,
        facts: &mut RedirectionFacts,
    ) -> Result<(Option<Key>, Vec<u16>), String> {
        let (ports, earlier) = (self.config.ports(), offer.earlier.len());
        let chain = |error| crate::chain(&error);
        facts.ports = self.keeper.free_ports(ports).map_err(chain)?;
        if self.is_check || !facts.tunnels.contains(&TunnelKind::WireGuard) {
            return Ok((None, self.keeper.further_ports(ports, earlier).map_err(chain)?));
        }
        let (migration, mut key) = (self.migration.to_string(), None);
        let mut reserve = || {
            let reserved = self.keeper.reserve(&migration, offer.end.number, ports).map_err(chain)?;
            let (public, port) = reserved.unzip();
            key = key.or(public);
            Ok::<_, String>(port)
        };
        if offer.end.key.is_some() {
            facts.ports.wireguard = reserve()?;
        }
        let mut more = Vec::new();
        for _ in offer.earlier.values().filter(|end| end.key.is_some()) {
            more.extend(reserve()?);
        }
        Ok((key, more))
    }

    fn with_keys(
        redirection: Redirection,
        offer: &RedirectionOffer,
        ours: Option<Key>,
    ) -> Result<Redirection, String> {
        if !offer::needs_keys(&redirection) {
            return Ok(redirection);
        }
        let ours = ours.ok_or("this host has no key for the tunnel")?;
        let with_keys = offer::with_keys(redirection, offer, ours);
        with_keys.ok_or_else(|| "a host has no key for its tunnel".to_owned())
    }
}

/// Network of a card at its new host.
struct CardPlace {
    interface: String,
    lan: Lan,
    facts: RedirectionFacts,
    /// Public key for tunnels of `WireGuard`, if one may be needed.
    key: Option<Key>,
    /// Ports of UDP for tunnels to hosts that the VM has left before.
    more_ports: Vec<u16>,
}

fn finding(found: RedirectionFinding) -> Finding {
    let severity = match found.severity {
        FindingSeverity::Blocker => Severity::Blocker,
        FindingSeverity::Warning => Severity::Warning,
    };
    Finding { severity, code: found.code.to_owned(), what: found.text, advice: found.advice }
}

/// Returns the finding about the fate of the VM's connections.
fn redirected(redirection: &Redirection) -> Finding {
    let pairs = redirection.place.attachment.pairs.iter();
    let is_translated = redirection.is_translated();
    let pairs: Vec<_> = pairs
        .map(|pair| {
            if is_translated { format!("{} at {}", pair.guest, pair.public) } else { pair.public.to_string() }
        })
        .collect();
    let tunnel = redirection.legs.first().map(|leg| &leg.tunnel);
    let by = tunnel.map_or_else(String::new, |tunnel| {
        format!(" through a tunnel ({}, {} bytes)", tunnel.kind, tunnel.mtu)
    });
    Finding {
        severity: Severity::Info,
        code: "connections-redirected".to_owned(),
        what: format!(
            "open connections go on{by}; new ones reach {} on {}",
            pairs.join(", "),
            redirection.place.host
        ),
        advice: if is_translated {
            "nothing to do".to_owned()
        } else {
            format!("configure {} in the VM, beside its other addresses", pairs.join(", "))
        },
    }
}

fn still_redirected(former: &Redirection, id: &MigrationId) -> Finding {
    Finding {
        severity: Severity::Blocker,
        code: "redirection-active".to_owned(),
        what: format!(
            "connections of {} are redirected since {}, and the destination is not where it was before",
            id.vm, former.migration
        ),
        advice: format!(
            "name its addresses at the destination with --new-address, or end these connections with `whimbrel net \
             release {}`",
            id.vm
        ),
    }
}

fn impossible(reason: &str) -> Finding {
    Finding {
        severity: Severity::Blocker,
        code: "redirection-impossible".to_owned(),
        what: format!("the VM's connections cannot be redirected: {reason}"),
        advice: "see docs/operations/wan.md, or move without --new-address: open connections end then"
            .to_owned(),
    }
}

fn unreadable(reason: &str) -> Finding {
    Finding {
        severity: Severity::Blocker,
        code: "agents-incompatible".to_owned(),
        what: format!("the offer of a redirection cannot be read: {reason}"),
        advice: "use the same version of whimbrel on both hosts".to_owned(),
    }
}
