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

/// Returns true if the findings include a blocker: the migration is refused.
pub fn is_blocked(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.severity == Severity::Blocker)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blockers_refuse_a_migration() {
        let found = |severity| Finding::new(severity, "code", "what", "advice");
        let harmless = [Severity::Info, Severity::Warning].map(found);
        assert!(!is_blocked(&[]) && !is_blocked(&harmless));
        assert!(is_blocked(&[&harmless[..], &[found(Severity::Blocker)]].concat()));
    }
}
