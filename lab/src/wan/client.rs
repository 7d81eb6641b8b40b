//! A client that sends a numbered message every few milliseconds over one TCP connection, whether the answer to the last
//! one has come or not, so that its silence is seen more finely than its round-trip time.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::host::Host;

/// Time between two messages.
pub(super) const INTERVAL: Duration = Duration::from_millis(5);
/// Time without an answer after which the connection counts as broken.
const PATIENCE: Duration = Duration::from_mins(2);

/// An answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// The time at which its message was sent.
    pub(super) sent: Instant,
    /// The time at which it came.
    pub(super) came: Instant,
}

impl Answer {
    /// Returns the time for which the client waited.
    pub(super) fn wait(self) -> Duration {
        self.came.saturating_duration_since(self.sent)
    }
}

/// A client that is connected. Its connection ends when it is dropped.
#[derive(Debug)]
pub(super) struct TickingClient {
    stream: TcpStream,
    /// Disconnected when the connection has ended.
    answers: Receiver<Answer>,
}

impl TickingClient {
    /// Connects from a host, and begins to send.
    pub(super) fn start(host: &Host, service: SocketAddr) -> Result<Self> {
        let stream = host
            .within(|| TcpStream::connect_timeout(&service, PATIENCE))?
            .context(|| format!("cannot reach {service}"))?;
        let clone = || stream.try_clone().context(|| "cannot duplicate a socket");
        let (to, from) = (clone()?, clone()?);
        let (sent, due) = mpsc::channel();
        let (answered, answers) = mpsc::channel();
        // Both end with the connection.
        thread::spawn(move || send(to, &sent));
        thread::spawn(move || receive(from, &due, &answered));
        Ok(Self { stream, answers })
    }

    /// Waits for the answers to all messages that are sent in the next `time`, and returns all answers that came since
    /// the last call. Fails if the connection broke.
    pub(super) fn answers_until(&self, time: Duration) -> Result<Vec<Answer>> {
        let end = Instant::now() + time;
        let mut answers = Vec::new();
        loop {
            let answer = self.answers.recv_timeout(PATIENCE);
            let answer = answer.map_err(|_| Error::Config("the client's connection broke".to_owned()))?;
            answers.push(answer);
            if answer.sent >= end {
                return Ok(answers);
            }
        }
    }
}

impl Drop for TickingClient {
    fn drop(&mut self) {
        // It may be broken.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn send(mut stream: TcpStream, sent: &Sender<Instant>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    for number in 0_u64.. {
        if sent.send(Instant::now()).is_err() {
            break;
        }
        stream.write_all(&number.to_be_bytes())?;
        thread::sleep(INTERVAL);
    }
    Ok(())
}

fn receive(mut stream: TcpStream, due: &Receiver<Instant>, answered: &Sender<Answer>) -> io::Result<()> {
    for number in 0_u64.. {
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        let came = Instant::now();
        if answer != number.to_be_bytes() {
            return Err(io::Error::other("this is no echo"));
        }
        let Ok(sent) = due.recv() else { break };
        if answered.send(Answer { sent, came }).is_err() {
            break;
        }
    }
    Ok(())
}
