//! Decisions of operators against the registry, or without it: those that are offered in a state, and made only where
//! their stated condition holds.

use engine::handover::destination::{DestinationEvent, DestinationState, destination};
use engine::handover::recover::{OperatorDecision, advise_destination, advise_source};
use engine::handover::source::{SourceEvent, SourceState, source};

use crate::mutation::{CORRECT, DestinationStep, Rules, SourceStep};
use crate::world::{Budget, Life, Qemu, Side, World, terms};
use crate::{NONE, found, handover, holds};

/// Returns the decisions that an operator may make now, and be right.
pub(crate) fn overrides(world: &World) -> Vec<(Side, OperatorDecision)> {
    let registry = world.registry.is_some();
    let mut overrides = Vec::new();
    if world.source.life == Life::Up {
        let terms = terms(world.source.epoch, world.source.base, registry);
        for choice in advise_source(&terms, world.source.state()).choices {
            overrides.push((Side::Source, choice.decision));
        }
    }
    if world.destination.life == Life::Up {
        let terms = terms(world.destination.epoch, world.destination.base, registry);
        for choice in advise_destination(&terms, world.destination.state()).choices {
            overrides.push((Side::Destination, choice.decision));
        }
    }
    overrides.retain(|(side, decision)| is_override(*decision) && is_right(world, *side, *decision));
    overrides
}

fn is_override(decision: OperatorDecision) -> bool {
    matches!(decision, OperatorDecision::RunHere { force: true } | OperatorDecision::WithoutRegistry { .. })
}

fn is_right(world: &World, side: Side, decision: OperatorDecision) -> bool {
    let gone = world.registry_lost || decision == OperatorDecision::RunHere { force: true };
    let run_here = decision != OperatorDecision::WithoutRegistry { run_here: false };
    let ran_there = world.ghost.destination.ran && world.same_attempt();
    gone && match side {
        Side::Source => !run_here || (world.destination.life == Life::Gone && !ran_there),
        Side::Destination if run_here => {
            world.source.life == Life::Gone && !world.ghost.source.ran_on && world.same_attempt()
        }
        // REFUSED reports that the guest has not run.
        Side::Destination => {
            !matches!(world.destination.state(), DestinationState::Starting { .. }) || !ran_there
        }
    }
}

/// Makes a decision. One without the registry has to end the wait for it.
pub(crate) fn apply_override(rules: &Rules, world: &mut World, side: Side, decision: OperatorDecision) {
    world.ghost.word = true;
    world.decide(rules, side, decision);
    let waits = match side {
        Side::Source => matches!(world.source.state(), SourceState::Reclaiming { .. }),
        Side::Destination => match world.destination.state() {
            DestinationState::Acquiring { .. } | DestinationState::Refusing | DestinationState::QemuLost => {
                true
            }
            DestinationState::Starting { .. } => {
                !world.destination_cont && world.destination_qemu == Qemu::Paused
            }
            _ => false,
        },
    };
    world.ghost.still_waits |= waits && matches!(decision, OperatorDecision::WithoutRegistry { .. });
}

/// One decision, where the registry may be lost and a host gone.
pub(crate) const OVERRIDES: Budget =
    Budget { overrides: 1, registers_lost: 1, hosts_gone: 1, in_flight: 2, ..NONE };

#[test]
fn correct_decisions_of_operators_break_no_rule() {
    holds("words", Budget { troubles: 1, ..OVERRIDES }, true);
    holds("words, agents die", Budget { agent_crashes: 1, in_flight: 1, ..OVERRIDES }, true);
    holds("words, QEMUs die", Budget { qemu_deaths: 1, ..OVERRIDES }, true);
    holds("words, hosts crash", Budget { host_crashes: 1, ..OVERRIDES }, true);
}

#[test]
fn finds_a_source_that_waits_for_a_registry_that_is_lost() {
    let waits: fn(&_, &_, &_) -> SourceStep = |terms, state, event| match (state, event) {
        (
            SourceState::Reclaiming { .. },
            SourceEvent::OperatorDecided(OperatorDecision::WithoutRegistry { .. }),
        ) => source(terms, state, &SourceEvent::Cancel),
        _ => source(terms, state, event),
    };
    let rules = Rules { source: waits, ..CORRECT };
    found(rules, Budget { troubles: 1, ..OVERRIDES }, true, &[handover::STILL_WAITS]);
}

#[test]
fn finds_a_destination_that_waits_for_a_registry_that_is_lost() {
    let waits: fn(&_, &_, &_) -> DestinationStep = |terms, state, event| match (state, event) {
        (
            DestinationState::Acquiring { .. },
            DestinationEvent::OperatorDecided(OperatorDecision::WithoutRegistry { .. }),
        ) => destination(terms, state, &DestinationEvent::Cancel),
        _ => destination(terms, state, event),
    };
    let rules = Rules { destination: waits, ..CORRECT };
    found(rules, Budget { troubles: 1, ..OVERRIDES }, true, &[handover::STILL_WAITS]);
}
