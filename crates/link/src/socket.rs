//! A TCP socket that never blocks by itself: waiting happens in `poll`, with a deadline, and ends at once when another
//! thread shuts the socket down.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
    sockopt,
};

use crate::error::LinkError;

/// Bytes sent and received by a socket, TLS included.
#[derive(Debug, Default)]
pub(crate) struct ByteCounters {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Socket {
    stream: TcpStream,
    closed: AtomicBool,
    counters: Arc<ByteCounters>,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Socket {
    /// Wraps a connected socket.
    ///
    /// The kernel ends a connection without progress for `silence`: an idle one by keepalive probes, one with unsent
    /// bytes by the user timeout. The latter also strikes when the peer's host is well but its agent reads nothing for
    /// that long ([`Self::set_stall_limit`]).
    pub(crate) fn new(stream: TcpStream, silence: Duration) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        sockopt::set_tcp_nodelay(&stream, true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        // The kernel knows whole seconds here; the user timeout, in milliseconds, also ends the probing.
        let probe = Duration::from_secs((silence.as_secs() / 4).max(1));
        sockopt::set_tcp_keepidle(&stream, probe)?;
        sockopt::set_tcp_keepintvl(&stream, probe)?;
        sockopt::set_tcp_keepcnt(&stream, 3)?;
        sockopt::set_tcp_user_timeout(&stream, whole_ms(silence))?;
        Ok(Self { stream, closed: AtomicBool::new(false), counters: Arc::default() })
    }

    /// Sets how long a peer may read nothing of the data sent. The kernel knows only one limit for this and for a peer
    /// whose host is gone.
    pub(crate) fn set_stall_limit(&self, stall: Duration) -> Result<(), LinkError> {
        sockopt::set_tcp_user_timeout(&self.stream, whole_ms(stall)).map_err(|errno| self.lost(errno))
    }

    pub(crate) fn counters(&self) -> Arc<ByteCounters> {
        Arc::clone(&self.counters)
    }

    /// Ends the connection in both directions. Threads that wait for it return.
    pub(crate) fn shutdown(&self) {
        self.closed.store(true, Ordering::Release);
        // Fails only if the peer was faster.
        let _ = shutdown(&self.stream, Shutdown::Both);
    }

    /// Signals the peer that nothing more follows.
    pub(crate) fn finish(&self) {
        let _ = shutdown(&self.stream, Shutdown::Write);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn closed(&self) -> &AtomicBool {
        &self.closed
    }

    /// Receives at least one byte; 0 means that the peer has ended the connection.
    pub(crate) fn recv(&self, into: &mut [u8], deadline: Option<Instant>) -> Result<usize, LinkError> {
        self.recv_parts(&mut [IoSliceMut::new(into)], deadline)
    }

    /// Receives into several buffers, in their order.
    pub(crate) fn recv_parts(
        &self,
        into: &mut [IoSliceMut<'_>],
        deadline: Option<Instant>,
    ) -> Result<usize, LinkError> {
        loop {
            match self.try_recv(into, RecvFlags::empty()) {
                Err(LinkError::TimedOut) => self.wait(PollFlags::IN, deadline)?,
                Ok(bytes) => {
                    self.counters.received.fetch_add(bytes as u64, Ordering::Relaxed);
                    return Ok(bytes);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the first byte that waits to be received, without consuming it. None at the connection's end.
    pub(crate) fn peek(&self, deadline: Instant) -> Result<Option<u8>, LinkError> {
        let mut byte = [0];
        loop {
            match self.try_recv(&mut [IoSliceMut::new(&mut byte)], RecvFlags::PEEK) {
                Err(LinkError::TimedOut) => self.wait(PollFlags::IN, Some(deadline))?,
                Ok(0) => return Ok(None),
                Ok(_) => return Ok(Some(byte[0])),
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends as much as fits into the socket's buffer now; returns 0 if nothing does.
    pub(crate) fn try_send(&self, parts: &[IoSlice<'_>]) -> Result<usize, LinkError> {
        loop {
            if self.is_closed() {
                return Err(LinkError::Closed);
            }
            let mut control = SendAncillaryBuffer::default();
            match sendmsg(&self.stream, parts, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(bytes) => {
                    self.counters.sent.fetch_add(bytes as u64, Ordering::Relaxed);
                    return Ok(bytes);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(0),
                Err(errno) => return Err(self.lost(errno)),
            }
        }
    }

    /// Waits until something can be sent.
    pub(crate) fn wait_to_send(&self, deadline: Option<Instant>) -> Result<(), LinkError> {
        self.wait(PollFlags::OUT, deadline)
    }

    /// Returns true if receiving would not wait.
    pub(crate) fn is_ready(&self) -> bool {
        self.events().is_some_and(|events| !events.is_empty())
    }

    /// Returns true if receiving would return an error, and only once.
    pub(crate) fn has_failed(&self) -> bool {
        self.events().is_none_or(|events| events.intersects(PollFlags::ERR | PollFlags::HUP))
    }

    fn events(&self) -> Option<PollFlags> {
        let mut asked = [PollFd::new(&self.stream, PollFlags::IN)];
        poll(&mut asked, Some(&Timespec::default())).ok()?;
        Some(asked[0].revents())
    }

    fn try_recv(&self, into: &mut [IoSliceMut<'_>], flags: RecvFlags) -> Result<usize, LinkError> {
        loop {
            if self.is_closed() {
                return Err(LinkError::Closed);
            }
            let mut control = RecvAncillaryBuffer::default();
            match recvmsg(&self.stream, into, &mut control, flags | RecvFlags::DONTWAIT)
                .map(|message| message.bytes)
            {
                // A shutdown on this side also reads as the end.
                Ok(0) if self.is_closed() => return Err(LinkError::Closed),
                Ok(bytes) => return Ok(bytes),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(LinkError::TimedOut),
                Err(errno) => return Err(self.lost(errno)),
            }
        }
    }

    fn wait(&self, what: PollFlags, deadline: Option<Instant>) -> Result<(), LinkError> {
        loop {
            let timeout = match deadline {
                None => None,
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(LinkError::TimedOut);
                    }
                    Timespec::try_from(left).ok()
                }
            };
            match poll(&mut [PollFd::new(&self.stream, what)], timeout.as_ref()) {
                // The call that follows reports errors and hang-ups.
                Ok(ready) if ready > 0 => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(self.lost(errno)),
            }
        }
    }

    fn lost(&self, errno: rustix::io::Errno) -> LinkError {
        if self.is_closed() { LinkError::Closed } else { LinkError::Lost(errno.into()) }
    }
}

fn whole_ms(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
