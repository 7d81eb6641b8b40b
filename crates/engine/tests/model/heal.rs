//! Recovery of a state when no further fault occurs.

use engine::handover::destination::{DestinationEvent, DestinationState};
use engine::handover::source::{SourceEvent, SourceState};

use crate::mutation::Rules;
use crate::world::{Life, Qemu, Side, World};

/// Number of steps until a state has to be final. Each delivers all packets in transit.
const TURNS: usize = 40;

/// Restarts all crashed parts that are not gone for good, delivers all packets, and runs timers.
pub(crate) fn heal(rules: &Rules, world: &World) -> World {
    let mut world = world.clone();
    world.budget.in_flight = 16;
    for (side, life) in [(Side::Source, world.source.life), (Side::Destination, world.destination.life)] {
        if life == Life::Down {
            world.restart(rules, side, None);
        }
    }
    for _ in 0..TURNS {
        let mut busy = false;
        if world.source_cont && !world.held {
            world.source_cont_done(rules, None);
            busy = true;
        }
        if world.destination_cont {
            world.destination_cont_done(rules, None);
            busy = true;
        }
        for packet in std::mem::take(&mut world.net) {
            world.deliver(rules, packet, None);
            busy = true;
        }
        if busy {
            continue;
        }
        if over(&world) {
            break;
        }
        time_passes(rules, &mut world);
    }
    world
}

fn time_passes(rules: &Rules, world: &mut World) {
    match (world.source.state(), world.destination.state()) {
        (SourceState::Prepared { .. }, DestinationState::Prepared) if world.streams => {
            world.feed_source(rules, &SourceEvent::Stop { run: true }, None);
        }
        (SourceState::Stopped { .. }, DestinationState::Prepared) if world.streams => {
            world.send_all(rules);
        }
        (SourceState::Prepared { .. } | SourceState::Stopped { .. }, _) => {
            world.streams = false;
            world.feed_source(rules, &SourceEvent::PeerLost, None);
        }
        _ => {}
    }
    if world.can_complete() && world.destination.life == Life::Up {
        world.complete(rules, None);
    }
    if world.destination.life == Life::Gone {
        world.feed_source_if(rules, &SourceEvent::ContactLostForGood, None);
    }
    if world.source.life == Life::Gone {
        world.feed_destination_if(rules, &DestinationEvent::ContactLostForGood, None);
    }
    world.repeat_source(rules, None);
    world.repeat_destination(rules, None);
}

fn source_over(world: &World) -> bool {
    *world.source.state() == SourceState::Idle || world.source.state().is_final()
}

fn destination_over(world: &World) -> bool {
    *world.destination.state() == DestinationState::Idle || world.destination.state().is_final()
}

fn over(world: &World) -> bool {
    source_over(world) && destination_over(world)
}

/// Returns true if exactly one host runs the VM, or if the reason is no error of the protocol: the guest crashed, or
/// only an operator can know.
pub(crate) fn one_runs(rules: &Rules, world: &World) -> bool {
    let healed = heal(rules, world);
    let one = healed.source_runs() != healed.destination_runs();
    let ghost = &healed.ghost;
    let crashed = ghost.source.lost || (ghost.destination.lost && healed.same_attempt());
    match (healed.source.life, healed.destination.life) {
        (Life::Gone, Life::Gone) => true,
        (Life::Gone, _) => match healed.destination.state() {
            DestinationState::Active { .. } | DestinationState::Completing { .. } => one,
            // The decision of the source is unknown.
            DestinationState::Ready { .. } => {
                healed.registry.is_none_or(|record| record.offer != Some(healed.destination.epoch))
            }
            DestinationState::QemuLost => true,
            _ => destination_over(&healed),
        },
        (_, Life::Gone) => match healed.source.state() {
            SourceState::Committed { .. } | SourceState::Reclaiming { .. } => {
                healed.registry.is_none_or(|record| record.owner == Side::Destination)
            }
            SourceState::QemuLost { .. } | SourceState::Done { .. } => true,
            _ => source_over(&healed) && (one || crashed_at_source(&healed)),
        },
        _ if !crashed => over(&healed) && one,
        _ => {
            let operator = matches!(healed.source.state(), SourceState::Committed { .. })
                && *healed.destination.state() == DestinationState::Crashed { has_run: false };
            over(&healed) || operator || waits_for_ever(&healed)
        }
    }
}

/// Returns true if the guest runs at the destination, and its missing pages were lost with the source.
fn waits_for_ever(world: &World) -> bool {
    let lost = world.ghost.source.lost && world.source_qemu == Qemu::Gone;
    lost && matches!(world.destination.state(), DestinationState::Completing { .. })
}

fn crashed_at_source(world: &World) -> bool {
    world.ghost.source.lost
}

/// Returns true unless a destination with a complete copy, of a guest that is lost at the source and has not continued
/// there, fails to run it. Exempt: the source was just asking the registry for it, or has won there.
pub(crate) fn last_copy(rules: &Rules, world: &World) -> bool {
    let whole = world.destination_qemu == Qemu::Paused
        && matches!(
            world.destination.state(),
            DestinationState::Ready { .. } | DestinationState::Acquiring { .. }
        )
        && world.destination.life != Life::Gone
        && world.same_attempt()
        && !world.ghost.destination.missing
        && !world.ghost.destination.gave_up;
    let lost = world.ghost.source.lost && !world.ghost.source.kept && world.source.life != Life::Gone;
    let reclaimed = world.ghost.source.reclaimed;
    !(whole && lost) || reclaimed || heal(rules, world).destination_runs()
}
