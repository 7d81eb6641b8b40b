//! The clients of a guest's services. Their sockets belong to the laboratory's client; the threads to this process.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use super::case::Workload;
use super::player::{FRAME, FRAME_BYTES};
use super::robot::{Robot, Visit};
use super::tally::Tally;
use crate::error::{Context, Error, Result};
use crate::host::Host;
use crate::http::Connection;

/// Longer than any guest is stopped.
const PATIENCE: Duration = Duration::from_mins(15);
/// Time from an answer to the next small request.
const PROBE_PAUSE: Duration = Duration::from_millis(5);
/// Clients that load the file, and readers of the board.
const LOADERS: u64 = 25;
const READERS: u64 = 250;
/// Receive buffer of the film's client: small, or a pause of the guest would not be visible.
const FILM_WINDOW_BYTES: usize = 16 << 10;

/// Clients at work.
#[derive(Debug)]
pub(super) struct Clients {
    start: Instant,
    started: SystemTime,
    shared: Arc<Shared>,
    sockets: Vec<TcpStream>,
    threads: Vec<JoinHandle<(ClientCounts, io::Result<()>)>>,
}

#[derive(Debug, Default)]
struct Shared {
    tally: Mutex<Tally>,
    is_over: Mutex<bool>,
    over: Condvar,
}

/// Counts of one client.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct ClientCounts {
    pub(super) posted: u64,
    pub(super) refused: u64,
    /// Times at which each frame of the film was complete.
    pub(super) frames: Vec<Duration>,
}

/// Observations of all clients.
#[derive(Debug, Default)]
pub(super) struct ClientsReport {
    pub(super) tally: Tally,
    pub(super) counts: ClientCounts,
    /// Errors that broke connections.
    pub(super) broken: Vec<String>,
}

impl Clients {
    /// Connects all clients of a workload from `host`, and starts them.
    pub(super) fn start(host: &Host, service: SocketAddr, workload: Workload) -> Result<Self> {
        let works: Vec<Work> = std::iter::once(Work::Probe)
            .chain(match workload {
                Workload::Static => (0..LOADERS).map(|_| Work::Load).collect::<Vec<_>>(),
                Workload::Board => (0..READERS).map(|number| Work::Read(Robot::new(number))).collect(),
                Workload::Video => vec![Work::Watch],
                Workload::Writer | Workload::Io => Vec::new(),
            })
            .collect();
        let connect =
            || works.iter().map(|_| Connection::open(service, PATIENCE)).collect::<io::Result<Vec<_>>>();
        let connections = host.within(connect)?.context(|| format!("cannot reach {service}"))?;
        let sockets =
            connections.iter().map(|connection| connection.socket().try_clone()).collect::<io::Result<_>>();
        let sockets = sockets.context(|| "cannot keep a socket")?;
        let (start, started) = (Instant::now(), SystemTime::now());
        let shared = Arc::new(Shared::default());
        let begin = |(work, connection): (Work, Connection)| {
            let mut client = ServiceClient {
                start,
                connection,
                shared: Arc::clone(&shared),
                counts: ClientCounts::default(),
            };
            thread::Builder::new().stack_size(256 << 10).spawn(move || {
                let ended = work.carry_out(&mut client);
                // A connection that is broken at the end is no error.
                let ended = if client.shared.is_over() { Ok(()) } else { ended };
                (client.counts, ended)
            })
        };
        let threads = works.into_iter().zip(connections).map(begin).collect::<io::Result<_>>();
        let threads = threads.context(|| "cannot start a client")?;
        Ok(Self { start, started, shared, sockets, threads })
    }

    /// Returns the time at which they began.
    pub(super) fn began(&self) -> Instant {
        self.start
    }

    /// Returns the time since then.
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Converts a time of the host's calendar.
    pub(super) fn moment(&self, at: SystemTime) -> Duration {
        at.duration_since(self.started).unwrap_or_default()
    }

    /// Waits until one of them has received data after a moment.
    pub(super) fn wait_for_answer(&self, after: Duration) -> Result<()> {
        let until = self.now() + PATIENCE;
        while locked(&self.shared.tally).last() <= after {
            if self.now() > until {
                return Err(Error::Config("no client gets an answer any more".to_owned()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Ends them, and returns their observations.
    pub(super) fn finish(self) -> ClientsReport {
        *locked(&self.shared.is_over) = true;
        self.shared.over.notify_all();
        for socket in &self.sockets {
            // It may be broken already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        let mut watched = ClientsReport::default();
        for thread in self.threads {
            // The threads do not panic; if one did, the panic continues here.
            let (counts, ended) = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            watched.counts.posted += counts.posted;
            watched.counts.refused += counts.refused;
            watched.counts.frames.extend(counts.frames);
            watched.broken.extend(ended.err().map(|error| error.to_string()));
        }
        watched.tally = std::mem::take(&mut *locked(&self.shared.tally));
        watched
    }
}

/// Returns the guarded value: no thread leaves it half changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn is_over(&self) -> bool {
        *locked(&self.is_over)
    }

    /// Waits; returns true if the clients have to end.
    fn pause(&self, time: Duration) -> bool {
        let waited = self.over.wait_timeout_while(locked(&self.is_over), time, |is_over| !*is_over);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A client with its connection.
#[derive(Debug)]
struct ServiceClient {
    start: Instant,
    connection: Connection,
    shared: Arc<Shared>,
    counts: ClientCounts,
}

/// Work of a client until it has to end, or its connection breaks.
#[derive(Debug)]
enum Work {
    /// Requests a few bytes, over and over.
    Probe,
    /// Requests the file, over and over.
    Load,
    /// Reads the board.
    Read(Robot),
    /// Watches the film.
    Watch,
}

impl Work {
    fn carry_out(self, client: &mut ServiceClient) -> io::Result<()> {
        match self {
            Self::Probe => client.repeat(|client| {
                client.load("/probe")?;
                Ok(PROBE_PAUSE)
            }),
            Self::Load => client.repeat(|client| {
                let asked = client.start.elapsed();
                client.load("/page")?;
                client.answered(asked);
                Ok(Duration::ZERO)
            }),
            Self::Read(mut robot) => {
                if client.shared.pause(robot.thinks()) {
                    return Ok(());
                }
                client.repeat(|client| client.visit(&mut robot))
            }
            Self::Watch => client.watch(),
        }
    }
}

impl ServiceClient {
    /// Repeats an action, with a pause that it returns.
    fn repeat(&mut self, mut once: impl FnMut(&mut Self) -> io::Result<Duration>) -> io::Result<()> {
        while !self.shared.is_over() {
            let pause = once(self)?;
            if !pause.is_zero() && self.shared.pause(pause) {
                break;
            }
        }
        Ok(())
    }

    fn answered(&self, asked: Duration) {
        let now = self.start.elapsed();
        locked(&self.shared.tally).answered(now, now.saturating_sub(asked));
    }

    fn load(&mut self, path: &str) -> io::Result<()> {
        let head = self.connection.ask("GET", path, "", "")?;
        if head.status != 200 {
            return Err(io::Error::other(format!("{path}: {}", head.status)));
        }
        let (start, shared) = (self.start, &self.shared);
        self.connection.read_body(&head, |piece| {
            locked(&shared.tally).arrived(start.elapsed(), piece.len() as u64);
        })
    }

    fn visit(&mut self, robot: &mut Robot) -> io::Result<Duration> {
        let asked = self.start.elapsed();
        let (start, shared) = (self.start, &self.shared);
        let visit = robot.visit(&mut self.connection, |bytes| {
            locked(&shared.tally).arrived(start.elapsed(), bytes as u64);
        })?;
        self.answered(asked);
        match visit {
            Visit::Read => {}
            Visit::Posted => self.counts.posted += 1,
            Visit::Refused => self.counts.refused += 1,
        }
        Ok(robot.thinks())
    }

    /// Reads a frame whenever one is due; a late frame as soon as it arrives.
    fn watch(&mut self) -> io::Result<()> {
        rustix::net::sockopt::set_socket_recv_buffer_size(self.connection.socket(), FILM_WINDOW_BYTES)?;
        let mut frame = vec![0; FRAME_BYTES];
        let mut due = self.start.elapsed();
        while !self.shared.is_over() {
            let head = self.connection.ask("GET", "/video", "", "")?;
            let mut left = head.body_bytes;
            while left > 0 {
                due += FRAME;
                if self.shared.pause(due.saturating_sub(self.start.elapsed())) {
                    return Ok(());
                }
                let bytes = left.min(FRAME_BYTES as u64);
                self.connection.read_exact(&mut frame[..bytes as usize])?;
                left -= bytes;
                let now = self.start.elapsed();
                locked(&self.shared.tally).arrived(now, bytes);
                self.counts.frames.push(now);
            }
        }
        Ok(())
    }
}
