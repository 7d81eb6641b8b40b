//! Names of VMs that have moved from here to another network: their records of DNS are changed, and given their TTL
//! back later, whether the migration is still under way or over, and whichever agent began it.
//!
//! The changes of each migration are in a file of `names` in the state directory before anything is changed
//! ([`dns::ChangeJournal`]). An agent that starts continues them. The journal of the host decides which goal they have,
//! so that an agent may die at any moment; a driver that names a goal only saves time.

mod decide;
mod shown;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::report::{Report, unix_ms_now};
use api::{NameChanges, OpenNames};
use dns::{ChangeJournal, Goal, PrepareError, Progress, Relocation, Updater, ZoneConfig, Zones};
use net::conntrack;
use net::netlink::Socket;
use proto::{Epoch, MigrationId, VmName};
use store::journal::{Journal, JournalError};
use tracing::{info, warn};

use crate::config::Config;
use decide::{Facts, Step};
pub use shown::not_changed;

/// Directory of the files, in the state directory.
const DIRECTORY: &str = "names";
/// End of the name of a file.
const FILE_END: &str = ".json";
/// Pause between two looks at changes.
const PAUSE: Duration = Duration::from_millis(500);
/// Pause between two lists of connections.
const LOOK_PAUSE: Duration = Duration::from_secs(10);
/// Longest wait for servers when changes are to be over because their VM is back.
const SETTLE_PATIENCE: Duration = Duration::from_secs(2);

/// Changes the names of VMs, until nothing is left to do.
#[derive(Debug)]
pub struct NamesKeeper {
    directory: PathBuf,
    zones: Vec<ZoneConfig>,
    restore_after_s: u64,
    held: Mutex<BTreeMap<MigrationId, Held>>,
    signal: Arc<Signal>,
}

/// Names of one migration.
#[derive(Debug)]
struct Held {
    updater: Updater,
    /// State that the report in the journal has; none if it has none.
    saved: Option<NameChanges>,
    /// Time of the last look at connections, and whether one uses an old address; none if that is not known.
    looked: Option<(Instant, Option<bool>)>,
}

/// Wakes the thread that looks at changes.
#[derive(Debug, Default)]
pub struct Signal {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
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

impl Held {
    fn new(updater: Updater) -> Self {
        Self { updater, saved: None, looked: None }
    }

    fn shown(&self) -> NameChanges {
        shown::changes(&self.updater.record(), self.updater.goal())
    }

    fn pursue(&self, goal: Goal) {
        if self.updater.goal() == goal {
            return;
        }
        match goal {
            Goal::Lowered => {}
            Goal::Switched => self.updater.switch(),
            Goal::Restored => self.updater.restore(),
            Goal::Undone => self.updater.undo(),
        }
    }

    /// Ends the thread, and removes the file.
    fn end(self, id: &MigrationId) {
        if let Err(error) = self.updater.finish() {
            warn!(migration = %id, %error, "cannot remove the record of the names' changes");
        }
    }
}

impl NamesKeeper {
    /// Continues the changes of an agent before this one.
    pub fn load(config: &Config) -> Self {
        for (zone, reason) in Zones::load(&config.dns.zones).unusable() {
            warn!(%zone, reason, "names in this zone cannot follow VMs");
        }
        let this = Self {
            directory: config.state_dir.join(DIRECTORY),
            zones: config.dns.zones.clone(),
            restore_after_s: config.dns.restore_after_s,
            held: Mutex::default(),
            signal: Arc::default(),
        };
        for (id, path) in files(&this.directory) {
            match Updater::resume(Zones::load(&this.zones), &path) {
                Ok(Some(updater)) => {
                    info!(migration = %id, "continue to change names");
                    this.lock().insert(id, Held::new(updater));
                }
                Ok(None) => {}
                Err(error) => warn!(path = %path.display(), %error, "cannot continue to change names"),
            }
        }
        this
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<MigrationId, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what wakes the thread that calls [`step`](Self::step).
    pub fn signal(&self) -> Arc<Signal> {
        Arc::clone(&self.signal)
    }

    /// Records the changes of a migration, and begins to lower the TTLs. Returns false if nothing changes.
    ///
    /// # Errors
    /// If a name is in no zone, or the record cannot be written. Servers give no errors here.
    pub fn begin(&self, id: &MigrationId, relocation: &Relocation) -> Result<bool, PrepareError> {
        if dns::plan(&self.zones, relocation)?.is_empty() {
            return Ok(false);
        }
        self.settle(&id.vm);
        fs::create_dir_all(&self.directory)?;
        let file = self.directory.join(format!("{}@{}{FILE_END}", id.vm, id.epoch));
        let updater = Updater::prepare(Zones::load(&self.zones), relocation, &file)?;
        self.lock().insert(id.clone(), Held::new(updater));
        self.signal.set();
        Ok(true)
    }

    /// Changes the records to those of the destination: the VM runs there. Returns at once.
    pub fn switch(&self, id: &MigrationId) {
        self.pursue(id, Goal::Switched);
    }

    /// Gives the records back what was found: the VM stays. Returns at once.
    pub fn undo(&self, id: &MigrationId) {
        self.pursue(id, Goal::Undone);
    }

    fn pursue(&self, id: &MigrationId, goal: Goal) {
        if let Some(held) = self.lock().get(id) {
            held.pursue(goal);
            self.signal.set();
        }
    }

    /// Ends the changes of a VM that is here, whose names belong to a later migration: they get their TTL back, if
    /// their servers answer soon.
    pub fn settle(&self, vm: &VmName) {
        let ids: Vec<_> = self.lock().keys().filter(|id| id.vm == *vm).cloned().collect();
        for id in ids {
            let Some(held) = self.lock().remove(&id) else { continue };
            if held.updater.goal() == Goal::Switched {
                held.updater.restore();
            }
            let record = held.updater.wait_until(SETTLE_PATIENCE, ChangeJournal::is_tried);
            if record.goal != held.updater.goal() || record.progress() == Progress::Incomplete {
                warn!(migration = %id, "names have not got their TTL back before their VM moves again");
            }
            held.end(&id);
        }
    }

    /// Returns the changes of a migration, if they are not over.
    pub fn changes(&self, id: &MigrationId) -> Option<NameChanges> {
        self.lock().get(id).map(Held::shown)
    }

    /// Puts the present state of a migration's names into its report, if they are not over.
    pub fn put_into(&self, report: &mut Report) {
        if let Some(changes) = self.changes(&report.migration) {
            shown::put_into(report, changes);
        }
    }

    /// Returns all changes that are not over.
    pub fn open(&self) -> Vec<OpenNames> {
        let open =
            |(id, held): (&MigrationId, &Held)| OpenNames { migration: id.clone(), changes: held.shown() };
        self.lock().iter().map(open).collect()
    }

    /// Looks at all changes: gives them the goal that follows from the journal, records their state in reports, and
    /// ends those that are over. Returns the time after which that is to be repeated; none if there are none.
    pub fn step(&self, journal: &Journal) -> Option<Duration> {
        let ids: Vec<_> = self.lock().keys().cloned().collect();
        for id in &ids {
            if let Err(error) = self.step_one(id, journal) {
                warn!(migration = %id, error = crate::chain(&error), "cannot read or write the journal for names");
            }
        }
        (!self.lock().is_empty()).then_some(PAUSE)
    }

    fn step_one(&self, id: &MigrationId, journal: &Journal) -> Result<(), JournalError> {
        let migration = journal.migration(id)?;
        let mut all = self.lock();
        let Some(held) = all.get_mut(id) else { return Ok(()) };
        let (goal, record) = (held.updater.goal(), held.updater.record());
        let is_closed = migration.as_ref().is_none_or(|migration| !migration.open);
        let mut facts = Facts {
            goal,
            progress: if record.goal == goal { record.progress() } else { Progress::Incomplete },
            is_left_alone: record.goal == goal && record.is_left_alone(),
            place: match &migration {
                Some(migration) => decide::place(&migration.state),
                None => Some(decide::place_by_goal(goal)),
            },
            is_closed,
            decided_for_s: migration
                .as_ref()
                .map_or(u64::MAX, |migration| unix_ms_now().saturating_sub(migration.updated_unix_ms) / 1000),
            is_cached: record.stale_until_s().is_none_or(|until_s| unix_ms_now() / 1000 < until_s),
            is_used: None,
        };
        if decide::may_be_unused(&facts) {
            facts.is_used = held.look(&record);
        }
        let step = decide::next_step(&facts, self.restore_after_s);
        let shown = held.shown();
        if is_closed && held.saved.as_ref() != Some(&shown) {
            save(journal, id, &shown)?;
            held.saved = Some(shown);
        }
        match step {
            Step::Wait => {}
            Step::Pursue(goal) => held.pursue(goal),
            Step::End => {
                let held = all.remove(id);
                drop(all);
                info!(migration = %id, ?goal, "names need nothing any more");
                if let Some(held) = held {
                    held.end(id);
                }
            }
        }
        Ok(())
    }
}

impl Drop for NamesKeeper {
    /// Wakes the thread, which ends then.
    fn drop(&mut self) {
        self.signal.set();
    }
}

impl Held {
    /// Returns true if this host tracks a connection with an old address; none if that is not known.
    fn look(&mut self, record: &ChangeJournal) -> Option<bool> {
        if let Some((at, known)) = self.looked
            && at.elapsed() < LOOK_PAUSE
        {
            return known;
        }
        let addresses = record.old_addresses();
        let listed = Socket::netfilter().and_then(|netfilter| conntrack::list(&netfilter, &addresses, 1));
        let known = listed.map(|(entries, _)| !entries.is_empty()).ok();
        self.looked = Some((Instant::now(), known));
        known
    }
}

/// Records the state of names in the report of their migration.
fn save(journal: &Journal, id: &MigrationId, changes: &NameChanges) -> Result<(), JournalError> {
    let Some(mut report) = journal.report(id)? else { return Ok(()) };
    shown::put_into(&mut report, changes.clone());
    journal.put_report(&report)
}

/// Returns the files of all changes that are open, each with its migration.
fn files(directory: &Path) -> Vec<(MigrationId, PathBuf)> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            warn!(directory = %directory.display(), %error, "cannot look for names that are to be changed");
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
