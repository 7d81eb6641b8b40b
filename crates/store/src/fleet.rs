//! Durable records of a controller: hosts, VMs, commands, evacuations, events. SQLite, one file.
//!
//! A batch is one synced transaction. What a controller orders follows from records that are stored: it writes a batch
//! before it carries out the actions that belong to it.
//!
//! Documents are JSON, whose format the controller owns. One controller writes: it holds a lock on the directory as long as
//! it lives.

mod batch;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, TransactionBehavior, params};
use rustix::fs::{FlockOperation, flock};

pub use batch::{
    FleetBatch, FleetRecords, HostDocument, NewEvent, StoredAnswer, StoredCommand, StoredEvacuation,
    StoredEvent, VmDocument,
};

/// Name of the database within the state directory.
const FILE_NAME: &str = "fleet.sqlite";

/// Name of the lock within the state directory.
const LOCK_NAME: &str = "controller.lock";

/// Time for which a controller that ends may still hold the lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// Pause between two attempts to take the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Number of events that are kept.
pub const EVENTS_KEPT: u64 = 100_000;

/// Number of commands that are kept.
const COMMANDS_KEPT: i64 = 10_000;

/// Formats in order: each entry converts the previous format to its own. `user_version` counts them.
const STEPS: [&str; 1] = ["
    -- One row: numbers that are never used again.
    CREATE TABLE numbers (
        row               INTEGER PRIMARY KEY CHECK (row = 1),
        term              INTEGER NOT NULL, -- the largest term that a controller with this database has had
        evacuation        INTEGER NOT NULL, -- of the last evacuation
        event             INTEGER NOT NULL  -- of the last event
    ) STRICT;
    INSERT INTO numbers VALUES (1, 0, 0, 0);

    CREATE TABLE hosts (
        host              TEXT PRIMARY KEY,
        document          TEXT NOT NULL
    ) STRICT;

    CREATE TABLE vms (
        host              TEXT NOT NULL,
        vm                TEXT NOT NULL,
        document          TEXT NOT NULL,
        PRIMARY KEY (host, vm)
    ) STRICT;

    CREATE TABLE commands (
        number            INTEGER PRIMARY KEY,
        id                TEXT NOT NULL UNIQUE,
        host              TEXT NOT NULL,
        command           TEXT NOT NULL,    -- proto::message::CommandVerb, JSON
        sent_unix_ms      INTEGER NOT NULL,
        answer            TEXT              -- proto::message::CommandAnswer, JSON
    ) STRICT;

    CREATE TABLE evacuations (
        id                TEXT PRIMARY KEY,
        number            INTEGER NOT NULL,
        options           TEXT NOT NULL,
        state             TEXT NOT NULL     -- engine::evacuation::Evacuation, JSON
    ) STRICT;

    CREATE TABLE events (
        number            INTEGER PRIMARY KEY,
        unix_ms           INTEGER NOT NULL,
        kind              TEXT NOT NULL,
        host              TEXT,
        vm                TEXT,
        evacuation        TEXT,
        text              TEXT NOT NULL
    ) STRICT;
"];

/// The records of one controller.
#[derive(Debug)]
pub struct FleetStore {
    connection: Mutex<Connection>,
    path: PathBuf,
    // Held for its lock.
    _lock: File,
}

/// Reason for which the records cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FleetStoreError {
    /// The state directory cannot be made or written.
    #[error("cannot use {path}; check `state_dir` in the configuration and its permissions", path = path.display())]
    Directory {
        /// Path of the directory or of a file in it.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// Another controller uses the same directory.
    #[error("another controller uses {path}; stop it, or give this one a `state_dir` of its own", path = path.display())]
    Locked {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The database was written by a newer version of this program.
    #[error(
        "{path} has format {found}, and this version supports formats up to {known}; use the version of whimbrel \
         that wrote it, or a newer one",
        path = path.display()
    )]
    Newer {
        /// Path of the database.
        path: PathBuf,
        /// Format of the database.
        found: i64,
        /// The newest known format.
        known: i64,
    },
    /// The database failed.
    #[error(
        "the controller's records in {path} could not {doing}; if the disk is full, free some space; otherwise see \
         docs/operations/controller.md about lost records",
        path = path.display()
    )]
    Sqlite {
        /// Path of the database.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// Error of SQLite.
        source: rusqlite::Error,
    },
}

impl FleetStore {
    /// Opens the records in a state directory, makes them if there are none, and converts an older format.
    pub fn open(state_dir: &Path) -> Result<Self, FleetStoreError> {
        let directory = |path: &Path| {
            let path = path.to_owned();
            move |source| FleetStoreError::Directory { path, source }
        };
        std::fs::create_dir_all(state_dir).map_err(directory(state_dir))?;
        let lock_path = state_dir.join(LOCK_NAME);
        let lock = File::options().write(true).create(true).truncate(false).open(&lock_path);
        let lock = lock.map_err(directory(&lock_path))?;
        let give_up = Instant::now() + LOCK_PATIENCE;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < give_up => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(FleetStoreError::Locked { path: state_dir.to_owned() });
                }
                Err(errno) => return Err(directory(&lock_path)(errno.into())),
            }
        }
        let path = state_dir.join(FILE_NAME);
        crate::private::create(&path).map_err(directory(&path))?;
        let failed = |source| FleetStoreError::Sqlite { path: path.clone(), doing: "be opened", source };
        let connection = open_database(&path).map_err(failed)?;
        let known = STEPS.len() as i64;
        let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(failed)?;
        if found > known {
            return Err(FleetStoreError::Newer { path, found, known });
        }
        convert(&connection, found).map_err(failed)?;
        Ok(Self { connection: Mutex::new(connection), path, _lock: lock })
    }

    /// Returns a term that is larger than all terms before it, and than `seen`: the largest one that agents have seen.
    pub fn next_term(&self, seen: u64) -> Result<u64, FleetStoreError> {
        self.write("note a term", |transaction| {
            let seen = i64::try_from(seen)
                .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
            // The table is strict: a term beyond the largest integer is an error, too.
            transaction.execute("UPDATE numbers SET term = max(term, ?1) + 1", [seen])?;
            transaction.query_row("SELECT term FROM numbers", [], |row| Ok(row.get::<_, i64>(0)? as u64))
        })
    }

    /// Returns a number for a new evacuation, which is never returned again.
    pub fn next_evacuation(&self) -> Result<u64, FleetStoreError> {
        self.write("note an evacuation", |transaction| {
            transaction.execute("UPDATE numbers SET evacuation = evacuation + 1", [])?;
            transaction.query_row(
                "SELECT evacuation FROM numbers",
                [],
                |row| Ok(row.get::<_, i64>(0)? as u64),
            )
        })
    }

    /// Writes a batch in one synced transaction. Events get the next numbers; returns that of the last event.
    pub fn store(&self, batch: &FleetBatch) -> Result<u64, FleetStoreError> {
        self.write("be written", |transaction| batch.write(transaction))
    }

    /// Returns all records but events and commands.
    pub fn load(&self) -> Result<FleetRecords, FleetStoreError> {
        self.read("be read", FleetRecords::read)
    }

    /// Returns up to `count` events after the one with this number, oldest first.
    pub fn events(&self, after: u64, count: u32) -> Result<Vec<StoredEvent>, FleetStoreError> {
        self.read("be read", |connection| {
            let sql = "SELECT number, unix_ms, kind, host, vm, evacuation, text FROM events
                       WHERE number > ?1 ORDER BY number LIMIT ?2";
            let mut statement = connection.prepare_cached(sql)?;
            let rows = statement.query_map(params![after as i64, count], StoredEvent::read)?;
            rows.collect()
        })
    }

    fn write<T>(
        &self,
        doing: &'static str,
        work: impl FnOnce(&rusqlite::Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, FleetStoreError> {
        let failed = |source| FleetStoreError::Sqlite { path: self.path.clone(), doing, source };
        let mut connection = self.connection();
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        let result = work(&transaction).map_err(failed)?;
        transaction.commit().map_err(failed)?;
        Ok(result)
    }

    fn read<T>(
        &self,
        doing: &'static str,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, FleetStoreError> {
        work(&self.connection()).map_err(|source| FleetStoreError::Sqlite {
            path: self.path.clone(),
            doing,
            source,
        })
    }

    /// Locks the connection. A thread that panicked with the lock left no transaction behind.
    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_database(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(5))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

fn convert(connection: &Connection, found: i64) -> rusqlite::Result<()> {
    for (step, format) in STEPS.iter().zip(1_i64..).skip(usize::try_from(found).unwrap_or(0)) {
        connection
            .execute_batch(&format!("BEGIN IMMEDIATE; {step} PRAGMA user_version = {format}; COMMIT"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
