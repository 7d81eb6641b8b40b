//! Start of post-copy for a guest with copied disks.

use super::forecast::FixedCost;
use super::policy::{Decision, GiveUp, Limit, RoundObservation};

/// Decides when post-copy starts. The remaining pages of memory may follow the guest; those of its disks may not,
/// because QEMU would read missing data. So rounds of disks alone are sent first, as long as each leaves fewer pages
/// than the one before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PostCopyStart {
    last_disks_ns: Option<u64>,
    /// Consecutive scans that found no fewer pages.
    scans_without_progress: u32,
}

/// Number of consecutive scans without fewer pages that are no accident: after a short round one hiccup is enough for
/// a single one.
const CERTAIN_SCANS: u32 = 3;

/// Divisor of the fixed downtime: a part that is no longer than this quotient is not noticed beside the fixed
/// downtime.
const UNNOTICED_DIVISOR: u64 = 8;

impl PostCopyStart {
    /// Returns true if the start of post-copy was decided: until then nothing else is decided.
    pub(super) fn has_begun(&self) -> bool {
        self.last_disks_ns.is_some()
    }

    /// Decides on the next round, where all dirty pages would take `pages_ns`.
    pub(super) fn decide(
        &mut self,
        observed: &RoundObservation,
        pages_ns: u64,
        fixed: &FixedCost,
        max_downtime_ns: u64,
    ) -> Decision {
        let disks_ns = disks_ns(observed, pages_ns);
        let expected_downtime_ns = downtime_ns(observed, pages_ns, fixed);
        let is_little = disks_ns <= fixed.downtime_ns(0) / UNNOTICED_DIVISOR;
        let is_less = self.last_disks_ns.is_none_or(|last| disks_ns < last - last / 8);
        // The least: a scan that found many more pages for a moment does not predict the next one.
        self.last_disks_ns = Some(self.last_disks_ns.map_or(disks_ns, |last| last.min(disks_ns)));
        self.scans_without_progress = if is_less { 0 } else { self.scans_without_progress + 1 };
        let would_take_too_long = expected_downtime_ns > max_downtime_ns;
        if !is_little && (is_less || would_take_too_long && self.scans_without_progress < CERTAIN_SCANS) {
            Decision::NextRound {
                expected_downtime_ns,
                most_pages: None,
                slow: false,
                must_precopy_only: true,
            }
        } else if is_little || !would_take_too_long {
            Decision::PostCopy { expected_downtime_ns }
        } else {
            let (limit, fixed_ns) = (Limit::Disks, fixed.downtime_ns(0));
            Decision::GiveUp { reason: GiveUp { limit, expected_downtime_ns, fixed_ns, max_downtime_ns } }
        }
    }
}

/// Returns the time for the dirty pages of disks, where all dirty pages take `pages_ns`.
fn disks_ns(observed: &RoundObservation, pages_ns: u64) -> u64 {
    let must_precopy_pages = observed.must_precopy_pages.min(observed.dirty_pages);
    let ns = (u128::from(pages_ns) * u128::from(must_precopy_pages)).checked_div(observed.dirty_pages.into());
    u64::try_from(ns.unwrap_or(0)).unwrap_or(u64::MAX)
}

/// Returns the downtime with post-copy of the memory.
pub(super) fn downtime_ns(observed: &RoundObservation, pages_ns: u64, fixed: &FixedCost) -> u64 {
    fixed.downtime_ns(disks_ns(observed, pages_ns)).saturating_add(observed.scan_ns.saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Decides with `must_precopy_pages` dirty pages of disks, where a hundred pages take a millisecond.
    fn decided(post_copy_start: &mut PostCopyStart, must_precopy_pages: u64) -> Decision {
        let observed =
            RoundObservation { must_precopy_pages, dirty_pages: 100_000, ..RoundObservation::default() };
        post_copy_start.decide(&observed, 1_000 * MS, &FixedCost::default(), 300 * MS)
    }

    #[test]
    fn disks_go_ahead_for_as_long_as_they_become_less() {
        let mut post_copy_start = PostCopyStart::default();
        assert!(!post_copy_start.has_begun());
        for must_precopy_pages in [90_000, 40_000, 20_000, 1_000] {
            let next = decided(&mut post_copy_start, must_precopy_pages);
            assert!(
                matches!(next, Decision::NextRound { must_precopy_only: true, .. }),
                "{must_precopy_pages}: {next:?}"
            );
            assert!(post_copy_start.has_begun());
        }
        let next = decided(&mut post_copy_start, 100);
        assert_eq!(next, Decision::PostCopy { expected_downtime_ns: 15 * MS }, "less than saving takes");
    }

    #[test]
    fn what_is_left_of_them_is_waited_for_where_that_is_allowed() {
        let mut post_copy_start = PostCopyStart::default();
        decided(&mut post_copy_start, 20_000);
        assert_eq!(
            decided(&mut post_copy_start, 20_000),
            Decision::PostCopy { expected_downtime_ns: 213 * MS },
            "no less than before"
        );
        let mut post_copy_start = PostCopyStart::default();
        decided(&mut post_copy_start, 40_000);
        for more in [90_000, 40_000] {
            let next = decided(&mut post_copy_start, more);
            assert!(matches!(next, Decision::NextRound { must_precopy_only: true, .. }), "{next:?}");
        }
        let Decision::GiveUp { reason } = decided(&mut post_copy_start, 40_000) else { panic!("too long") };
        assert_eq!(reason.limit, Limit::Disks);
        assert!(reason.to_string().contains("--throttle-writes"), "{reason}");
    }

    #[test]
    fn a_guest_without_disks_leaves_at_once() {
        assert_eq!(
            decided(&mut PostCopyStart::default(), 0),
            Decision::PostCopy { expected_downtime_ns: 15 * MS }
        );
    }
}
