//! Who we are and how we speak: what both connecting and listening need to know.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use proto::{HostId, Purpose, Versions};

use crate::connection::Connection;
use crate::error::ConnectError;
use crate::handshake;
use crate::identity::Security;
use crate::socket::Socket;

/// One agent, as it appears to its peers.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub(crate) host: HostId,
    pub(crate) security: Security,
    pub(crate) settings: Settings,
    pub(crate) versions: Versions,
}

/// Times and counts of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long a peer that has connected to us may take until it has greeted.
    pub handshake: Duration,
    /// How long nothing may get through on an open connection before it is lost. Idle connections are probed in whole
    /// seconds, so that less than a second does not help there. A peer that takes nothing for that long while there is
    /// something to send counts as lost, too.
    pub silence: Duration,
    /// How many connections may be in their handshake at once, half of them from one address. More wait in the system's
    /// queue.
    pub handshakes: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(5), silence: Duration::from_secs(5), handshakes: 64 }
    }
}

/// An agent to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Who is expected there.
    pub host: HostId,
    /// Where: `host:port`.
    pub address: String,
}

impl Endpoint {
    /// An agent with the default settings.
    pub fn new(host: HostId, security: Security) -> Self {
        Self { host, security, settings: Settings::default(), versions: Versions::OURS }
    }

    /// The same with other times and counts.
    #[must_use]
    pub fn with_settings(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    /// The same with fewer versions of the protocol, such as an older release speaks.
    #[must_use]
    pub fn with_versions(self, versions: Versions) -> Self {
        Self { versions, ..self }
    }

    /// This host's name.
    pub fn host(&self) -> &HostId {
        &self.host
    }

    /// Connects to a peer and greets. The deadline holds for all of it except the resolver, which has its own.
    pub fn connect(
        &self,
        peer: &Peer,
        purpose: Purpose,
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        let unreachable = |source| ConnectError::Unreachable {
            host: peer.host.clone(),
            address: peer.address.clone(),
            source,
        };
        let addresses = resolve(&peer.address)
            .map_err(|source| ConnectError::Resolve { address: peer.address.clone(), source })?;
        let stream = dial(&addresses, deadline).map_err(unreachable)?;
        let socket = Socket::new(stream, self.settings.silence).map_err(unreachable)?;
        handshake::connect(socket, &self.security, &self.host, &peer.host, self.versions, purpose, deadline)
            .map_err(|source| ConnectError::Handshake {
                host: peer.host.clone(),
                address: peer.address.clone(),
                source,
            })
    }
}

/// All addresses of `host:port`, at least one.
pub(crate) fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    let addresses: Vec<_> = address.to_socket_addrs()?.collect();
    if addresses.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(addresses) }
}

/// The first address that answers.
fn dial(addresses: &[SocketAddr], deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::ErrorKind::TimedOut.into();
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
