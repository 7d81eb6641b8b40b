//! Addresses of RAM blocks from QEMU's own heap, for versions that do not print them.
//!
//! QEMU keeps a structure per block on its heap. In 7.2:
//!
//! ```text
//! rcu_head (16) | mr * | host * | colo_cache * | offset | used_length | max_length | resized * | flags | idstr[256]
//! ```
//!
//! The search does not rely on this exact layout.
//!
//! Memory counts as such a structure only if three consecutive words equal the offset, the used and the maximal length
//! that `x-query-ramblock` printed, the block's name, ended by a zero byte, follows within 160 bytes, and one of the 16
//! words before (the nearest one) is the page-aligned start of mapped memory of at least the maximal length. Two
//! different results are an error. The offset makes each block unique: blocks never share their place in QEMU's address
//! space of RAM.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use super::{ListedBlock, RamError, proc_error};
use crate::maps::{Mapping, Maps};

/// Maximum distance of the name after the lengths, in bytes.
const NAME_WITHIN_BYTES: usize = 160;
/// Maximum distance of the host pointer before the lengths, in words.
const WORDS_BEFORE: usize = 16;
/// Bytes that are read at once; neighbouring reads overlap so that no structure is cut in two.
const CHUNK_BYTES: usize = 4 << 20;
const OVERLAP_BYTES: usize = 1024;
/// Maximum size of a heap in bytes: larger anonymous mappings are guest memory or code buffers.
const MAX_HEAP_BYTES: u64 = 4 << 30;

/// Returns the address of each listed block, in their order.
pub(super) fn find(pid: u32, maps: &Maps, listed: &[ListedBlock]) -> Result<Vec<u64>, RamError> {
    let memory = File::open(format!("/proc/{pid}/mem")).map_err(proc_error(pid, "mem"))?;
    let mut candidates = vec![BTreeSet::new(); listed.len()];
    // The main arena first: every known QEMU keeps its blocks there.
    let (heap, others): (Vec<&Mapping>, Vec<&Mapping>) =
        maps.iter().filter(|mapping| is_heap_like(mapping)).partition(|mapping| mapping.name == "[heap]");
    for mapping in heap.into_iter().chain(others) {
        if mapping.name != "[heap]" && candidates.iter().all(|found| !found.is_empty()) {
            break;
        }
        search_mapping(&memory, mapping, maps, listed, &mut candidates);
    }
    listed
        .iter()
        .zip(candidates)
        .map(|(block, found)| {
            let mut found = found.into_iter();
            match (found.next(), found.next()) {
                (Some(address), None) => Ok(address),
                (None, _) => Err("its record is not in QEMU's heap".to_owned()),
                (Some(one), Some(other)) => Err(format!("two addresses, {one:#x} and {other:#x}, match it")),
            }
            .map_err(|what| RamError::NotFound { block: block.name.clone(), pid, what })
        })
        .collect()
}

fn is_heap_like(mapping: &Mapping) -> bool {
    mapping.readable
        && mapping.writable
        && !mapping.executable
        && !mapping.shared
        && mapping.inode == 0
        && !mapping.name.starts_with("[stack")
        && mapping.end - mapping.start <= MAX_HEAP_BYTES
}

fn search_mapping(
    memory: &File,
    mapping: &Mapping,
    maps: &Maps,
    listed: &[ListedBlock],
    candidates: &mut [BTreeSet<u64>],
) {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = mapping.start;
    while at < mapping.end {
        let wanted = usize::try_from(mapping.end - at).map_or(CHUNK_BYTES, |l| l.min(CHUNK_BYTES));
        let Some(chunk) = buffer.get_mut(..wanted) else { return };
        // A mapping may have been removed in the meantime; then it does not contain the structure either.
        let Ok(count) = memory.read_at(chunk, at) else { return };
        let Some(chunk) = chunk.get(..count) else { return };
        search(chunk, maps, listed, candidates);
        if count < wanted || at + count as u64 >= mapping.end {
            return;
        }
        at += (count - OVERLAP_BYTES) as u64;
    }
}

/// Adds to `candidates[i]` every host address in a structure for `listed[i]` in `chunk`.
fn search(chunk: &[u8], maps: &Maps, listed: &[ListedBlock], candidates: &mut [BTreeSet<u64>]) {
    let (words, _) = chunk.as_chunks::<8>();
    let word = |at: usize| words.get(at).map(|bytes| u64::from_le_bytes(*bytes));
    // Nearly no word of a heap equals one of the sizes: one test in a table of 64 bits rejects most of them.
    let sizes = listed.iter().fold(0, |sizes, block| sizes | size_bit(block.max_bytes));
    for (at, bytes) in words.iter().enumerate().skip(2) {
        let max = u64::from_le_bytes(*bytes);
        if sizes & size_bit(max) == 0 {
            continue;
        }
        for (block, found) in listed.iter().zip(candidates.iter_mut()) {
            let is_it = block.max_bytes == max
                && word(at - 1) == Some(block.used_bytes)
                && word(at - 2) == Some(block.offset)
                && name_follows(chunk, (at + 1) * 8, &block.name);
            if is_it {
                let before = (at - 2).saturating_sub(WORDS_BEFORE)..at - 2;
                // The nearest: other data precede the structure, and may be pointers, too.
                found.extend(before.rev().filter_map(word).find(|address| is_start(*address, max, maps)));
            }
        }
    }
}

/// Returns one of 64 bits, chosen by the bits of a size that vary: sizes are multiples of pages.
const fn size_bit(bytes: u64) -> u64 {
    let mixed = (bytes >> 12).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // A heap is full of zeros and small numbers, which are not multiples of a page.
    if bytes == 0 || !bytes.is_multiple_of(4096) { 0 } else { 1 << (mixed >> 58) }
}

fn name_follows(chunk: &[u8], from: usize, name: &str) -> bool {
    let mut ended = name.as_bytes().to_vec();
    ended.push(0);
    let end = chunk.len().min(from + NAME_WITHIN_BYTES + ended.len());
    chunk.get(from..end).is_some_and(|tail| tail.windows(ended.len()).any(|window| window == ended))
}

fn is_start(address: u64, length: u64, maps: &Maps) -> bool {
    address != 0
        && address.is_multiple_of(4096)
        && maps.at(address).is_some_and(|mapping| mapping.start == address)
        && maps.covers(address, length)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0008000000 rw-p 00000000 00:00 0 
7f0010000000-7f0010040000 rw-p 00000000 00:00 0 
7f0020000000-7f0020040000 rw-p 00000000 00:00 0 
";

    fn listed(name: &str, offset: u64, max: u64) -> ListedBlock {
        ListedBlock {
            name: name.to_owned(),
            page_size_bytes: 4096,
            offset,
            used_bytes: max,
            max_bytes: max,
            host_address: None,
        }
    }

    /// Returns a structure with the layout of QEMU 7.2.
    fn record(host: u64, offset: u64, length: u64, name: &str) -> Vec<u8> {
        let mut out = Vec::new();
        for word in [0, 0, 0x55d0_0000_1000, host, 0, offset, length, length, 0, 5] {
            out.extend_from_slice(&u64::to_le_bytes(word));
        }
        out.truncate(out.len() - 4); // flags are 32 bits
        out.extend_from_slice(name.as_bytes());
        out.resize(out.len().next_multiple_of(8) + 256, 0);
        out
    }

    fn found(chunk: &[u8], blocks: &[ListedBlock]) -> Vec<Vec<u64>> {
        let mut candidates = vec![BTreeSet::new(); blocks.len()];
        search(chunk, &Maps::parse(MAPS), blocks, &mut candidates);
        candidates.into_iter().map(|set| set.into_iter().collect()).collect()
    }

    #[test]
    fn equal_sizes_are_distinguished_by_offset_and_name() {
        let blocks = [listed("a.rom", 0x1000_0000, 0x40000), listed("b.rom", 0x2000_0000, 0x40000)];
        let mut chunk = vec![0; 4096];
        chunk.extend(record(0x7f00_1000_0000, 0x1000_0000, 0x40000, "a.rom"));
        chunk.extend(record(0x7f00_2000_0000, 0x2000_0000, 0x40000, "b.rom"));
        assert_eq!(found(&chunk, &blocks), [vec![0x7f00_1000_0000], vec![0x7f00_2000_0000]]);
    }

    #[test]
    fn look_alikes_are_not_taken() {
        let block = [listed("pc.ram", 0, 0x800_0000)];
        // Another name; one that only begins like it; a host pointer to no mapping, into the middle
        // of one, to too little memory.
        for record in [
            record(0x7f00_0000_0000, 0, 0x800_0000, "pc.rom"),
            record(0x7f00_0000_0000, 0, 0x800_0000, "pc.ram2"),
            record(0x7e00_0000_0000, 0, 0x800_0000, "pc.ram"),
            record(0x7f00_0000_1000, 0, 0x800_0000, "pc.ram"),
            record(0x7f00_1000_0000, 0, 0x800_0000, "pc.ram"),
            record(0x7f00_0000_0000, 4096, 0x800_0000, "pc.ram"),
        ] {
            assert_eq!(found(&record, &block), [Vec::<u64>::new()]);
        }
        assert_eq!(found(&record(0x7f00_0000_0000, 0, 0x800_0000, "pc.ram"), &block), [[0x7f00_0000_0000]]);
    }

    #[test]
    fn pointers_before_the_structure_are_ignored() {
        let block = [listed("a.rom", 0x1000_0000, 0x40000)];
        let mut chunk: Vec<u8> = u64::to_le_bytes(0x7f00_2000_0000).into();
        chunk.extend([0; 24]);
        chunk.extend(record(0x7f00_1000_0000, 0x1000_0000, 0x40000, "a.rom"));
        assert_eq!(found(&chunk, &block), [[0x7f00_1000_0000]]);
    }

    #[test]
    fn a_name_at_the_very_end_is_no_reason_to_panic() {
        let block = [listed("pc.ram", 0, 0x800_0000)];
        let record = record(0x7f00_0000_0000, 0, 0x800_0000, "pc.ram");
        for cut in 0..record.len() {
            let _ = found(&record[..cut], &block);
        }
    }
}
