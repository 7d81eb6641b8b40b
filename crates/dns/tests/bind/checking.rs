//! The pre-flight check finds what would keep names from following, and changes nothing.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use dns::{CheckMode, DnsConfig, Relocation, Zones};
use proto::message::{Finding, Severity};
use whimbrel_dns as dns;

use crate::servers::{SECRET, Servers, ZONES, relocation, relocation_of};

fn check(servers: &Servers, config: &DnsConfig, relocation: &Relocation) -> Vec<Finding> {
    let check = || dns::check(&Zones::load(&config.zones), relocation, config.check);
    servers.lab.a.within(check).unwrap()
}

/// Returns the codes of findings, each with the first letter of its severity.
fn codes(findings: &[Finding]) -> Vec<String> {
    let mut codes: Vec<_> =
        findings.iter().map(|finding| format!("{:?} {}", finding.severity, finding.code)).collect();
    codes.sort();
    codes.dedup();
    codes
}

#[test]
fn names_that_can_follow_are_found_ready_and_unchanged() {
    let servers = Servers::start();
    let before = (servers.content(servers.first_address()), ZONES.map(|zone| servers.serial(zone)));
    let mut config = servers.config();
    let findings = check(&servers, &config, &relocation(&config));
    assert_eq!(codes(&findings), ["Info dns-ready"], "{findings:#?}");
    let texts: Vec<_> =
        findings.iter().map(|finding| format!("{}; {}", finding.what, finding.advice)).collect();
    let web = "web.example.org A 192.0.2.10 → 198.51.100.7 can be changed at 10.91.0.3";
    let web = texts.iter().find(|text| text.contains(web)).expect("a finding for web.example.org");
    assert!(web.contains("its TTL of 300 s becomes 5 s"), "{web}");
    assert_eq!(findings.len(), 6, "{texts:#?}");
    let after = (servers.content(servers.first_address()), ZONES.map(|zone| servers.serial(zone)));
    assert_eq!(after, before);

    config.check = CheckMode::Warn;
    let missing = check(&servers, &config, &relocation_of("missing.example.org"));
    let missing: Vec<_> = missing.iter().map(|finding| (finding.severity, finding.code.as_str())).collect();
    assert!(missing.contains(&(Severity::Warning, "dns-record-missing")), "{missing:?}");
}

#[test]
fn records_that_are_not_the_vms_are_found() {
    let servers = Servers::start();
    let config = servers.config();
    let found = |name: &str| {
        let findings = check(&servers, &config, &relocation_of(name));
        let failing: Vec<_> =
            findings.into_iter().filter(|finding| finding.severity == Severity::Blocker).collect();
        assert!(failing.iter().all(|finding| !finding.advice.is_empty()));
        let of_names = failing.iter().filter(|finding| !finding.what.contains("in-addr.arpa"));
        of_names.map(|finding| finding.code.clone()).collect::<Vec<_>>()
    };
    assert_eq!(found("missing.example.org"), ["dns-record-missing"]);
    assert_eq!(found("other.example.org"), ["dns-record-different"]);
    assert_eq!(found("alias.example.org"), ["dns-record-different"]);
    assert_eq!(found("any.wild.example.org"), ["dns-record-different"]);
    assert_eq!(found("web.example.net"), ["dns-zone-not-configured"]);
    assert_eq!(found("pool.example.org"), [""; 0]);
    // The name of the address is another's.
    let findings = check(&servers, &config, &relocation_of("pool.example.org"));
    let pointer = findings.iter().find(|finding| finding.code == "dns-record-different").unwrap();
    assert!(pointer.what.starts_with("10.2.0.192.in-addr.arpa PTR"), "{pointer:?}");
    assert_eq!(pointer.severity, Severity::Warning);
}

#[test]
fn permissions_are_found_without_a_change() {
    let servers = Servers::start();
    let config = servers.config_with(&[servers.first_address().to_string()], SECRET);
    let content = || servers.dig(servers.first_address(), &["closed.example", "AXFR"]);
    let before = content();
    let of_name = |name: &str, code: &str| {
        let findings = check(&servers, &config, &relocation_of(name));
        let zone = name.split_once('.').unwrap().1;
        let has = |code: &str| findings.iter().any(|found| found.code == code && found.what.contains(zone));
        assert!(has(code), "{findings:#?}");
        assert_eq!(has("dns-update-refused"), code == "dns-update-refused");
    };
    of_name("open.closed.example", "dns-ready");
    of_name("web.closed.example", "dns-update-refused");
    of_name("web.strict.example", "dns-update-refused");
    assert_eq!(content(), before);
}

#[test]
fn keys_and_servers_that_fail_are_found() {
    let servers = Servers::start();
    let first = servers.first_address().to_string();
    let moved = relocation_of("web.example.org");
    let of = |config: &DnsConfig| {
        let mut config = config.clone();
        config.zones.truncate(1);
        codes(&check(&servers, &config, &moved))
    };
    let config = servers.config_with(std::slice::from_ref(&first), SECRET);
    assert_eq!(of(&config), ["Info dns-ready"]);

    let mut unknown = config.clone();
    unknown.zones[0].key_name = "nobody".parse().unwrap();
    assert_eq!(of(&unknown), ["Blocker dns-key-refused"]);
    let mut other_algorithm = config.clone();
    other_algorithm.zones[0].algorithm = dns::Algorithm::HmacSha512;
    assert_eq!(of(&other_algorithm), ["Blocker dns-key-refused"]);
    let mut missing = config.clone();
    missing.zones[0].zone = "org".parse().unwrap();
    assert_eq!(of(&missing), ["Blocker dns-zone-not-served"]);
    let mut away = config.clone();
    away.zones[0].servers = vec![format!("{first}:5399").try_into().unwrap()];
    assert_eq!(of(&away), ["Blocker dns-unreachable"]);
    let mut second_away = config.clone();
    second_away.zones[0].servers.push(format!("{first}:5399").try_into().unwrap());
    assert_eq!(of(&second_away), ["Info dns-ready", "Warning dns-server-unread"]);
    // The second server does not accept updates, and has no key.
    let mut second = config.clone();
    second.zones[0].servers = vec![servers.second_address().to_string().try_into().unwrap()];
    assert_eq!(of(&second), ["Blocker dns-key-refused"]);

    let key = &config.zones[0].key_file;
    fs::set_permissions(key, Permissions::from_mode(0o644)).unwrap();
    assert_eq!(of(&config), ["Blocker dns-key-file"]);
    let wrong = servers.config_with(&[first], "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=");
    assert_eq!(of(&wrong), ["Blocker dns-key-refused"]);
}
