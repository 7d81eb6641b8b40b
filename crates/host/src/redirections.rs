//! Redirections of this host: connections of VMs that have moved from here, or to here, between networks.
//!
//! They outlive their migrations. A participant of a migration makes them; this module finds them again, decides when
//! they end, and removes them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use net::redirection::keeper::RedirectionError;
use net::redirection::teardown::{self, TeardownFacts, TeardownLimits, TeardownReason};
use net::redirection::{RecordStage, Redirection, RedirectionKeeper, RedirectionRecord, survey};
use proto::message::Message;
use proto::{Epoch, HostId, MigrationId, Purpose, VmName};
use tracing::{debug, info, warn};

use crate::Context;
use crate::config::{Config, RedirectionConfig};
use crate::peers::{self, PeerError};
use link::Incoming;

/// The redirection on which both hosts of a migration have agreed; empty before, and if there is none.
pub type AgreedRedirection = Arc<OnceLock<Redirection>>;

/// Directory of the records, in the directory of the journal.
const DIRECTORY: &str = "redirections";

fn limits(config: &RedirectionConfig) -> TeardownLimits {
    TeardownLimits {
        least: Duration::from_secs(config.least_s),
        quiet: Duration::from_secs(config.quiet_s),
        longest: Duration::from_secs(config.longest_s),
    }
}

/// Returns the keeper of this host's redirections.
pub fn keeper(config: &Config) -> RedirectionKeeper {
    RedirectionKeeper::new(config.host.as_str(), &config.state_dir.join(DIRECTORY))
}

/// Returns the record of the redirection that a migration makes on this host, if it has begun.
pub fn record_of(
    keeper: &RedirectionKeeper,
    migration: &MigrationId,
) -> Result<Option<RedirectionRecord>, RedirectionError> {
    let name = migration.to_string();
    Ok(keeper.records()?.into_iter().find(|record| record.redirection.migration == name))
}

/// Returns the redirection of a VM that is on this host, if it has one.
pub fn of_vm_here(
    keeper: &RedirectionKeeper,
    host: &HostId,
    vm: &VmName,
) -> Result<Option<Redirection>, RedirectionError> {
    let is_here = |record: &RedirectionRecord| {
        record.stage == RecordStage::Active
            && record.redirection.guest() == vm.as_str()
            && record.redirection.place.host == host.as_str()
    };
    Ok(keeper.records()?.into_iter().find(is_here).map(|record| record.redirection))
}

/// Removes a redirection of a migration that ends without it, and the key of its tunnel.
pub fn abandon(keeper: &RedirectionKeeper, migration: &MigrationId) -> Result<(), RedirectionError> {
    record_of(keeper, migration)?.map_or(Ok(()), |record| keeper.release(record))
}

/// Restores the redirections of this host after a start of the agent or of the host. What was prepared for a migration
/// that is over is removed.
pub fn restore(context: &Context) {
    let keeper = keeper(&context.config);
    let (records, errors) = match keeper.restore() {
        Ok(restored) => restored,
        Err(error) => {
            return warn!(error = crate::chain(&error), "redirections of VMs are not restored");
        }
    };
    for error in errors {
        warn!(error = crate::chain(&error), "a redirection is not whole");
    }
    if context.journal.open_migrations().is_ok_and(|open| open.is_empty())
        && let Err(error) = keeper.forget_unused_keys()
    {
        warn!(error = crate::chain(&error), "keys that no tunnel needs are not removed");
    }
    for record in records.into_iter().filter(|record| record.stage == RecordStage::Prepared) {
        let migration = record.redirection.migration.clone();
        if is_open(context, &migration) {
            continue;
        }
        match keeper.release(record) {
            Ok(()) => info!(migration, "removed what was prepared for a redirection"),
            Err(error) => warn!(migration, error = crate::chain(&error), "a redirection is not removed"),
        }
    }
}

/// Returns true if a migration is open in the journal, or if that is unknown.
fn is_open(context: &Context, migration: &str) -> bool {
    let Some(id) = migration_named(migration) else { return false };
    let record = context.journal.migration(&id);
    record.map_or(true, |record| record.is_some_and(|record| record.open))
}

/// Returns the migration with this name, as [`MigrationId`] prints it.
pub(crate) fn migration_named(name: &str) -> Option<MigrationId> {
    let (vm, epoch) = name.rsplit_once('#')?;
    Some(MigrationId { vm: VmName::new(vm).ok()?, epoch: Epoch(epoch.parse().ok()?) })
}

/// Returns true if this host has its part of the redirection of a migration, or is about to have it.
pub fn stands(context: &Context, migration: &MigrationId) -> bool {
    let record = record_of(&keeper(&context.config), migration);
    // What cannot be read is not ended for that.
    let serves = |record: RedirectionRecord| record.stage != RecordStage::Ending && has_legs(&record);
    record.map_or(true, |record| record.is_some_and(serves))
}

/// Ends the old connections of a VM on this host, at a user's request; with `all`, also the translation of its new
/// addresses. Returns the migrations of its redirections.
pub fn release(context: &Context, vm: &VmName, all: bool) -> Result<Vec<MigrationId>, RedirectionError> {
    let keeper = keeper(&context.config);
    let mut released = Vec::new();
    for record in keeper.records()? {
        let Some(id) = migration_named(&record.redirection.migration).filter(|id| id.vm == *vm) else {
            continue;
        };
        if record.stage == RecordStage::Prepared && is_open(context, &record.redirection.migration) {
            continue;
        }
        if all {
            keeper.release(record)?;
        } else if has_legs(&record) {
            settle(&keeper, record)?;
        } else {
            continue;
        }
        released.push(id);
    }
    Ok(released)
}

fn has_legs(record: &RedirectionRecord) -> bool {
    !record.redirection.legs.is_empty()
}

fn settle(keeper: &RedirectionKeeper, record: RedirectionRecord) -> Result<(), RedirectionError> {
    let abilities = survey::abilities().map_err(|source| RedirectionError::Kernel {
        object: "rules by which abilities are known".to_owned(),
        source,
    })?;
    keeper.settle(record, &abilities)
}

/// Ends redirections that nothing needs any more.
#[derive(Debug, Default)]
pub struct RedirectionReaper {
    /// Times since which no connection uses them.
    quiet_since: BTreeMap<String, Instant>,
}

impl RedirectionReaper {
    /// Looks once at all redirections.
    pub fn look(&mut self, context: &Context) {
        let keeper = keeper(&context.config);
        let records = match keeper.records() {
            Ok(records) => records,
            Err(error) => return warn!(error = crate::chain(&error), "redirections of VMs are not known"),
        };
        let is_known = |name: &str| records.iter().any(|record| record.redirection.migration == name);
        self.quiet_since.retain(|name, _| is_known(name));
        // Drivers change the redirections of VMs that move. A VM that arrives is in the journal before its migration is
        // closed.
        let moving = match context.journal.open_migrations() {
            Ok(open) => open.into_iter().map(|open| open.terms.migration.vm).collect::<BTreeSet<_>>(),
            Err(error) => return warn!(error = crate::chain(&error), "it is not known which VMs move"),
        };
        let moves =
            |record: &RedirectionRecord| moving.iter().any(|vm| vm.as_str() == record.redirection.guest());
        for record in records.into_iter().filter(|record| !moves(record)) {
            match record.stage {
                RecordStage::Prepared => {}
                RecordStage::Ending => end(&keeper, record, None),
                RecordStage::Active => {
                    let facts = self.facts(context, &record);
                    let reason = teardown::decide(facts, limits(&context.config.redirection));
                    // A translation without old connections lasts as long as the VM is here.
                    let is_reason =
                        |reason: &TeardownReason| has_legs(&record) || *reason == TeardownReason::GuestGone;
                    if let Some(reason) = reason.filter(is_reason) {
                        end(&keeper, record, Some(reason));
                    }
                }
            }
        }
    }

    fn facts(&mut self, context: &Context, record: &RedirectionRecord) -> TeardownFacts {
        let name = &record.redirection.migration;
        let connections = teardown::connections(record).unwrap_or_else(|error| {
            debug!(migration = name, %error, "connections are not counted");
            None
        });
        let quiet_for = if connections == Some(0) {
            self.quiet_since.entry(name.clone()).or_insert_with(Instant::now).elapsed()
        } else {
            self.quiet_since.remove(name);
            Duration::ZERO
        };
        let age_ms = api::report::unix_ms_now().saturating_sub(record.since_unix_ms);
        TeardownFacts {
            age: Duration::from_millis(age_ms),
            connections,
            quiet_for,
            is_asked: false,
            is_other_gone: has_legs(record) && is_other_gone(context, record),
            is_guest_gone: is_guest_gone(context, record),
        }
    }
}

/// Ends what the reason allows: without one, everything.
fn end(keeper: &RedirectionKeeper, record: RedirectionRecord, reason: Option<TeardownReason>) {
    let migration = record.redirection.migration.clone();
    let (why, ended) = match reason {
        None => ("it was ending", keeper.release(record)),
        Some(reason @ TeardownReason::GuestGone) => (words(reason), keeper.release(record)),
        Some(reason) => (words(reason), settle(keeper, record)),
    };
    match ended {
        Ok(()) => info!(migration, why, "ended a redirection of old connections"),
        Err(error) => warn!(migration, error = crate::chain(&error), "a redirection is not removed yet"),
    }
}

fn words(reason: TeardownReason) -> &'static str {
    match reason {
        TeardownReason::Asked => "a user wants it",
        TeardownReason::GuestGone => "the VM is not on this host any more",
        TeardownReason::OtherHostGone => "the other host serves no connection any more",
        TeardownReason::Unused => "no connection uses the old address",
        TeardownReason::TooOld => "it is as old as it may become",
    }
}

/// Returns true if a VM that was to be on this host is not.
fn is_guest_gone(context: &Context, record: &RedirectionRecord) -> bool {
    if record.redirection.place.host != record.host {
        return false;
    }
    let Ok(vm) = VmName::new(record.redirection.guest()) else { return true };
    context.journal.vm(&vm).is_ok_and(|known| known.is_none())
}

/// Returns true if no other host has its part of the redirection any more. One that does not answer may have it.
fn is_other_gone(context: &Context, record: &RedirectionRecord) -> bool {
    let Some(migration) = migration_named(&record.redirection.migration) else { return false };
    let others = record.redirection.hosts().filter(|host| *host != record.host);
    let mut others = others.filter_map(|host| HostId::new(host).ok());
    others.all(|host| match ask(context, &host, migration.clone()) {
        Ok(stands) => !stands,
        Err(error) => {
            debug!(%migration, error = crate::chain(&error), "the other host of a redirection does not answer");
            false
        }
    })
}

/// Asks another host whether it has its part of a redirection.
fn ask(context: &Context, host: &HostId, migration: MigrationId) -> Result<bool, PeerError> {
    let mut connection = peers::connect(context, host, None, Purpose::Redirection { migration })?;
    let lost = |source| PeerError::Lost { host: host.clone(), source };
    connection.send(&Message::AskRedirection).map_err(lost)?;
    let deadline = Instant::now() + Duration::from_millis(context.config.timeouts.peer_silence_ms);
    match connection.recv(Some(deadline)).map_err(lost)? {
        Incoming::Message(Message::RedirectionStands { stands }) => Ok(stands),
        _ => Err(PeerError::NoSense(host.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::id;

    #[test]
    fn names_of_migrations_are_read() {
        assert_eq!(migration_named(&id(12).to_string()), Some(id(12)));
        for other in ["", "web", "web#", "#1", "web#-1", "web#1x", "a b#1"] {
            assert_eq!(migration_named(other), None, "{other}");
        }
    }

    #[test]
    fn a_host_without_records_has_no_redirection() {
        let directory = tempfile::tempdir().unwrap();
        let keeper = RedirectionKeeper::new("a", directory.path());
        assert_eq!(record_of(&keeper, &id(3)).unwrap(), None);
        assert_eq!(of_vm_here(&keeper, &HostId::new("a").unwrap(), &id(3).vm).unwrap(), None);
        abandon(&keeper, &id(3)).unwrap();
    }
}
