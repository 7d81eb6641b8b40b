//! Golden digest: the bytes that a sender with all reductions writes to all streams, and what is counted of them.
//!
//! Everything that a thread could decide by its speed is fixed: acknowledgements count only after every stream has
//! ended the round, and rounds over several streams are either small, so that the caller sends them stream by stream,
//! or of pages that are all different.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use link::LinkError;
use link::transport::{DataStream, DirectReceiver, DirectSender, FrameSink, FrameSource, TransportError};
use proto::Generation;
use proto::frame::FrameKind;
use proto::limits::PAGE_BYTES;
use proto::packed::Compression;
use proto::pages::Ack;

use super::Dice;
use super::fake_ram::{FakeRam, PAGE};
use super::fake_wire::{WHOLE, connection};
use super::parts::Parts;
use super::references::FakeTemplates;
use crate::reductions::deltas::tests::PAGE_SEED;
use crate::{
    AcceptedReductions, CompletedRound, CompressionCriteria, CompressionState, ContentHash, ContentIndex,
    Deltas, HintedPages, OwedPages, ReadablePages, Receiver, ReductionStage, Sender, Templates, lock,
};

/// Holds acknowledgements back until every stream has ended the round. Connections that break do so when the
/// destination has applied everything.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    streams: u16,
    ended: u16,
    /// Number of streams whose last frame was applied, if the connections break.
    applied: u16,
    /// True if the connections break instead of acknowledging anything.
    breaks: bool,
}

impl Gate {
    fn begin(&self, streams: u16, breaks: bool) {
        *lock(&self.state) = GateState { streams, ended: 0, applied: 0, breaks };
    }

    fn end_stream(&self) {
        lock(&self.state).ended += 1;
        self.changed.notify_all();
    }

    /// Waits for the end of the round on all streams; returns true if the connections break.
    fn wait_ended(&self) -> bool {
        self.wait(|state| state.ended).breaks
    }

    fn wait_applied(&self) {
        lock(&self.state).applied += 1;
        self.changed.notify_all();
        drop(self.wait(|state| state.applied));
    }

    fn wait(&self, streams: impl Fn(&GateState) -> u16) -> MutexGuard<'_, GateState> {
        let mut state = lock(&self.state);
        while streams(&state) < state.streams {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }
}

/// Records all frames of a stream, over all of its connections.
struct RecordingSink {
    inner: Box<dyn FrameSink>,
    written: Arc<Mutex<blake3::Hasher>>,
    bytes: u64,
    /// Number of frames over this connection.
    frames: Arc<AtomicU64>,
    gate: Arc<Gate>,
}

impl FrameSink for RecordingSink {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.inner.set_deadline(deadline);
    }

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        let mut written = lock(&self.written);
        written.update(format!("{kind:?}").as_bytes());
        for part in payload {
            written.update(part);
            self.bytes += part.len() as u64;
        }
        drop(written);
        self.frames.fetch_add(1, Ordering::SeqCst);
        let sent = self.inner.send(kind, payload);
        if kind == FrameKind::RoundEnd {
            self.inner.flush()?;
            self.gate.end_stream();
        }
        sent
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        self.inner.flush()
    }

    /// A link that is now and then behind.
    fn unsent_bytes(&self) -> u64 {
        self.bytes % (128 << 10)
    }

    fn direct(&mut self) -> Option<&mut dyn DirectSender> {
        None
    }
}

struct GatedSource {
    inner: Box<dyn FrameSource>,
    frames: Arc<AtomicU64>,
    gate: Arc<Gate>,
}

impl FrameSource for GatedSource {
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, TransportError> {
        loop {
            let kind = self.inner.receive(payload)?;
            if !self.gate.wait_ended() {
                return Ok(kind);
            }
            let frames = self.frames.load(Ordering::SeqCst);
            if kind == FrameKind::Ack && Ack::decode(payload).unwrap().seq == frames {
                self.gate.wait_applied();
                return Err(LinkError::Ended.into());
            }
        }
    }

    fn has_more(&mut self) -> bool {
        self.inner.has_more()
    }

    fn direct(&mut self) -> Option<&mut dyn DirectReceiver> {
        None
    }

    fn places_directly(&self) -> bool {
        false
    }
}

/// Writes what was counted, apart from times.
fn describe(parts: &Parts, into: &mut String) {
    if let Some(known) = &parts.known {
        let mut names = blake3::Hasher::new();
        for (page, name) in known.sent_pages_of(1) {
            names.update(&page.to_le_bytes());
            names.update(&name.0);
        }
        writeln!(into, "{:?} {}", known.referred(), names.finalize()).unwrap();
    }
    if let Some(deltas) = &parts.deltas {
        let counted = deltas.count();
        writeln!(into, "{} pages, {} bytes", counted.pages, counted.bytes).unwrap();
    }
    if let Some(packing) = &parts.packing {
        let (counted, link) = (packing.count(), parts.counted());
        let bytes = [
            counted.opening_bytes,
            link.data_bytes,
            counted.tried_bytes,
            counted.compressed_bytes,
            link.wire_bytes,
        ];
        writeln!(into, "{bytes:?}").unwrap();
    }
    for left_out in parts.hinted.iter().flat_map(|hinted| hinted.left_out()) {
        writeln!(into, "{:?}", left_out.runs().collect::<Vec<_>>()).unwrap();
    }
}

/// Connections of one generation after the other, and the bytes that were sent over them.
struct Rig {
    source: FakeRam,
    destination: FakeRam,
    receiver: Receiver,
    parts: Parts,
    gate: Arc<Gate>,
    written: Vec<Arc<Mutex<blake3::Hasher>>>,
    generation: Generation,
    sender: Option<Sender>,
    owed: OwedPages,
    text: String,
}

/// Way in which a round is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Running,
    Breaking,
    Stopped,
}

impl Rig {
    fn new(source: FakeRam, streams: u16, parts: Parts, templates: FakeTemplates) -> Self {
        let pages: Vec<u64> = source.0.iter().map(|block| block.pages.len() as u64).collect();
        let destination = FakeRam::new(&pages);
        let templates = Some(Arc::new(templates) as Arc<dyn Templates>);
        let accepted = AcceptedReductions { templates, delta_seed: Some(PAGE_SEED) };
        let receiver = Receiver::with_reductions(destination.writers(), accepted, streams, |_, _| {});
        let written = (0..streams).map(|_| Arc::default()).collect();
        let owed = source.everything();
        let (generation, text) = (Generation(0), String::new());
        let gate = Arc::default();
        Self { source, destination, receiver, parts, gate, written, generation, sender: None, owed, text }
    }

    fn connect(&mut self) -> Sender {
        self.generation = self.generation.next();
        self.receiver.begin(self.generation);
        let streams = (0..).zip(&self.written).map(|(stream, written)| {
            let (near, far) = connection(WHOLE, WHOLE);
            self.receiver.attach(self.generation, stream, far).unwrap();
            let (written, frames, gate) = (Arc::clone(written), Arc::default(), Arc::clone(&self.gate));
            let source =
                GatedSource { inner: near.source, frames: Arc::clone(&frames), gate: Arc::clone(&gate) };
            let sink = RecordingSink { inner: near.sink, written, bytes: 0, frames, gate };
            DataStream { sink: Box::new(sink), source: Box::new(source), handle: near.handle }
        });
        let streams = streams.collect();
        Sender::with_reductions(self.source.readers(), self.parts.reductions(), streams).unwrap()
    }

    fn round(
        &mut self,
        how: How,
        prepare: impl FnOnce(ReadablePages, &Parts) -> (ReadablePages, Option<OwedPages>),
    ) {
        let owed = std::mem::replace(&mut self.owed, OwedPages::everything([]));
        let (cleared, found) = owed.clear_marks_and_report(&mut self.source.log(), usize::MAX).unwrap();
        let reductions = self.parts.reductions();
        found.iter().enumerate().for_each(|(block, found)| reductions.written(block, found));
        let (readable, later) = prepare(cleared.skip_drain(), &self.parts);
        if let Some(later) = &later {
            reductions.awaited(later.blocks(), later.round() + 1);
        }
        self.gate.begin(self.written.len() as u16, how == How::Breaking);
        let sender = self.sender.take().unwrap_or_else(|| self.connect());
        let sent = match how {
            How::Stopped => sender.send_round_by(readable, Instant::now() + Duration::from_mins(10)),
            How::Running | How::Breaking => sender.send_round(readable),
        };
        let mut stats = match sent {
            Ok(CompletedRound { sender, owed, stats }) => {
                (self.sender, self.owed) = (Some(sender), owed);
                stats
            }
            Err(interrupted) => {
                assert!(how == How::Breaking, "{interrupted:?}");
                self.owed = interrupted.owed;
                interrupted.stats
            }
        };
        // The end of the round is counted after it was sent, so that it may be missing.
        (stats.duration_us, stats.wire_bytes) = (0, 0);
        if let Some(later) = &later {
            self.owed.take_back(later);
        }
        let unknown = self.parts.deltas.as_ref().map(|deltas| deltas.unknown(self.owed.blocks()));
        writeln!(self.text, "{stats:?} {} {unknown:?}", self.owed.pages()).unwrap();
    }

    /// Returns the digest, and what it is of.
    fn finish(mut self) -> (String, String) {
        assert_eq!(self.owed.pages(), 0);
        drop(self.sender);
        self.receiver.end_and_join();
        for (block, left_out) in self.parts.hinted.iter().flat_map(|hinted| hinted.left_out()).enumerate() {
            left_out.runs().flatten().for_each(|page| self.source.0[block].is_punched(page));
        }
        assert_eq!(self.source.first_difference(&self.destination), None);
        describe(&self.parts, &mut self.text);
        let mut all = blake3::Hasher::new();
        for written in &self.written {
            let digest = lock(written).finalize();
            writeln!(self.text, "{digest}").unwrap();
            all.update(digest.as_bytes());
        }
        all.update(self.text.as_bytes());
        (all.finalize().to_hex()[..32].to_owned(), self.text)
    }
}

fn all(readable: ReadablePages, _: &Parts) -> (ReadablePages, Option<OwedPages>) {
    (readable, None)
}

/// Fills pages with content that compresses somewhat, and is different everywhere.
fn fill(source: &FakeRam, block: usize, pages: std::ops::Range<u64>, dice: &mut Dice) {
    for page in pages {
        let (head, step) = (dice.next().to_le_bytes(), page as usize % 7 + 1);
        let content = std::array::from_fn(|at| if at < 8 { head[at] } else { (at / 64 * step) as u8 });
        source.0[block].guest_fills(page, &content);
    }
}

/// One stream, rounds of any size, with all reductions: wrong templates, marks of few bits, little room, an opening.
#[test]
fn bytes_of_one_stream_stay_as_they_are() {
    let mut dice = Dice(29);
    let source = FakeRam::new(&[1500, 900]);
    fill(&source, 0, 0..800, &mut dice);
    fill(&source, 1, 100..700, &mut dice);
    (0..40).for_each(|_| source.touch(&mut dice));
    let (known, templates) = templates(&source, 37);
    let deltas = Arc::new(Deltas::with_bits(1, 90_000, 0b111));
    deltas.set(true);
    let worth = CompressionCriteria { least_ratio_percent: 120, skip_bytes: 300_000 };
    let bytes = source.0.iter().map(|block| block.pages.len() as u64 * PAGE_BYTES);
    let parts = Parts {
        known: Some(Arc::new(known)),
        deltas: Some(deltas),
        packing: Some(Arc::new(CompressionState::opening(worth))),
        hinted: Some(Arc::new(HintedPages::new(bytes.take(1)))),
        ..Parts::default()
    };
    let mut rig = Rig::new(source, 1, parts, templates);
    rig.round(How::Running, |readable, parts| {
        let hinted = parts.hinted.as_ref().unwrap();
        let answer = hinted.begin();
        hinted.add_free(answer, 0, 700..760);
        hinted.add_free(answer, 0, 1400..1500);
        hinted.end_answer(answer);
        (readable, None)
    });
    let hows = [How::Running, How::Breaking, How::Running, How::Running, How::Breaking, How::Running];
    for (round, how) in (0..).zip(hows) {
        for _ in 0..25 {
            rig.source.touch(&mut dice);
        }
        (0..300).for_each(|page| rig.source.0[0].guest_writes(page, dice.next(), page as usize * 8));
        let copied = |page: u64| rig.source.0[1].contents(page + 200).unwrap_or([3; PAGE]);
        (900..960).for_each(|page| rig.source.0[0].guest_fills(page, &copied(page - 900)));
        rig.round(how, |readable, parts| {
            let (known, hinted) = (parts.known.as_ref().unwrap(), parts.hinted.as_ref().unwrap());
            let answer = hinted.begin();
            hinted.add_free(answer, 0, 750 - round * 10..790);
            if round == 1 {
                known.enable_memory_lookup();
            }
            if round == 4 {
                parts.deltas.as_ref().unwrap().set(false);
                parts.deltas.as_ref().unwrap().set(true);
                let (way, standing) = (Compression::Zstd(3), Compression::Zstd(1));
                parts.packing.as_ref().unwrap().set_compression(way, standing);
            }
            if round == 3 {
                let (readable, later, _) =
                    readable.part(crate::PageCursor::default(), 400, crate::PartBoundary::Anywhere);
                return (readable, Some(later));
            }
            (readable, None)
        });
    }
    rig.parts.reductions().end(ReductionStage::MemorySent);
    fill(&rig.source, 0, 0..200, &mut dice);
    rig.round(How::Running, all);
    end(&mut rig);
    let (digest, text) = rig.finish();
    assert_eq!(digest, "5cc20a98e01d6bfb774edc2af2d64dcb", "{text}");
}

/// The guest is stopped: one round with deltas, and then full pages.
fn end(rig: &mut Rig) {
    rig.parts.reductions().end(ReductionStage::GuestStopped);
    (0..100).for_each(|page| rig.source.0[0].guest_writes(page, page, 64));
    rig.round(How::Stopped, all);
    rig.parts.reductions().end(ReductionStage::DevicesSaved);
    (50..90).for_each(|page| rig.source.0[0].guest_writes(page, page + 9, 128));
    rig.round(How::Stopped, all);
}

/// Two templates of pages that the source has; one in `wrong` of them is wrong.
fn templates(source: &FakeRam, wrong: usize) -> (ContentIndex, FakeTemplates) {
    let bytes = source.0.iter().map(|block| block.pages.len() as u64 * PAGE_BYTES);
    let known = ContentIndex::new(bytes, 1, 2000, 2000);
    let template = |(number, pages): (u16, std::ops::Range<u64>)| {
        let mut pages: Vec<_> = pages.filter_map(|page| source.0[1].contents(page)).collect();
        known.learn(number, 0, pages.iter().map(|page| ContentHash::of(page)));
        pages.iter_mut().skip(wrong - 1).step_by(wrong).for_each(|page| page[7] ^= 1);
        Mutex::new(pages)
    };
    let templates = [(0, 120..260), (1, 300..420)].map(template).into();
    (known, FakeTemplates(templates))
}

/// Three streams: a round of different pages by the workers, then rounds of few pages by the caller.
#[test]
fn bytes_of_three_streams_stay_as_they_are() {
    let mut dice = Dice(31);
    let source = FakeRam::new(&[1600, 700]);
    fill(&source, 0, 0..1500, &mut dice);
    fill(&source, 1, 0..600, &mut dice);
    let (known, templates) = templates(&source, 130);
    known.enable_memory_lookup();
    let deltas = Arc::new(Deltas::with_bits(1, 1 << 20, u16::MAX));
    deltas.set(true);
    let packing = CompressionState::new(Compression::Lz4, CompressionCriteria::default());
    let bytes = source.0.iter().map(|block| block.pages.len() as u64 * PAGE_BYTES);
    let parts = Parts {
        known: Some(Arc::new(known)),
        deltas: Some(deltas),
        packing: Some(Arc::new(packing)),
        hinted: Some(Arc::new(HintedPages::new(bytes))),
        ..Parts::default()
    };
    let mut rig = Rig::new(source, 3, parts, templates);
    rig.round(How::Running, all);
    for (round, how) in (0..).zip([How::Running, How::Breaking, How::Running, How::Running]) {
        for page in 0..50 {
            let at = page * 27 + round;
            rig.source.0[0].guest_writes(at, dice.next(), (at * 64 % 4096) as usize);
        }
        let moved = |page: u64| rig.source.0[1].contents(page).unwrap();
        (0..12).for_each(|page| rig.source.0[0].guest_fills(510 + page, &moved(300 + page + 20 * round)));
        fill(&rig.source, 1, 520 + round * 3..523 + round * 3, &mut dice);
        rig.round(how, |readable, parts| {
            let hinted = parts.hinted.as_ref().unwrap();
            let answer = hinted.begin();
            hinted.add_free(answer, 0, 20..30);
            (readable, None)
        });
    }
    end(&mut rig);
    let (digest, text) = rig.finish();
    assert_eq!(digest, "d29d28d24d73fe2967cd36d2a562a162", "{text}");
}

/// Pages that remain after the switch to post-copy are compressed, and not reduced otherwise.
#[test]
fn bytes_of_remaining_pages_stay_as_they_are() {
    let mut dice = Dice(37);
    let source = FakeRam::new(&[1200]);
    fill(&source, 0, 0..1100, &mut dice);
    let packing = CompressionState::new(Compression::Zstd(1), CompressionCriteria::default());
    packing.try_out(&[Compression::Lz4, Compression::Zstd(3)]);
    let parts = Parts { packing: Some(Arc::new(packing)), ..Parts::default() };
    let mut rig = Rig::new(source, 2, parts, FakeTemplates(Vec::new()));
    rig.round(How::Running, all);
    fill(&rig.source, 0, 1000..1100, &mut dice);
    rig.round(How::Running, all);
    assert_eq!(rig.parts.packing.as_ref().unwrap().take_trials().len(), 2);
    let (digest, text) = rig.finish();
    assert_eq!(digest, "35e3909159d24799456a5b8bf40ee2b9", "{text}");
}
