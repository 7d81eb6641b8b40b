//! Forecasts beside real migrations: from the facts of a recorded one, the forecast finds its end, time and downtime.
//!
//! The facts are taken from the same records: how many pages there were, how fast they were sent, and how many were
//! written in intervals of the lengths that occurred. So this shows that simulated rounds are like real ones; whether
//! facts that are measured beforehand hold is for benchmarks.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]
#![allow(clippy::disallowed_methods, reason = "records are read from files")]

extern crate whimbrel_engine as engine;

use std::path::Path;

use engine::forecast::facts::{FactUncertainty, GuestFacts, LinkFacts, MigrationFacts, OverheadTimes};
use engine::forecast::writes::{WorkingSetCurve, WorkingSetPoint};
use engine::forecast::{MigrationEnd, MigrationForecast, forecast};
use engine::pre_copy::{AnyPolicy, Decision, PolicyEvent, PreCopyGoals, RoundObservation, StopTrace};
use engine::traces::Traces;

const PAGE: u64 = 4096;

/// A recorded migration.
struct Recorded {
    policy: AnyPolicy,
    goals: PreCopyGoals,
    rounds: Vec<RoundObservation>,
    /// Number of the first rounds in which the guest was not slowed down.
    unthrottled: usize,
    end: Decision,
}

fn recorded(name: &str) -> Recorded {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(name);
    let traces: Traces = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let trace: &StopTrace = traces.stop.last().unwrap();
    let (mut goals, mut rounds, mut unthrottled, mut end) = (PreCopyGoals::default(), Vec::new(), None, None);
    for entry in &trace.entries {
        match entry.observed {
            PolicyEvent::Goals(changed) => goals = changed,
            PolicyEvent::ThrottleChanged { .. } => unthrottled = unthrottled.or(Some(rounds.len())),
            PolicyEvent::Round { observed } => {
                rounds.push(observed);
                end = entry.decision;
            }
        }
    }
    let unthrottled = unthrottled.unwrap_or(rounds.len());
    Recorded { policy: trace.policy.clone(), goals, rounds, unthrottled, end: end.unwrap() }
}

/// Returns the facts of a recorded migration.
fn facts(recorded: &Recorded, throttle_requested: bool) -> MigrationFacts {
    let rounds = &recorded.rounds;
    let first = rounds[0];
    let first_pass: Vec<_> = rounds.iter().take_while(|observed| observed.pass == 0).collect();
    let setup_ns = first.elapsed_ns - first.interval_ns;
    let sum = |of: fn(&RoundObservation) -> u64| first_pass.iter().map(|observed| of(observed)).sum::<u64>();
    let bytes = sum(|observed| observed.bytes_sent);
    let rate = u128::from(bytes) * 1_000_000_000 / u128::from(sum(|observed| observed.duration_ns));
    let memory_pages = first.remaining_pages + first.pages_sent;
    // Pages that needed no bytes of their own had no content.
    let used_pages = memory_pages * (bytes / PAGE) / sum(|observed| observed.pages_sent);
    let after = rounds.iter().find(|observed| observed.pass > 0).unwrap();
    let pass =
        WorkingSetPoint { interval_ns: after.elapsed_ns - setup_ns, written_bytes: after.dirty_pages * PAGE };
    let later =
        rounds[..recorded.unthrottled].iter().filter(|observed| observed.elapsed_ns > after.elapsed_ns);
    let points = later.map(|observed| {
        let written = observed.dirty_pages - observed.remaining_pages;
        // The trace does not have whether pages that waited were written: the share of the others counts for all.
        let all = if observed.remaining_pages > 0 {
            (observed.dirty_pages * written / observed.pages_sent).clamp(written, observed.dirty_pages)
        } else {
            written
        };
        WorkingSetPoint { interval_ns: observed.interval_ns, written_bytes: all * PAGE }
    });
    let scans = rounds.iter().map(|observed| observed.scan_ns).sum::<u64>();
    MigrationFacts {
        guest: GuestFacts {
            memory_bytes: memory_pages * PAGE,
            used_bytes: used_pages.min(memory_pages) * PAGE,
            writes: WorkingSetCurve::new(points.chain([pass])),
            ..GuestFacts::default()
        },
        path: LinkFacts {
            link_bytes_per_s: u64::try_from(rate).unwrap(),
            scan_ns: scans / rounds.len() as u64,
            ..LinkFacts::default()
        },
        times: OverheadTimes { setup_ns, finish_ns: 0 },
        spread: FactUncertainty { link_percent: 10, writes_percent: 25 },
        throttle_requested,
        ..MigrationFacts::default()
    }
}

fn forecast_of(name: &str, throttle_requested: bool) -> (Recorded, MigrationForecast) {
    let recorded = recorded(name);
    let found = forecast(&facts(&recorded, throttle_requested), &recorded.policy, recorded.goals);
    (recorded, found)
}

/// Asserts that a forecast has the end of the recorded migration, its total time within 20% or half a second, and its
/// downtime within 50% or 10 ms.
fn assert_like_recorded(name: &str, throttle_requested: bool) {
    let (recorded, found) = forecast_of(name, throttle_requested);
    let Decision::StopAndCopy { expected_downtime_ns, .. } = recorded.end else { panic!("{name}") };
    assert_eq!(found.end, MigrationEnd::StopAndCopy, "{name}: {found:?}");
    let total_ns = recorded.rounds.last().unwrap().elapsed_ns + expected_downtime_ns;
    let is_near = |found: u64, recorded: u64, percent: u64, least: u64| {
        found.abs_diff(recorded) <= least.max(recorded / 100 * percent)
    };
    let total = found.total_ns.expected;
    assert!(is_near(total, total_ns, 20, 500_000_000), "{name}: {total_ns} in all, forecast {found:?}");
    let downtime = found.downtime_ns.expected;
    assert!(
        is_near(downtime, expected_downtime_ns, 50, 10_000_000),
        "{name}: {expected_downtime_ns} of downtime, forecast {found:?}"
    );
    let converged = expected_downtime_ns <= recorded.goals.max_downtime_ns;
    assert_eq!(found.converges, converged, "{name}: {found:?}");
}

#[test]
fn guests_of_the_three_patterns_are_forecast() {
    for name in ["pattern-a.json", "pattern-b.json", "pattern-c.json"] {
        assert_like_recorded(name, false);
    }
}

#[test]
fn throttled_guests_are_forecast() {
    assert_like_recorded("cpu_throttle.json", true);
    assert_like_recorded("sla-slowed.json", false);
}

#[test]
fn post_copy_is_forecast() {
    let (recorded, found) = forecast_of("hybrid.json", false);
    let Decision::PostCopy { expected_downtime_ns } = recorded.end else { panic!("{found:?}") };
    assert_eq!(found.end, MigrationEnd::PostCopy, "{found:?}");
    assert!(found.downtime_ns.expected.abs_diff(expected_downtime_ns) < 10_000_000, "{found:?}");
    let stopped_ns = recorded.rounds.last().unwrap().elapsed_ns;
    assert!(found.total_ns.expected > stopped_ns - stopped_ns / 5, "{found:?}");
}
