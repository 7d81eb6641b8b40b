//! Passes connections of a migration to the thread that waits for them.
//!
//! The destination agent expects connections of one migration and one generation; they arrive one by one in threads of
//! the listener. A [`Route`] is the expectation: while it lives, arrivals of its generation go into its channel, and
//! those of other generations are refused with a reason. Expecting a newer generation ends older routes of the
//! migration, so that no connection of an old set can slip into a new one.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proto::{Generation, MigrationId, Purpose};

use crate::connection::Connection;
use crate::listen::ConnectedPeer;

/// Registry of expected data streams.
#[derive(Clone, Debug, Default)]
pub struct Router {
    state: Arc<Mutex<RouterState>>,
}

#[derive(Debug, Default)]
struct RouterState {
    expected: BTreeMap<MigrationId, Expected>,
    /// Number of routes created so far.
    routes: u64,
}

#[derive(Debug)]
struct Expected {
    /// Number of the route, so that the end of an older one does not affect it.
    route: u64,
    generation: Generation,
    /// For each expected data stream, true once it has arrived.
    seen: Vec<bool>,
    deliver: Sender<(u16, Connection)>,
}

/// The data streams of one generation, in order of arrival. Dropping it ends the expectation.
#[derive(Debug)]
pub struct Route {
    router: Router,
    migration: MigrationId,
    number: u64,
    arrivals: Receiver<(u16, Connection)>,
}

impl Router {
    /// Expects the data streams 0 to `streams` − 1 of a generation, each once. Replaces an earlier expectation for the
    /// same migration.
    pub fn expect(&self, migration: MigrationId, generation: Generation, streams: u16) -> Route {
        let (deliver, arrivals) = mpsc::channel();
        let mut state = self.lock();
        state.routes += 1;
        let number = state.routes;
        let seen = vec![false; usize::from(streams)];
        state.expected.insert(migration.clone(), Expected { route: number, generation, seen, deliver });
        Route { router: self.clone(), migration, number, arrivals }
    }

    /// Accepts an expected arrival and refuses an unexpected data stream. Returns an arrival of any other purpose.
    pub fn deliver(&self, arrival: ConnectedPeer) -> Option<ConnectedPeer> {
        let Purpose::Data { migration, generation, stream } = arrival.purpose().clone() else {
            return Some(arrival);
        };
        match self.claim(&migration, generation, stream) {
            Err(reason) => arrival.refuse(reason),
            Ok(deliver) => match arrival.accept() {
                // If the route is gone by now, so is the connection.
                Ok(connection) => drop(deliver.send((stream, connection))),
                Err(error) => tracing::warn!(
                    %migration,
                    stream,
                    %error,
                    "lost a data stream when it was accepted"
                ),
            },
        }
        None
    }

    /// Marks a stream as arrived and returns its channel, or the reason for which it is refused.
    fn claim(
        &self,
        migration: &MigrationId,
        generation: Generation,
        stream: u16,
    ) -> Result<Sender<(u16, Connection)>, String> {
        let mut state = self.lock();
        let expected = state
            .expected
            .get_mut(migration)
            .ok_or_else(|| format!("no data stream of {migration} is expected here"))?;
        if expected.generation != generation {
            return Err(format!(
                "connections of {migration} are of generation {}, not {generation}",
                expected.generation
            ));
        }
        match expected.seen.get_mut(usize::from(stream)) {
            Some(seen) if !*seen => {
                *seen = true;
                Ok(expected.deliver.clone())
            }
            Some(_) => Err(format!("stream {stream} of {migration} is already there")),
            None => Err(format!("{migration} has no stream {stream}")),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RouterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Route {
    /// Waits for the next data stream: its number and its connection. None at the deadline, or when a newer expectation
    /// has replaced this one.
    pub fn next(&self, deadline: Instant) -> Option<(u16, Connection)> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        self.arrivals.recv_timeout(left).ok()
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        let mut state = self.router.lock();
        if state.expected.get(&self.migration).is_some_and(|expected| expected.route == self.number) {
            state.expected.remove(&self.migration);
        }
    }
}
