//! Guest RAM as bytes: what the data plane reads at the source and writes at the destination.
//!
//! A RAM block is a row of bytes from 0 on. Where they are is behind [`BlockReader`] and [`BlockWriter`]:
//!
//! | memory of QEMU | read by | written by | given back by |
//! |---|---|---|---|
//! | shared file (memfd, tmpfs) | `pread` | `pwrite` | punching a hole |
//! | shared file of huge pages | `pread` | `process_vm_writev` | punching whole pages, zeros otherwise |
//! | anonymous | `process_vm_readv` | `process_vm_writev` | zeros; QEMU itself, by an injected call ([`BlockWriter::take_discardable`]) |
//! | private mapping of a file | `process_vm_readv` what the process has, `pread` the rest | `process_vm_writev` | zeros |
//! | private huge pages | `process_vm_readv` | `process_vm_writev` | zeros |
//!
//! A block that was there from end to end before the first page came was preallocated by the user's wish: nothing of it
//! is given back, and what has to be empty is filled with zeros.
//!
//! Where nothing is (holes of the file, pages neither present nor swapped) nothing is read, and a hole there becomes a
//! hole here (trap 5). Tracking puts a mark in the place of each page that is not there; what tells a mark from a page
//! in swap is its entry in `/proc/PID/pagemap`, which only a process with `CAP_SYS_ADMIN` sees. Of huge pages that are
//! not shared nobody can tell, so all of them are read, which makes those that were missing: of what is reserved for
//! them, as QEMU does unless told otherwise (`reserve=off`). What is read and is zero becomes a hole there all the
//! same.

use std::io;
use std::ops::Range;

use tracee::{AddressRange, MissingError, ProcessError, RamFileError, RemoteError};

mod destination;
mod dropped;
mod place;
mod preallocated;
mod source;
pub mod zero;

pub use destination::open_destination;
pub(crate) use dropped::DropWatch;
pub(crate) use place::drop_watches;
pub use source::open_source;

/// A block of guest RAM in the memory of a QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamRegion {
    /// QEMU's name for it.
    pub name: String,
    /// Length in use, in bytes.
    pub bytes: u64,
    /// Size of the host pages behind it, in bytes.
    pub page_bytes: u64,
    /// Where it begins in QEMU's address space.
    pub address: u64,
}

impl RamRegion {
    /// Its addresses.
    pub fn range(&self) -> AddressRange {
        AddressRange::with_len(self.address, self.bytes)
    }
}

/// Why guest memory cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The file behind it.
    #[error(transparent)]
    File(#[from] RamFileError),
    /// The memory of the process.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The process itself.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Pages of a guest that runs already cannot be placed.
    #[error(transparent)]
    Missing(#[from] MissingError),
    /// Its page table, or where its file has data.
    #[error("cannot find out where RAM has memory behind it")]
    Present(#[source] io::Error),
    /// A block is not mapped where QEMU says it is.
    #[error("RAM block {block} is not at {range}; was memory unplugged?")]
    NotThere {
        /// Name of the block.
        block: String,
        /// Where it should be.
        range: AddressRange,
    },
    /// A disk, which travels as a block of its own.
    #[error(transparent)]
    Disk(Box<dyn std::error::Error + Send + Sync>),
    /// A block whose length is no multiple of 4 KiB.
    #[error("RAM block {block} has {bytes} bytes, which are not whole pages")]
    Length {
        /// Name of the block.
        block: String,
        /// Its length.
        bytes: u64,
    },
}

/// Reads a block of guest RAM. Used from several threads at once, while the guest writes.
pub trait BlockReader: Send + Sync {
    /// QEMU's name for the block.
    fn name(&self) -> &str;

    /// What it is, for people.
    fn what(&self) -> String {
        format!("guest memory: RAM block {}", self.name())
    }

    /// Length of the block in bytes, a multiple of 4 KiB.
    fn bytes(&self) -> u64;

    /// Copies bytes from the block. The guest may write meanwhile: what is returned is one private copy, and all that
    /// is decided about a page (zero, hash) has to be decided on it.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError>;

    /// Where in a range of bytes (pages) the first page is that has memory behind it; the range's end if there is
    /// none. Pages before it were never touched or were given back, and read as zeros. Swapped pages count as memory.
    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError>;
}

/// How pages can be taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakesAway {
    /// Not at all, or only huge ones.
    Never,
    /// From outside: [`BlockWriter::drop_pages`] does it.
    FromOutside,
    /// Only by the process itself.
    ByProcess,
}

/// Writes a block of guest RAM. Used from several threads at once, never for the same chunk.
pub trait BlockWriter: Send + Sync {
    /// QEMU's name for the block.
    fn name(&self) -> &str;

    /// What it is, for people.
    fn what(&self) -> String {
        format!("guest memory: RAM block {}", self.name())
    }

    /// Length of the block in bytes, a multiple of 4 KiB.
    fn bytes(&self) -> u64;

    /// Whether it is guest memory, and not a disk that travels as a block.
    fn is_ram(&self) -> bool {
        true
    }

    /// Copies bytes from the block, as they are now.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError>;

    /// Puts bytes into the block.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError>;

    /// Puts bytes into several ranges of the block, one after the other; together they are as long as the data.
    fn write_runs(&self, runs: &[Range<u64>], data: &[u8]) -> Result<(), RamError> {
        let mut rest = data;
        for run in runs {
            let (mine, behind) = rest.split_at((run.end - run.start) as usize);
            self.write(run.start, mine)?;
            rest = behind;
        }
        Ok(())
    }

    /// Makes a range of bytes (pages) read as zeros, whatever was there before, and gives its memory back where that
    /// can be done (trap 5).
    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError>;

    /// Nothing more comes for it: lets go of what it has open. What comes all the same is an error.
    fn end(&self) {}

    /// How pages of it can be taken away, so that whoever touches one of them waits for it (post-copy).
    fn takes_away(&self) -> TakesAway {
        TakesAway::Never
    }

    /// Takes a range of bytes (pages) away, where that is done from outside.
    fn take_away(&self, range: Range<u64>) -> Result<(), RamError> {
        self.drop_pages(range)
    }

    /// Whether all of it is to have memory behind it in the end, empty or not.
    fn keeps_all(&self) -> bool {
        false
    }

    /// Parts of a range of bytes (pages) that may have memory behind them: what is to be taken away. All of it where to take
    /// it away costs no more than to ask.
    fn there(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, RamError> {
        Ok(vec![range])
    }

    /// The first byte of a range (pages) that has memory behind it: nobody waits for that.
    fn first_there(&self, range: Range<u64>) -> Result<Option<u64>, RamError> {
        Ok(self.there(range)?.first().map(|part| part.start))
    }

    /// Ranges of bytes that [`BlockWriter::drop_pages`] could only fill with zeros and that are zero still, in whole
    /// pages of the host, and forgets them. Nothing where memory is given back at once, or cannot be.
    fn take_discardable(&self) -> Vec<Range<u64>>;
}
