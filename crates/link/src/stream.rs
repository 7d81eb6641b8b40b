//! Bytes in order, with TLS or without, in two halves for two threads.
//!
//! # Splitting a TLS session
//!
//! A TLS session is one state for both directions. It is kept under a lock that is held for work only, never while
//! waiting for the network. The reading half receives into its own buffer without the lock and locks to decrypt. The
//! writing half locks to encrypt and to offer records to the socket, which accepts as much as fits and never blocks.
//!
//! When nothing fits, the lock is released before waiting. So two agents that both write and whose buffers are both
//! full still read, and neither direction waits for more than the other's encryption of one piece.
//!
//! Records leave in the order of encryption, because they are taken from the session's own queue under the lock. Key
//! updates are rustls' work: answers to them are put into the queue and sent with the next write.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustls::IoState;
use rustls::pki_types::CertificateDer;

use crate::error::LinkError;
use crate::rate_limit::RateLimit;
use crate::socket::Socket;

/// Maximum number of bytes that are encrypted under one lock, and sent between two checks of the rate limit.
const PIECE_BYTES: usize = 256 << 10;

/// Maximum number of bytes received at once if they are not received in place.
const INPUT_BYTES: usize = 256 << 10;

/// Maximum number of further bytes received along with bytes that are received in place: the next header and more.
/// Small, because they have to be copied.
const AHEAD_BYTES: usize = 4 << 10;

/// Maximum number of parts of one system call (`IOV_MAX`).
const MAX_PARTS: usize = 1024;

/// TLS adds a header, a type and a tag to each record of at most 16 KiB.
const RECORD_BYTES: u64 = 16 << 10;
const RECORD_OVERHEAD_BYTES: u64 = 22;

/// State that the two halves share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) socket: Socket,
    tls: Option<Mutex<rustls::Connection>>,
    limit: Mutex<Option<Arc<RateLimit>>>,
}

impl Shared {
    pub(crate) fn new(socket: Socket, tls: Option<rustls::Connection>) -> Self {
        Self { socket, tls: tls.map(Mutex::new), limit: Mutex::default() }
    }

    /// Ends everything at once; threads that wait in either half return.
    pub(crate) fn shutdown(&self) {
        self.socket.shutdown();
        if let Some(limit) = self.limit() {
            limit.wake();
        }
    }

    /// Returns the certificate that the peer has shown, once the session is negotiated.
    pub(crate) fn peer_certificate(&self) -> Option<CertificateDer<'static>> {
        let session = lock(self.tls.as_ref()?);
        session.peer_certificates()?.first().map(|certificate| certificate.clone().into_owned())
    }

    pub(crate) fn set_limit(&self, limit: Option<Arc<RateLimit>>) {
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner) = limit;
    }

    fn limit(&self) -> Option<Arc<RateLimit>> {
        self.limit.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn lock(tls: &Mutex<rustls::Connection>) -> MutexGuard<'_, rustls::Connection> {
    tls.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Negotiates TLS, if it is used. Bytes received after the negotiation stay in the reader.
pub(crate) fn negotiate(
    reader: &mut ByteReader,
    writer: &mut ByteWriter,
    deadline: Instant,
) -> Result<(), LinkError> {
    let shared = Arc::clone(&reader.shared);
    let Some(tls) = &shared.tls else { return Ok(()) };
    loop {
        writer.flush(tls, Some(deadline))?;
        if !lock(tls).is_handshaking() {
            return Ok(());
        }
        if reader.start == reader.end && reader.receive(Some(deadline))? == 0 {
            return Err(LinkError::Truncated);
        }
        if reader.decrypt(&mut lock(tls))?.peer_has_closed() {
            return Err(LinkError::Ended);
        }
    }
}

/// The reading half.
#[derive(Debug)]
pub(crate) struct ByteReader {
    shared: Arc<Shared>,
    /// Received and not yet used: `input[start..end]`.
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// The very first byte, which shows which protocol the peer speaks.
    first: Option<u8>,
}

impl ByteReader {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, input: vec![0; INPUT_BYTES].into_boxed_slice(), start: 0, end: 0, first: None }
    }

    pub(crate) fn first_byte(&self) -> Option<u8> {
        self.first
    }

    /// Reads at least one byte; 0 means that the peer has ended the connection.
    pub(crate) fn read(&mut self, into: &mut [u8], deadline: Option<Instant>) -> Result<usize, LinkError> {
        let shared = Arc::clone(&self.shared);
        match &shared.tls {
            None => self.read_plain(into, deadline),
            Some(tls) => self.read_tls(tls, into, deadline),
        }
    }

    /// Returns true if a read would not wait: at least a byte is there, or the connection's end, or an error.
    pub(crate) fn has_more(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let Some(tls) = &shared.tls else { return self.start < self.end || shared.socket.is_ready() };
        loop {
            let mut session = lock(tls);
            // The read that follows reports an error again.
            let nothing = |state: IoState| state.plaintext_bytes_to_read() == 0 && !state.peer_has_closed();
            if !session.process_new_packets().is_ok_and(nothing) {
                return true;
            }
            if self.start < self.end {
                if self.decrypt(&mut session).is_err() {
                    return true;
                }
                continue;
            }
            drop(session);
            if !shared.socket.is_ready() {
                return false;
            }
            if shared.socket.has_failed() || !self.receive(None).is_ok_and(|bytes| bytes > 0) {
                return true;
            }
        }
    }

    fn read_plain(&mut self, into: &mut [u8], deadline: Option<Instant>) -> Result<usize, LinkError> {
        if self.start == self.end {
            let ahead = &mut self.input[..AHEAD_BYTES];
            let mut parts = [IoSliceMut::new(&mut *into), IoSliceMut::new(ahead)];
            let bytes = self.shared.socket.recv_parts(&mut parts, deadline)?;
            let in_place = bytes.min(into.len());
            (self.start, self.end) = (0, bytes - in_place);
            self.first = self.first.or(into[..in_place].first().copied());
            return Ok(in_place);
        }
        let bytes = into.len().min(self.end - self.start);
        into[..bytes].copy_from_slice(&self.input[self.start..self.start + bytes]);
        self.start += bytes;
        Ok(bytes)
    }

    fn read_tls(
        &mut self,
        tls: &Mutex<rustls::Connection>,
        into: &mut [u8],
        deadline: Option<Instant>,
    ) -> Result<usize, LinkError> {
        loop {
            let mut session = lock(tls);
            let mut filled = 0;
            loop {
                match session.reader().read(&mut into[filled..]) {
                    // The peer's closing notice, or `into` is full.
                    Ok(0) => return Ok(filled),
                    Ok(bytes) => filled += bytes,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // An end without a notice. The protocol draws no conclusion from either.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(filled),
                    Err(error) => return Err(unwrap_link(error)),
                }
                if filled == into.len() || self.start == self.end {
                    break;
                }
                self.decrypt(&mut session)?;
            }
            drop(session);
            if filled > 0 {
                return Ok(filled);
            }
            if self.receive(deadline)? == 0 {
                return Ok(0);
            }
        }
    }

    /// Feeds the session some of the input. Called only when all bytes decrypted before have been consumed.
    ///
    /// After the peer's closing notice the session accepts no more input. Bytes after such a notice are dropped, or
    /// callers would offer them again and again.
    fn decrypt(&mut self, session: &mut rustls::Connection) -> Result<IoState, LinkError> {
        let mut input = &self.input[self.start..self.end];
        let taken = session.read_tls(&mut input).map_err(LinkError::Lost)?;
        self.start = if taken == 0 { self.end } else { self.end - input.len() };
        session.process_new_packets().map_err(|error| {
            // The alert that informs the peer of the reason, if the socket accepts it.
            let _ = session.write_tls(&mut Outlet(&self.shared.socket));
            LinkError::Tls(error)
        })
    }

    fn receive(&mut self, deadline: Option<Instant>) -> Result<usize, LinkError> {
        let bytes = self.shared.socket.recv(&mut self.input, deadline)?;
        (self.start, self.end) = (0, bytes);
        self.first = self.first.or(self.input[..bytes].first().copied());
        Ok(bytes)
    }
}

/// The writing half.
#[derive(Debug)]
pub(crate) struct ByteWriter {
    shared: Arc<Shared>,
}

impl ByteWriter {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Sends all of the parts, one after the other. They are not copied if there is no TLS.
    pub(crate) fn write(
        &mut self,
        parts: &[IoSlice<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), LinkError> {
        let mut rest = Parts { parts, offset: 0 };
        let mut piece = Vec::with_capacity(parts.len().min(MAX_PARTS));
        loop {
            let bytes = rest.take(&mut piece);
            if bytes == 0 {
                return Ok(());
            }
            self.wait_for_rate(bytes, deadline)?;
            match &self.shared.tls {
                None => self.write_plain(&mut piece, deadline)?,
                Some(tls) => self.write_tls(tls, &mut piece, deadline)?,
            }
        }
    }

    /// Signals the peer that nothing more follows.
    pub(crate) fn finish(&mut self, deadline: Option<Instant>) -> Result<(), LinkError> {
        if let Some(tls) = &self.shared.tls {
            lock(tls).send_close_notify();
            self.flush(tls, deadline)?;
        }
        self.shared.socket.finish();
        Ok(())
    }

    fn wait_for_rate(&self, bytes: usize, deadline: Option<Instant>) -> Result<(), LinkError> {
        let Some(limit) = self.shared.limit() else { return Ok(()) };
        let bytes = bytes as u64;
        let records = if self.shared.tls.is_some() { bytes.div_ceil(RECORD_BYTES) } else { 0 };
        limit.take_or_cancel(bytes + records * RECORD_OVERHEAD_BYTES, self.shared.socket.closed(), deadline)
    }

    fn write_plain(&self, piece: &mut [IoSlice<'_>], deadline: Option<Instant>) -> Result<(), LinkError> {
        let mut rest = piece;
        while !rest.is_empty() {
            let sent = self.shared.socket.try_send(rest)?;
            if sent == 0 {
                self.shared.socket.wait_to_send(deadline)?;
            }
            IoSlice::advance_slices(&mut rest, sent);
        }
        Ok(())
    }

    fn write_tls(
        &self,
        tls: &Mutex<rustls::Connection>,
        piece: &mut [IoSlice<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), LinkError> {
        let mut rest = piece;
        while !rest.is_empty() {
            let taken = lock(tls).writer().write_vectored(rest).map_err(unwrap_link)?;
            IoSlice::advance_slices(&mut rest, taken);
            self.flush(tls, deadline)?;
        }
        Ok(())
    }

    fn flush(&self, tls: &Mutex<rustls::Connection>, deadline: Option<Instant>) -> Result<(), LinkError> {
        loop {
            let mut session = lock(tls);
            if !session.wants_write() {
                return Ok(());
            }
            match session.write_tls(&mut Outlet(&self.shared.socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    drop(session);
                    self.shared.socket.wait_to_send(deadline)?;
                }
                Err(error) => return Err(unwrap_link(error)),
            }
        }
    }
}

/// The socket as rustls writes to it: accepts as much as fits, never waits.
struct Outlet<'a>(&'a Socket);

impl Write for Outlet<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.0.try_send(parts) {
            Ok(0) => Err(io::ErrorKind::WouldBlock.into()),
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Recovers the error that passed through rustls, or originated there, as an I/O error.
fn unwrap_link(error: io::Error) -> LinkError {
    match error.downcast::<LinkError>() {
        Ok(error) => error,
        Err(error) => error.downcast::<rustls::Error>().map_or_else(LinkError::Lost, LinkError::Tls),
    }
}

/// A list of parts from which pieces are cut.
struct Parts<'a> {
    parts: &'a [IoSlice<'a>],
    /// Bytes of the first part that are already consumed.
    offset: usize,
}

impl<'a> Parts<'a> {
    /// Puts the next piece into `piece` and returns its length in bytes.
    fn take(&mut self, piece: &mut Vec<IoSlice<'a>>) -> usize {
        piece.clear();
        let mut bytes = 0;
        while let [first, rest @ ..] = self.parts
            && bytes < PIECE_BYTES
            && piece.len() < MAX_PARTS
        {
            let first: &'a [u8] = &first[self.offset..];
            let part = &first[..first.len().min(PIECE_BYTES - bytes)];
            bytes += part.len();
            if !part.is_empty() {
                piece.push(IoSlice::new(part));
            }
            if part.len() == first.len() {
                (self.parts, self.offset) = (rest, 0);
            } else {
                self.offset += part.len();
            }
        }
        bytes
    }
}
