//! Numbered datagrams of UDP, which the guest echoes: each number is sent once, whether those before it were answered or not.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde::Serialize;

use super::arrivals::{Arrivals, PATIENCE, Session, SessionReport};
use crate::error::{Context, Result};
use crate::host::Host;

const PORT: u16 = 7;
/// Time between two datagrams.
const INTERVAL: Duration = Duration::from_millis(20);

/// Observations on datagrams.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DatagramReport {
    /// The answers that arrived.
    pub answers: SessionReport,
    /// Datagrams that were sent, without the last ones, whose answers were not waited for.
    pub sent: u64,
    /// Numbers of those that were not answered.
    pub unanswered: Vec<u64>,
    /// Answers that arrived once more.
    pub repeated: u64,
    /// Answers that arrived after one to a later datagram.
    pub overtaken: u64,
}

/// Result of the thread that receives.
#[derive(Debug, Default)]
struct Counted {
    answered: BTreeSet<u64>,
    repeated: u64,
    overtaken: u64,
}

impl Counted {
    fn record(&mut self, number: u64) {
        let last = self.answered.last().copied();
        if !self.answered.insert(number) {
            self.repeated += 1;
        } else if last.is_some_and(|last| number < last) {
            self.overtaken += 1;
        }
    }

    /// Returns the report; all answers up to the last one count.
    fn report(self, answers: SessionReport) -> DatagramReport {
        let sent = self.answered.last().map_or(0, |last| last + 1);
        let unanswered = (0..sent).filter(|number| !self.answered.contains(number)).collect();
        let Self { repeated, overtaken, .. } = self;
        DatagramReport { answers, sent, unanswered, repeated, overtaken }
    }
}

/// A client that sends datagrams.
#[derive(Debug)]
pub struct Datagrams {
    session: Session<Counted>,
    sender: JoinHandle<()>,
}

impl Datagrams {
    /// Begins to send from a host to the Debian guest with this address. The client's socket takes answers of this address
    /// alone.
    pub fn start(host: &Host, address: Ipv4Addr) -> Result<Self> {
        let service = SocketAddr::from((address, PORT));
        let connect = || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(service)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            Ok((socket.try_clone()?, socket))
        };
        let connected: io::Result<_> = host.within(connect)?;
        let (sending, receiving) = connected.context(|| format!("cannot send to {service}"))?;
        let (sent, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (of_sender, until) = (Arc::clone(&sent), Arc::clone(&is_over));
        let sender = thread::Builder::new().spawn(move || send(&sending, &of_sender, &until));
        let sender = sender.context(|| "cannot start a client")?;
        let session = Session::start(move |record, counted: &mut Counted| {
            let result = receive(record, counted, &receiving, &sent);
            is_over.store(true, Relaxed);
            result
        })?;
        Ok(Self { session, sender })
    }

    /// Waits until `answers` more have arrived.
    ///
    /// # Errors
    /// If the guest refuses a datagram first, or is silent for two minutes.
    pub fn wait_for(&self, answers: usize) -> Result<()> {
        self.session.wait_for(answers)
    }

    /// Ends the client when a datagram was answered that is sent from now on, and returns its observations.
    pub fn finish(self) -> DatagramReport {
        // Its socket has the same patience.
        let (answers, counted) = self.session.finish(|| {});
        // The thread does not panic; if it did, the panic continues here.
        self.sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        counted.report(answers)
    }
}

/// Sends numbers until it is over. A datagram that cannot be sent is one that is not answered.
fn send(socket: &UdpSocket, sent: &AtomicU64, is_over: &AtomicBool) {
    while !is_over.load(Relaxed) {
        let number = sent.fetch_add(1, Relaxed);
        let _ = socket.send(&number.to_be_bytes());
        thread::sleep(INTERVAL);
    }
}

/// Receives answers until one has arrived to a datagram that was sent after the client was asked to end.
fn receive(
    record: &mut Arrivals,
    counted: &mut Counted,
    socket: &UdpSocket,
    sent: &AtomicU64,
) -> io::Result<()> {
    let mut last = None;
    loop {
        let mut answer = [0; 16];
        let bytes = socket.recv(&mut answer)?;
        let number = answer.first_chunk().filter(|_| bytes == 8).map(|number| u64::from_be_bytes(*number));
        let number = number.filter(|number| *number < sent.load(Relaxed));
        let number = number.ok_or_else(|| io::Error::other("a datagram is no echo"))?;
        counted.record(number);
        record.record();
        if record.is_stopped() {
            let last = *last.get_or_insert_with(|| sent.load(Relaxed));
            if number >= last {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_missing_or_come_again_are_found() {
        let mut counted = Counted::default();
        for number in [0, 1, 3, 2, 3, 7, 6] {
            counted.record(number);
        }
        let report = counted.report(SessionReport::default());
        let DatagramReport { sent, unanswered, repeated, overtaken, .. } = report;
        assert_eq!((sent, unanswered, repeated, overtaken), (8, vec![4, 5], 1, 2));
        assert_eq!(Counted::default().report(SessionReport::default()).sent, 0);
    }
}
