//! Commands of the controller: a closed list of verbs, carried out by the same functions as requests of users.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::{Control, Limits, MigrateRequest, Problem, ProblemKind, StopPolicy};
use engine::evacuation::{CommandState, HostFacts, MoveEnd, MoveFailure};
use proto::limits::MESSAGE_BYTES;
use proto::message::{CommandAnswer, CommandVerb, MoveOrder, MovePolicy};
use proto::{CommandId, MigrationId};
use serde_json::Value;
use store::journal::{CommandRecord, JournalError};
use tracing::{info, warn};

use super::vms::is_owned;
use super::{contents, moves};
use crate::daemon::Daemon;
use crate::daemon::control::UserApi;
use crate::daemon::drive::internal;

/// Most moves that have not begun and were given other limits.
const MOST_EARLY_LIMITS: usize = 1024;
/// Largest document in an answer, in bytes: the message around it needs some space, too.
const DOCUMENT_BYTES: usize = MESSAGE_BYTES - (64 << 10);

/// Carries out a command, unless its term is old or it was carried out before. Returns the answer.
pub(super) fn carry_out(
    daemon: &Arc<Daemon>,
    term: u64,
    id: &CommandId,
    command: &CommandVerb,
) -> CommandAnswer {
    let answer = check_term(daemon, term).and_then(|stale| match stale {
        Some(stale) => Ok(stale),
        None => answer(daemon, id, command),
    });
    answer.unwrap_or_else(|problem| {
        warn!(command = %id, error = problem.error, "a command of the controller was not carried out");
        let problem = serde_json::to_value(&problem).unwrap_or_default();
        CommandAnswer::Refused { problem }
    })
}

/// Returns the answer to a command of a term that is smaller than one that this agent has seen.
fn check_term(daemon: &Arc<Daemon>, term: u64) -> Result<Option<CommandAnswer>, Problem> {
    let largest_term = daemon.context.journal.learn_term(term).map_err(|error| internal(&error))?;
    Ok((largest_term > term).then_some(CommandAnswer::Stale { largest_term }))
}

fn answer(daemon: &Arc<Daemon>, id: &CommandId, command: &CommandVerb) -> Result<CommandAnswer, Problem> {
    let user = || UserApi(Arc::clone(daemon));
    match command {
        CommandVerb::Move(order) => begin_move(daemon, id, order),
        CommandVerb::Check(order) => {
            let report = user().check(request(order))?;
            Ok(CommandAnswer::Checked { report: document(&report)? })
        }
        CommandVerb::Report { migration } => {
            let report = user().report(migration)?;
            Ok(CommandAnswer::Report { report: document(&report)? })
        }
        CommandVerb::Facts { commands } => {
            let facts = facts(daemon, commands).map_err(|error| internal(&error))?;
            Ok(CommandAnswer::Facts { facts: document(&facts)? })
        }
        CommandVerb::Cancel { of } => cancel(daemon, of, command),
        CommandVerb::Limit { of, bandwidth_bytes_per_s, max_downtime_ms } => {
            let limits = Limits {
                bandwidth_bytes_per_s: *bandwidth_bytes_per_s,
                max_downtime_ms: *max_downtime_ms,
                ..Limits::default()
            };
            limit(daemon, of, limits)
        }
        CommandVerb::Cordon => once(daemon, id, command, || daemon.context.journal.set_cordoned(true)),
        CommandVerb::Uncordon => once(daemon, id, command, || daemon.context.journal.set_cordoned(false)),
    }
}

/// Carries out a short command, unless it was begun before.
fn once(
    daemon: &Arc<Daemon>,
    id: &CommandId,
    command: &CommandVerb,
    work: impl FnOnce() -> Result<(), JournalError>,
) -> Result<CommandAnswer, Problem> {
    let journal = &daemon.context.journal;
    let known =
        journal.begin_command(id, &CommandRecord::new(command.clone())).map_err(|error| internal(&error))?;
    if let Some(known) = known {
        if known.command != *command {
            return Err(reused(id));
        }
        if let Some(answer) = known.answer {
            return Ok(answer);
        }
    }
    info!(command = %id, ?command, "a command of the controller");
    work()
        .and_then(|()| journal.answer_command(id, &CommandAnswer::Done))
        .map_err(|error| internal(&error))?;
    Ok(CommandAnswer::Done)
}

/// Returns the problem of a command whose id another one has: the controller's records are old.
fn reused(id: &CommandId) -> Problem {
    let error = format!("another command has had the id {id} before");
    let advice = "the controller's records are old; start it with --least-term";
    Problem::new(ProblemKind::Conflict, error, advice)
}

/// Begins a move, unless the command was begun before. Returns its state.
fn begin_move(daemon: &Arc<Daemon>, id: &CommandId, order: &MoveOrder) -> Result<CommandAnswer, Problem> {
    let Some(_underway) = Underway::begin(daemon, id) else {
        return Ok(moves::answer_of(&CommandState::Underway { progress: None }));
    };
    let state = try_move(daemon, id, order);
    // Those of a move that has not begun are of no use any longer.
    daemon.controller_link.early_limits().remove(id);
    Ok(moves::answer_of(&state.map_err(|error| internal(&error))?))
}

fn try_move(daemon: &Arc<Daemon>, id: &CommandId, order: &MoveOrder) -> Result<CommandState, JournalError> {
    let journal = &daemon.context.journal;
    let largest_epoch = Some(journal.largest_epoch(&order.vm)?);
    let record = CommandRecord { largest_epoch, ..CommandRecord::new(CommandVerb::Move(order.clone())) };
    if let Some(known) = journal.begin_command(id, &record)? {
        let is_same = match &known.command {
            // Another controller may give it another rate.
            CommandVerb::Move(begun) => (&begun.vm, &begun.to) == (&order.vm, &order.to),
            // It was cancelled before it arrived.
            CommandVerb::Cancel { .. } => true,
            _ => false,
        };
        if is_same {
            return moves::state(daemon, id);
        }
        // It is not journaled: the id is that of the other command.
        let reason = reused(id).error;
        warn!(command = %id, vm = %order.vm, to = %order.to, error = reason, "a move does not begin");
        let end = MoveEnd::Failed { kind: MoveFailure::Other, reason };
        return Ok(CommandState::Ended { end });
    }
    info!(command = %id, vm = %order.vm, to = %order.to, "the controller moves a VM");
    if daemon.context.config.peer(&order.to).is_none() {
        let reason = format!(
            "{} does not know host {}; add [hosts.{}] there",
            daemon.context.config.host, order.to, order.to
        );
        return moves::settle(daemon, id, MoveEnd::Failed { kind: MoveFailure::Refused, reason });
    }
    let begun = match daemon.begin(&request(order)) {
        Ok(status) => status.id,
        Err(problem) => {
            warn!(command = %id, vm = %order.vm, error = problem.error, "the move cannot begin");
            return moves::settle(daemon, id, moves::refused(&problem));
        }
    };
    journal.set_command_epoch(id, begun.epoch)?;
    let early = daemon.controller_link.early_limits().remove(id);
    if let Some(limits) = early
        && let Err(problem) = UserApi(Arc::clone(daemon)).set_limits(&begun, limits)
    {
        warn!(command = %id, error = problem.error, "the limits of a move were not changed");
    }
    // It may have been cancelled before it had a migration.
    if journal.command(id)?.is_some_and(|record| record.is_cancelled) {
        cancel_migration(daemon, &begun);
    }
    moves::state(daemon, id)
}

/// Changes limits of a move. One that has not begun yet is given them when it does.
fn limit(daemon: &Arc<Daemon>, of: &CommandId, limits: Limits) -> Result<CommandAnswer, Problem> {
    let link = &daemon.controller_link;
    {
        // As long as this is locked, no move takes its limits: it has recorded its migration before.
        let mut early = link.early_limits();
        let record = daemon.context.journal.command(of).map_err(|error| internal(&error))?;
        // The order of a move that is not known is on another thread.
        let is_early = record.is_none_or(|record| {
            record.epoch.is_none() && record.answer.is_none() && link.underway().contains(of)
        });
        if is_early {
            if early.len() >= MOST_EARLY_LIMITS {
                early.clear();
            }
            early.insert(of.clone(), limits);
            return Ok(CommandAnswer::Done);
        }
    }
    let migration = known_migration(daemon, of)?;
    UserApi(Arc::clone(daemon)).set_limits(&migration, limits)?;
    Ok(CommandAnswer::Done)
}

/// Cancels a move; one that was never begun never will be.
fn cancel(daemon: &Arc<Daemon>, of: &CommandId, command: &CommandVerb) -> Result<CommandAnswer, Problem> {
    let journal = &daemon.context.journal;
    let end = CommandState::Ended { end: MoveEnd::Cancelled };
    let never = CommandRecord {
        is_cancelled: true,
        answer: Some(moves::answer_of(&end)),
        ..CommandRecord::new(command.clone())
    };
    let known = journal.begin_command(of, &never).map_err(|error| internal(&error))?;
    info!(command = %of, is_known = known.is_some(), "the controller cancels a move");
    if known.is_some_and(|known| known.answer.is_none()) {
        journal.set_command_cancelled(of).map_err(|error| internal(&error))?;
        let begun = journal.command(of).map_err(|error| internal(&error))?;
        if let Some((vm, epoch)) = begun.and_then(|begun| match begun.command {
            CommandVerb::Move(order) => Some((order.vm, begun.epoch?)),
            _ => None,
        }) {
            cancel_migration(daemon, &MigrationId { vm, epoch });
        }
    }
    Ok(CommandAnswer::Done)
}

fn cancel_migration(daemon: &Arc<Daemon>, id: &MigrationId) {
    // The end that really comes is reported.
    if let Err(problem) = UserApi(Arc::clone(daemon)).cancel(id) {
        warn!(migration = %id, error = problem.error, "cannot cancel the migration");
    }
}

/// Returns the migration that a command has begun.
fn known_migration(daemon: &Arc<Daemon>, of: &CommandId) -> Result<MigrationId, Problem> {
    let record = daemon.context.journal.command(of).map_err(|error| internal(&error))?;
    let migration = record.and_then(|record| match record.command {
        CommandVerb::Move(order) => Some(MigrationId { vm: order.vm, epoch: record.epoch? }),
        _ => None,
    });
    migration.ok_or_else(|| {
        let error = format!("command {of} has begun no migration on this host");
        Problem::new(ProblemKind::NotFound, error, "ask the agent for its facts")
    })
}

/// Returns what this agent knows at this moment.
fn facts(daemon: &Arc<Daemon>, commands: &[CommandId]) -> Result<HostFacts, JournalError> {
    let context = &daemon.context;
    let mut states = BTreeMap::new();
    // Before the VMs: a move that has ended in between has its VM where it was found.
    for id in commands {
        if let Ok(name) = id.as_str().parse() {
            states.insert(name, moves::state(daemon, id)?);
        }
    }
    let mut vms = std::collections::BTreeSet::new();
    for record in context.journal.vms()? {
        let latest = context.journal.latest(&record.vm)?;
        if is_owned(latest.as_ref()) && record.process(&context.boot_id).is_ok() {
            vms.insert(record.vm.to_string());
        }
    }
    let namespaces_are_hosts = context.config.controller.as_ref().is_some_and(|one| one.namespaces_are_hosts);
    let contents = contents::contents(daemon, namespaces_are_hosts);
    Ok(HostFacts { host: context.config.host.to_string(), vms, commands: states, contents })
}

/// Returns the request of a user that an order corresponds to.
fn request(order: &MoveOrder) -> MigrateRequest {
    let mut request = MigrateRequest::new(order.vm.clone(), order.to.clone());
    request.verify = order.verify;
    request.options.bandwidth_bytes_per_s = order.bandwidth_bytes_per_s;
    request.options.policy = order.policy.map(|policy| match policy {
        MovePolicy::Pattern => StopPolicy::Pattern,
        MovePolicy::Hybrid => StopPolicy::Hybrid,
        MovePolicy::Sla => StopPolicy::Sla,
    });
    request
}

/// Returns a document of an answer, if it fits into a message.
fn document(value: &impl serde::Serialize) -> Result<Value, Problem> {
    let unfit = |error: String| Problem::new(ProblemKind::Internal, error, "ask on the host itself");
    let document = serde_json::to_value(value).map_err(|error| unfit(error.to_string()))?;
    let bytes = document.to_string().len();
    if bytes > DOCUMENT_BYTES {
        return Err(unfit(format!("the answer has {bytes} bytes, more than a message can have")));
    }
    Ok(document)
}

/// Entry in the list of commands that are being carried out.
struct Underway<'a> {
    daemon: &'a Arc<Daemon>,
    id: &'a CommandId,
}

impl<'a> Underway<'a> {
    /// Enters a command; none if it is in the list already.
    fn begin(daemon: &'a Arc<Daemon>, id: &'a CommandId) -> Option<Self> {
        daemon.controller_link.underway().insert(id.clone()).then_some(Self { daemon, id })
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        self.daemon.controller_link.underway().remove(self.id);
    }
}
