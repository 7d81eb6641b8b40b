//! State that the threads of a sender share, and the work of each thread.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use link::transport::{DataStream, FrameSource, TransportError};
use proto::frame::{FrameKind, HEADER_BYTES};
use proto::pages::{Ack, PagesHeader, ROUND_END_BYTES, encode_round_end};
use proto::reference::decode_missing;

use crate::chunk::encoding::{ChunkTask, FrameContent, PageEncoders};
use crate::chunk::{ChunkId, PageCounts, WantedPages};
use crate::lock;
use crate::page_set::{ChunkPages, PageSet};
use crate::priority::{NICE, Niceness};
use crate::reductions::Reductions;
use crate::send::counters::RoundCounters;
use crate::send::plan::Plan;
use crate::send::stream::{FrameOutput, InFlight, Stream};
use crate::send::turns::Turns;
use crate::send::{BlockProgress, RoundProgress, SendError, SourceRam};

pub(super) struct SenderState {
    ram: SourceRam,
    reductions: Reductions,
    streams: Vec<Stream>,
    /// Pages of the round that are not acknowledged. Only acknowledgements remove pages.
    owed: Mutex<Vec<PageSet>>,
    state: Mutex<WorkState>,
    /// Signals workers that wait for a round.
    begin: Condvar,
    /// Signals the caller that waits for the round's end.
    round_acknowledged: Condvar,
    /// Set together with the first failure: all threads stop working.
    pub(super) stopped: AtomicBool,
    counters: RoundCounters,
    /// Niceness of the workers.
    pub(super) nice: AtomicU8,
    /// Limit on the workers that copy at the same time, while the guest runs.
    turns: Turns,
    /// True if transports may move memory by themselves.
    pub(super) places_directly: AtomicBool,
}

#[derive(Default)]
struct WorkState {
    /// The last round passed to the workers; None for rounds that the caller sends by itself.
    work: Option<Arc<Plan>>,
    /// Streams whose end of the round is not acknowledged.
    unacknowledged: u16,
    failure: Option<SendError>,
}

impl SenderState {
    pub(super) fn new(
        ram: SourceRam,
        reductions: Reductions,
        streams: Vec<DataStream>,
        window: usize,
    ) -> (Self, Vec<Box<dyn FrameSource>>) {
        let mut sources = Vec::new();
        let streams = streams
            .into_iter()
            .map(|stream| {
                sources.push(stream.source);
                Stream::new(stream.sink, stream.handle, window, &reductions)
            })
            .collect();
        let counters = RoundCounters::new(ram.len());
        let shared = Self {
            ram,
            reductions,
            streams,
            owed: Mutex::default(),
            state: Mutex::default(),
            begin: Condvar::new(),
            round_acknowledged: Condvar::new(),
            stopped: AtomicBool::new(false),
            counters,
            nice: AtomicU8::new(NICE),
            turns: Turns::new(),
            places_directly: AtomicBool::new(true),
        };
        (shared, sources)
    }

    pub(super) fn stream_count(&self) -> u16 {
        self.streams.len() as u16
    }

    /// Sets the number of workers that copy at the same time from now on, while the guest runs.
    pub(super) fn set_max_copying(&self, threads: u16) {
        self.turns.set_most(threads);
        if let Some(meter) = self.reductions.meter() {
            meter.set_most_workers(threads.max(1));
        }
    }

    // ---- the caller of a round

    /// Opens a round; its pages are owed from here on.
    pub(super) fn begin(&self, owed: Vec<PageSet>, plan: &Plan) {
        self.counters.begin(plan);
        self.reductions.awaited(&owed, plan.round);
        *lock(&self.owed) = owed;
        lock(&self.state).unacknowledged = self.stream_count();
    }

    pub(super) fn wake_workers(&self, plan: &Arc<Plan>) {
        lock(&self.state).work = Some(Arc::clone(plan));
        self.begin.notify_all();
    }

    /// Waits until every stream's end of the round is acknowledged, or a failure, or the deadline.
    pub(super) fn wait_acknowledged(&self, deadline: Option<Instant>) -> Option<SendError> {
        let mut state = lock(&self.state);
        loop {
            if state.unacknowledged == 0 {
                return None;
            }
            if self.stopped.load(Ordering::Acquire) {
                return Some(state.failure.take().unwrap_or(SendError::Cancelled));
            }
            state = match deadline.map(|deadline| deadline.checked_duration_since(Instant::now())) {
                None => self.round_acknowledged.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Some(left)) => {
                    self.round_acknowledged
                        .wait_timeout(state, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
                Some(None) => {
                    drop(state);
                    self.fail(SendError::Overdue);
                    lock(&self.state)
                }
            };
        }
    }

    pub(super) fn take_owed(&self) -> Vec<PageSet> {
        std::mem::take(&mut lock(&self.owed))
    }

    /// Informs the reductions that these pages may not have arrived.
    pub(super) fn interrupted(&self, owed: &[PageSet], round: u32) {
        self.reductions.iter().for_each(|reduction| reduction.interrupted(owed, round));
    }

    pub(super) fn progress(&self) -> RoundProgress {
        self.counters.progress()
    }

    pub(super) fn block_progress(&self) -> Vec<BlockProgress> {
        self.counters.block_progress()
    }

    /// Ends everything, once: the first failure is the one that is reported.
    pub(super) fn fail(&self, cause: SendError) {
        let mut state = lock(&self.state);
        if self.stopped.swap(true, Ordering::AcqRel) {
            return;
        }
        state.failure = Some(cause);
        drop(state);
        self.streams.iter().for_each(Stream::close);
        self.begin.notify_all();
        self.round_acknowledged.notify_all();
    }

    // ---- workers

    /// Main loop of a worker: one share of each round that is passed to the workers.
    pub(super) fn work(&self, stream: u16) {
        let mut niceness = Niceness::begin();
        let _guard = DeathGuard { shared: self, stream };
        let mut done = 0;
        while let Some(plan) = self.next_work(done) {
            // The guest is stopped.
            if plan.deadline.is_some() {
                niceness.end();
            }
            self.send_share(stream, &plan, Some(&mut niceness));
            done = plan.round;
        }
    }

    fn next_work(&self, done: u32) -> Option<Arc<Plan>> {
        let mut state = lock(&self.state);
        loop {
            if self.stopped.load(Ordering::Acquire) {
                return None;
            }
            match &state.work {
                Some(plan) if plan.round > done => return Some(Arc::clone(plan)),
                _ => state = self.begin.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Sends a stream's chunks of a round and the round's end. A worker adapts its priority in between.
    pub(super) fn send_share(&self, stream: u16, plan: &Plan, worker: Option<&mut Niceness>) {
        let mut outlet = lock(&self.streams[usize::from(stream)].outlet);
        // The workers' streams are closed at the deadline; a caller that sends by itself waits for them here.
        outlet.sink.set_deadline(plan.deadline);
        let sent = self
            .send_chunks(stream, &mut outlet, plan, worker)
            .and_then(|()| self.end_round(stream, &mut outlet, plan.round));
        if let Err(cause) = sent {
            self.fail(cause);
        }
    }

    /// A worker waits for its turn before each chunk, and only then checks whether there is time for the chunk.
    ///
    /// A worker that waits for a turn holds none, and one that has a turn waits for nothing but its own connection,
    /// which fails if that lasts too long: so workers never wait for each other. After a failure each gets its turn to
    /// notice that.
    fn send_chunks(
        &self,
        stream: u16,
        outlet: &mut FrameOutput,
        plan: &Plan,
        mut worker: Option<&mut Niceness>,
    ) -> Result<(), SendError> {
        let mut share = plan.share(stream);
        loop {
            if let Some(niceness) = &mut worker {
                niceness.set(self.nice.load(Ordering::Relaxed));
            }
            // The caller is alone, and for a stopped guest all workers work at once.
            let takes_turns = worker.is_some() && plan.deadline.is_none();
            let _turn = takes_turns.then(|| self.turns.take(stream));
            let Some(place) = share.next() else { return Ok(()) };
            self.send_chunk(stream, outlet, plan, *place)?;
        }
    }

    fn send_chunk(
        &self,
        stream: u16,
        outlet: &mut FrameOutput,
        plan: &Plan,
        place: ChunkId,
    ) -> Result<(), SendError> {
        let ChunkId { block, chunk } = place;
        let owed = lock(&self.owed).get(usize::from(block)).map(|pages| pages.chunk(chunk.into()));
        let Some(owed) = owed else { return Ok(()) };
        let task = ChunkTask { id: place, round: plan.round, guest_runs: plan.deadline.is_none() };
        let mut wanted = WantedPages { pages: owed, left_out: ChunkPages::EMPTY };
        let mut used = owed;
        for encoder in &mut outlet.page_encoders {
            let left_out = encoder.select(&task, &used);
            wanted.left_out.insert(&left_out);
            used.remove(&left_out);
        }
        let sent = self.send_frames(stream, outlet, &task, wanted);
        outlet.page_encoders.iter_mut().for_each(|encoder| encoder.end_chunk());
        sent
    }

    /// Sends these pages of a chunk, in as many frames as needed.
    fn send_frames(
        &self,
        stream: u16,
        outlet: &mut FrameOutput,
        task: &ChunkTask,
        mut wanted: WantedPages,
    ) -> Result<(), SendError> {
        while !wanted.pages.is_empty() {
            if self.stopped.load(Ordering::Acquire) {
                return Err(SendError::Cancelled);
            }
            let mut work = || self.send_frame(stream, outlet, task, &wanted);
            let (content, counts, bytes) = match self.reductions.meter() {
                Some(meter) => meter.count_work(work)?,
                None => work()?,
            };
            self.counters.sent(task.id.block, &content.pages, &counts, bytes);
            wanted.pages.remove(&content.pages);
            outlet.page_encoders.iter_mut().for_each(|encoder| encoder.sent(&content));
        }
        Ok(())
    }

    /// Sends as many pages of a chunk as fit into a frame. Returns its content, the counts of its pages, and its
    /// length, in bytes.
    fn send_frame(
        &self,
        stream: u16,
        outlet: &mut FrameOutput,
        task: &ChunkTask,
        wanted: &WantedPages,
    ) -> Result<(FrameContent, PageCounts, usize), SendError> {
        let ChunkTask { id, round, guest_runs } = *task;
        let Some(reader) = self.ram.get(usize::from(id.block)) else { return Err(SendError::Cancelled) };
        let is_there = |block: u16, page| {
            lock(&self.owed).get(usize::from(block)).is_some_and(|owed| !owed.contains(page))
        };
        let is_named = self.places_directly.load(Ordering::Relaxed);
        let omits_zeros = outlet.direct(id.block).filter(|_| is_named).map(|direct| direct.omits_zeros());
        let FrameOutput { builder, page_encoders, .. } = outlet;
        let filled = if let Some(omits_zeros) = omits_zeros {
            builder.fill_named(reader.as_ref(), id, &wanted.pages, omits_zeros)
        } else {
            let mut encoders = PageEncoders { encoders: page_encoders, is_there: &is_there };
            builder.fill(reader.as_ref(), id.chunk.into(), wanted, &mut encoders)
        };
        let (content, counts) = filled.map_err(|failed| SendError::Memory {
            block: reader.description(),
            offset: failed.offset,
            source: failed.source,
        })?;
        let FrameContent { pages, presumed, .. } = content;
        let seq = self.register_frame(stream, outlet, InFlight::Pages { chunk: id, pages, presumed })?;
        let header = PagesHeader { seq, round, block: id.block, chunk: id.chunk.into() };
        let sent = match omits_zeros {
            Some(_) => outlet.send_named(&header, self.reductions.meter()),
            None => outlet.send_pages(&header, self.reductions.meter(), guest_runs),
        };
        let bytes = sent.map_err(|source| send_error(stream, source))?;
        Ok((content, counts, bytes))
    }

    fn end_round(&self, stream: u16, outlet: &mut FrameOutput, round: u32) -> Result<(), SendError> {
        let seq = self.register_frame(stream, outlet, InFlight::RoundEnd)?;
        let sent = outlet.sink.send(FrameKind::RoundEnd, &[&encode_round_end(seq, round)]);
        sent.and_then(|()| outlet.sink.flush()).map_err(|source| send_error(stream, source))?;
        self.counters.sent_bytes(HEADER_BYTES + ROUND_END_BYTES);
        Ok(())
    }

    fn register_frame(
        &self,
        stream: u16,
        outlet: &mut FrameOutput,
        frame: InFlight,
    ) -> Result<u64, SendError> {
        let state = &self.streams[usize::from(stream)];
        if !state.has_room() {
            // A frame that waits in a buffer on this host would never be acknowledged.
            outlet.sink.flush().map_err(|source| send_error(stream, source))?;
        }
        state.register_frame(frame).ok_or(SendError::Cancelled)
    }

    // ---- readers of acknowledgements

    /// Processes acknowledgements until the connection ends.
    pub(super) fn read_acks(&self, stream: u16, mut source: Box<dyn FrameSource>) {
        let _guard = DeathGuard { shared: self, stream };
        let mut payload = Vec::new();
        let mut done = Vec::new();
        let cause = loop {
            match source.receive(&mut payload) {
                Ok(FrameKind::Ack) => {}
                Ok(FrameKind::Missing) => match self.process_missing(stream, &payload) {
                    Ok(()) => continue,
                    Err(cause) => break cause,
                },
                Ok(kind) => break SendError::UnexpectedFrame { stream, kind },
                Err(source) => break SendError::Stream { stream, source },
            }
            let Ack { seq, waited_us } = match Ack::decode(&payload) {
                Ok(ack) => ack,
                Err(source) => break SendError::BadAck { stream, source },
            };
            if let Err(expected) = self.streams[usize::from(stream)].acknowledge(seq, &mut done) {
                break SendError::WrongAck { stream, seq, expected };
            }
            if let Some(meter) = self.reductions.meter() {
                meter.record_peer_wait(waited_us);
            }
            self.remove_acknowledged(&mut done);
        };
        self.fail(cause);
    }

    /// Handles a report of missing pages, which were sent as references or deltas: they are sent in the next round.
    /// Each can be reported only once, and only if it was presumed to be at the destination.
    fn process_missing(&self, stream: u16, payload: &[u8]) -> Result<(), SendError> {
        let (seq, pages) = decode_missing(payload).map_err(|source| SendError::BadAck { stream, source })?;
        let missing = ChunkPages::from_words(pages);
        let Some((chunk, refused)) = self.streams[usize::from(stream)].missing(seq, &missing) else {
            return Err(SendError::WrongMissing { stream, seq });
        };
        self.reductions.iter().for_each(|reduction| reduction.refused(chunk, &refused));
        self.counters.refused(missing.count());
        Ok(())
    }

    /// Removes acknowledged pages from those owed.
    fn remove_acknowledged(&self, done: &mut Vec<InFlight>) {
        let mut round_ended = false;
        let mut owed = lock(&self.owed);
        for frame in done.drain(..) {
            match frame {
                InFlight::Pages { chunk: id, pages, presumed } => {
                    if let Some(bitmap) = owed.get_mut(usize::from(id.block)) {
                        bitmap.remove_from_chunk(id.chunk.into(), &pages);
                    }
                    self.reductions.iter().for_each(|reduction| reduction.acknowledged(id, &presumed));
                }
                InFlight::RoundEnd => round_ended = true,
            }
        }
        drop(owed);
        if round_ended {
            let mut state = lock(&self.state);
            state.unacknowledged = state.unacknowledged.saturating_sub(1);
            if state.unacknowledged == 0 {
                self.round_acknowledged.notify_one();
            }
        }
    }
}

fn send_error(stream: u16, source: TransportError) -> SendError {
    match source {
        TransportError::Deadline(_) => SendError::Overdue,
        source => SendError::Stream { stream, source },
    }
}

impl fmt::Debug for SenderState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SenderState").field("streams", &self.streams.len()).finish_non_exhaustive()
    }
}

/// Guard that reports the death of a thread, which must not leave the caller waiting.
struct DeathGuard<'a> {
    shared: &'a SenderState,
    stream: u16,
}

impl Drop for DeathGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.fail(SendError::ThreadDied { stream: self.stream });
        }
    }
}
