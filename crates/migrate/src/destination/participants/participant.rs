//! A participant at the destination: its steps, their results, and its environment.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::memory::{BlockWriter, ReceiverHandle};
use proto::MigrationId;
use proto::message::{Message, Proposal};
use qemu::qmp::QmpError;

use crate::destination::inbox::DestinationMailbox;
use host::disks::{KnownFile, PlannedDisk};
use host::redirections::AgreedRedirections;
use host::verification::CompareError;
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm, Context};

/// Part of a VM that arrives.
pub(in crate::destination) trait ArrivingParticipant: Send {
    /// Returns the facts about this participant that never change.
    fn profile(&self) -> ArrivingProfile;

    /// Learns what was proposed and planned, and refuses what is impossible.
    fn check(&mut self, proposal: &Proposal, plan: &ArrivalPlan) -> Result<(), ArrivalError>;

    /// Makes what QEMU opens when it is started, and adds it to `artifacts`, by which it is found again.
    fn prepare(&mut self, artifacts: &mut ArrivalArtifacts) -> Result<(), ArrivalError>;

    /// Opens the blocks for writing, once, in the order in which the source sends them.
    fn open(&mut self, vm: &mut ArrivingVm) -> Result<OpenBlocks, ArrivalError>;

    /// Learns from a message of the source's participants, which arrives before the device state.
    fn learn(&mut self, message: &Message);

    /// Returns the chunks of its block `block` that differ from the source's hashes. Everything is read anew, by a path
    /// that shares nothing with the one that wrote it.
    fn compare(
        &mut self,
        vm: &mut ArrivingVm,
        block: usize,
        first_chunk: u64,
        theirs: &[String],
    ) -> Result<Vec<u64>, Incomparable>;

    /// Acts once all of its pages have arrived that precede the guest, while QEMU loads the devices.
    fn freeze(&mut self) -> Result<(), ArrivalError>;

    /// Acts once the devices are loaded, and refuses what would fail when the guest is to run.
    fn ready(&mut self, vm: &mut ArrivingVm) -> Result<(), ArrivalError>;

    /// Acts right before the guest is to run, whose devices are loaded. Is called again if `cont` is repeated.
    fn before_cont(&mut self);

    /// Acts once the guest runs here, or is its user's to resume. `runs_for` is the time for which it has run; none if
    /// it stays paused.
    fn commit(&mut self, vm: &mut ArrivingVm, runs_for: Option<Duration>);

    /// Ends all work of this agent on a copy that is about to be discarded; its QEMU may live. Removes what that QEMU has
    /// no part in, like conntrack entries and redirections.
    fn abandon(&mut self);

    /// Removes all that was made on this host and is still there, by this agent or by one before it, after the end of the
    /// copy's QEMU.
    /// Returns what could not be removed. Is called again if it has to be.
    fn undo(&mut self, artifacts: &ArrivalArtifacts, execution: GuestRan) -> Option<Leftover>;

    /// Returns the places on this host where users find it; empty if it has gone with its QEMU.
    fn places(&self) -> Vec<PathBuf>;

    /// Returns the message for the source once the guest runs here and all of its pages are present, if there is one.
    fn last_message(&mut self) -> Option<LastMessage>;

    /// Acts once the guest runs here and all of its pages are present.
    fn finish(&mut self, vm: Option<&ArrivingVm>);
}

/// Function that waits until a message is complete, and returns it. Runs on a thread of its own.
pub(in crate::destination) type LastMessage = Box<dyn FnOnce() -> Message + Send>;

/// Unchanging facts about an arriving participant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::destination) struct ArrivingProfile {
    /// Name, in the names of fault points and in messages.
    pub(in crate::destination) name: &'static str,
    /// True if its pages may arrive after the guest runs here. Such participants precede the others.
    pub(in crate::destination) can_post_copy: bool,
    /// Step before `commit` that cannot be undone, if there is one.
    pub(in crate::destination) irreversible: Option<&'static str>,
}

/// Results of the pre-flight check that the participants need.
#[derive(Debug, Default)]
pub struct ArrivalPlan {
    /// Disks that are copied, with the places of their images.
    pub copied: Vec<PlannedDisk>,
    /// Images that both hosts have, as they are now, and that QEMU opens once more before the guest runs.
    pub shared_files: Vec<KnownFile>,
    /// Redirections of the VM's connections; they are there when QEMU has been started.
    pub redirection: AgreedRedirections,
}

/// Blocks of a participant, open for writing.
pub(in crate::destination) struct OpenBlocks {
    pub(in crate::destination) writers: Vec<Box<dyn BlockWriter>>,
    pub(in crate::destination) after_round: RoundObserver,
}

/// Action after each round, before its acknowledgement. Runs on the thread of a stream: until it returns, the source
/// sends nothing.
pub(in crate::destination) type RoundObserver = Box<dyn Fn(&ReceivedRound, &ReceiverHandle) + Send + Sync>;

/// A round that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::destination) struct ReceivedRound {
    /// Number of the round among those that contained memory; 0 before the first of them.
    pub(in crate::destination) ram_round: u32,
    /// Time since the first frame of the round.
    pub(in crate::destination) took: Duration,
}

/// Execution of the guest on this host, before its copy is discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::destination) enum GuestRan {
    /// The guest has never run here.
    Never,
    /// The guest has run here, or may have run.
    Possibly,
}

/// Something that could not be removed from this host.
pub(in crate::destination) struct Leftover {
    /// Message for users, in case that it stays.
    pub(in crate::destination) notice: String,
    /// Tries again to remove it; returns true if it is gone.
    pub(in crate::destination) remove: Box<dyn Fn() -> bool + Send>,
}

/// Reason for which a part of the VM could not be compared.
#[derive(Debug, thiserror::Error)]
pub(in crate::destination) enum Incomparable {
    /// QEMU was to be asked for the location of a block.
    #[error("QEMU does not answer")]
    Qemu(#[from] QmpError),
    /// The block cannot be read, or does not exist here.
    #[error("the two sides cannot be compared")]
    Compare(#[from] CompareError),
}

/// Environment of the arriving participants.
#[derive(Clone)]
pub(in crate::destination) struct ArrivalEnvironment {
    pub(in crate::destination) context: Arc<Context>,
    pub(in crate::destination) migration: MigrationId,
    /// Sends notices to the driver, from threads of the participants.
    pub(in crate::destination) mailbox: DestinationMailbox,
}
