//! Observation of a running guest: which addresses it claims.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tracee::PacketSocket;
use tracing::debug;

use crate::claims::Claims;
use crate::ethernet::{Frame, Mac};
use crate::filter;

/// Thread that observes the taps of a guest's cards until this is dropped.
#[derive(Debug)]
pub struct ClaimSnooper {
    claims: Arc<Mutex<Vec<Claims>>>,
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ClaimSnooper {
    /// Begins to observe the cards behind these interfaces, which are in the network namespace of this thread.
    ///
    /// # Errors
    /// If an interface does not exist, or this process may not open packet sockets. Also if no thread can be started.
    pub fn start<'a>(cards: impl IntoIterator<Item = (&'a str, Mac)>) -> io::Result<Self> {
        let (mut sockets, mut claims) = (Vec::new(), Vec::new());
        for (interface, mac) in cards {
            sockets.push(PacketSocket::listen(interface, &filter::claims())?);
            claims.push(Claims::new(mac));
        }
        let claims = Arc::new(Mutex::new(claims));
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (into, until) = (Arc::clone(&claims), Arc::clone(&end));
        let listen = move || {
            if let Err(error) = listen(&sockets, &into, &until) {
                debug!(%error, "the addresses that a guest claims are not observed any more");
            }
        };
        let thread = thread::Builder::new().name("claims".to_owned()).spawn(listen)?;
        Ok(Self { claims, end, thread: Some(thread) })
    }

    /// Returns what the guest has claimed so far, card by card.
    pub fn claims(&self) -> Vec<Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ClaimSnooper {
    fn drop(&mut self) {
        // The counter of a new descriptor has room.
        let _ = rustix::io::write(&*self.end, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn listen(sockets: &[PacketSocket], claims: &Mutex<Vec<Claims>>, end: &OwnedFd) -> io::Result<()> {
    let mut buffer = [0; filter::FRAME_BYTES];
    loop {
        let mut waits: Vec<_> = sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        waits.push(PollFd::new(end, PollFlags::IN));
        match poll(&mut waits, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut claims = claims.lock().unwrap_or_else(PoisonError::into_inner);
        for (socket, claims) in sockets.iter().zip(claims.iter_mut()) {
            while let Some(received) = socket.receive(&mut buffer)? {
                let bytes = buffer.get(..received.bytes).unwrap_or(&buffer);
                if let Some(frame) = Frame::parse(bytes, received.vlan) {
                    claims.observe(!received.is_outgoing, &frame);
                }
            }
        }
        if waits.last().is_some_and(|end| !end.revents().is_empty()) {
            return Ok(());
        }
    }
}
