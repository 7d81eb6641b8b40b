//! Levelling the load of hosts, with hysteresis: a host is relieved once it was above the threshold for the hold time,
//! and a VM moves only if that makes enough of a difference, and one that is worth its time.

use std::collections::BTreeSet;

use super::obstacle::Obstacle;
use super::occupancy::WHOLE_PPM;
use super::placer::Placer;
use super::plan::{MoveReason, StayReason};
use super::request::Hysteresis;

/// Most obstacles and other reasons of VMs that stay which a plan lists for each host.
const MOST_STAYS: usize = 3;

fn ppm(percent: u32) -> u64 {
    u64::from(percent) * (WHOLE_PPM / 100)
}

/// Returns millionths as hundredths, rounded.
pub(super) fn percent(ppm: u64) -> u32 {
    u32::try_from(ppm.saturating_add(WHOLE_PPM / 200) / (WHOLE_PPM / 100)).unwrap_or(u32::MAX)
}

/// Move that levels load, with the reason for which it is not made, if there is one.
struct Candidate {
    vm: u32,
    to: u32,
    /// Difference that it makes between the load of its host and the higher load of both hosts afterwards.
    gain_ppm: u64,
    /// Worth in nanoseconds, less the time of the move.
    surplus_ns: i128,
    objection: Option<StayReason>,
}

/// Levels the load of hosts.
pub(super) fn balance(placer: &mut Placer<'_>, hysteresis: &Hysteresis) {
    let hosts = placer.fleet.host_count();
    let sum: u128 = (0..hosts).map(|host| u128::from(placer.occupancy.load_ppm(host))).sum();
    let mean_ppm = u64::try_from(sum / u128::from(hosts.max(1))).unwrap_or(u64::MAX);
    let threshold_ppm = mean_ppm.saturating_add(ppm(hysteresis.threshold_percent));
    // Once a host is relieved, it is brought below the threshold by the margin.
    let target_ppm = threshold_ppm - ppm(hysteresis.margin_percent).min(threshold_ppm - mean_ppm);
    let is_due = |load_ppm: u64, host: u32| {
        load_ppm > threshold_ppm && placer.fleet.host(host).busy_for_s >= hysteresis.hold_s
    };
    let loads = (0..hosts).map(|host| (placer.occupancy.load_ppm(host), host));
    let mut busy: BTreeSet<(u64, u32)> = loads.filter(|(load_ppm, host)| is_due(*load_ppm, *host)).collect();
    let mut moves = 0;
    while let Some((load_ppm, host)) = busy.pop_last() {
        let vms: Vec<u32> = placer.vms_on[host as usize].iter().copied().collect();
        let candidates: Vec<Candidate> =
            vms.into_iter().filter_map(|vm| candidate(placer, hysteresis, vm, load_ppm)).collect();
        let best = candidates.iter().filter(|candidate| candidate.objection.is_none());
        let best = best.max_by_key(|candidate| (candidate.surplus_ns, std::cmp::Reverse(candidate.vm)));
        let Some(Candidate { vm, to, .. }) = best else {
            record_stays(placer, candidates);
            continue;
        };
        if moves >= placer.limits.moves {
            placer.stay(*vm, StayReason::Limit);
            continue;
        }
        let (vm, to) = (*vm, *to);
        placer.reasons.insert(
            vm,
            MoveReason::Levels {
                from_percent: percent(load_ppm),
                to_percent: percent(placer.occupancy.load_with_vm(to, vm)),
                mean_percent: percent(mean_ppm),
            },
        );
        placer.place(vm, to);
        moves += 1;
        let load_ppm = placer.occupancy.load_ppm(host);
        if load_ppm > target_ppm {
            busy.insert((load_ppm, host));
        }
    }
}

/// Returns the best move of a VM away from its host; none if it may not move, or has nowhere to go.
fn candidate(placer: &mut Placer<'_>, hysteresis: &Hysteresis, vm: u32, load_ppm: u64) -> Option<Candidate> {
    let fleet = placer.fleet;
    let is_alone = fleet.units.members[fleet.units.of[vm as usize] as usize].len() == 1;
    let is_rested = fleet.vm(vm).rested_s.is_none_or(|rested_s| rested_s >= hysteresis.rest_s);
    // A VM moves once in a plan.
    let is_here = placer.host_of[vm as usize] == fleet.home[vm as usize];
    if fleet.hold(vm).is_some() || !is_alone || !is_rested || !is_here {
        return None;
    }
    let from = placer.host_of[vm as usize];
    let (_, to) = placer.best(&[vm], &|_, _| true)?;
    let to_ppm = placer.occupancy.load_with_vm(to, vm);
    let after_ppm = placer.occupancy.load_without_vm(from, vm).max(to_ppm);
    let gain_ppm = load_ppm.saturating_sub(after_ppm);
    let link = placer.targets(vm).into_iter().find(|(kind, _)| *kind == fleet.host_kind[to as usize]);
    let cost_ns = placer.move_ns(vm, link.map_or(1, |(_, rate)| rate));
    let worth = (u128::from(gain_ppm) * u128::from(hysteresis.payback_s)).saturating_mul(1_000_000_000);
    let worth_ns = u64::try_from(worth / u128::from(WHOLE_PPM)).unwrap_or(u64::MAX);
    let objection = if gain_ppm < ppm(hysteresis.margin_percent) {
        Some(StayReason::TooLittleGain { gain_percent: percent(gain_ppm) })
    } else if worth_ns <= cost_ns {
        let second = 1_000_000_000;
        Some(StayReason::TooExpensive { cost_s: cost_ns / second, worth_s: worth_ns / second })
    } else {
        None
    };
    let surplus_ns = i128::from(worth_ns) - i128::from(cost_ns);
    Some(Candidate { vm, to, gain_ppm, surplus_ns, objection })
}

/// Records why a busy host is not relieved further: the VMs that come nearest to being moved.
fn record_stays(placer: &mut Placer<'_>, candidates: Vec<Candidate>) {
    let mut candidates = candidates;
    candidates.sort_by_key(|candidate| std::cmp::Reverse((candidate.gain_ppm, candidate.surplus_ns)));
    for Candidate { vm, objection, .. } in candidates.into_iter().take(MOST_STAYS) {
        if let Some(why) = objection {
            placer.stay(vm, why);
        }
    }
}

/// Returns what keeps hosts from accepting VMs if nothing but cordons does.
pub(super) fn cordons(hosts: &[super::inventory::HostSpec]) -> Vec<Option<Obstacle>> {
    hosts.iter().map(|host| host.cordoned.then_some(Obstacle::Cordoned)).collect()
}
