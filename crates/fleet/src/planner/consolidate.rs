//! Consolidation: hosts are emptied whose VMs fit elsewhere, if that saves more than it costs.

use super::ledger::Ledger;
use super::model::PowerState;
use super::plan::{HostChange, Plan, Reason};

/// Hosts that are tried in vain before a plan ends: those that follow have more to move.
const MOST_FAILURES: usize = 32;

/// Empties hosts, those with the least to move first.
pub(super) fn consolidate(ledger: &mut Ledger<'_>, plan: &mut Plan) {
    let mut failures = 0;
    let mut slept = 0;
    for host in donors(ledger, plan) {
        // VMs that this plan brought here stay here.
        let is_target =
            ledger.entries[host].vms.iter().any(|vm| ledger.vm(*vm as usize).host as usize != host);
        if is_target || ledger.entries[host].vms.is_empty() {
            continue;
        }
        if failures >= MOST_FAILURES {
            return;
        }
        let is_over = slept >= ledger.settings.max_transitions;
        let result = if is_over { Err(Reason::Limit) } else { empty(ledger, host) };
        match result {
            Ok(()) => slept += 1,
            Err(reason) => {
                failures += usize::from(matches!(
                    reason,
                    Reason::NoRoomElsewhere { .. } | Reason::TooExpensive { .. }
                ));
                plan.keep.push(HostChange { host: host as u32, reason });
            }
        }
    }
}

/// Returns the hosts that may be emptied, those with the least to move first.
fn donors(ledger: &Ledger<'_>, plan: &mut Plan) -> Vec<usize> {
    let now_s = ledger.view.now_s;
    let mut donors = Vec::new();
    for (host, spec) in ledger.view.hosts.iter().enumerate() {
        if spec.state != PowerState::On || !ledger.entries[host].is_open {
            continue;
        }
        let left_s = spec.on_since_s + ledger.settings.min_run_s - now_s;
        if left_s > 0.0 {
            plan.keep.push(HostChange { host: host as u32, reason: Reason::MinimumTime { left_s } });
        } else {
            donors.push(host);
        }
    }
    // Emptying the least efficient host of equally full ones saves the most.
    let order = |host: &usize| ledger.filled(*host) / ledger.watts_per_vm(*host as u32);
    donors.sort_by(|a, b| order(a).total_cmp(&order(b)));
    donors
}

/// Empties a host, or changes nothing and returns the reason.
fn empty(ledger: &mut Ledger<'_>, host: usize) -> Result<(), Reason> {
    let mut vms: Vec<usize> = ledger.entries[host].vms.iter().map(|vm| *vm as usize).collect();
    if let Some(vm) = vms.iter().find(|vm| !ledger.forecasts[**vm].may_move) {
        return Err(Reason::HeldBy { vm: ledger.vm(*vm).id });
    }
    if ledger.moved.len() + vms.len() > ledger.settings.max_moves {
        return Err(Reason::Limit);
    }
    let cost_j = cost_j(ledger, &vms);
    let most_j = ledger.host(host).power.peak() * ledger.settings.payback_s;
    if most_j <= cost_j {
        return Err(Reason::TooExpensive { saved_j: most_j, cost_j });
    }
    // The largest VMs find room with the most difficulty: they go first.
    let level = |vm: &usize| ledger.forecasts[*vm].level;
    vms.sort_by(|a, b| level(b).total_cmp(&level(a)));
    let mut targets = Vec::new();
    let before = watts(ledger, host);
    let share = f64::from(ledger.settings.fill - ledger.settings.margin);
    let mut growth = 0.0;
    for at in 0..vms.len() {
        let Some(to) = ledger.find(vms[at], host, share) else {
            return undo(ledger, host, &vms[..at], Reason::NoRoomElsewhere { vm: ledger.vm(vms[at]).id });
        };
        let now = watts(ledger, to);
        ledger.move_vm(vms[at], to);
        growth += watts(ledger, to) - now;
        targets.push(to);
    }
    let watts = before - growth;
    let saved_j = watts * ledger.settings.payback_s;
    if saved_j <= cost_j {
        return undo(ledger, host, &vms, Reason::TooExpensive { saved_j, cost_j });
    }
    if let Some(fullest) = ledger.lacks_restart_room(host) {
        return undo(ledger, host, &vms, Reason::RestartRoom { fullest });
    }
    ledger.close(host);
    for vm in vms {
        ledger.record(vm, Reason::Saves { watts, saved_j, cost_j });
    }
    Ok(())
}

fn undo(ledger: &mut Ledger<'_>, host: usize, vms: &[usize], reason: Reason) -> Result<(), Reason> {
    for vm in vms {
        ledger.move_vm(*vm, host);
    }
    Err(reason)
}

/// Returns the power of a host by the forecast of its VMs.
fn watts(ledger: &Ledger<'_>, host: usize) -> f64 {
    let spec = ledger.host(host);
    spec.power.watts(ledger.entries[host].level / spec.cpu)
}

/// Returns the energy that moving these VMs costs, with the transition of their host.
fn cost_j(ledger: &Ledger<'_>, vms: &[usize]) -> f64 {
    let settings = ledger.settings;
    let one = |vm: &usize| {
        let busy = f64::from(ledger.forecasts[*vm].level);
        ledger.vm(*vm).move_s * (settings.move_watts + settings.slow_cost_j * busy)
    };
    settings.transition_j + vms.iter().map(one).sum::<f64>()
}
