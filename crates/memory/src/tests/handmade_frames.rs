//! Frames that a peer may send to a receiver, and their effects.

use std::sync::mpsc::{self, Receiver as Inbox};

use link::transport::fake::{self, RawEnd};
use link::transport::{DataStream, TransportError};
use proto::Generation;
use proto::delta::{Delta, HEAD_BYTES, PIECE_BYTES};
use proto::frame::{FrameKind, Header};
use proto::limits::CHUNK_PAGES;
use proto::packed::Codec;
use proto::pages::{Ack, BadPages, Content, PageRun, PagesHeader, encode_round_end};
use proto::reference::decode_missing;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::fake_ram::{FakeRam, PAGE};
use super::fake_wire::{WHOLE, connection, stream};
use crate::reductions::decoding::BadPacked;
use crate::reductions::deltas::tests::PAGE_SEED;
use crate::{AcceptedReductions, AttachError, ChunkPages, ReceiveError, Receiver, ReceiverEvent, lock};

/// A receiver with one stream of two, and its events.
struct Bench {
    ram: FakeRam,
    receiver: Receiver,
    peer: DataStream,
    raw: RawEnd,
    events: Inbox<ReceiverEvent>,
}

fn bench(generation: u64) -> Bench {
    with_reductions(
        generation,
        AcceptedReductions { delta_seed: Some(PAGE_SEED), ..AcceptedReductions::default() },
    )
}

fn with_reductions(generation: u64, presumed: AcceptedReductions) -> Bench {
    let ram = FakeRam::new(&[CHUNK_PAGES + 3, 1]);
    let (tell, events) = mpsc::channel();
    let mut receiver =
        Receiver::with_reductions(ram.writers(), presumed, 2, move |event, _| tell.send(event).unwrap());
    receiver.begin(Generation(generation));
    let (near, far) = fake::connection();
    receiver.attach(Generation(generation), 0, stream(far)).unwrap();
    let raw = near.raw();
    Bench { ram, receiver, peer: stream(near), raw, events }
}

pub(super) fn frame(seq: u64, round: u32, block: u16, chunk: u64, runs: &[PageRun]) -> Vec<u8> {
    let mut payload = Vec::new();
    PagesHeader { seq, round, block, chunk }.encode(runs, &mut payload);
    let data = runs.iter().filter(|run| run.content == Content::Data).map(|run| run.len_bytes()).sum::<u64>();
    payload.resize(payload.len() + data as usize, 0xab);
    payload
}

/// A packed frame whose data consists of the given bytes.
fn packed(codec: Codec, runs: &[PageRun], bytes: &[u8]) -> Vec<u8> {
    let mut payload = codec.encode().to_vec();
    PagesHeader { seq: 1, round: 1, block: 0, chunk: 0 }.encode(runs, &mut payload);
    payload.extend_from_slice(bytes);
    payload
}

pub(super) fn data(first_page: u16, pages: u16) -> PageRun {
    PageRun { first_page, pages, content: Content::Data }
}

impl Bench {
    fn send(&mut self, kind: FrameKind, payload: &[u8]) {
        self.peer.sink.send(kind, &[payload]).unwrap();
        self.peer.sink.flush().unwrap();
    }

    fn broken(&mut self) -> ReceiveError {
        match self.events.recv().unwrap() {
            ReceiverEvent::Broken { cause, stream: 0, .. } => cause,
            other => panic!("{other:?}"),
        }
    }

    fn acked(&mut self) -> u64 {
        let mut payload = Vec::new();
        assert_eq!(self.peer.source.receive(&mut payload).unwrap(), FrameKind::Ack);
        Ack::decode(&payload).unwrap().seq
    }

    fn untouched(&self) -> bool {
        self.ram.0.iter().flat_map(|block| &block.pages).all(|page| lock(page).contents.is_none())
    }
}

#[test]
fn frames_that_do_not_fit_end_the_stream_and_change_nothing() {
    type Check = fn(&ReceiveError) -> bool;
    let cases: Vec<(Vec<u8>, Check)> = vec![
        (frame(2, 1, 0, 0, &[data(0, 1)]), |e| matches!(e, ReceiveError::WrongSeq { expected: 1, found: 2 })),
        (frame(0, 1, 0, 0, &[data(0, 1)]), |e| matches!(e, ReceiveError::WrongSeq { .. })),
        (frame(1, 0, 0, 0, &[data(0, 1)]), |e| matches!(e, ReceiveError::WrongRound { .. })),
        (frame(1, 1, 2, 0, &[data(0, 1)]), |e| matches!(e, ReceiveError::Outside { block: 2, .. })),
        (frame(1, 1, u16::MAX, 1, &[data(0, 1)]), |e| matches!(e, ReceiveError::Outside { .. })),
        (frame(1, 1, 0, 2, &[data(0, 1)]), |e| matches!(e, ReceiveError::Outside { chunk: 2, .. })),
        (frame(1, 1, 0, u64::MAX / 2 + 1, &[data(0, 1)]), |e| matches!(e, ReceiveError::Outside { .. })),
        (frame(1, 1, 1, 1, &[]), |e| matches!(e, ReceiveError::Outside { .. })),
        (frame(1, 1, 1, 0, &[data(0, 2)]), |e| matches!(e, ReceiveError::Outside { .. })),
        (frame(1, 1, 1, 0, &[PageRun { first_page: 1, pages: 1, content: Content::Hole }]), |e| {
            matches!(e, ReceiveError::Outside { .. })
        }),
        (frame(1, 1, 0, 1, &[data(0, 1)]), |e| matches!(e, ReceiveError::WrongStream { stream: 0, .. })),
        (frame(1, 1, 0, 0, &[data(5, 1), data(4, 1)]), |e| matches!(e, ReceiveError::BadFrame(_))),
        (frame(1, 1, 0, 0, &[data(511, 2)]), |e| matches!(e, ReceiveError::BadFrame(_))),
        (frame(1, 1, 0, 0, &[data(0, 1)])[..PAGE].to_vec(), |e| matches!(e, ReceiveError::BadFrame(_))),
        (vec![], |e| matches!(e, ReceiveError::BadFrame(_))),
    ];
    for (index, (payload, check)) in cases.into_iter().enumerate() {
        let mut bench = bench(1);
        bench.send(FrameKind::Pages, &payload);
        let cause = bench.broken();
        assert!(check(&cause), "case {index}: {cause:?}");
        assert!(!cause.is_connection() && bench.untouched());
        // The peer sees the end of the connection, and no acknowledgement before that.
        assert!(bench.peer.source.receive(&mut Vec::new()).is_err());
    }
}

/// A frame with the given bytes as deltas.
fn changed(pages: u16, pieces: u16, changes: &[u8]) -> Vec<u8> {
    let mut payload = Vec::new();
    let runs = [PageRun { first_page: 4, pages, content: Content::Delta { pieces } }];
    PagesHeader { seq: 1, round: 1, block: 0, chunk: 0 }.encode(&runs, &mut payload);
    payload.extend_from_slice(changes);
    payload
}

#[test]
fn changes_that_do_not_fit_end_the_stream_and_change_nothing() {
    let mut one = Vec::new();
    Delta::encode(&[7; PAGE], xxh3_64_with_seed(&[7; PAGE], PAGE_SEED), 0b101, &mut one);
    let mut none = Vec::new();
    Delta::encode(&[7; PAGE], xxh3_64_with_seed(&[7; PAGE], PAGE_SEED), 0, &mut none);
    let cases = [
        // More than the run announces, and less.
        changed(1, 1, &one[..HEAD_BYTES + PIECE_BYTES]),
        changed(1, 3, &[&one[..], &[0; PIECE_BYTES]].concat()),
        changed(2, 2, &[&one[..], &one[..HEAD_BYTES]].concat()),
        // The right length, but not in its pages.
        changed(2, 2, &[&none[..], &none, &[0; 2 * PIECE_BYTES]].concat()),
        // All pieces of a page, which would not be shorter than the page.
        changed(1, 64, &[&[0xff; HEAD_BYTES][..], &[0; PAGE]].concat()),
        changed(2, 64, &[&[0xff; HEAD_BYTES][..], &[0; PAGE], &[0; HEAD_BYTES]].concat()),
        // Shorter than its run.
        changed(1, 2, &one[..one.len() - 1]),
    ];
    for (index, payload) in cases.into_iter().enumerate() {
        let mut bench = bench(1);
        bench.send(FrameKind::Pages, &payload);
        let cause = bench.broken();
        assert!(matches!(cause, ReceiveError::BadFrame(_)) && bench.untouched(), "case {index}: {cause:?}");
    }
    // The last case, whole: there is no page to apply it to, and so the page is missing.
    let mut bench = bench(1);
    bench.send(FrameKind::Pages, &changed(1, 2, &one));
    let mut payload = Vec::new();
    assert_eq!(bench.peer.source.receive(&mut payload).unwrap(), FrameKind::Missing);
    assert_eq!(decode_missing(&payload).unwrap(), (1, *ChunkPages::from_range(4..5).words()));
    assert_eq!(bench.acked(), 1);
    assert!(bench.untouched());
    // A receiver that does not accept deltas.
    let mut bench = with_reductions(1, AcceptedReductions::default());
    bench.send(FrameKind::Pages, &changed(1, 2, &one));
    let cause = bench.broken();
    assert!(matches!(cause, ReceiveError::BadFrame(BadPages::Delta)) && bench.untouched(), "{cause:?}");
}

/// Data before, between and behind, pages of zeros, and a page whose content was not the one that the source assumed.
#[test]
fn a_frame_may_have_a_bit_of_everything() {
    let mut bench = bench(1);
    (0..8).for_each(|page| bench.ram.0[0].guest_writes(page, 1, 0));
    let page = |word: u64| {
        let mut page = [0; PAGE];
        page[..8].copy_from_slice(&word.to_le_bytes());
        page
    };
    let mut changes = [Vec::new(), Vec::new()];
    for (word, changes) in [7, 8].into_iter().zip(&mut changes) {
        Delta::encode(&page(word), xxh3_64_with_seed(&page(word), PAGE_SEED), 1, changes);
    }
    bench.ram.0[0].guest_writes(3, 1, 100);
    let delta = |first_page| PageRun { first_page, pages: 2, content: Content::Delta { pieces: 2 } };
    let zeros = PageRun { first_page: 6, pages: 1, content: Content::Zero };
    let mut payload = Vec::new();
    let header = PagesHeader { seq: 1, round: 1, block: 0, chunk: 0 };
    let filled = PageRun { first_page: 8, pages: 2, content: Content::Filled };
    let runs = [data(0, 1), delta(1), delta(3), data(5, 1), zeros, data(7, 1), filled, data(10, 1)];
    header.encode(&runs, &mut payload);
    let [one, other] = &changes;
    for part in [&page(10)[..], one, other, one, other, &page(11), &page(12), b"whimbrel", &page(13)] {
        payload.extend_from_slice(part);
    }
    bench.send(FrameKind::Pages, &payload);
    let mut answer = Vec::new();
    assert_eq!(bench.peer.source.receive(&mut answer).unwrap(), FrameKind::Missing);
    assert_eq!(decode_missing(&answer).unwrap(), (1, *ChunkPages::from_range(3..4).words()));
    assert_eq!(bench.acked(), 1);
    let mut old = page(1);
    old[100..108].copy_from_slice(&1_u64.to_le_bytes());
    let is = |at, expected: Option<&[u8; PAGE]>| bench.ram.0[0].contents(at).as_ref() == expected;
    for (at, word) in [(0, 10), (1, 7), (2, 8), (4, 8), (5, 11), (7, 12), (10, 13)] {
        assert!(is(at, Some(&page(word))), "page {at}");
    }
    let filled = std::array::from_fn(|at| b"whimbrel"[at % 8]);
    assert!(is(8, Some(&filled)) && is(9, Some(&filled)));
    assert!(is(3, Some(&old)) && is(6, None));
}

#[test]
fn misfit_compressed_frames_end_the_stream_unapplied() {
    type Check = fn(&ReceiveError) -> bool;
    let page = vec![0xab; PAGE];
    let lz4 = lz4_flex::block::compress(&page);
    let zstd = zstd::bulk::compress(&page, 3).unwrap();
    let codec: Check = |e| matches!(e, ReceiveError::BadPacked(BadPacked::Codec { .. }));
    let short: Check =
        |e| matches!(e, ReceiveError::BadPacked(BadPacked::Length { expected: 8192, found: 4096 }));
    let none: Check = |e| matches!(e, ReceiveError::BadFrame(BadPages::Packed));
    let one = [data(0, 1)];
    let two = [data(0, 2)];
    let hole = [PageRun { first_page: 1, pages: 1, content: Content::Hole }];
    let cases: Vec<(Vec<u8>, Check)> = vec![
        // Of another codec, cut off, changed.
        (packed(Codec::Lz4, &one, &zstd), codec),
        (packed(Codec::Zstd, &one, &lz4), codec),
        (packed(Codec::Lz4, &one, &lz4[..lz4.len() - 1]), codec),
        (packed(Codec::Zstd, &one, &zstd[..zstd.len() - 1]), codec),
        (packed(Codec::Zstd, &one, &[&zstd[..], &[0]].concat()), codec),
        // More than the runs need, and less.
        (packed(Codec::Lz4, &one, &lz4_flex::block::compress(&vec![1; 1 << 19])), codec),
        (packed(Codec::Zstd, &one, &zstd::bulk::compress(&vec![1; 1 << 20], 1).unwrap()), codec),
        (packed(Codec::Lz4, &two, &lz4), short),
        (packed(Codec::Zstd, &two, &zstd), short),
        // Longer than its data, or empty.
        (packed(Codec::Lz4, &one, &page), none),
        (packed(Codec::Lz4, &one, &[]), none),
        (packed(Codec::Zstd, &hole, &zstd), none),
        (vec![9, 0, 0, 0], |e| matches!(e, ReceiveError::BadFrame(BadPages::Codec(9)))),
        (vec![1, 0], |e| matches!(e, ReceiveError::BadFrame(BadPages::Truncated))),
    ];
    for (index, (payload, check)) in cases.into_iter().enumerate() {
        let mut bench = bench(1);
        bench.send(FrameKind::Packed, &payload);
        let cause = bench.broken();
        assert!(check(&cause), "case {index}: {cause:?}");
        assert!(!cause.is_connection() && bench.untouched(), "case {index}");
    }
    // Valid data is accepted.
    for (codec, bytes) in [(Codec::Lz4, lz4), (Codec::Zstd, zstd)] {
        let mut bench = bench(1);
        bench.send(FrameKind::Packed, &packed(codec, &one, &bytes));
        assert_eq!(bench.acked(), 1);
        assert_eq!(bench.ram.0[0].contents(0).unwrap()[..], page);
    }
}

#[test]
fn a_frame_twice_is_refused_and_the_first_stays() {
    let mut bench = bench(1);
    let once = frame(1, 1, 0, 0, &[data(0, 1)]);
    bench.send(FrameKind::Pages, &once);
    assert_eq!(bench.acked(), 1);
    let first = bench.ram.0[0].contents(0).unwrap();
    // Its content is another one, so that it would show.
    let mut again = once;
    *again.last_mut().unwrap() = 0xba;
    bench.send(FrameKind::Pages, &again);
    assert!(matches!(bench.broken(), ReceiveError::WrongSeq { expected: 2, found: 1 }));
    assert_eq!(bench.ram.0[0].contents(0).unwrap(), first);
}

#[test]
fn rounds_do_not_go_back() {
    let mut bench = bench(1);
    bench.send(FrameKind::Pages, &frame(1, 3, 0, 0, &[data(0, 1)]));
    bench.send(FrameKind::RoundEnd, &encode_round_end(2, 3));
    bench.send(FrameKind::Pages, &frame(3, 3, 0, 0, &[data(0, 1)]));
    assert!(matches!(bench.broken(), ReceiveError::WrongRound { at_least: 4, found: 3 }));
    // The round has not ended on the other stream.
    assert_eq!(bench.receiver.completed_round(), 0);
}

/// Many frames that have arrived at once are acknowledged together; the last one at the latest when no more has
/// arrived.
#[test]
fn acknowledgements_are_batched_and_never_owed_while_waiting() {
    let mut bench = bench(1);
    let mut bytes = Vec::new();
    for seq in 1..=50 {
        let payload = frame(seq, 1, 0, 0, &[PageRun { first_page: 3, pages: 2, content: Content::Zero }]);
        bytes.extend_from_slice(&Header::new(FrameKind::Pages, payload.len()).unwrap().encode());
        bytes.extend_from_slice(&payload);
    }
    bench.raw.write(&bytes).unwrap();
    let mut acks = 1;
    while bench.acked() < 50 {
        acks += 1;
    }
    assert!(acks < 50, "one for each frame");
}

/// The source chooses the compression by these reports, so they are sent at once even if there is always more to apply.
#[test]
fn the_first_frame_is_acknowledged_though_there_is_more() {
    let mut bench = bench(1);
    let payload = frame(1, 1, 0, 0, &[PageRun { first_page: 3, pages: 2, content: Content::Zero }]);
    let mut bytes = Header::new(FrameKind::Pages, payload.len()).unwrap().encode().to_vec();
    bytes.extend_from_slice(&payload);
    // The beginning of the next frame.
    bytes.push(0);
    bench.raw.write(&bytes).unwrap();
    assert_eq!(bench.acked(), 1);
}

#[test]
fn other_frames_and_early_ends_are_told() {
    let mut one = bench(1);
    one.send(FrameKind::Message, b"{}");
    assert!(matches!(one.broken(), ReceiveError::UnexpectedFrame(FrameKind::Message)));
    let mut two = bench(1);
    two.peer.handle.shutdown();
    assert!(matches!(two.broken(), ReceiveError::Stream(TransportError::PeerClosed(_))));
    let mut three = bench(1);
    three.raw.write(&[3, 0, 0, 0, 255, 0, 0, 0, 1]).unwrap();
    three.peer.handle.shutdown();
    assert!(matches!(three.broken(), ReceiveError::Stream(_)));
}

#[test]
fn streams_of_other_generations_and_surplus_ones_are_not_taken() {
    let mut bench = bench(4);
    let stream = || connection(WHOLE, WHOLE).0;
    for generation in [3, 5] {
        let refused = bench.receiver.attach(Generation(generation), 1, stream());
        assert!(matches!(refused, Err(AttachError::Generation { current: Generation(4), .. })));
    }
    for number in [0, 2] {
        let refused = bench.receiver.attach(Generation(4), number, stream());
        assert!(matches!(refused, Err(AttachError::Stream { streams: 2, .. })));
    }
    bench.receiver.end_and_join();
    assert!(bench.receiver.attach(Generation(4), 1, stream()).is_err());
    assert!(bench.events.try_recv().is_err(), "an end that was asked for is no news");
}

/// One stream had ended round 1 when the connections broke. The end of round 2 on the other does not end round 1.
#[test]
fn a_round_that_was_cut_off_never_ends() {
    let mut bench = bench(1);
    bench.send(FrameKind::RoundEnd, &encode_round_end(1, 1));
    assert_eq!(bench.acked(), 1);
    bench.receiver.begin(Generation(2));
    let mut peers = Vec::new();
    for stream in 0..2 {
        let (near, far) = connection(WHOLE, WHOLE);
        bench.receiver.attach(Generation(2), stream, far).unwrap();
        peers.push(near);
    }
    for (stream, complete) in [(1, 0), (0, 2)] {
        std::mem::swap(&mut bench.peer, &mut peers[stream]);
        bench.send(FrameKind::RoundEnd, &encode_round_end(1, 2));
        assert_eq!(bench.acked(), 1);
        assert_eq!(bench.receiver.completed_round(), complete);
    }
    let reported = bench.events.try_recv().unwrap();
    assert!(matches!(reported, ReceiverEvent::RoundEnded { round: 2, .. }), "{reported:?}");
}

/// QEMU owns the memory from there on.
#[test]
fn after_it_was_shut_nothing_is_applied() {
    let mut bench = bench(1);
    bench.receiver.shut();
    bench.send(FrameKind::Pages, &frame(1, 1, 0, 0, &[data(0, 1)]));
    // The receiver hangs up instead of answering.
    assert!(bench.peer.source.receive(&mut Vec::new()).is_err());
    assert!(bench.untouched());
    let reported = bench.receiver.handle().discard_with(|ranges| ranges);
    assert_eq!(reported, []);
}
