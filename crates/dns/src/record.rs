//! Record of all changes of one migration, in a file: what was found is known before anything is changed, so that an agent
//! that starts again can finish or undo it.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::change::{Change, ChangeState, Goal};
use crate::data::Data;
use crate::failure::Failure;

/// Version of the file's format.
const FORMAT: u32 = 1;

/// All changes of one migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeJournal {
    format: u32,
    /// Goal of all changes.
    pub goal: Goal,
    /// The changes, each of one name and type.
    pub changes: Vec<Change>,
}

/// Progress of all changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Progress {
    /// The goal is reached at all servers.
    Complete,
    /// It is reached where updates are accepted; other servers do not have it yet.
    Lagging,
    /// At least one change has not been made.
    Incomplete,
}

impl ChangeJournal {
    pub(crate) fn new(changes: Vec<Change>) -> Self {
        Self { format: FORMAT, goal: Goal::Lowered, changes }
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
    pub fn unfinished(&self) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(|change| !change.is_complete(self.goal))
    }

    /// Returns true if each change that has not reached the goal where updates are accepted is another hand's now, or in
    /// a zone that the configuration does not have any longer: no further attempt is likely to make it.
    pub fn is_left_alone(&self) -> bool {
        let mut missing = self.changes.iter().filter(|change| !change.is_reached(self.goal));
        missing.all(|change| match &change.state {
            ChangeState::Conflict { .. } => true,
            ChangeState::Failed { failure } => matches!(failure, Failure::NotConfigured { .. }),
            ChangeState::Pending | ChangeState::NotNeeded | ChangeState::Reached { .. } => false,
        })
    }

    /// Returns true if each change has reached the goal, or was tried and could not.
    pub fn is_tried(&self) -> bool {
        self.unfinished().all(|change| match &change.state {
            ChangeState::Reached { goal, .. } => *goal == self.goal,
            ChangeState::Pending => false,
            ChangeState::NotNeeded | ChangeState::Conflict { .. } | ChangeState::Failed { .. } => true,
        })
    }

    /// Returns the addresses that names had at the source, and do not have at the destination.
    pub fn old_addresses(&self) -> BTreeSet<IpAddr> {
        let addresses = |records: fn(&Change) -> BTreeSet<Data>| -> BTreeSet<IpAddr> {
            let records = self.made().flat_map(records);
            records.filter_map(|data| data.to_address()).collect()
        };
        &addresses(Change::before) - &addresses(Change::after)
    }

    /// Returns the changes without those that are not needed.
    fn made(&self) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(|change| change.state != ChangeState::NotNeeded)
    }

    /// Returns the time from which no cache has records with the TTL that was found, in seconds since 1970. From then on a
    /// switch is seen by all within the low TTL. None as long as a TTL has not been lowered.
    pub fn settled_at_s(&self) -> Option<u64> {
        let settled = self.made().map(|change| {
            let survey = change.survey.as_ref()?;
            Some(survey.lowered_at_s? + u64::from(survey.ttl_s))
        });
        settled.collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    /// Returns the last time at which a cache may still give records of the source, in seconds since 1970; none as long as
    /// the records have not all been changed.
    pub fn stale_until_s(&self) -> Option<u64> {
        let stale = self.made().map(Change::stale_until_s);
        stale.collect::<Option<Vec<_>>>()?.into_iter().max()
    }
}

/// File with a record. Each version replaces the one before as a whole.
#[derive(Clone, Debug)]
pub(crate) struct RecordFile {
    path: PathBuf,
}

impl RecordFile {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Writes the first version.
    ///
    /// # Errors
    /// Among others if there is a file: it has what another migration has to restore.
    pub(crate) fn create(&self, record: &ChangeJournal) -> io::Result<()> {
        if self.path.try_exists()? {
            let text = format!("{} has changes that are to be finished or undone first", self.path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        self.save(record)
    }

    /// Replaces the file.
    pub(crate) fn save(&self, record: &ChangeJournal) -> io::Result<()> {
        let mut new = self.path.clone().into_os_string();
        new.push(".new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        self.sync_directory()
    }

    /// Reads the file; none if there is none.
    pub(crate) fn load(&self) -> io::Result<Option<ChangeJournal>> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut record: ChangeJournal = serde_json::from_slice(&bytes)?;
        if record.format != FORMAT {
            let text = format!("{} is of another version of this program", self.path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        // The agent that has written it may have sent updates that it did not record.
        for change in &mut record.changes {
            change.is_unsettled = true;
        }
        Ok(Some(record))
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
