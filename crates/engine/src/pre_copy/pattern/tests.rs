//! Guests with patterns of writes for which rounds do not help, and others.

use proto::limits::PAGE_BYTES;

use super::*;
use crate::pre_copy::tests::{observation, policy};

/// Simulates a guest on a link of 10 pages a millisecond, with `dirty_pages` dirty pages after the first pass. Returns
/// the number of intervals of 100 ms, and the last decision. `write` returns, for the pages sent in an interval, the
/// pages written in it and those of the pages sent that had been sent shortly before.
fn patterns(
    dirty_pages: u64,
    on_limit: OnLimit,
    mut write: impl FnMut(u64) -> (u64, u64),
) -> (u32, Decision) {
    let sampling = Sampling { interval_ns: 100_000_000, ..Sampling::default() };
    let mut policy = policy(10, 30, on_limit).sampling(sampling);
    // Its last part may be of any size.
    let part = RoundObservation { remaining_pages: 10_000, ..observation(0, dirty_pages, 100_000, 10_000) };
    assert!(matches!(policy.decide(&part), Decision::NextRound { most_pages: None, .. }));
    let mut decision = policy.decide(&observation(1, dirty_pages, 50, 5));
    let (mut looks, mut dirty, mut passes, mut gone) = (0, dirty_pages, 1, 0);
    while let Decision::NextRound { most_pages, .. } = decision {
        looks += 1;
        assert!(looks < 100, "no end");
        let sent = most_pages.unwrap_or(u64::MAX).min(dirty);
        let remaining_pages = dirty - sent;
        gone += sent;
        if remaining_pages == 0 || gone >= dirty_pages {
            (passes, gone) = (passes + 1, 0);
        }
        let (written, resent_pages) = write(sent);
        dirty = remaining_pages + written;
        decision = policy.decide(&RoundObservation {
            remaining_pages,
            resent_pages,
            ..observation(passes, dirty, sent, sent.div_ceil(10))
        });
    }
    (looks, decision)
}

fn pattern_of(decision: Decision) -> Option<Pattern> {
    match decision {
        Decision::StopAndCopy { pattern, .. } => pattern,
        other => panic!("{other:?}"),
    }
}

/// Fig. 10 a: all pages that are sent are written again at once.
#[test]
fn a_guest_that_writes_as_fast_as_the_link_is_recognised() {
    let (looks, decision) = patterns(1_800, OnLimit::Stop, |sent| (sent, 0));
    assert_eq!((looks, pattern_of(decision)), (2, Some(Pattern::Stable)));
    // The guest would have to stand still for a second: a pattern that was seen for two tenths of one may be over
    // soon.
    let (looks, decision) = patterns(10_000, OnLimit::Stop, |sent| (sent, 0));
    assert_eq!((looks, pattern_of(decision)), (6, Some(Pattern::Stable)));
    // Waiting does not help either where dirty pages become more.
    let (looks, decision) = patterns(1_800, OnLimit::Stop, |sent| (sent + sent / 4, 0));
    assert!(looks < 10 && pattern_of(decision) == Some(Pattern::Stable), "{looks} {decision:?}");
}

/// With `OnLimit::Abort` the guest gets time to become calmer: as long as six passes over the dirty pages take.
#[test]
fn a_guest_that_is_not_to_stand_still_for_long_gets_time() {
    let (looks, decision) = patterns(10_000, OnLimit::Abort, |sent| (sent, 0));
    assert!(
        matches!(decision, Decision::GiveUp { reason: GiveUp { limit: Limit::NotShrinking, .. } }),
        "{decision:?}"
    );
    assert_eq!(looks, 1 + 10 * PatternPolicy::PATIENCE_ROUNDS);
    // A burst that is over in time.
    let mut look = 0;
    let (_, decision) = patterns(10_000, OnLimit::Abort, |sent| {
        look += 1;
        (if look < 50 { sent } else { sent / 10 }, 0)
    });
    assert_eq!(pattern_of(decision), Some(Pattern::Drained));
}

/// A slow pass through much memory is no standstill, although only a tenth less remains after each interval; and its
/// parts do not count as rounds.
#[test]
fn a_slow_pass_over_much_memory_is_no_standstill() {
    for on_limit in [OnLimit::Abort, OnLimit::Stop] {
        let (looks, decision) = patterns(10_000, on_limit, |sent| (sent / 4, 0));
        assert_eq!(pattern_of(decision), Some(Pattern::Drained));
        assert!(looks > 10, "{looks}");
    }
}

/// Fig. 10 c: fewer and fewer pages remain, but always the same pages are sent.
#[test]
fn a_guest_that_writes_to_the_same_pages_is_recognised() {
    let (looks, decision) = patterns(1_900, OnLimit::Stop, |sent| (sent - sent / 4, sent - sent / 20));
    assert_eq!((looks, pattern_of(decision)), (2, Some(Pattern::Resent)));
    let (_, decision) = patterns(1_900, OnLimit::Stop, |sent| (sent - sent / 4, sent / 2));
    assert_eq!(pattern_of(decision), Some(Pattern::Drained), "half is not nine tenths");
}

/// A single different sample is averaged away.
#[test]
fn the_number_of_modified_pages_is_averaged() {
    let mut number = 0;
    let (looks, decision) = patterns(1_800, OnLimit::Stop, |sent| {
        number += 1;
        (if number % 2 == 1 { sent + sent / 3 } else { sent - sent / 3 }, 0)
    });
    assert_eq!((looks, pattern_of(decision)), (2, Some(Pattern::Stable)));
}

/// An answer takes 80 ms. Rounds of 100 ms would consist mostly of waiting.
#[test]
fn on_a_long_link_intervals_are_longer() {
    const WAY_MS: u64 = 80;
    let mut policy = policy(1, 30, OnLimit::Abort);
    // 10 Gb/s: 305 pages a millisecond.
    let first =
        RoundObservation { bytes_sent: 12_500_000_000, ..observation(1, 10_000_000, 3_050_000, 10_000) };
    let (mut decision, mut sent) = (policy.decide(&first), 0);
    for _ in 0..12 {
        let Decision::NextRound { most_pages, .. } = decision else { panic!("{decision:?}") };
        sent = most_pages.unwrap();
        let left = RoundObservation {
            remaining_pages: 9_000_000,
            ..observation(1, 10_000_000, sent, WAY_MS + sent / 305)
        };
        decision = policy.decide(&left);
    }
    assert!(sent > 5 * WAY_MS * 305, "{sent}");
}

/// An interval sends as much as the paper's link in a second; less on a slower one, and never for less than a tenth
/// of a second.
#[test]
fn the_interval_follows_the_link() {
    let most_pages = |megabytes_per_s: u64| {
        let mut policy = policy(1, 30, OnLimit::Abort);
        let bytes_sent = megabytes_per_s * 10_000_000;
        let observed = RoundObservation { bytes_sent, ..observation(1, 10_000_000, 1_000_000, 10_000) };
        match policy.decide(&observed) {
            Decision::NextRound { most_pages, .. } => most_pages.unwrap_or(u64::MAX) * PAGE_BYTES / 1_000_000,
            decision => panic!("{decision:?}"),
        }
    };
    // 10 MB/s for a second, 1 GB/s for an eighth of one, 5 GB/s for a tenth.
    assert_eq!([10, 125, 1_000, 5_000].map(most_pages), [9, 124, 124, 499]);
}
