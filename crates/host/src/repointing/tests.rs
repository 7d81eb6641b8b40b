use net::redirection::next_move::next_redirection;
use net::redirection::testing::{a_move, first};

use super::*;
use crate::testing::{World, id};
use proto::VmName;

/// Returns the redirection of the VM that has left host `a` for `b`, and the one after its move from there to `c`.
fn moves() -> [Redirection; 2] {
    let first = first();
    let onward = next_redirection(Some(&first), a_move(4, 2, 3, &[1, 2])).unwrap().redirection.unwrap();
    [first, onward].map(|mut redirection| {
        for host in redirection.legs.iter_mut().map(|leg| &mut leg.host).chain([&mut redirection.place.host])
        {
            *host = match host.as_str() {
                "host1" => "a",
                "host2" => "b",
                _ => "c",
            }
            .to_owned();
        }
        redirection
    })
}

/// Returns host `a`, which redirects the VM's connections to `b`.
fn world(first: &Redirection) -> World {
    let world = World::new();
    let keeper = &world.context.redirections;
    let mut record = keeper.prepare(first).unwrap();
    keeper.switch(&mut record).unwrap();
    keeper.confirm(&mut record).unwrap();
    world
}

fn next_id() -> MigrationId {
    MigrationId { vm: VmName::new("web").unwrap(), epoch: proto::Epoch(4) }
}

fn ask(world: &World, from: &str, message: Message) -> Message {
    answer(&world.context, &HostId::new(from).unwrap(), &next_id(), message).unwrap()
}

fn order_from(
    world: &World,
    from: &str,
    step: RepointStep,
    redirection: Option<&Redirection>,
) -> Option<String> {
    let redirection = redirection.map(|redirection| serde_json::to_value(redirection).unwrap());
    match ask(world, from, Message::Repoint { step, redirection }) {
        Message::Repointed { error } => error,
        other => panic!("{other:?}"),
    }
}

fn stages(world: &World) -> Vec<(String, RecordStage)> {
    let records = world.context.redirections.records().unwrap();
    records.into_iter().map(|record| (record.redirection.migration, record.stage)).collect()
}

fn stage(migration: &str, stage: RecordStage) -> (String, RecordStage) {
    (migration.to_owned(), stage)
}

#[test]
fn the_host_of_the_vm_gives_the_tunnel_another_end() {
    let [first, mut onward] = moves();
    // The hosts of this test do not trust their path, and have no keys.
    let world = world(&first);
    let refused = order_from(&world, "b", RepointStep::Prepare, Some(&onward)).unwrap();
    assert!(refused.contains("not the one that follows"), "{refused}");
    let ports = world.context.config.redirection.ports();
    let reserved = world.context.redirections.reserve("web#4", 401, ports).unwrap().unwrap();
    let tunnel = &mut onward.legs[0].tunnel;
    tunnel.kind = TunnelKind::WireGuard;
    (tunnel.ports, tunnel.keys) = ([reserved.1, 7750], Some([reserved.0, [3; 32]]));
    let before = world.kernel.shown();

    let refused = order_from(&world, "c", RepointStep::Prepare, Some(&onward)).unwrap();
    assert!(refused.contains("redirects no connection of web to c"), "{refused}");
    assert!(order_from(&world, "b", RepointStep::Switch, None).unwrap().contains("nothing is prepared"));
    assert_eq!(order_from(&world, "b", RepointStep::Prepare, Some(&onward)), None);
    let prepared = [stage("web#3", RecordStage::Active), stage("web#4", RecordStage::Prepared)];
    assert_eq!(stages(&world), prepared);
    assert!(order_from(&world, "c", RepointStep::Switch, None).is_some());
    assert!(order_from(&world, "c", RepointStep::Remove, None).is_some());
    assert_eq!(stages(&world), prepared);
    let asked = ask(&world, "b", Message::AskRedirection);
    assert_eq!(asked, Message::RedirectionStands { stands: true, confirmed: false });

    assert_eq!(order_from(&world, "b", RepointStep::Switch, None), None);
    assert_eq!(stages(&world), [stage("web#4", RecordStage::Active)]);
    assert!(!world.kernel.has("web#3") && world.kernel.has("table whimbrel-web#4"));
    assert_ne!(world.kernel.shown(), before);
    assert_eq!(order_from(&world, "b", RepointStep::Switch, None), None, "a repetition");
    assert_eq!(order_from(&world, "b", RepointStep::Remove, None), None, "too late");
    assert_eq!(stages(&world), [stage("web#4", RecordStage::Active)]);
    let asked = ask(&world, "b", Message::AskRedirection);
    assert_eq!(asked, Message::RedirectionStands { stands: true, confirmed: true });
}

#[test]
fn what_a_host_has_prepared_for_an_aborted_move_is_removed() {
    let [first, onward] = moves();
    let world = world(&first);
    let before = world.kernel.shown();
    let keeper = &world.context.redirections;
    keeper.prepare(&onward).unwrap();
    assert_ne!(world.kernel.shown(), before);
    assert_eq!(order_from(&world, "b", RepointStep::Remove, None), None);
    assert_eq!((stages(&world), world.kernel.shown()), (vec![stage("web#3", RecordStage::Active)], before));
    // What was reserved for a proposal that the destination has refused.
    keeper.reserve("web#4", 401, world.context.config.redirection.ports()).unwrap().unwrap();
    assert_eq!(order_from(&world, "b", RepointStep::Remove, None), None);
    let directory = world.context.config.state_dir.join("redirections");
    assert!(!directory.join("web@4.key").exists());
}

#[test]
fn a_host_offers_an_end_only_to_the_host_of_the_vm() {
    let [first, _] = moves();
    let world = world(&first);
    let request = |card: &str, to: &str| {
        let destination = HostId::new(to).unwrap();
        Message::AskTunnelEnd(TunnelRequest { card: card.to_owned(), destination, check_only: true })
    };
    let card = first.card.to_string();
    let reason = |answered| match answered {
        Message::TunnelEnd { end: None, reason: Some(reason) } => reason,
        other => panic!("{other:?}"),
    };
    let refused = reason(ask(&world, "c", request(&card, "b")));
    assert!(refused.contains("redirects no connection of web to c"), "{refused}");
    let refused = reason(ask(&world, "b", request("52:54:00:00:00:99", "b")));
    assert!(refused.contains("no connection of card"), "{refused}");
    let refused = reason(ask(&world, "b", request(&card, "c")));
    assert!(refused.contains("add [hosts.c] there"), "{refused}");
    assert_eq!(answer(&world.context, &HostId::new("b").unwrap(), &id(1), Message::Ping), None);
}

#[test]
fn a_host_knows_its_own_end_of_the_way() {
    let (own, other) = tunnel_ends("127.0.0.1:7740").unwrap();
    assert!(own.is_loopback() && other.is_loopback());
    assert!(tunnel_ends("no address").is_err());
}
