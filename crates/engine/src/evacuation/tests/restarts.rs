//! Restarts of the controller and of agents: facts are asked for, and commands keep their ids.

use std::collections::BTreeMap;

use super::fleet::*;
use crate::evacuation::*;
use crate::planner::MoveLimits;

fn two_at_once() -> Bench {
    let mut bench = Bench::new(
        vec![host("a"), host("b"), host("c")],
        vec![vm("v1", "a", 8), vm("v2", "a", 4), vm("v3", "a", 2)],
    );
    let mut request = empty_request(&["a"]);
    request.limits = MoveLimits { copy_bytes_per_s: 400_000_000, per_host: 2, ..MoveLimits::default() };
    bench.begin("e", request);
    assert_eq!(bench.orders.len(), 2);
    bench
}

fn starts(bench: &Bench) -> Vec<MoveOrder> {
    let starts = bench.actions.iter().filter_map(|action| match action {
        EvacuationAction::StartMove { order } => Some(order.clone()),
        _ => None,
    });
    starts.collect()
}

#[test]
fn facts_are_asked_for_and_unknown_commands_repeated() {
    let mut bench = two_at_once();
    let (first, second) = (bench.orders["v1"].clone(), bench.orders["v2"].clone());
    bench.restart();
    assert_eq!(starts(&bench), []);
    assert_eq!(bench.questions(), []);
    bench.tick(60);
    assert_eq!(starts(&bench), []);
    bench.connect("b");
    bench.connect("c");
    assert_eq!(starts(&bench), []);
    bench.connect("a");
    let [(host, commands)] = &bench.questions()[..] else { panic!("{:?}", bench.actions) };
    assert_eq!(host, "a");
    assert_eq!(*commands, [first.command.clone(), second.command.clone()]);
    // One had arrived, the other one was lost on its way.
    let commands = BTreeMap::from([
        (first.command.clone(), CommandState::Underway { progress: None }),
        (second.command.clone(), CommandState::Unknown),
    ]);
    bench.answer_with("a", commands, contents("a", &["v1", "v2", "v3"]));
    let repeated = starts(&bench);
    assert_eq!(repeated.len(), 1);
    assert_eq!((&repeated[0].command, &repeated[0].to), (&second.command, &second.to));
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { moved: 3, .. }), "{:?}", bench.texts);
}

#[test]
fn what_happened_in_between_is_learnt() {
    let mut bench = two_at_once();
    let (first, second) = (bench.orders["v1"].command.clone(), bench.orders["v2"].command.clone());
    bench.restart();
    for host in ["b", "c"] {
        bench.connect(host);
    }
    bench.spec("v1").host = bench.orders["v1"].to.clone();
    bench.connect("a");
    let commands = BTreeMap::from([
        (first, CommandState::Ended { end: MoveEnd::Moved }),
        (second, CommandState::Ended { end: failed(MoveFailure::Refused) }),
    ]);
    bench.orders.clear();
    bench.answer_with("a", commands, contents("a", &["v2", "v3"]));
    assert_eq!(bench.one("e").departures().len(), 1);
    assert_eq!(bench.orders.keys().collect::<Vec<_>>(), ["v3"]);
    bench.tick(5);
    assert_eq!(bench.orders["v2"].command.number, 4);
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { moved: 3, .. }), "{:?}", bench.texts);
}

#[test]
fn an_agent_that_has_reconnected_is_asked() {
    let mut bench = two_at_once();
    let first = bench.orders["v1"].clone();
    bench.handle(&EvacuationEvent::MoveStarted { command: first.command.clone() });
    bench.handle(&EvacuationEvent::HostLost { host: "a".to_owned() });
    // The end of the other one frees nothing that is known; nothing begins on a lost host.
    bench.tick(30);
    assert_eq!(starts(&bench), []);
    bench.connect("a");
    assert_eq!(bench.questions().len(), 1);
    // It does not answer, and is asked again.
    bench.tick(1);
    assert_eq!(bench.questions(), []);
    bench.tick(5);
    assert_eq!(bench.questions().len(), 1);
    // An answer without one of the commands is not enough.
    let commands = BTreeMap::from([(first.command, CommandState::Underway { progress: None })]);
    bench.answer_with("a", commands, contents("a", &["v1", "v2", "v3"]));
    bench.tick(5);
    assert_eq!(bench.questions().len(), 1);
    bench.answer();
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { moved: 3, .. }), "{:?}", bench.texts);
}

#[test]
fn an_answer_over_an_old_connection_does_not_count() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8)]);
    let step = bench.evacuations.begin(id("e"), empty_request(&["a"]), &bench.inventory, bench.now_ns);
    bench.take(step.unwrap());
    bench.handle(&EvacuationEvent::HostLost { host: "a".to_owned() });
    bench.answer_with("a", BTreeMap::new(), contents("a", &["v1"]));
    assert_eq!(bench.one("e").status(bench.now_ns).phase, EvacuationPhase::AsksFacts);
    bench.connect("a");
    bench.answer();
    assert_eq!(bench.ordered(), ["v1 a>b"]);
}

#[test]
fn the_order_to_cordon_is_repeated_after_a_restart() {
    let mut bench = two_at_once();
    assert!(bench.inventory.hosts[0].cordoned);
    // It was stored, and lost before it was carried out.
    bench.inventory.hosts[0].cordoned = false;
    bench.restart();
    for host in ["a", "b", "c"] {
        bench.connect(host);
    }
    bench.answer();
    assert!(bench.inventory.hosts[0].cordoned);
}

#[test]
fn a_cancelled_command_is_cancelled_again_after_a_restart() {
    let mut bench = two_at_once();
    let step = bench.evacuations.cancel(&id("e"), &bench.inventory, bench.now_ns).unwrap();
    bench.take(step);
    bench.restart();
    for host in ["b", "c", "a"] {
        bench.connect(host);
    }
    bench.answer();
    let is_cancel = |action: &EvacuationAction| matches!(action, EvacuationAction::CancelMove { .. });
    assert_eq!(count(&bench.actions, is_cancel), 2, "{:?}", bench.actions);
    assert_eq!(starts(&bench), []);
    bench.end("v1", MoveEnd::Cancelled);
    bench.end("v2", MoveEnd::Moved);
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Cancelled { moved: 1, .. }), "{:?}", bench.texts);
}

#[test]
fn rates_are_given_again_when_facts_are_known() {
    let mut bench = two_at_once();
    let command = bench.orders["v1"].command.clone();
    bench.restart();
    for host in ["b", "c", "a"] {
        bench.connect(host);
    }
    let second = bench.orders["v2"].command.clone();
    let underway = CommandState::Underway { progress: None };
    let commands = BTreeMap::from([(command.clone(), underway.clone()), (second, underway)]);
    bench.answer_with("a", commands, contents("a", &["v1", "v2", "v3"]));
    let is_rate = |action: &EvacuationAction| match action {
        EvacuationAction::SetBandwidth { command: of, bytes_per_s, .. } => {
            *of == command && *bytes_per_s == Some(400_000_000)
        }
        _ => false,
    };
    assert_eq!(count(&bench.actions, is_rate), 1, "{:?}", bench.actions);
}

#[test]
fn a_long_move_is_not_cancelled_because_of_a_restart() {
    let mut bench = two_at_once();
    let (first, second) = (bench.orders["v1"].command.clone(), bench.orders["v2"].command.clone());
    let progressed = |bytes_left| EvacuationEvent::MoveProgressed {
        command: first.clone(),
        progress: MoveProgress { bytes_left, bytes_per_s: 1_000_000, ..MoveProgress::default() },
    };
    for minute in 0..30 {
        bench.handle(&progressed((100 - minute) << 20));
        bench.tick(60);
    }
    let is_cancel = |action: &EvacuationAction| match action {
        EvacuationAction::CancelMove { command, .. } => *command == first,
        _ => false,
    };
    bench.restart();
    let underway = CommandState::Underway { progress: None };
    let commands = BTreeMap::from([(first.clone(), underway.clone()), (second, underway)]);
    for host in ["b", "c", "a"] {
        bench.connect(host);
        assert_eq!(count(&bench.actions, is_cancel), 0);
    }
    bench.answer_with("a", commands, contents("a", &["v1", "v2", "v3"]));
    assert_eq!(count(&bench.actions, is_cancel), 0);
    bench.tick(1);
    assert_eq!(count(&bench.actions, is_cancel), 0);
}
