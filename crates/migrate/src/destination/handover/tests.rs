//! Tests of the destination's driver against a peer that sends the messages of the test.

mod third;

use host::ArrivalArtifacts;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Instant;

use engine::handover::destination::DestinationState;
use engine::handover::recover::OperatorDecision;
use engine::handover::registry::RegistryAnswer;
use proto::message::{Message, Ownership, Verdict};
use proto::{Epoch, Generation, Incarnation};

use super::*;
use crate::destination::DestinationInbox;
use api::progress::Publisher;
use host::testing::{PATIENCE, Peer, Qemu, SlowRegistry, World, host, id, proposal, terms};
use store::journal::{Durability, State};

/// Returns a driver of the first migration, which is in the journal in this state, and the source's end of a
/// connection.
fn driver(world: &World, state: DestinationState, vm: Option<ArrivingVm>) -> (DestinationDriver, Peer) {
    driver_of(world, terms("b", "a"), state, vm)
}

fn driver_of(
    world: &World,
    terms: engine::handover::MigrationTerms,
    state: DestinationState,
    vm: Option<ArrivingVm>,
) -> (DestinationDriver, Peer) {
    world.journalled(&terms, State::Destination(state.clone()));
    let context = Arc::clone(&world.context);
    let (here, there) = World::from_peer();
    let publisher = Publisher::new();
    let mut driver =
        DestinationDriver::new(context, terms, state, proposal(), vm, DestinationInbox::new(), publisher);
    driver.attach_control_stream(here).unwrap();
    (driver, there)
}

/// A VM that has arrived and waits.
fn arrived(world: &World) -> (Qemu, ArrivingVm, Incarnation) {
    let mut artifacts = ArrivalArtifacts::plan(&world.context.config, &id(1));
    let qemu = Qemu::start(&artifacts.directory);
    artifacts.process = Some(qemu.process());
    let mut vm = ArrivingVm::find(artifacts, PATIENCE).unwrap();
    vm.qmp().unwrap().set_timeout(Duration::from_millis(50));
    let incarnation = qemu.incarnation();
    (qemu, vm, incarnation)
}

fn go(incarnation: &Incarnation) -> Message {
    Message::Go { epoch: Epoch(1), incarnation: incarnation.clone(), run: true }
}

fn other_incarnation() -> Incarnation {
    Incarnation { boot_id: "b".to_owned(), pid: 7, start_time_ticks: 9, generation: Generation(1) }
}

#[test]
fn a_protocol_violation_before_ready_ends_the_migration() {
    for nonsense in [go(&other_incarnation()), Message::Resumed] {
        let world = World::new();
        let (driver, mut source) = driver(&world, DestinationState::Prepared, None);
        let end_state = thread::spawn(move || driver.run());
        source.send_message(&nonsense);
        source.receive_until_closed();
        assert_eq!(end_state.join().unwrap(), DestinationState::CopyDestroyed);
        assert_eq!(world.state(), State::Destination(DestinationState::CopyDestroyed));
    }
}

#[test]
fn a_protocol_violation_after_ready_closes_the_connection_only() {
    let world = World::new();
    let (_qemu, vm, incarnation) = arrived(&world);
    let ready = DestinationState::Ready { incarnation, run: true };
    let (mut driver, mut source) = driver(&world, ready.clone(), Some(vm));
    let connection_id = *driver.connections.open.keys().next().unwrap();
    driver.message(connection_id, Message::Resumed);
    source.receive_until_closed();
    assert_eq!(world.state(), State::Destination(ready));
}

#[test]
fn late_messages_on_an_older_connection_are_ignored() {
    let world = World::new();
    let (mut driver, _old) = driver(&world, DestinationState::Prepared, None);
    let old = driver.connections.control.connection_id().unwrap();
    let (here, _new) = World::from_peer();
    driver.inbox.mailbox().connected(here, Some(Generation(2))).unwrap();
    let connected = driver.inbox.wait(Instant::now() + PATIENCE).unwrap();
    driver.notice(connected);
    driver.notice(DestinationNotice::Message { connection_id: old, message: Message::Resume });
    driver.notice(DestinationNotice::Blob { connection_id: old, bytes: vec![0; 16] });
    assert_eq!(*driver.session.state(), DestinationState::Prepared);
}

/// Otherwise the source would wait for an answer that is never sent.
#[test]
fn a_control_stream_of_an_old_generation_is_closed() {
    let world = World::new();
    let (mut driver, mut present) = driver(&world, DestinationState::Prepared, None);
    let control = driver.connections.control.connection_id().unwrap();
    driver.connections.control.connected(control, Some(Generation(2)));
    let (here, mut old) = World::from_peer();
    driver.inbox.mailbox().connected(here, Some(Generation(1))).unwrap();
    let connected = driver.inbox.wait(Instant::now() + PATIENCE).unwrap();
    driver.notice(connected);
    old.receive_until_closed();
    driver.send_message(&Message::Ping);
    present.receive_until(|message| *message == Message::Ping);
}

#[test]
fn a_fact_is_handled_again_until_the_journal_accepts_it() {
    let world = World::new();
    let (_qemu, vm, incarnation) = arrived(&world);
    let (mut driver, mut source) =
        driver(&world, DestinationState::Ready { incarnation, run: true }, Some(vm));
    world.context.journal.refuse_writes(true);
    driver.notice(DestinationNotice::Event(DestinationEvent::QemuDied));
    // Messages that are received in between are not applied either, and do not replace the pending event.
    driver.notice(DestinationNotice::Event(DestinationEvent::OperatorDecided(OperatorDecision::RunHere {
        force: false,
    })));
    assert_eq!(world.state().name(), "ready");
    world.context.journal.refuse_writes(false);
    let end_state = thread::spawn(move || driver.run_to_end());
    source.receive_until(|message| matches!(message, Message::Refused { .. }));
    assert_eq!(end_state.join().unwrap(), DestinationState::Refused);
}

/// In the order in which they were noticed: no operator has to find out if the guest has run.
#[test]
fn facts_that_the_journal_refuses_keep_their_order() {
    let world = World::new();
    let (_qemu, vm, incarnation) = arrived(&world);
    let (mut driver, mut source) =
        driver(&world, DestinationState::Starting { incarnation, again: false }, Some(vm));
    world.context.journal.refuse_writes(true);
    driver.take(&DestinationEvent::Continued { missing: false });
    driver.repeat();
    world.context.journal.refuse_writes(false);
    driver.notice(DestinationNotice::Event(DestinationEvent::QemuDied));
    assert_eq!(world.state().name(), "starting", "what precedes it is not in the journal yet");
    let end_state = thread::spawn(move || driver.run_to_end());
    source.receive_until(|message| matches!(message, Message::Running { .. }));
    assert_eq!(end_state.join().unwrap(), DestinationState::Crashed { has_run: true });
}

#[test]
fn a_statement_that_was_not_journalled_is_asked_for_again() {
    let world = World::new();
    let (qemu, vm, incarnation) = arrived(&world);
    let (mut driver, mut source) =
        driver(&world, DestinationState::Ready { incarnation: incarnation.clone(), run: true }, Some(vm));
    world.context.journal.refuse_writes(true);
    driver.message(0, go(&incarnation));
    assert_eq!(world.state().name(), "ready");
    assert!(!qemu.monitor().running, "nothing that does not stand in the journal is done");
    world.context.journal.refuse_writes(false);
    let end_state = thread::spawn(move || driver.run_to_end());
    source.receive_until(|message| matches!(message, Message::Ready { .. }));
    assert!(!qemu.monitor().running, "who knows what the source has decided since");
    source.send_message(&go(&incarnation));
    source.receive_until(|message| matches!(message, Message::Running { .. }));
    assert!(matches!(end_state.join().unwrap(), DestinationState::Active { .. }));
    assert!(qemu.monitor().running);
}

/// In between an operator may have assigned the VM to the source, also against the registry.
#[test]
fn the_registry_is_asked_again_after_a_failed_journal_write() {
    let (asked, questions) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let world = World::with(Some(Arc::new(SlowRegistry { asked, answers: Mutex::new(answers) })));
    let (qemu, vm, incarnation) = arrived(&world);
    let terms = engine::handover::MigrationTerms { registry: Some(Epoch(0)), ..terms("b", "a") };
    let acquiring = DestinationState::Acquiring { incarnation, run: true };
    let (mut driver, _source) = driver_of(&world, terms, acquiring, Some(vm));
    let owner = |name| {
        RegistryAnswer::Record(Some(Ownership {
            epoch: Epoch(1),
            owner: host(name),
            offer: None,
            released: false,
        }))
    };
    world.context.journal.refuse_writes(true);
    driver.notice(DestinationNotice::Event(DestinationEvent::RegistryAnswered(owner("a"))));
    assert_eq!(world.state().name(), "acquiring");
    world.context.journal.refuse_writes(false);
    answer.send(owner("b")).unwrap();
    assert_eq!(driver.run_to_end(), DestinationState::CopyDestroyed);
    assert!(questions.try_recv().is_ok(), "it was asked again");
    assert!(!qemu.monitor().received.iter().any(|command| command == "cont"));
}

#[test]
fn a_decision_that_was_not_journalled_is_not_retried() {
    let world = World::new();
    let (_qemu, vm, incarnation) = arrived(&world);
    let ready = DestinationState::Ready { incarnation, run: true };
    let (mut driver, _source) = driver(&world, ready.clone(), Some(vm));
    world.context.journal.refuse_writes(true);
    driver.notice(DestinationNotice::Event(DestinationEvent::OperatorDecided(OperatorDecision::DiscardCopy)));
    world.context.journal.refuse_writes(false);
    let text = driver.publisher.now().message.unwrap();
    assert!(text.starts_with("the decision was not carried out"), "{text}");
    driver.repeat();
    assert_eq!(world.state(), State::Destination(ready));
}

/// Otherwise QEMU would be held again, or be written to.
#[test]
fn messages_of_the_arrival_are_refused_after_ready() {
    let state = Message::DeviceState { bytes: 1, state_bytes: 1, digest: String::new() };
    let verify = Message::Verify { block: 0, first_chunk: 0, hashes: vec![] };
    for late in [Message::Frozen { epoch: Epoch(1), run: true }, Message::Resume, state, verify] {
        let world = World::new();
        let (qemu, vm, incarnation) = arrived(&world);
        let starting = DestinationState::Starting { incarnation, again: false };
        let (mut driver, mut source) = driver(&world, starting.clone(), Some(vm));
        driver.reporter.loaded = Some((String::new(), 0));
        driver.message(driver.connections.control.connection_id().unwrap(), late);
        source.receive_until_closed();
        assert!(!qemu.is_frozen());
        assert_eq!(world.state(), State::Destination(starting));
    }
}

#[test]
fn the_driver_answers_while_cont_is_not_answered() {
    let world = World::new();
    let (qemu, vm, incarnation) = arrived(&world);
    let (driver, mut source) =
        driver(&world, DestinationState::Ready { incarnation: incarnation.clone(), run: true }, Some(vm));
    qemu.monitor().ignores = Some("cont");
    let end_state = thread::spawn(move || driver.run_to_end());
    source.send_message(&go(&incarnation));
    // The command is repeated.
    qemu.received("cont", 2);
    source.send_message(&Message::Ping);
    source.receive_until(|message| *message == Message::Pong);
    qemu.monitor().ignores = None;
    source.receive_until(|message| matches!(message, Message::Running { .. }));
    assert!(matches!(end_state.join().unwrap(), DestinationState::Active { .. }));
}

/// Sends GO to a driver whose QEMU does not answer `cont` yet; the driver still processes messages.
fn goes_while_cont_waits(
    world: &World,
    qemu: &Qemu,
    vm: ArrivingVm,
    incarnation: Incarnation,
) -> (thread::JoinHandle<DestinationState>, Peer) {
    let message = go(&incarnation);
    let (mut driver, mut source) =
        driver(world, DestinationState::Ready { incarnation, run: true }, Some(vm));
    driver.resources.stage = ArrivalStage::FoundComplete;
    qemu.monitor().waits = Some("cont");
    let end_state = thread::spawn(move || driver.run_to_end());
    source.send_message(&message);
    qemu.received("cont", 1);
    source.send_message(&Message::Ping);
    source.receive_until(|message| *message == Message::Pong);
    (end_state, source)
}

/// The page arrives over connections that the driver has to answer.
#[test]
fn the_driver_answers_while_qemu_waits_for_a_page() {
    let world = World::new();
    let (qemu, mut vm, incarnation) = arrived(&world);
    vm.qmp().unwrap().set_timeout(qemu::qmp::DEFAULT_TIMEOUT);
    vm.artifacts.missing_pages = Some(missing_pages(&world, &serde_json::Value::Null));
    assert!(vm.qmp().unwrap().timeout() < Duration::from_secs(1));
    let (end_state, mut source) = goes_while_cont_waits(&world, &qemu, vm, incarnation);
    qemu.monitor().waits = None;
    source.receive_until(|message| matches!(message, Message::Running { .. }));
    assert!(matches!(end_state.join().unwrap(), DestinationState::Active { .. }));
    assert_eq!(qemu.monitor().received.iter().filter(|received| *received == "cont").count(), 1);
}

/// The guest never ran, however late QEMU answers: the source resumes it.
#[test]
fn a_cont_that_is_refused_late_gives_the_guest_back() {
    let world = World::new();
    let (qemu, mut vm, incarnation) = arrived(&world);
    vm.artifacts.missing_pages = Some(missing_pages(&world, &serde_json::Value::Null));
    qemu.monitor().refuses = Some("cont");
    let (end_state, mut source) = goes_while_cont_waits(&world, &qemu, vm, incarnation);
    qemu.monitor().waits = None;
    source.receive_until(|message| matches!(message, Message::Refused { .. }));
    assert_eq!(end_state.join().unwrap(), DestinationState::Refused);
}

#[test]
fn a_copy_that_is_ready_is_held_until_it_is_to_run() {
    let world = World::new();
    let (qemu, vm, incarnation) = arrived(&world);
    let (mut driver, mut source) = driver(&world, DestinationState::Prepared, Some(vm));
    driver.reporter.loaded = Some((String::new(), 0));
    driver.enter_ready(true);
    assert!(qemu.is_frozen());
    assert_eq!(
        world.state(),
        State::Destination(DestinationState::Ready { incarnation: incarnation.clone(), run: true })
    );
    let end_state = thread::spawn(move || driver.run());
    source.send_message(&go(&incarnation));
    assert!(matches!(end_state.join().unwrap(), DestinationState::Active { .. }));
    assert!(!qemu.is_frozen());
    qemu.received("cont", 1);
}

#[test]
fn a_copy_that_somebody_else_continued_is_never_ready() {
    let world = World::new();
    let (qemu, vm, _) = arrived(&world);
    let (mut driver, _source) = driver(&world, DestinationState::Prepared, Some(vm));
    driver.reporter.loaded = Some((String::new(), 0));
    qemu.emit_resume();
    driver.enter_ready(true);
    assert_eq!(*driver.session.state(), DestinationState::CopyDestroyed);
    assert_eq!(driver.run(), DestinationState::CopyDestroyed);
}

#[test]
fn a_held_copy_is_found_without_a_monitor_connection() {
    let world = World::new();
    let (qemu, mut vm, _) = arrived(&world);
    vm.freeze().unwrap();
    let artifacts = vm.artifacts.clone();
    drop(vm);
    let connections = qemu.monitor().connections;
    let mut found = ArrivingVm::find(artifacts, PATIENCE).unwrap();
    assert_eq!(found.found(), QemuAtStart::Paused);
    assert!(qemu.is_frozen());
    assert_eq!(qemu.monitor().connections, connections);
}

#[test]
fn an_epoch_that_is_not_new_is_refused_with_the_largest() {
    let world = World::new();
    world.context.journal.learn_epoch(&host::testing::vm(), Epoch(9)).unwrap();
    let context = Arc::clone(&world.context);
    let (terms, publisher) = (terms("b", "a"), Publisher::new());
    let idle = DestinationState::Idle;
    let mut driver =
        DestinationDriver::new(context, terms, idle, proposal(), None, DestinationInbox::new(), publisher);
    let error = driver.prepare().unwrap_err();
    assert_eq!(error.largest_epoch(), Some(Epoch(9)), "{error}");
}

/// A source that was started anew without its QEMU asks again and again, and will never send the remaining state.
#[test]
fn a_source_that_only_asks_does_not_keep_a_copy_waiting() {
    let world = World::patient(None, "give_up_after_ms = 500\n");
    let (driver, peer) = driver(&world, DestinationState::Prepared, None);
    drop(peer);
    let mailbox = driver.inbox.mailbox();
    let end_state = thread::spawn(move || driver.run_to_end());
    while !end_state.is_finished() {
        let (here, mut there) = World::from_peer();
        if mailbox.connected(here, None).is_err() {
            break;
        }
        there.send_message(&Message::Inquire { epoch: Epoch(1) });
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(end_state.join().unwrap(), DestinationState::CopyDestroyed);
}

/// Storage that fails to remove an image delays no migration; the image is reported, and tried again.
#[test]
fn an_image_that_stays_is_named_until_it_is_gone() {
    let world = World::new();
    let (driver, mut source) = driver(&world, DestinationState::Prepared, None);
    let image = world.folder.path().join("web@1-disk0.raw");
    // A directory cannot be removed as a file is.
    std::fs::create_dir(&image).unwrap();
    let mut artifacts = ArrivalArtifacts::plan(&world.context.config, &id(1));
    artifacts.images.push(image.clone());
    artifacts.keep(&world.context, &id(1), Durability::Process).unwrap();

    let end_state = thread::spawn(move || driver.run());
    source.send_message(&Message::Abort { epoch: Epoch(1), reason: "enough".to_owned() });
    assert_eq!(end_state.join().unwrap(), DestinationState::CopyDestroyed);
    let record = || world.context.journal.migration(&id(1)).unwrap().unwrap();
    assert!(!record().open, "it is over all the same");
    let message = record().message.unwrap();
    assert!(message.contains(&format!("remain here: {}", image.display())), "{message}");

    std::fs::remove_dir(&image).unwrap();
    host::testing::eventually("it is gone", || record().message.unwrap().contains("nothing is left here"));
}

/// It is not known whether the guest has run: the images stay, and are not reported as those of a VM that has run.
#[test]
fn a_copy_that_was_lost_with_its_host_leaves_its_images() {
    let world = World::new();
    let (driver, mut source) = driver(&world, DestinationState::QemuLost, None);
    let image = world.folder.path().join("web@1-disk0.raw");
    std::fs::write(&image, "half").unwrap();
    let mut artifacts = ArrivalArtifacts::plan(&world.context.config, &id(1));
    artifacts.images.push(image.clone());
    artifacts.keep(&world.context, &id(1), Durability::Process).unwrap();

    let end_state = thread::spawn(move || driver.run());
    source.send_message(&Message::Verdict { epoch: Epoch(1), verdict: Verdict::Returned });
    assert_eq!(end_state.join().unwrap(), DestinationState::Crashed { has_run: false });
    assert!(image.exists());
    let message = world.context.journal.migration(&id(1)).unwrap().unwrap().message.unwrap();
    assert!(message.contains("not known") && message.contains("otherwise those at b"), "{message}");
}

/// Returns the record of a guest with a page that was present before it arrived.
fn unexpected_page(world: &World) -> host::missing_pages_record::MissingPagesRecord {
    missing_pages(world, &serde_json::json!({"page": {"block": 0, "page": 7}, "is_stopped": false}))
}

/// Returns the record of a guest with missing pages.
fn missing_pages(
    world: &World,
    unexpected_page: &serde_json::Value,
) -> host::missing_pages_record::MissingPagesRecord {
    let record = serde_json::json!({
        "descriptor": 9999, "file": world.folder.path().join("missing-pages"), "regions": [],
        "unexpected_page": unexpected_page,
    });
    serde_json::from_value(record).unwrap()
}

#[test]
fn a_copy_with_an_unexpected_page_is_never_run() {
    let world = World::new();
    let (qemu, mut vm, incarnation) = arrived(&world);
    vm.artifacts.missing_pages = Some(unexpected_page(&world));
    let ready = DestinationState::Ready { incarnation: incarnation.clone(), run: true };
    let (mut driver, mut source) = driver(&world, ready, Some(vm));
    driver.resources.stage = ArrivalStage::FoundComplete;
    let end_state = thread::spawn(move || driver.run_to_end());
    source.send_message(&go(&incarnation));
    source.receive_until(
        |message| matches!(message, Message::Refused { reason, .. } if reason.contains("cannot be trusted")),
    );
    assert_eq!(end_state.join().unwrap(), DestinationState::Refused);
    assert!(!qemu.monitor().received.iter().any(|received| received == "cont"));
}

#[test]
fn a_guest_with_an_unexpected_page_is_stopped_once_and_reported() {
    let world = World::new();
    let (qemu, mut vm, incarnation) = arrived(&world);
    vm.artifacts.missing_pages = Some(unexpected_page(&world));
    let (mut driver, mut source) = driver(&world, DestinationState::Completing { incarnation }, Some(vm));
    // All pages have arrived; but the source is needed until the guest is stopped.
    driver.resources.stage = ArrivalStage::FoundComplete;
    qemu.monitor().ignores = Some("stop");
    let end_state = thread::spawn(move || driver.run_to_end());
    qemu.received("stop", 2);
    // The `stop` may wait for pages that only arrive if new connections are answered.
    source.send_message(&Message::Ping);
    source.receive_until(|message| *message == Message::Pong);
    let State::Destination(state) = world.state() else { panic!("no destination") };
    assert!(matches!(state, DestinationState::Completing { .. }), "{state:?}");
    qemu.monitor().ignores = None;
    let page = Some(proto::message::PageRequest { block: 0, page: 7 });
    source.receive_until(
        |message| matches!(message, Message::Incomplete { unexpected_page, .. } if *unexpected_page == page),
    );
    source.receive_until(
        |message| matches!(message, Message::Running { unexpected_page, .. } if *unexpected_page == page),
    );
    assert!(matches!(end_state.join().unwrap(), DestinationState::Active { .. }));
    let record = world.context.journal.migration(&id(1)).unwrap().unwrap();
    assert_eq!(record.details["missing_pages"]["unexpected_page"]["is_stopped"], true, "{}", record.details);
    assert!(record.message.as_deref().unwrap().contains("cannot be trusted"));
    let finding = crate::unexpected_page::finding(&world.context, &record, None).unwrap();
    assert_eq!(finding.code, "unexpected-page");
    let of_another = crate::unexpected_page::finding(&world.context, &record, Some(1));
    assert!(of_another.is_none(), "another QEMU has that name now");
}
