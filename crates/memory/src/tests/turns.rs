//! Rounds of which only some of the threads send at the same time.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use link::transport::{DataStream, DirectSender, FrameSink, TransportError, fake};
use proto::Generation;
use proto::frame::FrameKind;
use proto::limits::CHUNK_PAGES;
use proto::pages::PagesHeader;

use super::fake_ram::FakeRam;
use super::fake_wire::{WHOLE, connection, stream};
use crate::{CompletedRound, Receiver, SendError, Sender, lock, stream_of};

const STREAMS: u16 = 4;
const CHUNKS: u64 = 24;
/// A test that needs more time never ends.
const TIME: Duration = Duration::from_secs(20);

/// Observations of the sinks of all streams.
#[derive(Default)]
struct Seen {
    sending: AtomicU16,
    most_sending: AtomicU16,
    /// Streams and chunks in the order in which they were sent.
    chunks: Mutex<Vec<(u16, u64)>>,
    /// Number of threads that have arrived, if all of them have to send at the same time.
    arrived: Mutex<Option<u16>>,
    comes: Condvar,
}

impl Seen {
    fn wait_for_all(&self) {
        let mut arrived = lock(&self.arrived);
        if let Some(arrived) = &mut *arrived {
            *arrived += 1;
            self.comes.notify_all();
        }
        let is_missing = |arrived: &mut Option<u16>| arrived.is_some_and(|arrived| arrived < STREAMS);
        let (_came, waited) = self.comes.wait_timeout_while(arrived, TIME, is_missing).unwrap();
        assert!(!waited.timed_out(), "not all of them send");
    }
}

/// Records which streams send pages at the same time.
struct Watched {
    sink: Box<dyn FrameSink>,
    stream: u16,
    seen: Arc<Seen>,
}

impl FrameSink for Watched {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.sink.set_deadline(deadline);
    }

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        if kind == FrameKind::RoundEnd {
            return self.sink.send(kind, payload);
        }
        let sending = self.seen.sending.fetch_add(1, Ordering::SeqCst) + 1;
        self.seen.most_sending.fetch_max(sending, Ordering::SeqCst);
        let (header, _) = PagesHeader::decode(&payload.concat(), &mut Vec::new()).unwrap();
        lock(&self.seen.chunks).push((self.stream, header.chunk));
        self.seen.wait_for_all();
        // So that others could come in between.
        thread::yield_now();
        let sent = self.sink.send(kind, payload);
        self.seen.sending.fetch_sub(1, Ordering::SeqCst);
        sent
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        self.sink.flush()
    }

    fn unsent_bytes(&self) -> u64 {
        0
    }

    fn direct(&mut self) -> Option<&mut dyn DirectSender> {
        None
    }
}

/// A source whose pages all differ, and a destination.
struct Stage {
    source: FakeRam,
    destination: FakeRam,
    receiver: Receiver,
    generation: Generation,
    seen: Arc<Seen>,
}

impl Stage {
    fn new() -> Self {
        let pages = CHUNKS * CHUNK_PAGES;
        let (source, destination) = (FakeRam::new(&[pages]), FakeRam::new(&[pages]));
        (0..pages).for_each(|page| source.0[0].guest_writes(page, page + 1, 0));
        let receiver = Receiver::new(destination.writers(), STREAMS, |_, _| {});
        Self { source, destination, receiver, generation: Generation(0), seen: Arc::default() }
    }

    /// Opens new connections, of which one is cut after `budget` bytes.
    fn connect(&mut self, budget: u64) -> Sender {
        self.generation = self.generation.next();
        self.receiver.begin(self.generation);
        let near = (0..STREAMS).map(|stream| {
            let (near, far) = connection(if stream == 2 { budget } else { WHOLE }, WHOLE);
            self.receiver.attach(self.generation, stream, far).unwrap();
            let sink = Watched { sink: near.sink, stream, seen: Arc::clone(&self.seen) };
            DataStream { sink: Box::new(sink), ..near }
        });
        Sender::start(self.source.readers(), near.collect()).unwrap()
    }

    fn is_equal(&self) -> bool {
        self.source.first_difference(&self.destination).is_none()
    }

    /// Returns the maximum number of simultaneous senders, and the chunks sent.
    fn take_seen(&self) -> (u16, Vec<(u16, u64)>) {
        let most = self.seen.most_sending.swap(0, Ordering::SeqCst);
        (most, std::mem::take(&mut *lock(&self.seen.chunks)))
    }
}

/// Checks that each stream has sent its own chunks, from the first to the last.
fn assert_in_order(sent: &[(u16, u64)]) {
    for stream in 0..STREAMS {
        let own = |(_, chunk): &(u16, u64)| *chunk;
        let mut chunks: Vec<_> = sent.iter().filter(|(of, _)| *of == stream).map(own).collect();
        chunks.dedup();
        let expected: Vec<_> = (0..CHUNKS).filter(|chunk| stream_of(0, *chunk, STREAMS) == stream).collect();
        assert_eq!(chunks, expected, "stream {stream}");
    }
}

#[test]
fn a_round_in_turns_is_whole_and_each_stream_in_order() {
    let mut stage = Stage::new();
    let mut sender = stage.connect(WHOLE);
    let mut owed = stage.source.everything();
    for threads in [1, 2, 0] {
        sender.handle().limit_copying_threads(threads);
        let readable = owed.clear_marks(&mut stage.source.log()).unwrap().skip_drain();
        let sent = sender.send_round(readable).unwrap();
        assert_eq!(sent.owed.pages(), 0);
        let (most, chunks) = stage.take_seen();
        assert!(most <= threads.max(1), "{most} at the same time, not {threads}");
        assert_in_order(&chunks);
        assert!(stage.is_equal());
        (0..CHUNKS * CHUNK_PAGES).for_each(|page| stage.source.0[0].guest_writes(page, page + 7, 1));
        (sender, owed) = (sent.sender, sent.owed);
    }
}

#[test]
fn a_guest_that_stands_still_has_all_threads_at_work() {
    let mut stage = Stage::new();
    let sender = stage.connect(WHOLE);
    sender.handle().limit_copying_threads(1);
    *lock(&stage.seen.arrived) = Some(0);
    let readable = stage.source.everything().clear_marks(&mut stage.source.log()).unwrap().skip_drain();
    sender.send_round_by(readable, Instant::now() + Duration::from_mins(1)).unwrap();
    assert!(stage.is_equal());
    assert_in_order(&stage.take_seen().1);
}

/// A connection breaks in the middle of a turn, others wait for theirs; over new connections everything continues in
/// turns.
#[test]
fn a_cut_in_a_turn_ends_the_round_and_the_next_one_is_whole() {
    for budget in [0, 100_000, 3 << 20, 9 << 20] {
        let mut stage = Stage::new();
        let sender = stage.connect(budget);
        sender.handle().limit_copying_threads(1);
        let readable = stage.source.everything().clear_marks(&mut stage.source.log()).unwrap().skip_drain();
        let interrupted = sender.send_round(readable).unwrap_err();
        assert!(interrupted.cause.is_connection(), "{interrupted:?}");
        assert_eq!(stage.take_seen().0, 1);
        let sender = stage.connect(WHOLE);
        sender.handle().limit_copying_threads(1);
        let readable = interrupted.owed.clear_marks(&mut stage.source.log()).unwrap().skip_drain();
        let CompletedRound { owed, .. } = sender.send_round(readable).unwrap();
        assert_eq!((owed.pages(), stage.take_seen().0), (0, 1));
        assert!(stage.is_equal());
    }
}

/// The thread with the turn blocks in the middle of a frame that is not read, the others wait for theirs.
#[test]
fn cancelling_ends_a_turn_and_the_waiting_for_one() {
    let stage = Stage::new();
    let (near, mut far): (Vec<_>, Vec<_>) = (0..STREAMS).map(|_| fake::connection()).unzip();
    let near = near.into_iter().map(stream).collect();
    let sender = Sender::start(stage.source.readers(), near).unwrap();
    let handle = sender.handle();
    handle.limit_copying_threads(1);
    let readable = stage.source.everything().clear_marks(&mut stage.source.log()).unwrap().skip_drain();
    let (end_of, ended) = mpsc::channel();
    thread::spawn(move || end_of.send(sender.send_round(readable).unwrap_err()));
    // Any of the streams may be the first.
    let (notify, received) = mpsc::channel();
    for far in far.drain(..) {
        let notify = notify.clone();
        thread::spawn(move || notify.send((far.raw().read(&mut [0]).unwrap(), far)));
    }
    let (bytes, _far) = received.recv().unwrap();
    assert_eq!(bytes, 1);
    handle.cancel();
    let interrupted = ended.recv_timeout(TIME).unwrap();
    assert!(matches!(interrupted.cause, SendError::Cancelled));
    assert_eq!(interrupted.owed.pages(), CHUNKS * CHUNK_PAGES);
}
