//! Emptying hosts.
//!
//! The largest VMs choose first, each the best host with room. Where one finds none, a VM that is in its way moves to a
//! third host. On small fleets a search tries all other ways, because the first choice of each need not lead to the
//! best plan, and may lead to none.

use std::cmp::Reverse;

use super::obstacle::Obstacle;
use super::placer::Placer;
use super::plan::{MoveReason, StayReason};
use super::refusal::Refusal;

/// Most units of which all placements are searched.
const MOST_SEARCHED_UNITS: usize = 12;
/// Most hosts that a search looks at.
const MOST_SEARCHED_HOSTS: usize = 24;
/// Most steps of a search.
const MOST_STEPS: u32 = 20_000;
/// Most hosts on which room is made.
const MOST_ROOMS: usize = 64;

/// Moves all VMs away from hosts.
pub(super) fn drain(placer: &mut Placer<'_>, hosts: &[u32], partial: bool) -> Result<(), Refusal> {
    let units = movable_units(placer, hosts, partial)?;
    check_room(placer, &units, partial)?;
    let before: Vec<Vec<u32>> = units.iter().map(|unit| placer.hosts_of(unit)).collect();
    let mut targets = Vec::new();
    let mut left = Vec::new();
    for (at, unit) in units.iter().enumerate() {
        match placer.best(unit, &|_, _| true) {
            Some((score, host)) => {
                placer.place_unit(unit, host);
                targets.push((at, score));
            }
            None => left.push(at),
        }
    }
    if units.len() <= MOST_SEARCHED_UNITS && placer.open_hosts().count() <= MOST_SEARCHED_HOSTS {
        let found: u64 = targets.iter().fold(0, |sum, (_, score)| sum.saturating_add(*score));
        let limit = if left.is_empty() { found } else { u64::MAX };
        let first: Vec<Vec<u32>> = units.iter().map(|unit| placer.hosts_of(unit)).collect();
        for (unit, hosts) in units.iter().zip(&before) {
            placer.put_back(unit, hosts);
        }
        let mut search = Search { units: &units, steps: 0, limit, best: None };
        search.descend(placer, 0, 0, &mut Vec::new());
        if let Some(best) = search.best {
            for (unit, host) in units.iter().zip(best) {
                placer.place_unit(unit, host);
            }
            left.clear();
        } else {
            for (unit, hosts) in units.iter().zip(&first) {
                placer.put_back(unit, hosts);
            }
        }
    }
    for at in left {
        let unit = &units[at];
        if !make_room(placer, unit) {
            give_up(placer, unit, partial)?;
        }
    }
    record(placer);
    Ok(())
}

/// Returns the units that have to leave, the largest first; an error if one of their VMs may not move.
fn movable_units(placer: &mut Placer<'_>, hosts: &[u32], partial: bool) -> Result<Vec<Vec<u32>>, Refusal> {
    let fleet = placer.fleet;
    let mut units: Vec<u32> = hosts
        .iter()
        .flat_map(|host| &placer.vms_on[*host as usize])
        .map(|vm| fleet.units.of[*vm as usize])
        .collect();
    units.sort_unstable();
    units.dedup();
    refuse_arrivals(placer, partial)?;
    let mut movable = Vec::new();
    for unit in units {
        let members = &fleet.units.members[unit as usize];
        let leaves = |vm: &&u32| placer.is_drained(placer.host_of[**vm as usize]);
        let is_under_way = |vm: u32| {
            let to = fleet.moving_to[vm as usize];
            to.is_some_and(|to| !placer.is_drained(to))
        };
        let held = members.iter().filter(leaves).find_map(|vm| {
            // What is on its way out already needs no move.
            fleet.hold(*vm).filter(|_| !is_under_way(*vm)).map(|why| (*vm, why))
        });
        match held {
            None if members.len() == 1 && is_under_way(members[0]) => {}
            None => movable.push(members.clone()),
            Some((vm, why)) if partial => {
                let staying: Vec<u32> = members.iter().filter(leaves).copied().collect();
                for other in staying {
                    let why = if other == vm {
                        StayReason::Held { obstacle: why.clone() }
                    } else {
                        StayReason::Follows { vm: fleet.vm(vm).name.clone() }
                    };
                    placer.stay(other, why);
                }
            }
            Some((vm, why)) => {
                let spec = fleet.vm(vm);
                return Err(Refusal::Immovable { vm: spec.name.clone(), host: spec.host.clone(), why });
            }
        }
    }
    let key = |unit: &Vec<u32>| {
        let sum =
            |of: fn(&super::inventory::VmSpec) -> u64| unit.iter().map(|vm| of(fleet.vm(*vm))).sum::<u64>();
        (Reverse(sum(|vm| vm.memory_mib)), Reverse(sum(|vm| vm.busy_milli)), unit.first().copied())
    };
    movable.sort_by_cached_key(key);
    Ok(movable)
}

/// Refuses to empty a host to which a VM is moving from another one.
fn refuse_arrivals(placer: &mut Placer<'_>, partial: bool) -> Result<(), Refusal> {
    let fleet = placer.fleet;
    let arrives = |vm: &u32| {
        let is_there = placer.is_drained(fleet.home[*vm as usize]);
        fleet.moving_to[*vm as usize].is_some_and(|to| placer.is_drained(to) && !is_there)
    };
    for vm in (0..fleet.vm_count()).filter(arrives).collect::<Vec<_>>() {
        if !partial {
            let spec = fleet.vm(vm);
            let host = spec.moving_to.clone().unwrap_or_default();
            return Err(Refusal::Immovable { vm: spec.name.clone(), host, why: Obstacle::IsMoving });
        }
        placer.stay(vm, StayReason::Held { obstacle: Obstacle::IsMoving });
    }
    Ok(())
}

/// Refuses what cannot fit whatever the placement is.
fn check_room(placer: &Placer<'_>, units: &[Vec<u32>], partial: bool) -> Result<(), Refusal> {
    if partial || units.is_empty() {
        return Ok(());
    }
    let open: Vec<u32> = placer.open_hosts().collect();
    let moving = units.iter().flatten().filter(|vm| !placer.is_open(placer.host_of[**vm as usize]));
    let needs_mib: u64 = moving.map(|vm| placer.fleet.vm(*vm).memory_mib).sum();
    let free_mib: u64 = open.iter().map(|host| placer.occupancy.free_mib(*host)).sum();
    match open.as_slice() {
        [] => Err(Refusal::NoTargets),
        open if needs_mib > free_mib => {
            let hosts = match open {
                [host] => format!("host {}", placer.fleet.host(*host).name),
                hosts => format!("all {} targets together", hosts.len()),
            };
            Err(Refusal::Overfull { hosts, needs_mib, free_mib })
        }
        _ => Ok(()),
    }
}

/// Depth-first search over all placements of units, the best hosts first.
struct Search<'u> {
    units: &'u [Vec<u32>],
    steps: u32,
    /// Only placements with a lower sum of scores are of interest.
    limit: u64,
    best: Option<Vec<u32>>,
}

impl Search<'_> {
    fn descend(&mut self, placer: &mut Placer<'_>, at: usize, sum: u64, chosen: &mut Vec<u32>) {
        let Some(unit) = self.units.get(at) else {
            (self.limit, self.best) = (sum, Some(chosen.clone()));
            return;
        };
        let before = placer.hosts_of(unit);
        for (score, host) in placer.all(unit) {
            self.steps += 1;
            let sum = sum.saturating_add(score);
            // Hosts that follow are no better.
            if self.steps > MOST_STEPS || sum >= self.limit {
                return;
            }
            placer.place_unit(unit, host);
            chosen.push(host);
            self.descend(placer, at + 1, sum, chosen);
            chosen.pop();
            placer.put_back(unit, &before);
        }
    }
}

/// Moves one VM out of the way of a unit, and places the unit; changes nothing and returns false if that is impossible.
fn make_room(placer: &mut Placer<'_>, unit: &[u32]) -> bool {
    let fleet = placer.fleet;
    let hosts: Vec<u32> = placer.open_hosts().collect();
    let kinds: Vec<u32> = placer.targets(unit[0]).into_iter().map(|(kind, _)| kind).collect();
    let mut hosts: Vec<(u64, u32)> = hosts
        .into_iter()
        .filter(|host| kinds.contains(&fleet.host_kind[*host as usize]))
        .map(|host| (placer.occupancy.load_ppm(host), host))
        .collect();
    hosts.sort_unstable();
    for (_, host) in hosts.into_iter().take(MOST_ROOMS) {
        let mut others: Vec<u32> = placer.vms_on[host as usize].iter().copied().collect();
        others.retain(|other| {
            let was_drained = placer.is_drained(fleet.home[*other as usize]);
            let is_alone = fleet.units.members[fleet.units.of[*other as usize] as usize].len() == 1;
            is_alone && fleet.hold(*other).is_none() && (was_drained || placer.limits.make_room)
        });
        others.sort_unstable_by_key(|other| (fleet.vm(*other).memory_mib, *other));
        for other in others {
            let Some((_, away)) = placer.best(&[other], &|_, _| true) else { continue };
            placer.place(other, away);
            if placer.fits(unit, host) {
                placer.place_unit(unit, host);
                let vm = fleet.vm(unit[0]).name.clone();
                placer.reasons.entry(other).or_insert(MoveReason::MakesRoom { vm });
                return true;
            }
            placer.place(other, host);
        }
    }
    false
}

/// Lets a unit stay, or refuses the plan.
fn give_up(placer: &mut Placer<'_>, unit: &[u32], partial: bool) -> Result<(), Refusal> {
    let fleet = placer.fleet;
    let leaving: Vec<u32> =
        unit.iter().copied().filter(|vm| placer.is_drained(placer.host_of[*vm as usize])).collect();
    // The VM with the most obstacles is the one to name.
    let counted = leaving.iter().map(|vm| (*vm, placer.obstacles(*vm)));
    let hosts = |obstacles: &[(Obstacle, u32)]| obstacles.iter().map(|(_, hosts)| hosts).sum::<u32>();
    let worst = counted.max_by_key(|(vm, obstacles)| (hosts(obstacles), Reverse(*vm)));
    let Some((vm, obstacles)) = worst else { return Ok(()) };
    if !partial {
        let spec = fleet.vm(vm);
        return Err(Refusal::NoTarget { vm: spec.name.clone(), host: spec.host.clone(), obstacles });
    }
    for other in leaving {
        let why = if other == vm {
            StayReason::NoTarget { obstacles: obstacles.clone() }
        } else {
            StayReason::Follows { vm: fleet.vm(vm).name.clone() }
        };
        placer.stay(other, why);
    }
    Ok(())
}

/// Records the reasons of all moves.
fn record(placer: &mut Placer<'_>) {
    let fleet = placer.fleet;
    let moved = (0..fleet.vm_count()).filter(|vm| placer.host_of[*vm as usize] != fleet.home[*vm as usize]);
    for vm in moved.collect::<Vec<_>>() {
        if placer.is_drained(fleet.home[vm as usize]) {
            placer.reasons.insert(vm, MoveReason::Drained);
        } else if !placer.reasons.contains_key(&vm) {
            let unit = &fleet.units.members[fleet.units.of[vm as usize] as usize];
            let leads = unit.iter().find(|other| placer.is_drained(fleet.home[**other as usize]));
            let name = leads.map_or_else(String::new, |leader| fleet.vm(*leader).name.clone());
            placer.reasons.insert(vm, MoveReason::Follows { vm: name });
        }
    }
}
