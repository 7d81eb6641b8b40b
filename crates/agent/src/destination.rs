//! The destination's driver: one thread that receives a VM.
//!
//! It reads all notices from one inbox: connections of the source and their messages, ends of data streams, the exit of
//! QEMU, an operator's decision. The engine decides everything that concerns ownership; the rest is the work of
//! receiving ([`arriving`]).

mod arriving;
mod awaiting;
mod ending;
mod error;
mod handover;
mod inbox;
mod loading;
mod receiving;
mod taking;
pub(crate) mod untrusted;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use engine::handover::MigrationTerms;
use engine::handover::destination::{DestinationEvent, DestinationReport, DestinationState};
use link::{Connection, Handle, Writer};
use proto::Generation;
use proto::message::Proposal;

pub(crate) use arriving::{Arriving, DestinationDetails, Traces, find_by_monitor};
#[cfg(test)]
pub(crate) use awaiting::AwaitedTrace;
pub(crate) use error::ArriveError;
pub(crate) use inbox::{Inbox, Mailbox, Notice};

use crate::context::Context;
use crate::cpu::CpuTime;
use crate::disks::Images;
use crate::owners;
use crate::progress::Publisher;

/// The destination's side of one migration.
pub(crate) struct Driver {
    context: Arc<Context>,
    terms: MigrationTerms,
    state: DestinationState,
    proposal: Proposal,
    /// Absent before QEMU was started, and after it is gone or was handed to the agent's VMs.
    vm: Option<Arriving>,
    receiving: Option<receiving::Receiving>,
    /// Images of copied disks, until all of their content has arrived.
    images: Images,
    inbox: Inbox,
    publisher: Publisher,
    generation: Generation,
    /// Connections that the source reads, the control stream and connections for questions alike, by the driver's own
    /// count.
    links: BTreeMap<u64, (Writer, Handle)>,
    /// The control stream among `links`.
    control: Option<u64>,
    /// Events that effects produced; they are processed before the inbox.
    follow_ups: VecDeque<DestinationEvent>,
    /// The source's connection for page requests, until it can be used.
    page_stream: Option<Connection>,
    /// Pages that were discarded before the guest was stopped.
    taken: taking::TakenAway,
    /// Pages that arrive while the guest runs.
    awaiting: Option<awaiting::Awaiting>,
    /// True if all pages that a previous agent waited for are present.
    found_complete: bool,
    /// A device state, or a list of pages, that is being received.
    state_coming: Option<loading::StateComing>,
    /// Digest of the loaded device state, and the time that loading needed, in microseconds.
    loaded: Option<(String, u64)>,
    /// Statistics of `cont`; absent if another agent sent it.
    continued: Option<Continued>,
    /// CPU time since the migration began here; absent if another agent began it.
    cpu: Option<CpuTime>,
    go_heard: Option<Instant>,
    heard: Instant,
    /// True while a question to the source is pending.
    asking: Arc<AtomicBool>,
    /// An event of this host whose effects failed.
    not_taken: Option<DestinationEvent>,
    /// True if the state of QEMU is not known and has to be queried again.
    look_again: bool,
    /// Time of the next attempt to stop a guest that must not go on.
    stop_again_at: Option<Instant>,
    /// Requests of this migration to the ownership registry.
    register: owners::Desk,
    /// Images that could not be removed, with the migration's traces.
    left_behind: Option<ending::Left>,
    /// Reason for the end of the migration, for the source.
    reason: Option<String>,
    /// The last report to users, and the state in which it was made; it is not repeated with every retry.
    told: Option<(&'static str, DestinationReport)>,
}

/// Statistics of QEMU's `cont` after GO.
#[derive(Debug)]
struct Continued {
    /// Time at which `cont` had returned.
    returned: Instant,
    /// Duration from the arrival of GO to `returned`.
    took: Duration,
    /// The part of `took` after QEMU's event RESUME.
    resumed: Option<Duration>,
}

impl Driver {
    /// Creates the destination's side of a migration, in the state that the journal has.
    pub(crate) fn new(
        context: Arc<Context>,
        terms: MigrationTerms,
        state: DestinationState,
        proposal: Proposal,
        vm: Option<Arriving>,
        inbox: Inbox,
        publisher: Publisher,
    ) -> Self {
        publisher.update(|progress| {
            progress.ram_bytes = proposal.ram.iter().map(|block| block.bytes).sum();
        });
        let cpu = (state == DestinationState::Idle).then(CpuTime::start);
        Self {
            context,
            terms,
            state,
            proposal,
            vm,
            receiving: None,
            images: Images::default(),
            inbox,
            publisher,
            generation: Generation(1),
            links: BTreeMap::new(),
            control: None,
            follow_ups: VecDeque::new(),
            page_stream: None,
            taken: taking::TakenAway::default(),
            awaiting: None,
            found_complete: false,
            state_coming: None,
            loaded: None,
            continued: None,
            cpu,
            go_heard: None,
            heard: Instant::now(),
            asking: Arc::default(),
            not_taken: None,
            look_again: false,
            stop_again_at: None,
            register: owners::Desk::default(),
            left_behind: None,
            reason: None,
            told: None,
        }
    }

    /// Returns the source's proposal.
    pub(crate) fn proposal(&self) -> &Proposal {
        &self.proposal
    }
}
