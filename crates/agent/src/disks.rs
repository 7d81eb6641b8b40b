//! Disks that are copied, as the data plane wants them: rows of bytes like RAM blocks, behind them in the order of the
//! proposal.
//!
//! What travels is what the guest sees of a disk, so that both sides may have it in different formats. At the source it
//! is read from QEMU's own NBD server, at the destination written through the server of an image; several threads do so
//! at a time, each over a connection of its own.

mod cached;
mod destination;
mod known;
mod owner;
mod served;
mod source;

pub(crate) use cached::forget_cached;
pub(crate) use destination::Images;
pub(crate) use known::KnownFile;
pub(crate) use owner::{give, opens_as};
pub(crate) use source::{DiskLog, LeavingDisk, SocketPath, first_pages};

use proto::limits::PAGE_BYTES;

/// Whole pages, as the data plane counts: the last one may go beyond the disk's end.
fn whole_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES)
}

/// What a disk is called where RAM blocks are meant too.
fn called(name: &str) -> String {
    format!("disk {name}")
}

#[cfg(test)]
mod tests;
