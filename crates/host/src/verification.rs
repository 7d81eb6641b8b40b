//! `--verify`: after the stop, all of memory is compared by a path that shares nothing with the one that moved it.
//!
//! Each side asks its own QEMU anew for the locations of its RAM blocks, reads them plainly (from the file for shared
//! memory, from `/proc/PID/mem` otherwise; see [`::memory::verify`]), and hashes every chunk. No scanner, reader,
//! writer or bitmap of the data plane is used. Disks that were copied are opened anew, see [`block::compare`].

use std::path::Path;
use std::time::Duration;

use ::memory::PageSet;
use ::memory::verify::{self, Block, VerifyError};
use block::image::ImageError;
use block::reading::ImageReader;
use proto::limits::{CHUNK_BYTES, HASHES};
use proto::message::Message;
use qemu::describe::Disk;
use qemu::qmp::Qmp;
use qemu::ram::{RamBlock, RamError, ram_blocks};

/// Number of threads that hash.
const THREADS: usize = 2;

/// Reason for which memory or a disk could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// QEMU does not report the location of its memory.
    #[error("the guest's memory was not found")]
    Ram(#[from] RamError),
    /// The memory could not be read.
    #[error("the guest's memory could not be read")]
    Read(#[from] VerifyError),
    /// A disk could not be read.
    #[error("the guest's disk could not be read")]
    Disk(#[from] ImageError),
    /// The source names a block, or a part of one, that does not exist here.
    #[error("the source has a part of {0} that does not exist here")]
    NotThere(String),
}

/// Hashes of the source's memory and disks, in pieces that fit a message.
#[derive(Default)]
pub struct BlockHashes {
    /// Bytes that were hashed.
    pub bytes: u64,
    /// Chunks that were hashed.
    pub chunks: u64,
    /// Messages that carry the hashes to the destination.
    pub messages: Vec<Message>,
}

/// Hashes all of a stopped guest's memory. `names` are the blocks in the order of the proposal, which is also the order
/// of the pages that were left out: the destination has zeros there, and here they count as zeros.
pub(crate) fn hashes(
    qmp: &mut Qmp,
    pid: u32,
    names: &[&str],
    left_out: &[PageSet],
) -> Result<BlockHashes, CompareError> {
    let blocks = ram_blocks(qmp, pid)?;
    let mut all = BlockHashes::default();
    for block in &blocks {
        let place = names.iter().position(|name| *name == block.name);
        let place = place.ok_or_else(|| CompareError::NotThere(format!("RAM block {}", block.name)))?;
        let whole = part(block, 0, u64::MAX);
        let hashes = verify::hash_block_without(pid, &whole, left_out.get(place), THREADS)?;
        all.add(place, block.used_bytes, &hashes);
    }
    Ok(all)
}

/// A disk's image, as QEMU names it.
#[derive(Clone, Debug)]
pub struct DiskImage {
    pub(crate) path: String,
    pub(crate) format: String,
    /// Length of the disk: a raw image may be longer.
    pub(crate) disk_bytes: u64,
    /// Offset of a raw disk in its file, in bytes.
    pub(crate) offset_bytes: u64,
}

impl DiskImage {
    /// Returns the image that has a disk's content; none if the description does not have it.
    pub fn of(disk: &Disk) -> Option<Self> {
        let format = disk.nodes.as_ref()?.format.as_str();
        // Without a format of its own an image is raw.
        let format = if ["file", "host_device"].contains(&format) { "raw" } else { format };
        let offset_bytes = disk.part.as_ref().map_or(Some(0), |part| part.offset_bytes)?;
        let (path, disk_bytes) = (disk.file.clone()?, disk.bytes?);
        Some(Self { path, format: format.to_owned(), disk_bytes, offset_bytes })
    }

    /// Opens it, even if other processes have it open; see [`ImageReader::open`].
    pub(crate) fn open(&self, socket: &Path, patience: Duration) -> Result<ImageReader, ImageError> {
        let part = self.offset_bytes..self.offset_bytes.saturating_add(self.disk_bytes);
        let part = (self.format == "raw").then_some(part);
        ImageReader::open(&self.path, &self.format, part, socket, patience)
    }
}

impl BlockHashes {
    /// Adds a block with this index.
    fn add(&mut self, block: usize, bytes: u64, hashes: &[u64]) {
        self.bytes += bytes;
        self.chunks += hashes.len() as u64;
        for (piece, hashes) in hashes.chunks(HASHES).enumerate() {
            self.messages.push(Message::Verify {
                block: block as u16,
                first_chunk: (piece * HASHES) as u64,
                hashes: hashes.iter().map(|hash| format!("{hash:016x}")).collect(),
            });
        }
    }

    /// Adds the hashes of other blocks.
    pub fn append(&mut self, mut others: Self) {
        self.bytes += others.bytes;
        self.chunks += others.chunks;
        self.messages.append(&mut others.messages);
    }

    /// Adds the copied disks of a stopped guest, which QEMU has released. The first has the index `first_block`.
    pub fn add_disks(
        &mut self,
        first_block: usize,
        images: &[DiskImage],
        socket: &Path,
        patience: Duration,
    ) -> Result<(), CompareError> {
        for (number, image) in images.iter().enumerate() {
            let mut reading = image.open(socket, patience)?;
            let hashes = reading.hash_chunks(CHUNK_BYTES, 0..u64::MAX)?;
            self.add(first_block + number, reading.size_bytes(), &hashes);
        }
        Ok(())
    }
}

/// Returns the chunks of a block of this side that differ from the source's hashes.
pub fn differences(
    qmp: &mut Qmp,
    pid: u32,
    name: &str,
    first_chunk: u64,
    theirs: &[String],
) -> Result<Vec<u64>, CompareError> {
    let called = format!("RAM block {name}");
    let blocks = ram_blocks(qmp, pid)?;
    let block = blocks.iter().find(|block| block.name == name);
    let block = block.ok_or_else(|| CompareError::NotThere(called.clone()))?;
    let part = part(block, first_chunk, theirs.len() as u64);
    different(&called, first_chunk, &verify::hash_block(pid, &part, THREADS)?, theirs)
}

/// Returns the chunks that differ; both sides must have the same number of chunks.
pub(crate) fn different(
    called: &str,
    first_chunk: u64,
    ours: &[u64],
    theirs: &[String],
) -> Result<Vec<u64>, CompareError> {
    let not_there = || CompareError::NotThere(called.to_owned());
    if ours.len() != theirs.len() {
        return Err(not_there());
    }
    let theirs: Option<Vec<_>> = theirs.iter().map(|hash| u64::from_str_radix(hash, 16).ok()).collect();
    Ok(verify::different_chunks(first_chunk, ours, &theirs.ok_or_else(not_there)?))
}

/// Returns some chunks of a block, up to its end.
fn part(block: &RamBlock, first_chunk: u64, chunks: u64) -> Block {
    let start = first_chunk.saturating_mul(CHUNK_BYTES).min(block.used_bytes);
    let bytes = chunks.saturating_mul(CHUNK_BYTES).min(block.used_bytes - start);
    Block { name: block.name.clone(), bytes, address: block.host_address + start }
}
