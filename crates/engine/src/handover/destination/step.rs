//! The destination's transitions, state by state. `None` marks an illegal event.

#![allow(clippy::match_same_arms, reason = "one arm for each case, with its own reason")]

mod ways;

use proto::Incarnation;
use proto::message::Verdict;

use super::DestinationEffect as Do;
use super::DestinationEvent as On;
use super::DestinationReport as Say;
use super::DestinationState as In;
use crate::handover::recover::Decision;
use crate::handover::register::{self, Standing, Use};
use crate::handover::{Found, Ignored, Move, Step, Terms};

use ways::{
    Heard, activate, ask, bereave, cont_again, crash, discard, enter, give_back, heard, ignored, lost, moved,
    obey, refuse, refuse_through_register, refuse_unregistered, run_incomplete, start, stay,
};

type Moved = Move<In, Do>;
type Taken = Option<Step<In, Do>>;

pub(super) fn step(terms: &Terms, state: &In, event: &On) -> Taken {
    match state {
        In::Idle => idle(event),
        In::Prepared => prepared(terms, event),
        In::Ready { incarnation, run } => ready(terms, incarnation, *run, event),
        // Only with a registry can ownership be acquired or returned.
        In::Taking { .. } | In::Refusing if terms.register.is_none() => None,
        In::Taking { incarnation, run } => taking(terms, incarnation, *run, event),
        In::Starting { incarnation, again } => starting(terms, incarnation, *again, event),
        In::Completing { incarnation } => completing(incarnation, event),
        In::Active { incarnation } => active(incarnation, event),
        In::Refusing => refusing(terms, event),
        In::Refused | In::Discarded => gone(state, event),
        In::Bereft => bereft(terms, event),
        In::Crashed { ran } => crashed(*ran, event),
    }
}

fn idle(event: &On) -> Taken {
    match event {
        On::Prepare => moved(enter(In::Prepared)),
        // PREPARED is synced before the source is notified, so an epoch that is not in the journal was never prepared.
        // The refusal has to be journalled too.
        On::Go { .. } | On::Asked { .. } => moved(enter(In::Refused).then([Do::SendRefused])),
        On::AbortReceived { .. } => ignored(Ignored::TooLate),
        _ => None,
    }
}

fn prepared(terms: &Terms, event: &On) -> Taken {
    match event {
        On::Loaded { incarnation, run } => {
            let incarnation = incarnation.clone();
            moved(
                enter(In::Ready { incarnation: incarnation.clone(), run: *run })
                    .then([Do::SendReady { incarnation }]),
            )
        }
        // READY was never sent: no other program depends on this copy.
        On::AbortReceived { .. } => moved(discard(Say::Discarded)),
        On::SourceSays { verdict: Verdict::Aborted, .. } => moved(discard(Say::Discarded)),
        On::Failed | On::Cancel | On::PeerSilent | On::PeerLost | On::ContactLostForGood | On::QemuDied => {
            moved(discard(Say::Discarded).then([Do::SendRefused]))
        }
        On::Restarted(Found::Running | Found::Paused | Found::Gone) => {
            moved(discard(Say::Discarded).when("same-boot").then([Do::SendRefused]))
        }
        On::Restarted(Found::Rebooted) => moved(bereave(terms).within("rebooted")),
        On::Asked { .. } => ignored(Ignored::NotYet),
        On::Repeat => stay(In::Prepared),
        _ => None,
    }
}

fn ready(terms: &Terms, incarnation: &Incarnation, ran: bool, event: &On) -> Taken {
    let state = || In::Ready { incarnation: incarnation.clone(), run: ran };
    let here = || Move::to(state());
    let ready = || Do::SendReady { incarnation: incarnation.clone() };
    let read = || terms.register.map(|_| register::read(terms));
    match event {
        On::Go { incarnation: named, run, .. } if named == incarnation => {
            moved(obey(terms, incarnation, *run))
        }
        // Starts nothing, and reports the incarnation of this host.
        On::Go { .. } => moved(here().when("other-incarnation").then([ready()])),
        On::SourceSays { verdict: Verdict::Committed { incarnation: named, run }, .. } => {
            let told = if named == incarnation {
                obey(terms, incarnation, *run)
            } else {
                here().when("other-incarnation").then([ready()])
            };
            moved(told.within("committed"))
        }
        On::SourceSays { verdict: Verdict::Aborted, .. } => moved(discard(Say::SourceKept).when("aborted")),
        On::SourceSays { verdict: Verdict::Returned, .. } => moved(discard(Say::SourceKept).when("returned")),
        On::AbortReceived { .. } => moved(discard(Say::SourceKept)),
        On::SourceSays { verdict: Verdict::Undecided, .. } => {
            moved(here().when("undecided").asking(Use::Read, read()))
        }
        On::RegisterSays(answer) => match heard(terms, answer) {
            Heard::Record(Standing::Open { offer: Some(offer), .. })
                if offer.epoch == terms.epoch() && offer.incarnation == *incarnation =>
            {
                moved(obey(terms, incarnation, offer.run).within("offered"))
            }
            // The source has reclaimed it, or has owned it since in a later epoch.
            Heard::Record(Standing::Source | Standing::MovedOn) => {
                moved(discard(Say::SourceKept).when("source-owns"))
            }
            Heard::Record(Standing::Foreign) => {
                moved(here().when("foreign").then([Do::Report(Say::RegisterForeign)]))
            }
            // This host has not acquired ownership: a record that names it is not this incarnation's.
            Heard::Record(Standing::Destination) => None,
            Heard::Record(Standing::Open { .. }) | Heard::Unreachable | Heard::Unknown => {
                moved(here().when("otherwise"))
            }
        },
        On::Asked { .. } => moved(here().then([ready()])),
        On::Repeat => moved(here().then([ready(), Do::AskSource]).asking(Use::Read, read())),
        On::Restarted(Found::Paused) => {
            let ask_all = [ready(), Do::AskSource];
            moved(here().when("paused").then(ask_all).asking(Use::Read, read()))
        }
        // It cannot run any more, and has not: no `cont` was ever sent.
        On::QemuDied => moved(refuse()),
        On::Restarted(Found::Gone) => moved(refuse().when("qemu-gone")),
        On::Restarted(Found::Rebooted) => moved(bereave(terms).within("rebooted")),
        // Another program has continued it. That is no state of this protocol.
        On::Restarted(Found::Running) => None,
        On::OperatorDecides(Decision::RunHere { .. }) => {
            moved(obey(terms, incarnation, ran).within("run-here"))
        }
        On::OperatorDecides(Decision::RunElsewhere) => moved(refuse().when("run-elsewhere")),
        On::OperatorDecides(Decision::WithoutRegister { run_here: true }) => {
            moved(start(incarnation, ran).within("run-here").within("without-register"))
        }
        On::OperatorDecides(Decision::WithoutRegister { run_here: false }) => moved(refuse_unregistered()),
        On::ContactLostForGood if terms.register.is_some() => moved(here().asking(Use::Read, read())),
        On::ContactLostForGood => moved(here().when("no-register").then([Do::Report(Say::OperatorNeeded)])),
        On::Cancel => moved(here().then([Do::Report(Say::TooLate)])),
        // In doubt: neither silence nor a failure of anything but QEMU decides.
        On::Failed | On::PeerSilent | On::PeerLost => stay(state()),
        _ => None,
    }
}

fn taking(terms: &Terms, incarnation: &Incarnation, run: bool, event: &On) -> Taken {
    let state = || In::Taking { incarnation: incarnation.clone(), run };
    let here = || Move::to(state());
    let take = |since| ask(Use::Take, Some(register::take_by_destination(terms, since)));
    let read = || ask(Use::Read, Some(register::read(terms)));
    match event {
        On::RegisterSays(answer) => match heard(terms, answer) {
            Heard::Record(Standing::Destination) => moved(start(incarnation, run).within("destination-owns")),
            Heard::Record(Standing::Open { since, .. }) => moved(here().when("open").then(take(since))),
            Heard::Record(Standing::Source | Standing::MovedOn) => {
                moved(discard(Say::SourceKept).when("source-owns"))
            }
            Heard::Record(Standing::Foreign) => {
                moved(here().when("foreign").then([Do::Report(Say::RegisterForeign)]))
            }
            Heard::Unknown => moved(here().when("unknown").then(read())),
            Heard::Unreachable => moved(here().when("unreachable")),
        },
        On::Repeat => moved(here().then(terms.register.and_then(take))),
        On::Restarted(Found::Paused) => moved(here().when("paused").then(read())),
        // `cont` was not sent: otherwise STARTING would be in the journal.
        On::QemuDied => moved(give_back(terms)),
        On::Restarted(Found::Gone) => moved(give_back(terms).when("qemu-gone")),
        On::Restarted(Found::Rebooted) => moved(bereave(terms).within("rebooted")),
        On::OperatorDecides(Decision::RunElsewhere) => moved(give_back(terms).when("run-elsewhere")),
        On::OperatorDecides(Decision::RunHere { .. }) => moved(here().when("run-here").then(read())),
        On::OperatorDecides(Decision::WithoutRegister { run_here: true }) => {
            moved(start(incarnation, run).within("run-here").within("without-register"))
        }
        On::OperatorDecides(Decision::WithoutRegister { run_here: false }) => moved(refuse_unregistered()),
        // The source may have reclaimed it in the meantime; the registry has the answer.
        On::AbortReceived { .. } => moved(here().then(read())),
        On::SourceSays { verdict: Verdict::Aborted, .. } => moved(here().when("aborted").then(read())),
        On::SourceSays { verdict: Verdict::Returned, .. } => moved(here().when("returned").then(read())),
        On::Go { .. } | On::SourceSays { .. } => ignored(Ignored::TooLate),
        On::Asked { .. } => ignored(Ignored::NotYet),
        On::Cancel => moved(here().then([Do::Report(Say::TooLate)])),
        On::Failed | On::PeerSilent | On::PeerLost | On::ContactLostForGood => stay(state()),
        _ => None,
    }
}

fn starting(terms: &Terms, incarnation: &Incarnation, again: bool, event: &On) -> Taken {
    let state = |again| In::Starting { incarnation: incarnation.clone(), again };
    match event {
        On::Contd { missing: true } => moved(run_incomplete(incarnation).when("missing")),
        On::Contd { missing: false } => moved(activate(incarnation)),
        On::Restarted(Found::Running) => moved(activate(incarnation).when("running")),
        // `cont` may have been sent or not. Sending it again is safe while this host owns the guest, but an operator
        // may have returned it to the source since.
        On::Restarted(Found::Paused) => moved(cont_again(terms, enter(state(true))).within("paused")),
        On::Repeat if again => moved(cont_again(terms, Move::to(state(true))).within("again")),
        On::RegisterSays(answer) if again => match heard(terms, answer) {
            Heard::Record(Standing::Destination) => {
                moved(Move::to(state(true)).when("destination-owns").then([Do::Cont]))
            }
            // It was given to the source in conflict with the earlier record: it may have run here.
            Heard::Record(Standing::Source | Standing::MovedOn) => moved(lost().when("source-owns")),
            Heard::Record(Standing::Open { .. } | Standing::Foreign) => {
                moved(Move::to(state(true)).when("foreign").then([Do::Report(Say::RegisterForeign)]))
            }
            Heard::Unknown => {
                let read = ask(Use::Read, Some(register::read(terms)));
                moved(Move::to(state(true)).when("unknown").then(read))
            }
            Heard::Unreachable => moved(Move::to(state(true)).when("unreachable")),
        },
        On::ContFailed if again => {
            moved(Move::to(state(true)).when("again").then([Do::Report(Say::ContFailed)]))
        }
        On::ContFailed => moved(refuse_through_register(terms).within("first")),
        // The operator's assurance that it never ran replaces the proof.
        On::OperatorDecides(Decision::RunElsewhere) if again => {
            moved(refuse_through_register(terms).within("again").within("run-elsewhere"))
        }
        On::OperatorDecides(Decision::WithoutRegister { run_here: true }) if again => {
            let to = Move::to(state(true)).when("without-register").when("run-here").when("again");
            moved(to.then([Do::Cont]))
        }
        On::OperatorDecides(Decision::WithoutRegister { run_here: false }) if again => {
            moved(refuse_unregistered().when("again"))
        }
        On::QemuDied => moved(crash(false)),
        On::Restarted(Found::Gone | Found::Rebooted) => moved(crash(false).when("qemu-gone")),
        On::Cancel => moved(Move::to(state(again)).then([Do::Report(Say::TooLate)])),
        On::Go { .. } | On::Asked { .. } => ignored(Ignored::NotYet),
        On::SourceSays { verdict: Verdict::Committed { .. }, .. } => ignored(Ignored::NotYet),
        On::SourceSays { verdict: Verdict::Undecided, .. } | On::RegisterSays(_) => ignored(Ignored::TooLate),
        On::OperatorDecides(_) => moved(Move::to(state(again)).then([Do::Report(Say::TooLate)])),
        On::Repeat => moved(Move::to(state(again)).when("first")),
        On::Failed | On::PeerSilent | On::PeerLost | On::ContactLostForGood => stay(state(again)),
        // An honest source does not abort what it has committed, but an operator can.
        _ => None,
    }
}

/// The guest runs here for good. RUNNING is not sent yet because the source has to keep its pages.
fn completing(incarnation: &Incarnation, event: &On) -> Taken {
    let here = || Move::to(In::Completing { incarnation: incarnation.clone() });
    match event {
        On::Completed => {
            let state = In::Active { incarnation: incarnation.clone() };
            moved(enter(state).then([Do::SendRunning, Do::Report(Say::Active)]))
        }
        On::Go { .. } | On::Asked { .. } => moved(here().then([Do::SendIncomplete])),
        On::Restarted(Found::Running | Found::Paused) => {
            moved(here().when("qemu-lives").then([Do::SendIncomplete]))
        }
        On::QemuDied => moved(crash(true)),
        On::Restarted(Found::Gone | Found::Rebooted) => moved(crash(true).when("qemu-gone")),
        On::ContactLostForGood => moved(here().then([Do::Report(Say::SourceNeeded)])),
        On::Cancel => moved(here().then([Do::Report(Say::TooLate)])),
        On::SourceSays { verdict: Verdict::Aborted | Verdict::Returned, .. } | On::AbortReceived { .. } => {
            None
        }
        On::Prepare | On::Loaded { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}

fn active(incarnation: &Incarnation, event: &On) -> Taken {
    let here = || Move::to(In::Active { incarnation: incarnation.clone() });
    match event {
        On::Go { .. } | On::Asked { .. } => moved(here().then([Do::SendRunning])),
        On::Restarted(Found::Running | Found::Paused) => {
            moved(here().when("qemu-lives").then([Do::SendRunning]))
        }
        On::QemuDied => moved(crash(true)),
        On::Restarted(Found::Gone | Found::Rebooted) => moved(crash(true).when("qemu-gone")),
        On::SourceSays { verdict: Verdict::Aborted | Verdict::Returned, .. } | On::AbortReceived { .. } => {
            None
        }
        On::Prepare | On::Loaded { .. } => None,
        On::Cancel => moved(here().then([Do::Report(Say::TooLate)])),
        _ => ignored(Ignored::TooLate),
    }
}

fn refusing(terms: &Terms, event: &On) -> Taken {
    let here = || Move::to(In::Refusing);
    let give_back = || ask(Use::GiveBack, Some(register::give_back(terms)));
    match event {
        On::RegisterSays(answer) => match heard(terms, answer) {
            Heard::Record(Standing::Source | Standing::MovedOn) => moved(refuse().when("source-owns")),
            Heard::Record(Standing::Destination) => moved(here().when("destination-owns").then(give_back())),
            // Not acquired, but a request of this host's may still be in transit: rule it out.
            Heard::Record(Standing::Open { since, .. }) => {
                let shut = register::take_by_source(terms, since);
                moved(here().when("open").then(ask(Use::GiveBack, Some(shut))))
            }
            Heard::Record(Standing::Foreign) => {
                moved(here().when("foreign").then([Do::Report(Say::RegisterForeign)]))
            }
            Heard::Unknown => moved(here().when("unknown").then(ask(Use::Read, Some(register::read(terms))))),
            Heard::Unreachable => moved(here().when("unreachable")),
        },
        On::Repeat | On::Restarted(_) => moved(here().then(give_back())),
        On::Go { .. } | On::Asked { .. } => ignored(Ignored::NotYet),
        On::Prepare | On::Loaded { .. } => None,
        On::OperatorDecides(Decision::WithoutRegister { run_here: false }) => moved(refuse_unregistered()),
        On::Cancel => moved(here().then([Do::Report(Say::TooLate)])),
        _ => ignored(Ignored::TooLate),
    }
}

/// Refused or discarded: this host has not run the guest and never will.
fn gone(state: &In, event: &On) -> Taken {
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
/// never committed, as long as this host does not send CRASHED, upon which a source that is bereft itself aborts.
fn bereft(terms: &Terms, event: &On) -> Taken {
    let here = || Move::to(In::Bereft);
    let read = || ask(Use::Read, Some(register::read(terms)));
    match event {
        On::RegisterSays(answer) => match heard(terms, answer) {
            Heard::Record(Standing::Destination) => moved(lost().when("destination-owns")),
            // The record may also stem from an operator's decision against the registry: the source knows which.
            Heard::Record(Standing::Source | Standing::MovedOn) => {
                moved(here().when("source-owns").then([Do::AskSource]))
            }
            // Ownership was never acquired, so it never ran.
            Heard::Record(Standing::Open { .. }) => moved(give_back(terms).when("open")),
            Heard::Record(Standing::Foreign) => {
                moved(here().when("foreign").then([Do::Report(Say::RegisterForeign)]))
            }
            Heard::Unknown => moved(here().when("unknown").then(read())),
            Heard::Unreachable => moved(here().when("unreachable")),
        },
        On::SourceSays { verdict: Verdict::Aborted, .. } => moved(discard(Say::SourceKept).when("aborted")),
        On::AbortReceived { .. } => moved(discard(Say::SourceKept)),
        On::SourceSays { verdict: Verdict::Returned, .. } => moved(lost().when("returned")),
        // The source's operator decides then.
        On::OperatorDecides(Decision::RunElsewhere) if terms.register.is_none() => {
            moved(lost().when("no-register").when("run-elsewhere"))
        }
        On::OperatorDecides(Decision::WithoutRegister { run_here: false }) => {
            moved(lost().when("without-register").when("run-elsewhere"))
        }
        On::OperatorDecides(_) | On::Cancel => moved(here().then([Do::Report(Say::TooLate)])),
        On::ContactLostForGood => moved(here().then([Do::Report(Say::OperatorNeeded)])),
        On::Failed | On::PeerSilent | On::PeerLost => stay(In::Bereft),
        On::QemuDied => ignored(Ignored::TooLate),
        On::Repeat | On::Restarted(_) if terms.register.is_some() => {
            moved(here().when("register").then(read()))
        }
        On::Repeat | On::Restarted(_) => moved(here().when("no-register").then([Do::AskSource])),
        // Only a source that knows no more than this host asks: the answer is unknown.
        On::Asked { .. } => moved(lost()),
        // The registry's record has precedence over a source that has committed.
        On::Go { .. } | On::SourceSays { .. } if terms.register.is_some() => ignored(Ignored::NotYet),
        On::SourceSays { verdict: Verdict::Committed { .. }, .. } => {
            moved(lost().when("no-register").when("committed"))
        }
        On::SourceSays { verdict: Verdict::Undecided, .. } => {
            moved(here().when("no-register").when("undecided"))
        }
        On::Go { .. } => moved(lost().when("no-register")),
        _ => None,
    }
}

fn crashed(ran: bool, event: &On) -> Taken {
    let here = || Move::to(In::Crashed { ran });
    match event {
        // This host has owned it and still does: the source's copy is out of date.
        On::Go { .. } | On::Asked { .. } if ran => moved(here().when("ran").then([Do::SendRunning])),
        On::Go { .. } | On::Asked { .. } => moved(here().when("may-have-run").then([Do::SendCrashed])),
        On::Prepare | On::Loaded { .. } => None,
        _ => ignored(Ignored::TooLate),
    }
}
