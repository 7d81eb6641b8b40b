//! Checks the policy of the queue simulation, and the search for its best parameters.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use whimbrel_fleet::queue::search::{Goal, Search};
use whimbrel_fleet::queue::{BadBank, Bank, Capacity, Pair, Scale, Workload, simulate};
use whimbrel_fleet::random::Random;
use whimbrel_fleet::trace::RequestTrace;

const SCALE: Scale = Scale { servers: 20, max_service_s: 0.1, seed: 1 };
const GOAL: Goal = Goal { limit_s: 2.0, late_share: 0.01 };

fn bank() -> Bank {
    let power = "100,200".parse().unwrap();
    Bank { servers: 20, window_s: 60, power, waking_share: 1.0, off_watts: 0.0 }
}

/// Requests that rise to 200 a second within a minute, stay for an hour with a minute of 240, and fall again.
fn wave(waves: usize) -> Workload {
    let mut random = Random::new(5);
    let rate = |second: usize| match second % 7200 {
        rising @ 1800..1860 => 40.0 + (rising - 1800) as f64 * 160.0 / 60.0,
        3000..3060 => 240.0,
        1860..5400 => 200.0,
        _ => 40.0,
    };
    let counts = (0..waves * 7200).map(|second| random.poisson(rate(second))).collect();
    Workload::new(&RequestTrace::new(counts).unwrap(), &SCALE).unwrap()
}

fn follow(workload: &Workload, headroom_percent: u32, min_run_s: u32, latency_s: u32) -> Capacity {
    Capacity::follow(workload, &bank(), Pair { headroom_percent, min_run_s }, latency_s, GOAL.limit_s)
}

#[test]
fn servers_follow_demand_after_the_latency() {
    let workload = wave(1);
    let capacity = follow(&workload, 0, 60, 100);
    // All servers are on at the start, and about 40 of 240 requests a second need a sixth of them.
    assert_eq!(capacity.servers(0), 20);
    assert!((3..=5).contains(&capacity.servers(1000)), "{}", capacity.servers(1000));
    assert!(capacity.servers(1900) <= 5, "no server serves before the latency has passed");
    assert!((16..=18).contains(&capacity.servers(2100)), "{}", capacity.servers(2100));
    assert!((3..=5).contains(&capacity.servers(7000)), "{}", capacity.servers(7000));
}

#[test]
fn servers_stay_on_for_the_minimum_time() {
    let workload = wave(1);
    let capacity = follow(&workload, 0, 7200 - 1800, 30);
    assert!((2000..5400).all(|second| capacity.servers(second) >= 16));
    assert!((5600..7000).all(|second| capacity.servers(second) >= 16));
    assert!(follow(&workload, 0, 60, 30).servers(7000) < 6);
}

/// Energy of a constant number of servers: idle power, and the rest in proportion to the work.
#[test]
fn energy_is_that_of_the_power_curve() {
    let workload = wave(1);
    let constant = Capacity::constant(&workload, &bank(), 20, GOAL.limit_s);
    let seconds = workload.seconds() as f64;
    let work_s = workload.requests() as f64 * workload.service_s;
    let expected = 20.0 * seconds * 100.0 + work_s * 100.0;
    assert!((constant.energy.total_j() / expected - 1.0).abs() < 0.002);
    let waking = follow(&workload, 0, 60, 100);
    assert!((waking.energy.waking_j - waking.starts as f64 * 100.0 * 200.0).abs() < 1.0);
}

/// Work that the simulation serves is the work for which energy is counted.
#[test]
fn simulated_work_is_the_work_of_the_energy() {
    let workload = wave(1);
    let capacity = follow(&workload, 20, 600, 30);
    let responses = simulate(&workload, |second| capacity.servers(second), GOAL.limit_s, None, 3);
    assert_eq!(responses.requests, workload.requests());
    let work_s = workload.requests() as f64 * workload.service_s;
    assert!((responses.service_s / work_s - 1.0).abs() < 0.01);
}

#[test]
fn nothing_is_decided_in_a_gap_and_after_it() {
    let mut counts = vec![200; 1000];
    counts[400..500].fill(0);
    counts[500..].fill(20);
    let workload = Workload::new(&RequestTrace::new(counts).unwrap(), &SCALE).unwrap();
    let capacity = follow(&workload, 0, 0, 30);
    assert!((60..400).chain(500..560).all(|second| capacity.servers(second) == 20));
    assert_eq!(capacity.servers(561), 2);
    assert_eq!(capacity.server_s, 400 * 20 + 60 * 20 + 440 * 2);
}

#[test]
fn the_same_seed_gives_the_same_responses() {
    let workload = wave(1);
    let run = |seed| simulate(&workload, |_| 17, 0.5, None, seed);
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).response_s.to_bits(), run(2).response_s.to_bits());
}

/// The search finds what trying all pairs finds.
#[test]
fn the_best_pair_is_the_cheapest_that_meets_the_goal() {
    let (workload, bank) = (wave(3), bank());
    let search = Search { workload: &workload, bank: &bank, goal: GOAL, seed: 9 };
    let pairs: Vec<Pair> = [0, 20, 50, 100, 200, 400]
        .iter()
        .flat_map(|headroom| [60, 1800, 7200].map(|min_run| (*headroom, min_run)))
        .map(|(headroom_percent, min_run_s)| Pair { headroom_percent, min_run_s })
        .collect();
    for latency_s in [30, 300] {
        let best = search.best(latency_s, &pairs).unwrap();
        let all = pairs.iter().filter_map(|pair| {
            let capacity = Capacity::follow(&workload, &bank, *pair, latency_s, GOAL.limit_s);
            let responses = simulate(&workload, |second| capacity.servers(second), 2.0, None, 9);
            (responses.late_share() <= GOAL.late_share).then(|| (capacity.energy.total_j(), *pair))
        });
        let (energy_j, pair) = all.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        assert_eq!((best.pair, best.met.energy_j), (pair, energy_j), "latency {latency_s}");
        assert!(best.cheaper_pairs > 0 && best.met.responses.late_share() <= GOAL.late_share);
    }
}

#[test]
fn the_static_baseline_is_the_smallest_bank_that_suffices() {
    let (workload, bank) = (wave(1), bank());
    let search = Search { workload: &workload, bank: &bank, goal: GOAL, seed: 9 };
    let baseline = search.static_baseline().unwrap();
    assert!(search.constant(baseline.servers - 1).is_none());
    assert!(search.constant(baseline.servers).is_some());
    let impossible = Search { goal: Goal { limit_s: 1e-6, late_share: 0.0 }, ..search };
    assert!(impossible.static_baseline().is_none());
    assert!(impossible.best(30, &[Pair { headroom_percent: 0, min_run_s: 0 }]).is_none());
}

#[test]
fn impossible_banks_are_refused() {
    let refused = |bank: Bank| bank.check().unwrap_err();
    assert!(bank().check().is_ok());
    assert_eq!(refused(Bank { servers: 0, ..bank() }), BadBank::Servers);
    assert_eq!(refused(Bank { window_s: 0, ..bank() }), BadBank::Window);
    assert_eq!(refused(Bank { waking_share: 1.5, ..bank() }), BadBank::WakingShare);
    assert_eq!(refused(Bank { off_watts: 101.0, ..bank() }), BadBank::OffWatts);
    assert_eq!(refused(Bank { off_watts: f64::NAN, ..bank() }), BadBank::OffWatts);
}
