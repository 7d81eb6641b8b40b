//! Connections for messages: control, questions, page requests.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use proto::{HostId, Message};

use super::{Incoming, TransportError};

/// The half of a channel towards the peer.
pub trait MessageSender: fmt::Debug + Send {
    /// Sets a deadline for all sends from now on: they wait no longer than that for the peer. A late send fails with
    /// [`TransportError::Deadline`] and ends the connection.
    fn set_deadline(&mut self, deadline: Option<Instant>);

    /// Returns the deadline for sends, if there is one.
    fn deadline(&self) -> Option<Instant>;

    /// Sends a message.
    fn send(&mut self, message: &Message) -> Result<(), TransportError>;

    /// Sends a piece of device state, of a list of pages, or a page; at most [`proto::limits::BLOB_BYTES`].
    fn send_blob(&mut self, bytes: &[u8]) -> Result<(), TransportError>;

    /// Signals the peer that nothing more follows. The other direction stays open.
    fn finish(&mut self) -> Result<(), TransportError>;
}

/// The half of a channel from the peer.
pub trait MessageReceiver: fmt::Debug + Send {
    /// Waits for a message or a blob, until the deadline if there is one. After [`TransportError::Deadline`] nothing is
    /// lost, and the channel can still be used.
    fn recv(&mut self, deadline: Option<Instant>) -> Result<Incoming, TransportError>;
}

/// A view of a connection from other threads. It does not keep the connection open.
pub trait ConnectionHandle: fmt::Debug + Send + Sync {
    /// Ends the connection at once, in both directions: calls that wait in its halves return, with
    /// [`TransportError::Closed`]. From the return of this call on, the transport changes no memory by itself; a call
    /// of [`DirectReceiver::receive`](super::DirectReceiver::receive) that has begun may still do so until it returns.
    /// A second call has no effect.
    fn shutdown(&self);

    /// Returns the number of bytes sent, encryption included.
    fn sent_bytes(&self) -> u64;

    /// Returns the number of bytes received, encryption included.
    fn received_bytes(&self) -> u64;
}

/// An open connection for messages, in both directions.
#[derive(Debug)]
pub struct Channel {
    peer: HostId,
    receiver: Box<dyn MessageReceiver>,
    sender: Box<dyn MessageSender>,
    handle: Arc<dyn ConnectionHandle>,
}

impl Channel {
    /// Joins the halves of a connection to `peer`.
    pub fn new(
        peer: HostId,
        receiver: Box<dyn MessageReceiver>,
        sender: Box<dyn MessageSender>,
        handle: Arc<dyn ConnectionHandle>,
    ) -> Self {
        Self { peer, receiver, sender, handle }
    }

    /// The host at the other end.
    pub fn peer(&self) -> &HostId {
        &self.peer
    }

    /// Returns a handle with which other threads end the connection and read its byte counts.
    pub fn handle(&self) -> Arc<dyn ConnectionHandle> {
        Arc::clone(&self.handle)
    }

    /// Sends a message. See [`MessageSender::send`].
    pub fn send(&mut self, message: &Message) -> Result<(), TransportError> {
        self.sender.send(message)
    }

    /// Waits for a message or a blob. See [`MessageReceiver::recv`].
    pub fn recv(&mut self, deadline: Option<Instant>) -> Result<Incoming, TransportError> {
        self.receiver.recv(deadline)
    }

    /// Splits the channel into its two directions, for two threads. The connection ends when both are dropped.
    pub fn split(self) -> (Box<dyn MessageReceiver>, Box<dyn MessageSender>) {
        (self.receiver, self.sender)
    }
}
