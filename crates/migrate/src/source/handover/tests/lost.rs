//! Tests of a guest that is lost at its source before COMMITTED.

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
    assert_eq!(driver.settle(), SourceState::Aborted);
    assert_eq!(world.state(), State::Source(SourceState::Aborted));
    assert!(matches!(peer.receive_until_closed()[..], [Message::Inquire { .. }, Message::Abort { .. }]));
    let (outcome, reason) = controls.report(|report| (report.outcome, report.reason.clone()));
    assert_eq!(outcome, Outcome::Ended);
    assert_eq!(reason.as_deref(), Some("QEMU ended"), "nobody is asked any more");
}

/// The destination may be ready with the only copy.
#[test]
fn a_guest_that_is_lost_after_all_of_it_was_sent_may_be_there() {
    let world = World::new();
    let (mut driver, ..) = driver(&world, STOPPED, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    let mut peer = world.accept();
    driver.handover.may_have_all = true;
    driver.phases_ended(&SourceEvent::QemuDied);
    let settled = thread::spawn(move || driver.settle());
    peer.receive_until(|message| matches!(message, Message::Inquire { .. }));
    peer.send_message(&Message::Ready {
        epoch: Epoch(1),
        incarnation: incarnation(),
        digest: String::new(),
        load_us: 0,
    });
    peer.receive_until(|message| matches!(message, Message::Go { .. }));
    peer.send_message(&running());
    assert!(matches!(settled.join().unwrap(), SourceState::Done { .. }));
}

/// Pages that the destination still needs are gone with QEMU: it could not run the guest, and must not begin.
#[test]
fn guest_lost_before_committed_with_postcopy_is_given_up() {
    let regions = [None, Some(vec![])];
    for (later, is_lost) in regions.into_iter().zip([false, true]) {
        let world = World::new();
        let (mut driver, ..) = driver(&world, STOPPED, None);
        let (boot_id, process) = (world.context.boot_id.clone(), None);
        let details = Details { boot_id, accepted: true, later, process, vm_ended: false };
        let found = driver.found_gone(QemuAtStart::Gone, Some(&details));
        let settled = thread::spawn(move || driver.run_on(found));
        let mut peer = world.accept();
        if is_lost {
            assert_eq!(settled.join().unwrap(), SourceState::Aborted);
            assert!(matches!(
                peer.receive_until_closed()[..],
                [Message::Inquire { .. }, Message::Abort { .. }]
            ));
        } else {
            peer.receive_until(|message| matches!(message, Message::Inquire { .. }));
            peer.send_message(&Message::Refused { epoch: Epoch(1), reason: String::new() });
            assert_eq!(settled.join().unwrap(), SourceState::Aborted);
        }
    }
}
