//! Benchmarks: scans of a real process, reads of its memory, and operations on sets of ranges.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for developers")]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../../../benches/harness.rs"]
mod harness;

use std::hint::black_box;
use std::time::{Duration, Instant};

use common::{Victim, injector};
use harness::{Amount, Benches};
use whimbrel_tracee::{AddressRange, PAGE_SIZE, RemoteMemory, WriteTracker, intersect, merge_from, subtract};

const BYTES: u64 = 256 << 20;

fn main() {
    let mut benches = Benches::from_arguments();
    scans(&mut benches);
    scan_of_a_large_range(&mut benches);
    reads(&mut benches);
    ranges(&mut benches);
    benches.finish();
}

fn scans(benches: &mut Benches) {
    for kind in ["anonymous", "memfd"] {
        // Distance of the pages that are written before each scan.
        for (name, every) in
            [("nothing", None), ("64 pages", Some(1024)), ("every second", Some(2)), ("all", Some(1))]
        {
            benches.timed_in_part(
                &format!("scan, {kind}/{name}"),
                Amount::Of(BYTES / PAGE_SIZE, "page"),
                || {
                    let mut victim = Victim::start(&["mode-memory"]);
                    let range = victim.map(kind, BYTES);
                    victim.ask(&format!("write 0 {BYTES} 1"));
                    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
                    let mut tracker = WriteTracker::start(&victim.process, uffd, &[range]).unwrap();
                    let memory = RemoteMemory::new(&victim.process).unwrap();
                    let written: Vec<AddressRange> = every.map_or(Vec::new(), |every| {
                        let first_bytes = (range.start..range.end).step_by(every * PAGE_SIZE as usize);
                        first_bytes.map(|at| AddressRange::with_len(at, 1)).collect()
                    });
                    let bytes = vec![9; written.len()];
                    let mut dirty = Vec::new();
                    move || {
                        let _keep = &victim;
                        memory.write_runs(&written, &bytes).unwrap();
                        let time = time_of_scan(&mut tracker, range, &mut dirty);
                        let pages = dirty.iter().map(AddressRange::len).sum::<u64>() / PAGE_SIZE;
                        assert_eq!(pages, written.len() as u64, "what was written was found");
                        time
                    }
                },
            );
        }
    }
}

/// Scans a guest so large that several threads walk over its page table; most of it is never
/// touched.
fn scan_of_a_large_range(benches: &mut Benches) {
    const LARGE: u64 = 4 << 30;
    benches.timed_in_part("scan, 4 GiB/64 pages", Amount::Of(LARGE / PAGE_SIZE, "page"), || {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map("anonymous", LARGE);
        let uffd = injector().create_userfaultfd(&victim.process).unwrap();
        let mut tracker = WriteTracker::start(&victim.process, uffd, &[range]).unwrap();
        let memory = RemoteMemory::new(&victim.process).unwrap();
        let written: Vec<AddressRange> = (range.start..range.end)
            .step_by(LARGE as usize / 64)
            .map(|at| AddressRange::with_len(at, 1))
            .collect();
        let bytes = vec![9; written.len()];
        let mut dirty = Vec::new();
        move || {
            let _keep = &victim;
            memory.write_runs(&written, &bytes).unwrap();
            let time = time_of_scan(&mut tracker, range, &mut dirty);
            assert_eq!(dirty.len(), written.len(), "what was written was found");
            time
        }
    });
}

fn time_of_scan(tracker: &mut WriteTracker, range: AddressRange, dirty: &mut Vec<AddressRange>) -> Duration {
    dirty.clear();
    let started = Instant::now();
    tracker.take_dirty(range, dirty).unwrap();
    started.elapsed()
}

fn reads(benches: &mut Benches) {
    const READ: u64 = 256 << 10;
    benches.timed("remote memory, read/256 KiB", Amount::Bytes(READ), || {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map("anonymous", READ);
        victim.ask(&format!("write 0 {READ} 1"));
        let memory = RemoteMemory::new(&victim.process).unwrap();
        let mut bytes = vec![0; READ as usize];
        move || {
            let _keep = &victim;
            memory.read(range.start, &mut bytes).unwrap();
        }
    });
}

/// Returns the maximum number of ranges in 256 MiB: every second page, from page `first` on.
fn stripes(first: u64) -> Vec<AddressRange> {
    (first..BYTES / PAGE_SIZE)
        .step_by(2)
        .map(|page| AddressRange::with_len(page * PAGE_SIZE, PAGE_SIZE))
        .collect()
}

fn ranges(benches: &mut Benches) {
    let amount = Amount::Of(BYTES / PAGE_SIZE / 2, "range");
    benches.counted("ranges, merge/in order", amount, || {
        let (found, mut ranges) = (stripes(0), Vec::new());
        move || {
            ranges.clone_from(&found);
            merge_from(black_box(&mut ranges), 0);
        }
    });
    benches.counted("ranges, merge/all touch", amount, || {
        let mut found = stripes(0);
        for range in &mut found {
            range.end += PAGE_SIZE;
        }
        let mut ranges = Vec::new();
        move || {
            ranges.clone_from(&found);
            merge_from(black_box(&mut ranges), 0);
        }
    });
    // The ranges of the other set equal these, or are between them.
    for (name, first) in [("the same", 0), ("beside", 1)] {
        benches.counted(&format!("ranges, subtract/{name}"), amount, || {
            let (one, other) = (stripes(0), stripes(first));
            move || {
                black_box(subtract(black_box(&one), black_box(&other)));
            }
        });
        benches.counted(&format!("ranges, intersect/{name}"), amount, || {
            let (one, other) = (stripes(0), stripes(first));
            move || {
                black_box(intersect(black_box(&one), black_box(&other)));
            }
        });
    }
}
