//! An open connection: frames and messages, in both directions.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use proto::frame::{FrameKind, HEADER_BYTES, Header};
use proto::{HostId, Message, limits};

use crate::error::LinkError;
use crate::rate_limit::RateLimit;
use crate::socket::ByteCounters;
use crate::stream::{ByteReader, ByteWriter, Shared};

/// An open connection to an agent whose name and version are known.
#[derive(Debug)]
pub struct Connection {
    reader: Reader,
    writer: Writer,
    handle: Handle,
    peer: HostId,
    version: u16,
}

/// A unit received on a control stream.
#[derive(Debug)]
pub enum Incoming {
    /// A message.
    Message(Message),
    /// A piece of device state.
    Blob(Vec<u8>),
}

impl Connection {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        reader: Reader,
        writer: Writer,
        peer: HostId,
        version: u16,
    ) -> Self {
        let handle = Handle { counters: shared.socket.counters(), shared: Arc::downgrade(shared) };
        Self { reader, writer, handle, peer, version }
    }

    /// The host at the other end, by its certificate (without TLS: by its own claim).
    pub fn peer(&self) -> &HostId {
        &self.peer
    }

    /// The version of the protocol that both sides speak.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// Returns a handle with which other threads end the connection and read its byte counters.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Sends a message. See [`Writer::send`].
    pub fn send(&mut self, message: &Message) -> Result<(), LinkError> {
        self.writer.send(message)
    }

    /// Sends a piece of device state. See [`Writer::send_blob`].
    pub fn send_blob(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        self.writer.send_blob(bytes)
    }

    /// Waits for a message or a piece of device state. See [`Reader::recv`].
    pub fn recv(&mut self, deadline: Option<Instant>) -> Result<Incoming, LinkError> {
        self.reader.recv(deadline)
    }

    /// Returns true if more has arrived. See [`Reader::has_more`].
    pub fn has_more(&mut self) -> bool {
        self.reader.has_more()
    }

    /// Sets how long the peer may read nothing of the data sent here before it counts as lost. The limit replaces
    /// [`Settings::silence`](crate::Settings::silence), because the peer's storage may stall. Another connection has to
    /// detect that the peer's host is gone. Fails if the connection has ended.
    pub fn set_stall_limit(&self, stall: Duration) -> Result<(), LinkError> {
        self.reader.shared.socket.set_stall_limit(stall)
    }

    /// Splits the connection into its two directions, for two threads. The connection ends when both are dropped.
    pub fn split(self) -> (Reader, Writer) {
        (self.reader, self.writer)
    }
}

/// A weak reference to a connection: it does not keep the connection open.
#[derive(Clone, Debug)]
pub struct Handle {
    shared: Weak<Shared>,
    counters: Arc<ByteCounters>,
}

impl Handle {
    /// Ends the connection at once. Threads that wait in its halves, for the network or for the rate limit, return with
    /// [`LinkError::Closed`].
    pub fn shutdown(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.shutdown();
        }
    }

    /// Bytes written to the socket, TLS included.
    pub fn sent_bytes(&self) -> u64 {
        self.counters.sent.load(Ordering::Relaxed)
    }

    /// Bytes read from the socket, TLS included.
    pub fn received_bytes(&self) -> u64 {
        self.counters.received.load(Ordering::Relaxed)
    }
}

/// The receiving half: from the peer to this host.
#[derive(Debug)]
pub struct Reader {
    bytes: ByteReader,
    shared: Arc<Shared>,
    /// A partly received frame, so that a deadline in the middle of a frame loses nothing.
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    frame: Option<Header>,
    payload: Vec<u8>,
    payload_filled: usize,
}

impl Reader {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            bytes: ByteReader::new(Arc::clone(shared)),
            shared: Arc::clone(shared),
            header: [0; HEADER_BYTES],
            header_filled: 0,
            frame: None,
            payload: Vec::new(),
            payload_filled: 0,
        }
    }

    /// Waits for a message or a piece of device state, until the deadline if there is one. Frames of data streams are
    /// errors here.
    pub fn recv(&mut self, deadline: Option<Instant>) -> Result<Incoming, LinkError> {
        let header = self.next_frame(deadline, usize::MAX)?;
        let incoming = match header.kind {
            FrameKind::Message => self.message().map(Incoming::Message),
            FrameKind::Blob => Ok(Incoming::Blob(std::mem::take(&mut self.payload))),
            kind => Err(LinkError::NotExpected(kind)),
        };
        self.shutdown_on_error(incoming)
    }

    fn message(&self) -> Result<Message, LinkError> {
        let message: Message = serde_json::from_slice(&self.payload).map_err(LinkError::Message)?;
        message.validate()?;
        Ok(message)
    }

    /// Waits for a frame of any kind and puts its payload into `payload`, whose memory is reused.
    ///
    /// # Errors
    /// If the connection ends or is lost, or what was received is no frame. All but the peer's orderly end end the
    /// connection here, too.
    pub fn read_frame(&mut self, payload: &mut Vec<u8>) -> Result<Header, LinkError> {
        // Only a `recv` that reached its deadline leaves a partial frame behind.
        if self.frame.is_none() {
            std::mem::swap(&mut self.payload, payload);
        }
        let header = self.next_frame(None, usize::MAX);
        std::mem::swap(&mut self.payload, payload);
        header
    }

    /// Returns true if at least the beginning of a further frame has arrived, or the connection's end. Does not wait.
    pub fn has_more(&mut self) -> bool {
        self.header_filled > 0 || self.bytes.has_more()
    }

    /// Waits for the JSON of a greeting, from a peer that is still unknown.
    pub(crate) fn recv_greeting(&mut self, deadline: Instant) -> Result<Vec<u8>, LinkError> {
        let header = self.next_frame(Some(deadline), limits::GREETING_BYTES)?;
        let json = match header.kind {
            FrameKind::Message => Ok(std::mem::take(&mut self.payload)),
            kind => Err(LinkError::NotExpected(kind)),
        };
        self.shutdown_on_error(json)
    }

    /// Returns the first byte received. See [`ByteReader::first_byte`].
    pub(crate) fn first_byte(&self) -> Option<u8> {
        self.bytes.first_byte()
    }

    pub(crate) fn bytes(&mut self) -> &mut ByteReader {
        &mut self.bytes
    }

    /// Reads a whole frame into `self.payload`.
    fn next_frame(&mut self, deadline: Option<Instant>, max_bytes: usize) -> Result<Header, LinkError> {
        let frame = self.fill_frame(deadline, max_bytes);
        self.shutdown_on_error(frame)
    }

    fn fill_frame(&mut self, deadline: Option<Instant>, max_bytes: usize) -> Result<Header, LinkError> {
        let header = self.fill_header(deadline, max_bytes)?;
        while self.payload_filled < self.payload.len() {
            match self.bytes.read(&mut self.payload[self.payload_filled..], deadline)? {
                0 => return Err(LinkError::Truncated),
                bytes => self.payload_filled += bytes,
            }
        }
        (self.header_filled, self.frame, self.payload_filled) = (0, None, 0);
        Ok(header)
    }

    fn fill_header(&mut self, deadline: Option<Instant>, max_bytes: usize) -> Result<Header, LinkError> {
        if let Some(header) = self.frame {
            return Ok(header);
        }
        while self.header_filled < HEADER_BYTES {
            match self.bytes.read(&mut self.header[self.header_filled..], deadline)? {
                0 if self.header_filled == 0 => return Err(LinkError::Ended),
                0 => return Err(LinkError::Truncated),
                bytes => self.header_filled += bytes,
            }
        }
        let header = Header::decode(self.header)?;
        let bytes = header.payload_bytes as usize;
        if bytes > max_bytes {
            return Err(LinkError::TooMuch { bytes, max: max_bytes });
        }
        self.payload.resize(bytes, 0);
        self.payload_filled = 0;
        Ok(*self.frame.insert(header))
    }

    /// Shuts the connection down after an error other than a timeout or the peer's orderly end, because the start of
    /// the next frame is unknown then: the other half and the peer have to notice.
    fn shutdown_on_error<T>(&self, result: Result<T, LinkError>) -> Result<T, LinkError> {
        if let Err(error) = &result
            && !matches!(error, LinkError::TimedOut | LinkError::Ended)
        {
            self.shared.shutdown();
        }
        result
    }
}

/// The sending half: from this host to the peer.
#[derive(Debug)]
pub struct Writer {
    bytes: ByteWriter,
    deadline: Option<Instant>,
    shared: Arc<Shared>,
}

impl AsFd for Writer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.socket.as_fd()
    }
}

impl Writer {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { bytes: ByteWriter::new(Arc::clone(shared)), deadline: None, shared: Arc::clone(shared) }
    }

    pub(crate) fn bytes(&mut self) -> &mut ByteWriter {
        &mut self.bytes
    }

    /// Applies a rate limit to everything sent from now on.
    pub fn set_rate_limit(&mut self, limit: Option<Arc<RateLimit>>) {
        self.shared.set_limit(limit);
    }

    /// Sets a deadline for all sends from now on: they wait no longer than that for the peer or for the rate limit. A
    /// late send fails with [`LinkError::TimedOut`] and ends the connection.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Returns the deadline for sends, if there is one.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If the message is too long for a frame; or if the connection is lost or the deadline has passed, which ends it.
    pub fn send(&mut self, message: &Message) -> Result<(), LinkError> {
        let json = serde_json::to_vec(message).map_err(LinkError::Message)?;
        let header = Header::new(FrameKind::Message, json.len()).map_err(LinkError::TooLong)?;
        self.write_frame(header, &[IoSlice::new(&json)])
    }

    /// Sends a piece of device state, at most [`proto::limits::BLOB_BYTES`].
    ///
    /// # Errors
    /// If the bytes are too many for a frame; or if the connection is lost or the deadline has passed, which ends it.
    pub fn send_blob(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        let header = Header::new(FrameKind::Blob, bytes.len()).map_err(LinkError::TooLong)?;
        self.write_frame(header, &[IoSlice::new(bytes)])
    }

    /// Sends a frame whose payload is the concatenated parts. They are not copied if there is no TLS. Returns when the
    /// socket has accepted all bytes.
    ///
    /// # Errors
    /// If the parts do not have the length that the header announces; or if the connection is lost or the deadline has
    /// passed, which ends it.
    pub fn write_frame(&mut self, header: Header, parts: &[IoSlice<'_>]) -> Result<(), LinkError> {
        self.write_frame_until(header, parts, self.deadline)
    }

    pub(crate) fn write_frame_until(
        &mut self,
        header: Header,
        parts: &[IoSlice<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), LinkError> {
        let given = parts.iter().map(|part| part.len()).sum();
        let announced = header.payload_bytes as usize;
        if given != announced {
            return Err(LinkError::WrongLength { announced, given });
        }
        let header = header.encode();
        let mut all = Vec::with_capacity(parts.len() + 1);
        all.push(IoSlice::new(&header));
        all.extend_from_slice(parts);
        self.bytes.write(&all, deadline).inspect_err(|_| self.shared.shutdown())
    }

    /// Signals the peer that nothing more follows. The other direction stays open.
    ///
    /// # Errors
    /// If the connection is lost.
    pub fn finish(&mut self) -> Result<(), LinkError> {
        self.finish_until(None)
    }

    pub(crate) fn finish_until(&mut self, deadline: Option<Instant>) -> Result<(), LinkError> {
        self.bytes.finish(deadline).inspect_err(|_| self.shared.shutdown())
    }
}
