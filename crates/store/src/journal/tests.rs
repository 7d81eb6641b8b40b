use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use engine::handover::MigrationTerms;
use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use proto::message::Proposal;
use proto::{Generation, HostId, Incarnation};
use serde_json::{Value, json};

use super::*;
use api::MigrationSettings;
use api::progress::Standing;
use api::report::{Outcome, Report};

/// Opens a journal whose descriptions have no secrets.
fn open_journal(state_dir: &Path) -> Result<Journal, JournalError> {
    Journal::open(state_dir, Value::clone)
}

fn name(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

fn id(vm: &str, epoch: u64) -> MigrationId {
    MigrationId { vm: name(vm), epoch: Epoch(epoch) }
}

fn terms(id: &MigrationId) -> MigrationTerms {
    MigrationTerms {
        migration: id.clone(),
        source: HostId::new("alpha").unwrap(),
        destination: HostId::new("beta").unwrap(),
        registry: None,
        witness: None,
    }
}

fn proposal() -> Proposal {
    // As JSON, so that fields with defaults can be added without touching this test.
    let description = json!({"large": "x".repeat(50_000)});
    let proposal = json!({"reply_to": "192.0.2.1:7740", "streams": 2, "ram": [], "facts": {}, "description": description, "check_only": false});
    serde_json::from_value(proposal).unwrap()
}

fn begin(journal: &Journal, id: &MigrationId, state: State) -> Result<(), JournalError> {
    journal.begin(&NewMigration { terms: &terms(id), state, proposal: &proposal() })
}

fn prepared() -> State {
    State::Source(SourceState::Prepared { run: true })
}

fn incarnation() -> Incarnation {
    Incarnation { boot_id: "b".into(), pid: 7, start_time_ticks: 9, generation: Generation(2) }
}

#[test]
fn what_was_recorded_is_there_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let id = id("web", 1);
    let committed = SourceState::Committed { incarnation: incarnation(), run: true, has_run: false };
    {
        let journal = open_journal(folder.path()).unwrap();
        assert_eq!(journal.next_epoch(&id.vm).unwrap(), Epoch(1));
        begin(&journal, &id, prepared()).unwrap();
        journal.record_source(&id, &committed, Durability::Process).unwrap();
        journal.set_details(&id, &json!({"fd": 3}), Durability::Process).unwrap();
        journal.set_message(&id, "waits").unwrap();
    }
    let journal = open_journal(folder.path()).unwrap();
    let record = journal.migration(&id).unwrap().unwrap();
    assert_eq!(record.state, State::Source(committed));
    assert_eq!((record.role(), record.peer().as_str()), (engine::handover::Role::Source, "beta"));
    assert_eq!((record.details, record.message), (json!({"fd": 3}), Some("waits".into())));
    assert!(record.open);
    assert_eq!(record.state.standing(), Standing::InDoubt);
    assert_eq!(journal.open_migrations().unwrap().len(), 1);
    assert_eq!(journal.proposal(&id).unwrap().unwrap(), proposal());
}

#[test]
fn a_vm_has_one_open_migration_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open_journal(folder.path()).unwrap();
    begin(&journal, &id("web", 1), prepared()).unwrap();
    let error = begin(&journal, &id("web", 2), prepared()).unwrap_err();
    assert!(matches!(&error, JournalError::AlreadyOpen { open } if *open == id("web", 1)), "{error}");
    assert!(error.to_string().contains("whimbrel cancel web"), "{error}");
    begin(&journal, &id("db", 1), prepared()).unwrap();
    journal.close(&id("web", 1)).unwrap();
    begin(&journal, &id("web", 2), prepared()).unwrap();
    assert_eq!(journal.latest(&name("web")).unwrap().unwrap().id().epoch, Epoch(2));
    assert_eq!(journal.migrations().unwrap().len(), 3);
    let expected = ("source".to_owned(), "prepared".to_owned(), 3);
    assert_eq!(journal.migration_counts().unwrap(), [expected]);
}

#[test]
fn migrations_keep_their_order_when_the_clock_is_set_back() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open_journal(folder.path()).unwrap();
    begin(&journal, &id("web", 1), prepared()).unwrap();
    let database = Connection::open(folder.path().join(FILE_NAME)).unwrap();
    database.execute("UPDATE migrations SET created_unix_ms = created_unix_ms + 3600000", []).unwrap();
    begin(&journal, &id("db", 1), prepared()).unwrap();
    let ids =
        |records: Vec<MigrationRecord>| records.iter().map(|one| one.id().to_string()).collect::<Vec<_>>();
    assert_eq!(ids(journal.migrations().unwrap()), ["db#1", "web#1"]);
    assert_eq!(ids(journal.open_migrations().unwrap()), ["web#1", "db#1"]);
}

#[test]
fn epochs_only_grow_wherever_they_were_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let vm = name("web");
    {
        let journal = open_journal(folder.path()).unwrap();
        assert_eq!(journal.next_epoch(&vm).unwrap(), Epoch(1));
        journal.learn_epoch(&vm, Epoch(9)).unwrap();
        journal.learn_epoch(&vm, Epoch(4)).unwrap();
    }
    let journal = open_journal(folder.path()).unwrap();
    assert_eq!(journal.next_epoch(&vm).unwrap(), Epoch(10));
    assert_eq!(
        journal.next_epoch(&vm).unwrap(),
        Epoch(11),
        "never given twice, though nothing was begun with it"
    );

    let arriving = State::Destination(DestinationState::Prepared);
    for old in [3, 11] {
        let error = begin(&journal, &id("web", old), arriving.clone()).unwrap_err();
        assert!(matches!(&error, JournalError::OldEpoch { largest: Epoch(11), .. }), "{error}");
    }
    begin(&journal, &id("web", 12), arriving).unwrap();
    assert_eq!(journal.next_epoch(&vm).unwrap(), Epoch(13), "a peer's epoch counts");
}

#[test]
fn transitions_of_unknown_or_foreign_migrations_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open_journal(folder.path()).unwrap();
    begin(&journal, &id("web", 1), prepared()).unwrap();
    let aborted = SourceState::Aborted;
    let unknown = journal.record_source(&id("web", 2), &aborted, Durability::Synced).unwrap_err();
    assert!(matches!(unknown, JournalError::NoMigration(_)), "{unknown}");
    let other =
        journal.record_destination(&id("web", 1), &DestinationState::CopyDestroyed, Durability::Synced);
    assert!(matches!(other.unwrap_err(), JournalError::NoMigration(_)));
    assert_eq!(journal.migration(&id("web", 1)).unwrap().unwrap().state, prepared());
}

#[test]
fn the_log_does_not_grow_from_migration_to_migration() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open_journal(folder.path()).unwrap();
    let log_bytes = || std::fs::metadata(folder.path().join("journal.sqlite-wal")).unwrap().len();
    let migrate = |epoch| {
        let id = id("web", epoch);
        begin(&journal, &id, prepared()).unwrap();
        for _ in 0..50 {
            journal.record_source(&id, &SourceState::Stopped { run: true }, Durability::Process).unwrap();
        }
        journal.close(&id).unwrap();
        log_bytes()
    };
    let first = migrate(1);
    for epoch in 2..10 {
        let now = migrate(epoch);
        assert!(now < 2 * first, "{now} bytes after {epoch} migrations, {first} after one");
    }
}

#[test]
fn vms_and_reports_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open_journal(folder.path()).unwrap();
    let record =
        VmRecord::new(name("web"), json!({"cpus": 2}), (77, u64::MAX), "boot", PathBuf::from("/run/q.sock"));
    journal.put_vm(&record).unwrap();
    assert_eq!(journal.vm(&name("web")).unwrap(), Some(record.clone()));
    assert_eq!(journal.vms().unwrap(), vec![record]);
    assert!(journal.remove_vm(&name("web")).unwrap());
    assert!(!journal.remove_vm(&name("web")).unwrap());

    let settings = MigrationSettings { streams: 1, ..MigrationSettings::default() };
    let terms = terms(&id("web", 3));
    let mut report = Report::begin(terms.migration.clone(), terms.source, terms.destination, settings);
    journal.put_report(&report).unwrap();
    report.end(Outcome::Moved, None, 5);
    journal.put_report(&report).unwrap();
    assert_eq!(journal.report(&terms.migration).unwrap(), Some(report));
}

#[test]
fn descriptions_are_stored_without_secrets() {
    let folder = tempfile::tempdir().unwrap();
    let redact = |description: &Value| json!({"cpus": description["cpus"]});
    let journal = Journal::open(folder.path(), redact).unwrap();
    let description = json!({"cpus": 2, "password": "c2VjcmV0"});
    let vm = |which| VmRecord::new(name(which), description.clone(), (77, 1), "boot", PathBuf::from("/q"));
    journal.put_vm(&vm("web")).unwrap();
    journal.put_arrived_vm(&vm("db")).unwrap();
    let proposal = Proposal { description: description.clone(), ..proposal() };
    let id = id("web", 1);
    journal.begin(&NewMigration { terms: &terms(&id), state: prepared(), proposal: &proposal }).unwrap();
    let stored = json!({"cpus": 2});
    assert!(journal.vms().unwrap().iter().all(|vm| vm.description == stored));
    assert_eq!(journal.proposal(&id).unwrap().unwrap(), Proposal { description: stored, ..proposal });
    drop(journal);
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(8).any(|part| part == b"c2VjcmV0"));
    }
}

#[test]
fn a_second_agent_is_told_who_the_first_is() {
    let folder = tempfile::tempdir().unwrap();
    let first = open_journal(folder.path()).unwrap();
    let error = open_journal(folder.path()).unwrap_err();
    assert!(matches!(error, JournalError::Locked { .. }), "{error}");
    assert!(error.to_string().contains(&format!("(pid {})", std::process::id())), "{error}");
    drop(first);
    open_journal(folder.path()).unwrap();
}

/// Otherwise SQLite would go on in files that cannot be found again.
#[test]
fn nothing_is_begun_in_a_journal_that_was_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (state_dir, aside) = (folder.path().join("state"), folder.path().join("aside"));
    let journal = open_journal(&state_dir).unwrap();
    let (first, second) = (id("web", 1), id("db", 1));
    begin(&journal, &first, prepared()).unwrap();
    // The directory is moved away, replaced, and deleted.
    std::fs::rename(&state_dir, &aside).unwrap();
    let gone = |journal: &Journal| begin(journal, &second, prepared()).unwrap_err();
    assert!(matches!(gone(&journal), JournalError::Gone { .. }));
    drop(open_journal(&state_dir).unwrap());
    assert!(matches!(gone(&journal), JournalError::Gone { .. }));
    std::fs::remove_dir_all(&state_dir).unwrap();
    let text = gone(&journal).to_string();
    assert!(text.contains("deleted or replaced") && text.contains("move the directory back"), "{text}");
    let vm = |which| VmRecord::new(name(which), json!({}), (77, 1), "boot", PathBuf::from("/run/q.sock"));
    assert!(matches!(journal.put_vm(&vm("mail")).unwrap_err(), JournalError::Gone { .. }));
    // A migration under way can end; an arrived VM is recorded, too.
    journal.put_arrived_vm(&vm("web")).unwrap();
    assert!(journal.vm(&name("web")).unwrap().is_some());
    journal.record_source(&first, &SourceState::Aborted, Durability::Synced).unwrap();
    assert_eq!(journal.migration(&first).unwrap().unwrap().state, State::Source(SourceState::Aborted));
    // Nothing is lost when it is put back.
    std::fs::rename(&aside, &state_dir).unwrap();
    begin(&journal, &second, prepared()).unwrap();
    drop(journal);
    let journal = open_journal(&state_dir).unwrap();
    assert_eq!(journal.migration(&first).unwrap().unwrap().state, State::Source(SourceState::Aborted));
    assert!(journal.migration(&second).unwrap().is_some());
}

#[test]
fn a_newer_format_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    drop(open_journal(folder.path()).unwrap());
    let path = folder.path().join(FILE_NAME);
    let newer = |version: i64| Connection::open(&path).unwrap().pragma_update(None, "user_version", version);
    newer(99).unwrap();
    let before = std::fs::read(&path).unwrap();
    let error = open_journal(folder.path()).unwrap_err();
    assert!(matches!(error, JournalError::Newer { found: 99, .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn damage_is_called_damage() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join(FILE_NAME),
        "this is no database, it is a letter to the editor".repeat(100),
    )
    .unwrap();
    let error = open_journal(folder.path()).unwrap_err();
    assert!(matches!(error, JournalError::Damaged { .. }), "{error}");

    // A database with garbage in a page in the middle.
    let folder = tempfile::tempdir().unwrap();
    let journal = open_journal(folder.path()).unwrap();
    for n in 1..40 {
        begin(&journal, &id(&format!("vm{n}"), 1), prepared()).unwrap();
    }
    journal.tidy().unwrap();
    drop(journal);
    let path = folder.path().join(FILE_NAME);
    let mut bytes = std::fs::read(&path).unwrap();
    assert!(bytes.len() > 5 * 4096);
    bytes[4096..5 * 4096].fill(0x5a);
    std::fs::write(&path, bytes).unwrap();
    let error = open_journal(folder.path()).unwrap_err();
    assert!(matches!(error, JournalError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("backup"), "{error}");
}

#[test]
fn a_full_disk_is_said_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open_journal(folder.path()).unwrap();
    begin(&journal, &id("web", 1), prepared()).unwrap();
    // SQLite itself reports that there is no space when a database may not grow.
    let pages: i64 =
        journal.read("count", |c| Ok(c.query_row("PRAGMA page_count", [], |row| row.get(0))?)).unwrap();
    journal.guard().connection.pragma_update(None, "max_page_count", pages).unwrap();
    let error = begin(&journal, &id("db", 1), prepared()).unwrap_err();
    assert!(matches!(error, JournalError::Full { .. }), "{error}");
    journal.guard().connection.pragma_update(None, "max_page_count", 1_000_000).unwrap();
    assert_eq!(journal.migrations().unwrap().len(), 1);
    begin(&journal, &id("db", 1), prepared()).unwrap();
}

#[test]
fn an_unusable_directory_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = open_journal(&file.join("state")).unwrap_err();
    assert!(matches!(error, JournalError::Directory { .. }), "{error}");
    assert!(error.to_string().contains("state_dir"), "{error}");
}

/// Not a test of its own: [`writes_survive_a_killed_agent`] runs it as another process and kills that.
#[test]
fn victim_that_writes_until_it_is_killed() {
    let Ok(directory) = std::env::var("WHIMBREL_TEST_JOURNAL") else { return };
    let journal = open_journal(Path::new(&directory)).unwrap();
    let id = id("web", 1);
    if journal.migration(&id).unwrap().is_none() {
        begin(&journal, &id, prepared()).unwrap();
    }
    for n in 0.. {
        let state = SourceState::Committed {
            incarnation: Incarnation { pid: n, ..incarnation() },
            run: true,
            has_run: false,
        };
        journal.record_source(&id, &state, Durability::Process).unwrap();
        println!("recorded {n}");
    }
}

#[test]
fn writes_survive_a_killed_agent() {
    let folder = tempfile::tempdir().unwrap();
    for recorded in [1, 40, 300] {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "journal::tests::victim_that_writes_until_it_is_killed", "--nocapture"])
            .env("WHIMBREL_TEST_JOURNAL", folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
        let number = |line: &str| line.strip_prefix("recorded ").and_then(|n| n.parse::<u32>().ok());
        let mut last =
            lines.by_ref().find_map(|line| number(&line.unwrap()).filter(|n| *n >= recorded)).unwrap();
        victim.kill().unwrap();
        victim.wait().unwrap();
        last = lines.map_while(Result::ok).filter_map(|line| number(&line)).last().unwrap_or(last);

        let journal = open_journal(folder.path()).unwrap();
        let State::Source(SourceState::Committed { incarnation, .. }) =
            journal.migration(&id("web", 1)).unwrap().unwrap().state
        else {
            panic!("the state is lost")
        };
        // It may have recorded one more than it could print.
        assert!(incarnation.pid == last || incarnation.pid == last + 1, "{} after {last}", incarnation.pid);
    }
}

/// Prints the cost of writes; asserts nothing about time. `cargo test -p whimbrel-agent --release cost -- --ignored
/// --nocapture`
#[test]
#[ignore = "measures"]
fn cost_of_writes() {
    let folder =
        tempfile::tempdir_in(std::env::var("WHIMBREL_TEST_DIR").unwrap_or_else(|_| "/var/tmp".into()))
            .unwrap();
    let journal = open_journal(folder.path()).unwrap();
    let id = id("web", 1);
    begin(&journal, &id, prepared()).unwrap();
    for durability in [Durability::Process, Durability::Synced] {
        let mut times: Vec<_> = (0..500)
            .map(|pid| {
                let state = SourceState::Committed {
                    incarnation: Incarnation { pid, ..incarnation() },
                    run: true,
                    has_run: false,
                };
                let before = Instant::now();
                journal.record_source(&id, &state, durability).unwrap();
                before.elapsed().as_micros()
            })
            .collect();
        times.sort_unstable();
        println!("{durability:?}: median {} µs, 99 % {} µs, worst {} µs", times[250], times[495], times[499]);
    }
}

#[test]
fn forecasts_and_measurements_are_there_after_a_restart() {
    use engine::forecast::Calibration;
    use engine::forecast::calibration::CalibrationRecord;
    use engine::forecast::history::PathSample;

    let forecast = json!({
        "end": { "end": "stop-and-copy" }, "converges": true, "converging_percent": 100,
        "total_ns": { "expected": 5, "low": 4, "high": 6 }, "downtime_ns": { "expected": 1, "low": 1, "high": 1 },
        "bytes": { "expected": 9, "low": 9, "high": 9 }, "rounds": 3, "writes_bytes_per_s": 0,
        "sends_bytes_per_s": 7, "is_slowed": false,
    });
    let record = |total_ns: u64| -> CalibrationRecord {
        let outcome = json!({ "total_ns": total_ns, "downtime_ns": 1, "bytes": 9, "converged": true });
        let kind = json!({ "policy": "pattern", "memory_octave": 9, "heat": "idle" });
        let record = json!({ "kind": kind, "simulated": forecast, "shown": forecast, "outcome": outcome });
        serde_json::from_value(record).unwrap()
    };
    let measured: api::VmMeasurement = serde_json::from_value(json!({
        "unix_ms": 3, "pid": 7, "start_time_ticks": 9, "memory_bytes": 4096, "used_bytes": 0,
        "compressed_permille": 500, "writes": [{ "interval_ns": 5, "written_bytes": 6 }], "tracked_us": 5,
        "faults": 1, "fault_ns": 900,
    }))
    .unwrap();
    let beta = HostId::new("beta").unwrap();
    let folder = tempfile::tempdir().unwrap();
    {
        let journal = open_journal(folder.path()).unwrap();
        assert_eq!(journal.measurement(&name("web")).unwrap(), None);
        assert!(journal.outcomes().unwrap().is_empty());
        journal.put_measurement(&name("web"), &measured).unwrap();
        journal.put_measurement(&name("web"), &api::VmMeasurement { pid: 8, ..measured.clone() }).unwrap();
        for unix_ms in [1, 2] {
            journal.learn_path(&beta, PathSample { unix_ms, ..PathSample::default() }).unwrap();
        }
        for epoch in 0..Calibration::MOST_RECORDS as u64 + 2 {
            journal.learn_outcome(&id("web", epoch), &record(epoch)).unwrap();
        }
    }
    let journal = open_journal(folder.path()).unwrap();
    assert_eq!(journal.measurement(&name("web")).unwrap().unwrap().pid, 8, "the last one");
    assert_eq!(journal.measurement(&name("db")).unwrap(), None);
    let samples = journal.path_memory(&beta).unwrap().samples;
    assert_eq!(samples.iter().map(|sample| sample.unix_ms).collect::<Vec<_>>(), [2, 1]);
    let outcomes = journal.outcomes().unwrap();
    assert_eq!(outcomes.len(), Calibration::MOST_RECORDS, "the oldest are forgotten");
    assert_eq!((outcomes[0].migration.clone(), outcomes[0].record.clone()), (id("web", 2), record(2)));
    assert_eq!(journal.calibration().unwrap().records().len(), outcomes.len());
}

/// A journal of the first format is converted to this one, and keeps its records.
#[test]
fn a_journal_of_the_first_format_is_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let id = id("web", 3);
    let path = folder.path().join(FILE_NAME);
    let database = Connection::open(&path).unwrap();
    database.execute_batch(schema::STEPS[0]).unwrap();
    database.pragma_update(None, "user_version", 1).unwrap();
    let (terms, state) = (json!(terms(&id)), json!(SourceState::Prepared { run: true }));
    database
        .execute(
            "INSERT INTO migrations VALUES ('web', 3, 'source', ?1, ?2, 1, 1, 1, NULL, 'null', NULL, 5, 6)",
            [terms.to_string(), state.to_string()],
        )
        .unwrap();
    database.execute("INSERT INTO vms VALUES ('web', '{}', 7, 9, '/run/q.sock', 5)", []).unwrap();
    drop(database);
    let journal = open_journal(folder.path()).unwrap();
    assert_eq!(journal.open_migrations().unwrap()[0].state, prepared());
    let record = journal.vm(&name("web")).unwrap().unwrap();
    assert_eq!((record.pid, record.boot_id.as_str()), (7, ""));
    journal.record_source(&id, &SourceState::Aborted, Durability::Synced).unwrap();
}
