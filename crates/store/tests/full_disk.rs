//! A journal on a disk that is full to the last block. Needs root.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use engine::handover::MigrationTerms;
use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use proto::{Epoch, Generation, HostId, Incarnation, MigrationId, VmName};
use serde_json::{Value, json};
use store::journal::{Durability, Journal, JournalError, NewMigration, State};
use whimbrel_store as store;

/// A small file system in memory.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Self {
        let small = Self(tempfile::tempdir().unwrap());
        let words = ["-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs"];
        assert!(Command::new("mount").args(words).arg(small.0.path()).status().unwrap().success());
        small
    }

    fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }

    /// Fills the file system, so that no more bytes can be written.
    fn fill(&self) {
        let mut file = File::create(self.filler()).unwrap();
        for bytes in [4096, 1] {
            while file.write_all(&[1; 4096][..bytes]).is_ok() {}
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("--lazy").arg(self.0.path()).status());
    }
}

fn id(vm: &str) -> MigrationId {
    MigrationId { vm: VmName::new(vm).unwrap(), epoch: Epoch(1) }
}

fn begin(journal: &Journal, id: &MigrationId, state: State) -> Result<(), JournalError> {
    let description = json!({ "large": "x".repeat(50_000) });
    let proposal = json!({
        "reply_to": "192.0.2.1:7740", "streams": 2, "ram": [], "facts": {}, "description": description,
        "check_only": false,
    });
    let (source, destination) = (HostId::new("alpha").unwrap(), HostId::new("beta").unwrap());
    journal.begin(&NewMigration {
        terms: &MigrationTerms { migration: id.clone(), source, destination, registry: None, witness: None },
        state,
        proposal: &serde_json::from_value(proposal).unwrap(),
    })
}

#[test]
fn what_is_open_can_end_on_a_full_disk_and_nothing_new_begins() {
    let small = Small::mount();
    let leaving: Vec<_> = (0..6).map(|number| id(&format!("leaving{number}"))).collect();
    let arriving = id("arriving");
    // After COMMITTED, or READY, the guest is stopped: later entries must not fail for lack of space.
    let (committed, ready) = (id("committed"), id("ready"));
    let incarnation =
        || Incarnation { boot_id: "b".to_owned(), pid: 7, start_time_ticks: 9, generation: Generation(1) };
    let aborted = State::Source(SourceState::Aborted);
    {
        let journal = Journal::open(small.0.path(), Value::clone).unwrap();
        for id in &leaving {
            begin(&journal, id, State::Source(SourceState::Prepared { run: true })).unwrap();
        }
        begin(&journal, &arriving, State::Destination(DestinationState::Prepared)).unwrap();
        begin(&journal, &committed, State::Source(SourceState::Prepared { run: true })).unwrap();
        begin(&journal, &ready, State::Destination(DestinationState::Prepared)).unwrap();
        let state = SourceState::Committed { incarnation: incarnation(), run: true, has_run: false };
        journal.record_source(&committed, &state, Durability::Process).unwrap();
        let state = DestinationState::Ready { incarnation: incarnation(), run: true };
        journal.record_destination(&ready, &state, Durability::Process).unwrap();
        small.fill();
        let full = begin(&journal, &id("late"), State::Source(SourceState::Prepared { run: true }));
        assert!(matches!(full, Err(JournalError::Full { .. })), "{full:?}");
        // A migration that goes on may use the space beside the reserve, however often it is tried, but not the
        // reserve.
        for _ in 0..500 {
            let stopped =
                journal.record_source(&leaving[0], &SourceState::Stopped { run: true }, Durability::Process);
            assert!(matches!(stopped, Ok(()) | Err(JournalError::Full { .. })), "{stopped:?}");
        }
        for id in &leaving {
            journal.record_source(id, &SourceState::Aborting, Durability::Synced).unwrap();
            journal.record_source(id, &SourceState::Aborted, Durability::Synced).unwrap();
            journal.close(id).unwrap();
        }
        journal.record_destination(&arriving, &DestinationState::CopyDestroyed, Durability::Process).unwrap();
        let run = true;
        let reclaiming = SourceState::Reclaiming { incarnation: Some(incarnation()), run, force: false };
        for state in [reclaiming, SourceState::Returning, SourceState::Returned] {
            journal.record_source(&committed, &state, Durability::Synced).unwrap();
        }
        let acquiring = DestinationState::Acquiring { incarnation: incarnation(), run };
        let starting = DestinationState::Starting { incarnation: incarnation(), again: false };
        for state in [acquiring, starting, DestinationState::Active { incarnation: incarnation() }] {
            journal.record_destination(&ready, &state, Durability::Process).unwrap();
        }
    }
    fs::remove_file(small.filler()).unwrap();
    let journal = Journal::open(small.0.path(), Value::clone).unwrap();
    for id in &leaving {
        let record = journal.migration(id).unwrap().unwrap();
        assert_eq!((record.state, record.open), (aborted.clone(), false));
    }
    let record = journal.migration(&arriving).unwrap().unwrap();
    assert_eq!(record.state, State::Destination(DestinationState::CopyDestroyed));
    begin(&journal, &id("late"), State::Source(SourceState::Prepared { run: true })).unwrap();
}
