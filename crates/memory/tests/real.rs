//! Memory of a process that writes to it all the time, moved into another process: the kernel's write tracking, real
//! connections with and without TLS, a connection that is cut in the middle; compared at the end by plain reads.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use std::convert::Infallible;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use common::{Victim, connections, injector};
use link::Handle;
use link::transport::DataStream;
use proto::Generation;
use tracee::{AddressRange, Pagemap, RamFile, RemoteMemory, maps};
use whimbrel_memory::verify::{different_chunks, hash_block, hash_pages};
use whimbrel_memory::{
    ClearedPages, DirtyLog, HintedPages, OwedPages, Receiver, Reductions, Sender, SourceRam, TrackedRam,
    open_destination, open_source,
};

const MIB: u64 = 1 << 20;
const STREAMS: u16 = 3;
/// Tests that use huge pages compete for them, and some count them.
static HUGE_PAGES: Mutex<()> = Mutex::new(());

/// A migration of memory.
struct Move {
    source: Victim,
    destination: Victim,
    ram: SourceRam,
    log: TrackedRam,
    receiver: Receiver,
    generation: Generation,
    tls: bool,
    /// Handles with which the newest connections can be cut.
    cuts: Vec<Handle>,
}

impl Move {
    fn begin(mut source: Victim, destination: Victim, tls: bool) -> (Self, OwedPages) {
        source.order("storm");
        Self::begin_calm(source, destination, tls)
    }

    /// Begins with a source that writes nothing by itself.
    fn begin_calm(source: Victim, destination: Victim, tls: bool) -> (Self, OwedPages) {
        let regions = source.regions();
        let uffd = injector().create_userfaultfd(&source.process).unwrap();
        let log = TrackedRam::start(&source.process, uffd, &regions).unwrap();
        let ram: SourceRam = open_source(&source.process, &regions).unwrap().into();
        let writers = open_destination(&destination.process, &destination.regions()).unwrap();
        let receiver = Receiver::new(writers.into(), STREAMS, |_, _| {});
        let generation = Generation(0);
        let owed = OwedPages::everything(regions.iter().map(|region| region.bytes));
        (Self { source, destination, ram, log, receiver, generation, tls, cuts: Vec::new() }, owed)
    }

    /// Opens a new set of connections.
    fn connect(&mut self) -> Sender {
        self.generation = self.generation.next();
        let (near, far) = connections(self.tls, STREAMS);
        self.receiver.begin(self.generation);
        self.cuts = far.iter().map(link::Connection::handle).collect();
        for (stream, far) in (0..).zip(far) {
            self.receiver.attach(self.generation, stream, DataStream::over(far, None)).unwrap();
        }
        let near = near.into_iter().map(|near| DataStream::over(near, None)).collect();
        Sender::start(SourceRam::clone(&self.ram), near).unwrap()
    }

    fn clear(&mut self, owed: OwedPages) -> ClearedPages {
        owed.clear_marks(&mut self.log).unwrap()
    }

    /// Runs a round while the source continues to write.
    fn live_round(&mut self, sender: Sender, owed: OwedPages) -> (Sender, OwedPages) {
        let readable = self.clear(owed).drain(|| Ok::<_, Infallible>(())).unwrap();
        let sent = sender.send_round(readable).unwrap();
        (sent.sender, sent.owed)
    }

    /// Runs a round in which a connection breaks as soon as pages have been sent over it.
    fn broken_round(&mut self, sender: Sender, owed: OwedPages) -> OwedPages {
        // Enough that the round cannot end before the break.
        self.source.order("write 0 16000000 77");
        let readable = self.clear(owed).drain(|| Ok::<_, Infallible>(())).unwrap();
        let (handle, cut) = (sender.handle(), self.cuts[1].clone());
        let cutter = thread::spawn(move || {
            while handle.progress().sent.pages() == 0 && !handle.is_broken() {
                thread::yield_now();
            }
            cut.shutdown();
        });
        let interrupted = sender.send_round(readable).unwrap_err();
        cutter.join().unwrap();
        assert!(interrupted.cause.is_connection(), "{interrupted:?}");
        interrupted.owed
    }

    /// Runs the last round, with the source stopped.
    fn last_round(&mut self, sender: Sender, owed: OwedPages) {
        self.source.freeze();
        let readable = self.clear(owed).skip_drain();
        let sent = sender.send_round(readable).unwrap();
        assert_eq!(sent.owed.pages(), 0);
        assert_eq!(self.receiver.completed_round(), sent.stats.round);
    }

    /// Compares chunk by chunk, by plain reads.
    fn assert_equal(&self) {
        for (ours, theirs) in self.source.blocks().iter().zip(&self.destination.blocks()) {
            let (near, far) = (self.source.process.pid(), self.destination.process.pid());
            let hashes = hash_block(near, ours, 2).unwrap();
            let different = different_chunks(0, &hashes, &hash_block(far, theirs, 2).unwrap());
            if let Some(chunk) = different.first() {
                let pages = hash_pages(near, ours, *chunk).unwrap();
                let pages = different_chunks(0, &pages, &hash_pages(far, theirs, *chunk).unwrap());
                panic!(
                    "block {}: chunks {different:?} differ; of the first of them pages {pages:?}",
                    ours.name
                );
            }
        }
    }
}

/// Moves from one kind of memory to another, with every event that can happen on the way.
fn moves(from: &str, to: &str, tls: bool) {
    let bytes = 48 * MIB;
    let mut source = Victim::start(from, bytes);
    source.order("write 0 20000000 1");
    source.order("write 40000000 3000000 2");
    let (mut it, owed) = Move::begin(source, Victim::start(to, bytes), tls);
    let sender = it.connect();
    let (sender, owed) = it.live_round(sender, owed);
    it.source.order(&format!("drop {} {}", 3 * MIB, 5 * MIB));
    it.source.order(&format!("unmap-pages {} {}", 20 * MIB, MIB));
    it.source.order(&format!("read {} {}", 3 * MIB, MIB));
    let (sender, owed) = it.live_round(sender, owed);
    it.source.order(&format!("pageout {} {}", 8 * MIB, MIB));
    let owed = it.broken_round(sender, owed);
    it.source.order(&format!("drop {} {}", 9 * MIB, 3 * MIB));
    let sender = it.connect();
    let (sender, owed) = it.live_round(sender, owed);
    it.last_round(sender, owed);
    it.assert_equal();
}

#[test]
fn memfd_into_memfd() {
    moves("memfd", "memfd", false);
}

#[test]
fn anonymous_into_memfd_with_tls() {
    moves("anonymous", "memfd", true);
}

#[test]
fn huge_pages_into_anonymous() {
    moves("huge", "anonymous", false);
}

#[test]
fn memfd_into_anonymous_with_tls() {
    moves("memfd", "anonymous", true);
}

/// Reports a test that this machine does not support; `make test` lists these at its end.
fn not_tried(what: &str) {
    println!("NOT TRIED: {what}");
    if let Some(list) = std::env::var_os("WHIMBREL_NOT_TRIED") {
        let list = std::fs::OpenOptions::new().append(true).create(true).open(list);
        list.and_then(|mut list| std::io::Write::write_all(&mut list, format!("{what}\n").as_bytes()))
            .unwrap();
    }
}

/// Needs huge pages, which the host's administrator has to reserve.
#[test]
fn hugetlb_memfd_into_hugetlb_memfd_where_there_are_huge_pages() {
    let _alone = HUGE_PAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    if free.ok().and_then(|free| free.trim().parse().ok()).unwrap_or(0_u64) < 48 {
        not_tried("hugetlbfs between memfds: fewer than 48 huge pages of 2 MiB are free");
        return;
    }
    let source = Victim::start("hugetlb-memfd", 48 * MIB);
    let (mut it, owed) = Move::begin(source, Victim::start("hugetlb-memfd", 48 * MIB), false);
    let sender = it.connect();
    let (sender, owed) = it.live_round(sender, owed);
    it.source.order(&format!("drop {} {}", 4 * MIB, 6 * MIB));
    let (sender, owed) = it.live_round(sender, owed);
    it.last_round(sender, owed);
    it.assert_equal();
}

/// Returns the file of a victim's memory.
fn file(victim: &Victim) -> RamFile {
    let address = victim.regions()[0].address;
    RamFile::open(&victim.process, &maps::mapping_at(&victim.process, address).unwrap().unwrap()).unwrap()
}

/// Returns how much of a victim's 48 MiB is present, in bytes.
fn present(victim: &Victim) -> u64 {
    let mut found = Vec::new();
    let range = AddressRange::with_len(victim.regions()[0].address, 48 * MIB);
    Pagemap::open(&victim.process).unwrap().populated(range, &mut found).unwrap();
    found.iter().map(AddressRange::len).sum()
}

/// Trap 5: untouched pages cost no memory at the destination, and pages given back at the source are given back there.
#[test]
fn holes_stay_holes_and_become_holes() {
    let mut source = Victim::start("memfd", 48 * MIB);
    source.order(&format!("write 0 {} 5", 8 * MIB));
    let (mut it, owed) = Move::begin(source, Victim::start("memfd", 48 * MIB), false);
    it.source.order("calm");
    it.source.order(&format!("drop {} {}", 8 * MIB, 40 * MIB));
    let sender = it.connect();
    let (sender, owed) = it.live_round(sender, owed);
    let used = |victim: &Victim| file(victim).file().metadata().unwrap().blocks() * 512;
    assert_eq!(used(&it.destination), 8 * MIB);
    it.source.order(&format!("drop {} {}", MIB + 8192, 4 * MIB));
    let (sender, owed) = it.live_round(sender, owed);
    assert_eq!(used(&it.destination), 4 * MIB);
    it.last_round(sender, owed);
    it.assert_equal();
    assert_eq!(used(&it.destination), 4 * MIB, "comparing must not fill holes");
    assert_eq!(used(&it.source), 4 * MIB, "moving must not fill holes");
}

/// Trap 5, if a transport has written the pages by itself: a block has to know that they are not empty any more.
#[test]
fn pages_that_a_transport_wrote_become_holes() {
    for kind in ["memfd", "anonymous"] {
        let victim = Victim::start(kind, 48 * MIB);
        let region = &victim.regions()[0];
        let writers = open_destination(&victim.process, &victim.regions()).unwrap();
        let memory = RemoteMemory::new(&victim.process).unwrap();
        let (pages, len) = (2 * MIB..2 * MIB + 8192, 8192);
        assert!(writers[0].allow_direct_placement(pages.clone()), "{kind}");
        memory.write(region.address + pages.start, &vec![7; len]).unwrap();
        let mut found = vec![0; len];
        writers[0].read(pages.start, &mut found).unwrap();
        assert_eq!(found, vec![7; len], "{kind}");
        writers[0].drop_pages(pages.clone()).unwrap();
        writers[0].read(pages.start, &mut found).unwrap();
        assert_eq!(found, vec![0; len], "{kind}");
    }
}

/// Memory that was present from end to end before the first page arrived was requested: none of it is given back, and
/// pages that are empty at the source are zero at the destination.
#[test]
fn preallocated_memory_stays() {
    for kind in ["memfd", "anonymous"] {
        let mut source = Victim::start("memfd", 48 * MIB);
        source.order(&format!("write 0 {} 5", 8 * MIB));
        let mut destination = Victim::start(kind, 48 * MIB);
        destination.order(&format!("write 0 {} 6", 48 * MIB));
        let (mut it, owed) = Move::begin_calm(source, destination, false);
        let sender = it.connect();
        let (sender, owed) = it.live_round(sender, owed);
        it.source.order(&format!("drop {} {}", MIB + 8192, 4 * MIB));
        it.source.order(&format!("write {} 5 7", 2 * MIB + 100));
        let (sender, owed) = it.live_round(sender, owed);
        it.last_round(sender, owed);
        it.assert_equal();
        assert_eq!(present(&it.destination), 48 * MIB, "{kind}");
    }
}

/// A clean page of a shared file that is given back and read again leaves no mark at all: it is protected as before,
/// and zero. There is no other write here, which would hide that.
#[test]
fn pages_given_back_and_read_again_are_zero_there_too() {
    for kind in ["memfd", "anonymous"] {
        let mut source = Victim::start(kind, 48 * MIB);
        source.order(&format!("write 0 {} 5", 30 * MIB));
        let (mut it, owed) = Move::begin(source, Victim::start("memfd", 48 * MIB), false);
        it.source.order("calm");
        let sender = it.connect();
        let (sender, owed) = it.live_round(sender, owed);
        // Every page is clean from here on.
        let (sender, owed) = it.live_round(sender, owed);
        it.source.order(&format!("drop {} {}", MIB + 8192, 3 * MIB));
        it.source.order(&format!("read {} {}", 2 * MIB, MIB));
        // Pages that were read again are searched for only before a comparison. (Anonymous memory marks them.)
        let cleared = owed.clear_marks(&mut it.log).unwrap();
        let unmarked = if kind == "memfd" { MIB } else { 0 };
        assert_eq!(cleared.scan().pages, (3 * MIB - unmarked) / 4096, "{kind}");
        let owed = cleared.give_up();
        it.source.order(&format!("drop {} {}", 23 * MIB, 3 * MIB));
        it.source.order(&format!("read {} {}", 25 * MIB, 3 * MIB));
        it.log.announce_comparison();
        it.last_round(sender, owed);
        it.assert_equal();
    }
}

/// Absent pages of a private mapping are in its file, and moving them does not allocate them: on tmpfs the RAM of such
/// a guest would grow to its full size.
#[test]
fn a_private_mapping_of_a_file_is_moved_without_filling_it() {
    let mut source = Victim::start("private-sparse-file", 48 * MIB);
    let [low, _] = &source.regions()[..] else { panic!("two blocks") };
    let mapping = maps::mapping_at(&source.process, low.address).unwrap().unwrap();
    let (start, end) = (mapping.range.start, mapping.range.end);
    let link = source.process.path(&format!("map_files/{start:x}-{end:x}"));
    let file = std::fs::OpenOptions::new().write(true).open(link).unwrap();
    // Data of the file, including a single page among holes; of the process in front of such data; of the process in
    // front of a hole.
    file.write_all_at(&[9; 4096], 10 * MIB).unwrap();
    file.write_all_at(&vec![7; 6 * MIB as usize], 20 * MIB).unwrap();
    source.order(&format!("write {} {} 5", 21 * MIB + 100, MIB));
    source.order(&format!("write {} {} 6", 30 * MIB, MIB));
    let used = || file.metadata().unwrap().blocks() * 512;
    // Writing to a private mapping reads the file first, which fills its holes.
    let before = used();
    assert!((6 * MIB..8 * MIB).contains(&before), "{before}");

    let (mut it, owed) = Move::begin_calm(source, Victim::start("memfd", 48 * MIB), false);
    let sender = it.connect();
    let (sender, owed) = it.live_round(sender, owed);
    assert_eq!(used(), before, "moving must not fill holes");
    // In the middle of data, and in a hole; and pages that were the process's own are the file's again.
    it.source.order(&format!("write {} 5 8", 24 * MIB + 5000));
    it.source.order(&format!("write {} 5 9", MIB + 5000));
    it.source.order(&format!("drop {} {}", 21 * MIB, 4096 * 3));
    let filled = used();
    let (sender, owed) = it.live_round(sender, owed);
    it.last_round(sender, owed);
    assert_eq!(used(), filled, "moving must not fill holes");
    it.assert_equal();
}

/// Absent private huge pages are allocated by reading them: from those that are reserved for them.
#[test]
fn private_huge_pages_are_read_at_nobody_elses_expense() {
    let pages = |what: &str| -> u64 {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{what}_hugepages");
        std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    let left_to_others = || pages("free").saturating_sub(pages("resv"));
    let _alone = HUGE_PAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if left_to_others() < 48 {
        not_tried("private huge pages: fewer than 48 huge pages of 2 MiB are free");
        return;
    }
    let source = Victim::start("hugetlb", 48 * MIB);
    let destination = Victim::start("hugetlb-memfd", 48 * MIB);
    let left = left_to_others();
    let (mut it, owed) = Move::begin_calm(source, destination, false);
    let sender = it.connect();
    let (sender, owed) = it.live_round(sender, owed);
    it.last_round(sender, owed);
    assert_eq!(left_to_others(), left);
    it.assert_equal();
}

/// Anonymous memory at the destination is zeroed, and given back by the process itself between rounds.
#[test]
fn anonymous_memory_is_given_back_between_rounds() {
    let mut source = Victim::start("anonymous", 48 * MIB);
    source.order(&format!("write 0 {} 5", 8 * MIB));
    let (mut it, owed) = Move::begin(source, Victim::start("anonymous", 48 * MIB), false);
    it.source.order("calm");
    it.source.order(&format!("drop {} {}", 8 * MIB, 40 * MIB));
    let sender = it.connect();
    let (sender, owed) = it.live_round(sender, owed);
    assert_eq!(present(&it.destination), 8 * MIB);
    it.source.order(&format!("drop {} {}", MIB, 4 * MIB));
    let (sender, owed) = it.live_round(sender, owed);
    assert_eq!(present(&it.destination), 8 * MIB);
    // Pages that are written again must not be given back.
    it.source.order(&format!("write {MIB} {MIB} 6"));
    let (sender, owed) = it.live_round(sender, owed);
    let regions = it.destination.regions();
    let given: u64 = it.receiver.handle().discard_with(|found| {
        let ranges: Vec<AddressRange> = found
            .iter()
            .map(|one| {
                let base = regions[usize::from(one.block)].address;
                AddressRange::new(base + one.bytes.start, base + one.bytes.end)
            })
            .collect();
        injector().discard(&it.destination.process, &ranges).unwrap();
        ranges.iter().map(AddressRange::len).sum()
    });
    assert_eq!(given, 3 * MIB);
    assert_eq!(present(&it.destination), 5 * MIB);
    assert!(it.receiver.handle().discard_with(|found| found.is_empty()));
    it.last_round(sender, owed);
    it.assert_equal();
}

/// Content that QEMU itself had put into the destination's RAM does not show through the source's holes.
#[test]
fn what_was_there_before_is_overwritten() {
    for kind in ["anonymous", "memfd"] {
        let source = Victim::start("memfd", 4 * MIB);
        let mut destination = Victim::start(kind, 4 * MIB);
        destination.order(&format!("write {MIB} 10000 9"));
        let (mut it, owed) = Move::begin(source, destination, false);
        it.source.order("calm");
        it.source.order(&format!("drop 0 {}", 4 * MIB));
        let sender = it.connect();
        it.last_round(sender, owed);
        it.assert_equal();
    }
}

/// Guest memory that is gone is an error of the migration, and no reason to connect again.
#[test]
fn a_source_that_ends_is_no_broken_connection() {
    let source = Victim::start("anonymous", 8 * MIB);
    let (mut it, owed) = Move::begin(source, Victim::start("memfd", 8 * MIB), false);
    let sender = it.connect();
    let readable = it.clear(owed).drain(|| Ok::<_, Infallible>(())).unwrap();
    it.source.process.signal(tracee::Signal::KILL).unwrap();
    it.source.process.wait_exit(None).unwrap();
    let interrupted = sender.send_round(readable).unwrap_err();
    assert!(!interrupted.cause.is_connection(), "{interrupted:?}");
    assert!(interrupted.owed.clear_marks(&mut it.log).is_err());
}

#[test]
fn pages_are_counted_as_they_are_found() {
    let mut source = Victim::start("memfd", 8 * MIB);
    source.order(&format!("write 0 {} 5", 8 * MIB));
    let regions = source.regions();
    let uffd = injector().create_userfaultfd(&source.process).unwrap();
    let mut log = TrackedRam::start(&source.process, uffd, &regions).unwrap();
    let mut into: Vec<_> = regions.iter().map(|one| whimbrel_memory::PageSet::new(one.bytes)).collect();
    let hinted = Arc::new(HintedPages::new(regions.iter().map(|one| one.bytes)));
    log.report_to(Reductions::new(vec![hinted.clone()], None));
    assert_eq!(log.scan_dirty(&mut into).unwrap().pages, 0);
    let answer = hinted.begin();
    hinted.add_free(answer, 0, 0..3);
    hinted.add_free(answer, 1, 0..u64::MAX);
    source.order("write 4096 1 3");
    source.order(&format!("write {} 8192 3", 5 * MIB - 4096));
    assert_eq!(log.scan_dirty(&mut into).unwrap().pages, 3);
    assert!(into[0].contains(1));
    let border = regions[0].bytes / 4096;
    let high = 5 * MIB / 4096 - border;
    assert!(into[1].runs().eq(std::iter::once(high - 1..high + 1)));
    // Written pages are in use.
    assert_eq!(hinted.pages(), (3 - 1 + regions[1].bytes / 4096 - 2, 0));
    log.stop().unwrap();
    assert_eq!(into[0].count(), 1);
}
