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

mod codec;
pub(crate) mod decoder;
mod encoder;
mod opening;
pub(crate) mod select;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proto::packed::{Compression, CompressionTrial};

use crate::lock;
use codec::Encoders;
use opening::InitialCompression;
pub use select::CompressionCriteria;

/// Minimum length of data that is compressed, in bytes.
const LEAST_BYTES: usize = 512;
/// Minimum length of data for a trial, in bytes: fixed costs for each piece would distort trials on shorter data.
const LEAST_TRIAL_BYTES: usize = 32 << 10;

/// Returns the length of data after the fastest compression by Zstandard, for a forecast; that of the data if it cannot be
/// compressed.
pub(crate) fn compressed_bytes(data: &[u8]) -> usize {
    let packed = Encoders::default().encode(Compression::Zstd(1), data, &mut Vec::new());
    packed.map_or(data.len(), |(_, bytes)| bytes.min(data.len()))
}

/// Compression of a migration, shared by all streams of all its generations.
#[derive(Debug)]
pub struct CompressionState {
    worth: CompressionCriteria,
    is_opening: AtomicBool,
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
    tried_bytes: AtomicU64,
    compressed_bytes: AtomicU64,
    pack_ns: AtomicU64,
    trial_ns: AtomicU64,
}

/// Counters since the migration began, all streams together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressionCounters {
    /// Data sent before a compression was chosen, and compressed according to the link's progress, in bytes.
    pub opening_bytes: u64,
    /// The part of the data that was passed to a codec, in bytes; the rest was not worth it.
    pub tried_bytes: u64,
    /// The part of the data that was sent compressed, in bytes before compression.
    pub compressed_bytes: u64,
    /// Processor time of compressing data that was sent, in nanoseconds.
    pub pack_ns: u64,
    /// Processor time of trials, in nanoseconds.
    pub trial_ns: u64,
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
            tried_bytes: get(&counters.tried_bytes),
            compressed_bytes: get(&counters.compressed_bytes),
            pack_ns: get(&counters.pack_ns),
            trial_ns: get(&counters.trial_ns),
        }
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
