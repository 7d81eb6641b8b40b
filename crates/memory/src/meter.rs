//! Meter of what the streams of a migration send, by which policies judge link and processors.

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use crate::clock::{measure, waited};

/// Counters of all streams of all generations of a migration. Reading the clocks takes time, so a sender counts only if
/// it has a meter.
#[derive(Debug)]
pub struct LinkMeter {
    most_workers: AtomicU16,
    data_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    cpu_ns: AtomicU64,
    blocked_ns: AtomicU64,
    peer_waited_us: AtomicU64,
}

/// Counters since the migration began, all streams together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Data to be sent, in bytes.
    pub data_bytes: u64,
    /// Bytes sent for all of the data.
    pub wire_bytes: u64,
    /// Processor time of the workers, compressing and trials included, in nanoseconds.
    pub cpu_ns: u64,
    /// Time for which workers waited until the connection accepted more, in nanoseconds.
    pub blocked_ns: u64,
    /// Time for which the destination's workers had nothing to apply, in microseconds.
    pub peer_waited_us: u64,
}

impl Default for LinkMeter {
    fn default() -> Self {
        Self {
            most_workers: AtomicU16::new(u16::MAX),
            data_bytes: AtomicU64::new(0),
            wire_bytes: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            blocked_ns: AtomicU64::new(0),
            peer_waited_us: AtomicU64::new(0),
        }
    }
}

impl LinkMeter {
    /// Sets the number of workers that work at the same time; each waits for the link in its own turn only.
    pub(crate) fn set_most_workers(&self, workers: u16) {
        self.most_workers.store(workers, Ordering::Relaxed);
    }

    /// Returns how many of `workers` workers work at the same time.
    pub fn active_workers(&self, workers: u16) -> u16 {
        workers.min(self.most_workers.load(Ordering::Relaxed))
    }

    /// Returns the counters up to now.
    pub fn count(&self) -> LinkCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LinkCounters {
            data_bytes: get(&self.data_bytes),
            wire_bytes: get(&self.wire_bytes),
            cpu_ns: get(&self.cpu_ns),
            blocked_ns: get(&self.blocked_ns),
            peer_waited_us: get(&self.peer_waited_us),
        }
    }

    /// Counts a frame's data, and the bytes that are sent for it.
    pub(crate) fn record_data(&self, data_bytes: usize, wire_bytes: usize) {
        self.data_bytes.fetch_add(data_bytes as u64, Ordering::Relaxed);
        self.wire_bytes.fetch_add(wire_bytes as u64, Ordering::Relaxed);
    }

    /// Counts the waiting time that the destination reported.
    pub(crate) fn record_peer_wait(&self, us: u32) {
        self.peer_waited_us.fetch_add(us.into(), Ordering::Relaxed);
    }

    /// Runs a worker's action for a frame, and counts its processor time.
    pub(crate) fn count_work<T>(&self, work: impl FnOnce() -> T) -> T {
        let (done, took) = measure(work);
        self.cpu_ns.fetch_add(took.cpu_ns, Ordering::Relaxed);
        done
    }

    /// Runs the action that passes a frame to the connection, and counts its waiting time.
    pub(crate) fn count_send<T>(&self, send: impl FnOnce() -> T) -> T {
        let (sent, waited) = waited(send);
        self.blocked_ns.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
        sent
    }
}
