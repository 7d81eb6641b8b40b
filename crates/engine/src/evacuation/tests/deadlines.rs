//! Deadlines: refused, kept, at risk, and missed, each with its reason.

use super::fleet::*;
use crate::evacuation::*;
use crate::planner::Refusal;

/// A request with a deadline in so many seconds.
fn by(bench: &Bench, seconds: u64) -> EvacuationRequest {
    EvacuationRequest { deadline_ns: Some(bench.now_ns + seconds * SECOND), ..empty_request(&["a"]) }
}

fn bench() -> Bench {
    // 34.4 s and 17.2 s, one after the other.
    Bench::new(vec![host("a"), host("b"), host("c")], vec![vm("v1", "a", 32), vm("v2", "a", 16)])
}

fn standing(bench: &Bench) -> DeadlineStanding {
    bench.one("e").status(bench.now_ns).deadline.unwrap()
}

#[test]
fn an_impossible_deadline_is_refused_with_a_way_out() {
    let mut bench = bench();
    let request = by(&bench, 30);
    let refusal = bench.evacuations.preview(&request, &bench.inventory, bench.now_ns).unwrap_err();
    assert!(matches!(&refusal, EvacuationRefusal::Plan { refusal: Refusal::Deadline { .. } }), "{refusal}");
    assert!(refusal.advice().contains("allow 53 s"), "{}", refusal.advice());
    let refused = bench.evacuations.begin(id("e"), request.clone(), &bench.inventory, bench.now_ns);
    assert_eq!(refused.unwrap_err(), refusal);
    // A user may insist.
    bench.begin("e", EvacuationRequest { accept_late: true, ..request });
    let late = standing(&bench);
    assert_eq!(late.judgement, DeadlineJudgement::Late);
    assert!((20..24).contains(&(late.late_by_ns / SECOND)), "{late:?}");
    assert!(bench.has_text("the deadline will be missed by 2"), "{:?}", bench.texts);
    assert!(late.because.contains("VM v2"), "{late:?}");
}

#[test]
fn the_outlook_says_at_the_start_if_it_is_safe() {
    let mut one = bench();
    let request = by(&one, 200);
    let found = one.evacuations.preview(&request, &one.inventory, one.now_ns).unwrap().deadline.unwrap();
    assert_eq!(found.judgement, DeadlineJudgement::Safe);
    assert!(found.needs_ns.low < found.needs_ns.expected && found.needs_ns.expected < found.needs_ns.high);
    one.begin("e", request);
    assert!(one.has_text("the deadline will be kept"), "{:?}", one.texts);
    let mut one = bench();
    let request = by(&one, 60);
    one.begin("e", request);
    assert_eq!(standing(&one).judgement, DeadlineJudgement::AtRisk);
}

#[test]
fn the_outlook_follows_progress_and_failures() {
    let mut bench = bench();
    let request = by(&bench, 100);
    bench.begin("e", request);
    let command = bench.orders["v1"].command.clone();
    let progressed = |bytes_left, bytes_per_s| EvacuationEvent::MoveProgressed {
        command: command.clone(),
        progress: MoveProgress { bytes_left, bytes_per_s, ..MoveProgress::default() },
    };
    // 33 GB at 200 MB/s take 165 s.
    bench.now_ns += 5 * SECOND;
    bench.handle(&progressed(33_000_000_000, 200_000_000));
    bench.tick(0);
    let late = standing(&bench);
    assert_eq!(late.judgement, DeadlineJudgement::Late, "{late:?}");
    assert!(late.because.contains("33000 MB are left, at 200 MB/s"), "{late:?}");
    // It has become faster.
    bench.tick(5);
    bench.handle(&progressed(20_000_000_000, 900_000_000));
    bench.tick(0);
    assert_ne!(standing(&bench).judgement, DeadlineJudgement::Late);
    bench.end("v1", MoveEnd::InDoubt { reason: "cut".to_owned() });
    bench.tick(0);
    let blocked = standing(&bench);
    assert_eq!(blocked.judgement, DeadlineJudgement::Blocked);
    assert!(blocked.because.contains("VM v1 is in doubt"), "{blocked:?}");
}

#[test]
fn moves_that_take_longer_than_forecast_change_the_outlook() {
    let mut bench = bench();
    let request = by(&bench, 120);
    bench.begin("e", request);
    // Twice as long as forecast: the next one is expected to take twice as long, too.
    bench.now_ns += 70 * SECOND;
    bench.end("v1", MoveEnd::Moved);
    bench.tick(0);
    let found = standing(&bench);
    assert!(found.because.contains("2.0 times as long as forecast"), "{found:?}");
    assert!(found.needs_ns.expected > 15 * SECOND, "{found:?}");
}

#[test]
fn a_missed_deadline_is_stated_in_the_outcome() {
    let mut bench = bench();
    let request = by(&bench, 60);
    bench.begin("e", request);
    bench.now_ns += 90 * SECOND;
    bench.tick(0);
    assert_eq!(standing(&bench).judgement, DeadlineJudgement::Late);
    bench.end("v1", MoveEnd::Moved);
    bench.end("v2", MoveEnd::Moved);
    let done = EvacuationOutcome::Done { moved: 2, late_by_ns: Some(30 * SECOND) };
    assert_eq!(*bench.outcome("e"), done);
}
