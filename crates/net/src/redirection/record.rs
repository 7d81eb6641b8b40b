//! Record of a redirection: what it is, and what of it may be in the kernel of this host.
//!
//! It is written before anything is made, and removed when nothing is left, so that the next agent can remove or restore
//! everything, also after the host has started anew. Private keys are in files of their own. All files are readable by
//! their owner alone.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::names::{NUMBERS, Names};
use super::parts::Redirection;
use super::plan::HostPlan;
use super::tunnel::Key;

/// Ends of the files' names.
const RECORD_END: &str = ".json";
/// See [`RECORD_END`].
const KEY_END: &str = ".key";

/// Stage of a redirection at a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordStage {
    /// The objects from before the stop are being made, or are there.
    Prepared,
    /// It takes packets, or is about to.
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
    /// Time at which it became active, in milliseconds since 1970; the time of the record before that.
    pub since_unix_ms: u64,
}

impl RedirectionRecord {
    /// Returns the names of what this host has of it.
    pub fn names(&self) -> Names {
        let own = self.redirection.legs.iter().find(|leg| leg.host == self.host);
        Names(own.map_or(self.redirection.place.number, |leg| leg.number))
    }

    /// Returns true if it is for the same card of the same guest.
    pub fn is_of(&self, redirection: &Redirection) -> bool {
        self.redirection.card == redirection.card && self.redirection.guest() == redirection.guest()
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
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut records = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(RECORD_END)) {
                records.push(read(&path)?);
            }
        }
        records.sort_by_key(|record: &RedirectionRecord| record.names().0);
        Ok(records)
    }

    /// Writes a record, which is on stable storage afterwards.
    pub fn put(&self, record: &RedirectionRecord) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(record)?;
        self.write(&self.path(record.names().0, RECORD_END), &bytes)
    }

    /// Removes a record, and the keys of its tunnels.
    pub fn remove(&self, record: &RedirectionRecord) -> io::Result<()> {
        for leg in &record.redirection.legs {
            self.remove_key(leg.number)?;
        }
        unless_absent(fs::remove_file(self.path(record.names().0, RECORD_END)))
    }

    /// Returns the numbers of tunnels whose private keys are kept.
    pub fn keys(&self) -> io::Result<Vec<u32>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut numbers = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let number: Option<u32> = name.to_str().and_then(|name| name.strip_suffix(KEY_END)?.parse().ok());
            numbers.extend(number);
        }
        Ok(numbers)
    }

    /// Keeps the private key of a tunnel.
    pub fn put_key(&self, number: u32, key: &Key) -> io::Result<()> {
        self.write(&self.path(number, KEY_END), key)
    }

    /// Returns the private key of a tunnel.
    pub fn key(&self, number: u32) -> io::Result<Key> {
        let bytes = fs::read(self.path(number, KEY_END))?;
        bytes.try_into().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "a private key has 32 bytes"))
    }

    /// Removes the private key of a tunnel, if it is there.
    pub fn remove_key(&self, number: u32) -> io::Result<()> {
        unless_absent(fs::remove_file(self.path(number, KEY_END)))
    }

    fn path(&self, number: u32, end: &str) -> PathBuf {
        self.directory.join(format!("{}{end}", number % NUMBERS))
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let new = path.with_extension("new");
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
