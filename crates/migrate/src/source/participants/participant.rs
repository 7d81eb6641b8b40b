//! A participant at the source: its steps, their results, and its environment.

use std::sync::Arc;

use ::memory::{BlockReader, PageSet, Reductions, RoundStats, ScanError, ScanStats};
use engine::handover::MigrationTerms;
use proto::message::Message;
use qemu::qmp::Qmp;

use crate::source::MigrationControls;
use crate::source::agreement::Agreed;
use crate::source::failure::Failure;
use crate::source::telemetry::ShownBlock;
use api::report::Report;
use host::verification::BlockHashes;
use host::{Context, SourceVm};

/// Part of a VM that migrates with it.
pub(in crate::source) trait Participant: Send {
    /// Returns the facts about this participant that never change.
    fn profile(&self) -> Profile;

    /// Adds to the report what both hosts have agreed on. The report is in the journal before anything is sent.
    fn report(&self, agreed: &Agreed<'_>, report: &mut Report);

    /// Learns what both hosts have agreed on, and refuses what is impossible.
    fn check(&mut self, agreed: &Agreed<'_>) -> Result<(), Failure>;

    /// Performs the next step of the preparation, which is short.
    fn prepare(&mut self, vm: &mut SourceVm, reductions: &Reductions) -> Result<PrepareProgress, Failure>;

    /// Returns the blocks of pages to send, once and in a fixed order. Participants that are sent first are prepared by
    /// then.
    fn blocks(&mut self, vm: &SourceVm) -> Result<Vec<Block>, Failure>;

    /// Returns those of its [`blocks`](Self::blocks) that users see in the progress, each by itself; the number of the
    /// first block is 0.
    fn progress(&self) -> Vec<ShownBlock>;

    /// Acts right before a round is sent in which up to `pages` pages are sent. Returns the number of pages after which
    /// it has to be called again.
    fn before_round(&mut self, vm: &mut SourceVm, pages: u64) -> Result<u64, Failure>;

    /// Learns from a round, or from a part of one, that was sent.
    fn after_round(&mut self, stats: &RoundStats);

    /// Adds to `into`, which has a set for each block, the pages that were written since the last scan. `qmp` is absent
    /// while QEMU saves its devices: what needs QEMU was scanned in [`freeze`](Self::freeze).
    fn scan(&mut self, qmp: Option<&mut Qmp>, into: &mut [PageSet]) -> Result<ScanStats, ScanError>;

    /// Tidies up after a scan, when there is time.
    fn after_scan(&mut self, qmp: &mut Qmp) -> Result<(), Failure>;

    /// Acts right before the guest is stopped, and refuses what would fail after it.
    fn before_stop(&mut self, vm: &mut SourceVm) -> Result<(), Failure>;

    /// Returns the message for the destination's participants, right before the guest is stopped, if there is one.
    fn message(&mut self) -> Option<Message>;

    /// Acts once the guest has stopped, before its devices are saved; adds the last pages that QEMU has to report.
    fn freeze(&mut self, vm: &mut SourceVm, stop: Comparison, into: &mut [PageSet]) -> Result<(), Failure>;

    /// Adds the hashes of a stopped guest's blocks, whose first has the number `first_block`. Everything is read anew,
    /// by a path that shares nothing with the one that sent it. `left_out` are pages that are zeros at the destination.
    fn hash(
        &mut self,
        vm: &mut SourceVm,
        first_block: usize,
        left_out: &[PageSet],
        hashes: &mut BlockHashes,
    ) -> Result<(), Failure>;

    /// Acts while the destination loads the devices, before it receives FROZEN.
    fn ready(&mut self, vm: &mut SourceVm) -> Result<(), Failure>;

    /// Acts once COMMITTED is in the journal. May be called again, or never, and [`undo`](Self::undo) may follow.
    fn commit(&mut self);

    /// Undoes all that was changed on this host, by this agent or by one before it; `vm` is absent if its QEMU is gone.
    /// A guest that is to run runs already. Is called again if it has to be.
    fn undo(&mut self, vm: Option<&mut SourceVm>) -> UndoResult;

    /// Acts as soon as it is known that the guest runs at the destination, before the end of QEMU, which may have pages to
    /// send. May be called again, or never.
    fn running(&mut self);

    /// Acts after the end of QEMU, whose guest runs at the destination.
    fn finish(&mut self);

    /// Returns true if the destination's participant is to send a message once the guest runs there, and has not yet.
    fn expects_message(&self) -> bool;

    /// Learns from a message of the destination's participants.
    fn learn(&mut self, message: &Message);
}

/// Unchanging facts about a participant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::source) struct Profile {
    /// Name, in the names of fault points and in messages.
    pub(in crate::source) name: &'static str,
    /// True if its pages may arrive after the guest runs at the destination. Such participants precede the others.
    pub(in crate::source) can_post_copy: bool,
    /// True if its pages are sent alone until few remain, before the others are prepared.
    pub(in crate::source) is_sent_first: bool,
    /// Step before COMMITTED that cannot be undone, if there is one.
    pub(in crate::source) irreversible: Option<&'static str>,
}

/// A block of pages to send.
pub(in crate::source) struct Block {
    pub(in crate::source) reader: Box<dyn BlockReader>,
    /// Pages of the first pass.
    pub(in crate::source) first: PageSet,
}

/// Result of a step of the preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::source) enum PrepareProgress {
    /// More steps remain.
    Unfinished,
    /// The participant is prepared.
    Done,
}

/// Kind of the guest's stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::source) enum Comparison {
    /// Both sides are compared after the last round.
    Compared,
    /// They are not compared.
    NotCompared,
}

/// Result of undoing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::source) enum UndoResult {
    /// Success: everything is undone.
    Done,
    /// It has to be tried again; the text is for users, in case that it never succeeds.
    Retry(&'static str),
}

/// Environment of the participants.
#[derive(Clone)]
pub(in crate::source) struct Environment {
    pub(in crate::source) context: Arc<Context>,
    pub(in crate::source) terms: MigrationTerms,
    pub(in crate::source) controls: Arc<MigrationControls>,
    /// True if an agent before this one began the migration.
    pub(in crate::source) is_resumed: bool,
}
