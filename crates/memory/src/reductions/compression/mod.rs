//! Compression of the pages sent.
//!
//! Each stream's worker compresses its own frames, one after the other, so that order within a chunk is preserved (trap
//! 6); as many frames are compressed at once as there are streams. Compressed frames wait in the socket's buffer: while
//! the link drains it, the worker reads and compresses the next frame. That buffer bounds memory: a worker that finds
//! it full waits, so that no worker compresses faster than the link carries.
//!
//! Not all data is worth compressing ([`select`]), and the best compression depends on the link and on the processors:
//! the owner of a [`CompressionState`] may change the compression while pages are sent, according to its counters
//! ([`CompressionState::count`]).

pub(crate) mod codec;
mod opening;
pub(crate) mod select;

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};

use proto::packed::{Codec, Compression, CompressionTrial};

use crate::clock::{cpu_ns, measure, waited};
use crate::lock;
use codec::Encoders;
use opening::InitialCompression;
pub use select::CompressionCriteria;
use select::Selector;

/// Minimum length of data that is compressed, in bytes.
const LEAST_BYTES: usize = 512;
/// Minimum length of data for a trial, in bytes: fixed costs for each piece would distort trials on shorter data.
const LEAST_TRIAL_BYTES: usize = 32 << 10;

/// Compression of a migration, shared by all streams of all its generations.
#[derive(Debug)]
pub struct CompressionState {
    worth: CompressionCriteria,
    is_opening: AtomicBool,
    most_workers: AtomicU16,
    orders: Mutex<CompressionSettings>,
    counters: AtomicCompressionCounters,
    trials: Mutex<Vec<CompressionTrial>>,
    /// Idle encoders. The higher levels need some megabytes each, and there are more streams than simultaneous
    /// compressions.
    encoders: Mutex<Vec<Encoders>>,
}

#[derive(Debug)]
struct CompressionSettings {
    /// State of the opening, until a compression is chosen.
    opening: Option<InitialCompression>,
    way: Compression,
    /// Compression for a stopped guest.
    standing_way: Compression,
    /// Compressions to be tried, all on the same frame.
    to_try: Vec<Compression>,
}

#[derive(Debug, Default)]
struct AtomicCompressionCounters {
    opening_bytes: AtomicU64,
    data_bytes: AtomicU64,
    tried_bytes: AtomicU64,
    compressed_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    pack_ns: AtomicU64,
    trial_ns: AtomicU64,
    cpu_ns: AtomicU64,
    blocked_ns: AtomicU64,
    peer_waited_us: AtomicU64,
}

/// Counters since the migration began, all streams together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressionCounters {
    /// Data sent before a compression was chosen, and compressed according to the link's progress, in bytes.
    pub opening_bytes: u64,
    /// Data to be sent, in bytes.
    pub data_bytes: u64,
    /// The part of the data that was passed to a codec, in bytes; the rest was not worth it.
    pub tried_bytes: u64,
    /// The part of the data that was sent compressed, in bytes before compression.
    pub compressed_bytes: u64,
    /// Bytes sent for all of the data.
    pub wire_bytes: u64,
    /// Processor time of compressing data that was sent, in nanoseconds.
    pub pack_ns: u64,
    /// Processor time of trials, in nanoseconds.
    pub trial_ns: u64,
    /// Processor time of the workers, compressing and trials included, in nanoseconds.
    pub cpu_ns: u64,
    /// Time for which workers waited until the connection accepted more, in nanoseconds.
    pub blocked_ns: u64,
    /// Time for which the destination's workers had nothing to apply, in microseconds.
    pub peer_waited_us: u64,
}

impl CompressionState {
    /// Creates a state with a fixed compression.
    pub fn new(way: Compression, worth: CompressionCriteria) -> Self {
        Self::begin(way, None, worth)
    }

    /// Creates a state for a migration whose best compression is still unknown: for the first frames it depends on
    /// whether earlier frames have left this host.
    pub fn opening(worth: CompressionCriteria) -> Self {
        Self::begin(Compression::None, Some(InitialCompression::default()), worth)
    }

    fn begin(way: Compression, opening: Option<InitialCompression>, worth: CompressionCriteria) -> Self {
        let is_opening = AtomicBool::new(opening.is_some());
        Self {
            worth,
            is_opening,
            most_workers: AtomicU16::new(u16::MAX),
            orders: Mutex::new(CompressionSettings { opening, way, standing_way: way, to_try: Vec::new() }),
            counters: AtomicCompressionCounters::default(),
            trials: Mutex::default(),
            encoders: Mutex::default(),
        }
    }

    /// Sets the compression from the next frame of each stream on; `standing_way` is for a stopped guest.
    pub fn set_compression(&self, way: Compression, standing_way: Compression) {
        let mut orders = lock(&self.orders);
        self.is_opening.store(false, Ordering::Release);
        (orders.opening, orders.way, orders.standing_way) = (None, way, standing_way);
    }

    /// Returns true while the first frames are sent, for which no compression was chosen.
    pub(crate) fn is_opening(&self) -> bool {
        self.is_opening.load(Ordering::Acquire)
    }

    /// Chooses the compression of the opening's next frame, from the length of its data and the unsent bytes of earlier
    /// frames.
    pub(crate) fn open(&self, data_bytes: usize, unsent_bytes: u64) {
        let mut orders = lock(&self.orders);
        let Some(opening) = &mut orders.opening else { return };
        let way = opening.next(data_bytes as u64, unsent_bytes);
        orders.way = way.unwrap_or_default();
        if way.is_some() {
            self.counters.opening_bytes.fetch_add(data_bytes as u64, Ordering::Relaxed);
        } else {
            orders.opening = None;
            self.is_opening.store(false, Ordering::Release);
        }
    }

    /// Sets the number of workers that work at the same time; each waits for the link in its own turn only.
    pub(crate) fn set_most_workers(&self, workers: u16) {
        self.most_workers.store(workers, Ordering::Relaxed);
    }

    /// Returns how many of `workers` workers work at the same time.
    pub fn active_workers(&self, workers: u16) -> u16 {
        workers.min(self.most_workers.load(Ordering::Relaxed))
    }

    /// Requests a trial of these compressions on one frame that is sent while the guest runs; their output is
    /// discarded.
    pub fn try_out(&self, ways: &[Compression]) {
        ways.clone_into(&mut lock(&self.orders).to_try);
    }

    /// Returns the trials since the last call.
    pub fn take_trials(&self) -> Vec<CompressionTrial> {
        std::mem::take(&mut lock(&self.trials))
    }

    /// Returns the counters up to now.
    pub fn count(&self) -> CompressionCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        CompressionCounters {
            opening_bytes: get(&counters.opening_bytes),
            data_bytes: get(&counters.data_bytes),
            tried_bytes: get(&counters.tried_bytes),
            compressed_bytes: get(&counters.compressed_bytes),
            wire_bytes: get(&counters.wire_bytes),
            pack_ns: get(&counters.pack_ns),
            trial_ns: get(&counters.trial_ns),
            cpu_ns: get(&counters.cpu_ns),
            blocked_ns: get(&counters.blocked_ns),
            peer_waited_us: get(&counters.peer_waited_us),
        }
    }

    /// Counts the waiting time that the destination reported.
    pub(crate) fn record_peer_wait(&self, us: u32) {
        self.counters.peer_waited_us.fetch_add(us.into(), Ordering::Relaxed);
    }

    /// Runs a worker's action for a frame, and counts its processor time.
    pub(crate) fn count_work<T>(&self, work: impl FnOnce() -> T) -> T {
        let (done, took) = measure(work);
        self.counters.cpu_ns.fetch_add(took.cpu_ns, Ordering::Relaxed);
        done
    }

    /// Runs the action that passes a frame to the connection, and counts its waiting time.
    pub(crate) fn count_send<T>(&self, send: impl FnOnce() -> T) -> T {
        let (sent, waited) = waited(send);
        self.counters.blocked_ns.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
        sent
    }

    /// Returns the compression for `data_bytes` of data, and others to be tried on it.
    fn orders(&self, data_bytes: usize, guest_runs: bool) -> (Compression, Vec<Compression>) {
        let mut orders = lock(&self.orders);
        let fits = guest_runs && data_bytes >= LEAST_TRIAL_BYTES;
        let to_try = if fits { std::mem::take(&mut orders.to_try) } else { Vec::new() };
        let way = if guest_runs { orders.way } else { orders.standing_way };
        (if data_bytes < LEAST_BYTES { Compression::None } else { way }, to_try)
    }
}

/// Compressor of one stream's frames.
pub(crate) struct StreamCompressor {
    selector: Selector,
    out: Vec<u8>,
}

impl StreamCompressor {
    pub(crate) fn new() -> Self {
        Self { selector: Selector::default(), out: Vec::new() }
    }

    /// Compresses a frame's data as configured; None if it is to be sent uncompressed. Trials are skipped while the
    /// guest is stopped.
    pub(crate) fn pack(
        &mut self,
        packing: &CompressionState,
        data: &[u8],
        guest_runs: bool,
    ) -> Option<(Codec, &[u8])> {
        let counters = &packing.counters;
        let bytes = data.len() as u64;
        counters.data_bytes.fetch_add(bytes, Ordering::Relaxed);
        let (way, to_try) = packing.orders(data.len(), guest_runs);
        let packed = if way == Compression::None && to_try.is_empty() {
            None
        } else {
            let mut encoders = lock(&packing.encoders).pop().unwrap_or_default();
            let tried = to_try.into_iter().map(|way| self.try_out(packing, &mut encoders, way, data));
            let tried = tried.collect::<Vec<_>>();
            if !tried.is_empty() {
                // All at once, because trials that are compared have to use the same data.
                lock(&packing.trials).extend(tried);
            }
            let began = cpu_ns();
            let packed = self.pack_if_worth(packing, &mut encoders, way, data);
            counters.pack_ns.fetch_add(cpu_ns().saturating_sub(began), Ordering::Relaxed);
            lock(&packing.encoders).push(encoders);
            packed
        };
        let wire_bytes = packed.map_or(bytes, |(_, packed)| packed as u64);
        counters.wire_bytes.fetch_add(wire_bytes, Ordering::Relaxed);
        let (codec, packed) = packed?;
        counters.compressed_bytes.fetch_add(bytes, Ordering::Relaxed);
        Some((codec, &self.out[..packed]))
    }

    fn pack_if_worth(
        &mut self,
        packing: &CompressionState,
        encoders: &mut Encoders,
        way: Compression,
        data: &[u8],
    ) -> Option<(Codec, usize)> {
        let Self { selector, out } = self;
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

impl fmt::Debug for StreamCompressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").finish_non_exhaustive()
    }
}
