use engine::evacuation::{CommandState, HostFacts, MoveEnd, MoveFailure};
use host::testing::{Peer as Controller, Qemu, World, endpoint, host, vm};
use proto::HostId;
use proto::message::{CommandAnswer, CommandVerb, FleetChange, MoveOrder};

use super::*;

/// Starts an agent whose controller is the test, as host `b`.
fn start(world: &World) -> Arc<Daemon> {
    let daemon = Arc::new(Daemon::new(Arc::clone(&world.context), None));
    let address = world.context.config.hosts[&host("b")].clone();
    let config = ControllerConfig { name: host("b"), address, namespaces_are_hosts: true };
    super::start(&daemon, endpoint("a"), config).unwrap();
    daemon
}

/// Takes the snapshot of an agent, after the term. Returns its changes.
fn snapshot(controller: &mut Controller, term: u64) -> Vec<FleetChange> {
    controller.send_message(&Message::ControllerTerm { term });
    let mut all = Vec::new();
    for expected in 1.. {
        let Message::FleetReport { seq, report } = controller.receive_message() else { panic!("no report") };
        assert_eq!(seq, expected);
        match report {
            FleetReport::Begin { host } => assert_eq!((seq, host.role.as_str()), (1, "host")),
            FleetReport::Changed { changes } => all.extend(changes),
            FleetReport::Complete => break,
            other => panic!("{other:?}"),
        }
    }
    all
}

fn id(text: &str) -> CommandId {
    CommandId::new(text).unwrap()
}

/// Sends a command, and returns its answer.
fn ask(controller: &mut Controller, term: u64, of: &str, command: CommandVerb) -> CommandAnswer {
    controller.send_message(&Message::FleetCommand { term, id: id(of), command });
    let is_answer = |message: &Message| matches!(message, Message::FleetReport { report: FleetReport::Answer { id, .. }, .. } if id.as_str() == of);
    match controller.receive_until(is_answer) {
        Message::FleetReport { report: FleetReport::Answer { answer, .. }, .. } => answer,
        _ => unreachable!(),
    }
}

fn order(to: HostId) -> CommandVerb {
    CommandVerb::Move(MoveOrder { vm: vm(), to, bandwidth_bytes_per_s: None, policy: None, verify: false })
}

fn end(answer: CommandAnswer) -> MoveEnd {
    let CommandAnswer::Move { state } = answer else { panic!("{answer:?}") };
    match serde_json::from_value(state).unwrap() {
        CommandState::Ended { end } => end,
        other => panic!("{other:?}"),
    }
}

#[test]
fn everything_is_reported_once_and_then_what_changes() {
    let world = World::new();
    let qemu = Qemu::start(&world.folder.path().join("vm"));
    world.context.journal.put_vm(&qemu.record()).unwrap();
    let daemon = start(&world);
    let mut controller = world.accept();
    let changes = snapshot(&mut controller, 1);
    let has_vm = |change: &FleetChange| matches!(change, FleetChange::Vm { vm: found } if found.vm == vm());
    assert_eq!(changes.iter().filter(|change| has_vm(change)).count(), 1, "{changes:?}");
    assert!(changes.iter().any(|change| matches!(change, FleetChange::Contents { .. })));
    assert!(daemon.controller_link.is_connected());

    world.context.journal.remove_vm(&vm()).unwrap();
    controller.receive_until(|message| {
        let Message::FleetReport { report: FleetReport::Changed { changes }, .. } = message else {
            return false;
        };
        assert!(!changes.iter().any(has_vm), "it has not changed: {changes:?}");
        changes.iter().any(|change| matches!(change, FleetChange::VmGone { vm: gone } if *gone == vm()))
    });
}

#[test]
fn a_command_is_carried_out_once() {
    let world = World::new();
    let _daemon = start(&world);
    let mut controller = world.accept();
    snapshot(&mut controller, 1);
    let is_cordoned = || world.context.journal.is_cordoned().unwrap();
    assert_eq!(ask(&mut controller, 1, "c1-1", CommandVerb::Cordon), CommandAnswer::Done);
    assert!(is_cordoned());
    assert_eq!(ask(&mut controller, 1, "c1-2", CommandVerb::Uncordon), CommandAnswer::Done);
    assert_eq!(ask(&mut controller, 1, "c1-1", CommandVerb::Cordon), CommandAnswer::Done);
    assert!(!is_cordoned(), "the first command was sent again");
}

#[test]
fn moves_that_cannot_begin_end_with_a_kind() {
    let world = World::new();
    let _daemon = start(&world);
    let mut controller = world.accept();
    snapshot(&mut controller, 1);
    let kind = |end: MoveEnd| match end {
        MoveEnd::Failed { kind, .. } => kind,
        other => panic!("{other:?}"),
    };
    let elsewhere = ask(&mut controller, 1, "e1/1", order(host("z")));
    assert_eq!(kind(end(elsewhere.clone())), MoveFailure::Refused, "another destination may do");
    assert_eq!(ask(&mut controller, 1, "e1/1", order(host("z"))), elsewhere, "the same command");
    let unknown = ask(&mut controller, 1, "e1/2", order(host("b")));
    assert_eq!(kind(end(unknown)), MoveFailure::Other, "there is no such VM");
}

#[test]
fn limits_of_a_move_may_come_before_it_begins() {
    let world = World::new();
    let daemon = start(&world);
    let mut controller = world.accept();
    snapshot(&mut controller, 1);
    let limit =
        CommandVerb::Limit { of: id("e1.1/1"), bandwidth_bytes_per_s: Some(7), max_downtime_ms: None };
    assert_eq!(ask(&mut controller, 1, "c1-1", limit.clone()), CommandAnswer::Done);
    assert_eq!(daemon.controller_link.early_limits()[&id("e1.1/1")].bandwidth_bytes_per_s, Some(7));
    ask(&mut controller, 1, "e1.1/1", order(host("z")));
    assert!(daemon.controller_link.early_limits().is_empty(), "it has ended");
    let late = ask(&mut controller, 1, "c1-2", limit);
    assert!(matches!(late, CommandAnswer::Refused { .. }), "{late:?}");
}

#[test]
fn an_id_of_another_command_is_refused() {
    let world = World::new();
    let _daemon = start(&world);
    let mut controller = world.accept();
    snapshot(&mut controller, 1);
    let first = ask(&mut controller, 1, "e1.1/1", order(host("z")));
    let other = end(ask(&mut controller, 1, "e1.1/1", order(host("b"))));
    let MoveEnd::Failed { kind, reason } = &other else { panic!("{other:?}") };
    assert_eq!(*kind, MoveFailure::Other);
    assert!(reason.contains("another command has had the id e1.1/1"), "{reason}");
    assert_eq!(ask(&mut controller, 1, "e1.1/1", order(host("z"))), first);

    assert_eq!(ask(&mut controller, 1, "c1-1", CommandVerb::Uncordon), CommandAnswer::Done);
    for (id, command) in [("c1-1", CommandVerb::Cordon), ("e1.1/1", CommandVerb::Cordon)] {
        let answer = ask(&mut controller, 1, id, command);
        assert!(matches!(answer, CommandAnswer::Refused { .. }), "{answer:?}");
    }
    assert!(!world.context.journal.is_cordoned().unwrap());
}

#[test]
fn a_move_that_was_cancelled_before_never_begins() {
    let world = World::new();
    let _daemon = start(&world);
    let mut controller = world.accept();
    snapshot(&mut controller, 1);
    let cancel = CommandVerb::Cancel { of: id("e1/7") };
    assert_eq!(ask(&mut controller, 1, "c1-1", cancel), CommandAnswer::Done);
    let late = ask(&mut controller, 1, "e1/7", order(host("b")));
    assert_eq!(end(late), MoveEnd::Cancelled);
    let commands = vec![id("e1/7"), id("e1/8")];
    let CommandAnswer::Facts { facts } = ask(&mut controller, 1, "c1-2", CommandVerb::Facts { commands })
    else {
        panic!("no facts")
    };
    let facts: HostFacts = serde_json::from_value(facts).unwrap();
    assert_eq!(facts.host, "a");
    assert_eq!(facts.commands[&"e1/7".parse().unwrap()], CommandState::Ended { end: MoveEnd::Cancelled });
    assert_eq!(facts.commands[&"e1/8".parse().unwrap()], CommandState::Unknown);
}

#[test]
fn an_older_controller_is_refused() {
    let world = World::new();
    let _daemon = start(&world);
    let mut controller = world.accept();
    snapshot(&mut controller, 5);
    let stale = ask(&mut controller, 4, "c4-1", CommandVerb::Cordon);
    assert_eq!(stale, CommandAnswer::Stale { largest_term: 5 });
    assert!(!world.context.journal.is_cordoned().unwrap());
    drop(controller);

    let mut older = world.accept();
    older.send_message(&Message::ControllerTerm { term: 4 });
    let messages = older.receive_until_closed();
    assert_eq!(messages, [Message::ControllerTerm { term: 5 }], "it reports nothing");
    let mut next = world.accept();
    snapshot(&mut next, 6);
}

/// Receives the request for the evacuation of this host. Returns its number.
fn evacuation_request(controller: &mut Controller) -> u64 {
    let is_request = |message: &Message| {
        matches!(message, Message::FleetReport { report: FleetReport::EvacuateHost { .. }, .. })
    };
    match controller.receive_until(is_request) {
        Message::FleetReport { report: FleetReport::EvacuateHost { request, .. }, .. } => request,
        _ => unreachable!(),
    }
}

#[test]
fn an_evacuation_is_asked_for_again_until_it_is_answered() {
    let world = World::new();
    let daemon = start(&world);
    let link = &daemon.controller_link;
    let standing = || link.evacuation(&daemon).unwrap().standing;
    let report = |request, standing| {
        let (evacuation, text) = (Some("e1".to_owned()), "it has ended".to_owned());
        Message::HostEvacuation(HostEvacuation { request, evacuation, standing, text })
    };
    let mut controller = world.accept();
    snapshot(&mut controller, 1);
    assert!(link.evacuation(&daemon).is_none());
    assert!(link.ask_for_evacuation(None));
    let request = evacuation_request(&mut controller);
    // The answer to an earlier request; the command after it is answered once it was taken.
    controller.send_message(&report(request - 1, EvacuationStanding::Done));
    ask(&mut controller, 1, "c1-1", CommandVerb::Facts { commands: Vec::new() });
    assert_eq!(standing(), EvacuationStanding::Underway);
    drop(controller);

    let mut next = world.accept();
    snapshot(&mut next, 2);
    assert_eq!(evacuation_request(&mut next), request, "the answer may have been lost");
    next.send_message(&report(request, EvacuationStanding::Failed));
    ask(&mut next, 2, "c2-1", CommandVerb::Facts { commands: Vec::new() });
    assert_eq!(standing(), EvacuationStanding::Failed);
    assert!(link.ask_for_evacuation(None));
    assert!(evacuation_request(&mut next) > request);
}
