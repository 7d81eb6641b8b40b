//! Durable records of the agent: VMs, migrations and the states of their handovers, reports. SQLite, one file.
//!
//! # When a write has to reach the disk
//!
//! - [`Durability::Synced`]: the record survives a power failure of the host. PREPARED is written so, on both sides,
//!   before anything is risked: a host that comes back asks before it starts the VM.
//! - [`Durability::Process`]: the record survives the agent's death, because the kernel has it. Enough between `stop`
//!   and GO: if the host dies there, the VM's memory dies with it. There is no sync, so the stopped guest does not wait
//!   for a disk.
//!
//! Both are one transaction in SQLite's write-ahead log. A commit is a `write` to that log; a synced one is followed by
//! `fdatasync`, which includes earlier unsynced ones, because they precede it in the same file.
//!
//! The log is never folded into the database between: a checkpoint syncs, so it happens at [`Journal::tidy`], when the
//! last open migration is closed, and at a clean end. A synced write delays an unsynced one of another migration for as
//! long as the disk needs.
//!
//! # Space
//!
//! A guest must never be stopped because of a full disk, nor go on without the journal entry for that. So each write
//! that begins something keeps space for the entries by which everything that is open can end ([`reserve`]): it fails
//! itself, before anything is risked, if there is no such space.
//!
//! # Who may write
//!
//! One agent: it holds a lock on the directory as long as it lives. The kernel releases the lock with the process,
//! however that ends.

mod changes;
mod commands;
mod forecasts;
mod migrations;
mod record;
mod reserve;
mod schema;
mod vms;

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proto::{Epoch, MigrationId, VmName};
use rusqlite::{Connection, ErrorCode};
use rustix::fs::{FlockOperation, flock};

use changes::ChangeCounter;
pub use commands::CommandRecord;
pub use record::{MigrationRecord, NewMigration, State};
use reserve::Reserve;
pub use vms::VmRecord;

/// Name of the database within the state directory.
pub const FILE_NAME: &str = "journal.sqlite";

/// Name of the lock within the state directory.
pub const LOCK_NAME: &str = "agent.lock";

/// Time for which an agent that ends may still hold the lock: while the kernel frees its memory, and until a child that
/// it has just forked executes another program.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Pause between two attempts to take the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Failure that a record has to survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The end of the host.
    Synced,
    /// The end of the agent.
    Process,
}

/// Space that a write may use.
#[derive(Clone, Copy, Debug)]
enum WriteSpace {
    /// The space beside the reserve, for a document of this many bytes.
    Free(usize),
    /// Like `Free`, for an event that has happened, even if the journal's file was moved or deleted.
    ForEvent(usize),
    /// The reserve, too, because the write ends something.
    Reserved,
}

/// Function that returns the description of a VM without its secrets. Whoever knows the format of descriptions provides
/// it; the journal stores no description that has not passed through it.
pub type Redaction = fn(&serde_json::Value) -> serde_json::Value;

/// The journal of one agent.
#[derive(Debug)]
pub struct Journal {
    connection: Mutex<OpenDatabase>,
    path: PathBuf,
    redact: Redaction,
    changes: ChangeCounter,
    /// Device and inode of the database.
    file: (u64, u64),
    // Held for its lock.
    _lock: File,
}

#[derive(Debug)]
struct OpenDatabase {
    connection: Connection,
    durability: Durability,
    // Closed after the connection, see there.
    reserve: Reserve,
}

/// Reason for which the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The state directory cannot be made or written.
    #[error("cannot use the state directory {path}; check `state_dir` in the configuration and its permissions", path = path.display())]
    Directory {
        /// Path of the directory or of a file in it.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// Another agent uses the same directory.
    #[error("another agent{holder} uses the state directory {path}; stop it, or give this one a `state_dir` of its own", path = path.display())]
    Locked {
        /// Path of the directory.
        path: PathBuf,
        /// The other agent, as ` (pid N)`, if it is known.
        holder: String,
    },
    /// The database was written by a newer version of this program.
    #[error(
        "the journal {path} has format {found}, and this version supports formats up to {known}; use the \
         version of whimbrel that wrote it, or a newer one",
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
    /// The file is not a database, or a damaged one.
    #[error(
        "the journal {path} is damaged; restore it from a backup. If no VM is between two hosts, move the journal away and adopt this host's VMs again; otherwise this host would lose the state of such a VM", path = path.display())]
    Damaged {
        /// Path of the database.
        path: PathBuf,
        /// Error of SQLite, or result of its check.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The database is not at its path any more: the state directory was deleted, moved, or restored from a copy.
    #[error(
        "the journal {path} was deleted or replaced while the agent was running: no new migration is \
         started, because the next agent would not know of it; move the directory back, or restart the agent \
         when no VM here is in a migration",
        path = path.display()
    )]
    Gone {
        /// Path of the database.
        path: PathBuf,
    },
    /// There is no space for the write.
    #[error("no space left for the journal {path}; free some space; nothing was lost", path = path.display())]
    Full {
        /// Path of the database.
        path: PathBuf,
        /// Error of SQLite.
        source: rusqlite::Error,
    },
    /// Any other error of SQLite.
    #[error("the journal {path} could not {doing}", path = path.display())]
    Sqlite {
        /// Path of the database.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// Error of SQLite.
        source: rusqlite::Error,
    },
    /// A record that cannot be encoded as JSON or decoded from it.
    #[error("the journal's {what} is invalid")]
    Json {
        /// Name of the record.
        what: String,
        /// Error of the conversion.
        source: serde_json::Error,
    },
    /// The journal has no such migration.
    #[error("the journal holds no migration {0}")]
    NoMigration(MigrationId),
    /// The VM has a migration that is not over.
    #[error(
        "{vm} already has an open migration, {open}; wait until it ends, or use `whimbrel cancel {vm}` or \
         `whimbrel recover {vm}`",
        vm = open.vm
    )]
    AlreadyOpen {
        /// The open migration.
        open: MigrationId,
    },
    /// A larger epoch has been seen already.
    #[error("epoch {offered} of {vm} is not new; epoch {largest} has been seen already")]
    OldEpoch {
        /// The VM.
        vm: VmName,
        /// The epoch that was to be begun.
        offered: Epoch,
        /// The largest epoch that was seen.
        largest: Epoch,
    },
}

impl Journal {
    /// Opens the journal in a state directory, makes it if there is none, and migrates an older format. `redact` removes
    /// the secrets from descriptions before they are stored.
    ///
    /// # Errors
    /// If the directory cannot be written, another agent has locked it, or the database is damaged or of a newer
    /// format.
    pub fn open(state_dir: &Path, redact: Redaction) -> Result<Self, JournalError> {
        let directory = |path: &Path| {
            let path = path.to_owned();
            move |source| JournalError::Directory { path, source }
        };
        std::fs::create_dir_all(state_dir).map_err(directory(state_dir))?;
        let lock = lock(state_dir)?;
        let path = state_dir.join(FILE_NAME);
        let connection = schema::open(&path)?;
        let reserve = Reserve::open(&path).map_err(directory(&path))?;
        let file = identity(&path).map_err(directory(&path))?;
        let open = OpenDatabase { connection, durability: Durability::Synced, reserve };
        let changes = ChangeCounter::default();
        Ok(Self { connection: Mutex::new(open), path, redact, changes, file, _lock: lock })
    }

    /// Returns the database's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Folds the write-ahead log into the database. Syncs, so not while a guest is stopped.
    ///
    /// # Errors
    /// If SQLite cannot write the database. The entries stay in the log.
    pub fn tidy(&self) -> Result<(), JournalError> {
        self.guard()
            .connection
            .query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()))
            .map_err(self.failed("fold its log in"))
    }

    /// Runs a write in one transaction of the given durability.
    fn write<T>(
        &self,
        doing: &'static str,
        durability: Durability,
        room: WriteSpace,
        work: impl FnOnce(&rusqlite::Transaction<'_>) -> Result<T, TransactionError>,
    ) -> Result<T, JournalError> {
        let mut open = self.guard();
        // Events and ends are written all the same: this agent relies on them until it ends itself.
        if matches!(room, WriteSpace::Free(_)) && identity(&self.path).ok() != Some(self.file) {
            return Err(JournalError::Gone { path: self.path.clone() });
        }
        if let WriteSpace::Free(bytes) | WriteSpace::ForEvent(bytes) = room {
            open.keep_space(bytes).map_err(self.failed(doing))?;
        }
        open.set_durability(durability).map_err(self.failed(doing))?;
        let transaction = open
            .connection
            .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
            .map_err(self.failed(doing))?;
        let result = work(&transaction).map_err(|inner| self.outer(doing, inner))?;
        transaction.commit().map_err(self.failed(doing))?;
        self.changes.advance();
        Ok(result)
    }

    /// Waits until the number of changes to the journal differs from `seen`, or for `patience`. Returns the number.
    pub fn wait_for_change(&self, seen: u64, patience: Duration) -> u64 {
        self.changes.wait(seen, patience)
    }

    /// Ends all waits for a change, as if there had been one.
    pub fn wake(&self) {
        self.changes.advance();
    }

    /// Runs reads.
    fn read<T>(
        &self,
        doing: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, TransactionError>,
    ) -> Result<T, JournalError> {
        work(&self.guard().connection).map_err(|inner| self.outer(doing, inner))
    }

    /// Locks the connection. A thread that panicked with the lock left no transaction behind, because dropping it
    /// rolled it back.
    fn guard(&self) -> MutexGuard<'_, OpenDatabase> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, doing: &'static str) -> impl Fn(rusqlite::Error) -> JournalError + '_ {
        move |source| schema::explain(&self.path, doing, source)
    }

    fn outer(&self, doing: &'static str, inner: TransactionError) -> JournalError {
        match inner {
            TransactionError::Sqlite(source) => schema::explain(&self.path, doing, source),
            TransactionError::Other(error) => *error,
        }
    }
}

impl OpenDatabase {
    /// Keeps space for a document, and for the ends of all open migrations and one more.
    fn keep_space(&mut self, bytes: usize) -> rusqlite::Result<()> {
        let open: u64 = self
            .connection
            .prepare_cached("SELECT count(*) FROM migrations WHERE open = 1")?
            .query_row([], |row| row.get::<_, i64>(0))? as u64;
        self.reserve.keep(open + 1, bytes)
    }

    /// Sets `synchronous`, which belongs to the connection and cannot change within a transaction.
    fn set_durability(&mut self, durability: Durability) -> rusqlite::Result<()> {
        if self.durability != durability {
            let level = match durability {
                Durability::Synced => "FULL",
                // Not OFF: then a checkpoint, also the one when the connection closes, would not sync either.
                Durability::Process => "NORMAL",
            };
            self.connection.pragma_update(None, "synchronous", level)?;
            self.durability = durability;
        }
        Ok(())
    }
}

/// Error inside a transaction.
enum TransactionError {
    Sqlite(rusqlite::Error),
    Other(Box<JournalError>),
}

impl From<rusqlite::Error> for TransactionError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

impl From<JournalError> for TransactionError {
    fn from(error: JournalError) -> Self {
        Self::Other(Box::new(error))
    }
}

/// Returns the identity of a file, which stays the same when the file is moved.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|file| (file.dev(), file.ino()))
}

/// Acquires the directory's lock and records the holder in it.
fn lock(state_dir: &Path) -> Result<File, JournalError> {
    let path = state_dir.join(LOCK_NAME);
    let failed = |source| JournalError::Directory { path: path.clone(), source };
    let mut file =
        File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    let give_up = Instant::now() + LOCK_PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < give_up => std::thread::sleep(LOCK_PAUSE),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                let read = file.read_to_string(&mut pid).is_ok() && pid.trim().parse::<u32>().is_ok();
                let holder = if read { format!(" (pid {})", pid.trim()) } else { String::new() };
                return Err(JournalError::Locked { path: state_dir.to_owned(), holder });
            }
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    let note = |file: &mut File| {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    note(&mut file).map_err(failed)?;
    Ok(file)
}

/// True if SQLite reports that there is no space: for the database and its log, or for the index of the log.
fn is_full(error: &rusqlite::Error) -> bool {
    let rusqlite::Error::SqliteFailure(failure, _) = error else { return false };
    failure.code == ErrorCode::DiskFull || failure.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE
}

/// Support for tests of callers.
#[cfg(any(test, feature = "testing"))]
#[expect(clippy::unwrap_used, reason = "only tests use it")]
impl Journal {
    /// Makes every write fail, or none any more.
    ///
    /// # Panics
    /// If the database cannot be asked to.
    pub fn refuse_writes(&self, refuse: bool) {
        self.guard().connection.pragma_update(None, "query_only", refuse).unwrap();
    }
}

#[cfg(test)]
mod tests;
