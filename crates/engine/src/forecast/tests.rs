//! Forecasts of guests whose migrations can be computed by hand, and properties of all forecasts.

mod calibrated;

use proptest::prelude::*;

use super::facts::{DiskFacts, FactUncertainty, GuestFacts, LinkFacts, OverheadTimes};
use super::writes::{WorkingSetCurve, WorkingSetPoint};
use super::*;
use crate::pre_copy::{
    AvailableStrategies, FixedCost, HybridPolicy, Limit, MigrationStrategy, OnLimit, PatternPolicy, SlaPolicy,
};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const SECOND: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

/// A guest of 4 GiB, of which 3 have content, on a link of 100 MiB a second.
fn facts(writes: WorkingSetCurve) -> MigrationFacts {
    MigrationFacts {
        guest: GuestFacts {
            memory_bytes: 4 * GIB,
            used_bytes: 3 * GIB,
            writes,
            disks: None,
            vcpu_use_us_per_s: vec![1_000_000, 500_000],
        },
        path: LinkFacts { link_bytes_per_s: 100 * MIB, ..LinkFacts::default() },
        times: OverheadTimes { setup_ns: SECOND / 2, finish_ns: SECOND / 10 },
        ..MigrationFacts::default()
    }
}

fn pattern(on_limit: OnLimit) -> AnyPolicy {
    PatternPolicy::new(PreCopyGoals::default(), on_limit, FixedCost::default()).into()
}

fn forecast_pattern(facts: &MigrationFacts, on_limit: OnLimit) -> MigrationForecast {
    forecast(facts, &pattern(on_limit), PreCopyGoals::default())
}

/// Asserts that a value is within hundredths of another one.
fn assert_near(value: u64, expected: u64, percent: u64) {
    assert!(value.abs_diff(expected) * 100 <= expected * percent, "{value} instead of {expected}");
}

#[test]
fn a_curve_that_is_read_is_like_one_that_is_made() {
    let text = r#"[{"interval_ns":20,"written_bytes":9},{"interval_ns":0,"written_bytes":1},
                   {"interval_ns":10,"written_bytes":8}]"#;
    let curve: WorkingSetCurve = serde_json::from_str(text).unwrap();
    let point = |interval_ns, written_bytes| WorkingSetPoint { interval_ns, written_bytes };
    assert_eq!(curve, WorkingSetCurve::new([point(10, 8), point(20, 9)]));
    assert_eq!(curve.bytes_per_s(), 800_000_000);
}

#[test]
fn an_idle_guest_takes_as_long_as_its_memory() {
    let found = forecast_pattern(&facts(WorkingSetCurve::default()), OnLimit::Abort);
    assert!(found.converges && found.end == MigrationEnd::StopAndCopy, "{found:?}");
    // 30.7 s for the content, a second for the empty pages, half a second before the first page.
    assert_near(found.total_ns.expected, 32_400 * MS, 3);
    assert_eq!(found.downtime_ns.expected, FixedCost::default().downtime_ns(0) + 4 * MS);
    assert_eq!(found.bytes.expected, 3 * GIB);
    assert_eq!(found.converging_percent, 100);
    assert!(found.total_ns.low < 31 * SECOND && found.total_ns.high > 34 * SECOND, "{found:?}");
}

/// A guest that always writes new pages, half as fast as they are sent: rounds halve.
#[test]
fn rounds_of_a_steady_guest_make_a_geometric_series() {
    let found = forecast_pattern(&facts(WorkingSetCurve::steady(50 * MIB, SECOND)), OnLimit::Abort);
    assert!(found.converges, "{found:?}");
    // Until the last round each byte sent is followed by half of one; pages that are written before the first pass
    // reaches them are sent once.
    let most = 6 * GIB;
    assert!((4 * GIB..most).contains(&found.bytes.expected), "{found:?}");
    assert!(found.downtime_ns.expected <= 300 * MS && found.rounds > 4);
    assert!(!found.is_slowed);
}

#[test]
fn a_guest_that_writes_faster_than_the_link_does_not_converge() {
    let hot = facts(WorkingSetCurve::looping(310_000_000, 2 * GIB));
    let gives_up = forecast_pattern(&hot, OnLimit::Abort);
    let MigrationEnd::GivesUp { reason } = gives_up.end else { panic!("{gives_up:?}") };
    assert_eq!(reason.limit, Limit::NotShrinking);
    assert!(!gives_up.converges && gives_up.converging_percent == 0, "{gives_up:?}");
    assert_eq!(gives_up.downtime_ns, Estimate::certain(0));
    // What remains is the working set, without pages that were sent and not written again: each is after half of the
    // 6.9 s in which all are written, in the mean.
    let stops = forecast_pattern(&hot, OnLimit::Stop);
    assert!(stops.end == MigrationEnd::StopAndCopy && !stops.converges, "{stops:?}");
    assert_near(stops.downtime_ns.expected, 17_000 * MS, 5);
    let later = forecast_pattern(&hot, OnLimit::PostCopy);
    assert!(later.end == MigrationEnd::PostCopy && later.downtime_ns.expected < 30 * MS, "{later:?}");
}

#[test]
fn what_would_work_instead_is_named() {
    let hot = facts(WorkingSetCurve::looping(310_000_000, 2 * GIB));
    let ways = AvailableStrategies { slow_down: true, post_copy: true };
    let found = compare(&hot, &pattern(OnLimit::Abort), PreCopyGoals::default(), ways);
    let hybrid = found.alternatives.iter().find(|other| other.way == MigrationStrategy::PostCopy).unwrap();
    // All memory once, and twice what was sent in the first seconds, before it was known to be hot.
    let total_ns = hybrid.forecast.total_ns.expected;
    assert!((32_400 * MS..37_000 * MS).contains(&total_ns), "{hybrid:?}");
    let text = found.to_string();
    assert!(
        text.starts_with("will not converge: writes 310 MB/s, link carries 104 MB/s; gives up after "),
        "{text}"
    );
    let seconds = total_ns / SECOND;
    assert!(text.contains(&format!("; hybrid would take {seconds} s (")), "{text}");
    // Without these ways there is nothing to name.
    let none = AvailableStrategies { slow_down: false, post_copy: false };
    let found = compare(&hot, &pattern(OnLimit::Abort), PreCopyGoals::default(), none);
    assert!(found.alternatives.is_empty());
}

#[test]
fn a_throttle_makes_a_guest_converge_that_writes_twice_as_fast() {
    let mut hot = facts(WorkingSetCurve::looping(200 * MIB, 2 * GIB));
    hot.spread = FactUncertainty { link_percent: 5, writes_percent: 5 };
    assert!(!forecast_pattern(&hot, OnLimit::Abort).converges);
    hot.throttle_requested = true;
    let found = forecast_pattern(&hot, OnLimit::Abort);
    assert!(found.converges && found.is_slowed, "{found:?}");
}

#[test]
fn limits_of_time_are_kept_by_post_copy() {
    let goals = PreCopyGoals { max_total_ns: Some(60 * SECOND), ..PreCopyGoals::default() };
    let ways = AvailableStrategies { slow_down: false, post_copy: true };
    let policy = SlaPolicy::new(goals, ways, OnLimit::Abort, FixedCost::default()).into();
    let hot = facts(WorkingSetCurve::looping(310_000_000, 2 * GIB));
    let found = forecast(&hot, &policy, goals);
    assert_eq!(found.end, MigrationEnd::PostCopy);
    assert!(found.total_ns.high <= 70 * SECOND, "{found:?}");
}

#[test]
fn disks_take_their_time_before_memory() {
    let mut with_disks = facts(WorkingSetCurve::steady(MIB, SECOND));
    with_disks.guest.disks =
        Some(DiskFacts { bytes: 20 * GIB, writes: WorkingSetCurve::steady(10 * MIB, SECOND) });
    let found = forecast_pattern(&with_disks, OnLimit::Abort);
    assert!(found.converges, "{found:?}");
    // 23 GiB at 100 MiB a second, and a tenth of the disk's part again.
    assert_near(found.total_ns.expected, 260 * SECOND, 5);
    // Disks that are written as fast as they are sent cannot be waited for, not even with post-copy.
    with_disks.guest.disks =
        Some(DiskFacts { bytes: 20 * GIB, writes: WorkingSetCurve::steady(200 * MIB, SECOND) });
    let found = forecast_pattern(&with_disks, OnLimit::PostCopy);
    assert!(!found.converges && matches!(found.end, MigrationEnd::GivesUp { .. }), "{found:?}");
}

/// The rounds after the first pass of a migration that is forecast take as long as the forecast of the rest.
#[test]
fn the_rest_of_a_migration_continues_its_forecast() {
    let steady = facts(WorkingSetCurve::looping(40 * MIB, GIB));
    let goals = PreCopyGoals::default();
    let whole = forecast(&steady, &pattern(OnLimit::Abort), goals);
    let observed = RoundObservation {
        pass: 1,
        dirty_pages: GIB / 4096,
        full_pages: GIB / 4096,
        pages_sent: 25_600,
        bytes_sent: 100 * MIB,
        duration_ns: SECOND,
        interval_ns: SECOND,
        remaining_pages: GIB / 4096,
        scan_ns: 2 * MS,
        elapsed_ns: 22_500 * MS,
        ..RoundObservation::default()
    };
    let rest = forecast_rest(&steady, &pattern(OnLimit::Abort), goals, &observed);
    assert!(rest.converges && whole.converges, "{rest:?} {whole:?}");
    assert_near(rest.total_ns.expected, whole.total_ns.expected, 15);
    assert!(rest.bytes.expected < whole.bytes.expected);
    let width = |estimate: Estimate| estimate.high - estimate.low;
    assert!(width(rest.total_ns) < width(whole.total_ns), "less is uncertain: {rest:?} {whole:?}");
    // Nothing is left.
    let over = RoundObservation { dirty_pages: 0, full_pages: 0, remaining_pages: 0, ..observed };
    let rest = forecast_rest(&steady, &pattern(OnLimit::Abort), goals, &over);
    assert!(rest.total_ns.high < 24 * SECOND, "{rest:?}");
}

#[test]
fn a_guest_on_the_edge_is_said_to_be_uncertain() {
    let edge = facts(WorkingSetCurve::looping(80 * MIB, 2 * GIB));
    let found = compare(
        &edge,
        &pattern(OnLimit::Abort),
        PreCopyGoals::default(),
        AvailableStrategies { slow_down: false, post_copy: false },
    );
    let percent = found.forecast.converging_percent;
    assert!((20..=80).contains(&percent), "{found:?}");
    assert!(found.to_string().contains(&format!("rounds converge in {percent}% of the cases")), "{found}");
}

prop_compose! {
    fn any_curve()(points in prop::collection::vec((1..20 * SECOND, 0..2 * GIB), 0..5)) -> WorkingSetCurve {
        WorkingSetCurve::new(points.into_iter().map(|(interval_ns, written_bytes)| WorkingSetPoint {
            interval_ns,
            written_bytes,
        }))
    }
}

prop_compose! {
    fn any_facts()(
        (memory_bytes, used_bytes) in (0..8 * GIB, 0..8 * GIB),
        (writes, disk_writes) in (any_curve(), any_curve()),
        disk_bytes in prop::option::of(0..8 * GIB),
        (link_bytes_per_s, copy_bytes_per_s) in (MIB..10 * GIB, 10 * MIB..10 * GIB),
        (rtt_ns, scan_ns) in (0..200 * MS, 0..50 * MS),
        wire_permille in 50..1100_u32,
        throttle_requested in any::<bool>(),
    ) -> MigrationFacts {
        MigrationFacts {
            guest: GuestFacts {
                memory_bytes,
                used_bytes,
                writes,
                disks: disk_bytes.map(|bytes| DiskFacts { bytes, writes: disk_writes }),
                vcpu_use_us_per_s: Vec::new(),
            },
            path: LinkFacts { link_bytes_per_s, rtt_ns, copy_bytes_per_s, wire_permille, scan_ns, drain_ns: MS },
            throttle_requested,
            ..MigrationFacts::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_forecast_is_sound(facts in any_facts(), on_limit in 0..3_usize, passes in 0..3_u32) {
        let goals = PreCopyGoals { max_total_ns: Some(3600 * SECOND), ..PreCopyGoals::default() };
        let on_limit = [OnLimit::Stop, OnLimit::PostCopy, OnLimit::Abort][on_limit];
        let ways = AvailableStrategies { slow_down: true, post_copy: true };
        let policies: [AnyPolicy; 3] = [
            PatternPolicy::new(goals, on_limit, facts.fixed).into(),
            HybridPolicy::new(goals, passes, facts.fixed).into(),
            SlaPolicy::new(goals, ways, on_limit, facts.fixed).into(),
        ];
        for policy in policies {
            let found = forecast(&facts, &policy, goals);
            for estimate in [found.total_ns, found.downtime_ns, found.bytes] {
                prop_assert!(estimate.contains(estimate.expected), "{:?}", found);
            }
            prop_assert!(found.converging_percent <= 100);
            let arrives = matches!(found.end, MigrationEnd::StopAndCopy | MigrationEnd::PostCopy);
            if arrives {
                let content = facts.guest.used_bytes.min(facts.guest.memory_bytes) / 4096 * 4096;
                let least = u128::from(content) * u128::from(facts.path.wire_permille) / 1000;
                prop_assert!(u128::from(found.bytes.expected) + 1_000_000 >= least, "{:?}", found);
                prop_assert!(found.downtime_ns.expected >= facts.fixed.downtime_ns(0));
            }
            prop_assert_eq!(found, forecast(&facts, &policy, goals));
        }
    }
}
