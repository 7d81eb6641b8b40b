use net::redirection::testing::first;
use store::journal::Durability;

use super::*;
use crate::testing::{World, id, terms};

/// Prepares the redirection of the first migration, whose VM leaves this host, or arrives here.
fn prepared(world: &World, leaves: bool) -> RedirectionRecord {
    let mut redirection = first();
    (redirection.migration, redirection.epoch) = (id(1).to_string(), 1);
    let (left, arrived) = if leaves { ("a", "b") } else { ("b", "a") };
    redirection.legs[0].host = left.to_owned();
    redirection.place.host = arrived.to_owned();
    world.context.redirections.prepare(&redirection).unwrap()
}

fn stages(world: &World) -> Vec<RecordStage> {
    world.context.redirections.records().unwrap().iter().map(|record| record.stage).collect()
}

/// Ends the first migration, whose source this host is.
fn end(world: &World, state: &SourceState) {
    world.context.journal.record_source(&id(1), state, Durability::Process).unwrap();
    world.context.journal.close(&id(1)).unwrap();
}

#[test]
fn what_was_prepared_follows_the_outcome_of_its_migration() {
    let done = SourceState::Done { incarnation: None, run: true };
    for (state, expected) in [(done, vec![RecordStage::Active]), (SourceState::Aborted, vec![])] {
        let world = World::new();
        world.journalled(&terms("a", "b"), State::Source(SourceState::Prepared { run: true }));
        prepared(&world, true);
        let mut reaper = RedirectionReaper::default();
        reaper.look(&world.context);
        assert_eq!(stages(&world), [RecordStage::Prepared], "its driver decides");
        assert!(!world.kernel.has("table"));
        end(&world, &state);
        reaper.look(&world.context);
        assert_eq!(stages(&world), expected);
        assert_eq!(world.kernel.has("table"), !expected.is_empty());
        assert_eq!(world.kernel.shown().is_empty(), expected.is_empty());
    }
}

#[test]
fn an_incomplete_redirection_is_completed_without_a_restart() {
    let world = World::new();
    let mut record = prepared(&world, false);
    world.kernel.refuse("table");
    let keeper = &world.context.redirections;
    keeper.switch(&mut record).unwrap_err();
    keeper.confirm(&mut record).unwrap();
    let mut reaper = RedirectionReaper::default();
    reaper.look(&world.context);
    assert!(keeper.records().unwrap()[0].is_incomplete && !world.kernel.has("table"));
    world.kernel.mend();
    reaper.look(&world.context);
    assert!(!keeper.records().unwrap()[0].is_incomplete && world.kernel.has("table"));
}

#[test]
fn nothing_acts_on_what_was_seen_before_a_migration_began() {
    let world = World::new();
    let mut record = prepared(&world, true);
    let keeper = &world.context.redirections;
    keeper.switch(&mut record).unwrap();
    keeper.confirm(&mut record).unwrap();
    world.journalled(&terms("b", "a"), State::Destination(DestinationState::Prepared));
    act_if_unchanged(&world.context, &record, Reaping::End(None));
    assert_eq!(stages(&world), [RecordStage::Active], "its VM moves now");
    world.context.journal.close(&id(1)).unwrap();
    let before = RedirectionRecord { since_unix_ms: 7, ..record.clone() };
    act_if_unchanged(&world.context, &before, Reaping::End(None));
    assert_eq!(stages(&world), [RecordStage::Active], "it is another one now");
    act_if_unchanged(&world.context, &record, Reaping::End(None));
    assert_eq!((stages(&world), world.kernel.shown()), (vec![], vec![]));
}

#[test]
fn keys_of_migrations_that_never_began_are_forgotten() {
    let world = World::new();
    let keeper = &world.context.redirections;
    let ports = world.context.config.redirection.ports();
    world.journalled(&terms("a", "b"), State::Source(SourceState::Prepared { run: true }));
    for migration in [id(1), id(2)] {
        keeper.reserve(&migration.to_string(), 7, ports).unwrap().unwrap();
    }
    resume(&world.context);
    let directory = world.context.config.state_dir.join(DIRECTORY);
    let left = || -> Vec<_> {
        let entries = std::fs::read_dir(&directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(left(), ["web@1.key"], "the other one is not in the journal");
    // What a migration has reserved ends with it, however early that is.
    remove_of(keeper, &id(1)).unwrap();
    assert!(left().is_empty());
}

#[test]
fn names_of_migrations_are_read() {
    assert_eq!(migration_named(&id(12).to_string()), Some(id(12)));
    for other in ["", "web", "web#", "#1", "web#-1", "web#1x", "a b#1"] {
        assert_eq!(migration_named(other), None, "{other}");
    }
}

#[test]
fn a_host_without_records_has_no_redirection() {
    let directory = tempfile::tempdir().unwrap();
    let keeper = RedirectionKeeper::new("a", directory.path());
    assert_eq!(records_of(&keeper, &id(3)).unwrap(), []);
    assert_eq!(of_vm_here(&keeper, &HostId::new("a").unwrap(), &id(3).vm).unwrap(), []);
    remove_of(&keeper, &id(3)).unwrap();
}

#[test]
fn a_host_left_before_decides_by_what_the_others_say() {
    let said = |stands, confirmed| Some(Standing { stands, confirmed });
    for (all, expected) in [
        (vec![said(true, true), said(true, false)], Some(true)),
        (vec![None, said(true, true)], Some(true)),
        (vec![said(false, false), said(true, true)], Some(true)),
        (vec![said(false, false), said(false, false)], Some(false)),
        // The source has prepared its part, and the destination not yet.
        (vec![said(false, false), said(true, false)], None),
        (vec![said(false, false), None], None),
        (vec![None, None], None),
    ] {
        assert_eq!(outcome(&all), expected, "{all:?}");
    }
}
