use proto::limits::PAGE_BYTES;

use super::*;

const MS: u64 = 1_000_000;
const ALL: AvailableStrategies = AvailableStrategies { slow_down: true, post_copy: true };
const NOTHING: AvailableStrategies = AvailableStrategies { slow_down: false, post_copy: false };

/// A guest of 200,000 pages, on a link that carries 100 of them in a millisecond.
#[derive(Clone, Copy)]
struct Writer {
    /// Number of pages in its working set, which it writes one after the other.
    own_pages: u64,
    /// Pages that it writes in a millisecond, while it is not slowed down.
    pages_per_ms: u64,
}

const PAGES: u64 = 200_000;
const SENT_PER_MS: u64 = 100;

/// Simulates a migration. Returns the last decision, its time, and whether the guest was slowed down. As in the agent,
/// pages that are written wait until the others have been sent, and are sent in parts after that.
fn moved(writer: Writer, policy: SlaPolicy) -> (Decision, u64, bool) {
    let mut policy = policy;
    let own = writer.own_pages as f64;
    let (mut pass, mut cold, mut hot, mut elapsed_ms) = (0, PAGES, own, 0);
    let (mut slow, mut was_slow, mut most_pages) = (false, false, None);
    loop {
        let is_first = cold > 0;
        let sent =
            if is_first { cold.min(50_000) } else { most_pages.unwrap_or(u64::MAX).min(hot as u64).max(1) };
        let ms = (sent / SENT_PER_MS).max(1);
        let rate = if slow { writer.pages_per_ms.min(SENT_PER_MS / 2) } else { writer.pages_per_ms };
        // Random pages: all clean ones, and the ones that were sent, for half of the time.
        let written = |pages: f64, ms: f64| pages * (1.0 - (-(rate as f64) * ms / own).exp());
        let came = if is_first {
            // Written pages leave the part that is sent first.
            0.0
        } else {
            written((own - hot).max(0.0), ms as f64) + written(sent as f64, ms as f64 / 2.0)
        };
        let left = if is_first { hot } else { (hot - sent as f64).max(0.0) };
        hot = (left + came).min(own);
        cold -= if is_first { sent } else { 0 };
        elapsed_ms += ms;
        pass += u32::from(cold == 0 && (is_first || left < 1.0));
        let observed = RoundObservation {
            pass: pass.max(u32::from(cold == 0)),
            dirty_pages: hot as u64 + cold,
            full_pages: hot as u64 + cold,
            pages_sent: sent,
            remaining_pages: left as u64 + cold,
            bytes_sent: sent * PAGE_BYTES,
            duration_ns: ms * MS,
            interval_ns: ms * MS,
            elapsed_ns: elapsed_ms * MS,
            ..RoundObservation::default()
        };
        match policy.decide(&observed) {
            Decision::NextRound { most_pages: most, slow: is_slow, .. } => {
                most_pages = most;
                if is_slow && !slow {
                    policy.throttle_changed(ThrottleChange::Slower);
                }
                slow = is_slow;
                was_slow |= slow;
            }
            end => return (end, elapsed_ms, was_slow),
        }
        assert!(elapsed_ms < 1_000_000, "it goes on for ever");
    }
}

fn sla(max_downtime_ms: u64, max_total_ms: u64, ways: AvailableStrategies, on_limit: OnLimit) -> SlaPolicy {
    let max_total_ns = Some(max_total_ms * MS);
    let goals =
        PreCopyGoals { max_downtime_ns: max_downtime_ms * MS, max_total_ns, ..PreCopyGoals::default() };
    SlaPolicy::new(goals, ways, on_limit, FixedCost::default())
}

const CALM: Writer = Writer { own_pages: 100_000, pages_per_ms: 20 };
const FAST: Writer = Writer { own_pages: 100_000, pages_per_ms: 150 };

#[test]
fn a_calm_guest_goes_by_rounds() {
    let (end, ms, was_slow) = moved(CALM, sla(100, 10_000, ALL, OnLimit::Abort));
    assert!(
        matches!(end, Decision::StopAndCopy { expected_downtime_ns, .. } if expected_downtime_ns <= 100 * MS)
    );
    assert!(!was_slow && ms <= 10_000, "{end:?} after {ms}");
}

#[test]
fn a_fast_writer_is_throttled_where_there_is_time() {
    let (end, ms, was_slow) = moved(FAST, sla(100, 20_000, ALL, OnLimit::Abort));
    assert!(
        matches!(end, Decision::StopAndCopy { expected_downtime_ns, .. } if expected_downtime_ns <= 100 * MS)
    );
    assert!(was_slow && ms <= 20_000, "{end:?} after {ms}");
}

/// The first pass takes 2 s, and its remaining pages 1 s; with a CPU throttle it would take longer.
#[test]
fn a_fast_writer_without_time_moves_by_post_copy() {
    let (end, ms, was_slow) = moved(FAST, sla(100, 3_500, ALL, OnLimit::Abort));
    assert!(matches!(end, Decision::PostCopy { .. }), "{end:?} after {ms}");
    assert!(!was_slow && ms + 1_000 <= 3_500, "after {ms}");
    // There is no other way either for a guest that must not be slowed down.
    let (end, ms, _) =
        moved(FAST, sla(100, 60_000, AvailableStrategies { slow_down: false, ..ALL }, OnLimit::Abort));
    assert!(matches!(end, Decision::PostCopy { .. }), "{end:?} after {ms}");
}

#[test]
fn the_action_at_the_limit_is_taken_in_time() {
    let at_limit = |on_limit| moved(FAST, sla(100, 8_000, NOTHING, on_limit));
    let (end, ms, _) = at_limit(OnLimit::Abort);
    assert!(matches!(end, Decision::GiveUp { reason: GiveUp { limit: Limit::Total, .. } }), "{end:?}");
    assert!((6_000..8_000).contains(&ms), "after {ms}");
    let (end, ms, _) = at_limit(OnLimit::Stop);
    let Decision::StopAndCopy { expected_downtime_ns, .. } = end else { panic!("{end:?}") };
    assert!(expected_downtime_ns > 100 * MS && ms + expected_downtime_ns / MS <= 8_000, "after {ms}");
    assert!(matches!(at_limit(OnLimit::PostCopy).0, Decision::PostCopy { .. }));
}

#[test]
fn without_a_total_limit_the_sla_policy_stops_in_time() {
    let goals = PreCopyGoals { max_downtime_ns: 100 * MS, ..PreCopyGoals::default() };
    let policy = SlaPolicy::new(goals, ALL, OnLimit::Abort, FixedCost::default());
    assert!(matches!(moved(FAST, policy), (Decision::StopAndCopy { .. }, _, true)));
}

/// One sample in which a guest writes a lot is no reason to slow it down.
#[test]
fn one_sample_of_fast_writes_does_not_throttle() {
    let mut policy = sla(50, 60_000, ALL, OnLimit::Abort);
    let look = |pass, dirty_pages, elapsed_ms| RoundObservation {
        elapsed_ns: elapsed_ms * MS,
        ..super::super::tests::observation(pass, dirty_pages, 100_000, 1_000)
    };
    let slow = |decision| matches!(decision, Decision::NextRound { slow: true, .. });
    assert!(!slow(policy.decide(&look(1, 150_000, 1_000))));
    assert_eq!(
        policy.outlook().map(|outlook| (outlook.chosen, outlook.pre_copy)),
        Some((MigrationStrategy::PreCopy, None))
    );
    assert!(!slow(policy.decide(&look(2, 10_000, 2_000))));
    assert!(!slow(policy.decide(&look(3, 150_000, 3_000))));
    assert!(slow(policy.decide(&look(4, 150_000, 4_000))));
    // It stays slow, whatever two samples of the guest show as it was before.
    policy.throttle_changed(ThrottleChange::Slower);
    assert!(slow(policy.decide(&look(5, 150_000, 5_000))));
    policy.throttle_changed(ThrottleChange::Lifted);
    assert!(slow(policy.decide(&look(6, 150_000, 6_000))));
    // Until the throttle cannot be applied any more.
    policy.throttle_changed(ThrottleChange::Unavailable);
    assert!(!slow(policy.decide(&look(7, 150_000, 7_000))));
}

/// The policy knows nothing yet of the pages that the first pass has left to the end.
#[test]
fn nothing_is_expected_of_rounds_before_one_was_seen() {
    let first = RoundObservation {
        remaining_pages: 99_990,
        elapsed_ns: 1_000 * MS,
        ..super::super::tests::observation(1, 100_000, 100_000, 1_000)
    };
    let mut policy = sla(50, 60_000, ALL, OnLimit::Abort);
    assert!(matches!(policy.decide(&first), Decision::NextRound { slow: false, .. }));
    let outlook = policy.outlook().unwrap();
    assert_eq!((outlook.pre_copy, outlook.slowed_down), (None, None));
    // If there is no time for another sample, a way that keeps the limits without one is chosen.
    let mut policy = sla(50, 2_500, ALL, OnLimit::Abort);
    assert!(matches!(policy.decide(&first), Decision::PostCopy { .. }));
}

/// A downtime limit that cannot be kept, and no time limit.
#[test]
fn rounds_have_a_limit_too() {
    let goals = PreCopyGoals { max_downtime_ns: MS, ..PreCopyGoals::default() };
    let (end, ..) = moved(FAST, SlaPolicy::new(goals, ALL, OnLimit::Abort, FixedCost::default()));
    assert!(matches!(end, Decision::GiveUp { reason: GiveUp { limit: Limit::Passes, .. } }), "{end:?}");
}

/// Disks whose dirty pages do not become fewer prevent post-copy. The migration continues without it as long as there
/// is time, by another way if there is one by then; at the limit the guest is stopped if the user wants that, and else
/// the policy gives up.
#[test]
fn disks_that_become_no_less_leave_the_other_ways() {
    let look = |number: u32, must_precopy_pages, dirty_pages, elapsed_ms: u64| RoundObservation {
        must_precopy_pages,
        elapsed_ns: elapsed_ms * MS,
        ..super::super::tests::observation(number, dirty_pages, 100_000, 1_000)
    };
    let ways = AvailableStrategies { slow_down: false, post_copy: true };
    let ahead = |on_limit| {
        let mut policy = sla(300, 60_000, ways, on_limit);
        policy.decide(&look(1, 10_000, 1_000_000, 1_000));
        let ahead = policy.decide(&look(2, 10_000, 1_000_000, 2_000));
        assert!(matches!(ahead, Decision::NextRound { must_precopy_only: true, .. }), "{ahead:?}");
        policy
    };
    // It may be a hiccup: two more rounds of disks alone.
    let is_no_less_by_chance = |policy: &mut SlaPolicy| {
        for number in [3, 4] {
            let ahead = policy.decide(&look(number, 900_000, 1_000_000, u64::from(number) * 1_000));
            assert!(matches!(ahead, Decision::NextRound { must_precopy_only: true, .. }), "{ahead:?}");
        }
    };
    for on_limit in [OnLimit::Abort, OnLimit::Stop] {
        let mut policy = ahead(on_limit);
        is_no_less_by_chance(&mut policy);
        let goes_on = policy.decide(&look(5, 900_000, 1_000_000, 5_000));
        assert!(matches!(goes_on, Decision::NextRound { must_precopy_only: false, .. }), "{goes_on:?}");
        assert_eq!(
            policy.outlook().map(|outlook| (outlook.chosen, outlook.is_feasible)),
            Some((MigrationStrategy::PreCopy, false))
        );
        let end = policy.decide(&look(6, 950_000, 1_000_000, 59_500));
        match on_limit {
            OnLimit::Stop => assert!(matches!(end, Decision::StopAndCopy { .. }), "{end:?}"),
            _ => assert!(matches!(end, Decision::GiveUp { .. }), "{end:?}"),
        }
    }
    // The guest has become calm: rounds converge now.
    let mut policy = ahead(OnLimit::Abort);
    is_no_less_by_chance(&mut policy);
    let calm = policy.decide(&look(5, 39_000, 40_000, 5_000));
    assert!(matches!(calm, Decision::NextRound { must_precopy_only: false, .. }), "{calm:?}");
    assert_eq!(
        policy.outlook().map(|outlook| (outlook.chosen, outlook.is_feasible)),
        Some((MigrationStrategy::PreCopy, true))
    );
}

/// Dirty pages of disks are sent while the guest stands still, and slower processors do not write fewer of them.
#[test]
fn pages_of_disks_do_not_come_after_the_guest() {
    let mut policy = sla(300, 60_000, ALL, OnLimit::Abort);
    for (number, must_precopy_pages, comes_after) in
        [(1, 100_000, false), (2, 100_000, false), (3, 0, false), (4, 0, true)]
    {
        let observed = RoundObservation {
            must_precopy_pages,
            elapsed_ns: u64::from(number) * 1_000 * MS,
            ..super::super::tests::observation(number, 1_000_000, 100_000, 1_000)
        };
        let decision = policy.decide(&observed);
        assert_eq!(matches!(decision, Decision::PostCopy { .. }), comes_after, "{number}: {decision:?}");
    }
}
