//! Progress of a running migration, sampled from the sender a few times a second, and bytes counted over all
//! connections.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::SenderHandle;
use link::transport::ConnectionHandle;
use proto::limits::PAGE_BYTES;

use api::progress::{Phase, Progress, Publisher};

/// Interval of the progress samples.
const SAMPLE: Duration = Duration::from_millis(200);

/// Progress and byte counts of a migration.
#[derive(Debug)]
pub(crate) struct Telemetry {
    publisher: Publisher,
    /// Time at which the migration was requested.
    begun: Instant,
    connections: Arc<Mutex<Vec<Arc<dyn ConnectionHandle>>>>,
    /// Pages that wait for a later round.
    later: Arc<Mutex<DeferredPages>>,
    /// Dropping it ends the sampling thread.
    sampler: Mutex<Option<Sender<()>>>,
}

/// Pages that wait for a later round.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeferredPages {
    /// All of them.
    pub(crate) pages: u64,
    /// Pages of each disk.
    pub(crate) of_disks: Vec<u64>,
}

/// Counter of remaining pages, for a thread other than the driver's.
#[derive(Clone, Debug)]
pub(crate) struct RemainingCounter(Arc<Mutex<DeferredPages>>);

impl RemainingCounter {
    /// Sets the number of remaining pages, all of memory.
    pub(crate) fn set(&self, pages: u64) {
        *lock(&self.0) = DeferredPages { pages, of_disks: Vec::new() };
    }
}

impl Telemetry {
    pub(crate) fn new(publisher: Publisher, begun: Instant) -> Self {
        Self {
            publisher,
            begun,
            connections: Arc::default(),
            later: Arc::default(),
            sampler: Mutex::default(),
        }
    }

    /// Returns the time since the migration was requested, in microseconds.
    pub(crate) fn elapsed_us(&self) -> u64 {
        self.begun.elapsed().as_micros() as u64
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        let elapsed_us = self.elapsed_us();
        self.publisher.update(|progress| {
            progress.elapsed_us = elapsed_us;
            change(progress);
        });
    }

    pub(crate) fn now(&self) -> Progress {
        self.publisher.now()
    }

    /// Records the start of a round: its pass, and the pages that wait for a later one.
    pub(crate) fn begin_round(&self, pass: u32, later: DeferredPages) {
        *lock(&self.later) = later;
        self.update(|progress| progress.pass = pass);
    }

    /// Returns a counter of the remaining pages, for another thread.
    pub(crate) fn remaining(&self) -> RemainingCounter {
        RemainingCounter(Arc::clone(&self.later))
    }

    /// Counts the bytes of a connection from now on.
    pub(crate) fn count(&self, connection: Arc<dyn ConnectionHandle>) {
        lock(&self.connections).push(connection);
    }

    /// Returns the bytes sent and received over all connections.
    pub(crate) fn counted(&self) -> (u64, u64) {
        sum(&lock(&self.connections))
    }

    /// Publishes the progress of a sender until it is dropped or another one is followed.
    pub(crate) fn follow(&self, sender: Option<SenderHandle>) {
        let Some(sender) = sender else { return drop(lock(&self.sampler).take()) };
        let (stop, stopped) = mpsc::channel();
        let (publisher, connections) = (self.publisher.clone(), Arc::clone(&self.connections));
        let (begun, later) = (self.begun, Arc::clone(&self.later));
        let sample = move || {
            let mut before = (Instant::now(), sum(&lock(&connections)).0);
            while stopped.recv_timeout(SAMPLE) == Err(RecvTimeoutError::Timeout) {
                let (now, sent_bytes) = (Instant::now(), sum(&lock(&connections)).0);
                let span = now.duration_since(before.0).as_secs_f64();
                let rate = sent_bytes.saturating_sub(before.1) as f64 / span;
                before = (now, sent_bytes);
                let (round, blocks) = (sender.progress(), sender.block_progress());
                let later = lock(&later).clone();
                let remaining = round.pages.saturating_sub(round.sent.pages()) + later.pages;
                publisher.update(|progress| {
                    progress.round = round.round;
                    progress.round_bytes = (round.pages + later.pages) * PAGE_BYTES;
                    progress.remaining_bytes = remaining * PAGE_BYTES;
                    progress.missing_pages = (progress.phase == Phase::PostCopy).then_some(remaining);
                    // Disks are the last blocks.
                    let first = blocks.len().saturating_sub(progress.disks.len());
                    for (number, (disk, block)) in progress.disks.iter_mut().zip(&blocks[first..]).enumerate()
                    {
                        let later = later.of_disks.get(number).copied().unwrap_or(0);
                        disk.round_bytes = (block.pages + later) * PAGE_BYTES;
                        disk.remaining_bytes =
                            (block.pages.saturating_sub(block.sent_pages) + later) * PAGE_BYTES;
                    }
                    progress.sent_bytes = sent_bytes;
                    progress.rate_bytes_per_s = rate as u64;
                    progress.elapsed_us = begun.elapsed().as_micros() as u64;
                });
            }
        };
        // Without the thread no progress is shown; the migration continues all the same.
        if thread::Builder::new().name("progress".to_owned()).spawn(sample).is_ok() {
            *lock(&self.sampler) = Some(stop);
        }
    }
}

fn sum(connections: &[Arc<dyn ConnectionHandle>]) -> (u64, u64) {
    connections.iter().fold((0, 0), |(sent, received), connection| {
        (sent + connection.sent_bytes(), received + connection.received_bytes())
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
