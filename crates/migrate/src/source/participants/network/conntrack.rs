//! Conntrack entries of a VM that leaves: they are copied to the destination while the guest runs here, and once more
//! what has changed when it is stopped. Those of addresses that are certainly the guest's are removed here in the end.
//!
//! A guest that leaves for another network needs an entry for each flow of datagrams that is to go on. Where this host does
//! not track them, because they only pass its bridge, they are read from the guest's own datagrams.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use link::transport::{ConnectionHandle, Incoming, MessageReceiver, MessageSender};
use net::addresses::{self, SourceAddressSampler};
use net::conntrack::{self, ConntrackEntry};
use net::conntrack_sync::{EntryChange, MOST_ENTRIES, ReplicatedEntries};
use net::netlink::Socket;
use net::{ClaimSnooper, Claims, DatagramSampler};
use proto::message::Message;
use proto::{Purpose, limits};
use tracing::{debug, warn};

use crate::source::agreement::RedirectedGuest;
use crate::source::participants::participant::Environment;
use api::report::TrackedConnections;
use host::{network_cards, peers};

/// Pause after the first list of connections; it is doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause between two lists: what changes in between is sent while the guest is stopped.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Longest wait for the destination's answer to a list.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait of the stopped guest for the last list. What is late is still installed.
const LAST_PATIENCE: Duration = Duration::from_millis(15);
/// Time after which entries are removed here: packets on the old path have arrived by then.
const REMOVAL_DELAY: Duration = Duration::from_millis(500);

/// Thread that copies the conntrack entries of a guest, until this is dropped. Nothing waits for its end.
pub(super) struct ConntrackCopier(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<CopyState>,
    changed: Condvar,
}

#[derive(Default)]
struct CopyState {
    wanted: Wanted,
    /// True once the last list has been answered, or nothing more can be copied.
    is_answered: bool,
    connection: Option<Arc<dyn ConnectionHandle>>,
    copied: TrackedConnections,
    /// Addresses of the guest, as far as they are known.
    addresses: BTreeSet<IpAddr>,
}

/// Next work of the thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Wanted {
    /// Lists, again and again.
    #[default]
    Follow,
    /// The last list: the guest is stopped.
    Last,
    /// Removal here: the guest runs at the destination.
    Removal,
    /// Nothing: the guest stays.
    Nothing,
}

impl ConntrackCopier {
    /// Begins to copy the connections of the cards behind these interfaces.
    pub(super) fn start(
        environment: &Environment,
        snooper: Option<Arc<ClaimSnooper>>,
        interfaces: &[network_cards::Interface],
        redirected: Option<RedirectedGuest>,
    ) -> Result<Self, String> {
        let chain = |error: std::io::Error| crate::chain(&error);
        let netfilter = Socket::netfilter().map_err(chain)?;
        conntrack::check(&netfilter).map_err(chain)?;
        let named = || interfaces.iter().map(|(interface, mac)| (interface.as_str(), *mac));
        let is_untracked = redirected.as_ref().is_some_and(RedirectedGuest::is_untracked);
        let datagrams = is_untracked.then(|| DatagramSampler::start(named())).transpose();
        let source = ConntrackSource {
            environment: environment.clone(),
            netfilter,
            route: Socket::route().map_err(chain)?,
            snooper,
            senders: SourceAddressSampler::start(named()).map_err(chain)?,
            datagrams: datagrams.map_err(chain)?,
            macs: interfaces.iter().map(|(_, mac)| *mac).collect(),
            claimed: BTreeSet::new(),
            redirected,
            sent: ReplicatedEntries::default(),
            connection: None,
        };
        let shared = Arc::<Shared>::default();
        let of_thread = Arc::clone(&shared);
        let copy = move || source.copy(&of_thread);
        thread::Builder::new().name("flows".to_owned()).spawn(copy).map_err(chain)?;
        Ok(Self(shared))
    }

    /// Requests the last list, because the guest is stopped. Returns at once.
    pub(super) fn finish_list(&self) {
        self.0.want(Wanted::Last);
    }

    /// Waits for the answer to the last list, but only for a moment. Returns true if it has arrived.
    pub(super) fn wait_answer(&self) -> bool {
        let state = self.0.lock();
        let is_open = |state: &mut CopyState| !state.is_answered;
        let waited = self.0.changed.wait_timeout_while(state, LAST_PATIENCE, is_open);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_answered
    }

    /// Returns the addresses of the guest, as far as they are known.
    pub(super) fn addresses(&self) -> BTreeSet<IpAddr> {
        self.0.lock().addresses.clone()
    }

    /// Returns the result for the report.
    pub(super) fn copied(&self) -> TrackedConnections {
        self.0.lock().copied.clone()
    }

    /// Removes the copied entries here in a while, and returns the result for the report. Returns at once.
    pub(super) fn remove_here(&self) -> TrackedConnections {
        self.0.want(Wanted::Removal);
        self.copied()
    }
}

impl Drop for ConntrackCopier {
    /// Ends the copy, unless the thread removes entries.
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if state.wanted == Wanted::Removal {
            return;
        }
        state.wanted = Wanted::Nothing;
        if let Some(connection) = state.connection.take() {
            connection.shutdown();
        }
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, CopyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn want(&self, wanted: Wanted) {
        self.lock().wanted = wanted;
        self.changed.notify_all();
    }

    fn record_answer(&self) {
        self.lock().is_answered = true;
        self.changed.notify_all();
    }

    /// Waits until other work is wanted than `done`, or for `pause` if lists are wanted again and again.
    fn next(&self, done: Option<Wanted>, pause: Duration) -> Wanted {
        let is_done = |state: &mut CopyState| Some(state.wanted) == done;
        let state = self.lock();
        if done == Some(Wanted::Follow) {
            let waited = self.changed.wait_timeout_while(state, pause, is_done);
            waited.unwrap_or_else(PoisonError::into_inner).0.wanted
        } else {
            let waited = self.changed.wait_while(state, is_done);
            waited.unwrap_or_else(PoisonError::into_inner).wanted
        }
    }
}

/// Work of the thread that copies connections.
struct ConntrackSource {
    environment: Environment,
    netfilter: Socket,
    route: Socket,
    snooper: Option<Arc<ClaimSnooper>>,
    senders: SourceAddressSampler,
    /// Flows of a guest whose datagrams may not be tracked here.
    datagrams: Option<DatagramSampler>,
    /// Addresses of the guest's cards.
    macs: Vec<net::Mac>,
    /// Addresses that are certainly the guest's.
    claimed: BTreeSet<IpAddr>,
    /// Redirection of the guest's connections, if it moves to another network.
    redirected: Option<RedirectedGuest>,
    sent: ReplicatedEntries,
    connection: Option<(Box<dyn MessageReceiver>, Box<dyn MessageSender>)>,
}

impl ConntrackSource {
    fn copy(mut self, shared: &Shared) {
        let (mut done, mut pause) = (None, FIRST_PAUSE);
        loop {
            let wanted = shared.next(done, pause);
            if done == Some(Wanted::Follow) {
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            done = Some(wanted);
            match wanted {
                Wanted::Follow => {
                    if let Err(error) = self.ask_guest() {
                        debug!(%error, "the guest is not asked for its addresses");
                    }
                    if let Err(error) = self.send_changes(shared) {
                        debug!(error, "tracked connections are not copied now; tried again");
                        // It is not known what has arrived: everything is sent again.
                        (self.connection, self.sent) = (None, ReplicatedEntries::default());
                    }
                }
                Wanted::Last => {
                    if let Err(error) = self.send_changes(shared) {
                        self.environment.controls.note("connections-not-carried", error);
                        self.sent = ReplicatedEntries::default();
                    }
                    shared.record_answer();
                }
                Wanted::Removal => return self.remove(),
                Wanted::Nothing => return,
            }
        }
    }

    /// Asks the guest which ends of connections are its own: one that is silent would lose its connections. Its answers
    /// count for the next list.
    fn ask_guest(&mut self) -> std::io::Result<()> {
        let own = addresses::own(&self.route)?;
        let ends = conntrack::ends_of_all(&self.netfilter, MOST_ENTRIES)?;
        let is_open = |end: &IpAddr| !own.contains(end) && !self.claimed.contains(end) && !end.is_loopback();
        self.senders.ask(ends.into_iter().filter(is_open));
        Ok(())
    }

    /// Sends what has changed since the last list, and waits until the destination has installed it.
    fn send_changes(&mut self, shared: &Shared) -> Result<(), String> {
        let own = addresses::own(&self.route).map_err(|error| crate::chain(&error))?;
        let guests = self.addresses(&own).map_err(|error| crate::chain(&error))?;
        if guests.is_empty() {
            return Ok(());
        }
        shared.lock().addresses.clone_from(&guests);
        let listed = conntrack::list(&self.netfilter, &guests, MOST_ENTRIES);
        let (entries, is_whole) = listed.map_err(|error| crate::chain(&error))?;
        if !is_whole {
            debug!(most = MOST_ENTRIES, "the guest has more tracked connections than are copied");
        }
        let entries = self.carried(entries).map_err(|error| crate::chain(&error))?;
        let changes = self.sent.changes(Instant::now(), entries, &own);
        if changes.is_empty() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for change in &changes {
            change.encode(&mut bytes);
        }
        if bytes.len() as u64 > limits::FLOWS_BYTES {
            return Err(format!("{} bytes of tracked connections are too many", bytes.len()));
        }
        let answer = self.exchange(shared, &bytes)?;
        Self::learn(shared, &changes, answer)
    }

    /// Returns the entries that the destination needs: where the guest's connections are redirected, with the flows that are
    /// not tracked here.
    fn carried(&mut self, listed: Vec<ConntrackEntry>) -> std::io::Result<Vec<ConntrackEntry>> {
        let Some(guest) = &self.redirected else { return Ok(listed) };
        let addresses = guest.addresses();
        let mut entries = BTreeMap::new();
        if let Some(datagrams) = &mut self.datagrams {
            let of_guest = datagrams.look(Instant::now())?.filter(|entry| entry.is_of(&addresses));
            entries.extend(of_guest.map(|entry| (entry.key(), entry.clone())));
        }
        entries.extend(listed.into_iter().map(|entry| (entry.key(), entry)));
        Ok(entries.values().filter_map(|entry| guest.carried(entry)).collect())
    }

    /// Returns the addresses of the guest: those that are certainly its own, and those from which it sends.
    fn addresses(&mut self, own: &BTreeSet<IpAddr>) -> std::io::Result<BTreeSet<IpAddr>> {
        let claims = self.snooper.as_ref().map_or_else(Vec::new, |snooper| snooper.claims());
        self.claimed = claims.iter().flat_map(Claims::all).map(|claim| claim.address).collect();
        self.claimed.extend(addresses::neighbours(&self.route, &self.macs)?);
        // A guest that uses an address of its host does not own the host's connections.
        self.claimed.retain(|address| !own.contains(address));
        let senders = self.senders.look()?.iter().filter(|address| !own.contains(address));
        Ok(self.claimed.iter().chain(senders).copied().collect())
    }

    fn exchange(&mut self, shared: &Shared, bytes: &[u8]) -> Result<Message, String> {
        let (receiver, sender) = match &mut self.connection {
            Some(connection) => connection,
            empty => {
                let Environment { context, terms, .. } = &self.environment;
                let purpose = Purpose::Flows { migration: terms.migration.clone() };
                let connection = peers::connect(context, &terms.destination, None, purpose)
                    .map_err(|error| crate::chain(&error))?;
                let mut state = shared.lock();
                if state.wanted == Wanted::Nothing {
                    return Err("the guest stays here".to_owned());
                }
                state.connection = Some(connection.handle());
                empty.insert(connection.split())
            }
        };
        sender
            .send(&Message::Flows { bytes: bytes.len() as u64 })
            .and_then(|()| bytes.chunks(limits::BLOB_BYTES).try_for_each(|piece| sender.send_blob(piece)))
            .map_err(|error| crate::chain(&error))?;
        match receiver.recv(Some(Instant::now() + ANSWER_PATIENCE)) {
            Ok(Incoming::Message(message)) => Ok(message),
            Ok(Incoming::Blob(_)) => Err("the destination violates the protocol".to_owned()),
            Err(error) => Err(crate::chain(&error)),
        }
    }

    /// Records the destination's answer to these changes.
    fn learn(shared: &Shared, changes: &[EntryChange], answer: Message) -> Result<(), String> {
        let Message::FlowsInstalled { installed, failed, more_failed } = answer else {
            return Err("the destination violates the protocol".to_owned());
        };
        let mut state = shared.lock();
        let known = &mut state.copied;
        known.carried = installed;
        if !known.failed.is_empty() {
            // They have ended, or were tried again.
            let changed: BTreeSet<_> = changes.iter().map(|change| change.entry().to_string()).collect();
            known.failed.retain(|failed| !changed.contains(&failed.flow));
        }
        known.failed.extend(failed);
        let surplus = known.failed.len().saturating_sub(limits::FAILED_FLOWS);
        known.failed.truncate(limits::FAILED_FLOWS);
        let surplus = u32::try_from(surplus).unwrap_or(u32::MAX).saturating_add(more_failed);
        known.more_failed = known.more_failed.saturating_add(surplus);
        Ok(())
    }

    fn remove(self) {
        // The destination's part has ended.
        drop(self.connection);
        thread::sleep(REMOVAL_DELAY);
        let entries = self.sent.no_longer_needed(&self.claimed);
        if let Err(error) = conntrack::remove(&self.netfilter, &entries) {
            warn!(%error, "tracked connections of a guest that has left stay until they end");
        }
    }
}
