//! The receiver's loop: check a frame, apply it, acknowledge.

use std::hint::black_box;
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use link::LinkError;
use link::transport::{
    ConnectionHandle, DataStream, DirectReceiver, DirectSender, FrameSink, FrameSource, TransportError,
};
use proto::Generation;
use proto::frame::FrameKind;
use proto::limits::{CHUNK_BYTES, CHUNK_PAGES};
use proto::pages::{Content, PageRun, PagesHeader, encode_round_end};
use whimbrel_memory::{
    BlockWriter, DestinationRam, FRAME_PAGES, RamError, Receiver, ReceiverEvent, open_destination,
};

use crate::harness::{Amount, Benches};

#[path = "../../tests/common/mod.rs"]
mod common;

const CHUNKS: u64 = 16;

/// Returns the frames of a round again and again. Only their first bytes change, so that building them costs nothing.
struct Source {
    /// Waits here between rounds.
    begin: mpsc::Receiver<()>,
    /// Payloads of one chunk. The lent one is replaced by the receiver's previous buffer.
    frames: Vec<Vec<u8>>,
    lent: Option<usize>,
    /// The next frame of the round.
    next: usize,
    seq: u64,
    round: u32,
}

impl FrameSource for Source {
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, TransportError> {
        if let Some(lent) = self.lent.take() {
            std::mem::swap(payload, &mut self.frames[lent]);
        }
        if self.next == 0 {
            self.begin.recv().map_err(|_| LinkError::Ended)?;
            self.round += 1;
        }
        self.seq += 1;
        let (chunk, frame) = (self.next / self.frames.len(), self.next % self.frames.len());
        if chunk as u64 == CHUNKS {
            self.next = 0;
            payload.clear();
            payload.extend(encode_round_end(self.seq, self.round));
            return Ok(FrameKind::RoundEnd);
        }
        self.next += 1;
        self.lent = Some(frame);
        std::mem::swap(payload, &mut self.frames[frame]);
        // As in the module's documentation: seq, round, block, runs, chunk.
        payload[..8].copy_from_slice(&self.seq.to_le_bytes());
        payload[8..12].copy_from_slice(&self.round.to_le_bytes());
        payload[16..24].copy_from_slice(&(chunk as u64).to_le_bytes());
        Ok(FrameKind::Pages)
    }

    fn has_more(&mut self) -> bool {
        self.next > 0
    }

    fn direct(&mut self) -> Option<&mut dyn DirectReceiver> {
        None
    }

    fn places_directly(&self) -> bool {
        false
    }
}

struct Sink;

impl FrameSink for Sink {
    fn set_deadline(&mut self, _: Option<Instant>) {}

    fn send(&mut self, _: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        black_box(payload);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn unsent_bytes(&self) -> u64 {
        0
    }

    fn direct(&mut self) -> Option<&mut dyn DirectSender> {
        None
    }
}

/// There is no connection to hang up: the source ends when its last `Rounds` is dropped.
#[derive(Debug)]
struct End;

impl ConnectionHandle for End {
    fn shutdown(&self) {}

    fn sent_bytes(&self) -> u64 {
        0
    }

    fn received_bytes(&self) -> u64 {
        0
    }
}

/// Memory that discards all data.
struct Nowhere;

impl BlockWriter for Nowhere {
    fn name(&self) -> &'static str {
        "nowhere"
    }

    fn bytes(&self) -> u64 {
        CHUNKS * CHUNK_BYTES
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        black_box((offset, into));
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        black_box((offset, data));
        Ok(())
    }

    fn allow_direct_placement(&self, _: Range<u64>) -> bool {
        false
    }

    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        black_box(range);
        Ok(())
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

/// All pages of a chunk, in frames as a sender makes them.
fn frames(kind: &str) -> Vec<Vec<u8>> {
    let run =
        |first: u64, pages: u64, content| PageRun { first_page: first as u16, pages: pages as u16, content };
    let frames: Vec<Vec<PageRun>> = match kind {
        "data" => (0..CHUNK_PAGES)
            .step_by(FRAME_PAGES as usize)
            .map(|first| vec![run(first, FRAME_PAGES, Content::Data)])
            .collect(),
        "zeros" => vec![vec![run(0, CHUNK_PAGES, Content::Zero)]],
        // Every second page has data, so twice as many pages go into a frame.
        "mixed" => (0..CHUNK_PAGES)
            .step_by(2 * FRAME_PAGES as usize)
            .map(|first| {
                let two = |at| [run(at, 1, Content::Data), run(at + 1, 1, Content::Zero)];
                (first..first + 2 * FRAME_PAGES).step_by(2).flat_map(two).collect()
            })
            .collect(),
        other => panic!("no kind {other}"),
    };
    let payload = |runs: Vec<PageRun>| {
        let mut payload = Vec::new();
        PagesHeader { seq: 0, round: 0, block: 0, chunk: 0 }.encode(&runs, &mut payload);
        let data = runs.iter().filter(|run| run.content == Content::Data).map(|run| run.len_bytes());
        payload.resize(payload.len() + data.sum::<u64>() as usize, 7);
        payload
    };
    frames.into_iter().map(payload).collect()
}

/// Applies the same frames in each round. Dropped in this order, because the receiver waits for its threads.
struct Rounds {
    begin: mpsc::Sender<()>,
    ended: mpsc::Receiver<()>,
    _receiver: Receiver,
}

impl Rounds {
    fn new(frames: Vec<Vec<u8>>, ram: DestinationRam) -> Self {
        let (tell, ended) = mpsc::channel();
        let mut receiver = Receiver::new(ram, 1, move |event, _| {
            if let ReceiverEvent::RoundEnded { .. } = event {
                tell.send(()).unwrap();
            }
        });
        receiver.begin(Generation(1));
        let (begin, waiting) = mpsc::channel();
        let source = Source { begin: waiting, frames, lent: None, next: 0, seq: 0, round: 0 };
        let stream = DataStream { sink: Box::new(Sink), source: Box::new(source), handle: Arc::new(End) };
        receiver.attach(Generation(1), 0, stream).unwrap();
        Self { begin, ended, _receiver: receiver }
    }

    /// Begins a round and waits until all frames are applied.
    fn next(&self) {
        self.begin.send(()).unwrap();
        self.ended.recv().unwrap();
    }
}

pub(crate) fn cases(benches: &mut Benches) {
    let pages = Amount::Of(CHUNKS * CHUNK_PAGES, "page");
    for kind in ["data", "zeros", "mixed"] {
        benches.counted(&format!("frames, apply/{kind}"), pages, || {
            let nowhere: Box<dyn BlockWriter> = Box::new(Nowhere);
            let rounds = Rounds::new(frames(kind), [nowhere].into());
            move || rounds.next()
        });
    }
    for memory in ["memfd", "anonymous"] {
        for kind in ["data", "mixed"] {
            let bytes = Amount::Bytes(CHUNKS * CHUNK_BYTES);
            benches.timed(&format!("frames, apply to {memory}/{kind}"), bytes, || {
                let victim = common::Victim::start(memory, CHUNKS * CHUNK_BYTES);
                let region =
                    whimbrel_memory::RamRegion { bytes: CHUNKS * CHUNK_BYTES, ..victim.regions()[0].clone() };
                let ram = open_destination(&victim.process, &[region]).unwrap().into();
                let rounds = Rounds::new(frames(kind), ram);
                move || {
                    let _keep = &victim;
                    rounds.next();
                }
            });
        }
    }
}
