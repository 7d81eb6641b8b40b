//! Comparison of two disks after the guest has stopped, by a path that shares nothing with the one that moved them but
//! the [client](crate::nbd): each image is opened anew, for reading, by a server of its own.

use std::ops::Range;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::image::ImageError;
use crate::nbd::{Client, NbdError, ZERO};
use crate::reading::ImageReader;

/// Length of one read, in bytes: it fits the processor's cache.
const PIECE_BYTES: u64 = 256 << 10;

impl ImageReader {
    /// Returns the XXH3 (64 bits) of chunks of `chunk_bytes`, up to the end of the disk; its last chunk may be
    /// shorter. Ranges that are known to be zeros are not read.
    pub fn hash_chunks(&mut self, chunk_bytes: u64, chunks: Range<u64>) -> Result<Vec<u64>, ImageError> {
        self.ask(|client| hash_chunks(client, chunk_bytes, chunks))
    }
}

fn hash_chunks(client: &mut Client, chunk_bytes: u64, chunks: Range<u64>) -> Result<Vec<u64>, NbdError> {
    let end = client.size_bytes();
    let bytes = |chunk: u64| {
        let start = chunk.saturating_mul(chunk_bytes).min(end);
        start..start.saturating_add(chunk_bytes).min(end)
    };
    let chunks = chunks.start..chunks.end.min(end.div_ceil(chunk_bytes)).max(chunks.start);
    let mut is_zero = vec![true; (chunks.end - chunks.start) as usize];
    for extent in client.status(bytes(chunks.start).start..bytes(chunks.end).start)? {
        if extent.status & ZERO == 0 {
            let touched = extent.bytes.start / chunk_bytes..extent.bytes.end.div_ceil(chunk_bytes);
            let place = |chunk: u64| (chunk - chunks.start) as usize;
            is_zero[place(touched.start)..place(touched.end)].fill(false);
        }
    }
    let zeros = vec![0; chunk_bytes.min(end) as usize];
    let of_zeros = xxh3_64(&zeros);
    let mut piece = vec![0; PIECE_BYTES.min(chunk_bytes) as usize];
    let mut hashes = Vec::with_capacity(is_zero.len());
    for (chunk, is_zero) in chunks.zip(is_zero) {
        let bytes = bytes(chunk);
        let len = (bytes.end - bytes.start) as usize;
        hashes.push(match is_zero {
            true if len == zeros.len() => of_zeros,
            true => xxh3_64(&zeros[..len]),
            false => hash(client, bytes, &mut piece)?,
        });
    }
    Ok(hashes)
}

fn hash(client: &mut Client, bytes: Range<u64>, piece: &mut [u8]) -> Result<u64, NbdError> {
    let mut hash = Xxh3::new();
    let mut at = bytes.start;
    while at < bytes.end {
        let len = (bytes.end - at).min(piece.len() as u64);
        let piece = &mut piece[..len as usize];
        client.read(at, piece)?;
        hash.update(piece);
        at += len;
    }
    Ok(hash.digest())
}
