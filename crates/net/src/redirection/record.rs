//! Record of a redirection: what it is, and what of it may be in the kernel of this host.
//!
//! It is written before anything is made, and removed when nothing is left, so that the next agent can remove or restore
//! everything, also after the host has started anew. What a migration has reserved for its end of a tunnel, a private key
//! and ports, is in a file of its own, which may precede the record. All files are readable by their owner alone.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::kernel_names::{KernelNames, NUMBERS};
use super::model::Redirection;
use super::plan::HostPlan;
use super::tunnel::{Key, TunnelKind};

/// Ends of the files' names.
const RECORD_END: &str = ".json";
/// See [`RECORD_END`].
const KEY_END: &str = ".key";
/// See [`RECORD_END`]: a file that is being written.
const NEW_END: &str = ".new";

/// Stage of a redirection at a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordStage {
    /// The objects from before the stop are being made, or are there. It may take packets already, for a guest whose
    /// migration can still be aborted.
    Prepared,
    /// It takes packets, and the guest has moved.
    Active,
    /// It is being removed.
    Ending,
}

/// Record of a redirection at one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectionRecord {
    /// Name of the host.
    pub host: String,
    /// Stage.
    pub stage: RecordStage,
    /// The redirection.
    pub redirection: Redirection,
    /// The objects that this host has of it.
    pub plan: HostPlan,
    /// True if something of it could not be made, and is to be tried again.
    #[serde(default)]
    pub is_incomplete: bool,
    /// Time at which it became active, in milliseconds since 1970; the time of the record before that.
    pub since_unix_ms: u64,
}

impl RedirectionRecord {
    /// Returns the names of what this host has of it.
    pub fn names(&self) -> KernelNames {
        let own = self.redirection.legs.iter().find(|leg| leg.host == self.host);
        KernelNames(own.map_or(self.redirection.place.number, |leg| leg.number))
    }

    /// Returns this host's ports of its tunnels of a kind.
    pub fn own_ports(&self, kind: TunnelKind) -> impl Iterator<Item = u16> {
        let tunnels = self.redirection.legs.iter().filter(move |leg| leg.tunnel.kind == kind);
        let is_here = self.redirection.place.host == self.host;
        let tunnels = tunnels.filter(move |leg| is_here || leg.host == self.host);
        tunnels.map(move |leg| leg.tunnel.ports[usize::from(is_here)])
    }

    /// Returns true if it is for a card that has a later redirection which is not ending: packets take that one, or are about
    /// to.
    pub fn is_superseded(&self, records: &[RedirectionRecord]) -> bool {
        let is_later = |other: &&RedirectionRecord| {
            other.is_of(&self.redirection)
                && other.redirection.epoch > self.redirection.epoch
                && other.stage != RecordStage::Ending
        };
        records.iter().any(|other| is_later(&other))
    }

    /// Returns true if it is for the same card of the same guest.
    pub fn is_of(&self, redirection: &Redirection) -> bool {
        self.redirection.card == redirection.card && self.redirection.guest() == redirection.guest()
    }
}

/// Reservation of a migration for this host's ends of tunnels.
#[derive(Clone, PartialEq, Eq)]
pub struct ReservedEnd {
    /// Private key.
    pub key: Key,
    /// Ports of UDP, one for each tunnel.
    pub ports: Vec<u16>,
}

impl fmt::Debug for ReservedEnd {
    /// Leaves the private key out, so that no log has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReservedEnd").field("ports", &self.ports).finish_non_exhaustive()
    }
}

/// Records and keys of a host, in a directory.
#[derive(Clone, Debug)]
pub struct RecordStore {
    directory: PathBuf,
}

impl RecordStore {
    /// Keeps files in this directory, which is made with the first one.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Returns all records. One that cannot be read is an error: what it names is in the kernel.
    pub fn all(&self) -> io::Result<Vec<RedirectionRecord>> {
        let mut records = Vec::new();
        for name in self.names()?.iter().filter(|name| name.ends_with(RECORD_END)) {
            match read(&self.directory.join(name)) {
                // It has ended since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                record => records.push(record?),
            }
        }
        records.sort_by_key(|record: &RedirectionRecord| record.names().0);
        Ok(records)
    }

    /// Writes a record, which is on stable storage afterwards.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn put(&self, record: &RedirectionRecord) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(record)?;
        self.write(&self.path(record.names().0, RECORD_END), &bytes)
    }

    /// Removes a record, and what its migration has reserved, unless it has redirected other cards as well.
    ///
    /// # Errors
    /// If another record cannot be read, or a file cannot be removed. A record that is gone is no error.
    pub fn remove(&self, record: &RedirectionRecord) -> io::Result<()> {
        if !self.is_shared(record)? {
            self.remove_end(&record.redirection.migration)?;
        }
        unless_absent(fs::remove_file(self.path(record.names().0, RECORD_END)))
    }

    /// Returns true if another record is of the same migration: of another card of the guest.
    ///
    /// # Errors
    /// If a record cannot be read.
    pub fn is_shared(&self, record: &RedirectionRecord) -> io::Result<bool> {
        let migration = &record.redirection.migration;
        let is_other = |other: &RedirectionRecord| {
            other.redirection.migration == *migration && other.names() != record.names()
        };
        Ok(self.all()?.iter().any(is_other))
    }

    /// Returns the migrations that have reserved an end.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn ends(&self) -> io::Result<Vec<String>> {
        let names = self.names()?;
        let migration = |name: &String| {
            let (guest, epoch) = name.strip_suffix(KEY_END)?.rsplit_once('@')?;
            Some(format!("{guest}#{epoch}"))
        };
        Ok(names.iter().filter_map(migration).collect())
    }

    /// Keeps what a migration has reserved.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn put_end(&self, migration: &str, end: &ReservedEnd) -> io::Result<()> {
        let ports = end.ports.iter().flat_map(|port| port.to_be_bytes());
        self.write(&self.end_path(migration), &end.key.iter().copied().chain(ports).collect::<Vec<_>>())
    }

    /// Returns what a migration has reserved.
    ///
    /// # Errors
    /// `NotFound` if nothing is reserved; `InvalidData` if the file is damaged.
    pub fn end(&self, migration: &str) -> io::Result<ReservedEnd> {
        let bytes = fs::read(self.end_path(migration))?;
        let parts = bytes.split_first_chunk().map(|(key, ports)| (*key, ports.as_chunks::<2>()));
        let (key, (ports, _)) = parts.filter(|(_, (_, rest))| rest.is_empty()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "a private key has 32 bytes, and a port 2")
        })?;
        Ok(ReservedEnd { key, ports: ports.iter().map(|port| u16::from_be_bytes(*port)).collect() })
    }

    /// Removes what a migration has reserved, if there is something.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn remove_end(&self, migration: &str) -> io::Result<()> {
        unless_absent(fs::remove_file(self.end_path(migration)))
    }

    /// Removes files that an agent before this one has not written to their end.
    ///
    /// # Errors
    /// If the directory cannot be read, or a file cannot be removed.
    pub fn remove_unwritten(&self) -> io::Result<()> {
        for name in self.names()?.iter().filter(|name| name.ends_with(NEW_END)) {
            unless_absent(fs::remove_file(self.directory.join(name)))?;
        }
        Ok(())
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn end_path(&self, migration: &str) -> PathBuf {
        self.directory.join(format!("{}{KEY_END}", migration.replace(['#', '/'], "@")))
    }

    fn path(&self, number: u32, end: &str) -> PathBuf {
        self.directory.join(format!("{}{end}", number % NUMBERS))
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let mut new = path.as_os_str().to_owned();
        new.push(NEW_END);
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(&self.directory)?.sync_all()
    }
}

fn read(path: &Path) -> io::Result<RedirectionRecord> {
    let bytes = fs::read(path)?;
    serde_json::from_slice(&bytes).map_err(|error| {
        let text = format!("cannot read the record {}: {error}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

fn unless_absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
