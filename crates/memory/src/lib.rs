//! Transfer of guest memory: from the RAM blocks of a running QEMU over several streams into those of another one, with
//! no page lost.
//!
//! ```text
//!  source                                                                       destination
//!  DirtyLog ─► OwedPages ─► ClearedPages ─► ReadablePages ─► Sender ══ N streams ══► Receiver ─► BlockWriter
//!                         (marks cleared)     (drained)        ▲  ◄══ Ack ══════
//!                                                         BlockReader
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`page_set`] | sets of pages |
//! | [`round`] | the order of a round, as types: clear, drain, read |
//! | [`FirstPass`] | the first pass, with hot pages last |
//! | [`ram`] | RAM blocks as bytes, at source and destination |
//! | [`TrackedRam`] | the dirty log of a real QEMU |
//! | [`send`], [`receive`] | the two ends of the streams |
//! | [`ContentIndex`] | content that the destination has already, and need not be sent |
//! | [`Deltas`] | pieces of a page that changed since it was sent |
//! | [`CompressionState`] | compression of the data sent |
//! | [`HintedPages`] | free page hints of the guest |
//! | [`MissingPages`], [`RemainingPages`] | pages that arrive after the switchover: post-copy |
//! | [`sample_content`] | how much of memory has content, for a forecast |
//! | [`verify`] | comparison of both sides, by a path of its own |
//!
//! Threads and blocking calls throughout. Nothing here knows QEMU's monitor, the handover, or what carries the streams
//! ([`link::transport`]); this crate never decides by itself that a page need not be at the destination.

use std::sync::{Mutex, MutexGuard, PoisonError};

mod chunk;
mod clock;
mod content_hash;
mod first_pass;
mod meter;
pub mod page_set;
mod post_copy;
mod priority;
pub mod ram;
pub mod receive;
mod reductions;
pub mod round;
pub mod send;
mod sent_history;
mod survey;
mod tracked;
pub mod verify;

pub use chunk::{FRAME_PAGES, PageCounts};
pub use content_hash::{CONTENT_HASH_BYTES, ContentHash};
pub use first_pass::FirstPass;
pub use meter::{LinkCounters, LinkMeter};
pub use page_set::{ChunkPages, PageSet};
pub use post_copy::{
    BadPageSet, FaultReader, MissingPages, MissingPagesFile, PageArrivalError, PageRequests, Placer,
    RecentWrites, RemainingPages, RequestsEnd, WriterSwitch, answer_page_requests, decode_chunks, decode_set,
    encode_set, receive_missing_pages,
};
pub use ram::{BlockReader, BlockWriter, DiscardMethod, RamError, RamRegion, open_destination, open_source};
pub use receive::{
    AttachError, DestinationRam, ReceiveError, Receiver, ReceiverEvent, ReceiverHandle, ZeroedRange,
};
pub use reductions::compression::{CompressionCounters, CompressionCriteria, CompressionState};
pub use reductions::decoders::AcceptedReductions;
pub use reductions::decoding::BadPacked;
pub use reductions::deltas::{DeltaCounters, Deltas};
pub use reductions::hints::HintedPages;
pub use reductions::references::{ContentIndex, ReferenceOutcome, Templates};
pub use reductions::{Reduction, ReductionStage, Reductions};
pub use round::{
    ClearedPages, DirtyLog, DirtyLogError, DrainFailed, OwedPages, PageCursor, PartBoundary, ReadablePages,
    ScanError, ScanFailed, ScanStats, WrappedPart,
};
pub use send::{
    BlockProgress, CompletedRound, InterruptedRound, RoundProgress, RoundStats, SendError, Sender,
    SenderHandle, SourceRam, stream_of,
};
pub use sent_history::SentHistory;
pub use survey::{ContentSample, sample_content};
pub use tracee::TrackError;
pub use tracked::TrackedRam;

/// Locks. A thread that died while it held the lock is reported by its guard, so its lock need not report it again.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
