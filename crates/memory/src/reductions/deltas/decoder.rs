//! Decoder: the pieces of a delta are put into the present version of the page, which counts if its hash is right then.

use proto::delta::Delta;
use proto::limits::PAGE_BYTES;
use proto::pages::{BadPages, Content};
use tracing::debug;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::page_set::ChunkPages;
use crate::reductions::decoding::{EncodedRun, RunDecoder};

/// Decoder of deltas.
pub(crate) struct DeltaDecoder {
    /// Seed of the page hashes; None if deltas are not accepted.
    seed: Option<u64>,
}

impl DeltaDecoder {
    pub(crate) fn new(seed: Option<u64>) -> Self {
        Self { seed }
    }
}

impl RunDecoder for DeltaDecoder {
    fn decodes(&self, content: Content) -> bool {
        matches!(content, Content::Delta { .. })
    }

    /// Pages whose hash is wrong stay as they are.
    fn decode(&mut self, run: &EncodedRun<'_>, into: &mut [u8]) -> Result<ChunkPages, BadPages> {
        let EncodedRun { pages, data, offset, writer, .. } = run;
        let Some(seed) = self.seed.filter(|_| writer.is_ram()) else { return Err(BadPages::Delta) };
        let mut good = ChunkPages::EMPTY;
        if let Err(error) = writer.read(*offset, into) {
            debug!(block = writer.name(), offset, %error, "cannot read the pages that deltas change");
            return Ok(good);
        }
        let mut rest = *data;
        for (page, bytes) in pages.clone().zip(into.chunks_exact_mut(PAGE_BYTES as usize)) {
            let delta = Delta::take(&mut rest)?;
            delta.apply_to(bytes);
            if xxh3_64_with_seed(bytes, seed) == delta.hash {
                good.insert(&ChunkPages::from_range(page..page + 1));
            }
        }
        if rest.is_empty() { Ok(good) } else { Err(BadPages::Delta) }
    }
}
