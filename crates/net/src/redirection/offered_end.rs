//! End of a tunnel that a host offers, which the guest leaves or has left before.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::kernel_names::{MOST_LEGS, NUMBERS};
use super::model::{Lan, Leg, Redirection};
use super::next_move::may_change;
use super::preflight::{RedirectionFacts, RedirectionFinding, blocker, no_port, no_tunnel};
use super::record::RedirectionRecord;
use super::tunnel::{self, Key, Tunnel, TunnelKind, TunnelPath};

/// End of a tunnel to the host where the guest is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedEnd {
    /// Number of the tunnel, which is free at the host that offers it.
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
    /// Its ports for tunnels of `WireGuard` to hosts that the guest has left before.
    pub more_ports: &'a [u16],
    /// True if its owner trusts the path.
    pub is_trusted: bool,
    /// Records of its redirections.
    pub records: &'a [RedirectionRecord],
}

impl OfferedEnd {
    /// Returns true if it can be the end of a tunnel.
    pub fn is_valid(&self) -> bool {
        self.number < NUMBERS && self.old_endpoint.is_ipv4() == self.new_endpoint.is_ipv4()
    }

    /// Returns true if a leg has the tunnel that was offered: above all it is encrypted where others could read what
    /// passes it, whatever the other host says.
    pub(super) fn has_offered(&self, leg: &Leg) -> bool {
        let tunnel = &leg.tunnel;
        let [port, other_port] = tunnel.ports;
        let ports = &self.facts.ports;
        let has_its_port = match tunnel.kind {
            TunnelKind::Vxlan => Some(port) == ports.vxlan && other_port == port,
            TunnelKind::WireGuard => Some(port) == ports.wireguard && other_port != 0,
            TunnelKind::Gre | TunnelKind::Ipip => tunnel.ports == [0; 2],
        };
        let key = tunnel.keys.map(|[old, _]| old);
        leg.number == self.number
            && (self.is_trusted || tunnel.kind.is_encrypted())
            && self.facts.tunnels.contains(&tunnel.kind)
            && (tunnel.old_endpoint, tunnel.new_endpoint) == (self.old_endpoint, self.new_endpoint)
            && tunnel.mtu <= tunnel::mtu(tunnel.kind, self.new_endpoint.is_ipv6(), self.facts.path_mtu)
            && has_its_port
            && key == self.key.filter(|_| tunnel.kind.is_encrypted())
    }

    /// Returns the tunnel from this end to the host where the guest is to be; `port` is that host's port for a tunnel of
    /// `WireGuard`. Keys are added later.
    pub(super) fn tunnel(
        &self,
        host: &str,
        here: &ArrivalSide<'_>,
        port: Option<u16>,
        carries_v6: bool,
    ) -> Result<Tunnel, RedirectionFinding> {
        let mut own = here.facts.clone();
        own.ports.wireguard = port;
        let kind = self.choose(host, here, &own, carries_v6)?;
        let is_v6 = self.new_endpoint.is_ipv6();
        Ok(Tunnel {
            kind,
            old_endpoint: self.old_endpoint,
            new_endpoint: self.new_endpoint,
            mtu: tunnel::mtu(kind, is_v6, self.facts.path_mtu.min(own.path_mtu)),
            ports: [&self.facts, &own].map(|facts| port_of(kind, facts).unwrap_or(0)),
            keys: None,
        })
    }

    fn choose(
        &self,
        host: &str,
        here: &ArrivalSide<'_>,
        own: &RedirectionFacts,
        carries_v6: bool,
    ) -> Result<TunnelKind, RedirectionFinding> {
        let is_trusted = self.is_trusted && here.is_trusted;
        let path = TunnelPath { is_trusted, is_v6: self.new_endpoint.is_ipv6(), carries_v6 };
        let [usable_there, usable_here] = [usable(&self.facts, own), usable(own, &self.facts)];
        tunnel::choose(path, &usable_here, &usable_there).map_err(|missing| {
            // What both have, and cannot use, is nearer than what one of them does not have.
            match tunnel::choose(path, &own.tunnels, &self.facts.tunnels) {
                Ok(kind) => no_port(kind, [(host, &self.facts), (here.host, own)]),
                Err(_) => no_tunnel(&missing, here.host, host),
            }
        })
    }

    /// Finds what stands against this end at the other host.
    pub(super) fn obstacles(&self, host: &str, here: &ArrivalSide<'_>) -> Vec<RedirectionFinding> {
        let mut findings = Vec::new();
        if !here.facts.own.iter().any(|own| own.address == self.new_endpoint) {
            let text = format!(
                "{host} reaches {} by {}, which is no address of {}",
                here.host, self.new_endpoint, here.host
            );
            let advice = format!(
                "name an address of {} itself under [hosts] on {host}: a tunnel passes no translation",
                here.host
            );
            findings.push(blocker("tunnel-end-not-local", text, advice));
        }
        if here.facts.numbers.contains(&self.number) {
            let text = format!("the number {} of the tunnel is in use on {}", self.number, here.host);
            let advice = "try again: each migration has another number".to_owned();
            findings.push(blocker("tunnel-number", text, advice));
        }
        findings
    }
}

/// Returns a host's port of UDP for a tunnel of this kind, if it needs and has one.
fn port_of(kind: TunnelKind, facts: &RedirectionFacts) -> Option<u16> {
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

/// Returns true if a host that the guest has left before may take the next redirection in place of its own, at a request of
/// the host where the guest is by the present one. Nothing but the tunnel's other end changes.
pub fn may_repoint(present: &Redirection, next: &Redirection, host: &str, is_trusted: bool) -> bool {
    let leg = |of: &Redirection| of.legs.iter().find(|leg| leg.host == host).cloned();
    let (Some(before), Some(after)) = (leg(present), leg(next)) else { return false };
    may_change(present, &next.migration, next.epoch).is_ok()
        && present.epoch != next.epoch
        && (present.guest(), present.card) == (next.guest(), next.card)
        && next.place.host != host
        && next.legs.len() <= MOST_LEGS
        && before.attachment == after.attachment
        && (is_trusted || after.tunnel.kind.is_encrypted())
}
