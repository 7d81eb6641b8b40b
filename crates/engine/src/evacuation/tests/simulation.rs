//! Evacuations of simulated fleets in which connections, agents, moves and the controller fail at random moments. Then
//! all heals, and everything has to end.

use super::fleet::{SECOND, empty_request};
use super::planted::Planted;
use super::world::{Dice, World};
use crate::evacuation::*;
use crate::planner::MoveLimits;

/// Steps in which anything fails.
const FAULTY_STEPS: u64 = 250;
/// Most steps until everything has ended once nothing fails any longer.
const HEALED_STEPS: u64 = 6000;

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Faults {
    /// Connections and the controller.
    Connections,
    /// Moves, too; users start VMs, shut them down, and cancel and resume evacuations.
    All,
}

/// Runs the fleet of a seed until all evacuations have ended, or a violation was seen.
pub(super) fn run(seed: u64, faults: Faults, planted: Planted) -> World {
    let mut world = World::new(seed, planted);
    let names = world.names();
    let together = if names.len() > 3 && seed.is_multiple_of(4) { 2 } else { 1 };
    let (first, second) =
        (request(&mut world.dice, &names[..together]), request(&mut world.dice, &names[2..3]));
    let is_begun = world.begin("first", first);
    for step in 0..FAULTY_STEPS {
        if step == 10 + seed % 60 && faults == Faults::All {
            world.begin("second", second.clone());
        }
        fault(&mut world, &names, faults);
        let span_ns = (1 + world.dice.below(20)) * SECOND / 10;
        world.pass(span_ns, faults == Faults::All);
        exchange(&mut world, &names);
        if is_begun && step % 50 == 49 && is_done(&world, "first") {
            let back = world.evacuations.return_request(&names[0], &world.known);
            if let Ok(request) = back {
                world.begin("back", request);
            }
        }
        if !world.violations.is_empty() {
            return world;
        }
    }
    for _ in 0..HEALED_STEPS {
        for name in &names {
            world.connect(name);
        }
        world.pass(SECOND, false);
        exchange(&mut world, &names);
        if !world.violations.is_empty() || world.evacuations.iter().all(|one| one.outcome().is_some()) {
            return world;
        }
    }
    let running = world.evacuations.iter().filter(|one| one.outcome().is_none());
    let running: Vec<_> = running.map(|one| one.status(world.now_ns)).collect();
    world.violations.push(format!("these do not end: {running:#?}"));
    world
}

fn is_done(world: &World, name: &str) -> bool {
    let one = world.evacuations.get(&EvacuationId(name.to_owned()));
    matches!(one.and_then(Evacuation::outcome), Some(EvacuationOutcome::Done { .. }))
}

fn request(dice: &mut Dice, hosts: &[String]) -> EvacuationRequest {
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let copies = [100_000_000, 300_000_000, 1_000_000_000];
    EvacuationRequest {
        partial: !dice.is_one_of(3),
        accept_late: true,
        deadline_ns: dice.is_one_of(2).then(|| (5000 + dice.below(300)) * SECOND),
        limits: MoveLimits {
            copy_bytes_per_s: *dice.pick(&copies).unwrap_or(&1_000_000_000),
            bytes_per_s: dice.is_one_of(2).then_some(500_000_000),
            ..MoveLimits::default()
        },
        retries: RetryLimits { patience_s: 200, ..RetryLimits::default() },
        ..empty_request(&hosts)
    }
}

/// Lets something fail, or heal.
fn fault(world: &mut World, names: &[String], faults: Faults) {
    let name = names[world.dice.below(names.len() as u64) as usize].clone();
    let what = world.dice.below(60);
    match what {
        0..3 => world.lose(&name),
        3..12 => world.connect(&name),
        12 => world.restart(),
        13..18 if faults == Faults::All => users_do(world, &name, what),
        _ => {}
    }
}

fn users_do(world: &mut World, name: &str, what: u64) {
    let id = |name: &str| EvacuationId(name.to_owned());
    match what {
        13 => {
            let vms: Vec<String> = world.vms.keys().cloned().collect();
            if let Some(vm) = world.dice.pick(&vms).cloned() {
                world.shut_down(&vm);
            }
        }
        14 if world.dice.is_one_of(3) => world.start_up(name),
        15 if world.dice.is_one_of(3) => {
            let cancelled = world.evacuations.cancel(&id("first"), &world.known, world.now_ns);
            if let Ok(step) = cancelled {
                world.carry_out(step);
            }
        }
        _ => {
            for name in ["first", "second", "back"] {
                let resumed = world.evacuations.resume(&id(name), &world.known, world.now_ns);
                if let Ok(step) = resumed {
                    world.carry_out(step);
                }
            }
        }
    }
}

/// Delivers some messages, in any order between hosts.
fn exchange(world: &mut World, names: &[String]) {
    for _ in 0..world.dice.below(30) {
        let name = names[world.dice.below(names.len() as u64) as usize].clone();
        let is_to_agent = world.dice.is_one_of(2);
        world.deliver_one(&name, is_to_agent);
    }
    world.handle(&EvacuationEvent::Tick);
}

/// Asserts that a run has no violation.
fn check(seed: u64, world: &World) {
    let (violations, texts) = (world.violations.join("\n"), world.texts.join("\n"));
    assert!(violations.is_empty(), "seed {seed}: {violations}\n{texts}");
}

#[test]
fn every_vm_stays_in_one_place_and_everything_ends() {
    let (mut done, mut incomplete, mut moved, mut back) = (0, 0, 0, 0);
    for seed in 0..400 {
        let world = run(seed, Faults::All, Planted::Nothing);
        check(seed, &world);
        for one in world.evacuations.iter() {
            match one.outcome() {
                Some(EvacuationOutcome::Done { moved, .. }) if one.id().0 == "back" => back += moved,
                Some(EvacuationOutcome::Done { .. }) => done += 1,
                _ => incomplete += 1,
            }
            moved += one.departures().len();
        }
    }
    // The simulation tries what it is for.
    assert!(
        done > 100 && incomplete > 50 && moved > 200 && back > 20,
        "{done} done, {incomplete} not, {moved} moved, {back} back"
    );
}

#[test]
fn lost_connections_and_restarts_alone_keep_none_from_its_end() {
    let mut begun = 0;
    for seed in 0..200 {
        let world = run(seed, Faults::Connections, Planted::Nothing);
        check(seed, &world);
        for one in world.evacuations.iter().filter(|one| !one.request().partial) {
            begun += 1;
            let is_done = matches!(one.outcome(), Some(EvacuationOutcome::Done { .. }));
            assert!(is_done, "seed {seed}: {:?}\n{}", one.outcome(), world.texts.join("\n"));
        }
    }
    assert!(begun > 30, "{begun}");
}

#[test]
fn runs_of_a_seed_are_equal() {
    for seed in 0..5 {
        let texts = || run(seed, Faults::All, Planted::Nothing).texts;
        assert_eq!(texts(), texts());
    }
}
