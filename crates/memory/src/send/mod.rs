//! The source's side of the streams: rounds of pages out, acknowledgements in.
//!
//! ```text
//!  send_round(Readable) ─► plan: dirty chunks by stream
//!     worker 0 ─ read, find zeros, pack, frame ─► stream 0 ─►        ack reader 0 ◄─ Ack
//!     worker 1 ─ read, find zeros, pack, frame ─► stream 1 ─►        ack reader 1 ◄─ Ack
//!  ◄─ RoundStats when every stream's RoundEnd is acknowledged
//! ```
//!
//! # No page is lost
//!
//! A page is owed until the frame that carried it is acknowledged: pages leave the set of what is owed there and
//! nowhere else. So when a stream breaks, what is left in the set is what was not sent and what was sent but may not
//! have arrived, and nobody has to put it together (trap 7). A page that had arrived after all is sent twice, which
//! is harmless: its second copy was read later.
//!
//! # Order
//!
//! A chunk belongs to one stream ([`stream_of`]), within which frames are applied in order (trap 6). Which chunk
//! belongs to which stream stays the same as long as the number of streams does, and that is fixed for a generation.
//!
//! # Few threads
//!
//! Where the guest suffers only some of the workers read and send at the same time, in turns, chunk by chunk
//! ([`SenderHandle::copies_in`]). Each stream sends its own chunks in the same order as ever.
//!
//! # Few pages
//!
//! Waking a thread costs more than sending a page. A round of few pages is sent by the caller's own thread, one write
//! for each stream; only the acknowledgements come through the threads that wait for them anyway.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use link::LinkError;
use proto::frame::Kind;
use proto::limits::STREAMS;
use proto::pages::BadPages;

use crate::chunk::Contents;
use crate::deltas::Deltas;
use crate::pack::Packing;
use crate::ram::{BlockReader, RamError};
use crate::references::Known;
use crate::round::{Owed, Readable};
use crate::soft::Soft;
use crate::wire::{DataStream, is_transient};

mod counters;
mod plan;
mod shared;
mod stream;
mod turns;

use plan::Plan;
pub use plan::stream_of;
use shared::Shared;

/// Rounds of at most so many pages (512 KiB) are sent by the caller's thread.
const INLINE_PAGES: u64 = 128;

/// Most frames of a stream that wait for their acknowledgement. What waits is remembered in 100 bytes a frame, its
/// data is not kept.
const WINDOW_FRAMES: usize = 4096;

/// The blocks of the source's RAM in the order of the proposal.
pub type SourceRam = Arc<[Box<dyn BlockReader>]>;

/// How less is sent, the same for all generations of a migration.
#[derive(Clone, Debug, Default)]
pub struct Saving {
    /// Pages that the other side has are referred to. It has to have said that it takes references.
    pub known: Option<Arc<Known>>,
    /// Of pages that are sent again what changed is sent. The other side has to have said that it takes that.
    pub deltas: Option<Arc<Deltas>>,
    /// Data is compressed. The other side has to have named the codecs.
    pub packing: Option<Arc<Packing>>,
    /// What the guest does not use is left out.
    pub soft: Option<Arc<Soft>>,
}

/// Why a round could not be sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// A connection failed. The next generation of connections can go on.
    #[error("data stream {stream} failed")]
    Stream {
        /// Which stream.
        stream: u16,
        /// What the connection said.
        source: LinkError,
    },
    /// The other side sent something that is no acknowledgement.
    #[error(
        "the other side sent a {kind:?} frame on data stream {stream}, where only acknowledgements are allowed"
    )]
    UnexpectedFrame {
        /// Which stream.
        stream: u16,
        /// What came.
        kind: Kind,
    },
    /// The other side sent an acknowledgement that cannot be read.
    #[error("bad acknowledgement on data stream {stream}")]
    BadAck {
        /// Which stream.
        stream: u16,
        /// What is wrong with it.
        source: BadPages,
    },
    /// The other side acknowledged what was not sent, or took an acknowledgement back.
    #[error("the other side acknowledged frame {seq} of data stream {stream}; {expected} is not it")]
    WrongAck {
        /// Which stream.
        stream: u16,
        /// What it acknowledged.
        seq: u64,
        /// What it could have acknowledged: from the last acknowledged frame to the last one sent.
        expected: AckRange,
    },
    /// The other side misses pages that nobody presumed to be there, or misses them twice.
    #[error("the other side misses pages of frame {seq} of data stream {stream}, all of which it was sent")]
    WrongMissing {
        /// Which stream.
        stream: u16,
        /// The frame that it names.
        seq: u64,
    },
    /// Guest memory, or a disk, cannot be read; no connection can help.
    #[error("cannot read {block} at {offset:#x}")]
    Memory {
        /// The block, for people.
        block: String,
        /// Where, in bytes.
        offset: u64,
        /// Why.
        source: RamError,
    },
    /// The other side has not acknowledged everything in time.
    #[error("the other side has not acknowledged everything in time")]
    Overdue,
    /// [`SenderHandle::cancel`] was called, or the sender ended.
    #[error("sending was cancelled")]
    Cancelled,
    /// A thread of ours died: a mistake in this program.
    #[error("the thread of data stream {stream} died; please report this")]
    ThreadDied {
        /// Which stream.
        stream: u16,
    },
}

impl SendError {
    /// Whether new connections may help.
    pub fn is_connection(&self) -> bool {
        match self {
            Self::Stream { source, .. } => is_transient(source),
            Self::Overdue => true,
            _ => false,
        }
    }
}

/// Sequence numbers that an acknowledgement may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckRange {
    /// The last one acknowledged.
    pub from: u64,
    /// The last one sent.
    pub to: u64,
}

impl std::fmt::Display for AckRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

/// What a round was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundStats {
    /// Which one, from 1 on.
    pub round: u32,
    /// Pages by what they held.
    pub contents: Contents,
    /// Pages of `contents.reference` and `contents.delta` that the other side did not have after all: they are owed
    /// still.
    pub refused_pages: u64,
    /// Bytes of frames given to the connections, headers included (TLS and TCP come on top).
    pub wire_bytes: u64,
    /// From the first page read until everything was acknowledged, in microseconds.
    pub duration_us: u64,
}

/// How far a round is; see [`SenderHandle::progress`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Which round, from 1 on.
    pub round: u32,
    /// Pages of the round.
    pub pages: u64,
    /// Pages that were sent, by what they held.
    pub sent: Contents,
    /// Pages that the other side does not have, although they were referred to or changed.
    pub refused: u64,
    /// Bytes of frames given to the connections in this round.
    pub wire_bytes: u64,
}

/// How far a round is with one block; see [`SenderHandle::of_blocks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockProgress {
    /// Pages of the round.
    pub pages: u64,
    /// Those of them that were sent.
    pub sent_pages: u64,
}

/// A round that came to no end. The sender is gone with its connections; go on with a new one.
#[derive(Debug, thiserror::Error)]
#[error("round {round} was interrupted", round = owed.round())]
pub struct Interrupted {
    /// Everything that was not acknowledged.
    pub owed: Owed,
    /// What the round had sent.
    pub stats: RoundStats,
    /// Why.
    #[source]
    pub cause: SendError,
}

/// A round that the other side has applied wholly.
#[derive(Debug)]
pub struct Sent {
    /// Ready for the next round.
    pub sender: Sender,
    /// Nothing is owed any more but what the dirty log will tell, pages of which a reference or a change was refused, and
    /// those for which there was no time.
    pub owed: Owed,
    /// What the round was.
    pub stats: RoundStats,
}

/// Sends rounds over the streams of one generation. Dropping it ends connections and threads.
#[derive(Debug)]
pub struct Sender {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Sender {
    /// Starts the threads of a generation: two for each stream. The place of a stream in the list is its number.
    ///
    /// # Errors
    /// When the system gives no more threads, or there is no stream.
    pub fn start(ram: SourceRam, streams: Vec<DataStream>) -> io::Result<Self> {
        Self::saving(ram, Saving::default(), streams)
    }

    /// As [`start`](Self::start), and sends less.
    ///
    /// # Errors
    /// As there.
    pub fn saving(ram: SourceRam, saving: Saving, streams: Vec<DataStream>) -> io::Result<Self> {
        Self::with_window(ram, saving, streams, WINDOW_FRAMES)
    }

    pub(crate) fn with_window(
        ram: SourceRam,
        saving: Saving,
        streams: Vec<DataStream>,
        window: usize,
    ) -> io::Result<Self> {
        if streams.is_empty() || streams.len() > usize::from(STREAMS) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (shared, sources) = Shared::new(ram, saving, streams, window);
        let mut sender = Self { shared: Arc::new(shared), threads: Vec::new() };
        for (stream, source) in (0_u16..).zip(sources) {
            let shared = Arc::clone(&sender.shared);
            sender.spawn(format!("acks-{stream}"), move || shared.read_acks(stream, source))?;
            let shared = Arc::clone(&sender.shared);
            sender.spawn(format!("pages-{stream}"), move || shared.work(stream))?;
        }
        Ok(sender)
    }

    fn spawn(&mut self, name: String, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        // Dropping the sender ends the threads that were started before.
        self.threads.push(thread::Builder::new().name(name).spawn(run)?);
        Ok(())
    }

    /// For other threads: cancel, and see how far it is.
    pub fn handle(&self) -> SenderHandle {
        SenderHandle(Arc::clone(&self.shared))
    }

    /// Sends all pages of a round and waits until all of them are acknowledged.
    ///
    /// # Errors
    /// [`Interrupted`] when a connection breaks, guest memory cannot be read, or somebody cancels.
    pub fn send_round(self, pages: Readable) -> Result<Sent, Box<Interrupted>> {
        self.send(pages, None, None)
    }

    /// As [`send_round`](Self::send_round), but begins no chunk after a moment: pages that are not sent by then stay owed.
    ///
    /// # Errors
    /// As there.
    pub fn send_round_until(self, pages: Readable, until: Instant) -> Result<Sent, Box<Interrupted>> {
        self.send(pages, None, Some(until))
    }

    /// As [`send_round`](Self::send_round), for a guest that stands still meanwhile: it does so no longer than until
    /// `deadline`, whatever the cap on the sending rate is. The other side's kernel takes bytes and keeps connections
    /// alive also for an agent that hangs.
    ///
    /// # Errors
    /// As there, and with [`SendError::Overdue`].
    pub fn send_round_by(self, pages: Readable, deadline: Instant) -> Result<Sent, Box<Interrupted>> {
        self.send(pages, Some(deadline), None)
    }

    fn send(
        mut self,
        pages: Readable,
        deadline: Option<Instant>,
        until: Option<Instant>,
    ) -> Result<Sent, Box<Interrupted>> {
        let started = Instant::now();
        let round = pages.owed.round + 1;
        let plan = Plan::new(&pages.owed.blocks, self.shared.stream_count(), round, deadline);
        let plan = Arc::new(Plan { until, ..plan });
        self.shared.begin(pages.owed.blocks, &plan);
        if plan.pages <= INLINE_PAGES {
            (0..self.shared.stream_count()).for_each(|stream| self.shared.send_share(stream, &plan, None));
        } else {
            self.shared.wake_workers(&plan);
        }
        let failure = self.shared.wait_settled(deadline);
        if failure.is_some() {
            // No thread of this generation does anything after this.
            self.end_threads();
        }
        let owed = Owed { blocks: self.shared.take_owed(), round };
        if failure.is_some() {
            self.shared.forget(&owed.blocks, round);
        }
        let progress = self.shared.progress();
        let stats = RoundStats {
            round,
            contents: progress.sent,
            refused_pages: progress.refused,
            wire_bytes: progress.wire_bytes,
            duration_us: started.elapsed().as_micros() as u64,
        };
        match failure {
            None => Ok(Sent { sender: self, owed, stats }),
            Some(cause) => Err(Box::new(Interrupted { owed, stats, cause })),
        }
    }

    fn end_threads(&mut self) {
        self.shared.fail(SendError::Cancelled);
        for thread in self.threads.drain(..) {
            // A thread that died has told so through its guard.
            let _ = thread.join();
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.end_threads();
    }
}

/// A view of a [`Sender`] from other threads.
#[derive(Clone, Debug)]
pub struct SenderHandle(Arc<Shared>);

impl SenderHandle {
    /// Ends the round in progress, or the next one, at once, with [`SendError::Cancelled`].
    pub fn cancel(&self) {
        self.0.fail(SendError::Cancelled);
    }

    /// How far the round in progress is.
    pub fn progress(&self) -> Progress {
        self.0.progress()
    }

    /// How far the round in progress is with each block, in the order of the proposal.
    pub fn of_blocks(&self) -> Vec<BlockProgress> {
        self.0.of_blocks()
    }

    /// From the next round on its threads give way to guests by so much (`nice(2)`), while the one that is moved runs.
    pub fn gives_way_by(&self, nice: u8) {
        self.0.nice.store(nice, Ordering::Relaxed);
    }

    /// From now on only so many of its threads read and send at the same time, one at least, while the one that is moved runs.
    pub fn copies_in(&self, threads: u16) {
        self.0.set_most_copying(threads);
    }

    /// How many threads it has that read and send, one for each stream.
    pub fn threads(&self) -> u16 {
        self.0.stream_count()
    }

    /// Whether a connection has failed or somebody has cancelled, so that the next round cannot be sent.
    pub fn is_broken(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }
}
