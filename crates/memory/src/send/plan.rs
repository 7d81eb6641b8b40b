//! Assignment of chunks to streams.

use std::time::Instant;

use crate::chunk::ChunkId;
use crate::page_set::PageSet;

/// Returns the stream that sends a chunk, in every round (trap 6).
pub fn stream_of(block: u16, chunk: u64, streams: u16) -> u16 {
    ((chunk + u64::from(block)) % u64::from(streams.max(1))) as u16
}

/// The work of a round.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) round: u32,
    pub(super) pages: u64,
    /// Number of pages of each block.
    pub(super) block_pages: Vec<u64>,
    /// Time by which everything has to be sent and acknowledged; None without a limit.
    pub(super) deadline: Option<Instant>,
    /// Time after which no further chunk is begun; None to send all.
    pub(super) until: Option<Instant>,
    /// For each stream its chunks, in ascending order.
    pub(super) shares: Vec<Vec<ChunkId>>,
}

impl Plan {
    pub(super) fn new(blocks: &[PageSet], streams: u16, round: u32, deadline: Option<Instant>) -> Self {
        let mut shares = vec![Vec::new(); usize::from(streams)];
        let mut block_pages = vec![0; blocks.len()];
        for ((block, bitmap), pages) in (0_u16..).zip(blocks).zip(&mut block_pages) {
            for chunk in bitmap.nonempty_chunks() {
                *pages += bitmap.chunk(chunk).count();
                shares[usize::from(stream_of(block, chunk, streams))]
                    .push(ChunkId { block, chunk: chunk as u32 });
            }
        }
        let pages = block_pages.iter().sum();
        Self { round, pages, block_pages, deadline, until: None, shares }
    }

    /// Returns the chunks of a stream for which there is time; one of them in any case, so that every round makes
    /// progress.
    pub(super) fn share(&self, stream: u16) -> impl Iterator<Item = &ChunkId> {
        let is_in_time = |number: usize| number == 0 || self.until.is_none_or(|until| Instant::now() < until);
        let share = self.shares[usize::from(stream)].iter().enumerate();
        share.take_while(move |(number, _)| is_in_time(*number)).map(|(_, place)| place)
    }
}
