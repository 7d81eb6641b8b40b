//! RAM moved while it is written, over streams that break: at the end every byte has arrived.

use std::env;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use proto::Generation;
use proto::limits::PAGE_BYTES;
use proto::packed::Compression;

use super::Dice;
use super::direct::Way;
use super::fake_ram::{FakeLog, FakeRam};
use super::fake_wire::{WHOLE, breaking_ends, connection, corrupting_ends, stream};
use super::parts::Parts;
use super::references::FakeTemplates;
use crate::reductions::deltas::MARKS_BYTES;
use crate::reductions::deltas::tests::PAGE_SEED;
use crate::{
    AcceptedReductions, CompletedRound, CompressionCriteria, CompressionState, Deltas, DirtyLog, HintedPages,
    OwedPages, PageCursor, PartBoundary, Receiver, ReceiverEvent, Sender, Templates, lock,
};

/// A drain that does not fail.
#[allow(clippy::unnecessary_wraps, reason = "what a drain returns")]
fn always(drain: impl FnOnce()) -> Result<(), std::fmt::Error> {
    drain();
    Ok(())
}

/// Configuration and state of a move.
pub(super) struct Move {
    pub(super) source: FakeRam,
    pub(super) destination: FakeRam,
    log: FakeLog,
    /// References to content of the destination, of which some is wrong; deltas, free page hints and compression.
    pub(super) saving: Parts,
    marks_bytes: usize,
    templates: Arc<FakeTemplates>,
    streams: u16,
    window: usize,
    /// Way in which data is placed.
    pub(super) way: Way,
    /// Disk reads in flight: block, page, value.
    dma: Arc<Mutex<Vec<(usize, u64, u64)>>>,
}

/// Counters of events.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) rounds: u32,
    pub(super) breaks: u32,
    pub(super) corrupt: u64,
    referred: u64,
    deltas: u64,
    refused: u64,
    left_out: u64,
    unsent: u64,
    compressed_bytes: u64,
    plain_bytes: u64,
}

impl Move {
    pub(super) fn new(dice: &mut Dice) -> Self {
        let blocks: Vec<u64> = (0..=dice.below(3)).map(|_| dice.below(1600) + 1).collect();
        let (source, destination) = (FakeRam::new(&blocks), FakeRam::new(&blocks));
        for _ in 0..dice.below(120) {
            source.touch(dice);
        }
        // The new QEMU has written something before (firmware).
        destination.0[0].guest_writes(0, 7, 0);
        let log = source.log();
        let (known, templates) = FakeTemplates::of(&source, dice);
        let window = if dice.one_in(3) { 1 + dice.below(3) as usize } else { 4096 };
        let known = dice.one_in(2).then(|| Arc::new(known));
        let worth = CompressionCriteria {
            least_ratio_percent: dice.below(300) as u32,
            skip_bytes: dice.below(1 << 20),
        };
        let (opens, way) = (dice.one_in(3), some_way(dice));
        let packing =
            || if opens { CompressionState::opening(worth) } else { CompressionState::new(way, worth) };
        let packing = dice.one_in(2).then(packing).map(Arc::new);
        // Marks of a few bits, so that some changed pieces are mistaken for unchanged ones.
        let marks_bytes = dice.below(3) as usize * 30_000;
        let bits = if dice.one_in(2) { u16::MAX } else { 0b111 };
        let deltas =
            dice.one_in(2).then(|| Arc::new(Deltas::with_bits(1 + blocks.len() / 2, marks_bytes, bits)));
        let bytes = source.0.iter().map(|block| block.pages.len() as u64 * PAGE_BYTES);
        let hinted = dice.one_in(2).then(|| Arc::new(HintedPages::new(bytes)));
        let saving = Parts { known, deltas, packing, hinted, ..Parts::default() };
        let templates = Arc::new(templates);
        Self {
            source,
            destination,
            log,
            saving,
            marks_bytes,
            templates,
            streams: 1 + dice.below(4) as u16,
            window,
            way: Way::Copied,
            dma: Arc::default(),
        }
    }

    fn land_dma(&self) {
        for (block, page, value) in lock(&self.dma).drain(..) {
            self.source.0[block].dma_lands(page, value);
        }
    }

    /// Runs guest and disks until they are stopped. Every piece of work is counted, so that a round can wait for some.
    fn guest(&self, seed: u64, stop: Arc<AtomicBool>, done: Arc<AtomicU64>) -> thread::JoinHandle<()> {
        let (ram, dma, deltas) = (self.source.clone(), Arc::clone(&self.dma), self.saving.deltas.clone());
        thread::spawn(move || {
            let mut dice = Dice(seed);
            while !stop.load(Ordering::Relaxed) {
                ram.touch(&mut dice);
                // As the policy does, at any time.
                if let Some(deltas) = &deltas
                    && dice.one_in(20)
                {
                    deltas.set(!dice.one_in(3));
                }
                if dice.one_in(3) {
                    let block = dice.below(ram.0.len() as u64) as usize;
                    let page = dice.below(ram.0[block].pages.len() as u64);
                    let mut dma = lock(&dma);
                    // One request for a page at a time, and no other write to that page in between, which would leave a
                    // mark.
                    ram.0[block].dma_begins(page);
                    dma.push((block, page, dice.next()));
                }
                done.fetch_add(1, Ordering::Relaxed);
                thread::yield_now();
            }
        })
    }

    /// Runs the whole move: rounds while the guest writes, breaks and new generations, then a last round.
    #[expect(clippy::too_many_lines, reason = "one move from its begin to its end")]
    pub(super) fn run(&mut self, seed: u64, dice: &mut Dice) -> Outcome {
        let mut outcome = Outcome::default();
        let ended = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&ended);
        let corrupt = Arc::new(AtomicU64::new(0));
        let corrupt_seen = Arc::clone(&corrupt);
        let templates = Some(Arc::clone(&self.templates) as Arc<dyn Templates>);
        let presumed = AcceptedReductions { templates, delta_seed: Some(PAGE_SEED) };
        let ram = self.destination.writers();
        let mut receiver =
            Receiver::with_reductions(ram, presumed, self.streams, move |event, _| match event {
                ReceiverEvent::RoundEnded { round, .. } => lock(&seen).push(round),
                ReceiverEvent::Broken { cause, .. } if cause.is_connection() => {}
                ReceiverEvent::Broken { cause, .. } => {
                    assert!(cause.is_corrupt(), "{cause:?}");
                    corrupt_seen.fetch_add(1, Ordering::Relaxed);
                }
            });
        let stop = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let mut guest = Some(self.guest(!seed, Arc::clone(&stop), Arc::clone(&done)));

        let mut generation = Generation(0);
        let mut sender = None;
        let mut owed = self.source.everything();
        let (rounds, breaks) = (1 + dice.below(5), dice.below(6));
        let mut complete = Vec::new();
        let mut place = PageCursor::default();
        let (mut answer, mut late) = (None, Vec::new());
        loop {
            let last = guest.is_none();
            let this = sender.take().unwrap_or_else(|| {
                generation = generation.next();
                let fragile = u64::from(outcome.breaks) < breaks;
                self.connect(generation, &mut receiver, fragile, dice)
            });
            let (cleared, found) = owed.clear_marks_and_report(&mut self.log, usize::MAX).unwrap();
            if let Some(hinted) = &self.saving.hinted {
                found.iter().enumerate().for_each(|(block, found)| hinted.written(block, found));
            }
            let readable = cleared.drain(|| always(|| self.land_dma())).unwrap();
            if let Some(packing) = &self.saving.packing {
                packing.set_compression(some_way(dice), some_way(dice));
                packing.try_out(&[some_way(dice), some_way(dice)]);
            }
            if let Some(deltas) = &self.saving.deltas {
                deltas.set(!dice.one_in(6));
                // As when the guest is stopped, and devices have been saved.
                if last {
                    deltas.end();
                }
            }
            if let Some(hinted) = &self.saving.hinted {
                // An answer may need several rounds, end or not, and be given up.
                match answer.filter(|_| dice.one_in(3)) {
                    Some(_) if dice.one_in(8) => hinted.forget(),
                    Some(answer) => _ = hinted.end_answer(answer),
                    None => {}
                }
                if answer.is_none() || dice.one_in(2) {
                    answer = Some(hinted.begin());
                    late.clear();
                }
                let answer = answer.unwrap();
                if last {
                    hinted.end();
                }
                // Pages that were free in the round before, and may have been written since.
                for (block, free) in late.drain(..) {
                    hinted.add_free(answer, block, free);
                }
                // Pages that are not in use at this moment, with any content; the guest may allocate them at any time.
                for _ in 0..dice.below(6) {
                    let block = dice.below(self.source.0.len() as u64) as usize;
                    let pages = self.source.0[block].pages.len() as u64;
                    let first = dice.below(pages);
                    let free = first..(first + dice.below(300)).min(pages);
                    free.clone().for_each(|page| self.source.0[block].guest_frees(page));
                    if dice.one_in(3) {
                        late.push((block, free.clone()));
                    } else {
                        hinted.add_free(answer, block, free);
                    }
                    // An answer that arrives too late.
                    hinted.add_free(answer.wrapping_sub(1), block, 0..first);
                }
            }
            // Some of the pages wait, as many as are written in a first pass, or do not fit into a part.
            let (readable, later) = match dice.below(4) {
                0 if !last => {
                    let around = readable.part_wrapping(
                        place,
                        1 + dice.below(700),
                        [PartBoundary::Anywhere, PartBoundary::BetweenClusters][dice.below(2) as usize],
                    );
                    place = around.next;
                    (around.readable, Some(around.later))
                }
                1 if !last => {
                    let (now, later) = readable.without(&found);
                    (now, Some(later))
                }
                _ => (readable, None),
            };
            this.handle().limit_copying_threads(dice.below(4) as u16);
            let pages = readable.pages();
            let is_hasty = !last && dice.one_in(3);
            // As the rounds of a stopped guest are sent: no page may remain after the last one.
            let sent = if last {
                this.send_round_by(readable, Instant::now() + Duration::from_mins(10))
            } else if is_hasty {
                this.send_round_until(readable, Instant::now() + Duration::from_micros(dice.below(2_000)))
            } else {
                this.send_round(readable)
            };
            match sent {
                Ok(CompletedRound { sender: next_sender, owed: left, stats }) => {
                    let unsent_pages = left.pages() - stats.refused_pages;
                    assert_eq!(stats.contents.pages() + unsent_pages, pages);
                    assert!(is_hasty || unsent_pages == 0);
                    outcome.unsent += unsent_pages;
                    complete.push(stats.round);
                    outcome.rounds += 1;
                    outcome.referred += stats.contents.reference;
                    outcome.deltas += stats.contents.delta;
                    outcome.left_out += stats.contents.hinted;
                    outcome.refused += stats.refused_pages;
                    let remaining_pages = left.pages();
                    (sender, owed) = (Some(next_sender), left);
                    if last {
                        assert_eq!(remaining_pages, 0);
                        break;
                    }
                }
                Err(interrupted) => {
                    assert!(interrupted.cause.is_connection(), "{:?}", interrupted.cause);
                    assert!(interrupted.owed.pages() <= pages);
                    owed = interrupted.owed;
                    outcome.breaks += 1;
                }
            }
            if let Some(later) = &later {
                owed.take_back(later);
            }
            if u64::from(outcome.rounds) >= rounds && guest.is_some() {
                // The guest stops, and so do its disks.
                stop.store(true, Ordering::Relaxed);
                guest.take().unwrap().join().unwrap();
                self.land_dma();
            } else if guest.is_some() {
                let before = done.load(Ordering::Relaxed);
                while done.load(Ordering::Relaxed) < before + 3 {
                    thread::yield_now();
                }
            }
        }
        drop(sender);
        receiver.end_and_join();
        outcome.corrupt = corrupt.load(Ordering::Relaxed);
        // A round may have ended at the destination although its last acknowledgement was lost.
        let ended = lock(&ended);
        assert!(ended.is_sorted_by(|one, next| one < next), "{ended:?}");
        assert!(complete.iter().all(|round| ended.contains(round)), "{ended:?} {complete:?}");
        assert_eq!(receiver.completed_round(), *complete.last().unwrap());
        if let Some(deltas) = &self.saving.deltas {
            assert!(deltas.is_balanced(self.marks_bytes / MARKS_BYTES));
        }
        if let Some(counted) = self.saving.packing.as_ref().map(|packing| packing.count()) {
            let link = self.saving.counted();
            assert!(
                counted.compressed_bytes <= counted.tried_bytes && counted.tried_bytes <= link.data_bytes
            );
            assert!(link.wire_bytes <= link.data_bytes);
            outcome.compressed_bytes = counted.compressed_bytes;
            outcome.plain_bytes = link.data_bytes - counted.compressed_bytes;
        }
        outcome
    }

    fn connect(
        &self,
        generation: Generation,
        receiver: &mut Receiver,
        fragile: bool,
        dice: &mut Dice,
    ) -> Sender {
        let mut near = Vec::new();
        receiver.begin(generation);
        for number in 0..self.streams {
            let mut budget = |most: u64| if fragile && dice.one_in(2) { dice.below(most) } else { WHOLE };
            let mut ends = breaking_ends(budget(4 << 20), budget(400));
            if fragile && dice.one_in(6) {
                ends = corrupting_ends(dice.below(40));
            }
            let (mine, theirs) = self.way.apply(ends);
            near.push(stream(mine));
            receiver.attach(generation, number, stream(theirs)).unwrap();
        }
        Sender::with_window(self.source.readers(), self.saving.reductions(), near, self.window).unwrap()
    }
}

fn some_way(dice: &mut Dice) -> Compression {
    match dice.below(4) {
        0 => Compression::None,
        1 => Compression::Lz4,
        2 => Compression::Zstd(1),
        _ => Compression::Zstd(1 + dice.below(6) as u8),
    }
}

fn seeds() -> std::ops::Range<u64> {
    if let Some(seed) = env::var("WHIMBREL_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return seed..seed + 1;
    }
    0..if env::var_os("WHIMBREL_SOAK").is_some() { 5_000 } else { 80 }
}

#[test]
fn every_page_arrives_whatever_breaks() {
    let (mut rounds, mut breaks, mut referred, mut refused, mut deltas) = (0, 0, 0, 0, 0);
    let (mut compressed_bytes, mut plain_bytes, mut left_out, mut unsent, mut corrupt) = (0, 0, 0, 0, 0);
    for seed in seeds() {
        let mut dice = Dice(seed);
        let mut it = Move::new(&mut dice);
        let outcome = it.run(seed, &mut dice);
        // Zeros at the destination, with any content at the source; all other pages are equal.
        for (block, left_out) in it.saving.hinted.iter().flat_map(|hinted| hinted.left_out()).enumerate() {
            for page in left_out.runs().flatten() {
                let is_free = lock(&it.source.0[block].pages[page as usize]).is_free;
                assert!(is_free, "page {page} of block {block} is in use, WHIMBREL_SEED={seed}");
                it.source.0[block].is_punched(page);
            }
        }
        let difference = it.source.first_difference(&it.destination);
        assert_eq!(difference, None, "WHIMBREL_SEED={seed} {outcome:?}");
        left_out += outcome.left_out;
        unsent += outcome.unsent;
        rounds += outcome.rounds;
        breaks += outcome.breaks;
        corrupt += outcome.corrupt;
        referred += outcome.referred;
        deltas += outcome.deltas;
        refused += outcome.refused;
        compressed_bytes += outcome.compressed_bytes;
        plain_bytes += outcome.plain_bytes;
    }
    println!(
        "{rounds} rounds, {breaks} breaks, {corrupt} of them by a corrupt frame, {referred} pages referred to, of {deltas} what changed; {refused} refused, \
         {left_out} left out, {unsent} not sent in time"
    );
    println!("{compressed_bytes} bytes compressed, {plain_bytes} not, where that was wanted");
    let all = seeds().count() < 2
        || [u64::from(breaks), corrupt, refused, referred, deltas, left_out, unsent].iter().all(|n| *n > 0);
    assert!(all, "no connection ever broke, or nothing was referred to, or changed, or left out, or late");
    assert!(
        seeds().count() < 2 || (compressed_bytes > 0 && plain_bytes > 0),
        "nothing was compressed, or all"
    );
}

/// Runs a round without concurrent threads: pages owed are sent over one generation of connections that do not break.
fn send_once(
    source: &FakeRam,
    destination: &FakeRam,
    owed: OwedPages,
    log: &mut dyn DirtyLog,
    drain: impl FnOnce(),
) -> OwedPages {
    let mut receiver = Receiver::new(destination.writers(), 1, |_, _| {});
    receiver.begin(Generation(1));
    let (near, far) = connection(WHOLE, WHOLE);
    receiver.attach(Generation(1), 0, far).unwrap();
    let sender = Sender::start(source.readers(), vec![near]).unwrap();
    let readable = owed.clear_marks(log).unwrap().drain(|| always(drain)).unwrap();
    // Rounds continue counting; this receiver has seen none before.
    sender.send_round(readable).unwrap().owed
}

/// Trap 1. Also shows that these fakes detect the fault: without the drain the page is lost.
#[test]
fn disk_read_in_flight_needs_the_drain() {
    for drained in [true, false] {
        let (source, destination) = (FakeRam::new(&[4]), FakeRam::new(&[4]));
        let mut log = source.log();
        let owed = send_once(&source, &destination, source.everything(), &mut log, || {});
        source.0[0].dma_begins(2);
        let land = || source.0[0].dma_lands(2, 99);
        let owed = send_once(&source, &destination, owed, &mut log, || {
            if drained {
                land();
            }
        });
        if !drained {
            land();
        }
        send_once(&source, &destination, owed, &mut log, || {});
        assert_eq!(source.first_difference(&destination).is_none(), drained);
    }
}

/// Trap 3. Also shows that these fakes detect the fault: with a query for written pages alone the page is lost.
#[test]
fn dropped_page_is_found_by_querying_absent_pages() {
    for asks_for_absent in [false, true] {
        let (source, destination) = (FakeRam::new(&[4]), FakeRam::new(&[4]));
        let mut log = source.log();
        source.0[0].guest_writes(1, 5, 0);
        source.0[0].guest_writes(3, 5, 0);
        let owed = send_once(&source, &destination, source.everything(), &mut log, || {});
        log.asks_for_absent = asks_for_absent;
        source.0[0].is_punched(1);
        source.0[0].guest_writes(3, 6, 0);
        source.0[0].is_reclaimed(3);
        send_once(&source, &destination, owed, &mut log, || {});
        assert_eq!(source.first_difference(&destination).is_none(), asks_for_absent);
    }
}

/// Trap 5. Also shows that these fakes detect the fault.
#[test]
fn a_page_that_became_a_hole_is_a_hole_there_too() {
    for never_drops in [false, true] {
        let (source, mut destination) = (FakeRam::new(&[600]), FakeRam::new(&[600]));
        Arc::get_mut(&mut destination.0[0]).unwrap().never_drops = never_drops;
        let mut log = source.log();
        (0..600).for_each(|page| source.0[0].guest_writes(page, page, 0));
        let owed = send_once(&source, &destination, source.everything(), &mut log, || {});
        for page in [3, 511, 512, 599] {
            source.0[0].is_punched(page);
        }
        (100..200).for_each(|page| source.0[0].is_punched(page));
        send_once(&source, &destination, owed, &mut log, || {});
        assert_eq!(source.first_difference(&destination).is_none(), !never_drops);
    }
}
