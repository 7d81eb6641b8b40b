//! The file that records the missing pages.
//!
//! An agent may die while the guest runs. The memory itself does not show which pages are present, because a page that
//! arrived and that the guest has given back since looks like one that has not arrived. So the file has a bit for each
//! page, chunk by chunk and block by block, which is cleared when the page is present. It need not outlive the host:
//! nor does the guest.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use proto::limits::CHUNK_PAGES;

use crate::page_set::{ChunkPages, PageSet};

/// Bytes of the file for a chunk.
const CHUNK_BYTES: usize = CHUNK_PAGES as usize / 8;

/// Missing pages, recorded in a file.
#[derive(Debug)]
pub struct MissingPagesFile {
    file: File,
    /// Start of each block in the file, in bytes.
    places: Vec<u64>,
}

impl MissingPagesFile {
    /// Creates the file, complete.
    ///
    /// # Errors
    /// If the file cannot be created, or there is no room for it.
    pub fn create(path: &Path, missing: &[PageSet]) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        let bytes: Vec<u8> = missing
            .iter()
            .flat_map(|block| (0..block.chunks()).flat_map(|chunk| encode(&block.chunk(chunk))))
            .collect();
        // All of it, including zeros, so that its room is allocated now.
        file.write_all_at(&bytes, 0)?;
        Ok(Self { file, places: places(missing) })
    }

    /// Opens the file of another agent, for blocks of these lengths in bytes.
    ///
    /// # Errors
    /// If the file cannot be read, or belongs to other blocks.
    pub fn open(path: &Path, lengths: impl IntoIterator<Item = u64>) -> io::Result<(Self, Vec<PageSet>)> {
        let file = File::options().read(true).write(true).open(path)?;
        let mut missing: Vec<_> = lengths.into_iter().map(PageSet::new).collect();
        let chunks: u64 = missing.iter().map(PageSet::chunks).sum();
        if file.metadata()?.len() != chunks * CHUNK_BYTES as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is of another guest"));
        }
        let places = places(&missing);
        for (block, place) in missing.iter_mut().zip(&places) {
            let mut bytes = vec![0; block.chunks() as usize * CHUNK_BYTES];
            file.read_exact_at(&mut bytes, *place)?;
            for (chunk, bytes) in (0..).zip(bytes.as_chunks::<CHUNK_BYTES>().0) {
                block.insert_into_chunk(chunk, &decode(bytes));
            }
        }
        Ok((Self { file, places }, missing))
    }

    /// Records the missing pages of the chunks in which `pages` have changed.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn update(&self, block: usize, missing: &PageSet, pages: Range<u64>) -> io::Result<()> {
        let chunks = pages.start / CHUNK_PAGES..pages.end.div_ceil(CHUNK_PAGES);
        let Some(place) = self.places.get(block) else { return Ok(()) };
        let bytes: Vec<u8> = chunks.clone().flat_map(|chunk| encode(&missing.chunk(chunk))).collect();
        self.file.write_all_at(&bytes, place + chunks.start * CHUNK_BYTES as u64)
    }
}

fn places(blocks: &[PageSet]) -> Vec<u64> {
    let mut next = 0;
    let place = |block: &PageSet| {
        let place = next;
        next += block.chunks() * CHUNK_BYTES as u64;
        place
    };
    blocks.iter().map(place).collect()
}

fn encode(pages: &ChunkPages) -> Vec<u8> {
    pages.words().iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn decode(bytes: &[u8; CHUNK_BYTES]) -> ChunkPages {
    let mut words = [0; CHUNK_BYTES / 8];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    ChunkPages::from_words(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_agent_reads_what_the_last_one_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing");
        let lengths = [3 << 20, 0, 8 << 20];
        let mut missing: Vec<_> = lengths.map(PageSet::new).into();
        missing[0].set(5..700);
        missing[2].set(1..2048);
        let file = MissingPagesFile::create(&path, &missing).unwrap();
        for (block, pages) in [(0, 512..513), (2, 0..1030), (2, 2047..2048)] {
            missing[block].clear(pages.clone());
            file.update(block, &missing[block], pages).unwrap();
        }
        drop(file);
        assert_eq!(MissingPagesFile::open(&path, lengths).unwrap().1, missing);
        assert!(MissingPagesFile::open(&path, [3 << 20, 8 << 20, 1]).is_err(), "of other blocks");
    }
}
