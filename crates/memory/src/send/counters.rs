//! Progress of a round, counted by all threads of a sender.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::chunk::PageCounts;
use crate::page_set::ChunkPages;
use crate::send::plan::Plan;
use crate::send::{BlockProgress, RoundProgress};

#[derive(Debug, Default)]
pub(super) struct RoundCounters {
    round: AtomicU32,
    pages: AtomicU64,
    data: AtomicU64,
    zero: AtomicU64,
    hole: AtomicU64,
    reference: AtomicU64,
    delta: AtomicU64,
    filled: AtomicU64,
    hinted: AtomicU64,
    refused: AtomicU64,
    wire_bytes: AtomicU64,
    blocks: Vec<BlockCounters>,
}

#[derive(Debug, Default)]
struct BlockCounters {
    pages: AtomicU64,
    sent: AtomicU64,
}

impl RoundCounters {
    /// Creates counters for `blocks` blocks.
    pub(super) fn new(blocks: usize) -> Self {
        Self {
            blocks: std::iter::repeat_with(BlockCounters::default).take(blocks).collect(),
            ..Self::default()
        }
    }

    /// Resets the counters for a round.
    pub(super) fn begin(&self, plan: &Plan) {
        self.round.store(plan.round, Ordering::Relaxed);
        self.pages.store(plan.pages, Ordering::Relaxed);
        let Self {
            round: _,
            pages: _,
            data,
            zero,
            hole,
            reference,
            delta,
            filled,
            hinted,
            refused,
            wire_bytes,
            blocks,
        } = self;
        for counter in [data, zero, hole, reference, delta, filled, hinted, refused, wire_bytes] {
            counter.store(0, Ordering::Relaxed);
        }
        for (block, pages) in blocks.iter().zip(&plan.block_pages) {
            block.sent.store(0, Ordering::Relaxed);
            block.pages.store(*pages, Ordering::Relaxed);
        }
    }

    /// Counts pages of a block as sent, in a frame of `bytes` bytes.
    pub(super) fn sent(&self, block: u16, taken: &ChunkPages, contents: &PageCounts, bytes: usize) {
        self.data.fetch_add(contents.data, Ordering::Relaxed);
        self.zero.fetch_add(contents.zero, Ordering::Relaxed);
        self.hole.fetch_add(contents.hole, Ordering::Relaxed);
        self.reference.fetch_add(contents.reference, Ordering::Relaxed);
        self.delta.fetch_add(contents.delta, Ordering::Relaxed);
        self.filled.fetch_add(contents.filled, Ordering::Relaxed);
        self.hinted.fetch_add(contents.hinted, Ordering::Relaxed);
        self.sent_bytes(bytes);
        if let Some(block) = self.blocks.get(usize::from(block)) {
            block.sent.fetch_add(taken.count(), Ordering::Relaxed);
        }
    }

    /// Counts bytes as sent.
    pub(super) fn sent_bytes(&self, bytes: usize) {
        self.wire_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts pages that the destination lacks.
    pub(super) fn refused(&self, pages: u64) {
        self.refused.fetch_add(pages, Ordering::Relaxed);
    }

    pub(super) fn progress(&self) -> RoundProgress {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let sent = PageCounts {
            data: get(&self.data),
            zero: get(&self.zero),
            hole: get(&self.hole),
            reference: get(&self.reference),
            delta: get(&self.delta),
            filled: get(&self.filled),
            hinted: get(&self.hinted),
        };
        RoundProgress {
            round: self.round.load(Ordering::Relaxed),
            pages: get(&self.pages),
            sent,
            refused: get(&self.refused),
            wire_bytes: get(&self.wire_bytes),
        }
    }

    pub(super) fn block_progress(&self) -> Vec<BlockProgress> {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let of =
            |block: &BlockCounters| BlockProgress { pages: get(&block.pages), sent_pages: get(&block.sent) };
        self.blocks.iter().map(of).collect()
    }
}
