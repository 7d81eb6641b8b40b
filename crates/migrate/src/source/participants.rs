//! Parts of a VM that migrate with it, at the source: memory, disks, redirected connections, network cards, names.
//!
//! The driver knows no part in particular: it calls all of them at the same points of a migration, in the order of the
//! list. A new one is added to [`of_a_vm`], and needs no other change, unless both hosts have to agree on it, or it
//! needs a message or a connection of its own: those are of the protocol.
//!
//! ```text
//! report         what was agreed on, for the report
//! check          what was agreed on is possible; nothing has changed on this host yet
//! prepare        from its end on, the guest's writes are recorded
//! before_round   a round of pages is about to be sent; after_round: it was sent
//! scan           which pages were written since the last scan; after_scan: there is time again
//! before_stop    the guest is about to be stopped
//! freeze         the guest has stopped: the last pages that QEMU has to report
//! ready          the destination has everything, and is about to receive FROZEN
//! commit         COMMITTED is in the journal: the destination may run the guest
//! undo           the guest continues here; all that was changed on this host is changed back
//! running        the guest runs at the destination; its QEMU here may still have pages to send
//! finish         its QEMU here has ended
//! learn          a message of the destination's participants has arrived
//! ```
//!
//! Every step can be undone: a participant that cannot undo one of its steps before `commit` names it in its
//! [`Profile`], and is refused. Even `commit` may be followed by `undo`: the destination may refuse the guest, or
//! return it. It may be called again, after the source has tried to reclaim the guest, and it may be left out: QEMU may
//! be lost before COMMITTED is in the journal, and an agent that was restarted after it does not repeat the call.
//! Participants undo in the reverse order of the list: what holds the guest's frames, which runs again, goes first.

mod disks;
mod dns_records;
mod log;
mod memory;
mod network;
mod redirection;
#[cfg(test)]
pub(super) mod tests;

use std::ops::Range;
use std::sync::Arc;

use ::memory::{BlockReader, DirtyLog, OwedPages, PageSet, Reductions, RoundStats, ScanError, ScanStats};
use engine::handover::MigrationTerms;
use engine::handover::source::SourceEvent;
use proto::limits::PAGE_BYTES;
use proto::message::Message;
use qemu::qmp::Qmp;

use self::log::{Log, no_room};
use super::MigrationControls;
use super::agreement::Agreed;
use super::failure::Failure;
use super::payload::Payload;
use super::telemetry::ShownBlock;
use api::report::Report;
use host::verification::BlockHashes;
use host::{Context, SourceVm};

/// Part of a VM that migrates with it.
pub(super) trait Participant: Send {
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
pub(super) struct Profile {
    /// Name, in the names of fault points and in messages.
    pub(super) name: &'static str,
    /// True if its pages may arrive after the guest runs at the destination. Such participants precede the others.
    pub(super) can_post_copy: bool,
    /// True if its pages are sent alone until few remain, before the others are prepared.
    pub(super) is_sent_first: bool,
    /// Step before COMMITTED that cannot be undone, if there is one.
    pub(super) irreversible: Option<&'static str>,
}

/// A block of pages to send.
pub(super) struct Block {
    pub(super) reader: Box<dyn BlockReader>,
    /// Pages of the first pass.
    pub(super) first: PageSet,
}

/// Result of a step of the preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrepareProgress {
    /// More steps remain.
    Unfinished,
    /// The participant is prepared.
    Done,
}

/// Kind of the guest's stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// Both sides are compared after the last round.
    Compared,
    /// They are not compared.
    NotCompared,
}

/// Result of undoing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UndoResult {
    /// Nothing remains.
    Done,
    /// It has to be tried again; the text is for users, in case that it never succeeds.
    Retry(&'static str),
}

/// Environment of the participants.
#[derive(Clone)]
pub(super) struct Environment {
    pub(super) context: Arc<Context>,
    pub(super) terms: MigrationTerms,
    pub(super) controls: Arc<MigrationControls>,
    /// True if an agent before this one began the migration.
    pub(super) is_resumed: bool,
}

/// Returns the participants of a VM's migration, in the order of their blocks.
pub(super) fn of_a_vm(environment: &Environment) -> Participants {
    Participants::new(
        environment.context.faults.clone(),
        vec![
            Box::new(memory::Memory::new(environment)),
            Box::new(disks::Disks::new(environment)),
            Box::new(redirection::LeavingRedirection::new(environment)),
            Box::new(network::Network::new(environment)),
            Box::new(dns_records::DnsRecords::new(environment)),
        ],
    )
}

/// Participants of a migration, with the numbers of their blocks.
pub(super) struct Participants {
    members: Vec<Member>,
    faults: host::fault::Faults,
}

struct Member {
    participant: Box<dyn Participant>,
    profile: Profile,
    /// Numbers of its blocks, once they are known.
    blocks: Range<usize>,
    /// Pages of its first pass, for each of its blocks.
    first: Vec<PageSet>,
    is_prepared: bool,
}

impl Participants {
    /// Creates the list.
    pub(super) fn new(faults: host::fault::Faults, participants: Vec<Box<dyn Participant>>) -> Self {
        let member = |participant: Box<dyn Participant>| Member {
            profile: participant.profile(),
            participant,
            blocks: 0..0,
            first: Vec::new(),
            is_prepared: false,
        };
        Self { members: participants.into_iter().map(member).collect(), faults }
    }

    /// Adds a participant behind the others.
    #[cfg(test)]
    pub(super) fn add(&mut self, participant: Box<dyn Participant>) {
        self.members.extend(Self::new(self.faults.clone(), vec![participant]).members);
    }

    /// Adds to the report what both hosts have agreed on.
    pub(super) fn report(&self, agreed: &Agreed<'_>, report: &mut Report) {
        self.members.iter().for_each(|member| member.participant.report(agreed, report));
    }

    /// Refuses what cannot be migrated, before anything changes on this host.
    pub(super) fn check(&mut self, agreed: &Agreed<'_>) -> Result<(), Failure> {
        for Member { participant, profile, .. } in &mut self.members {
            if let Some(step) = profile.irreversible {
                let reason = format!("{} cannot undo its step {step}; please report this", profile.name);
                return Err(Failure::new(SourceEvent::Failed, reason));
            }
            participant.check(agreed)?;
        }
        self.reach("check");
        Ok(())
    }

    /// Prepares the participants that are sent first, and opens the blocks of all.
    pub(super) fn open(&mut self, vm: &mut SourceVm) -> Result<Payload, Failure> {
        for member in self.members.iter_mut().filter(|member| member.profile.is_sent_first) {
            while member.participant.prepare(vm, &Reductions::default())? == PrepareProgress::Unfinished {}
            member.is_prepared = true;
        }
        self.reach("prepare-first");
        let (mut readers, mut post_copied) = (Vec::new(), 0);
        for member in &mut self.members {
            let blocks = member.participant.blocks(vm)?;
            member.blocks = readers.len()..readers.len() + blocks.len();
            if member.profile.can_post_copy {
                debug_assert_eq!(
                    post_copied,
                    readers.len(),
                    "participants with post-copy precede the others"
                );
                post_copied = member.blocks.end;
            }
            for Block { reader, first } in blocks {
                readers.push(reader);
                member.first.push(first);
            }
        }
        Ok(Payload::new(readers, post_copied))
    }

    /// Performs the next step of the preparation of those that are not prepared, and adds the pages of each that
    /// becomes prepared to `owed`.
    pub(super) fn prepare(
        &mut self,
        vm: &mut SourceVm,
        reductions: &Reductions,
        owed: &mut OwedPages,
    ) -> Result<PrepareProgress, Failure> {
        let Some(member) = self.members.iter_mut().find(|member| !member.is_prepared) else {
            self.reach("prepare");
            return Ok(PrepareProgress::Done);
        };
        if member.participant.prepare(vm, reductions)? == PrepareProgress::Done {
            member.is_prepared = true;
            owed.add_pages(member.blocks.start, &member.first);
        }
        Ok(PrepareProgress::Unfinished)
    }

    /// Returns true if a participant is sent first, alone, before all are prepared.
    pub(super) fn is_any_sent_first(&self) -> bool {
        self.members.iter().any(|member| member.is_prepared && !member.first.is_empty())
    }

    /// Returns the pages of the first pass of the participants that are prepared, and none of the others.
    pub(super) fn first_pages(&self) -> OwedPages {
        let pages = |member: &Member| -> Vec<PageSet> {
            if member.is_prepared {
                member.first.clone()
            } else {
                member.first.iter().map(PageSet::emptied).collect()
            }
        };
        OwedPages::of(self.members.iter().flat_map(pages).collect())
    }

    /// Returns the pages of the first pass of the participants that are sent first, for each of their blocks.
    pub(super) fn pages_sent_first(&self) -> Vec<PageSet> {
        let early = self.members.iter().filter(|member| member.profile.is_sent_first);
        early.flat_map(|member| member.first.iter().cloned()).collect()
    }

    /// Returns the bytes of the first pass of the participants that are not prepared yet.
    pub(super) fn waiting_bytes(&self) -> u64 {
        let waiting = self.members.iter().filter(|member| !member.is_prepared);
        waiting.flat_map(|member| &member.first).map(|pages| pages.pages() * PAGE_BYTES).sum()
    }

    /// Returns the blocks that users see in the progress, in the order of the list.
    pub(super) fn progress(&self) -> Vec<ShownBlock> {
        let shown = |member: &Member| {
            let mut shown = member.participant.progress();
            for block in &mut shown {
                block.number += member.blocks.start;
            }
            shown
        };
        self.members.iter().flat_map(shown).collect()
    }

    /// Acts before a round of up to `pages` pages; returns the number of pages after which it has to be called again.
    pub(super) fn before_round(&mut self, vm: &mut SourceVm, pages: u64) -> Result<u64, Failure> {
        let mut most = u64::MAX;
        for member in &mut self.members {
            most = most.min(member.participant.before_round(vm, pages)?);
        }
        Ok(most)
    }

    /// Passes on the statistics of a round that was sent; there are none if it was cut off.
    pub(super) fn after_round(&mut self, stats: Option<&RoundStats>) {
        let Some(stats) = stats else { return };
        self.members.iter_mut().for_each(|member| member.participant.after_round(stats));
    }

    /// Returns the dirty log of all participants that are prepared. Without `qmp`, of those that need no request to
    /// QEMU.
    pub(super) fn log<'a>(&'a mut self, qmp: Option<&'a mut Qmp>) -> impl DirtyLog + 'a {
        Log { members: &mut self.members, qmp }
    }

    /// Tidies up after a scan, when there is time.
    pub(super) fn after_scan(&mut self, qmp: &mut Qmp) -> Result<(), Failure> {
        self.prepared().try_for_each(|member| member.participant.after_scan(qmp))
    }

    /// Acts right before the guest is stopped.
    pub(super) fn before_stop(&mut self, vm: &mut SourceVm) -> Result<(), Failure> {
        self.members.iter_mut().try_for_each(|member| member.participant.before_stop(vm))?;
        self.reach("before-stop");
        Ok(())
    }

    /// Returns the messages for the destination's participants.
    pub(super) fn messages(&mut self) -> Vec<Message> {
        self.members.iter_mut().filter_map(|member| member.participant.message()).collect()
    }

    /// Acts once the guest has stopped; adds the last pages that QEMU has to report to `owed`.
    pub(super) fn freeze(
        &mut self,
        vm: &mut SourceVm,
        stop: Comparison,
        owed: &mut OwedPages,
    ) -> Result<(), Failure> {
        for member in &mut self.members {
            let blocks = owed.blocks_mut(member.blocks.clone()).ok_or_else(|| {
                Failure::local("cannot find the dirty pages", &no_room(member.profile.name))
            })?;
            member.participant.freeze(vm, stop, blocks)?;
        }
        self.reach("freeze");
        Ok(())
    }

    /// Returns the hashes of all blocks of a stopped guest.
    pub(super) fn hashes(&mut self, vm: &mut SourceVm, left_out: &[PageSet]) -> Result<BlockHashes, Failure> {
        let mut hashes = BlockHashes::default();
        for member in &mut self.members {
            member.participant.hash(vm, member.blocks.start, left_out, &mut hashes)?;
        }
        Ok(hashes)
    }

    /// Acts while the destination loads the devices.
    pub(super) fn ready(&mut self, vm: &mut SourceVm) -> Result<(), Failure> {
        self.members.iter_mut().try_for_each(|member| member.participant.ready(vm))?;
        self.reach("ready");
        Ok(())
    }

    /// Acts once COMMITTED is in the journal.
    pub(super) fn commit(&mut self) {
        self.members.iter_mut().for_each(|member| member.participant.commit());
        self.reach("commit");
    }

    /// Undoes all that was changed on this host, in the reverse order. All participants undo, whatever one of them
    /// returns. Returns what remains, for users; it has to be undone again.
    pub(super) fn undo(&mut self, mut vm: Option<&mut SourceVm>) -> Vec<&'static str> {
        let mut remaining = Vec::new();
        for member in self.members.iter_mut().rev() {
            member.is_prepared = false;
            if let UndoResult::Retry(text) = member.participant.undo(vm.as_deref_mut()) {
                remaining.push(text);
            }
        }
        self.reach("undo");
        remaining
    }

    /// Acts once the guest runs at the destination.
    pub(super) fn running(&mut self) {
        self.members.iter_mut().for_each(|member| member.participant.running());
        self.reach("running");
    }

    /// Acts after the end of QEMU.
    pub(super) fn finish(&mut self) {
        self.members.iter_mut().for_each(|member| member.participant.finish());
        self.reach("finish");
    }

    /// Returns true if the destination has not sent all messages that it is to send once the guest runs there.
    pub(super) fn expects_message(&self) -> bool {
        self.members.iter().any(|member| member.participant.expects_message())
    }

    /// Passes on a message of the destination's participants.
    pub(super) fn learn(&mut self, message: &Message) {
        self.members.iter_mut().for_each(|member| member.participant.learn(message));
    }

    fn prepared(&mut self) -> impl Iterator<Item = &mut Member> {
        self.members.iter_mut().filter(|member| member.is_prepared)
    }

    /// Reaches the fault points of a step that all participants have done.
    fn reach(&self, step: &str) {
        for Member { profile, .. } in &self.members {
            self.faults.reach(|| format!("source/{}/{step}", profile.name));
        }
    }
}
