//! Tests of a participant that is added to those of every VM.

use super::*;
use crate::source::participants::tests::{Fake, Steps, taken};

/// Adds a participant to those of every VM.
fn with_third(driver: &mut SourceDriver) -> Steps {
    let steps = Steps::default();
    driver.resources.participants.add(Box::new(Fake::new("third", &steps)));
    steps
}

#[test]
fn a_third_participant_takes_part_in_a_migration_that_succeeds() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, ..) = driver(&world, STOPPED, Some(&qemu));
    let steps = with_third(&mut driver);
    driver.take(&SourceEvent::Ready { epoch: Epoch(1), incarnation: incarnation() });
    assert_eq!(taken(&steps), ["third commit"]);
    driver.take(&SourceEvent::Incomplete { epoch: Epoch(1) });
    assert_eq!(taken(&steps), ["third running"], "the destination still needs pages");
    driver.take(&SourceEvent::Running { epoch: Epoch(1) });
    assert_eq!(taken(&steps), ["third running", "third finish"]);
}
