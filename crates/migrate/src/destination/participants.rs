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
mod participant;
mod redirection;
#[cfg(test)]
pub(super) mod tests;

use std::ops::Range;
use std::time::Duration;

use ::memory::{BlockWriter, ReceiverHandle};
use proto::message::{Message, Proposal};

pub use self::participant::ArrivalPlan;
pub(super) use self::participant::{
    ArrivalEnvironment, ArrivingParticipant, ArrivingProfile, GuestRan, Incomparable, LastMessage, Leftover,
    ReceivedRound, RoundObserver,
};
use host::fault::Faults;
use host::verification::CompareError;
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm};

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
        self.try_in_turn("check", |ArrivingMember { participant, profile, .. }| {
            if let Some(step) = profile.irreversible {
                return Err(ArrivalError::Irreversible { participant: profile.name, step });
            }
            participant.check(proposal, plan)
        })
    }

    /// Makes what QEMU opens when it is started. After an error the caller undoes.
    pub(super) fn prepare(&mut self, artifacts: &mut ArrivalArtifacts) -> Result<(), ArrivalError> {
        self.try_in_turn("prepare", |member| member.participant.prepare(artifacts))
    }

    /// Opens the blocks of all.
    pub(super) fn open(&mut self, vm: &mut ArrivingVm) -> Result<AllBlocks, ArrivalError> {
        let (mut writers, mut observers, mut post_copied) = (Vec::new(), Vec::new(), 0);
        self.try_in_turn("open", |member| {
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
            Ok(())
        })?;
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
        self.in_turn("learn", |participant| participant.learn(message));
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
        self.try_in_turn("freeze", |member| member.participant.freeze())
    }

    /// Acts once the devices are loaded.
    pub(super) fn ready(&mut self, vm: &mut ArrivingVm) -> Result<(), ArrivalError> {
        self.try_in_turn("ready", |member| member.participant.ready(vm))
    }

    /// Acts right before the guest is to run.
    pub(super) fn before_cont(&mut self) {
        self.in_turn("before-cont", |participant| participant.before_cont());
    }

    /// Acts once the guest runs here, for the time `runs_for`, or stays paused.
    pub(super) fn commit(&mut self, vm: &mut ArrivingVm, runs_for: Option<Duration>) {
        self.in_turn("commit", |participant| participant.commit(vm, runs_for));
    }

    /// Ends all work on a copy that is about to be discarded.
    pub(super) fn abandon(&mut self) {
        self.in_turn("abandon", |participant| participant.abandon());
    }

    /// Removes all that was made on this host, in the order of the list: unlike at the source, no guest runs that a
    /// participant might make wait, and none needs what another one has made. All participants undo, whatever one of
    /// them leaves behind.
    pub(super) fn undo(&mut self, artifacts: &ArrivalArtifacts, execution: GuestRan) -> Vec<Leftover> {
        let mut left = Vec::new();
        self.in_turn("undo", |participant| left.extend(participant.undo(artifacts, execution)));
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
        self.in_turn("finish", |participant| participant.finish(vm));
    }

    /// Lets each participant act, up to the first that fails. A host may fail between any two of them: the fault point of
    /// each is reached when it has acted, and before the next one does.
    fn try_in_turn(
        &mut self,
        step: &str,
        mut act: impl FnMut(&mut ArrivingMember) -> Result<(), ArrivalError>,
    ) -> Result<(), ArrivalError> {
        for member in &mut self.members {
            act(member)?;
            member.reach(&self.faults, step);
        }
        Ok(())
    }

    /// Lets each participant do a step that cannot fail, with the same fault points.
    fn in_turn(&mut self, step: &str, mut act: impl FnMut(&mut dyn ArrivingParticipant)) {
        for member in &mut self.members {
            act(member.participant.as_mut());
            member.reach(&self.faults, step);
        }
    }
}

impl ArrivingMember {
    /// Reaches the fault point of a step that this participant has done.
    fn reach(&self, faults: &Faults, step: &str) {
        faults.reach(|| format!("destination/{}/{step}", self.profile.name));
    }
}
