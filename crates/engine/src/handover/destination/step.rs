//! The destination's transitions, state by state. `None` marks an illegal event.

#![allow(clippy::match_same_arms, reason = "one arm for each case, with its own reason")]

mod transitions;

use proto::Incarnation;
use proto::message::Verdict;

use super::DestinationEffect as Effect;
use super::DestinationEvent as Event;
use super::DestinationReport as Report;
use super::DestinationState as State;
use crate::handover::operator::OperatorDecision;
use crate::handover::registry::{self, RecordMeaning, RegistryAnswer, RegistryResult, RequestPurpose};
use crate::handover::terms::{MigrationTerms, QemuAtStart};
use crate::handover::transition::{Ignored, Step, Transition, ignored, moved, stay};

use transitions::{
    activate, ask, cont_again, crash, crash_with_host, destroy_copy, enter, enter_qemu_lost, follow_go,
    refuse, refuse_through_registry, refuse_without_registry, return_to_source, run_incomplete, start,
};

type DestinationTransition = Transition<State, Effect>;
type TransitionResult = Option<Step<State, Effect>>;

pub(super) fn step(terms: &MigrationTerms, state: &State, event: &Event) -> TransitionResult {
    match state {
        State::Idle => idle(event),
        State::Prepared => prepared(terms, event),
        State::Ready { incarnation, run } => ready(terms, incarnation, *run, event),
        // Only with a registry can ownership be acquired or returned.
        State::Acquiring { .. } | State::Refusing if terms.registry.is_none() => None,
        State::Acquiring { incarnation, run } => acquiring(terms, incarnation, *run, event),
        State::Starting { incarnation, again } => starting(terms, incarnation, *again, event),
        State::Completing { incarnation } => completing(incarnation, event),
        State::Active { incarnation } => active(incarnation, event),
        State::Refusing => refusing(terms, event),
        State::Refused | State::CopyDestroyed => final_without_guest(state, event),
        State::QemuLost => qemu_lost(terms, event),
        State::Crashed { has_run } => crashed(*has_run, event),
    }
}

fn idle(event: &Event) -> TransitionResult {
    match event {
        Event::Prepare => moved(enter(State::Prepared)),
        // PREPARED is synced before the source is notified, so an epoch that is not in the journal was never prepared.
        // The refusal has to be journalled too.
        Event::Go { .. } | Event::Asked { .. } => moved(enter(State::Refused).then([Effect::SendRefused])),
        Event::AbortReceived { .. } => ignored(Ignored::TooLate),
        _ => None,
    }
}

fn prepared(terms: &MigrationTerms, event: &Event) -> TransitionResult {
    match event {
        Event::Loaded { incarnation, run } => {
            let incarnation = incarnation.clone();
            moved(
                enter(State::Ready { incarnation: incarnation.clone(), run: *run })
                    .then([Effect::SendReady { incarnation }]),
            )
        }
        // READY was never sent: no other program depends on this copy.
        Event::AbortReceived { .. } => moved(destroy_copy(Report::CopyDestroyed)),
        Event::SourceAnswered { verdict: Verdict::Aborted, .. } => moved(destroy_copy(Report::CopyDestroyed)),
        Event::Failed
        | Event::Cancel
        | Event::PeerSilent
        | Event::PeerLost
        | Event::ContactLostForGood
        | Event::QemuDied => moved(destroy_copy(Report::CopyDestroyed).then([Effect::SendRefused])),
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused | QemuAtStart::Gone) => {
            moved(destroy_copy(Report::CopyDestroyed).when("same-boot").then([Effect::SendRefused]))
        }
        Event::Restarted(QemuAtStart::Rebooted) => moved(enter_qemu_lost(terms).within("rebooted")),
        Event::Asked { .. } => ignored(Ignored::NotYet),
        Event::Repeat => stay(State::Prepared),
        _ => None,
    }
}

fn ready(terms: &MigrationTerms, incarnation: &Incarnation, run: bool, event: &Event) -> TransitionResult {
    let state = || State::Ready { incarnation: incarnation.clone(), run };
    let here = || Transition::to(state());
    let ready = || Effect::SendReady { incarnation: incarnation.clone() };
    let read = || terms.registry.map(|_| registry::read(terms));
    match event {
        Event::Go { incarnation: named, run, .. } if named == incarnation => {
            moved(follow_go(terms, incarnation, *run))
        }
        // Starts nothing, and reports the incarnation of this host.
        Event::Go { .. } => moved(here().when("other-incarnation").then([ready()])),
        Event::SourceAnswered { verdict: Verdict::Committed { incarnation: named, run }, .. } => {
            let transition = if named == incarnation {
                follow_go(terms, incarnation, *run)
            } else {
                here().when("other-incarnation").then([ready()])
            };
            moved(transition.within("committed"))
        }
        Event::SourceAnswered { verdict: Verdict::Aborted, .. } => {
            moved(destroy_copy(Report::SourceKept).when("aborted"))
        }
        Event::SourceAnswered { verdict: Verdict::Returned, .. } => {
            moved(destroy_copy(Report::SourceKept).when("returned"))
        }
        Event::AbortReceived { .. } => moved(destroy_copy(Report::SourceKept)),
        Event::SourceAnswered { verdict: Verdict::Undecided, .. } => {
            moved(here().when("undecided").asking(RequestPurpose::Read, read()))
        }
        Event::RegistryAnswered(answer) => ready_by_registry(terms, incarnation, run, answer),
        Event::Asked { .. } => moved(here().then([ready()])),
        Event::Repeat => {
            moved(here().then([ready(), Effect::AskSource]).asking(RequestPurpose::Read, read()))
        }
        Event::Restarted(QemuAtStart::Paused) => {
            let ask_all = [ready(), Effect::AskSource];
            moved(here().when("paused").then(ask_all).asking(RequestPurpose::Read, read()))
        }
        // It cannot run any more, and has not: no `cont` was ever sent.
        Event::QemuDied => moved(refuse()),
        Event::Restarted(QemuAtStart::Gone) => moved(refuse().when("qemu-gone")),
        Event::Restarted(QemuAtStart::Rebooted) => moved(enter_qemu_lost(terms).within("rebooted")),
        // Another program has continued it. That is no state of this protocol.
        Event::Restarted(QemuAtStart::Running) => None,
        Event::OperatorDecided(OperatorDecision::RunHere { .. }) => {
            moved(follow_go(terms, incarnation, run).within("run-here"))
        }
        Event::OperatorDecided(OperatorDecision::DiscardCopy) => moved(refuse().when("discard-copy")),
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: true }) => {
            moved(start(incarnation, run).within("run-here").within("without-registry"))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(refuse_without_registry())
        }
        Event::ContactLostForGood if terms.registry.is_some() => {
            moved(here().asking(RequestPurpose::Read, read()))
        }
        Event::ContactLostForGood => {
            moved(here().when("no-registry").then([Effect::Report(Report::OperatorNeeded)]))
        }
        Event::Cancel => moved(here().then([Effect::Report(Report::TooLate)])),
        // In doubt: neither silence nor a failure of anything but QEMU decides.
        Event::Failed | Event::PeerSilent | Event::PeerLost => stay(state()),
        _ => None,
    }
}

/// Returns the transition of READY for the registry's answer.
fn ready_by_registry(
    terms: &MigrationTerms,
    incarnation: &Incarnation,
    run: bool,
    answer: &RegistryAnswer,
) -> TransitionResult {
    let here = || Transition::to(State::Ready { incarnation: incarnation.clone(), run });
    match registry::interpret(terms, answer) {
        RegistryResult::Record(RecordMeaning::Open { offer: Some(offer), .. })
            if offer.epoch == terms.epoch() && offer.incarnation == *incarnation =>
        {
            moved(follow_go(terms, incarnation, offer.run).within("offered"))
        }
        // The source has reclaimed it, or has owned it since in a later epoch.
        RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
            moved(destroy_copy(Report::SourceKept).when("source-owns"))
        }
        RegistryResult::Record(RecordMeaning::Foreign) => {
            moved(here().when("foreign").then([Effect::Report(Report::ForeignRecord)]))
        }
        // This host has not acquired ownership: a record that names it is not this incarnation's.
        RegistryResult::Record(RecordMeaning::Destination) => None,
        RegistryResult::Record(RecordMeaning::Open { .. })
        | RegistryResult::Unreachable
        | RegistryResult::Unknown => moved(here().when("otherwise")),
    }
}

fn acquiring(
    terms: &MigrationTerms,
    incarnation: &Incarnation,
    run: bool,
    event: &Event,
) -> TransitionResult {
    let state = || State::Acquiring { incarnation: incarnation.clone(), run };
    let here = || Transition::to(state());
    let acquire = |since| ask(RequestPurpose::Acquire, Some(registry::acquire_by_destination(terms, since)));
    let read = || ask(RequestPurpose::Read, Some(registry::read(terms)));
    match event {
        Event::RegistryAnswered(answer) => match registry::interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Destination) => {
                moved(start(incarnation, run).within("destination-owns"))
            }
            RegistryResult::Record(RecordMeaning::Open { since, .. }) => {
                moved(here().when("open").then(acquire(since)))
            }
            RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
                moved(destroy_copy(Report::SourceKept).when("source-owns"))
            }
            RegistryResult::Record(RecordMeaning::Foreign) => {
                moved(here().when("foreign").then([Effect::Report(Report::ForeignRecord)]))
            }
            RegistryResult::Unknown => moved(here().when("unknown").then(read())),
            RegistryResult::Unreachable => moved(here().when("unreachable")),
        },
        Event::Repeat => moved(here().then(terms.registry.and_then(acquire))),
        Event::Restarted(QemuAtStart::Paused) => moved(here().when("paused").then(read())),
        // `cont` was not sent: otherwise STARTING would be in the journal.
        Event::QemuDied => moved(return_to_source(terms)),
        Event::Restarted(QemuAtStart::Gone) => moved(return_to_source(terms).when("qemu-gone")),
        Event::Restarted(QemuAtStart::Rebooted) => moved(enter_qemu_lost(terms).within("rebooted")),
        Event::OperatorDecided(OperatorDecision::DiscardCopy) => {
            moved(return_to_source(terms).when("discard-copy"))
        }
        Event::OperatorDecided(OperatorDecision::RunHere { .. }) => {
            moved(here().when("run-here").then(read()))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: true }) => {
            moved(start(incarnation, run).within("run-here").within("without-registry"))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(refuse_without_registry())
        }
        // The source may have reclaimed it in the meantime; the registry has the answer.
        Event::AbortReceived { .. } => moved(here().then(read())),
        Event::SourceAnswered { verdict: Verdict::Aborted, .. } => moved(here().when("aborted").then(read())),
        Event::SourceAnswered { verdict: Verdict::Returned, .. } => {
            moved(here().when("returned").then(read()))
        }
        Event::Go { .. } | Event::SourceAnswered { .. } => ignored(Ignored::TooLate),
        Event::Asked { .. } => ignored(Ignored::NotYet),
        Event::Cancel => moved(here().then([Effect::Report(Report::TooLate)])),
        Event::Failed | Event::PeerSilent | Event::PeerLost | Event::ContactLostForGood => stay(state()),
        _ => None,
    }
}

fn starting(
    terms: &MigrationTerms,
    incarnation: &Incarnation,
    again: bool,
    event: &Event,
) -> TransitionResult {
    let state = |again| State::Starting { incarnation: incarnation.clone(), again };
    match event {
        Event::Continued { missing: true } => moved(run_incomplete(incarnation).when("missing")),
        Event::Continued { missing: false } => moved(activate(incarnation)),
        Event::Restarted(QemuAtStart::Running) => moved(activate(incarnation).when("running")),
        // `cont` may have been sent or not. Sending it again is safe while this host owns the guest, but an operator
        // may have returned it to the source since.
        Event::Restarted(QemuAtStart::Paused) => {
            moved(cont_again(terms, enter(state(true))).within("paused"))
        }
        Event::Repeat if again => moved(cont_again(terms, Transition::to(state(true))).within("again")),
        Event::RegistryAnswered(answer) if again => match registry::interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Destination) => {
                moved(Transition::to(state(true)).when("destination-owns").then([Effect::Cont]))
            }
            // It was given to the source in conflict with the earlier record: it may have run here.
            RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
                moved(crash_with_host().when("source-owns"))
            }
            RegistryResult::Record(RecordMeaning::Open { .. } | RecordMeaning::Foreign) => moved(
                Transition::to(state(true)).when("foreign").then([Effect::Report(Report::ForeignRecord)]),
            ),
            RegistryResult::Unknown => {
                let read = ask(RequestPurpose::Read, Some(registry::read(terms)));
                moved(Transition::to(state(true)).when("unknown").then(read))
            }
            RegistryResult::Unreachable => moved(Transition::to(state(true)).when("unreachable")),
        },
        Event::ContFailed if again => {
            moved(Transition::to(state(true)).when("again").then([Effect::Report(Report::ContFailed)]))
        }
        Event::ContFailed => moved(refuse_through_registry(terms).within("first")),
        // The operator's assurance that it never ran replaces the proof.
        Event::OperatorDecided(OperatorDecision::DiscardCopy) if again => {
            moved(refuse_through_registry(terms).within("again").within("discard-copy"))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: true }) if again => {
            let to = Transition::to(state(true)).when("without-registry").when("run-here").when("again");
            moved(to.then([Effect::Cont]))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) if again => {
            moved(refuse_without_registry().when("again"))
        }
        Event::QemuDied => moved(crash(false)),
        Event::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(crash(false).when("qemu-gone")),
        Event::Cancel => moved(Transition::to(state(again)).then([Effect::Report(Report::TooLate)])),
        Event::Go { .. } | Event::Asked { .. } => ignored(Ignored::NotYet),
        Event::SourceAnswered { verdict: Verdict::Committed { .. }, .. } => ignored(Ignored::NotYet),
        Event::SourceAnswered { verdict: Verdict::Undecided, .. } | Event::RegistryAnswered(_) => {
            ignored(Ignored::TooLate)
        }
        Event::OperatorDecided(_) => {
            moved(Transition::to(state(again)).then([Effect::Report(Report::TooLate)]))
        }
        Event::Repeat => moved(Transition::to(state(again)).when("first")),
        Event::Failed | Event::PeerSilent | Event::PeerLost | Event::ContactLostForGood => stay(state(again)),
        // An honest source does not abort what it has committed, but an operator can.
        _ => None,
    }
}

/// The guest runs here for good. RUNNING is not sent yet because the source has to keep its pages.
fn completing(incarnation: &Incarnation, event: &Event) -> TransitionResult {
    let here = || Transition::to(State::Completing { incarnation: incarnation.clone() });
    match event {
        Event::Completed => {
            let state = State::Active { incarnation: incarnation.clone() };
            moved(enter(state).then([Effect::SendRunning, Effect::Report(Report::Active)]))
        }
        Event::Go { .. } | Event::Asked { .. } => moved(here().then([Effect::SendIncomplete])),
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(here().when("qemu-lives").then([Effect::SendIncomplete]))
        }
        Event::QemuDied => moved(crash(true)),
        Event::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(crash(true).when("qemu-gone")),
        Event::ContactLostForGood => moved(here().then([Effect::Report(Report::SourceNeeded)])),
        Event::Cancel => moved(here().then([Effect::Report(Report::TooLate)])),
        Event::SourceAnswered { verdict: Verdict::Aborted | Verdict::Returned, .. }
        | Event::AbortReceived { .. } => None,
        Event::Prepare | Event::Loaded { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}

fn active(incarnation: &Incarnation, event: &Event) -> TransitionResult {
    let here = || Transition::to(State::Active { incarnation: incarnation.clone() });
    match event {
        Event::Go { .. } | Event::Asked { .. } => moved(here().then([Effect::SendRunning])),
        Event::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(here().when("qemu-lives").then([Effect::SendRunning]))
        }
        Event::QemuDied => moved(crash(true)),
        Event::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(crash(true).when("qemu-gone")),
        Event::SourceAnswered { verdict: Verdict::Aborted | Verdict::Returned, .. }
        | Event::AbortReceived { .. } => None,
        Event::Prepare | Event::Loaded { .. } => None,
        Event::Cancel => moved(here().then([Effect::Report(Report::TooLate)])),
        _ => ignored(Ignored::TooLate),
    }
}

fn refusing(terms: &MigrationTerms, event: &Event) -> TransitionResult {
    let here = || Transition::to(State::Refusing);
    let return_to_source = || ask(RequestPurpose::ReturnToSource, Some(registry::return_to_source(terms)));
    match event {
        Event::RegistryAnswered(answer) => match registry::interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
                moved(refuse().when("source-owns"))
            }
            RegistryResult::Record(RecordMeaning::Destination) => {
                moved(here().when("destination-owns").then(return_to_source()))
            }
            // Not acquired, but a request of this host's may still be in transit: rule it out.
            RegistryResult::Record(RecordMeaning::Open { since, .. }) => {
                let shut = registry::acquire_by_source(terms, since);
                moved(here().when("open").then(ask(RequestPurpose::ReturnToSource, Some(shut))))
            }
            RegistryResult::Record(RecordMeaning::Foreign) => {
                moved(here().when("foreign").then([Effect::Report(Report::ForeignRecord)]))
            }
            RegistryResult::Unknown => {
                moved(here().when("unknown").then(ask(RequestPurpose::Read, Some(registry::read(terms)))))
            }
            RegistryResult::Unreachable => moved(here().when("unreachable")),
        },
        Event::Repeat | Event::Restarted(_) => moved(here().then(return_to_source())),
        Event::Go { .. } | Event::Asked { .. } => ignored(Ignored::NotYet),
        Event::Prepare | Event::Loaded { .. } => None,
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(refuse_without_registry())
        }
        Event::Cancel => moved(here().then([Effect::Report(Report::TooLate)])),
        _ => ignored(Ignored::TooLate),
    }
}

/// Refused, or the copy is destroyed: this host has not run the guest and never will.
fn final_without_guest(state: &State, event: &Event) -> TransitionResult {
    let here = || Transition::to(state.clone());
    match event {
        Event::Go { .. } | Event::Asked { .. } => moved(here().then([Effect::SendRefused])),
        // The agent may have died before it had removed everything.
        Event::Restarted(_) => moved(here().then([Effect::DestroyCopy, Effect::SendRefused])),
        Event::Prepare | Event::Loaded { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}

/// The copy is lost, and perhaps entries that it has run. Only proof that it never ran permits the removal of its
/// images. That is a registry in which ownership was never acquired for it; or a source that is ABORTED, which has
/// never committed, as long as this host does not send CRASHED, upon which a source that has lost its QEMU itself
/// aborts.
fn qemu_lost(terms: &MigrationTerms, event: &Event) -> TransitionResult {
    let here = || Transition::to(State::QemuLost);
    let read = || ask(RequestPurpose::Read, Some(registry::read(terms)));
    match event {
        Event::RegistryAnswered(answer) => match registry::interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Destination) => {
                moved(crash_with_host().when("destination-owns"))
            }
            // The record may also stem from an operator's decision against the registry: the source knows which.
            RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
                moved(here().when("source-owns").then([Effect::AskSource]))
            }
            // Ownership was never acquired, so it never ran.
            RegistryResult::Record(RecordMeaning::Open { .. }) => moved(return_to_source(terms).when("open")),
            RegistryResult::Record(RecordMeaning::Foreign) => {
                moved(here().when("foreign").then([Effect::Report(Report::ForeignRecord)]))
            }
            RegistryResult::Unknown => moved(here().when("unknown").then(read())),
            RegistryResult::Unreachable => moved(here().when("unreachable")),
        },
        Event::SourceAnswered { verdict: Verdict::Aborted, .. } => {
            moved(destroy_copy(Report::SourceKept).when("aborted"))
        }
        Event::AbortReceived { .. } => moved(destroy_copy(Report::SourceKept)),
        Event::SourceAnswered { verdict: Verdict::Returned, .. } => moved(crash_with_host().when("returned")),
        // The source's operator decides then.
        Event::OperatorDecided(OperatorDecision::DiscardCopy) if terms.registry.is_none() => {
            moved(crash_with_host().when("no-registry").when("discard-copy"))
        }
        Event::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(crash_with_host().when("without-registry").when("discard-copy"))
        }
        Event::OperatorDecided(_) | Event::Cancel => moved(here().then([Effect::Report(Report::TooLate)])),
        Event::ContactLostForGood => moved(here().then([Effect::Report(Report::OperatorNeeded)])),
        Event::Failed | Event::PeerSilent | Event::PeerLost => stay(State::QemuLost),
        Event::QemuDied => ignored(Ignored::TooLate),
        Event::Repeat | Event::Restarted(_) if terms.registry.is_some() => {
            moved(here().when("registry").then(read()))
        }
        Event::Repeat | Event::Restarted(_) => moved(here().when("no-registry").then([Effect::AskSource])),
        // Only a source that knows no more than this host asks: the answer is unknown.
        Event::Asked { .. } => moved(crash_with_host()),
        // The registry's record has precedence over a source that has committed.
        Event::Go { .. } | Event::SourceAnswered { .. } if terms.registry.is_some() => {
            ignored(Ignored::NotYet)
        }
        Event::SourceAnswered { verdict: Verdict::Committed { .. }, .. } => {
            moved(crash_with_host().when("no-registry").when("committed"))
        }
        Event::SourceAnswered { verdict: Verdict::Undecided, .. } => {
            moved(here().when("no-registry").when("undecided"))
        }
        Event::Go { .. } => moved(crash_with_host().when("no-registry")),
        _ => None,
    }
}

fn crashed(has_run: bool, event: &Event) -> TransitionResult {
    let here = || Transition::to(State::Crashed { has_run });
    match event {
        // This host has owned it and still does: the source's copy is out of date.
        Event::Go { .. } | Event::Asked { .. } if has_run => {
            moved(here().when("has-run").then([Effect::SendRunning]))
        }
        Event::Go { .. } | Event::Asked { .. } => {
            moved(here().when("may-have-run").then([Effect::SendCrashed]))
        }
        Event::Prepare | Event::Loaded { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}
