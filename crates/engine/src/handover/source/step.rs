//! The source's transitions, state by state. `None` marks an illegal event.

#![allow(clippy::match_same_arms, reason = "one arm for each case, with its own reason")]

mod shared;

use proto::Incarnation;
use proto::message::Verdict;

use super::SourceEffect as Do;
use super::SourceEvent as On;
use super::SourceReport as Notice;
use super::SourceState as In;
use crate::handover::operator::OperatorDecision;
use crate::handover::registry::{self, RecordMeaning, RequestPurpose};
use crate::handover::{Ignored, MigrationTerms, Move, QemuAtStart, Step};

use shared::{
    RegistryView, abandon_reclaim, abort, abort_stopped, ask, commit, commit_without_qemu, enter,
    enter_qemu_lost, enter_returned, finish, ignored, moved, offer, read, reclaim, repeat_messages, serve,
    stay, without_registry,
};

type Moved = Move<In, Do>;
type StepResult = Option<Step<In, Do>>;

pub(super) fn step(terms: &MigrationTerms, state: &In, event: &On) -> StepResult {
    match state {
        In::Idle => idle(event),
        In::Prepared { run } => prepared(terms, *run, event),
        In::Stopped { run } => stopped(terms, *run, event),
        In::QemuLost { incarnation, run } => qemu_lost(terms, incarnation.as_ref(), *run, event),
        In::Committed { incarnation, run, ran: false } => committed(terms, incarnation, *run, event),
        In::Committed { incarnation, run, ran: true } => serving(terms, incarnation, *run, event),
        // Only a registry can return the VM.
        In::Reclaiming { .. } if terms.registry.is_none() => None,
        In::Reclaiming { incarnation, run, force } => {
            reclaiming(terms, incarnation.as_ref(), *run, *force, event)
        }
        In::Aborting | In::Returning => continuing(state, event),
        In::Aborted | In::Returned => final_at_source(state, event),
        In::Done { incarnation, run } => done(incarnation.as_ref(), *run, event),
    }
}

fn idle(event: &On) -> StepResult {
    match event {
        // The first entry, synced: a host that reboots during the migration asks before it starts the VM.
        On::Begin { run } => moved(enter(In::Prepared { run: *run })),
        _ => None,
    }
}

fn prepared(terms: &MigrationTerms, run: bool, event: &On) -> StepResult {
    match event {
        // Journalled before `stop` is sent, so that an agent that finds a stopped guest knows that it has to be
        // continued.
        On::Stop { run } => moved(enter(In::Stopped { run: *run }).then([Do::StopVm])),
        On::Cancel => moved(abort(Notice::Cancelled)),
        On::Failed => moved(abort(Notice::Failed)),
        // A source that has not committed keeps the guest, whatever has happened to the destination.
        On::PeerSilent | On::PeerLost | On::ContactLostForGood => moved(abort(Notice::PeerGaveUp)),
        On::Refused { .. } | On::Crashed { .. } | On::Asked { .. } => moved(abort(Notice::PeerGaveUp)),
        On::QemuDied => moved(abort(Notice::VmCrashed)),
        On::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(abort(Notice::Interrupted).when("qemu-lives"))
        }
        On::Restarted(QemuAtStart::Gone) => moved(abort(Notice::VmCrashed).when("qemu-gone")),
        // Entries may be missing: the guest may have been stopped, committed, and started at the destination.
        On::Restarted(QemuAtStart::Rebooted) => moved(enter_qemu_lost(terms, None, run).when("rebooted")),
        On::Repeat => stay(In::Prepared { run }),
        _ => None,
    }
}

fn stopped(terms: &MigrationTerms, run: bool, event: &On) -> StepResult {
    match event {
        On::Ready { incarnation, .. } => moved(commit(terms, incarnation, run)),
        On::Cancel => moved(abort_stopped(run, Notice::Cancelled)),
        On::Failed => moved(abort_stopped(run, Notice::Failed)),
        On::PeerSilent | On::PeerLost | On::ContactLostForGood => {
            moved(abort_stopped(run, Notice::PeerGaveUp))
        }
        On::Refused { .. } | On::Crashed { .. } => moved(abort_stopped(run, Notice::PeerGaveUp)),
        // The destination may be ready, with its READY on another connection than its question.
        On::Asked { .. } => moved(Move::to(In::Stopped { run }).then([Do::Answer(Verdict::Undecided)])),
        On::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(abort_stopped(run, Notice::Interrupted).within("qemu-lives"))
        }
        // Everything may have been sent already, and the destination may be ready with the only copy.
        On::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => {
            moved(enter_qemu_lost(terms, None, run).when("qemu-gone"))
        }
        On::QemuDied => moved(enter_qemu_lost(terms, None, run)),
        On::Repeat => stay(In::Stopped { run }),
        _ => None,
    }
}

/// QEMU lost: the source has no copy to run. It can only help the destination, or find out that there is no copy.
fn qemu_lost(terms: &MigrationTerms, incarnation: Option<&Incarnation>, run: bool, event: &On) -> StepResult {
    let state = || In::QemuLost { incarnation: incarnation.cloned(), run };
    let here = || Move::to(state());
    match event {
        On::Ready { incarnation: ready, .. } => match incarnation {
            None => moved(commit_without_qemu(terms, ready, run).within("first")),
            Some(known) if known == ready => {
                moved(here().when("again").then([Do::SendGo { incarnation: known.clone(), run }]))
            }
            Some(_) => ignored(Ignored::OtherIncarnation),
        },
        // With no incarnation known, COMMITTED had been written, and was lost with the host's memory.
        On::Running { .. } => moved(finish(incarnation, run)),
        // The guest runs, and will have to stand still where it needs pages that were lost at the source.
        On::Incomplete { .. } => moved(here().then([Do::Report(Notice::MemoryLost)])),
        // There is no copy.
        On::Refused { .. } | On::Crashed { .. } => moved(abort(Notice::VmCrashed)),
        On::RegistryAnswered(answer) => match read(terms, answer) {
            // The destination returned it and its REFUSED was lost.
            RegistryView::Record(RecordMeaning::Source) => {
                moved(abort(Notice::VmCrashed).when("source-owns"))
            }
            _ => moved(here().when("otherwise")),
        },
        // The source knows that it did not send everything.
        On::Failed if incarnation.is_none() => moved(abort(Notice::VmCrashed).when("not-committed")),
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
        On::Repeat | On::Restarted(_) => moved(repeat_messages(here(), terms, incarnation, run)),
        On::Cancel => moved(here().then([Do::Report(Notice::TooLate)])),
        On::ContactLostForGood => moved(here().then([Do::Report(Notice::OperatorNeeded)])),
        On::OperatorDecided(OperatorDecision::RunHere { force }) => {
            moved(reclaim(terms, incarnation, run, *force).within("run-here"))
        }
        On::OperatorDecided(OperatorDecision::RunElsewhere) => {
            moved(finish(incarnation, run).when("run-elsewhere"))
        }
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here }) => {
            moved(without_registry(incarnation, run, *run_here))
        }
        On::PeerSilent | On::PeerLost => stay(state()),
        On::QemuDied => ignored(Ignored::TooLate),
        _ => None,
    }
}

fn committed(terms: &MigrationTerms, incarnation: &Incarnation, run: bool, event: &On) -> StepResult {
    let here = || Move::to(In::Committed { incarnation: incarnation.clone(), run, ran: false });
    let go = || Do::SendGo { incarnation: incarnation.clone(), run };
    let offer_again = || offer(terms, incarnation, run);
    match event {
        On::Running { .. } => moved(finish(Some(incarnation), run)),
        // The destination needs the pages of the source, which waits for RUNNING as before.
        On::Incomplete { .. } => moved(serve(incarnation, run)),
        On::Refused { .. } => moved(reclaim(terms, Some(incarnation), run, false)),
        On::Crashed { .. } => moved(here().then([Do::Report(Notice::DestinationCrashed)])),
        On::Asked { .. } => {
            let verdict = Verdict::Committed { incarnation: incarnation.clone(), run };
            moved(here().then([Do::Answer(verdict)]))
        }
        On::Ready { incarnation: other, .. } if other != incarnation => ignored(Ignored::OtherIncarnation),
        On::Ready { .. } => moved(here().then([go()])),
        On::Repeat => moved(here().then([go()]).asking(RequestPurpose::Offer, offer_again())),
        // Another program may have sent SIGCONT since, or the agent may have died before its own SIGSTOP.
        On::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => moved(
            here()
                .when("qemu-lives")
                .then([Do::PauseQemu, go()])
                .asking(RequestPurpose::Offer, offer_again()),
        ),
        On::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(
            here()
                .when("qemu-gone")
                .then([Do::Report(Notice::CopyLost), go()])
                .asking(RequestPurpose::Offer, offer_again()),
        ),
        On::QemuDied => moved(here().then([Do::Report(Notice::CopyLost)])),
        On::RegistryAnswered(answer) => match read(terms, answer) {
            // The destination returned it and its REFUSED was lost.
            RegistryView::Record(RecordMeaning::Source) => moved(enter_returned(run).within("source-owns")),
            // The registry's epoch (`since`) differs from that of pre-flight.
            RegistryView::Record(RecordMeaning::Open { since, offer })
                if offer.as_ref().is_none_or(|offer| offer.epoch != terms.epoch()) =>
            {
                let request = registry::offer(terms, since, incarnation, run);
                moved(here().when("not-offered").then(ask(RequestPurpose::Offer, Some(request))))
            }
            // Best effort: `Repeat` offers again.
            _ => moved(here().when("otherwise")),
        },
        On::ContactLostForGood if terms.registry.is_some() => {
            moved(reclaim(terms, Some(incarnation), run, false))
        }
        On::ContactLostForGood => {
            moved(here().when("no-registry").then([Do::Report(Notice::OperatorNeeded)]))
        }
        On::OperatorDecided(OperatorDecision::RunHere { force }) => {
            moved(reclaim(terms, Some(incarnation), run, *force).within("run-here"))
        }
        On::OperatorDecided(OperatorDecision::RunElsewhere) => {
            moved(finish(Some(incarnation), run).when("run-elsewhere"))
        }
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here }) => {
            moved(without_registry(Some(incarnation), run, *run_here))
        }
        On::Cancel => moved(here().then([Do::Report(Notice::TooLate)])),
        // The point of no return is passed: after no failure at the source or on the link is the guest run by a guess.
        On::Failed | On::PeerSilent | On::PeerLost => {
            stay(In::Committed { incarnation: incarnation.clone(), run, ran: false })
        }
        _ => None,
    }
}

/// COMMITTED, and the destination has run the guest: it needs the source's pages, and the guest cannot return. The
/// transitions are those of COMMITTED, except that the registry has nothing to decide any more.
fn serving(terms: &MigrationTerms, incarnation: &Incarnation, run: bool, event: &On) -> StepResult {
    let state = || In::Committed { incarnation: incarnation.clone(), run, ran: true };
    let report = |what| moved(Move::to(state()).when("ran").then([Do::Report(what)]));
    match event {
        On::Incomplete { .. } => report(Notice::Incomplete),
        On::ContactLostForGood => report(Notice::NeededThere),
        // The operator does not know it yet.
        On::OperatorDecided(
            OperatorDecision::RunHere { .. } | OperatorDecision::WithoutRegistry { run_here: true },
        ) => report(Notice::TooLate),
        // Neither is sent by a destination that has run the guest: if it crashes, it sends RUNNING. A registry with
        // another record is out of date.
        On::Refused { .. } | On::Crashed { .. } => ignored(Ignored::TooLate),
        On::RegistryAnswered(_) => moved(Move::to(state()).when("ran")),
        _ => Some(match committed(terms, incarnation, run, event)? {
            Step::Moved(mut step) => {
                if matches!(step.to, In::Committed { .. }) {
                    step.to = state();
                }
                step.guards.retain(|guard| !["registry", "no-registry"].contains(guard));
                step.effects.retain(|effect| !matches!(effect, Do::Registry { .. }));
                Step::Moved(step.within("ran"))
            }
            ignored @ Step::Ignored(_) => ignored,
        }),
    }
}

fn reclaiming(
    terms: &MigrationTerms,
    incarnation: Option<&Incarnation>,
    run: bool,
    force: bool,
    event: &On,
) -> StepResult {
    let state = |force| In::Reclaiming { incarnation: incarnation.cloned(), run, force };
    let take_since = |since| ask(RequestPurpose::Take, Some(registry::acquire_by_source(terms, since)));
    let take = || terms.registry.and_then(take_since);
    match event {
        On::RegistryAnswered(answer) => match read(terms, answer) {
            RegistryView::Record(RecordMeaning::Source) => moved(enter_returned(run).within("source-owns")),
            RegistryView::Record(RecordMeaning::Open { since, .. }) => {
                moved(Move::to(state(force)).when("open").then(take_since(since)))
            }
            RegistryView::Record(RecordMeaning::Destination) if force => {
                let seize = ask(RequestPurpose::GiveBack, Some(registry::return_to_source(terms)));
                moved(Move::to(state(force)).when("destination-owns").when("force").then(seize))
            }
            RegistryView::Record(RecordMeaning::Destination | RecordMeaning::MovedOn) => {
                moved(abandon_reclaim(incarnation, run))
            }
            RegistryView::Record(RecordMeaning::Foreign) => {
                moved(Move::to(state(force)).when("foreign").then([Do::Report(Notice::ForeignRecord)]))
            }
            RegistryView::Unknown => moved(
                Move::to(state(force))
                    .when("unknown")
                    .then(ask(RequestPurpose::Read, Some(registry::read(terms)))),
            ),
            RegistryView::Unreachable => moved(Move::to(state(force)).when("unreachable")),
        },
        // The destination has won, and runs the guest.
        On::Running { .. } => moved(finish(incarnation, run)),
        On::Incomplete { .. } => moved(match incarnation {
            Some(incarnation) => serve(incarnation, run),
            None => abandon_reclaim(None, run),
        }),
        On::Repeat | On::Refused { .. } => moved(Move::to(state(force)).then(take())),
        On::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(Move::to(state(force)).when("qemu-lives").then([Do::PauseQemu]).then(take()))
        }
        On::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => {
            moved(Move::to(state(force)).when("qemu-gone").then([Do::Report(Notice::CopyLost)]).then(take()))
        }
        // Either answer could turn out wrong before the registry has answered.
        On::Asked { .. } => moved(Move::to(state(force)).then([Do::Answer(Verdict::Undecided)])),
        On::OperatorDecided(OperatorDecision::RunHere { force: true }) => {
            moved(enter(state(true)).when("run-here").when("force").then(take()))
        }
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here }) => {
            moved(without_registry(incarnation, run, *run_here))
        }
        On::OperatorDecided(_) | On::Cancel => {
            moved(Move::to(state(force)).then([Do::Report(Notice::TooLate)]))
        }
        On::Crashed { .. } => moved(Move::to(state(force)).then([Do::Report(Notice::DestinationCrashed)])),
        On::QemuDied => moved(Move::to(state(force)).then([Do::Report(Notice::CopyLost)])),
        On::Ready { .. } => ignored(Ignored::TooLate),
        On::Failed | On::PeerSilent | On::PeerLost | On::ContactLostForGood => stay(state(force)),
        _ => None,
    }
}

/// ABORTED or RETURNED: the decision that the guest continues at the source is journalled; `cont` is being sent.
fn continuing(state: &In, event: &On) -> StepResult {
    let (end, first, verdict) = match state {
        In::Aborting => (In::Aborted, vec![], Verdict::Aborted),
        _ => (In::Returned, vec![Do::ResumeQemu], Verdict::Returned),
    };
    let here = || Move::to(state.clone());
    match event {
        On::Continued => moved(enter(end).then([Do::UndoAll])),
        On::QemuDied => moved(enter(end).then([Do::UndoAll, Do::Report(Notice::VmCrashed)])),
        On::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => {
            moved(enter(end).when("qemu-gone").then([Do::UndoAll, Do::Report(Notice::VmCrashed)]))
        }
        On::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(here().when("qemu-lives").then(first).then([Do::ContinueVm]))
        }
        On::Repeat => moved(here().then(first).then([Do::ContinueVm])),
        On::ContinueFailed => moved(here().then([Do::Report(Notice::ContinueFailed)])),
        On::Asked { .. } | On::Ready { .. } => moved(here().then([Do::Answer(verdict)])),
        On::Cancel | On::Failed | On::PeerSilent | On::PeerLost | On::Refused { .. } | On::Crashed { .. } => {
            ignored(Ignored::TooLate)
        }
        On::ContactLostForGood | On::RegistryAnswered(_) | On::OperatorDecided(_) => {
            ignored(Ignored::TooLate)
        }
        On::Running { .. } | On::Incomplete { .. } => moved(here().then([Do::Report(Notice::Contradiction)])),
        _ => None,
    }
}

fn final_at_source(state: &In, event: &On) -> StepResult {
    let here = || Move::to(state.clone());
    let verdict = if *state == In::Aborted { Verdict::Aborted } else { Verdict::Returned };
    match event {
        On::Asked { .. } | On::Ready { .. } => moved(here().then([Do::Answer(verdict)])),
        // The agent may have died before it had undone everything. SIGCONT is sent also if the guest stays paused.
        On::Restarted(_) if *state == In::Returned => moved(here().then([Do::ResumeQemu, Do::UndoAll])),
        On::Restarted(_) => moved(here().then([Do::UndoAll, Do::SendAbort])),
        // It cannot run there: report it. (An outdated RUNNING of a host that has crashed since causes this report,
        // too.)
        On::Running { .. } | On::Incomplete { .. } => moved(here().then([Do::Report(Notice::Contradiction)])),
        On::Begin { .. } | On::Stop { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}

fn done(incarnation: Option<&Incarnation>, run: bool, event: &On) -> StepResult {
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
