//! The ownership registry in a database.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use engine::handover::registry::{RegistryAnswer, apply};
use proto::VmName;
use proto::message::{Ownership, RegistryReply, RegistryRequest};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior};

use super::Registry;

/// Name of the database within the state directory.
const FILE_NAME: &str = "registry.sqlite";

/// The newest format that this version knows.
const FORMAT: i64 = 1;

/// An ownership registry in an SQLite database. Every change is on stable storage before it is answered.
#[derive(Debug)]
pub struct SqliteRegistry {
    connection: Mutex<Connection>,
    path: PathBuf,
}

/// Reason for which the registry cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The database cannot be opened.
    #[error(
        "cannot open the registry {path}; check `state_dir` in the configuration, its permissions and the \
         free space on its disk",
        path = path.display()
    )]
    Open {
        /// Path of the database.
        path: PathBuf,
        /// Error of SQLite.
        source: rusqlite::Error,
    },
    /// The database was written by a newer version of this program.
    #[error(
        "the registry {path} has format {found}, and this version supports formats up to {FORMAT}; use the \
         version of whimbrel that wrote it, or a newer one",
        path = path.display()
    )]
    Newer {
        /// Path of the database.
        path: PathBuf,
        /// Format of the database.
        found: i64,
    },
    /// A request was not carried out and never will be.
    #[error("the registry {path} could not process the request; nothing was changed", path = path.display())]
    NotDone {
        /// Path of the database.
        path: PathBuf,
        /// Error of SQLite.
        source: rusqlite::Error,
    },
    /// A record that cannot be read or written as JSON. Nothing changed.
    #[error("a record in the registry {path} is damaged; nothing was changed", path = path.display())]
    Record {
        /// Path of the database.
        path: PathBuf,
        /// Error of the conversion.
        source: serde_json::Error,
    },
    /// Other users' permissions cannot be removed from its files.
    #[error(
        "cannot protect {path} from other users; check `state_dir` in the configuration and its permissions",
        path = path.display()
    )]
    Private {
        /// Path of the database.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// The commit failed: the transaction may have reached the disk, or not.
    #[error("the registry {path} may or may not have processed the request", path = path.display())]
    Unknown {
        /// Path of the database.
        path: PathBuf,
        /// Error of SQLite.
        source: rusqlite::Error,
    },
}

impl SqliteRegistry {
    /// Opens the registry in a state directory, makes it if there is none.
    ///
    /// # Errors
    /// If the directory cannot be written or protected from other users, or the database is damaged or of a newer
    /// format.
    pub fn open(state_dir: &Path) -> Result<Self, RegistryError> {
        let path = state_dir.join(FILE_NAME);
        let failed = |source| RegistryError::Open { path: path.clone(), source };
        crate::private::create(&path)
            .map_err(|source| RegistryError::Private { path: path.clone(), source })?;
        let connection = Connection::open(&path).map_err(failed)?;
        connection.busy_timeout(std::time::Duration::from_secs(5)).map_err(failed)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(failed)?;
        connection.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
        let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(failed)?;
        if found > FORMAT {
            return Err(RegistryError::Newer { path, found });
        }
        connection
            .execute_batch(&format!(
                "BEGIN IMMEDIATE;
                 CREATE TABLE IF NOT EXISTS owners (vm TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT;
                 PRAGMA user_version = {FORMAT};
                 COMMIT"
            ))
            .map_err(failed)?;
        Ok(Self { connection: Mutex::new(connection), path })
    }

    /// Carries a request out, synced.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] if the commit failed: it is not known if the request was carried out. After any other
    /// error nothing has changed.
    pub fn apply(&self, request: &RegistryRequest) -> Result<RegistryReply, RegistryError> {
        let not_done = |source| RegistryError::NotDone { path: self.path.clone(), source };
        let damaged = |source| RegistryError::Record { path: self.path.clone(), source };
        let (RegistryRequest::Read { vm } | RegistryRequest::CompareAndSet { vm, .. }) = request;

        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        // Immediate: no other writer changes a record between comparing and setting, in this process or another one.
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(not_done)?;
        let text: Option<String> = transaction
            .prepare_cached("SELECT record FROM owners WHERE vm = ?1")
            .and_then(|mut select| select.query_row([vm.as_str()], |row| row.get(0)).optional())
            .map_err(not_done)?;
        let record: Option<Ownership> =
            text.map(|text| serde_json::from_slice(text.as_bytes())).transpose().map_err(damaged)?;
        let (reply, new) = apply(request, record.as_ref());
        if let Some(new) = new {
            let text = serde_json::to_string(&new).map_err(damaged)?;
            transaction
                .prepare_cached("INSERT OR REPLACE INTO owners (vm, record) VALUES (?1, ?2)")
                .and_then(|mut insert| insert.execute([vm.as_str(), &text]))
                .map_err(not_done)?;
            transaction
                .commit()
                .map_err(|source| RegistryError::Unknown { path: self.path.clone(), source })?;
        }
        Ok(reply)
    }

    /// Returns all records, by VM.
    ///
    /// # Errors
    /// If the database cannot be read, or a record is damaged.
    pub fn all(&self) -> Result<Vec<(VmName, Ownership)>, RegistryError> {
        let not_done = |source| RegistryError::NotDone { path: self.path.clone(), source };
        let damaged = |source| RegistryError::Record { path: self.path.clone(), source };
        let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let mut statement =
            connection.prepare_cached("SELECT vm, record FROM owners ORDER BY vm").map_err(not_done)?;
        let rows = statement
            .query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))
            .map_err(not_done)?;
        rows.map(|row| {
            let (vm, record) = row.map_err(not_done)?;
            let vm = serde_json::from_value(vm.into()).map_err(damaged)?;
            Ok((vm, serde_json::from_slice(record.as_bytes()).map_err(damaged)?))
        })
        .collect()
    }
}

impl Registry for SqliteRegistry {
    fn ask(&self, request: &RegistryRequest) -> RegistryAnswer {
        match self.apply(request) {
            Ok(reply) => RegistryAnswer::from_reply(request, reply),
            Err(error) => {
                tracing::error!(error = api::with_causes(&error), "a request to the registry failed");
                match error {
                    RegistryError::Unknown { .. } => RegistryAnswer::Unknown,
                    _ => RegistryAnswer::Unreachable,
                }
            }
        }
    }
}
