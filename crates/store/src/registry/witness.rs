//! An ownership registry at another agent: the client and the server.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::handover::registry::RegistryAnswer as Answer;
use link::{ConnectedPeer, Connection, Endpoint, Incoming, LinkError, Peer};
use proto::message::{Message, RegistryReply, RegistryRequest};
use proto::{HostId, Purpose};

use super::Registry;
use super::sqlite::{RegistryError, SqliteRegistry};
use api::with_causes;

/// Idle time after which a connection is tested with a ping before a request is sent on it: a request on a dead
/// connection has an unknown outcome, a ping has none.
const PING_AFTER_IDLE: Duration = Duration::from_millis(500);

/// Client of a witness. Keeps its connection, so that a request needs no handshake while a guest is stopped.
#[derive(Debug)]
pub struct WitnessClient {
    endpoint: Endpoint,
    witness: Peer,
    connect: Duration,
    reply: Duration,
    kept: Mutex<Option<IdleConnection>>,
}

#[derive(Debug)]
struct IdleConnection {
    connection: Connection,
    used: Instant,
}

impl WitnessClient {
    /// Creates a client of a witness, with the longest times to wait for a connection and for a reply. Sends nothing
    /// yet.
    pub fn new(endpoint: Endpoint, witness: Peer, connect: Duration, reply: Duration) -> Self {
        Self { endpoint, witness, connect, reply, kept: Mutex::new(None) }
    }

    /// Returns the witness's name.
    pub fn witness(&self) -> &HostId {
        &self.witness.host
    }

    /// Returns the kept connection if it is alive, or a new one.
    fn connection(&self, kept: Option<IdleConnection>) -> Option<Connection> {
        if let Some(IdleConnection { mut connection, used }) = kept
            && (used.elapsed() < PING_AFTER_IDLE || self.ping(&mut connection))
        {
            return Some(connection);
        }
        match self.endpoint.connect(&self.witness, Purpose::Registry, Instant::now() + self.connect) {
            Ok(connection) => Some(connection),
            Err(error) => {
                tracing::warn!(error = with_causes(&error), "the registry cannot be reached");
                None
            }
        }
    }

    fn ping(&self, connection: &mut Connection) -> bool {
        connection.send(&Message::Ping).is_ok()
            && matches!(
                connection.recv(Some(Instant::now() + self.reply)),
                Ok(Incoming::Message(Message::Pong))
            )
    }

    /// Sends a request and returns the reply; after an error the connection must not be used again.
    fn exchange(
        &self,
        connection: &mut Connection,
        request: &RegistryRequest,
    ) -> Result<RegistryReply, Answer> {
        if let Err(error) = connection.send(&Message::RegistryRequest(request.clone())) {
            // The socket has not accepted all of the frame, so the witness cannot have the request.
            tracing::warn!(error = with_causes(&error), "cannot query the registry");
            return Err(Answer::Unreachable);
        }
        match connection.recv(Some(Instant::now() + self.reply)) {
            Ok(Incoming::Message(Message::RegistryReply(reply))) => Ok(reply),
            Ok(_) => {
                tracing::warn!("the registry sent an unexpected answer");
                Err(Answer::Unknown)
            }
            Err(error) => {
                tracing::warn!(error = with_causes(&error), "the registry did not answer");
                Err(Answer::Unknown)
            }
        }
    }
}

impl Registry for WitnessClient {
    fn ask(&self, request: &RegistryRequest) -> Answer {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut connection) = self.connection(kept.take()) else { return Answer::Unreachable };
        match self.exchange(&mut connection, request) {
            Ok(reply) => {
                *kept = Some(IdleConnection { connection, used: Instant::now() });
                Answer::from_reply(request, reply)
            }
            // The connection is dropped: a late reply must not be mistaken for the reply to the next request.
            Err(answer) => answer,
        }
    }
}

/// Serves an ownership registry to other agents.
#[derive(Clone, Debug)]
pub struct WitnessServer {
    registry: Arc<SqliteRegistry>,
}

impl WitnessServer {
    /// Creates a server of this registry.
    pub fn new(registry: Arc<SqliteRegistry>) -> Self {
        Self { registry }
    }

    /// Accepts an arrival whose purpose is the registry and serves it until it ends. To be called from a thread of its
    /// own, such as the one that the listener calls its handler from.
    pub fn serve(&self, arrival: ConnectedPeer) {
        let host = arrival.host().clone();
        if *arrival.purpose() != Purpose::Registry {
            arrival
                .refuse("this agent is a witness: it keeps the ownership registry and does not accept VMs");
            return;
        }
        let ended = arrival.accept().map_err(|error| with_causes(&error)).and_then(|mut connection| {
            self.converse(&host, &mut connection).map_err(|error| with_causes(&error))
        });
        match ended {
            Ok(()) => tracing::debug!(%host, "registry: connection ended"),
            Err(error) => tracing::warn!(%host, error, "registry: connection lost"),
        }
    }

    fn converse(&self, host: &HostId, connection: &mut Connection) -> Result<(), LinkError> {
        loop {
            let message = match connection.recv(None) {
                Ok(Incoming::Message(message)) => message,
                Ok(Incoming::Blob(_)) => return Err(LinkError::NotExpected(proto::frame::FrameKind::Blob)),
                Err(LinkError::Ended) => return Ok(()),
                Err(error) => return Err(error),
            };
            match message {
                Message::Ping => connection.send(&Message::Pong)?,
                Message::RegistryRequest(request) => match self.answer(host, &request) {
                    Some(reply) => connection.send(&Message::RegistryReply(reply))?,
                    // No answer is the honest one; the client reads again.
                    None => return Ok(()),
                },
                other => {
                    tracing::warn!(
                        %host,
                        message = ?std::mem::discriminant(&other),
                        "a message that is not for a registry"
                    );
                    return Ok(());
                }
            }
        }
    }

    /// Returns the reply, or none if the outcome is not known here either.
    fn answer(&self, host: &HostId, request: &RegistryRequest) -> Option<RegistryReply> {
        if let Some(reason) = refusal(host, request) {
            tracing::warn!(%host, ?request, "refused a request to the ownership registry");
            return Some(RegistryReply::Failed { reason });
        }
        match self.registry.apply(request) {
            Ok(reply) => {
                if reply == RegistryReply::Set {
                    tracing::info!(%host, ?request, "changed a record of the ownership registry");
                }
                Some(reply)
            }
            Err(error @ RegistryError::Unknown { .. }) => {
                tracing::error!(%host, error = with_causes(&error), "unknown whether the registry changed");
                None
            }
            Err(error) => {
                tracing::error!(%host, error = with_causes(&error), "a request to the registry failed");
                Some(RegistryReply::Failed { reason: error.to_string() })
            }
        }
    }
}

/// Returns the reason for which a host may not make a request: a host may change only records that it owns, or make
/// itself the owner, but not act between two other hosts.
fn refusal(host: &HostId, request: &RegistryRequest) -> Option<String> {
    let RegistryRequest::CompareAndSet { vm, expected, new } = request else { return None };
    let gives = expected.as_ref().is_some_and(|(_, owner)| owner == host);
    let takes = new.owner == *host;
    (!gives && !takes).then(|| format!("{host} is neither the owner of {vm} nor the next owner"))
}
