//! The sender at its edges: errors of guest memory, cancelling, few pages, peers that acknowledge wrongly.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use link::transport::{DataStream, DirectSender, FrameSink, TransportError, fake};
use proto::Generation;
use proto::frame::FrameKind;
use proto::limits::CHUNK_PAGES;
use proto::pages::{Ack, Content, PagesHeader};
use rustix::process::{geteuid, getpriority_process};

use super::fake_ram::{FakeRam, PAGE};
use super::fake_wire::{WHOLE, connection, stream};
use super::pair::Pair;
use super::parts::Parts;
use crate::{
    OwedPages, PageSet, RamError, ReadablePages, Receiver, ReceiverEvent, SendError, Sender, lock, stream_of,
};

fn all(ram: &FakeRam) -> ReadablePages {
    ram.everything().clear_marks(&mut ram.log()).unwrap().skip_drain()
}

/// A sender over streams whose far ends are handed to the test.
fn sender(ram: &FakeRam, streams: u16) -> (Sender, Vec<DataStream>) {
    let (near, far) = (0..streams).map(|_| connection(WHOLE, WHOLE)).unzip();
    (Sender::start(ram.readers(), near).unwrap(), far)
}

#[test]
fn unreadable_memory_ends_the_round_and_stays_owed() {
    for pages in [3 * CHUNK_PAGES, 20] {
        let ram = FakeRam::new(&[pages]);
        (0..pages).for_each(|page| ram.0[0].guest_writes(page, page + 1, 0));
        *lock(&ram.0[0].unreadable) = Some(pages - 2);
        let destination = FakeRam::new(&[pages]);
        let mut receiver = Receiver::new(destination.writers(), 2, |_, _| {});
        receiver.begin(Generation(1));
        let (sender, far) = sender(&ram, 2);
        for (stream, far) in (0..).zip(far) {
            receiver.attach(Generation(1), stream, far).unwrap();
        }
        let interrupted = sender.send_round(all(&ram)).unwrap_err();
        let SendError::Memory { block, source, .. } = &interrupted.cause else { panic!("{interrupted:?}") };
        assert_eq!(block, "guest memory: RAM block ram0");
        assert!(matches!(source, RamError::Present(why) if why.raw_os_error() == Some(14)));
        assert!(!interrupted.cause.is_connection());
        assert!(interrupted.owed.blocks()[0].contains(pages - 2));
        assert_eq!(interrupted.owed.round(), 1);
    }
}

/// Reports the niceness of the threads that send.
struct Watched(Box<dyn FrameSink>, mpsc::Sender<i32>);

impl FrameSink for Watched {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.0.set_deadline(deadline);
    }

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        self.1.send(getpriority_process(None).unwrap()).unwrap();
        self.0.send(kind, payload)
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        self.0.flush()
    }

    fn unsent_bytes(&self) -> u64 {
        0
    }

    fn direct(&mut self) -> Option<&mut dyn DirectSender> {
        None
    }
}

#[test]
fn workers_are_nice_only_while_the_guest_runs() {
    let ram = FakeRam::new(&[8 * CHUNK_PAGES]);
    let destination = FakeRam::new(&[8 * CHUNK_PAGES]);
    let mut receiver = Receiver::new(destination.writers(), 1, |_, _| {});
    receiver.begin(Generation(1));
    let (near, far) = connection(WHOLE, WHOLE);
    receiver.attach(Generation(1), 0, far).unwrap();
    let (notify, reported) = mpsc::channel();
    let near = DataStream { sink: Box::new(Watched(near.sink, notify)), ..near };
    let mut sender = Sender::start(ram.readers(), vec![near]).unwrap();
    let mut owed = ram.everything();
    let own = getpriority_process(None).unwrap();
    // Only root may reduce its niceness, and a thread that cannot reduce it does not increase it.
    let (more, back) = if geteuid().is_root() { (own + 11, own) } else { (own + 5, own + 5) };
    for (nice, stands_still, expected) in [(5, false, own + 5), (11, false, more), (11, true, back)] {
        sender.handle().set_niceness(nice);
        (0..8 * CHUNK_PAGES).for_each(|page| ram.0[0].guest_writes(page, page + 1, 0));
        let readable = owed.clear_marks(&mut ram.log()).unwrap().skip_drain();
        let sent = if stands_still {
            sender.send_round_by(readable, Instant::now() + Duration::from_mins(1)).unwrap()
        } else {
            sender.send_round(readable).unwrap()
        };
        let seen: Vec<_> = reported.try_iter().collect();
        assert!(!seen.is_empty() && seen.iter().all(|nice| *nice == expected.min(19)), "{seen:?}");
        (sender, owed) = (sent.sender, sent.owed);
    }
}

/// The destination does not read: the connection fills, and the workers block in the middle of a frame.
#[test]
fn cancelling_ends_a_blocked_round_at_once() {
    let ram = FakeRam::new(&[4 * CHUNK_PAGES]);
    (0..4 * CHUNK_PAGES).for_each(|page| ram.0[0].guest_writes(page, page + 1, 0));
    let (near, far): (Vec<_>, Vec<_>) = (0..2).map(|_| fake::connection()).unzip();
    let near = near.into_iter().map(stream).collect();
    let sender = Sender::start(ram.readers(), near).unwrap();
    let handle = sender.handle();
    let round = thread::spawn({
        let readable = all(&ram);
        move || sender.send_round(readable).unwrap_err()
    });
    for far in &far {
        assert_eq!(far.raw().read(&mut [0]).unwrap(), 1);
    }
    handle.cancel();
    let interrupted = round.join().unwrap();
    assert!(matches!(interrupted.cause, SendError::Cancelled));
    assert_eq!(interrupted.owed.pages(), 4 * CHUNK_PAGES);
    assert!(handle.is_broken());
    drop(far);
}

#[test]
fn a_side_that_takes_all_and_acknowledges_nothing_is_overdue() {
    let ram = FakeRam::new(&[3]);
    (0..3).for_each(|page| ram.0[0].guest_writes(page, page + 1, 0));
    let (sender, _silent) = sender(&ram, 1);
    let interrupted = sender.send_round_by(all(&ram), Instant::now()).unwrap_err();
    assert!(matches!(interrupted.cause, SendError::Overdue), "{}", interrupted.cause);
    assert_eq!(interrupted.owed.pages(), 3);
}

/// Fewer pages than a worker is woken for, and more than fit into a connection.
#[test]
fn a_side_that_takes_nothing_is_overdue() {
    let pages = 120;
    let ram = FakeRam::new(&[pages]);
    (0..pages).for_each(|page| ram.0[0].guest_writes(page, page + 1, 0));
    let (sender, _silent) = sender(&ram, 1);
    let interrupted = sender.send_round_by(all(&ram), Instant::now()).unwrap_err();
    assert!(matches!(interrupted.cause, SendError::Overdue), "{}", interrupted.cause);
    assert_eq!(interrupted.owed.pages(), pages);
}

#[test]
fn cancelling_before_a_round_ends_it_before_it_begins() {
    let ram = FakeRam::new(&[3]);
    let (sender, _far) = sender(&ram, 1);
    sender.handle().cancel();
    let interrupted = sender.send_round(all(&ram)).unwrap_err();
    assert!(matches!(interrupted.cause, SendError::Cancelled));
    assert_eq!(interrupted.owed.pages(), 3);
}

#[test]
fn connection_broken_between_rounds_fails_the_next_round() {
    let ram = FakeRam::new(&[3]);
    let (sender, far) = sender(&ram, 2);
    drop(far);
    let interrupted = sender.send_round(all(&ram)).unwrap_err();
    assert!(interrupted.cause.is_connection(), "{interrupted:?}");
    assert_eq!(interrupted.owed.pages(), 3);
}

#[test]
fn a_wrong_acknowledgement_is_an_error_and_counts_for_nothing() {
    // One frame of pages and one end of the round are in flight.
    for wrong in [3, u64::MAX] {
        let ram = FakeRam::new(&[3]);
        let (sender, mut far) = sender(&ram, 1);
        far[0].sink.send(FrameKind::Ack, &[&Ack { seq: wrong, waited_us: 0 }.encode()]).unwrap();
        far[0].sink.flush().unwrap();
        let interrupted = sender.send_round(all(&ram)).unwrap_err();
        let cause = &interrupted.cause;
        assert!(matches!(cause, SendError::WrongAck { seq, .. } if *seq == wrong), "{cause:?}");
        assert_eq!(interrupted.owed.pages(), 3);
    }
    for (kind, payload) in [(FrameKind::RoundEnd, &[0; 12][..]), (FrameKind::Ack, &[0; 7])] {
        let ram = FakeRam::new(&[3]);
        let (sender, mut far) = sender(&ram, 1);
        far[0].sink.send(kind, &[payload]).unwrap();
        far[0].sink.flush().unwrap();
        let interrupted = sender.send_round(all(&ram)).unwrap_err();
        let cause = &interrupted.cause;
        assert!(matches!(cause, SendError::UnexpectedFrame { .. } | SendError::BadAck { .. }), "{cause:?}");
        assert_eq!(interrupted.owed.pages(), 3);
    }
}

/// A page is owed until its acknowledgement and not shorter: the destination reads everything and acknowledges only the
/// first frame.
#[test]
fn what_was_sent_but_not_acknowledged_is_owed() {
    let pages = 2 * CHUNK_PAGES;
    let ram = FakeRam::new(&[pages]);
    (0..pages).for_each(|page| ram.0[0].guest_writes(page, page + 1, 0));
    let (sender, mut far) = sender(&ram, 1);
    let far = thread::spawn(move || {
        let DataStream { mut source, mut sink, handle } = far.remove(0);
        let (mut payload, mut runs) = (Vec::new(), Vec::new());
        let mut first = 0;
        while source.receive(&mut payload).unwrap() == FrameKind::Pages {
            PagesHeader::decode(&payload, &mut runs).unwrap();
            if first == 0 {
                first = runs.iter().map(|run| u64::from(run.pages)).sum();
                sink.send(FrameKind::Ack, &[&Ack { seq: 1, waited_us: 0 }.encode()]).unwrap();
                sink.flush().unwrap();
            }
        }
        handle.shutdown();
        first
    });
    let interrupted = sender.send_round(all(&ram)).unwrap_err();
    let first = far.join().unwrap();
    assert_eq!(interrupted.stats.contents.data, pages);
    assert_eq!(interrupted.owed.pages(), pages - first);
}

#[test]
fn each_chunk_has_its_stream_and_ascending_pages() {
    let ram = FakeRam::new(&[3 * CHUNK_PAGES + 17, 2 * CHUNK_PAGES, 1]);
    for block in &ram.0 {
        (0..block.pages.len() as u64).step_by(3).for_each(|page| block.guest_writes(page, page + 1, 0));
    }
    let (sender, far) = sender(&ram, 3);
    let readers: Vec<_> = (0_u16..)
        .zip(far)
        .map(|(stream, mut far)| {
            thread::spawn(move || {
                let (mut payload, mut runs) = (Vec::new(), Vec::new());
                let (mut seq, mut last, mut pages) = (0, None, 0);
                loop {
                    seq += 1;
                    let kind = far.source.receive(&mut payload).unwrap();
                    if kind == FrameKind::RoundEnd {
                        far.sink.send(FrameKind::Ack, &[&Ack { seq, waited_us: 0 }.encode()]).unwrap();
                        far.sink.flush().unwrap();
                        return (far, pages);
                    }
                    let (header, _) = PagesHeader::decode(&payload, &mut runs).unwrap();
                    assert_eq!((header.seq, header.round), (seq, 1));
                    assert_eq!(stream_of(header.block, header.chunk, 3), stream);
                    for run in &runs {
                        let at = (header.block, header.chunk, run.first_page);
                        assert!(last.is_none_or(|last| last < at));
                        last = Some(at);
                        pages += u64::from(run.pages);
                    }
                }
            })
        })
        .collect();
    let sent = sender.send_round(all(&ram)).unwrap();
    let reported: u64 = readers.into_iter().map(|reader| reader.join().unwrap().1).sum();
    assert_eq!(reported, ram.everything().pages());
    assert_eq!(sent.stats.contents.pages(), reported);
}

/// Zeros and holes cost no data; a page that is zero but for its last byte is no zero page.
#[test]
fn contents_are_told_apart() {
    let ram = FakeRam::new(&[600]);
    let block = &ram.0[0];
    (0..40).for_each(|page| block.guest_zeroes(page));
    block.guest_writes_last_word(40, 1);
    block.guest_writes(41, 9, 0);
    let (sender, mut far) = sender(&ram, 1);
    let reader = thread::spawn(move || {
        let (mut payload, mut runs) = (Vec::new(), Vec::new());
        let mut all = Vec::new();
        let mut seq = 0;
        loop {
            seq += 1;
            if far[0].source.receive(&mut payload).unwrap() == FrameKind::RoundEnd {
                far[0].sink.send(FrameKind::Ack, &[&Ack { seq, waited_us: 0 }.encode()]).unwrap();
                far[0].sink.flush().unwrap();
                return (far, all);
            }
            let (header, _) = PagesHeader::decode(&payload, &mut runs).unwrap();
            let base = header.chunk as u16 * 512;
            all.extend(runs.iter().map(|run| (base + run.first_page, run.pages, run.content)));
        }
    });
    let stats = sender.send_round(all(&ram)).unwrap().stats;
    assert_eq!((stats.contents.zero, stats.contents.data, stats.contents.hole), (40, 2, 558));
    let expected =
        [(0, 40, Content::Zero), (40, 2, Content::Data), (42, 470, Content::Hole), (512, 88, Content::Hole)];
    assert_eq!(reader.join().unwrap().1, expected);
    assert!(stats.wire_bytes < 3 * 4096);
}

#[test]
fn how_far_a_round_is_is_told_of_each_block() {
    let lengths = [100, 2 * CHUNK_PAGES];
    let (ram, destination) = (FakeRam::new(&lengths), FakeRam::new(&lengths));
    let mut receiver = Receiver::new(destination.writers(), 1, |_, _| {});
    receiver.begin(Generation(1));
    let (sender, mut far) = sender(&ram, 1);
    receiver.attach(Generation(1), 0, far.remove(0)).unwrap();
    let handle = sender.handle();
    let reported =
        || handle.block_progress().iter().map(|block| (block.pages, block.sent_pages)).collect::<Vec<_>>();
    let sent = sender.send_round(all(&ram)).unwrap();
    assert_eq!(reported(), lengths.map(|pages| (pages, pages)));
    // Pages of another round are not counted in this one.
    let mut owed = sent.owed;
    owed.add_pages(0, &[PageSet::full(lengths[0] * proto::limits::PAGE_BYTES)]);
    sent.sender.send_round(owed.clear_marks(&mut ram.log()).unwrap().skip_drain()).unwrap();
    assert_eq!(reported(), [(100, 100), (0, 0)]);
}

/// The patterns with which debugging kernels fill free pages are sent as such, between other pages and in any length.
#[test]
fn pages_that_are_filled_go_as_what_they_are_filled_with() {
    let source = FakeRam::new(&[600]);
    let ram = &source.0[0];
    (0..600).for_each(|page| ram.guest_fills(page, &[0xaa; PAGE]));
    (100..102).for_each(|page| ram.guest_fills(page, &std::array::from_fn(|at| (at % 8) as u8)));
    ram.guest_writes(300, 7, 8);
    ram.guest_zeroes(301);
    let owed = source.everything();
    let (pair, owed, stats) = Pair::new(source, &Parts::default(), Vec::new()).round(owed);
    assert_eq!((stats.contents.filled, stats.contents.data, stats.contents.zero), (598, 1, 1));
    assert!(stats.wire_bytes < 5000 && owed.pages() == 0 && pair.is_equal(), "{stats:?}");
    // Former data, and the other way round.
    pair.source.0[0].guest_fills(300, &[9; PAGE]);
    pair.source.0[0].guest_writes(5, 1, 16);
    let (pair, _, stats) = pair.round(owed);
    assert_eq!((stats.contents.filled, stats.contents.data), (1, 1));
    assert!(pair.is_equal());
}

/// Trap 7: a worker of the old generation blocks in a slow write when the new connections arrive.
#[test]
fn old_generation_is_not_applied_after_a_new_one_begins() {
    let (source, destination) = (FakeRam::new(&[1]), FakeRam::new(&[1]));
    let (entered, has_entered) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let mut first = true;
    *lock(&destination.0[0].before_write) = Some(Box::new(move |_| {
        if std::mem::take(&mut first) {
            entered.send(()).unwrap();
            may_go_on.recv().unwrap();
        }
    }));
    let mut receiver = Receiver::new(destination.writers(), 1, |_, _| {});
    receiver.begin(Generation(1));
    let (near, far) = connection(WHOLE, WHOLE);
    receiver.attach(Generation(1), 0, far).unwrap();
    let sender = Sender::start(source.readers(), vec![near]).unwrap();

    source.0[0].guest_writes(0, 1, 0);
    let handle = sender.handle();
    let round = thread::spawn({
        let readable = all(&source);
        move || sender.send_round(readable).unwrap_err().owed
    });
    has_entered.recv().unwrap();
    handle.cancel();
    let owed: OwedPages = round.join().unwrap();

    // The guest writes again; the new generation must carry that, and the old worker must not undo it.
    source.0[0].guest_writes(0, 2, 0);
    let (tell_id, id) = mpsc::channel();
    let beginning = thread::spawn(move || {
        tell_id.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
        receiver.begin(Generation(2));
        receiver
    });
    // The thread ends (which is wrong), or it sleeps: in the join, because there is nothing else to wait for.
    let stat = format!("/proc/self/task/{}/stat", id.recv().unwrap());
    let sleeps = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "));
    while !beginning.is_finished() && !sleeps() {
        thread::yield_now();
    }
    assert!(!beginning.is_finished(), "the new generation began while the old worker was in its write");
    go_on.send(()).unwrap();
    let mut receiver = beginning.join().unwrap();
    let (near, far) = connection(WHOLE, WHOLE);
    receiver.attach(Generation(2), 0, far).unwrap();
    let sender = Sender::start(source.readers(), vec![near]).unwrap();
    sender.send_round(owed.clear_marks(&mut source.log()).unwrap().skip_drain()).unwrap();
    assert_eq!(source.first_difference(&destination), None);
}

/// The receiver's observer learns the end of a round before the sender does.
#[test]
fn a_round_has_ended_there_before_it_has_ended_here() {
    let (source, destination) = (FakeRam::new(&[1000]), FakeRam::new(&[1000]));
    let reported = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut receiver = Receiver::new(destination.writers(), 3, {
        let reported = Arc::clone(&reported);
        move |event, _| {
            if let ReceiverEvent::RoundEnded { round, .. } = event {
                lock(&reported).push(round);
            }
        }
    });
    receiver.begin(Generation(1));
    let (mut sender, far) = sender(&source, 3);
    for (stream, far) in (0..).zip(far) {
        receiver.attach(Generation(1), stream, far).unwrap();
    }
    let mut owed = source.everything();
    for round in 1..=20 {
        source.0[0].guest_writes(u64::from(round) * 31, 4, 8);
        let sent = sender.send_round(owed.clear_marks(&mut source.log()).unwrap().skip_drain()).unwrap();
        assert_eq!(lock(&reported).last(), Some(&round));
        (sender, owed) = (sent.sender, sent.owed);
    }
    assert_eq!(source.first_difference(&destination), None);
}
