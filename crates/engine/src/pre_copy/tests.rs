use proto::limits::PAGE_BYTES;

use super::*;

mod generated;

pub(super) fn observation(
    pass: u32,
    dirty_pages: u64,
    pages_sent: u64,
    duration_ms: u64,
) -> RoundObservation {
    RoundObservation {
        pass,
        dirty_pages,
        full_pages: dirty_pages,
        pages_sent,
        empty_pages: 0,
        reduced_pages: 0,
        remaining_pages: 0,
        remaining_must_precopy_pages: 0,
        resent_pages: 0,
        bytes_sent: pages_sent * PAGE_BYTES,
        duration_ns: duration_ms * 1_000_000,
        interval_ns: duration_ms * 1_000_000,
        scan_ns: 0,
        elapsed_ns: 0,
        must_precopy_pages: 0,
    }
}

fn free() -> FixedCost {
    FixedCost { stop_ns: 0, save_ns: 0, load_ns: 0, continue_ns: 0 }
}

pub(super) fn policy(max_downtime_ms: u64, max_passes: u32, on_limit: OnLimit) -> PatternPolicy {
    PatternPolicy::new(
        PreCopyGoals { max_downtime_ns: max_downtime_ms * 1_000_000, max_passes, ..PreCopyGoals::default() },
        on_limit,
        free(),
    )
}

fn expected(decision: Decision) -> u64 {
    match decision {
        Decision::NextRound { expected_downtime_ns, .. }
        | Decision::StopAndCopy { expected_downtime_ns, .. }
        | Decision::PostCopy { expected_downtime_ns } => expected_downtime_ns,
        Decision::GiveUp { reason } => reason.expected_downtime_ns,
    }
}

/// Rounds of deltas are quick. Unknown pages are not.
#[test]
fn full_pages_are_expected_to_take_as_long_as_before() {
    const MS: u64 = 1_000_000;
    let mut policy = policy(300, 30, OnLimit::Abort);
    // 32 pages in a millisecond.
    assert_eq!(expected(policy.decide(&observation(1, 32_000, 320_000, 10_000))), 1_000 * MS);
    let changes = |number, full_pages| RoundObservation {
        full_pages,
        reduced_pages: 32_000,
        bytes_sent: 32_000 * 90,
        ..observation(number, 32_000, 32_000, 50)
    };
    // All pages are known: as quick as the last round.
    let now = expected(policy.decide(&RoundObservation { full_pages: 0, ..changes(2, 0) }));
    assert!(now > 300 * MS, "the mean has not forgotten the first round");
    for number in 3..12 {
        policy.decide(&changes(number, 0));
    }
    assert!(expected(policy.decide(&changes(12, 0))) < 100 * MS);
    // Half of the pages were written for the first time.
    assert_eq!(expected(policy.decide(&changes(13, 16_000))), 500 * MS);
}

/// A first round of a guest whose memory is mostly on its disks is no measure of the link.
#[test]
fn references_of_the_first_round_do_not_make_the_link_quicker() {
    const MS: u64 = 1_000_000;
    let mut policy = policy(300, 30, OnLimit::Abort);
    // A tenth of the pages was sent in full, in a second, in which ten times as many pages were finished.
    let first = observation(1, 10_000, 100_000, 1_000);
    let first = RoundObservation { reduced_pages: 90_000, full_pages: 10_000, ..first };
    assert_eq!(expected(policy.decide(&first)), 1_000 * MS);
    // The first round with mostly full pages counts from here on.
    let second = RoundObservation { full_pages: 1_000, ..observation(2, 1_000, 20_000, 1_000) };
    assert_eq!(expected(policy.decide(&second)), 60 * MS);
}

/// One bad moment does not keep the objective out of reach, also if nothing else was measured yet.
#[test]
fn the_fixed_cost_is_the_best_of_the_last_migrations() {
    let mut history = CostHistory::default();
    let guess = FixedCost::default();
    assert_eq!(history.estimate(), guess);
    history.learn(FixedCost { stop_ns: 70_000_000, load_ns: 3, ..guess });
    assert_eq!(history.estimate(), FixedCost { load_ns: 3, ..guess });
    history.learn(FixedCost { stop_ns: 1, load_ns: 9, ..guess });
    assert_eq!(history.estimate(), FixedCost { stop_ns: 1, load_ns: 3, ..guess });
    history.forget();
    for stop_ns in [70_000_000, 60_000_000] {
        history.learn(FixedCost { stop_ns, ..guess });
    }
    assert_eq!(history.estimate(), FixedCost { stop_ns: 60_000_000, ..guess });
    // A host that has become slow is believed after a while.
    let slow =
        FixedCost { stop_ns: 50_000_000, save_ns: 50_000_000, load_ns: 50_000_000, continue_ns: 50_000_000 };
    for _ in 0..4 {
        history.learn(slow);
    }
    assert_eq!(history.estimate(), slow);
    history.forget();
    assert_eq!(history.estimate(), guess);
}

/// Algorithm 1 of the paper, where neither limits nor a fixed part matter, the rate does not change, and another round
/// would be no shorter.
#[test]
fn agrees_with_kvm_s_rule_at_a_steady_rate() {
    let mut policy = policy(30, 100, OnLimit::Abort);
    // 1000 pages in 10 ms, round after round: 100 pages take 1 ms.
    for (n, dirty) in [(1, 100_000), (2, 30_000), (3, 9_000), (4, 3_001)] {
        let decision = policy.decide(&observation(n, dirty, 1000 * u64::from(n), 10 * u64::from(n)));
        assert!(matches!(decision, Decision::NextRound { .. }));
        assert_eq!(expected(decision), dirty * 10_000);
    }
    let decision = policy.decide(&observation(5, 3_000, 3_000, 30));
    assert!(matches!(decision, Decision::StopAndCopy { expected_downtime_ns: 30_000_000, .. }));
}

/// Returns the number of rounds until the stop, and the expected downtime, where 10 pages are sent and `dirty_per_ms`
/// are written in a millisecond.
fn rounds_and_expected(fixed: FixedCost, max_passes: u32, dirty_per_ms: u64) -> (u32, u64) {
    let goals = PreCopyGoals { max_downtime_ns: 300_000_000, max_passes, ..PreCopyGoals::default() };
    let mut policy = PatternPolicy::new(goals, OnLimit::Abort, fixed);
    let (mut n, mut left) = (1, 10_000);
    loop {
        let duration_ms = left / 10;
        let observed = observation(n, dirty_per_ms * duration_ms, left, duration_ms);
        match policy.decide(&observed) {
            Decision::NextRound { .. } => (n, left) = (n + 1, observed.dirty_pages),
            Decision::StopAndCopy { expected_downtime_ns, .. } => {
                return (n, expected_downtime_ns / 1_000_000);
            }
            Decision::GiveUp { reason } => panic!("{reason}"),
            Decision::PostCopy { .. } => panic!("nobody asked for it"),
        }
    }
}

#[test]
fn within_the_limit_rounds_go_on_while_they_are_worth_it() {
    let fixed = FixedCost { load_ns: 20_000_000, ..free() };
    // 1000 ms, then 200, 40, 8: the pages that remain after the third round take 8 ms, and the next would save 6 of
    // 28.
    assert_eq!(rounds_and_expected(fixed, 30, 2), (4, 21));
    // Without a fixed part rounds continue until no page remains.
    assert_eq!(rounds_and_expected(free(), 30, 2), (6, 0));
    // Rounds have a limit.
    assert_eq!(rounds_and_expected(fixed, 2, 2), (2, 60));
    // Nine of ten pages are written again: only the limit can be kept.
    assert_eq!(rounds_and_expected(free(), 30, 9), (12, 280));
}

/// A working set that is written again and again remains after every round, however short it is.
#[test]
fn within_the_limit_a_round_that_left_no_less_is_the_last() {
    let mut policy = policy(300, 30, OnLimit::Abort);
    assert!(matches!(policy.decide(&observation(1, 500, 100_000, 1000)), Decision::NextRound { .. }));
    assert!(matches!(policy.decide(&observation(2, 499, 500, 5)), Decision::StopAndCopy { .. }));
}

/// The time that a round takes beside sending does not fall with the number of pages.
#[test]
fn the_time_between_rounds_counts() {
    let decide = |interval_ms: u64| {
        let observed =
            RoundObservation { interval_ns: interval_ms * 1_000_000, ..observation(1, 500, 1000, 10) };
        policy(300, 30, OnLimit::Abort).decide(&observed)
    };
    assert!(matches!(decide(10), Decision::NextRound { .. }));
    assert!(matches!(decide(60), Decision::StopAndCopy { .. }));
}

/// The device state is saved while the last pages are sent.
#[test]
fn saving_counts_where_it_takes_longer_than_the_last_pages() {
    let fixed = FixedCost { save_ns: 5_000_000, ..free() };
    let decide = |dirty| {
        expected(
            PatternPolicy::new(PreCopyGoals::default(), OnLimit::Abort, fixed)
                .decide(&observation(1, dirty, 1000, 10)),
        )
    };
    assert_eq!((decide(0), decide(400), decide(600)), (5_000_000, 5_000_000, 6_000_000));
}

#[test]
fn the_fixed_part_counts() {
    let goals = PreCopyGoals::default();
    let fixed = FixedCost { load_ns: goals.max_downtime_ns, ..free() };
    let decide =
        |fixed| PatternPolicy::new(goals, OnLimit::Abort, fixed).decide(&observation(1, 1000, 1000, 10));
    assert!(matches!(decide(free()), Decision::StopAndCopy { .. }));
    assert!(matches!(decide(fixed), Decision::NextRound { .. }));
}

#[test]
fn a_round_into_buffers_does_not_deceive() {
    let mut policy = policy(30, 100, OnLimit::Abort);
    policy.decide(&observation(1, 20_000, 100_000, 1000));
    // The second round seems a hundred times as fast. At the first one's rate 20,000 pages take 200 ms.
    let decision = policy.decide(&observation(2, 20_000, 20_000, 2));
    assert!(expected(decision) > 30_000_000, "{decision:?}");
    assert!(matches!(decision, Decision::NextRound { .. }));
}

#[test]
fn a_link_that_became_slow_is_believed_at_once() {
    let mut policy = policy(30, 100, OnLimit::Abort);
    policy.decide(&observation(1, 20_000, 1_000_000, 1000));
    let decision = policy.decide(&observation(2, 10_000, 20_000, 2000));
    assert_eq!(expected(decision), 1_000_000_000);
}

#[test]
fn limits() {
    let mut stop = policy(1, 3, OnLimit::Stop);
    let mut abort = policy(1, 3, OnLimit::Abort);
    for n in 1..3 {
        let observed = observation(n, 90_000 / u64::from(n), 1000, 100);
        assert!(matches!(stop.decide(&observed), Decision::NextRound { .. }));
        assert!(matches!(abort.decide(&observed), Decision::NextRound { .. }));
    }
    let last = observation(3, 10_000, 1000, 100);
    assert!(matches!(stop.decide(&last), Decision::StopAndCopy { expected_downtime_ns: 1_000_000_000, .. }));
    let Decision::GiveUp { reason } = abort.decide(&last) else { panic!("no limit") };
    assert_eq!(reason.limit, Limit::Passes);
    assert!(
        reason
            .to_string()
            .contains("about 1000.0 ms (0.0 of them regardless of the remaining pages) and 1.0 ms are"),
        "{reason}"
    );
    let unknown = GiveUp { expected_downtime_ns: u64::MAX, ..reason };
    assert!(unknown.to_string().contains("not known yet and 1.0 ms are allowed"), "{unknown}");
}

#[test]
fn rounds_that_do_not_shrink_end_it() {
    let mut policy = policy(1, 1000, OnLimit::Abort).with_patience(3);
    let decisions: Vec<_> =
        (1..=5).map(|n| policy.decide(&observation(n, 10_000 - u64::from(n), 10_000, 100))).collect();
    assert!(decisions[..3].iter().all(|d| matches!(d, Decision::NextRound { .. })), "{decisions:?}");
    assert!(
        matches!(decisions[3], Decision::GiveUp { reason: GiveUp { limit: Limit::NotShrinking, .. } }),
        "{decisions:?}"
    );
}

#[test]
fn a_changed_aim_holds_at_once_and_is_in_the_trace() {
    let mut policy = TracedStopPolicy::new(policy(1, 100, OnLimit::Abort));
    let observed = |n| observation(n, 1000, 10_000, 100);
    assert!(matches!(policy.decide(&observed(1)), Decision::NextRound { .. }));
    let goals = PreCopyGoals { max_downtime_ns: 10_000_000, max_passes: 100, ..PreCopyGoals::default() };
    policy.set_goals(goals);
    policy.set_goals(goals);
    assert!(matches!(policy.decide(&observed(2)), Decision::StopAndCopy { .. }));
    assert_eq!(policy.trace().entries.len(), 3);
    let text = serde_json::to_string(policy.trace()).unwrap();
    let read: StopTrace = serde_json::from_str(&text).unwrap();
    assert_eq!(read.replay(), *policy.trace());
}

/// All policies make the same decisions in a replay, whatever they observe.
#[test]
fn every_policy_can_be_replayed() {
    let goals = PreCopyGoals { max_downtime_ns: 30_000_000, max_passes: 5, ..PreCopyGoals::default() };
    let ways = AvailableStrategies { slow_down: true, post_copy: true };
    let policies: [AnyPolicy; 5] = [
        HybridPolicy::new(goals, 4, free()).into(),
        SlaPolicy::new(goals, ways, OnLimit::Abort, free()).into(),
        PatternPolicy::new(goals, OnLimit::Stop, free()).into(),
        TargetPolicy::new(goals, OnLimit::Abort).into(),
        RoundCountPolicy::default().into(),
    ];
    for policy in policies {
        let mut traced = TracedStopPolicy::new(policy);
        for (n, dirty) in
            [(0, 90_000), (1, 50_000), (1, 30_000), (2, 9_000), (3, 100_000), (5, 90_000), (6, 10)]
        {
            traced.decide(&RoundObservation {
                remaining_pages: dirty / 3,
                ..observation(n, dirty, 100_000, 1000)
            });
        }
        let text = serde_json::to_string(traced.trace()).unwrap();
        let read: StopTrace = serde_json::from_str(&text).unwrap();
        assert_eq!((&read.replay(), &read), (traced.trace(), traced.trace()), "{text}");
    }
}

/// 2 GiB with data in 16 GiB, at 32,768 pages a second; checking an empty page takes a hundredth of that.
#[test]
fn pages_of_zeros_say_nothing_of_the_link() {
    let mut forecast = forecast::Forecast::default();
    let (all, data) = (1_u64 << 22, 1_u64 << 19);
    let duration_ns = data * 30_518 + (all - data) * 305;
    let first = RoundObservation { empty_pages: all - data, duration_ns, ..observation(1, 32_768, all, 0) };
    forecast.learn(&first);
    let expected_ns = forecast.pages_ns(&first);
    assert!((900_000_000..1_200_000_000).contains(&expected_ns), "{expected_ns}");
    // A part with nothing else has no information, and changes nothing.
    let empty = RoundObservation { empty_pages: all, ..observation(1, 32_768, all, 1_000) };
    forecast.learn(&empty);
    assert_eq!(forecast.pages_ns(&empty), expected_ns);
    assert_eq!(forecast::Forecast::default().pages_ns(&empty), u64::MAX);
}

#[test]
fn what_is_seen_of_memory_is_without_what_waits_of_disks() {
    let seen = RoundObservation {
        must_precopy_pages: 900,
        remaining_pages: 1_000,
        remaining_must_precopy_pages: 800,
        ..observation(2, 1_500, 10_000, 1_000)
    };
    assert_eq!(seen.dirty_rate_bytes_per_s(), 500 * PAGE_BYTES);
    assert_eq!(seen.without_must_precopy().dirty_rate_bytes_per_s(), 400 * PAGE_BYTES);
}

/// The throttle slows writes to disks down, not those to memory.
#[test]
fn rounds_make_progress_while_the_disk_throttle_acts() {
    let decided = |must_precopy_pages| {
        let mut policy = policy(1, 1_000, OnLimit::Abort).with_write_throttle();
        let looks = (1..200)
            .map(|n| RoundObservation { must_precopy_pages, ..observation(n, 100_000, 100_000, 1_000) });
        looks.map(|look| policy.decide(&look)).find(|next| matches!(next, Decision::GiveUp { .. }))
    };
    assert_eq!(decided(60_000), None);
    let Some(Decision::GiveUp { reason }) = decided(40_000) else { panic!("it goes on for ever") };
    assert_eq!(reason.limit, Limit::NotShrinking);
}

/// A policy that recognizes pattern c has to observe the pages that were sent again.
#[test]
fn pattern_c_policies_observe_resent_pages() {
    let (goals, ways) = (PreCopyGoals::default(), AvailableStrategies { slow_down: false, post_copy: false });
    let resent =
        |n| RoundObservation { resent_pages: 900, remaining_pages: 10, ..observation(n, 900, 1000, 100) };
    let policies: [AnyPolicy; 2] = [
        PatternPolicy::new(goals, OnLimit::Abort, free()).into(),
        SlaPolicy::new(goals, ways, OnLimit::Abort, free()).into(),
    ];
    for policy in policies {
        let mut traced = TracedStopPolicy::new(policy);
        let seen: Vec<_> = (1..=3).map(|n| traced.decide(&resent(n))).collect();
        let is_named = seen
            .iter()
            .any(|decision| matches!(decision, Decision::StopAndCopy { pattern: Some(Pattern::Resent), .. }));
        assert!(is_named && traced.has_history(), "{seen:?}");
    }
}
