//! Copied disks, as the data plane needs them: linear address spaces like RAM blocks, numbered after these in the order
//! of the proposal.
//!
//! Disks are copied by their content as the guest sees it, so that both hosts may use different image formats. The
//! source reads it from QEMU's own NBD server; the destination writes it through the server of an image. Several
//! threads do so at a time, each over a connection of its own.

mod cached;
mod destination;
mod known;
mod owner;
mod planned;
mod served;
mod source;

pub use cached::drop_page_cache;
pub use destination::CopiedImages;
pub use known::KnownFile;
pub(crate) use owner::{check_can_open_as, give_ownership};
pub use planned::PlannedDisk;
pub use source::{DiskLog, LeavingDisk, SocketPath, first_pages};

use proto::limits::PAGE_BYTES;

/// Rounds up to whole pages, as the data plane counts: the last one may extend beyond the disk's end.
fn whole_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES)
}

/// Returns the name of a disk where RAM blocks are possible too.
fn display_name(name: &str) -> String {
    format!("disk {name}")
}

#[cfg(test)]
mod tests;
