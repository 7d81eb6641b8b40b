//! Connections go on while a guest moves to another network, there and back: needs root.
//!
//! The laboratory's hosts are in different networks here, with its router between them. Its witness is the guest: a
//! cable is its card, and the end at a host stands for the tap.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

#[path = "redirection/cards.rs"]
mod cards;
#[path = "redirection/datagrams.rs"]
mod datagrams;
#[path = "redirection/network.rs"]
mod network;
#[path = "redirection/state.rs"]
mod state;
#[path = "redirection/tunnels.rs"]
mod tunnels;

use std::collections::BTreeMap;
use std::net::IpAddr;

use datagrams::{Datagrams, install_held};
use net::own_objects;
use net::redirection::keeper::RedirectionError;
use net::redirection::next_move::{NetworkMove, next_redirection};
use net::redirection::teardown;
use net::redirection::{
    GuestPlace, NewAddressMode, Prefix, RecordStage, Redirection, Subnet, TunnelKind, host_facts,
};
use network::{BOTH, Ends, Family, NEW, Network, OLD, THIRD, tunnel, tunnel_between};
use whimbrel_net as net;

/// Moves the guest from the old host to the new one.
fn first_move(network: &Network, addressing: NewAddressMode) -> Redirection {
    network.first_move(addressing, &BOTH, tunnel(TunnelKind::Vxlan))
}

/// Asserts that connections which the guest opens leave by its address in the network where it is, and those to former
/// neighbours by its old one.
#[track_caller]
fn assert_guest_reaches_others(network: &Network, family: Family, side: usize) {
    let (mut opened, from) = network.connect_from_guest(family);
    opened.exchange();
    assert_eq!(from, family.guest(side), "new connections leave by the newest address");
    let (mut neighbour, from) = network.connect_to_neighbour(family);
    neighbour.exchange();
    assert_eq!(from, family.guest(OLD), "former neighbours know the old address");
}

#[test]
fn connections_go_on_in_another_network_and_nothing_is_left() {
    let network = Network::new();
    let before = network.state();
    let redirection = first_move(&network, NewAddressMode::Nat);
    let mut old: Vec<_> = BOTH.iter().map(|family| network.connect(*family, OLD)).collect();
    let mut opened: Vec<_> = BOTH.iter().map(|family| network.connect_from_guest(*family).0).collect();
    old.iter_mut().chain(&mut opened).for_each(Ends::exchange);

    // An abort leaves nothing.
    let prepared = network.prepare(&redirection);
    assert_ne!(network.state(), before);
    old.iter_mut().for_each(Ends::exchange);
    for (side, record) in [OLD, NEW].into_iter().zip(prepared) {
        network.at(side, |keeper| keeper.remove(&record)).unwrap();
    }
    assert_eq!(network.state(), before);

    let mut records = network.prepare(&redirection);
    network.move_guest(NEW);
    network.switch(&mut records);
    old.iter_mut().chain(&mut opened).for_each(Ends::exchange);
    for family in BOTH {
        let mut new = network.connect(family, NEW);
        new.exchange();
        network.connect(family, OLD).exchange();
        assert_guest_reaches_others(&network, family, NEW);
    }
    old.iter_mut().chain(&mut opened).for_each(Ends::exchange);

    for side in [OLD, NEW] {
        let items = network.host(side).within(|| {
            [own_objects::devices(), own_objects::tables(), own_objects::routing()]
                .map(Result::unwrap)
                .concat()
        });
        let items = items.unwrap();
        assert!(
            items.len() > 5 && items.iter().all(|item| item.migration.as_deref() == Some("guest#3")),
            "{items:#?}"
        );
        let count = network.host(side).within(|| teardown::connections(&records[side]));
        let count = count.unwrap().unwrap().unwrap();
        assert!(count >= 4, "{count} connections at {side}");
    }
    drop((old, opened));
    lab::until("no connection uses the old address", || {
        [OLD, NEW].into_iter().all(|side| {
            let count = network.host(side).within(|| teardown::connections(&records[side]));
            count.unwrap().unwrap() == Some(0)
        })
    });
    network.remove(records);
    network.move_guest(OLD);
    assert_eq!(network.state(), before);
}

/// A held datagram reaches the guest past the tunnel, and the guest may send before another one comes through it.
#[test]
fn answers_to_held_datagrams_return_by_the_tunnel() {
    let network = Network::new();
    let before = network.state();
    let redirection = first_move(&network, NewAddressMode::Nat);
    let flows = BOTH.map(|family| Datagrams::new(&network, family));
    for flow in &flows {
        flow.exchange();
    }
    let mut records = network.prepare(&redirection);
    network.move_guest(NEW);
    for flow in &flows {
        install_held(&network, &redirection, &flow.frame());
    }
    network.switch(&mut records);
    for flow in &flows {
        flow.answer();
        flow.exchange();
    }
    network.remove(records);
    network.move_guest(OLD);
    assert_eq!(network.state(), before);
}

#[test]
fn a_redirection_outlives_agents_and_hosts_and_obeys_its_owner() {
    let network = Network::new();
    let before = network.state();
    let redirection = first_move(&network, NewAddressMode::Nat);
    let mut old = network.connect(Family::V4, OLD);
    let mut records = network.prepare(&redirection);
    network.move_guest(NEW);
    network.switch(&mut records);
    old.exchange();

    // The old host starts anew: its kernel has nothing, but the record is there.
    network.host(OLD).within(|| state::forget_all(7)).unwrap();
    let restored = network.at(OLD, |keeper| {
        let (records, errors) = keeper.resume()?;
        assert!(errors.is_empty(), "{errors:?}");
        Ok(records)
    });
    assert_eq!(restored.unwrap(), records[..1]);
    old.exchange();
    // An agent that starts anew finds everything there.
    let restored = network.at(NEW, whimbrel_net::redirection::RedirectionKeeper::resume).unwrap();
    assert_eq!((restored.0.as_slice(), restored.1.len()), (&records[1..], 0));
    old.exchange();

    let late = Redirection { epoch: 2, migration: "guest#2".to_owned(), ..redirection.clone() };
    let refused = network.at(OLD, |keeper| keeper.prepare(&late));
    assert!(matches!(refused, Err(RedirectionError::NotOwner(_))), "{refused:?}");
    // The owner itself may repeat what it did.
    let again = network.at(NEW, |keeper| keeper.prepare(&redirection)).unwrap();
    assert_eq!((again.stage, &again), (RecordStage::Active, &records[1]));
    old.exchange();
    drop(old);
    network.remove(records);
    network.move_guest(OLD);
    assert_eq!(network.state(), before);
}

#[test]
fn a_guest_that_moves_back_takes_its_redirection_along() {
    let network = Network::new();
    let before = network.state();
    let first = first_move(&network, NewAddressMode::Nat);
    let mut old = network.connect(Family::V4, OLD);
    let mut records = network.prepare(&first);
    network.move_guest(NEW);
    network.switch(&mut records);
    let mut new = network.connect(Family::V4, NEW);
    let (mut opened, _) = network.connect_from_guest(Family::V4);
    old.exchange();

    let next = NetworkMove {
        migration: "guest#4".to_owned(),
        epoch: 4,
        card: network::CARD,
        addressing: NewAddressMode::Nat,
        from: network.place(NEW, NewAddressMode::Nat, &BOTH),
        to: GuestPlace { number: 8, ..network.place(OLD, NewAddressMode::Nat, &BOTH) },
        tunnels: BTreeMap::from([("b".to_owned(), (8, network::turned(TunnelKind::Vxlan)))]),
    };
    let entries = network.entries(NEW);
    let back = next_redirection(Some(&first), next).unwrap();
    assert_eq!(back.dropped, Vec::<String>::new());
    let back = back.redirection.unwrap();
    assert_eq!(back.legs.len(), 1, "the way to the network where the guest is has ended");
    let in_use = Redirection { place: GuestPlace { number: 7, ..back.place.clone() }, ..back.clone() };
    let refused = network.at(OLD, |keeper| keeper.prepare(&in_use));
    assert!(matches!(refused, Err(RedirectionError::NumberInUse { number: 7, .. })), "{refused:?}");
    // The guest does not start at home again: it goes on, and its connections with it.
    let mut aborted = network.prepare(&back);
    network.host(OLD).run(&["ip", "tuntap", "add", "dev", network::TAP, "mode", "tap"]).unwrap();
    network.at(OLD, |keeper| keeper.switch(&mut aborted[OLD])).unwrap();
    for (side, record) in aborted.into_iter().enumerate().rev() {
        network.at(side, |keeper| keeper.remove(&record)).unwrap();
    }
    network.host(OLD).run(&["ip", "link", "delete", "dev", network::TAP]).unwrap();
    for connection in [&mut old, &mut new, &mut opened] {
        connection.exchange();
    }
    network.connect(Family::V4, OLD).exchange();

    let mut records = network.prepare(&back);
    network.carry(OLD, &entries, "b", Some(&first), &back);
    network.move_guest(OLD);
    network.switch(&mut records);
    for connection in [&mut old, &mut new, &mut opened] {
        connection.exchange();
    }
    network.connect(Family::V4, NEW).exchange();
    network.connect(Family::V4, OLD).exchange();
    let (mut opened, from) = network.connect_from_guest(Family::V4);
    opened.exchange();
    assert_eq!(from, Family::V4.guest(OLD), "it is at home");
    assert_eq!(
        network.at(OLD, whimbrel_net::redirection::RedirectionKeeper::records).unwrap().len(),
        1,
        "the former one is gone"
    );
    drop((old, new, opened));
    network.remove(records);
    assert_eq!(network.state(), before);
}

/// Returns the redirection of the guest that moves on from the second host to the third one.
fn moved_on(network: &Network, first: &Redirection) -> Redirection {
    let tunnel = |from| tunnel_between(TunnelKind::Vxlan, Family::V4, from, THIRD);
    let next = NetworkMove {
        migration: "guest#4".to_owned(),
        epoch: 4,
        card: network::CARD,
        addressing: NewAddressMode::Nat,
        from: network.place(NEW, NewAddressMode::Nat, &BOTH),
        to: GuestPlace { number: 9, ..network.place(THIRD, NewAddressMode::Nat, &BOTH) },
        tunnels: BTreeMap::from([("a".to_owned(), (8, tunnel(OLD))), ("b".to_owned(), (9, tunnel(NEW)))]),
    };
    let onward = next_redirection(Some(first), next).unwrap();
    assert_eq!(onward.dropped, Vec::<String>::new());
    onward.redirection.unwrap()
}

#[test]
fn a_guest_that_moves_on_keeps_the_connections_of_all_networks() {
    let network = Network::with_third();
    let before = network.state();
    let first = first_move(&network, NewAddressMode::Nat);
    let mut old: Vec<_> = BOTH.iter().map(|family| network.connect(*family, OLD)).collect();
    let mut records = network.prepare(&first);
    network.move_guest(NEW);
    network.switch(&mut records);
    let mut new: Vec<_> = BOTH.iter().map(|family| network.connect(*family, NEW)).collect();
    let mut opened: Vec<_> = BOTH.iter().map(|family| network.connect_from_guest(*family).0).collect();
    old.iter_mut().chain(&mut new).chain(&mut opened).for_each(Ends::exchange);

    let onward = moved_on(&network, &first);
    let redirected = network.state();
    let aborted = network.prepare(&onward);
    old.iter_mut().for_each(Ends::exchange);
    for (side, record) in aborted.into_iter().enumerate() {
        network.at(side, |keeper| keeper.remove(&record)).unwrap();
    }
    assert_eq!(network.state(), redirected, "the first redirection stands as before");

    let entries = network.entries(NEW);
    let mut records = network.prepare(&onward);
    network.carry(THIRD, &entries, "b", Some(&first), &onward);
    network.move_guest(THIRD);
    network.switch(&mut records);
    old.iter_mut().chain(&mut new).chain(&mut opened).for_each(Ends::exchange);
    for family in BOTH {
        for side in [OLD, NEW, THIRD] {
            network.connect(family, side).exchange();
        }
        assert_guest_reaches_others(&network, family, THIRD);
    }
    // There is no chain: connections by the first address do not need the second host.
    network.without(NEW, || old.iter_mut().for_each(Ends::exchange));
    new.iter_mut().for_each(Ends::exchange);
    for side in [OLD, NEW, THIRD] {
        assert_eq!(network.at(side, whimbrel_net::redirection::RedirectionKeeper::records).unwrap().len(), 1);
    }
    // A repetition of the first move's owner comes too late.
    let late = network.at(OLD, |keeper| keeper.prepare(&first));
    assert!(matches!(late, Err(RedirectionError::NotOwner(_))), "{late:?}");
    drop((old, new, opened));
    network.remove(records);
    network.move_guest(OLD);
    assert_eq!(network.state(), before);
}

#[test]
fn a_guest_can_have_both_addresses() {
    let network = Network::new();
    let before = network.state();
    let redirection = first_move(&network, NewAddressMode::Configured);
    let mut all: Vec<_> = BOTH.iter().map(|family| network.connect(*family, OLD)).collect();
    all.extend(BOTH.iter().map(|family| network.connect_from_guest(*family).0));
    let mut records = network.prepare(&redirection);
    network.move_guest(NEW);
    network.switch(&mut records);
    // Before anything in the guest knows the new network.
    all.iter_mut().for_each(Ends::exchange);
    network.give_new_address();
    for family in BOTH {
        network.connect(family, OLD).exchange();
        all.push(network.connect(family, NEW));
        let (later, from) = network.connect_from_guest(family);
        assert_eq!(from, family.guest(NEW));
        all.push(later);
        let (mut neighbour, _) = network.connect_to_neighbour(family);
        neighbour.exchange();
    }
    all.iter_mut().for_each(Ends::exchange);
    drop(all);
    network.remove(records);
    network.move_guest(OLD);
    assert_eq!(network.state(), before);
}

#[test]
fn former_neighbours_of_ipv6_are_reached() {
    let network = Network::new();
    network.add_neighbour();
    let before = network.state();
    let mut redirection = first_move(&network, NewAddressMode::Nat);
    // The host has spoken with its neighbours, and with the guest.
    network.meet_neighbours();
    let lan = network.host(OLD).within(|| host_facts::lan(network::TAP, network::CARD)).unwrap().unwrap();
    redirection.legs[0].attachment.lan = lan.clone();
    redirection.home_lan = Some(lan);
    let mut records = network.prepare(&redirection);
    network.move_guest(NEW);
    network.switch(&mut records);
    for address in [network::neighbour(), Family::V6.host(OLD)] {
        let (mut ends, from) = network.connect_to(address);
        ends.exchange();
        assert_eq!(from, Family::V6.guest(OLD), "{address}");
    }
    network.remove(records);
    network.move_guest(OLD);
    assert_eq!(network.state(), before);
}

#[test]
fn all_addresses_of_all_cards_are_redirected() {
    let network = Network::new();
    cards::add(&network);
    let before = network.state();
    let redirections = cards::first_moves(&network);
    let mut old: Vec<_> = cards::addresses(OLD).into_iter().map(|old| network.connect_by(old)).collect();
    let mut records = redirections.each_ref().map(|redirection| network.prepare(redirection));
    network.move_guest(NEW);
    for records in &mut records {
        network.switch(records);
    }
    old.iter_mut().for_each(Ends::exchange);
    for address in [OLD, NEW].into_iter().flat_map(cards::addresses) {
        network.connect_by(address).exchange();
    }
    for side in [OLD, NEW] {
        assert_eq!(network.at(side, whimbrel_net::redirection::RedirectionKeeper::records).unwrap().len(), 2);
    }
    // The end of one card's redirection leaves that of the other one alone.
    let [first, second] = records;
    network.remove(first);
    for address in [OLD, NEW].into_iter().flat_map(|side| cards::of_card(1, side)) {
        network.connect_by(address).exchange();
    }
    drop(old);
    network.remove(second);
    network.move_guest(OLD);
    assert_eq!(network.state(), before);
}

#[test]
fn facts_are_read_from_the_kernel() {
    let network = Network::new();
    let before = network.state();
    let host = network.host(NEW);
    let facts = host.within(network::facts).unwrap();
    assert!(facts.tunnels.contains(&TunnelKind::Vxlan), "{facts:?}");
    assert!(
        facts.kernel_features.has_egress && facts.kernel_features.has_v6 && facts.has_conntrack,
        "{facts:?}"
    );
    assert_eq!((facts.path_mtu, facts.closed.len()), (1500, 1), "{facts:?}");
    assert!(facts.closed[0].forwards && facts.closed[0].name == "inet closed forward", "{facts:?}");
    assert!(!facts.is_tap, "a bridge is none");
    host.run(&["ip", "tuntap", "add", "dev", "tap9", "mode", "tap"]).unwrap();
    assert!(host.within(|| host_facts::is_tap("tap9")).unwrap().unwrap());
    host.run(&["ip", "link", "set", "dev", "tap9", "master", "vms"]).unwrap();
    let lan = host.within(|| host_facts::lan("tap9", network::CARD)).unwrap().unwrap();
    assert_eq!((lan.bridge.as_deref(), lan.mtu), (Some("vms"), 1500));
    let of_host = |family: Family| Subnet {
        prefix: Prefix { address: family.host(NEW), length: family.length() },
        gateway: Some(family.gateway(NEW)),
    };
    assert!(BOTH.iter().all(|family| lan.subnets.contains(&of_host(*family))), "{lan:?}");
    host.run(&["ip", "link", "delete", "dev", "tap9"]).unwrap();
    let gateway: IpAddr = Family::V4.gateway(NEW);
    assert_eq!(
        facts.in_use,
        [gateway].into(),
        "the router answers, and no neighbour for the guest's new address"
    );
    assert!(facts.own.iter().any(|own| own.address == Family::V4.host(NEW)), "{facts:?}");
    host.run(&["nft", "delete table inet closed"]).unwrap();
    assert_eq!(network.state(), before);
}

#[test]
fn each_kind_of_tunnel_carries_connections() {
    for kind in TunnelKind::ALL.into_iter().filter(|kind| !tunnels::carries(*kind, Family::V4)) {
        lab::not_tried(format!("redirection by {kind}: this kernel has no {}", kind.module()));
    }
}

#[test]
fn each_kind_of_tunnel_passes_a_network_of_ipv6() {
    let kinds = TunnelKind::ALL.into_iter().filter(|kind| *kind != TunnelKind::Ipip);
    for kind in kinds.filter(|kind| !tunnels::carries(*kind, Family::V6)) {
        lab::not_tried(format!("redirection by {kind} over IPv6: this kernel does not have it"));
    }
}
