//! The order of a round, as types: clear the marks, drain block I/O, only then read (design, traps 1 and 4).
//!
//! ```text
//! OwedPages ──clear_marks──► ClearedPages ──drain──► ReadablePages ──Sender::send_round──► OwedPages
//! ```
//!
//! Reason for this order: a disk read with `O_DIRECT` is DMA into guest pages. The page is marked when the read is
//! submitted, not when the data lands, so a page that is read between the two is sent with old bytes and no mark
//! remains. Once all requests that were in flight when the marks were cleared have completed, every later change has a
//! mark of its own, which the next round finds.
//!
//! Each stage is consumed by the next one and each failure returns the pages: pages owed to the destination can be
//! neither read too early nor lost on the way.
//!
//! ```compile_fail,E0308
//! # use whimbrel_memory as memory;
//! # fn f(owed: memory::OwedPages, log: &mut dyn memory::DirtyLog, sender: memory::Sender) {
//! let cleared = owed.clear_marks(log).unwrap();
//! sender.send_round(cleared); // not drained: does not compile
//! # }
//! ```
//!
//! ```no_run
//! # use whimbrel_memory as memory;
//! # fn f(owed: memory::OwedPages, log: &mut dyn memory::DirtyLog, sender: memory::Sender) {
//! let cleared = owed.clear_marks(log).unwrap();
//! let readable = cleared.drain(|| Ok::<(), std::io::Error>(())).unwrap();
//! sender.send_round(readable).unwrap();
//! # }
//! ```

use std::cmp::Ordering;
use std::ops::Range;

use proto::limits::PAGE_BYTES;

use crate::page_set::PageSet;
use crate::ram::RamError;
use tracee::TrackError;

/// Result and cost of one dirty scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanStats {
    /// Pages found written (or unmapped since they were written), all blocks together.
    pub pages: u64,
    /// Duration, in microseconds.
    pub duration_us: u64,
}

/// Error of tracking writes to RAM.
#[derive(Debug, thiserror::Error)]
pub enum DirtyLogError {
    /// The kernel cannot track the writes.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// The memory cannot be reached.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The log of blocks that are no memory.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

/// Error of reading the dirty log.
#[derive(Debug, thiserror::Error)]
#[error("cannot find the dirty pages of {block}")]
pub struct ScanError {
    /// Name of the block.
    pub block: String,
    /// Error of the operating system.
    pub source: DirtyLogError,
}

/// Source of dirty pages: records which pages were written.
pub trait DirtyLog: Send {
    /// Adds all pages that were written since the last call (for the first call: since the log began) to `into`, which
    /// has one bitmap for each block in the order of the proposal. Removes them from the log.
    ///
    /// Clearing a mark and protecting the page again have to be one step, and pages that were written and then dropped
    /// count as written (traps 3 and 4). On an error, `into` holds the pages found by then.
    fn scan_dirty(&mut self, into: &mut [PageSet]) -> Result<ScanStats, ScanError>;
}

/// Pages that the destination must receive before the guest may run there: those written since they were last sent, and
/// those sent but never acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwedPages {
    pub(crate) blocks: Vec<PageSet>,
    pub(crate) round: u32,
}

impl OwedPages {
    /// Creates the set of all pages, as before the first round, from the length of each block in bytes, in the order of
    /// the proposal.
    pub fn everything(block_bytes: impl IntoIterator<Item = u64>) -> Self {
        Self { blocks: block_bytes.into_iter().map(PageSet::full).collect(), round: 0 }
    }

    /// Creates a set of these pages of each block, as before the first round.
    pub fn of(blocks: Vec<PageSet>) -> Self {
        Self { blocks, round: 0 }
    }

    /// Adds pages of the blocks from `first` on, which were not scanned before.
    pub fn add_pages(&mut self, first: usize, pages: &[PageSet]) {
        let blocks = self.blocks.get_mut(first..).unwrap_or_default();
        blocks.iter_mut().zip(pages).for_each(|(block, pages)| block.insert(pages));
    }

    /// Returns the pages of these blocks, to which a log adds those that it finds; none if a block does not exist.
    pub fn blocks_mut(&mut self, blocks: Range<usize>) -> Option<&mut [PageSet]> {
        self.blocks.get_mut(blocks)
    }

    /// Adds the pages that a [part](ReadablePages::part) left out.
    pub fn take_back(&mut self, later: &Self) {
        self.blocks.iter_mut().zip(&later.blocks).for_each(|(mine, theirs)| mine.insert(theirs));
    }

    /// Returns the number of pages owed.
    pub fn pages(&self) -> u64 {
        self.blocks.iter().map(PageSet::count).sum()
    }

    /// Returns the pages of each block.
    pub fn blocks(&self) -> &[PageSet] {
        &self.blocks
    }

    /// Returns the last round that was begun; 0 before the first. The numbers continue over all generations of
    /// connections.
    pub fn round(&self) -> u32 {
        self.round
    }

    /// Begins a round: takes the dirty pages out of the log. Pages that were owed before stay so.
    pub fn clear_marks(mut self, log: &mut dyn DirtyLog) -> Result<ClearedPages, ScanFailed> {
        match log.scan_dirty(&mut self.blocks) {
            Ok(scan) => Ok(ClearedPages { owed: self, scan }),
            Err(source) => Err(ScanFailed { owed: self, source }),
        }
    }

    /// Begins a round as [`clear_marks`](Self::clear_marks) does. Returns also the pages found in the first `first`
    /// blocks.
    pub fn clear_marks_and_report(
        mut self,
        log: &mut dyn DirtyLog,
        first: usize,
    ) -> Result<(ClearedPages, Vec<PageSet>), ScanFailed> {
        let first = first.min(self.blocks.len());
        let others = self.blocks.split_off(first);
        let mut into: Vec<_> = self.blocks.iter().map(PageSet::emptied).chain(others).collect();
        let taken = log.scan_dirty(&mut into);
        self.blocks.extend(into.split_off(first));
        self.blocks.iter_mut().zip(&into).for_each(|(mine, found)| mine.insert(found));
        match taken {
            Ok(scan) => Ok((ClearedPages { owed: self, scan }, into)),
            Err(source) => Err(ScanFailed { owed: self, source }),
        }
    }
}

/// The dirty log failed; the pages that it reported are kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot begin the round")]
pub struct ScanFailed {
    /// The pages owed, with those that the log reported before it failed.
    pub owed: OwedPages,
    /// Reason of the failure.
    pub source: ScanError,
}

/// A round whose marks are cleared. Block I/O that was submitted before may still be writing into guest memory, so the
/// pages must not be read yet.
#[must_use = "the pages in it are owed to the other side"]
#[derive(Debug)]
pub struct ClearedPages {
    owed: OwedPages,
    scan: ScanStats,
}

impl ClearedPages {
    /// Returns the statistics of the dirty scan.
    pub fn scan(&self) -> ScanStats {
        self.scan
    }

    /// Returns the number of pages that this round has to send.
    pub fn pages(&self) -> u64 {
        self.owed.pages()
    }

    /// Runs `drain`, which returns when all block I/O that was in flight at its call has completed (an empty QMP
    /// `transaction`), and then allows the pages to be read.
    pub fn drain<E>(self, drain: impl FnOnce() -> Result<(), E>) -> Result<ReadablePages, DrainFailed<E>>
    where
        E: std::error::Error + 'static,
    {
        match drain() {
            Ok(()) => Ok(ReadablePages { owed: self.owed }),
            Err(source) => Err(DrainFailed { owed: self.owed, source }),
        }
    }

    /// Allows the pages to be read because the guest had been stopped **before** the marks were cleared: QEMU's `stop`
    /// drains by itself, and since then nothing was submitted.
    pub fn skip_drain(self) -> ReadablePages {
        ReadablePages { owed: self.owed }
    }

    /// Gives the round up; its pages stay owed.
    pub fn give_up(self) -> OwedPages {
        self.owed
    }
}

/// Block I/O could not be drained; the pages stay owed.
#[derive(Debug, thiserror::Error)]
#[error("block I/O in flight could not be drained")]
pub struct DrainFailed<E: std::error::Error + 'static> {
    /// The pages owed.
    pub owed: OwedPages,
    /// Error returned by the caller's drain.
    pub source: E,
}

/// Pages that may be read and sent.
#[must_use = "the pages in it are owed to the other side"]
#[derive(Debug)]
pub struct ReadablePages {
    pub(crate) owed: OwedPages,
}

/// Boundary at which a part of a round may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartBoundary {
    /// After any page: for memory alone.
    Anywhere,
    /// Between clusters (64 KiB) of the images to which arriving disks are written. A hole in two pieces, neither of
    /// them a whole cluster, would be written as zeros there.
    BetweenClusters,
}

impl PartBoundary {
    /// Returns the first boundary at or after a page.
    fn at_or_behind(self, page: u64) -> u64 {
        match self {
            Self::Anywhere => page,
            Self::BetweenClusters => page.next_multiple_of((64 << 10) / PAGE_BYTES),
        }
    }
}

/// Position in all blocks, one after the other, at which a part of a round begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCursor {
    block: usize,
    page: u64,
}

/// Result of [`ReadablePages::part_wrapping`].
#[derive(Debug)]
pub struct WrappedPart {
    /// The pages of this round.
    pub readable: ReadablePages,
    /// The other pages.
    pub later: OwedPages,
    /// Position at which the next part begins.
    pub next: PageCursor,
    /// True if this part has reached the end of all blocks.
    pub has_wrapped: bool,
}

impl PageCursor {
    /// Creates a position from a page of a block.
    pub fn at(block: u16, page: u64) -> Self {
        Self { block: block.into(), page }
    }
}

impl ReadablePages {
    /// Splits off the first `pages` pages from a position on, extended to the next boundary. The others stay owed if
    /// the caller adds them again ([`OwedPages::take_back`]). Returns also the beginning of the next part; None if this
    /// one reaches the end.
    pub fn part(
        mut self,
        from: PageCursor,
        pages: u64,
        cut: PartBoundary,
    ) -> (Self, OwedPages, Option<PageCursor>) {
        let mut later = self.owed.clone();
        let (mut left, mut next) = (pages, None);
        for (number, (now, later)) in self.owed.blocks.iter_mut().zip(&mut later.blocks).enumerate() {
            let start = match number.cmp(&from.block) {
                Ordering::Less => now.pages(),
                Ordering::Equal => from.page.min(now.pages()),
                Ordering::Greater => 0,
            };
            let mut end = start;
            for run in later.runs_within(start..now.pages()) {
                if left == 0 {
                    break;
                }
                let taken = (run.end - run.start).min(left);
                end = run.start + taken;
                left -= taken;
            }
            // Without pages of the next part in this block, that part begins here.
            if left == 0 && next.is_none() {
                end = cut.at_or_behind(end).min(now.pages());
                next = Some(PageCursor { block: number, page: end });
            }
            now.clear(0..start);
            now.clear(end..now.pages());
            later.clear(start..end);
        }
        (self, later, next)
    }

    /// Splits off `pages` pages from a position on, continuing from the beginning after the end, so that in consecutive
    /// rounds no page waits for ever. The others stay owed if the caller adds them again ([`OwedPages::take_back`]).
    pub fn part_wrapping(self, from: PageCursor, pages: u64, cut: PartBoundary) -> WrappedPart {
        let (part, later, next) = self.part(from, pages, cut);
        if let Some(next) = next {
            return WrappedPart { readable: part, later, next, has_wrapped: false };
        }
        let left = pages.saturating_sub(part.pages());
        let (more, later, next) = Self { owed: later }.part(PageCursor::default(), left, cut);
        WrappedPart {
            readable: part.and(more.owed()),
            later,
            next: next.unwrap_or_default(),
            has_wrapped: true,
        }
    }

    /// Removes these pages of each block from the round. They stay owed if the caller adds them again
    /// ([`OwedPages::take_back`]).
    pub fn without(mut self, pages: &[PageSet]) -> (Self, OwedPages) {
        let mut later = OwedPages {
            blocks: self.owed.blocks.iter().map(PageSet::emptied).collect(),
            round: self.owed.round,
        };
        for ((now, later), pages) in self.owed.blocks.iter_mut().zip(&mut later.blocks).zip(pages) {
            for chunk in pages.nonempty_chunks() {
                let mut both = now.chunk(chunk);
                both.retain(&pages.chunk(chunk));
                now.remove_from_chunk(chunk, &both);
                later.insert_into_chunk(chunk, &both);
            }
        }
        (self, later)
    }

    /// Restricts the round to these pages of each block; the others stay owed if the caller adds them again
    /// ([`OwedPages::take_back`]).
    pub fn only(self, pages: &[PageSet]) -> (Self, OwedPages) {
        let (others, these) = self.without(pages);
        (Self { owed: these }, others.owed)
    }

    /// Adds pages that were [put off](Self::without): their marks were cleared before those of this round.
    pub fn and(mut self, put_off: &OwedPages) -> Self {
        self.owed.take_back(put_off);
        self
    }

    /// Returns the pages owed.
    pub fn owed(&self) -> &OwedPages {
        &self.owed
    }

    /// Returns the number of pages that this round has to send.
    pub fn pages(&self) -> u64 {
        self.owed.pages()
    }

    /// Gives the round up; its pages stay owed.
    pub fn give_up(self) -> OwedPages {
        self.owed
    }
}

#[cfg(test)]
mod tests;
