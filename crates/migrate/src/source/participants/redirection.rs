//! Redirection of connections as a participant: for a VM that moves to another network, this host stands in for it in
//! the one that it leaves.
//!
//! The tunnel's end alone is there before the guest runs at the destination. The record on this host is the truth:
//! an agent that restarts finds by it what one before it has made. Hosts that the VM has left before get their orders from
//! here; without them they ask for the outcome.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use ::memory::{PageSet, Reductions, RoundStats, ScanError, ScanStats};
use engine::handover::source::SourceEvent;
use link::transport::Channel;
use net::redirection::{RecordStage, Redirection, RedirectionKeeper, RedirectionRecord};
use proto::message::{Message, RepointStep};
use qemu::qmp::Qmp;
use tracing::warn;

use super::participant::{Block, Comparison, Environment, Participant, PrepareProgress, Profile, UndoResult};
use crate::repeated_announcement;
use crate::source::agreement::{Agreed, RedirectedCard, RedirectedGuest};
use crate::source::failure::Failure;
use crate::source::telemetry::ShownBlock;
use api::NewAddress;
use api::report::{RedirectedConnections, Report};
use host::verification::BlockHashes;
use host::{SourceVm, redirections, repointing};

/// Redirection of the connections of a VM that leaves.
pub(super) struct LeavingRedirection {
    environment: Environment,
    keeper: RedirectionKeeper,
    agreed: Option<RedirectedGuest>,
    /// Connections to hosts that the VM has left before, and that have prepared their parts.
    prepared: BTreeMap<String, Channel>,
}

impl LeavingRedirection {
    pub(super) fn new(environment: &Environment) -> Self {
        let keeper = environment.context.redirections.clone();
        Self { environment: environment.clone(), keeper, agreed: None, prepared: BTreeMap::new() }
    }

    fn records(&self) -> Vec<RedirectionRecord> {
        let found = redirections::records_of(&self.keeper, &self.environment.terms.migration);
        found.unwrap_or_else(|error| {
            warn!(error = crate::chain(&error), "the records of redirections cannot be read");
            Vec::new()
        })
    }

    /// Returns the records of what is not in effect yet.
    fn prepared_records(&self) -> Vec<RedirectionRecord> {
        let mut records = self.records();
        records.retain(|record| record.stage == RecordStage::Prepared);
        records
    }

    /// Makes this host's ends of tunnels, and lets the hosts that the VM has left before make theirs.
    fn make_tunnels(&mut self, redirections: &[Redirection]) -> Result<(), String> {
        let Environment { context, terms, .. } = &self.environment;
        for redirection in redirections {
            self.keeper.prepare(redirection).map_err(|error| crate::chain(&error))?;
        }
        for redirection in redirections {
            for host in earlier_hosts([redirection], terms.source.as_str()) {
                let connection = self.prepared.remove(&host);
                let to = (host.as_str(), connection);
                let connection = repointing::prepare(context, &terms.migration, to, redirection)?;
                self.prepared.insert(host, connection);
            }
        }
        Ok(())
    }

    /// Orders a step of the hosts that the VM has left before. Returns at once: they do not delay this host, and one that
    /// does not answer finds out by itself.
    fn order_earlier(&mut self, hosts: BTreeSet<String>, step: RepointStep) {
        let Environment { context, terms, .. } = &self.environment;
        for host in hosts {
            let (context, id) = (Arc::clone(context), terms.migration.clone());
            let connection = self.prepared.remove(&host);
            let order = move || {
                if let Err(error) = repointing::order(&context, &id, &host, connection, step) {
                    warn!(migration = %id, host, ?step, error, "a host that the VM has left before has to ask");
                }
            };
            if let Err(error) = thread::Builder::new().name("repointing".to_owned()).spawn(order) {
                warn!(%error, "cannot start a thread for a host that the VM has left before");
            }
        }
    }

    /// Returns the hosts that the VM has left before, and that may have prepared or reserved something.
    fn hosts_to_undo(&self) -> BTreeSet<String> {
        let Environment { context, terms, .. } = &self.environment;
        let mut redirections = self.agreed.as_ref().map(RedirectedGuest::redirections).unwrap_or_default();
        redirections.extend(self.records().into_iter().map(|record| record.redirection));
        if redirections.is_empty() {
            // Before both hosts have agreed, all of them were asked.
            let present = redirections::of_vm_here(&self.keeper, &context.config.host, &terms.migration.vm);
            redirections = present.unwrap_or_default();
        }
        earlier_hosts(&redirections, terms.source.as_str())
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
    fn switch(&mut self, records: Vec<RedirectionRecord>) {
        let began = Instant::now();
        let redirections = records.iter().map(|record| &record.redirection);
        let earlier = earlier_hosts(redirections, self.environment.terms.source.as_str());
        self.order_earlier(earlier, RepointStep::Switch);
        let mut switched = Vec::new();
        for mut record in records {
            // What is missing is recorded, and tried again.
            if let Err(error) = self.keeper.switch(&mut record) {
                self.environment.controls.note("redirection-incomplete", crate::chain(&error));
                warn!(error = crate::chain(&error), "not all of the VM's old connections are redirected yet");
            }
            switched.push(record);
        }
        if switched.iter().all(|record| !record.is_incomplete) {
            self.report_times(|section| section.switch_us = Some(us(began)));
        }
        for mut record in switched {
            if let Err(error) = self.keeper.confirm(&mut record) {
                warn!(
                    error = crate::chain(&error),
                    "a redirection is not confirmed yet, or a former one not removed"
                );
            }
            repeated_announcement::of_redirection(self.keeper.clone(), record);
        }
    }
}

/// Returns the hosts that the VM has left before the source.
fn earlier_hosts<'a>(
    redirections: impl IntoIterator<Item = &'a Redirection>,
    source: &str,
) -> BTreeSet<String> {
    let legs = redirections.into_iter().flat_map(|redirection| &redirection.legs);
    legs.map(|leg| leg.host.clone()).filter(|host| host != source).collect()
}

fn us(since: Instant) -> u64 {
    since.elapsed().as_micros() as u64
}

impl Participant for LeavingRedirection {
    fn profile(&self) -> Profile {
        Profile { name: "redirection", can_post_copy: false, is_sent_first: false, irreversible: None }
    }

    fn report(&self, agreed: &Agreed<'_>, report: &mut Report) {
        let cards = agreed.redirection.map(|guest| &guest.cards[..]).unwrap_or_default();
        // The tunnels of all cards have the same ends.
        let own = |card: &RedirectedCard| {
            let mut legs = card.redirection.legs.iter();
            legs.find(|leg| leg.host == card.offer.place.host).map(|leg| leg.tunnel.clone())
        };
        let Some(tunnel) = cards.first().and_then(own) else { return };
        let address = |wanted: &net::redirection::offer::WantedAddress| NewAddress {
            old: wanted.pair.guest,
            new: wanted.pair.public,
            prefix: wanted.length,
        };
        report.redirection = Some(RedirectedConnections {
            addresses: cards.iter().flat_map(|card| &card.offer.wanted).map(address).collect(),
            tunnel: tunnel.kind.to_string(),
            ends: [tunnel.old_endpoint, tunnel.new_endpoint],
            mtu: tunnel.mtu,
            prepare_us: None,
            switch_us: None,
        });
    }

    fn check(&mut self, agreed: &Agreed<'_>) -> Result<(), Failure> {
        self.agreed = agreed.redirection.cloned();
        let Some(guest) = &self.agreed else { return Ok(()) };
        if guest.cards.iter().any(|card| card.offer.end.key.is_some())
            && !guest.cards.iter().any(|card| net::redirection::offer::needs_keys(&card.redirection))
            && let Err(error) = self.keeper.forget_key(&self.environment.terms.migration.to_string())
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
        let Some(guest) = self.agreed.clone() else { return Ok(()) };
        let began = Instant::now();
        self.make_tunnels(&guest.redirections()).map_err(|reason| {
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
        self.order_earlier(self.hosts_to_undo(), RepointStep::Remove);
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
        let prepared = self.prepared_records();
        if !prepared.is_empty() {
            self.switch(prepared);
        }
    }

    /// An agent before this one may have died before it switched.
    fn finish(&mut self) {
        if self.agreed.is_some() && self.records().is_empty() {
            warn!("the record of the redirection is gone: the VM's old connections end");
        }
        self.running();
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
