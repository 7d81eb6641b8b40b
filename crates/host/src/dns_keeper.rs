//! Names of VMs that have moved from here to another network: their records of DNS are changed, and given their TTL
//! back later, whether the migration is still under way or over, and whichever agent began it.
//!
//! The changes of each migration are in a file of `names` in the state directory before anything is changed
//! ([`dns::ChangeSet`]). An agent that starts continues them. The journal of the host decides which goal they have,
//! so that an agent may die at any moment; a driver that names a goal only saves time.

mod api_form;
mod decide;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::report::{Report, unix_ms_now};
use api::{NameChanges, OpenNames};
use dns::{ChangeSet, Goal, PrepareError, Progress, Relocation, Updater, ZoneConfig, Zones};
use net::conntrack;
use net::netlink::Socket;
use proto::{Epoch, MigrationId, VmName};
use store::journal::{Journal, JournalError};
use tracing::{info, warn};

use crate::config::Config;
pub use api_form::not_changed;
use decide::{ChangeFacts, Step};

/// Directory of the files, in the state directory.
const DIRECTORY: &str = "names";
/// End of the name of a file.
const FILE_END: &str = ".json";
/// Pause between two looks at changes.
const PAUSE: Duration = Duration::from_millis(500);
/// Pause between two lists of connections.
const LOOK_PAUSE: Duration = Duration::from_secs(10);
/// Longest wait for servers when changes are to be over because their VM is back.
const EARLIER_PATIENCE: Duration = Duration::from_secs(2);

/// Changes the names of VMs, until nothing is left to do.
#[derive(Debug)]
pub struct DnsKeeper {
    directory: PathBuf,
    zones: Vec<ZoneConfig>,
    restore_after_s: u64,
    held: Mutex<BTreeMap<MigrationId, OpenChanges>>,
    wakeup: Arc<Wakeup>,
}

/// Names of one migration.
#[derive(Debug)]
struct OpenChanges {
    updater: Updater,
    /// State that the report in the journal has; none if it has none.
    saved: Option<NameChanges>,
    /// Time of the last look at connections, and whether one uses an old address; none if that is not known.
    looked: Option<(Instant, Option<bool>)>,
}

/// Wakes the thread that looks at changes.
#[derive(Debug, Default)]
pub struct Wakeup {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Wakeup {
    fn set(&self) {
        *self.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits until there is something to do, or for this time; without a limit if it is absent.
    pub fn wait(&self, limit: Option<Duration>) {
        let is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let is_waiting = |is_set: &mut bool| !*is_set;
        let mut is_set = match limit {
            Some(limit) => {
                let waited = self.changed.wait_timeout_while(is_set, limit, is_waiting);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.changed.wait_while(is_set, is_waiting).unwrap_or_else(PoisonError::into_inner),
        };
        *is_set = false;
    }
}

impl OpenChanges {
    fn new(updater: Updater) -> Self {
        Self { updater, saved: None, looked: None }
    }

    fn api_form(&self) -> NameChanges {
        api_form::changes(&self.updater.change_set(), self.updater.goal())
    }

    fn set_goal(&self, goal: Goal) {
        if self.updater.goal() == goal {
            return;
        }
        match goal {
            Goal::Lowered => {}
            Goal::Switched => self.updater.switch(),
            Goal::Restored => self.updater.restore_ttl(),
            Goal::Undone => self.updater.undo(),
        }
    }

    /// Ends the changes without a wait for what the thread is doing.
    fn end(self, id: &MigrationId) {
        if let Err(error) = self.updater.abandon() {
            warn!(migration = %id, %error, "cannot remove the file of changes of DNS records");
        }
    }
}

impl DnsKeeper {
    /// Continues the changes of an agent before this one.
    pub fn load(config: &Config) -> Self {
        for (zone, reason) in Zones::load(&config.dns.zones).unusable() {
            warn!(%zone, reason, "DNS records of this zone cannot follow VMs");
        }
        let this = Self {
            directory: config.state_dir.join(DIRECTORY),
            zones: config.dns.zones.clone(),
            restore_after_s: config.dns.restore_after_s,
            held: Mutex::default(),
            wakeup: Arc::default(),
        };
        for (id, path) in files(&this.directory) {
            match Updater::resume(Zones::load(&this.zones), &path) {
                Ok(Some(updater)) => {
                    info!(migration = %id, "DNS records: continuing the changes of an earlier agent");
                    this.lock().insert(id, OpenChanges::new(updater));
                }
                Ok(None) => {}
                Err(error) => warn!(path = %path.display(), %error, "cannot continue changes of DNS records"),
            }
        }
        this
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<MigrationId, OpenChanges>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what wakes the thread that calls [`tick`](Self::tick).
    pub fn wakeup(&self) -> Arc<Wakeup> {
        Arc::clone(&self.wakeup)
    }

    /// Records the changes of a migration, and begins to lower the TTLs. Changes of an earlier one end; what they know of
    /// TTLs that they have not given back yet is taken over. Returns false if nothing changes.
    ///
    /// # Errors
    /// If a name is in no zone, or the file cannot be written. Servers give no errors here.
    pub fn begin(&self, id: &MigrationId, relocation: &Relocation) -> Result<bool, PrepareError> {
        if dns::changes_of(&self.zones, relocation)?.is_empty() {
            return Ok(false);
        }
        fs::create_dir_all(&self.directory)?;
        let file = self.directory.join(format!("{}@{}{FILE_END}", id.vm, id.epoch));
        let zones = Zones::load(&self.zones);
        let mut all = self.lock();
        let earlier: Vec<_> = all.keys().filter(|other| other.vm == id.vm).cloned().collect();
        let unfinished: Vec<_> =
            earlier.iter().filter_map(|id| Some(all.get(id)?.updater.change_set())).collect();
        let updater = Updater::prepare(zones, relocation, &file, &unfinished)?;
        let ended: Vec<_> = earlier.iter().filter_map(|id| Some((id, all.remove(id)?))).collect();
        all.insert(id.clone(), OpenChanges::new(updater));
        drop(all);
        for (id, held) in ended {
            held.end(id);
        }
        self.wakeup.set();
        Ok(true)
    }

    /// Changes the records to those of the destination: the VM runs there. Returns at once.
    pub fn switch(&self, id: &MigrationId) {
        self.set_goal(id, Goal::Switched);
    }

    /// Gives the records back what was found: the VM stays. Returns at once.
    pub fn undo(&self, id: &MigrationId) {
        self.set_goal(id, Goal::Undone);
    }

    fn set_goal(&self, id: &MigrationId, goal: Goal) {
        if let Some(held) = self.lock().get(id) {
            held.set_goal(goal);
            self.wakeup.set();
        }
    }

    /// Begins to give the names of a VM their TTL back, which is about to arrive here. Returns the time until which servers
    /// are waited for, in [`end_earlier_changes`](Self::end_earlier_changes).
    pub fn begin_to_end_changes(&self, vm: &VmName) -> Instant {
        let all = self.lock();
        for (_, held) in all.iter().filter(|(id, _)| id.vm == *vm) {
            if held.updater.goal() == Goal::Switched {
                held.updater.restore_ttl();
            }
        }
        Instant::now() + EARLIER_PATIENCE
    }

    /// Ends the changes of a VM whose names belong to a later migration: they have got their TTL back, if their servers
    /// have answered by then.
    pub fn end_earlier_changes(&self, vm: &VmName, until: Instant) {
        let ids: Vec<_> = self.lock().keys().filter(|id| id.vm == *vm).cloned().collect();
        for id in ids {
            let Some(held) = self.lock().remove(&id) else { continue };
            if held.updater.goal() == Goal::Switched {
                held.updater.restore_ttl();
            }
            let limit = until.saturating_duration_since(Instant::now());
            let change_set = held.updater.wait_until(limit, ChangeSet::is_tried);
            if change_set.goal != held.updater.goal() || change_set.progress() == Progress::Incomplete {
                warn!(migration = %id, "DNS records did not get their TTL back before their VM moves again");
            }
            held.end(&id);
        }
    }

    /// Returns the changes of a migration, if they are not over.
    pub fn changes(&self, id: &MigrationId) -> Option<NameChanges> {
        self.lock().get(id).map(OpenChanges::api_form)
    }

    /// Puts the present state of a migration's names into its report, if they are not over.
    pub fn put_into(&self, report: &mut Report) {
        if let Some(changes) = self.changes(&report.migration) {
            api_form::put_into(report, changes);
        }
    }

    /// Returns all changes that are not over.
    pub fn open(&self) -> Vec<OpenNames> {
        let open = |(id, held): (&MigrationId, &OpenChanges)| OpenNames {
            migration: id.clone(),
            changes: held.api_form(),
        };
        self.lock().iter().map(open).collect()
    }

    /// Looks at all changes: gives them the goal that follows from the journal, records their state in reports, and
    /// ends those that are over. Returns the time after which that is to be repeated; none if there are none.
    pub fn tick(&self, journal: &Journal) -> Option<Duration> {
        let ids: Vec<_> = self.lock().keys().cloned().collect();
        for id in &ids {
            if let Err(error) = self.tick_one(id, journal) {
                warn!(
                    migration = %id,
                    error = crate::chain(&error),
                    "cannot read or write the journal for DNS records"
                );
            }
        }
        (!self.lock().is_empty()).then_some(PAUSE)
    }

    /// Decides about one migration's names. The lock is not held while the kernel lists connections, nor while the journal is
    /// written: drivers and users wait for it.
    fn tick_one(&self, id: &MigrationId, journal: &Journal) -> Result<(), JournalError> {
        let migration = journal.migration(id)?;
        let Some(held) = self.lock().get(id).map(HeldState::of) else { return Ok(()) };
        let HeldState { goal, change_set, api_form, saved, looked } = held;
        let is_closed = migration.as_ref().is_none_or(|migration| !migration.open);
        let mut facts = ChangeFacts {
            goal,
            progress: if change_set.goal == goal { change_set.progress() } else { Progress::Incomplete },
            has_only_conflicts: change_set.goal == goal && change_set.has_only_conflicts(),
            location: match &migration {
                Some(migration) => decide::location(&migration.state),
                None => Some(decide::location_by_goal(goal)),
            },
            is_closed,
            decided_for_s: migration
                .as_ref()
                .map_or(u64::MAX, |migration| unix_ms_now().saturating_sub(migration.updated_unix_ms) / 1000),
            is_cached: change_set.stale_until_s().is_none_or(|until_s| unix_ms_now() / 1000 < until_s),
            is_used: None,
        };
        if decide::may_be_unused(&facts) {
            let known = looked.filter(|(at, _)| at.elapsed() < LOOK_PAUSE);
            let (at, is_used) = known.unwrap_or_else(|| (Instant::now(), is_used(&change_set)));
            facts.is_used = is_used;
            self.update(id, |held| held.looked = Some((at, is_used)));
        }
        let step = decide::next_step(&facts, self.restore_after_s);
        if is_closed && saved.as_ref() != Some(&api_form) {
            save(journal, id, &api_form)?;
            self.update(id, |held| held.saved = Some(api_form));
        }
        match step {
            Step::Wait => {}
            // A driver may have set another goal meanwhile: the next call decides about that.
            Step::SetGoal(next) => self.update(id, |held| {
                if held.updater.goal() == goal {
                    held.set_goal(next);
                }
            }),
            Step::End => {
                let ended = {
                    let mut all = self.lock();
                    let is_same = all.get(id).is_some_and(|held| held.updater.goal() == goal);
                    if is_same { all.remove(id) } else { None }
                };
                if let Some(held) = ended {
                    info!(migration = %id, ?goal, "DNS records: all changes made");
                    held.end(id);
                }
            }
        }
        Ok(())
    }

    fn update(&self, id: &MigrationId, change: impl FnOnce(&mut OpenChanges)) {
        if let Some(held) = self.lock().get_mut(id) {
            change(held);
        }
    }
}

/// State of one migration's names at a moment.
struct HeldState {
    goal: Goal,
    change_set: ChangeSet,
    api_form: NameChanges,
    saved: Option<NameChanges>,
    looked: Option<(Instant, Option<bool>)>,
}

impl HeldState {
    fn of(held: &OpenChanges) -> Self {
        Self {
            goal: held.updater.goal(),
            change_set: held.updater.change_set(),
            api_form: held.api_form(),
            saved: held.saved.clone(),
            looked: held.looked,
        }
    }
}

impl Drop for DnsKeeper {
    /// Wakes the thread, which ends then.
    fn drop(&mut self) {
        self.wakeup.set();
    }
}

/// Returns true if this host tracks a connection with an old address; none if that is not known.
fn is_used(change_set: &ChangeSet) -> Option<bool> {
    let addresses = change_set.old_addresses();
    Socket::netfilter().and_then(|netfilter| conntrack::any_of(netfilter, &addresses)).ok()
}

/// Records the state of names in the report of their migration.
fn save(journal: &Journal, id: &MigrationId, changes: &NameChanges) -> Result<(), JournalError> {
    let Some(mut report) = journal.report(id)? else { return Ok(()) };
    api_form::put_into(&mut report, changes.clone());
    journal.put_report(&report)
}

/// Returns the files of all changes that are open, each with its migration.
fn files(directory: &Path) -> Vec<(MigrationId, PathBuf)> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            warn!(directory = %directory.display(), %error, "cannot look for unfinished changes of DNS records");
            return Vec::new();
        }
    };
    let paths = entries.flatten().map(|entry| entry.path());
    paths.filter_map(|path| Some((migration_of(path.file_name()?.to_str()?)?, path))).collect()
}

/// Returns the migration whose changes a file of this name has.
fn migration_of(name: &str) -> Option<MigrationId> {
    let (vm, epoch) = name.strip_suffix(FILE_END)?.rsplit_once('@')?;
    Some(MigrationId { vm: VmName::new(vm).ok()?, epoch: Epoch(epoch.parse().ok()?) })
}

#[cfg(test)]
mod tests;
