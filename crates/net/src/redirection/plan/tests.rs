use std::collections::BTreeSet;

use super::*;
use crate::redirection::model::NewAddressMode;
use crate::redirection::rules::{ChainHook, RuleExpression};
use crate::redirection::testing::{CARD, first, ip, place};

fn able() -> KernelFeatures {
    KernelFeatures {
        has_v6: true,
        forwards_v6_by_device: true,
        v6_forwarding: "0".to_owned(),
        send_redirects: "1".to_owned(),
        advertised_devices: vec!["eth0".to_owned()],
        has_egress: true,
    }
}

fn plan_of(redirection: &Redirection, host: &str) -> HostPlan {
    plan(redirection, host, &able()).unwrap()
}

fn routes(plan: &HostPlan) -> Vec<&RouteObject> {
    plan.objects()
        .filter_map(|object| if let KernelObject::Route(route) = object { Some(route) } else { None })
        .collect()
}

fn policies(plan: &HostPlan) -> Vec<&PolicyRule> {
    plan.objects()
        .filter_map(|object| if let KernelObject::Policy(rule) = object { Some(rule) } else { None })
        .collect()
}

fn expressions(plan: &HostPlan) -> Vec<&RuleExpression> {
    plan.objects()
        .filter_map(|object| if let KernelObject::Rules(table) = object { Some(table) } else { None })
        .flat_map(|table| table.chains.iter().flat_map(|chain| chain.rules.iter().flatten()))
        .collect()
}

/// Returns the devices that a plan makes, and those that it names.
fn devices(plan: &HostPlan) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut made, mut named) = (BTreeSet::new(), BTreeSet::new());
    for object in plan.objects() {
        match object {
            KernelObject::Device(DeviceObject { name, kind, .. }) => {
                made.insert(name.clone());
                if let DeviceKind::Veth { peer, .. } = kind {
                    made.insert(peer.clone());
                }
            }
            KernelObject::Port { device, .. }
            | KernelObject::Up { device }
            | KernelObject::Address { device, .. }
            | KernelObject::Neighbour { device, .. }
            | KernelObject::Proxy { device, .. }
            | KernelObject::Route(RouteObject { device, .. }) => drop(named.insert(device.clone())),
            KernelObject::Rules(table) => {
                for chain in &table.chains {
                    if let ChainHook::Ingress(device) | ChainHook::Egress(device) = &chain.hook {
                        named.insert(device.clone());
                    }
                }
            }
            KernelObject::Sysctl(_) | KernelObject::Policy(_) => {}
        }
    }
    for part in expressions(plan) {
        if let RuleExpression::In(device)
        | RuleExpression::NotIn(device)
        | RuleExpression::NotOut(device)
        | RuleExpression::Forward(device) = part
        {
            named.insert(device.clone());
        }
    }
    (made, named)
}

#[test]
fn what_is_prepared_takes_no_packets() {
    let redirection = first();
    for host in ["host1", "host2"] {
        let plan = plan_of(&redirection, host);
        let takes = |object: &KernelObject| {
            use KernelObject::{Port, Proxy, Route, Rules};
            matches!(object, Route(_) | Rules(_) | KernelObject::Policy(_) | Port { .. })
                || matches!(object, Proxy { device, .. } if Some(device) == plan.announced.as_ref().map(|it| &it.0))
        };
        assert!(!plan.prepared.iter().any(takes), "{host}");
        assert!(plan.switched.iter().any(takes), "{host}");
    }
}

/// A packet that arrives before its route and its rules is lost.
#[test]
fn a_proxy_device_joins_its_bridge_last() {
    for host in ["host1", "host2"] {
        let plan = plan_of(&first(), host);
        assert!(
            matches!(plan.switched.last(), Some(KernelObject::Port { .. })),
            "{host}: {:#?}",
            plan.switched
        );
    }
}

#[test]
fn devices_are_made_and_named_after_the_migration() {
    let redirection = first();
    for host in ["host1", "host2"] {
        let plan = plan_of(&redirection, host);
        let (made, named) = devices(&plan);
        let foreign: Vec<_> = named.difference(&made).map(String::as_str).collect();
        assert_eq!(foreign, if host == "host1" { vec!["br0"] } else { vec!["br0", "tap0"] });
        for object in plan.objects() {
            match object {
                KernelObject::Device(device) => assert_eq!(device.alias, "web#3"),
                KernelObject::Rules(table) => assert!(table.name.starts_with("whimbrel-web#3-redirection-")),
                _ => {}
            }
        }
        // Nothing of the host itself is changed where single devices can forward.
        let is_global = |object: &KernelObject| matches!(object, KernelObject::Sysctl(setting) if setting.before.is_some());
        assert!(!plan.objects().any(is_global));
    }
}

#[test]
fn the_old_host_stands_in_for_the_guest() {
    let plan = plan_of(&first(), "host1");
    let (device, mac, addresses) = plan.announced.clone().unwrap();
    assert_eq!((mac, addresses), (CARD, vec![ip("10.1.0.5"), ip("fd01::5")]));
    let names = KernelNames(301);
    assert_eq!(device, names.proxy_device());
    let to_guest = routes(&plan).into_iter().find(|route| route.table == names.inner_table()).unwrap();
    assert_eq!((to_guest.device.clone(), to_guest.next_hop), (names.tunnel(), Some(NEXT_HOP_V4.into())));
    let out = routes(&plan).into_iter().find(|route| route.destination == Prefix::all_like(ip("10.0.0.0")));
    assert_eq!(out.unwrap().device, device);
    assert!(
        expressions(&plan).iter().all(|part| !matches!(part, RuleExpression::Snat(_))),
        "its own address"
    );
    assert!(expressions(&plan).contains(&&RuleExpression::ClampMss(1410)));
    assert!(expressions(&plan).contains(&&RuleExpression::ClampMss(1390)));
}

#[test]
fn the_new_host_translates_and_returns_answers_by_the_tunnel() {
    let plan = plan_of(&first(), "host2");
    let (place, leg) = (KernelNames(20), KernelNames(301));
    for (guest, public) in [("10.1.0.5", "10.2.0.5"), ("fd01::5", "fd02::5")] {
        assert!(expressions(&plan).contains(&&RuleExpression::Snat(ip(public))));
        assert!(expressions(&plan).contains(&&RuleExpression::Dnat(ip(guest))));
        let marked = PolicyRule {
            priority: MARKED_PRIORITY,
            from: Some(ip(guest)),
            to: None,
            mark: Some((first().legs[0].mark, MARK_MASK)),
            table: leg.tunnel_table(),
        };
        assert!(policies(&plan).contains(&&marked), "{guest}");
        let others = PolicyRule { priority: FROM_PRIORITY, mark: None, table: place.lan_table(), ..marked };
        assert!(policies(&plan).contains(&&others), "{guest}");
    }
    // Former neighbours are behind the tunnel, and are answered for.
    let former = routes(&plan).into_iter().find(|route| {
        route.table == place.lan_table()
            && route.destination.contains(ip("10.1.0.9"))
            && route.destination.length > 0
    });
    assert_eq!(former.unwrap().device, leg.tunnel());
    let proxy = KernelObject::Proxy { device: place.bypass(), address: ip("fd01::9") };
    let router = Prefix { address: ip("fe80::1"), length: 64 };
    assert!(plan.prepared.contains(&proxy));
    assert!(plan.prepared.contains(&KernelObject::Address { device: place.bypass(), address: router }));
    let isolated = |object: &KernelObject| match object {
        KernelObject::Rules(table) => {
            table.chains.iter().any(|chain| chain.hook == ChainHook::Egress("tap0".to_owned()))
        }
        _ => false,
    };
    assert!(plan.switched.iter().any(isolated));
}

#[test]
fn a_guest_with_both_addresses_is_not_translated() {
    let mut redirection = first();
    redirection.addressing = NewAddressMode::Configured;
    redirection.place = place(2, NewAddressMode::Configured);
    let plan = plan_of(&redirection, "host2");
    assert_eq!(plan.announced, None, "the guest itself has its new address");
    let translates = |part: &&RuleExpression| {
        matches!(part, RuleExpression::Snat(_) | RuleExpression::Dnat(_) | RuleExpression::SetMark(_))
    };
    assert!(!expressions(&plan).iter().any(translates));
    let back = policies(&plan).into_iter().find(|rule| rule.from == Some(ip("10.1.0.5"))).unwrap();
    assert_eq!((back.mark, back.table), (None, KernelNames(301).tunnel_table()));
    assert!(policies(&plan).iter().all(|rule| rule.from != Some(ip("10.2.0.5"))));
    assert!(
        expressions(&plan).contains(&&RuleExpression::Source(ip("10.1.0.5"))),
        "only its old address takes the bypass"
    );
}

#[test]
fn a_host_that_routes_has_no_proxy_device() {
    let mut redirection = first();
    redirection.place.attachment.lan.bridge = None;
    let plan = plan_of(&redirection, "host2");
    assert_eq!(plan.announced, None);
    let names = KernelNames(20);
    assert!(!devices(&plan).0.contains(&names.proxy_device()));
    assert!(
        !expressions(&plan)
            .iter()
            .any(|part| matches!(part, RuleExpression::NotIn(_) | RuleExpression::Notrack))
    );
    // Its former neighbours are still behind the tunnel.
    assert!(routes(&plan).iter().any(|route| route.table == names.lan_table()));
}

#[test]
fn older_kernels_forward_as_a_whole_and_are_restored() {
    let kernel_features = KernelFeatures { forwards_v6_by_device: false, ..able() };
    let plan = plan(&first(), "host1", &kernel_features).unwrap();
    // Routes that were learnt from advertisements would be forgotten otherwise.
    assert_eq!(
        shared_sysctls(&plan),
        [("net/ipv6/conf/eth0/accept_ra", "2", "1"), ("net/ipv6/conf/all/forwarding", "1", "0")]
    );
}

fn shared_sysctls(plan: &HostPlan) -> Vec<(&str, &str, &str)> {
    let shared = |object| match object {
        &KernelObject::Sysctl(Sysctl { ref path, ref value, before: Some(ref before) }) => {
            Some((path.as_str(), value.as_str(), before.as_str()))
        }
        _ => None,
    };
    plan.objects().filter_map(shared).collect()
}

#[test]
fn what_wireguard_changes_for_the_host_is_restored() {
    assert_eq!(shared_sysctls(&plan_of(&first(), "host1")), []);
    let mut redirection = first();
    let tunnel = &mut redirection.legs[0].tunnel;
    (tunnel.kind, tunnel.keys) = (TunnelKind::WireGuard, Some([[1; 32], [2; 32]]));
    let tunnel = KernelNames(redirection.legs[0].number).tunnel();
    for host in ["host1", "host2"] {
        let plan = plan_of(&redirection, host);
        assert_eq!(shared_sysctls(&plan), [("net/ipv4/conf/all/send_redirects", "0", "1")], "{host}");
        let is_tunnel =
            |object: &KernelObject| matches!(object, KernelObject::Device(device) if device.name == tunnel);
        let device = plan.objects().position(is_tunnel).unwrap();
        // Removed in the opposite order: the device would clear it again.
        assert!(plan.objects().position(KernelObject::is_shared_sysctl) < Some(device));
    }
}

#[test]
fn a_plan_needs_a_part_numbers_and_keys() {
    let good = first();
    let of = |redirection: &Redirection, host| plan(redirection, host, &able()).unwrap_err();
    assert_eq!(of(&good, "host3"), NoPlan::NotInvolved("host3".to_owned()));
    let none = Redirection { legs: Vec::new(), ..good.clone() };
    assert_eq!(of(&none, "host1"), NoPlan::NotInvolved("host1".to_owned()));
    let both = Redirection { addressing: NewAddressMode::Configured, ..none };
    assert_eq!(of(&both, "host2"), NoPlan::Legs(0));
    let twice = [good.legs.clone(), good.legs.clone()].concat();
    assert_eq!(of(&Redirection { legs: twice, ..good.clone() }, "host1"), NoPlan::Numbers);
    let mut keyless = good;
    keyless.legs[0].tunnel.kind = TunnelKind::WireGuard;
    assert_eq!(of(&keyless, "host1"), NoPlan::NoKeys);
    keyless.legs[0].tunnel.keys = Some([[1; 32], [2; 32]]);
    let peer = |host| {
        let plan = plan(&keyless, host, &able()).unwrap();
        let peer = |object: &KernelObject| match object {
            KernelObject::Device(DeviceObject { kind: DeviceKind::WireGuard { peer, .. }, .. }) => {
                Some(peer[0])
            }
            _ => None,
        };
        plan.objects().find_map(peer)
    };
    assert_eq!((peer("host1"), peer("host2")), (Some(2), Some(1)), "each has the other's key");
    let plan = plan(&keyless, "host1", &able()).unwrap();
    assert!(
        routes(&plan)
            .iter()
            .all(|route| route.next_hop.is_none() || route.device == KernelNames(301).proxy_device())
    );
}

#[test]
fn translation_outlives_old_connections() {
    let before = plan_of(&first(), "host2");
    let without_legs = crate::redirection::next_move::without_legs(&first()).unwrap();
    let plan = plan_of(&without_legs, "host2");
    let (made, named) = devices(&plan);
    let tunnel = KernelNames(first().legs[0].number).tunnel();
    assert!(devices(&before).0.contains(&tunnel) && !made.contains(&tunnel));
    assert!(named.is_subset(&made.iter().cloned().chain(["tap0".to_owned(), "br0".to_owned()]).collect()));
    assert!(expressions(&plan).contains(&&RuleExpression::Snat(ip("10.2.0.5"))));
    let answered = |plan: &HostPlan| {
        let proxy = |object: &&KernelObject| {
            matches!(object, KernelObject::Proxy { .. } | KernelObject::Address { .. })
        };
        plan.objects().filter(proxy).cloned().collect::<Vec<_>>()
    };
    assert_eq!(answered(&plan), answered(&before), "its former gateways are still answered for");
}
