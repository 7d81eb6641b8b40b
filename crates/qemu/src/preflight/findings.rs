use super::{Finding, Severity};

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
