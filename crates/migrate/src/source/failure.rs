//! Failures of phases.

use api::report::FailureKind;
use engine::handover::source::SourceEvent;
use proto::message::{Finding, Message, Severity};

/// Failure of a phase, which ends the migration.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Event for the engine.
    pub(crate) event: SourceEvent,
    /// Reason for users.
    pub(crate) reason: String,
    /// Kind for whoever decides about another attempt.
    pub(crate) kind: FailureKind,
}

impl Failure {
    pub(crate) fn new(event: SourceEvent, reason: impl Into<String>) -> Self {
        let kind = match event {
            SourceEvent::PeerLost | SourceEvent::PeerSilent => FailureKind::Connection,
            _ => FailureKind::Other,
        };
        Self { event, reason: reason.into(), kind }
    }

    /// Returns the failure with another kind than the one that follows from its event.
    pub(super) fn of_kind(self, kind: FailureKind) -> Self {
        Self { kind, ..self }
    }

    /// Creates a failure that has its cause at the source, from an error with all its causes.
    pub(crate) fn local(doing: &str, error: &dyn std::error::Error) -> Self {
        Self::new(SourceEvent::Failed, format!("{doing}: {}", crate::chain(error)))
    }

    pub(super) fn peer(doing: &str, error: &dyn std::error::Error) -> Self {
        Self::new(SourceEvent::PeerLost, format!("{doing}: {}", crate::chain(error)))
    }
}

/// Returns the failure of a migration whose QEMU has ended.
pub(super) fn gone() -> Failure {
    Failure::new(SourceEvent::QemuDied, "QEMU is gone")
}

/// Returns the failure for a message that answers nothing.
pub(super) fn unexpected(message: &Message) -> Failure {
    let kind = serde_json::to_value(message).ok().and_then(|value| value["type"].as_str().map(str::to_owned));
    let kind = kind.unwrap_or_default();
    Failure::new(SourceEvent::Failed, format!("the destination sent an unexpected message `{kind}`"))
}

/// Returns the blockers among findings, as one line.
pub(crate) fn refusal(findings: &[Finding]) -> String {
    let blockers: Vec<_> = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Blocker)
        .map(|finding| format!("{}: {}", finding.what, finding.advice))
        .collect();
    if blockers.is_empty() {
        "the destination refused without giving a reason".to_owned()
    } else {
        format!("the destination refuses: {}", blockers.join("; "))
    }
}
