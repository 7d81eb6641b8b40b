//! Kind of a migration's failure.

use serde::{Deserialize, Serialize};

/// Kind of the failure that ended a migration before COMMITTED: it decides which other attempt is worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// The destination refused the VM.
    Refused,
    /// The destination could not be reached, or stopped answering.
    Connection,
    /// The policy gave up: rounds did not become short enough.
    NotConverging,
    /// Any other failure.
    Other,
}
