//! The trait of a reduction, and the stages at which one ends.

use std::fmt;
use std::sync::Arc;

use crate::chunk::ChunkId;
use crate::chunk::encoding::{Encoder, PresumedPages};
use crate::page_set::PageSet;

/// Stage of a migration at which reductions end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReductionStage {
    /// All of memory was sent once: pages written later are on no disk.
    MemorySent,
    /// The guest is stopped, and the remaining pages are about to be sent.
    GuestStopped,
    /// The devices are saved, and the last round is about to be sent: no page of it may be missing.
    DevicesSaved,
    /// The guest is stopped, and the remaining pages are sent after the switchover.
    PostCopy,
}

/// A way to send fewer bytes, in one migration.
///
/// No method has a default, so that none is forgotten. All may be called from several threads at once.
pub trait Reduction: fmt::Debug + Send + Sync {
    /// Creates the encoder of one stream.
    fn encoder(self: Arc<Self>) -> Encoder;

    /// Learns that these pages of each block are sent in this round, or wait for it.
    fn awaited(&self, owed: &[PageSet], round: u32);

    /// Learns that the destination has applied a frame of a chunk, with these pages that it had to complete itself.
    fn acknowledged(&self, chunk: ChunkId, presumed: &PresumedPages);

    /// Learns that the destination could not complete these pages of a chunk: they are sent again.
    fn refused(&self, chunk: ChunkId, refused: &PresumedPages);

    /// Learns that a round was interrupted, so that these pages of each block may not have arrived. No stream sends
    /// during this call.
    fn interrupted(&self, owed: &[PageSet], round: u32);

    /// Learns that the destination discards these pages of each block.
    fn discarded(&self, pages: &[PageSet]);

    /// Learns that a dirty scan has found these pages of a block of memory.
    fn written(&self, block: usize, found: &PageSet);

    /// Returns how many of these pages will certainly not be reduced.
    fn full_pages(&self, owed: &[PageSet]) -> u64;

    /// Ends at the stages at which it has to, for good.
    fn end(&self, stage: ReductionStage);
}
