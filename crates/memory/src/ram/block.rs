//! Blocks of RAM for readers and writers, and their errors.

use std::io;
use std::ops::Range;

use tracee::{AddressRange, PageFaultError, ProcessError, RamFileError, RemoteError};

/// A block of guest RAM in the memory of a QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamRegion {
    /// QEMU's name of the block.
    pub name: String,
    /// Length in use, in bytes.
    pub bytes: u64,
    /// Size of the host pages behind the block, in bytes.
    pub page_bytes: u64,
    /// Start of the block in QEMU's address space.
    pub address: u64,
}

impl RamRegion {
    /// Returns the addresses of the block.
    pub fn range(&self) -> AddressRange {
        AddressRange::with_len(self.address, self.bytes)
    }
}

/// Error of reaching guest memory.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The file behind a block failed.
    #[error(transparent)]
    File(#[from] RamFileError),
    /// Reading or writing the memory of the process failed.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The process itself failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Pages of a guest that runs already cannot be placed.
    #[error(transparent)]
    Missing(#[from] PageFaultError),
    /// Reading the page table, or the map of a file's data, failed.
    #[error("cannot find the allocated parts of RAM")]
    Present(#[source] io::Error),
    /// A block is not mapped at the address that QEMU reports.
    #[error("RAM block {block} is not at {range}; was memory unplugged?")]
    NotThere {
        /// Name of the block.
        block: String,
        /// The expected addresses.
        range: AddressRange,
    },
    /// A page that does not exist was to be read.
    #[error("there is no page {page} of block {block}")]
    NoPage {
        /// Index of the block.
        block: u16,
        /// The page.
        page: u64,
    },
    /// A block that is no memory failed.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// A block whose length is no multiple of 4 KiB.
    #[error("RAM block {block} has {bytes} bytes, which are not whole pages")]
    Length {
        /// Name of the block.
        block: String,
        /// Length of the block.
        bytes: u64,
    },
}

/// Reads a block of guest RAM. Used from several threads at once, while the guest writes.
pub trait BlockReader: Send + Sync {
    /// Returns QEMU's name of the block.
    fn name(&self) -> &str;

    /// Returns a human-readable description.
    fn description(&self) -> String {
        format!("guest memory: RAM block {}", self.name())
    }

    /// Returns the length of the block in bytes, a multiple of 4 KiB.
    fn bytes(&self) -> u64;

    /// Copies bytes from the block. The guest may write at the same time: the result is one private copy, and every
    /// decision about a page (zero, hash) has to be based on it.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError>;

    /// Returns the position of the first page in a range of bytes (pages) that has memory behind it; the range's end if
    /// there is none. Pages before it were never touched or were given back, and read as zeros. Swapped pages count as
    /// memory.
    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError>;
}

/// Way in which pages of a block can be discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardMethod {
    /// Discarding is impossible, or possible for huge pages only.
    Never,
    /// From outside, by [`BlockWriter::drop_pages`].
    FromOutside,
    /// Only by the process itself.
    ByProcess,
}

/// Writes a block of guest RAM. Used from several threads at once, never for the same chunk.
pub trait BlockWriter: Send + Sync {
    /// Returns QEMU's name of the block.
    fn name(&self) -> &str;

    /// Returns a human-readable description.
    fn description(&self) -> String {
        format!("guest memory: RAM block {}", self.name())
    }

    /// Returns the length of the block in bytes, a multiple of 4 KiB.
    fn bytes(&self) -> u64;

    /// Returns true for guest memory, and false for a disk that is sent as a block.
    fn is_ram(&self) -> bool {
        true
    }

    /// Copies bytes from the block, in their current state.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError>;

    /// Writes bytes to the block.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError>;

    /// Writes bytes to several ranges of the block, one after the other; the ranges' lengths add up to that of the
    /// data.
    fn write_runs(&self, runs: &[Range<u64>], data: &[u8]) -> Result<(), RamError> {
        let mut rest = data;
        for run in runs {
            let (mine, behind) = rest.split_at((run.end - run.start) as usize);
            self.write(run.start, mine)?;
            rest = behind;
        }
        Ok(())
    }

    /// Prepares for a transport that writes a range of bytes (pages) of the block by itself. Returns false if the block
    /// has to be written by [`BlockWriter::write`].
    fn allow_direct_placement(&self, range: Range<u64>) -> bool;

    /// Makes a range of bytes (pages) read as zeros, whatever it held before, and gives its memory back to the host if
    /// possible (trap 5).
    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError>;

    /// Ends writing and closes open files. A later write is an error.
    fn end(&self) {}

    /// Returns how pages of the block can be discarded, so that a thread that touches one of them waits for it
    /// (post-copy).
    fn discard_method(&self) -> DiscardMethod {
        DiscardMethod::Never
    }

    /// Discards a range of bytes (pages), if that is done from outside.
    fn discard_range(&self, range: Range<u64>) -> Result<(), RamError> {
        self.drop_pages(range)
    }

    /// Returns true if the whole block is to have memory behind it in the end, even if it is empty.
    fn is_preallocated(&self) -> bool {
        false
    }

    /// Returns the parts of a range of bytes (pages) that may have memory behind them and so have to be discarded.
    /// Returns the whole range if discarding costs no more than the query.
    fn mapped_ranges(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, RamError> {
        Ok(vec![range])
    }

    /// Returns the first byte of a range (pages) that has memory behind it: no thread waits for that one.
    fn first_mapped(&self, range: Range<u64>) -> Result<Option<u64>, RamError> {
        Ok(self.mapped_ranges(range)?.first().map(|part| part.start))
    }

    /// Returns, and forgets, the ranges of bytes that [`BlockWriter::drop_pages`] could only fill with zeros and that
    /// are still zero, in whole pages of the host. Empty if memory is given back at once, or cannot be.
    fn take_discardable(&self) -> Vec<Range<u64>>;
}
