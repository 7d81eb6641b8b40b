//! The database's format, and the conversion of older formats.

use std::path::Path;

use rusqlite::{Connection, ErrorCode};

use super::{JournalError, is_full};

/// Formats in order: each entry converts the previous format to its own. `user_version` counts them. Entries are never
/// changed once they have been released; new ones are added at the end.
pub(super) const STEPS: [&str; 4] = [
    "
    CREATE TABLE vms (
        vm                TEXT PRIMARY KEY,
        description       TEXT NOT NULL,    -- qemu::VmDescription, JSON
        pid               INTEGER NOT NULL, -- with start_time_ticks: one process, never another with the same id
        start_time_ticks  INTEGER NOT NULL,
        qmp               TEXT NOT NULL,
        adopted_unix_ms   INTEGER NOT NULL
    ) STRICT;

    -- The largest epoch of each VM that was ever seen, also of VMs that have gone.
    CREATE TABLE epochs (
        vm                TEXT PRIMARY KEY,
        largest           INTEGER NOT NULL
    ) STRICT;

    CREATE TABLE migrations (
        vm                TEXT NOT NULL,
        epoch             INTEGER NOT NULL,
        role              TEXT NOT NULL,    -- source, destination
        terms             TEXT NOT NULL,    -- engine::handover::Terms, JSON
        state             TEXT NOT NULL,    -- the role's state, JSON
        open              INTEGER NOT NULL, -- 1 while something is left to be done
        generation        INTEGER NOT NULL,
        was_running       INTEGER NOT NULL,
        incarnation       TEXT,             -- proto::Incarnation, JSON
        details           TEXT NOT NULL,    -- the driver's own, JSON
        message           TEXT,
        created_unix_ms   INTEGER NOT NULL,
        updated_unix_ms   INTEGER NOT NULL,
        PRIMARY KEY (vm, epoch)
    ) STRICT;

    -- At most one open migration of a VM.
    CREATE UNIQUE INDEX one_open ON migrations (vm) WHERE open = 1;

    -- Apart from the migrations, because it is large and never changes: records between stop and GO stay small.
    CREATE TABLE proposals (
        vm                TEXT NOT NULL,
        epoch             INTEGER NOT NULL,
        proposal          TEXT NOT NULL,    -- proto::message::Proposal, JSON
        PRIMARY KEY (vm, epoch)
    ) STRICT;

    CREATE TABLE reports (
        vm                TEXT NOT NULL,
        epoch             INTEGER NOT NULL,
        report            TEXT NOT NULL,    -- report::Report, JSON
        PRIMARY KEY (vm, epoch)
    ) STRICT;
",
    "
    -- A process id and a start time name a process since one boot only.
    ALTER TABLE vms ADD COLUMN boot_id TEXT NOT NULL DEFAULT '';

    -- Nobody read these.
    ALTER TABLE migrations DROP COLUMN generation;
    ALTER TABLE migrations DROP COLUMN was_running;
    ALTER TABLE migrations DROP COLUMN incarnation;
",
    "
    -- Measurements for forecasts, the last of each subject: a VM, or the path to a host.
    CREATE TABLE measurements (
        subject           TEXT PRIMARY KEY, -- vm/NAME, path/HOST
        measurement       TEXT NOT NULL     -- JSON
    ) STRICT;

    -- Forecasts beside their outcomes.
    CREATE TABLE forecasts (
        number            INTEGER PRIMARY KEY,
        vm                TEXT NOT NULL,
        epoch             INTEGER NOT NULL,
        record            TEXT NOT NULL     -- engine::forecast::calibration::CalibrationRecord, JSON
    ) STRICT;
",
    "
    -- One row: this host in its fleet.
    CREATE TABLE fleet (
        row               INTEGER PRIMARY KEY CHECK (row = 1),
        term              INTEGER NOT NULL, -- the largest term of a controller that was ever seen
        cordoned          INTEGER NOT NULL  -- 1 while no VM is accepted
    ) STRICT;
    INSERT INTO fleet VALUES (1, 0, 0);

    -- The controller's commands that were begun.
    CREATE TABLE commands (
        number            INTEGER PRIMARY KEY, -- in the order of their arrival
        id                TEXT NOT NULL UNIQUE,
        command           TEXT NOT NULL,    -- proto::message::CommandVerb, JSON
        largest_epoch     INTEGER,          -- of the VM that it moves, before the move was begun
        epoch             INTEGER,          -- of the migration that it has begun
        cancelled         INTEGER NOT NULL, -- 1 once it was to be cancelled
        answer            TEXT              -- proto::message::CommandAnswer, JSON
    ) STRICT;
",
];

/// Opens the database, checks it, and converts it to the present format.
pub(super) fn open(path: &Path) -> Result<Connection, JournalError> {
    let doing = "be opened";
    let failed = |source| explain(path, doing, source);
    crate::private::create(path)
        .map_err(|source| JournalError::Directory { path: path.to_owned(), source })?;
    let mut connection = Connection::open(path).map_err(failed)?;
    // Only this agent uses the database, so a lock that is held longer than this is an error.
    connection.busy_timeout(std::time::Duration::from_secs(5)).map_err(failed)?;
    connection.pragma_update(None, "journal_mode", "WAL").map_err(failed)?;
    connection.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
    connection.pragma_update(None, "wal_autocheckpoint", 0).map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(64);

    let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(failed)?;
    let known = STEPS.len() as i64;
    if found > known {
        return Err(JournalError::Newer { path: path.to_owned(), found, known });
    }
    let check: String =
        connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(failed)?;
    if check != "ok" {
        return Err(JournalError::Damaged { path: path.to_owned(), source: check.into() });
    }
    let transaction = connection.transaction().map_err(failed)?;
    for step in STEPS.iter().skip(usize::try_from(found).unwrap_or(0)) {
        transaction.execute_batch(step).map_err(failed)?;
    }
    transaction.pragma_update(None, "user_version", known).map_err(failed)?;
    transaction.commit().map_err(failed)?;
    connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).map_err(failed)?;
    Ok(connection)
}

/// Converts an error of SQLite to one of the journal.
pub(super) fn explain(path: &Path, doing: &'static str, source: rusqlite::Error) -> JournalError {
    let path = path.to_owned();
    match source.sqlite_error_code() {
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            JournalError::Damaged { path, source: Box::new(source) }
        }
        _ if is_full(&source) => JournalError::Full { path, source },
        _ => JournalError::Sqlite { path, doing, source },
    }
}
