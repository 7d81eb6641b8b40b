use super::*;
use crate::config::DnsConfig;

fn zones() -> Vec<ZoneConfig> {
    let zone = |name: &str| {
        format!(
            "[[zones]]\nzone = \"{name}\"\nservers = [\"192.0.2.53\"]\nkey_name = \"k\"\nkey_file = \"/k\"\n"
        )
    };
    let text: String = ["example.org", "2.0.192.in-addr.arpa", "8.b.d.0.1.0.0.2.ip6.arpa"].map(zone).concat();
    toml::from_str::<DnsConfig>(&text).unwrap().zones
}

fn names(text: &str) -> VmNames {
    toml::from_str(text).unwrap()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn moved(before: &str, after: &str) -> AddressChange {
    AddressChange::new(address(before), address(after))
}

fn texts(changes: &[RrsetChange]) -> Vec<String> {
    changes.iter().map(ToString::to_string).collect()
}

#[test]
fn addresses_services_and_names_of_addresses_change() {
    let source = names(
        r#"
        names = ["web.example.org"]
        [[services]]
        name = "_http._tcp.example.org"
        port = 80
        target = "a.example.org"
        [[services]]
        name = "_same._tcp.example.org"
        port = 81
        target = "web.example.org"
        "#,
    );
    let destination = names(
        r#"
        [[services]]
        name = "_same._tcp.example.org"
        port = 81
        target = "web.example.org"
        [[services]]
        name = "_http._tcp.example.org"
        weight = 5
        port = 8080
        target = "b.example.org"
        "#,
    );
    let addresses = vec![moved("192.0.2.10", "198.51.100.7"), moved("2001:db8::10", "2001:db8:1::7")];
    let relocation = Relocation::new(&source, Some(&destination), addresses);
    let changes = changes_of(&zones(), &relocation).unwrap();
    let expected = [
        "_http._tcp.example.org SRV 0 0 80 a.example.org → 0 5 8080 b.example.org",
        "0.1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa PTR web.example.org → nothing",
        "7.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa PTR nothing → web.example.org",
        "10.2.0.192.in-addr.arpa PTR web.example.org → nothing",
        "web.example.org A 192.0.2.10 → 198.51.100.7",
        "web.example.org AAAA 2001:db8::10 → 2001:db8:1::7",
    ];
    let mut planned = texts(&changes);
    planned.sort();
    let mut expected = expected.map(str::to_owned);
    expected.sort();
    assert_eq!(planned, expected);
    let needed: Vec<_> =
        changes.iter().filter(|change| !change.is_optional).map(|change| change.kind).collect();
    assert_eq!(needed, [RecordType::Srv]);

    let kinds = |goal| order(&changes, goal).into_iter().map(|index| changes[index].kind).collect::<Vec<_>>();
    assert_eq!(
        kinds(Goal::Switched),
        [RecordType::A, RecordType::Aaaa, RecordType::Srv, RecordType::Ptr, RecordType::Ptr, RecordType::Ptr]
    );
    let last = |goal| texts(&[changes[*order(&changes, goal).last().unwrap()].clone()]);
    assert!(last(Goal::Switched)[0].ends_with("→ nothing"));
    assert!(last(Goal::Undone)[0].contains("PTR nothing →"));
}

#[test]
fn services_stay_where_the_destination_has_nothing_for_the_vm() {
    let text = "names = [\"web.example.org\"]\n[[services]]\nname = \"_a._tcp.example.org\"\nport = 1\ntarget = \"a\"";
    let source = names(text);
    let stays = Relocation::new(&source, None, vec![]);
    assert_eq!(stays.services, []);
    let ends = Relocation::new(&source, Some(&VmNames::default()), vec![]);
    assert_eq!(ends.services.len(), 1);
    assert_eq!(ends.services[0].after, None);
    assert_eq!(ends.names, source.names);
}

#[test]
fn several_addresses_of_a_name_are_one_change() {
    let relocation = Relocation {
        names: vec!["web.example.org".parse().unwrap()],
        addresses: vec![
            moved("203.0.113.1", "198.51.100.1"),
            moved("203.0.113.2", "198.51.100.2"),
            moved("203.0.113.3", "203.0.113.3"),
            moved("203.0.113.4", "2001:db9::4"),
        ],
        services: vec![],
    };
    let changes = changes_of(&zones(), &relocation).unwrap();
    let expected = [
        "web.example.org A 203.0.113.1, 203.0.113.2, 203.0.113.4 → 198.51.100.1, 198.51.100.2",
        "web.example.org AAAA nothing → 2001:db9::4",
    ];
    assert_eq!(texts(&changes), expected);
}

#[test]
fn a_name_without_a_zone_is_an_error() {
    let relocation = Relocation {
        names: vec!["web.example.net".parse().unwrap()],
        addresses: vec![moved("203.0.113.1", "198.51.100.1")],
        services: vec![],
    };
    let error = changes_of(&zones(), &relocation).unwrap_err();
    assert_eq!(error, RelocationError::NoZone("web.example.net".parse().unwrap()));
}
