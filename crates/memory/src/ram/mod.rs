//! Guest RAM as bytes: what the data plane reads at the source and writes at the destination.
//!
//! A RAM block is a row of bytes from 0 on. Where they are (a shared file, anonymous memory of a process, a private
//! mapping of a file) is behind [`BlockReader`] and [`BlockWriter`]; tests put vectors there.

use std::io;
use std::ops::Range;

pub mod zero;

/// Reads a block of guest RAM. Used from several threads at once, while the guest writes.
pub trait BlockReader: Send + Sync {
    /// QEMU's name for the block.
    fn name(&self) -> &str;

    /// Length of the block in bytes, a multiple of 4 KiB.
    fn bytes(&self) -> u64;

    /// Copies bytes from the block. The guest may write meanwhile: what is returned is one private copy, and all that
    /// is decided about a page (zero, hash) has to be decided on it.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Where in a range of bytes (pages) the first page is that has memory behind it; the range's end if there is
    /// none. Pages before it were never touched or were given back, and read as zeros. Swapped pages count as memory.
    fn first_present(&self, range: Range<u64>) -> io::Result<u64>;
}

/// Writes a block of guest RAM. Used from several threads at once, never for the same chunk.
pub trait BlockWriter: Send + Sync {
    /// QEMU's name for the block.
    fn name(&self) -> &str;

    /// Length of the block in bytes, a multiple of 4 KiB.
    fn bytes(&self) -> u64;

    /// Puts bytes into the block.
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Makes a range of bytes (pages) read as zeros, whatever was there before, and gives its memory back where that
    /// can be done (trap 5).
    fn drop_pages(&self, range: Range<u64>) -> io::Result<()>;

    /// Ranges of bytes that [`BlockWriter::drop_pages`] could only fill with zeros and that are zero still, in whole
    /// pages of the host, and forgets them. Nothing where memory was given back at once.
    fn take_discardable(&self) -> Vec<Range<u64>>;
}
