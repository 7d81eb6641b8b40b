//! Space for the entries that end something, allocated on the disk before it begins.
//!
//! SQLite writes to the end of its write-ahead log, and after a checkpoint to its beginning again. Blocks that the file
//! system has already allocated to the log, beyond its end, are available to the next writes whatever else fills the
//! disk. The same holds for the log's index, which grows by steps.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tracing::warn;

/// Space for the entries by which one migration ends: three updates of a row, each of some pages of 4 KiB.
const END_BYTES: u64 = 256 << 10;

/// Step by which SQLite lengthens the index of its log.
const INDEX_BYTES: u64 = 32 << 10;

/// The log and its index, and the extents of their blocks.
///
/// Closing a file releases all locks that this process has on it, also SQLite's: this must be dropped after the
/// connection.
#[derive(Debug)]
pub(super) struct Reserve {
    log: AllocatedFile,
    index: AllocatedFile,
}

#[derive(Debug)]
struct AllocatedFile {
    file: File,
    /// Bytes from the beginning that have blocks.
    bytes: u64,
}

impl Reserve {
    /// Finds the files that belong to an open database in WAL mode.
    pub(super) fn open(database: &Path) -> std::io::Result<Self> {
        let beside = |suffix: &str| {
            let mut path = database.as_os_str().to_owned();
            path.push(suffix);
            let file = File::options().read(true).write(true).open(PathBuf::from(path))?;
            Ok::<_, std::io::Error>(AllocatedFile { file, bytes: 0 })
        };
        Ok(Self { log: beside("-wal")?, index: beside("-shm")? })
    }

    /// Keeps space for the ends of `ends` migrations, beside a document of `document_bytes` bytes.
    pub(super) fn keep(&mut self, ends: u64, document_bytes: usize) -> rusqlite::Result<()> {
        // A document needs its pages, a header for each, and some pages that lead to them.
        self.log.keep((ends + 1) * END_BYTES + 2 * document_bytes as u64)?;
        self.index.keep(INDEX_BYTES)
    }
}

impl AllocatedFile {
    fn keep(&mut self, bytes: u64) -> rusqlite::Result<()> {
        let full =
            |_| rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL), None);
        let wanted = self.file.metadata().map_err(full)?.len() + bytes;
        if wanted <= self.bytes {
            return Ok(());
        }
        match fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, wanted) {
            Ok(()) => {}
            Err(Errno::INTR) => return self.keep(bytes),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                warn!(
                    "the journal's file system does not support reserved space; make sure that it does not \
                     become full"
                );
            }
            Err(errno) => return Err(full(errno.into())),
        }
        self.bytes = wanted;
        Ok(())
    }
}
