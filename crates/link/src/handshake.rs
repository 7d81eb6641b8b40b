//! From a connected socket to an open connection: TLS or not, then `Hello` and `Welcome`.
//!
//! The first byte alone shows which protocol the peer speaks: a TLS handshake begins with 22, an alert with 21, a plain
//! `Hello` or `Welcome` with the kind of its frame, 1. So that both agents can report the fault, an agent answers a
//! peer of the other sort with a plain `Welcome::Refused`, whose first byte is enough for a TLS client.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::frame::{FrameKind, Header};
use proto::message::{Hello, Welcome};
use proto::{HostId, Purpose, Versions};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::{Connection, Reader, Writer};
use crate::error::{HandshakeError, LinkError, quoted};
use crate::identity::{Security, check_name, peer_fault};
use crate::socket::Socket;
use crate::stream::{Shared, negotiate};

const TLS_ALERT: u8 = 21;
const TLS_HANDSHAKE: u8 = 22;
const PLAIN_GREETING: u8 = FrameKind::Message as u8;

/// Maximum time to wait until the peer has read the reason for which it was refused.
const LINGER: Duration = Duration::from_secs(1);

/// Runs the connecting side of the handshake, up to the open connection.
pub(crate) fn connect(
    socket: Socket,
    security: &Security,
    host: &HostId,
    peer: &HostId,
    versions: Versions,
    purpose: Purpose,
    deadline: Instant,
) -> Result<Connection, HandshakeError> {
    let session = match security {
        Security::Plain => None,
        Security::Tls(identity) => Some(identity.client(peer)?),
    };
    let hello = Hello { oldest: versions.oldest, newest: versions.newest, host: host.clone(), purpose };
    let mut greeting = Greeting::new(socket, session, deadline);
    greeting.negotiate(peer)?;
    greeting.send(&hello)?;
    match greeting.receive()? {
        Welcome::Refused { reason } => Err(HandshakeError::Refused { reason }),
        Welcome::Accepted { host: found, .. } if found != *peer => {
            Err(HandshakeError::WrongHost { expected: peer.clone(), found })
        }
        Welcome::Accepted { version, .. } if !versions.contains(version) => Err(HandshakeError::Version {
            ours: versions,
            theirs: Versions { oldest: version, newest: version },
        }),
        Welcome::Accepted { version, .. } => Ok(greeting.open(peer.clone(), version)),
    }
}

/// Runs the answering side of the handshake, up to the checked `Hello` and the version that both speak. On an error
/// that the peer can be informed of, it has been informed when this returns.
pub(crate) fn answer(
    socket: Socket,
    security: &Security,
    versions: Versions,
    deadline: Instant,
) -> Result<(Greeting, Hello, u16), HandshakeError> {
    let first = socket.peek(deadline)?.ok_or(HandshakeError::Link(LinkError::Ended))?;
    let session = match (security, first) {
        (Security::Plain, PLAIN_GREETING) => None,
        (Security::Tls(identity), TLS_HANDSHAKE) => Some(identity.server()?),
        (Security::Tls(_), PLAIN_GREETING) => {
            return Err(Greeting::new(socket, None, deadline).refuse_with(HandshakeError::PeerIsPlain));
        }
        (Security::Plain, TLS_HANDSHAKE) => {
            return Err(Greeting::new(socket, None, deadline).refuse_with(HandshakeError::PeerIsTls));
        }
        (_, other) => return Err(HandshakeError::NotAnAgent(other)),
    };
    let mut greeting = Greeting::new(socket, session, deadline);
    greeting.negotiate_as_server()?;
    let hello: Hello = greeting.receive()?;
    if let Some(certificate) = greeting.shared.peer_certificate()
        && let Err(error) = check_name(&certificate, &hello.host)
    {
        return Err(greeting.refuse_with(error));
    }
    let theirs = Versions { oldest: hello.oldest, newest: hello.newest };
    match versions.agree(theirs) {
        Some(version) => Ok((greeting, hello, version)),
        None => Err(greeting.refuse_with(HandshakeError::Version { ours: versions, theirs })),
    }
}

/// A connection on which only the greetings may be exchanged.
#[derive(Debug)]
pub(crate) struct Greeting {
    shared: Arc<Shared>,
    reader: Reader,
    writer: Writer,
    deadline: Instant,
}

impl Greeting {
    fn new(socket: Socket, session: Option<rustls::Connection>, deadline: Instant) -> Self {
        let shared = Arc::new(Shared::new(socket, session));
        Self { reader: Reader::new(&shared), writer: Writer::new(&shared), shared, deadline }
    }

    /// Negotiates TLS as the connecting side. On failure it checks the first byte received, to find a peer without TLS.
    fn negotiate(&mut self, peer: &HostId) -> Result<(), HandshakeError> {
        self.run_tls().map_err(|error| match error {
            LinkError::Tls(source) => match self.reader.first_byte() {
                Some(PLAIN_GREETING) => HandshakeError::PeerIsPlain,
                Some(TLS_ALERT | TLS_HANDSHAKE) | None => peer_fault(source, peer),
                Some(other) => HandshakeError::NotAnAgent(other),
            },
            other => other.into(),
        })
    }

    fn negotiate_as_server(&mut self) -> Result<(), HandshakeError> {
        Ok(self.run_tls()?)
    }

    fn run_tls(&mut self) -> Result<(), LinkError> {
        negotiate(self.reader.bytes(), self.writer.bytes(), self.deadline).inspect_err(|error| {
            // An alert is on its way. If the socket were closed now with unread data in it, the alert could be lost.
            if matches!(error, LinkError::Tls(_)) {
                self.linger();
            }
        })
    }

    fn send(&mut self, greeting: &impl Serialize) -> Result<(), HandshakeError> {
        let json = serde_json::to_vec(greeting).map_err(HandshakeError::Greeting)?;
        let header = Header::new(FrameKind::Message, json.len()).map_err(LinkError::TooLong)?;
        Ok(self.writer.write_frame_until(header, &[IoSlice::new(&json)], Some(self.deadline))?)
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<T, HandshakeError> {
        let json = self.reader.recv_greeting(self.deadline).map_err(|error| {
            match (&error, self.reader.first_byte()) {
                // Without TLS this is the first byte received.
                (LinkError::Header(_), Some(TLS_ALERT | TLS_HANDSHAKE)) => HandshakeError::PeerIsTls,
                (LinkError::Header(_), Some(other)) if other != PLAIN_GREETING => {
                    HandshakeError::NotAnAgent(other)
                }
                _ => error.into(),
            }
        })?;
        serde_json::from_slice(&json).map_err(HandshakeError::Greeting)
    }

    /// Sends the peer the reason for which it is refused, and returns the error.
    fn refuse_with(mut self, error: HandshakeError) -> HandshakeError {
        self.refuse(refusal(&error));
        error
    }

    /// Accepts the peer. The connection may carry everything from now on.
    pub(crate) fn accept(
        mut self,
        host: &HostId,
        peer: HostId,
        version: u16,
    ) -> Result<Connection, HandshakeError> {
        self.send(&Welcome::Accepted { version, host: host.clone() })?;
        Ok(self.open(peer, version))
    }

    /// Refuses the peer, and waits a moment for it to read the reason. No result: whether the peer read it does not
    /// matter.
    pub(crate) fn refuse(&mut self, reason: String) {
        let _ = self.send(&Welcome::Refused { reason });
        self.linger();
    }

    fn linger(&self) {
        let deadline = self.deadline.min(Instant::now() + LINGER);
        self.shared.socket.finish();
        let mut scrap = [0; 4096];
        // The deadline also ends the loop for a peer that never stops sending.
        while Instant::now() < deadline
            && matches!(self.shared.socket.recv(&mut scrap, Some(deadline)), Ok(bytes) if bytes > 0)
        {}
    }

    fn open(self, peer: HostId, version: u16) -> Connection {
        Connection::new(&self.shared, self.reader, self.writer, peer, version)
    }
}

/// Returns the text that the peer receives, in words for its user.
fn refusal(error: &HandshakeError) -> String {
    match error {
        HandshakeError::PeerIsPlain => "it requires TLS, and this connection does not use it: give both \
                                        agents certificates, or configure both for plain connections"
            .to_owned(),
        HandshakeError::Version { ours, theirs } => format!(
            "it supports {ours} of the protocol and was offered {theirs}: install releases of Whimbrel on \
             both hosts that have a version in common"
        ),
        HandshakeError::WrongName { host, presented } => format!(
            "the certificate that it received is for {}, not for '{host}', the name of this agent",
            quoted(presented)
        ),
        other => other.to_string(),
    }
}
