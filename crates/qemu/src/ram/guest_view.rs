//! The parts of RAM blocks that the guest sees, at their guest-physical addresses.
//!
//! `info mtree` lists regions that may cover each other; `gpa2hva` reports which one is visible at an address, and where
//! it is in QEMU's process. Between two ends of regions the visible one is the same, so each such piece is compared at
//! its first and its last page. `info mtree -f` prints the visible pieces at once, but each call leaves references in QEMU (7.2 to
//! 10.0): a device that is unplugged later is never freed, and `DEVICE_DELETED` is never sent.

use std::collections::BTreeSet;

use super::text::{self, Region};
use super::{RamBlock, RamError, block_of_region};
use crate::qmp::Qmp;

/// Command that prints the guest's memory regions.
const MEMORY_TREE: &str = "info mtree";
/// Maximum number of samples of regions that change.
const MAX_SAMPLES: usize = 20;
/// Length of the smallest piece that is compared, in bytes.
const PAGE_BYTES: u64 = 4096;

/// A piece of a block, at the address where the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestMapping {
    /// First guest-physical address.
    pub guest_address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Index of the block.
    pub block: usize,
    /// Offset in the block, in bytes.
    pub offset_bytes: u64,
}

/// Returns the addresses at which the guest sees these blocks now, after a comparison with the output of `gpa2hva`. The
/// guest may remap some of them while it boots; its main memory stays.
///
/// # Errors
/// If QEMU cannot be queried; [`RamError::Contradiction`] at the first difference.
pub fn guest_mappings(qmp: &mut Qmp, blocks: &[RamBlock]) -> Result<Vec<GuestMapping>, RamError> {
    Ok(sampled(qmp, blocks)?.mappings)
}

/// Compares blocks with the output of `gpa2hva` for every part of them that the guest sees: the main memory below and
/// above 4 GiB, NUMA nodes, the firmware. Returns the number of places that were compared.
///
/// # Errors
/// [`RamError::Contradiction`] at the first difference.
pub fn cross_check(qmp: &mut Qmp, blocks: &[RamBlock]) -> Result<usize, RamError> {
    Ok(sampled(qmp, blocks)?.compared_places)
}

/// The visible pieces of blocks.
#[derive(Debug, Default, PartialEq, Eq)]
struct View {
    mappings: Vec<GuestMapping>,
    compared_places: usize,
}

fn sampled(qmp: &mut Qmp, blocks: &[RamBlock]) -> Result<View, RamError> {
    let mut tree = qmp.hmp(MEMORY_TREE)?;
    let mut samples = 0;
    loop {
        let regions = text::regions(&tree);
        let pieces = pieces(&regions);
        let mut questions: Vec<String> = pieces.iter().flat_map(Piece::questions).collect();
        questions.push(MEMORY_TREE.to_owned());
        let mut replies = qmp.hmp_all(&questions)?;
        let tree_after = replies.pop().unwrap_or_default();
        samples += 1;
        match view(&pieces, &replies, blocks) {
            // While the guest boots, its firmware opens and closes windows: the regions may be outdated when the
            // replies arrive.
            Err(_) if tree_after != tree && samples < MAX_SAMPLES => tree = tree_after,
            seen => return seen,
        }
    }
}

/// Addresses between two neighbouring ends of regions, with the regions of RAM or ROM that cover them.
#[derive(Debug)]
struct Piece<'a> {
    start: u64,
    end: u64,
    covering: Vec<&'a Region>,
}

impl Piece<'_> {
    fn last_page(&self) -> u64 {
        (self.end - 1) & !(PAGE_BYTES - 1)
    }

    fn questions(&self) -> [String; 2] {
        [self.start, self.last_page()].map(|address| format!("gpa2hva 0x{address:x}"))
    }
}

fn pieces(regions: &[Region]) -> Vec<Piece<'_>> {
    let ends = regions.iter().flat_map(|region| [Some(region.start), region.last.checked_add(1)]);
    let ends: Vec<u64> = ends.flatten().collect::<BTreeSet<_>>().into_iter().collect();
    let piece = |pair: &[u64]| {
        let &[start, end] = pair else { return None };
        let covers = |region: &&Region| region.is_memory && region.start <= start && region.last >= end - 1;
        let covering: Vec<_> = regions.iter().filter(covers).collect();
        // Smaller ones have no page of their own to compare.
        (!covering.is_empty() && end - start >= PAGE_BYTES).then_some(Piece { start, end, covering })
    };
    ends.windows(2).filter_map(piece).collect()
}

/// Returns what the guest sees by the replies of `gpa2hva` to all pieces' questions.
fn view(pieces: &[Piece<'_>], replies: &[String], blocks: &[RamBlock]) -> Result<View, RamError> {
    let mut view = View::default();
    for (piece, replies) in pieces.iter().zip(replies.chunks(2)) {
        let [Some(first), Some(last)] = [0, 1].map(|one| text::host_address(replies.get(one)?)) else {
            // It is covered by a device, or no memory is mapped there any more.
            continue;
        };
        if let Some((block, offset_bytes)) = visible(piece, [first, last], blocks)? {
            view.compared_places += 2;
            view.add(GuestMapping {
                guest_address: piece.start,
                bytes: piece.end - piece.start,
                block,
                offset_bytes,
            });
        }
    }
    view.mappings.retain(|seen| {
        let end = seen.offset_bytes.checked_add(seen.bytes);
        end.is_some_and(|end| end <= blocks[seen.block].used_bytes)
    });
    Ok(view)
}

impl View {
    /// Adds a piece, to the one before if it continues that.
    fn add(&mut self, piece: GuestMapping) {
        match self.mappings.last_mut() {
            Some(last)
                if last.block == piece.block
                    && last.guest_address + last.bytes == piece.guest_address
                    && last.offset_bytes + last.bytes == piece.offset_bytes =>
            {
                last.bytes += piece.bytes;
            }
            _ => self.mappings.push(piece),
        }
    }
}

/// Returns the block and the offset that are visible in a piece by the regions and addresses that `gpa2hva` reports for
/// its first and last page; `None` if the visible region belongs to no known block.
fn visible(
    piece: &Piece<'_>,
    reported: [(&str, u64); 2],
    blocks: &[RamBlock],
) -> Result<Option<(usize, u64)>, RamError> {
    let [(name, first), (_, last)] = reported;
    let Some(block) = block_of_region(blocks, name) else { return Ok(None) };
    for region in piece.covering.iter().filter(|region| region.name == name) {
        let offset_bytes = region.offset.wrapping_add(piece.start - region.start);
        let expected = block.host_address.wrapping_add(offset_bytes);
        if [first, last] == [expected, expected.wrapping_add(piece.last_page() - piece.start)] {
            let index = blocks.iter().position(|one| one.name == block.name);
            return Ok(index.map(|index| (index, offset_bytes)));
        }
    }
    let what = format!(
        "gpa2hva reports {first:#x} for guest address {:#x} and {last:#x} for {:#x}, which contradicts info mtree",
        piece.start,
        piece.last_page()
    );
    Err(RamError::Contradiction { block: block.name.clone(), what })
}

#[cfg(test)]
mod tests;
