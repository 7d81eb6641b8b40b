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
mod participant;
mod redirection;
#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::ops::Range;

use ::memory::{DirtyLog, OwedPages, PageSet, Reductions, RoundStats};
use engine::handover::source::SourceEvent;
use proto::limits::PAGE_BYTES;
use proto::message::Message;
use qemu::qmp::Qmp;

use self::log::{Log, no_room};
pub(super) use self::participant::{
    Block, Comparison, Environment, Participant, PrepareProgress, Profile, UndoResult,
};
use super::agreement::Agreed;
use super::failure::Failure;
use super::payload::Payload;
use super::telemetry::ShownBlock;
use api::report::Report;
use host::SourceVm;
use host::fault::Faults;
use host::verification::BlockHashes;

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
    faults: Faults,
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
    pub(super) fn new(faults: Faults, participants: Vec<Box<dyn Participant>>) -> Self {
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
        self.try_in_turn("check", |Member { participant, profile, .. }| {
            if let Some(step) = profile.irreversible {
                let reason = format!("{} cannot undo its step {step}; please report this", profile.name);
                return Err(Failure::new(SourceEvent::Failed, reason));
            }
            participant.check(agreed)
        })
    }

    /// Prepares the participants that are sent first, and opens the blocks of all.
    pub(super) fn open(&mut self, vm: &mut SourceVm) -> Result<Payload, Failure> {
        self.try_in_turn("prepare-first", |member| {
            if member.profile.is_sent_first {
                while member.participant.prepare(vm, &Reductions::default())? == PrepareProgress::Unfinished {
                }
                member.is_prepared = true;
            }
            Ok(())
        })?;
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
            let sent_first = self.members.iter().filter(|member| member.profile.is_sent_first);
            sent_first.for_each(|member| member.reach(&self.faults, "prepare"));
            return Ok(PrepareProgress::Done);
        };
        if member.participant.prepare(vm, reductions)? == PrepareProgress::Done {
            member.is_prepared = true;
            owed.add_pages(member.blocks.start, &member.first);
            member.reach(&self.faults, "prepare");
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

    /// Returns the numbers of pages owed, by the names of the participants to which they belong; none where it is 0.
    pub(super) fn pages_by_name(&self, owed: &OwedPages) -> BTreeMap<String, u64> {
        let of = |member: &Member| {
            let blocks = owed.blocks().get(member.blocks.clone())?;
            let pages: u64 = blocks.iter().map(PageSet::count).sum();
            (pages > 0).then(|| (member.profile.name.to_owned(), pages))
        };
        self.members.iter().filter_map(of).collect()
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
        self.try_in_turn("before-stop", |member| member.participant.before_stop(vm))
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
        self.try_in_turn("freeze", |member| {
            let blocks = owed.blocks_mut(member.blocks.clone()).ok_or_else(|| {
                Failure::local("cannot find the dirty pages", &no_room(member.profile.name))
            })?;
            member.participant.freeze(vm, stop, blocks)
        })
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
        self.try_in_turn("ready", |member| member.participant.ready(vm))
    }

    /// Acts once COMMITTED is in the journal.
    pub(super) fn commit(&mut self) {
        self.in_turn("commit", |participant| participant.commit());
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
            member.reach(&self.faults, "undo");
        }
        remaining
    }

    /// Acts once the guest runs at the destination.
    pub(super) fn running(&mut self) {
        self.in_turn("running", |participant| participant.running());
    }

    /// Acts after the end of QEMU.
    pub(super) fn finish(&mut self) {
        self.in_turn("finish", |participant| participant.finish());
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

    /// Lets each participant act, up to the first that fails. A host may fail between any two of them: the fault point of
    /// each is reached when it has acted, and before the next one does.
    fn try_in_turn(
        &mut self,
        step: &str,
        mut act: impl FnMut(&mut Member) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for member in &mut self.members {
            act(member)?;
            member.reach(&self.faults, step);
        }
        Ok(())
    }

    /// Lets each participant do a step that cannot fail, with the same fault points.
    fn in_turn(&mut self, step: &str, mut act: impl FnMut(&mut dyn Participant)) {
        for member in &mut self.members {
            act(member.participant.as_mut());
            member.reach(&self.faults, step);
        }
    }
}

impl Member {
    /// Reaches the fault point of a step that this participant has done.
    fn reach(&self, faults: &Faults, step: &str) {
        faults.reach(|| format!("source/{}/{step}", self.profile.name));
    }
}
