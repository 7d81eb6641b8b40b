//! Placement of VMs on hosts: plans that empty hosts, level load, spread groups, or put VMs where they should be.
//!
//! A plan follows from an [`Inventory`] and a [`PlanRequest`] and nothing else; equal inputs give equal plans. It is
//! made in two steps:
//!
//! 1. *Where*: each VM that has to move gets the host with the least cost: the forecast time of the move, and what the
//!    load of the host is worth. Hosts of one kind differ only in what they have in use, so of each kind the least
//!    loaded one is looked at, whatever the number of hosts is.
//! 2. *When*: moves begin as soon as the memory, the links and the processors of both hosts allow. A moving VM uses
//!    memory on both hosts, so memory fits at every step; also where moves take longer than forecast, because each
//!    names the moves that it waits for.
//!
//! What is impossible is a [`Refusal`] with its reason and a way out. [`matrix()`] answers which VM could run where, and
//! why not.

mod affinity_groups;
mod balance;
mod cost;
mod drain;
mod index;
pub mod inventory;
mod matrix;
mod obstacle;
mod occupancy;
mod place;
mod placer;
mod plan;
mod refusal;
mod request;
mod schedule;
mod spread;

pub use inventory::Inventory;
pub use matrix::{
    CommonCpuModel, NextCpuModel, PlacementMatrix, PlacementMatrixCell, PlacementMatrixRow, matrix,
};
pub use obstacle::Obstacle;
pub(crate) use obstacle::link_bytes_per_s;
pub use plan::{DeadlineOutlook, MoveReason, PlacementPlan, PlannedMove, StayReason, StayingVm};
pub use refusal::Refusal;
pub use request::{Hysteresis, MoveLimits, Placement, PlanGoal, PlanRequest};

use std::collections::BTreeMap;

use balance::{balance, cordons, percent};
use index::Fleet;
use occupancy::Occupancy;
use placer::Placer;
use schedule::{DurationBound, ScheduledMove, WantedMove, schedule};

use crate::forecast::Estimate;

/// Plans the moves that reach a goal.
pub fn plan(inventory: &Inventory, request: &PlanRequest) -> Result<PlacementPlan, Refusal> {
    request.check()?;
    let fleet = Fleet::new(inventory)?;
    let mut closed = cordons(&inventory.hosts);
    let before = Occupancy::new(&fleet, request.limits.most_load_percent);
    let mut placer = match &request.goal {
        PlanGoal::Drain { hosts, to } => {
            let drained = find_hosts(&fleet, hosts, "the request")?;
            let targets = find_hosts(&fleet, to, "the request")?;
            for host in 0..fleet.host_count() {
                let is_other = !targets.is_empty() && targets.binary_search(&host).is_err();
                let why = drained.binary_search(&host).is_ok().then_some(Obstacle::Drained);
                let why = why.or_else(|| is_other.then_some(Obstacle::NotATarget));
                let cordoned = closed[host as usize].take();
                closed[host as usize] = why.or(cordoned);
            }
            let mut placer = Placer::new(&fleet, request.limits, closed.clone(), before.clone());
            drain::drain(&mut placer, &drained, request.partial)?;
            placer
        }
        PlanGoal::Balance => {
            let mut placer = Placer::new(&fleet, request.limits, closed.clone(), before.clone());
            balance(&mut placer, &request.hysteresis);
            placer
        }
        PlanGoal::Spread => {
            let mut placer = Placer::new(&fleet, request.limits, closed.clone(), before.clone());
            spread::spread(&mut placer);
            placer
        }
        PlanGoal::Place { placements } => {
            let wanted = find_placements(&fleet, placements)?;
            let mut placer = Placer::new(&fleet, request.limits, closed.clone(), before.clone());
            place::place(&mut placer, &wanted, request.partial)?;
            placer
        }
    };
    let wanted: Vec<WantedMove> = std::mem::take(&mut placer.reasons)
        .into_iter()
        .map(|(vm, why)| WantedMove { vm, to: placer.host_of[vm as usize], why })
        .filter(|wanted| wanted.to != fleet.home[wanted.vm as usize])
        .collect();
    let ordered = |duration: DurationBound| {
        schedule(&fleet, request.limits, &closed, wanted.clone(), &before, duration)
    };
    let moves = ordered(|estimate| estimate.expected)?;
    let expected = end_of(&moves);
    // Where moves take another time, they may have another order, and even none.
    let bound = |duration: DurationBound| ordered(duration).map_or(expected, |moves| end_of(&moves));
    let (low, high) = (bound(|estimate| estimate.low), bound(|estimate| estimate.high));
    let duration_ns = Estimate { expected, low: low.min(expected), high: high.max(expected) };
    let deadline = check_deadline(&fleet, request, &moves, duration_ns)?;
    let highest = |occupancy: &Occupancy<'_>| {
        percent((0..fleet.host_count()).map(|host| occupancy.load_ppm(host)).max().unwrap_or(0))
    };
    Ok(PlacementPlan {
        duration_ns,
        deadline,
        bytes: moves.iter().map(|one| one.cost.bytes).fold(0, u64::saturating_add),
        downtime_ns: moves.iter().map(|one| one.cost.downtime_ns).fold(0, u64::saturating_add),
        highest_load_before_percent: highest(&before),
        highest_load_after_percent: highest(&placer.occupancy),
        stays: std::mem::take(&mut placer.stays),
        moves: moves.into_iter().map(|one| planned(&fleet, &placer.occupancy, one)).collect(),
    })
}

fn find_hosts(fleet: &Fleet<'_>, names: &[String], named_by: &str) -> Result<Vec<u32>, Refusal> {
    let mut hosts =
        names.iter().map(|name| fleet.find_host(name, named_by)).collect::<Result<Vec<_>, _>>()?;
    hosts.sort_unstable();
    hosts.dedup();
    Ok(hosts)
}

fn find_placements(fleet: &Fleet<'_>, placements: &[Placement]) -> Result<Vec<(u32, u32)>, Refusal> {
    let mut found = BTreeMap::new();
    for Placement { vm, host } in placements {
        let pair = (fleet.find_vm(vm, "the request")?, fleet.find_host(host, "the request")?);
        if found.insert(pair.0, pair.1).is_some() {
            return Err(Refusal::DuplicateName { name: vm.clone() });
        }
    }
    Ok(found.into_iter().collect())
}

fn end_of(moves: &[ScheduledMove]) -> u64 {
    moves.iter().map(|one| one.ends_ns).max().unwrap_or(0)
}

/// Refuses a deadline that is not expected to be kept.
fn check_deadline(
    fleet: &Fleet<'_>,
    request: &PlanRequest,
    moves: &[ScheduledMove],
    duration_ns: Estimate,
) -> Result<Option<DeadlineOutlook>, Refusal> {
    let Some(deadline_s) = request.deadline_s else { return Ok(None) };
    let has_ns = deadline_s.saturating_mul(1_000_000_000);
    if duration_ns.expected <= has_ns {
        return Ok(Some(DeadlineOutlook { has_ns, is_safe: duration_ns.high <= has_ns }));
    }
    let mut bytes: BTreeMap<u32, u64> = BTreeMap::new();
    for one in moves {
        for host in [one.from, one.to] {
            let sum = bytes.entry(host).or_default();
            *sum = sum.saturating_add(one.cost.bytes);
        }
    }
    let busy_ns = |host: u32, bytes: u64| {
        let rate = fleet.host(host).links.iter().map(|link| link.bytes_per_s).max().unwrap_or(1).max(1);
        u128::from(bytes) * 1_000_000_000 / u128::from(rate)
    };
    let busiest =
        bytes.into_iter().max_by_key(|(host, bytes)| (busy_ns(*host, *bytes), std::cmp::Reverse(*host)));
    let (bottleneck, bottleneck_bytes) = busiest.unwrap_or((0, 0));
    let in_time = moves.iter().filter(|one| one.ends_ns <= has_ns).count();
    Err(Refusal::Deadline {
        needs_ns: duration_ns.expected,
        has_ns,
        bottleneck: fleet.host(bottleneck).name.clone(),
        bottleneck_bytes,
        in_time,
        late: moves.len() - in_time,
    })
}

/// Returns a move with names.
fn planned(fleet: &Fleet<'_>, after: &Occupancy<'_>, one: ScheduledMove) -> PlannedMove {
    let host = |host: u32| fleet.host(host).name.clone();
    PlannedMove {
        vm: fleet.vm(one.vm).name.clone(),
        from: host(one.from),
        to: host(one.to),
        begins_ns: one.begins_ns,
        total_ns: one.cost.total_ns,
        downtime_ns: one.cost.downtime_ns,
        bytes: one.cost.bytes,
        bytes_per_s: one.bytes_per_s,
        waits_for: one.waits_for,
        target_load_percent: percent(after.load_ppm(one.to)),
        why: one.why,
    }
}

#[cfg(test)]
mod tests;
