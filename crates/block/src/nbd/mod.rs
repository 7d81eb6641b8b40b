//! An NBD client over a unix socket, with one request at a time.
//!
//! A running QEMU serves its disks over NBD as its guest sees them, with the changes in a dirty bitmap; `qemu-nbd`
//! serves an image of any format for writing. Neither host needs more of a disk, so that no image format is known
//! here. Structured replies are required: every server of interest has them, and only they report holes.
//!
//! The client does not pipeline requests. A caller that needs several requests in flight opens several connections,
//! which QEMU serves at the same time.

use std::io::{self, IoSlice, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod handshake;
mod wire;

use wire::{
    CHUNK_DATA, CHUNK_DONE, CHUNK_ERROR, CHUNK_HOLE, CHUNK_NONE, CHUNK_STATUS, Command, Cursor, REQUEST,
    SIMPLE_REPLY, STRUCTURED_REPLY,
};

/// Context for allocated and zero ranges: status bits [`HOLE`] and [`ZERO`].
pub const ALLOCATION: &str = "base:allocation";
/// Status bit of [`ALLOCATION`]: nothing is allocated.
pub const HOLE: u32 = 1;
/// Status bit of [`ALLOCATION`]: reads as zeros.
pub const ZERO: u32 = 2;
/// Status bit of a [`dirty_bitmap`]: written.
pub const DIRTY: u32 = 1;

/// Returns the context of a dirty bitmap, with status bit [`DIRTY`].
pub fn dirty_bitmap(name: &str) -> String {
    format!("qemu:dirty-bitmap:{name}")
}

/// Most bytes of one status request: QEMU wants less than 4 GiB, with any alignment.
const STATUS_BYTES: u64 = 1 << 31;
/// Flag of a request for writing zeros: no block is released.
const NO_HOLE: u16 = 1 << 1;
/// Most bytes of a request for writing zeros.
const ZEROES_BYTES: u64 = 1 << 30;
/// Longest text or list that is accepted from a server, in bytes: what QEMU sends at most is 1 MiB.
const REPLY_BYTES: usize = 8 << 20;

/// Error of a connection to a server or of a request.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// No server listens at the socket.
    #[error("cannot reach the NBD server at {path}", path = path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The connection failed, or the server did not answer in time.
    #[error("the NBD connection failed")]
    Lost(#[from] io::Error),
    /// The server lacks a required feature, export or context.
    #[error("the NBD server does not have {what}{message}")]
    Lacks {
        /// Description of the requirement.
        what: String,
        /// Message of the server, with a colon before it; or nothing.
        message: String,
    },
    /// The server reported an error for a request.
    #[error("the NBD server cannot {command}{message}")]
    Failed {
        /// The request.
        command: &'static str,
        /// Message of the server, with a colon before it; or nothing.
        message: String,
        /// The error as an error of the operating system.
        source: io::Error,
    },
    /// The server violates the protocol.
    #[error("the NBD server violates the protocol: {0}")]
    Protocol(&'static str),
}

impl NbdError {
    /// Returns true if the disk behind the server is full.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Failed { source, .. } if source.kind() == io::ErrorKind::StorageFull)
    }
}

/// A part of an export, and its status in the context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Range, in bytes.
    pub bytes: Range<u64>,
    /// Bits or a number, as the context defines.
    pub status: u32,
}

/// Connection to one export of a server.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    size_bytes: u64,
    /// Id of the context, chosen by the server.
    context: Option<u32>,
    cookie: u64,
}

impl Client {
    /// Opens an export; with a context, [`status`](Self::status) can be requested. Neither the connect nor a request
    /// takes longer than `timeout`.
    ///
    /// # Errors
    /// Fails if there is no such server, export or context.
    pub fn connect(
        path: &Path,
        export: &str,
        context: Option<&str>,
        timeout: Duration,
    ) -> Result<Self, NbdError> {
        let connect = |source| NbdError::Connect { path: path.to_owned(), source };
        let socket = UnixStream::connect(path).map_err(connect)?;
        socket.set_read_timeout(Some(timeout))?;
        socket.set_write_timeout(Some(timeout))?;
        let (size_bytes, context) = handshake::open(&socket, export, context)?;
        Ok(Self { socket, size_bytes, context, cookie: 0 })
    }

    /// Returns the length of the export, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Reads bytes of the export.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), NbdError> {
        self.request(Command::Read, offset, into.len() as u64, &[])?;
        let mut got = 0;
        let whole = into.len() as u64;
        let mut place = |at: u64, len: u64| -> Result<Range<usize>, NbdError> {
            let start = at.checked_sub(offset).filter(|start| start + len <= whole);
            let start = start.ok_or(NbdError::Protocol("data that was not requested"))? as usize;
            got += len;
            Ok(start..start + len as usize)
        };
        self.replies(Command::Read, |socket, chunk| match chunk.kind {
            CHUNK_DATA if chunk.bytes >= 8 => {
                let place = place(read_u64(socket)?, u64::from(chunk.bytes) - 8)?;
                Ok(socket.read_exact(&mut into[place])?)
            }
            CHUNK_HOLE if chunk.bytes == 12 => {
                let at = read_u64(socket)?;
                let mut len = [0; 4];
                socket.read_exact(&mut len)?;
                into[place(at, u32::from_be_bytes(len).into())?].fill(0);
                Ok(())
            }
            _ => Err(NbdError::Protocol("an answer that does not match a read")),
        })?;
        if got == whole { Ok(()) } else { Err(NbdError::Protocol("a part of the data is missing")) }
    }

    /// Writes bytes. They are on stable storage after the next [`flush`](Self::flush).
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), NbdError> {
        self.request(Command::Write, offset, data.len() as u64, data)?;
        self.done(Command::Write)
    }

    /// Makes a range read as zeros; blocks that were allocated there may be released.
    pub fn write_zeroes(&mut self, range: Range<u64>) -> Result<(), NbdError> {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(ZEROES_BYTES);
            self.request(Command::WriteZeroes, at, len, &[])?;
            self.done(Command::WriteZeroes)?;
            at += len;
        }
        Ok(())
    }

    /// Writes zeros to a range, and releases no block.
    pub fn allocate_zeroes(&mut self, range: Range<u64>) -> Result<(), NbdError> {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(ZEROES_BYTES);
            self.request_with(NO_HOLE, Command::WriteZeroes, at, len, &[])?;
            self.done(Command::WriteZeroes)?;
            at += len;
        }
        Ok(())
    }

    /// Flushes all writes, of any connection, to stable storage.
    pub fn flush(&mut self) -> Result<(), NbdError> {
        self.request(Command::Flush, 0, 0, &[])?;
        self.done(Command::Flush)
    }

    /// Returns the status of a range in the context: extents without gaps, in order.
    pub fn status(&mut self, range: Range<u64>) -> Result<Vec<Extent>, NbdError> {
        let context = self.context.ok_or(NbdError::Protocol("no context was agreed on"))?;
        let mut found: Vec<Extent> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            self.request(Command::BlockStatus, at, (range.end - at).min(STATUS_BYTES), &[])?;
            let begin = at;
            self.replies(Command::BlockStatus, |socket, chunk| {
                if chunk.kind != CHUNK_STATUS {
                    return Err(NbdError::Protocol("an answer that does not match a status request"));
                }
                let payload = read_payload(socket, chunk.bytes)?;
                let mut fields = Cursor(&payload);
                if fields.u32() != Some(context) {
                    return Err(NbdError::Protocol("status of a different context"));
                }
                while let (Some(len), Some(status)) = (fields.u32(), fields.u32()) {
                    // The last one may end beyond the requested range.
                    let end = (at + u64::from(len)).min(range.end);
                    match found.last_mut() {
                        Some(last) if last.status == status => last.bytes.end = end,
                        _ if at < end => found.push(Extent { bytes: at..end, status }),
                        _ => {}
                    }
                    at = end;
                }
                Ok(())
            })?;
            if at == begin {
                return Err(NbdError::Protocol("an empty status"));
            }
        }
        Ok(found)
    }

    fn request(&mut self, command: Command, offset: u64, len: u64, data: &[u8]) -> Result<(), NbdError> {
        self.request_with(0, command, offset, len, data)
    }

    fn request_with(
        &mut self,
        flags: u16,
        command: Command,
        offset: u64,
        len: u64,
        data: &[u8],
    ) -> Result<(), NbdError> {
        let len = u32::try_from(len).map_err(|_| NbdError::Protocol("a request that is too large"))?;
        self.cookie += 1;
        let mut header = [0; 28];
        header[..4].copy_from_slice(&REQUEST.to_be_bytes());
        header[4..6].copy_from_slice(&flags.to_be_bytes());
        header[6..8].copy_from_slice(&(command as u16).to_be_bytes());
        header[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        header[16..24].copy_from_slice(&offset.to_be_bytes());
        header[24..].copy_from_slice(&len.to_be_bytes());
        let mut parts = [IoSlice::new(&header), IoSlice::new(data)];
        let mut rest = &mut parts[..];
        while !rest.is_empty() {
            match self.socket.write_vectored(rest) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(sent) => IoSlice::advance_slices(&mut rest, sent),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn done(&mut self, command: Command) -> Result<(), NbdError> {
        self.replies(command, |_, _| Err(NbdError::Protocol("an answer with data to a request without data")))
    }

    /// Processes all chunks of the reply to the last request.
    fn replies(
        &mut self,
        command: Command,
        mut take: impl FnMut(&mut UnixStream, &Chunk) -> Result<(), NbdError>,
    ) -> Result<(), NbdError> {
        let mut failure = None;
        loop {
            let chunk = Chunk::receive(&mut self.socket, self.cookie)?;
            if let Some((errno, message)) = chunk.error(&mut self.socket)? {
                let source = io::Error::from_raw_os_error(errno);
                failure.get_or_insert(NbdError::Failed { command: command.name(), message, source });
            } else if chunk.kind != CHUNK_NONE {
                take(&mut self.socket, &chunk)?;
            }
            if chunk.last {
                return failure.map_or(Ok(()), Err);
            }
        }
    }
}

impl Drop for Client {
    /// Sends a disconnect request, so that the server does not wait for further ones.
    fn drop(&mut self) {
        let _ = self.request(Command::Disconnect, 0, 0, &[]);
    }
}

/// Header of one chunk of a reply; its payload is not read yet.
#[derive(Debug)]
struct Chunk {
    kind: u16,
    bytes: u32,
    last: bool,
    /// The error of a simple reply.
    errno: u32,
}

impl Chunk {
    fn receive(socket: &mut UnixStream, cookie: u64) -> Result<Self, NbdError> {
        let mut head = [0; 16];
        socket.read_exact(&mut head)?;
        let mut fields = Cursor(&head);
        let magic = fields.u32();
        let chunk = if magic == Some(SIMPLE_REPLY) {
            let errno = fields.u32().unwrap_or_default();
            Self { kind: CHUNK_NONE, bytes: 0, last: true, errno }
        } else if magic == Some(STRUCTURED_REPLY) {
            let flags = fields.u16().unwrap_or_default();
            let kind = fields.u16().unwrap_or_default();
            Self { kind, bytes: 0, last: flags & CHUNK_DONE != 0, errno: 0 }
        } else {
            return Err(NbdError::Protocol("an invalid answer"));
        };
        if fields.u64() != Some(cookie) {
            return Err(NbdError::Protocol("an answer to a different request"));
        }
        if magic == Some(SIMPLE_REPLY) {
            return Ok(chunk);
        }
        let mut bytes = [0; 4];
        socket.read_exact(&mut bytes)?;
        Ok(Self { bytes: u32::from_be_bytes(bytes), ..chunk })
    }

    /// Reads the error of the chunk, if it is one: errno and message.
    fn error(&self, socket: &mut UnixStream) -> Result<Option<(i32, String)>, NbdError> {
        if self.errno != 0 {
            return Ok(Some((self.errno as i32, String::new())));
        }
        if self.kind < CHUNK_ERROR {
            return Ok(None);
        }
        let payload = read_payload(socket, self.bytes)?;
        let mut fields = Cursor(&payload);
        let errno = fields.u32().unwrap_or_default() as i32;
        let len = fields.u16().unwrap_or_default();
        let text = fields.bytes(len.into()).unwrap_or_default();
        Ok(Some((errno, message_suffix(text))))
    }
}

/// Formats a server's message as the end of a sentence.
fn message_suffix(text: &[u8]) -> String {
    if text.is_empty() { String::new() } else { format!(": {}", String::from_utf8_lossy(text)) }
}

fn read_u64(socket: &mut UnixStream) -> Result<u64, NbdError> {
    let mut bytes = [0; 8];
    socket.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}

fn read_payload(mut socket: &UnixStream, bytes: u32) -> Result<Vec<u8>, NbdError> {
    if bytes as usize > REPLY_BYTES {
        return Err(NbdError::Protocol("an answer that is too large"));
    }
    let mut payload = vec![0; bytes as usize];
    socket.read_exact(&mut payload)?;
    Ok(payload)
}
