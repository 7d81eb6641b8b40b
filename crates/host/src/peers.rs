//! Connections to other agents, by the names that the configuration gives them.

use std::time::{Duration, Instant};

use link::Peer;
use link::transport::{BulkSettings, Channel, DataStream, Transport, TransportError};
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
        source: TransportError,
    },
    /// The connection was lost during the exchange.
    #[error("the connection to {host} was lost")]
    Lost {
        /// The peer.
        host: HostId,
        /// Error of the connection.
        source: TransportError,
    },
    /// The peer's message is not a valid answer.
    #[error("{0} sent an unexpected answer; use the same version of whimbrel on both hosts")]
    NoSense(HostId),
    /// No thread could be started for the connection.
    #[error("cannot start a thread for the connection")]
    Thread(#[source] std::io::Error),
}

/// Connects to a peer for messages. `address` is the one that the peer has sent, for peers that the configuration does
/// not name; the peer's certificate proves its identity in either case.
pub fn connect(
    context: &Context,
    host: &HostId,
    address: Option<&str>,
    purpose: Purpose,
) -> Result<Channel, PeerError> {
    open(context, host, address, |transport, peer, deadline| transport.control(peer, purpose, deadline))
}

/// Opens a data stream to a peer.
pub fn open_bulk(
    context: &Context,
    host: &HostId,
    purpose: Purpose,
    settings: &BulkSettings,
) -> Result<DataStream, PeerError> {
    open(context, host, None, |transport, peer, deadline| transport.bulk(peer, purpose, settings, deadline))
}

/// Opens a connection for page requests to a peer, which may read nothing for `stall`.
pub fn open_page_requests(
    context: &Context,
    host: &HostId,
    purpose: Purpose,
    stall: Duration,
) -> Result<Channel, PeerError> {
    open(context, host, None, |transport, peer, deadline| {
        transport.page_requests(peer, purpose, stall, deadline)
    })
}

fn open<T>(
    context: &Context,
    host: &HostId,
    address: Option<&str>,
    with: impl FnOnce(&dyn Transport, &Peer, Instant) -> Result<T, TransportError>,
) -> Result<T, PeerError> {
    let address = context.config.peer(host).or(address).ok_or_else(|| PeerError::Unknown(host.clone()))?;
    let peer = Peer { host: host.clone(), address: address.to_owned() };
    let deadline = Instant::now() + Duration::from_millis(context.config.timeouts.connect_ms);
    with(&*context.transport.connections, &peer, deadline)
        .map_err(|source| PeerError::Connect { host: host.clone(), source })
}
