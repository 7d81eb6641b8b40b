//! Redirections of this host: connections of VMs that have moved from here, or to here, between networks.
//!
//! They outlive their migrations. A participant of a migration makes them; this module finds them again, decides when
//! they end, and removes them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use net::Mac;
#[cfg(any(test, feature = "testing"))]
use net::redirection::host_kernel::HostKernel;
use net::redirection::keeper::RedirectionError;
use net::redirection::teardown::{self, TeardownFacts, TeardownLimits, TeardownReason};
use net::redirection::{RecordStage, Redirection, RedirectionKeeper, RedirectionRecord};
use proto::message::Message;
use proto::{Epoch, HostId, MigrationId, Purpose, VmName};
use store::journal::State;
use tracing::{debug, info, warn};

use crate::Context;
use crate::config::{Config, RedirectionConfig};
use crate::peers::{self, PeerError};
use link::Incoming;

/// The redirections on which both hosts of a migration have agreed, one for each card of the VM; empty before, and if there
/// are none.
pub type AgreedRedirections = Arc<OnceLock<Vec<Redirection>>>;

/// Directory of the records, in the directory of the journal.
const DIRECTORY: &str = "redirections";

fn limits(config: &RedirectionConfig) -> TeardownLimits {
    TeardownLimits {
        least: Duration::from_secs(config.least_s),
        quiet: Duration::from_secs(config.quiet_s),
        longest: Duration::from_secs(config.longest_s),
    }
}

/// Returns a keeper of this host's redirections; that of an agent is in its [`Context`].
pub fn keeper(config: &Config) -> RedirectionKeeper {
    RedirectionKeeper::new(config.host.as_str(), &config.state_dir.join(DIRECTORY))
}

/// Returns a keeper for a host with this kernel.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn keeper_with(config: &Config, kernel: Arc<dyn HostKernel>) -> RedirectionKeeper {
    RedirectionKeeper::with(config.host.as_str(), &config.state_dir.join(DIRECTORY), kernel)
}

/// Returns the records of the redirections that a migration makes on this host, as far as it has begun.
pub fn records_of(
    keeper: &RedirectionKeeper,
    migration: &MigrationId,
) -> Result<Vec<RedirectionRecord>, RedirectionError> {
    let (name, mut records) = (migration.to_string(), keeper.records()?);
    records.retain(|record| record.redirection.migration == name);
    Ok(records)
}

/// Returns the redirections of a VM that is on this host, one for each card that has one.
pub fn of_vm_here(
    keeper: &RedirectionKeeper,
    host: &HostId,
    vm: &VmName,
) -> Result<Vec<Redirection>, RedirectionError> {
    let is_here = |record: &RedirectionRecord| {
        record.stage == RecordStage::Active
            && record.redirection.guest() == vm.as_str()
            && record.redirection.place.host == host.as_str()
    };
    Ok(keeper.records()?.into_iter().filter(is_here).map(|record| record.redirection).collect())
}

/// Removes the redirections of a migration that ends without them, and what it has reserved for its tunnels.
pub fn remove_of(keeper: &RedirectionKeeper, migration: &MigrationId) -> Result<(), RedirectionError> {
    let mut removed = Ok(());
    for record in records_of(keeper, migration)? {
        removed = removed.and(keeper.remove(&record));
    }
    removed?;
    keeper.forget_key(&migration.to_string())
}

/// Resumes the redirections of this host after a start of the agent or of the host. What was prepared for a migration
/// that is over ends, or stays, by its outcome.
pub fn resume(context: &Context) {
    let keeper = &context.redirections;
    let (records, errors) = match keeper.resume() {
        Ok(restored) => restored,
        Err(error) => {
            return warn!(error = crate::chain(&error), "redirections of VMs are not resumed");
        }
    };
    for error in errors {
        warn!(error = crate::chain(&error), "a redirection is not restored completely; it is tried again");
    }
    // What cannot be read may be open.
    let is_open = |migration: &str| {
        let id = migration_named(migration);
        let record = id.and_then(|id| context.journal.migration(&id).transpose());
        record.is_some_and(|record| record.map_or(true, |record| record.open))
    };
    if context.journal.open_migrations().is_ok()
        && let Err(error) = keeper.forget_unused_keys(is_open)
    {
        warn!(error = crate::chain(&error), "keys that no tunnel needs are not removed");
    }
    for record in records.into_iter().filter(|record| record.stage == RecordStage::Prepared) {
        act_if_unchanged(context, &record, Reaping::Decide);
    }
}

/// Returns the migration with this name, as [`MigrationId`] prints it.
pub(crate) fn migration_named(name: &str) -> Option<MigrationId> {
    let (vm, epoch) = name.rsplit_once('#')?;
    Some(MigrationId { vm: VmName::new(vm).ok()?, epoch: Epoch(epoch.parse().ok()?) })
}

/// State of a host's part of the redirection of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// True if it has its part, or is about to have it.
    pub(crate) stands: bool,
    /// True if it is in effect for good: the guest has moved.
    pub(crate) confirmed: bool,
}

/// Returns what this host says of its part of the redirection of a migration.
pub(crate) fn standing(context: &Context, migration: &MigrationId) -> Standing {
    // What cannot be read is not ended for that.
    let Ok(records) = records_of(&context.redirections, migration) else {
        return Standing { stands: true, confirmed: false };
    };
    Standing {
        stands: records.iter().any(|record| record.stage != RecordStage::Ending && has_legs(record)),
        confirmed: records.iter().any(|record| record.stage == RecordStage::Active),
    }
}

/// Ends the old connections of a VM on this host, at a user's request; with `all`, also the translation of its new
/// addresses. Returns the migrations of its redirections. The VM must not be in a migration, nor begin one before this returns.
pub fn end_of_vm(context: &Context, vm: &VmName, all: bool) -> Result<Vec<MigrationId>, RedirectionError> {
    let keeper = &context.redirections;
    let mut released = Vec::new();
    for record in keeper.records()? {
        let Some(id) = migration_named(&record.redirection.migration).filter(|id| id.vm == *vm) else {
            continue;
        };
        // Its migration is over: the reaper is about to decide about it.
        if record.stage == RecordStage::Prepared {
            continue;
        }
        if all {
            keeper.remove(&record)?;
        } else if has_legs(&record) {
            keeper.drop_legs(&record)?;
        } else {
            continue;
        }
        released.push(id);
    }
    // One migration may have redirected several cards.
    released.dedup();
    Ok(released)
}

fn has_legs(record: &RedirectionRecord) -> bool {
    !record.redirection.legs.is_empty()
}

/// Ends redirections that nothing needs any more, and completes those of which something could not be made.
#[derive(Debug, Default)]
pub struct RedirectionReaper {
    /// Times since which no connection uses them, by their migrations and cards.
    quiet_since: BTreeMap<(String, Mac), Instant>,
}

/// Action on a redirection whose VM is in no migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaping {
    /// Confirmation or removal, by the outcome of its migration, which has ended without either.
    Decide,
    /// Completion of objects that could not be made.
    Complete,
    /// End, as far as the reason allows; without a reason, of the whole redirection.
    End(Option<TeardownReason>),
}

impl RedirectionReaper {
    /// Looks once at all redirections.
    pub fn look(&mut self, context: &Context) {
        let records = match context.redirections.records() {
            Ok(records) => records,
            Err(error) => return warn!(error = crate::chain(&error), "redirections of VMs are not known"),
        };
        self.quiet_since.retain(|known, _| records.iter().any(|record| name(record) == *known));
        // Drivers change the redirections of VMs that move. A VM that arrives is in the journal before its migration is
        // closed.
        let moving = match context.journal.open_migrations() {
            Ok(open) => open.into_iter().map(|open| open.terms.migration.vm).collect::<BTreeSet<_>>(),
            Err(error) => return warn!(error = crate::chain(&error), "it is not known which VMs move"),
        };
        let moves =
            |record: &RedirectionRecord| moving.iter().any(|vm| vm.as_str() == record.redirection.guest());
        for record in records.iter().filter(|record| !moves(record)) {
            if let Some(action) = self.action(context, record, &records) {
                act_if_unchanged(context, record, action);
            }
        }
    }

    fn action(
        &mut self,
        context: &Context,
        record: &RedirectionRecord,
        all: &[RedirectionRecord],
    ) -> Option<Reaping> {
        match record.stage {
            RecordStage::Ending => Some(Reaping::End(None)),
            _ if is_replaced(record, all) => Some(Reaping::End(None)),
            RecordStage::Prepared => Some(Reaping::Decide),
            RecordStage::Active if record.is_incomplete => Some(Reaping::Complete),
            RecordStage::Active => {
                let facts = self.facts(context, record);
                let reason = teardown::decide(facts, limits(&context.config.redirection));
                // A translation without old connections lasts as long as the VM is here.
                let is_reason =
                    |reason: &TeardownReason| has_legs(record) || *reason == TeardownReason::GuestGone;
                reason.filter(is_reason).map(|reason| Reaping::End(Some(reason)))
            }
        }
    }

    fn facts(&mut self, context: &Context, record: &RedirectionRecord) -> TeardownFacts {
        let connections = teardown::connections(record).unwrap_or_else(|error| {
            debug!(migration = record.redirection.migration, %error, "connections are not counted");
            None
        });
        let quiet_for = if connections == Some(0) {
            self.quiet_since.entry(name(record)).or_insert_with(Instant::now).elapsed()
        } else {
            self.quiet_since.remove(&name(record));
            Duration::ZERO
        };
        let age_ms = api::report::unix_ms_now().saturating_sub(record.since_unix_ms);
        TeardownFacts {
            age: Duration::from_millis(age_ms),
            connections,
            quiet_for,
            is_other_gone: has_legs(record) && is_other_gone(context, record),
            is_guest_gone: is_guest_gone(context, record),
        }
    }
}

/// Returns what distinguishes a redirection from others of this host.
fn name(record: &RedirectionRecord) -> (String, Mac) {
    (record.redirection.migration.clone(), record.redirection.card)
}

/// Returns true if a later redirection of the same card is confirmed: this one should have ended with that.
fn is_replaced(record: &RedirectionRecord, all: &[RedirectionRecord]) -> bool {
    let active: Vec<_> = all.iter().filter(|other| other.stage == RecordStage::Active).cloned().collect();
    record.is_superseded(&active)
}

/// Acts on a redirection, unless its VM has begun to move since it was looked at, or the redirection is another one now.
fn act_if_unchanged(context: &Context, record: &RedirectionRecord, action: Reaping) {
    let Ok(vm) = VmName::new(record.redirection.guest()) else { return };
    let _exclusive = context.names.exclusive(&vm);
    let moves = context.journal.open_migrations().map(|open| {
        let mut vms = open.into_iter().map(|open| open.terms.migration.vm);
        vms.any(|moving| moving == vm)
    });
    let is_unchanged = context.redirections.records().is_ok_and(|records| records.contains(record));
    if moves.is_ok_and(|moves| !moves) && is_unchanged {
        act(context, record.clone(), action);
    }
}

fn act(context: &Context, record: RedirectionRecord, action: Reaping) {
    let (keeper, migration) = (&context.redirections, record.redirection.migration.clone());
    let (what, why, done) = match action {
        Reaping::Decide => match has_moved(context, &record) {
            None => return,
            Some(true) => ("confirmed", "its migration has succeeded", confirm(keeper, record)),
            Some(false) => ("removed", "its migration has ended without it", keeper.remove(&record)),
        },
        Reaping::Complete => ("completed", "something was missing", keeper.complete(&record)),
        Reaping::End(None) => {
            ("ended", "it was ending, or another one has replaced it", keeper.remove(&record))
        }
        Reaping::End(Some(reason @ TeardownReason::GuestGone)) => {
            ("ended", words(reason), keeper.remove(&record))
        }
        Reaping::End(Some(reason)) => ("ended", words(reason), keeper.drop_legs(&record)),
    };
    match done {
        Ok(()) => info!(migration, why, "{what} a redirection of old connections"),
        Err(error) => {
            warn!(migration, error = crate::chain(&error), "a redirection is not {what} yet");
        }
    }
}

/// Makes a prepared redirection active, whose VM has moved.
pub(crate) fn confirm(
    keeper: &RedirectionKeeper,
    mut record: RedirectionRecord,
) -> Result<(), RedirectionError> {
    let switched = keeper.switch(&mut record);
    keeper.confirm(&mut record).and(switched)
}

/// Returns true if the VM of a migration that is over is at its destination, as far as this host knows; none if the journal
/// cannot be read, or other hosts have not decided.
fn has_moved(context: &Context, record: &RedirectionRecord) -> Option<bool> {
    let redirection = &record.redirection;
    let Some(id) = migration_named(&redirection.migration) else { return Some(false) };
    let Some(journalled) = context.journal.migration(&id).ok()? else {
        // A host that the VM has left before has no part in the migration, but in its redirection.
        let is_of_others = redirection.place.host != record.host && redirection.legs.len() > 1;
        return if is_of_others {
            outcome(&standings(context, record, redirection.hosts()))
        } else {
            Some(false)
        };
    };
    Some(matches!(
        journalled.state,
        State::Source(SourceState::Done { .. }) | State::Destination(DestinationState::Active { .. })
    ))
}

/// Decides by what the other hosts of a redirection say whether the VM has moved; those that do not answer say nothing.
fn outcome(said: &[Option<Standing>]) -> Option<bool> {
    if said.iter().flatten().any(|standing| standing.confirmed) {
        return Some(true);
    }
    let is_over = said.iter().all(|said| said.is_some_and(|standing| !standing.stands));
    is_over.then_some(false)
}

fn words(reason: TeardownReason) -> &'static str {
    match reason {
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

/// Returns true if no host at the other end of a tunnel has its part of the redirection any more. One that does not answer
/// may have it.
fn is_other_gone(context: &Context, record: &RedirectionRecord) -> bool {
    let redirection = &record.redirection;
    // Hosts that the VM has left have no tunnels to one another.
    let is_here = redirection.place.host == record.host;
    let ends = redirection.hosts().filter(|host| is_here || *host == redirection.place.host);
    let said = standings(context, record, ends);
    !said.is_empty() && said.iter().all(|said| said.is_some_and(|standing| !standing.stands))
}

/// Asks hosts, but for this one, for their parts of a redirection; those that do not answer say nothing.
fn standings<'a>(
    context: &Context,
    record: &RedirectionRecord,
    hosts: impl Iterator<Item = &'a str>,
) -> Vec<Option<Standing>> {
    let Some(migration) = migration_named(&record.redirection.migration) else { return Vec::new() };
    let others = hosts.filter(|host| *host != record.host);
    let said = |host| {
        let said = ask(context, &host, migration.clone());
        said.inspect_err(|error| {
            let error = crate::chain(error);
            debug!(%migration, error, "the other host of a redirection does not answer");
        })
        .ok()
    };
    others.filter_map(|host| HostId::new(host).ok()).map(said).collect()
}

/// Asks another host for its part of a redirection.
fn ask(context: &Context, host: &HostId, migration: MigrationId) -> Result<Standing, PeerError> {
    let mut connection = peers::connect(context, host, None, Purpose::Redirection { migration })?;
    let lost = |source| PeerError::Lost { host: host.clone(), source };
    connection.send(&Message::AskRedirection).map_err(lost)?;
    let deadline = Instant::now() + Duration::from_millis(context.config.timeouts.peer_silence_ms);
    match connection.recv(Some(deadline)).map_err(lost)? {
        Incoming::Message(Message::RedirectionStands { stands, confirmed }) => {
            Ok(Standing { stands, confirmed })
        }
        _ => Err(PeerError::NoSense(host.clone())),
    }
}

#[cfg(test)]
mod tests;
