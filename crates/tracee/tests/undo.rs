//! Every change of a process is undone: when it fails, when it is dropped, when the agent dies.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::process::Command;

use common::{Victim, injector};
use whimbrel_tracee::{AddressRange, PAGE_SIZE, ProcessError, TrackError, WriteTracker};

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
