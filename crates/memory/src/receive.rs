//! The destination's side of the streams: pages in, acknowledgements out.
//!
//! One thread for each data stream reads frames, checks them, applies them in the order in which they come, and
//! acknowledges what it has applied: not each frame while more are there already, but always before it waits for more.
//!
//! # Generations
//!
//! [`Receiver::begin`] ends the workers of the generation before and **joins** them, and only then are streams of the
//! new one accepted. A frame of an old connection may sit in a buffer or in a slow write when the new connections
//! come; applied late, it would put an old page over a newer one (trap 7).
//!
//! # What a peer may do
//!
//! Everything it says is compared with what there is: block, chunk, runs, round, sequence number, and whether the
//! chunk belongs on this stream. What does not fit ends the connection and changes nothing.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use link::LinkError;
use proto::Generation;
use proto::frame::Kind;
use proto::limits::PAGE_BYTES;
use proto::pages::BadPages;

use crate::background::GivesWay;
use crate::lock;
use crate::pack::codec::{BadPacked, Unpacker};
use crate::ram::{BlockWriter, RamError};
use crate::references::Templates;
use crate::wire::{DataStream, HangUp, is_transient};

mod worker;

use worker::StreamWorker;

/// The blocks of the destination's RAM in the order of the proposal.
pub type DestinationRam = Arc<[Box<dyn BlockWriter>]>;

/// Why a data stream came to an end.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The connection failed.
    #[error("the data stream failed")]
    Stream(#[source] LinkError),
    /// A frame that has no place on a data stream.
    #[error("{0:?} frame on a data stream")]
    UnexpectedFrame(Kind),
    /// A frame that cannot be read.
    #[error("bad data frame")]
    BadFrame(#[from] BadPages),
    /// Compressed pages that cannot be unpacked.
    #[error("bad data frame")]
    BadPacked(#[from] BadPacked),
    /// A frame was left out or came twice.
    #[error("frame {found} of the data stream came where frame {expected} has to come")]
    WrongSeq {
        /// Which one it should have been.
        expected: u64,
        /// Which one it was.
        found: u64,
    },
    /// A round that is over, or never was.
    #[error("a frame of round {found}, but this stream is at round {at_least}")]
    WrongRound {
        /// The round must not be less than this one.
        at_least: u32,
        /// Which round it was.
        found: u32,
    },
    /// No such block, no such chunk, or pages beyond the block's end.
    #[error("a frame for RAM block {block}, chunk {chunk}, that goes beyond the RAM")]
    Outside {
        /// Index of the block.
        block: u16,
        /// The chunk.
        chunk: u64,
    },
    /// The chunk belongs to another stream, so that its order would not be kept.
    #[error("RAM block {block}, chunk {chunk}, came on stream {stream}; it belongs to another one")]
    WrongStream {
        /// Index of the block.
        block: u16,
        /// The chunk.
        chunk: u64,
        /// The stream on which it came.
        stream: u16,
    },
    /// Guest memory, or a disk, cannot be written. No new connection can help.
    #[error("cannot write {block} at {offset:#x}; is there room left?")]
    Memory {
        /// The block, for people.
        block: String,
        /// Where, in bytes.
        offset: u64,
        /// Why.
        source: RamError,
    },
    /// Memory was complete already.
    #[error("a frame came after the last one")]
    Shut,
    /// The thread died: a mistake in this program.
    #[error("the thread of the data stream died; please report this")]
    ThreadDied,
}

impl ReceiveError {
    /// Whether new connections may help.
    pub fn is_connection(&self) -> bool {
        matches!(self, Self::Stream(source) if is_transient(source))
    }

    /// Whether something came that is not what a source sends: what was not acknowledged can be sent again over new
    /// connections. A source that does so again and again is another matter.
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Stream(source) => {
                matches!(source, LinkError::Header(_) | LinkError::TooMuch { .. } | LinkError::NotExpected(_))
            }
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

/// What the receiver has to tell. Told on the stream's own thread, which goes on when the call returns.
#[derive(Debug)]
pub enum ReceiverEvent {
    /// The last stream has come to the end of a round. Told before that is acknowledged: until the call returns the
    /// source sends nothing, and no frame is applied.
    RoundEnded {
        /// Which round.
        round: u32,
        /// Which of those that brought memory: disks may have gone ahead. 0 for a round before the first of them.
        ram_round: u32,
        /// From its first frame on.
        took: Duration,
        /// Whether something in it was referred to.
        referred: bool,
    },
    /// A stream came to an end that the receiver was not asked for.
    Broken {
        /// Of which set of connections.
        generation: Generation,
        /// Which stream.
        stream: u16,
        /// Why.
        cause: ReceiveError,
    },
}

/// Why a stream was not taken.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Not the generation that is open.
    #[error("a data stream of generation {found}; the generation now is {current}")]
    Generation {
        /// The one that is open.
        current: Generation,
        /// Which one it says.
        found: Generation,
    },
    /// No such stream, or it is there already.
    #[error("data stream {stream} is one too many: there are {streams}, each of them once")]
    Stream {
        /// Which one it says.
        stream: u16,
        /// How many there are.
        streams: u16,
    },
    /// The system gives no more threads.
    #[error("cannot start a thread for a data stream")]
    Thread(#[source] io::Error),
}

/// Memory that was zeroed and could be given back, in bytes of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discardable {
    /// Index of the block.
    pub block: u16,
    /// Where in the block, in whole pages of the host.
    pub bytes: Range<u64>,
}

/// What a source may presume of its destination.
#[derive(Default)]
pub struct Presumed {
    /// References may go to these, too.
    pub templates: Option<Arc<dyn Templates>>,
    /// What changed of pages may come, with hashes of this seed.
    pub delta_seed: Option<u64>,
}

impl fmt::Debug for Presumed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Presumed").finish_non_exhaustive()
    }
}

/// Applies what comes on the data streams to the destination's RAM. Dropping it ends connections and threads.
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<Shared>,
    generation: Generation,
    workers: Vec<Option<Worker>>,
}

struct Worker {
    hang_up: Arc<dyn HangUp>,
    thread: JoinHandle<()>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

struct Shared {
    ram: DestinationRam,
    presumed: Presumed,
    streams: u16,
    observer: Box<Observer>,
    /// Held for reading while a frame is applied.
    gate: RwLock<Gate>,
    rounds: Mutex<Rounds>,
    /// The generation is being ended: what breaks now is no news.
    ending: AtomicBool,
    pages: AtomicU64,
}

/// Is told what happens, and lent the handle: one that kept it would keep the receiver, which keeps him.
type Observer = dyn Fn(ReceiverEvent, &ReceiverHandle) + Send + Sync;

/// Whether anything may be done to the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    Shut,
}

#[derive(Debug)]
struct Rounds {
    /// The newest round of which anything has come.
    newest: u32,
    /// For each stream the last round that it has ended.
    ended: Vec<u32>,
    /// The last round that all streams have ended.
    complete: u32,
    /// The first round that has brought memory, 0 before it.
    first_of_ram: u32,
    /// When the first frame of the newest round came.
    began: Instant,
    /// Whether something was referred to since the last one was complete.
    referred: bool,
}

impl Rounds {
    /// Which of the rounds that brought memory a round is.
    fn of_ram(&self, round: u32) -> u32 {
        if self.first_of_ram == 0 { 0 } else { round.saturating_add(1).saturating_sub(self.first_of_ram) }
    }
}

impl Receiver {
    /// A receiver without connections. `observer` is called on the threads of the streams.
    pub fn new(
        ram: DestinationRam,
        streams: u16,
        observer: impl Fn(ReceiverEvent, &ReceiverHandle) + Send + Sync + 'static,
    ) -> Self {
        Self::presuming(ram, Presumed::default(), streams, observer)
    }

    /// As [`new`](Self::new), for a source that sends less than all.
    pub fn presuming(
        ram: DestinationRam,
        presumed: Presumed,
        streams: u16,
        observer: impl Fn(ReceiverEvent, &ReceiverHandle) + Send + Sync + 'static,
    ) -> Self {
        let rounds = Rounds {
            newest: 0,
            ended: vec![0; streams.into()],
            complete: 0,
            first_of_ram: 0,
            began: Instant::now(),
            referred: false,
        };
        let shared = Shared {
            ram,
            presumed,
            streams,
            observer: Box::new(observer),
            gate: RwLock::new(Gate::Open),
            rounds: Mutex::new(rounds),
            ending: AtomicBool::new(false),
            pages: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared), generation: Generation(0), workers: Vec::new() }
    }

    /// Opens a generation: ends and joins everything of the one before, then lets streams of the new one in.
    pub fn begin(&mut self, generation: Generation) {
        self.end_and_join();
        self.generation = generation;
        // A round that was cut off is not ended by the streams that had come to its end.
        let mut rounds = lock(&self.shared.rounds);
        let complete = rounds.complete;
        rounds.ended.fill(complete);
        drop(rounds);
        self.shared.ending.store(false, Ordering::Release);
        self.workers.resize_with(self.shared.streams.into(), || None);
    }

    /// Takes a data stream and begins to apply what comes on it.
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
        let hang_up: Arc<dyn HangUp> = Arc::from(connection.hang_up);
        let newest = lock(&self.shared.rounds).newest;
        let mut worker = StreamWorker {
            guard: Guard {
                shared: Arc::clone(&self.shared),
                hang_up: Arc::clone(&hang_up),
                generation,
                stream,
            },
            source: connection.source,
            sink: connection.sink,
            round: newest,
            seen: newest,
            applied: 0,
            acked: 0,
            bytes_since_ack: 0,
            written: Vec::new(),
            found: Vec::new(),
            unpacker: Unpacker::default(),
            waited: Duration::ZERO,
            acked_at: None,
            acks: 0,
            gives_way: None,
            brought_ram: false,
        };
        let thread = thread::Builder::new()
            .name(format!("apply-{stream}"))
            .spawn(move || {
                worker.gives_way = Some(GivesWay::begin());
                let cause = worker.run();
                worker.guard.broken(cause);
            })
            .map_err(AttachError::Thread)?;
        *place = Some(Worker { hang_up, thread });
        Ok(())
    }

    /// From the return of this call on nothing is applied any more, for ever, without a wait for threads to end: memory
    /// is complete. [`Receiver::end_and_join`] tidies up.
    pub fn shut(&self) {
        self.shared.ending.store(true, Ordering::Release);
        *self.shared.gate.write().unwrap_or_else(PoisonError::into_inner) = Gate::Shut;
    }

    /// Ends all connections and waits until no thread applies anything any more. What had been applied stays.
    pub fn end_and_join(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        self.workers.iter().flatten().for_each(|worker| worker.hang_up.hang_up());
        for worker in self.workers.drain(..).flatten() {
            // A thread that died has told so through its guard.
            let _ = worker.thread.join();
        }
    }

    /// The last round of which all streams have seen the end, 0 before the first.
    pub fn completed_round(&self) -> u32 {
        lock(&self.shared.rounds).complete
    }

    /// The newest round of which anything has come, 0 before the first.
    pub fn newest_round(&self) -> u32 {
        lock(&self.shared.rounds).newest
    }

    /// For other threads. It keeps what there is of the guest's memory open.
    pub fn handle(&self) -> ReceiverHandle {
        ReceiverHandle(Arc::clone(&self.shared))
    }

    /// Pages applied so far, of whatever content.
    pub fn applied_pages(&self) -> u64 {
        self.shared.pages.load(Ordering::Relaxed)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.end_and_join();
    }
}

/// A view of a [`Receiver`] for its observer.
#[derive(Clone, Debug)]
pub struct ReceiverHandle(Arc<Shared>);

impl ReceiverHandle {
    /// Stops the application of frames, gives `discard` the memory that was zeroed where it could not be given back
    /// from outside (anonymous RAM), and goes on when it returns. Each range is told once, unless it is zeroed anew.
    ///
    /// Meant for the end of a round that was long, not for a last one: giving memory back makes QEMU run a system
    /// call, and the guest waits for it.
    pub fn discard_with<R>(&self, discard: impl FnOnce(Vec<Discardable>) -> R) -> R {
        let gate = self.0.gate.write().unwrap_or_else(PoisonError::into_inner);
        if *gate == Gate::Shut {
            return discard(Vec::new());
        }
        let found = (0_u16..).zip(self.0.ram.iter()).flat_map(|(block, writer)| {
            writer.take_discardable().into_iter().map(move |bytes| Discardable { block, bytes })
        });
        discard(found.collect())
    }
}

impl Shared {
    /// Reads pages of a block as it is now.
    fn read(&self, block: u16, first_page: u64, into: &mut [u8]) -> Result<(), RamError> {
        let nowhere = || RamError::Disk(format!("there is no page {first_page} of block {block}").into());
        let writer = self.ram.get(usize::from(block)).ok_or_else(nowhere)?;
        let offset = first_page.checked_mul(PAGE_BYTES).ok_or_else(nowhere)?;
        let end = offset.checked_add(into.len() as u64).filter(|end| *end <= writer.bytes());
        end.ok_or_else(nowhere)?;
        writer.read(offset, into)
    }

    fn tell(self: &Arc<Self>, event: ReceiverEvent) {
        (self.observer)(event, &ReceiverHandle(Arc::clone(self)));
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("rounds", &self.rounds).finish_non_exhaustive()
    }
}

/// Tells the end of a worker, however it ends.
struct Guard {
    shared: Arc<Shared>,
    hang_up: Arc<dyn HangUp>,
    generation: Generation,
    stream: u16,
}

impl Guard {
    fn broken(&self, cause: ReceiveError) {
        // The source notices by its connection.
        self.hang_up.hang_up();
        if !self.shared.ending.load(Ordering::Acquire) {
            let (generation, stream) = (self.generation, self.stream);
            self.shared.tell(ReceiverEvent::Broken { generation, stream, cause });
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
