//! Obstacles to a redirection, found before the guest is touched.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::kernel_names::OWN_DEVICES;
use super::model::{Leg, Prefix, Redirection};
use super::plan::KernelFeatures;
use super::tunnel::{FreePorts, LEAST_V4_MTU, LEAST_V6_MTU, NoTunnel, TunnelKind};

/// Largest packet below which a tunnel is worth a warning, in bytes: usual paths leave more.
const USUAL_MTU: u32 = 1280;

/// Facts of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectionFacts {
    /// Kinds of tunnels that the kernel has.
    pub tunnels: BTreeSet<TunnelKind>,
    /// Features of the kernel.
    pub kernel_features: KernelFeatures,
    /// Addresses of the host.
    pub own: Vec<Prefix>,
    /// Addresses of those that the guest is to get for which a neighbour answered.
    pub in_use: BTreeSet<IpAddr>,
    /// Chains of firewalls that let pass only what their rules name.
    pub closed: Vec<DropPolicyChain>,
    /// Largest packet on the way to the other host, in bytes.
    pub path_mtu: u32,
    /// Numbers of redirections that are in use.
    pub numbers: BTreeSet<u32>,
    /// True if the host has connection tracking, and the agent may use it.
    pub has_conntrack: bool,
    /// True if the interface behind the guest's card is a tap.
    pub is_tap: bool,
    /// Ports for tunnels.
    pub ports: FreePorts,
}

/// Chain of a firewall that lets pass only what its rules name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DropPolicyChain {
    /// Family, table and name, as nft writes them.
    pub name: String,
    /// True if it is applied to packets that pass through the host; otherwise to those for the host itself.
    pub forwards: bool,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FindingSeverity {
    /// The redirection works, with a restriction.
    Warning,
    /// The redirection cannot work.
    Blocker,
}

/// Something that stands against a redirection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedirectionFinding {
    /// Code, which does not change.
    pub code: &'static str,
    /// Severity.
    pub severity: FindingSeverity,
    /// Description.
    pub text: String,
    /// Advice.
    pub advice: String,
}

pub(super) fn blocker(code: &'static str, text: String, advice: String) -> RedirectionFinding {
    RedirectionFinding { code, severity: FindingSeverity::Blocker, text, advice }
}

pub(super) fn warning(code: &'static str, text: String, advice: String) -> RedirectionFinding {
    RedirectionFinding { code, severity: FindingSeverity::Warning, text, advice }
}

/// Finds that two hosts have no kind of tunnel in common.
pub fn no_tunnel(missing: &NoTunnel, here: &str, there: &str) -> RedirectionFinding {
    let modules = |kinds: &[TunnelKind]| {
        kinds
            .iter()
            .map(|kind| kind.module())
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect::<Vec<_>>()
            .join(" or ")
    };
    let places = [
        (&missing.missing_here, format!("on {here}")),
        (&missing.missing_there, format!("on {there}")),
        (&missing.missing_on_both, "on both hosts".to_owned()),
    ];
    let advice = places.iter().find(|(kinds, _)| !kinds.is_empty()).map_or_else(
        || "reach the other host by another address".to_owned(),
        |(kinds, place)| format!("load the kernel's module {} {place} (modprobe)", modules(kinds)),
    );
    let text = format!("{here} and {there} have no suitable kind of tunnel in common");
    blocker("tunnel-missing", text, advice)
}

/// Judges that two hosts have no ports for a tunnel of this kind, which both have.
pub(super) fn no_port(kind: TunnelKind, hosts: [(&str, &RedirectionFacts); 2]) -> RedirectionFinding {
    let port = |facts: &RedirectionFacts| match kind {
        TunnelKind::WireGuard => facts.ports.wireguard,
        _ => facts.ports.vxlan,
    };
    let lacking: Vec<_> =
        hosts.iter().filter(|(_, facts)| port(facts).is_none()).map(|(host, _)| *host).collect();
    let text = if lacking.is_empty() {
        let each: Vec<_> =
            hosts.iter().filter_map(|(host, facts)| Some(format!("{} on {host}", port(facts)?))).collect();
        format!("the hosts have different ports of UDP for {kind}: {}", each.join(", "))
    } else {
        format!("all ports of UDP for {kind} are in use on {}", lacking.join(" and on "))
    };
    let advice = "choose a free `port` under [network.redirection], the same on both hosts; or end redirections that are \
                  not needed (`whimbrel net release`)";
    blocker("tunnel-port", text, advice.to_owned())
}

/// Checks the part of a redirection that a host has. A host without a part has no findings.
pub fn check(redirection: &Redirection, host: &str, facts: &RedirectionFacts) -> Vec<RedirectionFinding> {
    let mut findings = Vec::new();
    if redirection.place.host == host {
        findings.extend(addresses(redirection, facts));
        findings.extend(guest(redirection, facts));
        for leg in &redirection.legs {
            findings.extend(path(leg, host, &leg.host, redirection, facts));
        }
    } else if let Some(leg) = redirection.legs.iter().find(|leg| leg.host == host) {
        findings.extend(path(leg, host, &redirection.place.host, redirection, facts));
        findings.extend(proxy_device(leg.attachment.lan.bridge.as_deref(), host, facts));
    }
    findings
}

/// Checks the addresses that the guest is to get.
fn addresses(redirection: &Redirection, facts: &RedirectionFacts) -> Vec<RedirectionFinding> {
    let (host, attachment) = (&redirection.place.host, &redirection.place.attachment);
    let mut findings = Vec::new();
    for pair in &attachment.pairs {
        let address = pair.public;
        let is_own = facts.own.iter().any(|own| own.address == address);
        if is_own || facts.in_use.contains(&address) {
            let whose = if is_own { "the host itself" } else { "another machine" };
            let text = format!("{address}, which the VM is to get on {host}, is in use by {whose}");
            let advice = "choose another address for the VM, or free this one".to_owned();
            findings.push(blocker("address-in-use", text, advice));
        }
        let subnets = &attachment.lan.subnets;
        if !subnets.iter().any(|network| network.prefix.contains(address)) {
            let text = format!("{address}, which the VM is to get, is in no network of {host}");
            let advice = "choose an address of the network to which the VM's tap belongs there".to_owned();
            findings.push(blocker("address-outside-subnet", text, advice));
        }
    }
    let former = redirection.home().into_iter().flat_map(|home| &home.attachment.lan.subnets);
    for network in former {
        if let Some(own) = facts.own.iter().find(|own| network.prefix.contains(own.address)) {
            let Prefix { address, length } = network.prefix.first();
            let text = format!(
                "{host} has the address {} in {address}/{length}, the network that the VM has left: the VM reaches \
                 {host} there, and not the machine that has this address in its old network",
                own.address
            );
            let advice = "give the networks of both hosts different addresses".to_owned();
            findings.push(warning("networks-overlap", text, advice));
        }
    }
    findings
}

/// Checks what the guest's host has to have.
fn guest(redirection: &Redirection, facts: &RedirectionFacts) -> Vec<RedirectionFinding> {
    let place = &redirection.place;
    let mut findings = Vec::new();
    if !facts.is_tap {
        let text = format!("{}, behind which the VM's card is on {}, is no tap", place.interface, place.host);
        let advice = "give the VM a tap there: a macvtap passes the host's rules".to_owned();
        findings.push(blocker("not-a-tap", text, advice));
    }
    if redirection.is_translated() {
        if !facts.has_conntrack {
            let text =
                format!("{} has no connection tracking, without which it cannot translate", place.host);
            let advice =
                "load the kernel's module nf_conntrack, and let the agent use it (CAP_NET_ADMIN), or give \
                          the VM both addresses"
                    .to_owned();
            findings.push(blocker("conntrack-missing", text, advice));
        }
        findings.extend(proxy_device(place.attachment.lan.bridge.as_deref(), &place.host, facts));
        findings.extend(advertised_route(redirection));
    }
    findings
}

/// Finds that the guest may have its default route from advertisements of a router which it has left.
fn advertised_route(redirection: &Redirection) -> Option<RedirectionFinding> {
    let home = redirection.home()?;
    let gateways = home.attachment.lan.subnets.iter().filter_map(|network| network.gateway);
    let mut gateways = gateways.filter(IpAddr::is_ipv6);
    let gateway = gateways.next()?;
    let text = format!(
        "if the VM has learnt its route to {gateway} from router advertisements, it loses it when the last one expires, \
         usually after 30 minutes"
    );
    let advice = "configure the route in the VM, or expect that its IPv6 connections last as long".to_owned();
    Some(warning("route-advertised", text, advice))
}

/// Checks that a host can stand in for the guest in a bridge.
fn proxy_device(bridge: Option<&str>, host: &str, facts: &RedirectionFacts) -> Option<RedirectionFinding> {
    let bridge = bridge.filter(|_| !facts.kernel_features.has_egress)?;
    let text = format!(
        "the kernel of {host} has no rules for frames that it sends: it cannot ask in the VM's name in bridge {bridge}"
    );
    let advice =
        "boot a kernel with netfilter's egress hook (CONFIG_NETFILTER_EGRESS, Linux 5.16)".to_owned();
    Some(blocker("egress-missing", text, advice))
}

/// Checks the path between two hosts, and through this one.
fn path(
    leg: &Leg,
    host: &str,
    other: &str,
    redirection: &Redirection,
    facts: &RedirectionFacts,
) -> Vec<RedirectionFinding> {
    let mut findings = Vec::new();
    let (tunnel, kind) = (&leg.tunnel, leg.tunnel.kind);
    if !facts.tunnels.contains(&kind) {
        let text = format!("the kernel of {host} has no {kind}");
        let advice = format!("load its module {} there (modprobe)", kind.module());
        findings.push(blocker("tunnel-missing", text, advice));
    }
    let fits = facts.path_mtu.saturating_sub(kind.header_bytes(tunnel.new_endpoint.is_ipv6()));
    let mtu = tunnel.mtu.min(fits);
    let carries_v6 = redirection.guest_addresses().iter().any(IpAddr::is_ipv6);
    let least = if carries_v6 { LEAST_V6_MTU } else { LEAST_V4_MTU };
    let text = format!("packets of at most {mtu} bytes pass the tunnel between {host} and {other}");
    let advice = format!("raise the MTU of the path between {host} and {other} to 1500 bytes");
    if mtu < least {
        findings.push(blocker("mtu-too-small", text, advice));
    } else if mtu < USUAL_MTU {
        findings.push(warning("mtu-small", text, advice));
    }
    for chain in &facts.closed {
        findings.push(closed(chain, host, leg, facts.ports));
    }
    findings
}

/// Finds a firewall that lets pass only what its rules name.
fn closed(chain: &DropPolicyChain, host: &str, leg: &Leg, own_ports: FreePorts) -> RedirectionFinding {
    let name = &chain.name;
    let what = if chain.forwards { "packets between its networks" } else { "packets from other hosts" };
    let text = format!("the firewall of {host} (chain {name}) lets pass only {what} that its rules name");
    let own = format!("\"{OWN_DEVICES}\"");
    let advice = if chain.forwards {
        format!(
            "unless a rule does so already: nft 'insert rule {name} iifname {own} accept; insert rule {name} oifname \
             {own} accept'"
        )
    } else {
        let tunnel = &leg.tunnel;
        let other = if leg.host == host { tunnel.new_endpoint } else { tunnel.old_endpoint };
        let family = if other.is_ipv4() { "ip" } else { "ip6" };
        // Each tunnel of WireGuard has another port.
        let is_each_its_own = tunnel.kind == TunnelKind::WireGuard;
        let ports = if is_each_its_own { own_ports.range } else { [tunnel.ports[0]; 2] };
        let what = tunnel.kind.as_match(ports);
        format!(
            "unless a rule does so already: nft 'insert rule {name} {family} saddr {other} {what} accept'"
        )
    };
    warning("firewall-in-way", text, advice)
}

#[cfg(test)]
mod tests;
