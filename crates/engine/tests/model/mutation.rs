//! Planted errors: replacements of the engine's functions, each with one difference.

use engine::handover::destination::{DestinationEffect, DestinationEvent, DestinationState, destination};
use engine::handover::registry::RegistryAnswer;
use engine::handover::source::{SourceEffect, SourceEvent, SourceState, source};
use engine::handover::{Illegal, MigrationTerms, QemuAtStart, Step, Transition};
use engine::session::{DestinationSession, SourceSession};
use proto::message::Verdict;

use crate::world::incarnation;

pub(crate) type SourceStep = Result<Step<SourceState, SourceEffect>, Illegal>;
pub(crate) type DestinationStep = Result<Step<DestinationState, DestinationEffect>, Illegal>;

/// The two functions under test, what the sessions decide, and the behaviour of the source's agent that the model
/// needs.
#[derive(Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) source: fn(&MigrationTerms, &SourceState, &SourceEvent) -> SourceStep,
    pub(crate) destination: fn(&MigrationTerms, &DestinationState, &DestinationEvent) -> DestinationStep,
    /// FROZEN: data that the destination needs for READY is sent only if the guest has not run since the stop, and its
    /// QEMU is frozen, so that no program can continue it any more.
    pub(crate) holds: bool,
    /// Event that follows the one that ended the source's phases. A source whose QEMU died before FROZEN gives up,
    /// because it knows that it did not send everything.
    pub(crate) after_phases: fn(&SourceSession) -> Option<SourceEvent>,
    /// Rule by which the source enters a state whose entry the journal did not accept.
    pub(crate) enters_without_entry: fn(&mut SourceSession, &SourceState) -> bool,
    /// Event that follows one whose effects failed at the destination.
    pub(crate) destination_failed: fn(&mut DestinationSession, &DestinationEvent) -> Option<DestinationEvent>,
    /// Rule by which the destination handles an event now.
    pub(crate) destination_admits: fn(&mut DestinationSession, &DestinationEvent) -> bool,
}

/// The engine's own rules.
pub(crate) const CORRECT: Rules = Rules {
    source,
    destination,
    holds: true,
    after_phases: SourceSession::after_phases,
    enters_without_entry: SourceSession::entry_failed,
    destination_failed: DestinationSession::effect_failed,
    destination_admits: DestinationSession::admit,
};

#[allow(clippy::unnecessary_wraps, reason = "stands in for a function that can fail")]
fn to<S, E>(to: S, effects: Vec<E>) -> Result<Step<S, E>, Illegal> {
    Ok(Step::Transition(Transition { to, guards: vec![], effects }))
}

/// Changes the effects of one transition.
fn change<S, E>(
    step: Result<Step<S, E>, Illegal>,
    change: impl Fn(&mut Vec<E>),
) -> Result<Step<S, E>, Illegal> {
    step.map(|step| match step {
        Step::Transition(mut moved) => {
            change(&mut moved.effects);
            Step::Transition(moved)
        }
        ignored @ Step::Ignored(_) => ignored,
    })
}

/// The destination puts a fact that the journal refuses again behind later ones.
pub(crate) fn destination_defers_facts(
    session: &mut DestinationSession,
    event: &DestinationEvent,
) -> Option<DestinationEvent> {
    session.handled(event);
    session.effect_failed(event)
}

/// The source continues by itself after COMMITTED.
pub(crate) fn source_continues_after_committed(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> SourceStep {
    match (state, event) {
        (SourceState::Committed { .. }, SourceEvent::PeerLost) => to(
            SourceState::Aborting,
            vec![
                SourceEffect::Journal { state: SourceState::Aborting, durable: true },
                SourceEffect::ThawQemu,
                SourceEffect::ContinueVm,
            ],
        ),
        _ => source(terms, state, event),
    }
}

/// The source treats INCOMPLETE like RUNNING.
pub(crate) fn source_ends_at_incomplete(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> SourceStep {
    match event {
        SourceEvent::Incomplete { epoch } => source(terms, state, &SourceEvent::Running { epoch: *epoch }),
        _ => source(terms, state, event),
    }
}

/// The destination sends RUNNING when `cont` has returned, even if pages are missing.
pub(crate) fn destination_says_running_too_early(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match event {
        DestinationEvent::Continued { .. } => {
            destination(terms, state, &DestinationEvent::Continued { missing: false })
        }
        _ => destination(terms, state, event),
    }
}

/// The source sends GO before COMMITTED is in the journal.
pub(crate) fn source_sends_go_first(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> SourceStep {
    let step = source(terms, state, event);
    if !matches!((state, event), (SourceState::Stopped { .. }, SourceEvent::Ready { .. })) {
        return step;
    }
    change(step, |effects| {
        if let Some(place) = effects.iter().position(|effect| matches!(effect, SourceEffect::SendGo { .. })) {
            effects[..=place].rotate_right(1);
        }
    })
}

/// The source does not hold its QEMU.
pub(crate) fn source_does_not_hold_qemu(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> SourceStep {
    change(source(terms, state, event), |effects| {
        effects.retain(|effect| *effect != SourceEffect::FreezeQemu);
    })
}

/// The source reclaims the VM although the registry has not confirmed that.
pub(crate) fn source_reclaims_without_winning(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> SourceStep {
    match (state, event) {
        (SourceState::Reclaiming { .. }, SourceEvent::Repeat) => to(
            SourceState::Returning,
            vec![
                SourceEffect::Journal { state: SourceState::Returning, durable: true },
                SourceEffect::ThawQemu,
                SourceEffect::ContinueVm,
            ],
        ),
        _ => source(terms, state, event),
    }
}

/// ABORTED is not synced before the guest continues.
pub(crate) fn source_does_not_sync_aborted(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> SourceStep {
    change(source(terms, state, event), |effects| {
        for effect in effects {
            if let SourceEffect::Journal { state: SourceState::Aborting | SourceState::Aborted, durable } =
                effect
            {
                *durable = false;
            }
        }
    })
}

/// The source aborts although it was restarted in COMMITTED.
pub(crate) fn source_aborts_when_restarted(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> SourceStep {
    match (state, event) {
        (SourceState::Committed { run, .. }, SourceEvent::Restarted(_)) => {
            let step = source(terms, &SourceState::Stopped { run: *run }, event);
            change(step, |effects| effects.insert(1, SourceEffect::ThawQemu))
        }
        _ => source(terms, state, event),
    }
}

/// The destination discards in doubt.
pub(crate) fn destination_discards_in_doubt(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match (state, event) {
        (DestinationState::Ready { .. }, DestinationEvent::PeerLost) => to(
            DestinationState::CopyDestroyed,
            vec![
                DestinationEffect::Journal { state: DestinationState::CopyDestroyed, durable: false },
                DestinationEffect::DestroyCopy,
            ],
        ),
        _ => destination(terms, state, event),
    }
}

/// The destination runs the guest in doubt.
pub(crate) fn destination_runs_in_doubt(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match (state, event) {
        (DestinationState::Ready { incarnation, .. }, DestinationEvent::PeerLost) => {
            let epoch = terms.epoch();
            let go = DestinationEvent::Go { epoch, incarnation: incarnation.clone(), run: true };
            destination(terms, state, &go)
        }
        _ => destination(terms, state, event),
    }
}

/// The destination accepts GO for another incarnation and epoch.
pub(crate) fn destination_obeys_any_go(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match event {
        DestinationEvent::Go { run, .. } => {
            let epoch = terms.epoch();
            let go = DestinationEvent::Go { epoch, incarnation: incarnation(epoch.0 as u8), run: *run };
            destination(terms, state, &go)
        }
        _ => destination(terms, state, event),
    }
}

/// The destination sends `cont` without asking the registry.
pub(crate) fn destination_skips_registry(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    let is_committed = matches!(
        event,
        DestinationEvent::Go { .. }
            | DestinationEvent::SourceAnswered { verdict: Verdict::Committed { .. }, .. }
    );
    if is_committed && matches!(state, DestinationState::Ready { .. }) {
        destination(&MigrationTerms { registry: None, ..terms.clone() }, state, event)
    } else {
        destination(terms, state, event)
    }
}

/// The destination sends READY before it is in the journal.
pub(crate) fn destination_sends_ready_first(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    let step = destination(terms, state, event);
    match event {
        DestinationEvent::Loaded { .. } => change(step, |effects| effects.reverse()),
        _ => step,
    }
}

/// STARTING is not in the journal when `cont` is sent.
pub(crate) fn destination_does_not_journal_starting(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    change(destination(terms, state, event), |effects| {
        effects.retain(|effect| {
            !matches!(effect, DestinationEffect::Journal { state: DestinationState::Starting { .. }, .. })
        });
    })
}

/// A destination in `Acquiring` refuses without returning the VM in the registry.
pub(crate) fn destination_refuses_and_keeps(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match (state, event) {
        (DestinationState::Acquiring { incarnation, .. }, DestinationEvent::QemuDied) => {
            let ready = DestinationState::Ready { incarnation: incarnation.clone(), run: true };
            destination(terms, &ready, event)
        }
        _ => destination(terms, state, event),
    }
}

/// A destination on a rebooted host believes the journal to be complete.
pub(crate) fn destination_trusts_a_rebooted_journal(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match event {
        DestinationEvent::Restarted(QemuAtStart::Rebooted) => {
            destination(terms, state, &DestinationEvent::Restarted(QemuAtStart::Gone))
        }
        _ => destination(terms, state, event),
    }
}

/// A destination on a rebooted host sends CRASHED while it asks a source that may have lost its QEMU, too.
pub(crate) fn destination_says_crashed_while_it_asks(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    let step = destination(terms, state, event);
    match (state, event) {
        (DestinationState::QemuLost, DestinationEvent::Repeat) => {
            change(step, |effects| effects.insert(0, DestinationEffect::SendCrashed))
        }
        _ => step,
    }
}

/// A source that continues after COMMITTED answers the same as one that has never committed.
pub(crate) fn source_says_aborted_after_it_returned(
    terms: &MigrationTerms,
    state: &SourceState,
    event: &SourceEvent,
) -> SourceStep {
    change(source(terms, state, event), |effects| {
        for effect in effects {
            if *effect == SourceEffect::Answer(Verdict::Returned) {
                *effect = SourceEffect::Answer(Verdict::Aborted);
            }
        }
    })
}

/// A destination that has crashed sends REFUSED.
pub(crate) fn destination_refuses_after_cont(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match (state, event) {
        (DestinationState::Starting { .. } | DestinationState::Active { .. }, DestinationEvent::QemuDied) => {
            to(
                DestinationState::Refused,
                vec![
                    DestinationEffect::Journal { state: DestinationState::Refused, durable: false },
                    DestinationEffect::SendRefused,
                ],
            )
        }
        _ => destination(terms, state, event),
    }
}

/// A destination that has refused accepts GO.
pub(crate) fn destination_runs_a_refused_copy(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match (state, event) {
        (
            DestinationState::Refused | DestinationState::CopyDestroyed,
            DestinationEvent::Go { incarnation, .. },
        ) => {
            let ready = DestinationState::Ready { incarnation: incarnation.clone(), run: true };
            destination(terms, &ready, event)
        }
        _ => destination(terms, state, event),
    }
}

/// A destination that does not expect the registry's record to have changed since pre-flight.
pub(crate) fn destination_knows_preflight_only(
    terms: &MigrationTerms,
    state: &DestinationState,
    event: &DestinationEvent,
) -> DestinationStep {
    match (state, event) {
        (
            DestinationState::Acquiring { .. },
            DestinationEvent::RegistryAnswered(RegistryAnswer::Record(Some(record))),
        ) if record.epoch < terms.epoch() && Some(record.epoch) != terms.registry => {
            destination(terms, state, &DestinationEvent::RegistryAnswered(RegistryAnswer::Unreachable))
        }
        _ => destination(terms, state, event),
    }
}
