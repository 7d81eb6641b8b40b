//! The source's transitions, state by state. `None` marks an illegal event.

#![allow(clippy::match_same_arms, reason = "one arm for each case, with its own reason")]

use proto::Incarnation;
use proto::message::{RegisterRequest, Verdict};

use super::SourceEffect as Do;
use super::SourceEvent as On;
use super::SourceReport as Say;
use super::SourceState as In;
use crate::handover::recover::Decision;
use crate::handover::register::{self, RegisterAnswer, Standing, Use};
use crate::handover::{Found, Ignored, Move, Step, Terms};

type Moved = Move<In, Do>;
type Taken = Option<Step<In, Do>>;

pub(super) fn step(terms: &Terms, state: &In, event: &On) -> Taken {
    match state {
        In::Idle => idle(event),
        In::Prepared { run } => prepared(terms, *run, event),
        In::Stopped { run } => stopped(terms, *run, event),
        In::Bereft { incarnation, run } => bereft(terms, incarnation.as_ref(), *run, event),
        In::Committed { incarnation, run, ran: false } => committed(terms, incarnation, *run, event),
        In::Committed { incarnation, run, ran: true } => serving(terms, incarnation, *run, event),
        // Only a registry can return the VM.
        In::Reclaiming { .. } if terms.register.is_none() => None,
        In::Reclaiming { incarnation, run, force } => {
            reclaiming(terms, incarnation.as_ref(), *run, *force, event)
        }
        In::Aborting | In::Returning => continuing(state, event),
        In::Aborted | In::Returned => back(state, event),
        In::Done { incarnation, run } => done(incarnation.as_ref(), *run, event),
    }
}

fn idle(event: &On) -> Taken {
    match event {
        // The first entry, synced: a host that reboots during the migration asks before it starts the VM.
        On::Begin { run } => moved(enter(In::Prepared { run: *run })),
        _ => None,
    }
}

fn prepared(terms: &Terms, run: bool, event: &On) -> Taken {
    match event {
        // Journalled before `stop` is sent, so that an agent that finds a stopped guest knows that it has to be
        // continued.
        On::Stop { run } => moved(enter(In::Stopped { run: *run }).then([Do::StopVm])),
        On::Cancel => moved(abort(Say::Cancelled)),
        On::Failed => moved(abort(Say::Failed)),
        // A source that has not committed keeps the guest, whatever has happened to the destination.
        On::PeerSilent | On::PeerLost | On::ContactLostForGood => moved(abort(Say::PeerGaveUp)),
        On::Refused { .. } | On::Crashed { .. } | On::Asked { .. } => moved(abort(Say::PeerGaveUp)),
        On::QemuDied => moved(abort(Say::VmCrashed)),
        On::Restarted(Found::Running | Found::Paused) => moved(abort(Say::Interrupted).when("qemu-lives")),
        On::Restarted(Found::Gone) => moved(abort(Say::VmCrashed).when("qemu-gone")),
        // Entries may be missing: the guest may have been stopped, committed, and started at the destination.
        On::Restarted(Found::Rebooted) => moved(bereave(terms, None, run).when("rebooted")),
        On::Repeat => stay(In::Prepared { run }),
        _ => None,
    }
}

fn stopped(terms: &Terms, run: bool, event: &On) -> Taken {
    match event {
        On::Ready { incarnation, .. } => moved(commit(terms, incarnation, run)),
        On::Cancel => moved(abort_stopped(run, Say::Cancelled)),
        On::Failed => moved(abort_stopped(run, Say::Failed)),
        On::PeerSilent | On::PeerLost | On::ContactLostForGood => moved(abort_stopped(run, Say::PeerGaveUp)),
        On::Refused { .. } | On::Crashed { .. } => moved(abort_stopped(run, Say::PeerGaveUp)),
        // The destination may be ready, with its READY on another connection than its question.
        On::Asked { .. } => moved(Move::to(In::Stopped { run }).then([Do::Answer(Verdict::Undecided)])),
        On::Restarted(Found::Running | Found::Paused) => {
            moved(abort_stopped(run, Say::Interrupted).within("qemu-lives"))
        }
        // Everything may have been sent already, and the destination may be ready with the only copy.
        On::Restarted(Found::Gone | Found::Rebooted) => moved(bereave(terms, None, run).when("qemu-gone")),
        On::QemuDied => moved(bereave(terms, None, run)),
        On::Repeat => stay(In::Stopped { run }),
        _ => None,
    }
}

/// Bereft: the source has no copy to run. It can only help the destination, or find out that there is no copy.
fn bereft(terms: &Terms, incarnation: Option<&Incarnation>, run: bool, event: &On) -> Taken {
    let state = || In::Bereft { incarnation: incarnation.cloned(), run };
    let here = || Move::to(state());
    match event {
        On::Ready { incarnation: ready, .. } => match incarnation {
            None => moved(commit_bereft(terms, ready, run).within("first")),
            Some(known) if known == ready => {
                moved(here().when("again").then([Do::SendGo { incarnation: known.clone(), run }]))
            }
            Some(_) => ignored(Ignored::OtherIncarnation),
        },
        // With no incarnation known, COMMITTED had been written, and was lost with the host's memory.
        On::Running { .. } => moved(finish(incarnation, run)),
        // The guest runs, and will have to stand still where it needs pages that were lost at the source.
        On::Incomplete { .. } => moved(here().then([Do::Report(Say::MemoryLost)])),
        // There is no copy.
        On::Refused { .. } | On::Crashed { .. } => moved(abort(Say::VmCrashed)),
        On::RegisterSays(answer) => match read(terms, answer) {
            // The destination returned it and its REFUSED was lost.
            Heard::Record(Standing::Source) => moved(abort(Say::VmCrashed).when("source-owns")),
            _ => moved(here().when("otherwise")),
        },
        // The source knows that it did not send everything.
        On::Failed if incarnation.is_none() => moved(abort(Say::VmCrashed).when("not-committed")),
        On::Failed => moved(here().when("committed")),
        On::Asked { .. } => {
            let answer = match incarnation {
                Some(incarnation) => Verdict::Committed { incarnation: incarnation.clone(), run },
                None => Verdict::Undecided,
            };
            let ask_back = incarnation.is_none().then_some(Do::AskDestination);
            let guard = if incarnation.is_some() { "committed" } else { "not-committed" };
            moved(here().when(guard).then([Do::Answer(answer)]).then(ask_back))
        }
        On::Repeat | On::Restarted(_) => moved(insist(here(), terms, incarnation, run)),
        On::Cancel => moved(here().then([Do::Report(Say::TooLate)])),
        On::ContactLostForGood => moved(here().then([Do::Report(Say::OperatorNeeded)])),
        On::OperatorDecides(Decision::RunHere { force }) => {
            moved(take_back(terms, incarnation, run, *force).within("run-here"))
        }
        On::OperatorDecides(Decision::RunElsewhere) => moved(finish(incarnation, run).when("run-elsewhere")),
        On::OperatorDecides(Decision::WithoutRegister { run_here }) => {
            moved(without_register(incarnation, run, *run_here))
        }
        On::PeerSilent | On::PeerLost => stay(state()),
        On::QemuDied => ignored(Ignored::TooLate),
        _ => None,
    }
}

fn committed(terms: &Terms, incarnation: &Incarnation, run: bool, event: &On) -> Taken {
    let here = || Move::to(In::Committed { incarnation: incarnation.clone(), run, ran: false });
    let go = || Do::SendGo { incarnation: incarnation.clone(), run };
    let offer_again = || offer(terms, incarnation, run);
    match event {
        On::Running { .. } => moved(finish(Some(incarnation), run)),
        // The destination needs the pages of the source, which waits for RUNNING as before.
        On::Incomplete { .. } => moved(serve(incarnation, run)),
        On::Refused { .. } => moved(take_back(terms, Some(incarnation), run, false)),
        On::Crashed { .. } => moved(here().then([Do::Report(Say::DestinationCrashed)])),
        On::Asked { .. } => {
            let verdict = Verdict::Committed { incarnation: incarnation.clone(), run };
            moved(here().then([Do::Answer(verdict)]))
        }
        On::Ready { incarnation: other, .. } if other != incarnation => ignored(Ignored::OtherIncarnation),
        On::Ready { .. } => moved(here().then([go()])),
        On::Repeat => moved(here().then([go()]).asking(Use::Offer, offer_again())),
        // Another program may have sent SIGCONT since, or the agent may have died before its own SIGSTOP.
        On::Restarted(Found::Running | Found::Paused) => {
            moved(here().when("qemu-lives").then([Do::PauseQemu, go()]).asking(Use::Offer, offer_again()))
        }
        On::Restarted(Found::Gone | Found::Rebooted) => moved(
            here()
                .when("qemu-gone")
                .then([Do::Report(Say::CopyLost), go()])
                .asking(Use::Offer, offer_again()),
        ),
        On::QemuDied => moved(here().then([Do::Report(Say::CopyLost)])),
        On::RegisterSays(answer) => match read(terms, answer) {
            // The destination returned it and its REFUSED was lost.
            Heard::Record(Standing::Source) => moved(give_return(run).within("source-owns")),
            // The registry's epoch (`since`) differs from that of pre-flight.
            Heard::Record(Standing::Open { since, offer })
                if offer.as_ref().is_none_or(|offer| offer.epoch != terms.epoch()) =>
            {
                let request = register::offer(terms, since, incarnation, run);
                moved(here().when("not-offered").then(ask(Use::Offer, Some(request))))
            }
            // Best effort: `Repeat` offers again.
            _ => moved(here().when("otherwise")),
        },
        On::ContactLostForGood if terms.register.is_some() => {
            moved(take_back(terms, Some(incarnation), run, false))
        }
        On::ContactLostForGood => moved(here().when("no-register").then([Do::Report(Say::OperatorNeeded)])),
        On::OperatorDecides(Decision::RunHere { force }) => {
            moved(take_back(terms, Some(incarnation), run, *force).within("run-here"))
        }
        On::OperatorDecides(Decision::RunElsewhere) => {
            moved(finish(Some(incarnation), run).when("run-elsewhere"))
        }
        On::OperatorDecides(Decision::WithoutRegister { run_here }) => {
            moved(without_register(Some(incarnation), run, *run_here))
        }
        On::Cancel => moved(here().then([Do::Report(Say::TooLate)])),
        // The point of no return is passed: after no failure at the source or on the link is the guest run by a guess.
        On::Failed | On::PeerSilent | On::PeerLost => {
            stay(In::Committed { incarnation: incarnation.clone(), run, ran: false })
        }
        _ => None,
    }
}

/// COMMITTED, and the destination has run the guest: it needs the source's pages, and the guest cannot return. The
/// transitions are those of COMMITTED, except that the registry has nothing to decide any more.
fn serving(terms: &Terms, incarnation: &Incarnation, run: bool, event: &On) -> Taken {
    let state = || In::Committed { incarnation: incarnation.clone(), run, ran: true };
    let report = |what| moved(Move::to(state()).when("ran").then([Do::Report(what)]));
    match event {
        On::Incomplete { .. } => report(Say::Incomplete),
        On::ContactLostForGood => report(Say::NeededThere),
        // The operator does not know it yet.
        On::OperatorDecides(Decision::RunHere { .. } | Decision::WithoutRegister { run_here: true }) => {
            report(Say::TooLate)
        }
        // Neither is sent by a destination that has run the guest: if it crashes, it sends RUNNING. A registry with
        // another record is out of date.
        On::Refused { .. } | On::Crashed { .. } => ignored(Ignored::TooLate),
        On::RegisterSays(_) => moved(Move::to(state()).when("ran")),
        _ => Some(match committed(terms, incarnation, run, event)? {
            Step::Moved(mut step) => {
                if matches!(step.to, In::Committed { .. }) {
                    step.to = state();
                }
                step.guards.retain(|guard| !["register", "no-register"].contains(guard));
                step.effects.retain(|effect| !matches!(effect, Do::Register { .. }));
                Step::Moved(step.within("ran"))
            }
            ignored @ Step::Ignored(_) => ignored,
        }),
    }
}

fn reclaiming(terms: &Terms, incarnation: Option<&Incarnation>, run: bool, force: bool, event: &On) -> Taken {
    let state = |force| In::Reclaiming { incarnation: incarnation.cloned(), run, force };
    let take_since = |since| ask(Use::Take, Some(register::take_by_source(terms, since)));
    let take = || terms.register.and_then(take_since);
    match event {
        On::RegisterSays(answer) => match read(terms, answer) {
            Heard::Record(Standing::Source) => moved(give_return(run).within("source-owns")),
            Heard::Record(Standing::Open { since, .. }) => {
                moved(Move::to(state(force)).when("open").then(take_since(since)))
            }
            Heard::Record(Standing::Destination) if force => {
                let seize = ask(Use::GiveBack, Some(register::give_back(terms)));
                moved(Move::to(state(force)).when("destination-owns").when("force").then(seize))
            }
            Heard::Record(Standing::Destination | Standing::MovedOn) => {
                moved(give_up_reclaim(incarnation, run))
            }
            Heard::Record(Standing::Foreign) => {
                moved(Move::to(state(force)).when("foreign").then([Do::Report(Say::RegisterForeign)]))
            }
            Heard::Unknown => moved(
                Move::to(state(force)).when("unknown").then(ask(Use::Read, Some(register::read(terms)))),
            ),
            Heard::Unreachable => moved(Move::to(state(force)).when("unreachable")),
        },
        // The destination has won, and runs the guest.
        On::Running { .. } => moved(finish(incarnation, run)),
        On::Incomplete { .. } => moved(match incarnation {
            Some(incarnation) => serve(incarnation, run),
            None => give_up_reclaim(None, run),
        }),
        On::Repeat | On::Refused { .. } => moved(Move::to(state(force)).then(take())),
        On::Restarted(Found::Running | Found::Paused) => {
            moved(Move::to(state(force)).when("qemu-lives").then([Do::PauseQemu]).then(take()))
        }
        On::Restarted(Found::Gone | Found::Rebooted) => {
            moved(Move::to(state(force)).when("qemu-gone").then([Do::Report(Say::CopyLost)]).then(take()))
        }
        // Either answer could turn out wrong before the registry has answered.
        On::Asked { .. } => moved(Move::to(state(force)).then([Do::Answer(Verdict::Undecided)])),
        On::OperatorDecides(Decision::RunHere { force: true }) => {
            moved(enter(state(true)).when("run-here").when("force").then(take()))
        }
        On::OperatorDecides(Decision::WithoutRegister { run_here }) => {
            moved(without_register(incarnation, run, *run_here))
        }
        On::OperatorDecides(_) | On::Cancel => moved(Move::to(state(force)).then([Do::Report(Say::TooLate)])),
        On::Crashed { .. } => moved(Move::to(state(force)).then([Do::Report(Say::DestinationCrashed)])),
        On::QemuDied => moved(Move::to(state(force)).then([Do::Report(Say::CopyLost)])),
        On::Ready { .. } => ignored(Ignored::TooLate),
        On::Failed | On::PeerSilent | On::PeerLost | On::ContactLostForGood => stay(state(force)),
        _ => None,
    }
}

/// ABORTED or RETURNED: the decision that the guest continues at the source is journalled; `cont` is being sent.
fn continuing(state: &In, event: &On) -> Taken {
    let (end, first, verdict) = match state {
        In::Aborting => (In::Aborted, vec![], Verdict::Aborted),
        _ => (In::Returned, vec![Do::ResumeQemu], Verdict::Returned),
    };
    let here = || Move::to(state.clone());
    match event {
        On::Continued => moved(enter(end).then([Do::UndoAll])),
        On::QemuDied => moved(enter(end).then([Do::UndoAll, Do::Report(Say::VmCrashed)])),
        On::Restarted(Found::Gone | Found::Rebooted) => {
            moved(enter(end).when("qemu-gone").then([Do::UndoAll, Do::Report(Say::VmCrashed)]))
        }
        On::Restarted(Found::Running | Found::Paused) => {
            moved(here().when("qemu-lives").then(first).then([Do::ContinueVm]))
        }
        On::Repeat => moved(here().then(first).then([Do::ContinueVm])),
        On::ContinueFailed => moved(here().then([Do::Report(Say::ContinueFailed)])),
        On::Asked { .. } | On::Ready { .. } => moved(here().then([Do::Answer(verdict)])),
        On::Cancel | On::Failed | On::PeerSilent | On::PeerLost | On::Refused { .. } | On::Crashed { .. } => {
            ignored(Ignored::TooLate)
        }
        On::ContactLostForGood | On::RegisterSays(_) | On::OperatorDecides(_) => ignored(Ignored::TooLate),
        On::Running { .. } | On::Incomplete { .. } => moved(here().then([Do::Report(Say::Contradiction)])),
        _ => None,
    }
}

fn back(state: &In, event: &On) -> Taken {
    let here = || Move::to(state.clone());
    let verdict = if *state == In::Aborted { Verdict::Aborted } else { Verdict::Returned };
    match event {
        On::Asked { .. } | On::Ready { .. } => moved(here().then([Do::Answer(verdict)])),
        // The agent may have died before it had undone everything. SIGCONT is sent also if the guest stays paused.
        On::Restarted(_) if *state == In::Returned => moved(here().then([Do::ResumeQemu, Do::UndoAll])),
        On::Restarted(_) => moved(here().then([Do::UndoAll, Do::SendAbort])),
        // It cannot run there: report it. (An outdated RUNNING of a host that has crashed since causes this report,
        // too.)
        On::Running { .. } | On::Incomplete { .. } => moved(here().then([Do::Report(Say::Contradiction)])),
        On::Begin { .. } | On::Stop { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}

fn done(incarnation: Option<&Incarnation>, run: bool, event: &On) -> Taken {
    let here = || Move::to(In::Done { incarnation: incarnation.cloned(), run });
    match (event, incarnation) {
        // After an operator's decision the destination may not have received GO yet.
        (On::Asked { .. }, Some(incarnation)) => {
            let verdict = Verdict::Committed { incarnation: incarnation.clone(), run };
            moved(here().then([Do::Answer(verdict)]))
        }
        // The incarnation is unknown to the source; the question makes a destination that has lost its copy report
        // that.
        (On::Asked { .. }, None) => moved(here().when("unknown").then([Do::AskDestination])),
        (On::Ready { incarnation: ready, .. }, Some(incarnation)) if ready == incarnation => {
            moved(here().then([Do::SendGo { incarnation: incarnation.clone(), run }]))
        }
        (On::Restarted(_), _) => moved(here().then([Do::QuitQemu])),
        (On::Begin { .. } | On::Stop { .. }, _) => None,
        _ => ignored(Ignored::TooLate),
    }
}

// ---- transitions that several states share

/// COMMITTED: journalled, and the source's QEMU held, before GO can reach the destination.
fn commit(terms: &Terms, incarnation: &Incarnation, run: bool) -> Moved {
    enter(In::Committed { incarnation: incarnation.clone(), run, ran: false })
        .then([Do::PauseQemu, Do::SendGo { incarnation: incarnation.clone(), run }])
        .asking(Use::Offer, offer(terms, incarnation, run))
}

/// COMMITTED, with the durable note that the guest has run at the destination.
fn serve(incarnation: &Incarnation, run: bool) -> Moved {
    enter(In::Committed { incarnation: incarnation.clone(), run, ran: true })
        .then([Do::Report(Say::Incomplete)])
}

/// COMMITTED by a source that has no QEMU to hold.
fn commit_bereft(terms: &Terms, incarnation: &Incarnation, run: bool) -> Moved {
    enter(In::Bereft { incarnation: Some(incarnation.clone()), run })
        .then([Do::SendGo { incarnation: incarnation.clone(), run }])
        .asking(Use::Offer, offer(terms, incarnation, run))
}

/// ABORTED where the guest was not stopped, or has ended.
fn abort(why: Say) -> Moved {
    enter(In::Aborted).then([Do::UndoAll, Do::SendAbort, Do::Report(why)])
}

/// ABORTED where the guest is stopped: it is continued first, and cleaning up waits.
fn abort_stopped(run: bool, why: Say) -> Moved {
    if run {
        enter(In::Aborting).when("run").then([Do::ContinueVm, Do::SendAbort, Do::Report(why)])
    } else {
        abort(why).when("paused")
    }
}

fn bereave(terms: &Terms, incarnation: Option<&Incarnation>, run: bool) -> Moved {
    let state = In::Bereft { incarnation: incarnation.cloned(), run };
    insist(enter(state).then([Do::Report(Say::Bereft)]), terms, incarnation, run)
}

/// Repeated messages of a bereft source.
fn insist(to: Moved, terms: &Terms, incarnation: Option<&Incarnation>, run: bool) -> Moved {
    match incarnation {
        Some(incarnation) => to
            .when("committed")
            .then([Do::SendGo { incarnation: incarnation.clone(), run }])
            .asking(Use::Offer, offer(terms, incarnation, run)),
        None => to.when("not-committed").then([Do::AskDestination]),
    }
}

/// Towards RETURNED: through the registry if there is one.
fn take_back(terms: &Terms, incarnation: Option<&Incarnation>, run: bool, force: bool) -> Moved {
    match terms.register {
        None => give_return(run).within("no-register"),
        Some(since) => {
            let take = Some(register::take_by_source(terms, since));
            let state = In::Reclaiming { incarnation: incarnation.cloned(), run, force };
            enter(state).when("register").then(ask(Use::Take, take))
        }
    }
}

/// The operator's decision replaces that of the registry, which is lost.
fn without_register(incarnation: Option<&Incarnation>, run: bool, run_here: bool) -> Moved {
    if run_here {
        give_return(run).within("run-here").within("without-register")
    } else {
        finish(incarnation, run).within("run-elsewhere").within("without-register")
    }
}

/// RETURNED: the destination has refused, or the registry or an operator has decided.
fn give_return(run: bool) -> Moved {
    if run {
        enter(In::Returning).when("run").then([Do::ResumeQemu, Do::ContinueVm, Do::Report(Say::Returned)])
    } else {
        enter(In::Returned).when("paused").then([Do::ResumeQemu, Do::UndoAll, Do::Report(Say::Returned)])
    }
}

/// The destination owns the VM: the source waits as before.
fn give_up_reclaim(incarnation: Option<&Incarnation>, run: bool) -> Moved {
    let lost = Do::Report(Say::DestinationOwns);
    match incarnation {
        Some(incarnation) => enter(In::Committed { incarnation: incarnation.clone(), run, ran: false })
            .when("destination-owns")
            .then([lost, Do::SendGo { incarnation: incarnation.clone(), run }]),
        None => enter(In::Bereft { incarnation: None, run })
            .when("destination-owns")
            .when("bereft")
            .then([lost, Do::AskDestination]),
    }
}

fn finish(incarnation: Option<&Incarnation>, run: bool) -> Moved {
    enter(In::Done { incarnation: incarnation.cloned(), run }).then([Do::QuitQemu, Do::Report(Say::Done)])
}

// ---- helpers

/// Enters a state, by way of the journal.
fn enter(state: In) -> Moved {
    let durable = state.durable();
    Move::to(state.clone()).then([Do::Journal { state, durable }])
}

fn offer(terms: &Terms, incarnation: &Incarnation, run: bool) -> Option<RegisterRequest> {
    terms.register.map(|since| register::offer(terms, since, incarnation, run))
}

fn ask(why: Use, request: Option<RegisterRequest>) -> Option<Do> {
    request.map(|request| Do::Register { why, request })
}

enum Heard {
    Record(Standing),
    Unreachable,
    Unknown,
}

fn read(terms: &Terms, answer: &RegisterAnswer) -> Heard {
    match answer {
        RegisterAnswer::Stands(record) => Heard::Record(register::standing(terms, record.as_ref())),
        RegisterAnswer::Unreachable => Heard::Unreachable,
        RegisterAnswer::Unknown => Heard::Unknown,
    }
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
fn moved(to: Moved) -> Taken {
    Some(Step::Moved(to))
}

/// Stays in the state; the event is legal and has no effects.
fn stay(state: In) -> Taken {
    moved(Move::to(state))
}

#[allow(clippy::unnecessary_wraps, reason = "one shape for all outcomes")]
fn ignored(why: Ignored) -> Taken {
    Some(Step::Ignored(why))
}
