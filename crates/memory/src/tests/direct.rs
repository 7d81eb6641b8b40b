//! Memory that the transport moves by itself: named by the sender, placed at the receiver.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use link::transport::TransportError;
use link::transport::fake::{self, End, Placement, RawEnd, Regions};
use proto::Generation;
use proto::frame::{FrameKind, Header};
use proto::limits::CHUNK_PAGES;

use super::Dice;
use super::fake_ram::{FakeBlock, FakeRam, PAGE};
use super::fake_wire::stream;
use super::handmade_frames::{data, frame};
use super::moves::Move;
use super::parts::Parts;
use crate::{
    BlockReader, BlockWriter, CompletedRound, RamError, ReadablePages, ReceiveError, Receiver, ReceiverEvent,
    SendError, Sender, SourceRam, lock,
};

/// Blocks of RAM as regions, and the numbers of their reads and writes.
pub(super) struct Reached {
    ram: FakeRam,
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Reached {
    fn new(ram: &FakeRam) -> Arc<Self> {
        Arc::new(Self { ram: ram.clone(), reads: AtomicU64::new(0), writes: AtomicU64::new(0) })
    }

    fn block(&self, region: u16) -> &Arc<FakeBlock> {
        &self.ram.0[usize::from(region)]
    }
}

impl fmt::Debug for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reached").finish_non_exhaustive()
    }
}

impl Regions for Reached {
    fn reaches(&self, region: u16) -> bool {
        usize::from(region) < self.ram.0.len()
    }

    fn read(&self, region: u16, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        BlockReader::read(self.block(region), offset, into).map_err(io::Error::other)
    }

    fn write(&self, region: u16, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        BlockWriter::write(self.block(region), offset, bytes).map_err(io::Error::other)
    }
}

/// Way in which the data of a connection is placed.
#[derive(Clone)]
pub(super) enum Way {
    /// By copies of the data plane.
    Copied,
    /// By the transport, at the ends that have regions.
    InOrder { from: Option<Arc<Reached>>, to: Option<Arc<Reached>>, omits_zeros: bool },
    /// By writes of the source's end.
    OneSided { from: Arc<Reached>, to: Arc<Reached> },
}

impl Way {
    pub(super) fn apply(&self, (near, far): (End, End)) -> (End, End) {
        match self.clone() {
            Self::Copied => (near, far),
            Self::InOrder { from, to, omits_zeros } => {
                let place = |end: End, regions: Option<Arc<Reached>>| match regions {
                    Some(regions) => end.placing(Placement::InOrder { regions, omits_zeros }),
                    None => end,
                };
                (place(near, from), place(far, to))
            }
            Self::OneSided { from, to } => {
                let placement = Placement::OneSided { from, to };
                (near.placing(placement.clone()), far.placing(placement))
            }
        }
    }
}

/// Every page arrives, whatever breaks, for each way of placement: at both ends, at one, and one-sided.
#[test]
fn every_page_arrives_by_direct_placement() {
    for case in 0..5 {
        let (mut rounds, mut breaks, mut corrupt, mut reads, mut writes) = (0, 0, 0, 0, 0);
        for seed in 0..24 {
            let mut dice = Dice(seed);
            let mut it = Move::new(&mut dice);
            it.saving = Parts::default();
            let (from, to) = (Reached::new(&it.source), Reached::new(&it.destination));
            let (some_from, some_to) = (Some(Arc::clone(&from)), Some(Arc::clone(&to)));
            it.way = match case {
                0 => Way::InOrder { from: some_from, to: some_to, omits_zeros: true },
                1 => Way::InOrder { from: some_from, to: some_to, omits_zeros: false },
                2 => Way::InOrder { from: some_from, to: None, omits_zeros: true },
                3 => Way::InOrder { from: None, to: some_to, omits_zeros: true },
                _ => Way::OneSided { from: Arc::clone(&from), to: Arc::clone(&to) },
            };
            let outcome = it.run(seed, &mut dice);
            let difference = it.source.first_difference(&it.destination);
            // Zeros that were not left out are no holes.
            let differs = |(block, page): (usize, u64)| {
                let contents = it.source.0[block].contents(page).unwrap_or([0; PAGE]);
                contents != it.destination.0[block].contents(page).unwrap_or([0; PAGE])
            };
            let is_equal = match case {
                1 | 4 => all_pages(&it.source).all(|place| !differs(place)),
                _ => difference.is_none(),
            };
            assert!(is_equal, "case {case}, seed {seed}: {difference:?} {outcome:?}");
            rounds += outcome.rounds;
            breaks += outcome.breaks;
            corrupt += outcome.corrupt;
            reads += from.reads.load(Ordering::Relaxed);
            writes += to.writes.load(Ordering::Relaxed);
        }
        assert!(rounds > 0 && breaks > 0 && corrupt > 0, "case {case}: {rounds} {breaks} {corrupt}");
        assert_eq!((reads > 0, writes > 0), (case != 3, case != 2), "case {case}");
    }
}

fn all_pages(ram: &FakeRam) -> impl Iterator<Item = (usize, u64)> {
    let blocks = ram.0.iter().enumerate();
    blocks.flat_map(|(block, it)| (0..it.pages.len() as u64).map(move |page| (block, page)))
}

/// A source whose pages all differ, and a destination.
struct Pair {
    source: FakeRam,
    destination: FakeRam,
    from: Arc<Reached>,
    to: Arc<Reached>,
    receiver: Receiver,
}

impl Pair {
    fn new(pages: u64, allows_direct: bool) -> Self {
        let (source, mut destination) = (FakeRam::new(&[pages]), FakeRam::new(&[pages]));
        (0..pages).for_each(|page| source.0[0].guest_writes(page, page + 1, 0));
        Arc::get_mut(&mut destination.0[0]).unwrap().allows_direct = allows_direct;
        let mut receiver = Receiver::new(destination.writers(), 1, |_, _| {});
        receiver.begin(Generation(1));
        let (from, to) = (Reached::new(&source), Reached::new(&destination));
        Self { source, destination, from, to, receiver }
    }

    fn connect(&mut self, readers: SourceRam, omits_zeros: bool) -> Sender {
        let (from, to) = (Some(Arc::clone(&self.from)), Some(Arc::clone(&self.to)));
        let (near, far) = Way::InOrder { from, to, omits_zeros }.apply(fake::connection());
        self.receiver.attach(Generation(1), 0, stream(far)).unwrap();
        Sender::start(readers, vec![stream(near)]).unwrap()
    }

    fn everything(&self) -> ReadablePages {
        self.source.everything().clear_marks(&mut self.source.log()).unwrap().skip_drain()
    }

    fn is_equal(&self) -> bool {
        self.source.first_difference(&self.destination).is_none()
    }

    /// Returns the numbers of regions read and written.
    fn counts(&self) -> (u64, u64) {
        (self.from.reads.load(Ordering::Relaxed), self.to.writes.load(Ordering::Relaxed))
    }
}

/// Block whose reads fail the test.
struct Untouchable(Arc<FakeBlock>);

impl BlockReader for Untouchable {
    fn name(&self) -> &str {
        BlockReader::name(&self.0)
    }

    fn bytes(&self) -> u64 {
        BlockReader::bytes(&self.0)
    }

    fn read(&self, offset: u64, _: &mut [u8]) -> Result<(), RamError> {
        panic!("the memory at {offset} is read");
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        self.0.first_present(range)
    }
}

#[test]
fn memory_that_is_named_need_not_be_touched() {
    for pages in [40, 3 * CHUNK_PAGES + 5] {
        let mut pair = Pair::new(pages, true);
        let reader: Box<dyn BlockReader> = Box::new(Untouchable(Arc::clone(&pair.source.0[0])));
        let sender = pair.connect([reader].into(), false);
        let CompletedRound { owed, stats, .. } = sender.send_round(pair.everything()).unwrap();
        assert_eq!((owed.pages(), stats.contents.data), (0, pages));
        assert!(stats.wire_bytes > pages * PAGE as u64, "moved bytes count");
        assert!(pair.is_equal());
    }
}

/// Disks, for instance, and blocks into which the kernel places pages.
#[test]
fn a_block_that_must_not_be_placed_into_is_written() {
    let mut pair = Pair::new(2 * CHUNK_PAGES, false);
    let sender = pair.connect(pair.source.readers(), true);
    sender.send_round(pair.everything()).unwrap();
    assert!(pair.is_equal());
    let (reads, writes) = pair.counts();
    assert!(reads > 0 && writes == 0, "{reads} {writes}");
}

#[test]
fn copies_are_sent_once_direct_placement_stops() {
    let mut pair = Pair::new(CHUNK_PAGES, true);
    let sender = pair.connect(pair.source.readers(), true);
    let CompletedRound { sender, owed, .. } = sender.send_round(pair.everything()).unwrap();
    let before = pair.counts();
    assert!(before.0 > 0 && before.1 > 0);
    sender.handle().stop_direct_placement();
    (0..CHUNK_PAGES).for_each(|page| pair.source.0[0].guest_writes(page, !page, 8));
    let readable = owed.clear_marks(&mut pair.source.log()).unwrap().skip_drain();
    sender.send_round(readable).unwrap();
    assert!(pair.is_equal());
    // The receiver may still place what arrives.
    assert_eq!(pair.counts().0, before.0);
}

/// New connections would fail in the same way.
#[test]
fn memory_out_of_the_transport_s_reach_ends_the_round() {
    for pages in [40, 3 * CHUNK_PAGES] {
        let mut pair = Pair::new(pages, true);
        *lock(&pair.source.0[0].unreadable) = Some(pages - 2);
        let sender = pair.connect(pair.source.readers(), false);
        let interrupted = sender.send_round(pair.everything()).unwrap_err();
        let SendError::Stream { source, .. } = &interrupted.cause else { panic!("{interrupted:?}") };
        assert!(matches!(source, TransportError::Memory(_)), "{source:?}");
        assert!(!interrupted.cause.is_connection());
        assert!(interrupted.owed.blocks()[0].contains(pages - 2));
    }
}

/// A receiver that places what arrives, the test's end, and the reasons for the end of its stream.
fn placing_receiver(ram: &FakeRam) -> (Receiver, RawEnd, mpsc::Receiver<ReceiveError>) {
    let (tell, ends) = mpsc::channel();
    let mut receiver = Receiver::new(ram.writers(), 1, move |event, _| {
        if let ReceiverEvent::Broken { cause, .. } = event {
            tell.send(cause).unwrap();
        }
    });
    receiver.begin(Generation(1));
    let way = Way::InOrder { from: None, to: Some(Reached::new(ram)), omits_zeros: true };
    let (near, far) = way.apply(fake::connection());
    receiver.attach(Generation(1), 0, stream(far)).unwrap();
    (receiver, near.raw(), ends)
}

fn with_header(payload: &[u8]) -> Vec<u8> {
    let header = Header::new(FrameKind::Pages, payload.len()).unwrap();
    [&header.encode()[..], payload].concat()
}

#[test]
fn a_head_that_does_not_fit_places_nothing() {
    type Check = fn(&ReceiveError) -> bool;
    let cut = |bytes: usize| frame(1, 1, 0, 0, &[data(0, 2)])[..bytes].to_vec();
    let surplus = [frame(1, 1, 0, 0, &[data(0, 1)]), vec![1]].concat();
    let cases: Vec<(Vec<u8>, Check)> = vec![
        (frame(2, 1, 0, 0, &[data(0, 1)]), |e| matches!(e, ReceiveError::WrongSeq { .. })),
        (frame(1, 0, 0, 0, &[data(0, 1)]), |e| matches!(e, ReceiveError::WrongRound { .. })),
        (frame(1, 1, 1, 0, &[data(0, 1)]), |e| matches!(e, ReceiveError::Outside { .. })),
        (frame(1, 1, 0, 1, &[data(2, 2)]), |e| matches!(e, ReceiveError::Outside { .. })),
        (frame(1, 1, 0, 0, &[data(5, 1), data(4, 1)]), |e| matches!(e, ReceiveError::BadFrame(_))),
        (cut(10), |e| matches!(e, ReceiveError::BadFrame(_))),
        (cut(30), |e| matches!(e, ReceiveError::BadFrame(_))),
        (cut(PAGE), |e| matches!(e, ReceiveError::Stream(TransportError::Protocol(_)))),
        (surplus, |e| matches!(e, ReceiveError::Stream(TransportError::Protocol(_)))),
    ];
    for (index, (payload, check)) in cases.into_iter().enumerate() {
        let ram = FakeRam::new(&[CHUNK_PAGES + 3]);
        let (_receiver, raw, ends) = placing_receiver(&ram);
        raw.write(&with_header(&payload)).unwrap();
        let cause = ends.recv().unwrap();
        assert!(check(&cause) && !cause.is_connection(), "case {index}: {cause:?}");
        let untouched = ram.0[0].pages.iter().all(|page| lock(page).contents.is_none());
        assert!(untouched, "case {index}");
    }
}

/// QEMU owns the memory once it is shut, whatever the source still sends.
#[test]
fn shutting_memory_ends_a_placement_that_waits() {
    let ram = FakeRam::new(&[CHUNK_PAGES]);
    let (receiver, raw, _ends) = placing_receiver(&ram);
    let bytes = with_header(&frame(1, 1, 0, 0, &[data(0, 64)]));
    // A part of the data is placed, the rest does not arrive.
    let (now, later) = bytes.split_at(bytes.len() - 20 * PAGE);
    raw.write(now).unwrap();
    while ram.0[0].contents(31).is_none() {
        thread::yield_now();
    }
    receiver.shut();
    let placed = || ram.0[0].pages.iter().filter(|page| lock(page).contents.is_some()).count();
    let before = placed();
    assert!(raw.write(later).is_err());
    drop(receiver);
    assert_eq!(placed(), before);
    assert!(before < 64);
}
