//! What people see of a migration while it runs: progress, sampled from the sender a few times a second, and bytes
//! counted over all connections.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::SenderHandle;
use link::Handle;

use crate::progress::{Progress, Publisher};

/// How often progress is looked at.
const SAMPLE: Duration = Duration::from_millis(200);

/// What people see of a migration.
#[derive(Debug)]
pub(crate) struct Telemetry {
    publisher: Publisher,
    /// When the migration was asked for.
    begun: Instant,
    connections: Arc<Mutex<Vec<Handle>>>,
    /// Pages that wait for a later round.
    later_pages: Arc<AtomicU64>,
    /// Dropping it ends the sampling thread.
    sampler: Mutex<Option<Sender<()>>>,
}

impl Telemetry {
    pub(crate) fn new(publisher: Publisher, begun: Instant) -> Self {
        Self {
            publisher,
            begun,
            connections: Arc::default(),
            later_pages: Arc::default(),
            sampler: Mutex::default(),
        }
    }

    /// Since the migration was asked for, in microseconds.
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

    /// A round begins: of which pass, and how many pages wait for a later one.
    pub(crate) fn begins(&self, pass: u32, later_pages: u64) {
        self.later_pages.store(later_pages, Ordering::Relaxed);
        self.update(|progress| progress.pass = pass);
    }

    /// Pages that wait for a later round, to be counted elsewhere.
    pub(crate) fn later_pages(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.later_pages)
    }

    /// Counts the bytes of a connection from now on.
    pub(crate) fn count(&self, connection: Handle) {
        lock(&self.connections).push(connection);
    }

    /// Bytes sent and received over all connections.
    pub(crate) fn counted(&self) -> (u64, u64) {
        sum(&lock(&self.connections))
    }

    /// Publishes the progress of a sender until it is dropped or another one is followed.
    pub(crate) fn follow(&self, sender: Option<SenderHandle>) {
        let Some(sender) = sender else { return drop(lock(&self.sampler).take()) };
        let (stop, stopped) = mpsc::channel();
        let (publisher, connections) = (self.publisher.clone(), Arc::clone(&self.connections));
        let (begun, later) = (self.begun, Arc::clone(&self.later_pages));
        let sample = move || {
            let mut before = (Instant::now(), sum(&lock(&connections)).0);
            while stopped.recv_timeout(SAMPLE) == Err(RecvTimeoutError::Timeout) {
                let (now, sent_bytes) = (Instant::now(), sum(&lock(&connections)).0);
                let span = now.duration_since(before.0).as_secs_f64();
                let rate = sent_bytes.saturating_sub(before.1) as f64 / span;
                before = (now, sent_bytes);
                let round = sender.progress();
                let later = later.load(Ordering::Relaxed);
                let left = round.pages.saturating_sub(round.sent.pages()) + later;
                publisher.update(|progress| {
                    progress.round = round.round;
                    progress.round_bytes = (round.pages + later) * proto::limits::PAGE_BYTES;
                    progress.remaining_bytes = left * proto::limits::PAGE_BYTES;
                    progress.sent_bytes = sent_bytes;
                    progress.rate_bytes_per_s = rate as u64;
                    progress.elapsed_us = begun.elapsed().as_micros() as u64;
                });
            }
        };
        // Without the thread nobody sees the progress; the migration goes on all the same.
        if thread::Builder::new().name("progress".to_owned()).spawn(sample).is_ok() {
            *lock(&self.sampler) = Some(stop);
        }
    }
}

fn sum(connections: &[Handle]) -> (u64, u64) {
    connections.iter().fold((0, 0), |(sent, received), connection| {
        (sent + connection.sent_bytes(), received + connection.received_bytes())
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
