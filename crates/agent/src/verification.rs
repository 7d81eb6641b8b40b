//! `--verify`: after the stop, all of memory is compared by a path that shares nothing with the one that moved it.
//!
//! Each side asks its own QEMU anew where its RAM blocks are, reads them plainly (from the file where it is shared memory,
//! from `/proc/PID/mem` otherwise; see [`::memory::verify`]), and hashes every chunk. No scanner, reader, writer or bitmap of the data plane has a part in it.

use ::memory::verify::{self, Block, VerifyError};
use proto::limits::{CHUNK_BYTES, HASHES};
use proto::message::Message;
use qemu::qmp::Qmp;
use qemu::ram::{RamBlock, RamError, ram_blocks};

/// Threads that hash.
const THREADS: usize = 2;

/// Why memory could not be compared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompareError {
    /// QEMU does not tell where it is.
    #[error("the guest's memory was not found")]
    Ram(#[from] RamError),
    /// It could not be read.
    #[error("the guest's memory could not be read")]
    Read(#[from] VerifyError),
    /// The other side names a block, or a part of one, that is not here.
    #[error("the source has a part of RAM block {0} that is not here")]
    NotThere(String),
}

/// What the source says of its memory, in pieces that fit a message.
pub(crate) struct Hashes {
    pub(crate) bytes: u64,
    pub(crate) chunks: u64,
    pub(crate) messages: Vec<Message>,
}

/// Hashes all of a stopped guest's memory. `names` are the blocks in the order of the proposal.
pub(crate) fn hashes(qmp: &mut Qmp, pid: u32, names: &[&str]) -> Result<Hashes, CompareError> {
    let blocks = ram_blocks(qmp, pid)?;
    let mut all = Hashes { bytes: 0, chunks: 0, messages: Vec::new() };
    for block in &blocks {
        let place = names.iter().position(|name| *name == block.name);
        let place = place.ok_or_else(|| CompareError::NotThere(block.name.clone()))?;
        let hashes = verify::hash_block(pid, &part(block, 0, u64::MAX), THREADS)?;
        all.bytes += block.used_bytes;
        all.chunks += hashes.len() as u64;
        for (piece, hashes) in hashes.chunks(HASHES).enumerate() {
            all.messages.push(Message::Verify {
                block: place as u16,
                first_chunk: (piece * HASHES) as u64,
                hashes: hashes.iter().map(|hash| format!("{hash:016x}")).collect(),
            });
        }
    }
    Ok(all)
}

/// The chunks of a block of this side that differ from the source's hashes.
pub(crate) fn differences(
    qmp: &mut Qmp,
    pid: u32,
    name: &str,
    first_chunk: u64,
    theirs: &[String],
) -> Result<Vec<u64>, CompareError> {
    let not_there = || CompareError::NotThere(name.to_owned());
    let blocks = ram_blocks(qmp, pid)?;
    let block = blocks.iter().find(|block| block.name == name).ok_or_else(not_there)?;
    let part = part(block, first_chunk, theirs.len() as u64);
    let ours = verify::hash_block(pid, &part, THREADS)?;
    if ours.len() != theirs.len() {
        return Err(not_there());
    }
    let theirs: Option<Vec<_>> = theirs.iter().map(|hash| u64::from_str_radix(hash, 16).ok()).collect();
    Ok(verify::different_chunks(first_chunk, &ours, &theirs.ok_or_else(not_there)?))
}

/// Some chunks of a block, as far as it goes.
fn part(block: &RamBlock, first_chunk: u64, chunks: u64) -> Block {
    let start = first_chunk.saturating_mul(CHUNK_BYTES).min(block.used_bytes);
    let bytes = chunks.saturating_mul(CHUNK_BYTES).min(block.used_bytes - start);
    Block { name: block.name.clone(), bytes, address: block.host_address + start }
}
