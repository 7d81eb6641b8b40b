//! Memory as a participant: its writes are tracked by the kernel, and need no request to QEMU.

use ::memory::{BlockReader, DirtyLog, PageSet, Reductions, RoundStats, ScanError, ScanStats, TrackedRam};
use proto::message::Message;
use qemu::qmp::Qmp;
use tracee::{InjectError, TrackerStart};

use super::participant::{Block, Comparison, Environment, Participant, PrepareProgress, Profile, UndoResult};
use crate::source::agreement::Agreed;
use crate::source::failure::Failure;
use crate::source::telemetry::ShownBlock;
use api::report::Report;
use host::ram;
use host::verification::BlockHashes;
use host::{Context, SourceVm};
use std::sync::Arc;

/// Error of tracking the guest's writes.
#[derive(Debug, thiserror::Error)]
enum TrackError {
    /// QEMU could not open a userfaultfd for the agent.
    #[error("QEMU could not be made to open a userfaultfd")]
    Inject(#[from] InjectError),
    /// The kernel does not track writes to the memory.
    #[error("the kernel cannot track writes to it")]
    Track(#[from] ::memory::DirtyLogError),
}

/// Memory of a VM that leaves.
pub(super) struct Memory {
    context: Arc<Context>,
    tracking: Tracking,
}

/// Tracking of the guest's writes. Dropping it ends the tracking.
enum Tracking {
    Off,
    /// It is being set up, in short steps: that needs seconds for a large guest that arrived by a migration.
    Starting(TrackerStart),
    On(TrackedRam),
}

impl Memory {
    pub(super) fn new(environment: &Environment) -> Self {
        Self { context: Arc::clone(&environment.context), tracking: Tracking::Off }
    }

    /// Performs the next step; returns true if more steps remain.
    fn track(&mut self, vm: &SourceVm, reductions: &Reductions) -> Result<bool, TrackError> {
        match std::mem::replace(&mut self.tracking, Tracking::Off) {
            Tracking::Off => {
                let userfaultfd = self.context.injector.create_userfaultfd(&vm.process)?;
                let start = ram::begin_tracking(&vm.process, userfaultfd, &vm.blocks)?;
                self.tracking = Tracking::Starting(start);
                Ok(true)
            }
            Tracking::Starting(mut start) => {
                if start.step().map_err(::memory::DirtyLogError::from)? {
                    self.tracking = Tracking::Starting(start);
                    return Ok(true);
                }
                let mut tracked = ram::tracked(start, &vm.process, &vm.blocks)?;
                tracked.report_to(reductions.clone());
                self.tracking = Tracking::On(tracked);
                Ok(false)
            }
            on @ Tracking::On(_) => {
                self.tracking = on;
                Ok(false)
            }
        }
    }
}

impl Participant for Memory {
    fn profile(&self) -> Profile {
        Profile { name: "memory", can_post_copy: true, is_sent_first: false, irreversible: None }
    }

    fn report(&self, _: &Agreed<'_>, _: &mut Report) {}

    fn check(&mut self, _: &Agreed<'_>) -> Result<(), Failure> {
        Ok(())
    }

    fn prepare(&mut self, vm: &mut SourceVm, reductions: &Reductions) -> Result<PrepareProgress, Failure> {
        match self.track(vm, reductions) {
            Ok(true) => Ok(PrepareProgress::Unfinished),
            Ok(false) => Ok(PrepareProgress::Done),
            Err(error) => Err(Failure::local("cannot track the guest's writes", &error)),
        }
    }

    fn blocks(&mut self, vm: &SourceVm) -> Result<Vec<Block>, Failure> {
        let readers = ram::source(&vm.process, &vm.blocks)
            .map_err(|error| Failure::local("cannot reach the guest's memory", &error))?;
        let block = |reader: Box<dyn BlockReader>| Block { first: PageSet::full(reader.bytes()), reader };
        Ok(readers.into_iter().map(block).collect())
    }

    fn progress(&self) -> Vec<ShownBlock> {
        Vec::new()
    }

    fn before_round(&mut self, _: &mut SourceVm, _: u64) -> Result<u64, Failure> {
        Ok(u64::MAX)
    }

    fn after_round(&mut self, _: &RoundStats) {}

    fn scan(&mut self, _: Option<&mut Qmp>, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        match &mut self.tracking {
            Tracking::On(tracked) => tracked.scan_dirty(into),
            Tracking::Off | Tracking::Starting(_) => Ok(ScanStats::default()),
        }
    }

    fn after_scan(&mut self, _: &mut Qmp) -> Result<(), Failure> {
        Ok(())
    }

    fn before_stop(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        Ok(())
    }

    fn message(&mut self) -> Option<Message> {
        None
    }

    /// Without a comparison, the guest is not kept stopped to find pages that were given back and read again.
    fn freeze(&mut self, _: &mut SourceVm, stop: Comparison, _: &mut [PageSet]) -> Result<(), Failure> {
        if let (Tracking::On(tracked), Comparison::Compared) = (&mut self.tracking, stop) {
            tracked.announce_comparison();
        }
        Ok(())
    }

    fn hash(
        &mut self,
        vm: &mut SourceVm,
        _: usize,
        left_out: &[PageSet],
        hashes: &mut BlockHashes,
    ) -> Result<(), Failure> {
        let found = vm.hashes(left_out);
        hashes.append(found.map_err(|error| Failure::local("cannot read the pages to compare", &error))?);
        Ok(())
    }

    fn ready(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        Ok(())
    }

    fn commit(&mut self) {}

    fn undo(&mut self, _: Option<&mut SourceVm>) -> UndoResult {
        self.tracking = Tracking::Off;
        UndoResult::Done
    }

    fn running(&mut self) {}

    fn finish(&mut self) {}

    fn expects_message(&self) -> bool {
        false
    }

    fn learn(&mut self, _: &Message) {}
}
