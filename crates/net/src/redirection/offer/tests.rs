use super::*;
use crate::redirection::judge::FindingWeight;
use crate::redirection::plan::{HostAbilities, plan};
use crate::redirection::testing::{CARD, HOME, first, ip, lan, place as place_at};

const OF: RedirectedMove<'static> = RedirectedMove { migration: "web#3", epoch: 3 };
const NEXT: RedirectedMove<'static> = RedirectedMove { migration: "web#4", epoch: 4 };

fn facts(host: u8) -> RedirectionFacts {
    RedirectionFacts {
        tunnels: TunnelKind::ALL.into(),
        abilities: HostAbilities { has_egress: true, ..HostAbilities::default() },
        own: vec![Prefix { address: ip(&format!("10.{host}.0.2")), length: 24 }],
        path_mtu: 1500,
        tracks: true,
        is_tap: true,
        ..RedirectionFacts::default()
    }
}

fn wanted(guest: &str, public: &str) -> WantedAddress {
    WantedAddress { pair: AddressPair { guest: ip(guest), public: ip(public) }, length: None }
}

/// Returns the offer of the guest's home to another host.
fn offer() -> RedirectionOffer {
    let mut place = place_at(HOME, GuestAddressing::Translated);
    place.presence.pairs.retain(|pair| pair.guest.is_ipv4());
    place.number = 31;
    RedirectionOffer {
        card: CARD,
        place,
        wanted: vec![wanted("10.1.0.5", "10.2.0.5")],
        number: 31,
        old_end: ip("10.1.0.2"),
        new_end: ip("10.2.0.2"),
        is_trusted: true,
        key: Some([1; 32]),
        facts: facts(1),
        former: None,
    }
}

fn side<'a>(
    host: &'a str,
    network: u8,
    facts: &'a RedirectionFacts,
    records: &'a [RedirectionRecord],
) -> ArrivalSide<'a> {
    ArrivalSide { host, interface: "tap1", lan: lan(network), facts, is_trusted: true, port: 7741, records }
}

fn codes(findings: &[RedirectionFinding], weight: FindingWeight) -> Vec<&'static str> {
    findings.iter().filter(|found| found.weight == weight).map(|found| found.code).collect()
}

#[test]
fn both_hosts_plan_what_was_offered() {
    let (offer, facts) = (offer(), facts(2));
    assert!(offer.is_valid("host1") && !offer.is_valid("host2"));
    let (redirection, findings) = agree(&offer, OF, &side("host2", 2, &facts, &[]));
    assert_eq!(codes(&findings, FindingWeight::Blocker), Vec::<&str>::new(), "{findings:?}");
    let redirection = redirection.unwrap();
    assert!(offer.is_of(&redirection, OF, "host2"));
    assert!(!offer.is_of(&redirection, NEXT, "host2") && !offer.is_of(&redirection, OF, "host3"));
    let mut other = redirection.clone();
    other.legs[0].presence.lan.bridge = Some("br9".to_owned());
    assert!(!offer.is_of(&other, OF, "host2"), "another bridge than offered");
    assert_eq!(redirection.place.presence.station, Names(31).station_mac());
    let tunnel = &redirection.legs[0].tunnel;
    assert_eq!((tunnel.kind, tunnel.mtu, tunnel.port), (TunnelKind::Vxlan, 1450, 7741));
    for host in ["host1", "host2"] {
        plan(&redirection, host, &facts.abilities).unwrap();
    }
}

#[test]
fn an_untrusted_path_needs_encryption_and_keys() {
    let (offer, facts) = (RedirectionOffer { is_trusted: false, ..offer() }, facts(2));
    let redirection = agree(&offer, OF, &side("host2", 2, &facts, &[])).0.unwrap();
    assert!(needs_keys(&redirection));
    plan(&redirection, "host1", &facts.abilities).unwrap_err();
    let with = with_keys(redirection, [1; 32], [2; 32]);
    plan(&with, "host1", &facts.abilities).unwrap();
    assert!(offer.is_of(&with, OF, "host2"));
    assert!(!offer.is_of(&with_keys(with.clone(), [3; 32], [2; 32]), OF, "host2"), "not the key offered");
    let without = RedirectionFacts { tunnels: [TunnelKind::Vxlan].into(), ..facts };
    let (none, findings) = agree(&offer, OF, &side("host2", 2, &without, &[]));
    assert_eq!((none, codes(&findings, FindingWeight::Blocker)), (None, vec!["tunnel-missing"]));
}

#[test]
fn what_stands_against_it_is_found_before_the_move() {
    let good = facts(2);
    let check = |offer: &RedirectionOffer, facts: &RedirectionFacts| {
        codes(&agree(offer, OF, &side("host2", 2, facts, &[])).1, FindingWeight::Blocker)
    };
    assert_eq!(check(&offer(), &good), Vec::<&str>::new());
    let mut unknown = offer();
    unknown.place.presence.lan.networks.clear();
    assert_eq!(check(&unknown, &good), ["network-unknown"]);
    assert_eq!(
        check(&RedirectionOffer { new_end: ip("10.9.0.2"), ..offer() }, &good),
        ["tunnel-end-foreign"]
    );
    let used = RedirectionFacts { numbers: [31].into(), ..good.clone() };
    assert_eq!(check(&offer(), &used), ["tunnel-number"]);
    let taken = RedirectionFacts { taken: [ip("10.2.0.5")].into(), ..good.clone() };
    assert_eq!(check(&offer(), &taken), ["address-in-use"]);
    let mut foreign = RedirectionOffer { wanted: vec![wanted("10.1.0.5", "10.7.0.5")], ..offer() };
    assert_eq!(check(&foreign, &good), ["address-foreign"]);
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
        plan: plan(redirection, "host1", &HostAbilities::default()).unwrap(),
        since_unix_ms: 5,
    };
    let offer = RedirectionOffer {
        place: former.place.clone(),
        wanted: vec![wanted("10.1.0.5", "10.1.0.5")],
        old_end: ip("10.2.0.2"),
        new_end: ip("10.1.0.2"),
        facts: facts(2),
        former: Some(former.clone()),
        ..offer()
    };
    let (facts, records) = (facts(1), [record(&former)]);
    let (back, findings) = agree(&offer, NEXT, &side("host1", 1, &facts, &records));
    let back = back.unwrap();
    assert_eq!(codes(&findings, FindingWeight::Blocker), Vec::<&str>::new(), "{findings:?}");
    assert_eq!(back.place.presence, former.legs[0].presence);
    assert_eq!((back.legs.len(), back.legs[0].host.as_str()), (1, "host2"));
    assert!(offer.is_of(&back, NEXT, "host1"));
    // A host that does not know the former redirection believes nothing about its own devices.
    let (back, _) = agree(&offer, NEXT, &side("host1", 1, &facts, &[]));
    assert_eq!(back.unwrap().place.presence.pairs.len(), 1);
    let (_, findings) = agree(&offer, NEXT, &side("host3", 3, &facts, &[]));
    assert!(codes(&findings, FindingWeight::Warning).contains(&"connections-end"), "{findings:?}");
}
