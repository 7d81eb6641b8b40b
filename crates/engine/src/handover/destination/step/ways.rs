//! Transitions that several of the destination's states share, and helpers.

use proto::Incarnation;
use proto::message::RegisterRequest;

use super::{Do, In, Moved, Say, Taken};
use crate::handover::register::{self, RegisterAnswer, Standing, Use};
use crate::handover::{Ignored, Move, Step, Terms};

/// Follows GO, from the source, the registry's offer, or an operator.
pub(super) fn obey(terms: &Terms, incarnation: &Incarnation, run: bool) -> Moved {
    let take = terms.register.map(|since| register::take_by_destination(terms, since));
    match take {
        None => start(incarnation, run).within("no-register"),
        take => enter(In::Taking { incarnation: incarnation.clone(), run })
            .when("register")
            .then(ask(Use::Take, take)),
    }
}

/// This host owns the guest. STARTING is in the journal before `cont` is sent, so that a restarted agent knows that a
/// vCPU may have run.
pub(super) fn start(incarnation: &Incarnation, run: bool) -> Moved {
    if run {
        enter(In::Starting { incarnation: incarnation.clone(), again: false }).when("run").then([Do::Cont])
    } else {
        activate(incarnation).when("paused")
    }
}

/// Sends another `cont`, after the registry has confirmed the owner again.
pub(super) fn cont_again(terms: &Terms, to: Moved) -> Moved {
    if terms.register.is_some() {
        to.when("register").then(ask(Use::Read, Some(register::read(terms))))
    } else {
        to.when("no-register").then([Do::Cont])
    }
}

pub(super) fn activate(incarnation: &Incarnation) -> Moved {
    enter(In::Active { incarnation: incarnation.clone() }).then([
        Do::Announce,
        Do::SendRunning,
        Do::Report(Say::Active),
    ])
}

/// Like [`activate`], but the source still has pages to send.
pub(super) fn run_incomplete(incarnation: &Incarnation) -> Moved {
    enter(In::Completing { incarnation: incarnation.clone() }).then([
        // QEMU may be waiting for a page, and answer late.
        Do::SendIncomplete,
        Do::Announce,
        Do::Report(Say::Incomplete),
    ])
}

pub(super) fn refuse_through_register(terms: &Terms) -> Moved {
    if terms.register.is_some() { give_back(terms).when("register") } else { refuse().when("no-register") }
}

pub(super) fn give_back(terms: &Terms) -> Moved {
    enter(In::Refusing).then(ask(Use::GiveBack, Some(register::give_back(terms))))
}

/// REFUSED is sent only when no process remains that could hold the disks' locks.
pub(super) fn refuse() -> Moved {
    enter(In::Refused).then([Do::Discard, Do::SendRefused, Do::Report(Say::Refused)])
}

/// REFUSED by the operator's decision: the registry, which would have to record it first, is lost.
pub(super) fn refuse_unregistered() -> Moved {
    refuse().when("without-register").when("run-elsewhere")
}

pub(super) fn discard(why: Say) -> Moved {
    enter(In::Discarded).then([Do::Discard, Do::Report(why)])
}

pub(super) fn crash(ran: bool) -> Moved {
    let tell = if ran { Do::SendRunning } else { Do::SendCrashed };
    enter(In::Crashed { ran }).then([tell, Do::Report(Say::Crashed)])
}

/// The copy is lost with its host: it is unknown whether it has run.
pub(super) fn lost() -> Moved {
    enter(In::Crashed { ran: false }).then([Do::SendCrashed, Do::Report(Say::Lost)])
}

/// The host has booted since PREPARED: the copy is lost, and later entries may be. The registry has recorded whether
/// it can have run, or the source knows that it cannot have.
pub(super) fn bereave(terms: &Terms) -> Moved {
    let bereft = enter(In::Bereft);
    match terms.register {
        Some(_) => bereft
            .when("register")
            .then([Do::Report(Say::Bereft)])
            .then(ask(Use::Read, Some(register::read(terms)))),
        None => bereft.when("no-register").then([Do::AskSource, Do::Report(Say::Bereft)]),
    }
}

/// Enters a state, by way of the journal.
pub(super) fn enter(state: In) -> Moved {
    let durable = state.durable();
    Move::to(state.clone()).then([Do::Journal { state, durable }])
}

pub(super) fn ask(why: Use, request: Option<RegisterRequest>) -> Option<Do> {
    request.map(|request| Do::Register { why, request })
}

pub(super) enum Heard {
    Record(Standing),
    Unreachable,
    Unknown,
}

pub(super) fn heard(terms: &Terms, answer: &RegisterAnswer) -> Heard {
    match answer {
        RegisterAnswer::Stands(record) => Heard::Record(register::standing(terms, record.as_ref())),
        RegisterAnswer::Unreachable => Heard::Unreachable,
        RegisterAnswer::Unknown => Heard::Unknown,
    }
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
pub(super) fn moved(to: Moved) -> Taken {
    Some(Step::Moved(to))
}

/// Stays in the state; the event is legal and has no effects.
pub(super) fn stay(state: In) -> Taken {
    moved(Move::to(state))
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
pub(super) fn ignored(why: Ignored) -> Taken {
    Some(Step::Ignored(why))
}
