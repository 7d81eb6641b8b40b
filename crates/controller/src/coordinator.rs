//! The coordinator: all state of a controller, and the course of each input.
//!
//! An input changes the state, and may order actions. [`Coordinator::settle`] stores the changes, and carries the actions out
//! once that is done: a controller that is restarted has stored whatever it has ordered. If the changes cannot be stored,
//! nothing is ordered until they can.

mod evacuations;
mod orders;
mod reports;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::fleet::{EventSignal, MoveOptions};
use api::report::unix_ms_now;
use engine::evacuation::{
    Evacuation, EvacuationAction, EvacuationEvent, EvacuationId, EvacuationStep, Evacuations,
};
use engine::planner::Inventory;
use link::Handle;
use proto::message::{CommandAnswer, CommandVerb, Message};
use proto::{CommandId, HostId};
use serde::{Deserialize, Serialize};
use store::fleet::{FleetBatch, FleetStore, FleetStoreError, NewEvent, StoredEvacuation};
use tracing::{error, info, warn};

use crate::config::ControllerConfig;
use crate::fleet::Fleet;
use crate::inventory::inventory;
pub(crate) use evacuations::BeginError;
use reports::SnapshotNames;

/// Numbers of commands that an evacuation has for each term. One that needs more uses those of the next term.
const NUMBERS_OF_TERM: u64 = 10_000;

/// Time between two looks for cordons that agents have refused to change.
const CORDON_PAUSE: Duration = Duration::from_secs(5);

/// The coordinator, shared by all threads.
pub(crate) type Shared = Arc<Mutex<Coordinator>>;

/// All state of a controller.
pub(crate) struct Coordinator {
    pub(crate) config: ControllerConfig,
    store: FleetStore,
    /// Larger than the terms of all controllers before this one.
    pub(crate) term: u64,
    pub(crate) fleet: Fleet,
    pub(crate) evacuations: Evacuations,
    /// Records of each evacuation beside its state.
    pub(crate) kept: BTreeMap<EvacuationId, KeptEvacuation>,
    links: BTreeMap<HostId, AgentLink>,
    commands: CommandBook,
    pending: Pending,
    clock: Clock,
    signal: EventSignal,
    /// Number of the last event.
    pub(crate) last_event: u64,
    /// True once the controller ends.
    is_ending: bool,
}

/// Record of an evacuation beside its state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct KeptEvacuation {
    /// Number, in the order of requests.
    pub(crate) number: u64,
    /// Time of the request, in milliseconds since 1970.
    pub(crate) created_unix_ms: u64,
    /// Way in which VMs are moved.
    pub(crate) moves: MoveOptions,
    /// Hosts whose agents have asked for it, and receive its state, with the numbers of their requests.
    pub(crate) asked_by: BTreeMap<HostId, u64>,
}

/// Connection of an agent.
struct AgentLink {
    /// Number of the connection: a later one of the same host replaces it.
    number: u64,
    outgoing: Sender<Message>,
    handle: Handle,
    /// Number of the last report.
    seq: u64,
    /// Names in the snapshot that is being received.
    snapshot: Option<SnapshotNames>,
}

/// Commands that were sent.
struct CommandBook {
    /// Number of the last command of this term.
    last: u64,
    /// Number of the last connection.
    last_link: u64,
    /// Requests of users that wait for an answer.
    waiting: BTreeMap<CommandId, (HostId, Sender<CommandAnswer>)>,
    /// Cordons that were ordered and not answered: the state that was ordered.
    cordons: BTreeMap<HostId, (CommandId, bool)>,
    /// Time at which it was looked for cordons that agents have refused to change.
    cordons_at: Instant,
    /// Larger terms that agents have seen, which were reported.
    replaced_by: BTreeMap<HostId, u64>,
}

impl CommandBook {
    fn new() -> Self {
        Self {
            last: 0,
            last_link: 0,
            waiting: BTreeMap::new(),
            cordons: BTreeMap::new(),
            cordons_at: Instant::now(),
            replaced_by: BTreeMap::new(),
        }
    }
}

/// Clock of evacuations, in nanoseconds since 1970. It does not jump when the machine's clock is set: pauses and the time
/// without progress are measured with it.
struct Clock {
    base_ns: u64,
    since: Instant,
}

impl Clock {
    /// Begins with the machine's clock, but not before a time that is recorded.
    fn after(recorded_ns: u64) -> Self {
        let unix_ns = unix_ms_now().saturating_mul(1_000_000);
        Self { base_ns: unix_ns.max(recorded_ns), since: Instant::now() }
    }

    fn now_ns(&self) -> u64 {
        let elapsed = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.base_ns.saturating_add(elapsed)
    }
}

/// Changes that are not stored yet, and actions that wait for that.
#[derive(Default)]
struct Pending {
    batch: FleetBatch,
    evacuations: Vec<EvacuationId>,
    actions: VecDeque<EvacuationAction>,
    /// True if there is something to store that cannot wait for the next tick.
    is_urgent: bool,
    /// True if the last attempt to store has failed.
    has_failed: bool,
}

/// Locks the coordinator. A thread that panicked with the lock has left a state that the next report corrects.
pub(crate) fn lock(shared: &Shared) -> MutexGuard<'_, Coordinator> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Coordinator {
    /// Opens the records, and begins a term that is larger than `seen_term`.
    pub(crate) fn open(config: ControllerConfig, seen_term: u64) -> Result<Self, FleetStoreError> {
        let store = FleetStore::open(&config.state_dir)?;
        let records = store.load()?;
        let term = store.next_term(seen_term)?;
        let mut restored = Vec::new();
        let mut kept = BTreeMap::new();
        for StoredEvacuation { id, number, options, state } in &records.evacuations {
            let evacuation = serde_json::from_str::<Evacuation>(state.as_deref().unwrap_or_default());
            match evacuation {
                Ok(evacuation) => {
                    let known: KeptEvacuation = serde_json::from_str(options).unwrap_or_default();
                    kept.insert(EvacuationId(id.clone()), KeptEvacuation { number: *number, ..known });
                    restored.push(evacuation);
                }
                Err(error) => {
                    error!(evacuation = id, %error, "the record of an evacuation is damaged; it is left out");
                }
            }
        }
        // Records may be older than what agents have journaled: ids of commands that were sent since are not used again.
        let mut evacuations = Evacuations::restore(restored);
        evacuations.skip_numbers(first_number(term));
        let mut coordinator = Self {
            fleet: Fleet::restore(&records),
            clock: Clock::after(evacuations.latest_ns()),
            evacuations,
            kept,
            links: BTreeMap::new(),
            commands: CommandBook::new(),
            pending: Pending::default(),
            signal: EventSignal::new(records.last_event),
            last_event: records.last_event,
            is_ending: false,
            config,
            store,
            term,
        };
        let name = coordinator.config.name.clone();
        coordinator.event("controller-started", |event| {
            event.text = format!("controller {name} was started, with term {term}");
        });
        coordinator.feed(&EvacuationEvent::Restarted);
        coordinator.settle();
        Ok(coordinator)
    }

    /// Returns the time of evacuations: nanoseconds since 1970.
    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Returns the signal of new events.
    pub(crate) fn signal(&self) -> &EventSignal {
        &self.signal
    }

    /// Returns events; see [`FleetStore::events`].
    pub(crate) fn events(
        &self,
        after: u64,
        count: u32,
    ) -> Result<Vec<store::fleet::StoredEvent>, FleetStoreError> {
        self.store.events(after, count)
    }

    /// Returns the fleet as the planner sees it now.
    pub(crate) fn inventory(&mut self) -> Arc<Inventory> {
        if let Some(known) = &self.fleet.inventory {
            return Arc::clone(known);
        }
        let built = Arc::new(inventory(&self.fleet, &self.config));
        self.fleet.inventory = Some(Arc::clone(&built));
        built
    }

    /// Ends all connections, and stores what has changed: the controller ends.
    pub(crate) fn end(&mut self) {
        self.is_ending = true;
        for agent in self.links.values() {
            agent.handle.shutdown();
        }
        self.pending.is_urgent = true;
        self.settle();
    }

    /// Lets time pass. `is_second` is true about once a second.
    pub(crate) fn tick(&mut self, is_second: bool) {
        if is_second && self.evacuations.iter().any(|one| one.outcome().is_none()) {
            self.feed(&EvacuationEvent::Tick);
        }
        let now = Instant::now();
        if is_second && now.duration_since(self.commands.cordons_at) >= CORDON_PAUSE {
            self.commands.cordons_at = now;
            self.order_cordons_again();
        }
        self.pending.is_urgent = true;
        self.settle();
    }

    /// Gives evacuations an event.
    fn feed(&mut self, event: &EvacuationEvent) {
        let inventory = self.inventory();
        let step = self.evacuations.handle(event, &inventory, self.now_ns());
        self.take_step(step);
    }

    /// Enters what evacuations have decided: it is stored first, and carried out then.
    fn take_step(&mut self, step: EvacuationStep) {
        self.pending.is_urgent |= !step.changed.is_empty() || !step.actions.is_empty();
        for id in step.changed {
            if !self.pending.evacuations.contains(&id) {
                self.pending.evacuations.push(id);
            }
        }
        self.pending.actions.extend(step.actions);
    }

    /// Records an event for people.
    fn event(&mut self, kind: &str, describe: impl FnOnce(&mut NewEvent)) {
        let mut event = NewEvent { unix_ms: unix_ms_now(), kind: kind.to_owned(), ..NewEvent::default() };
        describe(&mut event);
        info!(kind, host = event.host, vm = event.vm, evacuation = event.evacuation, "{}", event.text);
        self.pending.batch.events.push(event);
        self.pending.is_urgent = true;
    }

    /// Stores what has changed, and carries out what was ordered, until nothing is left.
    pub(crate) fn settle(&mut self) {
        while self.pending.is_urgent || !self.pending.actions.is_empty() {
            if !self.store_changes() {
                return;
            }
            let Some(action) = self.pending.actions.pop_front() else { return };
            self.carry_out(action);
        }
    }

    /// Stores what has changed. Returns false if that fails: it is tried again with the next input.
    fn store_changes(&mut self) -> bool {
        self.fleet.take_changes(&mut self.pending.batch);
        for id in std::mem::take(&mut self.pending.evacuations) {
            match self.evacuation_record(&id) {
                Ok(stored) => self.pending.batch.put_evacuation(stored),
                Err(error) => {
                    if !std::mem::replace(&mut self.pending.has_failed, true) {
                        error!(evacuation = %id, %error, "nothing is ordered: an evacuation cannot be stored");
                    }
                    self.pending.evacuations.push(id);
                }
            }
        }
        if !self.pending.evacuations.is_empty() {
            return false;
        }
        if self.pending.batch.is_empty() {
            self.pending.is_urgent = false;
            return true;
        }
        match self.store.store(&self.pending.batch) {
            Ok(last_event) => {
                if std::mem::take(&mut self.pending.has_failed) {
                    info!("the records can be written again");
                }
                self.pending.batch = FleetBatch::default();
                self.pending.is_urgent = false;
                if last_event > self.last_event {
                    self.last_event = last_event;
                    self.signal.set(last_event);
                }
                true
            }
            Err(failed) => {
                if !std::mem::replace(&mut self.pending.has_failed, true) {
                    error!(
                        error = crate::chain(&failed),
                        "nothing is ordered until the records can be written"
                    );
                }
                false
            }
        }
    }

    /// Returns the record of an evacuation; without a state if it was forgotten.
    fn evacuation_record(&self, id: &EvacuationId) -> serde_json::Result<StoredEvacuation> {
        let kept = self.kept.get(id).cloned().unwrap_or_default();
        let state = self.evacuations.get(id).map(serde_json::to_string).transpose()?;
        let options = serde_json::to_string(&kept)?;
        Ok(StoredEvacuation { id: id.0.clone(), number: kept.number, options, state })
    }

    /// Sends a command to an agent. Without a connection it is lost: whoever has ordered it orders it again.
    fn send(&mut self, host: &HostId, id: CommandId, command: CommandVerb) {
        let Some(agent) = self.links.get(host) else {
            warn!(%host, command = %id, "the host is not connected; the command is not sent");
            return;
        };
        let message = Message::FleetCommand { term: self.term, id, command };
        // If the connection has ended, its end is on its way here.
        let _ = agent.outgoing.send(message);
    }

    /// Returns an id for a command that is not one of an evacuation.
    fn next_command(&mut self) -> Option<CommandId> {
        self.commands.last += 1;
        CommandId::new(format!("c{}-{}", self.term, self.commands.last)).ok()
    }
}

/// Returns the largest number of a command that evacuations of earlier terms may have used.
fn first_number(term: u64) -> u32 {
    u32::try_from(term.saturating_mul(NUMBERS_OF_TERM)).unwrap_or(u32::MAX).min(u32::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_does_not_go_behind_what_is_recorded() {
        let unix_ns = unix_ms_now() * 1_000_000;
        assert!(Clock::after(0).now_ns() >= unix_ns);
        let recorded_ns = unix_ns + 3600 * 1_000_000_000;
        assert!(Clock::after(recorded_ns).now_ns() >= recorded_ns);
    }

    #[test]
    fn numbers_of_later_terms_are_larger_and_never_run_out() {
        assert_eq!((first_number(1), first_number(2)), (10_000, 20_000));
        assert!(u64::from(first_number(u64::MAX)) + NUMBERS_OF_TERM < u64::from(u32::MAX));
    }
}
