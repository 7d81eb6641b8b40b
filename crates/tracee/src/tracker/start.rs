//! Start of tracking: in short steps, so that the caller can stop it.
//!
//! 1. Slice by slice, the pages that the files behind shared memory have in memory are mapped in
//!    the process. The memory of a guest that arrived here by a migration was written from outside,
//!    so its process has not mapped most of it, and every scan would query the file about it all;
//!    and the guest itself handles the page faults sooner here than at its next touch.
//! 2. Everything is registered and protected, in one step. Writes are detected from here on.
//! 3. Slice by slice, the holes are recorded.
//!
//! Step 1 is only for speed: the scans query all pages that it omits. Pages that are swapped out
//! are omitted, because mapping them would read all of them from the disk at once.
//!
//! The order matters: a page that is punched out and touched again after (2) would be present,
//! protected, and undetected (trap 20). So no page is touched after (2); and no page may be sent
//! before (3) has ended, because the scans treat the recorded holes as holes from the start.

use std::collections::VecDeque;

use super::{Area, TrackError, WriteTracker};
use crate::range::{AddressRange, PAGE_SIZE};

/// Number of bytes that one step processes.
const SLICE_BYTES: u64 = 256 << 20;
/// Number of pages that are touched in one system call.
const TOUCHED_AT_ONCE: usize = 1024;

/// A [`WriteTracker`] that is being started. Dropping it undoes all steps.
#[derive(Debug)]
pub struct TrackerStart {
    tracker: WriteTracker,
    work: RemainingSteps,
}

impl TrackerStart {
    pub(super) fn new(tracker: WriteTracker, areas: Vec<Area>) -> Self {
        Self { tracker, work: RemainingSteps::new(areas) }
    }

    /// Runs the next step; returns true if more remain.
    ///
    /// # Errors
    /// The start cannot be finished then.
    pub fn step(&mut self) -> Result<bool, TrackError> {
        self.work.step(&mut self.tracker)
    }

    /// Runs all remaining steps.
    ///
    /// # Errors
    /// The tracker unregisters the ranges again.
    pub fn finish(mut self) -> Result<WriteTracker, TrackError> {
        while self.step()? {}
        Ok(self.tracker)
    }
}

/// Remaining work for some areas.
#[derive(Debug)]
pub(super) struct RemainingSteps {
    /// Areas that are not registered yet.
    areas: Vec<Area>,
    /// Index of the first of them among the registered ones.
    first: usize,
    left: VecDeque<Step>,
}

/// Areas by their index in [`RemainingSteps`].
#[derive(Debug)]
enum Step {
    Map { area: usize, slice: AddressRange },
    Track,
    Learn { area: usize, slice: AddressRange },
}

impl RemainingSteps {
    pub(super) fn new(areas: Vec<Area>) -> Self {
        let slices = || {
            let slices_of = |(index, area): (usize, &Area)| {
                slices(area.range, area.page_size).map(move |slice| (index, slice)).collect::<Vec<_>>()
            };
            areas.iter().enumerate().flat_map(slices_of)
        };
        let map = slices().map(|(area, slice)| Step::Map { area, slice });
        let learn = slices().map(|(area, slice)| Step::Learn { area, slice });
        let left = map.chain([Step::Track]).chain(learn).collect();
        Self { areas, first: 0, left }
    }

    /// Runs the next step; returns true if more remain.
    pub(super) fn step(&mut self, tracker: &mut WriteTracker) -> Result<bool, TrackError> {
        match self.left.pop_front() {
            Some(Step::Map { area, slice }) => tracker.map_resident_pages(&self.areas[area], slice)?,
            Some(Step::Track) => {
                self.first = tracker.registered.areas.len();
                self.areas.drain(..).try_for_each(|area| tracker.registered.add(area))?;
            }
            Some(Step::Learn { area, slice }) => tracker.record_discarded(self.first + area, slice)?,
            None => {}
        }
        Ok(!self.left.is_empty())
    }
}

/// Returns parts of a range, cut at multiples of the page size from its start on.
pub(super) fn slices(range: AddressRange, page_size: u64) -> impl Iterator<Item = AddressRange> {
    let len = SLICE_BYTES.max(page_size);
    (range.start..range.end)
        .step_by(len as usize)
        .map(move |start| AddressRange::new(start, range.end.min(start + len)))
}

impl WriteTracker {
    /// Runs the first step, for a part of an area.
    fn map_resident_pages(&mut self, area: &Area, slice: AddressRange) -> Result<(), TrackError> {
        if !area.discarded.has_file() {
            return Ok(());
        }
        let absent = self.absent(slice)?;
        let there = area.discarded.resident_within(slice, &absent)?;
        let pages: Vec<_> =
            there.iter().flat_map(|run| (run.start..run.end).step_by(PAGE_SIZE as usize)).collect();
        let mut bytes = [0; TOUCHED_AT_ONCE];
        for pages in pages.chunks(TOUCHED_AT_ONCE) {
            let first_bytes: Vec<_> = pages.iter().map(|page| AddressRange::with_len(*page, 1)).collect();
            // The scans query a page that cannot be read now.
            let _ = self.memory.read_runs(&first_bytes, &mut bytes[..first_bytes.len()]);
        }
        Ok(())
    }

    /// Runs the last step, for a part of an area that is protected.
    fn record_discarded(&mut self, area: usize, slice: AddressRange) -> Result<(), TrackError> {
        let absent = self.absent(slice)?;
        let area = &mut self.registered.areas[area];
        area.update_discarded(&self.pagemap, slice, &[], &absent, &mut Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_the_whole_range_in_whole_pages() {
        for (len, page_size) in [
            (PAGE_SIZE, PAGE_SIZE),
            (SLICE_BYTES, PAGE_SIZE),
            (3 << 30, 1 << 30),
            (SLICE_BYTES * 3 + PAGE_SIZE, PAGE_SIZE),
        ] {
            let range = AddressRange::with_len(7 << 30, len);
            let found: Vec<_> = slices(range, page_size).collect();
            assert_eq!(found.len() as u64, len.div_ceil(SLICE_BYTES.max(page_size)));
            assert!(found.iter().all(|slice| slice.is_aligned(page_size)));
            assert!(found.is_sorted_by(|one, next| one.end == next.start));
            assert_eq!((found[0].start, found[found.len() - 1].end), (range.start, range.end));
        }
    }
}
