//! The source's transitions, state by state. `None` marks an illegal event.

#![allow(clippy::match_same_arms, reason = "one arm for each case, with its own reason")]

mod transitions;

use proto::Incarnation;
use proto::message::Verdict;

use super::SourceEffect as Effect;
use super::SourceEvent as Event;
use super::SourceReport as Report;
use super::SourceState as State;
use crate::handover::operator::OperatorDecision;
use crate::handover::registry::{self, RecordMeaning, RegistryResult, RequestPurpose};
use crate::handover::terms::{MigrationTerms, QemuAtStart};
use crate::handover::transition::{Ignored, Step, Transition, ignored, moved, stay};

use transitions::{
    abandon_reclaim, abort, abort_stopped, ask, commit, commit_without_qemu, enter, enter_qemu_lost,
    enter_returned, finish, offer, reclaim, repeat_messages, serve, without_registry,
};

type SourceTransition = Transition<State, Effect>;
type TransitionResult = Option<Step<State, Effect>>;

pub(super) fn step(terms: &MigrationTerms, state: &State, event: &Event) -> TransitionResult {
    match state {
        State::Idle => idle(event),
        State::Prepared { run } => prepared(terms, *run, event),
        State::Stopped { run } => stopped(terms, *run, event),
        State::QemuLost { incarnation, run } => qemu_lost(terms, incarnation.as_ref(), *run, event),
        State::Committed { incarnation, run, has_run: false } => committed(terms, incarnation, *run, event),
        State::Committed { incarnation, run, has_run: true } => serving(incarnation, *run, event),
        // Only a registry can return the VM.
        State::Reclaiming { .. } if terms.registry.is_none() => None,
        State::Reclaiming { incarnation, run, force } => {
            reclaiming(terms, incarnation.as_ref(), *run, *force, event)
        }
        State::Aborting | State::Returning => continuing(state, event),
        State::Aborted | State::Returned => final_at_source(state, event),
        State::Done { incarnation, run } => done(incarnation.as_ref(), *run, event),
    }
}

fn idle(event: &Event) -> TransitionResult {
    match event {
        // The first entry, synced: a host that reboots during the migration asks before it starts the VM.
        Event::Begin { run } => moved(enter(State::Prepared { run: *run })),
        _ => None,
    }
}

fn prepared(terms: &MigrationTerms, run: bool, event: &Event) -> TransitionResult {
    match event {
        // Journalled before `stop` is sent, so that an agent that finds a stopped guest knows that it has to be
        // continued.
        Event::Stop { run } => moved(enter(State::Stopped { run: *run }).then([Effect::StopVm])),
        Event::Cancel => moved(abort(Report::Cancelled)),
        Event::Failed => moved(abort(Report::Failed)),
        // A source that has not committed keeps the guest, whatever has happened to the destination.
        Event::PeerSilent | Event::PeerLost | Event::ContactLostForGood => moved(abort(Report::PeerGaveUp)),
        Event::Refused { .. } | Event::Crashed { .. } | Event::Asked { .. } => {
            moved(abort(Report::PeerGaveUp))
        }
        Event::QemuDied => moved(abort(Report::VmCrashed)),
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(abort(Report::Interrupted).when("qemu-lives"))
        }
        Event::Restarted(QemuAtStart::Gone) => moved(abort(Report::VmCrashed).when("qemu-gone")),
        // Entries may be missing: the guest may have been stopped, committed, and started at the destination.
        Event::Restarted(QemuAtStart::Rebooted) => moved(enter_qemu_lost(terms, None, run).when("rebooted")),
        Event::Repeat => stay(State::Prepared { run }),
        _ => None,
    }
}

fn stopped(terms: &MigrationTerms, run: bool, event: &Event) -> TransitionResult {
    match event {
        Event::Ready { incarnation, .. } => moved(commit(terms, incarnation, run)),
        Event::Cancel => moved(abort_stopped(run, Report::Cancelled)),
        Event::Failed => moved(abort_stopped(run, Report::Failed)),
        Event::PeerSilent | Event::PeerLost | Event::ContactLostForGood => {
            moved(abort_stopped(run, Report::PeerGaveUp))
        }
        Event::Refused { .. } | Event::Crashed { .. } => moved(abort_stopped(run, Report::PeerGaveUp)),
        // The destination may be ready, with its READY on another connection than its question.
        Event::Asked { .. } => {
            moved(Transition::to(State::Stopped { run }).then([Effect::Answer(Verdict::Undecided)]))
        }
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(abort_stopped(run, Report::Interrupted).within("qemu-lives"))
        }
        // Everything may have been sent already, and the destination may be ready with the only copy.
        Event::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => {
            moved(enter_qemu_lost(terms, None, run).when("qemu-gone"))
        }
        Event::QemuDied => moved(enter_qemu_lost(terms, None, run)),
        Event::Repeat => stay(State::Stopped { run }),
        _ => None,
    }
}

/// QEMU lost: the source has no copy to run. It can only help the destination, or find out that there is no copy.
fn qemu_lost(
    terms: &MigrationTerms,
    incarnation: Option<&Incarnation>,
    run: bool,
    event: &Event,
) -> TransitionResult {
    let state = || State::QemuLost { incarnation: incarnation.cloned(), run };
    let here = || Transition::to(state());
    match event {
        Event::Ready { incarnation: ready, .. } => match incarnation {
            None => moved(commit_without_qemu(terms, ready, run).within("first")),
            Some(known) if known == ready => {
                moved(here().when("again").then([Effect::SendGo { incarnation: known.clone(), run }]))
            }
            Some(_) => ignored(Ignored::OtherIncarnation),
        },
        // With no incarnation known, COMMITTED had been written, and was lost with the host's memory.
        Event::Running { .. } => moved(finish(incarnation, run)),
        // The guest runs, and will have to stand still where it needs pages that were lost at the source.
        Event::Incomplete { .. } => moved(here().then([Effect::Report(Report::MemoryLost)])),
        // There is no copy.
        Event::Refused { .. } | Event::Crashed { .. } => moved(abort(Report::VmCrashed)),
        Event::RegistryAnswered(answer) => match registry::interpret(terms, answer) {
            // The destination returned it and its REFUSED was lost.
            RegistryResult::Record(RecordMeaning::Source) => {
                moved(abort(Report::VmCrashed).when("source-owns"))
            }
            _ => moved(here().when("otherwise")),
        },
        // The source knows that it did not send everything.
        Event::Failed if incarnation.is_none() => moved(abort(Report::VmCrashed).when("not-committed")),
        Event::Failed => moved(here().when("committed")),
        Event::Asked { .. } => {
            let answer = match incarnation {
                Some(incarnation) => Verdict::Committed { incarnation: incarnation.clone(), run },
                None => Verdict::Undecided,
            };
            let ask_back = incarnation.is_none().then_some(Effect::AskDestination);
            let guard = if incarnation.is_some() { "committed" } else { "not-committed" };
            moved(here().when(guard).then([Effect::Answer(answer)]).then(ask_back))
        }
        Event::Repeat | Event::Restarted(_) => moved(repeat_messages(here(), terms, incarnation, run)),
        Event::Cancel => moved(here().then([Effect::Report(Report::TooLate)])),
        Event::ContactLostForGood => moved(here().then([Effect::Report(Report::OperatorNeeded)])),
        Event::OperatorDecided(OperatorDecision::RunHere { force }) => {
            moved(reclaim(terms, incarnation, run, *force).within("run-here"))
        }
        Event::OperatorDecided(OperatorDecision::DiscardCopy) => {
            moved(finish(incarnation, run).when("discard-copy"))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here }) => {
            moved(without_registry(incarnation, run, *run_here))
        }
        Event::PeerSilent | Event::PeerLost => stay(state()),
        Event::QemuDied => ignored(Ignored::TooLate),
        _ => None,
    }
}

fn committed(
    terms: &MigrationTerms,
    incarnation: &Incarnation,
    run: bool,
    event: &Event,
) -> TransitionResult {
    let here = || Transition::to(State::Committed { incarnation: incarnation.clone(), run, has_run: false });
    let go = || Effect::SendGo { incarnation: incarnation.clone(), run };
    let offer_again = || offer(terms, incarnation, run);
    match event {
        Event::Running { .. } => moved(finish(Some(incarnation), run)),
        // The destination needs the pages of the source, which waits for RUNNING as before.
        Event::Incomplete { .. } => moved(serve(incarnation, run)),
        Event::Refused { .. } => moved(reclaim(terms, Some(incarnation), run, false)),
        Event::Crashed { .. } => moved(here().then([Effect::Report(Report::DestinationCrashed)])),
        Event::Asked { .. } => {
            let verdict = Verdict::Committed { incarnation: incarnation.clone(), run };
            moved(here().then([Effect::Answer(verdict)]))
        }
        Event::Ready { incarnation: other, .. } if other != incarnation => ignored(Ignored::OtherIncarnation),
        Event::Ready { .. } => moved(here().then([go()])),
        Event::Repeat => moved(here().then([go()]).asking(RequestPurpose::Offer, offer_again())),
        // Another program may have sent SIGCONT since, or the agent may have died before its own SIGSTOP.
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => moved(
            here()
                .when("qemu-lives")
                .then([Effect::FreezeQemu, go()])
                .asking(RequestPurpose::Offer, offer_again()),
        ),
        Event::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(
            here()
                .when("qemu-gone")
                .then([Effect::Report(Report::CopyLost), go()])
                .asking(RequestPurpose::Offer, offer_again()),
        ),
        Event::QemuDied => moved(here().then([Effect::Report(Report::CopyLost)])),
        Event::RegistryAnswered(answer) => match registry::interpret(terms, answer) {
            // The destination returned it and its REFUSED was lost.
            RegistryResult::Record(RecordMeaning::Source) => moved(enter_returned(run).within("source-owns")),
            // The registry's epoch (`since`) differs from that of pre-flight.
            RegistryResult::Record(RecordMeaning::Open { since, offer })
                if offer.as_ref().is_none_or(|offer| offer.epoch != terms.epoch()) =>
            {
                let request = registry::offer(terms, since, incarnation, run);
                moved(here().when("not-offered").then(ask(RequestPurpose::Offer, Some(request))))
            }
            // Best effort: `Repeat` offers again.
            _ => moved(here().when("otherwise")),
        },
        Event::ContactLostForGood if terms.registry.is_some() => {
            moved(reclaim(terms, Some(incarnation), run, false))
        }
        Event::ContactLostForGood => {
            moved(here().when("no-registry").then([Effect::Report(Report::OperatorNeeded)]))
        }
        Event::OperatorDecided(OperatorDecision::RunHere { force }) => {
            moved(reclaim(terms, Some(incarnation), run, *force).within("run-here"))
        }
        Event::OperatorDecided(OperatorDecision::DiscardCopy) => {
            moved(finish(Some(incarnation), run).when("discard-copy"))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here }) => {
            moved(without_registry(Some(incarnation), run, *run_here))
        }
        Event::Cancel => moved(here().then([Effect::Report(Report::TooLate)])),
        // The point of no return is passed: after no failure at the source or on the link is the guest run by a guess.
        Event::Failed | Event::PeerSilent | Event::PeerLost => {
            stay(State::Committed { incarnation: incarnation.clone(), run, has_run: false })
        }
        _ => None,
    }
}

/// COMMITTED, and the destination has run the guest: it needs the source's pages, and the guest cannot return. The
/// registry has nothing to decide any more, and is not asked.
fn serving(incarnation: &Incarnation, run: bool, event: &Event) -> TransitionResult {
    let here = || {
        Transition::to(State::Committed { incarnation: incarnation.clone(), run, has_run: true })
            .when("has-run")
    };
    let report = |what| moved(here().then([Effect::Report(what)]));
    let go = || Effect::SendGo { incarnation: incarnation.clone(), run };
    match event {
        Event::Running { .. } => moved(finish(Some(incarnation), run).within("has-run")),
        Event::Incomplete { .. } => report(Report::Incomplete),
        Event::Asked { .. } => {
            let verdict = Verdict::Committed { incarnation: incarnation.clone(), run };
            moved(here().then([Effect::Answer(verdict)]))
        }
        Event::Ready { incarnation: other, .. } if other != incarnation => ignored(Ignored::OtherIncarnation),
        Event::Ready { .. } | Event::Repeat => moved(here().then([go()])),
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(here().when("qemu-lives").then([Effect::FreezeQemu, go()]))
        }
        Event::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => {
            moved(here().when("qemu-gone").then([Effect::Report(Report::CopyLost), go()]))
        }
        Event::QemuDied => report(Report::CopyLost),
        Event::ContactLostForGood => report(Report::NeededThere),
        // The operator does not know it yet.
        Event::OperatorDecided(
            OperatorDecision::RunHere { .. } | OperatorDecision::WithoutRegistry { run_here: true },
        )
        | Event::Cancel => report(Report::TooLate),
        Event::OperatorDecided(OperatorDecision::DiscardCopy) => {
            moved(finish(Some(incarnation), run).when("discard-copy").within("has-run"))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(without_registry(Some(incarnation), run, false).within("has-run"))
        }
        // Neither is sent by a destination that has run the guest: if it crashes, it sends RUNNING. A registry with
        // another record is out of date.
        Event::Refused { .. } | Event::Crashed { .. } => ignored(Ignored::TooLate),
        Event::RegistryAnswered(_) | Event::Failed | Event::PeerSilent | Event::PeerLost => moved(here()),
        Event::Begin { .. } | Event::Stop { .. } | Event::Continued | Event::ContinueFailed => None,
    }
}

fn reclaiming(
    terms: &MigrationTerms,
    incarnation: Option<&Incarnation>,
    run: bool,
    force: bool,
    event: &Event,
) -> TransitionResult {
    let state = |force| State::Reclaiming { incarnation: incarnation.cloned(), run, force };
    let acquire_since = |since| ask(RequestPurpose::Acquire, Some(registry::acquire_by_source(terms, since)));
    let acquire = || terms.registry.and_then(acquire_since);
    match event {
        Event::RegistryAnswered(answer) => match registry::interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Source) => moved(enter_returned(run).within("source-owns")),
            RegistryResult::Record(RecordMeaning::Open { since, .. }) => {
                moved(Transition::to(state(force)).when("open").then(acquire_since(since)))
            }
            RegistryResult::Record(RecordMeaning::Destination) if force => {
                let return_to_source =
                    ask(RequestPurpose::ReturnToSource, Some(registry::return_to_source(terms)));
                moved(
                    Transition::to(state(force))
                        .when("destination-owns")
                        .when("force")
                        .then(return_to_source),
                )
            }
            RegistryResult::Record(RecordMeaning::Destination | RecordMeaning::MovedOn) => {
                moved(abandon_reclaim(incarnation, run))
            }
            RegistryResult::Record(RecordMeaning::Foreign) => moved(
                Transition::to(state(force)).when("foreign").then([Effect::Report(Report::ForeignRecord)]),
            ),
            RegistryResult::Unknown => moved(
                Transition::to(state(force))
                    .when("unknown")
                    .then(ask(RequestPurpose::Read, Some(registry::read(terms)))),
            ),
            RegistryResult::Unreachable => moved(Transition::to(state(force)).when("unreachable")),
        },
        // The destination has won, and runs the guest.
        Event::Running { .. } => moved(finish(incarnation, run)),
        Event::Incomplete { .. } => moved(match incarnation {
            Some(incarnation) => serve(incarnation, run),
            None => abandon_reclaim(None, run),
        }),
        Event::Repeat | Event::Refused { .. } => moved(Transition::to(state(force)).then(acquire())),
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(Transition::to(state(force)).when("qemu-lives").then([Effect::FreezeQemu]).then(acquire()))
        }
        Event::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(
            Transition::to(state(force))
                .when("qemu-gone")
                .then([Effect::Report(Report::CopyLost)])
                .then(acquire()),
        ),
        // Either answer could turn out wrong before the registry has answered.
        Event::Asked { .. } => moved(Transition::to(state(force)).then([Effect::Answer(Verdict::Undecided)])),
        Event::OperatorDecided(OperatorDecision::RunHere { force: true }) => {
            moved(enter(state(true)).when("run-here").when("force").then(acquire()))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here }) => {
            moved(without_registry(incarnation, run, *run_here))
        }
        Event::OperatorDecided(_) | Event::Cancel => {
            moved(Transition::to(state(force)).then([Effect::Report(Report::TooLate)]))
        }
        Event::Crashed { .. } => {
            moved(Transition::to(state(force)).then([Effect::Report(Report::DestinationCrashed)]))
        }
        Event::QemuDied => moved(Transition::to(state(force)).then([Effect::Report(Report::CopyLost)])),
        Event::Ready { .. } => ignored(Ignored::TooLate),
        Event::Failed | Event::PeerSilent | Event::PeerLost | Event::ContactLostForGood => stay(state(force)),
        _ => None,
    }
}

/// ABORTED or RETURNED: the decision that the guest continues at the source is journalled; `cont` is being sent.
fn continuing(state: &State, event: &Event) -> TransitionResult {
    let (end, first, verdict) = match state {
        State::Aborting => (State::Aborted, vec![], Verdict::Aborted),
        _ => (State::Returned, vec![Effect::ThawQemu], Verdict::Returned),
    };
    let here = || Transition::to(state.clone());
    match event {
        Event::Continued => moved(enter(end).then([Effect::UndoAll])),
        Event::QemuDied => moved(enter(end).then([Effect::UndoAll, Effect::Report(Report::VmCrashed)])),
        Event::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => {
            moved(enter(end).when("qemu-gone").then([Effect::UndoAll, Effect::Report(Report::VmCrashed)]))
        }
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(here().when("qemu-lives").then(first).then([Effect::ContinueVm]))
        }
        Event::Repeat => moved(here().then(first).then([Effect::ContinueVm])),
        Event::ContinueFailed => moved(here().then([Effect::Report(Report::ContinueFailed)])),
        Event::Asked { .. } | Event::Ready { .. } => moved(here().then([Effect::Answer(verdict)])),
        Event::Cancel
        | Event::Failed
        | Event::PeerSilent
        | Event::PeerLost
        | Event::Refused { .. }
        | Event::Crashed { .. } => ignored(Ignored::TooLate),
        Event::ContactLostForGood | Event::RegistryAnswered(_) | Event::OperatorDecided(_) => {
            ignored(Ignored::TooLate)
        }
        Event::Running { .. } | Event::Incomplete { .. } => {
            moved(here().then([Effect::Report(Report::Contradiction)]))
        }
        _ => None,
    }
}

fn final_at_source(state: &State, event: &Event) -> TransitionResult {
    let here = || Transition::to(state.clone());
    let verdict = if *state == State::Aborted { Verdict::Aborted } else { Verdict::Returned };
    match event {
        Event::Asked { .. } | Event::Ready { .. } => moved(here().then([Effect::Answer(verdict)])),
        // The agent may have died before it had undone everything. SIGCONT is sent also if the guest stays paused.
        Event::Restarted(_) if *state == State::Returned => {
            moved(here().then([Effect::ThawQemu, Effect::UndoAll]))
        }
        Event::Restarted(_) => moved(here().then([Effect::UndoAll, Effect::SendAbort])),
        // It cannot run there: report it. (An outdated RUNNING of a host that has crashed since causes this report,
        // too.)
        Event::Running { .. } | Event::Incomplete { .. } => {
            moved(here().then([Effect::Report(Report::Contradiction)]))
        }
        Event::Begin { .. } | Event::Stop { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}

fn done(incarnation: Option<&Incarnation>, run: bool, event: &Event) -> TransitionResult {
    let here = || Transition::to(State::Done { incarnation: incarnation.cloned(), run });
    match (event, incarnation) {
        // After an operator's decision the destination may not have received GO yet.
        (Event::Asked { .. }, Some(incarnation)) => {
            let verdict = Verdict::Committed { incarnation: incarnation.clone(), run };
            moved(here().then([Effect::Answer(verdict)]))
        }
        // The incarnation is unknown to the source; the question makes a destination that has lost its copy report
        // that.
        (Event::Asked { .. }, None) => moved(here().when("unknown").then([Effect::AskDestination])),
        (Event::Ready { incarnation: ready, .. }, Some(incarnation)) if ready == incarnation => {
            moved(here().then([Effect::SendGo { incarnation: incarnation.clone(), run }]))
        }
        (Event::Restarted(_), _) => moved(here().then([Effect::QuitQemu])),
        (Event::Begin { .. } | Event::Stop { .. }, _) => None,
        _ => ignored(Ignored::TooLate),
    }
}
