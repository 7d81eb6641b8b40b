//! A transport between agents of one process.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proto::{Generation, HostId, MigrationId, Purpose};

use super::connection;
use crate::endpoint::Peer;
use crate::error::HandshakeError;
use crate::transport::{
    Arrivals, ArrivedStream, BulkSettings, Channel, DataStream, ExpectedStreams, Transport, TransportError,
};

/// The transport of one agent.
#[derive(Clone, Debug)]
pub struct FakeTransport {
    host: HostId,
    network: Arc<Network>,
}

#[derive(Debug, Default)]
struct Network {
    state: Mutex<NetworkState>,
    /// Signals that a channel has arrived.
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct NetworkState {
    /// Channels that were opened to each agent, and not accepted.
    channels: BTreeMap<HostId, VecDeque<(Purpose, Channel)>>,
    expected: BTreeMap<(HostId, MigrationId), ExpectedGeneration>,
    /// Number of expectations so far.
    count: u64,
}

#[derive(Debug)]
struct ExpectedGeneration {
    number: u64,
    generation: Generation,
    streams: ExpectedStreams,
    /// For each stream, true once it has arrived.
    seen: Vec<bool>,
    deliver: Sender<ArrivedStream>,
}

impl Network {
    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(reason: impl Into<String>) -> TransportError {
    TransportError::Refused(Box::new(HandshakeError::Refused { reason: reason.into() }))
}

impl FakeTransport {
    /// Returns the transports of agents that reach each other, one for each name.
    pub fn between<const N: usize>(hosts: [HostId; N]) -> [Self; N] {
        let network = Arc::<Network>::default();
        for host in &hosts {
            network.lock().channels.insert(host.clone(), VecDeque::new());
        }
        hosts.map(|host| Self { host, network: Arc::clone(&network) })
    }

    /// Waits for a channel that another agent opens to this one, until the deadline.
    pub fn accept(&self, deadline: Instant) -> Option<(Purpose, Channel)> {
        let mut state = self.network.lock();
        loop {
            if let Some(first) = state.channels.get_mut(&self.host).and_then(VecDeque::pop_front) {
                return Some(first);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.network.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Passes a stream to the agent that expects it.
    fn deliver(
        &self,
        peer: &Peer,
        purpose: &Purpose,
        arrived: impl FnOnce(u16) -> ArrivedStream,
    ) -> Result<(), TransportError> {
        let Purpose::Data { migration, generation, stream } = purpose else {
            return Err(refused("this is no stream of a generation"));
        };
        let mut state = self.network.lock();
        let expected = state.expected.get_mut(&(peer.host.clone(), migration.clone()));
        let expected = expected.filter(|expected| expected.generation == *generation);
        let expected =
            expected.ok_or_else(|| refused(format!("no stream of {migration} is expected there")))?;
        let is_page_requests = *stream == expected.streams.bulk;
        match expected.seen.get_mut(usize::from(*stream)) {
            Some(seen) if !*seen => *seen = true,
            _ => return Err(refused(format!("stream {stream} of {migration} is not expected there"))),
        }
        let arrived = arrived(*stream);
        if is_page_requests != matches!(arrived, ArrivedStream::PageRequests(_)) {
            return Err(refused(format!("stream {stream} of {migration} has another purpose")));
        }
        // If the expectation is gone by now, so is the stream.
        drop(expected.deliver.send(arrived));
        Ok(())
    }
}

impl Transport for FakeTransport {
    fn control(&self, peer: &Peer, purpose: Purpose, _: Instant) -> Result<Channel, TransportError> {
        let (near, far) = connection();
        let mut state = self.network.lock();
        let channels = state
            .channels
            .get_mut(&peer.host)
            .ok_or_else(|| refused(format!("{} is not there", peer.host)))?;
        channels.push_back((purpose, far.into_channel(self.host.clone())));
        self.network.arrived.notify_all();
        Ok(near.into_channel(peer.host.clone()))
    }

    fn bulk(
        &self,
        peer: &Peer,
        purpose: Purpose,
        _: &BulkSettings,
        _: Instant,
    ) -> Result<DataStream, TransportError> {
        let (near, far) = connection();
        let data = far.into_stream();
        self.deliver(peer, &purpose, |stream| ArrivedStream::Bulk { stream, data })?;
        Ok(near.into_stream())
    }

    fn page_requests(
        &self,
        peer: &Peer,
        purpose: Purpose,
        _: Duration,
        _: Instant,
    ) -> Result<Channel, TransportError> {
        let (near, far) = connection();
        let channel = far.into_channel(self.host.clone());
        self.deliver(peer, &purpose, |_| ArrivedStream::PageRequests(channel))?;
        Ok(near.into_channel(peer.host.clone()))
    }

    fn expect(
        &self,
        migration: &MigrationId,
        generation: Generation,
        streams: ExpectedStreams,
    ) -> Box<dyn Arrivals> {
        let (deliver, arrivals) = mpsc::channel();
        let mut state = self.network.lock();
        state.count += 1;
        let (number, seen) = (state.count, vec![false; streams.count().into()]);
        let key = (self.host.clone(), migration.clone());
        state.expected.insert(key.clone(), ExpectedGeneration { number, generation, streams, seen, deliver });
        Box::new(FakeArrivals { network: Arc::clone(&self.network), key, number, arrivals })
    }
}

struct FakeArrivals {
    network: Arc<Network>,
    key: (HostId, MigrationId),
    number: u64,
    arrivals: Receiver<ArrivedStream>,
}

impl Arrivals for FakeArrivals {
    fn next(&self, deadline: Instant) -> Option<ArrivedStream> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        self.arrivals.recv_timeout(left).ok()
    }
}

impl Drop for FakeArrivals {
    fn drop(&mut self) {
        let mut state = self.network.lock();
        if state.expected.get(&self.key).is_some_and(|expected| expected.number == self.number) {
            state.expected.remove(&self.key);
        }
    }
}
