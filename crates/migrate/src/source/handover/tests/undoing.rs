//! Tests of what a source undoes on its host, and in which order.

use super::*;
use crate::source::participants::tests::{Fake, Steps, Zeros, taken};
use crate::source::stages::{Proposed, SourceStage};

/// Adds a participant whose undoing fails so many times.
fn add_stuck(driver: &mut SourceDriver, name: &'static str, failed_undos: u32, steps: &Steps) {
    driver.resources.participants.add(Box::new(Fake { failed_undos, ..Fake::new(name, steps) }));
}

/// A redirection, for example, is removed from the kernel: that needs no QEMU.
#[test]
fn undoing_is_tried_again_after_the_end_of_qemu() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, ..) = driver(&world, SourceState::Prepared { run: true }, Some(&qemu));
    let steps = Steps::default();
    add_stuck(&mut driver, "third", 1, &steps);
    drop(qemu);
    driver.take(&SourceEvent::QemuDied);
    assert_eq!(driver.run_to_end(), SourceState::Aborted);
    assert_eq!(taken(&steps), ["third undo without QEMU"; 2]);
}

#[test]
fn users_learn_of_everything_that_cannot_be_undone() {
    let world = World::new();
    let (mut driver, ..) = driver(&world, SourceState::Prepared { run: true }, None);
    let steps = Steps::default();
    for name in ["third", "fourth"] {
        add_stuck(&mut driver, name, u32::MAX, &steps);
    }
    driver.take(&SourceEvent::Failed);
    driver.finish_undoing();
    let message = driver.telemetry.now().message.unwrap();
    assert!(message.ends_with("fourth; third"), "{message}");
}

/// QEMU answers the participants only when it is released; and a part of the phases that still reads from it would be
/// cut off by them.
#[test]
fn qemu_is_released_and_parts_end_before_participants_undo() {
    let world = World::new();
    let qemu = Arc::new(Qemu::start(world.folder.path()));
    // The guest is not continued, so that nothing but undoing releases QEMU.
    let (mut driver, ..) = driver(&world, SourceState::Stopped { run: false }, Some(&qemu));
    let steps = Steps::default();
    let observed = Arc::clone(&qemu);
    let observe = Box::new(move || if observed.is_frozen() { " while QEMU is frozen" } else { "" });
    driver.resources.participants.add(Box::new(Fake { observe, ..Fake::new("third", &steps) }));
    let block = Zeros { bytes: 0, steps: Arc::clone(&steps) };
    let accepted = Proposed::default().accept(Payload::new(vec![Box::new(block)], 1));
    let (stopped, _) = accepted.stream().stop();
    driver.resources.stage = SourceStage::Stopped(stopped);
    driver.resources.vm.as_mut().unwrap().freeze().unwrap();
    assert!(qemu.is_frozen());
    driver.take(&SourceEvent::Failed);
    assert_eq!(taken(&steps), ["zeros end", "third undo"]);
}
