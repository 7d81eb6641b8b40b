//! Placements that a request names: VMs go back to where they were, for instance.

use super::obstacle::Obstacle;
use super::placer::Placer;
use super::plan::{MoveReason, StayReason};
use super::refusal::Refusal;

/// Moves VMs to given hosts, all of which have room in the end.
pub(super) fn place(placer: &mut Placer<'_>, wanted: &[(u32, u32)], partial: bool) -> Result<(), Refusal> {
    // All leave first: a VM may go where another one is now.
    let mut moving = Vec::new();
    for (vm, host) in wanted.iter().copied() {
        if placer.host_of[vm as usize] == host {
            continue;
        }
        match obstacle(placer, vm, host) {
            None => moving.push((vm, host)),
            Some(why) => refuse(placer, vm, why, partial)?,
        }
    }
    for (vm, _) in &moving {
        placer.occupancy.remove(*vm, placer.fleet.home[*vm as usize]);
    }
    let mut placed = Vec::new();
    let mut failed = Vec::new();
    for (vm, host) in moving {
        match placer.occupancy.shortage(vm, host) {
            None => {
                placer.occupancy.add(vm, host);
                placed.push((vm, host));
            }
            Some(shortage) => failed.push((vm, placer.occupancy.explain(vm, shortage))),
        }
    }
    for (vm, why) in failed {
        // One that stays may take the room of one that was placed.
        let home = placer.fleet.home[vm as usize];
        let is_wanted = partial && placed.iter().any(|(_, host)| *host == home);
        if let Some(shortage) = placer.occupancy.shortage(vm, home).filter(|_| is_wanted) {
            let why = placer.occupancy.explain(vm, shortage);
            return Err(no_target(placer, vm, why));
        }
        placer.occupancy.add(vm, home);
        refuse(placer, vm, why, partial)?;
    }
    for (vm, host) in placed {
        let from = placer.host_of[vm as usize];
        placer.vms_on[from as usize].remove(&vm);
        placer.vms_on[host as usize].insert(vm);
        placer.host_of[vm as usize] = host;
        placer.reasons.insert(vm, MoveReason::Placed);
    }
    let moved: Vec<u32> = placer.reasons.keys().copied().collect();
    match moved.into_iter().find_map(|vm| Some((vm, separated(placer, vm)?))) {
        Some((vm, other)) => {
            let other = placer.fleet.vm(other).name.clone();
            Err(no_target(placer, vm, Obstacle::Separated { vm: other }))
        }
        None => Ok(()),
    }
}

/// Returns a VM that goes with this one, and would be on another host.
fn separated(placer: &Placer<'_>, vm: u32) -> Option<u32> {
    let units = &placer.fleet.units;
    let mut unit = units.members[units.of[vm as usize] as usize].iter();
    unit.find(|other| placer.host_of[**other as usize] != placer.host_of[vm as usize]).copied()
}

/// Returns what keeps a VM from a host beside what others use there.
fn obstacle(placer: &Placer<'_>, vm: u32, host: u32) -> Option<Obstacle> {
    let fleet = placer.fleet;
    let not_allowed = (!fleet.is_allowed(vm, host)).then_some(Obstacle::NotAmongItsHosts);
    let cordoned = fleet.host(host).cordoned.then_some(Obstacle::Cordoned);
    let lasting = || fleet.lasting_obstacles(vm, fleet.home[vm as usize], host).into_iter().next();
    fleet.hold(vm).or(cordoned).or(not_allowed).or_else(lasting)
}

fn refuse(placer: &mut Placer<'_>, vm: u32, why: Obstacle, partial: bool) -> Result<(), Refusal> {
    if partial {
        placer.stay(vm, StayReason::NoTarget { obstacles: vec![(why, 1)] });
        return Ok(());
    }
    Err(no_target(placer, vm, why))
}

fn no_target(placer: &Placer<'_>, vm: u32, why: Obstacle) -> Refusal {
    let spec = placer.fleet.vm(vm);
    Refusal::NoTarget { vm: spec.name.clone(), host: spec.host.clone(), obstacles: vec![(why, 1)] }
}
