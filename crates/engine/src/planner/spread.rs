//! Spreading groups of VMs over zones: of each group, no zone has two VMs more than another one that could take one.

use std::collections::{BTreeMap, BTreeSet};

use super::placer::Placer;
use super::plan::{MoveReason, StayReason};

/// Most hosts that are looked at one by one.
const MOST_HOSTS: usize = 1024;

/// Spreads all groups, one after the other.
pub(super) fn spread(placer: &mut Placer<'_>) {
    let fleet = placer.fleet;
    let mut groups: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for vm in 0..fleet.vm_count() {
        if let Some(label) = &fleet.vm(vm).rules.spread {
            groups.entry(label).or_default().push(vm);
        }
    }
    let zones = fleet.zone.iter().max().map_or(0, |last| *last as usize + 1);
    let mut hosts_in = vec![Vec::new(); zones];
    for host in 0..fleet.host_count() {
        hosts_in[fleet.zone[host as usize] as usize].push(host);
    }
    let mut moves = 0;
    for (label, vms) in groups {
        spread_group(placer, label, &vms, &hosts_in, &mut moves);
    }
}

fn spread_group(placer: &mut Placer<'_>, label: &str, vms: &[u32], hosts_in: &[Vec<u32>], moves: &mut u32) {
    let fleet = placer.fleet;
    let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
    for vm in vms {
        *counts.entry(fleet.zone[placer.host_of[*vm as usize] as usize]).or_default() += 1;
    }
    // Zones from which no VM can move any more.
    let mut done: BTreeSet<u32> = BTreeSet::new();
    while let Some((zone, count)) = fullest(&counts, &done) {
        let here = |vm: &&u32| fleet.zone[placer.host_of[**vm as usize] as usize] == zone;
        let here: Vec<u32> = vms.iter().filter(here).copied().collect();
        let Some((vm, to)) = best_move(placer, &here, hosts_in, &counts, count) else {
            done.insert(zone);
            continue;
        };
        if *moves >= placer.limits.moves {
            placer.stay(vm, StayReason::Limit);
            return;
        }
        let next = fleet.zone[to as usize];
        let there = counts.get(&next).copied().unwrap_or(0);
        placer.reasons.insert(vm, MoveReason::Spreads { label: label.to_owned(), from: count, to: there });
        placer.place(vm, to);
        *moves += 1;
        counts.insert(zone, count - 1);
        counts.insert(next, there + 1);
    }
}

/// Returns the zone with the most VMs of a group, of those that are not done, if it has two or more.
fn fullest(counts: &BTreeMap<u32, u32>, done: &BTreeSet<u32>) -> Option<(u32, u32)> {
    let open = counts.iter().filter(|(zone, count)| **count >= 2 && !done.contains(*zone));
    open.max_by_key(|(zone, count)| (**count, std::cmp::Reverse(**zone))).map(|(zone, count)| (*zone, *count))
}

/// Returns the VM that moves with the least cost, and its host, which is in the zone with the fewest VMs of the group
/// that has room: two fewer at least.
fn best_move(
    placer: &mut Placer<'_>,
    here: &[u32],
    hosts_in: &[Vec<u32>],
    counts: &BTreeMap<u32, u32>,
    count: u32,
) -> Option<(u32, u32)> {
    let fleet = placer.fleet;
    let in_zone = |host: u32| counts.get(&fleet.zone[host as usize]).copied().unwrap_or(0);
    let movable: Vec<u32> = here
        .iter()
        .copied()
        .filter(|vm| {
            let is_alone = fleet.units.members[fleet.units.of[*vm as usize] as usize].len() == 1;
            let is_here = placer.host_of[*vm as usize] == fleet.home[*vm as usize];
            is_alone && is_here && fleet.hold(*vm).is_none()
        })
        .collect();
    // Numbers of VMs that zones have, the lowest first.
    let mut levels: BTreeSet<u32> = counts.values().copied().collect();
    levels.insert(0);
    for level in levels.into_iter().take_while(|level| level + 2 <= count) {
        let mut found: Option<(u64, u32, u32)> = None;
        let few = few_hosts(hosts_in, counts, level);
        for vm in &movable {
            let best = match &few {
                Some(hosts) => placer.best_of(&[*vm], hosts),
                None => placer.best(&[*vm], &|_, host| in_zone(host) == level),
            };
            if let Some((score, to)) = best {
                let scored = (score, *vm, to);
                found = Some(found.map_or(scored, |best| best.min(scored)));
            }
        }
        if let Some((_, vm, to)) = found {
            return Some((vm, to));
        }
    }
    None
}

/// Returns the hosts of the zones that have so many VMs of a group; none if these are many, so that a search among all
/// hosts finds one of them soon.
fn few_hosts(hosts_in: &[Vec<u32>], counts: &BTreeMap<u32, u32>, level: u32) -> Option<Vec<u32>> {
    let zones: Vec<u32> = if level > 0 {
        counts.iter().filter(|(_, count)| **count == level).map(|(zone, _)| *zone).collect()
    } else {
        let taken = counts.values().filter(|count| **count > 0).count();
        if hosts_in.len() > 4 * taken {
            return None;
        }
        let is_free = |zone: &u32| counts.get(zone).is_none_or(|count| *count == 0);
        (0..hosts_in.len() as u32).filter(is_free).collect()
    };
    let hosts = || zones.iter().map(|zone| &hosts_in[*zone as usize]);
    let count: usize = hosts().map(Vec::len).sum();
    (count <= MOST_HOSTS).then(|| hosts().flatten().copied().collect())
}
