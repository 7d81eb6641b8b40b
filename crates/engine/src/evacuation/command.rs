//! Commands to agents, and what agents know about them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Name of an evacuation, which the controller has chosen and never uses again.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EvacuationId(pub String);

/// Id of a command to move a VM: `EVACUATION/NUMBER`.
///
/// An agent journals it with the migration, and carries it out once: if the same id comes again, it answers with the
/// state of the migration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CommandId {
    /// Evacuation.
    pub evacuation: EvacuationId,
    /// Number in the evacuation, from 1 on.
    pub number: u32,
}

/// Text that is no id of a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no id of a command; one is EVACUATION/NUMBER")]
pub struct WrongCommandId(String);

/// State of a command, as the agent of the VM's source journals it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum CommandState {
    /// The agent has never seen the id.
    Unknown,
    /// The migration is under way.
    Underway {
        /// Progress, if it is known.
        #[serde(default)]
        progress: Option<MoveProgress>,
    },
    /// The migration has ended, or is in doubt.
    Ended {
        /// Its end.
        end: MoveEnd,
    },
}

/// Progress of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveProgress {
    /// Bytes that are still to be sent, as far as is known now: the rest of the present round.
    pub bytes_left: u64,
    /// Rate at which they are sent, in bytes per second.
    pub bytes_per_s: u64,
    /// Bytes that were sent since the beginning.
    #[serde(default)]
    pub sent_bytes: u64,
    /// Number of the migration's phase: another one in each.
    #[serde(default)]
    pub phase: u32,
}

/// End of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "end", rename_all = "kebab-case")]
pub enum MoveEnd {
    /// The VM runs at the destination, and nothing of it is to be served from the source any longer.
    Moved,
    /// The VM runs at its source as before.
    Failed {
        /// Kind of the failure.
        kind: MoveFailure,
        /// Reason, for people.
        reason: String,
    },
    /// The migration was cancelled, or was never begun and never will be; the VM runs at its source.
    Cancelled,
    /// The guest shut down, or its QEMU ended, before it was moved.
    VmEnded,
    /// It is not known which host owns the VM. Another end follows when that is known.
    InDoubt {
        /// Reason, for people.
        reason: String,
    },
}

/// Kind of a failure: it decides about the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveFailure {
    /// The destination refuses the VM: another one is used.
    Refused,
    /// The VM cannot be moved from its host, whatever the destination is.
    Immovable,
    /// The destination cannot be reached, or the connection was lost.
    Connection,
    /// Rounds do not converge.
    NotConverging,
    /// Any other failure.
    Other,
}

impl fmt::Display for EvacuationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for CommandId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.evacuation, self.number)
    }
}

impl FromStr for CommandId {
    type Err = WrongCommandId;

    fn from_str(text: &str) -> Result<Self, WrongCommandId> {
        let parsed = text.rsplit_once('/').and_then(|(evacuation, number)| {
            let number = number.parse().ok()?;
            Some(Self { evacuation: EvacuationId(evacuation.to_owned()), number })
        });
        parsed.ok_or_else(|| WrongCommandId(text.to_owned()))
    }
}

impl TryFrom<String> for CommandId {
    type Error = WrongCommandId;

    fn try_from(text: String) -> Result<Self, WrongCommandId> {
        text.parse()
    }
}

impl From<CommandId> for String {
    fn from(id: CommandId) -> Self {
        id.to_string()
    }
}
