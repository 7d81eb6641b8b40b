//! Connections to servers, by TCP: a message is not cut, an address cannot be forged, and a server that is away is
//! known at once.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::rand::{GetRandomFlags, getrandom};

use crate::answer::{self, UpdateResult};
use crate::change::Rrset;
use crate::config::Server;
use crate::failure::Failure;
use crate::message::{Response, TYPE_SOA, Update, query};
use crate::name::Name;
use crate::rdata::RecordType;
use crate::tsig::{Key, SignatureError};

/// Longest time for a connection, or for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(4);

/// Connection to a server.
#[derive(Debug)]
pub(crate) struct Client<'a> {
    server: Server,
    /// Key by which requests are signed, and answers verified; none for servers that only answer queries.
    key: Option<&'a Key>,
    stream: TcpStream,
}

/// Returns the time in seconds since 1970.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl<'a> Client<'a> {
    /// Connects to a server.
    pub(crate) fn connect(server: Server, key: Option<&'a Key>) -> Result<Self, Failure> {
        let unreachable = |error: io::Error| Failure::Unreachable { server, reason: error.to_string() };
        let stream = TcpStream::connect_timeout(&server.0, LONGEST_WAIT).map_err(unreachable)?;
        // A request is one write; its end must not wait for an acknowledgement.
        stream.set_nodelay(true).map_err(unreachable)?;
        Ok(Self { server, key, stream })
    }

    /// Returns the records of a name.
    pub(crate) fn records(&mut self, zone: &Name, owner: &Name, kind: RecordType) -> Result<Rrset, Failure> {
        let response = self.exchange(|id| query(id, owner, kind.code()))?;
        answer::records(&response, self.server, zone, owner, kind)
    }

    /// Returns the serial number of a zone.
    pub(crate) fn serial(&mut self, zone: &Name) -> Result<u32, Failure> {
        let response = self.exchange(|id| query(id, zone, TYPE_SOA))?;
        answer::serial(&response, self.server, zone)
    }

    /// Sends an update.
    pub(crate) fn update(&mut self, update: &Update) -> Result<UpdateResult, Failure> {
        let response = self.exchange(|id| update.encode(id))?;
        answer::of_update(&response, self.server, &update.zone)
    }

    /// Sends a request, and returns its answer if it is signed as it should be.
    fn exchange(&mut self, request: impl FnOnce(u16) -> Vec<u8>) -> Result<Response, Failure> {
        let server = self.server;
        let malformed = |reason: String| Failure::Malformed { server, reason };
        let mut number = [0; 2];
        getrandom(&mut number, GetRandomFlags::empty())
            .map_err(|error| Failure::Unreachable { server, reason: error.to_string() })?;
        let id = u16::from_be_bytes(number);
        let mut message = request(id);
        let code = self.key.map(|key| key.sign(&mut message, now_s()));
        let answer = self
            .transfer(&message)
            .map_err(|error| Failure::Unreachable { server, reason: error.to_string() })?;
        let response = Response::parse(&answer).map_err(|error| malformed(error.to_string()))?;
        if response.id != id {
            return Err(malformed("it is the answer to another request".to_owned()));
        }
        let (Some(key), Some(code)) = (self.key, code) else { return Ok(response) };
        let Some(at) = response.signature_at else {
            return Err(Failure::Unsigned { server, code: response.code });
        };
        match key.verify(&answer, at, &code, now_s()) {
            Ok(()) => Ok(response),
            Err(SignatureError::Rejected(rejection)) => Err(Failure::Key { server, rejection }),
            Err(SignatureError::Wrong) => Err(Failure::WrongSignature { server }),
            Err(SignatureError::Malformed(error)) => Err(malformed(error.to_string())),
        }
    }

    /// Sends a message, and returns the next one.
    fn transfer(&mut self, message: &[u8]) -> io::Result<Vec<u8>> {
        let too_long =
            || io::Error::new(io::ErrorKind::InvalidInput, "the name has too many records for a message");
        let length = u16::try_from(message.len()).map_err(|_| too_long())?;
        let deadline = Instant::now() + LONGEST_WAIT;
        self.stream.set_write_timeout(Some(LONGEST_WAIT))?;
        self.stream.write_all(&[&length.to_be_bytes(), message].concat())?;
        let mut length = [0; 2];
        self.receive(&mut length, deadline)?;
        let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
        self.receive(&mut answer, deadline)?;
        Ok(answer)
    }

    /// Reads until a buffer is full, or the deadline has passed.
    fn receive(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut buffer[filled..]) {
                Ok(0) => {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it has closed the connection"));
                }
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
