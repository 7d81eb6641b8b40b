//! Redirection of connections as an arriving participant: for a VM that comes from another network, this host answers as
//! its former neighbours, and translates its new addresses.
//!
//! The record on this host is the truth: an agent that restarts finds by it what one before it has made.

use std::path::PathBuf;
use std::time::Duration;

use ::memory::ReceiverHandle;
use net::redirection::keeper::RedirectionError;
use net::redirection::{RecordStage, RedirectionKeeper, RedirectionRecord, offer, survey};
use proto::message::{Message, Proposal};
use tracing::{error, warn};

use super::{
    ArrivalEnvironment, ArrivalPlan, ArrivingParticipant, ArrivingProfile, Execution, Incomparable,
    LastMessage, Leftover, OpenBlocks, ReceivedRound,
};
use crate::repeated_announcement;
use host::redirections::{self, AgreedRedirection};
use host::verification::CompareError;
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm};

/// Redirection of the connections of a VM that arrives.
pub(super) struct ArrivingRedirection {
    environment: ArrivalEnvironment,
    keeper: RedirectionKeeper,
    agreed: AgreedRedirection,
    /// Redirections of the same card that this one has replaced: the guest was here before.
    replaced: Vec<RedirectionRecord>,
    /// Error of the preparation, after which the guest may not come.
    failed: Option<String>,
}

impl ArrivingRedirection {
    pub(super) fn new(environment: &ArrivalEnvironment) -> Self {
        Self {
            environment: environment.clone(),
            keeper: redirections::keeper(&environment.context.config),
            agreed: AgreedRedirection::default(),
            replaced: Vec::new(),
            failed: None,
        }
    }

    /// Makes what takes no packets yet, once.
    fn make_ends(&mut self) {
        let Some(redirection) = self.agreed.get() else { return };
        let prepared = survey::abilities()
            .map_err(|error| crate::chain(&error))
            .and_then(|abilities| {
                self.keeper.prepare(redirection, &abilities).map_err(|error| crate::chain(&error))
            })
            .map(drop);
        self.failed = prepared.err();
    }

    fn record(&self) -> Result<Option<RedirectionRecord>, RedirectionError> {
        redirections::record_of(&self.keeper, &self.environment.migration)
    }

    /// Lets the rules take packets.
    fn switch(&mut self) -> Result<(), RedirectionError> {
        let Some(mut record) = self.record()? else { return Ok(()) };
        if record.stage == RecordStage::Prepared {
            let of_card = |former: &RedirectionRecord| {
                former.is_of(&record.redirection) && former.redirection.epoch < record.redirection.epoch
            };
            self.replaced = self.keeper.records()?.into_iter().filter(of_card).collect();
        }
        self.keeper.switch(&mut record)
    }

    /// Removes everything, and makes again what it has replaced.
    fn remove(&mut self) -> Result<(), RedirectionError> {
        redirections::abandon(&self.keeper, &self.environment.migration)?;
        if let Some(agreed) = self.agreed.get().filter(|agreed| offer::needs_keys(agreed)) {
            agreed.legs.iter().try_for_each(|leg| self.keeper.forget_key(leg.number))?;
        }
        while let Some(former) = self.replaced.pop() {
            self.keeper.reinstate(&former)?;
        }
        Ok(())
    }
}

impl ArrivingParticipant for ArrivingRedirection {
    fn profile(&self) -> ArrivingProfile {
        ArrivingProfile { name: "redirection", can_post_copy: false, irreversible: None }
    }

    fn check(&mut self, _: &Proposal, plan: &ArrivalPlan) -> Result<(), ArrivalError> {
        self.agreed = AgreedRedirection::clone(&plan.redirection);
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
        if self.record().is_ok_and(|record| record.is_none()) {
            self.make_ends();
        }
        self.failed.take().map_or(Ok(()), |reason| Err(ArrivalError::Redirection(reason)))
    }

    fn ready(&mut self, _: &mut ArrivingVm) -> Result<(), ArrivalError> {
        Ok(())
    }

    /// Rules have to be there when the guest's first frame leaves.
    fn before_cont(&mut self) {
        if let Err(error) = self.switch() {
            // It is recorded as active: the next agent makes what is missing.
            error!(error = crate::chain(&error), "the VM's connections are not redirected");
        }
    }

    fn commit(&mut self, _: &mut ArrivingVm, runs_for: Option<Duration>) {
        if runs_for.is_none() {
            self.before_cont();
        }
        self.replaced.clear();
        if let Ok(Some(record)) = self.record() {
            repeated_announcement::of_redirection(self.keeper.clone(), record);
        }
    }

    fn abandon(&mut self) {
        if let Err(error) = self.remove() {
            warn!(error = crate::chain(&error), "a redirection is not removed yet");
        }
    }

    fn undo(&mut self, _: &ArrivalArtifacts, _: Execution) -> Option<Leftover> {
        let error = self.remove().err()?;
        let (keeper, migration) = (self.keeper.clone(), self.environment.migration.clone());
        Some(Leftover {
            notice: format!("parts of a redirection remain in the kernel: {}", crate::chain(&error)),
            remove: Box::new(move || redirections::abandon(&keeper, &migration).is_ok()),
        })
    }

    fn places(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn last_message(&mut self) -> Option<LastMessage> {
        None
    }

    fn finish(&mut self, _: Option<&ArrivingVm>) {}
}
