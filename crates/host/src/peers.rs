//! Connections to other agents, by the names that the configuration gives them.

use std::time::{Duration, Instant};

use link::{ConnectError, Connection, Peer};
use proto::{HostId, Purpose};

use crate::Context;

/// Reason for the failure of a request to a peer.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The configuration does not name the host.
    #[error("no host {0} in the configuration; add [hosts.{0}] with its address")]
    Unknown(HostId),
    /// The connection could not be made.
    #[error("cannot communicate with {host}")]
    Connect {
        /// The peer.
        host: HostId,
        /// Error of the connection.
        source: Box<ConnectError>,
    },
    /// The connection was lost during the exchange.
    #[error("the connection to {host} was lost")]
    Lost {
        /// The peer.
        host: HostId,
        /// Error of the connection.
        source: link::LinkError,
    },
    /// The peer's message is not a valid answer.
    #[error("{0} sent an unexpected answer; use the same version of whimbrel on both hosts")]
    NoSense(HostId),
    /// No thread could be started for the connection.
    #[error("cannot start a thread for the connection")]
    Thread(#[source] std::io::Error),
}

/// Connects to a peer. `address` is the one that the peer has sent, for peers that the configuration does not name; the
/// peer's certificate proves its identity in either case.
pub fn connect(
    context: &Context,
    host: &HostId,
    address: Option<&str>,
    purpose: Purpose,
) -> Result<Connection, PeerError> {
    let address = context.config.peer(host).or(address).ok_or_else(|| PeerError::Unknown(host.clone()))?;
    let peer = Peer { host: host.clone(), address: address.to_owned() };
    let deadline = Instant::now() + Duration::from_millis(context.config.timeouts.connect_ms);
    context
        .endpoint
        .connect(&peer, purpose, deadline)
        .map_err(|source| PeerError::Connect { host: host.clone(), source: Box::new(source) })
}
