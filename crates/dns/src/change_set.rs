//! All changes of one migration, in a file: what was found is known before anything is changed, so that an agent
//! that starts again can finish or undo it.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::change::{ChangeState, Goal, RrsetChange};
use crate::failure::Failure;
use crate::rdata::Rdata;

/// Version of the file's format.
const FORMAT: u32 = 1;

/// All changes of one migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeSet {
    format: u32,
    /// Goal of all changes.
    pub goal: Goal,
    /// The changes, each of one name and type.
    pub changes: Vec<RrsetChange>,
}

/// Progress of all changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Progress {
    /// The goal is reached at all servers.
    Complete,
    /// It is reached at the primaries; secondaries do not have it yet.
    Lagging,
    /// At least one change has not been made.
    Incomplete,
}

impl ChangeSet {
    pub(crate) fn new(changes: Vec<RrsetChange>) -> Self {
        Self { format: FORMAT, goal: Goal::Lowered, changes }
    }

    /// Takes over what earlier changes, which are not finished, know of the TTLs of the same records.
    pub(crate) fn adopt_ttls(&mut self, earlier: &[ChangeSet]) {
        for change in &mut self.changes {
            let mut others = earlier.iter().flat_map(|earlier| &earlier.changes);
            change.original_ttl_s = others.find_map(|other| {
                let is_same = (&other.owner, other.kind) == (&change.owner, change.kind);
                let known = other.original.as_ref().map(|original| original.ttl_s).or(other.original_ttl_s);
                known.filter(|_| is_same)
            });
        }
    }

    /// Returns the progress of all changes.
    pub fn progress(&self) -> Progress {
        if self.changes.iter().all(|change| change.is_complete(self.goal)) {
            Progress::Complete
        } else if self.changes.iter().all(|change| change.is_reached(self.goal)) {
            Progress::Lagging
        } else {
            Progress::Incomplete
        }
    }

    /// Returns the changes that have not reached the goal at all servers.
    pub fn unfinished(&self) -> impl Iterator<Item = &RrsetChange> {
        self.changes.iter().filter(|change| !change.is_complete(self.goal))
    }

    /// Returns true if each change that has not reached the goal at the primary is another client's now, or in
    /// a zone that the configuration does not have any longer: no further attempt is likely to make it.
    pub fn has_only_conflicts(&self) -> bool {
        let mut missing = self.changes.iter().filter(|change| !change.is_reached(self.goal));
        missing.all(|change| match &change.state {
            ChangeState::Conflict { .. } => true,
            ChangeState::Failed { failure } => matches!(failure, Failure::NotConfigured { .. }),
            ChangeState::Pending | ChangeState::NotNeeded | ChangeState::Made { .. } => false,
        })
    }

    /// Returns true if each change has reached the goal, or was tried and could not.
    pub fn is_tried(&self) -> bool {
        self.unfinished().all(|change| match &change.state {
            ChangeState::Made { goal, .. } => *goal == self.goal,
            ChangeState::Pending => false,
            ChangeState::NotNeeded | ChangeState::Conflict { .. } | ChangeState::Failed { .. } => true,
        })
    }

    /// Returns the addresses that names had at the source, and do not have at the destination.
    pub fn old_addresses(&self) -> BTreeSet<IpAddr> {
        let addresses = |records: fn(&RrsetChange) -> BTreeSet<Rdata>| -> BTreeSet<IpAddr> {
            let records = self.made().flat_map(records);
            records.filter_map(|data| data.to_address()).collect()
        };
        &addresses(RrsetChange::before) - &addresses(RrsetChange::after)
    }

    /// Returns the changes without those that are not needed.
    fn made(&self) -> impl Iterator<Item = &RrsetChange> {
        self.changes.iter().filter(|change| change.state != ChangeState::NotNeeded)
    }

    /// Returns the last time at which a cache may still give records of the source, in seconds since 1970; none as long as
    /// the records have not all been changed.
    pub fn stale_until_s(&self) -> Option<u64> {
        let stale = self.made().map(RrsetChange::stale_until_s);
        stale.collect::<Option<Vec<_>>>()?.into_iter().max()
    }
}

/// File with a set of changes. Each version replaces the one before as a whole. Clones are of one file.
#[derive(Clone, Debug)]
pub(crate) struct ChangeSetFile {
    path: PathBuf,
    /// True if it is given up: nothing is written any more.
    is_given_up: Arc<Mutex<bool>>,
}

impl ChangeSetFile {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), is_given_up: Arc::default() }
    }

    /// Writes the first version.
    ///
    /// # Errors
    /// Among others if there is a file: it has what another migration has to restore.
    pub(crate) fn create(&self, change_set: &ChangeSet) -> io::Result<()> {
        if self.path.try_exists()? {
            let text = format!("{} has changes that are to be finished or undone first", self.path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        self.save(change_set)
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// Among others if it is given up.
    pub(crate) fn save(&self, change_set: &ChangeSet) -> io::Result<()> {
        let is_given_up = self.is_given_up.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_given_up {
            return Err(io::Error::other("these changes are given up"));
        }
        let mut new = self.path.clone().into_os_string();
        new.push(".new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(change_set)?)?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        self.sync_directory()
    }

    /// Reads the file; none if there is none.
    pub(crate) fn load(&self) -> io::Result<Option<ChangeSet>> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut change_set: ChangeSet = serde_json::from_slice(&bytes)?;
        if change_set.format != FORMAT {
            let text = format!("{} is of another version of this program", self.path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        // The agent that has written it may have sent updates that it did not record.
        for change in &mut change_set.changes {
            change.may_still_apply = true;
        }
        Ok(Some(change_set))
    }

    /// Removes the file, if it is there; no other thread writes it again.
    pub(crate) fn give_up(&self) -> io::Result<()> {
        *self.is_given_up.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.remove()
    }

    /// Returns true if it is given up.
    pub(crate) fn is_given_up(&self) -> bool {
        *self.is_given_up.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the file, if it is there.
    pub(crate) fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.sync_directory()
    }

    fn sync_directory(&self) -> io::Result<()> {
        let directory = self.path.parent().filter(|path| !path.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    }
}
