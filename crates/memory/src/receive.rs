//! The destination's side of the streams: pages in, acknowledgements out.
//!
//! One thread for each data stream reads frames, checks them, applies them in the order of arrival, and acknowledges
//! applied frames: not each one while more have arrived already, but always before it waits for more.
//!
//! # Generations
//!
//! [`Receiver::begin`] ends the workers of the generation before and **joins** them, and only then are streams of the
//! new one accepted. A frame of an old connection may sit in a buffer or in a slow write when the new connections
//! arrive; applied late, it would put an old page over a newer one (trap 7).
//!
//! # Checks of the peer's input
//!
//! Every field of a frame is compared with the actual state: block, chunk, runs, round, sequence number, and the stream
//! to which the chunk belongs. A frame that does not fit ends the connection and changes nothing.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use link::transport::{ConnectionHandle, DataStream, TransportError};
use proto::Generation;
use proto::frame::FrameKind;
use proto::limits::PAGE_BYTES;
use proto::pages::BadPages;

use crate::lock;
use crate::priority::Niceness;
use crate::ram::{BlockWriter, RamError};
use crate::reductions::decoders::AcceptedReductions;
use crate::reductions::decoding::{BadFrame, BadPacked};

mod acknowledger;
mod frame_data;
mod placement;
mod worker;

use acknowledger::Acknowledger;
use placement::Placement;
use worker::StreamWorker;

/// The blocks of the destination's RAM in the order of the proposal.
pub type DestinationRam = Arc<[Box<dyn BlockWriter>]>;

/// Reason for the end of a data stream.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The connection failed.
    #[error("the data stream failed")]
    Stream(#[source] TransportError),
    /// A frame that is not allowed on a data stream.
    #[error("{0:?} frame on a data stream")]
    UnexpectedFrame(FrameKind),
    /// A frame that cannot be read.
    #[error("bad data frame")]
    BadFrame(#[from] BadPages),
    /// Compressed pages that cannot be unpacked.
    #[error("bad data frame")]
    BadPacked(#[from] BadPacked),
    /// A frame is missing or arrived twice.
    #[error("received frame {found} of the data stream instead of frame {expected}")]
    WrongSeq {
        /// The expected sequence number.
        expected: u64,
        /// The received sequence number.
        found: u64,
    },
    /// A round that is over, or never existed.
    #[error("received a frame of round {found}, but this stream is at round {at_least}")]
    WrongRound {
        /// The lowest allowed round.
        at_least: u32,
        /// The received round.
        found: u32,
    },
    /// No such block, no such chunk, or pages beyond the block's end.
    #[error("received a frame for RAM block {block}, chunk {chunk}, which is beyond the end of RAM")]
    Outside {
        /// Index of the block.
        block: u16,
        /// The chunk.
        chunk: u64,
    },
    /// The chunk belongs to another stream, so that its order would not be kept.
    #[error(
        "received RAM block {block}, chunk {chunk}, on stream {stream}, although it belongs to another stream"
    )]
    WrongStream {
        /// Index of the block.
        block: u16,
        /// The chunk.
        chunk: u64,
        /// The stream on which the frame arrived.
        stream: u16,
    },
    /// Guest memory, or a disk, cannot be written. New connections cannot help.
    #[error("cannot write {block} at {offset:#x}; is there enough space?")]
    Memory {
        /// Name of the block, for messages.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
        /// Reason of the failure.
        source: RamError,
    },
    /// Memory was complete already.
    #[error("received a frame after the last one")]
    Shut,
    /// The thread died: a bug in this program.
    #[error("the thread of the data stream panicked; please report this")]
    ThreadDied,
}

impl From<BadFrame> for ReceiveError {
    fn from(error: BadFrame) -> Self {
        match error {
            BadFrame::Pages(source) => source.into(),
            BadFrame::Packed(source) => source.into(),
        }
    }
}

impl ReceiveError {
    /// Returns true if new connections may help.
    pub fn is_connection(&self) -> bool {
        matches!(self, Self::Stream(source) if source.is_transient())
    }

    /// Returns true if the input is invalid, so that no correct source would have sent it: unacknowledged pages can be
    /// sent again over new connections. A source that repeats the fault is another matter.
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Stream(source) => matches!(source, TransportError::Protocol(_)),
            Self::UnexpectedFrame(_)
            | Self::BadFrame(_)
            | Self::BadPacked(_)
            | Self::WrongSeq { .. }
            | Self::WrongRound { .. }
            | Self::Outside { .. }
            | Self::WrongStream { .. } => true,
            Self::Memory { .. } | Self::Shut | Self::ThreadDied => false,
        }
    }
}

/// Event of the receiver. Reported on the stream's own thread, which continues when the call returns.
#[derive(Debug)]
pub enum ReceiverEvent {
    /// The last stream has reached the end of a round. Reported before the acknowledgement: until the call returns the
    /// source sends nothing, and no frame is applied.
    RoundEnded {
        /// Number of the round.
        round: u32,
        /// Number of the round among those that contained memory, because disks may have been sent first. 0 for a round
        /// before the first of them.
        ram_round: u32,
        /// Time since the first frame of the round.
        took: Duration,
        /// True if the round contained references.
        referred: bool,
    },
    /// A stream ended without a request to the receiver.
    Broken {
        /// Generation of the connections.
        generation: Generation,
        /// Number of the stream.
        stream: u16,
        /// Reason of the end.
        cause: ReceiveError,
    },
}

/// Reason for refusing a stream.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The stream is not of the open generation.
    #[error("received a data stream of generation {found}; the current generation is {current}")]
    Generation {
        /// The open generation.
        current: Generation,
        /// The stream's generation.
        found: Generation,
    },
    /// No such stream, or it is there already.
    #[error("data stream {stream} is unexpected: there are {streams} streams, each with one connection")]
    Stream {
        /// The stream's number.
        stream: u16,
        /// Number of streams of the migration.
        streams: u16,
    },
    /// The system cannot start another thread.
    #[error("cannot start a thread for a data stream")]
    Thread(#[source] io::Error),
}

/// Memory that was zeroed and could be given back to the host, in bytes of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroedRange {
    /// Index of the block.
    pub block: u16,
    /// Range in the block, in whole pages of the host.
    pub bytes: Range<u64>,
}

/// Applies the data streams' frames to the destination's RAM. Dropping it ends connections and threads.
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<ReceiverState>,
    generation: Generation,
    workers: Vec<Option<Worker>>,
}

struct Worker {
    handle: Arc<dyn ConnectionHandle>,
    /// True if the transport may place memory by itself.
    places_directly: bool,
    thread: JoinHandle<()>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

struct ReceiverState {
    ram: DestinationRam,
    accepted: AcceptedReductions,
    streams: u16,
    observer: Box<Observer>,
    /// Held for reading while a frame is applied.
    gate: RwLock<Gate>,
    rounds: Mutex<RoundTracker>,
    /// The generation is being ended: broken streams are not reported.
    ending: AtomicBool,
}

/// Callback for events. The handle is lent: an observer that kept it would keep the receiver alive, which keeps the
/// observer.
type Observer = dyn Fn(ReceiverEvent, &ReceiverHandle) + Send + Sync;

/// State of the guest's memory: open or shut for changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    Shut,
}

#[derive(Debug)]
struct RoundTracker {
    /// The newest round of which a frame has arrived.
    newest: u32,
    /// For each stream the last round that it has ended.
    ended: Vec<u32>,
    /// The last round that all streams have ended.
    complete: u32,
    /// The first round that contained memory, 0 before it.
    first_of_ram: u32,
    /// Arrival of the first frame of the newest round.
    began: Instant,
    /// True if a reference arrived since the last round was complete.
    referred: bool,
}

impl RoundTracker {
    /// Returns the number of a round among those that contained memory.
    fn of_ram(&self, round: u32) -> u32 {
        if self.first_of_ram == 0 { 0 } else { round.saturating_add(1).saturating_sub(self.first_of_ram) }
    }
}

impl Receiver {
    /// Creates a receiver without connections. `observer` is called on the threads of the streams.
    pub fn new(
        ram: DestinationRam,
        streams: u16,
        observer: impl Fn(ReceiverEvent, &ReceiverHandle) + Send + Sync + 'static,
    ) -> Self {
        Self::with_reductions(ram, AcceptedReductions::default(), streams, observer)
    }

    /// Creates a receiver as [`new`](Self::new) does, for a source that sends references or deltas.
    pub fn with_reductions(
        ram: DestinationRam,
        accepted: AcceptedReductions,
        streams: u16,
        observer: impl Fn(ReceiverEvent, &ReceiverHandle) + Send + Sync + 'static,
    ) -> Self {
        let rounds = RoundTracker {
            newest: 0,
            ended: vec![0; streams.into()],
            complete: 0,
            first_of_ram: 0,
            began: Instant::now(),
            referred: false,
        };
        let shared = ReceiverState {
            ram,
            accepted,
            streams,
            observer: Box::new(observer),
            gate: RwLock::new(Gate::Open),
            rounds: Mutex::new(rounds),
            ending: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), generation: Generation(0), workers: Vec::new() }
    }

    /// Opens a generation: ends and joins everything of the one before, then accepts streams of the new one.
    pub fn begin(&mut self, generation: Generation) {
        self.end_and_join();
        self.generation = generation;
        // Streams that had reached the end of a round that was cut off have not ended it.
        let mut rounds = lock(&self.shared.rounds);
        let complete = rounds.complete;
        rounds.ended.fill(complete);
        drop(rounds);
        self.shared.ending.store(false, Ordering::Release);
        self.workers.resize_with(self.shared.streams.into(), || None);
    }

    /// Accepts a data stream and begins to apply its frames.
    pub fn attach(
        &mut self,
        generation: Generation,
        stream: u16,
        connection: DataStream,
    ) -> Result<(), AttachError> {
        if generation != self.generation {
            return Err(AttachError::Generation { current: self.generation, found: generation });
        }
        let streams = self.shared.streams;
        let Some(place @ None) = self.workers.get_mut(usize::from(stream)) else {
            return Err(AttachError::Stream { stream, streams });
        };
        let newest = lock(&self.shared.rounds).newest;
        let places_directly = connection.source.places_directly();
        let mut worker = StreamWorker {
            guard: Guard {
                shared: Arc::clone(&self.shared),
                handle: Arc::clone(&connection.handle),
                generation,
                stream,
            },
            source: connection.source,
            sink: connection.sink,
            round: newest,
            seen: newest,
            acknowledger: Acknowledger::default(),
            written: Vec::new(),
            found: Vec::new(),
            decoders: self.shared.accepted.decoders(),
            placement: Placement::default(),
            niceness: None,
            brought_ram: false,
        };
        let thread = thread::Builder::new()
            .name(format!("apply-{stream}"))
            .spawn(move || {
                worker.niceness = Some(Niceness::begin());
                let cause = worker.run();
                worker.guard.broken(cause);
            })
            .map_err(AttachError::Thread)?;
        *place = Some(Worker { handle: connection.handle, places_directly, thread });
        Ok(())
    }

    /// Shuts memory because it is complete: from the return of this call on nothing is applied, for ever. Does not wait
    /// for threads to end. [`Receiver::end_and_join`] tidies up.
    pub fn shut(&self) {
        self.shared.ending.store(true, Ordering::Release);
        // A stream that waits for the rest of a frame holds the gate.
        let placing = self.workers.iter().flatten().filter(|worker| worker.places_directly);
        placing.for_each(|worker| worker.handle.shutdown());
        *self.shared.gate.write().unwrap_or_else(PoisonError::into_inner) = Gate::Shut;
    }

    /// Ends all connections and waits until no thread applies anything. Applied pages stay.
    pub fn end_and_join(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        self.workers.iter().flatten().for_each(|worker| worker.handle.shutdown());
        for worker in self.workers.drain(..).flatten() {
            // The guard of a thread that died has reported it.
            let _ = worker.thread.join();
        }
    }

    /// Returns the last round that all streams have ended, 0 before the first.
    #[cfg(feature = "testing")]
    pub fn completed_round(&self) -> u32 {
        lock(&self.shared.rounds).complete
    }

    /// Returns the newest round of which a frame has arrived, 0 before the first.
    pub fn newest_round(&self) -> u32 {
        lock(&self.shared.rounds).newest
    }

    /// Returns a handle for other threads. It keeps the guest's memory open.
    pub fn handle(&self) -> ReceiverHandle {
        ReceiverHandle(Arc::clone(&self.shared))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.end_and_join();
    }
}

/// A view of a [`Receiver`] for its observer.
#[derive(Clone, Debug)]
pub struct ReceiverHandle(Arc<ReceiverState>);

impl ReceiverHandle {
    /// Pauses the application of frames while `discard` runs, which receives the zeroed memory that could not be given
    /// back to the host from outside (anonymous RAM). Each range is reported once, unless it is zeroed anew.
    ///
    /// Meant for the end of a long round, not for a last one: giving memory back makes QEMU run a system call, and the
    /// guest waits for it.
    pub fn discard_with<R>(&self, discard: impl FnOnce(Vec<ZeroedRange>) -> R) -> R {
        let gate = self.0.gate.write().unwrap_or_else(PoisonError::into_inner);
        if *gate == Gate::Shut {
            return discard(Vec::new());
        }
        let found = (0_u16..).zip(self.0.ram.iter()).flat_map(|(block, writer)| {
            writer.take_discardable().into_iter().map(move |bytes| ZeroedRange { block, bytes })
        });
        discard(found.collect())
    }
}

impl ReceiverState {
    /// Reads pages of a block in their current state.
    fn read(&self, block: u16, first_page: u64, into: &mut [u8]) -> Result<(), RamError> {
        let nowhere = || RamError::NoPage { block, page: first_page };
        let writer = self.ram.get(usize::from(block)).ok_or_else(nowhere)?;
        let offset = first_page.checked_mul(PAGE_BYTES).ok_or_else(nowhere)?;
        let end = offset.checked_add(into.len() as u64).filter(|end| *end <= writer.bytes());
        end.ok_or_else(nowhere)?;
        writer.read(offset, into)
    }

    fn notify(self: &Arc<Self>, event: ReceiverEvent) {
        (self.observer)(event, &ReceiverHandle(Arc::clone(self)));
    }
}

impl fmt::Debug for ReceiverState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiverState").field("rounds", &self.rounds).finish_non_exhaustive()
    }
}

/// Reports the end of a worker, in every way in which it may end.
struct Guard {
    shared: Arc<ReceiverState>,
    handle: Arc<dyn ConnectionHandle>,
    generation: Generation,
    stream: u16,
}

impl Guard {
    fn broken(&self, cause: ReceiveError) {
        // The source notices by its connection.
        self.handle.shutdown();
        if !self.shared.ending.load(Ordering::Acquire) {
            let (generation, stream) = (self.generation, self.stream);
            self.shared.notify(ReceiverEvent::Broken { generation, stream, cause });
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if thread::panicking() {
            self.broken(ReceiveError::ThreadDied);
        }
    }
}
