//! Accepts connections from other agents.
//!
//! One thread accepts; each connection gets a thread of its own for its handshake, which has a deadline, and then for
//! the handler. The number of simultaneous handshakes is limited, so that clients that send nothing cost no more than
//! that many threads for no longer than the deadline; others wait in the system's queue. One address may have at most
//! half of them: further connections of that address are closed at once.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use proto::{HostId, Purpose};
use rustix::net::{Shutdown, shutdown};

use crate::connection::Connection;
use crate::endpoint::{Endpoint, resolve};
use crate::error::{BindError, HandshakeError, LinkError};
use crate::gate::Gate;
use crate::handshake::{Greeting, answer};
use crate::socket::Socket;

/// Pause after the system has refused a connection for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// A bound address.
#[derive(Debug)]
pub struct Listener {
    endpoint: Endpoint,
    socket: TcpListener,
    address: SocketAddr,
}

/// A connected agent whose greeting was checked and that waits for an answer. If it is dropped without one, the
/// connection just ends.
#[derive(Debug)]
pub struct ConnectedPeer {
    greeting: Greeting,
    own: HostId,
    host: HostId,
    purpose: Purpose,
    version: u16,
    from: SocketAddr,
}

/// A connection that failed in its handshake. The peer was informed of the reason if that was possible.
#[derive(Debug, thiserror::Error)]
#[error("a connection from {from} was refused")]
pub struct Rejected {
    /// Address of the peer.
    pub from: SocketAddr,
    /// Reason of the failure.
    pub source: HandshakeError,
}

/// A running listener. Ends when stopped or dropped.
#[derive(Debug)]
pub struct ListenerHandle {
    socket: Arc<TcpListener>,
    address: SocketAddr,
    stopped: Arc<AtomicBool>,
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Binds an address (`host:port`; port 0 lets the system choose).
    ///
    /// # Errors
    /// If the address cannot be resolved, or is in use.
    pub fn bind(endpoint: Endpoint, address: &str) -> Result<Self, BindError> {
        let cannot_resolve = |source| BindError::Resolve { address: address.to_owned(), source };
        let wanted = *resolve(address)
            .map_err(cannot_resolve)?
            .first()
            .ok_or_else(|| cannot_resolve(io::ErrorKind::NotFound.into()))?;
        let bind = |source| BindError::Bind { address: wanted, source };
        let socket = TcpListener::bind(wanted).map_err(bind)?;
        let address = socket.local_addr().map_err(bind)?;
        Ok(Self { endpoint, socket, address })
    }

    /// Returns the bound address, with the port that the system chose.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts connections in a thread of its own. The handler is called from one thread for each connection, with the
    /// agent that has passed the handshake or with the reason for which it has not. The handler may block.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn serve<H>(self, handler: H) -> Result<ListenerHandle, BindError>
    where
        H: Fn(Result<ConnectedPeer, Rejected>) + Send + Sync + 'static,
    {
        let mut serving = ListenerHandle {
            gate: Arc::new(Gate::new(self.endpoint.settings.handshakes)),
            socket: Arc::new(self.socket),
            address: self.address,
            stopped: Arc::default(),
            thread: None,
        };
        let (socket, stopped) = (Arc::clone(&serving.socket), Arc::clone(&serving.stopped));
        let (gate, endpoint, handler) =
            (Arc::clone(&serving.gate), Arc::new(self.endpoint), Arc::new(handler));
        let accepting = thread::Builder::new()
            .name("link-accept".to_owned())
            .spawn(move || accept_all(&socket, &stopped, &gate, &endpoint, &handler))
            .map_err(BindError::Thread)?;
        serving.thread = Some(accepting);
        Ok(serving)
    }
}

fn accept_all<H>(
    socket: &TcpListener,
    stopped: &AtomicBool,
    gate: &Arc<Gate>,
    endpoint: &Arc<Endpoint>,
    handler: &Arc<H>,
) where
    H: Fn(Result<ConnectedPeer, Rejected>) + Send + Sync + 'static,
{
    while let Some(mut slot) = Gate::acquire(gate) {
        let (stream, from) = match socket.accept() {
            Ok(accepted) => accepted,
            Err(_) if stopped.load(Ordering::Acquire) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                thread::sleep(PAUSE);
                continue;
            }
        };
        if !slot.assign_address(from.ip()) {
            tracing::debug!(%from, "too many connections of one address are in their handshake; closed");
            continue;
        }
        let (endpoint, handler) = (Arc::clone(endpoint), Arc::clone(handler));
        let spawned = thread::Builder::new().name("link-peer".to_owned()).spawn(move || {
            let arrival = receive(stream, from, &endpoint);
            drop(slot);
            handler(arrival);
        });
        if let Err(error) = spawned {
            tracing::warn!(%from, %error, "cannot start a thread for a connection; closing it");
        }
    }
}

fn receive(stream: TcpStream, from: SocketAddr, endpoint: &Endpoint) -> Result<ConnectedPeer, Rejected> {
    let deadline = Instant::now() + endpoint.settings.handshake;
    Socket::new(stream, endpoint.settings.silence)
        .map_err(|error| HandshakeError::Link(LinkError::Lost(error)))
        .and_then(|socket| answer(socket, &endpoint.security, endpoint.versions, deadline))
        .map(|(greeting, hello, version)| ConnectedPeer {
            greeting,
            own: endpoint.host.clone(),
            host: hello.host,
            purpose: hello.purpose,
            version,
            from,
        })
        .map_err(|source| Rejected { from, source })
}

impl ConnectedPeer {
    /// Name of the host that has connected.
    pub fn host(&self) -> &HostId {
        &self.host
    }

    /// Purpose of the connection.
    pub fn purpose(&self) -> &Purpose {
        &self.purpose
    }

    /// Address of the peer.
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// Welcomes the peer. Callers have to be quick, because the deadline of the peer's handshake runs.
    ///
    /// # Errors
    /// If the connection is lost before the peer is welcomed.
    pub fn accept(self) -> Result<Connection, HandshakeError> {
        self.greeting.accept(&self.own, self.host, self.version)
    }

    /// Refuses the peer, with a reason and advice. Waits up to a second for the peer to read them.
    pub fn refuse(mut self, reason: impl Into<String>) {
        self.greeting.refuse(reason.into());
    }
}

impl ListenerHandle {
    /// Returns the bound address, with the port that the system chose.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting. Accepted connections stay open; running handlers are not waited for.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stopped.store(true, Ordering::Release);
        self.gate.close();
        // Wakes the thread that blocks in `accept`.
        let _ = shutdown(&*self.socket, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; if it did, there would be nothing to stop any more.
            let _ = thread.join();
        }
    }
}

impl Drop for ListenerHandle {
    fn drop(&mut self) {
        self.end();
    }
}
