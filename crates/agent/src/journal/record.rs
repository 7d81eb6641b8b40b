//! A migration as the journal holds it, and as it stands in a row.

use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use engine::handover::{Role, Terms};
use proto::message::Proposal;
use proto::{HostId, MigrationId};
use rusqlite::Row;
use serde::de::DeserializeOwned;

use super::{Inner, JournalError};
use crate::progress::Standing;

/// A migration to be begun. The journal entry of its first state is written together with it.
#[derive(Clone, Debug)]
pub struct NewMigration<'a> {
    /// What both sides agreed on.
    pub terms: &'a Terms,
    /// This side's first state.
    pub state: State,
    /// What the source offers.
    pub proposal: &'a Proposal,
}

/// How far the handover got on this side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The VM leaves from here.
    Source(SourceState),
    /// The VM comes here.
    Destination(DestinationState),
}

impl State {
    /// Which side this is.
    pub fn role(&self) -> Role {
        match self {
            Self::Source(_) => Role::Source,
            Self::Destination(_) => Role::Destination,
        }
    }

    /// The state's name, as in docs/handover-table.md.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Source(state) => state.name(),
            Self::Destination(state) => state.name(),
        }
    }

    /// Whether it is decided, and nothing more will happen but for answers and cleaning up.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Source(state) => state.is_final(),
            Self::Destination(state) => state.is_final(),
        }
    }

    /// How the migration stands if nobody is at work on it.
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
    /// What both sides agreed on.
    pub terms: Terms,
    /// How far the handover got on this side.
    pub state: State,
    /// Something is left to be done, by the agent or by an operator: until [`Journal::close`].
    pub open: bool,
    /// What else this side needs in order to go on or to clean up after a restart; its driver's own.
    pub details: serde_json::Value,
    /// Why it is as it is, for people.
    pub message: Option<String>,
    /// When it began, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// When it last changed, in milliseconds since 1970.
    pub updated_unix_ms: u64,
}

impl MigrationRecord {
    /// Which migration.
    pub fn id(&self) -> &MigrationId {
        &self.terms.migration
    }

    /// Which side this agent is on.
    pub fn role(&self) -> Role {
        self.state.role()
    }

    /// The other side.
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
        SourceState::Bereft { .. } | SourceState::Committed { .. } | SourceState::Reclaiming { .. } => {
            Standing::InDoubt
        }
        SourceState::Done { .. } => Standing::Done,
    }
}

fn destination_standing(state: &DestinationState) -> Standing {
    match state {
        DestinationState::Idle | DestinationState::Discarded | DestinationState::Refused => Standing::Failed,
        DestinationState::Prepared
        | DestinationState::Starting { .. }
        | DestinationState::Completing { .. }
        | DestinationState::Refusing => Standing::Underway,
        DestinationState::Ready { .. }
        | DestinationState::Taking { .. }
        | DestinationState::Bereft
        | DestinationState::Crashed { .. } => Standing::InDoubt,
        DestinationState::Active { .. } => Standing::Done,
    }
}

/// A row as SQLite gives it.
pub(super) struct Columns {
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

impl Columns {
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

    pub(super) fn record(self) -> Result<MigrationRecord, Inner> {
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

/// A document of the database.
pub(super) fn parsed<T: DeserializeOwned>(text: &str, what: impl FnOnce() -> String) -> Result<T, Inner> {
    serde_json::from_str(text).map_err(|source| JournalError::Json { what: what(), source }.into())
}

/// The text of a document, or which one could not be written.
pub(super) fn json(
    text: serde_json::Result<String>,
    what: impl FnOnce() -> String,
) -> Result<String, JournalError> {
    text.map_err(|source| JournalError::Json { what: what(), source })
}
