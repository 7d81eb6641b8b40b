//! Decisions that agents, users and evacuations may not make for others.

use api::{ClientError, ProblemKind};
use engine::evacuation::{CommandState, EvacuationOutcome, MoveEnd};
use proto::message::{CommandVerb, FleetChange, Message, MigrationFacts, MigrationStanding};
use proto::{Epoch, MigrationId, VmName};

use crate::played::{Agent, World, empty, host, with_a_moving_vm};

#[test]
fn the_end_of_a_move_is_taken_from_its_source_only() {
    let world = World::new();
    let (mut a, mut b, id, command) = with_a_moving_vm(&world);
    let state = serde_json::to_value(CommandState::Ended { end: MoveEnd::VmEnded }).unwrap();
    let mut facts = b.facts();
    facts.kernel = "6.13".to_owned();
    b.changed(vec![
        FleetChange::Move { command: command.clone(), state },
        FleetChange::Host { host: Box::new(facts) },
    ]);
    world.until("the report was taken", |world| world.shown("b").kernel == "6.13");
    // It is not over: the move is cancelled by its id.
    world.client().cancel(&id).unwrap();
    loop {
        let Message::FleetCommand { id, command: verb, .. } = a.next() else { panic!("no command") };
        if verb == (CommandVerb::Cancel { of: command.clone() }) {
            break;
        }
        a.carry_out(id, &verb);
    }
    assert_eq!(world.client().evacuation(&id).unwrap().status.outcome, None);
}

#[test]
fn a_cordon_of_a_user_outlives_a_cancelled_evacuation() {
    let world = World::new();
    let mut a = Agent::up(&world, "a", &["web"]);
    let _b = Agent::up(&world, "b", &[]);
    let id = world.client().evacuate(&empty("a")).unwrap().id;
    let (command, _) = a.until_move();
    world.client().set_cordoned(&host("a"), true).unwrap();
    world.client().cancel(&id).unwrap();
    a.answer_move(&command, CommandState::Ended { end: MoveEnd::Cancelled });
    let outcome = |world: &World| world.client().evacuation(&id).unwrap().status.outcome;
    world.until("it is cancelled", |world| {
        matches!(outcome(world), Some(EvacuationOutcome::Cancelled { .. }))
    });
    assert!(world.shown("a").cordoned);
    let events = world.events();
    assert!(events.iter().all(|event| event.kind != "host-uncordoned"), "{events:#?}");
}

#[test]
fn a_host_with_an_open_migration_is_not_forgotten() {
    let world = World::new();
    let mut a = Agent::up(&world, "a", &["web"]);
    let mut b = Agent::up(&world, "b", &[]);
    let migration = |standing| FleetChange::Migration {
        migration: Box::new(MigrationFacts {
            migration: MigrationId { vm: VmName::new("web").unwrap(), epoch: Epoch(1) },
            from: host("a"),
            to: host("b"),
            state: "committed".to_owned(),
            standing,
            message: None,
            progress: None,
        }),
    };
    b.changed(vec![migration(MigrationStanding::InDoubt)]);
    a.changed(vec![migration(MigrationStanding::InDoubt)]);
    let in_doubt = |world: &World| world.events().iter().any(|event| event.kind == "migration-in-doubt");
    world.until("the migration is known", in_doubt);
    drop(b);
    world.until("the host is away", |world| !world.shown("b").connected);
    let Err(ClientError::Problem(problem)) = world.client().forget_host(&host("b")) else {
        panic!("it is forgotten")
    };
    assert_eq!(problem.kind, ProblemKind::Conflict, "{problem:?}");
    assert!(problem.error.contains("web#1"), "{problem:?}");
    a.changed(vec![migration(MigrationStanding::Done)]);
    let has_ended = |world: &World| world.events().iter().any(|event| event.kind == "migration-ended");
    world.until("it is over", has_ended);
    world.client().forget_host(&host("b")).unwrap();
}
