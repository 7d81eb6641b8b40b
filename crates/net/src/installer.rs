//! Installation of the entries of connection tracking of a guest that arrives, until it is here or does not arrive.
//!
//! A file lists them before the kernel has them, so that they can be removed after the end of this process, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::warn;

use crate::addresses;
use crate::conntrack::{self, RefusedConnection, TrackedConnection};
use crate::flows::{FlowChange, MOST_FLOWS};
use crate::netlink::Socket;

/// Reason for which an entry is of no use here.
const NOT_OUR_ADDRESS: &str = "it is translated by an address of the host that the VM has left";
/// Reason for which an entry is not installed.
const TOO_MANY: &str = "the VM has too many connections";

/// Installs entries for one guest; can be used by several threads.
#[derive(Clone, Debug)]
pub struct FlowInstaller(Arc<Mutex<Installed>>);

#[derive(Debug)]
struct Installed {
    netfilter: Socket,
    route: Socket,
    record: PathBuf,
    /// The record, until the guest is here.
    file: Option<File>,
    /// Entries that were not there before.
    entries: BTreeMap<Vec<u8>, TrackedConnection>,
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

/// Result of a list of changes.
#[derive(Debug, Default)]
pub struct InstallResult {
    /// Number of entries that are there because of all lists until now.
    pub installed: usize,
    /// Flows of this list that could not be installed, each with the reason.
    pub failed: Vec<(String, String)>,
}

impl FlowInstaller {
    /// Opens connections to the kernel, in the network namespace of this thread. Entries are listed in the file
    /// `record`.
    ///
    /// # Errors
    /// Among others if this host has no connection tracking, or does not allow its use.
    pub fn start(record: &Path) -> io::Result<Self> {
        let (netfilter, route) = (Socket::netfilter()?, Socket::route()?);
        conntrack::check(&netfilter)?;
        let (record, entries, stage) = (record.to_owned(), BTreeMap::new(), ArrivalStage::Arriving);
        let installed = Installed { netfilter, route, record, file: None, entries, stage };
        Ok(Self(Arc::new(Mutex::new(installed))))
    }

    /// Makes changes.
    pub fn apply(&self, changes: Vec<FlowChange>) -> io::Result<InstallResult> {
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
    pub fn discard(&self) {
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
    fn apply(&mut self, changes: Vec<FlowChange>) -> io::Result<InstallResult> {
        let mut result = InstallResult::default();
        if self.stage == ArrivalStage::Ended {
            return Ok(result);
        }
        let (removed, wanted) = self.sort(changes, &mut result)?;
        let lines = removed.iter().cloned().map(FlowChange::Remove);
        self.list(lines.chain(wanted.iter().cloned().map(FlowChange::Install)));
        conntrack::remove(&self.netfilter, &removed)?;
        let refused = conntrack::install(&self.netfilter, &wanted)?;
        let mut wanted: Vec<_> = wanted.into_iter().map(Some).collect();
        let mut others = Vec::new();
        for RefusedConnection { index, error } in refused {
            let Some(entry) = wanted.get_mut(index).and_then(Option::take) else { continue };
            // This host has seen the flow by itself, and its entry is not ours.
            if error.kind() != io::ErrorKind::AlreadyExists {
                result.failed.push((entry.to_string(), error.to_string()));
            }
            others.push(FlowChange::Remove(entry));
        }
        self.list(others.into_iter());
        self.entries.extend(wanted.into_iter().flatten().map(|entry| (entry.key(), entry)));
        result.installed = self.entries.len();
        Ok(result)
    }

    /// Returns the entries to remove, and those to install.
    fn sort(
        &mut self,
        changes: Vec<FlowChange>,
        result: &mut InstallResult,
    ) -> io::Result<(Vec<TrackedConnection>, Vec<TrackedConnection>)> {
        let needs_address = |change: &FlowChange| matches!(change, FlowChange::InstallWithOwnAddress(_));
        let own =
            if changes.iter().any(needs_address) { addresses::own(&self.route)? } else { BTreeSet::new() };
        let (mut removed, mut wanted) = (Vec::new(), Vec::new());
        for change in changes {
            match change {
                FlowChange::Remove(entry) => removed.extend(self.entries.remove(&entry.key())),
                FlowChange::InstallWithOwnAddress(entry)
                    if !entry.translated_to().iter().any(|address| own.contains(address)) =>
                {
                    result.failed.push((entry.to_string(), NOT_OUR_ADDRESS.to_owned()));
                }
                FlowChange::Install(entry) | FlowChange::InstallWithOwnAddress(entry) => {
                    // After a cut the source sends everything again.
                    removed.extend(self.entries.remove(&entry.key()));
                    wanted.push(entry);
                }
            }
        }
        let room = MOST_FLOWS.saturating_sub(self.entries.len()).min(wanted.len());
        let surplus = wanted.drain(room..);
        result.failed.extend(surplus.map(|entry| (entry.to_string(), TOO_MANY.to_owned())));
        Ok((removed, wanted))
    }

    /// Appends changes to the record.
    fn list(&mut self, changes: impl Iterator<Item = FlowChange>) {
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
pub fn discard_recorded(record: &Path) {
    let bytes = match fs::read(record) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return warn!(%error, "cannot read the record of tracked connections"),
    };
    let mut entries = BTreeMap::new();
    let mut rest = &bytes[..];
    // The last change is cut off if the other process ended while it wrote it.
    while let Ok((change, after)) = FlowChange::decode(rest) {
        match change {
            FlowChange::Install(entry) | FlowChange::InstallWithOwnAddress(entry) => {
                entries.insert(entry.key(), entry);
            }
            FlowChange::Remove(entry) => drop(entries.remove(&entry.key())),
        }
        rest = after;
    }
    remove_entries(&entries.into_values().collect::<Vec<_>>());
    remove_record(record);
}

/// Removes entries over a new connection to the kernel: an older one may have failed.
fn remove_entries(entries: &[TrackedConnection]) {
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
            warn!(record = %record.display(), %error, "left behind");
        }
        _ => {}
    }
}
