//! Tests of a participant that is added to those of every VM.

use super::*;
use crate::source::participants::StopKind;
use crate::source::participants::tests::{Fake, Steps, taken};
use crate::source::stages::{Proposed, SourceStage};
use ::memory::OwedPages;

/// Adds a participant to those of every VM.
fn with_third(driver: &mut SourceDriver) -> Steps {
    let steps = Steps::default();
    driver.resources.participants.add(Box::new(Fake::new("third", &steps)));
    steps
}

#[test]
fn a_third_participant_takes_part_in_a_migration_that_fails() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, ..) = driver(&world, SourceState::Prepared { run: true }, Some(&qemu));
    let steps = with_third(&mut driver);
    let payload = payload(&mut driver);
    assert_eq!(taken(&steps), ["third check"]);
    let vm = driver.resources.vm.as_mut().unwrap();
    driver.resources.participants.before_stop(vm).unwrap();
    driver.resources.participants.freeze(vm, StopKind::NotCompared, &mut OwedPages::of(vec![])).unwrap();
    driver.resources.participants.ready(vm).unwrap();
    assert_eq!(taken(&steps), ["third before_stop", "third freeze", "third ready"]);
    driver.resources.stage = SourceStage::RolledBack(Proposed::default().accept(payload).roll_back());
    driver.take(&SourceEvent::Failed);
    assert_eq!(taken(&steps), ["third undo"], "the engine's effect reaches it");
    drop(driver);
}

#[test]
fn a_third_participant_takes_part_in_a_migration_that_succeeds() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, ..) = driver(&world, STOPPED, Some(&qemu));
    let steps = with_third(&mut driver);
    driver.take(&SourceEvent::Ready { epoch: Epoch(1), incarnation: incarnation() });
    assert_eq!(taken(&steps), ["third commit"]);
    driver.take(&SourceEvent::Running { epoch: Epoch(1) });
    assert_eq!(taken(&steps), ["third finish"]);
}
