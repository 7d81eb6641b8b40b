//! Effects of a migration on the guest's program, from the program's own records.
//!
//! All by the guest's clock, which does not run while the guest is stopped: the downtime is not included.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::serial::{Progress, SLOT};

/// Time that the guest runs undisturbed before the migration, and again after its arrival, by its own clock.
pub(super) const UNDISTURBED: Duration = Duration::from_secs(1);
/// Slots that are averaged: a tenth of a second.
const WINDOW: usize = 10;
/// Share of its usual work at which the program counts as back at full speed.
const FULL_SPEED: f64 = 0.9;

/// Effects of a migration on the guest's program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disturbance {
    /// The longest time in which the program did not run, ms.
    pub longest_stall_ms: f64,
    /// Work that the program did less than it usually does in that time, in ms of its usual work.
    pub lost_work_ms: f64,
    /// Brownout: time from the arrival until the program was back at full speed, ms. Absent if it never was.
    pub brownout_ms: Option<f64>,
}

/// Moments of a measurement, by the guest's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moments {
    /// The program ran undisturbed from here on, for [`UNDISTURBED`].
    pub(super) settled: Duration,
    /// The migration was requested.
    pub(super) requested: Duration,
    /// The guest ran at its destination.
    pub(super) resumed: Duration,
    /// The end of the observation.
    pub(super) seen_until: Duration,
}

impl Moments {
    /// Watches the program for a while after its arrival, and after all of its memory has arrived.
    pub(super) fn new(settled: Duration, requested: Duration, resumed: Duration, complete: Duration) -> Self {
        Self { settled, requested, resumed, seen_until: resumed.max(complete) + UNDISTURBED }
    }
}

/// Computes the disturbance from the program's records.
pub(super) fn compute_disturbance(progress: &Progress, moments: Moments) -> Disturbance {
    let known = progress.work.len().min(progress.gap.len());
    let slots = |from: Duration, to: Duration| {
        let slot = |at: Duration| (at.as_millis() / SLOT.as_millis()) as u64;
        let index = |at: u64| (at.saturating_sub(progress.first) as usize).min(known);
        index(slot(from))..index(slot(to))
    };
    let mean = |work: &[u32]| f64::from(work.iter().sum::<u32>()) / work.len().max(1) as f64;
    let usual = mean(&progress.work[slots(moments.settled, moments.settled + UNDISTURBED)]);
    let during = slots(moments.requested, moments.seen_until);
    let gap = progress.gap[during.clone()].iter().copied().max().unwrap_or(0);
    let work = &progress.work[during];
    let lost =
        if usual > 0.0 { work.len() as f64 - f64::from(work.iter().sum::<u32>()) / usual } else { 0.0 };
    let after = &progress.work[slots(moments.resumed, moments.seen_until)];
    let back = after.windows(WINDOW).position(|window| mean(window) >= FULL_SPEED * usual);
    let slot_ms = SLOT.as_secs_f64() * 1e3;
    Disturbance {
        longest_stall_ms: f64::from(gap) / 10.0,
        lost_work_ms: lost * slot_ms,
        brownout_ms: back.map(|slots| slots as f64 * slot_ms),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_lost_work_and_brownout_are_seen() {
        // A second of ten pages a slot; then a migration: half speed for 20 slots, arrival, 5 slots of nothing, full
        // speed.
        let mut work = vec![10; 100];
        work.extend([5; 20]);
        work.extend([0; 5]);
        work.extend([10; 30]);
        let mut gap = vec![12; work.len()];
        gap[122] = 480;
        gap[10] = 900;
        let progress = Progress { first: 100, work, gap };
        let at = |slot: u64| Duration::from_millis((100 + slot) * 10);
        let moments = Moments { settled: at(0), requested: at(100), resumed: at(120), seen_until: at(155) };
        let judged = compute_disturbance(&progress, moments);
        assert!((judged.longest_stall_ms - 48.0).abs() < 1e-9, "{judged:?}");
        assert!((judged.lost_work_ms - 150.0).abs() < 1e-9, "{judged:?}");
        // The first tenth of a second with nine tenths of the usual work begins four slots after the arrival.
        assert_eq!(judged.brownout_ms, Some(40.0));

        let nothing = compute_disturbance(&Progress::default(), moments);
        assert_eq!(nothing, Disturbance { brownout_ms: None, ..Disturbance::default() });
    }
}
