//! A client's thread, and its record of what arrives.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::{Context, Error, Result};

/// Time in which nothing arrives after which a connection counts as broken: far longer than any migration needs.
pub(super) const PATIENCE: Duration = Duration::from_mins(2);

/// Observations on one connection.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SessionReport {
    /// Lines, pieces or messages that arrived.
    pub arrived: u64,
    /// The longest time in which nothing arrived, ms.
    pub longest_gap_ms: f64,
    /// Time at which that gap ended, ms since the client began.
    pub longest_gap_at_ms: f64,
    /// Error that ended the connection, if any.
    pub error: Option<String>,
}

/// Record of a client's thread.
#[derive(Debug)]
pub(super) struct Arrivals {
    stop: Arc<AtomicBool>,
    notices: Sender<()>,
    start: Instant,
    last: Instant,
    report: SessionReport,
}

impl Arrivals {
    /// Begins a record, which sends an item for each thing that arrives.
    pub(super) fn new(stop: Arc<AtomicBool>, notices: Sender<()>) -> Self {
        let now = Instant::now();
        Self { stop, notices, start: now, last: now, report: SessionReport::default() }
    }

    /// Returns true if the client has to end.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Records that something has arrived.
    pub(super) fn record(&mut self) {
        self.record_at(Instant::now());
    }

    fn record_at(&mut self, now: Instant) {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let gap_ms = ms(now.saturating_duration_since(self.last));
        if gap_ms > self.report.longest_gap_ms {
            self.report.longest_gap_ms = gap_ms;
            self.report.longest_gap_at_ms = ms(now.saturating_duration_since(self.start));
        }
        self.last = now;
        self.report.arrived += 1;
        // The receiver may be gone.
        let _ = self.notices.send(());
    }
}

/// A client at work in a thread, until its connection breaks or it is asked to end. `R` is its result.
#[derive(Debug)]
pub struct Session<R> {
    stop: Arc<AtomicBool>,
    /// Receives one item for each thing that arrives; disconnected when the thread has ended.
    arrivals: Receiver<()>,
    thread: JoinHandle<(SessionReport, R)>,
}

impl<R: Default + Send + 'static> Session<R> {
    /// Starts a client, which returns when it is asked to end, or with an error.
    pub(super) fn start(
        work: impl FnOnce(&mut Arrivals, &mut R) -> io::Result<()> + Send + 'static,
    ) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (notices, arrivals) = mpsc::channel();
        let mut record = Arrivals::new(Arc::clone(&stop), notices);
        let work = move || {
            let mut result = R::default();
            record.report.error = work(&mut record, &mut result).err().map(|error| error.to_string());
            (record.report, result)
        };
        let thread = thread::Builder::new().spawn(work).context(|| "cannot start a client")?;
        Ok(Self { stop, arrivals, thread })
    }

    /// Waits until `count` more things have arrived.
    ///
    /// # Errors
    /// If the connection breaks first, or is silent for two minutes.
    pub fn wait_for(&self, count: usize) -> Result<()> {
        // Earlier ones do not count.
        let _ = self.arrivals.try_iter().count();
        for _ in 0..count {
            let arrived = self.arrivals.recv_timeout(PATIENCE);
            arrived.map_err(|error| Error::Config(format!("a client's connection broke: {error}")))?;
        }
        Ok(())
    }

    /// Ends the client, which completes what it does at this moment, and returns its observations. `interrupt` is called
    /// if nothing arrives for two minutes, and has to make it end.
    pub(super) fn finish(self, interrupt: impl FnOnce()) -> (SessionReport, R) {
        self.stop.store(true, Relaxed);
        let mut interrupt = Some(interrupt);
        while let Some(waits) = interrupt.take() {
            match self.arrivals.recv_timeout(PATIENCE) {
                Ok(()) => interrupt = Some(waits),
                Err(mpsc::RecvTimeoutError::Disconnected) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => waits(),
            }
        }
        // The thread does not panic; if it did, the panic continues here.
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_is_found() {
        let (notices, arrivals) = mpsc::channel();
        let ms = Duration::from_millis;
        let mut record = Arrivals::new(Arc::default(), notices);
        let start = record.start;
        for at in [10, 30, 530, 540, 900] {
            record.record_at(start + ms(at));
        }
        let SessionReport { arrived, longest_gap_ms, longest_gap_at_ms, error } = record.report;
        assert_eq!((arrived, longest_gap_ms, longest_gap_at_ms, error), (5, 500.0, 530.0, None));
        assert_eq!(arrivals.try_iter().count(), 5);
    }

    #[test]
    fn a_broken_connection_is_reported() {
        let session = Session::start(|record, count: &mut u32| {
            record.record();
            *count = 7;
            Err(io::ErrorKind::ConnectionReset.into())
        });
        let session = session.unwrap();
        assert!(session.wait_for(2).is_err());
        let (report, count) = session.finish(|| {});
        assert_eq!((report.arrived, report.error.is_some(), count), (1, true, 7));
    }
}
