//! No write is missed, whatever happens to the memory, and nothing remains.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::sync::Mutex;

use common::copier::Copier;
use common::{Victim, injector, soak};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, RngSeed, TestRunner};
use whimbrel_tracee::{AddressRange, Injector, PAGE_SIZE, Pagemap, RamFile, WriteTracker, maps};

const MIB: u64 = 1 << 20;

/// An operation on memory, in pages.
#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, len: u64, seed: u64 },
    Read { page: u64, pages: u64 },
    Drop { page: u64, pages: u64 },
    UnmapPages { page: u64, pages: u64 },
    PageOut { page: u64, pages: u64 },
    ForkWrite { offset: u64, seed: u64 },
    Round,
}

fn steps(pages: u64) -> impl Strategy<Value = Vec<Step>> {
    let some = move || {
        (0..pages, prop_oneof![1..4u64, 1..pages]).prop_map(move |(page, n)| (page, n.min(pages - page)))
    };
    let len = pages * PAGE_SIZE;
    let step = prop_oneof![
        6 => (0..len - 1, prop_oneof![1..9u64, 1..20_000u64], any::<u32>())
            .prop_map(move |(offset, n, seed)| Step::Write { offset, len: n.min(len - offset), seed: seed.into() }),
        2 => some().prop_map(|(page, pages)| Step::Read { page, pages }),
        2 => some().prop_map(|(page, pages)| Step::Drop { page, pages }),
        1 => some().prop_map(|(page, pages)| Step::UnmapPages { page, pages }),
        2 => some().prop_map(|(page, pages)| Step::PageOut { page, pages }),
        1 => (0..len - 8, any::<u32>()).prop_map(|(offset, seed)| Step::ForkWrite { offset, seed: seed.into() }),
        3 => Just(Step::Round),
    ];
    prop::collection::vec(step, 1..40)
}

/// Runs the steps in a fresh victim and checks after every round, and at the end.
fn check(injector: &Injector, kind: &str, unit: u64, pages: u64, steps: &[Step]) {
    let shared = kind.contains("memfd");
    let has_file = shared || kind == "private-file";
    let huge = unit > PAGE_SIZE;
    let mut copier = Copier::start(injector, kind, pages * PAGE_SIZE);
    // The slow and obvious oracle: pages that may have changed since the last round.
    let mut touched: BTreeSet<u64> = BTreeSet::new();
    let mut discarded: BTreeSet<u64> = BTreeSet::new();
    let mut rounds = 0;
    // Dropping and paging out work on whole pages of the mapping.
    let whole = |page: u64, n: u64| {
        let unit = unit / PAGE_SIZE;
        let start = page / unit * unit;
        (start, ((page + n).next_multiple_of(unit)).min(pages) - start)
    };
    for step in steps.iter().chain([&Step::Round]) {
        match *step {
            Step::Write { offset, len, seed } => {
                copier.tell(&format!("write {offset} {len} {seed}"));
                touched.extend(offset / PAGE_SIZE..=(offset + len - 1) / PAGE_SIZE);
            }
            // A page of a file that was discarded and is read again before the next round is not
            // detected: a remaining gap of `discarded`.
            Step::Read { page, pages } if has_file || unit > PAGE_SIZE => {
                let discarded = |at: u64| discarded.contains(&at);
                if !(whole(page, pages).0..whole(page, pages).0 + whole(page, pages).1).any(discarded) {
                    copier.tell(&format!("read {} {}", page * PAGE_SIZE, pages * PAGE_SIZE));
                }
            }
            Step::Read { page, pages } => {
                copier.tell(&format!("read {} {}", page * PAGE_SIZE, pages * PAGE_SIZE));
            }
            Step::Drop { page, pages } => {
                let (page, pages) = whole(page, pages);
                copier.tell(&format!("drop {} {}", page * PAGE_SIZE, pages * PAGE_SIZE));
                discarded.extend(page..page + pages);
                touched.extend(page..page + pages);
            }
            // hugetlbfs with a file: the other remaining gap.
            Step::UnmapPages { .. } if kind == "hugetlb-memfd" => {}
            Step::UnmapPages { page, pages } => {
                let (page, pages) = whole(page, pages);
                copier.tell(&format!("unmap-pages {} {}", page * PAGE_SIZE, pages * PAGE_SIZE));
                touched.extend(page..page + pages);
                if !shared {
                    discarded.extend(page..page + pages);
                }
            }
            Step::PageOut { page, pages } if !huge => {
                copier.tell(&format!("pageout {} {}", page * PAGE_SIZE, pages * PAGE_SIZE));
                if has_file {
                    // A page of a file that is reclaimed leaves no entry, and counts as written.
                    touched.extend(page..page + pages);
                }
            }
            // Writes of a child to shared memory are not detected: trap 2, with a test of its own.
            Step::ForkWrite { offset, seed } if !shared => {
                copier.tell(&format!("fork-write {offset} 8 {seed}"));
            }
            Step::PageOut { .. } | Step::ForkWrite { .. } => {}
            Step::Round => {
                let dirty = copier.round();
                rounds += 1;
                // Reading memory in the simple way makes missing pages present, so it is not done
                // in every round.
                if rounds % 2 == 0 {
                    copier.assert_equal();
                }
                if !huge {
                    let reported = copier.page_numbers(&dirty);
                    let surplus: Vec<_> = reported.difference(&touched).collect();
                    assert!(surplus.is_empty(), "reported, but not touched: {surplus:?}");
                }
                touched.clear();
                discarded.clear();
            }
        }
    }
    copier.assert_equal();
    copier.tracker.stop().unwrap();
    assert!(!copier.victim.is_registered());
    assert_eq!(copier.victim.userfaultfds(), 0);
}

fn property(kind: &str, unit: u64, pages: u64, cases: u32) {
    let injector = injector();
    let cases = if soak() { cases * 50 } else { cases };
    let seed = if soak() { RngSeed::Random } else { RngSeed::Fixed(20_261_121) };
    let config = Config {
        cases,
        rng_seed: seed,
        rng_algorithm: RngAlgorithm::ChaCha,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new(config)
        .run(&steps(pages), |steps| {
            check(&injector, kind, unit, pages, &steps);
            Ok(())
        })
        .unwrap();
}

/// Enables swap for as long as it lives, in a file of its own; does nothing if that is not
/// permitted.
struct Swap(Option<tempfile::NamedTempFile>);

/// Lock for tests that need swap, so that one does not disable it for another.
static SWAP: Mutex<()> = Mutex::new(());

impl Swap {
    fn on() -> Self {
        let file = tempfile::Builder::new().prefix("whimbrel-swap-").tempfile_in("/var/tmp").unwrap();
        fs::write(file.path(), vec![0; 64 << 20]).unwrap();
        let run = |program: &str| {
            Command::new(program).arg(file.path()).output().is_ok_and(|out| out.status.success())
        };
        let works = run("mkswap") && run("swapon");
        if !works {
            eprintln!("no swap here: pages are not swapped out in this test");
        }
        Self(works.then_some(file))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            let off = Command::new("swapoff").arg(file.path()).status();
            assert!(off.is_ok_and(|status| status.success()), "swap stays on: {}", file.path().display());
        }
    }
}

/// Raises the number of huge pages of hugetlbfs for as long as it lives.
struct HugePages(Option<String>);

static HUGE_PAGES: Mutex<()> = Mutex::new(());
const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

impl HugePages {
    fn raise(by: u64) -> Self {
        let free = || {
            let text = fs::read_to_string("/proc/meminfo").unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:")).unwrap();
            line.trim().parse::<u64>().unwrap()
        };
        let before = fs::read_to_string(NR_HUGEPAGES).unwrap_or_default().trim().to_owned();
        let wanted = before.parse::<u64>().map(|before| before + by);
        let raised = wanted.is_ok_and(|wanted| fs::write(NR_HUGEPAGES, wanted.to_string()).is_ok());
        let enough = raised && free() >= by;
        if !enough {
            eprintln!("no huge pages here: hugetlbfs is not tested");
        }
        Self(raised.then_some(before).filter(|_| enough))
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            fs::write(NR_HUGEPAGES, before).unwrap();
        }
    }
}

#[test]
fn no_change_of_anonymous_memory_is_missed() {
    let _one = SWAP.lock();
    let _swap = Swap::on();
    property("anonymous", PAGE_SIZE, 1024, 40);
}

#[test]
fn pages_in_swap_keep_their_marks() {
    let _one = SWAP.lock();
    let swap = Swap::on();
    if swap.0.is_none() {
        return;
    }
    let injector = injector();
    for kind in ["anonymous", "memfd"] {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map(kind, 4 * MIB);
        victim.ask("write 0 1048576 1");
        let mut copier = Copier::start_with(&injector, victim, range);
        assert!(copier.round().is_empty());
        copier.tell("write 8192 1 2");
        // From outside, as a host does that is short of memory.
        copier.victim.process.page_out(AddressRange::with_len(range.start, MIB)).unwrap();
        if kind == "anonymous" {
            let all = maps::detailed_mappings(&copier.victim.process).unwrap();
            let swapped: u64 = all.iter().filter_map(|one| one.details.as_ref()).map(|one| one.swapped).sum();
            assert!(swapped > 0, "nothing was swapped out");
            let mut populated = Vec::new();
            copier.pagemap.populated(range, &mut populated).unwrap();
            assert_eq!(populated, [AddressRange::with_len(range.start, MIB)]);
        }
        // Only the written page, though nothing is present any more.
        assert_eq!(copier.round(), [AddressRange::with_len(range.start + 8192, PAGE_SIZE)], "{kind}");
        assert!(copier.round().is_empty(), "{kind}");
        copier.assert_equal();
    }
}

#[test]
fn no_change_of_shared_memory_is_missed() {
    let _one = SWAP.lock();
    let _swap = Swap::on();
    property("memfd", PAGE_SIZE, 1024, 40);
}

#[test]
fn no_change_of_a_private_copy_of_a_file_is_missed() {
    let _one = SWAP.lock();
    let _swap = Swap::on();
    property("private-file", PAGE_SIZE, 1024, 25);
}

#[test]
fn no_change_of_transparent_huge_pages_is_missed() {
    property("huge", 2 * MIB, 2048, 20);
}

#[test]
fn no_change_of_hugetlbfs_is_missed() {
    let _one = HUGE_PAGES.lock();
    let pages = HugePages::raise(6);
    if pages.0.is_some() {
        property("hugetlb-memfd", 2 * MIB, 1024, 10);
        property("hugetlb", 2 * MIB, 1024, 10);
    }
}

#[test]
fn more_runs_than_one_scan_returns_are_all_found() {
    let injector = injector();
    let len = 160 * MIB;
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("memfd", len);
    let mut copier = Copier::start_with(&injector, victim, range);
    for seed in 0..2 {
        copier.tell(&format!("stripes 0 {len} {seed}"));
        assert_eq!(copier.round().len() as u64, len / PAGE_SIZE / 2);
        copier.assert_equal();
    }
}

/// More than one thread walks over the range.
#[test]
fn no_write_to_a_large_range_is_missed() {
    const BYTES: u64 = 5 << 30;
    let injector = injector();
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", BYTES);
    let uffd = injector.create_userfaultfd(&victim.process).unwrap();
    let mut tracker = WriteTracker::start(&victim.process, uffd, &[range]).unwrap();
    let mut dirty = Vec::new();
    // Pages on both sides of every possible cut of the range, and at its ends.
    let cuts = (range.start.next_multiple_of(1 << 30)..range.end).step_by(1 << 30);
    let around = |at: u64| AddressRange::with_len(at - PAGE_SIZE, 2 * PAGE_SIZE).intersection(&range);
    let written: Vec<_> =
        [range.start].into_iter().chain(cuts).chain([range.end]).filter_map(around).collect();
    for seed in 1..3 {
        for part in &written {
            victim.ask(&format!("write {} {} {seed}", part.start - range.start, part.len()));
        }
        dirty.clear();
        tracker.take_dirty(range, &mut dirty).unwrap();
        assert_eq!(dirty, written);
        dirty.clear();
        tracker.take_dirty(range, &mut dirty).unwrap();
        assert_eq!(dirty, []);
    }
}

#[test]
fn no_write_of_a_running_program_is_missed() {
    let injector = injector();
    for kind in ["anonymous", "memfd", "huge"] {
        let mut copier = Copier::start(&injector, kind, 32 * MIB);
        copier.tell("storm");
        let mut rounds_with_writes = 0;
        while rounds_with_writes < if soak() { 100 } else { 10 } {
            rounds_with_writes += u32::from(!copier.round().is_empty());
        }
        copier.tell("calm");
        copier.round();
        copier.assert_equal();
        assert!(copier.round().is_empty());
    }
}

/// A victim like a guest that arrived by a migration: another process wrote its file, and most of it is not mapped.
#[test]
fn pages_written_from_outside_are_mapped_at_the_start() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("memfd", 4 * MIB);
    let mapping = maps::mapping_at(&victim.process, range.start).unwrap().unwrap();
    let file = RamFile::open(&victim.process, &mapping).unwrap();
    file.write_at(MIB, &vec![7; MIB as usize]).unwrap();
    let mut pagemap = Pagemap::open(&victim.process).unwrap();
    let mut populated = || {
        let mut found = Vec::new();
        pagemap.populated(range, &mut found).unwrap();
        found
    };
    assert_eq!(populated(), []);
    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
    let mut tracker = WriteTracker::start(&victim.process, uffd, &[range]).unwrap();
    assert_eq!(populated(), [AddressRange::with_len(range.start + MIB, MIB)], "and holes stay holes");
    let mut dirty = Vec::new();
    tracker.take_dirty(range, &mut dirty).unwrap();
    assert_eq!(dirty, []);
}

/// Mapping it would read all of it from the disk at once; and no write is missed without it. A file on a disk stands
/// for a memfd in swap: of the latter the kernel keeps an arbitrary part in memory.
#[test]
fn pages_not_in_memory_are_not_read_at_the_start() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("disk-file", 4 * MIB);
    victim.ask("write 0 2097152 1");
    let mapping = maps::mapping_at(&victim.process, range.start).unwrap().unwrap();
    let file = RamFile::open(&victim.process, &mapping).unwrap();
    let in_memory = || {
        let mut found = Vec::new();
        file.resident_runs(0..4 * MIB, &mut found).unwrap();
        found
    };
    victim.process.page_out(range).unwrap();
    file.file().sync_all().unwrap();
    nix::fcntl::posix_fadvise(file.file(), 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED)
        .unwrap();
    assert_eq!(in_memory(), [], "of a file in /var/tmp, which has to be on a disk");
    file.write_at(MIB, &[7; 3 * PAGE_SIZE as usize]).unwrap();
    let there = MIB..MIB + 3 * PAGE_SIZE;
    assert_eq!(in_memory(), std::slice::from_ref(&there));

    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
    let mut tracker = WriteTracker::start(&victim.process, uffd, &[range]).unwrap();
    assert_eq!(in_memory(), [there]);
    let mut populated = Vec::new();
    Pagemap::open(&victim.process).unwrap().populated(range, &mut populated).unwrap();
    assert_eq!(populated, [AddressRange::with_len(range.start + MIB, 3 * PAGE_SIZE)]);
    let mut dirty = Vec::new();
    tracker.take_dirty(range, &mut dirty).unwrap();
    assert_eq!(dirty, []);
    victim.ask("write 8192 1 2");
    tracker.take_dirty(range, &mut dirty).unwrap();
    assert_eq!(dirty, [AddressRange::with_len(range.start + 8192, PAGE_SIZE)]);
}

/// A caller can stop the start between two steps, and nothing remains.
#[test]
fn the_start_of_tracking_can_be_stopped_between_steps() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("memfd", 600 * MIB);
    let mapping = maps::mapping_at(&victim.process, range.start).unwrap().unwrap();
    let file = RamFile::open(&victim.process, &mapping).unwrap();
    for at in [0, 300 * MIB, 599 * MIB] {
        file.write_at(at, &[7; PAGE_SIZE as usize]).unwrap();
    }
    let mut pagemap = Pagemap::open(&victim.process).unwrap();
    let mut mapped = || {
        let mut found = Vec::new();
        pagemap.populated(range, &mut found).unwrap();
        found.iter().map(|run| (run.start - range.start) / MIB).collect::<Vec<_>>()
    };
    let injector = injector();
    let begin = || {
        WriteTracker::begin(&victim.process, injector.create_userfaultfd(&victim.process).unwrap(), &[range])
    };

    let mut start = begin().unwrap();
    for so_far in [&[0][..], &[0, 300], &[0, 300, 599]] {
        assert!(start.step().unwrap());
        assert_eq!(mapped(), so_far);
    }
    assert!(!victim.is_registered());
    assert!(start.step().unwrap());
    assert_eq!(victim.registered(), [range]);
    drop(start);
    assert!(!victim.is_registered());

    let mut start = begin().unwrap();
    while start.step().unwrap() {}
    let mut tracker = start.finish().unwrap();
    let mut dirty = Vec::new();
    tracker.take_dirty(range, &mut dirty).unwrap();
    assert_eq!(dirty, [], "holes are known");
    file.punch_hole(300 * MIB..301 * MIB).unwrap();
    tracker.take_dirty(range, &mut dirty).unwrap();
    assert_eq!(dirty, [AddressRange::with_len(range.start + 300 * MIB, PAGE_SIZE)]);
}
