//! Progress of a running migration, sampled from the sender a few times a second, and bytes counted over all
//! connections.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{BlockProgress, OwedPages, PageSet, SenderHandle};
use link::transport::ConnectionHandle;
use proto::limits::PAGE_BYTES;

use api::progress::{PartProgress, Phase, Progress, Publisher};

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
    /// Numbers of the blocks that users see by themselves.
    shown: Arc<Mutex<Vec<usize>>>,
    /// Dropping it ends the sampling thread.
    sampler: Mutex<Option<Sender<()>>>,
}

/// Pages that wait for a later round.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeferredPages {
    /// All of them.
    pub(crate) pages: u64,
    /// Pages of each block; empty if only their sum is known.
    pub(crate) of_blocks: Vec<u64>,
}

impl DeferredPages {
    /// Counts the pages that wait for a later round.
    pub(crate) fn of(later: &OwedPages) -> Self {
        let of_blocks = later.blocks().iter().map(PageSet::count);
        Self { pages: later.pages(), of_blocks: of_blocks.collect() }
    }
}

/// Block of pages that users see in the progress by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShownBlock {
    /// Number among the blocks of the participant, or of all participants.
    pub(crate) number: usize,
    /// Kind of what it holds, in a word.
    pub(crate) kind: &'static str,
    /// Name of what it holds.
    pub(crate) name: String,
    /// Length, in bytes.
    pub(crate) bytes: u64,
}

/// Sets the progress of `parts`, whose blocks have the numbers `shown`. A part whose block is not sent stays as it was.
fn set_progress(
    parts: &mut [PartProgress],
    shown: &[usize],
    blocks: &[BlockProgress],
    later: &DeferredPages,
) {
    for (part, number) in parts.iter_mut().zip(shown) {
        let Some(block) = blocks.get(*number) else { continue };
        let later = later.of_blocks.get(*number).copied().unwrap_or(0);
        part.round_bytes = (block.pages + later) * PAGE_BYTES;
        part.remaining_bytes = (block.pages.saturating_sub(block.sent_pages) + later) * PAGE_BYTES;
    }
}

/// Counter of remaining pages, for a thread other than the driver's.
#[derive(Clone, Debug)]
pub(crate) struct RemainingCounter(Arc<Mutex<DeferredPages>>);

impl RemainingCounter {
    /// Sets the number of remaining pages, all of memory.
    pub(crate) fn set(&self, pages: u64) {
        *lock(&self.0) = DeferredPages { pages, of_blocks: Vec::new() };
    }
}

impl Telemetry {
    pub(crate) fn new(publisher: Publisher, begun: Instant) -> Self {
        Self {
            publisher,
            begun,
            connections: Arc::default(),
            later: Arc::default(),
            shown: Arc::default(),
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

    /// Returns a publisher of the progress, for another thread.
    pub(crate) fn publisher(&self) -> Publisher {
        self.publisher.clone()
    }

    pub(crate) fn now(&self) -> Progress {
        self.publisher.now()
    }

    /// Shows these blocks by themselves from here on, numbered among those of all participants.
    pub(crate) fn show(&self, blocks: Vec<ShownBlock>) {
        *lock(&self.shown) = blocks.iter().map(|block| block.number).collect();
        let part = |ShownBlock { kind, name, bytes, .. }| PartProgress {
            kind: String::from(kind),
            name,
            bytes,
            ..PartProgress::default()
        };
        self.update(|progress| progress.parts = blocks.into_iter().map(part).collect());
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
        let (begun, later, shown) = (self.begun, Arc::clone(&self.later), Arc::clone(&self.shown));
        let sample = move || {
            let mut before = (Instant::now(), sum(&lock(&connections)).0);
            while stopped.recv_timeout(SAMPLE) == Err(RecvTimeoutError::Timeout) {
                let (now, sent_bytes) = (Instant::now(), sum(&lock(&connections)).0);
                let span = now.duration_since(before.0).as_secs_f64();
                let rate = sent_bytes.saturating_sub(before.1) as f64 / span;
                before = (now, sent_bytes);
                let (round, blocks) = (sender.progress(), sender.block_progress());
                let (later, shown) = (lock(&later).clone(), lock(&shown).clone());
                let remaining = round.pages.saturating_sub(round.sent.pages()) + later.pages;
                publisher.update(|progress| {
                    progress.round = round.round;
                    progress.round_bytes = (round.pages + later.pages) * PAGE_BYTES;
                    progress.remaining_bytes = remaining * PAGE_BYTES;
                    progress.missing_pages = (progress.phase == Phase::PostCopy).then_some(remaining);
                    set_progress(&mut progress.parts, &shown, &blocks, &later);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_the_progress_of_its_own_block() {
        let telemetry = Telemetry::new(Publisher::new(), Instant::now());
        let block =
            |number, kind, name: &str| ShownBlock { number, kind, name: name.to_owned(), bytes: 1 << 20 };
        telemetry.show(vec![block(1, "disk", "sda"), block(3, "other", "x"), block(4, "other", "unsent")]);
        let blocks =
            [(9, 9), (8, 3), (7, 7), (6, 0)].map(|(pages, sent_pages)| BlockProgress { pages, sent_pages });
        let later = DeferredPages { pages: 12, of_blocks: vec![10, 2] };
        let shown = lock(&telemetry.shown).clone();
        telemetry.update(|progress| set_progress(&mut progress.parts, &shown, &blocks, &later));
        let pages = |part: &PartProgress| (part.round_bytes / PAGE_BYTES, part.remaining_bytes / PAGE_BYTES);
        let parts = telemetry.now().parts;
        assert_eq!(parts.iter().map(pages).collect::<Vec<_>>(), [(10, 7), (6, 6), (0, 0)]);
        assert_eq!(
            (parts[0].kind.as_str(), parts[0].name.as_str(), parts[0].bytes),
            ("disk", "sda", 1 << 20)
        );
    }
}
