//! Networks of a guest that are probed before it moves: bridges, VLANs, gateways. Needs root.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use common::{Cluster, Device, GuestSpec, Load, until};
use lab::lab::{VM_BRIDGE, VM_GATEWAY};
use lab::{Guest, Host, Net};
use serde_json::Value;

const VM: &str = "vm1";
/// Beginning of the addresses from which a probe is sent.
const STATIONS: &str = "02:57:48:";

/// A guest whose tap on each host is in the network of the laboratory.
fn guest(cluster: &Cluster) -> Guest {
    let mut spec =
        GuestSpec::tiny(VM, Load { fill_mib: 8, wss_mib: 4, rate_mib_per_s: 1, ..Load::default() });
    spec.devices.push(Device::Net(Net::new(1)));
    cluster.lab.b.tap(&tap()).unwrap();
    cluster.guest(&spec)
}

fn tap() -> String {
    Net::new(1).tap
}

/// Runs commands, each a line, in a host.
#[track_caller]
fn run(host: &Host, commands: &str) {
    for command in commands.lines().map(str::trim).filter(|line| !line.is_empty()) {
        host.run(&command.split(' ').collect::<Vec<_>>()).unwrap();
    }
}

/// Checks the migration. Returns true if it is possible, and code and text of the findings of the probe.
#[track_caller]
fn check(cluster: &Cluster, more: &[&str]) -> (bool, Vec<(String, String)>) {
    let report = cluster.a.cli(&[&["migrate", VM, "--to", "b", "--check"], more].concat()).json();
    let of = |side: &str| report[side].as_array().unwrap().clone();
    let all = [of("source_findings"), of("destination_findings")].concat();
    let text = |finding: &Value, of: &str| finding[of].as_str().unwrap().to_owned();
    let all = all.iter().map(|finding| (text(finding, "code"), text(finding, "what")));
    let is_ours = |code: &str| code.starts_with("network-") || code == "gateway-silent";
    (report["possible"] == true, all.filter(|(code, _)| is_ours(code)).collect())
}

/// Asserts that the check finds this about the only network, and that the migration is possible.
#[track_caller]
fn assert_found(cluster: &Cluster, code: &str, texts: &[&str]) {
    let (possible, found) = check(cluster, &[]);
    assert!(possible, "{found:?}");
    let [(found_code, what)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(found_code, code, "{what}");
    for text in texts {
        assert!(what.contains(text), "{text:?} is missing in {what}");
    }
}

/// Returns the codes of a report's findings.
fn codes(report: &Value) -> Vec<String> {
    let findings = report["findings"].as_array().unwrap();
    findings.iter().map(|found| found["code"].as_str().unwrap().to_owned()).collect()
}

/// The tap in another bridge, in none, and a user who wants that or does not.
#[test]
fn another_bridge_at_the_destination_is_found() {
    let cluster = Cluster::new();
    let _guest = guest(&cluster);
    let (tap, b) = (tap(), &cluster.lab.b);
    assert_found(&cluster, "network-proven", &[&format!("{tap} on a"), &format!("{tap} on b")]);
    let stations = || cluster.lab.a.run(&["bridge", "fdb", "show"]).unwrap();
    until("the source's bridge has forgotten the probe", || !stations().contains(STATIONS));

    run(b, "ip link add name other type bridge forward_delay 0\nip link set dev other up");
    run(b, &format!("ip link set dev {tap} master other"));
    assert_found(&cluster, "network-unproven", &[&format!("bridge {VM_BRIDGE}"), "bridge other"]);
    let (possible, found) = check(&cluster, &["--network-check", "require"]);
    assert!(!possible && found[0].0 == "network-unproven", "{found:?}");
    assert_eq!(check(&cluster, &["--network-check", "off"]), (true, Vec::new()));
    // What the source asks the guest in its own network does not reach it there, by no way.
    let is_reached = |report: &Value| {
        let warned = codes(report).contains(&"guest-not-reached".to_owned());
        assert_ne!(report["network"][0]["first_in_us"].is_u64(), warned, "{report}");
        !warned
    };
    assert!(!is_reached(&cluster.migrate(VM, "a", "b", &[])));
    assert!(!is_reached(&cluster.migrate(VM, "b", "a", &[])));

    run(b, &format!("ip link set dev {tap} nomaster"));
    assert_found(&cluster, "network-unproven", &[&format!("{tap} on b (in no bridge)")]);
    run(b, &format!("ip link set dev {tap} master {VM_BRIDGE}"));
    let report = cluster.migrate(VM, "a", "b", &["--network-check", "require"]);
    assert!(codes(&report).contains(&"network-proven".to_owned()), "{report}");
    assert!(is_reached(&report), "only the source sends to this guest");
}

#[test]
fn a_vlan_that_the_destination_lacks_is_found() {
    let cluster = Cluster::new();
    let _guest = guest(&cluster);
    let tap = tap();
    let filtering = ["ip", "link", "set", "dev", VM_BRIDGE, "type", "bridge", "vlan_filtering", "1"];
    if let Err(error) = cluster.lab.a.run(&filtering) {
        lab::not_tried(format!("VLANs of bridges: {error}"));
        return;
    }
    for host in [&cluster.lab.a, &cluster.lab.b] {
        run(
            host,
            &format!(
                "ip link set dev {VM_BRIDGE} type bridge vlan_filtering 1
                 bridge vlan del dev {tap} vid 1
                 bridge vlan add dev {tap} vid 5 pvid untagged
                 bridge vlan add dev {tap} vid 6
                 bridge vlan add dev trunk vid 5
                 bridge vlan add dev trunk vid 6"
            ),
        );
    }
    assert_found(&cluster, "network-proven", &["VLAN 5"]);
    let b = &cluster.lab.b;
    run(b, &format!("bridge vlan del dev {tap} vid 6"));
    assert_found(&cluster, "network-unproven", &["frames in VLAN 6 from"]);
    run(
        b,
        &format!(
            "bridge vlan add dev {tap} vid 6
             bridge vlan del dev {tap} vid 5
             bridge vlan add dev {tap} vid 7 pvid untagged"
        ),
    );
    assert_found(&cluster, "network-unproven", &["VLAN 5) do not arrive", "VLAN 7)"]);
    run(b, &format!("bridge vlan del dev {tap} vid 7\nbridge vlan add dev {tap} vid 5 pvid untagged"));
    run(b, "bridge vlan del dev trunk vid 5");
    assert_found(&cluster, "network-unproven", &["frames from"]);
}

#[test]
fn a_gateway_that_is_silent_at_the_destination_is_found() {
    let cluster = Cluster::new();
    let _guest = guest(&cluster);
    let gateway = VM_GATEWAY.to_string();
    run(
        &cluster.lab.a,
        &format!(
            "ip addr add 10.92.0.250/24 dev {VM_BRIDGE}
             ip route add default via {gateway}"
        ),
    );
    let neighbour = || {
        // The kernel asks the gateway for the first packet that is sent to it.
        let _ = cluster.lab.a.run(&["bash", "-c", "echo >/dev/udp/192.0.2.1/9"]);
        cluster.lab.a.run(&["ip", "neigh", "show", &gateway]).unwrap()
    };
    until("the source knows its gateway", || neighbour().contains("lladdr"));
    assert_found(&cluster, "network-proven", &[&gateway]);
    run(
        &cluster.lab.b,
        "nft add table netdev test
         nft add chain netdev test in { type filter hook ingress device trunk priority 0 ; }
         nft add rule netdev test in ether type arp drop",
    );
    assert_found(&cluster, "gateway-silent", &[&gateway]);
}
