//! Transitions that several of the destination's states share, and helpers.

use proto::Incarnation;
use proto::message::RegistryRequest;

use super::{DestinationTransition, Effect, Report, State};
use crate::handover::registry::{self, RequestPurpose};
use crate::handover::terms::MigrationTerms;
use crate::handover::transition::Transition;

/// Effects behind the entry of a state in which the guest is this host's for good.
const COMMIT_TO_GUEST: [Effect; 3] = [Effect::ThawQemu, Effect::CommitParticipants, Effect::Announce];

/// Follows GO, from the source, the registry's offer, or an operator.
pub(super) fn follow_go(
    terms: &MigrationTerms,
    incarnation: &Incarnation,
    run: bool,
) -> DestinationTransition {
    let acquire = terms.registry.map(|since| registry::acquire_by_destination(terms, since));
    match acquire {
        None => start(incarnation, run).within("no-registry"),
        acquire => enter(State::Acquiring { incarnation: incarnation.clone(), run })
            .when("registry")
            .then(ask(RequestPurpose::Acquire, acquire)),
    }
}

/// This host owns the guest. STARTING is in the journal before `cont` is sent, so that a restarted agent knows that a
/// vCPU may have run.
pub(super) fn start(incarnation: &Incarnation, run: bool) -> DestinationTransition {
    if run {
        enter(State::Starting { incarnation: incarnation.clone(), again: false })
            .when("run")
            .then([Effect::Cont])
    } else {
        activate(incarnation).when("paused")
    }
}

/// Sends another `cont`, after the registry has confirmed the owner again.
pub(super) fn cont_again(terms: &MigrationTerms, to: DestinationTransition) -> DestinationTransition {
    if terms.registry.is_some() {
        to.when("registry").then(ask(RequestPurpose::Read, Some(registry::read(terms))))
    } else {
        to.when("no-registry").then([Effect::Cont])
    }
}

/// The guest is this host's for good: it runs, or its user had paused it.
pub(super) fn activate(incarnation: &Incarnation) -> DestinationTransition {
    enter(State::Active { incarnation: incarnation.clone() })
        .then(COMMIT_TO_GUEST)
        .then([Effect::SendRunning, Effect::Report(Report::Active)])
}

/// Like [`activate`], but the source still has pages to send.
pub(super) fn run_incomplete(incarnation: &Incarnation) -> DestinationTransition {
    enter(State::Completing { incarnation: incarnation.clone() })
        // QEMU may be waiting for a page, and answer late.
        .then([Effect::SendIncomplete])
        .then(COMMIT_TO_GUEST)
        .then([Effect::Report(Report::Incomplete)])
}

pub(super) fn refuse_through_registry(terms: &MigrationTerms) -> DestinationTransition {
    if terms.registry.is_some() {
        return_to_source(terms).when("registry")
    } else {
        refuse().when("no-registry")
    }
}

pub(super) fn return_to_source(terms: &MigrationTerms) -> DestinationTransition {
    enter(State::Refusing).then(ask(RequestPurpose::ReturnToSource, Some(registry::return_to_source(terms))))
}

/// REFUSED is sent only when no process remains that could hold the disks' locks.
pub(super) fn refuse() -> DestinationTransition {
    enter(State::Refused).then([Effect::DestroyCopy, Effect::SendRefused, Effect::Report(Report::Refused)])
}

/// REFUSED by the operator's decision: the registry, which would have to record it first, is lost.
pub(super) fn refuse_without_registry() -> DestinationTransition {
    refuse().when("without-registry").when("discard-copy")
}

pub(super) fn destroy_copy(why: Report) -> DestinationTransition {
    enter(State::CopyDestroyed).then([Effect::DestroyCopy, Effect::Report(why)])
}

pub(super) fn crash(has_run: bool) -> DestinationTransition {
    let tell = if has_run { Effect::SendRunning } else { Effect::SendCrashed };
    enter(State::Crashed { has_run }).then([tell, Effect::Report(Report::Crashed)])
}

/// The copy is lost with its host: it is unknown whether it has run.
pub(super) fn crash_with_host() -> DestinationTransition {
    enter(State::Crashed { has_run: false }).then([Effect::SendCrashed, Effect::Report(Report::Lost)])
}

/// The host has booted since PREPARED: the copy is lost, and later entries may be. The registry has recorded whether
/// it can have run, or the source knows that it cannot have.
pub(super) fn enter_qemu_lost(terms: &MigrationTerms) -> DestinationTransition {
    let qemu_lost = enter(State::QemuLost);
    match terms.registry {
        Some(_) => qemu_lost
            .when("registry")
            .then([Effect::Report(Report::QemuLost)])
            .then(ask(RequestPurpose::Read, Some(registry::read(terms)))),
        None => qemu_lost.when("no-registry").then([Effect::AskSource, Effect::Report(Report::QemuLost)]),
    }
}

/// Enters a state, by way of the journal.
pub(super) fn enter(state: State) -> DestinationTransition {
    let durable = state.durable();
    Transition::to(state.clone()).then([Effect::Journal { state, durable }])
}

pub(super) fn ask(why: RequestPurpose, request: Option<RegistryRequest>) -> Option<Effect> {
    request.map(|request| Effect::Registry { why, request })
}
