//! Netlink messages, composed and parsed by hand: the few requests of this crate need no library.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

/// Flags of a request: it is one; the kernel confirms it; what it names is made, and must not exist; all of a table.
pub const REQUEST: u16 = 0x1;
/// See [`REQUEST`].
pub const ACKNOWLEDGE: u16 = 0x4;
/// See [`REQUEST`].
pub const CREATE: u16 = 0x400;
/// See [`REQUEST`].
pub const EXCLUSIVE: u16 = 0x200;
/// See [`REQUEST`].
pub const DUMP: u16 = 0x300;
/// Flag of a request: what is there is replaced.
pub const REPLACE: u16 = 0x100;
/// Flag of a request: what is made comes behind what is there.
pub const APPEND: u16 = 0x800;

/// Bytes of a message's header.
const HEADER_BYTES: usize = 16;
/// Bytes of an attribute's header.
const ATTRIBUTE_BYTES: usize = 4;
/// Bit of an attribute's kind: it consists of attributes.
const NESTED: u16 = 0x8000;
/// Bits of an attribute's kind that are its number.
const KIND_MASK: u16 = 0x3fff;

/// Kind of an answer: confirmation or error.
const ERROR: u16 = 2;
/// Kind of an answer: the end of a table.
const DONE: u16 = 3;

/// Longest wait for the kernel, which answers at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Largest answer that the kernel sends at once.
const ANSWER_BYTES: usize = 64 << 10;

/// Requests that are sent together.
#[derive(Debug, Default)]
pub struct Requests {
    bytes: Vec<u8>,
    count: u32,
    /// Places of the lengths of what is not complete: the request, and attributes within attributes.
    open: Vec<usize>,
}

impl Requests {
    /// Appends a request: its kind, flags, and the structure with which it begins.
    pub fn request(&mut self, kind: u16, flags: u16, fixed: &[u8]) -> &mut Self {
        self.close_all();
        self.open.push(self.bytes.len());
        self.count += 1;
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | REQUEST).to_ne_bytes());
        self.bytes.extend(self.count.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.bytes.extend(fixed);
        self.align();
        self
    }

    /// Appends the only request of another list.
    pub fn append(&mut self, other: Self) {
        self.close_all();
        self.count += 1;
        let at = self.bytes.len();
        self.bytes.extend(other.finish());
        self.bytes[at + 8..at + 12].copy_from_slice(&self.count.to_ne_bytes());
    }

    /// Appends an attribute.
    pub fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.begin(kind);
        self.bytes.extend(value);
        self.end()
    }

    /// Appends an attribute that consists of attributes which are composed already.
    pub fn nested(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.attribute(kind | NESTED, value)
    }

    /// Appends an attribute that is a text.
    pub fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        self.begin(kind);
        self.bytes.extend(value.as_bytes());
        self.bytes.push(0);
        self.end()
    }

    /// Appends an attribute that is a number in the network's order of bytes.
    pub fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    /// Begins an attribute that consists of the following ones.
    pub fn nest(&mut self, kind: u16) -> &mut Self {
        self.begin(kind | NESTED)
    }

    /// Ends the attribute that was begun last.
    pub fn end(&mut self) -> &mut Self {
        if let Some(at) = self.open.pop() {
            let bytes = (self.bytes.len() - at) as u16;
            self.bytes[at..at + 2].copy_from_slice(&bytes.to_ne_bytes());
            self.align();
        }
        self
    }

    fn begin(&mut self, kind: u16) -> &mut Self {
        self.open.push(self.bytes.len());
        self.bytes.extend([0; 2]);
        self.bytes.extend(kind.to_ne_bytes());
        self
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Completes the last request.
    fn close_all(&mut self) {
        while self.open.len() > 1 {
            self.end();
        }
        if let Some(at) = self.open.pop() {
            let bytes = (self.bytes.len() - at) as u32;
            self.bytes[at..at + 4].copy_from_slice(&bytes.to_ne_bytes());
        }
    }

    /// Returns the bytes of all requests.
    pub fn finish(mut self) -> Vec<u8> {
        self.close_all();
        self.bytes
    }

    /// Returns the number of requests.
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// A message of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    /// Kind of the message.
    pub kind: u16,
    /// Number of the request that it answers.
    pub sequence: u32,
    /// Content after the header.
    pub body: &'a [u8],
}

/// Divides what was received into messages; ends at one that is cut off.
pub fn answers(mut bytes: &[u8]) -> impl Iterator<Item = Answer<'_>> {
    std::iter::from_fn(move || {
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        let length = u32::from_ne_bytes(*header.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let sequence = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
        let body = bytes.get(HEADER_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Answer { kind, sequence, body })
    })
}

/// Divides bytes into attributes: kind and value. Ends at one that is cut off.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header: &[u8; ATTRIBUTE_BYTES] = bytes.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & KIND_MASK;
        let value = bytes.get(ATTRIBUTE_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Returns the value of the attribute with this kind.
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find_map(|(found, value)| (found == kind).then_some(value))
}

/// Returns the error in an answer of kind [`ERROR`]; none if it is a confirmation.
fn failure(body: &[u8]) -> Option<io::Error> {
    let code = i32::from_ne_bytes(*body.first_chunk()?);
    (code != 0).then(|| io::Error::from_raw_os_error(code.saturating_neg()))
}

/// Connection to a part of the kernel.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Opens a connection to netfilter, in the network namespace of this thread.
    ///
    /// # Errors
    /// If the kernel has no netlink, or this process may not open such a connection.
    pub fn netfilter() -> io::Result<Self> {
        Self::open(Some(netlink::NETFILTER))
    }

    /// Opens a connection to the devices and routes of the network namespace of this thread.
    ///
    /// # Errors
    /// As for [`netfilter`](Self::netfilter).
    pub fn route() -> io::Result<Self> {
        Self::open(None)
    }

    /// Opens a connection to parts of the kernel that are found by a name, in the network namespace of this thread.
    ///
    /// # Errors
    /// As for [`netfilter`](Self::netfilter).
    pub fn generic() -> io::Result<Self> {
        Self::open(Some(netlink::GENERIC))
    }

    /// Returns the number of the device with this name, in the network namespace of this connection.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn index_of(&self, interface: &str) -> io::Result<u32> {
        Ok(rustix::net::netdevice::name_to_index(&self.0, interface)?)
    }

    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self(socket))
    }

    /// Sends requests, and waits until the kernel has confirmed those that ask for it. After an error this connection
    /// cannot be used any more: confirmations of other requests may still arrive.
    pub fn confirm(&self, requests: Requests) -> io::Result<()> {
        let expected = confirmations(&requests.bytes);
        self.send(requests)?;
        let (mut buffer, mut confirmed) = (vec![0; ANSWER_BYTES], 0);
        while confirmed < expected {
            let bytes = self.receive(&mut buffer)?;
            for answer in answers(&buffer[..bytes]).filter(|answer| answer.kind == ERROR) {
                failure(answer.body).map_or(Ok(()), Err)?;
                confirmed += 1;
            }
        }
        Ok(())
    }

    /// Sends requests that all are to be confirmed, and returns the numbers of those that failed, with their errors.
    pub fn exchange(&self, requests: Requests) -> io::Result<Vec<(u32, io::Error)>> {
        let expected = confirmations(&requests.bytes);
        self.send(requests)?;
        let (mut buffer, mut confirmed, mut failed) = (vec![0; ANSWER_BYTES], 0, Vec::new());
        while confirmed < expected {
            let bytes = self.receive(&mut buffer)?;
            for answer in answers(&buffer[..bytes]).filter(|answer| answer.kind == ERROR) {
                failed.extend(failure(answer.body).map(|error| (answer.sequence, error)));
                confirmed += 1;
            }
        }
        Ok(failed)
    }

    /// Sends a request for a table, and passes each entry to `each`.
    ///
    /// # Errors
    /// The kernel's error for the request, or a timeout. `each` may have been called before.
    pub fn dump(&self, requests: Requests, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        self.send(requests)?;
        let mut buffer = vec![0; ANSWER_BYTES];
        loop {
            let bytes = self.receive(&mut buffer)?;
            for answer in answers(&buffer[..bytes]) {
                match answer.kind {
                    DONE => return Ok(()),
                    ERROR => return failure(answer.body).map_or(Ok(()), Err),
                    _ => each(answer.body),
                }
            }
        }
    }

    /// Sends a request for a table, and returns true if an entry is `found`. The rest is not read, so that the connection is
    /// of no use after that.
    ///
    /// # Errors
    /// The kernel's error for the request, or a timeout.
    pub fn has(self, requests: Requests, found: impl Fn(&[u8]) -> bool) -> io::Result<bool> {
        self.send(requests)?;
        let mut buffer = vec![0; ANSWER_BYTES];
        loop {
            let bytes = self.receive(&mut buffer)?;
            for answer in answers(&buffer[..bytes]) {
                match answer.kind {
                    DONE => return Ok(false),
                    ERROR => return failure(answer.body).map_or(Ok(false), Err),
                    _ if found(answer.body) => return Ok(true),
                    _ => {}
                }
            }
        }
    }

    fn send(&self, requests: Requests) -> io::Result<()> {
        let bytes = requests.finish();
        if send(&self.0, &bytes, SendFlags::empty())? == bytes.len() {
            Ok(())
        } else {
            Err(io::ErrorKind::WriteZero.into())
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match recv(&self.0, &mut *buffer, RecvFlags::empty()) {
                Ok((bytes, _)) => return Ok(bytes),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns the number of requests that are to be confirmed.
fn confirmations(requests: &[u8]) -> usize {
    let mut bytes = requests;
    let mut count = 0;
    while let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        count += usize::from(u16::from_ne_bytes([header[6], header[7]]) & ACKNOWLEDGE != 0);
        // The last one has no length yet.
        bytes = if length == 0 { &[] } else { bytes.get(length.next_multiple_of(4)..).unwrap_or_default() };
    }
    count
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_have_the_kernels_layout() {
        let mut requests = Requests::default();
        requests.request(0x10, 0, &[1, 2, 3, 4]);
        requests.request(0xa06, CREATE | ACKNOWLEDGE, &[5, 0, 0, 0]).text(1, "abc").nest(4).nest(1);
        requests.number(2, 7).attribute(3, &[9]).end().end();
        requests.number(5, 8);
        assert_eq!((requests.count(), confirmations(&requests.bytes)), (2, 1));
        let bytes = requests.finish();
        assert_eq!(bytes.len(), 20 + 16 + 4 + 8 + (4 + (4 + 8 + 8)) + 8);
        let found: Vec<_> = answers(&bytes).collect();
        assert_eq!((found[0].kind, found[0].sequence, found[0].body), (0x10, 1, &[1, 2, 3, 4][..]));
        assert_eq!((found[1].kind, found[1].sequence, found.len()), (0xa06, 2, 2));
        let body = &found[1].body[4..];
        assert_eq!(attribute(body, 1), Some(&b"abc\0"[..]));
        let nested = attribute(attribute(body, 4).unwrap(), 1).unwrap();
        assert_eq!(attribute(nested, 2), Some(&[0, 0, 0, 7][..]));
        assert_eq!(attribute(nested, 3), Some(&[9][..]));
        assert_eq!((attribute(body, 5), attribute(body, 6)), (Some(&[0, 0, 0, 8][..]), None));
    }

    #[test]
    fn errors_are_told_from_confirmations() {
        assert!(failure(&0_i32.to_ne_bytes()).is_none());
        let error = failure(&(-17_i32).to_ne_bytes()).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(failure(&i32::MIN.to_ne_bytes()).unwrap().raw_os_error(), Some(i32::MAX));
    }

    proptest! {
        #[test]
        fn any_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(answers(&bytes).count() <= bytes.len());
            prop_assert!(attributes(&bytes).count() <= bytes.len());
            confirmations(&bytes);
        }
    }
}
