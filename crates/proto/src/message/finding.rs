//! Results of the pre-flight check.

use serde::{Deserialize, Serialize};

/// One result of the pre-flight check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Severity of the finding.
    pub severity: Severity,
    /// Stable name of the check.
    pub code: String,
    /// Description of the finding.
    pub what: String,
    /// Advice on the finding.
    pub advice: String,
}

impl Finding {
    /// Creates a finding.
    pub fn new(severity: Severity, code: &str, what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { severity, code: code.to_owned(), what: what.into(), advice: advice.into() }
    }
}

/// Severity of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// For information only.
    Info,
    /// The migration continues, possibly slower or with differences.
    Warning,
    /// The migration is refused.
    Blocker,
}
