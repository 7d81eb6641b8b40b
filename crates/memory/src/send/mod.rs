//! The source's side of the streams: rounds of pages out, acknowledgements in.
//!
//! ```text
//!  send_round(ReadablePages) ─► plan: dirty chunks by stream
//!     worker 0 ─ read, find zeros, pack, frame ─► stream 0 ─►        ack reader 0 ◄─ Ack
//!     worker 1 ─ read, find zeros, pack, frame ─► stream 1 ─►        ack reader 1 ◄─ Ack
//!  ◄─ RoundStats when every stream's RoundEnd is acknowledged
//! ```
//!
//! # No page is lost
//!
//! A page is owed until the frame that carried it is acknowledged: pages leave the set of owed pages there and nowhere
//! else. So when a stream breaks, the set holds the pages that were not sent and those that were sent but may not have
//! arrived, and needs no reconstruction (trap 7). A page that had arrived after all is sent twice, which is harmless:
//! its second copy was read later.
//!
//! # Order
//!
//! A chunk belongs to one stream ([`stream_of`]), within which frames are applied in order (trap 6). The assignment of
//! chunks to streams stays the same as long as the number of streams does, and that is fixed for a generation.
//!
//! # Few threads
//!
//! If the guest suffers, only some of the workers read and send at the same time, in turns, chunk by chunk
//! ([`SenderHandle::limit_copying_threads`]). Each stream still sends its own chunks in the same order.
//!
//! # Few pages
//!
//! Waking a thread costs more than sending a page. A round of few pages is sent by the caller's own thread, with one
//! write for each stream; only the acknowledgements arrive through the threads that wait for them anyway.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use link::transport::{DataStream, TransportError};
use proto::frame::FrameKind;
use proto::limits::STREAMS;
use proto::pages::BadPages;

use crate::chunk::PageCounts;
use crate::ram::{BlockReader, RamError};
use crate::reductions::Reductions;
use crate::round::{OwedPages, ReadablePages};

mod counters;
mod plan;
mod shared;
mod stream;
mod turns;

use plan::Plan;
pub use plan::stream_of;
use shared::SenderState;

/// Maximum number of pages (512 KiB) of a round that the caller's thread sends.
const INLINE_PAGES: u64 = 128;

/// Maximum number of unacknowledged frames of a stream. Such a frame is remembered in 100 bytes, its data is not kept.
const WINDOW_FRAMES: usize = 4096;

/// The blocks of the source's RAM in the order of the proposal.
pub type SourceRam = Arc<[Box<dyn BlockReader>]>;

/// Error of sending a round.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// A connection failed. The next generation of connections can continue.
    #[error("data stream {stream} failed")]
    Stream {
        /// Number of the stream.
        stream: u16,
        /// Error of the connection.
        source: TransportError,
    },
    /// The destination sent a frame that is no acknowledgement.
    #[error(
        "the other side sent a {kind:?} frame on data stream {stream}, where only acknowledgements are allowed"
    )]
    UnexpectedFrame {
        /// Number of the stream.
        stream: u16,
        /// Kind of the received frame.
        kind: FrameKind,
    },
    /// The destination sent an acknowledgement that cannot be decoded.
    #[error("bad acknowledgement on data stream {stream}")]
    BadAck {
        /// Number of the stream.
        stream: u16,
        /// Reason of the failure.
        source: BadPages,
    },
    /// The destination acknowledged a frame that was not sent, or one before its last acknowledgement.
    #[error("the other side acknowledged frame {seq} of data stream {stream} instead of frame {expected}")]
    WrongAck {
        /// Number of the stream.
        stream: u16,
        /// The acknowledged sequence number.
        seq: u64,
        /// The allowed sequence numbers: from the last acknowledged frame to the last one sent.
        expected: AckRange,
    },
    /// The destination reported missing pages that were sent in full, or reported pages twice.
    #[error(
        "the other side reports missing pages of frame {seq} of data stream {stream}, which were sent in full"
    )]
    WrongMissing {
        /// Number of the stream.
        stream: u16,
        /// Sequence number of the reported frame.
        seq: u64,
    },
    /// Guest memory, or a disk, cannot be read; new connections cannot help.
    #[error("cannot read {block} at {offset:#x}")]
    Memory {
        /// Name of the block, for messages.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
        /// Reason of the failure.
        source: RamError,
    },
    /// The destination has not acknowledged everything in time.
    #[error("the other side has not acknowledged everything in time")]
    Overdue,
    /// [`SenderHandle::cancel`] was called, or the sender ended.
    #[error("sending was cancelled")]
    Cancelled,
    /// A thread of the sender died: a bug in this program.
    #[error("the thread of data stream {stream} panicked; please report this")]
    ThreadDied {
        /// Number of the stream.
        stream: u16,
    },
}

impl SendError {
    /// Returns true if new connections may help.
    pub fn is_connection(&self) -> bool {
        match self {
            Self::Stream { source, .. } => source.is_transient(),
            Self::Overdue => true,
            _ => false,
        }
    }
}

/// Sequence numbers that an acknowledgement may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckRange {
    /// The last acknowledged frame.
    pub from: u64,
    /// The last frame sent.
    pub to: u64,
}

impl std::fmt::Display for AckRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

/// Statistics of one finished round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundStats {
    /// Number of the round, from 1 on.
    pub round: u32,
    /// Number of pages by content.
    pub contents: PageCounts,
    /// Pages of `contents.reference` and `contents.delta` that the destination did not have after all: they are still
    /// owed.
    pub refused_pages: u64,
    /// Bytes of frames written to the connections, headers included (TLS and TCP are not counted).
    pub wire_bytes: u64,
    /// Time from the first page read until everything was acknowledged, in microseconds.
    pub duration_us: u64,
}

/// Progress of a round; see [`SenderHandle::progress`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundProgress {
    /// Number of the round, from 1 on.
    pub round: u32,
    /// Pages of the round.
    pub pages: u64,
    /// Pages that were sent, by content.
    pub sent: PageCounts,
    /// Pages that the destination lacks, although references or deltas were sent for them.
    pub refused: u64,
    /// Bytes of frames written to the connections in this round.
    pub wire_bytes: u64,
}

/// Progress of a round with one block; see [`SenderHandle::block_progress`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockProgress {
    /// Pages of the round.
    pub pages: u64,
    /// Pages of the round that were sent.
    pub sent_pages: u64,
}

/// An interrupted round. The sender has ended with its connections; a new one can continue.
#[derive(Debug, thiserror::Error)]
#[error("round {round} was interrupted", round = owed.round())]
pub struct InterruptedRound {
    /// All pages that were not acknowledged.
    pub owed: OwedPages,
    /// Statistics of the interrupted round.
    pub stats: RoundStats,
    /// Reason of the interruption.
    #[source]
    pub cause: SendError,
}

/// A round that the destination has applied completely.
#[derive(Debug)]
pub struct CompletedRound {
    /// Ready for the next round.
    pub sender: Sender,
    /// Pages still owed: those whose reference or delta was refused, and those for which there was no time. The dirty
    /// log will add others.
    pub owed: OwedPages,
    /// Statistics of the round.
    pub stats: RoundStats,
}

/// Sends rounds over the streams of one generation. Dropping it ends connections and threads.
#[derive(Debug)]
pub struct Sender {
    shared: Arc<SenderState>,
    threads: Vec<JoinHandle<()>>,
}

impl Sender {
    /// Starts the threads of a generation: two for each stream. A stream's position in the list is its number.
    ///
    /// # Errors
    /// If the system cannot start another thread, or there is no stream.
    pub fn start(ram: SourceRam, streams: Vec<DataStream>) -> io::Result<Self> {
        Self::with_reductions(ram, Reductions::default(), streams)
    }

    /// Starts a sender as [`start`](Self::start) does, with reductions.
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn with_reductions(
        ram: SourceRam,
        reductions: Reductions,
        streams: Vec<DataStream>,
    ) -> io::Result<Self> {
        Self::with_window(ram, reductions, streams, WINDOW_FRAMES)
    }

    pub(crate) fn with_window(
        ram: SourceRam,
        reductions: Reductions,
        streams: Vec<DataStream>,
        window: usize,
    ) -> io::Result<Self> {
        if streams.is_empty() || streams.len() > usize::from(STREAMS) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (shared, sources) = SenderState::new(ram, reductions, streams, window);
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

    /// Returns a handle with which other threads cancel the round and read its progress.
    pub fn handle(&self) -> SenderHandle {
        SenderHandle(Arc::clone(&self.shared))
    }

    /// Sends all pages of a round and waits until all of them are acknowledged.
    ///
    /// # Errors
    /// [`InterruptedRound`] if a connection breaks, guest memory cannot be read, or the round is cancelled.
    pub fn send_round(self, pages: ReadablePages) -> Result<CompletedRound, Box<InterruptedRound>> {
        self.send(pages, None, None)
    }

    /// Sends a round as [`send_round`](Self::send_round) does, but begins no chunk after `until`: pages not sent by
    /// then stay owed.
    ///
    /// # Errors
    /// Those of [`send_round`](Self::send_round).
    pub fn send_round_until(
        self,
        pages: ReadablePages,
        until: Instant,
    ) -> Result<CompletedRound, Box<InterruptedRound>> {
        self.send(pages, None, Some(until))
    }

    /// Sends a round as [`send_round`](Self::send_round) does, while the guest is stopped, but waits at most until
    /// `deadline`, whatever the bandwidth limit is. A deadline is needed because the destination's kernel accepts bytes
    /// and keeps connections alive also for an agent that hangs.
    ///
    /// # Errors
    /// Those of [`send_round`](Self::send_round), and [`SendError::Overdue`].
    pub fn send_round_by(
        self,
        pages: ReadablePages,
        deadline: Instant,
    ) -> Result<CompletedRound, Box<InterruptedRound>> {
        self.send(pages, Some(deadline), None)
    }

    fn send(
        mut self,
        pages: ReadablePages,
        deadline: Option<Instant>,
        until: Option<Instant>,
    ) -> Result<CompletedRound, Box<InterruptedRound>> {
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
        let failure = self.shared.wait_acknowledged(deadline);
        if failure.is_some() {
            // The threads of this generation do nothing after this.
            self.end_threads();
        }
        let owed = OwedPages { blocks: self.shared.take_owed(), round };
        if failure.is_some() {
            self.shared.interrupted(&owed.blocks, round);
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
            None => Ok(CompletedRound { sender: self, owed, stats }),
            Some(cause) => Err(Box::new(InterruptedRound { owed, stats, cause })),
        }
    }

    fn end_threads(&mut self) {
        self.shared.fail(SendError::Cancelled);
        for thread in self.threads.drain(..) {
            // The guard of a thread that died has reported it.
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
pub struct SenderHandle(Arc<SenderState>);

impl SenderHandle {
    /// Ends the round in progress, or the next one, at once, with [`SendError::Cancelled`].
    pub fn cancel(&self) {
        self.0.fail(SendError::Cancelled);
    }

    /// Returns the progress of the round in progress.
    pub fn progress(&self) -> RoundProgress {
        self.0.progress()
    }

    /// Returns the progress of the round with each block, in the order of the proposal.
    pub fn block_progress(&self) -> Vec<BlockProgress> {
        self.0.block_progress()
    }

    /// Sets the niceness of the sender's threads (`nice(2)`) from the next round on, while the guest that is moved
    /// runs.
    pub fn set_niceness(&self, nice: u8) {
        self.0.nice.store(nice, Ordering::Relaxed);
    }

    /// Sets how many of the sender's threads read and send at the same time from now on, at least one, while the guest
    /// that is moved runs.
    pub fn limit_copying_threads(&self, threads: u16) {
        self.0.set_max_copying(threads);
    }

    /// Sends copies of pages from the next frame on, even if the transport could move memory by itself: the
    /// destination's kernel places each page from now on.
    pub fn stop_direct_placement(&self) {
        self.0.places_directly.store(false, Ordering::Release);
    }

    /// Returns the number of threads that read and send, one for each stream.
    pub fn threads(&self) -> u16 {
        self.0.stream_count()
    }

    /// Returns true if a connection has failed or the sender was cancelled, so that the next round cannot be sent.
    #[cfg(feature = "testing")]
    pub fn is_broken(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }
}
