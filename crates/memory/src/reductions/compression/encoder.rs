//! Encoder: the data of frames is compressed if that is worth it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use proto::packed::{Codec, Compression, CompressionTrial};

use super::CompressionState;
use super::codec::Encoders;
use super::select::Selector;
use crate::chunk::ChunkId;
use crate::chunk::encoding::{Encoder, FrameEncoder, PresumedPages};
use crate::clock::cpu_ns;
use crate::lock;
use crate::page_set::PageSet;
use crate::reductions::reduction::{Reduction, ReductionStage};

/// Compression has no knowledge of pages, and so nothing to learn about them.
impl Reduction for CompressionState {
    fn encoder(self: Arc<Self>) -> Encoder {
        let (selector, out) = (Selector::default(), Vec::new());
        Encoder::Frame(Box::new(StreamCompressor { packing: self, selector, out }))
    }

    fn awaited(&self, _: &[PageSet], _: u32) {}

    fn acknowledged(&self, _: ChunkId, _: &PresumedPages) {}

    fn refused(&self, _: ChunkId, _: &PresumedPages) {}

    fn interrupted(&self, _: &[PageSet], _: u32) {}

    fn discarded(&self, _: &[PageSet]) {}

    fn written(&self, _: usize, _: &PageSet) {}

    /// A ratio is no knowledge of pages.
    fn full_pages(&self, owed: &[PageSet]) -> u64 {
        owed.iter().map(PageSet::count).sum()
    }

    /// It does not end: remaining pages are compressed after the switchover, too.
    fn end(&self, _: ReductionStage) {}
}

/// Compressor of one stream's frames.
struct StreamCompressor {
    packing: Arc<CompressionState>,
    selector: Selector,
    out: Vec<u8>,
}

impl FrameEncoder for StreamCompressor {
    /// Compresses a frame's data as configured. Trials are skipped while the guest is stopped.
    fn encode(
        &mut self,
        data: &[u8],
        guest_runs: bool,
        unsent_bytes: &dyn Fn() -> u64,
    ) -> Option<(Codec, &[u8])> {
        let packing = Arc::clone(&self.packing);
        let counters = &packing.counters;
        if guest_runs && packing.is_opening() {
            packing.open(data.len(), unsent_bytes());
        }
        let (way, to_try) = packing.orders(data.len(), guest_runs);
        if way == Compression::None && to_try.is_empty() {
            return None;
        }
        let mut encoders = lock(&packing.encoders).pop().unwrap_or_default();
        let tried = to_try.into_iter().map(|way| self.try_out(&packing, &mut encoders, way, data));
        let tried = tried.collect::<Vec<_>>();
        if !tried.is_empty() {
            // All at once, because trials that are compared have to use the same data.
            lock(&packing.trials).extend(tried);
        }
        let began = cpu_ns();
        let packed = self.pack_if_worth(&packing, &mut encoders, way, data);
        counters.pack_ns.fetch_add(cpu_ns().saturating_sub(began), Ordering::Relaxed);
        lock(&packing.encoders).push(encoders);
        let (codec, packed) = packed?;
        counters.compressed_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        Some((codec, &self.out[..packed]))
    }
}

impl StreamCompressor {
    fn pack_if_worth(
        &mut self,
        packing: &CompressionState,
        encoders: &mut Encoders,
        way: Compression,
        data: &[u8],
    ) -> Option<(Codec, usize)> {
        let Self { selector, out, .. } = self;
        if way == Compression::None {
            return None;
        }
        if !selector.is_worth_trying(&packing.worth, data, |sample| {
            encoders.encode(way, sample, out).map_or(sample.len(), |(_, packed)| packed)
        }) {
            return None;
        }
        packing.counters.tried_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        let (codec, packed) = encoders.encode(way, data, out)?;
        let is_worth = selector.record_result(&packing.worth, data.len(), packed);
        is_worth.then_some((codec, packed))
    }

    fn try_out(
        &mut self,
        packing: &CompressionState,
        encoders: &mut Encoders,
        way: Compression,
        data: &[u8],
    ) -> CompressionTrial {
        let began = cpu_ns();
        let packed = encoders.encode(way, data, &mut self.out).map_or(data.len(), |(_, packed)| packed);
        let pack_ns = cpu_ns().saturating_sub(began);
        packing.counters.trial_ns.fetch_add(pack_ns, Ordering::Relaxed);
        // Data that is not worth it is sent uncompressed.
        let compressed_bytes =
            if packing.worth.is_met(data.len(), packed) { packed } else { data.len() } as u64;
        CompressionTrial { way, data_bytes: data.len() as u64, compressed_bytes, pack_ns }
    }
}
