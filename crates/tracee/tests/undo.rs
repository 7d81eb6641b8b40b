//! Every change of a process is undone: when it fails, when it is dropped, when the agent dies.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::process::Command;

use common::{Victim, injector};
use whimbrel_tracee::{
    AddressRange, PAGE_SIZE, ProcessError, TrackError, WriteMeter, WriteTracker, WrittenMemory,
};

const MIB: u64 = 1 << 20;

fn track(victim: &Victim, ranges: &[AddressRange]) -> Result<WriteTracker, TrackError> {
    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
    WriteTracker::start(&victim.process, uffd, ranges)
}

#[test]
fn dropping_the_tracker_leaves_the_process_as_it_was() {
    for kind in ["anonymous", "memfd", "huge", "private-file"] {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map(kind, 4 * MIB);
        let tracker = track(&victim, &[range]).unwrap();
        assert!(victim.is_registered());
        // Only the tracker has the descriptor.
        assert_eq!(victim.userfaultfds(), 0);
        drop(tracker);
        assert!(!victim.is_registered());
        // And it can begin anew.
        track(&victim, &[range]).unwrap().stop().unwrap();
        assert!(!victim.is_registered());
        victim.ask("write 0 4194304 1");
        victim.assert_well();
    }
}

#[test]
fn a_failed_start_leaves_nothing_registered() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", 4 * MIB);
    let half = AddressRange::with_len(range.start, MIB);
    // Not mapped, not mapped as a whole, between pages, nothing.
    let unmapped = AddressRange::with_len(0x1000, PAGE_SIZE);
    let error = track(&victim, &[half, unmapped]).unwrap_err();
    assert!(matches!(error, TrackError::NotMapped { range } if range == unmapped), "{error:?}");
    assert!(!victim.is_registered());
    let beyond = AddressRange::new(range.start, range.start + (1 << 40));
    assert!(matches!(track(&victim, &[beyond]), Err(TrackError::NotMapped { .. })));
    let between = AddressRange::new(range.start + 1, range.end);
    assert!(matches!(track(&victim, &[between]), Err(TrackError::Unaligned { .. })));
    let empty = AddressRange::new(range.start, range.start);
    assert!(matches!(track(&victim, &[empty]), Err(TrackError::NotMapped { .. })));
    assert!(!victim.is_registered());

    // Another userfaultfd has registered a part already; the ranges before it are unregistered.
    let other = AddressRange::with_len(range.start + 2 * MIB, MIB);
    let tracker = track(&victim, &[other]).unwrap();
    let error = track(&victim, &[half, other]).unwrap_err();
    assert!(matches!(error, TrackError::Taken { range } if range == other), "{error:?}");
    // The same while another range is tracked with that descriptor, and stays so.
    let mut two = track(&victim, &[half]).unwrap();
    let overlapping = AddressRange::new(half.end, other.end);
    let error = two.add(overlapping).unwrap_err();
    assert!(matches!(error, TrackError::Taken { range } if range == other), "{error:?}");
    assert_eq!(victim.registered(), [half, other]);
    assert_eq!(two.ranges().collect::<Vec<_>>(), [half]);
    assert_eq!(tracker.ranges().collect::<Vec<_>>(), [other]);
    drop(tracker);
    drop(two);
    assert!(!victim.is_registered());
    victim.assert_well();
}

#[test]
fn a_range_that_is_not_tracked_is_refused() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", 4 * MIB);
    let [first, second] = [0, MIB].map(|at| AddressRange::with_len(range.start + at, MIB));
    let mut tracker = track(&victim, &[first]).unwrap();
    let both = AddressRange::new(first.start, second.end);
    let mut dirty = Vec::new();
    assert!(matches!(tracker.take_dirty(both, &mut dirty), Err(TrackError::NotMapped { .. })));
    tracker.add(second).unwrap();
    victim.ask(&format!("write {} 8192 1", MIB - 4096));
    tracker.take_dirty(both, &mut dirty).unwrap();
    assert_eq!(dirty, [AddressRange::with_len(second.start - 4096, 8192)]);
    let between = AddressRange::new(first.start, second.start + 5);
    assert!(matches!(tracker.take_dirty(between, &mut dirty), Err(TrackError::Unaligned { .. })));
    tracker.take_dirty(AddressRange::new(first.start, first.start), &mut dirty).unwrap();

    // Mapped anew, and so not tracked any more.
    victim.ask("remap 8192 4096");
    assert!(matches!(tracker.take_dirty(both, &mut dirty), Err(TrackError::Lost { .. })));
    drop(tracker);
    assert!(!victim.is_registered());
    victim.assert_well();
}

#[test]
fn a_process_that_has_ended_is_not_taken_for_a_clean_one() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", MIB);
    let mut tracker = track(&victim, &[range]).unwrap();
    victim.ask("write 0 8 1");
    victim.child.kill().unwrap();
    victim.process.wait_exit(None).unwrap();
    let error = tracker.take_dirty(range, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, TrackError::Process(ProcessError::Gone { .. })), "{error:?}");
    tracker.stop().unwrap();
}

#[test]
fn a_meter_counts_writes_and_leaves_the_process_as_it_was() {
    for (kind, page) in [("anonymous", PAGE_SIZE), ("memfd", PAGE_SIZE), ("private-file", PAGE_SIZE)] {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map(kind, 4 * MIB);
        // The first write to memory that is missing may bring a huge page.
        victim.ask("write 0 4194304 7");
        let start = |victim: &Victim| {
            let uffd = injector().create_userfaultfd(&victim.process).unwrap();
            WriteMeter::start(&victim.process, uffd, &[range])
        };
        let mut meter = start(&victim).unwrap();
        assert!(victim.is_registered());
        assert!(matches!(start(&victim), Err(TrackError::Taken { .. })), "not beside another one");
        victim.ask("write 0 8192 1");
        victim.ask("write 4096 8192 2");
        victim.ask("read 65536 65536");
        let written = WrittenMemory { bytes: 3 * page, faults: 3 };
        assert_eq!(meter.count().unwrap(), written, "{kind}");
        assert_eq!(meter.count().unwrap(), written, "{kind}: counting changes nothing");
        drop(meter);
        assert!(!victim.is_registered());
        assert_eq!(victim.userfaultfds(), 0);
        victim.ask("write 0 4194304 1");
        victim.assert_well();
    }
}

#[test]
fn missing_memory_needs_no_page_tables_for_a_meter() {
    let page_tables_kib = |victim: &Victim| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", victim.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", 256 * MIB);
    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
    let before = page_tables_kib(&victim);
    let mut meter = WriteMeter::start(&victim.process, uffd, &[range]).unwrap();
    // The whole memory would need 512 KiB.
    assert!(page_tables_kib(&victim) < before + 128, "{before} before");
    assert_eq!(meter.count().unwrap(), WrittenMemory::default());
    victim.ask("write 0 4096 1");
    assert!(meter.count().unwrap().bytes >= PAGE_SIZE, "a new page counts as written");
    drop(meter);
    victim.assert_well();
}

#[test]
fn a_meter_that_is_interrupted_does_not_start() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", MIB);
    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
    assert!(WriteMeter::start_unless(&victim.process, uffd, &[range], || true).unwrap().is_none());
    assert!(!victim.is_registered());
    assert_eq!(victim.userfaultfds(), 0);
    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
    assert!(WriteMeter::start_unless(&victim.process, uffd, &[range], || false).unwrap().is_some());
    victim.assert_well();
}

#[test]
fn a_meter_of_an_ended_process_counts_nothing() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", MIB);
    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
    let mut meter = WriteMeter::start(&victim.process, uffd, &[range]).unwrap();
    victim.child.kill().unwrap();
    victim.process.wait_exit(None).unwrap();
    let error = meter.count().unwrap_err();
    assert!(matches!(error, TrackError::Process(ProcessError::Gone { .. })), "{error:?}");
    meter.stop().unwrap();
}

#[test]
fn the_kernel_cleans_up_after_an_agent_that_was_killed() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("memfd", 4 * MIB);
    victim.ask("write 0 4194304 1");
    for _ in 0..5 {
        let mut agent = Command::new(env!("CARGO_BIN_EXE_tracee-test-injector"));
        agent.args(["track", &victim.process.pid().to_string()]);
        agent.args([range.start.to_string(), range.len().to_string()]);
        let mut agent = Victim::start_command(agent);
        assert!(victim.is_registered());
        agent.child.kill().unwrap();
        agent.child.wait().unwrap();
        assert!(!victim.is_registered());
        assert_eq!(victim.userfaultfds(), 0);
    }
    let mut tracker = track(&victim, &[range]).unwrap();
    let mut dirty = Vec::new();
    tracker.take_dirty(range, &mut dirty).unwrap();
    assert_eq!(dirty, []);
    drop(tracker);
    victim.assert_well();
}
