//! A client that watches a service over connections that are opened once, kept, and never reopened. The longest silence
//! is the disruption that a migration of the VM causes for an outside client.
//!
//! One connection requests a page again and again; the other hands in notes, each of which must be stored in the end.
//! Both speak HTTP/1.1 with keep-alive. The sockets are made in a host of the laboratory; the threads that use them
//! belong to this process.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::{Context, Error, Result};
use crate::host::Host;
use crate::http::Connection;

/// Longest answer that is read. The service's are far smaller.
const ANSWER_BYTES: u64 = 1 << 20;
/// Silence after which a connection is given up: far longer than any migration needs.
const SILENCE: Duration = Duration::from_mins(1);

/// Observations on one connection.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ConnectionReport {
    /// Requests answered with success.
    pub answered: u64,
    /// The longest time between two answers, ms.
    pub longest_gap_ms: f64,
    /// Time at which that gap ended, ms since the client began.
    pub longest_gap_at_ms: f64,
    /// Median time from a request to its answer, ms.
    pub median_ms: f64,
    /// Error that ended the connection, if any. The connection is never reopened.
    pub error: Option<String>,
}

/// Report of a client.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ClientReport {
    /// Time for which the client watched, ms.
    pub watched_ms: f64,
    /// The connection that requests the page.
    pub page: ConnectionReport,
    /// The connection that hands in notes.
    pub notes: ConnectionReport,
    /// Notes that the service has in the end, minus those that it had at the beginning. `None` if the service did not
    /// answer.
    pub notes_kept: Option<u64>,
}

impl ClientReport {
    /// Returns true if no connection broke and every note whose receipt was confirmed is stored.
    pub fn is_clean(&self) -> bool {
        self.page.error.is_none()
            && self.notes.error.is_none()
            && self.notes_kept == Some(self.notes.answered)
    }
}

/// A client that is watching.
#[derive(Debug)]
pub struct Client {
    start: Instant,
    stop: Arc<AtomicBool>,
    /// Receives one item for each answer with the page; disconnected when the connection ends.
    answers: Receiver<()>,
    page: JoinHandle<ConnectionReport>,
    notes: JoinHandle<(ConnectionReport, Option<u64>)>,
}

impl Client {
    /// Connects from `host` to the service (twice) and begins to watch. `pause` is the time between an answer and the
    /// next request for the page; notes are handed in ten times less often.
    pub fn start(host: &Host, service: SocketAddr, pause: Duration) -> Result<Self> {
        let connect = || {
            host.within(|| Connection::open(service, SILENCE))?.context(|| format!("cannot reach {service}"))
        };
        let mut page = connect()?;
        let mut keeper = connect()?;
        let before = notes(&mut keeper).context(|| format!("{service} is no service of notes"))?;
        let start = Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        let (page_stop, notes_stop) = (Arc::clone(&stop), Arc::clone(&stop));
        let (answered, answers) = mpsc::channel();
        Ok(Self {
            start,
            stop,
            answers,
            page: thread::spawn(move || {
                watch(&page_stop, start, pause, |_| {
                    page.request("GET", "/", "", ANSWER_BYTES)?;
                    // The receiver may be gone.
                    let _ = answered.send(());
                    Ok(())
                })
            }),
            notes: thread::spawn(move || {
                let watched = watch(&notes_stop, start, pause * 10, |n| {
                    keeper.request("POST", "/notes", &format!("note {n}"), ANSWER_BYTES).map(drop)
                });
                (watched, notes(&mut keeper).ok().and_then(|after| after.checked_sub(before)))
            }),
        })
    }

    /// Waits for `answers` more answers with the page. Fails if the connection breaks first.
    pub fn wait_for_answers(&self, answers: usize) -> Result<()> {
        // Earlier answers do not count.
        let _ = self.answers.try_iter().count();
        if self.answers.iter().take(answers).count() < answers {
            return Err(Error::Config("the client's connection broke".to_owned()));
        }
        Ok(())
    }

    /// Ends watching and returns the report.
    pub fn finish(self) -> ClientReport {
        let watched_ms = self.start.elapsed().as_secs_f64() * 1e3;
        self.stop.store(true, Relaxed);
        // The threads do not panic; if one did, the panic continues here.
        let page = self.page.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (notes, notes_kept) = self.notes.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ClientReport { watched_ms, page, notes, notes_kept }
    }
}

/// Repeats a request until it is stopped, or until a request fails.
fn watch(
    stop: &AtomicBool,
    start: Instant,
    pause: Duration,
    mut request: impl FnMut(u64) -> io::Result<()>,
) -> ConnectionReport {
    let mut watched = ConnectionReport::default();
    let mut times_ms = Vec::new();
    let mut last = Instant::now();
    while !stop.load(Relaxed) {
        let asked = Instant::now();
        if let Err(error) = request(watched.answered) {
            watched.error = Some(error.to_string());
            break;
        }
        let now = Instant::now();
        watched.answered += 1;
        times_ms.push((now - asked).as_secs_f64() * 1e3);
        let gap_ms = (now - last).as_secs_f64() * 1e3;
        if gap_ms > watched.longest_gap_ms {
            watched.longest_gap_ms = gap_ms;
            watched.longest_gap_at_ms = (now - start).as_secs_f64() * 1e3;
        }
        last = now;
        thread::sleep(pause);
    }
    times_ms.sort_by(f64::total_cmp);
    watched.median_ms = times_ms.get(times_ms.len() / 2).copied().unwrap_or_default();
    watched
}

/// Returns the number of notes that the service has.
fn notes(connection: &mut Connection) -> io::Result<u64> {
    let body: serde_json::Value =
        serde_json::from_slice(&connection.request("GET", "/notes", "", ANSWER_BYTES)?)?;
    body["count"].as_u64().ok_or_else(|| io::Error::other("the answer has no count"))
}

/// Waits until a service accepts connections from a host.
pub fn wait_for_service(host: &Host, address: Ipv4Addr, port: u16, deadline: Duration) -> Result<()> {
    let start = Instant::now();
    let service = SocketAddr::from((address, port));
    loop {
        // A packet to a guest that still boots is lost or refused: there is no event to wait for but the answer.
        let attempt = host.within(|| TcpStream::connect_timeout(&service, Duration::from_secs(1)))?;
        match attempt {
            Ok(_) => return Ok(()),
            Err(_) if start.elapsed() < deadline => thread::sleep(Duration::from_millis(50)),
            Err(error) => {
                return Err(Error::Io { what: format!("{service} cannot be reached"), source: error });
            }
        }
    }
}
