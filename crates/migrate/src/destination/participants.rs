//! Parts of a VM that migrate with it, at the destination: memory, disks, redirected connections, network cards.
//!
//! The driver knows no part in particular: it calls all of them at the same points of a migration, in the order of the
//! list. A new one is added to [`of_an_arriving_vm`], and needs no other change, unless both hosts have to agree on it, or it
//! needs a message or a connection of its own: those are of the protocol.
//!
//! ```text
//! check        the plan is possible; nothing has changed on this host yet
//! prepare      QEMU is about to be started: what it opens is made
//! open         QEMU waits for its guest: the writers of the blocks, and what is to be done after each round
//! learn        a message of the source's participants has arrived; the guest is about to be stopped there
//! compare      the guest is stopped at the source: a part of a block against the source's hashes
//! freeze       all pages that precede the guest have arrived; QEMU loads the devices at the same time
//! ready        the devices are loaded: nothing may keep the guest from running here
//! before_cont  the guest is about to run here
//! commit       the guest runs here, or may be resumed by its user: nothing can be undone any more
//! abandon      the copy is about to be discarded: nothing of this agent uses it any more, and what its QEMU has no part in
//!              is removed
//! undo         the copy's QEMU has ended: all that was made on this host and is still there is removed
//! finish       the guest runs here, and all of its pages are present
//! ```
//!
//! Before `commit` every step can be undone: a participant that cannot undo one of its steps says so in its
//! [`ArrivingProfile`], and is refused. If an agent dies right after the guest's start, its successor leaves `commit`
//! out; `finish` it calls in any case.

mod disks;
mod memory;
mod network;
mod redirection;
#[cfg(test)]
pub(super) mod tests;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::memory::{BlockWriter, ReceiverHandle};
use proto::MigrationId;
use proto::message::{Message, Proposal};
use qemu::qmp::QmpError;

use super::inbox::DestinationMailbox;
use host::disks::{KnownFile, PlannedDisk};
use host::fault::Faults;
use host::redirections::AgreedRedirections;
use host::verification::CompareError;
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm, Context};

/// Part of a VM that arrives.
pub(super) trait ArrivingParticipant: Send {
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
pub(super) type LastMessage = Box<dyn FnOnce() -> Message + Send>;

/// Unchanging facts about an arriving participant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArrivingProfile {
    /// Name, in the names of fault points and in messages.
    pub(super) name: &'static str,
    /// True if its pages may arrive after the guest runs here. Such participants precede the others.
    pub(super) can_post_copy: bool,
    /// Step before `commit` that cannot be undone, if there is one.
    pub(super) irreversible: Option<&'static str>,
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
pub(super) struct OpenBlocks {
    pub(super) writers: Vec<Box<dyn BlockWriter>>,
    pub(super) after_round: RoundObserver,
}

/// Action after each round, before its acknowledgement. Runs on the thread of a stream: until it returns, the source
/// sends nothing.
pub(super) type RoundObserver = Box<dyn Fn(&ReceivedRound, &ReceiverHandle) + Send + Sync>;

/// A round that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReceivedRound {
    /// Number of the round among those that contained memory; 0 before the first of them.
    pub(super) ram_round: u32,
    /// Time since the first frame of the round.
    pub(super) took: Duration,
}

/// Execution of the guest on this host, before its copy is discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GuestRan {
    /// The guest has never run here.
    Never,
    /// The guest has run here, or may have run.
    Possibly,
}

/// Something that could not be removed from this host.
pub(super) struct Leftover {
    /// Message for users, in case that it stays.
    pub(super) notice: String,
    /// Tries again to remove it; returns true if it is gone.
    pub(super) remove: Box<dyn Fn() -> bool + Send>,
}

/// Reason for which a part of the VM could not be compared.
#[derive(Debug, thiserror::Error)]
pub(super) enum Incomparable {
    /// QEMU was to be asked for the location of a block.
    #[error("QEMU does not answer")]
    Qemu(#[from] QmpError),
    /// The block cannot be read, or does not exist here.
    #[error("the two sides cannot be compared")]
    Compare(#[from] CompareError),
}

/// Environment of the arriving participants.
#[derive(Clone)]
pub(super) struct ArrivalEnvironment {
    pub(super) context: Arc<Context>,
    pub(super) migration: MigrationId,
    /// Sends notices to the driver, from threads of the participants.
    pub(super) mailbox: DestinationMailbox,
}

/// Returns the participants of an arriving VM's migration, in the order of their blocks.
pub(super) fn of_an_arriving_vm(environment: &ArrivalEnvironment) -> ArrivingParticipants {
    ArrivingParticipants::new(
        environment.context.faults.clone(),
        vec![
            Box::new(memory::ArrivingMemory::new(environment)),
            Box::new(disks::ArrivingDisks::new(environment)),
            // It announces the guest first: frames for a guest that returns would find no way while its redirection ends.
            Box::new(network::ArrivingNetwork::new(environment)),
            Box::new(redirection::ArrivingRedirection::new(environment)),
        ],
    )
}

/// Participants of an arriving VM's migration, with the numbers of their blocks.
pub(super) struct ArrivingParticipants {
    members: Vec<ArrivingMember>,
    faults: Faults,
}

struct ArrivingMember {
    participant: Box<dyn ArrivingParticipant>,
    profile: ArrivingProfile,
    /// Numbers of its blocks, once they are open.
    blocks: Range<usize>,
}

/// Blocks of all participants, open for writing.
pub(super) struct AllBlocks {
    pub(super) writers: Vec<Box<dyn BlockWriter>>,
    /// Number of blocks, the first ones, whose pages may arrive after the guest runs here.
    pub(super) post_copied: usize,
    pub(super) after_round: RoundObserver,
}

impl ArrivingParticipants {
    /// Creates the list.
    pub(super) fn new(faults: Faults, participants: Vec<Box<dyn ArrivingParticipant>>) -> Self {
        let member = |participant: Box<dyn ArrivingParticipant>| ArrivingMember {
            profile: participant.profile(),
            participant,
            blocks: 0..0,
        };
        Self { members: participants.into_iter().map(member).collect(), faults }
    }

    /// Adds a participant behind the others.
    #[cfg(test)]
    pub(super) fn add(&mut self, participant: Box<dyn ArrivingParticipant>) {
        self.members.extend(Self::new(self.faults.clone(), vec![participant]).members);
    }

    /// Refuses what cannot arrive, before anything changes on this host.
    pub(super) fn check(&mut self, proposal: &Proposal, plan: &ArrivalPlan) -> Result<(), ArrivalError> {
        for ArrivingMember { participant, profile, .. } in &mut self.members {
            if let Some(step) = profile.irreversible {
                return Err(ArrivalError::Irreversible { participant: profile.name, step });
            }
            participant.check(proposal, plan)?;
        }
        self.reach("check");
        Ok(())
    }

    /// Makes what QEMU opens when it is started. After an error the caller undoes.
    pub(super) fn prepare(&mut self, artifacts: &mut ArrivalArtifacts) -> Result<(), ArrivalError> {
        self.members.iter_mut().try_for_each(|member| member.participant.prepare(artifacts))?;
        self.reach("prepare");
        Ok(())
    }

    /// Opens the blocks of all.
    pub(super) fn open(&mut self, vm: &mut ArrivingVm) -> Result<AllBlocks, ArrivalError> {
        let (mut writers, mut observers, mut post_copied) = (Vec::new(), Vec::new(), 0);
        for member in &mut self.members {
            let blocks = member.participant.open(vm)?;
            member.blocks = writers.len()..writers.len() + blocks.writers.len();
            if member.profile.can_post_copy {
                debug_assert_eq!(
                    post_copied,
                    writers.len(),
                    "participants with post-copy precede the others"
                );
                post_copied = member.blocks.end;
            }
            writers.extend(blocks.writers);
            observers.push(blocks.after_round);
        }
        self.reach("open");
        // The last ones first, as at the source: what they begin goes on while the others work.
        observers.reverse();
        let after_round = move |round: &ReceivedRound, handle: &ReceiverHandle| {
            for observe in &observers {
                observe(round, handle);
            }
        };
        Ok(AllBlocks { writers, post_copied, after_round: Box::new(after_round) })
    }

    /// Passes on a message of the source's participants.
    pub(super) fn learn(&mut self, message: &Message) {
        self.members.iter_mut().for_each(|member| member.participant.learn(message));
        self.reach("learn");
    }

    /// Returns the chunks of a block that differ from the source's hashes.
    pub(super) fn compare(
        &mut self,
        vm: &mut ArrivingVm,
        block: usize,
        first_chunk: u64,
        theirs: &[String],
    ) -> Result<Vec<u64>, Incomparable> {
        let mut members = self.members.iter_mut();
        let member = members
            .find(|member| member.blocks.contains(&block))
            .ok_or_else(|| CompareError::NotThere(format!("block {block}")))?;
        member.participant.compare(vm, block - member.blocks.start, first_chunk, theirs)
    }

    /// Acts while QEMU loads the devices.
    pub(super) fn freeze(&mut self) -> Result<(), ArrivalError> {
        self.members.iter_mut().try_for_each(|member| member.participant.freeze())?;
        self.reach("freeze");
        Ok(())
    }

    /// Acts once the devices are loaded.
    pub(super) fn ready(&mut self, vm: &mut ArrivingVm) -> Result<(), ArrivalError> {
        self.members.iter_mut().try_for_each(|member| member.participant.ready(vm))?;
        self.reach("ready");
        Ok(())
    }

    /// Acts right before the guest is to run.
    pub(super) fn before_cont(&mut self) {
        self.members.iter_mut().for_each(|member| member.participant.before_cont());
        self.reach("before-cont");
    }

    /// Acts once the guest runs here, for the time `runs_for`, or stays paused.
    pub(super) fn commit(&mut self, vm: &mut ArrivingVm, runs_for: Option<Duration>) {
        self.members.iter_mut().for_each(|member| member.participant.commit(vm, runs_for));
        self.reach("commit");
    }

    /// Ends all work on a copy that is about to be discarded.
    pub(super) fn abandon(&mut self) {
        self.members.iter_mut().for_each(|member| member.participant.abandon());
        self.reach("abandon");
    }

    /// Removes all that was made on this host, in the order of the list: unlike at the source, no guest runs that a
    /// participant might make wait, and none needs what another one has made. All participants undo, whatever one of
    /// them leaves behind.
    pub(super) fn undo(&mut self, artifacts: &ArrivalArtifacts, execution: GuestRan) -> Vec<Leftover> {
        let members = self.members.iter_mut();
        let left = members.filter_map(|member| member.participant.undo(artifacts, execution)).collect();
        self.reach("undo");
        left
    }

    /// Returns a text with the places on this host where users find the parts of the VM; none if there are no such
    /// places.
    pub(super) fn places(&self) -> Option<String> {
        let of_each = self.members.iter().filter_map(|ArrivingMember { participant, profile, .. }| {
            let places = participant.places();
            let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
            (!places.is_empty()).then(|| format!("its {} are {}", profile.name, places.join(", ")))
        });
        let of_each: Vec<_> = of_each.collect();
        (!of_each.is_empty()).then(|| of_each.join(" and "))
    }

    /// Returns the last messages for the source.
    pub(super) fn last_messages(&mut self) -> Vec<LastMessage> {
        self.members.iter_mut().filter_map(|member| member.participant.last_message()).collect()
    }

    /// Acts once the guest runs here and all of its pages are present.
    pub(super) fn finish(&mut self, vm: Option<&ArrivingVm>) {
        self.members.iter_mut().for_each(|member| member.participant.finish(vm));
        self.reach("finish");
    }

    /// Reaches the fault points of a step that all participants have done.
    fn reach(&self, step: &str) {
        for ArrivingMember { profile, .. } in &self.members {
            self.faults.reach(|| format!("destination/{}/{step}", profile.name));
        }
    }
}
