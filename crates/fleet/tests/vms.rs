//! Checks the simulation of VMs on hosts, its baselines, and the check of their plausibility.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use whimbrel_fleet::planner::Settings;
use whimbrel_fleet::random::Random;
use whimbrel_fleet::trace::{Day, STEPS_PER_DAY};
use whimbrel_fleet::vms::plausibility::{Bounds, Finding, check};
use whimbrel_fleet::vms::{
    Baseline, DayResult, MemoryRule, Metrics, OURS, Overload, POLICIES, Policy, PolicyResult, REFERENCE,
    Setup, Snapshot, WakePower, evaluate_day, simulate,
};

/// VMs like those of `PlanetLab`: a low level each, with noise and bursts.
fn day(vms: usize, seed: u64) -> Day {
    let mut random = Random::new(seed);
    let mut vm = || {
        let (level, mut burst) = (3.0 + 10.0 * random.exponential(), 0.0);
        let mut at = |_| {
            burst *= 0.7;
            if random.unit() < 0.03 {
                burst += 40.0 * random.exponential();
            }
            (level * (1.0 + 0.3 * random.normal()) + burst).clamp(0.0, 100.0) as u8
        };
        (0..STEPS_PER_DAY).map(&mut at).collect()
    };
    Day { name: "20110101".to_owned(), vms: (0..vms).map(|_| vm()).collect() }
}

fn all() -> Vec<String> {
    POLICIES.map(str::to_owned).to_vec()
}

fn evaluate(memory: MemoryRule) -> DayResult {
    evaluate_day(&day(120, 3), 90, memory, 1.0, Settings::default(), &all()).unwrap()
}

fn of(result: &DayResult, policy: &str) -> Metrics {
    result.policies.iter().find(|one| one.policy == policy).unwrap().metrics
}

/// Moves the VM to the other host at the start.
struct Once;
impl Policy for Once {
    fn decide(&mut self, snapshot: &Snapshot<'_>) -> Vec<(usize, usize)> {
        let other = 1 - snapshot.host_of[0] as usize;
        if snapshot.step == 0 { vec![(0, other)] } else { Vec::new() }
    }
}

/// One VM on one host at 50% of its MIPS: everything follows by hand.
#[test]
fn metrics_are_those_of_the_definition() {
    let day = Day { name: String::new(), vms: vec![vec![50; STEPS_PER_DAY]] };
    let setup = Setup::new(&day, 2, MemoryRule::Ignored, 1.0).unwrap();
    let still = simulate(&setup, &mut Baseline::Static).unwrap();
    // 1250 of 5320 MIPS, on the curve between 20% and 30%: 101 and 105 W.
    let watts = 101.0 + 4.0 * (1250.0 / 532.0 - 2.0);
    assert!((still.energy_kwh - watts * 24.0 / 1000.0).abs() < 1e-9, "{still:?}");
    assert_eq!((still.moves, still.starts), (0, 1));

    let moved = simulate(&setup, &mut Once).unwrap();
    // 870 MB at 62.5 MB/s take 13.92 s, in which 10% of the MIPS are lost.
    assert!((moved.pdm - 0.1 * 13.92 / 86_400.0).abs() < 1e-12, "{moved:?}");
    assert_eq!((moved.moves, moved.starts), (1, 2));
    let both_s = 13.92;
    assert!((moved.mean_hosts - (1.0 + both_s / 86_400.0)).abs() < 1e-9);
}

/// Moves all VMs to the host of the first.
struct Together;
impl Policy for Together {
    fn decide(&mut self, snapshot: &Snapshot<'_>) -> Vec<(usize, usize)> {
        let host = snapshot.host_of[0] as usize;
        (0..snapshot.host_of.len()).map(|vm| (vm, host)).collect()
    }
}

/// Four VMs, one of each type, ask for 6000 MIPS for half of the day, and are moved to a host of 5320 MIPS.
#[test]
fn overload_is_counted_by_time() {
    let vm = |_| (0..STEPS_PER_DAY).map(|step| if step < 144 { 100 } else { 10 }).collect::<Vec<_>>();
    let day = Day { name: String::new(), vms: (0..4).map(vm).collect() };
    let setup = Setup::new(&day, 2, MemoryRule::Ignored, 1.0).unwrap();
    let metrics = simulate(&setup, &mut Together).unwrap();
    // The third VM, of 1740 MB, arrives last. The other host is active until then, and never full.
    let full_s = 43_200.0 - 1740.0 / 62.5;
    assert!((metrics.slatah - full_s / 86_400.0 / 2.0).abs() < 1e-9, "{metrics:?}");
    let asked = 6000.0 * 43_200.0 + 600.0 * 43_200.0;
    assert!((metrics.unserved - 680.0 * full_s / asked).abs() < 1e-6, "{metrics:?}");
}

#[test]
fn the_same_day_gives_the_same_result() {
    assert_eq!(evaluate(MemoryRule::Ignored), evaluate(MemoryRule::Ignored));
}

#[test]
fn results_are_plausible() {
    for memory in [MemoryRule::Ignored, MemoryRule::Kept] {
        let result = evaluate(memory);
        assert_eq!(result.findings, [], "{memory:?}");
        let (stays, threshold, regression) =
            (of(&result, "static"), of(&result, "THR-MMT"), of(&result, REFERENCE));
        assert_eq!(stays.moves, 0);
        assert!(threshold.energy_kwh < stays.energy_kwh && regression.energy_kwh < stays.energy_kwh);
    }
}

/// Ours is better than LR-MMT in all four metrics, on a day that no setting was made for.
#[test]
fn ours_is_no_worse_than_the_reference() {
    let result = evaluate(MemoryRule::Ignored);
    let (ours, reference) = (of(&result, OURS), of(&result, REFERENCE));
    assert!(ours.energy_kwh <= reference.energy_kwh, "{ours:?} {reference:?}");
    assert!(ours.slatah <= reference.slatah, "{ours:?} {reference:?}");
    assert!(ours.pdm <= reference.pdm && ours.moves <= reference.moves, "{ours:?} {reference:?}");
}

/// Results of a day in which another policy stands in the place of LR-MMT.
fn with_planted(mut planted: impl Policy) -> Vec<Finding> {
    let day = day(120, 3);
    let setup = Setup::new(&day, 90, MemoryRule::Ignored, 1.0).unwrap();
    let mut result = evaluate(MemoryRule::Ignored);
    let metrics = simulate(&setup, &mut planted).unwrap();
    for one in result.policies.iter_mut().filter(|one| one.policy == REFERENCE) {
        *one = PolicyResult { policy: REFERENCE.to_owned(), metrics };
    }
    check(&Bounds::new(&setup), &result.policies)
}

fn regression(safety: f64) -> Baseline {
    Baseline::Dynamic(Overload::LocalRegression(safety), WakePower::LikeIdle)
}

/// Errors in LR-MMT that would make ours look good, or bad, are found.
#[test]
fn planted_errors_of_the_baseline_are_noticed() {
    assert!(with_planted(Baseline::LR_MMT).is_empty());
    // A safety factor that was forgotten, and one that is applied twice.
    assert!(!with_planted(regression(0.6)).is_empty(), "hosts are never overloaded");
    assert!(!with_planted(regression(1.44)).is_empty(), "hosts are emptied too early");
    // A baseline that does nothing.
    assert!(!with_planted(Baseline::Static).is_empty());
}

#[test]
fn bounds_enclose_all_policies() {
    let result = evaluate(MemoryRule::Kept);
    for PolicyResult { policy, metrics } in &result.policies {
        assert!(metrics.energy_kwh >= result.bounds.packed_kwh, "{policy}");
        assert!(metrics.energy_kwh <= result.bounds.all_full_kwh, "{policy}");
    }
    // 90 hosts of 117 and 135 W in turn: 126 W each.
    assert!((result.bounds.all_full_kwh - 90.0 * 126.0 * 24.0 / 1000.0).abs() < 1e-9);
}

/// Moves that last for several steps still end, and memory is kept while they last.
#[test]
fn long_moves_keep_all_rules() {
    let all = all();
    for memory in [MemoryRule::Ignored, MemoryRule::Kept] {
        let result = evaluate_day(&day(60, 4), 60, memory, 60.0, Settings::default(), &all).unwrap();
        assert!(of(&result, OURS).moves > 0 && of(&result, REFERENCE).moves > 0);
    }
}

#[test]
fn impossible_set_ups_are_refused() {
    let refused =
        |hosts, factor| Setup::new(&day(4, 1), hosts, MemoryRule::Kept, factor).unwrap_err().to_string();
    assert_eq!(refused(0, 1.0), "at least one host is needed");
    assert!(refused(1, 0.0).starts_with("the factor"));
    assert!(refused(1, f64::NAN).starts_with("the factor"));
    let small = Setup::new(&day(40, 1), 2, MemoryRule::Kept, 1.0).unwrap();
    assert!(simulate(&small, &mut Baseline::Static).unwrap_err().to_string().contains("fits on no host"));
}
