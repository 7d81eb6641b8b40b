//! The bytes of a fake connection: two queues, each written by one side and read by the other.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::error::LinkError;
use crate::transport::{ConnectionHandle, TransportError};

/// Maximum number of bytes that wait for their reader.
const CAPACITY: usize = 256 << 10;

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    bytes: VecDeque<u8>,
    /// Number of bytes that were written.
    written: u64,
    /// Number of bytes that were read.
    read: u64,
    /// True if the writing side has ended the queue.
    has_ended: bool,
    /// True if the reading side has ended the queue.
    is_unread: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all threads that wait for a change.
    fn change(&self, change: impl FnOnce(&mut QueueState)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits for a change, at most until the deadline.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, QueueState>,
        deadline: Option<Instant>,
    ) -> Result<MutexGuard<'a, QueueState>, TransportError> {
        let Some(deadline) = deadline else {
            return Ok(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LinkError::TimedOut.into());
        }
        Ok(self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }
}

/// One side of a connection, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Side {
    outgoing: Arc<Queue>,
    incoming: Arc<Queue>,
}

impl Side {
    /// Returns the two sides of a new connection.
    pub(super) fn pair() -> (Arc<Self>, Arc<Self>) {
        let (there, back) = (Arc::<Queue>::default(), Arc::<Queue>::default());
        let near = Self { outgoing: Arc::clone(&there), incoming: Arc::clone(&back) };
        (Arc::new(near), Arc::new(Self { outgoing: back, incoming: there }))
    }

    /// Writes all of the bytes; waits while the peer does not read.
    pub(super) fn write(&self, bytes: &[u8], deadline: Option<Instant>) -> Result<(), TransportError> {
        let mut rest = bytes;
        let mut state = self.outgoing.lock();
        while !rest.is_empty() {
            if state.has_ended {
                return Err(TransportError::Closed);
            }
            if state.is_unread {
                return Err(LinkError::Lost(io::ErrorKind::BrokenPipe.into()).into());
            }
            let (now, later) = rest.split_at(rest.len().min(CAPACITY - state.bytes.len()));
            if now.is_empty() {
                state = self.outgoing.wait(state, deadline)?;
                continue;
            }
            state.bytes.extend(now);
            state.written += now.len() as u64;
            self.outgoing.changed.notify_all();
            rest = later;
        }
        Ok(())
    }

    /// Runs an action of this side on the peer's memory, unless the connection has ended.
    pub(super) fn act_there(
        &self,
        action: impl FnOnce() -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let state = self.outgoing.lock();
        if state.has_ended || state.is_unread {
            return Err(TransportError::Closed);
        }
        action()
    }

    /// Reads at least one byte and at most as many as `into` has; 0 means that the peer has ended the connection.
    pub(super) fn read(&self, into: &mut [u8], deadline: Option<Instant>) -> Result<usize, TransportError> {
        let mut state = self.incoming.lock();
        loop {
            if state.is_unread {
                return Err(TransportError::Closed);
            }
            let bytes = into.len().min(state.bytes.len());
            if bytes > 0 {
                let (first, second) = state.bytes.as_slices();
                let of_first = bytes.min(first.len());
                into[..of_first].copy_from_slice(&first[..of_first]);
                into[of_first..bytes].copy_from_slice(&second[..bytes - of_first]);
                state.bytes.drain(..bytes);
                state.read += bytes as u64;
                self.incoming.changed.notify_all();
                return Ok(bytes);
            }
            if state.has_ended {
                return Ok(0);
            }
            state = self.incoming.wait(state, deadline)?;
        }
    }

    /// Returns true if reading would not wait.
    pub(super) fn is_readable(&self) -> bool {
        let state = self.incoming.lock();
        !state.bytes.is_empty() || state.has_ended || state.is_unread
    }

    /// Returns the number of bytes that the peer has not read.
    pub(super) fn unread_bytes(&self) -> u64 {
        self.outgoing.lock().bytes.len() as u64
    }

    /// Signals the peer that nothing more follows.
    pub(super) fn finish(&self) {
        self.outgoing.change(|state| state.has_ended = true);
    }

    /// Ends both directions. The peer still reads what was written before.
    pub(super) fn shutdown(&self) {
        self.finish();
        self.incoming.change(|state| {
            state.is_unread = true;
            state.bytes.clear();
        });
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// Handle of one side.
#[derive(Debug)]
pub(super) struct SideHandle {
    side: Weak<Side>,
    outgoing: Arc<Queue>,
    incoming: Arc<Queue>,
}

impl SideHandle {
    pub(super) fn new(side: &Arc<Side>) -> Self {
        let (outgoing, incoming) = (Arc::clone(&side.outgoing), Arc::clone(&side.incoming));
        Self { side: Arc::downgrade(side), outgoing, incoming }
    }
}

impl ConnectionHandle for SideHandle {
    fn shutdown(&self) {
        if let Some(side) = self.side.upgrade() {
            side.shutdown();
        }
    }

    fn sent_bytes(&self) -> u64 {
        self.outgoing.lock().written
    }

    fn received_bytes(&self) -> u64 {
        self.incoming.lock().read
    }
}
