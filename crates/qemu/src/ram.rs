//! Addresses of a guest's memory inside QEMU.
//!
//! QEMU keeps the guest's memory in *RAM blocks*: main memory, video memory, ROMs, tables. Source
//! and destination identify a block by its name (`pc.ram`, `0000:00:02.0/vga.vram`), and the agent
//! reads and writes it at its address in QEMU's process.
//!
//! QMP's `x-query-ramblock` lists the blocks, and newer versions (10.0) print the addresses. Where
//! it does not (7.2), the address is found in QEMU's own data structures, see [`heap`]. Either way
//! the result is verified before it is used: every block is in readable and writable memory, starts
//! where a mapping starts, overlaps no other, and the parts that the guest sees agree with the
//! output of `gpa2hva` ([`cross_check`]).
//!
//! A wrong block corrupts a guest, so every doubt is an error here.

mod guest_view;
mod heap;
mod text;

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::maps::Maps;
use crate::qmp::{Qmp, QmpError};
pub use guest_view::{GuestMapping, cross_check, guest_mappings};

/// Error: the guest's memory could not be located.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The monitor failed.
    #[error("cannot query QEMU for its RAM blocks")]
    Qmp(#[from] QmpError),
    /// `/proc` of the process could not be read.
    #[error(
        "cannot read {path}; run the agent as root or as QEMU's user, on a kernel that permits tracing (ptrace_scope)"
    )]
    Proc {
        /// Path of the file.
        path: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// QEMU's answer could not be parsed.
    #[error("cannot read QEMU's list of RAM blocks: {what}; is this version of QEMU supported?")]
    Text {
        /// Part that could not be parsed.
        what: String,
    },
    /// A block's address could not be found.
    #[error(
        "cannot find RAM block {block} in QEMU process {pid}: {what}; use a QEMU whose x-query-ramblock prints HVA (8.2 or later)"
    )]
    NotFound {
        /// Name of the block.
        block: String,
        /// Process id.
        pid: u32,
        /// Result of the search.
        what: String,
    },
    /// The result contradicts itself or `gpa2hva`.
    #[error("RAM block {block} failed a consistency check: {what}; nothing was changed")]
    Contradiction {
        /// Name of the block.
        block: String,
        /// Description of the difference.
        what: String,
    },
}

/// A file behind guest memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedFile {
    /// Name in `/proc/PID/maps`; `/memfd:NAME (deleted)` for a memfd.
    pub path: PathBuf,
    /// Inode number.
    pub inode: u64,
    /// Major and minor number of its file system.
    pub device: (u32, u32),
    /// Offset of the block in the file, in bytes.
    pub offset_bytes: u64,
}

/// Kind of memory of a block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RamKind {
    /// Private anonymous memory, QEMU's default.
    Anonymous,
    /// A file or memfd mapped shared: other processes can map and fill it too.
    SharedFile(MappedFile),
    /// A file mapped privately: the guest's writes are not in the file.
    PrivateFile(MappedFile),
}

/// One RAM block of a running QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// QEMU's name for it (`idstr`), equal on source and destination.
    pub name: String,
    /// Page size of its memory: 4096, or a huge page's for hugetlbfs.
    pub page_size_bytes: u64,
    /// Number of bytes in use. Firmware tables can grow up to `max_bytes`.
    pub used_bytes: u64,
    /// Number of bytes that are mapped.
    pub max_bytes: u64,
    /// Address in QEMU's process.
    pub host_address: u64,
    /// Kind of memory.
    pub kind: RamKind,
}

/// One line of `x-query-ramblock`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ListedBlock {
    name: String,
    page_size_bytes: u64,
    offset: u64,
    used_bytes: u64,
    max_bytes: u64,
    host_address: Option<u64>,
}

/// Returns all RAM blocks of the QEMU that `qmp` is connected to, whose process is `pid`, in QEMU's
/// own order.
///
/// # Errors
/// If a block cannot be found, or if a verification fails.
pub fn ram_blocks(qmp: &mut Qmp, pid: u32) -> Result<Vec<RamBlock>, RamError> {
    let listed = list(qmp)?;
    let maps = Maps::of(pid).map_err(proc_error(pid, "maps"))?;
    let reported: Option<Vec<u64>> = listed.iter().map(|block| block.host_address).collect();
    let addresses = match reported {
        Some(addresses) => addresses,
        None => heap::find(pid, &maps, &listed)?,
    };
    checked(qmp, &listed, addresses, &maps)
}

/// Like [`ram_blocks`], but always from QEMU's heap, even if QEMU prints the addresses: the two
/// ways verify each other.
#[cfg(feature = "testing")]
pub fn ram_blocks_from_heap(qmp: &mut Qmp, pid: u32) -> Result<Vec<RamBlock>, RamError> {
    let listed = list(qmp)?;
    let maps = Maps::of(pid).map_err(proc_error(pid, "maps"))?;
    let addresses = heap::find(pid, &maps, &listed)?;
    checked(qmp, &listed, addresses, &maps)
}

fn checked(
    qmp: &mut Qmp,
    listed: &[ListedBlock],
    addresses: Vec<u64>,
    maps: &Maps,
) -> Result<Vec<RamBlock>, RamError> {
    let blocks = listed
        .iter()
        .zip(addresses)
        .map(|(block, address)| located(block, address, maps))
        .collect::<Result<Vec<_>, _>>()?;
    check_no_overlap(&blocks)?;
    cross_check(qmp, &blocks)?;
    Ok(blocks)
}

/// Returns names and page sizes of the blocks in a table of `x-query-ramblock`.
pub(crate) fn names(table: &str) -> Vec<(String, u64)> {
    let blocks = text::blocks(table).unwrap_or_default();
    blocks.into_iter().map(|block| (block.name, block.page_size_bytes)).collect()
}

/// Returns the block behind a memory region with that name. The name of a device's block has the
/// device's path before the region's name (`0000:00:02.0/vga.vram`); two devices with equal regions
/// cannot be distinguished.
fn block_of_region<'a>(blocks: &'a [RamBlock], region: &str) -> Option<&'a RamBlock> {
    let is_it = |block: &&RamBlock| {
        block.name == region
            || block
                .name
                .strip_suffix(region)
                .is_some_and(|device| device.ends_with('/') && !device.starts_with("/rom@"))
    };
    let mut found = blocks.iter().filter(is_it);
    found.next().filter(|_| found.next().is_none())
}

fn list(qmp: &mut Qmp) -> Result<Vec<ListedBlock>, RamError> {
    let answer: Value = qmp.execute("x-query-ramblock", Value::Null)?;
    let table = answer.get("human-readable-text").and_then(Value::as_str).unwrap_or_default();
    text::blocks(table).map_err(|what| RamError::Text { what })
}

fn located(block: &ListedBlock, address: u64, maps: &Maps) -> Result<RamBlock, RamError> {
    let wrong = |what| RamError::Contradiction { block: block.name.clone(), what };
    let mapping = maps.at(address).ok_or_else(|| wrong(format!("{address:#x} is not mapped")))?;
    if mapping.start != address && mapping.inode == 0 {
        return Err(wrong(format!("{address:#x} is not the start of a mapping")));
    }
    if !maps.covers(address, block.max_bytes) {
        return Err(wrong(format!(
            "{:#x} bytes at {address:#x} are not all readable and writable",
            block.max_bytes
        )));
    }
    let file = || MappedFile {
        path: PathBuf::from(&mapping.name),
        inode: mapping.inode,
        device: mapping.device,
        offset_bytes: mapping.offset + (address - mapping.start),
    };
    let kind = match (mapping.inode, mapping.shared) {
        (0, _) => RamKind::Anonymous,
        (_, true) => RamKind::SharedFile(file()),
        (_, false) => RamKind::PrivateFile(file()),
    };
    Ok(RamBlock {
        name: block.name.clone(),
        page_size_bytes: block.page_size_bytes,
        used_bytes: block.used_bytes,
        max_bytes: block.max_bytes,
        host_address: address,
        kind,
    })
}

fn check_no_overlap(blocks: &[RamBlock]) -> Result<(), RamError> {
    let mut sorted: Vec<&RamBlock> = blocks.iter().collect();
    sorted.sort_unstable_by_key(|block| block.host_address);
    for pair in sorted.windows(2) {
        if let [low, high] = pair
            && low.host_address.saturating_add(low.max_bytes) > high.host_address
        {
            return Err(RamError::Contradiction {
                block: low.name.clone(),
                what: format!("it overlaps {}", high.name),
            });
        }
    }
    Ok(())
}

fn proc_error(pid: u32, file: &str) -> impl FnOnce(io::Error) -> RamError {
    let path = format!("/proc/{pid}/{file}");
    move |source| RamError::Proc { path, source }
}
