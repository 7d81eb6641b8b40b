//! What is said when something cannot be done.

use std::fmt;

use proto::message::Finding;
use serde::{Deserialize, Serialize};

/// Why something cannot be done, and what to do about it. The body of every answer that is not a success, and what
/// [`Control`](super::Control) returns as its error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// What sort of problem, for programs; decides the HTTP status.
    pub kind: Kind,
    /// What is wrong, for people.
    pub error: String,
    /// What to do about it, for people; may be empty.
    pub advice: String,
    /// What pre-flight found, where it is pre-flight that says no.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// What sort of problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The request makes no sense: 400.
    BadRequest,
    /// No such VM, host or migration: 404.
    NotFound,
    /// It is at odds with how things stand (already in migration, already adopted, past the point of no return): 409.
    Conflict,
    /// The VM has ended: 410.
    Gone,
    /// Pre-flight or a rule says no: 422.
    Refused,
    /// The peer or the register does not answer: 503.
    Unavailable,
    /// The agent failed at its own work: 500.
    Internal,
}

impl Kind {
    /// The HTTP status that goes with it.
    pub const fn status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::Gone => 410,
            Self::Refused => 422,
            Self::Unavailable => 503,
            Self::Internal => 500,
        }
    }
}

impl Problem {
    /// A problem of the given kind.
    pub fn new(kind: Kind, error: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { kind, error: error.into(), advice: advice.into(), findings: Vec::new() }
    }

    /// A problem that another error caused; names all its causes, outermost first.
    pub fn caused_by(kind: Kind, error: &dyn std::error::Error, advice: impl Into<String>) -> Self {
        Self::new(kind, with_causes(error), advice)
    }

    /// The same problem with what pre-flight found.
    #[must_use]
    pub fn with_findings(mut self, findings: Vec<Finding>) -> Self {
        self.findings = findings;
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)
    }
}

impl std::error::Error for Problem {}

/// An error and its causes in one line, as `what: why: why`.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_named_once_and_in_order() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot open the journal")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("disk is full"));
        assert_eq!(with_causes(&error), "cannot open the journal: disk is full");
    }
}
