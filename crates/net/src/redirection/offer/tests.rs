use super::*;
use crate::redirection::offered_end::may_repoint;
use crate::redirection::plan::{KernelFeatures, plan};
use crate::redirection::preflight::RedirectionFacts;
use crate::redirection::testing::{CARD, HOME, first, ip, lan, place as place_at};
use crate::redirection::tunnel::FreePorts;

const OF: MigrationRef<'static> = MigrationRef { migration: "web#3", epoch: 3 };
const NEXT: MigrationRef<'static> = MigrationRef { migration: "web#4", epoch: 4 };

fn facts(host: u8) -> RedirectionFacts {
    RedirectionFacts {
        tunnels: TunnelKind::ALL.into(),
        kernel_features: KernelFeatures { has_egress: true, ..KernelFeatures::default() },
        own: vec![Prefix { address: ip(&format!("10.{host}.0.2")), length: 24 }],
        path_mtu: 1500,
        has_conntrack: true,
        is_tap: true,
        ports: FreePorts { vxlan: Some(7741), wireguard: Some(7750 + u16::from(host)), range: [7742, 7840] },
        ..RedirectionFacts::default()
    }
}

fn wanted(guest: &str, public: &str) -> WantedAddress {
    WantedAddress { pair: AddressPair { guest: ip(guest), public: ip(public) }, length: None }
}

/// Returns the offer of the guest's home to another host.
fn offer() -> RedirectionOffer {
    let mut place = place_at(HOME, NewAddressMode::Nat);
    place.attachment.pairs.retain(|pair| pair.guest.is_ipv4());
    place.number = 31;
    RedirectionOffer {
        card: CARD,
        place,
        wanted: vec![wanted("10.1.0.5", "10.2.0.5")],
        addressing: NewAddressMode::Nat,
        end: end(1, 2, 31),
        former: None,
        earlier: BTreeMap::new(),
        lost: BTreeMap::new(),
    }
}

/// Returns the end of a host for a tunnel to another one.
fn end(from: u8, to: u8, number: u32) -> OfferedEnd {
    OfferedEnd {
        number,
        old_endpoint: ip(&format!("10.{from}.0.2")),
        new_endpoint: ip(&format!("10.{to}.0.2")),
        is_trusted: true,
        key: Some([from; 32]),
        facts: facts(from),
    }
}

/// Returns the same offer with another end.
fn with_end(offer: RedirectionOffer, change: impl FnOnce(&mut OfferedEnd)) -> RedirectionOffer {
    let mut end = offer.end.clone();
    change(&mut end);
    RedirectionOffer { end, ..offer }
}

fn side<'a>(
    host: &'a str,
    network: u8,
    facts: &'a RedirectionFacts,
    records: &'a [RedirectionRecord],
) -> ArrivalSide<'a> {
    let more_ports = &[7801, 7802];
    ArrivalSide { host, interface: "tap1", lan: lan(network), facts, more_ports, is_trusted: true, records }
}

fn codes(findings: &[RedirectionFinding], severity: FindingSeverity) -> Vec<&'static str> {
    findings.iter().filter(|found| found.severity == severity).map(|found| found.code).collect()
}

#[test]
fn both_hosts_plan_what_was_offered() {
    let (offer, facts) = (offer(), facts(2));
    assert!(offer.is_valid("host1") && !offer.is_valid("host2"));
    let (redirection, findings) = agree(&offer, OF, &side("host2", 2, &facts, &[]));
    assert_eq!(codes(&findings, FindingSeverity::Blocker), Vec::<&str>::new(), "{findings:?}");
    let redirection = redirection.unwrap();
    assert!(offer.is_of(&redirection, OF, "host2"));
    assert!(!offer.is_of(&redirection, NEXT, "host2") && !offer.is_of(&redirection, OF, "host3"));
    let mut other = redirection.clone();
    other.legs[0].attachment.lan.bridge = Some("br9".to_owned());
    assert!(!offer.is_of(&other, OF, "host2"), "another bridge than offered");
    assert_eq!(redirection.place.attachment.mac, KernelNames(31).proxy_mac());
    let tunnel = &redirection.legs[0].tunnel;
    assert_eq!((tunnel.kind, tunnel.mtu, tunnel.ports), (TunnelKind::Vxlan, 1450, [7741; 2]));
    for host in ["host1", "host2"] {
        plan(&redirection, host, &facts.kernel_features).unwrap();
    }
}

#[test]
fn an_untrusted_path_needs_encryption_and_keys() {
    let (offer, facts) = (with_end(offer(), |end| end.is_trusted = false), facts(2));
    let redirection = agree(&offer, OF, &side("host2", 2, &facts, &[])).0.unwrap();
    assert!(needs_keys(&redirection));
    plan(&redirection, "host1", &facts.kernel_features).unwrap_err();
    assert_eq!(redirection.legs[0].tunnel.ports, [7751, 7752], "each host has a port of its own");
    assert!(!offer.is_of(&redirection, OF, "host2"), "without keys");
    let with = with_keys(redirection, &offer, [2; 32]).unwrap();
    plan(&with, "host1", &facts.kernel_features).unwrap();
    assert!(offer.is_of(&with, OF, "host2"));
    let other = with_end(offer.clone(), |end| end.key = Some([3; 32]));
    assert!(!other.is_of(&with, OF, "host2"), "not the key offered");
    let none = with_end(offer.clone(), |end| end.key = None);
    assert_eq!(with_keys(with, &none, [2; 32]), None);
    let without = RedirectionFacts { tunnels: [TunnelKind::Vxlan].into(), ..facts };
    let (none, findings) = agree(&offer, OF, &side("host2", 2, &without, &[]));
    assert_eq!((none, codes(&findings, FindingSeverity::Blocker)), (None, vec!["tunnel-missing"]));
}

#[test]
fn the_source_refuses_what_it_has_not_offered() {
    let trusted = offer();
    let plain = agree(&trusted, OF, &side("host2", 2, &facts(2), &[])).0.unwrap();
    let untrusted = with_end(offer(), |end| end.is_trusted = false);
    assert!(trusted.is_of(&plain, OF, "host2"));
    assert!(!untrusted.is_of(&plain, OF, "host2"), "others could read what passes the tunnel");
    let refuses = |change: fn(&mut Redirection)| {
        let mut other = plain.clone();
        change(&mut other);
        !trusted.is_of(&other, OF, "host2")
    };
    assert!(refuses(|other| other.legs[0].tunnel.mtu += 1), "larger than the path");
    assert!(!refuses(|other| other.legs[0].tunnel.mtu -= 100));
    assert!(refuses(|other| other.legs[0].tunnel.ports = [53, 53]), "another port");
    assert!(refuses(|other| other.legs[0].tunnel.keys = Some([[1; 32], [2; 32]])));
    assert!(refuses(|other| other.legs.push(Leg { host: "host9".to_owned(), ..other.legs[0].clone() })));
    let few = with_end(offer(), |end| end.facts.tunnels = [TunnelKind::Gre].into());
    assert!(!few.is_of(&plain, OF, "host2"), "a kind that it lacks");
    for (address, length, is_valid) in
        [("10.2.0.5", 32, true), ("10.2.0.5", 33, false), ("fd02::5", 128, true)]
    {
        let wanted = vec![WantedAddress { length: Some(length), ..wanted("10.1.0.5", address) }];
        assert_eq!(RedirectionOffer { wanted, ..offer() }.is_valid("host1"), is_valid, "{address}/{length}");
    }
}

#[test]
fn a_tunnel_needs_a_port_on_both_hosts() {
    let kind = |offer: &RedirectionOffer, facts: &RedirectionFacts| {
        let (redirection, findings) = agree(offer, OF, &side("host2", 2, facts, &[]));
        let blockers = findings.into_iter().filter(|found| found.severity == FindingSeverity::Blocker);
        let texts: Vec<_> = blockers.map(|found| (found.code, found.text)).collect();
        (redirection.map(|redirection| redirection.legs[0].tunnel.kind), texts)
    };
    let with = |vxlan, wireguard| {
        let ports = FreePorts { vxlan, wireguard, ..facts(2).ports };
        RedirectionFacts { ports, ..facts(2) }
    };
    assert_eq!(kind(&offer(), &with(None, Some(1))), (Some(TunnelKind::Gre), vec![]), "the next kind");
    assert_eq!(kind(&offer(), &with(Some(9), Some(1))).0, Some(TunnelKind::Gre), "VXLANs share one port");
    let only =
        |offer: RedirectionOffer, kind: TunnelKind| with_end(offer, |end| end.facts.tunnels = [kind].into());
    let untrusted = with_end(offer(), |end| end.is_trusted = false);
    for (offer, facts, expected) in [
        (&untrusted, with(Some(7741), None), "all ports of UDP for WireGuard are in use on host2"),
        (
            &only(offer(), TunnelKind::Vxlan),
            with(None, None),
            "all ports of UDP for VXLAN are in use on host2",
        ),
        (
            &only(offer(), TunnelKind::Vxlan),
            with(Some(9), None),
            "the hosts have different ports of UDP for VXLAN: 7741 on host1, 9 on host2",
        ),
    ] {
        assert_eq!(kind(offer, &facts), (None, vec![("tunnel-port", expected.to_owned())]));
    }
}

#[test]
fn what_stands_against_it_is_found_before_the_move() {
    let good = facts(2);
    let check = |offer: &RedirectionOffer, facts: &RedirectionFacts| {
        codes(&agree(offer, OF, &side("host2", 2, facts, &[])).1, FindingSeverity::Blocker)
    };
    assert_eq!(check(&offer(), &good), Vec::<&str>::new());
    let mut unknown = offer();
    unknown.place.attachment.lan.subnets.clear();
    assert_eq!(check(&unknown, &good), ["network-unknown"]);
    let foreign = with_end(offer(), |end| end.new_endpoint = ip("10.9.0.2"));
    assert_eq!(check(&foreign, &good), ["tunnel-end-not-local"]);
    let used = RedirectionFacts { numbers: [31].into(), ..good.clone() };
    assert_eq!(check(&offer(), &used), ["tunnel-number"]);
    let in_use = RedirectionFacts { in_use: [ip("10.2.0.5")].into(), ..good.clone() };
    assert_eq!(check(&offer(), &in_use), ["address-in-use"]);
    let mut foreign = RedirectionOffer { wanted: vec![wanted("10.1.0.5", "10.7.0.5")], ..offer() };
    assert_eq!(check(&foreign, &good), ["address-outside-subnet"]);
    foreign.wanted[0].length = Some(24);
    assert_eq!(check(&foreign, &good), Vec::<&str>::new(), "the user has given the network");
}

#[test]
fn a_guest_that_returns_is_reached_as_before() {
    let former = first();
    let record = |redirection: &Redirection| RedirectionRecord {
        host: "host1".to_owned(),
        stage: RecordStage::Active,
        redirection: redirection.clone(),
        plan: plan(redirection, "host1", &KernelFeatures::default()).unwrap(),
        is_incomplete: false,
        since_unix_ms: 5,
    };
    let offer = RedirectionOffer {
        place: former.place.clone(),
        wanted: vec![wanted("10.1.0.5", "10.1.0.5")],
        end: end(2, 1, 31),
        former: Some(former.clone()),
        ..offer()
    };
    let (facts, records) = (facts(1), [record(&former)]);
    let (back, findings) = agree(&offer, NEXT, &side("host1", 1, &facts, &records));
    let back = back.unwrap();
    assert_eq!(codes(&findings, FindingSeverity::Blocker), Vec::<&str>::new(), "{findings:?}");
    assert_eq!(back.place.attachment, former.legs[0].attachment);
    assert_eq!((back.legs.len(), back.legs[0].host.as_str()), (1, "host2"));
    assert!(offer.is_of(&back, NEXT, "host1"));
    // A host that does not know the former redirection believes nothing about its own devices.
    let (back, _) = agree(&offer, NEXT, &side("host1", 1, &facts, &[]));
    assert_eq!(back.unwrap().place.attachment.pairs.len(), 1);
    let (_, findings) = agree(&offer, NEXT, &side("host3", 3, &facts, &[]));
    assert!(codes(&findings, FindingSeverity::Warning).contains(&"connections-end"), "{findings:?}");
}

/// Returns the offer of the second host for a guest that moves on to the third one.
fn onward() -> RedirectionOffer {
    let former = first();
    RedirectionOffer {
        place: former.place.clone(),
        wanted: vec![wanted("10.1.0.5", "10.3.0.5")],
        end: end(2, 3, 31),
        former: Some(former),
        earlier: BTreeMap::from([("host1".to_owned(), end(1, 3, 32))]),
        ..offer()
    }
}

/// Returns the hosts of the legs at the third host, and the texts of warnings.
fn legs_at_third(offer: &RedirectionOffer) -> (Vec<String>, Vec<String>) {
    let (redirection, findings) = agree(offer, NEXT, &side("host3", 3, &facts(3), &[]));
    assert_eq!(codes(&findings, FindingSeverity::Blocker), Vec::<&str>::new(), "{findings:?}");
    let ending = findings.into_iter().filter(|found| found.code == "connections-end");
    let legs = redirection.unwrap().legs.into_iter().map(|leg| leg.host);
    (legs.collect(), ending.map(|found| found.text).collect())
}

#[test]
fn a_guest_that_moves_on_is_reached_by_way_of_all_hosts() {
    let offer = onward();
    assert!(offer.is_valid("host2"));
    assert_eq!(legs_at_third(&offer), (vec!["host1".to_owned(), "host2".to_owned()], vec![]));
    let facts = facts(3);
    let redirection = agree(&offer, NEXT, &side("host3", 3, &facts, &[])).0.unwrap();
    assert!(offer.is_of(&redirection, NEXT, "host3"));
    assert!(may_repoint(&first(), &redirection, "host1", true));
    for host in ["host1", "host2", "host3"] {
        plan(&redirection, host, &facts.kernel_features).unwrap();
    }
    let refuses = |change: fn(&mut Redirection)| {
        let mut other = redirection.clone();
        change(&mut other);
        !offer.is_of(&other, NEXT, "host3")
    };
    assert!(!refuses(|other| drop(other.legs.remove(0))), "that of another host is its own affair");
    assert!(refuses(|other| drop(other.legs.remove(1))));
    assert!(refuses(|other| other.legs[0].attachment.lan.bridge = None));
    assert!(refuses(|other| other.legs[0].number += 1));
    assert!(refuses(|other| other.legs[1] = other.legs[0].clone()), "the same host twice");
    // On an untrusted path each tunnel has a port of its own.
    let mut untrusted = offer;
    for end in untrusted.earlier.values_mut().chain([&mut untrusted.end]) {
        end.is_trusted = false;
    }
    let redirection = agree(&untrusted, NEXT, &side("host3", 3, &facts, &[])).0.unwrap();
    let redirection = with_keys(redirection, &untrusted, [3; 32]).unwrap();
    assert!(untrusted.is_of(&redirection, NEXT, "host3"));
    let tunnels: Vec<_> =
        redirection.legs.iter().map(|leg| (leg.tunnel.ports, leg.tunnel.keys.unwrap()[0])).collect();
    assert_eq!(tunnels, [([7751, 7801], [1; 32]), ([7752, 7753], [2; 32])]);
    assert!(may_repoint(&first(), &redirection, "host1", false));
}

#[test]
fn a_host_left_before_cannot_keep_the_guest_from_moving() {
    let ends = |reason: &str| format!("connections that the VM still has by way of host1 end: {reason}");
    let with = |change: fn(&mut OfferedEnd)| {
        let mut offer = onward();
        change(offer.earlier.get_mut("host1").unwrap());
        let (legs, ending) = legs_at_third(&offer);
        assert_eq!(legs, ["host2"]);
        ending
    };
    assert_eq!(with(|end| end.number = 31), [ends("two tunnels have the same number")]);
    let foreign = with(|end| end.new_endpoint = ip("10.9.0.2"));
    assert_eq!(foreign, [ends("host1 reaches host3 by 10.9.0.2, which is no address of host3")]);
    assert!(with(|end| end.facts.tunnels.clear())[0].contains("no suitable kind of tunnel"));
    assert!(with(|end| end.facts.path_mtu = 900)[0].contains("packets of at most 850 bytes"));
    assert!(with(|end| end.facts.kernel_features.has_egress = false)[0].contains("cannot ask"));
    let mut silent = onward();
    silent.earlier.clear();
    silent.lost.insert("host1".to_owned(), "it is away".to_owned());
    assert_eq!(legs_at_third(&silent), (vec!["host2".to_owned()], vec![ends("it is away")]));
    // A host that no record names has no part.
    let mut foreign = onward();
    foreign.earlier.insert("host7".to_owned(), end(7, 3, 33));
    assert_eq!(legs_at_third(&foreign).0, ["host1", "host2"]);
}

#[test]
fn only_the_host_of_the_guest_gives_a_tunnel_another_end() {
    let next = agree(&onward(), NEXT, &side("host3", 3, &facts(3), &[])).0.unwrap();
    let refuses = |change: fn(&mut Redirection), is_trusted| {
        let mut other = next.clone();
        change(&mut other);
        !may_repoint(&first(), &other, "host1", is_trusted)
    };
    assert!(!refuses(|_| (), true));
    assert!(refuses(|_| (), false), "others could read what passes the tunnel");
    assert!(refuses(|other| other.epoch = 3, true), "the present epoch");
    assert!(refuses(|other| other.card.0[5] = 9, true), "another card");
    assert!(refuses(|other| other.migration = "db#4".to_owned(), true), "another guest");
    assert!(refuses(|other| other.place.host = "host1".to_owned(), true), "the guest would be here");
    assert!(refuses(|other| other.legs[0].attachment.pairs.clear(), true), "other addresses");
    assert!(!may_repoint(&first(), &next, "host9", true), "a host without a part");
}

#[test]
fn cards_of_one_guest_have_tunnels_of_their_own() {
    let ipip =
        |kinds: &[TunnelKind]| with_end(offer(), |end| end.facts.tunnels = kinds.iter().copied().collect());
    let mut second = with_end(ipip(&[TunnelKind::Ipip, TunnelKind::WireGuard]), |end| end.number = 32);
    second.card.0[5] = 9;
    let offers = [ipip(&[TunnelKind::Ipip]), second];
    assert!(are_valid(&offers, "host1"));
    let facts = facts(2);
    let sides = [side("host2", 2, &facts, &[]), side("host2", 2, &facts, &[])];
    let agreed = agree_on_all(&offers, OF, &sides);
    let kind = |(redirection, _): &(Option<Redirection>, Vec<RedirectionFinding>)| {
        redirection.as_ref().unwrap().legs[0].tunnel.kind
    };
    // The kernel has one of the former kind between two addresses.
    assert_eq!(agreed.iter().map(kind).collect::<Vec<_>>(), [TunnelKind::Ipip, TunnelKind::WireGuard]);
    assert!(!are_valid(&[], "host1"));
    assert!(!are_valid(&[offer(), offer()], "host1"), "one card twice");
    let mut same_number = offer();
    same_number.card.0[5] = 9;
    assert!(!are_valid(&[offer(), same_number], "host1"));
}

#[test]
fn a_guest_may_have_its_new_addresses_itself() {
    let own = RedirectionOffer { addressing: NewAddressMode::Configured, ..offer() };
    let facts = facts(2);
    let (redirection, findings) = agree(&own, OF, &side("host2", 2, &facts, &[]));
    assert_eq!(codes(&findings, FindingSeverity::Blocker), Vec::<&str>::new(), "{findings:?}");
    let redirection = redirection.unwrap();
    assert!(own.is_of(&redirection, OF, "host2") && !offer().is_of(&redirection, OF, "host2"));
    let attachment = &redirection.place.attachment;
    assert!(attachment.is_home() && attachment.mac == CARD, "{attachment:?}");
    assert_eq!(attachment.pairs[0].public, ip("10.2.0.5"));
    plan(&redirection, "host2", &facts.kernel_features).unwrap();
    // Back, it is reached by what it has there, and its names follow.
    let pair = |guest: &str, public: &str| AddressPair { guest: ip(guest), public: ip(public) };
    assert_eq!(returning_addresses(&redirection, "host1"), [pair("10.2.0.5", "10.1.0.5")]);
    assert_eq!(returning_addresses(&redirection, "host9"), []);
    let home = [pair("10.1.0.5", "10.1.0.5"), pair("fd01::5", "fd01::5")];
    assert_eq!(returning_addresses(&first(), "host1"), home);

    let mut routed = side("host2", 2, &facts, &[]);
    routed.lan.bridge = None;
    let findings = agree(&own, OF, &routed).1;
    assert_eq!(codes(&findings, FindingSeverity::Blocker), ["bridge-missing"]);
    assert_eq!(codes(&agree(&offer(), OF, &routed).1, FindingSeverity::Blocker), Vec::<&str>::new());
    let mixed = RedirectionOffer { addressing: NewAddressMode::Configured, ..onward() };
    let findings = agree(&mixed, NEXT, &side("host3", 3, &facts, &[])).1;
    assert!(codes(&findings, FindingSeverity::Blocker).contains(&"address-owner-differs"), "{findings:?}");
}
