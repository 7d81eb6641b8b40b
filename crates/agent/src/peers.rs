//! Connections to other agents, by the names that the configuration gives them.

use std::time::{Duration, Instant};

use link::{ConnectError, Connection, Peer};
use proto::{HostId, Purpose};

use crate::context::Context;

/// Why a peer could not be talked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// The configuration does not name it.
    #[error("no host {0} in the configuration; add [hosts.{0}] with its address")]
    Unknown(HostId),
    /// It could not be connected to.
    #[error("cannot talk to {host}")]
    Connect {
        /// The peer.
        host: HostId,
        /// Why.
        source: Box<ConnectError>,
    },
    /// The connection was lost while it was being talked to.
    #[error("the connection to {host} was lost")]
    Lost {
        /// The peer.
        host: HostId,
        /// Why.
        source: link::LinkError,
    },
    /// It answered what is no answer.
    #[error("{0} gave an answer that makes no sense here; use the same version of whimbrel on both hosts")]
    NoSense(HostId),
    /// No thread could be started for the connection.
    #[error("no thread for the connection")]
    Thread(#[source] std::io::Error),
}

/// Connects to a peer. `address` is where it said that it can be reached, for peers that the configuration does not
/// name; who it is, its certificate tells in either case.
pub(crate) fn connect(
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
