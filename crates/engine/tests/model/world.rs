//! The world of the model: two hosts with agents, journals and QEMUs, a registry, and a network that delays, reorders,
//! loses and doubles packets.

mod acts;
mod destination_acts;
mod source_acts;

use engine::handover::MigrationTerms;
use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use engine::session::{DestinationSession, SourceSession};
use proto::message::{Offer, Ownership, RegistryRequest};
use proto::{Epoch, Generation, HostId, Incarnation, MigrationId, VmName};

/// Bounds on the faults and events of a run. Everything else may happen at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Budget {
    /// Agents killed, at any point between two effects; they may stay dead for any time.
    pub(crate) agent_crashes: u8,
    /// Hosts that lose their memory and what the journal had not synced.
    pub(crate) host_crashes: u8,
    /// Hosts that never come back.
    pub(crate) hosts_gone: u8,
    /// Packets delivered twice.
    pub(crate) duplicates: u8,
    /// QEMUs that die.
    pub(crate) qemu_deaths: u8,
    /// Entries that a journal does not accept.
    pub(crate) journal_failures: u8,
    /// `cont`s that fail.
    pub(crate) cont_failures: u8,
    /// Silence, cancellation, contact given up, lost answers of the registry: events that are caused by no fault of
    /// the model's own.
    pub(crate) troubles: u8,
    /// A `cont` of another program on the source's QEMU.
    pub(crate) foreign_conts: u8,
    /// Decisions of operators.
    pub(crate) decisions: u8,
    /// Decisions of operators against the registry or without it.
    pub(crate) overrides: u8,
    /// Registries that never answer again.
    pub(crate) registers_lost: u8,
    /// True if pages are missing when the guest already runs at the destination (post-copy).
    pub(crate) post_copy: bool,
    /// Migrations that begin.
    pub(crate) attempts: u8,
    /// Packets in transit at once; further ones are lost.
    pub(crate) in_flight: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Side {
    Source,
    Destination,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Life {
    Up,
    Down,
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Qemu {
    Running,
    Paused,
    Gone,
}

/// An agent and its journal. `session` is in the agent's memory; a crash leaves only the journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Agent<S, J> {
    pub(crate) life: Life,
    pub(crate) epoch: u8,
    /// The epoch in which the source owns the VM in the registry, as read when the attempt began.
    pub(crate) base: u8,
    pub(crate) session: S,
    /// The last synced entry, then those that a crash of the host may lose.
    pub(crate) journal: Vec<J>,
    pub(crate) rebooted: bool,
}

pub(crate) type SourceAgent = Agent<SourceSession, SourceState>;
pub(crate) type DestinationAgent = Agent<DestinationSession, DestinationState>;

impl SourceAgent {
    fn new() -> Self {
        Self::of(SourceSession::new(SourceState::Idle), SourceState::Idle)
    }

    pub(crate) fn state(&self) -> &SourceState {
        self.session.state()
    }
}

impl DestinationAgent {
    fn new() -> Self {
        Self::of(DestinationSession::new(DestinationState::Idle), DestinationState::Idle)
    }

    pub(crate) fn state(&self) -> &DestinationState {
        self.session.state()
    }
}

impl<S, J: Clone> Agent<S, J> {
    fn of(session: S, entry: J) -> Self {
        Self { life: Life::Up, epoch: 0, base: 0, session, journal: vec![entry], rebooted: false }
    }

    /// Appends an entry. Entries before a synced one can never be restored; nor, while no host can crash, can entries
    /// before the last.
    fn write(&mut self, state: &J, durable: bool) {
        if durable {
            self.journal.clear();
        }
        self.journal.push(state.clone());
    }
}

/// A record of the registry, abbreviated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Record {
    pub(crate) epoch: u8,
    pub(crate) owner: Side,
    pub(crate) offer: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Op {
    Read,
    Set { expected: (u8, Side), new: Record },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Packet {
    Propose(u8),
    /// All of memory and device state, complete, and the source's FROZEN.
    Data(u8),
    Ready(u8),
    Go(u8),
    Committed(u8),
    Aborted(u8),
    Returned(u8),
    Undecided(u8),
    Abort(u8),
    Running(u8),
    Incomplete(u8),
    Refused(u8),
    Crashed(u8),
    AskSource(u8),
    AskDestination(u8),
    Request(Side, u8, Op),
    Reply(Side, u8, Record),
}

/// State for the properties that no agent can see.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Ghost {
    /// State of the source's present attempt.
    pub(crate) source: SourceGhost,
    /// State of the destination's present attempt, which may be an older one.
    pub(crate) destination: DestinationGhost,
    /// Violations found while doing an effect.
    pub(crate) decided_alone: bool,
    pub(crate) ran_discarded: bool,
    pub(crate) threw_away: bool,
    /// An operator has decided against the registry or without it.
    pub(crate) word: bool,
    /// Waits for the registry although an operator has decided without it.
    pub(crate) still_waits: bool,
    pub(crate) illegal: Option<&'static str>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SourceGhost {
    /// The guest ran after it had been stopped.
    pub(crate) ran_on: bool,
    pub(crate) go_sent: bool,
    /// ABORTED or RETURNED was written.
    pub(crate) kept: bool,
    /// The registry was asked to return the guest.
    pub(crate) reclaimed: bool,
    /// The copy at the source was discarded.
    pub(crate) quit: bool,
    /// QEMU died, or the host crashed.
    pub(crate) lost: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct DestinationGhost {
    pub(crate) ran: bool,
    /// The agent was notified that the guest runs, and has not died since.
    pub(crate) is_known_to_have_run: bool,
    pub(crate) ready_sent: bool,
    /// STARTING is written: only an agent that has not restarted knows whether `cont` was sent.
    pub(crate) cont_decided: bool,
    pub(crate) cont_failed: bool,
    /// Pages of the guest are missing.
    pub(crate) missing: bool,
    /// COPY DESTROYED, REFUSING or REFUSED was written.
    pub(crate) gave_up: bool,
    /// QEMU died when `cont` might have been sent, or the host crashed.
    pub(crate) lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) source: SourceAgent,
    pub(crate) destination: DestinationAgent,
    pub(crate) source_qemu: Qemu,
    /// Held by SIGSTOP.
    pub(crate) held: bool,
    /// A `cont` in transit to the source's QEMU.
    pub(crate) source_cont: bool,
    pub(crate) destination_qemu: Qemu,
    pub(crate) destination_cont: bool,
    /// True while the streams of the migration are open.
    pub(crate) streams: bool,
    pub(crate) registry: Option<Record>,
    pub(crate) registry_lost: bool,
    pub(crate) net: Vec<Packet>,
    pub(crate) budget: Budget,
    pub(crate) ghost: Ghost,
}

impl World {
    pub(crate) fn new(budget: Budget, registry: bool) -> Self {
        Self {
            source: SourceAgent::new(),
            destination: DestinationAgent::new(),
            source_qemu: Qemu::Running,
            held: false,
            source_cont: false,
            destination_qemu: Qemu::Gone,
            destination_cont: false,
            streams: false,
            registry: registry.then_some(Record { epoch: 0, owner: Side::Source, offer: None }),
            registry_lost: false,
            net: Vec::new(),
            budget,
            ghost: Ghost::default(),
        }
    }

    pub(crate) fn source_runs(&self) -> bool {
        self.source_qemu == Qemu::Running && !self.held
    }

    pub(crate) fn destination_runs(&self) -> bool {
        self.destination_qemu == Qemu::Running
    }

    pub(crate) fn same_attempt(&self) -> bool {
        self.source.epoch == self.destination.epoch
    }

    /// Returns true if the missing pages of the destination's guest can still arrive.
    pub(crate) fn can_complete(&self) -> bool {
        let there = self.source.life == Life::Up && self.source_qemu != Qemu::Gone && self.same_attempt();
        there && matches!(self.destination.state(), DestinationState::Completing { .. })
    }

    /// Returns true if the source has discarded pages that a guest at the destination needs.
    pub(crate) fn lost_pages(&self) -> bool {
        let lacks = self.ghost.destination.missing && self.destination_runs() && self.same_attempt();
        lacks && self.ghost.source.quit && !self.ghost.word
    }

    /// Returns true if an agent that knows that its guest has run reports that it may not have.
    pub(crate) fn doubts_what_it_knows(&self) -> bool {
        let is_doubtful = *self.destination.state() == DestinationState::Crashed { has_run: false };
        is_doubtful && self.ghost.destination.is_known_to_have_run
    }

    /// Returns true if both copies have run since the stop.
    pub(crate) fn two_histories(&self) -> bool {
        self.ghost.destination.ran && (self.ghost.source.ran_on || !self.same_attempt())
    }

    /// Returns true if the registry assigns this attempt's VM to the source for good.
    fn registry_says_source(&self) -> bool {
        self.registry.is_some_and(|r| r.owner == Side::Source && r.epoch >= self.source.epoch)
    }
}

// ---- samples of the engine's types

fn host(side: Side) -> HostId {
    HostId::new(if side == Side::Source { "s" } else { "d" }).expect("a name")
}

fn side(host: &HostId) -> Side {
    if host.as_str() == "s" { Side::Source } else { Side::Destination }
}

pub(crate) fn terms(epoch: u8, base: u8, registry: bool) -> MigrationTerms {
    MigrationTerms {
        migration: MigrationId { vm: VmName::new("v").expect("a name"), epoch: Epoch(epoch.into()) },
        source: host(Side::Source),
        destination: host(Side::Destination),
        registry: registry.then(|| Epoch(base.into())),
        witness: None,
    }
}

/// Returns the incarnation of an attempt; each attempt has one.
pub(crate) fn incarnation(epoch: u8) -> Incarnation {
    Incarnation {
        boot_id: String::new(),
        pid: epoch.into(),
        start_time_ticks: 0,
        generation: Generation(epoch.into()),
    }
}

fn small(owned: &Ownership) -> Record {
    let offer = owned.offer.as_ref().map(|offer| offer.epoch.0 as u8);
    Record { epoch: owned.epoch.0 as u8, owner: side(&owned.owner), offer }
}

fn large(record: Record) -> Ownership {
    let offer = |epoch: u8| Offer { epoch: Epoch(epoch.into()), incarnation: incarnation(epoch), run: true };
    Ownership {
        epoch: Epoch(record.epoch.into()),
        owner: host(record.owner),
        offer: record.offer.map(offer).map(Box::new),
        released: false,
    }
}

fn small_op(request: &RegistryRequest) -> Op {
    match request {
        RegistryRequest::Read { .. } => Op::Read,
        RegistryRequest::CompareAndSet { expected, new, .. } => {
            let (epoch, owner) = expected.as_ref().expect("only adoption expects nothing");
            Op::Set { expected: (epoch.0 as u8, side(owner)), new: small(new) }
        }
    }
}

fn large_op(op: Op) -> RegistryRequest {
    let vm = VmName::new("v").expect("a name");
    match op {
        Op::Read => RegistryRequest::Read { vm },
        Op::Set { expected: (epoch, owner), new } => RegistryRequest::CompareAndSet {
            vm,
            expected: Some((Epoch(epoch.into()), host(owner))),
            new: large(new),
        },
    }
}
