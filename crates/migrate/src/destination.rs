//! The destination's driver: one thread that receives a VM.
//!
//! It reads all notices from one inbox: connections of the source and their messages, ends of data streams, the exit of
//! QEMU, an operator's decision. The engine decides everything that concerns ownership; the rest is the work of
//! receiving ([`ArrivingVm`]).

mod answers;
mod discarding;
mod ending;
mod handover;
mod held_flows;
mod inbox;
mod loading;
mod participants;
mod post_copy_error;
mod post_copy_receiver;
mod receiving;
mod references;
mod stages;
mod unexpected_page;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::handover::MigrationTerms;
use engine::handover::destination::{DestinationReport, DestinationState};
use engine::session::{ControlGeneration, DestinationSession, RegistryClient};
use link::transport::{ConnectionHandle, MessageSender};
use proto::message::Proposal;

use crate::clock::Clock;
pub use answers::answers_from_journal;
use api::progress::Publisher;
use host::ArrivingVm;
use host::Context;
use host::cpu::CpuTime;
pub use inbox::{DestinationInbox, DestinationMailbox, DestinationNotice};
pub use participants::ArrivalPlan;

/// The destination's side of one migration.
pub struct DestinationDriver {
    context: Arc<Context>,
    terms: MigrationTerms,
    proposal: Proposal,
    inbox: DestinationInbox,
    publisher: Publisher,
    clock: Clock,
    session: DestinationSession,
    questions: Questions,
    connections: DestinationConnections,
    resources: DestinationResources,
    reporter: DestinationReporter,
}

/// Questions of this migration to other hosts.
#[derive(Default)]
struct Questions {
    /// True while a question to the source is pending.
    is_asking_source: bool,
    /// Requests to the ownership registry.
    registry: RegistryClient,
}

/// Sending half of a connection, and the handle that ends it.
type OpenConnection = (Box<dyn MessageSender>, Arc<dyn ConnectionHandle>);

/// Connections of the source.
struct DestinationConnections {
    /// Connections that the source reads, the control stream and connections for questions alike, by the driver's own
    /// count.
    open: BTreeMap<u64, OpenConnection>,
    /// The control stream among the connections in `open`, and its generation.
    control: ControlGeneration,
    /// A device state, or a list of pages, that is being received on the control stream.
    incoming_payload: Option<loading::IncomingPayload>,
}

impl DestinationConnections {
    fn new() -> Self {
        Self { open: BTreeMap::new(), control: ControlGeneration::new(), incoming_payload: None }
    }
}

/// The arriving VM, and all that exists on this host because of its migration.
struct DestinationResources {
    /// Absent before QEMU was started, and after it is gone or was handed to the agent's VMs.
    vm: Option<ArrivingVm>,
    participants: participants::ArrivingParticipants,
    /// Stage of the arrival, with what exists in it alone.
    stage: stages::ArrivalStage,
}

impl DestinationResources {
    fn new(vm: Option<ArrivingVm>, participants: participants::ArrivingParticipants) -> Self {
        Self { vm, participants, stage: stages::ArrivalStage::default() }
    }
}

/// Reports to users and to the source, and measurements for them.
#[derive(Default)]
struct DestinationReporter {
    /// Reason for the end of the migration, for the source.
    reason: Option<String>,
    /// The last report to users, and the state in which it was made; it is not repeated with every retry.
    last_report: Option<(&'static str, DestinationReport)>,
    /// The last error that was logged of those that recur with every retry.
    logged_error: Option<String>,
    /// Digest of the loaded device state, and the time that loading needed, in microseconds.
    loaded: Option<(String, u64)>,
    /// Statistics of `cont`; absent if another agent sent it.
    continued: Option<Continued>,
    go_received_at: Option<Instant>,
    /// CPU time since the migration began here; absent if another agent began it.
    cpu: Option<CpuTime>,
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

impl DestinationDriver {
    /// Creates the destination's side of a migration, in the state that the journal has.
    pub fn new(
        context: Arc<Context>,
        terms: MigrationTerms,
        state: DestinationState,
        proposal: Proposal,
        vm: Option<ArrivingVm>,
        inbox: DestinationInbox,
        publisher: Publisher,
    ) -> Self {
        publisher.update(|progress| {
            progress.ram_bytes = proposal.ram.iter().map(|block| block.bytes).sum();
        });
        let cpu = (state == DestinationState::Idle).then(CpuTime::start);
        let participants = participants::of_an_arriving_vm(&participants::ArrivalEnvironment {
            context: Arc::clone(&context),
            migration: terms.migration.clone(),
            mailbox: inbox.mailbox(),
        });
        Self {
            context,
            terms,
            proposal,
            inbox,
            publisher,
            clock: Clock::start(),
            session: DestinationSession::new(state),
            questions: Questions::default(),
            connections: DestinationConnections::new(),
            resources: DestinationResources::new(vm, participants),
            reporter: DestinationReporter { cpu, ..DestinationReporter::default() },
        }
    }

    /// Returns the time between two attempts.
    fn retry(&self) -> Duration {
        Duration::from_millis(self.context.config.timeouts.retry_ms)
    }

    /// Returns the time without a sign of life after which a party counts as lost for good.
    fn reclaim_after(&self) -> Duration {
        Duration::from_millis(self.context.config.timeouts.reclaim_after_ms)
    }

    /// Returns the source's proposal.
    pub fn proposal(&self) -> &Proposal {
        &self.proposal
    }
}
