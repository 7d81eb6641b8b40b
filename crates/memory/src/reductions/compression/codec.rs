//! Codecs behind one trait for each direction.

use std::{fmt, io};

use lz4_flex::block;
use proto::packed::{Codec, Compression};
use zstd::bulk;

/// Compresses data.
trait Encoder: Send {
    /// Writes the compressed data to the beginning of `into`, which has room for [`Encoders::room`]; returns its
    /// length.
    fn encode(&mut self, data: &[u8], into: &mut [u8]) -> io::Result<usize>;
}

/// Decompresses data.
trait Decoder: Send {
    /// Fills the beginning of `into`; returns the number of bytes filled. Nothing is allocated because of claims in
    /// `packed`.
    fn decode(&mut self, packed: &[u8], into: &mut [u8]) -> io::Result<usize>;
}

struct Lz4;

impl Encoder for Lz4 {
    fn encode(&mut self, data: &[u8], into: &mut [u8]) -> io::Result<usize> {
        block::compress_into(data, into).map_err(io::Error::other)
    }
}

impl Decoder for Lz4 {
    fn decode(&mut self, packed: &[u8], into: &mut [u8]) -> io::Result<usize> {
        block::decompress_into(packed, into).map_err(io::Error::other)
    }
}

/// Encoder that keeps its tables between pieces of data.
struct ZstdEncoder {
    inner: bulk::Compressor<'static>,
    level: u8,
}

impl Encoder for ZstdEncoder {
    fn encode(&mut self, data: &[u8], into: &mut [u8]) -> io::Result<usize> {
        self.inner.compress_to_buffer(data, into)
    }
}

impl Decoder for bulk::Decompressor<'_> {
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
        let encoder: &mut dyn Encoder = match way {
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

/// Error of compressed data.
#[derive(Debug, thiserror::Error)]
pub enum BadPacked {
    /// The data is invalid for its codec, or longer than announced.
    #[error("data that {codec} cannot decompress", codec = codec.name())]
    Codec {
        /// The announced codec.
        codec: Codec,
        /// Error of the codec.
        source: io::Error,
    },
    /// The data is shorter than announced.
    #[error("compressed data of {found} bytes instead of {expected}")]
    Length {
        /// Length of the runs' data, in bytes.
        expected: usize,
        /// Length of the decompressed data, in bytes.
        found: usize,
    },
}

/// The decoders of one stream, and a reused buffer.
#[derive(Default)]
pub(crate) struct StreamDecompressor {
    zstd: Option<bulk::Decompressor<'static>>,
    data: Vec<u8>,
}

impl StreamDecompressor {
    /// Decompresses data whose decompressed length has to be `bytes`; the caller has checked that length. The buffer is
    /// returned with [`StreamDecompressor::take_back`].
    pub(crate) fn unpack(&mut self, codec: Codec, packed: &[u8], bytes: usize) -> Result<Vec<u8>, BadPacked> {
        let mut data = std::mem::take(&mut self.data);
        data.clear();
        data.resize(bytes, 0);
        let failed = |source| BadPacked::Codec { codec, source };
        let found = match codec {
            Codec::Lz4 => Lz4.decode(packed, &mut data),
            Codec::Zstd => self.zstd().and_then(|decoder| decoder.decode(packed, &mut data)),
        }
        .map_err(failed)?;
        if found == bytes { Ok(data) } else { Err(BadPacked::Length { expected: bytes, found }) }
    }

    /// Accepts the buffer of [`StreamDecompressor::unpack`] for reuse.
    pub(crate) fn take_back(&mut self, data: Vec<u8>) {
        self.data = data;
    }

    fn zstd(&mut self) -> io::Result<&mut bulk::Decompressor<'static>> {
        let decoder = match self.zstd.take() {
            Some(decoder) => decoder,
            None => bulk::Decompressor::new()?,
        };
        Ok(self.zstd.insert(decoder))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Data similar to memory: pieces that repeat, zeros, noise.
    fn data() -> impl Strategy<Value = Vec<u8>> {
        let piece = (prop::collection::vec(any::<u8>(), 1..64), 1..40_usize)
            .prop_map(|(piece, times)| piece.repeat(times));
        prop::collection::vec(piece, 1..24).prop_map(|pieces| pieces.concat())
    }

    fn way() -> impl Strategy<Value = Compression> {
        prop_oneof![Just(Compression::Lz4), (1_u8..=9).prop_map(Compression::Zstd)]
    }

    proptest! {
        /// With the same encoders and the same buffers, after any other compression.
        #[test]
        fn what_was_packed_is_unpacked(all in prop::collection::vec((data(), way()), 1..6)) {
            let (mut encoders, mut packed, mut unpacker) = (Encoders::default(), Vec::new(), StreamDecompressor::default());
            for (data, way) in all {
                let (codec, bytes) = encoders.encode(way, &data, &mut packed).unwrap();
                prop_assert_eq!(Some(codec), way.codec());
                let unpacked = unpacker.unpack(codec, &packed[..bytes], data.len()).unwrap();
                prop_assert_eq!(&unpacked, &data);
                unpacker.take_back(unpacked);
            }
        }

        /// Invalid data that is close to valid data, where bugs are likely: an error, or data of the announced length.
        #[test]
        fn what_was_changed_has_the_length_that_was_announced(
            data in data(),
            way in way(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            announced in 1..100_000_usize,
        ) {
            let (mut packed, mut unpacker) = (Vec::new(), StreamDecompressor::default());
            let (codec, bytes) = Encoders::default().encode(way, &data, &mut packed).unwrap();
            packed.truncate(bytes);
            for (at, byte) in changes {
                let at = at.index(bytes);
                packed[at] = byte;
            }
            for announced in [announced, data.len()] {
                if let Ok(unpacked) = unpacker.unpack(codec, &packed, announced) {
                    prop_assert_eq!(unpacked.len(), announced);
                }
            }
        }

        #[test]
        fn arbitrary_bytes_are_an_error_or_data(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            announced in 1..100_000_usize,
        ) {
            for codec in Codec::ALL {
                if let Ok(unpacked) = StreamDecompressor::default().unpack(codec, &bytes, announced) {
                    prop_assert_eq!(unpacked.len(), announced);
                }
            }
        }
    }

    #[test]
    fn nothing_is_nothing() {
        let mut packed = Vec::new();
        assert!(Encoders::default().encode(Compression::None, &[1; 4096], &mut packed).is_none());
        assert!(packed.is_empty());
    }
}
