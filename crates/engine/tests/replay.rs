//! Replays of real migrations: the decisions that were made in them are made today.
//!
//! `traces/*.json` are the traces of their reports. Where a rule changes on purpose, `BLESS=1` writes today's
//! decisions for the recorded observations: the difference in the files is the effect of the change. The observations
//! stay those of a migration by the former rule. New ones are recorded where `WHIMBREL_RECORD_TRACES` names a
//! directory, by the end-to-end tests that replay a report (`bin/whimbrel/tests/common/replay.rs`).
//!
//! The three patterns are guests that rewrite 48, 4 and 20 MiB as fast as they can on a link of 20 MiB/s,
//! `--max-downtime 100 --on-limit stop`, uncompressed; c with `stable_window = 50`, or it is a. Unneeded ends of long
//! traces were cut off, and are counted there (`left_out`).

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]
#![allow(clippy::disallowed_methods, reason = "records are read from files, and decided again without")]

extern crate whimbrel_engine as engine;

use std::path::{Path, PathBuf};

use engine::discards::DiscardDecision;
use engine::pre_copy::{Decision, Pattern};
use engine::traces::{OtherTraces, Traces};

/// Returns all recorded traces, with the names of their files.
fn recorded() -> Vec<(PathBuf, Traces)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces");
    let mut files: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        let traces =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (path, traces)
    };
    files.into_iter().map(read).collect()
}

#[test]
fn what_was_decided_is_decided_again() {
    for (path, traces) in recorded() {
        if std::env::var_os("BLESS").is_some() {
            let text = serde_json::to_string_pretty(&traces.replay()).unwrap();
            std::fs::write(&path, text + "\n").unwrap();
            continue;
        }
        for replayed in traces.compare() {
            let differences: Vec<_> = replayed.differences.iter().map(ToString::to_string).collect();
            assert!(
                differences.is_empty(),
                "{}, {}: where that is meant to be, BLESS=1 writes it anew\n{}",
                path.display(),
                replayed.policy,
                differences.join("\n")
            );
        }
    }
}

/// Each policy is in one of the traces, and makes a decision there that differs from its first one.
#[test]
fn every_policy_is_recorded() {
    let all: Vec<Traces> = recorded().into_iter().map(|(_, traces)| traces).collect();
    let stops: Vec<_> = all.iter().flat_map(|traces| &traces.stop).collect();
    for policy in ["pattern", "hybrid", "sla", "target", "rounds"] {
        assert!(stops.iter().any(|trace| trace.policy.name() == policy), "{policy}");
    }
    for wanted in [Pattern::Stable, Pattern::Drained, Pattern::Resent] {
        let is_seen = |decision: &Option<Decision>| matches!(decision, Some(Decision::StopAndCopy { pattern: Some(pattern), .. }) if *pattern == wanted);
        assert!(stops.iter().any(|trace| trace.decisions().any(is_seen)), "{wanted}");
    }
    let any = |decides: &dyn Fn(&OtherTraces) -> Option<bool>| {
        all.iter().any(|traces| decides(&traces.others).unwrap_or(false))
    };
    // No policy is left out.
    let OtherTraces {
        disks: _,
        writes: _,
        cpu_throttle: _,
        pressure: _,
        compression: _,
        references: _,
        discards: _,
        push: _,
    } = OtherTraces::default();
    let of_writes =
        |all: &OtherTraces| Some(all.writes.as_ref()?.decisions().any(|cap| cap.bytes_per_s.is_some()));
    let of_slowing = |all: &OtherTraces| Some(all.cpu_throttle.as_ref()?.decisions().any(Option::is_some));
    let of_pressure = |all: &OtherTraces| {
        Some(all.pressure.as_ref()?.decisions().any(|restraint| restraint.interval_factor > 1))
    };
    let of_compression =
        |all: &OtherTraces| Some(all.compression.as_ref()?.decisions().any(|decision| decision.is_informed));
    let of_push =
        |all: &OtherTraces| Some(all.push.as_ref()?.decisions().any(|part| part.pace_bytes_per_s.is_some()));
    let of_disks = |all: &OtherTraces| Some(!all.disks.as_ref()?.entries.is_empty());
    let of_references = |all: &OtherTraces| Some(!all.references.as_ref()?.entries.is_empty());
    let of_naming = |all: &OtherTraces| {
        let discards: Vec<_> = all.discards.as_ref()?.decisions().collect();
        Some(discards.contains(&&DiscardDecision::Discard) && discards.contains(&&DiscardDecision::Stop))
    };
    assert!(any(&of_writes), "writes");
    assert!(any(&of_slowing), "cpu_throttle");
    assert!(any(&of_pressure), "pressure");
    assert!(any(&of_compression), "compression");
    assert!(any(&of_push), "push");
    assert!(any(&of_disks), "disks");
    assert!(any(&of_naming), "discards");
    assert!(any(&of_references), "references");
}
