//! Transfer of guest memory: from the RAM blocks of a running QEMU over several streams into those of another one, with
//! no page lost.
//!
//! ```text
//!  source                                                                  destination
//!  DirtyLog ─► Owed ─► Cleared ─► Readable ─► Sender ══ N streams ══► Receiver ─► BlockWriter
//!              (marks cleared) (drained)        ▲  ◄══ Ack ══════
//!                                          BlockReader
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`dirty`] | sets of pages |
//! | [`round`] | the order of a round, as types: clear, drain, read |
//! | [`FirstPass`] | the first pass, with hot pages last |
//! | [`ram`] | RAM blocks as bytes, at source and destination |
//! | [`TrackedRam`] | the dirty log of a real QEMU |
//! | [`send`], [`receive`] | the two ends of the streams |
//! | [`Known`] | content that the destination has already, and need not be sent |
//! | [`Deltas`] | pieces of a page that changed since it was sent |
//! | [`Packing`] | compression of the data sent |
//! | [`Soft`] | free page hints of the guest |
//! | [`Awaited`], [`Remaining`] | pages that arrive after the switchover: post-copy |
//! | [`verify`] | comparison of both sides, by a path of its own |
//! | [`wire`] | requirements on a connection |
//!
//! Threads and blocking calls throughout. Nothing here knows QEMU's monitor, the handover, or how connections are
//! opened; this crate never decides by itself that a page need not be at the destination.

use std::sync::{Mutex, MutexGuard, PoisonError};

mod background;
mod chunk;
mod clock;
mod deltas;
pub mod dirty;
mod first_pass;
mod pack;
mod postcopy;
pub mod ram;
pub mod receive;
mod recent;
mod references;
pub mod round;
pub mod send;
mod soft;
mod tracked;
pub mod verify;
mod went;
pub mod wire;

pub use chunk::{Contents, FRAME_PAGES};
pub use deltas::{Deltas, DeltasCounted};
pub use dirty::{ChunkPages, DirtyBitmap};
pub use first_pass::FirstPass;
pub use pack::codec::BadPacked;
pub use pack::{Counted, Packing, Worth};
pub use postcopy::{
    Awaited, BadSet, Ledger, Placer, Recency, Remaining, Switch, decode_chunks, decode_set, encode_set,
};
pub use ram::{BlockReader, BlockWriter, RamError, RamRegion, TakesAway, open_destination, open_source};
pub use receive::{
    AttachError, DestinationRam, Discardable, Presumed, ReceiveError, Receiver, ReceiverEvent, ReceiverHandle,
};
pub use recent::Recent;
pub use references::{Known, NAME_BYTES, PageName, Referred, Templates};
pub use round::{
    Cleared, Cut, DirtyLog, DrainFailed, Owed, PartAround, Place, Readable, ScanError, ScanFailed, ScanStats,
};
pub use send::{
    BlockProgress, Interrupted, Progress, RoundStats, Saving, SendError, Sender, SenderHandle, Sent,
    SourceRam, stream_of,
};
pub use soft::Soft;
pub use tracee::TrackError;
pub use tracked::{LogError, TrackedRam};
pub use wire::{DataStream, FrameSink, FrameSource, HangUp};

/// Locks. A thread that died while it held the lock is reported by its guard, so its lock need not report it again.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
