//! Connections between agents. The only crate that opens any to a peer.
//!
//! ```text
//! Endpoint (who we are, how we speak)
//!   ├─ connect(Peer, Purpose) ──────────────► Connection        the side that connects
//!   └─ Listener ── Arrival (checked Hello) ──► Connection        the side that answers
//!                    └─ Router: hands arrivals to whoever expects their migration and generation
//! Connection ── split ──► Reader, Writer     usable from two threads; Handle ends both from a third
//!                           └─ RateLimit     shared by all streams of a migration
//! ```
//!
//! # What holds for every connection
//!
//! - Both sides show a certificate of the same authority (TLS 1.3 only), and each is who it says: the name in `Hello`
//!   or `Welcome` is among the names of its certificate. Without TLS only when both configurations say so.
//! - Both have agreed on a version of the protocol before anything else is said.
//! - Nothing waits for ever on a silent peer: the handshake has a deadline, and a connection over which nothing gets
//!   through for [`Settings::silence`] is lost.
//! - Lengths are compared with the protocol's limits before anything is allocated for them.
//! - After an error other than [`LinkError::TimedOut`] the connection is of no use; both halves and the peer notice.
//!   How it ended says nothing about what the peer has done: that is for the protocol to ask.
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
mod rate;
mod router;
mod socket;
mod stream;

pub use connection::{Connection, Handle, Incoming, Reader, Writer};
pub use endpoint::{Endpoint, Peer, Settings};
pub use error::{BindError, ConnectError, HandshakeError, LinkError};
pub use identity::{Identity, IdentityError, Security, TlsFiles};
pub use listen::{Arrival, Listener, Rejected, Serving};
pub use rate::{Bucket, RateLimit};
pub use router::{Route, Router};

// Tests inside and outside of the crate share helpers, which call it by its name.
#[cfg(test)]
extern crate self as whimbrel_link;
#[cfg(test)]
mod tests;
