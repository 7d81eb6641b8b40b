//! Compression of what is sent.
//!
//! Each stream's worker compresses its own frames, one after the other, so that order within a chunk stays what it is
//! (trap 6); as many are compressed at once as there are streams. What is compressed waits in the socket's buffer: while
//! the link takes it from there, the worker reads and compresses the next frame. That buffer is what bounds memory, and
//! a worker that finds it full waits, so that nobody compresses faster than the link carries.
//!
//! Not all data is worth it ([`select`]), and how it is done best depends on the link and on the processors: whoever owns
//! a [`Packing`] may change its way while pages are sent, by what it counted ([`Packing::count`]).

pub(crate) mod codec;
mod opening;
pub(crate) mod select;

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};

use proto::packed::{Codec, Compression, Trial};

use crate::clock::{cpu_ns, timed, waited};
use crate::lock;
use codec::Encoders;
use opening::Opening;
use select::Selector;
pub use select::Worth;

/// Shorter data is sent as it is.
const LEAST_BYTES: usize = 512;
/// Nothing is tried out on shorter data: what is done once for each piece would count too much.
const LEAST_TRIAL_BYTES: usize = 32 << 10;

/// Compression of a migration, shared by all streams of all its generations.
#[derive(Debug)]
pub struct Packing {
    worth: Worth,
    is_opening: AtomicBool,
    most_workers: AtomicU16,
    orders: Mutex<Orders>,
    counters: Counters,
    trials: Mutex<Vec<Trial>>,
    /// Those that nobody works with. The harder ways need some megabytes each, and there are more streams than compress
    /// at the same time.
    encoders: Mutex<Vec<Encoders>>,
}

#[derive(Debug)]
struct Orders {
    /// As long as nobody has picked a way.
    opening: Option<Opening>,
    way: Compression,
    /// For a guest that stands still.
    standing_way: Compression,
    /// To be tried, all on the same frame.
    to_try: Vec<Compression>,
}

#[derive(Debug, Default)]
struct Counters {
    opening_bytes: AtomicU64,
    data_bytes: AtomicU64,
    tried_bytes: AtomicU64,
    packed_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    pack_ns: AtomicU64,
    trial_ns: AtomicU64,
    cpu_ns: AtomicU64,
    blocked_ns: AtomicU64,
    peer_waited_us: AtomicU64,
}

/// What was counted since a migration began, all streams together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// The part of the data that went before a way was picked, and was compressed as the link took it, in bytes.
    pub opening_bytes: u64,
    /// Data to be sent, in bytes.
    pub data_bytes: u64,
    /// The part of it that was given to a codec, in bytes; the rest was not worth it.
    pub tried_bytes: u64,
    /// The part of it that went compressed, in bytes before that.
    pub packed_bytes: u64,
    /// What went for all of it, in bytes.
    pub wire_bytes: u64,
    /// Processor time of compressing what was sent, in nanoseconds.
    pub pack_ns: u64,
    /// Processor time of trying ways out, in nanoseconds.
    pub trial_ns: u64,
    /// Processor time of the workers, compressing and trials included, in nanoseconds.
    pub cpu_ns: u64,
    /// For how long workers waited until the connection took more, in nanoseconds.
    pub blocked_ns: u64,
    /// For how long the other side's workers had nothing to apply, in microseconds.
    pub peer_waited_us: u64,
}

impl Packing {
    /// Begins in a way.
    pub fn new(way: Compression, worth: Worth) -> Self {
        Self::begin(way, None, worth)
    }

    /// Begins before anybody can know which way is good: for the first frames it is found by whether those before them
    /// are still on this side.
    pub fn opening(worth: Worth) -> Self {
        Self::begin(Compression::None, Some(Opening::default()), worth)
    }

    fn begin(way: Compression, opening: Option<Opening>, worth: Worth) -> Self {
        let is_opening = AtomicBool::new(opening.is_some());
        Self {
            worth,
            is_opening,
            most_workers: AtomicU16::new(u16::MAX),
            orders: Mutex::new(Orders { opening, way, standing_way: way, to_try: Vec::new() }),
            counters: Counters::default(),
            trials: Mutex::default(),
            encoders: Mutex::default(),
        }
    }

    /// From the next frame of each stream on; the second way is for a guest that stands still.
    pub fn set_ways(&self, way: Compression, standing_way: Compression) {
        let mut orders = lock(&self.orders);
        self.is_opening.store(false, Ordering::Release);
        (orders.opening, orders.way, orders.standing_way) = (None, way, standing_way);
    }

    /// Whether the first frames go, for which no way was picked.
    pub(crate) fn is_opening(&self) -> bool {
        self.is_opening.load(Ordering::Acquire)
    }

    /// A frame with so much data is next, and of those before it so much is still on this side, both in bytes.
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

    /// Only so many workers work at the same time, each of which waits for the link in its own turn only.
    pub(crate) fn set_most_workers(&self, workers: u16) {
        self.most_workers.store(workers, Ordering::Relaxed);
    }

    /// How many of so many workers work at the same time.
    pub fn working_of(&self, workers: u16) -> u16 {
        workers.min(self.most_workers.load(Ordering::Relaxed))
    }

    /// Has these ways tried on one frame that is sent while the guest runs; what comes of it is thrown away.
    pub fn try_out(&self, ways: &[Compression]) {
        ways.clone_into(&mut lock(&self.orders).to_try);
    }

    /// What was tried since the last call.
    pub fn take_trials(&self) -> Vec<Trial> {
        std::mem::take(&mut lock(&self.trials))
    }

    /// What was counted up to now.
    pub fn count(&self) -> Counted {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        Counted {
            opening_bytes: get(&counters.opening_bytes),
            data_bytes: get(&counters.data_bytes),
            tried_bytes: get(&counters.tried_bytes),
            packed_bytes: get(&counters.packed_bytes),
            wire_bytes: get(&counters.wire_bytes),
            pack_ns: get(&counters.pack_ns),
            trial_ns: get(&counters.trial_ns),
            cpu_ns: get(&counters.cpu_ns),
            blocked_ns: get(&counters.blocked_ns),
            peer_waited_us: get(&counters.peer_waited_us),
        }
    }

    /// The other side has said how long it waited.
    pub(crate) fn peer_waited(&self, us: u32) {
        self.counters.peer_waited_us.fetch_add(us.into(), Ordering::Relaxed);
    }

    /// Runs what a worker does for a frame, and counts what that took.
    pub(crate) fn working<T>(&self, work: impl FnOnce() -> T) -> T {
        let (done, took) = timed(work);
        self.counters.cpu_ns.fetch_add(took.cpu_ns, Ordering::Relaxed);
        done
    }

    /// Runs what gives a frame to the connection, and counts how long that was waited for.
    pub(crate) fn sending<T>(&self, send: impl FnOnce() -> T) -> T {
        let (sent, waited) = waited(send);
        self.counters.blocked_ns.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
        sent
    }

    /// The way for so much data, and others to be tried on it.
    fn orders(&self, data_bytes: usize, guest_runs: bool) -> (Compression, Vec<Compression>) {
        let mut orders = lock(&self.orders);
        let fits = guest_runs && data_bytes >= LEAST_TRIAL_BYTES;
        let to_try = if fits { std::mem::take(&mut orders.to_try) } else { Vec::new() };
        let way = if guest_runs { orders.way } else { orders.standing_way };
        (if data_bytes < LEAST_BYTES { Compression::None } else { way }, to_try)
    }
}

/// What compresses the frames of one stream.
pub(crate) struct Packer {
    selector: Selector,
    out: Vec<u8>,
}

impl Packer {
    pub(crate) fn new() -> Self {
        Self { selector: Selector::default(), out: Vec::new() }
    }

    /// Compresses a frame's data as is ordered; none if it is to be sent as it is. A guest that stands still does not
    /// wait for trials.
    pub(crate) fn pack(
        &mut self,
        packing: &Packing,
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
                // All at once: what is compared with each other is of the same data.
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
        counters.packed_bytes.fetch_add(bytes, Ordering::Relaxed);
        Some((codec, &self.out[..packed]))
    }

    fn pack_if_worth(
        &mut self,
        packing: &Packing,
        encoders: &mut Encoders,
        way: Compression,
        data: &[u8],
    ) -> Option<(Codec, usize)> {
        let Self { selector, out } = self;
        if way == Compression::None {
            return None;
        }
        if !selector.wants(&packing.worth, data, |sample| {
            encoders.encode(way, sample, out).map_or(sample.len(), |(_, packed)| packed)
        }) {
            return None;
        }
        packing.counters.tried_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        let (codec, packed) = encoders.encode(way, data, out)?;
        let is_worth = selector.learn(&packing.worth, data.len(), packed);
        is_worth.then_some((codec, packed))
    }

    fn try_out(
        &mut self,
        packing: &Packing,
        encoders: &mut Encoders,
        way: Compression,
        data: &[u8],
    ) -> Trial {
        let began = cpu_ns();
        let packed = encoders.encode(way, data, &mut self.out).map_or(data.len(), |(_, packed)| packed);
        let pack_ns = cpu_ns().saturating_sub(began);
        packing.counters.trial_ns.fetch_add(pack_ns, Ordering::Relaxed);
        // What is not worth it is sent as it is.
        let packed_bytes = if packing.worth.holds(data.len(), packed) { packed } else { data.len() } as u64;
        Trial { way, data_bytes: data.len() as u64, packed_bytes, pack_ns }
    }
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").finish_non_exhaustive()
    }
}
