//! The sender's loop: read pages, find zeros and holes, build frames. The memory is artificial and the connection
//! accepts everything at once, so that only the loop is measured.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Arc, LazyLock, mpsc};
use std::time::Instant;

use link::LinkError;
use link::transport::{
    ConnectionHandle, DataStream, DirectReceiver, DirectSender, FrameSink, FrameSource, TransportError,
};
use proto::frame::FrameKind;
use proto::limits::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES};
use proto::packed::Compression;
use proto::pages::{Ack, decode_round_end};
use whimbrel_memory::{
    BlockReader, CompletedRound, CompressionCriteria, CompressionState, Deltas, DirtyLog, OwedPages, PageSet,
    RamError, Reductions, ScanError, ScanStats, Sender,
};

use crate::harness::{Amount, Benches};

const PAGE: usize = PAGE_BYTES as usize;

/// Accepts every frame, and signals the other half when a round has ended.
struct Sink(mpsc::Sender<Vec<u8>>);

impl FrameSink for Sink {
    fn set_deadline(&mut self, _: Option<Instant>) {}

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        let seq = match kind {
            FrameKind::RoundEnd => Some(decode_round_end(payload[0]).unwrap().0),
            // Before the sender waits for it.
            FrameKind::Pages => {
                payload[0].first_chunk().map(|seq| u64::from_le_bytes(*seq)).filter(|seq| seq % 1024 == 0)
            }
            _ => None,
        };
        if let Some(seq) = seq {
            self.0.send(Ack { seq, waited_us: 0 }.encode().to_vec()).unwrap();
        }
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

/// Acknowledges rounds.
struct Source(mpsc::Receiver<Vec<u8>>);

impl FrameSource for Source {
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, TransportError> {
        *payload = self.0.recv().map_err(|_| LinkError::Ended)?;
        Ok(FrameKind::Ack)
    }

    fn has_more(&mut self) -> bool {
        false
    }

    fn direct(&mut self) -> Option<&mut dyn DirectReceiver> {
        None
    }

    fn places_directly(&self) -> bool {
        false
    }
}

/// Ends both halves, because the acknowledgements end.
#[derive(Debug)]
struct End(mpsc::Sender<Vec<u8>>);

impl ConnectionHandle for End {
    fn shutdown(&self) {
        // An invalid acknowledgement ends the thread that reads them.
        let _ = self.0.send(Vec::new());
    }

    fn sent_bytes(&self) -> u64 {
        0
    }

    fn received_bytes(&self) -> u64 {
        0
    }
}

/// A block of `chunks` chunks whose pages are all of one kind, or of all kinds in turn.
struct Memory {
    kind: &'static str,
    chunks: u64,
}

/// Pages of small numbers, one byte in eight, as much of a program's memory is.
static NUMBERS: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 1_u64;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56).to_le_bytes()
    };
    (0..64 * PAGE / 8).flat_map(|_| word()).collect()
});

impl BlockReader for Memory {
    fn name(&self) -> &'static str {
        "made up"
    }

    fn bytes(&self) -> u64 {
        self.chunks * CHUNK_BYTES
    }

    /// Writes only as much into the buffer as distinguishes the kinds, because the cost of copying is not measured
    /// here.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        for (page, bytes) in (offset / PAGE_BYTES..).zip(into.chunks_exact_mut(PAGE)) {
            if self.kind == "numbers" {
                let at = page as usize % 64 * PAGE;
                bytes.copy_from_slice(&NUMBERS[at..at + PAGE]);
                continue;
            }
            let (first, last) = match self.kind {
                "zeros" | "holes" => (0, 0),
                "last byte" => (0, 1),
                "data" => (1, 0),
                "mixed" => (u8::from(page % 2 == 0), 0),
                other => panic!("no kind {other}"),
            };
            (bytes[0], bytes[PAGE - 1]) = (first, last);
        }
        Ok(())
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        Ok(if self.kind == "holes" { range.end } else { range.start })
    }
}

/// Reports the same pages as written in each round.
struct Written(PageSet);

impl DirtyLog for Written {
    fn scan_dirty(&mut self, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        into[0].insert(&self.0);
        Ok(ScanStats::default())
    }
}

/// Rounds of the same pages, one for each call.
fn rounds(kind: &'static str, chunks: u64, written: PageSet, saving: Reductions) -> impl FnMut() {
    let (acks, arriving) = mpsc::channel();
    let stream = DataStream {
        sink: Box::new(Sink(acks.clone())),
        source: Box::new(Source(arriving)),
        handle: Arc::new(End(acks)),
    };
    let memory: Box<dyn BlockReader> = Box::new(Memory { kind, chunks });
    let sender = Sender::with_reductions([memory].into(), saving, vec![stream]).unwrap();
    let nothing = OwedPages::everything([chunks * CHUNK_BYTES]);
    let mut state = Some((sender, nothing));
    let mut log = Written(written);
    let mut round = move || {
        let (sender, owed) = state.take().unwrap();
        let readable = owed.clear_marks(&mut log).unwrap().drain(|| Ok::<_, Infallible>(())).unwrap();
        let CompletedRound { sender, owed, .. } = sender.send_round(readable).unwrap();
        state = Some((sender, owed));
    };
    // The first round covers everything.
    round();
    round
}

pub(crate) fn cases(benches: &mut Benches) {
    const CHUNKS: u64 = 16;
    for kind in ["zeros", "last byte", "data", "mixed", "holes"] {
        let pages = Amount::Of(CHUNKS * CHUNK_PAGES, "page");
        benches.counted(&format!("frames, build/{kind}"), pages, || {
            rounds(kind, CHUNKS, PageSet::full(CHUNKS * CHUNK_BYTES), Reductions::default())
        });
    }
    for way in [Compression::Lz4, Compression::Zstd(1), Compression::Zstd(3), Compression::Zstd(7)] {
        let pages = Amount::Of(CHUNKS * CHUNK_PAGES, "page");
        benches.counted(&format!("frames, pack/{way}"), pages, || {
            let packing = Arc::new(CompressionState::new(way, CompressionCriteria::default()));
            let saving = Reductions::new(vec![packing], Some(Arc::default()));
            rounds("numbers", CHUNKS, PageSet::full(CHUNKS * CHUNK_BYTES), saving)
        });
    }
    benches.counted("frames, pages as they were", Amount::Of(CHUNKS * CHUNK_PAGES, "page"), || {
        let deltas = Deltas::new(1, (CHUNKS * CHUNK_BYTES) as usize / 16, 0);
        deltas.set(true);
        let saving = Reductions::new(vec![Arc::new(deltas)], None);
        rounds("numbers", CHUNKS, PageSet::full(CHUNKS * CHUNK_BYTES), saving)
    });
    // The assignment of chunks to streams is computed anew in each round.
    benches.counted("round of few pages/64 in 1 GiB", Amount::Of(1, "round"), || {
        let mut written = PageSet::new(1 << 30);
        (0..64).for_each(|page| written.set(page * 8 * CHUNK_PAGES..page * 8 * CHUNK_PAGES + 1));
        rounds("data", 512, written, Reductions::default())
    });
}
