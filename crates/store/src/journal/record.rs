//! A migration as the journal holds it, and as a row of the database.

use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use engine::handover::{MigrationTerms, Role};
use proto::message::Proposal;
use proto::{HostId, MigrationId};
use rusqlite::Row;
use serde::de::DeserializeOwned;

use super::{JournalError, TransactionError};
use api::progress::Standing;

/// A migration to be begun. It is journalled together with its first state.
#[derive(Clone, Debug)]
pub struct NewMigration<'a> {
    /// The terms of both sides.
    pub terms: &'a MigrationTerms,
    /// This side's first state.
    pub state: State,
    /// The source's proposal.
    pub proposal: &'a Proposal,
}

/// State of the handover on this side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The VM leaves this host.
    Source(SourceState),
    /// The VM arrives at this host.
    Destination(DestinationState),
}

impl State {
    /// Returns the role of this side.
    pub fn role(&self) -> Role {
        match self {
            Self::Source(_) => Role::Source,
            Self::Destination(_) => Role::Destination,
        }
    }

    /// Returns the state's name, as in docs/handover-table.md.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Source(state) => state.name(),
            Self::Destination(state) => state.name(),
        }
    }

    /// True if the migration is decided, and only answers and clean-up follow.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Source(state) => state.is_final(),
            Self::Destination(state) => state.is_final(),
        }
    }

    /// Returns the standing of a migration without a driver.
    pub fn standing(&self) -> Standing {
        match self {
            Self::Source(state) => source_standing(state),
            Self::Destination(state) => destination_standing(state),
        }
    }

    pub(super) fn to_json(&self) -> serde_json::Result<String> {
        match self {
            Self::Source(state) => serde_json::to_string(state),
            Self::Destination(state) => serde_json::to_string(state),
        }
    }
}

/// A migration as the journal holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationRecord {
    /// The terms of both sides.
    pub terms: MigrationTerms,
    /// State of the handover on this side.
    pub state: State,
    /// True until the migration is closed: the agent or an operator still has something to do.
    pub open: bool,
    /// Further data that this side needs in order to go on or to clean up after a restart; its driver defines it.
    pub details: serde_json::Value,
    /// Human-readable message about the state.
    pub message: Option<String>,
    /// Time at which it began, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Time of its last change, in milliseconds since 1970.
    pub updated_unix_ms: u64,
}

impl MigrationRecord {
    /// Returns the migration's id.
    pub fn id(&self) -> &MigrationId {
        &self.terms.migration
    }

    /// Returns the role of this agent.
    pub fn role(&self) -> Role {
        self.state.role()
    }

    /// Returns the other host of the migration.
    pub fn peer(&self) -> &HostId {
        match self.role() {
            Role::Source => &self.terms.destination,
            Role::Destination => &self.terms.source,
        }
    }
}

fn source_standing(state: &SourceState) -> Standing {
    match state {
        SourceState::Idle | SourceState::Aborted | SourceState::Returned => Standing::Failed,
        SourceState::Prepared { .. }
        | SourceState::Stopped { .. }
        | SourceState::Aborting
        | SourceState::Returning => Standing::Underway,
        SourceState::QemuLost { .. } | SourceState::Committed { .. } | SourceState::Reclaiming { .. } => {
            Standing::InDoubt
        }
        SourceState::Done { .. } => Standing::Done,
    }
}

fn destination_standing(state: &DestinationState) -> Standing {
    match state {
        DestinationState::Idle | DestinationState::CopyDestroyed | DestinationState::Refused => {
            Standing::Failed
        }
        DestinationState::Prepared
        | DestinationState::Starting { .. }
        | DestinationState::Completing { .. }
        | DestinationState::Refusing => Standing::Underway,
        DestinationState::Ready { .. }
        | DestinationState::Acquiring { .. }
        | DestinationState::QemuLost
        | DestinationState::Crashed { .. } => Standing::InDoubt,
        DestinationState::Active { .. } => Standing::Done,
    }
}

/// A row as SQLite returns it.
pub(super) struct MigrationColumns {
    vm: String,
    epoch: i64,
    role: String,
    terms: String,
    state: String,
    open: bool,
    details: String,
    message: Option<String>,
    created: i64,
    updated: i64,
}

impl MigrationColumns {
    pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            vm: row.get(0)?,
            epoch: row.get(1)?,
            role: row.get(2)?,
            terms: row.get(3)?,
            state: row.get(4)?,
            open: row.get(5)?,
            details: row.get(6)?,
            message: row.get(7)?,
            created: row.get(8)?,
            updated: row.get(9)?,
        })
    }

    pub(super) fn record(self) -> Result<MigrationRecord, TransactionError> {
        let what = |part: &str| format!("{part} of {}#{}", self.vm, self.epoch);
        let state = if self.role == Role::Source.to_string() {
            State::Source(parsed(&self.state, || what("state"))?)
        } else {
            State::Destination(parsed(&self.state, || what("state"))?)
        };
        Ok(MigrationRecord {
            terms: parsed(&self.terms, || what("terms"))?,
            state,
            open: self.open,
            details: parsed(&self.details, || what("details"))?,
            message: self.message,
            created_unix_ms: self.created as u64,
            updated_unix_ms: self.updated as u64,
        })
    }
}

/// Parses a document of the database.
pub(super) fn parsed<T: DeserializeOwned>(
    text: &str,
    what: impl FnOnce() -> String,
) -> Result<T, TransactionError> {
    serde_json::from_slice(text.as_bytes())
        .map_err(|source| JournalError::Json { what: what(), source }.into())
}

/// Returns the text of a document, or an error with its name.
pub(super) fn json(
    text: serde_json::Result<String>,
    what: impl FnOnce() -> String,
) -> Result<String, JournalError> {
    text.map_err(|source| JournalError::Json { what: what(), source })
}
