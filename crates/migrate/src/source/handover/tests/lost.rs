//! Tests of a guest that is lost at its source before COMMITTED.

use engine::handover::recover::OperatorDecision;

use super::*;

/// The destination lacks parts of the guest, and always will: neither host waits for the other.
#[test]
fn guest_lost_before_all_was_sent_is_given_up() {
    let world = World::new();
    let (mut driver, _, controls) = driver(&world, STOPPED, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    let mut peer = world.accept();
    driver.record_reason("QEMU ended");
    driver.phases_ended(&SourceEvent::QemuDied);
    assert_eq!(driver.run_to_end(), SourceState::Aborted);
    assert_eq!(world.state(), State::Source(SourceState::Aborted));
    assert!(matches!(peer.receive_until_closed()[..], [Message::Inquire { .. }, Message::Abort { .. }]));
    let (outcome, reason) = controls.report(|report| (report.outcome, report.reason.clone()));
    assert_eq!(outcome, Outcome::VmEnded);
    assert_eq!(reason.as_deref(), Some("QEMU ended"), "QEMU is not queried any more");
}

/// The destination may be ready with the only copy.
#[test]
fn a_guest_that_is_lost_after_all_of_it_was_sent_may_be_there() {
    let world = World::new();
    let (mut driver, ..) = driver(&world, STOPPED, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    let mut peer = world.accept();
    driver.session.set_destination_may_be_complete(true);
    driver.phases_ended(&SourceEvent::QemuDied);
    let end_state = thread::spawn(move || driver.run_to_end());
    peer.receive_until(|message| matches!(message, Message::Inquire { .. }));
    peer.send_message(&Message::Ready {
        epoch: Epoch(1),
        incarnation: incarnation(),
        digest: String::new(),
        load_us: 0,
    });
    peer.receive_until(|message| matches!(message, Message::Go { .. }));
    peer.send_message(&running());
    assert!(matches!(end_state.join().unwrap(), SourceState::Done { .. }));
}

/// Pages that the destination still needs are gone with QEMU: it could not run the guest, and must not begin.
#[test]
fn guest_lost_before_committed_with_post_copy_is_given_up() {
    let regions = [None, Some(vec![])];
    for (post_copied_regions, is_lost) in regions.into_iter().zip([false, true]) {
        let world = World::new();
        let (mut driver, ..) = driver(&world, STOPPED, None);
        let (boot_id, process) = (world.context.boot_id.clone(), None);
        let details =
            SourceDetails { boot_id, accepted: true, post_copied_regions, process, vm_ended: false };
        let found = driver.found_gone(QemuAtStart::Gone, Some(&details));
        let end_state = thread::spawn(move || driver.run_on(found));
        let mut peer = world.accept();
        if is_lost {
            assert_eq!(end_state.join().unwrap(), SourceState::Aborted);
            assert!(matches!(
                peer.receive_until_closed()[..],
                [Message::Inquire { .. }, Message::Abort { .. }]
            ));
        } else {
            peer.receive_until(|message| matches!(message, Message::Inquire { .. }));
            peer.send_message(&Message::Refused { epoch: Epoch(1), reason: String::new() });
            assert_eq!(end_state.join().unwrap(), SourceState::Aborted);
        }
    }
}

/// An operator decides about a guest whose memory is not where the journal has it.
#[test]
fn memory_that_cannot_be_read_keeps_no_event_waiting() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let state = SourceState::Committed { incarnation: incarnation(), run: true, has_run: true };
    let (mut driver, mailbox, _) = driver(&world, state, None);
    let vm = SourceVm::find(&world.context, &qemu.record()).unwrap();
    let region = serde_json::json!({ "name": "ram", "bytes": 4096, "page_bytes": 4096, "address": 4096 });
    let post_copied_regions = Some(vec![serde_json::from_value(region).unwrap()]);
    let (boot_id, process) = (world.context.boot_id.clone(), None);
    let details = SourceDetails { boot_id, accepted: true, post_copied_regions, process, vm_ended: false };
    mailbox.put(SourceNotice::Event(SourceEvent::OperatorDecided(OperatorDecision::DiscardCopy)));
    let (end_state, settles) = mpsc::channel();
    thread::spawn(move || {
        let found = driver.found_with(vm, Some(&details));
        end_state.send(driver.run_on(found)).unwrap();
    });
    let state = settles.recv_timeout(host::testing::PATIENCE).expect("the decision waits for the memory");
    assert!(matches!(state, SourceState::Done { .. }), "{state:?}");
}
