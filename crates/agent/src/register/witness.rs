//! A register at another agent: the side that asks and the side that answers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::handover::register::RegisterAnswer as Answer;
use link::{Arrival, Connection, Endpoint, Incoming, LinkError, Peer};
use proto::message::{Message, RegisterReply, RegisterRequest};
use proto::{HostId, Purpose};

use super::Register;
use super::sqlite::{RegisterError, SqliteRegister};
use crate::api::with_causes;

/// A connection that was idle for longer is tried with a ping before a request is risked on it: a request that goes
/// into a dead connection has an unknown outcome, a ping has none.
const FRESH: Duration = Duration::from_millis(500);

/// Asks a witness. Keeps its connection: asking must not cost a handshake while a guest stands still.
#[derive(Debug)]
pub struct WitnessClient {
    endpoint: Endpoint,
    witness: Peer,
    connect: Duration,
    reply: Duration,
    kept: Mutex<Option<Kept>>,
}

#[derive(Debug)]
struct Kept {
    connection: Connection,
    used: Instant,
}

impl WitnessClient {
    /// A client of a witness, with the longest times to wait for a connection and for a reply. Nothing is sent yet.
    pub fn new(endpoint: Endpoint, witness: Peer, connect: Duration, reply: Duration) -> Self {
        Self { endpoint, witness, connect, reply, kept: Mutex::new(None) }
    }

    /// The witness's name.
    pub fn witness(&self) -> &HostId {
        &self.witness.host
    }

    /// The kept connection if it is alive, or a new one.
    fn connection(&self, kept: Option<Kept>) -> Option<Connection> {
        if let Some(Kept { mut connection, used }) = kept
            && (used.elapsed() < FRESH || self.ping(&mut connection))
        {
            return Some(connection);
        }
        match self.endpoint.connect(&self.witness, Purpose::Register, Instant::now() + self.connect) {
            Ok(connection) => Some(connection),
            Err(error) => {
                tracing::warn!(error = with_causes(&error), "the register cannot be reached");
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

    /// The reply, and whether the connection can be used again.
    fn exchange(
        &self,
        connection: &mut Connection,
        request: &RegisterRequest,
    ) -> Result<RegisterReply, Answer> {
        if let Err(error) = connection.send(&Message::Register(request.clone())) {
            // The socket has not taken all of the frame, so the witness cannot have the request.
            tracing::warn!(error = with_causes(&error), "the register cannot be asked");
            return Err(Answer::Unreachable);
        }
        match connection.recv(Some(Instant::now() + self.reply)) {
            Ok(Incoming::Message(Message::Registered(reply))) => Ok(reply),
            Ok(_) => {
                tracing::warn!("the register answered something else");
                Err(Answer::Unknown)
            }
            Err(error) => {
                tracing::warn!(error = with_causes(&error), "the register did not answer");
                Err(Answer::Unknown)
            }
        }
    }
}

impl Register for WitnessClient {
    fn ask(&self, request: &RegisterRequest) -> Answer {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut connection) = self.connection(kept.take()) else { return Answer::Unreachable };
        match self.exchange(&mut connection, request) {
            Ok(reply) => {
                *kept = Some(Kept { connection, used: Instant::now() });
                Answer::from_reply(request, reply)
            }
            // The connection is dropped: a reply that comes late must not be taken for the next one's.
            Err(answer) => answer,
        }
    }
}

/// Serves a register to other agents.
#[derive(Clone, Debug)]
pub struct WitnessServer {
    register: Arc<SqliteRegister>,
}

impl WitnessServer {
    /// Serves this register.
    pub fn new(register: Arc<SqliteRegister>) -> Self {
        Self { register }
    }

    /// Accepts an arrival whose purpose is the register and serves it until it ends. To be called from a thread of its
    /// own, such as the one that the listener calls its handler from.
    pub fn serve(&self, arrival: Arrival) {
        let host = arrival.host().clone();
        if *arrival.purpose() != Purpose::Register {
            arrival.refuse("this agent is a witness: it keeps the register of owners and takes no VMs");
            return;
        }
        let ended = arrival.accept().map_err(|error| with_causes(&error)).and_then(|mut connection| {
            self.converse(&host, &mut connection).map_err(|error| with_causes(&error))
        });
        match ended {
            Ok(()) => tracing::debug!(%host, "register: connection ended"),
            Err(error) => tracing::warn!(%host, error, "register: connection lost"),
        }
    }

    fn converse(&self, host: &HostId, connection: &mut Connection) -> Result<(), LinkError> {
        loop {
            let message = match connection.recv(None) {
                Ok(Incoming::Message(message)) => message,
                Ok(Incoming::Blob(_)) => return Err(LinkError::NotExpected(proto::frame::Kind::Blob)),
                Err(LinkError::Ended) => return Ok(()),
                Err(error) => return Err(error),
            };
            match message {
                Message::Ping => connection.send(&Message::Pong)?,
                Message::Register(request) => match self.answer(host, &request) {
                    Some(reply) => connection.send(&Message::Registered(reply))?,
                    // No answer is the honest one; the client reads again.
                    None => return Ok(()),
                },
                other => {
                    tracing::warn!(%host, message = ?std::mem::discriminant(&other), "not for a register");
                    return Ok(());
                }
            }
        }
    }

    /// The reply, or none when the outcome is not known here either.
    fn answer(&self, host: &HostId, request: &RegisterRequest) -> Option<RegisterReply> {
        if let Some(reason) = not_theirs(host, request) {
            tracing::warn!(%host, ?request, "refused");
            return Some(RegisterReply::Failed { reason });
        }
        match self.register.apply(request) {
            Ok(reply) => {
                if reply == RegisterReply::Set {
                    tracing::info!(%host, ?request, "set");
                }
                Some(reply)
            }
            Err(error @ RegisterError::Unknown { .. }) => {
                tracing::error!(%host, error = with_causes(&error), "register");
                None
            }
            Err(error) => {
                tracing::error!(%host, error = with_causes(&error), "register");
                Some(RegisterReply::Failed { reason: error.to_string() })
            }
        }
    }
}

/// A host may take what is its own to take or to give: a third one has no say between two others.
fn not_theirs(host: &HostId, request: &RegisterRequest) -> Option<String> {
    let RegisterRequest::CompareAndSet { vm, expected, new } = request else { return None };
    let gives = expected.as_ref().is_some_and(|(_, owner)| owner == host);
    let takes = new.owner == *host;
    (!gives && !takes).then(|| format!("{host} is neither the owner of {vm} nor to become it"))
}
