//! States of moves that commands of the controller have begun, from the journal: they are right after a restart, too.

use std::sync::Arc;

use api::Problem;
use api::progress::Standing;
use api::report::{FailureKind, Outcome, Report};
use engine::evacuation::{CommandState, MoveEnd, MoveFailure, MoveProgress};
use proto::message::{CommandAnswer, CommandVerb, MoveOrder};
use proto::{CommandId, MigrationId};
use store::journal::{CommandRecord, Journal, JournalError, MigrationRecord};

use crate::daemon::Daemon;
use api::ProblemKind;

/// Reason of a move that an agent has not begun before it ended.
const INTERRUPTED: &str = "the source's agent was restarted before it began the move";

/// Returns the state of a command that moves a VM; unknown for all others. The first call that finds the end of its migration records it as the answer.
pub(super) fn state(daemon: &Arc<Daemon>, id: &CommandId) -> Result<CommandState, JournalError> {
    let journal = &daemon.context.journal;
    let is_underway = || daemon.controller_link.underway().contains(id);
    let Some((record, begins)) = look(journal, id, is_underway)? else { return Ok(CommandState::Unknown) };
    if let Some(answer) = &record.answer {
        return Ok(answered(answer));
    }
    let CommandVerb::Move(order) = &record.command else { return Ok(CommandState::Unknown) };
    if begins {
        return Ok(CommandState::Underway { progress: None });
    }
    let Some(migration) = migration_of(daemon, id, &record, order)? else {
        let end =
            if record.is_cancelled { MoveEnd::Cancelled } else { failed(MoveFailure::Other, INTERRUPTED) };
        return settle(daemon, id, end);
    };
    let Some(found) = journal.migration(&migration)? else {
        return settle(daemon, id, failed(MoveFailure::Other, INTERRUPTED));
    };
    match end_of(daemon, &record, &found)? {
        None => Ok(CommandState::Underway { progress: progress(daemon, &migration) }),
        // It is not over: another end follows.
        Some(end @ MoveEnd::InDoubt { .. }) => Ok(CommandState::Ended { end }),
        Some(end) => settle(daemon, id, end),
    }
}

/// Returns the record of a command, and true if the command is being carried out and has no migration yet.
///
/// A command is underway before it is recorded, and until its migration or its answer is recorded. So one that is recorded
/// and not underway has either by now, unless the agent was restarted.
fn look(
    journal: &Journal,
    id: &CommandId,
    is_underway: impl FnOnce() -> bool,
) -> Result<Option<(CommandRecord, bool)>, JournalError> {
    let Some(record) = journal.command(id)? else { return Ok(None) };
    if record.answer.is_some() || record.epoch.is_some() {
        return Ok(Some((record, false)));
    }
    if is_underway() {
        return Ok(Some((record, true)));
    }
    Ok(journal.command(id)?.map(|record| (record, false)))
}

/// Returns true if a state is final.
pub(super) fn is_settled(state: &CommandState) -> bool {
    matches!(state, CommandState::Ended { end } if !matches!(end, MoveEnd::InDoubt { .. }))
}

/// Records the end of a command's move as its answer, and returns the recorded state: the first end that was recorded.
pub(super) fn settle(
    daemon: &Arc<Daemon>,
    id: &CommandId,
    end: MoveEnd,
) -> Result<CommandState, JournalError> {
    let state = CommandState::Ended { end };
    let journal = &daemon.context.journal;
    journal.answer_command(id, &answer_of(&state))?;
    let recorded = journal.command(id)?.and_then(|record| record.answer);
    Ok(recorded.map_or(state, |answer| answered(&answer)))
}

/// Returns a state as the answer to its command.
pub(super) fn answer_of(state: &CommandState) -> CommandAnswer {
    CommandAnswer::Move { state: serde_json::to_value(state).unwrap_or_default() }
}

/// Returns the end of a move whose migration was refused before it began.
pub(super) fn refused(problem: &Problem) -> MoveEnd {
    let kind = match problem.kind {
        // The source's own findings: no destination would help.
        ProblemKind::Refused => MoveFailure::Immovable,
        ProblemKind::Unavailable => MoveFailure::Connection,
        _ => MoveFailure::Other,
    };
    if problem.kind == ProblemKind::Gone {
        return MoveEnd::VmEnded;
    }
    let findings: Vec<_> = problem.findings.iter().map(|finding| finding.what.clone()).collect();
    if findings.is_empty() {
        return failed(kind, &problem.error);
    }
    failed(kind, &format!("{}: {}", problem.error, findings.join("; ")))
}

fn failed(kind: MoveFailure, reason: &str) -> MoveEnd {
    MoveEnd::Failed { kind, reason: reason.to_owned() }
}

/// Returns the state that an answer has.
fn answered(answer: &CommandAnswer) -> CommandState {
    match answer {
        CommandAnswer::Move { state } => {
            serde_json::from_value(state.clone()).unwrap_or(CommandState::Unknown)
        }
        _ => CommandState::Unknown,
    }
}

/// Returns the migration that a command has begun. An agent that ended between the migration's first entry and the
/// command's has not recorded it: then it is the VM's next migration to that host.
fn migration_of(
    daemon: &Arc<Daemon>,
    id: &CommandId,
    record: &CommandRecord,
    order: &MoveOrder,
) -> Result<Option<MigrationId>, JournalError> {
    if let Some(epoch) = record.epoch {
        return Ok(Some(MigrationId { vm: order.vm.clone(), epoch }));
    }
    let journal = &daemon.context.journal;
    let newest = journal.newest_migrations(u32::MAX)?;
    let begun = newest.into_iter().rev().find(|found| {
        let terms = &found.terms;
        terms.migration.vm == order.vm
            && record.largest_epoch.is_none_or(|largest| terms.migration.epoch > largest)
            && terms.source == daemon.context.config.host
            && terms.destination == order.to
    });
    let Some(begun) = begun else { return Ok(None) };
    journal.set_command_epoch(id, begun.id().epoch)?;
    Ok(Some(begun.id().clone()))
}

/// Returns the end of a migration; none as long as it goes on, and as long as anything of it is left at this host.
fn end_of(
    daemon: &Arc<Daemon>,
    command: &CommandRecord,
    record: &MigrationRecord,
) -> Result<Option<MoveEnd>, JournalError> {
    let is_driven = daemon.drivers().contains_key(record.id());
    let reason = || record.message.clone().unwrap_or_else(|| "no reason was recorded".to_owned());
    Ok(match daemon.standing_of(record) {
        Standing::InDoubt => Some(MoveEnd::InDoubt { reason: reason() }),
        Standing::Underway => None,
        _ if record.open || is_driven => None,
        Standing::Done => Some(MoveEnd::Moved),
        Standing::VmEnded => Some(MoveEnd::VmEnded),
        Standing::Failed => {
            let report = daemon.context.journal.report(record.id())?;
            Some(failure_of(command.is_cancelled, report.as_ref(), reason))
        }
    })
}

/// Returns the end of a move that has failed.
fn failure_of(is_cancelled: bool, report: Option<&Report>, reason: impl Fn() -> String) -> MoveEnd {
    if is_cancelled || report.is_some_and(|report| report.outcome == Outcome::Cancelled) {
        return MoveEnd::Cancelled;
    }
    let kind = match report.and_then(|report| report.failure) {
        Some(FailureKind::Refused) => MoveFailure::Refused,
        Some(FailureKind::Connection) => MoveFailure::Connection,
        Some(FailureKind::NotConverging) => MoveFailure::NotConverging,
        Some(FailureKind::Other) | None => MoveFailure::Other,
    };
    let reason = report.and_then(|report| report.reason.clone()).unwrap_or_else(reason);
    MoveEnd::Failed { kind, reason }
}

/// Returns the progress of a migration that is driven here.
fn progress(daemon: &Arc<Daemon>, id: &MigrationId) -> Option<MoveProgress> {
    let progress = daemon.drivers().get(id).map(|driven| driven.publisher.now())?;
    let left = if progress.round == 0 { progress.ram_bytes } else { progress.remaining_bytes };
    Some(MoveProgress {
        bytes_left: left,
        bytes_per_s: progress.rate_bytes_per_s,
        sent_bytes: progress.sent_bytes,
        phase: progress.phase as u32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::testing::World;
    use proto::Epoch;
    use proto::message::{Finding, Severity};

    #[test]
    fn refusals_before_the_beginning_have_kinds() {
        let refused_as = |kind| refused(&Problem::new(kind, "error", "advice"));
        assert_eq!(refused_as(ProblemKind::Gone), MoveEnd::VmEnded);
        for (kind, expected) in [
            (ProblemKind::Refused, MoveFailure::Immovable),
            (ProblemKind::Unavailable, MoveFailure::Connection),
            (ProblemKind::NotFound, MoveFailure::Other),
            (ProblemKind::Conflict, MoveFailure::Other),
        ] {
            assert_eq!(refused_as(kind), failed(expected, "error"));
        }
        let found = Finding::new(Severity::Blocker, "x", "a passed-through device", "");
        let problem =
            Problem::new(ProblemKind::Refused, "web cannot be migrated", "").with_findings(vec![found]);
        let expected = failed(MoveFailure::Immovable, "web cannot be migrated: a passed-through device");
        assert_eq!(refused(&problem), expected);
    }

    /// The closure is what other threads do between the first look at the journal and that at the list.
    #[test]
    fn a_command_that_begins_is_not_taken_for_interrupted() {
        let world = World::new();
        let journal = &world.context.journal;
        let id = CommandId::new("e1/1").unwrap();
        assert_eq!(look(journal, &id, || true).unwrap(), None, "its order may not have come");
        let record = CommandRecord::new(CommandVerb::Cordon);
        journal.begin_command(&id, &record).unwrap();
        assert_eq!(look(journal, &id, || true).unwrap(), Some((record.clone(), true)));
        assert_eq!(look(journal, &id, || false).unwrap(), Some((record.clone(), false)));
        let begins = || {
            journal.set_command_epoch(&id, Epoch(3)).unwrap();
            false
        };
        let begun = CommandRecord { epoch: Some(Epoch(3)), ..record };
        assert_eq!(look(journal, &id, begins).unwrap(), Some((begun, false)));
    }

    #[test]
    fn ends_in_doubt_are_not_settled() {
        let ended = |end| CommandState::Ended { end };
        assert!(is_settled(&ended(MoveEnd::Moved)));
        assert!(!is_settled(&ended(MoveEnd::InDoubt { reason: String::new() })));
        assert!(!is_settled(&CommandState::Unknown));
    }
}
