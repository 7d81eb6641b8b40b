//! A client of the guest's echo service: one TCP connection that is kept, and one message after the other, the next one
//! shortly after the answer. The longest time without an answer is the silence that a migration costs such a client.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::result::Spread;
use super::statistics::ClientObservation;
use crate::error::{Context, Error, Result};
use crate::host::Host;
use crate::lab::vm_address;

/// Port of the guest's service.
pub(super) const ECHO_PORT: u16 = 7000;
/// Time between an answer and the next message.
const PAUSE: Duration = Duration::from_millis(1);
/// Time without an answer after which the connection counts as broken: far longer than any migration needs.
const PATIENCE: Duration = Duration::from_mins(2);
/// Answers after a migration for which the client is watched: the guest's place is known by then.
const LAST_ANSWERS: usize = 200;

/// A client that is connected.
#[derive(Debug)]
pub(super) struct EchoClient {
    stop: Arc<AtomicBool>,
    /// Times of the answers; disconnected when the connection has ended.
    answers: Receiver<Instant>,
}

impl EchoClient {
    /// Connects from a host to the bench's guest, and begins to send.
    pub(super) fn start(host: &Host) -> Result<Self> {
        let service = SocketAddr::from((vm_address(1), ECHO_PORT));
        let stream = host
            .within(|| TcpStream::connect_timeout(&service, PATIENCE))?
            .context(|| format!("cannot reach {service}"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let (answered, answers) = mpsc::channel();
        let client = Self { stop: Arc::clone(&stop), answers };
        // It ends with the guest at the latest.
        thread::spawn(move || exchange(stream, &stop, &answered));
        client.wait_for(1).map(|_| client)
    }

    /// Forgets all answers so far.
    pub(super) fn forget(&self) {
        self.answers.try_iter().for_each(drop);
    }

    /// Waits for some more answers, ends the connection, and returns what was seen since the last [`Self::forget`].
    /// Fails if the connection broke.
    pub(super) fn finish(self) -> Result<ClientObservation> {
        let mut times: Vec<Instant> = self.answers.try_iter().collect();
        times.extend(self.wait_for(LAST_ANSWERS)?);
        let between = times.windows(2).map(|two| (two[1] - two[0]).as_secs_f64() * 1e3);
        let spread = Spread::of(between).unwrap_or(Spread { median: 0.0, least: 0.0, most: 0.0 });
        Ok(ClientObservation { longest_silence_ms: spread.most, usual_ms: spread.median })
    }

    fn wait_for(&self, answers: usize) -> Result<Vec<Instant>> {
        let times: Vec<_> = self.answers.iter().take(answers).collect();
        if times.len() < answers {
            return Err(Error::Config("the connection of the guest's client broke".to_owned()));
        }
        Ok(times)
    }
}

impl Drop for EchoClient {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// Exchanges numbered messages until it is stopped, or the connection breaks.
fn exchange(mut stream: TcpStream, stop: &AtomicBool, answered: &Sender<Instant>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    for number in 0_u64.. {
        let (message, mut answer) = (number.to_be_bytes(), [0; 8]);
        stream.write_all(&message)?;
        stream.read_exact(&mut answer)?;
        if answer != message {
            return Err(io::Error::other("this is no echo"));
        }
        if stop.load(Relaxed) || answered.send(Instant::now()).is_err() {
            break;
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}
