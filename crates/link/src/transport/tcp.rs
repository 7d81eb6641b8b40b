//! TCP, with TLS or without: the [connections](crate::Connection) of this crate behind the traits.
//!
//! A data stream sends bytes that its caller holds, and places nothing directly.

use std::io::IoSlice;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::frame::{FrameKind, Header};
use proto::{Generation, Message, MigrationId, Purpose};

use super::{
    Arrivals, ArrivedStream, BulkSettings, Channel, ConnectionHandle, DataStream, DirectReceiver,
    DirectSender, ExpectedStreams, FrameSink, FrameSource, Incoming, MessageReceiver, MessageSender,
    Transport, TransportError,
};
use crate::connection::{Connection, Handle, Reader, Writer};
use crate::endpoint::{Endpoint, Peer};
use crate::error::LinkError;
use crate::rate_limit::RateLimit;
use crate::router::{Route, Router};

/// Connections over TCP. Those that peers open reach it through the listener, which passes them to its [`Router`].
#[derive(Clone, Debug)]
pub struct TcpTransport {
    endpoint: Endpoint,
    router: Router,
}

impl TcpTransport {
    /// Creates a transport with the identity of this agent. The listener has to pass arrivals to `router`.
    pub fn new(endpoint: Endpoint, router: Router) -> Self {
        Self { endpoint, router }
    }
}

impl Transport for TcpTransport {
    fn control(&self, peer: &Peer, purpose: Purpose, deadline: Instant) -> Result<Channel, TransportError> {
        Ok(self.endpoint.connect(peer, purpose, deadline)?.into())
    }

    fn bulk(
        &self,
        peer: &Peer,
        purpose: Purpose,
        settings: &BulkSettings,
        deadline: Instant,
    ) -> Result<DataStream, TransportError> {
        let connection = self.endpoint.connect(peer, purpose, deadline)?;
        connection.set_stall_limit(settings.stall)?;
        Ok(DataStream::over(connection, settings.limit.clone()))
    }

    fn page_requests(
        &self,
        peer: &Peer,
        purpose: Purpose,
        stall: Duration,
        deadline: Instant,
    ) -> Result<Channel, TransportError> {
        let connection = self.endpoint.connect(peer, purpose, deadline)?;
        connection.set_stall_limit(stall)?;
        Ok(connection.into())
    }

    fn expect(
        &self,
        migration: &MigrationId,
        generation: Generation,
        streams: ExpectedStreams,
    ) -> Box<dyn Arrivals> {
        let route = self.router.expect(migration.clone(), generation, streams.count());
        Box::new(TcpArrivals { route, bulk: streams.bulk })
    }
}

struct TcpArrivals {
    route: Route,
    /// Number of data streams; the connection for page requests has the number behind theirs.
    bulk: u16,
}

impl Arrivals for TcpArrivals {
    fn next(&self, deadline: Instant) -> Option<ArrivedStream> {
        let (stream, connection) = self.route.next(deadline)?;
        Some(if stream == self.bulk {
            ArrivedStream::PageRequests(connection.into())
        } else {
            ArrivedStream::Bulk { stream, data: DataStream::over(connection, None) }
        })
    }
}

impl From<Connection> for Channel {
    fn from(connection: Connection) -> Self {
        let (peer, handle) = (connection.peer().clone(), Arc::new(connection.handle()));
        let (reader, writer) = connection.split();
        Self::new(peer, Box::new(reader), Box::new(writer), handle)
    }
}

impl DataStream {
    /// Creates a data stream over an open connection. Sent bytes count against the limit, which all streams share.
    pub fn over(connection: Connection, limit: Option<Arc<RateLimit>>) -> Self {
        let handle = Arc::new(connection.handle());
        let (reader, mut writer) = connection.split();
        writer.set_rate_limit(limit);
        Self { sink: Box::new(writer), source: Box::new(reader), handle }
    }
}

impl ConnectionHandle for Handle {
    fn shutdown(&self) {
        Self::shutdown(self);
    }

    fn sent_bytes(&self) -> u64 {
        Self::sent_bytes(self)
    }

    fn received_bytes(&self) -> u64 {
        Self::received_bytes(self)
    }
}

impl MessageSender for Writer {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        Self::set_deadline(self, deadline);
    }

    fn deadline(&self) -> Option<Instant> {
        Self::deadline(self)
    }

    fn send(&mut self, message: &Message) -> Result<(), TransportError> {
        Ok(Self::send(self, message)?)
    }

    fn send_blob(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        Ok(Self::send_blob(self, bytes)?)
    }

    fn finish(&mut self) -> Result<(), TransportError> {
        Ok(Self::finish(self)?)
    }
}

impl MessageReceiver for Reader {
    fn recv(&mut self, deadline: Option<Instant>) -> Result<Incoming, TransportError> {
        Ok(Self::recv(self, deadline)?)
    }
}

impl FrameSink for Writer {
    fn set_deadline(&mut self, deadline: Option<Instant>) {
        Self::set_deadline(self, deadline);
    }

    fn send(&mut self, kind: FrameKind, payload: &[&[u8]]) -> Result<(), TransportError> {
        let (first, second) = match *payload {
            [] => (&[][..], &[][..]),
            [one] => (one, &[][..]),
            [one, two, ..] => (one, two),
        };
        let header =
            Header::new(kind, payload.iter().map(|part| part.len()).sum()).map_err(LinkError::TooLong)?;
        Ok(self.write_frame(header, &[IoSlice::new(first), IoSlice::new(second)])?)
    }

    /// No action: frames are not buffered.
    fn flush(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn unsent_bytes(&self) -> u64 {
        tracee::unsent_bytes(self.as_fd()).unwrap_or(0)
    }

    fn direct(&mut self) -> Option<&mut dyn DirectSender> {
        None
    }
}

impl FrameSource for Reader {
    fn receive(&mut self, payload: &mut Vec<u8>) -> Result<FrameKind, TransportError> {
        Ok(self.read_frame(payload)?.kind)
    }

    fn has_more(&mut self) -> bool {
        Self::has_more(self)
    }

    fn direct(&mut self) -> Option<&mut dyn DirectReceiver> {
        None
    }

    fn places_directly(&self) -> bool {
        false
    }
}
