//! Identity and settings of this agent, which both connecting and listening need.

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
    /// Time limit for the greeting of a peer that has connected to this agent.
    pub handshake: Duration,
    /// Time without progress after which an open connection counts as lost. Idle connections are probed in whole
    /// seconds, so a value below a second does not help there. A peer that reads nothing for that long while there is
    /// something to send counts as lost, too.
    pub silence: Duration,
    /// Maximum number of connections in their handshake at once, half of them from one address. More wait in the
    /// system's queue.
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
    /// Name of the host that is expected at the address.
    pub host: HostId,
    /// Network address: `host:port`.
    pub address: String,
}

impl Endpoint {
    /// Creates an endpoint with the default settings.
    pub fn new(host: HostId, security: Security) -> Self {
        Self { host, security, settings: Settings::default(), versions: Versions::OURS }
    }

    /// Replaces the times and counts.
    #[must_use]
    pub fn with_settings(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    /// Restricts the versions of the protocol, for example to those of an older release.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn with_versions(self, versions: Versions) -> Self {
        Self { versions, ..self }
    }

    /// This host's name.
    pub fn host(&self) -> &HostId {
        &self.host
    }

    /// Connects to a peer and greets. The deadline covers everything except the resolver, which has its own.
    ///
    /// # Errors
    /// If the address cannot be resolved, no program answers there before the deadline, or the handshake fails: another
    /// host answers, a certificate is not valid, no version is common, or the peer refuses.
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

/// Returns all addresses of `host:port`, at least one.
pub(crate) fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    let addresses: Vec<_> = address.to_socket_addrs()?.collect();
    if addresses.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(addresses) }
}

/// Connects to the first address that answers.
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
