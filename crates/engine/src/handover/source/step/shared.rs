//! Transitions that several of the source's states share, and helpers.

use proto::Incarnation;
use proto::message::RegistryRequest;

use super::{Do, In, Moved, Notice, StepResult};
use crate::handover::registry::{self, RecordMeaning, RegistryAnswer, RequestPurpose};
use crate::handover::{Ignored, MigrationTerms, Move, Step};

/// COMMITTED: journalled, and the source's QEMU held, before GO can reach the destination.
pub(super) fn commit(terms: &MigrationTerms, incarnation: &Incarnation, run: bool) -> Moved {
    enter(In::Committed { incarnation: incarnation.clone(), run, ran: false })
        .then([Do::PauseQemu, Do::SendGo { incarnation: incarnation.clone(), run }])
        .asking(RequestPurpose::Offer, offer(terms, incarnation, run))
}

/// COMMITTED, with the durable note that the guest has run at the destination.
pub(super) fn serve(incarnation: &Incarnation, run: bool) -> Moved {
    enter(In::Committed { incarnation: incarnation.clone(), run, ran: true })
        .then([Do::Report(Notice::Incomplete)])
}

/// COMMITTED by a source that has no QEMU to hold.
pub(super) fn commit_without_qemu(terms: &MigrationTerms, incarnation: &Incarnation, run: bool) -> Moved {
    enter(In::QemuLost { incarnation: Some(incarnation.clone()), run })
        .then([Do::SendGo { incarnation: incarnation.clone(), run }])
        .asking(RequestPurpose::Offer, offer(terms, incarnation, run))
}

/// ABORTED where the guest was not stopped, or has ended.
pub(super) fn abort(why: Notice) -> Moved {
    enter(In::Aborted).then([Do::UndoAll, Do::SendAbort, Do::Report(why)])
}

/// ABORTED where the guest is stopped: it is continued first, and cleaning up waits.
pub(super) fn abort_stopped(run: bool, why: Notice) -> Moved {
    if run {
        enter(In::Aborting).when("run").then([Do::ContinueVm, Do::SendAbort, Do::Report(why)])
    } else {
        abort(why).when("paused")
    }
}

pub(super) fn enter_qemu_lost(terms: &MigrationTerms, incarnation: Option<&Incarnation>, run: bool) -> Moved {
    let state = In::QemuLost { incarnation: incarnation.cloned(), run };
    repeat_messages(enter(state).then([Do::Report(Notice::QemuLost)]), terms, incarnation, run)
}

/// Repeated messages of a source that has lost its QEMU.
pub(super) fn repeat_messages(
    to: Moved,
    terms: &MigrationTerms,
    incarnation: Option<&Incarnation>,
    run: bool,
) -> Moved {
    match incarnation {
        Some(incarnation) => to
            .when("committed")
            .then([Do::SendGo { incarnation: incarnation.clone(), run }])
            .asking(RequestPurpose::Offer, offer(terms, incarnation, run)),
        None => to.when("not-committed").then([Do::AskDestination]),
    }
}

/// Towards RETURNED: through the registry if there is one.
pub(super) fn reclaim(
    terms: &MigrationTerms,
    incarnation: Option<&Incarnation>,
    run: bool,
    force: bool,
) -> Moved {
    match terms.registry {
        None => enter_returned(run).within("no-registry"),
        Some(since) => {
            let take = Some(registry::acquire_by_source(terms, since));
            let state = In::Reclaiming { incarnation: incarnation.cloned(), run, force };
            enter(state).when("registry").then(ask(RequestPurpose::Take, take))
        }
    }
}

/// The operator's decision replaces that of the registry, which is lost.
pub(super) fn without_registry(incarnation: Option<&Incarnation>, run: bool, run_here: bool) -> Moved {
    if run_here {
        enter_returned(run).within("run-here").within("without-registry")
    } else {
        finish(incarnation, run).within("run-elsewhere").within("without-registry")
    }
}

/// RETURNED: the destination has refused, or the registry or an operator has decided.
pub(super) fn enter_returned(run: bool) -> Moved {
    if run {
        enter(In::Returning).when("run").then([Do::ResumeQemu, Do::ContinueVm, Do::Report(Notice::Returned)])
    } else {
        enter(In::Returned).when("paused").then([Do::ResumeQemu, Do::UndoAll, Do::Report(Notice::Returned)])
    }
}

/// The destination owns the VM: the source waits as before.
pub(super) fn abandon_reclaim(incarnation: Option<&Incarnation>, run: bool) -> Moved {
    let lost = Do::Report(Notice::DestinationOwns);
    match incarnation {
        Some(incarnation) => enter(In::Committed { incarnation: incarnation.clone(), run, ran: false })
            .when("destination-owns")
            .then([lost, Do::SendGo { incarnation: incarnation.clone(), run }]),
        None => enter(In::QemuLost { incarnation: None, run })
            .when("destination-owns")
            .when("qemu-lost")
            .then([lost, Do::AskDestination]),
    }
}

pub(super) fn finish(incarnation: Option<&Incarnation>, run: bool) -> Moved {
    enter(In::Done { incarnation: incarnation.cloned(), run }).then([Do::QuitQemu, Do::Report(Notice::Done)])
}

/// Enters a state, by way of the journal.
pub(super) fn enter(state: In) -> Moved {
    let durable = state.durable();
    Move::to(state.clone()).then([Do::Journal { state, durable }])
}

pub(super) fn offer(terms: &MigrationTerms, incarnation: &Incarnation, run: bool) -> Option<RegistryRequest> {
    terms.registry.map(|since| registry::offer(terms, since, incarnation, run))
}

pub(super) fn ask(why: RequestPurpose, request: Option<RegistryRequest>) -> Option<Do> {
    request.map(|request| Do::Registry { why, request })
}

pub(super) enum RegistryView {
    Record(RecordMeaning),
    Unreachable,
    Unknown,
}

pub(super) fn read(terms: &MigrationTerms, answer: &RegistryAnswer) -> RegistryView {
    match answer {
        RegistryAnswer::Record(record) => {
            RegistryView::Record(registry::interpret_record(terms, record.as_ref()))
        }
        RegistryAnswer::Unreachable => RegistryView::Unreachable,
        RegistryAnswer::Unknown => RegistryView::Unknown,
    }
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
pub(super) fn moved(to: Moved) -> StepResult {
    Some(Step::Moved(to))
}

/// Stays in the state; the event is legal and has no effects.
pub(super) fn stay(state: In) -> StepResult {
    moved(Move::to(state))
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
pub(super) fn ignored(why: Ignored) -> StepResult {
    Some(Step::Ignored(why))
}
