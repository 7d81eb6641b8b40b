//! Advice to an operator about a migration in doubt, and the execution of decisions.

use host::DestinationDetails;
use std::path::PathBuf;

use engine::handover::MigrationTerms;
use engine::handover::destination::{DestinationEvent, DestinationState};
use engine::handover::recover::{Advice, Choice, OperatorDecision, advise_destination, advise_source};
use engine::handover::source::{SourceEvent, SourceState};
use proto::{HostId, MigrationId};

use super::{Daemon, DriverMailbox};
use api::progress::Standing;
use api::{Problem, RecoverAction, RecoverReport, RecoverRequest, RegistryUse};
use migrate::{destination, source};
use store::journal::{MigrationRecord, State};

/// Answer to an operator.
struct DecisionAnswer {
    /// Choices, with their risks.
    risked: Vec<String>,
    /// True if the migration is over at this host.
    is_over: bool,
    message: String,
}

impl Daemon {
    /// Asks the peer again, describes a decision, or carries it out.
    pub(super) fn decide(
        &self,
        id: &MigrationId,
        request: &RecoverRequest,
    ) -> Result<RecoverReport, Problem> {
        let record = self.record(id)?;
        let advice = match &record.state {
            State::Source(state) => advise_source(&record.terms, state),
            State::Destination(state) => advise_destination(&record.terms, state),
        };
        let known =
            advice.known.iter().chain(&advice.unknown).cloned().chain(self.copied_disks(&record)).collect();
        let requested = requested_decision(request).map(|decision| choice(&advice, decision));
        let DecisionAnswer { risked, is_over: done, message } = match requested {
            None => self.ask_again(id, &advice)?,
            Some(None) => unavailable_decision(&record, &advice),
            Some(Some(choice)) if !request.accept_risk => unaccepted_risk(choice),
            Some(Some(choice)) => self.carry_out_choice(&record, choice)?,
        };
        Ok(RecoverReport { status: self.status(id)?, known, risked, done, message })
    }

    /// Asks the peers again, and waits for their answers.
    fn ask_again(&self, id: &MigrationId, advice: &Advice) -> Result<DecisionAnswer, Problem> {
        self.nudge(id);
        self.wait_until_over(id, |status| status.standing != Standing::Underway);
        let is_over = self.status(id)?.standing.is_over();
        let message = if is_over { "settled" } else { "asked again; there is no new information" };
        let risked = advice.choices.iter().map(described).collect();
        Ok(DecisionAnswer { risked, is_over, message: message.to_owned() })
    }

    /// Carries out a decision whose risk the operator accepts.
    fn carry_out_choice(&self, record: &MigrationRecord, choice: &Choice) -> Result<DecisionAnswer, Problem> {
        self.carry_out(record, choice.decision);
        let is_over = self.status(record.id())?.standing.is_over();
        let message =
            if is_over { "done" } else { "the decision was accepted; the migration has not ended yet" };
        Ok(DecisionAnswer { risked: vec![described(choice)], is_over, message: message.to_owned() })
    }

    /// Describes the locations of copied disks. There are two images of each, and the one to start the guest from
    /// depends on where it ran last. Returns none if the migration failed early: the images at the destination are
    /// removed then.
    fn copied_disks(&self, record: &MigrationRecord) -> Option<String> {
        let MigrationTerms { source, destination, .. } = &record.terms;
        let images = match &record.state {
            State::Source(
                SourceState::Committed { .. }
                | SourceState::Reclaiming { .. }
                | SourceState::QemuLost { .. }
                | SourceState::Done { .. },
            ) => {
                let report = self.context.journal.report(record.id()).ok()??;
                report.disks.into_iter().map(|disk| disk.path).collect()
            }
            State::Source(_)
            | State::Destination(
                DestinationState::Idle
                | DestinationState::Prepared
                | DestinationState::Refused
                | DestinationState::CopyDestroyed,
            ) => return None,
            State::Destination(_) => {
                let details: DestinationDetails = serde_json::from_value(record.details.clone()).ok()?;
                let path = |image: PathBuf| image.display().to_string();
                details.artifacts.images.into_iter().map(path).collect::<Vec<_>>()
            }
        };
        (!images.is_empty()).then(|| describe_copies(&images, source, destination))
    }

    /// Sends a decision to a driver, and waits until it is carried out, or known to be impossible.
    fn carry_out(&self, before: &MigrationRecord, decision: OperatorDecision) {
        let id = before.id();
        let is_delivered = match self.mailbox(id) {
            Some(DriverMailbox::Source(mailbox)) => {
                mailbox.put(source::SourceNotice::Event(SourceEvent::OperatorDecided(decision)))
            }
            Some(DriverMailbox::Destination(mailbox)) => mailbox
                .put(destination::DestinationNotice::Event(DestinationEvent::OperatorDecided(decision))),
            None => false,
        };
        if !is_delivered {
            return;
        }
        let before = self.status_of(before);
        self.wait_until_over(id, |status| {
            // The peer was asked, and has answered that the VM is there: more is not possible. State and time come from
            // one read: with two, one could be from before the decision and the other from the middle of it.
            let refused = status.state == "committed" && status.updated != before.updated;
            status.standing.is_over() || refused
        });
    }
}

/// Describes disks that have another image at the destination.
fn describe_copies(images: &[String], source: &HostId, destination: &HostId) -> String {
    format!(
        "its disks were copied to {destination}: {}. If the guest has run there, these are its disks, and \
         the images at {source} have the state at which it was stopped; if it has not, its disks are those \
         at {source}",
        images.join(", ")
    )
}

/// Returns the requested decision; none for a request to ask the peers again.
fn requested_decision(request: &RecoverRequest) -> Option<OperatorDecision> {
    match (request.action, request.registry) {
        (RecoverAction::Ask, _) => None,
        (RecoverAction::RunHere, RegistryUse::Asked) => Some(OperatorDecision::RunHere { force: false }),
        (RecoverAction::RunHere, RegistryUse::Overridden) => Some(OperatorDecision::RunHere { force: true }),
        (RecoverAction::RunHere, RegistryUse::None) => {
            Some(OperatorDecision::WithoutRegistry { run_here: true })
        }
        (RecoverAction::DiscardCopy, RegistryUse::None) => {
            Some(OperatorDecision::WithoutRegistry { run_here: false })
        }
        (RecoverAction::DiscardCopy, _) => Some(OperatorDecision::DiscardCopy),
    }
}

fn choice(advice: &Advice, decision: OperatorDecision) -> Option<&Choice> {
    advice.choices.iter().find(|choice| choice.decision == decision)
}

/// Returns the answer to a decision that is impossible now.
fn unavailable_decision(record: &MigrationRecord, advice: &Advice) -> DecisionAnswer {
    let message = if advice.choices.is_empty() {
        "no decision is needed here".to_owned()
    } else {
        let words: Vec<_> = advice.choices.iter().map(|choice| options(choice.decision)).collect();
        format!("nothing was done; decisions that are possible now: {}", words.join(", or "))
    };
    DecisionAnswer { risked: Vec::new(), is_over: record.state.standing().is_over(), message }
}

/// Returns the answer to a decision whose risk the operator has not accepted.
fn unaccepted_risk(choice: &Choice) -> DecisionAnswer {
    let message =
        "nothing was done; repeat the command with --accept-risk to accept the risk and carry it out";
    DecisionAnswer { risked: vec![described(choice)], is_over: false, message: message.to_owned() }
}

/// Formats a choice: its options, its effect, and its risk.
fn described(choice: &Choice) -> String {
    format!("{}: {}; risk: {}", options(choice.decision), choice.then, choice.risk)
}

/// Returns the command line options for a decision.
fn options(decision: OperatorDecision) -> &'static str {
    match decision {
        OperatorDecision::RunHere { force: false } => "--run-here",
        OperatorDecision::RunHere { force: true } => "--run-here --overrule-registry",
        OperatorDecision::DiscardCopy => "--discard-copy",
        OperatorDecision::WithoutRegistry { run_here: true } => "--run-here --without-registry",
        OperatorDecision::WithoutRegistry { run_here: false } => "--discard-copy --without-registry",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_named_with_the_host_where_they_are_right() {
        let host = |name| HostId::new(name).unwrap();
        let images = ["/pool/one.raw", "/pool/two.raw"].map(str::to_owned);
        let text = describe_copies(&images, &host("a"), &host("b"));
        assert!(text.starts_with("its disks were copied to b: /pool/one.raw, /pool/two.raw. If"), "{text}");
        assert!(text.ends_with("if it has not, its disks are those at a"), "{text}");
    }
}
