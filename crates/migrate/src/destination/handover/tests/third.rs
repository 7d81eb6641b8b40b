//! A third participant takes part in an arrival without an edit of the driver.

use super::*;
use crate::destination::participants::tests::{ArrivingFake, ArrivingSteps, taken};

/// Adds a participant to those of every arriving VM.
fn with_third(driver: &mut DestinationDriver) -> ArrivingSteps {
    let steps = ArrivingSteps::default();
    let fake = ArrivingFake { blocks: 1, ..ArrivingFake::new("third", &steps) };
    driver.resources.participants.add(Box::new(fake));
    steps
}

#[test]
fn a_third_participant_takes_part_in_an_arrival_that_fails() {
    let world = World::new();
    let (_qemu, vm, _) = arrived(&world);
    let (mut driver, mut source) = driver(&world, DestinationState::Prepared, None);
    let steps = with_third(&mut driver);
    let mut artifacts = vm.artifacts.clone();
    driver.check(&ArrivalPlan::default()).unwrap();
    driver.prepare_start(&mut artifacts).unwrap();
    assert!(driver.started(vm).unwrap().is_none());
    assert_eq!(taken(&steps), ["third check", "third prepare", "third open"]);
    let verify = Message::Verify { block: 0, first_chunk: 3, hashes: vec!["a".to_owned()] };
    driver.message(driver.connections.control.connection_id().unwrap(), verify);
    source.receive_until(
        |message| matches!(message, Message::Verified { different_chunks } if *different_chunks == [3]),
    );
    assert_eq!(taken(&steps), [r#"third compare 0 3 ["a"]"#]);
    driver.message(driver.connections.control.connection_id().unwrap(), Message::Claims { cards: vec![] });
    assert_eq!(taken(&steps), ["third learn Claims { cards: [] }"]);
    let end_state = thread::spawn(move || driver.run());
    source.send_message(&Message::Abort { epoch: Epoch(1), reason: "enough".to_owned() });
    assert_eq!(end_state.join().unwrap(), DestinationState::CopyDestroyed);
    assert_eq!(taken(&steps), ["third abandon", "third undo Never"], "the engine's effect reaches it");
}

#[test]
fn a_third_participant_takes_part_in_an_arrival_that_succeeds() {
    let world = World::new();
    let (_qemu, vm, incarnation) = arrived(&world);
    let ready = DestinationState::Ready { incarnation: incarnation.clone(), run: true };
    let (mut driver, mut source) = driver(&world, ready, Some(vm));
    let steps = with_third(&mut driver);
    let end_state = thread::spawn(move || driver.run_to_end());
    source.send_message(&go(&incarnation));
    assert!(matches!(end_state.join().unwrap(), DestinationState::Active { .. }));
    let expected = ["third before_cont", "third commit running", "third last_message", "third finish"];
    assert_eq!(taken(&steps), expected);
    // The messages of all participants are sent, in the order of the list.
    source.receive_until(|message| matches!(message, Message::FirstFrames { epoch: Epoch(1), .. }));
    source.receive_until(|message| *message == Message::Pong);
}

/// Its content may be that of a guest that has run.
#[test]
fn a_third_participant_learns_that_a_lost_guest_may_have_run() {
    let world = World::new();
    let (mut driver, mut source) = driver(&world, DestinationState::QemuLost, None);
    let steps = ArrivingSteps::default();
    let place = Some("/srv/third".into());
    driver.resources.participants.add(Box::new(ArrivingFake {
        place,
        failed_removals: 1,
        ..ArrivingFake::new("parts", &steps)
    }));
    let end_state = thread::spawn(move || driver.run());
    source.send_message(&Message::Verdict { epoch: Epoch(1), verdict: Verdict::Returned });
    assert_eq!(end_state.join().unwrap(), DestinationState::Crashed { has_run: false });
    assert_eq!(taken(&steps), ["parts abandon", "parts undo Possibly"]);
    let message = || world.context.journal.migration(&id(1)).unwrap().unwrap().message.unwrap();
    // What it leaves behind is reported until it is gone.
    host::testing::eventually("the report is back", || {
        message().contains("if it has run, its parts are /srv/third, otherwise those at b")
    });
}

/// Files of a process that lives stay open, and a server may still write to an image.
#[test]
fn a_copy_is_abandoned_before_its_qemu_ends_and_undone_after() {
    let world = World::new();
    let (qemu, vm, _) = arrived(&world);
    let (mut driver, _source) = driver(&world, DestinationState::Prepared, Some(vm));
    let steps = ArrivingSteps::default();
    let (pid, start_time) = qemu.process();
    let process = tracee::Process::open_exact(pid, start_time).unwrap();
    let observe = Box::new(move || if process.is_alive() { " while QEMU lives" } else { "" });
    driver
        .resources
        .participants
        .add(Box::new(ArrivingFake { observe, ..ArrivingFake::new("third", &steps) }));
    driver.take(&DestinationEvent::Failed);
    assert_eq!(taken(&steps), ["third abandon while QEMU lives", "third undo Never"]);
}
