//! Tests of the daemon without listeners of its own: admission of peers, answers, recovery.

use host::{ArrivalArtifacts, DestinationDetails};
use std::net::SocketAddr;
use std::time::Instant;

use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use proto::message::{Message, RepointStep, Verdict};
use proto::{Epoch, Generation, Incarnation, Purpose};

use super::*;
use api::report::Report;
use api::{Control as _, ProblemKind};
use host::testing::{
    Peer as Other, Qemu, World, endpoint, eventually, host, id, proposal, terms, wait_until_blocked,
};
use migrate::source::{Goals, MigrationControls};
use store::journal::{Durability, State};

fn daemon(world: &World) -> Arc<Daemon> {
    Arc::new(Daemon::new(Arc::clone(&world.context), None))
}

/// Serves peers.
fn serve(daemon: &Arc<Daemon>) -> (ListenerHandle, SocketAddr) {
    let listener = Listener::bind(endpoint("a"), "127.0.0.1:0").unwrap();
    let address = listener.address();
    let daemon = Arc::clone(daemon);
    (listener.serve(move |arrival| daemon.arrival(arrival)).unwrap(), address)
}

fn questions() -> Purpose {
    Purpose::Handover { migration: id(1) }
}

fn incarnation() -> Incarnation {
    Incarnation { boot_id: "b".to_owned(), pid: 7, start_time_ticks: 9, generation: Generation(1) }
}

fn controls(daemon: &Daemon) -> Arc<MigrationControls> {
    let request = serde_json::from_value(serde_json::json!({ "vm": "web", "to": "b" })).unwrap();
    let goals = Goals::new(&request, &daemon.context.config);
    let report = Report::begin(id(1), host("a"), host("b"), goals.settings.clone());
    Arc::new(MigrationControls::new(goals, report, Instant::now()))
}

fn driven() -> DriverHandle {
    let mailbox = DriverMailbox::Source(source::SourceInbox::new().mailbox());
    DriverHandle { mailbox, publisher: Publisher::new(), controls: None }
}

#[test]
fn only_a_migrations_two_hosts_have_a_say_in_it() {
    let world = World::new();
    let daemon = daemon(&world);
    let (_serving, address) = serve(&daemon);
    world.journalled(&terms("b", "a"), State::Destination(DestinationState::CopyDestroyed));
    let control = || Purpose::Control { migration: id(1), generation: Generation(1) };
    for purpose in [questions(), control()] {
        let refused = Other::connect("c", address, purpose).map(drop).unwrap_err();
        let reason = crate::chain(&refused);
        assert!(reason.contains("c has no role in migration web#1"), "{reason}");
    }
    let mut source = Other::connect("b", address, questions()).unwrap();
    source.send_message(&Message::Inquire { epoch: Epoch(1) });
    assert!(matches!(source.receive_message(), Message::Refused { epoch: Epoch(1), .. }));
}

/// A host that the VM has left before asks whether it has moved on; it cannot change anything.
#[test]
fn a_host_left_before_asks_about_redirections_and_no_more() {
    let world = World::new();
    let daemon = daemon(&world);
    let (_serving, address) = serve(&daemon);
    world.journalled(&terms("b", "a"), State::Destination(DestinationState::Prepared));
    let about = || Purpose::Redirection { migration: id(1) };
    let mut before = Other::connect("c", address, about()).unwrap();
    before.send_message(&Message::AskRedirection);
    let answer = Message::RedirectionStands { stands: false, confirmed: false };
    assert_eq!(before.receive_message(), answer);
    before.send_message(&Message::Repoint { step: RepointStep::Remove, redirection: None });
    let refused = before.receive_message();
    assert!(matches!(&refused, Message::Repointed { error: Some(_) }), "{refused:?}");
    before.send_message(&Message::Ping);
    assert_eq!(before.receive_until_closed(), []);
}

#[test]
fn the_link_is_measured_unless_a_migration_uses_it() {
    let world = World::new();
    let daemon = daemon(&world);
    let (_serving, address) = serve(&daemon);
    let mut peer = Other::connect("c", address, Purpose::Measurement).unwrap();
    peer.send_message(&Message::MeasureLink { bytes: 2 });
    peer.0.send_blob(&[7; 2]).unwrap();
    assert!(matches!(peer.receive_message(), Message::LinkMeasured { bytes: 0, .. }));
    let _driver_slot = daemon.driver_slot(&id(1), driven()).unwrap();
    let refused = Other::connect("c", address, Purpose::Measurement).map(drop).unwrap_err();
    assert!(crate::chain(&refused).contains("a migration uses the link"), "{}", crate::chain(&refused));
}

/// A migration ends the measurement of its VM, also where it fails later.
#[test]
fn a_migration_that_begins_ends_the_measurement_of_its_vm() {
    let world = World::new();
    let daemon = daemon(&world);
    let qemu = Qemu::start(world.folder.path());
    world.context.journal.put_vm(&qemu.record()).unwrap();
    let request = serde_json::from_value(serde_json::json!({ "vm": "web", "to": "b" })).unwrap();
    let running = daemon.measurements.begin(&host::testing::vm()).unwrap();
    let beginning = std::thread::spawn({
        let daemon = Arc::clone(&daemon);
        move || daemon.begin(&request).map(drop)
    });
    eventually("the measurement is to end", || running.is_interrupted());
    assert!(!beginning.is_finished(), "the migration waits for that");
    drop(running);
    // Its QEMU is none.
    beginning.join().unwrap().unwrap_err();
}

#[test]
fn a_vm_in_a_migration_is_neither_measured_nor_forecast() {
    let world = World::new();
    let daemon = daemon(&world);
    let qemu = Qemu::start(world.folder.path());
    world.context.journal.put_vm(&qemu.record()).unwrap();
    world.journalled(&terms("a", "b"), State::Source(SourceState::Prepared { run: true }));
    let migration = serde_json::from_value(serde_json::json!({ "vm": "web", "to": "b" })).unwrap();
    let request = api::ForecastRequest { migration, fresh: true };
    let problem = control::UserApi(Arc::clone(&daemon)).forecast(request).map(drop).unwrap_err();
    assert_eq!(problem.kind, ProblemKind::Conflict);
    assert!(problem.error.contains("already in a migration, web#1"), "{problem:?}");
}

#[test]
fn a_destination_cannot_return_a_vm_in_the_same_migration() {
    let world = World::new();
    let daemon = daemon(&world);
    let (_serving, address) = serve(&daemon);
    world.journalled(&terms("a", "b"), State::Source(SourceState::Aborted));
    let control = Purpose::Control { migration: id(1), generation: Generation(1) };
    assert!(Other::connect("b", address, control).is_err());
    let mut destination = Other::connect("b", address, questions()).unwrap();
    destination.send_message(&Message::Ask { epoch: Epoch(1) });
    let verdict = Message::Verdict { epoch: Epoch(1), verdict: Verdict::Aborted };
    assert_eq!(destination.receive_message(), verdict);
}

#[test]
fn nothing_is_decided_about_an_unknown_migration() {
    let world = World::new();
    let daemon = daemon(&world);
    let (_serving, address) = serve(&daemon);
    let mut peer = Other::connect("b", address, questions()).unwrap();
    peer.send_message(&Message::Inquire { epoch: Epoch(1) });
    peer.send_message(&Message::Go { epoch: Epoch(1), incarnation: incarnation(), run: true });
    peer.send_message(&Message::Ping);
    assert_eq!(peer.receive_message(), Message::Pong, "neither REFUSED nor anything else");
    peer.send_message(&Message::Ask { epoch: Epoch(1) });
    let verdict = Message::Verdict { epoch: Epoch(1), verdict: Verdict::Undecided };
    assert_eq!(peer.receive_message(), verdict);
}

#[test]
fn a_message_other_than_a_query_closes_a_query_connection() {
    let world = World::new();
    let daemon = daemon(&world);
    let (_serving, address) = serve(&daemon);
    let mut peer = Other::connect("b", address, questions()).unwrap();
    peer.send_message(&Message::Resumed);
    assert_eq!(peer.receive_until_closed(), []);
}

#[test]
fn a_driver_is_not_put_out_of_reach_by_another() {
    let world = World::new();
    let daemon = daemon(&world);
    let driver_slot = daemon.driver_slot(&id(1), driven()).unwrap();
    let problem = daemon.driver_slot(&id(1), driven()).map(drop).unwrap_err();
    assert_eq!(problem.kind, ProblemKind::Conflict);
    assert!(daemon.mailbox(&id(1)).is_some(), "the first one is still there");
    drop(driver_slot);
    assert!(daemon.mailbox(&id(1)).is_none());
    let driver_slot = daemon.driver_slot(&id(1), driven()).unwrap();
    driver_slot.work(|| {});
    eventually("a place is given back when the work is done", || daemon.mailbox(&id(1)).is_none());
}

/// The user learns of RUNNING before the destination has made its last journal entries.
#[test]
fn a_vm_that_has_just_come_can_be_moved_on() {
    let world = World::new();
    let daemon = daemon(&world);
    let state = DestinationState::Refused;
    world.journalled(&terms("b", "a"), State::Destination(state));
    let driver_slot = daemon.driver_slot(&id(1), driven()).unwrap();
    let (begun, begins) = std::sync::mpsc::channel();
    let moved_on = std::thread::spawn({
        let daemon = Arc::clone(&daemon);
        move || {
            begun.send(rustix::thread::gettid()).unwrap();
            daemon.wait_for_last_migration(&host::testing::vm()).unwrap();
            daemon.check_not_in_migration(&host::testing::vm())
        }
    });
    wait_until_blocked(begins.recv().unwrap());
    world.context.journal.close(&id(1)).unwrap();
    drop(driver_slot);
    moved_on.join().unwrap().unwrap();
}

#[test]
fn nothing_is_journalled_that_no_driver_could_end() {
    let world = World::new();
    let daemon = daemon(&world);
    let qemu = Qemu::start(world.folder.path());
    let vm = || host::SourceVm::find(&world.context, &qemu.record()).unwrap();
    let driver_slot = daemon.driver_slot(&id(1), driven()).unwrap();
    let start_source_driver =
        || daemon.start_source_driver(terms("a", "b"), vm(), proposal(), controls(&daemon));
    start_source_driver().unwrap_err();
    assert_eq!(world.context.journal.migration(&id(1)).unwrap(), None);
    drop(driver_slot);
    // With a driver it begins: the destination receives the proposal.
    start_source_driver().unwrap();
    assert!(matches!(world.accept().receive_message(), Message::Propose(_)));
    world.reaches("aborted");
}

/// Leaves a destination in READY with its QEMU, as a previous agent would.
fn left_ready(world: &World) -> (Qemu, DestinationState) {
    let mut artifacts = ArrivalArtifacts::plan(&world.context.config, &id(1));
    let qemu = Qemu::start(&artifacts.directory);
    artifacts.process = Some(qemu.process());
    let ready = DestinationState::Ready { incarnation: qemu.incarnation(), run: true };
    world.journalled(&terms("b", "a"), State::Destination(ready.clone()));
    let details = DestinationDetails { boot_id: "this boot".to_owned(), artifacts };
    world.context.journal.set_details(&id(1), &details, Durability::Synced).unwrap();
    (qemu, ready)
}

/// A QEMU that lives and does not answer is not treated as gone, and delays no other migration.
#[test]
fn one_silent_qemu_keeps_no_agent_from_its_work() {
    let world = World::new();
    let daemon = daemon(&world);
    let (qemu, ready) = left_ready(&world);
    let other = MigrationId { vm: proto::VmName::new("db").unwrap(), epoch: Epoch(4) };
    let other_terms = engine::handover::MigrationTerms { migration: other.clone(), ..terms("a", "b") };
    let state = State::Source(SourceState::Prepared { run: true });
    let new = store::journal::NewMigration { terms: &other_terms, state, proposal: &proposal() };
    world.context.journal.begin(&new).unwrap();
    qemu.monitor().mute = true;
    daemon.resume_migrations().unwrap();
    eventually("it is tried again", || qemu.monitor().connections >= 2);
    assert!(daemon.mailbox(&id(1)).is_some());
    assert_eq!(world.state(), State::Destination(ready.clone()));
    // The other migration proceeds, and peers are answered.
    let ended = || world.context.journal.migration(&other).unwrap().is_some_and(|record| !record.open);
    eventually("the other migration ends", ended);
    let (_serving, address) = serve(&daemon);
    let mut peer = Other::connect("b", address, Purpose::Handover { migration: other }).unwrap();
    peer.send_message(&Message::Ask { epoch: Epoch(4) });
    let verdict = Message::Verdict { epoch: Epoch(4), verdict: Verdict::Aborted };
    assert_eq!(peer.receive_until(|message| matches!(message, Message::Verdict { .. })), verdict);
    // This one proceeds, too, when its QEMU answers again.
    qemu.monitor().mute = false;
    let mut peer = Other::connect("b", address, questions()).unwrap();
    peer.send_message(&Message::Inquire { epoch: Epoch(1) });
    peer.receive_until(|message| matches!(message, Message::Ready { .. }));
    assert_eq!(world.state(), State::Destination(ready));
}

#[test]
fn a_vm_that_begins_to_move_is_not_forgotten() {
    let world = World::new();
    let daemon = daemon(&world);
    let qemu = Qemu::start(world.folder.path());
    world.context.journal.put_vm(&qemu.record()).unwrap();
    let exclusive = world.context.names.exclusive(&host::testing::vm());
    let (begun, begins) = std::sync::mpsc::channel();
    let forget = std::thread::spawn({
        let users = control::UserApi(Arc::clone(&daemon));
        move || {
            begun.send(rustix::thread::gettid()).unwrap();
            users.forget(&host::testing::vm())
        }
    });
    wait_until_blocked(begins.recv().unwrap());
    world.journalled(&terms("a", "b"), State::Source(SourceState::Prepared { run: true }));
    drop(exclusive);
    assert_eq!(forget.join().unwrap().unwrap_err().kind, ProblemKind::Conflict);
    assert!(world.context.journal.vm(&host::testing::vm()).unwrap().is_some());
}

/// While the start of one VM's migration hangs (at its QEMU, or at the registry), others start; a second one of the
/// same VM waits.
#[test]
fn a_vm_that_hangs_as_it_begins_to_move_holds_up_no_other() {
    let world = World::new();
    let daemon = daemon(&world);
    let start = |name: &str| Qemu::start(&world.folder.path().join(name));
    let (web, db) = (start("web"), start("db"));
    let other = proto::VmName::new("db").unwrap();
    let db_record = store::journal::VmRecord { vm: other.clone(), ..db.record() };
    for record in [&web.record(), &db_record] {
        world.context.journal.put_vm(record).unwrap();
    }
    let begin = |vm: proto::VmName| {
        let daemon = Arc::clone(&daemon);
        let request = serde_json::from_value(serde_json::json!({ "vm": vm, "to": "b" })).unwrap();
        std::thread::spawn(move || daemon.begin(&request))
    };
    let hangs = world.context.names.exclusive(&host::testing::vm());
    let again = begin(host::testing::vm());
    let at_once = begin(other);
    // A sleeping process is not a QEMU that can be moved, which the check reports.
    eventually("the other one begins", || at_once.is_finished());
    at_once.join().unwrap().unwrap_err();
    assert!(db.monitor().connections > 0);
    assert!(web.monitor().connections == 0 && !again.is_finished());
    drop(hangs);
    again.join().unwrap().unwrap_err();
    assert!(web.monitor().connections > 0);
}

/// The agent's record of the VM may be gone, or belong to another VM by now.
#[test]
fn a_migration_finds_its_own_qemu() {
    let world = World::new();
    let daemon = daemon(&world);
    let qemu = Qemu::start(world.folder.path());
    let committed = SourceState::Committed { incarnation: incarnation(), run: true, has_run: false };
    world.journalled(&terms("a", "b"), State::Source(committed));
    let vm = host::SourceVm::find(&world.context, &qemu.record()).unwrap();
    let details = source::SourceDetails::of(&world.context, Some(&vm), true);
    world.context.journal.set_details(&id(1), &details, Durability::Synced).unwrap();
    daemon.resume_migrations().unwrap();
    eventually("the QEMU of the migration is held", || qemu.is_frozen());
}

#[test]
fn a_process_of_another_boot_is_a_stranger() {
    let world = World::new();
    let qemu = Qemu::start(world.folder.path());
    let record = qemu.record();
    assert!(host::SourceVm::find(&world.context, &record).is_ok());
    let older = store::journal::VmRecord { boot_id: "last boot".to_owned(), ..record };
    let gone = host::SourceVm::find(&world.context, &older).map(drop).unwrap_err();
    assert!(matches!(gone, host::VmError::Process(tracee::ProcessError::Gone { .. })), "{gone:?}");
    assert_eq!(host::vms::summary(&world.context, &older, None).state, "gone");
}

#[test]
fn another_registry_than_a_migration_s_is_not_asked() {
    let (asked, questions) = std::sync::mpsc::channel();
    let (_answer, answers) = std::sync::mpsc::channel();
    let registry = host::testing::SlowRegistry { asked, answers: Mutex::new(answers) };
    let world = World::with(Some(Arc::new(registry)));
    let terms = engine::handover::MigrationTerms {
        registry: Some(Epoch(0)),
        witness: Some(host("elsewhere")),
        ..terms("b", "a")
    };
    let request = engine::handover::registry::read(&terms);
    let answer = host::ownership::ask(&world.context, &terms, &request);
    assert_eq!(answer, engine::handover::registry::RegistryAnswer::Unreachable);
    assert!(questions.try_recv().is_err(), "its word does not count");
    // Users see which one is missing.
    let daemon = daemon(&world);
    world.journalled(&terms, State::Destination(DestinationState::Refusing));
    daemon.resume_migrations().unwrap();
    let message = world.context.journal.migration(&id(1)).unwrap().unwrap().message.unwrap();
    assert!(message.contains("at elsewhere") && message.contains("recover web"), "{message}");
}

/// A panic is a defect of this program: the migration would have no driver any more. The process aborts, and the next
/// one resumes the migration.
#[test]
fn a_driver_that_panics_takes_the_agent_with_it() {
    const INSIDE: &str = "WHIMBREL_TEST_PANICS";
    if std::env::var_os(INSIDE).is_some() {
        let world = World::new();
        let daemon = daemon(&world);
        let driver_slot = daemon.driver_slot(&id(1), driven()).unwrap();
        driver_slot.work(|| panic!("as planned"));
        eventually("the place is given back", || daemon.mailbox(&id(1)).is_none());
        return;
    }
    let name = "daemon::tests::a_driver_that_panics_takes_the_agent_with_it";
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(INSIDE, "1")
        .output()
        .unwrap()
        .status;
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    assert_eq!(signal, Some(rustix::process::Signal::ABORT.as_raw()), "{status}");
}

#[test]
fn it_is_known_when_it_is_too_late_to_cancel() {
    let too_late = |state: State| {
        let terms = match &state {
            State::Source(_) => terms("a", "b"),
            State::Destination(_) => terms("b", "a"),
        };
        let world = World::new();
        world.journalled(&terms, state);
        control::is_too_late_to_cancel(&world.context.journal.migration(&id(1)).unwrap().unwrap())
    };
    let committed = SourceState::Committed { incarnation: incarnation(), run: true, has_run: false };
    assert!(too_late(State::Source(committed)));
    assert!(!too_late(State::Source(SourceState::Prepared { run: true })));
    assert!(!too_late(State::Source(SourceState::Stopped { run: true })));
    assert!(!too_late(State::Destination(DestinationState::Prepared)));
    let incarnation = incarnation();
    let starting = DestinationState::Starting { incarnation: incarnation.clone(), again: false };
    for state in [DestinationState::Ready { incarnation, run: true }, starting] {
        assert!(too_late(State::Destination(state)));
    }
}

#[test]
fn an_agent_that_cannot_read_what_is_open_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let text = "host = \"a\"\nlisten = \"127.0.0.1:0\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n[tls]\nplain = true\n";
    let config = Config::parse(&folder.path().join("agent.toml"), text).unwrap();
    let journal = Journal::open(&config.state_dir, redact_secrets).unwrap();
    let state = State::Source(SourceState::Prepared { run: true });
    let new = store::journal::NewMigration { terms: &terms("a", "b"), state, proposal: &proposal() };
    journal.begin(&new).unwrap();
    let path = journal.path().to_owned();
    drop(journal);
    let database = rusqlite::Connection::open(path).unwrap();
    database.execute("UPDATE migrations SET state = '{}'", []).unwrap();
    drop(database);
    let helper = || HelperProgram { program: "/nonexistent".into(), arguments: Vec::new() };
    let error = Agent::start(config, helper(), helper()).map(drop).unwrap_err();
    assert!(matches!(error, StartError::Journal(JournalError::Json { .. })), "{error:?}");
}
