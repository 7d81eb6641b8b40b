//! Relief of hosts without processor time left.

use super::ledger::Ledger;
use super::model::PowerState;
use super::plan::{HostChange, Plan, Reason};

/// Use of a host, as a share of its capacity, at which its VMs wait for processors.
const FULL: f64 = 0.999;

/// Moves VMs away from hosts that are full now, and that are busy by the forecast as well.
pub(super) fn relieve(ledger: &mut Ledger<'_>, plan: &mut Plan) {
    for host in 0..ledger.entries.len() {
        if is_overloaded(ledger, host) {
            relieve_host(ledger, host, plan);
        }
    }
}

fn is_overloaded(ledger: &Ledger<'_>, host: usize) -> bool {
    let (entry, cpu) = (&ledger.entries[host], ledger.host(host).cpu);
    entry.is_on && entry.used >= FULL * cpu && entry.level >= f64::from(ledger.settings.watch) * cpu
}

fn relieve_host(ledger: &mut Ledger<'_>, host: usize, plan: &mut Plan) {
    let cpu = ledger.host(host).cpu;
    let share = |value: f64| (value / cpu) as f32;
    let reason = Reason::Overload {
        used: share(ledger.entries[host].used),
        forecast: share(ledger.entries[host].level),
    };
    let mut passed_over = Vec::new();
    while is_overloaded(ledger, host) && ledger.moved.len() < ledger.settings.max_moves {
        let Some(vm) = choose(ledger, host, &passed_over) else { return };
        match target(ledger, vm, host, plan) {
            Some(to) => {
                ledger.move_vm(vm, to);
                ledger.record(vm, reason.clone());
            }
            None => passed_over.push(vm),
        }
    }
}

/// Returns the VM to move: of those that end the overload alone the one that moves fastest, or else the largest.
fn choose(ledger: &Ledger<'_>, host: usize, passed_over: &[usize]) -> Option<usize> {
    let excess = ledger.entries[host].used - FULL * ledger.host(host).cpu;
    let may_move = |vm: &usize| {
        let one = ledger.vm(*vm);
        !one.is_pinned && !one.is_moving && !passed_over.contains(vm)
    };
    let vms = || ledger.entries[host].vms.iter().map(|vm| *vm as usize).filter(may_move);
    let used = |vm: usize| f64::from(ledger.forecasts[vm].used);
    let seconds = |vm: usize| ledger.vm(vm).move_s;
    let enough = vms().filter(|vm| used(*vm) > excess);
    let fastest =
        enough.min_by(|a, b| seconds(*a).total_cmp(&seconds(*b)).then(used(*a).total_cmp(&used(*b))));
    fastest.or_else(|| vms().max_by(|a, b| used(*a).total_cmp(&used(*b))))
}

/// Returns the host for a VM; wakes one if none that is on has room.
fn target(ledger: &mut Ledger<'_>, vm: usize, not: usize, plan: &mut Plan) -> Option<usize> {
    let fill = f64::from(ledger.settings.fill);
    if let Some(host) = ledger.find(vm, not, fill) {
        return Some(host);
    }
    let one = ledger.vm(vm);
    let sleeps = |host: &usize| {
        let spec = ledger.host(*host);
        spec.state == PowerState::Sleeping
            && !spec.is_cordoned
            && !ledger.entries[*host].is_on
            && spec.memory_mb >= one.memory_mb
            && spec.core >= f64::from(ledger.forecasts[vm].used).min(one.core)
    };
    let efficiency = |host: usize| ledger.watts_per_vm(host as u32);
    let host =
        (0..ledger.entries.len()).filter(sleeps).min_by(|a, b| efficiency(*a).total_cmp(&efficiency(*b)))?;
    ledger.wake(host);
    plan.wake.push(HostChange { host: host as u32, reason: Reason::NoRoom { vm: one.id } });
    Some(host)
}
