//! A controller with agents that the test plays: snapshots, cordons, evacuations across restarts.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod asked;
mod foreign;
mod played;

use std::time::{Duration, Instant};

use api::fleet::EvacuateRequest;
use api::{ClientError, ProblemKind};
use engine::evacuation::{CommandState, EvacuationOutcome};
use link::{Endpoint, Incoming, Peer, Security};
use proto::Purpose;
use proto::message::{CommandAnswer, CommandVerb, FleetChange, FleetReport, Message};

use played::{Agent, PATIENCE, World, empty, host};

#[test]
fn a_snapshot_replaces_what_was_known() {
    let world = World::new();
    let mut agent = Agent::up(&world, "a", &["web", "db"]);
    assert_eq!(world.client().vms().unwrap().len(), 2);
    agent.vms.remove("web");
    agent.reconnect(&world);
    world.until("the VM is gone", |world| world.client().vms().unwrap().len() == 1);
    let kinds: Vec<_> = world.events().into_iter().map(|event| event.kind).collect();
    for kind in ["vm-appeared", "vm-vanished", "host-lost", "host-connected"] {
        assert!(kinds.iter().any(|found| found == kind), "{kind} in {kinds:?}");
    }

    // A gap in the numbers of reports ends the connection: something may be missing.
    agent.seq += 1;
    agent.changed(Vec::new());
    world.until("the connection has ended", |world| !world.shown("a").connected);
    assert!(agent.connection.recv(Some(Instant::now() + PATIENCE)).is_err());
    assert_eq!(world.client().vms().unwrap().len(), 1, "what was known stays known");
}

#[test]
fn a_cordon_reaches_an_agent_that_was_away() {
    let mut world = World::new();
    let mut agent = Agent::up(&world, "a", &[]);
    world.restart();
    assert!(!world.shown("a").cordoned, "known, and not connected");
    assert!(world.client().set_cordoned(&host("a"), true).unwrap().cordoned);
    agent.reconnect(&world);
    let Message::FleetCommand { id, command, .. } = agent.next() else { panic!("no command") };
    assert_eq!(command, CommandVerb::Cordon);
    agent.carry_out(id, &command);
    let mut facts = agent.facts();
    facts.kernel = "6.13".to_owned();
    agent.changed(vec![FleetChange::Host { host: Box::new(facts) }]);
    world.until("the facts are known", |world| world.shown("a").kernel == "6.13");
    // Its user ends the cordon on the host.
    agent.cordoned = false;
    let facts = Box::new(agent.facts());
    agent.changed(vec![FleetChange::Host { host: facts }]);
    world.until("the controller follows", |world| !world.shown("a").cordoned);
}

#[test]
fn a_cordon_that_an_agent_refuses_is_ordered_again() {
    let world = World::new();
    let mut agent = Agent::up(&world, "a", &[]);
    world.client().set_cordoned(&host("a"), true).unwrap();
    let Message::FleetCommand { id, command, .. } = agent.next() else { panic!("no command") };
    assert_eq!(command, CommandVerb::Cordon);
    let problem = serde_json::json!({ "error": "its disk is full" });
    agent.report(FleetReport::Answer { id: id.clone(), answer: CommandAnswer::Refused { problem } });
    let Message::FleetCommand { id: again, command, .. } = agent.next() else { panic!("no command") };
    assert_eq!(command, CommandVerb::Cordon);
    assert_ne!(again, id, "a refused command is over");
}

/// The controller is replaced after a move was ordered, and before its agent has answered: the same command comes again.
#[test]
fn an_ordered_move_keeps_its_id_over_a_restart() {
    let mut world = World::new();
    let mut a = Agent::up(&world, "a", &["web"]);
    let mut b = Agent::up(&world, "b", &[]);
    let plan = world.client().preview(&empty("a")).unwrap();
    assert_eq!(plan.moves.len(), 1);
    let id = world.client().evacuate(&empty("a")).unwrap().id;
    let (command, to) = a.until_move();
    assert_eq!(to, "b");
    assert!(a.cordoned, "it is cordoned before anything moves");
    world.restart();
    a.reconnect(&world);
    b.reconnect(&world);
    let (again, _) = a.until_move();
    assert_eq!(again, command);
    a.answer_move(&command, CommandState::Underway { progress: None });
    b.vms.insert("web");
    b.changed(vec![Agent::vm("web")]);
    a.let_go("web", &command);
    let is_over = |world: &World| world.client().evacuation(&id).unwrap().status.outcome.is_some();
    let deadline = Instant::now() + PATIENCE;
    while !is_over(&world) {
        assert!(Instant::now() < deadline, "{:#?}", world.events());
        // Questions for facts go on until the host is empty.
        if let Ok(Incoming::Message(Message::FleetCommand { id, command, .. })) =
            a.connection.recv(Some(Instant::now() + Duration::from_millis(50)))
        {
            assert!(!matches!(command, CommandVerb::Move(_)), "nothing moves twice");
            a.carry_out(id, &command);
        }
    }
    let outcome = world.client().evacuation(&id).unwrap().status.outcome;
    assert_eq!(outcome, Some(EvacuationOutcome::Done { moved: 1, late_by_ns: None }));
    assert_eq!(world.shown("a").remains, Some(Vec::new()));
}

#[test]
fn impossible_requests_are_refused_with_advice() {
    let world = World::new();
    let _a = Agent::up(&world, "a", &["web"]);
    let refused = |request: &EvacuateRequest| match world.client().evacuate(request) {
        Err(ClientError::Problem(problem)) => problem,
        other => panic!("{other:?}"),
    };
    for (request, kind) in [
        (empty("nowhere"), ProblemKind::BadRequest),
        (EvacuateRequest::default(), ProblemKind::BadRequest),
        (empty("a"), ProblemKind::Refused),
    ] {
        let problem = refused(&request);
        assert_eq!(problem.kind, kind, "{problem:?}");
        assert!(!problem.advice.is_empty(), "{problem:?}");
    }
    assert!(world.client().evacuations().unwrap().is_empty(), "refused requests leave nothing");
}

#[test]
fn agents_report_that_a_controller_was_replaced() {
    let mut world = World::new();
    let found = |world: &World| {
        let events = world.events().into_iter();
        events.filter(|event| event.kind == "controller-replaced").collect::<Vec<_>>()
    };
    let refuse = |world: &World| {
        let mut agent = Agent::connect(world, "a", &[]);
        agent.connection.send(&Message::ControllerTerm { term: 99 }).unwrap();
        assert!(agent.connection.recv(Some(Instant::now() + PATIENCE)).is_err());
    };
    refuse(&world);
    world.until("an event names the remedy", |world| {
        found(world).iter().any(|event| event.text.contains("--least-term 99"))
    });
    refuse(&world);
    assert_eq!(found(&world).len(), 1, "it is reported once");
    world.controller = None;
    world.start(99);
    assert_eq!(Agent::connect(&world, "a", &[]).term, 100, "larger than the one that was seen");
}

#[test]
fn other_connections_are_refused() {
    let world = World::new();
    let endpoint = Endpoint::new(host("a"), Security::Plain);
    let peer = Peer { host: host("control"), address: world.address().to_string() };
    let refused = endpoint.connect(&peer, Purpose::Registry, Instant::now() + PATIENCE).unwrap_err();
    assert!(api::with_causes(&refused).contains("`[controller]`"), "{refused:?}");
}
