//! Decoder: the data of frames is decompressed.

use std::io;

use proto::frame::FrameKind;
use proto::packed::{Codec, Packed};
use proto::pages::{PageRun, PagesHeader};
use zstd::bulk;

use super::codec::{CodecDecoder, Lz4};
use crate::reductions::decoding::{BadFrame, BadPacked, FrameDecoder};

/// The decoders of one stream, and a reused buffer.
#[derive(Default)]
pub(crate) struct StreamDecompressor {
    zstd: Option<bulk::Decompressor<'static>>,
    data: Vec<u8>,
}

impl StreamDecompressor {
    /// Decompresses data whose decompressed length has to be `bytes`; the caller has checked that length. The buffer is
    /// returned with [`FrameDecoder::take_back`].
    fn unpack(&mut self, codec: Codec, packed: &[u8], bytes: usize) -> Result<Vec<u8>, BadPacked> {
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

    fn zstd(&mut self) -> io::Result<&mut bulk::Decompressor<'static>> {
        let decoder = match self.zstd.take() {
            Some(decoder) => decoder,
            None => bulk::Decompressor::new()?,
        };
        Ok(self.zstd.insert(decoder))
    }
}

impl FrameDecoder for StreamDecompressor {
    fn decodes(&self, kind: FrameKind) -> bool {
        kind == FrameKind::Packed
    }

    fn decode(
        &mut self,
        payload: &[u8],
        runs: &mut Vec<PageRun>,
    ) -> Result<(PagesHeader, Vec<u8>), BadFrame> {
        let packed = Packed::decode(payload, runs)?;
        let data = self.unpack(packed.codec, packed.bytes, packed.data_bytes)?;
        Ok((packed.header, data))
    }

    fn take_back(&mut self, data: Vec<u8>) {
        self.data = data;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use proto::packed::Compression;

    use super::super::codec::Encoders;
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
}
