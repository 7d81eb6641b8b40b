//! Protocol between two processes, over TCP.
//!
//! ```text
//! hello    64 bytes: the problem, in words, padded with spaces. Both sides send it; they must be the same.
//! frame    from: u16, to: u16    parts (see team)
//!          count: u32            elements that follow
//!          count elements        little endian
//! …
//! end of the stream
//! ```
//!
//! A process that has nothing more to send ends its stream and reads until the other one does the same: neither closes
//! while data is under way.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Add;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a hello.
const HELLO: usize = 64;
/// The longest frame accepted, in bytes. The longest sent is a quarter of the grid of FT, class A: 32 MiB.
const LIMIT: usize = 64 << 20;
/// Elements turned into bytes, or back, at a time.
const CHUNK: usize = 8192;
/// Time between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(200);

/// Data that members of a team send each other.
pub trait Element: Copy + Default + Add<Output = Self> + Send + Sync + 'static {
    /// Bytes of one element, in a frame.
    const BYTES: usize;

    /// Appends the element's bytes.
    fn put(self, bytes: &mut Vec<u8>);

    /// Reads an element from [`Self::BYTES`] bytes.
    fn take(bytes: &[u8]) -> Self;
}

impl Element for u32 {
    const BYTES: usize = 4;

    fn put(self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_le_bytes());
    }

    fn take(bytes: &[u8]) -> Self {
        let mut own = [0; Self::BYTES];
        own.copy_from_slice(bytes);
        Self::from_le_bytes(own)
    }
}

impl Element for f64 {
    const BYTES: usize = 8;

    fn put(self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_le_bytes());
    }

    fn take(bytes: &[u8]) -> Self {
        let mut own = [0; Self::BYTES];
        own.copy_from_slice(bytes);
        Self::from_le_bytes(own)
    }
}

/// Reasons why members cannot continue together.
#[derive(Debug)]
pub enum ExchangeError {
    /// The network failed.
    Io {
        /// The operation.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The peer was started for another problem.
    Different {
        /// The problem here.
        ours: String,
        /// The problem there.
        theirs: String,
    },
    /// The peer sent invalid data.
    Malformed(&'static str),
    /// The other member, or the peer, ended before the work was done.
    Gone,
}

impl fmt::Display for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { doing, .. } => f.write_str(doing),
            Self::Different { ours, theirs } => {
                write!(f, "the peer must run the same: here \"{ours}\", there \"{theirs}\"")
            }
            Self::Malformed(what) => write!(f, "the peer sent {what}"),
            Self::Gone => f.write_str("the other side ended before the work was done"),
        }
    }
}

impl std::error::Error for ExchangeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

fn failed(doing: &'static str) -> impl FnOnce(io::Error) -> ExchangeError {
    move |source| ExchangeError::Io { doing, source }
}

/// The other process.
#[derive(Debug)]
pub struct Peer {
    /// Rank of this process: 0 for the one that listened, 1 for the one that connected.
    rank: usize,
    incoming: TcpStream,
    /// Locked while a frame is written, which must stay in one piece.
    outgoing: Mutex<Outgoing>,
}

#[derive(Debug)]
struct Outgoing {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Peer {
    /// Waits for the connection of the peer. `hello` describes the problem; the peer must send the same.
    pub fn accept(listener: &TcpListener, hello: &str) -> Result<Self, ExchangeError> {
        let (stream, _) = listener.accept().map_err(failed("waiting for the peer"))?;
        Self::greet(stream, 0, hello)
    }

    /// Connects to the process that listens at `address` (`HOST:PORT`), which may start listening later, until
    /// `patience` is over.
    pub fn connect(address: &str, hello: &str, patience: Duration) -> Result<Self, ExchangeError> {
        let began = Instant::now();
        loop {
            match TcpStream::connect(address) {
                Ok(stream) => return Self::greet(stream, 1, hello),
                Err(_) if began.elapsed() < patience => thread::sleep(PAUSE),
                Err(source) => return Err(ExchangeError::Io { doing: "connecting to the peer", source }),
            }
        }
    }

    fn greet(mut stream: TcpStream, rank: usize, hello: &str) -> Result<Self, ExchangeError> {
        let greeting = failed("greeting the peer");
        let exchange = |stream: &mut TcpStream| -> io::Result<([u8; HELLO], TcpStream)> {
            stream.set_nodelay(true)?;
            stream.write_all(format!("{hello:HELLO$.HELLO$}").as_bytes())?;
            let mut theirs = [0; HELLO];
            stream.read_exact(&mut theirs)?;
            Ok((theirs, stream.try_clone()?))
        };
        let (theirs, incoming) = exchange(&mut stream).map_err(greeting)?;
        let theirs = String::from_utf8_lossy(&theirs).trim_end().to_owned();
        if theirs != hello {
            return Err(ExchangeError::Different { ours: hello.to_owned(), theirs });
        }
        Ok(Self { rank, incoming, outgoing: Mutex::new(Outgoing { stream, bytes: Vec::new() }) })
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Sends one frame.
    pub(crate) fn send<E: Element>(
        &self,
        from: usize,
        to: usize,
        elements: &[E],
    ) -> Result<(), ExchangeError> {
        let mut outgoing = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        let Outgoing { stream, bytes } = &mut *outgoing;
        bytes.clear();
        bytes.extend_from_slice(&(from as u16).to_le_bytes());
        bytes.extend_from_slice(&(to as u16).to_le_bytes());
        bytes.extend_from_slice(&(elements.len() as u32).to_le_bytes());
        let mut write = |bytes: &mut Vec<u8>| {
            let written = stream.write_all(bytes);
            bytes.clear();
            written.map_err(failed("sending to the peer"))
        };
        for chunk in elements.chunks(CHUNK) {
            for element in chunk {
                element.put(bytes);
            }
            write(bytes)?;
        }
        // The header, if no element followed it.
        write(bytes)
    }

    /// Passes every frame to `deliver`, with its sender and its receiver, until the peer's stream ends or `deliver`
    /// fails.
    pub(crate) fn receive<E: Element>(
        &self,
        mut deliver: impl FnMut(usize, usize, Vec<E>) -> Result<(), ExchangeError>,
    ) -> Result<(), ExchangeError> {
        let mut reader = BufReader::with_capacity(1 << 16, &self.incoming);
        let mut frames = || -> Result<(), ExchangeError> {
            while !reader.fill_buf().map_err(failed("receiving from the peer"))?.is_empty() {
                let (from, to, elements) = read_frame(&mut reader)?;
                deliver(from, to, elements)?;
            }
            Ok(())
        };
        // After a failure nothing is read, and the peer must not wait for that.
        frames().inspect_err(|_| drop(self.incoming.shutdown(Shutdown::Both)))
    }

    /// Ends the outgoing stream.
    pub(crate) fn finish(&self) {
        // A peer that has ended already needs no notice.
        let _ = self.incoming.shutdown(Shutdown::Write);
    }
}

fn read_frame<E: Element>(reader: &mut impl Read) -> Result<(usize, usize, Vec<E>), ExchangeError> {
    let mut header = [0; 8];
    reader.read_exact(&mut header).map_err(failed("receiving from the peer"))?;
    let [from0, from1, to0, to1, count @ ..] = header;
    let (from, to) = (u16::from_le_bytes([from0, from1]), u16::from_le_bytes([to0, to1]));
    let count = u32::from_le_bytes(count) as usize;
    if count > LIMIT / E::BYTES {
        return Err(ExchangeError::Malformed("a frame that is too long"));
    }
    let mut elements = Vec::with_capacity(count);
    let mut bytes = vec![0; count.min(CHUNK) * E::BYTES];
    while elements.len() < count {
        let bytes = &mut bytes[..(count - elements.len()).min(CHUNK) * E::BYTES];
        reader.read_exact(bytes).map_err(failed("receiving from the peer"))?;
        elements.extend(bytes.chunks_exact(E::BYTES).map(E::take));
    }
    Ok((from.into(), to.into(), elements))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns two processes' ends of a connection.
    pub(crate) fn pair() -> [Peer; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let connecting =
            thread::spawn(move || Peer::connect(&address, "test", Duration::from_secs(10)).unwrap());
        [Peer::accept(&listener, "test").unwrap(), connecting.join().unwrap()]
    }

    #[test]
    fn frames_arrive_as_they_were_sent() {
        let [one, other] = pair();
        let long: Vec<f64> = (0..3 * CHUNK + 5).map(|n| n as f64 / 7.0).collect();
        one.send::<f64>(0, 1, &[]).unwrap();
        one.send(2, 3, &long).unwrap();
        one.finish();
        let mut frames = Vec::new();
        other
            .receive(|from, to, elements: Vec<f64>| {
                frames.push((from, to, elements));
                Ok(())
            })
            .unwrap();
        assert_eq!(frames, [(0, 1, vec![]), (2, 3, long)]);
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_before_it_is_read() {
        let mut frame = [0; 8];
        frame[4..].copy_from_slice(&((LIMIT / 8 + 1) as u32).to_le_bytes());
        assert!(matches!(read_frame::<f64>(&mut &frame[..]), Err(ExchangeError::Malformed(_))));
    }

    #[test]
    fn a_stream_that_ends_within_a_frame_is_an_error() {
        let [one, other] = pair();
        one.outgoing.lock().unwrap().stream.write_all(&[0, 0, 1, 0, 9, 0, 0, 0, 1, 2, 3]).unwrap();
        one.finish();
        let received = other.receive(|_, _, _: Vec<u32>| Ok(()));
        assert!(matches!(received, Err(ExchangeError::Io { .. })));
    }

    #[test]
    fn peers_that_run_something_else_part_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let connecting = thread::spawn(move || Peer::connect(&address, "CG S", Duration::from_secs(10)));
        for end in [Peer::accept(&listener, "CG W"), connecting.join().unwrap()] {
            assert!(matches!(end, Err(ExchangeError::Different { .. })));
        }
    }
}
