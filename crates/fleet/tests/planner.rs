//! Checks the planner: its constraints, its reasons, and that one sample moves nothing.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;

use proptest::prelude::*;
use whimbrel_fleet::planner::{BadSettings, Host, Plan, Planner, PowerState, Reason, Settings, View, Vm};
use whimbrel_fleet::power_curve::PowerCurve;

fn host(id: u32, state: PowerState) -> Host {
    let power = Arc::new("100,200".parse::<PowerCurve>().unwrap());
    let (is_cordoned, reserved_mb, on_since_s) = (false, 0.0, f64::NEG_INFINITY);
    Host { id, cpu: 100.0, core: 50.0, memory_mb: 1000.0, power, state, on_since_s, is_cordoned, reserved_mb }
}

fn vm(id: u32, host: u32, memory_mb: f64) -> Vm {
    let (apart, is_pinned, is_moving) = (None, false, false);
    Vm { id, host, cpu: 50.0, core: 50.0, memory_mb, move_s: 10.0, apart, is_pinned, is_moving }
}

fn hosts(count: u32) -> Vec<Host> {
    (0..count).map(|id| host(id, PowerState::On)).collect()
}

/// Feeds the same use for an hour, then `last`, and plans.
fn plan_with(settings: Settings, hosts: &[Host], vms: &[Vm], used: &[f32], last: &[f32]) -> Plan {
    let mut planner = Planner::new(settings).unwrap();
    let some = |values: &[f32]| values.iter().copied().map(Some).collect::<Vec<_>>();
    for step in 0..12 {
        planner.observe(f64::from(step) * 300.0, &some(used));
    }
    planner.observe(3600.0, &some(last));
    planner.plan(&View { now_s: 3600.0, hosts, vms })
}

fn plan(hosts: &[Host], vms: &[Vm], used: &[f32]) -> Plan {
    plan_with(Settings::default(), hosts, vms, used, used)
}

#[test]
fn a_host_whose_vms_fit_elsewhere_is_emptied() {
    let vms = [vm(0, 0, 100.0), vm(1, 1, 100.0), vm(2, 2, 100.0)];
    let plan = plan(&hosts(3), &vms, &[10.0, 20.0, 20.0]);
    assert_eq!(plan.moves.len(), 1);
    assert_eq!((plan.moves[0].vm, plan.moves[0].from), (0, 0));
    assert!(matches!(plan.moves[0].reason, Reason::Saves { saved_j, cost_j, .. } if saved_j > cost_j));
    assert_eq!(plan.sleep.iter().map(|change| change.host).collect::<Vec<_>>(), [0]);
}

/// Two hosts could be one, but then nothing is left to restart the VMs on.
#[test]
fn room_to_restart_the_fullest_host_is_kept() {
    let vms = [vm(0, 0, 100.0), vm(1, 1, 100.0)];
    let plan = plan(&hosts(2), &vms, &[10.0, 20.0]);
    assert!(plan.moves.is_empty());
    assert!(plan.keep.iter().any(|kept| matches!(kept.reason, Reason::RestartRoom { .. })), "{plan:?}");
}

#[test]
fn a_host_runs_for_the_minimum_time() {
    let vms = [vm(0, 0, 100.0), vm(1, 1, 100.0), vm(2, 2, 100.0)];
    let mut hosts = hosts(3);
    for host in &mut hosts {
        host.on_since_s = 3000.0;
    }
    let plan = plan(&hosts, &vms, &[10.0, 20.0, 20.0]);
    assert!(plan.moves.is_empty());
    assert!(matches!(plan.keep[0].reason, Reason::MinimumTime { left_s } if (left_s - 3000.0).abs() < 1.0));
}

#[test]
fn moves_that_cost_more_than_they_save_are_not_made() {
    let mut vms = [vm(0, 0, 100.0), vm(1, 1, 100.0), vm(2, 2, 100.0)];
    for vm in &mut vms {
        vm.move_s = 100_000.0;
    }
    let plan = plan(&hosts(3), &vms, &[10.0, 20.0, 20.0]);
    assert!(plan.moves.is_empty());
    assert!(plan.keep.iter().all(|kept| matches!(kept.reason, Reason::TooExpensive { .. })));
}

#[test]
fn vms_of_a_group_stay_apart() {
    let mut vms = [vm(0, 0, 100.0), vm(1, 1, 100.0), vm(2, 2, 100.0)];
    for vm in &mut vms {
        vm.apart = Some(1);
    }
    assert!(plan(&hosts(3), &vms, &[10.0, 20.0, 20.0]).moves.is_empty());
}

#[test]
fn pinned_vms_stay() {
    let mut vms = [vm(0, 0, 100.0), vm(1, 1, 100.0), vm(2, 2, 100.0)];
    vms[0].is_pinned = true;
    let plan = plan(&hosts(3), &vms, &[10.0, 20.0, 20.0]);
    assert!(plan.moves.iter().all(|one| one.vm != 0));
    assert!(plan.keep.iter().any(|kept| kept.reason == Reason::HeldBy { vm: 0 }));
}

/// A host at half of its capacity whose VM jumps to all that it can use: the forecast does not agree yet.
#[test]
fn one_sample_moves_nothing() {
    let vms = [vm(0, 0, 100.0), vm(1, 0, 100.0), vm(2, 1, 100.0), vm(3, 2, 100.0)];
    let (used, last) = ([10.0, 10.0, 40.0, 40.0], [50.0, 50.0, 40.0, 40.0]);
    let settings = Settings { min_run_s: 1e9, ..Settings::default() };
    let mut hosts = hosts(3);
    for host in &mut hosts {
        host.on_since_s = 0.0;
    }
    assert!(plan_with(settings, &hosts, &vms, &used, &last).moves.is_empty());
    // With the second sample it is an overload.
    let busy = [40.0, 45.0, 40.0, 40.0];
    let plan = plan_with(settings, &hosts, &vms, &busy, &last);
    assert_eq!(plan.moves.len(), 1);
    assert!(matches!(plan.moves[0].reason, Reason::Overload { used, .. } if used >= 1.0));
}

/// Nothing that is on has room, so the planner wakes the host that sleeps.
#[test]
fn relief_wakes_a_host() {
    let vms = [vm(0, 0, 100.0), vm(1, 0, 100.0), vm(2, 1, 100.0), vm(3, 1, 100.0)];
    let mut hosts = hosts(3);
    hosts[2].state = PowerState::Sleeping;
    let plan = plan(&hosts, &vms, &[50.0, 50.0, 45.0, 45.0]);
    assert_eq!(plan.wake.len(), 1);
    assert_eq!((plan.wake[0].host, plan.moves[0].to), (2, 2));
    let why = plan.moves[0].reason.to_string();
    assert_eq!(why, "its host uses 100% of its processors, forecast 100%");
}

#[test]
fn impossible_settings_are_refused() {
    let refused = |settings: Settings| Planner::new(settings).unwrap_err();
    let usual = Settings::default();
    assert_eq!(refused(Settings { min_samples: 1, ..usual }), BadSettings::OneSample);
    assert_eq!(refused(Settings { smoothing: 0.0, ..usual }), BadSettings::Range("smoothing"));
    assert_eq!(refused(Settings { min_run_s: -1.0, ..usual }), BadSettings::Range("min_run_s"));
    assert_eq!(refused(Settings { transition_j: f64::NAN, ..usual }), BadSettings::Range("transition_j"));
}

prop_compose! {
    fn fleet()(
        count in 3_u32..8,
        states in prop::collection::vec(0_u8..6, 8),
    )(
        count in Just(count),
        states in Just(states),
        vms in prop::collection::vec((0..count, 50.0..400.0_f64, prop::option::of(0_u32..4), 0.0..50.0_f32, 0.0..50.0_f32), 0..20),
    ) -> (Vec<Host>, Vec<Vm>, Vec<f32>, Vec<f32>) {
        let mut hosts = hosts(count);
        for (host, state) in hosts.iter_mut().zip(states) {
            match state {
                0 => host.is_cordoned = true,
                1 => host.state = PowerState::Draining,
                _ => {}
            }
        }
        let (mut all, mut used, mut last) = (Vec::new(), Vec::new(), Vec::new());
        for (host, memory_mb, apart, first, second) in vms {
            let here = || all.iter().filter(|one: &&Vm| one.host == host);
            let is_full = here().map(|one| one.memory_mb).sum::<f64>() + memory_mb > 1000.0;
            if is_full || (apart.is_some() && here().any(|one| one.apart == apart)) {
                continue;
            }
            all.push(Vm { apart, ..vm(all.len() as u32, host, memory_mb) });
            used.push(first);
            last.push(second);
        }
        (hosts, all, used, last)
    }
}

proptest! {
    /// Memory fits in the order of the moves, even if no move has ended before the last begins; groups stay apart;
    /// cordoned and draining hosts get nothing; equal inputs give equal plans.
    #[test]
    fn plans_keep_all_constraints((hosts, vms, used, last) in fleet()) {
        let plan = plan_with(Settings::default(), &hosts, &vms, &used, &last);
        let mut memory_mb = vec![0.0; hosts.len()];
        let mut host_of: Vec<u32> = vms.iter().map(|vm| vm.host).collect();
        for vm in &vms {
            memory_mb[vm.host as usize] += vm.memory_mb;
        }
        for one in &plan.moves {
            let target = &hosts[one.to as usize];
            prop_assert!(target.state == PowerState::On && !target.is_cordoned);
            prop_assert_eq!(host_of[one.vm as usize], one.from);
            memory_mb[one.to as usize] += vms[one.vm as usize].memory_mb;
            prop_assert!(memory_mb[one.to as usize] <= 1000.0 + 1e-6);
            host_of[one.vm as usize] = one.to;
        }
        for (at, vm) in vms.iter().enumerate() {
            let clashes = |other: usize| host_of[other] == host_of[at] && vms[other].apart == vm.apart;
            prop_assert!(vm.apart.is_none() || !(0..at).any(clashes));
        }
        for change in &plan.sleep {
            prop_assert!(!host_of.contains(&change.host));
        }
        prop_assert_eq!(plan, plan_with(Settings::default(), &hosts, &vms, &used, &last));
    }
}
