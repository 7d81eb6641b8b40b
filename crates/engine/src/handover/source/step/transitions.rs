//! Transitions that several of the source's states share, and helpers.

use proto::Incarnation;
use proto::message::RegistryRequest;

use super::{Effect, Report, SourceTransition, State};
use crate::handover::registry::{self, RequestPurpose};
use crate::handover::terms::MigrationTerms;
use crate::handover::transition::Transition;

/// COMMITTED: journalled, and the source's QEMU frozen, before GO can reach the destination.
pub(super) fn commit(terms: &MigrationTerms, incarnation: &Incarnation, run: bool) -> SourceTransition {
    enter(State::Committed { incarnation: incarnation.clone(), run, has_run: false })
        .then([Effect::FreezeQemu, Effect::SendGo { incarnation: incarnation.clone(), run }])
        .asking(RequestPurpose::Offer, offer(terms, incarnation, run))
}

/// COMMITTED, with the durable note that the guest has run at the destination.
pub(super) fn serve(incarnation: &Incarnation, run: bool) -> SourceTransition {
    enter(State::Committed { incarnation: incarnation.clone(), run, has_run: true })
        .then([Effect::Report(Report::Incomplete)])
}

/// COMMITTED by a source that has no QEMU to hold.
pub(super) fn commit_without_qemu(
    terms: &MigrationTerms,
    incarnation: &Incarnation,
    run: bool,
) -> SourceTransition {
    enter(State::QemuLost { incarnation: Some(incarnation.clone()), run })
        .then([Effect::SendGo { incarnation: incarnation.clone(), run }])
        .asking(RequestPurpose::Offer, offer(terms, incarnation, run))
}

/// ABORTED where the guest was not stopped, or has ended.
pub(super) fn abort(why: Report) -> SourceTransition {
    enter(State::Aborted).then([Effect::UndoAll, Effect::SendAbort, Effect::Report(why)])
}

/// ABORTED where the guest is stopped: it is continued first, and cleaning up waits.
pub(super) fn abort_stopped(run: bool, why: Report) -> SourceTransition {
    if run {
        enter(State::Aborting).when("run").then([Effect::ContinueVm, Effect::SendAbort, Effect::Report(why)])
    } else {
        abort(why).when("paused")
    }
}

pub(super) fn enter_qemu_lost(
    terms: &MigrationTerms,
    incarnation: Option<&Incarnation>,
    run: bool,
) -> SourceTransition {
    let state = State::QemuLost { incarnation: incarnation.cloned(), run };
    repeat_messages(enter(state).then([Effect::Report(Report::QemuLost)]), terms, incarnation, run)
}

/// Repeated messages of a source that has lost its QEMU.
pub(super) fn repeat_messages(
    to: SourceTransition,
    terms: &MigrationTerms,
    incarnation: Option<&Incarnation>,
    run: bool,
) -> SourceTransition {
    match incarnation {
        Some(incarnation) => to
            .when("committed")
            .then([Effect::SendGo { incarnation: incarnation.clone(), run }])
            .asking(RequestPurpose::Offer, offer(terms, incarnation, run)),
        None => to.when("not-committed").then([Effect::AskDestination]),
    }
}

/// Towards RETURNED: through the registry if there is one.
pub(super) fn reclaim(
    terms: &MigrationTerms,
    incarnation: Option<&Incarnation>,
    run: bool,
    force: bool,
) -> SourceTransition {
    match terms.registry {
        None => enter_returned(run).within("no-registry"),
        Some(since) => {
            let acquire = Some(registry::acquire_by_source(terms, since));
            let state = State::Reclaiming { incarnation: incarnation.cloned(), run, force };
            enter(state).when("registry").then(ask(RequestPurpose::Acquire, acquire))
        }
    }
}

/// The operator's decision replaces that of the registry, which is lost.
pub(super) fn without_registry(
    incarnation: Option<&Incarnation>,
    run: bool,
    run_here: bool,
) -> SourceTransition {
    if run_here {
        enter_returned(run).within("run-here").within("without-registry")
    } else {
        finish(incarnation, run).within("discard-copy").within("without-registry")
    }
}

/// RETURNED: the destination has refused, or the registry or an operator has decided.
pub(super) fn enter_returned(run: bool) -> SourceTransition {
    if run {
        enter(State::Returning).when("run").then([
            Effect::ThawQemu,
            Effect::ContinueVm,
            Effect::Report(Report::Returned),
        ])
    } else {
        enter(State::Returned).when("paused").then([
            Effect::ThawQemu,
            Effect::UndoAll,
            Effect::Report(Report::Returned),
        ])
    }
}

/// The destination owns the VM: the source waits as before.
pub(super) fn abandon_reclaim(incarnation: Option<&Incarnation>, run: bool) -> SourceTransition {
    let lost = Effect::Report(Report::DestinationOwns);
    match incarnation {
        Some(incarnation) => {
            enter(State::Committed { incarnation: incarnation.clone(), run, has_run: false })
                .when("destination-owns")
                .then([lost, Effect::SendGo { incarnation: incarnation.clone(), run }])
        }
        None => enter(State::QemuLost { incarnation: None, run })
            .when("destination-owns")
            .when("qemu-lost")
            .then([lost, Effect::AskDestination]),
    }
}

pub(super) fn finish(incarnation: Option<&Incarnation>, run: bool) -> SourceTransition {
    enter(State::Done { incarnation: incarnation.cloned(), run })
        .then([Effect::QuitQemu, Effect::Report(Report::Done)])
}

/// Enters a state, by way of the journal. Participants learn of an entry that concerns them before any other program
/// does.
pub(super) fn enter(state: State) -> SourceTransition {
    let informs = match state {
        State::Committed { has_run: false, .. } => Some(Effect::CommitParticipants),
        State::Committed { has_run: true, .. } | State::Done { .. } => Some(Effect::NotifyRunning),
        _ => None,
    };
    let durable = state.durable();
    Transition::to(state.clone()).then([Effect::Journal { state, durable }]).then(informs)
}

pub(super) fn offer(terms: &MigrationTerms, incarnation: &Incarnation, run: bool) -> Option<RegistryRequest> {
    terms.registry.map(|since| registry::offer(terms, since, incarnation, run))
}

pub(super) fn ask(why: RequestPurpose, request: Option<RegistryRequest>) -> Option<Effect> {
    request.map(|request| Effect::Registry { why, request })
}
