//! Post-copy: pages that are here as they were, and have to be away before anybody can wait for them.
//!
//! Most of them the source names while its guest still runs ([`TakenAway::take`]), so that the stop is no longer for them.

use std::ops::Range;

use ::memory::ram::RamRegion;
use ::memory::{BlockWriter, DirtyBitmap, TakesAway, decode_chunks};
use proto::limits::{CHUNK_PAGES, PAGE_BYTES};
use tracee::{AddressRange, Injector, Process};

use super::arriving::Arriving;
use super::awaiting::AwaitError;
use crate::ram;

/// What was taken away before the source has named all that is to come.
#[derive(Debug, Default)]
pub(super) struct TakenAway(Vec<DirtyBitmap>);

/// The blocks of the guest's memory, and how each is written.
pub(super) type Blocks<'a> = (&'a [RamRegion], &'a [Box<dyn BlockWriter>]);

impl TakenAway {
    /// Takes away what is there of these pages. Nobody waits for them yet, so one of them may come back (the kernel makes
    /// huge pages of what surrounds them): it is looked at again when all are named.
    pub(super) fn take(
        &mut self,
        injector: &Injector,
        vm: &Arriving,
        writers: &[Box<dyn BlockWriter>],
        set: &[u8],
    ) -> Result<(), AwaitError> {
        let regions = ram::regions(&vm.blocks);
        if self.0.is_empty() {
            self.0 = regions.iter().map(|region| DirtyBitmap::new(region.bytes)).collect();
        }
        let mut runs = Vec::new();
        for (block, chunk, pages) in decode_chunks(set, &self.0)? {
            self.0[block].insert_into_chunk(chunk, &pages);
            let first = chunk * CHUNK_PAGES;
            runs.extend(pages.runs().map(|run| (block, first + run.start..first + run.end)));
        }
        take_away(injector, &vm.process, (&regions, writers), runs)
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
                let offset = run.start * PAGE_BYTES;
                return Err(AwaitError::NotNamed { block: region.name.clone(), offset });
            }
        }
        Ok(())
    }
}

/// All of these pages, with the block of each run.
pub(super) fn runs_of(pages: &[DirtyBitmap]) -> impl Iterator<Item = (usize, Range<u64>)> + '_ {
    pages.iter().enumerate().flat_map(|(block, pages)| pages.runs().map(move |run| (block, run)))
}

/// Takes away what is there of these pages, which ascend.
pub(super) fn take_away(
    injector: &Injector,
    process: &Process,
    (regions, writers): Blocks<'_>,
    runs: impl IntoIterator<Item = (usize, Range<u64>)>,
) -> Result<(), AwaitError> {
    let mut of_process = Vec::new();
    for (block, run) in runs {
        if writers[block].takes_away() == TakesAway::ByProcess {
            of_process.push((block, run));
        } else {
            writers[block].take_away(run.start * PAGE_BYTES..run.end * PAGE_BYTES)?;
        }
    }
    let mut discarded = Vec::new();
    for (block, close) in close_together(&of_process) {
        let bytes = close[0].1.start * PAGE_BYTES..close[close.len() - 1].1.end * PAGE_BYTES;
        let there = writers[block].there(bytes)?;
        let at = |offset| regions[block].address + offset;
        let both = |(_, run): &(usize, Range<u64>)| common(run, &there);
        let both = close.iter().flat_map(both);
        discarded.extend(both.map(|bytes| AddressRange::new(at(bytes.start), at(bytes.end))));
    }
    if !discarded.is_empty() {
        injector.discard(process, &discarded)?;
    }
    Ok(())
}

/// Makes sure that none of these pages is there.
pub(super) fn are_away(
    (regions, writers): Blocks<'_>,
    runs: impl IntoIterator<Item = (usize, Range<u64>)>,
) -> Result<(), AwaitError> {
    let still_there = |block: usize, offset| {
        Err(AwaitError::StillThere { block: RamRegion::clone(&regions[block]).name, offset })
    };
    let mut of_process = Vec::new();
    for (block, run) in runs {
        if writers[block].takes_away() == TakesAway::ByProcess {
            of_process.push((block, run));
        } else if let Some(offset) =
            writers[block].first_there(run.start * PAGE_BYTES..run.end * PAGE_BYTES)?
        {
            return still_there(block, offset);
        }
    }
    for (block, close) in close_together(&of_process) {
        let bytes = close[0].1.start * PAGE_BYTES..close[close.len() - 1].1.end * PAGE_BYTES;
        let there = writers[block].there(bytes)?;
        if let Some(bytes) = close.iter().find_map(|(_, run)| common(run, &there).next()) {
            return still_there(block, bytes.start);
        }
    }
    Ok(())
}

/// To look whether so many pages are there takes no longer than to ask twice.
const APART_PAGES: u64 = 256;

/// Runs of pages of one block that are close enough to each other to be asked after at once.
fn close_together(runs: &[(usize, Range<u64>)]) -> impl Iterator<Item = (usize, &[(usize, Range<u64>)])> {
    let is_close = |(block, run): &(usize, Range<u64>), (next_block, next): &(usize, Range<u64>)| {
        block == next_block && next.start - run.end <= APART_PAGES
    };
    runs.chunk_by(is_close).map(|close| (close[0].0, close))
}

/// What of a run of pages is in these ranges of bytes, which ascend.
fn common<'a>(run: &Range<u64>, there: &'a [Range<u64>]) -> impl Iterator<Item = Range<u64>> + use<'a> {
    let bytes = run.start * PAGE_BYTES..run.end * PAGE_BYTES;
    let from = there.partition_point(|part| part.end <= bytes.start);
    there[from..]
        .iter()
        .take_while(move |part| part.start < bytes.end)
        .map(move |part| part.start.max(bytes.start)..part.end.min(bytes.end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_away_has_to_come_again() {
        let set = |pages: &[u64]| {
            let mut set = DirtyBitmap::new(8 * PAGE_BYTES);
            for page in pages {
                set.set(*page..page + 1);
            }
            set
        };
        let region = |name: &str| RamRegion {
            name: name.to_owned(),
            bytes: 8 * PAGE_BYTES,
            page_bytes: PAGE_BYTES,
            address: 0,
        };
        let regions = [region("ram"), region("vga")];
        let mut taken = TakenAway::default();
        taken.check(&regions, &[set(&[]), set(&[])]).unwrap();
        taken.0 = vec![set(&[1, 2]), set(&[7])];
        taken.check(&regions, &[set(&[1, 2, 3]), set(&[7])]).unwrap();
        let lost = taken.check(&regions, &[set(&[1, 2]), set(&[6])]).unwrap_err();
        assert!(
            matches!(&lost, AwaitError::NotNamed { block, offset } if block == "vga" && *offset == 7 * PAGE_BYTES),
            "{lost}"
        );
        taken.forget();
        taken.check(&regions, &[set(&[]), set(&[])]).unwrap();
    }

    #[test]
    fn runs_that_are_close_together_are_asked_after_at_once() {
        let runs = [(0, 0..2), (0, 5..6), (0, 262..263), (0, 520..521), (1, 521..522), (1, 600..700)];
        let joined: Vec<_> = close_together(&runs).map(|(block, close)| (block, close.len())).collect();
        assert_eq!(joined, [(0, 3), (0, 1), (1, 2)]);
        assert_eq!(close_together(&[]).count(), 0);
    }

    #[test]
    fn what_is_there_of_a_run_is_what_both_have() {
        let page = |pages: Range<u64>| pages.start * PAGE_BYTES..pages.end * PAGE_BYTES;
        let there = [page(0..2), page(4..6), page(8..20)];
        let both = |run: Range<u64>| common(&run, &there).collect::<Vec<_>>();
        assert_eq!(both(1..9), [page(1..2), page(4..6), page(8..9)]);
        assert_eq!(both(2..4), []);
        assert_eq!(both(10..12), vec![page(10..12)]);
        assert_eq!(both(20..30), []);
    }
}
