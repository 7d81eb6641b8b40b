//! Memory as an arriving participant: QEMU makes it when it is started, and it is gone with QEMU.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::memory::{ReceiverHandle, ZeroedRange};
use proto::message::{Message, Proposal};
use tracee::{AddressRange, Injector, Process};
use tracing::{info, warn};

use super::participant::{
    ArrivalEnvironment, ArrivalPlan, ArrivingParticipant, ArrivingProfile, GuestRan, Incomparable,
    LastMessage, Leftover, OpenBlocks, ReceivedRound,
};
use host::verification::{self, CompareError};
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm};

/// Memory of a VM that arrives.
pub(super) struct ArrivingMemory {
    injector: Arc<Injector>,
}

impl ArrivingMemory {
    pub(super) fn new(environment: &ArrivalEnvironment) -> Self {
        Self { injector: Arc::clone(&environment.context.injector) }
    }
}

impl ArrivingParticipant for ArrivingMemory {
    fn profile(&self) -> ArrivingProfile {
        ArrivingProfile { name: "memory", can_post_copy: true, irreversible: None }
    }

    fn check(&mut self, _: &Proposal, _: &ArrivalPlan) -> Result<(), ArrivalError> {
        Ok(())
    }

    fn prepare(&mut self, _: &mut ArrivalArtifacts) -> Result<(), ArrivalError> {
        Ok(())
    }

    fn open(&mut self, vm: &mut ArrivingVm) -> Result<OpenBlocks, ArrivalError> {
        let writers = host::ram::destination(&vm.process, &vm.blocks)?;
        let releaser = MemoryReleaser::new(Arc::clone(&self.injector), vm)?;
        let after_round =
            move |round: &ReceivedRound, handle: &ReceiverHandle| releaser.release_memory(round, handle);
        Ok(OpenBlocks { writers, after_round: Box::new(after_round) })
    }

    fn learn(&mut self, _: &Message) {}

    fn compare(
        &mut self,
        vm: &mut ArrivingVm,
        block: usize,
        first_chunk: u64,
        theirs: &[String],
    ) -> Result<Vec<u64>, Incomparable> {
        let name = vm.blocks.get(block).map(|block| block.name.clone());
        let name = name.ok_or_else(|| CompareError::NotThere(format!("RAM block {block}")))?;
        let pid = vm.process.pid();
        Ok(verification::differences(vm.qmp()?, pid, &name, first_chunk, theirs)?)
    }

    fn freeze(&mut self) -> Result<(), ArrivalError> {
        Ok(())
    }

    fn ready(&mut self, _: &mut ArrivingVm) -> Result<(), ArrivalError> {
        Ok(())
    }

    fn before_cont(&mut self) {}

    fn commit(&mut self, _: &mut ArrivingVm, _: Option<Duration>) {}

    fn abandon(&mut self) {}

    fn undo(&mut self, _: &ArrivalArtifacts, _: GuestRan) -> Option<Leftover> {
        None
    }

    fn places(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn last_message(&mut self) -> Option<LastMessage> {
        None
    }

    fn finish(&mut self, vm: Option<&ArrivingVm>) {
        if let Some(vm) = vm {
            vm.remove_missing_pages_record();
        }
    }
}

/// Frees memory that was zeroed. Only QEMU itself can free anonymous memory, by an injected system call. It does so
/// after long rounds only: in a last round the guest would wait for it.
struct MemoryReleaser {
    process: Process,
    injector: Arc<Injector>,
    addresses: Vec<u64>,
}

/// Shortest round after which memory is freed. To free memory needs some milliseconds, which is negligible beside such
/// a round, even if the guest is stopped during it.
const LONG_ROUND: Duration = Duration::from_millis(250);

impl MemoryReleaser {
    fn new(injector: Arc<Injector>, vm: &ArrivingVm) -> Result<Self, ArrivalError> {
        Ok(Self {
            process: vm.process.try_clone()?,
            injector,
            addresses: vm.blocks.iter().map(|block| block.host_address).collect(),
        })
    }

    fn release_memory(
        &self,
        &ReceivedRound { ram_round: round, took }: &ReceivedRound,
        handle: &ReceiverHandle,
    ) {
        // It is not known here whether a round is the last; the first two are not. Before them there is no memory.
        if round == 0 || (round > 2 && took < LONG_ROUND) {
            return;
        }
        handle.discard_with(|discardable| {
            let ranges: Vec<_> = discardable.iter().filter_map(|part| self.address(part)).collect();
            if ranges.is_empty() {
                return;
            }
            match self.injector.discard(&self.process, &ranges) {
                Ok(()) => info!(round, ranges = ranges.len(), "released memory that the guest does not use"),
                // The memory reads as zeros in any case.
                Err(error) => warn!(round, error = crate::chain(&error), "zeroed memory stays allocated"),
            }
        });
    }

    fn address(&self, part: &ZeroedRange) -> Option<AddressRange> {
        let base = self.addresses.get(usize::from(part.block))?;
        Some(AddressRange::new(base + part.bytes.start, base + part.bytes.end))
    }
}
