//! Tests of a source's driver against a peer that sends what the test specifies.

mod lost;
mod reconnecting;
mod rejected;
mod third;
mod undoing;
mod whole;

use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::registry::RegistryAnswer;
use engine::handover::source::SourceState;
use proto::message::{Acceptance, CopiedDisk, Message, Ownership, Verdict};
use proto::{Epoch, Generation, Incarnation};

use super::*;
use crate::source::payload::Payload;
use crate::source::{Goals, MigrationControls, SourceInbox, SourceMailbox};
use api::progress::Publisher;
use api::report::{Outcome, Report};
use api::{MigrationSettings, OnLimit};
use host::testing::{Peer, Qemu, SlowRegistry, World, host, id, terms};
use store::journal::State;

fn settings() -> MigrationSettings {
    MigrationSettings {
        streams: 1,
        max_downtime_ms: 30,
        on_limit: OnLimit::Stop,
        ..MigrationSettings::default()
    }
}

/// Returns a driver of the first migration, which the journal has in this state.
fn driver(
    world: &World,
    state: SourceState,
    qemu: Option<&Qemu>,
) -> (SourceDriver, SourceMailbox, Arc<MigrationControls>) {
    driver_of(world, terms("a", "b"), state, qemu)
}

fn driver_of(
    world: &World,
    terms: engine::handover::MigrationTerms,
    state: SourceState,
    qemu: Option<&Qemu>,
) -> (SourceDriver, SourceMailbox, Arc<MigrationControls>) {
    world.journalled(&terms, State::Source(state.clone()));
    new_driver(world, terms, state, qemu)
}

/// Returns a driver in this state, which the journal does not have yet.
fn new_driver(
    world: &World,
    terms: engine::handover::MigrationTerms,
    state: SourceState,
    qemu: Option<&Qemu>,
) -> (SourceDriver, SourceMailbox, Arc<MigrationControls>) {
    let report = Report::begin(terms.migration.clone(), host("a"), host("b"), settings());
    let goals = Goals::restored(settings(), &world.context.config);
    let controls = Arc::new(MigrationControls::new(goals, report, Instant::now()));
    let vm = qemu.map(|qemu| SourceVm::find(&world.context, &qemu.record()).unwrap());
    let inbox = SourceInbox::new();
    let mailbox = inbox.mailbox();
    let context = Arc::clone(&world.context);
    let driver = SourceDriver::new(context, terms, state, vm, inbox, Arc::clone(&controls), Publisher::new());
    (driver, mailbox, controls)
}

/// Returns the payload of a VM without disks to copy.
fn payload(driver: &mut SourceDriver) -> Payload {
    driver.open_participants(&host::testing::acceptance()).unwrap()
}

fn incarnation() -> Incarnation {
    Incarnation { boot_id: "b".to_owned(), pid: 7, start_time_ticks: 9, generation: Generation(1) }
}

/// Returns the message that the guest runs at the destination.
fn running() -> Message {
    Message::Running {
        epoch: Epoch(1),
        continue_us: 0,
        since_us: 0,
        resumed_us: None,
        agent_cpu_us: None,
        unexpected_page: None,
    }
}

fn committed() -> SourceState {
    SourceState::Committed { incarnation: incarnation(), run: true, has_run: false }
}

const STOPPED: SourceState = SourceState::Stopped { run: true };

#[test]
fn peer_error_is_reported_before_its_write_error() {
    let world = World::new();
    let (mut driver, ..) = driver(&world, SourceState::Prepared { run: true }, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    let mut peer = world.accept();
    // More than a message may name.
    peer.send_message(&Message::Verified { different_chunks: vec![7; 1 << 18] });
    let failure = loop {
        if let Err(failure) = driver.send_message(&Message::Ping) {
            break failure;
        }
    };
    assert!(failure.reason.contains("breaks the protocol's limits"), "{}", failure.reason);
    assert_eq!(failure.event, SourceEvent::PeerLost);
}

#[test]
fn an_older_connection_answers_no_question_of_the_present_one() {
    let world = World::new();
    let (mut driver, mailbox, _) = driver(&world, SourceState::Prepared { run: true }, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    let _old = world.accept();
    let old = driver.connections.control.as_ref().unwrap().connection_id;
    driver.connections.control = Some(driver.connect_control().unwrap());
    let mut peer = world.accept();
    mailbox.put(SourceNotice::Message { connection_id: Some(old), message: Message::Resumed });
    let answer = Message::Verified { different_chunks: vec![] };
    peer.send_message(&answer);
    assert_eq!(driver.receive_message(Instant::now() + host::testing::PATIENCE).unwrap(), answer);
}

#[test]
fn lost_control_stream_does_not_end_pre_copy() {
    let world = World::new();
    let (mut driver, ..) = driver(&world, SourceState::Prepared { run: true }, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    drop(world.accept());
    while driver.connections.control.is_some() {
        driver.handle_notices().unwrap();
        thread::yield_now();
    }
    // A stopped guest does not wait for a new control stream.
    let failure = driver.handle_last_notices().unwrap_err();
    assert_eq!(failure.event, SourceEvent::PeerLost);
    assert!(failure.reason.starts_with("the control stream was lost"), "{}", failure.reason);
    let reason = driver.send_message(&Message::Ping).unwrap_err().reason;
    assert_eq!(reason, failure.reason);
}

/// The guest runs: a cut is mended, however it is noticed.
#[test]
fn a_sign_of_life_that_cannot_be_answered_does_not_end_pre_copy() {
    let world = World::new();
    let (mut driver, mailbox, _) = driver(&world, SourceState::Prepared { run: true }, None);
    let control = driver.connect_control().unwrap();
    let (connection_id, handle) = (Some(control.connection_id), Arc::clone(&control.handle));
    driver.connections.control = Some(control);
    let _peer = world.accept();
    mailbox.put(SourceNotice::Message { connection_id, message: Message::Ping });
    handle.shutdown();
    while driver.connections.control.is_some() {
        driver.handle_notices().unwrap();
        thread::yield_now();
    }
}

/// Accepts the new connections after a cut: the control stream, and one for data.
fn mended(world: &World) -> [Peer; 2] {
    let mut control = world.accept();
    assert_eq!(control.receive_message(), Message::Resume);
    control.send_message(&Message::Resumed);
    [control, world.accept()]
}

/// This happens, for example, while the tracking of the guest's memory begins, which may last seconds.
#[test]
fn data_streams_follow_a_new_control_stream_after_a_loss() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, _, controls) = driver(&world, SourceState::Prepared { run: true }, Some(&qemu));
    driver.connections.control = Some(driver.connect_control().unwrap());
    drop(world.accept());
    while driver.connections.control.is_some() {
        driver.handle_notices().unwrap();
        thread::yield_now();
    }
    let opening = thread::spawn(move || {
        let payload = payload(&mut driver);
        let opened = driver.open_streams(&payload);
        opened.map(drop).map_err(|failure| failure.reason)
    });
    let _connections = mended(&world);
    opening.join().unwrap().unwrap();
    assert_eq!(controls.report(|report| report.reconnections), 1);
}

/// Their content only saves bytes; the cut is mended before anything is sent.
#[test]
fn link_cut_during_template_query_is_tolerated() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, _, controls) = driver(&world, SourceState::Prepared { run: true }, Some(&qemu));
    driver.connections.control = Some(driver.connect_control().unwrap());
    let mut control = world.accept();
    let disk = CopiedDisk {
        name: "disk0".to_owned(),
        path: "/pool/disk0".to_owned(),
        format: "raw".to_owned(),
        send_zeros: false,
    };
    let accepted =
        Acceptance { copied: vec![disk], references: true, templates: 1, ..host::testing::acceptance() };
    let opening = thread::spawn(move || {
        let payload = payload(&mut driver);
        driver.query_destination_content(&accepted, &payload).map_err(|failure| failure.reason)?;
        driver.open_streams(&payload).map(drop).map_err(|failure| failure.reason)
    });
    assert_eq!(control.receive_message(), Message::QueryTemplates { hashes: vec![] });
    drop(control);
    let _connections = mended(&world);
    opening.join().unwrap().unwrap();
    assert_eq!(controls.report(|report| report.reconnections), 1);
}

/// The guest is stopped in the meantime.
#[test]
fn a_comparison_ends_however_fast_the_destination_answers() {
    let world = World::new();
    let (mut driver, ..) = driver(&world, STOPPED, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    let Peer(mut peer) = world.accept();
    let answers = thread::spawn(move || {
        while peer.recv(None).is_ok() && peer.send(&Message::Verified { different_chunks: vec![] }).is_ok() {}
    });
    let piece = Message::Verify { block: 0, first_chunk: 0, hashes: vec![] };
    let compared_by = Instant::now() + Duration::from_millis(100);
    let failure = driver.compare(std::iter::repeat_n(piece, 1 << 20), compared_by).unwrap_err();
    assert_eq!(failure.event, SourceEvent::PeerSilent, "{}", failure.reason);
    drop(driver);
    answers.join().unwrap();
}

/// The error says nothing about the connection, on which no last notice follows.
#[test]
fn a_failed_write_stops_a_guest_no_longer_than_its_deadline() {
    let world = World::patient(None, "peer_silence_ms = 3600000");
    let (mut driver, ..) = driver(&world, STOPPED, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    let _peer = world.accept();
    driver.set_control_deadline(Some(Instant::now()));
    let (failed, failures) = mpsc::channel();
    thread::spawn(move || {
        let too_long = vec![0; proto::limits::BLOB_BYTES + 1];
        let sent = driver.send("cannot send the device state", |writer| writer.send_blob(&too_long));
        failed.send(sent.unwrap_err().reason).unwrap();
    });
    let reason =
        failures.recv_timeout(host::testing::PATIENCE).expect("it waits for the silence of the peer");
    assert!(reason.starts_with("cannot send the device state"), "{reason}");
}

#[test]
fn ping_is_no_answer() {
    let world = World::new();
    let (mut driver, mailbox, _) = driver(&world, STOPPED, None);
    driver.connections.control = Some(driver.connect_control().unwrap());
    let _peer = world.accept();
    let connection_id = driver.connections.control.as_ref().map(|control| control.connection_id);
    for _ in 0..1 << 10 {
        mailbox.put(SourceNotice::Message { connection_id, message: Message::Pong });
    }
    let failure = driver.receive_message(Instant::now()).unwrap_err();
    assert_eq!(failure.event, SourceEvent::PeerSilent, "{}", failure.reason);
    assert!(driver.inbox.waiting().is_some(), "all of it was looked at");
}

#[test]
fn protocol_error_before_committed_ends_migration() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, ..) = driver(&world, STOPPED, Some(&qemu));
    driver.connections.control = Some(driver.connect_control().unwrap());
    let connection_id = driver.connections.control.as_ref().unwrap().connection_id;
    let mut peer = world.accept();
    // Nothing was ever committed.
    driver.message(Some(connection_id), running());
    peer.receive_until_closed();
    assert_eq!(driver.run_to_end(), SourceState::Aborted);
    assert_eq!(world.state(), State::Source(SourceState::Aborted));
    assert!(qemu.monitor().running, "the guest goes on");
}

#[test]
fn protocol_error_after_committed_ends_only_the_connection() {
    let world = World::new();
    let (driver, ..) = driver(&world, committed(), None);
    let end_state = thread::spawn(move || driver.run_on(QemuAtStart::Gone));
    let is_go = |message: &Message| matches!(message, Message::Go { .. });
    let mut peer = world.accept();
    peer.receive_until(is_go);
    peer.send_message(&Message::Resumed);
    peer.receive_until_closed();
    let mut peer = world.accept();
    peer.receive_until(is_go);
    assert_eq!(world.state(), State::Source(committed()));
    peer.send_message(&running());
    assert!(matches!(end_state.join().unwrap(), SourceState::Done { .. }));
}

#[test]
fn go_waits_for_the_check_that_qemu_is_frozen() {
    let world = World::new();
    let (mut driver, _, controls) = driver(&world, STOPPED, None);
    // There is no QEMU to freeze: the effect fails after COMMITTED was journalled.
    driver.take(&SourceEvent::Ready { epoch: Epoch(1), incarnation: incarnation() });
    assert_eq!(world.state(), State::Source(committed()));
    let end_state = thread::spawn(move || driver.run_to_end());
    let mut peer = world.accept();
    peer.receive_until(|message| matches!(message, Message::Go { .. }));
    let looked = controls.report(|report| {
        report.events.iter().any(|event| event.detail.contains("this host's stopped copy is lost"))
    });
    assert!(looked, "GO went out before anybody looked");
    peer.send_message(&running());
    end_state.join().unwrap();
}

/// The destination's work after `cont` is no part of the downtime.
#[test]
fn the_guest_stood_still_until_cont_returned() {
    let world = World::new();
    let (mut driver, _, controls) = driver(&world, committed(), None);
    let stopped_at = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
    driver.reporter.stop_clock.stopped_at = Some(stopped_at);
    driver.running(100_000, 400_000, None);
    let downtime = controls.report(|report| report.downtime.unwrap());
    let most_us = stopped_at.elapsed().as_micros() as u64 - 400_000;
    assert!((600_000..=most_us).contains(&downtime.total_us), "{} of {most_us}", downtime.total_us);
    assert_eq!(downtime.continue_us, 100_000);
}

#[test]
fn guest_continued_elsewhere_is_not_handed_over() {
    check_continued_elsewhere(true);
}

#[test]
fn paused_guest_continued_elsewhere_is_not_handed_over() {
    check_continued_elsewhere(false);
}

fn check_continued_elsewhere(run: bool) {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, ..) = driver(&world, SourceState::Stopped { run }, Some(&qemu));
    driver.resources.vm.as_mut().unwrap().monitor().unwrap();
    qemu.emit_resume();
    let failure = driver.freeze().unwrap_err();
    assert!(failure.reason.contains("another program resumed the guest"), "{}", failure.reason);
    assert!(qemu.is_frozen(), "looked at only when nothing can happen any more");
    driver.take(&failure.event);
    let end_state = thread::spawn(move || driver.run_to_end());
    world.reaches("aborted");
    assert_eq!(end_state.join().unwrap(), SourceState::Aborted);
    assert!(!qemu.is_frozen(), "it is let go");
    assert_eq!(qemu.monitor().running, run);
}

#[test]
fn guest_not_continued_is_frozen() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let (mut driver, ..) = driver(&world, STOPPED, Some(&qemu));
    driver.resources.vm.as_mut().unwrap().monitor().unwrap();
    driver.freeze().unwrap();
    assert!(qemu.is_frozen());
}

#[test]
fn a_registry_that_does_not_answer_gathers_no_questions() {
    let (asked, questions) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let world = World::with(Some(Arc::new(SlowRegistry { asked, answers: Mutex::new(answers) })));
    let state = SourceState::Reclaiming { incarnation: Some(incarnation()), run: true, force: false };
    let terms = engine::handover::MigrationTerms { registry: Some(Epoch(0)), ..terms("a", "b") };
    let (driver, mailbox, _) = driver_of(&world, terms, state, None);
    for _ in 0..5 {
        mailbox.put(SourceNotice::Event(SourceEvent::Repeat));
    }
    let (reply, replied) = mpsc::sync_channel(1);
    mailbox.put(SourceNotice::Asked { epoch: Epoch(1), reply });
    let end_state = thread::spawn(move || driver.run_to_end());
    // The answer follows all the repetitions, by its place in the queue.
    let verdict = Message::Verdict { epoch: Epoch(1), verdict: Verdict::Undecided };
    assert_eq!(replied.recv_timeout(host::testing::PATIENCE).unwrap(), verdict);
    questions.recv_timeout(host::testing::PATIENCE).unwrap();
    assert_eq!(questions.try_recv(), Err(mpsc::TryRecvError::Empty), "one at a time");
    answer.send(RegistryAnswer::Unreachable).unwrap();
    questions.recv_timeout(host::testing::PATIENCE).expect("the one that has waited is asked now");
    let ours = Ownership { epoch: id(1).epoch, owner: host("a"), offer: None, released: false };
    answer.send(RegistryAnswer::Record(Some(ours))).unwrap();
    assert_eq!(end_state.join().unwrap(), SourceState::Returned);
}

#[test]
fn one_offer_is_on_its_way_at_a_time() {
    let (asked, questions) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let world = World::with(Some(Arc::new(SlowRegistry { asked, answers: Mutex::new(answers) })));
    let terms = engine::handover::MigrationTerms { registry: Some(Epoch(0)), ..terms("a", "b") };
    let (mut driver, ..) = driver_of(&world, terms, committed(), None);
    for _ in 0..5 {
        driver.take(&SourceEvent::Repeat);
    }
    questions.recv_timeout(host::testing::PATIENCE).unwrap();
    assert_eq!(questions.try_recv(), Err(mpsc::TryRecvError::Empty), "one at a time");
    answer.send(RegistryAnswer::Unreachable).unwrap();
    let ended = driver.inbox.wait(Instant::now() + host::testing::PATIENCE).unwrap();
    driver.notice(ended);
    driver.take(&SourceEvent::Repeat);
    questions.recv_timeout(host::testing::PATIENCE).expect("it is offered again");
    answer.send(RegistryAnswer::Unreachable).unwrap();
}

#[test]
fn late_journal_entry_does_not_replace_a_newer_one() {
    let world = World::new();
    let (mut driver, ..) = driver(&world, SourceState::Aborting, None);
    // The journal did not record the state when it was entered.
    assert!(driver.session.entry_failed(&SourceState::Aborting));
    driver.take(&SourceEvent::Continued);
    assert_eq!(driver.run_to_end(), SourceState::Aborted);
    assert_eq!(world.state(), State::Source(SourceState::Aborted));
}

#[test]
fn source_keeps_the_vm_until_its_departure_is_journalled() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let journal = &world.context.journal;
    journal.put_vm(&qemu.record()).unwrap();
    let (driver, mailbox, _) = driver(&world, committed(), None);
    let database = rusqlite::Connection::open(journal.path()).unwrap();
    let refuse = "CREATE TRIGGER refuse BEFORE DELETE ON vms BEGIN SELECT RAISE(FAIL, 'not now'); END";
    database.execute_batch(refuse).unwrap();
    let end_state = thread::spawn(move || driver.run_to_end());
    mailbox.put(SourceNotice::Message {
        connection_id: None,
        message: Message::Running {
            epoch: Epoch(1),
            continue_us: 0,
            since_us: 0,
            resumed_us: None,
            agent_cpu_us: None,
            unexpected_page: None,
        },
    });
    world.reaches("done");
    database.execute_batch("DROP TRIGGER refuse").unwrap();
    assert!(matches!(end_state.join().unwrap(), SourceState::Done { .. }));
    assert!(journal.vm(&host::testing::vm()).unwrap().is_none(), "it has left");
    assert!(!journal.migration(&id(1)).unwrap().unwrap().open);
}
