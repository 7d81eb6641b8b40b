//! Redirection of connections as an arriving participant: for a VM that comes from another network, this host answers as
//! its former neighbours, and translates its new addresses.
//!
//! The record on this host is the truth: an agent that restarts finds by it what one before it has made.

use std::path::PathBuf;
use std::time::Duration;

use ::memory::ReceiverHandle;
use net::redirection::keeper::RedirectionError;
use net::redirection::{RecordStage, Redirection, RedirectionKeeper, RedirectionRecord};
use proto::message::{Message, Proposal};
use tracing::{error, warn};

use super::participant::{
    ArrivalEnvironment, ArrivalPlan, ArrivingParticipant, ArrivingProfile, GuestRan, Incomparable,
    LastMessage, Leftover, OpenBlocks, ReceivedRound,
};
use crate::repeated_announcement;
use host::redirections::{self, AgreedRedirections};
use host::verification::CompareError;
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm};

/// Redirection of the connections of a VM that arrives.
pub(super) struct ArrivingRedirection {
    environment: ArrivalEnvironment,
    keeper: RedirectionKeeper,
    agreed: AgreedRedirections,
    /// Records of what this agent has switched, and not confirmed.
    switched: Vec<RedirectionRecord>,
    /// Error of the preparation, after which the guest may not come.
    failed: Option<String>,
}

impl ArrivingRedirection {
    pub(super) fn new(environment: &ArrivalEnvironment) -> Self {
        Self {
            environment: environment.clone(),
            keeper: environment.context.redirections.clone(),
            agreed: AgreedRedirections::default(),
            switched: Vec::new(),
            failed: None,
        }
    }

    /// Makes what takes no packets yet, once.
    fn make_ends(&mut self) {
        let made = self.agreed().iter().try_for_each(|one| self.keeper.prepare(one).map(drop));
        self.failed = made.err().map(|error| crate::chain(&error));
    }

    fn agreed(&self) -> &[Redirection] {
        self.agreed.get().map(Vec::as_slice).unwrap_or_default()
    }

    fn records(&self) -> Result<Vec<RedirectionRecord>, RedirectionError> {
        redirections::records_of(&self.keeper, &self.environment.migration)
    }

    /// Lets the rules take packets. Nothing is written: the guest may wait.
    fn switch(&mut self) {
        let switched = self.records().and_then(|records| {
            let mut result = Ok(());
            for mut record in records.into_iter().filter(|record| record.stage == RecordStage::Prepared) {
                result = result.and(self.keeper.switch(&mut record));
                self.switched.push(record);
            }
            result
        });
        if let Err(error) = switched {
            // What is missing is recorded when it is confirmed, and tried again.
            error!(error = crate::chain(&error), "not all of the VM's connections are redirected yet");
        }
    }

    /// Keeps what was switched, also by an agent before this one: the guest is here.
    fn confirm(&mut self) {
        if self.switched.is_empty() {
            self.switch();
        }
        for mut record in std::mem::take(&mut self.switched) {
            if let Err(error) = self.keeper.confirm(&mut record) {
                warn!(
                    error = crate::chain(&error),
                    "a redirection is not confirmed yet, or a former one not removed"
                );
            }
            repeated_announcement::of_redirection(self.keeper.clone(), record);
        }
    }

    /// Removes everything, and makes again what it has replaced.
    fn remove(&mut self) -> Result<(), RedirectionError> {
        self.switched.clear();
        redirections::remove_of(&self.keeper, &self.environment.migration)
    }
}

impl ArrivingParticipant for ArrivingRedirection {
    fn profile(&self) -> ArrivingProfile {
        ArrivingProfile { name: "redirection", can_post_copy: false, irreversible: None }
    }

    fn check(&mut self, _: &Proposal, plan: &ArrivalPlan) -> Result<(), ArrivalError> {
        self.agreed = AgreedRedirections::clone(&plan.redirection);
        Ok(())
    }

    fn prepare(&mut self, _: &mut ArrivalArtifacts) -> Result<(), ArrivalError> {
        Ok(())
    }

    fn open(&mut self, _: &mut ArrivingVm) -> Result<OpenBlocks, ArrivalError> {
        let after_round = |_: &ReceivedRound, _: &ReceiverHandle| {};
        Ok(OpenBlocks { writers: Vec::new(), after_round: Box::new(after_round) })
    }

    fn compare(
        &mut self,
        _: &mut ArrivingVm,
        block: usize,
        _: u64,
        _: &[String],
    ) -> Result<Vec<u64>, Incomparable> {
        Err(CompareError::NotThere(format!("block {block} of the redirection")).into())
    }

    /// The guest is about to be stopped at the source.
    fn learn(&mut self, message: &Message) {
        if matches!(message, Message::Claims { .. }) {
            self.make_ends();
        }
    }

    /// Makes what an agent that observes no claims has not asked for; what is there already is left as it is.
    fn freeze(&mut self) -> Result<(), ArrivalError> {
        if !self.agreed().is_empty() && self.failed.is_none() {
            let records = self.records().map_err(|error| ArrivalError::Redirection(crate::chain(&error)))?;
            if records.len() < self.agreed().len() {
                self.make_ends();
            }
        }
        self.failed.take().map_or(Ok(()), |reason| Err(ArrivalError::Redirection(reason)))
    }

    fn ready(&mut self, _: &mut ArrivingVm) -> Result<(), ArrivalError> {
        Ok(())
    }

    /// Rules have to be there when the guest's first frame leaves.
    fn before_cont(&mut self) {
        self.switch();
    }

    fn commit(&mut self, _: &mut ArrivingVm, _: Option<Duration>) {
        self.confirm();
    }

    fn abandon(&mut self) {
        if let Err(error) = self.remove() {
            warn!(error = crate::chain(&error), "a redirection is not removed yet");
        }
    }

    fn undo(&mut self, _: &ArrivalArtifacts, _: GuestRan) -> Option<Leftover> {
        let error = self.remove().err()?;
        let (keeper, migration) = (self.keeper.clone(), self.environment.migration.clone());
        Some(Leftover {
            notice: format!("parts of a redirection remain in the kernel: {}", crate::chain(&error)),
            remove: Box::new(move || redirections::remove_of(&keeper, &migration).is_ok()),
        })
    }

    fn places(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn last_message(&mut self) -> Option<LastMessage> {
        None
    }

    /// An agent before this one may have died before it confirmed.
    fn finish(&mut self, _: Option<&ArrivingVm>) {
        self.confirm();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use host::testing::{World, id};
    use net::redirection::next_move::next_redirection;
    use net::redirection::testing::a_move;

    use super::*;
    use crate::destination::inbox::DestinationInbox;

    /// Returns the redirection of the VM that has left this host, and of the one that comes back.
    fn there_and_back() -> [Redirection; 2] {
        let first = next_redirection(None, a_move(1, 1, 2, &[1])).unwrap().redirection.unwrap();
        let back = next_redirection(Some(&first), a_move(2, 2, 1, &[2])).unwrap().redirection.unwrap();
        [first, back].map(|mut redirection| {
            let name = |host: &mut String| *host = if host == "host1" { "a" } else { "b" }.to_owned();
            redirection.legs.iter_mut().for_each(|leg| name(&mut leg.host));
            name(&mut redirection.place.host);
            redirection
        })
    }

    /// A host that redirects for the VM which comes back.
    fn world(former: &Redirection) -> World {
        let world = World::new();
        let keeper = &world.context.redirections;
        let mut record = keeper.prepare(former).unwrap();
        keeper.switch(&mut record).unwrap();
        keeper.confirm(&mut record).unwrap();
        world
    }

    fn arriving(world: &World, agreed: Option<&Redirection>) -> ArrivingRedirection {
        let (context, mailbox) = (Arc::clone(&world.context), DestinationInbox::new().mailbox());
        let environment = ArrivalEnvironment { context, migration: id(2), mailbox };
        let participant = ArrivingRedirection::new(&environment);
        if let Some(agreed) = agreed {
            participant.agreed.set(vec![agreed.clone()]).unwrap();
        }
        participant
    }

    fn stages(world: &World) -> Vec<(String, RecordStage)> {
        let records = world.context.redirections.records().unwrap();
        records.into_iter().map(|record| (record.redirection.migration, record.stage)).collect()
    }

    #[test]
    fn a_guest_that_does_not_start_here_is_redirected_as_before() {
        let [first, back] = there_and_back();
        let world = world(&first);
        let before = world.kernel.shown();
        let artifacts = ArrivalArtifacts::of(&world.context, &id(2));
        let mut participant = arriving(&world, Some(&back));
        participant.make_ends();
        participant.freeze().unwrap();
        participant.before_cont();
        assert!(world.kernel.has("web#2") && !world.kernel.has("web#1"));
        assert_eq!(stages(&world).iter().filter(|(_, stage)| *stage == RecordStage::Prepared).count(), 1);
        // Neither the first nor the second attempt removes everything.
        world.kernel.keep("table whimbrel-web#2");
        participant.abandon();
        let left = participant.undo(&artifacts, GuestRan::Never).expect("something is left");
        assert!(!(left.remove)());
        world.kernel.mend();
        assert!((left.remove)());
        assert_eq!(world.kernel.shown(), before);
        assert_eq!(stages(&world), [("web#1".to_owned(), RecordStage::Active)]);
        assert!(participant.undo(&artifacts, GuestRan::Never).is_none());
    }

    #[test]
    fn an_agent_confirms_what_one_before_it_has_switched() {
        let [first, back] = there_and_back();
        let switched = || {
            let world = world(&first);
            let mut participant = arriving(&world, Some(&back));
            participant.make_ends();
            participant.before_cont();
            (world, participant)
        };
        let (by_one_agent, mut participant) = switched();
        participant.confirm();
        let expected = by_one_agent.kernel.shown();
        let (world, _) = switched();
        let mut next = arriving(&world, None);
        next.finish(None);
        assert_eq!(stages(&world), [("web#2".to_owned(), RecordStage::Active)]);
        assert_eq!(world.kernel.shown(), expected);
        next.finish(None);
        assert_eq!(world.kernel.shown(), expected);
    }

    #[test]
    fn a_guest_does_not_come_where_records_cannot_be_read() {
        let [first, back] = there_and_back();
        let world = world(&first);
        let directory = world.context.config.state_dir.join("redirections");
        fs::write(directory.join("9.json"), "{").unwrap();
        let refused = arriving(&world, Some(&back)).freeze();
        assert!(matches!(&refused, Err(ArrivalError::Redirection(_))), "{refused:?}");
        // Others are not concerned.
        arriving(&world, None).freeze().unwrap();
    }
}
