//! The destination's transitions, state by state. `None` marks an illegal event.

#![allow(clippy::match_same_arms, reason = "one arm for each case, with its own reason")]

mod shared;

use proto::Incarnation;
use proto::message::Verdict;

use super::DestinationEffect as Do;
use super::DestinationEvent as On;
use super::DestinationReport as Notice;
use super::DestinationState as In;
use crate::handover::operator::OperatorDecision;
use crate::handover::registry::{self, RecordMeaning, RegistryAnswer, RequestPurpose};
use crate::handover::{Ignored, MigrationTerms, Move, QemuAtStart, Step};

use shared::{
    RegistryResult, activate, ask, cont_again, crash, crash_with_host, discard, enter, enter_qemu_lost,
    follow_go, ignored, interpret, moved, refuse, refuse_through_registry, refuse_without_registry,
    return_to_source, run_incomplete, start, stay,
};

type Moved = Move<In, Do>;
type TransitionResult = Option<Step<In, Do>>;

pub(super) fn step(terms: &MigrationTerms, state: &In, event: &On) -> TransitionResult {
    match state {
        In::Idle => idle(event),
        In::Prepared => prepared(terms, event),
        In::Ready { incarnation, run } => ready(terms, incarnation, *run, event),
        // Only with a registry can ownership be acquired or returned.
        In::Taking { .. } | In::Refusing if terms.registry.is_none() => None,
        In::Taking { incarnation, run } => taking(terms, incarnation, *run, event),
        In::Starting { incarnation, again } => starting(terms, incarnation, *again, event),
        In::Completing { incarnation } => completing(incarnation, event),
        In::Active { incarnation } => active(incarnation, event),
        In::Refusing => refusing(terms, event),
        In::Refused | In::Discarded => final_without_guest(state, event),
        In::QemuLost => qemu_lost(terms, event),
        In::Crashed { ran } => crashed(*ran, event),
    }
}

fn idle(event: &On) -> TransitionResult {
    match event {
        On::Prepare => moved(enter(In::Prepared)),
        // PREPARED is synced before the source is notified, so an epoch that is not in the journal was never prepared.
        // The refusal has to be journalled too.
        On::Go { .. } | On::Asked { .. } => moved(enter(In::Refused).then([Do::SendRefused])),
        On::AbortReceived { .. } => ignored(Ignored::TooLate),
        _ => None,
    }
}

fn prepared(terms: &MigrationTerms, event: &On) -> TransitionResult {
    match event {
        On::Loaded { incarnation, run } => {
            let incarnation = incarnation.clone();
            moved(
                enter(In::Ready { incarnation: incarnation.clone(), run: *run })
                    .then([Do::SendReady { incarnation }]),
            )
        }
        // READY was never sent: no other program depends on this copy.
        On::AbortReceived { .. } => moved(discard(Notice::Discarded)),
        On::SourceAnswered { verdict: Verdict::Aborted, .. } => moved(discard(Notice::Discarded)),
        On::Failed | On::Cancel | On::PeerSilent | On::PeerLost | On::ContactLostForGood | On::QemuDied => {
            moved(discard(Notice::Discarded).then([Do::SendRefused]))
        }
        On::Restarted(QemuAtStart::Running | QemuAtStart::Paused | QemuAtStart::Gone) => {
            moved(discard(Notice::Discarded).when("same-boot").then([Do::SendRefused]))
        }
        On::Restarted(QemuAtStart::Rebooted) => moved(enter_qemu_lost(terms).within("rebooted")),
        On::Asked { .. } => ignored(Ignored::NotYet),
        On::Repeat => stay(In::Prepared),
        _ => None,
    }
}

fn ready(terms: &MigrationTerms, incarnation: &Incarnation, ran: bool, event: &On) -> TransitionResult {
    let state = || In::Ready { incarnation: incarnation.clone(), run: ran };
    let here = || Move::to(state());
    let ready = || Do::SendReady { incarnation: incarnation.clone() };
    let read = || terms.registry.map(|_| registry::read(terms));
    match event {
        On::Go { incarnation: named, run, .. } if named == incarnation => {
            moved(follow_go(terms, incarnation, *run))
        }
        // Starts nothing, and reports the incarnation of this host.
        On::Go { .. } => moved(here().when("other-incarnation").then([ready()])),
        On::SourceAnswered { verdict: Verdict::Committed { incarnation: named, run }, .. } => {
            let transition = if named == incarnation {
                follow_go(terms, incarnation, *run)
            } else {
                here().when("other-incarnation").then([ready()])
            };
            moved(transition.within("committed"))
        }
        On::SourceAnswered { verdict: Verdict::Aborted, .. } => {
            moved(discard(Notice::SourceKept).when("aborted"))
        }
        On::SourceAnswered { verdict: Verdict::Returned, .. } => {
            moved(discard(Notice::SourceKept).when("returned"))
        }
        On::AbortReceived { .. } => moved(discard(Notice::SourceKept)),
        On::SourceAnswered { verdict: Verdict::Undecided, .. } => {
            moved(here().when("undecided").asking(RequestPurpose::Read, read()))
        }
        On::RegistryAnswered(answer) => ready_by_registry(terms, incarnation, ran, answer),
        On::Asked { .. } => moved(here().then([ready()])),
        On::Repeat => moved(here().then([ready(), Do::AskSource]).asking(RequestPurpose::Read, read())),
        On::Restarted(QemuAtStart::Paused) => {
            let ask_all = [ready(), Do::AskSource];
            moved(here().when("paused").then(ask_all).asking(RequestPurpose::Read, read()))
        }
        // It cannot run any more, and has not: no `cont` was ever sent.
        On::QemuDied => moved(refuse()),
        On::Restarted(QemuAtStart::Gone) => moved(refuse().when("qemu-gone")),
        On::Restarted(QemuAtStart::Rebooted) => moved(enter_qemu_lost(terms).within("rebooted")),
        // Another program has continued it. That is no state of this protocol.
        On::Restarted(QemuAtStart::Running) => None,
        On::OperatorDecided(OperatorDecision::RunHere { .. }) => {
            moved(follow_go(terms, incarnation, ran).within("run-here"))
        }
        On::OperatorDecided(OperatorDecision::RunElsewhere) => moved(refuse().when("run-elsewhere")),
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: true }) => {
            moved(start(incarnation, ran).within("run-here").within("without-registry"))
        }
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(refuse_without_registry())
        }
        On::ContactLostForGood if terms.registry.is_some() => {
            moved(here().asking(RequestPurpose::Read, read()))
        }
        On::ContactLostForGood => {
            moved(here().when("no-registry").then([Do::Report(Notice::OperatorNeeded)]))
        }
        On::Cancel => moved(here().then([Do::Report(Notice::TooLate)])),
        // In doubt: neither silence nor a failure of anything but QEMU decides.
        On::Failed | On::PeerSilent | On::PeerLost => stay(state()),
        _ => None,
    }
}

/// Returns the transition of [`In::Ready`] for the registry's answer.
fn ready_by_registry(
    terms: &MigrationTerms,
    incarnation: &Incarnation,
    ran: bool,
    answer: &RegistryAnswer,
) -> TransitionResult {
    let here = || Move::to(In::Ready { incarnation: incarnation.clone(), run: ran });
    match interpret(terms, answer) {
        RegistryResult::Record(RecordMeaning::Open { offer: Some(offer), .. })
            if offer.epoch == terms.epoch() && offer.incarnation == *incarnation =>
        {
            moved(follow_go(terms, incarnation, offer.run).within("offered"))
        }
        // The source has reclaimed it, or has owned it since in a later epoch.
        RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
            moved(discard(Notice::SourceKept).when("source-owns"))
        }
        RegistryResult::Record(RecordMeaning::Foreign) => {
            moved(here().when("foreign").then([Do::Report(Notice::ForeignRecord)]))
        }
        // This host has not acquired ownership: a record that names it is not this incarnation's.
        RegistryResult::Record(RecordMeaning::Destination) => None,
        RegistryResult::Record(RecordMeaning::Open { .. })
        | RegistryResult::Unreachable
        | RegistryResult::Unknown => moved(here().when("otherwise")),
    }
}

fn taking(terms: &MigrationTerms, incarnation: &Incarnation, run: bool, event: &On) -> TransitionResult {
    let state = || In::Taking { incarnation: incarnation.clone(), run };
    let here = || Move::to(state());
    let take = |since| ask(RequestPurpose::Take, Some(registry::acquire_by_destination(terms, since)));
    let read = || ask(RequestPurpose::Read, Some(registry::read(terms)));
    match event {
        On::RegistryAnswered(answer) => match interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Destination) => {
                moved(start(incarnation, run).within("destination-owns"))
            }
            RegistryResult::Record(RecordMeaning::Open { since, .. }) => {
                moved(here().when("open").then(take(since)))
            }
            RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
                moved(discard(Notice::SourceKept).when("source-owns"))
            }
            RegistryResult::Record(RecordMeaning::Foreign) => {
                moved(here().when("foreign").then([Do::Report(Notice::ForeignRecord)]))
            }
            RegistryResult::Unknown => moved(here().when("unknown").then(read())),
            RegistryResult::Unreachable => moved(here().when("unreachable")),
        },
        On::Repeat => moved(here().then(terms.registry.and_then(take))),
        On::Restarted(QemuAtStart::Paused) => moved(here().when("paused").then(read())),
        // `cont` was not sent: otherwise STARTING would be in the journal.
        On::QemuDied => moved(return_to_source(terms)),
        On::Restarted(QemuAtStart::Gone) => moved(return_to_source(terms).when("qemu-gone")),
        On::Restarted(QemuAtStart::Rebooted) => moved(enter_qemu_lost(terms).within("rebooted")),
        On::OperatorDecided(OperatorDecision::RunElsewhere) => {
            moved(return_to_source(terms).when("run-elsewhere"))
        }
        On::OperatorDecided(OperatorDecision::RunHere { .. }) => moved(here().when("run-here").then(read())),
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: true }) => {
            moved(start(incarnation, run).within("run-here").within("without-registry"))
        }
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(refuse_without_registry())
        }
        // The source may have reclaimed it in the meantime; the registry has the answer.
        On::AbortReceived { .. } => moved(here().then(read())),
        On::SourceAnswered { verdict: Verdict::Aborted, .. } => moved(here().when("aborted").then(read())),
        On::SourceAnswered { verdict: Verdict::Returned, .. } => moved(here().when("returned").then(read())),
        On::Go { .. } | On::SourceAnswered { .. } => ignored(Ignored::TooLate),
        On::Asked { .. } => ignored(Ignored::NotYet),
        On::Cancel => moved(here().then([Do::Report(Notice::TooLate)])),
        On::Failed | On::PeerSilent | On::PeerLost | On::ContactLostForGood => stay(state()),
        _ => None,
    }
}

fn starting(terms: &MigrationTerms, incarnation: &Incarnation, again: bool, event: &On) -> TransitionResult {
    let state = |again| In::Starting { incarnation: incarnation.clone(), again };
    match event {
        On::Continued { missing: true } => moved(run_incomplete(incarnation).when("missing")),
        On::Continued { missing: false } => moved(activate(incarnation)),
        On::Restarted(QemuAtStart::Running) => moved(activate(incarnation).when("running")),
        // `cont` may have been sent or not. Sending it again is safe while this host owns the guest, but an operator
        // may have returned it to the source since.
        On::Restarted(QemuAtStart::Paused) => moved(cont_again(terms, enter(state(true))).within("paused")),
        On::Repeat if again => moved(cont_again(terms, Move::to(state(true))).within("again")),
        On::RegistryAnswered(answer) if again => match interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Destination) => {
                moved(Move::to(state(true)).when("destination-owns").then([Do::Cont]))
            }
            // It was given to the source in conflict with the earlier record: it may have run here.
            RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
                moved(crash_with_host().when("source-owns"))
            }
            RegistryResult::Record(RecordMeaning::Open { .. } | RecordMeaning::Foreign) => {
                moved(Move::to(state(true)).when("foreign").then([Do::Report(Notice::ForeignRecord)]))
            }
            RegistryResult::Unknown => {
                let read = ask(RequestPurpose::Read, Some(registry::read(terms)));
                moved(Move::to(state(true)).when("unknown").then(read))
            }
            RegistryResult::Unreachable => moved(Move::to(state(true)).when("unreachable")),
        },
        On::ContFailed if again => {
            moved(Move::to(state(true)).when("again").then([Do::Report(Notice::ContFailed)]))
        }
        On::ContFailed => moved(refuse_through_registry(terms).within("first")),
        // The operator's assurance that it never ran replaces the proof.
        On::OperatorDecided(OperatorDecision::RunElsewhere) if again => {
            moved(refuse_through_registry(terms).within("again").within("run-elsewhere"))
        }
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: true }) if again => {
            let to = Move::to(state(true)).when("without-registry").when("run-here").when("again");
            moved(to.then([Do::Cont]))
        }
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) if again => {
            moved(refuse_without_registry().when("again"))
        }
        On::QemuDied => moved(crash(false)),
        On::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(crash(false).when("qemu-gone")),
        On::Cancel => moved(Move::to(state(again)).then([Do::Report(Notice::TooLate)])),
        On::Go { .. } | On::Asked { .. } => ignored(Ignored::NotYet),
        On::SourceAnswered { verdict: Verdict::Committed { .. }, .. } => ignored(Ignored::NotYet),
        On::SourceAnswered { verdict: Verdict::Undecided, .. } | On::RegistryAnswered(_) => {
            ignored(Ignored::TooLate)
        }
        On::OperatorDecided(_) => moved(Move::to(state(again)).then([Do::Report(Notice::TooLate)])),
        On::Repeat => moved(Move::to(state(again)).when("first")),
        On::Failed | On::PeerSilent | On::PeerLost | On::ContactLostForGood => stay(state(again)),
        // An honest source does not abort what it has committed, but an operator can.
        _ => None,
    }
}

/// The guest runs here for good. RUNNING is not sent yet because the source has to keep its pages.
fn completing(incarnation: &Incarnation, event: &On) -> TransitionResult {
    let here = || Move::to(In::Completing { incarnation: incarnation.clone() });
    match event {
        On::Completed => {
            let state = In::Active { incarnation: incarnation.clone() };
            moved(enter(state).then([Do::SendRunning, Do::Report(Notice::Active)]))
        }
        On::Go { .. } | On::Asked { .. } => moved(here().then([Do::SendIncomplete])),
        On::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(here().when("qemu-lives").then([Do::SendIncomplete]))
        }
        On::QemuDied => moved(crash(true)),
        On::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(crash(true).when("qemu-gone")),
        On::ContactLostForGood => moved(here().then([Do::Report(Notice::SourceNeeded)])),
        On::Cancel => moved(here().then([Do::Report(Notice::TooLate)])),
        On::SourceAnswered { verdict: Verdict::Aborted | Verdict::Returned, .. }
        | On::AbortReceived { .. } => None,
        On::Prepare | On::Loaded { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}

fn active(incarnation: &Incarnation, event: &On) -> TransitionResult {
    let here = || Move::to(In::Active { incarnation: incarnation.clone() });
    match event {
        On::Go { .. } | On::Asked { .. } => moved(here().then([Do::SendRunning])),
        On::Restarted(QemuAtStart::Running | QemuAtStart::Paused) => {
            moved(here().when("qemu-lives").then([Do::SendRunning]))
        }
        On::QemuDied => moved(crash(true)),
        On::Restarted(QemuAtStart::Gone | QemuAtStart::Rebooted) => moved(crash(true).when("qemu-gone")),
        On::SourceAnswered { verdict: Verdict::Aborted | Verdict::Returned, .. }
        | On::AbortReceived { .. } => None,
        On::Prepare | On::Loaded { .. } => None,
        On::Cancel => moved(here().then([Do::Report(Notice::TooLate)])),
        _ => ignored(Ignored::TooLate),
    }
}

fn refusing(terms: &MigrationTerms, event: &On) -> TransitionResult {
    let here = || Move::to(In::Refusing);
    let return_to_source = || ask(RequestPurpose::GiveBack, Some(registry::return_to_source(terms)));
    match event {
        On::RegistryAnswered(answer) => match interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
                moved(refuse().when("source-owns"))
            }
            RegistryResult::Record(RecordMeaning::Destination) => {
                moved(here().when("destination-owns").then(return_to_source()))
            }
            // Not acquired, but a request of this host's may still be in transit: rule it out.
            RegistryResult::Record(RecordMeaning::Open { since, .. }) => {
                let shut = registry::acquire_by_source(terms, since);
                moved(here().when("open").then(ask(RequestPurpose::GiveBack, Some(shut))))
            }
            RegistryResult::Record(RecordMeaning::Foreign) => {
                moved(here().when("foreign").then([Do::Report(Notice::ForeignRecord)]))
            }
            RegistryResult::Unknown => {
                moved(here().when("unknown").then(ask(RequestPurpose::Read, Some(registry::read(terms)))))
            }
            RegistryResult::Unreachable => moved(here().when("unreachable")),
        },
        On::Repeat | On::Restarted(_) => moved(here().then(return_to_source())),
        On::Go { .. } | On::Asked { .. } => ignored(Ignored::NotYet),
        On::Prepare | On::Loaded { .. } => None,
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(refuse_without_registry())
        }
        On::Cancel => moved(here().then([Do::Report(Notice::TooLate)])),
        _ => ignored(Ignored::TooLate),
    }
}

/// Refused or discarded: this host has not run the guest and never will.
fn final_without_guest(state: &In, event: &On) -> TransitionResult {
    let here = || Move::to(state.clone());
    match event {
        On::Go { .. } | On::Asked { .. } => moved(here().then([Do::SendRefused])),
        // The agent may have died before it had removed everything.
        On::Restarted(_) => moved(here().then([Do::Discard, Do::SendRefused])),
        On::Prepare | On::Loaded { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}

/// The copy is lost, and perhaps entries that it has run. Only proof that it never ran permits the removal of its
/// images. That is a registry in which ownership was never acquired for it; or a source that is ABORTED, which has
/// never committed, as long as this host does not send CRASHED, upon which a source that has lost its QEMU itself aborts.
fn qemu_lost(terms: &MigrationTerms, event: &On) -> TransitionResult {
    let here = || Move::to(In::QemuLost);
    let read = || ask(RequestPurpose::Read, Some(registry::read(terms)));
    match event {
        On::RegistryAnswered(answer) => match interpret(terms, answer) {
            RegistryResult::Record(RecordMeaning::Destination) => {
                moved(crash_with_host().when("destination-owns"))
            }
            // The record may also stem from an operator's decision against the registry: the source knows which.
            RegistryResult::Record(RecordMeaning::Source | RecordMeaning::MovedOn) => {
                moved(here().when("source-owns").then([Do::AskSource]))
            }
            // Ownership was never acquired, so it never ran.
            RegistryResult::Record(RecordMeaning::Open { .. }) => moved(return_to_source(terms).when("open")),
            RegistryResult::Record(RecordMeaning::Foreign) => {
                moved(here().when("foreign").then([Do::Report(Notice::ForeignRecord)]))
            }
            RegistryResult::Unknown => moved(here().when("unknown").then(read())),
            RegistryResult::Unreachable => moved(here().when("unreachable")),
        },
        On::SourceAnswered { verdict: Verdict::Aborted, .. } => {
            moved(discard(Notice::SourceKept).when("aborted"))
        }
        On::AbortReceived { .. } => moved(discard(Notice::SourceKept)),
        On::SourceAnswered { verdict: Verdict::Returned, .. } => moved(crash_with_host().when("returned")),
        // The source's operator decides then.
        On::OperatorDecided(OperatorDecision::RunElsewhere) if terms.registry.is_none() => {
            moved(crash_with_host().when("no-registry").when("run-elsewhere"))
        }
        On::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: false }) => {
            moved(crash_with_host().when("without-registry").when("run-elsewhere"))
        }
        On::OperatorDecided(_) | On::Cancel => moved(here().then([Do::Report(Notice::TooLate)])),
        On::ContactLostForGood => moved(here().then([Do::Report(Notice::OperatorNeeded)])),
        On::Failed | On::PeerSilent | On::PeerLost => stay(In::QemuLost),
        On::QemuDied => ignored(Ignored::TooLate),
        On::Repeat | On::Restarted(_) if terms.registry.is_some() => {
            moved(here().when("registry").then(read()))
        }
        On::Repeat | On::Restarted(_) => moved(here().when("no-registry").then([Do::AskSource])),
        // Only a source that knows no more than this host asks: the answer is unknown.
        On::Asked { .. } => moved(crash_with_host()),
        // The registry's record has precedence over a source that has committed.
        On::Go { .. } | On::SourceAnswered { .. } if terms.registry.is_some() => ignored(Ignored::NotYet),
        On::SourceAnswered { verdict: Verdict::Committed { .. }, .. } => {
            moved(crash_with_host().when("no-registry").when("committed"))
        }
        On::SourceAnswered { verdict: Verdict::Undecided, .. } => {
            moved(here().when("no-registry").when("undecided"))
        }
        On::Go { .. } => moved(crash_with_host().when("no-registry")),
        _ => None,
    }
}

fn crashed(ran: bool, event: &On) -> TransitionResult {
    let here = || Move::to(In::Crashed { ran });
    match event {
        // This host has owned it and still does: the source's copy is out of date.
        On::Go { .. } | On::Asked { .. } if ran => moved(here().when("ran").then([Do::SendRunning])),
        On::Go { .. } | On::Asked { .. } => moved(here().when("may-have-run").then([Do::SendCrashed])),
        On::Prepare | On::Loaded { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}
