use super::*;
use crate::redirection::testing::{first, ip};
use crate::redirection::tunnel::TunnelPath;

fn good() -> RedirectionFacts {
    RedirectionFacts {
        tunnels: TunnelKind::ALL.into(),
        kernel_features: KernelFeatures { has_egress: true, ..KernelFeatures::default() },
        own: vec![Prefix { address: ip("10.2.0.2"), length: 24 }],
        path_mtu: 1500,
        has_conntrack: true,
        is_tap: true,
        ..RedirectionFacts::default()
    }
}

/// Returns the codes and weights that a change of the facts brings at the guest's new host.
fn found(change: impl FnOnce(&mut RedirectionFacts)) -> Vec<(&'static str, FindingSeverity)> {
    let mut facts = good();
    change(&mut facts);
    let findings = check(&first(), "host2", &facts);
    assert!(findings.iter().all(|finding| !finding.advice.is_empty() && !finding.text.is_empty()));
    let usual = "route-advertised";
    findings
        .iter()
        .map(|finding| (finding.code, finding.severity))
        .filter(|(code, _)| *code != usual)
        .collect()
}

#[test]
fn each_obstacle_is_found() {
    use FindingSeverity::{Blocker, Warning};
    let chain = |forwards| DropPolicyChain { name: "inet filter c".to_owned(), forwards };
    assert_eq!(found(|_| {}), []);
    assert_eq!(found(|facts| facts.tunnels.clear()), [("tunnel-missing", Blocker)]);
    assert_eq!(found(|facts| facts.in_use.extend([ip("10.2.0.5")])), [("address-in-use", Blocker)]);
    assert_eq!(found(|facts| facts.own[0].address = ip("fd02::5")), [("address-in-use", Blocker)]);
    assert_eq!(found(|facts| facts.own[0].address = ip("10.1.0.8")), [("networks-overlap", Warning)]);
    assert_eq!(found(|facts| facts.closed.push(chain(true))), [("firewall-in-way", Warning)]);
    assert_eq!(found(|facts| facts.closed.push(chain(false))), [("firewall-in-way", Warning)]);
    assert_eq!(found(|facts| facts.path_mtu = 1329), [("mtu-too-small", Blocker)], "IPv6 needs 1280");
    assert_eq!(found(|facts| facts.has_conntrack = false), [("conntrack-missing", Blocker)]);
    assert_eq!(found(|facts| facts.is_tap = false), [("not-a-tap", Blocker)]);
    assert_eq!(found(|facts| facts.kernel_features.has_egress = false), [("egress-missing", Blocker)]);
}

#[test]
fn small_packets_are_enough_for_ipv4() {
    let mut redirection = first();
    for attachment in [&mut redirection.place.attachment, &mut redirection.legs[0].attachment] {
        attachment.pairs.retain(|pair| pair.guest.is_ipv4());
        attachment.lan.subnets.retain(|network| network.prefix.address.is_ipv4());
    }
    let codes = |path_mtu| {
        let facts = RedirectionFacts { path_mtu, ..good() };
        check(&redirection, "host2", &facts).iter().map(|finding| finding.code).collect::<Vec<_>>()
    };
    assert_eq!((codes(1400), codes(1329), codes(600)), (vec![], vec!["mtu-small"], vec!["mtu-too-small"]));
}

#[test]
fn an_address_of_another_network_is_refused() {
    let mut redirection = first();
    redirection.place.attachment.pairs[0].public = ip("10.9.0.5");
    let findings = check(&redirection, "host2", &good());
    assert!(findings.iter().any(|finding| finding.code == "address-outside-subnet"), "{findings:?}");
    assert_eq!(check(&redirection, "host9", &good()), [], "it has no part");
}

#[test]
fn remedies_name_what_to_do() {
    let missing = super::super::tunnel::choose(
        TunnelPath { is_trusted: false, is_v6: false, carries_v6: false },
        &TunnelKind::ALL.into(),
        &BTreeSet::new(),
    );
    let finding = no_tunnel(&missing.unwrap_err(), "host1", "host2");
    assert_eq!(finding.advice, "load the kernel's module wireguard on host2 (modprobe)");
    let facts = RedirectionFacts {
        closed: vec![DropPolicyChain { name: "ip filter INPUT".to_owned(), forwards: false }],
        ..good()
    };
    let findings = check(&first(), "host1", &facts);
    let rule = "insert rule ip filter INPUT ip saddr 10.2.0.2 udp dport 7741 accept";
    assert!(findings[0].advice.contains(rule), "{findings:?}");
}
