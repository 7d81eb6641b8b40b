//! Connections of a migration, whatever carries them.
//!
//! | connection | type | carries |
//! |---|---|---|
//! | control | [`Channel`] | messages of the handover, device state |
//! | bulk | [`DataStream`] | frames of pages and blocks, acknowledgements |
//! | page requests | [`Channel`] | requests for pages and their answers; never behind bulk |
//!
//! A [`Transport`] opens them at the source, and expects them at the destination ([`Arrivals`]). Drivers and the data
//! plane know these traits and [`TransportError`] only. [`TcpTransport`] is TCP, with TLS or without; `fake` is memory
//! of one process, for tests.
//!
//! # What every transport keeps
//!
//! - Frames of a stream arrive in order, whole, and once, or the stream ends.
//! - A frame counts as delivered when its receiver has acknowledged it, and for no other reason: the data plane
//!   acknowledges what is in the destination's memory.
//! - The connections of a generation end as a whole. After [`ConnectionHandle::shutdown`] and the end of the thread
//!   that receives, nothing of them changes memory any more.
//! - Control and page requests do not wait for bulk.
//! - No call waits for ever for a silent peer.

mod channel;
mod data;
mod error;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod tcp;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::{Generation, MigrationId, Purpose};

pub use channel::{Channel, ConnectionHandle, MessageReceiver, MessageSender};
pub use data::{DataStream, DirectReceiver, DirectSender, FrameSink, FrameSource, Part};
pub use error::TransportError;
pub use tcp::TcpTransport;

pub use crate::connection::Incoming;
use crate::endpoint::Peer;
use crate::rate_limit::RateLimit;

/// Opens and expects the connections of migrations.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Opens a connection for messages to a peer, until the deadline.
    fn control(&self, peer: &Peer, purpose: Purpose, deadline: Instant) -> Result<Channel, TransportError>;

    /// Opens a data stream to a peer, until the deadline.
    fn bulk(
        &self,
        peer: &Peer,
        purpose: Purpose,
        settings: &BulkSettings,
        deadline: Instant,
    ) -> Result<DataStream, TransportError>;

    /// Opens a connection for page requests to a peer, until the deadline. The peer may read nothing for `stall`.
    fn page_requests(
        &self,
        peer: &Peer,
        purpose: Purpose,
        stall: Duration,
        deadline: Instant,
    ) -> Result<Channel, TransportError>;

    /// Expects the connections of a generation, each once, and refuses those of other generations. Replaces an earlier
    /// expectation for the same migration.
    fn expect(
        &self,
        migration: &MigrationId,
        generation: Generation,
        streams: ExpectedStreams,
    ) -> Box<dyn Arrivals>;
}

/// Settings of a data stream.
#[derive(Clone, Debug)]
pub struct BulkSettings {
    /// Time for which the peer may read nothing, because its storage may stall. Another connection has to detect that
    /// the peer's host is gone.
    pub stall: Duration,
    /// Limit on the rate of sent bytes, which all streams share.
    pub limit: Option<Arc<RateLimit>>,
}

/// Connections that a generation has, apart from control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedStreams {
    /// Number of data streams.
    pub bulk: u16,
    /// True if there is a connection for page requests, too.
    pub page_requests: bool,
}

impl ExpectedStreams {
    /// Returns the number of connections.
    pub fn count(self) -> u16 {
        self.bulk + u16::from(self.page_requests)
    }
}

/// The connections of one generation, in order of arrival. Dropping it ends the expectation.
pub trait Arrivals: Send {
    /// Waits for the next connection. None at the deadline, or when a newer expectation has replaced this one.
    fn next(&self, deadline: Instant) -> Option<ArrivedStream>;
}

/// A connection that has arrived.
#[derive(Debug)]
pub enum ArrivedStream {
    /// A data stream.
    Bulk {
        /// Its number.
        stream: u16,
        /// The stream.
        data: DataStream,
    },
    /// The connection for page requests.
    PageRequests(Channel),
}
