//! The API's error type.

use std::fmt;

use proto::message::Finding;
use serde::{Deserialize, Serialize};

use crate::options::InvalidOption;

/// Reason for the failure of a request, and advice. The body of every unsuccessful answer, and the error type of
/// [`Control`](super::Control).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Kind of problem, for programs; determines the HTTP status.
    pub kind: ProblemKind,
    /// Human-readable description.
    pub error: String,
    /// Human-readable advice; may be empty.
    pub advice: String,
    /// Findings, if the pre-flight checks refuse the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// Kind of problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemKind {
    /// The request is invalid: 400.
    BadRequest,
    /// No such VM, host or migration: 404.
    NotFound,
    /// The request conflicts with the present state (already in migration, already adopted, past the commit point):
    /// 409.
    Conflict,
    /// The VM has ended: 410.
    Gone,
    /// The pre-flight checks or a rule refuse the request: 422.
    Refused,
    /// The peer or the ownership registry does not answer: 503.
    Unavailable,
    /// The agent failed internally: 500.
    Internal,
}

impl ProblemKind {
    /// Returns the matching HTTP status.
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
    /// Creates a problem of the given kind.
    pub fn new(kind: ProblemKind, error: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { kind, error: error.into(), advice: advice.into(), findings: Vec::new() }
    }

    /// Creates a problem that another error caused; names all its causes, outermost first.
    pub fn caused_by(kind: ProblemKind, error: &dyn std::error::Error, advice: impl Into<String>) -> Self {
        Self::new(kind, with_causes(error), advice)
    }

    /// Returns the problem with findings of the pre-flight checks.
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

impl From<InvalidOption> for Problem {
    fn from(InvalidOption { what, advice, .. }: InvalidOption) -> Self {
        Self::new(ProblemKind::BadRequest, what, advice)
    }
}

/// Formats an error and its causes in one line, as `what: why: why`.
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
