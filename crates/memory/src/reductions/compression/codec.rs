//! Codecs behind one trait for each direction.

use std::{fmt, io};

use lz4_flex::block;
use proto::packed::{Codec, Compression};
use zstd::bulk;

/// Compresses data.
trait CodecEncoder: Send {
    /// Writes the compressed data to the beginning of `into`, which has room for [`Encoders::room`]; returns its
    /// length.
    fn encode(&mut self, data: &[u8], into: &mut [u8]) -> io::Result<usize>;
}

/// Decompresses data.
pub(super) trait CodecDecoder: Send {
    /// Fills the beginning of `into`; returns the number of bytes filled. Nothing is allocated because of claims in
    /// `packed`.
    fn decode(&mut self, packed: &[u8], into: &mut [u8]) -> io::Result<usize>;
}

pub(super) struct Lz4;

impl CodecEncoder for Lz4 {
    fn encode(&mut self, data: &[u8], into: &mut [u8]) -> io::Result<usize> {
        block::compress_into(data, into).map_err(io::Error::other)
    }
}

impl CodecDecoder for Lz4 {
    fn decode(&mut self, packed: &[u8], into: &mut [u8]) -> io::Result<usize> {
        block::decompress_into(packed, into).map_err(io::Error::other)
    }
}

/// Encoder that keeps its tables between pieces of data.
struct ZstdEncoder {
    inner: bulk::Compressor<'static>,
    level: u8,
}

impl CodecEncoder for ZstdEncoder {
    fn encode(&mut self, data: &[u8], into: &mut [u8]) -> io::Result<usize> {
        self.inner.compress_to_buffer(data, into)
    }
}

impl CodecDecoder for bulk::Decompressor<'_> {
    fn decode(&mut self, packed: &[u8], into: &mut [u8]) -> io::Result<usize> {
        self.decompress_to_buffer(packed, into)
    }
}

/// The encoders of one thread. Memory is allocated at first use.
#[derive(Default)]
pub(super) struct Encoders {
    zstd: Option<ZstdEncoder>,
}

impl fmt::Debug for Encoders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoders").finish_non_exhaustive()
    }
}

impl Encoders {
    /// Returns the room that an encoder may need for `data_bytes` of data, in bytes.
    pub(super) fn room(data_bytes: usize) -> usize {
        block::get_maximum_output_size(data_bytes).max(zstd::zstd_safe::compress_bound(data_bytes))
    }

    /// Compresses into `into`, which grows if needed; returns the codec and the length. None without compression, or if
    /// it fails.
    pub(super) fn encode(
        &mut self,
        way: Compression,
        data: &[u8],
        into: &mut Vec<u8>,
    ) -> Option<(Codec, usize)> {
        let codec = way.codec()?;
        let room = Self::room(data.len());
        if into.len() < room {
            into.resize(room, 0);
        }
        let encoder: &mut dyn CodecEncoder = match way {
            Compression::None => return None,
            Compression::Lz4 => &mut Lz4,
            Compression::Zstd(level) => self.zstd(level)?,
        };
        // Data that cannot be compressed is sent uncompressed.
        encoder.encode(data, into).ok().map(|bytes| (codec, bytes))
    }

    fn zstd(&mut self, level: u8) -> Option<&mut ZstdEncoder> {
        let encoder = match self.zstd.take() {
            Some(mut encoder) if encoder.level != level => {
                encoder.inner.set_compression_level(level.into()).ok()?;
                ZstdEncoder { level, ..encoder }
            }
            Some(encoder) => encoder,
            None => ZstdEncoder { inner: bulk::Compressor::new(level.into()).ok()?, level },
        };
        Some(self.zstd.insert(encoder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_compression_nothing_is_encoded() {
        let mut packed = Vec::new();
        assert!(Encoders::default().encode(Compression::None, &[1; 4096], &mut packed).is_none());
        assert!(packed.is_empty());
    }
}
