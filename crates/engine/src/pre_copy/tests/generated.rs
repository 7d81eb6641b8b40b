//! Properties for arbitrary observations: generated rounds.

use proptest::prelude::*;

use super::*;

fn any_observation() -> impl Strategy<Value = RoundObservation> {
    let number = || prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), 0..1_000_000_u64];
    let pages = (number(), number(), number(), number(), number(), number());
    (pages, number(), number(), number(), number(), number()).prop_map(
        |(
            (dirty_pages, full_pages, pages_sent, reduced_pages, remaining_pages, resent_pages),
            bytes_sent,
            duration_ns,
            interval_ns,
            scan_ns,
            elapsed_ns,
        )| RoundObservation {
            pass: 0,
            dirty_pages,
            full_pages,
            pages_sent,
            empty_pages: pages_sent / 5 * (pages_sent % 6),
            reduced_pages,
            remaining_pages,
            remaining_must_precopy_pages: remaining_pages / 3,
            resent_pages,
            bytes_sent,
            duration_ns,
            interval_ns,
            scan_ns,
            elapsed_ns,
            must_precopy_pages: dirty_pages / 3,
        },
    )
}

fn any_policy() -> impl Strategy<Value = PatternPolicy> {
    let number = || prop_oneof![Just(0), Just(u64::MAX), 0..1_000_000_000_u64];
    (number(), 0..60_u32, any::<bool>(), number(), number(), 0..10_u32).prop_map(
        |(max_downtime_ns, max_passes, stop, load_ns, stop_ns, patience)| {
            let on_limit = if stop { OnLimit::Stop } else { OnLimit::Abort };
            let fixed = FixedCost { stop_ns, load_ns, ..FixedCost::default() };
            PatternPolicy::new(
                PreCopyGoals { max_downtime_ns, max_passes, ..PreCopyGoals::default() },
                on_limit,
                fixed,
            )
            .with_patience(patience)
        },
    )
}

/// Feeds observations as rounds 0 (first round incomplete), 1, 2, … until the policy ends the migration.
fn run(policy: impl Into<AnyPolicy>, seen: &[RoundObservation]) -> TracedStopPolicy {
    let mut policy = TracedStopPolicy::new(policy);
    for (n, observed) in (0..).zip(seen) {
        if !matches!(policy.decide(&RoundObservation { pass: n, ..*observed }), Decision::NextRound { .. }) {
            break;
        }
    }
    policy
}

fn decisions(traced: &TracedStopPolicy) -> Vec<Decision> {
    traced.trace().decisions().copied().flatten().collect()
}

proptest! {
    /// For all observations, extreme values included: the migration ends within the limit of rounds, never before all
    /// memory was sent once, and a replay makes the same decisions.
    #[test]
    fn ends_in_time_and_not_too_early(
        policy in any_policy(),
        seen in prop::collection::vec(any_observation(), 62),
    ) {
        let max_passes = policy.current_goals().max_passes;
        let traced = run(policy, &seen);
        let decisions = decisions(&traced);
        let ended = decisions.iter().position(|d| !matches!(d, Decision::NextRound { .. }));
        prop_assert!(ended.is_some(), "{decisions:?}");
        let ended = ended.unwrap_or_default();
        prop_assert!(ended >= 1);
        prop_assert!(ended as u32 <= max_passes.max(1));
        prop_assert_eq!(&traced.trace().replay(), traced.trace());
    }

    /// For all observations: the other rules end by their counters, none before the passes that they require, and a
    /// replay makes the same decisions.
    #[test]
    fn other_rules_end_by_what_they_count(
        (max_downtime_ns, max_passes, passes) in (0..1_000_000_000_u64, 0..40_u32, 0..10_u32),
        seen in prop::collection::vec(any_observation(), 62),
    ) {
        let goals = PreCopyGoals { max_downtime_ns, max_passes, ..PreCopyGoals::default() };
        let rules: [(AnyPolicy, u32, u32); 3] = [
            (TargetPolicy::new(goals, OnLimit::Stop).into(), 1, max_passes.max(1)),
            (RoundCountPolicy::default().into(), 1, RoundCountPolicy::MAX_PASSES),
            (HybridPolicy::new(goals, passes, FixedCost::default()).into(), passes, passes),
        ];
        for (policy, least, most) in rules {
            let traced = run(policy, &seen);
            let decisions = decisions(&traced);
            // Remaining pages of disks are sent before post-copy starts.
            let is_of_memory = |d: &&Decision| matches!(d, Decision::NextRound { must_precopy_only: false, .. });
            let rounds = decisions.iter().filter(is_of_memory).count() as u32;
            prop_assert!((least..=most).contains(&rounds), "{decisions:?}");
            let has_ended = !matches!(decisions.last(), Some(Decision::NextRound { must_precopy_only: false, .. }));
            prop_assert!(has_ended, "{decisions:?}");
            prop_assert_eq!(&traced.trace().replay(), traced.trace());
        }
    }

    /// For all observations: no way continues when the time is over, none begins before all memory was sent once, and
    /// a replay makes the same decisions.
    #[test]
    fn limits_of_time_are_kept(
        (max_downtime_ns, max_total_ns) in (0..1_000_000_000_u64, 0..100_000_000_000_u64),
        (slow_down, post_copy, way_out) in (any::<bool>(), any::<bool>(), 0..3_u8),
        seen in prop::collection::vec(any_observation(), 20),
    ) {
        let on_limit = [OnLimit::Stop, OnLimit::PostCopy, OnLimit::Abort][usize::from(way_out)];
        let goals = PreCopyGoals { max_downtime_ns, max_total_ns: Some(max_total_ns), ..PreCopyGoals::default() };
        let traced =
            run(SlaPolicy::new(goals, AvailableStrategies { slow_down, post_copy }, on_limit, FixedCost::default()), &seen);
        let decisions = decisions(&traced);
        for (index, (observed, decision)) in seen.iter().zip(&decisions).enumerate() {
            let goes_on = matches!(decision, Decision::NextRound { .. });
            let is_late = matches!(decision, Decision::GiveUp { .. }) && observed.elapsed_ns > max_total_ns;
            prop_assert!(goes_on || index > 0 || is_late, "{decision:?} before all of memory was sent");
            // Remaining pages of disks are sent before post-copy starts.
            let is_of_disks = matches!(decision, Decision::NextRound { must_precopy_only: true, .. });
            let is_late = index > 0 && !is_of_disks && observed.elapsed_ns > max_total_ns;
            prop_assert!(!goes_on || !is_late, "{observed:?}");
            let slows = matches!(decision, Decision::NextRound { slow: true, .. });
            let posts = matches!(decision, Decision::PostCopy { .. });
            prop_assert!(slow_down || !slows);
            prop_assert!(post_copy || !posts || on_limit == OnLimit::PostCopy);
        }
        prop_assert_eq!(&traced.trace().replay(), traced.trace());
    }

    /// More dirty pages never make the expected downtime shorter.
    #[test]
    fn expected_downtime_grows_with_dirty_pages(
        policy in any_policy(),
        seen in prop::collection::vec(any_observation(), 0..8),
        last in any_observation(),
        more in any::<u64>(),
    ) {
        let mut policy = policy;
        for observed in &seen {
            policy.decide(observed);
        }
        let fewer = RoundObservation { dirty_pages: last.dirty_pages.min(more), ..last };
        let many = RoundObservation { dirty_pages: last.dirty_pages.max(more), ..last };
        prop_assert!(expected(policy.clone().decide(&fewer)) <= expected(policy.decide(&many)));
    }

    /// A guest whose dirty rate is a fixed share of the link's rate converges, and the objective holds when it does.
    #[test]
    fn a_guest_that_converges_is_moved(
        pages in 1_000..1_000_000_u64,
        percent_dirty in 0..80_u64,
        pages_per_ms in 10..1000_u64,
    ) {
        let mut policy = policy(30, 60, OnLimit::Abort);
        let mut left = pages;
        for n in 1..=60 {
            let duration_ns = (left * 1_000_000).div_ceil(pages_per_ms).max(1);
            let dirty = left * percent_dirty / 100;
            let observed = RoundObservation { duration_ns, ..observation(n, dirty, left, 0) };
            match policy.decide(&observed) {
                Decision::NextRound { .. } => left = dirty,
                Decision::StopAndCopy { expected_downtime_ns, .. } => {
                    prop_assert!(expected_downtime_ns <= 30_000_000);
                    return Ok(());
                }
                Decision::GiveUp { reason } => prop_assert!(false, "{reason}"),
                Decision::PostCopy { .. } => prop_assert!(false, "nobody asked for it"),
            }
        }
        prop_assert!(false, "no end");
    }
}
