//! The destination's driver: one thread that receives a VM.
//!
//! It takes whatever happens from one inbox: connections of the source and what comes on them, the ends of data
//! streams, QEMU's end, a user's word. What concerns ownership goes to the engine, which decides; the rest is the work
//! of receiving ([`arriving`]).

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

use engine::handover::Terms;
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
    terms: Terms,
    state: DestinationState,
    proposal: Proposal,
    /// Absent before it was started, and after it is gone or given to the agent's VMs.
    vm: Option<Arriving>,
    receiving: Option<receiving::Receiving>,
    /// Of disks that are copied, until all of them has come.
    images: Images,
    inbox: Inbox,
    publisher: Publisher,
    generation: Generation,
    /// Connections on which the source listens, control stream and questions alike, by the driver's own count.
    links: BTreeMap<u64, (Writer, Handle)>,
    /// The control stream among them.
    control: Option<u64>,
    /// Events that effects led to, to be taken before anything from the inbox.
    follow_ups: VecDeque<DestinationEvent>,
    /// The source's connection for pages that somebody waits for, until it is of use.
    page_stream: Option<Connection>,
    /// Pages that were taken away before the guest was stopped.
    taken: taking::TakenAway,
    /// Pages that come while the guest runs.
    awaiting: Option<awaiting::Awaiting>,
    /// All that an agent before this one had waited for was there.
    found_complete: bool,
    /// A device state on its way.
    state_coming: Option<loading::StateComing>,
    /// Digest and time of the device state that was loaded.
    loaded: Option<(String, u64)>,
    /// When `cont` had returned, and how long that took from GO's arrival; absent if another agent did it.
    continued: Option<Continued>,
    /// Since the migration began here; absent if another agent began it.
    cpu: Option<CpuTime>,
    go_heard: Option<Instant>,
    heard: Instant,
    /// A question to the source is under way.
    asking: Arc<AtomicBool>,
    /// An event of this side whose effects failed.
    not_taken: Option<DestinationEvent>,
    /// What QEMU does is not known.
    look_again: bool,
    /// When it is tried again to stop a guest that is not to run on.
    stop_again_at: Option<Instant>,
    /// Its questions to the register.
    register: owners::Desk,
    /// Images that were not removed, and whose they are.
    left_behind: Option<ending::Left>,
    /// Why the migration ended, for the source.
    reason: Option<String>,
    /// The last thing that people were told, and in which state: not again at every repetition.
    told: Option<(&'static str, DestinationReport)>,
}

/// QEMU's `cont` at GO.
#[derive(Debug)]
struct Continued {
    /// When it had returned.
    returned: Instant,
    /// From GO until then.
    took: Duration,
    /// The part of it after QEMU's event RESUME.
    resumed: Option<Duration>,
}

impl Driver {
    /// The destination's side of a migration in whatever state the journal has it.
    pub(crate) fn new(
        context: Arc<Context>,
        terms: Terms,
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

    /// What its source has proposed.
    pub(crate) fn proposal(&self) -> &Proposal {
        &self.proposal
    }
}
