//! Post-copy: pages that are here as they were, and have to be away before anybody can wait for them.
//!
//! Most of them the source names while its guest still runs ([`TakenAway::take`]), so that the stop is no longer for them.

use std::ops::Range;

use ::memory::ram::{RamError, RamRegion};
use ::memory::{BlockWriter, DirtyBitmap, TakesAway, decode_set};
use proto::limits::PAGE_BYTES;
use tracee::{AddressRange, Injector, Process};

use super::arriving::Arriving;
use super::awaiting::AwaitError;
use crate::ram;

/// What was taken away before the source has named all that is to come.
#[derive(Debug, Default)]
pub(super) struct TakenAway(Vec<DirtyBitmap>);

impl TakenAway {
    /// Takes away what is there of these pages.
    pub(super) fn take(
        &mut self,
        injector: &Injector,
        vm: &Arriving,
        writers: &[Box<dyn BlockWriter>],
        set: &[u8],
    ) -> Result<(), AwaitError> {
        let regions = ram::regions(&vm.blocks);
        let pages = decode_set(set, regions.iter().map(|region| region.bytes))?;
        self.0.resize_with(regions.len(), || DirtyBitmap::new(0));
        for ((taken, pages), region) in self.0.iter_mut().zip(&pages).zip(&regions) {
            if taken.pages() == 0 {
                *taken = DirtyBitmap::new(region.bytes);
            }
            taken.insert(pages);
        }
        take_away(injector, &vm.process, (&regions, writers), &pages)
    }

    /// The source sends all of it again, in rounds or after the guest.
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }

    /// Makes sure that what was taken away comes again. Nothing else would tell it from a page of zeros.
    pub(super) fn check(&self, regions: &[RamRegion], awaited: &[DirtyBitmap]) -> Result<(), AwaitError> {
        for ((taken, awaited), region) in self.0.iter().zip(awaited).zip(regions) {
            let mut lost = taken.clone();
            lost.remove(awaited);
            if let Some(run) = lost.runs().next() {
                return Err(AwaitError::NotNamed {
                    block: region.name.clone(),
                    offset: run.start * PAGE_BYTES,
                });
            }
        }
        Ok(())
    }
}

/// To look whether so many pages are there takes no longer than to ask twice.
const APART_PAGES: u64 = 256;

/// Sees that none of these pages is there.
pub(super) fn take_away(
    injector: &Injector,
    process: &Process,
    (regions, writers): (&[RamRegion], &[Box<dyn BlockWriter>]),
    pages: &[DirtyBitmap],
) -> Result<(), AwaitError> {
    let blocks = || regions.iter().zip(writers).zip(pages);
    let mut discarded = Vec::new();
    for ((region, writer), pages) in blocks() {
        for run in there(&**writer, pages)?.runs() {
            let bytes = run.start * PAGE_BYTES..run.end * PAGE_BYTES;
            if writer.takes_away() == TakesAway::ByProcess {
                let at = |offset| region.address + offset;
                discarded.push(AddressRange::new(at(bytes.start), at(bytes.end)));
            } else {
                writer.take_away(bytes)?;
            }
        }
    }
    if !discarded.is_empty() {
        injector.discard(process, &discarded)?;
    }
    for ((region, writer), pages) in blocks() {
        if let Some(run) = there(&**writer, pages)?.runs().next() {
            return Err(AwaitError::StillThere {
                block: region.name.clone(),
                offset: run.start * PAGE_BYTES,
            });
        }
    }
    Ok(())
}

/// Which of these pages are there.
fn there(writer: &dyn BlockWriter, pages: &DirtyBitmap) -> Result<DirtyBitmap, RamError> {
    // A file tells of each part that is there; asked after what lies between pages it would tell of all of that.
    let apart = if writer.takes_away() == TakesAway::ByProcess { APART_PAGES } else { 0 };
    let mut found = pages.emptied();
    for pages in close_together(pages.runs(), apart) {
        for bytes in writer.there(pages.start * PAGE_BYTES..pages.end * PAGE_BYTES)? {
            found.set_bytes(bytes);
        }
    }
    found.retain(pages);
    Ok(found)
}

/// Runs of pages that are no further apart than that, as one.
fn close_together(runs: impl Iterator<Item = Range<u64>>, apart: u64) -> impl Iterator<Item = Range<u64>> {
    let mut runs = runs.peekable();
    std::iter::from_fn(move || {
        let mut whole = runs.next()?;
        while let Some(next) = runs.next_if(|next| next.start - whole.end <= apart) {
            whole.end = next.end;
        }
        Some(whole)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_are_close_together_are_one() {
        let joined =
            |apart| close_together([0..2, 5..6, 9..10, 300..301].into_iter(), apart).collect::<Vec<_>>();
        assert_eq!(joined(0), [0..2, 5..6, 9..10, 300..301]);
        assert_eq!(joined(3), [0..10, 300..301]);
        assert_eq!(joined(290), [0..301]);
    }
}
