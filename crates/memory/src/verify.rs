//! Comparison of source and destination after the guest has stopped, by a path that shares nothing with the one that
//! moved its memory.
//!
//! The caller provides its own list of blocks. Bytes are read from `/proc/PID/mem`; if a block is a shared file, they
//! are read from that file by its link in `/proc/PID/map_files`, because reading a hole of a shared file through the
//! process would fill it with memory. (A private mapping of a file has that effect, too: the content behind its holes
//! is unknown here, so they are filled if both sides are compared.)
//!
//! Chunks are hashed with 64 bits of XXH3: enough against accidents, and no adversary can choose the data that is
//! compared.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use proto::limits::{CHUNK_BYTES, PAGE_BYTES};
use xxhash_rust::xxh3::Xxh3;

use crate::page_set::{ChunkPages, PageSet};

/// Bytes read at a time: they fit into the processor's cache.
const PIECE_BYTES: usize = 256 << 10;

/// A block to verify, as the caller knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// QEMU's name of the block.
    pub name: String,
    /// Length in use, in bytes.
    pub bytes: u64,
    /// Start of the block in QEMU's address space.
    pub address: u64,
}

/// Error of hashing a block.
#[derive(Debug, thiserror::Error)]
#[error("cannot read RAM block {block} of process {pid} at {address:#x} to verify it")]
pub struct VerifyError {
    /// Process id of the QEMU.
    pub pid: u32,
    /// Name of the block.
    pub block: String,
    /// Address in the process.
    pub address: u64,
    /// Error of the operating system.
    pub source: io::Error,
}

/// Returns the hashes of a block's chunks, in order; the last chunk may be shorter. Uses up to `threads` threads, with
/// 256 KiB each, and at least the caller's.
///
/// # Errors
/// If the block cannot be read.
pub fn hash_block(pid: u32, block: &Block, threads: usize) -> Result<Vec<u64>, VerifyError> {
    hash_block_without(pid, block, None, threads)
}

/// Returns the hashes as [`hash_block`] does; pages that were left out count as zeros, whatever their content.
///
/// # Errors
/// If the block cannot be read.
pub fn hash_block_without(
    pid: u32,
    block: &Block,
    left_out: Option<&PageSet>,
    threads: usize,
) -> Result<Vec<u64>, VerifyError> {
    let failed = |address, source| VerifyError { pid, block: block.name.clone(), address, source };
    let memory = Memory::open(pid, block).map_err(|source| failed(block.address, source))?;
    let chunks = block.bytes.div_ceil(CHUNK_BYTES);
    let hashes = Mutex::new(vec![0; chunks as usize]);
    let next = AtomicU64::new(0);
    let work = || -> Result<(), VerifyError> {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                return Ok(());
            }
            let left_out = left_out.map_or(ChunkPages::EMPTY, |pages| pages.chunk(chunk));
            let hash =
                memory.hash_chunk(chunk, &left_out, &mut piece).map_err(|(at, source)| failed(at, source))?;
            hashes.lock().unwrap_or_else(PoisonError::into_inner)[chunk as usize] = hash;
        }
    };
    let results: Vec<_> = thread::scope(|scope| {
        // Threads that the system does not provide are not needed.
        let start = |_| thread::Builder::new().name("hash".to_owned()).spawn_scoped(scope, work).ok();
        let started: Vec<_> = (1..threads.max(1)).filter_map(start).collect();
        let mine = work();
        let theirs = started.into_iter().map(|thread| {
            let died = || Err(failed(block.address, io::Error::other("the thread that read it panicked")));
            thread.join().unwrap_or_else(|_| died())
        });
        std::iter::once(mine).chain(theirs).collect()
    });
    results.into_iter().collect::<Result<(), _>>()?;
    Ok(hashes.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Returns the numbers of the chunks that differ; a chunk that one side lacks differs, too. `first_chunk` is the number
/// of the first one in both lists.
pub fn different_chunks(first_chunk: u64, ours: &[u64], theirs: &[u64]) -> Vec<u64> {
    let count = ours.len().max(theirs.len());
    let differs = |index: &usize| ours.get(*index) != theirs.get(*index);
    (0..count).filter(differs).map(|index| first_chunk + index as u64).collect()
}

/// Returns the hashes of the pages of one chunk of a block: compared with the peer's, they show which page differs.
#[cfg(feature = "testing")]
pub fn hash_pages(pid: u32, block: &Block, chunk: u64) -> Result<Vec<u64>, VerifyError> {
    let failed = |address, source| VerifyError { pid, block: block.name.clone(), address, source };
    let memory = Memory::open(pid, block).map_err(|source| failed(block.address, source))?;
    let mut bytes = vec![0; memory.chunk_bytes(chunk)];
    let offset = chunk * CHUNK_BYTES;
    memory.read(offset, &mut bytes).map_err(|source| failed(block.address + offset, source))?;
    Ok(bytes.chunks(PAGE_BYTES as usize).map(xxhash_rust::xxh3::xxh3_64).collect())
}

/// An open block.
struct Memory {
    file: File,
    /// Start of the block in `file`, in bytes.
    start: u64,
    address: u64,
    bytes: u64,
}

impl Memory {
    fn open(pid: u32, block: &Block) -> io::Result<Self> {
        let Block { bytes, address, .. } = *block;
        if let Some((name, start)) = shared_file(pid, address, bytes)?
            && let Ok(file) = File::open(format!("/proc/{pid}/map_files/{name}"))
        {
            return Ok(Self { file, start, address, bytes });
        }
        let file = File::open(format!("/proc/{pid}/mem"))?;
        Ok(Self { file, start: address, address, bytes })
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, self.start + offset)
    }

    fn chunk_bytes(&self, chunk: u64) -> usize {
        self.bytes.saturating_sub(chunk * CHUNK_BYTES).min(CHUNK_BYTES) as usize
    }

    /// Returns the hash of a chunk, or the address at which reading failed, with the error.
    fn hash_chunk(
        &self,
        chunk: u64,
        left_out: &ChunkPages,
        piece: &mut [u8],
    ) -> Result<u64, (u64, io::Error)> {
        let mut hash = Xxh3::new();
        let mut offset = chunk * CHUNK_BYTES;
        let mut left = self.chunk_bytes(chunk);
        while left > 0 {
            let len = left.min(piece.len());
            self.read(offset, &mut piece[..len]).map_err(|source| (self.address + offset, source))?;
            let first = offset % CHUNK_BYTES / PAGE_BYTES;
            for (page, bytes) in (first..).zip(piece[..len].chunks_mut(PAGE_BYTES as usize)) {
                if left_out.contains(page) {
                    bytes.fill(0);
                }
            }
            hash.update(&piece[..len]);
            offset += len as u64;
            left -= len;
        }
        Ok(hash.digest())
    }
}

/// If a block lies within one shared mapping of a file, returns that mapping's name in `map_files`, and the block's
/// offset in the file.
fn shared_file(pid: u32, address: u64, bytes: u64) -> io::Result<Option<(String, u64)>> {
    let map = std::fs::read(format!("/proc/{pid}/maps"))?;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let line = |line: &[u8]| -> Option<(String, u64)> {
        let line = String::from_utf8_lossy(line);
        let mut fields = line.split_ascii_whitespace();
        let (name, flags, offset) = (fields.next()?, fields.next()?, hex(fields.next()?)?);
        let (start, end) = name.split_once('-')?;
        let (start, end) = (hex(start)?, hex(end)?);
        let whole = start <= address && address.checked_add(bytes)? <= end;
        // Only a file has an inode number other than 0.
        let is_file = fields.nth(1)? != "0";
        (whole && flags.ends_with('s') && is_file).then(|| (name.to_owned(), offset + (address - start)))
    };
    Ok(map.split(|byte| *byte == b'\n').find_map(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(bytes: &[u8]) -> Block {
        Block { name: "test".into(), bytes: bytes.len() as u64, address: bytes.as_ptr() as u64 }
    }

    #[test]
    fn one_changed_byte_is_one_different_chunk_and_page() {
        let me = std::process::id();
        let mut bytes = vec![7; 3 * CHUNK_BYTES as usize + 5 * PAGE_BYTES as usize];
        let before = hash_block(me, &block(&bytes), 3).unwrap();
        assert_eq!(before.len(), 4);
        assert_eq!(before, hash_block(me, &block(&bytes), 1).unwrap());
        let expected: Vec<u64> = bytes.chunks(CHUNK_BYTES as usize).map(xxhash_rust::xxh3::xxh3_64).collect();
        assert_eq!(before, expected);
        let last = bytes.len() - 1;
        for (at, chunk, page) in [(0, 0, 0), (2 * CHUNK_BYTES as usize - 1, 1, 511), (last, 3, 4)] {
            let pages_before = hash_pages(me, &block(&bytes), chunk).unwrap();
            bytes[at] ^= 1;
            let after = hash_block(me, &block(&bytes), 2).unwrap();
            assert_eq!(different_chunks(0, &before, &after), [chunk]);
            let pages_after = hash_pages(me, &block(&bytes), chunk).unwrap();
            assert_eq!(different_chunks(0, &pages_before, &pages_after), [page]);
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn what_was_left_out_counts_as_zeros() {
        let me = std::process::id();
        let mut bytes = vec![7; 2 * CHUNK_BYTES as usize];
        let (page, first) = (PAGE_BYTES as usize, CHUNK_BYTES as usize / 2);
        let mut left_out = PageSet::new(bytes.len() as u64);
        left_out.set(0..1);
        left_out.set(255..257);
        left_out.set(1023..1024);
        let hashes = hash_block_without(me, &block(&bytes), Some(&left_out), 2).unwrap();
        bytes[..page].fill(0);
        bytes[first - page..first + page].fill(0);
        let end = bytes.len() - page;
        bytes[end..].fill(0);
        assert_eq!(hashes, hash_block(me, &block(&bytes), 1).unwrap());
    }

    #[test]
    fn lists_of_other_length_differ_where_one_has_nothing() {
        assert_eq!(different_chunks(10, &[1, 2, 3], &[1, 5]), [11, 12]);
        assert!(different_chunks(10, &[1], &[1]).is_empty());
    }

    /// To be run in a process of its own, where no thread can be started.
    #[test]
    #[ignore = "what the next test starts"]
    fn hashes_alone() {
        if thread::Builder::new().spawn(|| {}).is_ok() {
            return;
        }
        let bytes = vec![7; 3 * CHUNK_BYTES as usize];
        assert_eq!(hash_block(std::process::id(), &block(&bytes), 3).unwrap().len(), 3);
        println!("hashed");
    }

    #[test]
    fn without_other_threads_the_callers_is_enough() {
        let alone = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture", "--test-threads=1", "verify::tests::hashes_alone"])
            // No address space has room for such a stack.
            .env("RUST_MIN_STACK", (1_u64 << 60).to_string())
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&alone.stdout).contains("hashed"), "{alone:?}");
        assert!(alone.status.success(), "{alone:?}");
    }

    #[test]
    fn unreadable_memory_is_an_error() {
        let nowhere = Block { name: "pc.ram".into(), bytes: 4096, address: 4096 };
        let error = hash_block(std::process::id(), &nowhere, 2).unwrap_err();
        assert_eq!((error.block.as_str(), error.address), ("pc.ram", 4096));
        assert!(hash_block(u32::MAX / 2, &nowhere, 1).is_err());
    }
}
