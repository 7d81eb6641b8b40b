use super::*;
use crate::pre_copy::{AnyPolicy, FixedCost, HybridPolicy, Limit, OnLimit, PatternPolicy, PolicyEvent};

const OPEN: RoundContext = RoundContext { has_control: true, has_deferred: false, has_discarded: false };
const CUT: RoundContext = RoundContext { has_control: false, ..OPEN };
const DEFERRED: RoundContext = RoundContext { has_deferred: true, ..OPEN };
const DISCARDED: RoundContext = RoundContext { has_discarded: true, ..OPEN };

/// Number of pages for which the guest is stopped.
const FEW: u64 = 100;
const MANY: u64 = 1 << 30;

fn hybrid(passes: u32) -> TracedStopPolicy {
    TracedStopPolicy::new(HybridPolicy::new(PreCopyGoals::default(), passes, FixedCost::default()))
}

/// A round in which a page takes a microsecond.
fn whole_round() -> SentRound {
    SentRound { pages_sent: 1_000_000, duration_ns: 1_000_000_000, ..SentRound::default() }
}

fn scan(dirty_pages: u64) -> ScanResult {
    ScanResult { dirty_pages, ..ScanResult::default() }
}

/// Returns rounds of which one was sent, and after which a scan found these pages.
fn rounds_after(passes: u32, scan: ScanResult) -> Rounds {
    let mut rounds = Rounds::new(hybrid(passes));
    rounds.end_first_pass();
    assert_eq!(rounds.scanned(|| unreachable!("there was no round")), None);
    assert_eq!(rounds.next_step(OPEN), RoundStep::Send);
    assert_eq!(rounds.select_pages(1_000_000, 1), PageSelection::All);
    rounds.sent(whole_round(), false);
    assert!(rounds.scanned(|| scan).is_some());
    rounds
}

/// Returns the steps until the scan is used.
fn steps(rounds: &mut Rounds, facts: RoundContext) -> Vec<RoundStep> {
    let mut steps = Vec::new();
    loop {
        let step = rounds.next_step(facts);
        steps.push(step);
        if !matches!(step, RoundStep::Discard | RoundStep::CheckControl) {
            return steps;
        }
    }
}

fn is_stop(step: Option<&RoundStep>, expected: SwitchoverKind) -> bool {
    matches!(step, Some(RoundStep::Stop { ending, .. }) if *ending == expected)
}

#[test]
fn without_a_round_before_the_scan_nothing_is_decided() {
    let mut rounds = Rounds::new(hybrid(0));
    for _ in 0..2 {
        assert_eq!(rounds.scanned(|| unreachable!("there was no round")), None);
        assert_eq!(steps(&mut rounds, CUT), [RoundStep::Send]);
        rounds.cut();
    }
    assert!(rounds.is_first());
    let frees =
        |event: &PolicyEvent| *event == PolicyEvent::ThrottleChanged { change: ThrottleChange::Lifted };
    let observed = rounds.policy().trace().entries.iter().map(|entry| entry.observed);
    assert_eq!(observed.filter(frees).count(), 2);
}

#[test]
fn a_round_follows_as_long_as_the_policy_wants_one() {
    let mut rounds = rounds_after(5, scan(MANY));
    assert_eq!(steps(&mut rounds, OPEN), [RoundStep::Send]);
    assert!(!rounds.is_first());
    assert_eq!(rounds.passes(), 2);
}

#[test]
fn few_pages_stop_the_guest_once_notices_are_handled() {
    let mut rounds = rounds_after(1, scan(FEW));
    let steps = steps(&mut rounds, OPEN);
    assert_eq!(steps[0], RoundStep::CheckControl);
    assert!(is_stop(steps.get(1), SwitchoverKind::StopAndCopy), "{steps:?}");
}

#[test]
fn many_pages_are_discarded_before_post_copy() {
    let mut rounds = rounds_after(1, scan(MANY));
    // Pages that were written since the last discard remain.
    let steps = steps(&mut rounds, DISCARDED);
    assert_eq!(steps[..2], [RoundStep::CheckControl, RoundStep::Discard]);
    assert!(is_stop(steps.get(2), SwitchoverKind::PostCopy), "{steps:?}");
}

#[test]
fn guest_is_not_stopped_while_the_link_is_cut() {
    for dirty in [FEW, MANY] {
        let mut rounds = rounds_after(1, scan(dirty));
        assert_eq!(steps(&mut rounds, CUT).last(), Some(&RoundStep::Send));
        // Nothing was sent since then, so nothing is decided from it.
        rounds.cut();
        assert_eq!(rounds.scanned(|| unreachable!("there was no round")), None);
        assert_eq!(steps(&mut rounds, OPEN), [RoundStep::Send]);
        assert_eq!(rounds.select_pages(dirty, 1), PageSelection::All);
    }
}

/// The control stream may be lost at each of the steps between the decision and the stop.
#[test]
fn control_stream_that_is_lost_late_prevents_the_stop() {
    let mut rounds = rounds_after(1, scan(MANY));
    assert_eq!(rounds.next_step(OPEN), RoundStep::CheckControl);
    assert_eq!(rounds.next_step(OPEN), RoundStep::Discard);
    assert_eq!(rounds.next_step(CUT), RoundStep::Send);
    let mut rounds = rounds_after(1, scan(FEW));
    assert_eq!(rounds.next_step(OPEN), RoundStep::CheckControl);
    assert_eq!(rounds.next_step(CUT), RoundStep::Send);
}

#[test]
fn deferred_memory_is_taken_back_before_any_stop() {
    for dirty in [FEW, MANY] {
        let mut rounds = rounds_after(1, scan(dirty));
        assert_eq!(rounds.next_step(DEFERRED), RoundStep::ReclaimDeferred);
        // Until that is reported, nothing else follows.
        assert_eq!(rounds.next_step(DEFERRED), RoundStep::ReclaimDeferred);
        rounds.deferred_reclaimed(hybrid(1));
        assert_eq!(rounds.next_step(OPEN), RoundStep::SendReclaimed);
        // No policy learns of that round.
        assert_eq!(rounds.scanned(|| unreachable!("no round is observed")), None);
        assert_eq!(rounds.next_step(OPEN), RoundStep::Send);
        assert!(rounds.policy().trace().entries.is_empty());
        assert_eq!(rounds.passes(), 2, "the passes are counted on");
    }
}

/// Deferred memory does not matter as long as rounds follow.
#[test]
fn deferred_memory_stays_deferred_during_rounds() {
    let mut rounds = rounds_after(5, scan(MANY));
    assert_eq!(steps(&mut rounds, DEFERRED), [RoundStep::Send]);
}

#[test]
fn memory_is_discarded_once_before_rounds_of_disks_alone() {
    let disks = ScanResult { must_precopy_pages: MANY / 2, ..scan(MANY) };
    let mut rounds = rounds_after(1, disks);
    assert!(rounds.sends_must_precopy_only());
    assert_eq!(steps(&mut rounds, OPEN), [RoundStep::Discard, RoundStep::Send]);
    assert_eq!(rounds.select_pages(MANY, 1), PageSelection::MustPreCopy);
    let mut again = rounds_after(1, disks);
    assert_eq!(steps(&mut again, DISCARDED), [RoundStep::Send]);
}

#[test]
fn a_policy_that_gives_up_ends_the_rounds() {
    let goals = PreCopyGoals { max_downtime_ns: 1, max_passes: 1, max_total_ns: None };
    let policy = PatternPolicy::new(goals, OnLimit::Abort, FixedCost::default());
    let mut rounds = Rounds::new(TracedStopPolicy::new(policy));
    rounds.end_first_pass();
    rounds.sent(whole_round(), true);
    let decided = rounds.scanned(|| ScanResult { goals, ..scan(MANY) }).unwrap();
    assert!(matches!(decided.decision, Decision::GiveUp { .. }), "{decided:?}");
    assert_eq!(decided.demand, None);
    let RoundStep::GiveUp { reason } = rounds.next_step(CUT) else { panic!("it goes on") };
    assert_eq!(reason.limit, Limit::Passes);
}

#[test]
fn goals_and_demands_reach_policy_and_throttle() {
    let mut rounds = Rounds::new(hybrid(5));
    rounds.end_first_pass();
    rounds.sent(whole_round(), true);
    let goals = PreCopyGoals { max_downtime_ns: 77, ..PreCopyGoals::default() };
    let decided = rounds.scanned(|| ScanResult { goals, is_throttle_requested: true, ..scan(MANY) }).unwrap();
    let demand = decided.demand.unwrap();
    assert_eq!((demand.is_chosen, demand.is_requested), (false, true));
    assert_eq!((demand.passes, demand.max_downtime_ns), (2, 77));
    let first = &rounds.policy().trace().entries[0];
    assert_eq!(first.observed, PolicyEvent::Goals(goals));
}

#[test]
fn observation_covers_round_scan_and_interval() {
    let at = |ms| Time::since_origin(Duration::from_millis(ms));
    let sent = SentRound {
        scanned_at: at(5),
        pages_sent: 1,
        empty_pages: 2,
        reduced_pages: 3,
        remaining_pages: 4,
        remaining_must_precopy_pages: 5,
        resent_pages: 6,
        bytes_sent: 7,
        duration_ns: 8,
    };
    let scan = ScanResult {
        scanned_at: at(25),
        scan_ns: 9,
        dirty_pages: 10,
        full_pages: 11,
        must_precopy_pages: 12,
        elapsed: Duration::from_nanos(13),
        ..ScanResult::default()
    };
    let expected = RoundObservation {
        pass: 14,
        dirty_pages: 10,
        full_pages: 11,
        pages_sent: 1,
        empty_pages: 2,
        reduced_pages: 3,
        remaining_pages: 4,
        remaining_must_precopy_pages: 5,
        resent_pages: 6,
        bytes_sent: 7,
        duration_ns: 8,
        interval_ns: 20_000_000,
        scan_ns: 9,
        elapsed_ns: 13,
        must_precopy_pages: 12,
    };
    assert_eq!(observe(&sent, &scan, 14), expected);
}

#[test]
fn first_pass_and_post_copy_need_the_written_pages() {
    let mut rounds = Rounds::new(hybrid(1));
    assert!(rounds.needs_written_pages(false));
    rounds.end_first_pass();
    assert!(!rounds.needs_written_pages(false));
    assert!(rounds.needs_written_pages(true));
    assert!(!rounds.has_sent_all());
    rounds.select_pages(1, 1);
    rounds.sent(whole_round(), true);
    assert!(rounds.has_sent_all());
}

#[test]
fn a_changed_strategy_is_reported_once() {
    use crate::pre_copy::{AvailableStrategies, SlaPolicy};

    let (ways, goals) = (AvailableStrategies { slow_down: false, post_copy: false }, PreCopyGoals::default());
    let policy: AnyPolicy = SlaPolicy::new(goals, ways, OnLimit::Stop, FixedCost::default()).into();
    let mut rounds = Rounds::new(TracedStopPolicy::new(policy));
    rounds.end_first_pass();
    let mut outlooks = 0;
    for _ in 0..2 {
        rounds.select_pages(MANY, 1);
        rounds.sent(whole_round(), true);
        let decided = rounds.scanned(|| ScanResult { goals, ..scan(900_000) }).unwrap();
        outlooks += u32::from(decided.new_outlook.is_some());
    }
    assert_eq!(outlooks, 1);
}
