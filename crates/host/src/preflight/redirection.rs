//! Redirection of connections for a VM that moves to another network: what the source offers, and what the destination
//! finds when the QEMU that waits for the VM has its taps.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use engine::handover::MigrationTerms;
use net::announcer::Card;
use net::netlink::Socket;
use net::redirection::kernel_names::free_number;
use net::redirection::offer::{self, ArrivalSide, MigrationRef, RedirectionOffer, WantedAddress};
use net::redirection::preflight::{FindingSeverity, RedirectionFacts, RedirectionFinding};
use net::redirection::tunnel::Key;
use net::redirection::{
    AddressPair, Attachment, GuestPlace, NewAddressMode, OfferedEnd, Redirection, RedirectionKeeper,
    RedirectionRecord, TunnelKind, host_facts,
};
use net::{Mac, addresses};
use proto::message::{Finding, Proposal, Severity, is_blocked};
use proto::{HostId, MigrationId};
use qemu::qmp::Qmp;
use tracee::Process;

use super::network_probe::reachable_cards;
use crate::config::RedirectionConfig;
use crate::redirections::{self, AgreedRedirection};
use crate::repointing;
use crate::{Context, SourceVm};
use api::{NewAddress, NewAddressOwner};

/// Returns the addresses that a VM gets without being named: those of a network to which it returns.
pub fn returning_addresses(context: &Context, request: &api::MigrateRequest) -> Vec<NewAddress> {
    let here = redirections::of_vm_here(&context.redirections, &context.config.host, &request.vm);
    let Ok(Some(redirection)) = here else { return Vec::new() };
    let address = |pair: AddressPair| NewAddress { old: pair.guest, new: pair.public, prefix: None };
    offer::returning_addresses(&redirection, request.to.as_str()).into_iter().map(address).collect()
}

/// Describes what this host has for the redirection of a VM that leaves with new addresses; the result is for its
/// proposal. A check makes nothing.
pub fn offer_redirection(
    context: &Context,
    vm: &mut SourceVm,
    (id, to): (&MigrationId, &HostId),
    request: &api::MigrateRequest,
    is_check: bool,
) -> Result<Option<serde_json::Value>, Finding> {
    let wanted = &request.new_addresses;
    let keeper = &context.redirections;
    let former = redirections::of_vm_here(keeper, &context.config.host, &id.vm)
        .map_err(|error| impossible(&crate::chain(&error)))?;
    if wanted.is_empty() {
        return former.map_or(Ok(None), |former| Err(still_redirected(&former, id)));
    }
    let offered = try_offer(context, vm, (id, to), wanted, former);
    let mut offered = offered.map_err(|reason| impossible(&reason))?;
    let usual = context.config.migration.new_address_owner;
    offered.addressing = match (request.options.new_address_owner, &offered.former) {
        // What is not requested stays as it is.
        (None, Some(former)) => former.addressing,
        (requested, _) => match requested.unwrap_or(usual) {
            NewAddressOwner::Host => NewAddressMode::Nat,
            NewAddressOwner::Vm => NewAddressMode::Configured,
        },
    };
    let end = &mut offered.end;
    if !is_check && end.facts.tunnels.contains(&TunnelKind::WireGuard) {
        let ports = context.config.redirection.ports();
        let reserved = keeper.reserve(&id.to_string(), end.number, ports);
        let reserved = reserved.map_err(|error| impossible(&crate::chain(&error)))?;
        (end.key, end.facts.ports.wireguard) = reserved.unzip();
    }
    (offered.earlier, offered.lost) = ask_earlier(context, &offered, (id, to), is_check);
    serde_json::to_value(offered).map(Some).map_err(|error| impossible(&crate::chain(&error)))
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

fn try_offer(
    context: &Context,
    vm: &mut SourceVm,
    (id, to): (&MigrationId, &HostId),
    wanted: &[NewAddress],
    former: Option<Redirection>,
) -> Result<RedirectionOffer, String> {
    let io = |error: io::Error| crate::chain(&error);
    let process = vm.process.try_clone().map_err(|error| crate::chain(&error))?;
    let qmp = vm.monitor().map_err(|error| crate::chain(&error))?;
    let cards = reachable_cards(qmp, &process)?;
    let olds: Vec<_> = wanted.iter().map(|address| address.old).collect();
    let known = former.as_ref().map(|former| former.card);
    let (interface, card) = find_card(&cards, known, &olds)?;
    let mut used = host_facts::numbers().map_err(io)?;
    let records = context.redirections.records().map_err(|error| crate::chain(&error))?;
    used.extend(records.iter().map(|record| record.names().0));
    let number = free_number(&id.to_string(), &used).ok_or("too many redirections are active")?;
    let place = match &former {
        Some(former) => former.place.clone(),
        None => GuestPlace {
            host: context.config.host.to_string(),
            interface: interface.clone(),
            number,
            attachment: Attachment {
                lan: host_facts::lan(&interface, card).map_err(io)?,
                mac: card,
                pairs: olds.iter().map(|old| AddressPair { guest: *old, public: *old }).collect(),
            },
        },
    };
    let address = context.config.peer(to).ok_or_else(|| format!("{to} has no address"))?;
    let ends = repointing::tunnel_ends(address);
    let (own, other) = ends.map_err(|error| format!("no way to {address}: {error}"))?;
    let mut facts = host_facts::read_facts(Some(&interface), number, [own, other], &[]).map_err(io)?;
    let ports = context.redirections.free_ports(context.config.redirection.ports());
    facts.ports = ports.map_err(|error| crate::chain(&error))?;
    let wanted = wanted.iter().map(|address| WantedAddress {
        pair: AddressPair { guest: address.old, public: address.new },
        length: address.prefix,
    });
    Ok(RedirectionOffer {
        card,
        place,
        wanted: wanted.collect(),
        end: OfferedEnd {
            number,
            old_endpoint: own,
            new_endpoint: other,
            is_trusted: context.config.redirection.trusted_path,
            key: None,
            facts,
        },
        addressing: NewAddressMode::Nat,
        former,
        earlier: BTreeMap::new(),
        lost: BTreeMap::new(),
    })
}

/// Returns the card that has these addresses, and the interface behind it.
fn find_card(cards: &[Card], known: Option<Mac>, olds: &[IpAddr]) -> Result<(String, Mac), String> {
    let named: Vec<_> =
        cards.iter().filter_map(|card| Some((card.interface()?.to_owned(), card.mac))).collect();
    if let Some(known) = known {
        let found = named.into_iter().find(|(_, mac)| *mac == known);
        return found.ok_or_else(|| format!("the VM has no card {known} with a tap any more"));
    }
    if let [only] = &named[..] {
        return Ok(only.clone());
    }
    let has_all = |mac: Mac| -> io::Result<bool> {
        let seen = addresses::neighbours(&Socket::route()?, &[mac])?;
        Ok(olds.iter().all(|old| seen.contains(old)))
    };
    let mut found = Vec::new();
    for (interface, mac) in named {
        if has_all(mac).map_err(|error| crate::chain(&error))? {
            found.push((interface, mac));
        }
    }
    match found.pop() {
        Some(one) if found.is_empty() => Ok(one),
        _ => {
            Err("it is not known which of its cards has these addresses: let this host reach the VM by them \
                  (`ping`) before, and name addresses of one card"
                .to_owned())
        }
    }
}

/// Redirection that a source offers.
pub(super) struct ExpectedRedirection {
    offer: RedirectionOffer,
    migration: MigrationId,
    host: HostId,
    config: RedirectionConfig,
    keeper: RedirectionKeeper,
    is_check: bool,
    agreed: AgreedRedirection,
}

impl ExpectedRedirection {
    /// Returns the redirection of a proposal, if it has one. Its facts are those of the QEMU that is started later.
    pub(super) fn of(
        context: &Context,
        terms: &MigrationTerms,
        proposal: &Proposal,
    ) -> Result<Option<Self>, Finding> {
        let Some(offered) = proposal.redirection.clone() else { return Ok(None) };
        let offer: Result<RedirectionOffer, _> = serde_json::from_value(offered);
        let offer = offer.map_err(|error| unreadable(&crate::chain(&error)))?;
        if !offer.is_valid(terms.source.as_str()) {
            return Err(unreadable("it is not one of the source"));
        }
        Ok(Some(Self {
            offer,
            migration: terms.migration.clone(),
            host: context.config.host.clone(),
            config: context.config.redirection.clone(),
            keeper: context.redirections.clone(),
            is_check: proposal.check_only,
            agreed: AgreedRedirection::default(),
        }))
    }

    /// Returns where the redirection is found after [`look`](Self::look).
    pub(super) fn agreed(&self) -> AgreedRedirection {
        Arc::clone(&self.agreed)
    }

    /// Looks at the network of the waiting QEMU's tap, and computes the redirection.
    pub(super) fn look(&self, qmp: &mut Qmp, pid: u32) -> Vec<Finding> {
        self.try_look(qmp, pid).unwrap_or_else(|reason| vec![impossible(&reason)])
    }

    fn try_look(&self, qmp: &mut Qmp, pid: u32) -> Result<Vec<Finding>, String> {
        let io = |error: io::Error| crate::chain(&error);
        let process = Process::open(pid).map_err(|error| crate::chain(&error))?;
        let cards = reachable_cards(qmp, &process)?;
        let card = cards.iter().find(|card| card.mac == self.offer.card);
        let interface = card.and_then(Card::interface);
        let interface =
            interface.ok_or_else(|| format!("the VM has no tap for card {} here", self.offer.card))?;
        let records = self.keeper.records().map_err(|error| crate::chain(&error))?;
        let asked = self.unserved(&records);
        let end = &self.offer.end;
        let ends = [end.new_endpoint, end.old_endpoint];
        let facts = host_facts::read_facts(Some(interface), end.number, ends, &asked);
        let mut facts = facts.map_err(io)?;
        facts.numbers.extend(records.iter().map(|record| record.names().0));
        let migration = self.migration.to_string();
        let (key, more_ports) = self.reserve_ports(&mut facts)?;
        let side = ArrivalSide {
            host: self.host.as_str(),
            interface,
            lan: host_facts::lan(interface, self.offer.card).map_err(io)?,
            facts: &facts,
            more_ports: &more_ports,
            is_trusted: self.config.trusted_path,
            records: &records,
        };
        let of = MigrationRef { migration: &migration, epoch: self.migration.epoch.0 };
        let (redirection, found) = offer::agree(&self.offer, of, &side);
        let mut findings: Vec<_> = found.into_iter().map(finding).collect();
        let redirection = redirection.filter(|_| !is_blocked(&findings));
        if key.is_some() && !redirection.as_ref().is_some_and(offer::needs_keys) {
            self.keeper.forget_key(&migration).map_err(|error| crate::chain(&error))?;
        }
        if let Some(redirection) = redirection {
            findings.push(redirected(&redirection));
            let redirection = if self.is_check { redirection } else { self.with_keys(redirection, key)? };
            self.agreed.get_or_init(|| redirection);
        }
        Ok(findings)
    }

    /// Returns the new addresses for which no proxy device of this VM answers here: one does where it was before.
    fn unserved(&self, records: &[RedirectionRecord]) -> Vec<IpAddr> {
        let own = records.iter().filter(|record| record.redirection.guest() == self.migration.vm.as_str());
        let own = own.filter_map(|record| record.plan.announced.as_ref());
        let served: Vec<_> = own.flat_map(|(_, _, addresses)| addresses.iter().copied()).collect();
        let wanted = self.offer.wanted.iter().map(|wanted| wanted.pair.public);
        wanted.filter(|address| !served.contains(address)).collect()
    }

    /// Finds ports, and reserves one for each tunnel that may need it alone. Returns the public key for these tunnels, and
    /// the ports of those to hosts that the VM has left before.
    fn reserve_ports(&self, facts: &mut RedirectionFacts) -> Result<(Option<Key>, Vec<u16>), String> {
        let (ports, earlier) = (self.config.ports(), self.offer.earlier.len());
        let chain = |error| crate::chain(&error);
        facts.ports = self.keeper.free_ports(ports).map_err(chain)?;
        if self.is_check || !facts.tunnels.contains(&TunnelKind::WireGuard) {
            return Ok((None, self.keeper.further_ports(ports, earlier).map_err(chain)?));
        }
        let (migration, mut key) = (self.migration.to_string(), None);
        let mut reserve = || {
            let reserved = self.keeper.reserve(&migration, self.offer.end.number, ports).map_err(chain)?;
            let (public, port) = reserved.unzip();
            key = key.or(public);
            Ok::<_, String>(port)
        };
        if self.offer.end.key.is_some() {
            facts.ports.wireguard = reserve()?;
        }
        let mut more = Vec::new();
        for _ in self.offer.earlier.values().filter(|end| end.key.is_some()) {
            more.extend(reserve()?);
        }
        Ok((key, more))
    }

    fn with_keys(&self, redirection: Redirection, ours: Option<Key>) -> Result<Redirection, String> {
        if !offer::needs_keys(&redirection) {
            return Ok(redirection);
        }
        let ours = ours.ok_or("this host has no key for the tunnel")?;
        let with_keys = offer::with_keys(redirection, &self.offer, ours);
        with_keys.ok_or_else(|| "a host has no key for its tunnel".to_owned())
    }
}

fn finding(found: RedirectionFinding) -> Finding {
    let severity = match found.severity {
        FindingSeverity::Blocker => Severity::Blocker,
        FindingSeverity::Warning => Severity::Warning,
    };
    Finding { severity, code: found.code.to_owned(), what: found.text, advice: found.advice }
}

/// Says what will happen to the VM's connections.
fn redirected(redirection: &Redirection) -> Finding {
    let pairs = redirection.place.attachment.pairs.iter();
    let is_translated = redirection.is_translated();
    let pairs: Vec<_> = pairs
        .map(|pair| match is_translated {
            true => format!("{} at {}", pair.guest, pair.public),
            false => pair.public.to_string(),
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
        advice: match is_translated {
            true => "nothing to do".to_owned(),
            false => format!("configure {} in the VM, beside its other addresses", pairs.join(", ")),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_card_of_the_addresses_is_found() {
        let mac = |number: u8| Mac([0x52, 0x54, 0, 0, 0, number]);
        let card = |number| Card { mac: mac(number), taps: Vec::new() };
        let old = "192.0.2.5".parse().unwrap();
        let error = find_card(&[card(1)], Some(mac(1)), &[old]).unwrap_err();
        assert!(error.contains("no card 52:54:00:00:00:01 with a tap"), "{error}");
        assert!(find_card(&[], None, &[old]).unwrap_err().contains("which of its cards"));
    }
}
