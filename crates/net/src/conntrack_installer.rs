//! Installation of the conntrack entries of a guest that arrives, until it is here or does not arrive.
//!
//! A file lists them before the kernel has them, so that they can be removed after the end of this process, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::warn;

use crate::addresses;
use crate::conntrack::{self, ConntrackEntry, RefusedEntry};
use crate::conntrack_sync::{EntryChange, MOST_ENTRIES};
use crate::netlink::Socket;

/// Reason for which an entry is of no use here.
const NOT_OUR_ADDRESS: &str = "it is translated by an address of the host that the VM has left";
/// Reason for which an entry is not installed.
const TOO_MANY: &str = "the VM has too many connections";

/// Installs entries for one guest; can be used by several threads.
#[derive(Clone, Debug)]
pub struct ConntrackInstaller(Arc<Mutex<Installed>>);

#[derive(Debug)]
struct Installed {
    table: Box<dyn EntryTable>,
    route: Socket,
    record: PathBuf,
    /// The record, until the guest is here.
    file: Option<File>,
    /// Entries that were not there before.
    entries: BTreeMap<Vec<u8>, ConntrackEntry>,
    stage: ArrivalStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArrivalStage {
    /// The guest may still not arrive.
    Arriving,
    /// The guest is here.
    Arrived,
    /// The guest does not arrive.
    Ended,
}

/// Table of conntrack entries of a kernel.
trait EntryTable: fmt::Debug + Send {
    /// Removes entries, and returns those that cannot be.
    fn remove(&self, entries: &[ConntrackEntry]) -> io::Result<Vec<RefusedEntry>>;

    /// Installs entries, and returns those that cannot be.
    fn install(&self, entries: &[ConntrackEntry]) -> io::Result<Vec<RefusedEntry>>;
}

impl EntryTable for Socket {
    fn remove(&self, entries: &[ConntrackEntry]) -> io::Result<Vec<RefusedEntry>> {
        conntrack::remove(self, entries)
    }

    fn install(&self, entries: &[ConntrackEntry]) -> io::Result<Vec<RefusedEntry>> {
        conntrack::install(self, entries)
    }
}

/// Result of a list of changes.
#[derive(Debug, Default)]
pub struct InstallResult {
    /// Number of entries that are there because of all lists until now.
    pub installed: usize,
    /// Flows of this list that could not be installed, each with the reason.
    pub failed: Vec<(String, String)>,
}

impl ConntrackInstaller {
    /// Opens connections to the kernel, in the network namespace of this thread. Entries are listed in the file
    /// `record`.
    ///
    /// # Errors
    /// Among others if this host has no connection tracking, or does not allow its use.
    pub fn start(record: &Path) -> io::Result<Self> {
        let (netfilter, route) = (Socket::netfilter()?, Socket::route()?);
        conntrack::check(&netfilter)?;
        let (record, entries, stage) = (record.to_owned(), BTreeMap::new(), ArrivalStage::Arriving);
        let table = Box::new(netfilter);
        let installed = Installed { table, route, record, file: None, entries, stage };
        Ok(Self(Arc::new(Mutex::new(installed))))
    }

    /// Makes changes.
    ///
    /// # Errors
    /// If the kernel does not answer: entries that it may have by then count as installed, and are removed at the end. An
    /// entry that it refuses is no error, and is in the result.
    pub fn apply(&self, changes: Vec<EntryChange>) -> io::Result<InstallResult> {
        self.lock().apply(changes)
    }

    /// Keeps all entries: the guest is here. Later changes are still made.
    pub fn keep(&self) {
        let mut installed = self.lock();
        installed.stage = ArrivalStage::Arrived;
        installed.file = None;
        remove_record(&installed.record);
    }

    /// Removes all entries: the guest does not arrive. Later changes are not made.
    pub fn remove_all(&self) {
        let mut installed = self.lock();
        installed.stage = ArrivalStage::Ended;
        let entries: Vec<_> = std::mem::take(&mut installed.entries).into_values().collect();
        remove_entries(&entries);
        installed.file = None;
        remove_record(&installed.record);
    }

    fn lock(&self) -> MutexGuard<'_, Installed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Installed {
    fn apply(&mut self, changes: Vec<EntryChange>) -> io::Result<InstallResult> {
        let mut result = InstallResult::default();
        if self.stage == ArrivalStage::Ended {
            return Ok(result);
        }
        let (removed, wanted) = self.sort(changes, &mut result)?;
        let lines = removed.iter().cloned().map(EntryChange::Remove);
        self.list(lines.chain(wanted.iter().cloned().map(EntryChange::Install)));
        // After an error it is not known which of them the kernel has: all of them count as installed.
        let both = removed.iter().chain(&wanted);
        self.entries.extend(both.map(|entry| (entry.key(), entry.clone())));
        self.table.remove(&removed)?;
        let refused = self.table.install(&wanted)?;
        let wanted_keys: BTreeSet<_> = wanted.iter().map(ConntrackEntry::key).collect();
        for key in removed.iter().map(ConntrackEntry::key).filter(|key| !wanted_keys.contains(key)) {
            self.entries.remove(&key);
        }
        let mut others = Vec::new();
        for RefusedEntry { index, error } in refused {
            let Some(entry) = wanted.get(index) else { continue };
            // This host has seen the connection by itself, and its entry is not ours.
            if error.kind() != io::ErrorKind::AlreadyExists {
                result.failed.push((entry.to_string(), error.to_string()));
            }
            self.entries.remove(&entry.key());
            others.push(EntryChange::Remove(entry.clone()));
        }
        self.list(others.into_iter());
        result.installed = self.entries.len();
        Ok(result)
    }

    /// Returns the entries to remove, and those to install.
    fn sort(
        &mut self,
        changes: Vec<EntryChange>,
        result: &mut InstallResult,
    ) -> io::Result<(Vec<ConntrackEntry>, Vec<ConntrackEntry>)> {
        let needs_address = |change: &EntryChange| matches!(change, EntryChange::InstallWithOwnAddress(_));
        let own =
            if changes.iter().any(needs_address) { addresses::own(&self.route)? } else { BTreeSet::new() };
        let (mut removed, mut wanted) = (Vec::new(), Vec::new());
        for change in changes {
            match change {
                EntryChange::Remove(entry) => removed.extend(self.entries.remove(&entry.key())),
                EntryChange::InstallWithOwnAddress(entry)
                    if !entry.translated_to().iter().any(|address| own.contains(address)) =>
                {
                    result.failed.push((entry.to_string(), NOT_OUR_ADDRESS.to_owned()));
                }
                EntryChange::Install(entry) | EntryChange::InstallWithOwnAddress(entry) => {
                    // After a cut the source sends everything again.
                    removed.extend(self.entries.remove(&entry.key()));
                    wanted.push(entry);
                }
            }
        }
        let room = MOST_ENTRIES.saturating_sub(self.entries.len()).min(wanted.len());
        let surplus = wanted.drain(room..);
        result.failed.extend(surplus.map(|entry| (entry.to_string(), TOO_MANY.to_owned())));
        Ok((removed, wanted))
    }

    /// Appends changes to the record.
    fn list(&mut self, changes: impl Iterator<Item = EntryChange>) {
        if self.stage != ArrivalStage::Arriving {
            return;
        }
        let mut bytes = Vec::new();
        changes.for_each(|change| change.encode(&mut bytes));
        if bytes.is_empty() {
            return;
        }
        if let Err(error) = self.append(&bytes) {
            warn!(%error, "tracked connections would stay in the kernel if this agent ended now");
        }
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(OpenOptions::new().create(true).append(true).open(&self.record)?);
        }
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(bytes))
    }
}

/// Removes all entries that another process has listed in the file `record`, and the file, in the network namespace of
/// this thread.
pub fn remove_recorded(record: &Path) {
    let bytes = match fs::read(record) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return warn!(%error, "cannot read the record of tracked connections"),
    };
    let mut entries = BTreeMap::new();
    let mut rest = &bytes[..];
    // The last change is cut off if the other process ended while it wrote it.
    while let Ok((change, after)) = EntryChange::decode(rest) {
        match change {
            EntryChange::Install(entry) | EntryChange::InstallWithOwnAddress(entry) => {
                entries.insert(entry.key(), entry);
            }
            EntryChange::Remove(entry) => drop(entries.remove(&entry.key())),
        }
        rest = after;
    }
    remove_entries(&entries.into_values().collect::<Vec<_>>());
    remove_record(record);
}

/// Removes entries over a new connection to the kernel: an older one may have failed.
fn remove_entries(entries: &[ConntrackEntry]) {
    if entries.is_empty() {
        return;
    }
    if let Err(error) = Socket::netfilter().and_then(|netfilter| conntrack::remove(&netfilter, entries)) {
        warn!(%error, "tracked connections of a guest that did not arrive stay in the kernel until they end");
    }
}

/// Removes the file of a guest that is here, or does not arrive.
pub fn remove_record(record: &Path) {
    match fs::remove_file(record) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            warn!(record = %record.display(), %error, "cannot remove the record of a guest's tracked connections");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conntrack_sync::tests::plain;

    /// A table that takes the first entry of each list; the answer is lost then, or says that it is there already.
    #[derive(Debug)]
    struct FakeTable {
        loses_answers: bool,
    }

    impl EntryTable for FakeTable {
        fn remove(&self, _: &[ConntrackEntry]) -> io::Result<Vec<RefusedEntry>> {
            if self.loses_answers { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Vec::new()) }
        }

        fn install(&self, entries: &[ConntrackEntry]) -> io::Result<Vec<RefusedEntry>> {
            if self.loses_answers {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let refused = |index| RefusedEntry { index, error: io::ErrorKind::AlreadyExists.into() };
            Ok((1..entries.len()).map(refused).collect())
        }
    }

    fn installed(loses_answers: bool, record: &Path) -> Installed {
        Installed {
            table: Box::new(FakeTable { loses_answers }),
            route: Socket::route().unwrap(),
            record: record.to_owned(),
            file: None,
            entries: BTreeMap::new(),
            stage: ArrivalStage::Arriving,
        }
    }

    #[test]
    fn entries_whose_installation_failed_halfway_are_removed_later() {
        let directory = tempfile::tempdir().unwrap();
        let mut installed = installed(true, &directory.path().join("flows"));
        let entries = [plain(1000, 3, 300), plain(1001, 3, 300)];
        installed.apply(entries.iter().cloned().map(EntryChange::Install).collect()).unwrap_err();
        assert_eq!(installed.entries.len(), 2, "the kernel may have taken them");
        // One that was to be removed may still be there.
        installed.apply(vec![EntryChange::Remove(entries[0].clone())]).unwrap_err();
        assert_eq!(installed.entries.len(), 2);
    }

    #[test]
    fn entries_of_others_and_removed_ones_are_not_ours() {
        let directory = tempfile::tempdir().unwrap();
        let mut installed = installed(false, &directory.path().join("flows"));
        let [first, second] = [plain(1000, 3, 300), plain(1001, 3, 300)];
        let both = vec![EntryChange::Install(first.clone()), EntryChange::Install(second)];
        assert_eq!(installed.apply(both).unwrap().installed, 1);
        assert!(installed.entries.contains_key(&first.key()));
        assert_eq!(installed.apply(vec![EntryChange::Install(first.clone())]).unwrap().installed, 1);
        assert_eq!(installed.apply(vec![EntryChange::Remove(first)]).unwrap().installed, 0);
    }
}
