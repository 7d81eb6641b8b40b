//! Tests of a proposal that the destination rejects.

use super::*;

/// Frames that announce it would go into its network, and taps would be kept open for them.
#[test]
fn a_guest_that_was_never_accepted_elsewhere_is_not_announced() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, ..) = new_driver(&world, terms("a", "b"), SourceState::Idle, Some(&qemu));
    driver.begin(host::testing::proposal()).unwrap();
    let end_state = thread::spawn(move || driver.run());
    let mut peer = world.accept();
    peer.receive_until(|message| matches!(message, Message::Propose(_)));
    peer.send_message(&Message::Reject { findings: vec![], largest_epoch: None });
    assert_eq!(end_state.join().unwrap(), SourceState::Aborted);
    let asked = std::mem::take(&mut qemu.monitor().received);
    assert!(!asked.iter().any(|command| command == "human-monitor-command"), "{asked:?}");
}

#[test]
fn a_rejected_epoch_teaches_a_larger_one() {
    let world = World::new();
    let (mut driver, ..) = driver(&world, SourceState::Prepared { run: true }, None);
    driver.agreement.proposal = Some(host::testing::proposal());
    let learns = thread::spawn(move || driver.reach_ready().unwrap_err());
    let mut peer = world.accept();
    peer.receive_until(|message| matches!(message, Message::Propose(_)));
    peer.send_message(&Message::Reject { findings: vec![], largest_epoch: Some(Epoch(41)) });
    learns.join().unwrap();
    let vm = host::testing::vm();
    assert_eq!(world.context.journal.next_epoch(&vm).unwrap(), Epoch(42));

    // But it does not teach one that leaves no further epochs.
    let world = World::new();
    let (mut driver, ..) = super::driver(&world, SourceState::Prepared { run: true }, None);
    driver.agreement.proposal = Some(host::testing::proposal());
    let learns = thread::spawn(move || driver.reach_ready().unwrap_err());
    let mut peer = world.accept();
    peer.receive_until(|message| matches!(message, Message::Propose(_)));
    peer.send_message(&Message::Reject { findings: vec![], largest_epoch: Some(Epoch(i64::MAX as u64)) });
    learns.join().unwrap();
    assert_eq!(world.context.journal.next_epoch(&vm).unwrap(), Epoch(2));
}
