//! Connections between agents. This is the only crate that opens connections to a peer.
//!
//! ```text
//! Endpoint (identity and settings of this agent)
//!   ├─ connect(Peer, Purpose) ──────────────► Connection        the connecting side
//!   └─ Listener ── ConnectedPeer (checked Hello) ► Connection     the answering side
//!                    └─ Router: passes arrivals to the owner of the route for their migration and generation
//! Connection ── split ──► Reader, Writer     usable from two threads; Handle ends both from a third
//!                           └─ RateLimit     shared by all streams of a migration
//! ```
//!
//! The connections of a migration are behind the traits of [`transport`], of which these connections are one
//! implementation.
//!
//! # Invariants of every connection
//!
//! - Both agents show a certificate of the same authority (TLS 1.3 only), and each proves its name: the name in `Hello`
//!   or `Welcome` is among the names of its certificate. Without TLS only when both configurations allow that.
//! - Both agents have agreed on a version of the protocol before any other message.
//! - No thread waits for ever for a silent peer: the handshake has a deadline, and a connection without progress for
//!   [`Settings::silence`] is lost.
//! - Lengths are compared with the protocol's limits before anything is allocated for them.
//! - After an error other than [`LinkError::TimedOut`] the connection is of no use; both halves and the peer notice.
//!   The way a connection ended proves nothing about the peer's state: the protocol has to ask.
//!
//! Threads and blocking calls throughout; below them the sockets do not block, so that deadlines and
//! [`Handle::shutdown`] reach a thread wherever it waits.

mod connection;
mod endpoint;
mod error;
mod gate;
mod handshake;
mod identity;
mod listen;
mod rate_limit;
mod router;
mod socket;
mod stream;
pub mod transport;

pub use connection::{Connection, Handle, Incoming, Reader, Writer};
pub use endpoint::{Endpoint, Peer, Settings};
pub use error::{BindError, ConnectError, HandshakeError, LinkError};
pub use identity::{Identity, IdentityError, Security, TlsFiles};
pub use listen::{ConnectedPeer, Listener, ListenerHandle, Rejected};
pub use rate_limit::RateLimit;
pub use router::{Route, Router};

// Tests inside and outside of the crate share helpers, which call it by its name.
#[cfg(test)]
extern crate self as whimbrel_link;
#[cfg(test)]
mod tests;
