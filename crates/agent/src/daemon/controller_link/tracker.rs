//! Reported state of this host: what has changed since is reported next.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::evacuation::{CommandState, HostContents};
use proto::limits::{FLEET_CHANGES, FLEET_TEXT_BYTES};
use proto::message::{FleetChange, HostFacts, MigrationFacts, MigrationProgress, MigrationStanding, VmFacts};
use proto::{CommandId, MigrationId, VmName};
use store::journal::{JournalError, MigrationRecord};

use super::facts::{LoadMeter, host_facts};
use super::vms::VmSurvey;
use super::{contents, moves};
use crate::daemon::Daemon;
use api::progress::{Progress, Standing};

/// Number of migrations that are reported, the newest ones.
const MIGRATIONS: u32 = 256;
/// Time between two looks at the host's use and its contents.
const LOAD_PAUSE: Duration = Duration::from_secs(5);
/// Time between two looks at facts that rarely change.
const FACTS_PAUSE: Duration = Duration::from_secs(30);

/// Reported state.
#[derive(Debug)]
pub(super) struct Tracker {
    namespaces_are_hosts: bool,
    host: Option<HostFacts>,
    facts_since: Instant,
    load: LoadMeter,
    load_since: Option<Instant>,
    pool_free_bytes: u64,
    contents: Option<HostContents>,
    survey: VmSurvey,
    vms: BTreeMap<VmName, VmFacts>,
    migrations: BTreeMap<MigrationId, MigrationFacts>,
    moves: BTreeMap<CommandId, CommandState>,
}

impl Tracker {
    pub(super) fn new(namespaces_are_hosts: bool) -> Self {
        Self {
            namespaces_are_hosts,
            host: None,
            facts_since: Instant::now(),
            load: LoadMeter::default(),
            load_since: None,
            pool_free_bytes: 0,
            contents: None,
            survey: VmSurvey::default(),
            vms: BTreeMap::new(),
            migrations: BTreeMap::new(),
            moves: BTreeMap::new(),
        }
    }

    /// Records facts of the host that were reported.
    pub(super) fn set_host(&mut self, host: &HostFacts) {
        self.host = Some(host.clone());
    }

    /// Returns the changes since the last call, in lists that fit into a report. VMs come before the moves that have
    /// brought them or taken them away: whoever learns of the end of a move knows where its VM is.
    pub(super) fn changes(&mut self, daemon: &Arc<Daemon>) -> Result<Vec<Vec<FleetChange>>, JournalError> {
        let mut changes = Vec::new();
        self.add_host(daemon, &mut changes)?;
        self.add_vms(daemon, &mut changes)?;
        self.add_migrations(daemon, &mut changes)?;
        self.add_moves(daemon, &mut changes)?;
        self.add_load(daemon, &mut changes);
        let mut lists = Vec::new();
        while changes.len() > FLEET_CHANGES {
            let rest = changes.split_off(FLEET_CHANGES);
            lists.push(std::mem::replace(&mut changes, rest));
        }
        if !changes.is_empty() {
            lists.push(changes);
        }
        Ok(lists)
    }

    fn add_host(&mut self, daemon: &Arc<Daemon>, changes: &mut Vec<FleetChange>) -> Result<(), JournalError> {
        let cordoned = daemon.context.journal.is_cordoned()?;
        let Some(host) = &mut self.host else { return Ok(()) };
        let is_due = self.facts_since.elapsed() >= FACTS_PAUSE || host.cordoned != cordoned;
        if is_due {
            self.facts_since = Instant::now();
            let now = host_facts(daemon);
            if now != *host {
                host.clone_from(&now);
                changes.push(FleetChange::Host { host: Box::new(now) });
            }
        }
        Ok(())
    }

    fn add_load(&mut self, daemon: &Arc<Daemon>, changes: &mut Vec<FleetChange>) {
        // What VMs and migrations have changed is in the contents, too.
        let is_due = self.load_since.is_none_or(|since| since.elapsed() >= LOAD_PAUSE);
        if is_due {
            self.load_since = Some(Instant::now());
            let pool = daemon.context.config.pool.as_ref();
            self.pool_free_bytes = pool.map_or(0, host::config::Pool::free_space_bytes);
            changes.push(FleetChange::Load { load: self.load.measure(self.pool_free_bytes) });
        }
        if is_due || !changes.is_empty() {
            let contents = contents::contents(daemon, self.namespaces_are_hosts);
            if self.contents.as_ref() != Some(&contents) {
                let value = serde_json::to_value(&contents).unwrap_or_default();
                changes.push(FleetChange::Contents { contents: value });
                self.contents = Some(contents);
            }
        }
    }

    fn add_vms(&mut self, daemon: &Arc<Daemon>, changes: &mut Vec<FleetChange>) -> Result<(), JournalError> {
        let now = self.survey.look(daemon)?;
        for (name, vm) in &now {
            if self.vms.get(name) != Some(vm) {
                changes.push(FleetChange::Vm { vm: Box::new(vm.clone()) });
            }
        }
        let gone = self.vms.keys().filter(|name| !now.contains_key(*name));
        changes.extend(gone.map(|vm| FleetChange::VmGone { vm: vm.clone() }));
        self.vms = now;
        Ok(())
    }

    fn add_migrations(
        &mut self,
        daemon: &Arc<Daemon>,
        changes: &mut Vec<FleetChange>,
    ) -> Result<(), JournalError> {
        let records = daemon.context.journal.newest_migrations(MIGRATIONS)?;
        let mut now = BTreeMap::new();
        // The oldest first, so that the newest are the last that whoever receives them learns.
        for record in records.into_iter().rev() {
            let facts = migration_facts(daemon, &record);
            if self.migrations.get(&facts.migration) != Some(&facts) {
                changes.push(FleetChange::Migration { migration: Box::new(facts.clone()) });
            }
            now.insert(facts.migration.clone(), facts);
        }
        self.migrations = now;
        Ok(())
    }

    fn add_moves(
        &mut self,
        daemon: &Arc<Daemon>,
        changes: &mut Vec<FleetChange>,
    ) -> Result<(), JournalError> {
        let mut now = BTreeMap::new();
        for id in daemon.context.journal.open_commands()? {
            let state = moves::state(daemon, &id)?;
            // Another command, or one that was removed in between.
            if state != CommandState::Unknown {
                now.insert(id, state);
            }
        }
        // Those that are no longer open have ended.
        for id in self.moves.keys().filter(|id| !now.contains_key(*id)).cloned().collect::<Vec<_>>() {
            let state = moves::state(daemon, &id)?;
            push_move(changes, &id, &state);
        }
        for (id, state) in &now {
            if self.moves.get(id) != Some(state) {
                push_move(changes, id, state);
            }
        }
        now.retain(|_, state| !moves::is_settled(state));
        self.moves = now;
        Ok(())
    }
}

fn push_move(changes: &mut Vec<FleetChange>, command: &CommandId, state: &CommandState) {
    let state = serde_json::to_value(state).unwrap_or_default();
    changes.push(FleetChange::Move { command: command.clone(), state });
}

/// Returns the facts of a migration.
fn migration_facts(daemon: &Arc<Daemon>, record: &MigrationRecord) -> MigrationFacts {
    let progress = daemon.drivers().get(record.id()).map(|driven| driven.publisher.now());
    let message = progress.as_ref().and_then(|progress| progress.message.clone()).or(record.message.clone());
    let is_source = record.role() == api::Role::Source;
    MigrationFacts {
        migration: record.id().clone(),
        from: record.terms.source.clone(),
        to: record.terms.destination.clone(),
        state: record.state.name().to_owned(),
        standing: standing_fact(daemon.standing_of(record)),
        message: message.map(|message| shortened(&message)),
        progress: progress.filter(|_| is_source).map(|progress| progress_fact(&progress)),
    }
}

fn standing_fact(standing: Standing) -> MigrationStanding {
    match standing {
        Standing::Underway => MigrationStanding::Underway,
        Standing::Done => MigrationStanding::Done,
        Standing::Failed => MigrationStanding::Failed,
        Standing::VmEnded => MigrationStanding::VmEnded,
        Standing::InDoubt => MigrationStanding::InDoubt,
    }
}

fn progress_fact(progress: &Progress) -> MigrationProgress {
    let phase = serde_json::to_value(progress.phase).ok();
    MigrationProgress {
        phase: phase.and_then(|phase| phase.as_str().map(str::to_owned)).unwrap_or_default(),
        round_bytes: progress.round_bytes,
        remaining_bytes: progress.remaining_bytes,
        sent_bytes: progress.sent_bytes,
        rate_bytes_per_s: progress.rate_bytes_per_s,
        dirty_rate_bytes_per_s: progress.dirty_rate_bytes_per_s,
        downtime_us: progress.downtime_us,
        elapsed_us: progress.elapsed_us,
    }
}

/// Returns the part of a text that fits into a report.
fn shortened(text: &str) -> String {
    text[..text.floor_char_boundary(FLEET_TEXT_BYTES)].to_owned()
}
