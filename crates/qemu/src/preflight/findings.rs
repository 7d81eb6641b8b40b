//! Findings of the pre-flight check.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Something will be different.
    Info,
    /// Something may fail.
    Warning,
    /// The guest cannot be moved in this state.
    Blocker,
}

/// One result of the pre-flight check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Severity.
    pub severity: Severity,
    /// Identifier for programs, e.g. `machine-type-unknown`.
    pub code: String,
    /// Description of the finding.
    pub what: String,
    /// Advice.
    pub advice: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Blocker => "blocker",
        };
        write!(f, "{severity}: {}; {} [{}]", self.what, self.advice, self.code)
    }
}

pub(super) type Findings = Vec<Finding>;

pub(super) fn add(
    findings: &mut Findings,
    severity: Severity,
    code: &str,
    what: impl Into<String>,
    advice: impl Into<String>,
) {
    findings.push(Finding { severity, code: code.to_owned(), what: what.into(), advice: advice.into() });
}

/// Returns major and minor of a version or a kernel's release.
pub(super) fn major_minor(version: &str) -> (u64, u64) {
    let mut parts =
        version.split(|letter: char| !letter.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}
