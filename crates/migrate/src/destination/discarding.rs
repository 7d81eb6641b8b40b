//! Post-copy: pages that are present with old content, and must be discarded before threads can wait for them.
//!
//! The source names most of them while its guest still runs ([`DiscardedPages::take`]), so that they do not prolong the
//! stop.

use std::ops::Range;

use ::memory::ram::{RamError, RamRegion};
use ::memory::{BlockWriter, DiscardMethod, PageSet, decode_chunks};
use proto::limits::{CHUNK_PAGES, PAGE_BYTES};
use tracee::{AddressRange, Injector, Process};

use super::post_copy_error::PostCopyError;
use host::ArrivingVm;
use host::ram;

/// Pages that were discarded before the source has named all missing pages.
#[derive(Debug, Default)]
pub(super) struct DiscardedPages(Vec<PageSet>);

/// The blocks of the guest's memory, and their writers.
pub(super) type Blocks<'a> = (&'a [RamRegion], &'a [Box<dyn BlockWriter>]);

/// A run of pages, or of bytes, with its block.
type BlockRun = (usize, Range<u64>);

impl DiscardedPages {
    /// Discards those of these pages that are present. Threads do not wait for them yet, so one of them may come back
    /// (the kernel makes huge pages of the surrounding pages): they are checked again when all missing pages are named.
    pub(super) fn take(
        &mut self,
        injector: &Injector,
        vm: &ArrivingVm,
        writers: &[Box<dyn BlockWriter>],
        set: &[u8],
    ) -> Result<(), PostCopyError> {
        let regions = ram::regions(&vm.blocks);
        if self.0.is_empty() {
            self.0 = regions.iter().map(|region| PageSet::new(region.bytes)).collect();
        }
        let mut runs = Vec::new();
        for (block, chunk, pages) in decode_chunks(set, &self.0)? {
            self.0[block].insert_into_chunk(chunk, &pages);
            let first = chunk * CHUNK_PAGES;
            runs.extend(pages.runs().map(|run| (block, first + run.start..first + run.end)));
        }
        discard_range(injector, &vm.process, (&regions, writers), runs)
    }

    /// Forgets the discarded pages: the source sends all of memory again, in rounds or after the guest.
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }

    /// Checks that every discarded page will arrive again. Otherwise it could not be distinguished from a zero page.
    pub(super) fn check(&self, regions: &[RamRegion], missing: &[PageSet]) -> Result<(), PostCopyError> {
        for ((taken, missing), region) in self.0.iter().zip(missing).zip(regions) {
            let mut lost = taken.clone();
            lost.remove(missing);
            if let Some(run) = lost.runs().next() {
                let offset = run.start * PAGE_BYTES;
                return Err(PostCopyError::NotInList { block: region.name.clone(), offset });
            }
        }
        Ok(())
    }
}

/// Returns all of these pages as runs with their block.
pub(super) fn runs_of(pages: &[PageSet]) -> impl Iterator<Item = BlockRun> + '_ {
    pages.iter().enumerate().flat_map(|(block, pages)| pages.runs().map(move |run| (block, run)))
}

/// Discards those of these pages, in ascending order, that are present.
pub(super) fn discard_range(
    injector: &Injector,
    process: &Process,
    (regions, writers): Blocks<'_>,
    runs: impl IntoIterator<Item = BlockRun>,
) -> Result<(), PostCopyError> {
    let (of_process, of_files) = split_by_method(writers, runs);
    for (block, run) in of_files {
        writers[block].discard_range(run.start * PAGE_BYTES..run.end * PAGE_BYTES)?;
    }
    let mapped_ranges = mapped_ranges(writers, &of_process)?.into_iter().map(|(block, bytes)| {
        let at = |offset| regions[block].address + offset;
        AddressRange::new(at(bytes.start), at(bytes.end))
    });
    let discarded: Vec<_> = mapped_ranges.collect();
    if !discarded.is_empty() {
        injector.discard(process, &discarded)?;
    }
    Ok(())
}

/// Checks that none of these pages is present.
pub(super) fn check_discarded(
    (regions, writers): Blocks<'_>,
    runs: impl IntoIterator<Item = BlockRun>,
) -> Result<(), PostCopyError> {
    let (of_process, of_files) = split_by_method(writers, runs);
    let mut first = mapped_ranges(writers, &of_process)?.first().map(|(block, bytes)| (*block, bytes.start));
    for (block, run) in of_files {
        if first.is_none() {
            let offset = writers[block].first_mapped(run.start * PAGE_BYTES..run.end * PAGE_BYTES)?;
            first = offset.map(|offset| (block, offset));
        }
    }
    first.map_or(Ok(()), |(block, offset)| {
        Err(PostCopyError::StillThere { block: regions[block].name.clone(), offset })
    })
}

/// Splits the runs into those that QEMU itself has to discard, and the others.
fn split_by_method(
    writers: &[Box<dyn BlockWriter>],
    runs: impl IntoIterator<Item = BlockRun>,
) -> (Vec<BlockRun>, Vec<BlockRun>) {
    runs.into_iter().partition(|(block, _)| writers[*block].discard_method() == DiscardMethod::ByProcess)
}

/// Returns the present parts of these pages, in bytes of their blocks.
fn mapped_ranges(writers: &[Box<dyn BlockWriter>], runs: &[BlockRun]) -> Result<Vec<BlockRun>, RamError> {
    let mut found = Vec::new();
    for (block, close) in group_close_runs(runs) {
        let (first, last) = (&close[0].1, &close[close.len() - 1].1);
        let mapped_ranges = writers[block].mapped_ranges(first.start * PAGE_BYTES..last.end * PAGE_BYTES)?;
        let both = close.iter().flat_map(|(_, run)| intersection(run, &mapped_ranges));
        found.extend(both.map(|bytes| (block, bytes)));
    }
    Ok(found)
}

/// Number of pages between two runs up to which one query over the gap is no slower than two queries.
const MAX_GAP_PAGES: u64 = 256;

/// Groups runs of pages of one block that are close enough for one query.
fn group_close_runs(runs: &[BlockRun]) -> impl Iterator<Item = (usize, &[BlockRun])> {
    let is_close = |(block, run): &BlockRun, (next_block, next): &BlockRun| {
        block == next_block && next.start - run.end <= MAX_GAP_PAGES
    };
    runs.chunk_by(is_close).map(|close| (close[0].0, close))
}

/// Returns the parts of a run of pages that are in these ascending ranges of bytes.
fn intersection<'a>(
    run: &Range<u64>,
    mapped_ranges: &'a [Range<u64>],
) -> impl Iterator<Item = Range<u64>> + use<'a> {
    let bytes = run.start * PAGE_BYTES..run.end * PAGE_BYTES;
    let from = mapped_ranges.partition_point(|part| part.end <= bytes.start);
    mapped_ranges[from..]
        .iter()
        .take_while(move |part| part.start < bytes.end)
        .map(move |part| part.start.max(bytes.start)..part.end.min(bytes.end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discarded_pages_have_to_be_missing_later() {
        let set = |pages: &[u64]| {
            let mut set = PageSet::new(8 * PAGE_BYTES);
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
        let mut taken = DiscardedPages::default();
        taken.check(&regions, &[set(&[]), set(&[])]).unwrap();
        taken.0 = vec![set(&[1, 2]), set(&[7])];
        taken.check(&regions, &[set(&[1, 2, 3]), set(&[7])]).unwrap();
        let lost = taken.check(&regions, &[set(&[1, 2]), set(&[6])]).unwrap_err();
        assert!(
            matches!(&lost, PostCopyError::NotInList { block, offset } if block == "vga" && *offset == 7 * PAGE_BYTES),
            "{lost}"
        );
        taken.forget();
        taken.check(&regions, &[set(&[]), set(&[])]).unwrap();
    }

    #[test]
    fn runs_that_are_close_together_are_asked_after_at_once() {
        let runs = [(0, 0..2), (0, 5..6), (0, 262..263), (0, 520..521), (1, 521..522), (1, 600..700)];
        let joined: Vec<_> = group_close_runs(&runs).map(|(block, close)| (block, close.len())).collect();
        assert_eq!(joined, [(0, 3), (0, 1), (1, 2)]);
        assert_eq!(group_close_runs(&[]).count(), 0);
    }

    #[test]
    fn what_is_there_of_a_run_is_what_both_have() {
        let page = |pages: Range<u64>| pages.start * PAGE_BYTES..pages.end * PAGE_BYTES;
        let mapped_ranges = [page(0..2), page(4..6), page(8..20)];
        let both = |run: Range<u64>| intersection(&run, &mapped_ranges).collect::<Vec<_>>();
        assert_eq!(both(1..9), [page(1..2), page(4..6), page(8..9)]);
        assert_eq!(both(2..4), []);
        assert_eq!(both(10..12), vec![page(10..12)]);
        assert_eq!(both(20..30), []);
    }
}
