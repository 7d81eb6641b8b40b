//! Work of the program in each hundredth of a second of the guest's own clock, and the times in which it did not run:
//! measured in the guest, and reported on request, so that reports do not disturb the measurement.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Duration;

/// Length of a slot.
const SLOT: Duration = Duration::from_millis(10);
/// Slots kept: five minutes and a half.
const KEPT_SLOTS: usize = 1 << 15;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Slot {
    /// Pages written and verified in the slot.
    work: u32,
    /// The longest time without the program that ended in the slot, in tenths of a millisecond.
    gap: u32,
}

/// The recent past, slot by slot.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Number of the first slot kept; slots are counted from the start of the load.
    first: u64,
    slots: VecDeque<Slot>,
}

impl Progress {
    /// Records that at this time since the start the program ran, after a time in which it did not, with the work that
    /// it did then.
    pub(crate) fn note(&mut self, at: Duration, gap: Duration, work: u32) {
        let number = (at.as_micros() / SLOT.as_micros()) as u64;
        while self.first + self.slots.len() as u64 <= number {
            self.slots.push_back(Slot::default());
            if self.slots.len() > KEPT_SLOTS {
                self.slots.pop_front();
                self.first += 1;
            }
        }
        if let Some(slot) =
            number.checked_sub(self.first).and_then(|index| self.slots.get_mut(index as usize))
        {
            slot.work = slot.work.saturating_add(work);
            slot.gap = slot.gap.max((gap.as_micros() / 100) as u32);
        }
    }

    /// Formats at most `count` slots from one on: `slot_ms=10 first=N work=A,B,… gap=C,D,…`, with gaps in tenths of a
    /// millisecond.
    pub(crate) fn report(&self, from: u64, count: usize) -> String {
        let first = from.max(self.first);
        let slots = self.slots.iter().skip((first - self.first) as usize).take(count);
        let mut text = format!("slot_ms={} first={first}", SLOT.as_millis());
        for (name, value) in [("work", (|slot| slot.work) as fn(&Slot) -> u32), ("gap", |slot| slot.gap)] {
            let values = slots.clone().map(|slot| value(slot).to_string()).collect::<Vec<_>>().join(",");
            // Writing to a string cannot fail.
            let _ = write!(text, " {name}={values}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_and_gaps_are_told_by_slot() {
        let mut progress = Progress::default();
        progress.note(Duration::from_millis(1), Duration::from_micros(150), 4);
        progress.note(Duration::from_millis(9), Duration::from_micros(1_250), 4);
        progress.note(Duration::from_millis(31), Duration::from_millis(22), 1);
        assert_eq!(progress.report(0, 9), "slot_ms=10 first=0 work=8,0,0,1 gap=12,0,0,220");
        assert_eq!(progress.report(2, 1), "slot_ms=10 first=2 work=0 gap=0");
        assert_eq!(progress.report(9, 9), "slot_ms=10 first=9 work= gap=");
    }

    #[test]
    fn the_past_is_forgotten() {
        let mut progress = Progress::default();
        for slot in 0..KEPT_SLOTS as u32 + 5 {
            progress.note(SLOT * slot, Duration::ZERO, slot);
        }
        assert!(progress.report(0, 9).starts_with("slot_ms=10 first=5 work=5,6,"));
        progress.note(Duration::ZERO, Duration::ZERO, 1);
        assert!(progress.report(0, 9).starts_with("slot_ms=10 first=5 work=5,6,"));
    }
}
