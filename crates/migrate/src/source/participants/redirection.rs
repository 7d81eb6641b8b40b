//! Redirection of connections as a participant: for a VM that moves to another network, this host stands in for it in
//! the one that it leaves.
//!
//! The tunnel's end alone is there before the guest runs at the destination. The record on this host is the truth:
//! an agent that restarts finds by it what one before it has made.

use std::time::Instant;

use ::memory::{PageSet, Reductions, RoundStats, ScanError, ScanStats};
use engine::handover::source::SourceEvent;
use net::redirection::{RecordStage, RedirectionKeeper, RedirectionRecord};
use proto::message::Message;
use qemu::qmp::Qmp;
use tracing::warn;

use super::{
    Agreed, Block, Comparison, Environment, Participant, PrepareProgress, Profile, ShownBlock, SourceVm,
    UndoResult,
};
use crate::repeated_announcement;
use crate::source::agreement::RedirectedGuest;
use crate::source::failure::Failure;
use api::NewAddress;
use api::report::{RedirectedConnections, Report};
use host::redirections;
use host::verification::BlockHashes;

/// Redirection of the connections of a VM that leaves.
pub(super) struct LeavingRedirection {
    environment: Environment,
    keeper: RedirectionKeeper,
    agreed: Option<RedirectedGuest>,
}

impl LeavingRedirection {
    pub(super) fn new(environment: &Environment) -> Self {
        let keeper = environment.context.redirections.clone();
        Self { environment: environment.clone(), keeper, agreed: None }
    }

    fn record(&self) -> Option<RedirectionRecord> {
        let found = redirections::record_of(&self.keeper, &self.environment.terms.migration);
        found.unwrap_or_else(|error| {
            warn!(error = crate::chain(&error), "the records of redirections cannot be read");
            None
        })
    }

    /// Makes this host's end of the tunnel.
    fn make_tunnel(&self, guest: &RedirectedGuest) -> Result<(), String> {
        let prepared = self.keeper.prepare(&guest.redirection);
        prepared.map(drop).map_err(|error| crate::chain(&error))
    }

    /// Changes the report's section, if there is one.
    fn report_times(&self, change: impl FnOnce(&mut RedirectedConnections)) {
        self.environment.controls.report(|report| {
            if let Some(section) = &mut report.redirection {
                change(section);
            }
        });
    }

    /// Redirects the connections: the guest runs at the destination.
    fn switch(&self, mut record: RedirectionRecord) {
        let began = Instant::now();
        match self.keeper.switch(&mut record) {
            Ok(()) => self.report_times(|section| section.switch_us = Some(us(began))),
            // What is missing is recorded, and tried again.
            Err(error) => {
                self.environment.controls.note("redirection-incomplete", crate::chain(&error));
                warn!(error = crate::chain(&error), "not all of the VM's old connections are redirected yet");
            }
        }
        if let Err(error) = self.keeper.confirm(&mut record) {
            warn!(
                error = crate::chain(&error),
                "a redirection is not confirmed yet, or a former one not removed"
            );
        }
        repeated_announcement::of_redirection(self.keeper.clone(), record);
    }
}

fn us(since: Instant) -> u64 {
    since.elapsed().as_micros() as u64
}

impl Participant for LeavingRedirection {
    fn profile(&self) -> Profile {
        Profile { name: "redirection", can_post_copy: false, is_sent_first: false, irreversible: None }
    }

    fn report(&self, agreed: &Agreed<'_>, report: &mut Report) {
        let Some(RedirectedGuest { offer, redirection }) = agreed.redirection else { return };
        let Some(tunnel) = redirection.legs.first().map(|leg| &leg.tunnel) else { return };
        let address = |wanted: &net::redirection::offer::WantedAddress| NewAddress {
            old: wanted.pair.guest,
            new: wanted.pair.public,
            prefix: wanted.length,
        };
        report.redirection = Some(RedirectedConnections {
            addresses: offer.wanted.iter().map(address).collect(),
            tunnel: tunnel.kind.to_string(),
            ends: [tunnel.old_endpoint, tunnel.new_endpoint],
            mtu: tunnel.mtu,
            prepare_us: None,
            switch_us: None,
        });
    }

    fn check(&mut self, agreed: &Agreed<'_>) -> Result<(), Failure> {
        self.agreed = agreed.redirection.cloned();
        let Some(RedirectedGuest { offer, redirection }) = &self.agreed else { return Ok(()) };
        if offer.key.is_some()
            && !net::redirection::offer::needs_keys(redirection)
            && let Err(error) = self.keeper.forget_key(&redirection.migration)
        {
            warn!(error = crate::chain(&error), "a key that no tunnel needs is not removed");
        }
        Ok(())
    }

    fn prepare(&mut self, _: &mut SourceVm, _: &Reductions) -> Result<PrepareProgress, Failure> {
        Ok(PrepareProgress::Done)
    }

    fn blocks(&mut self, _: &SourceVm) -> Result<Vec<Block>, Failure> {
        Ok(Vec::new())
    }

    fn progress(&self) -> Vec<ShownBlock> {
        Vec::new()
    }

    fn before_round(&mut self, _: &mut SourceVm, _: u64) -> Result<u64, Failure> {
        Ok(u64::MAX)
    }

    fn after_round(&mut self, _: &RoundStats) {}

    fn scan(&mut self, _: Option<&mut Qmp>, _: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        Ok(ScanStats::default())
    }

    fn after_scan(&mut self, _: &mut Qmp) -> Result<(), Failure> {
        Ok(())
    }

    /// Without its tunnel the guest would lose its connections: it stays.
    fn before_stop(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        let Some(guest) = &self.agreed else { return Ok(()) };
        let began = Instant::now();
        self.make_tunnel(guest).map_err(|reason| {
            let reason = format!("the VM's connections cannot be redirected: {reason}");
            Failure::new(SourceEvent::Failed, reason)
        })?;
        self.report_times(|section| section.prepare_us = Some(us(began)));
        Ok(())
    }

    fn message(&mut self) -> Option<Message> {
        None
    }

    fn freeze(&mut self, _: &mut SourceVm, _: Comparison, _: &mut [PageSet]) -> Result<(), Failure> {
        Ok(())
    }

    fn hash(
        &mut self,
        _: &mut SourceVm,
        _: usize,
        _: &[PageSet],
        _: &mut BlockHashes,
    ) -> Result<(), Failure> {
        Ok(())
    }

    fn ready(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        Ok(())
    }

    fn commit(&mut self) {}

    fn undo(&mut self, _: Option<&mut SourceVm>) -> UndoResult {
        self.environment.controls.report(|report| report.redirection = None);
        match redirections::remove_of(&self.keeper, &self.environment.terms.migration) {
            Ok(()) => {
                self.agreed = None;
                UndoResult::Done
            }
            Err(error) => {
                warn!(error = crate::chain(&error), "a redirection is not removed yet");
                UndoResult::Retry("parts of a redirection remain in the kernel: see `whimbrel net show`")
            }
        }
    }
    /// The proxy device takes the guest's packets from now on: with post-copy, QEMU here ends much later.
    fn running(&mut self) {
        if let Some(record) = self.record().filter(|record| record.stage == RecordStage::Prepared) {
            self.switch(record);
        }
    }

    /// An agent before this one may have died before it switched.
    fn finish(&mut self) {
        match self.record() {
            Some(record) if record.stage == RecordStage::Prepared => self.switch(record),
            None if self.agreed.is_some() => {
                warn!("the record of the redirection is gone: the VM's old connections end");
            }
            Some(_) | None => {}
        }
    }

    fn expects_message(&self) -> bool {
        false
    }

    fn learn(&mut self, _: &Message) {}
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::source::{Goals, MigrationControls};
    use api::MigrationSettings;
    use host::testing::{World, terms};

    /// No record names it.
    #[test]
    fn a_key_that_stays_is_removed_by_the_next_attempt() {
        let (world, terms, settings) = (World::new(), terms("a", "b"), MigrationSettings::default());
        let (source, destination) = (terms.source.clone(), terms.destination.clone());
        let report = Report::begin(terms.migration.clone(), source, destination, settings.clone());
        let goals = Goals::restored(settings, &world.context.config);
        let controls = Arc::new(MigrationControls::new(goals, report, Instant::now()));
        let context = Arc::clone(&world.context);
        let environment = Environment { context, terms, controls, is_resumed: false };
        let mut redirecting = LeavingRedirection::new(&environment);
        let key = world.context.config.state_dir.join("redirections/web@1.key");
        // A directory cannot be removed as a file is.
        fs::create_dir_all(&key).unwrap();
        assert!(matches!(redirecting.undo(None), UndoResult::Retry(_)));
        fs::remove_dir(&key).unwrap();
        fs::write(&key, [0; 32]).unwrap();
        assert_eq!(redirecting.undo(None), UndoResult::Done);
        assert!(!key.exists());
    }
}
