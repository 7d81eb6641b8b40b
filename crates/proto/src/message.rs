//! Messages between the agents, as JSON.

mod finding;
pub(crate) mod fleet;
mod network;
mod proposal;
mod redirection;
mod registry;

use serde::{Deserialize, Serialize};

pub use finding::{Finding, Severity, is_blocked};
pub use fleet::{
    CommandAnswer, CommandVerb, CpuFacts, EvacuationStanding, FleetChange, FleetReport, HostEvacuation,
    HostFacts, HostLoad, MigrationFacts, MigrationProgress, MigrationStanding, MoveOrder, MovePolicy,
    VmFacts,
};
pub use network::{CardClaims, CardFrames, ClaimedAddress, FailedFlow, NetworkProbe, ProbedCard};
pub use proposal::{Acceptance, CopiedDisk, DiskMode, Proposal, ProposedDisk, RamBlock};
pub use redirection::{RepointStep, TunnelRequest};
pub use registry::{Offer, Ownership, RegistryReply, RegistryRequest};

use crate::ids::{CommandId, Epoch, Generation, HostId, Incarnation, MigrationId};

/// First message on every connection, from the agent that connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Oldest version that the sender supports.
    pub oldest: u16,
    /// Newest version that the sender supports.
    pub newest: u16,
    /// The host that connects; its certificate has to bear the same name.
    pub host: HostId,
    /// Purpose of the connection.
    pub purpose: Purpose,
}

/// Purpose of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "for", rename_all = "kebab-case")]
pub enum Purpose {
    /// Control stream of a migration, source to destination.
    Control {
        /// The migration.
        migration: MigrationId,
        /// Number of the set of connections.
        generation: Generation,
    },
    /// Data stream of a migration, source to destination.
    Data {
        /// The migration.
        migration: MigrationId,
        /// Number of the set of connections.
        generation: Generation,
        /// Number of the stream, from 0 on.
        stream: u16,
    },
    /// Questions about a handover, in either direction, answered from the journal.
    Handover {
        /// The migration.
        migration: MigrationId,
    },
    /// Requests to the ownership registry.
    Registry,
    /// Frames for the guest that the source holds from shortly before the stop, source to destination, as `net::held`
    /// encodes them in `Blob` frames.
    Frames {
        /// The migration.
        migration: MigrationId,
    },
    /// Tracked connections of the guest, source to destination, from before the stop on.
    Flows {
        /// The migration.
        migration: MigrationId,
    },
    /// Questions and orders about connections of a guest that has moved to another network, between hosts that serve
    /// them.
    Redirection {
        /// The migration by which it has moved, or moves on.
        migration: MigrationId,
    },
    /// Measurement of the link, for a forecast. No migration is concerned.
    Measurement,
    /// Reports of an agent to its controller, and commands of the controller; agent to controller.
    Controller,
}

/// Default for a source that omits the field: the guest ran, because few guests are paused.
fn default_run() -> bool {
    true
}

fn is_zero<N: Default + PartialEq>(number: &N) -> bool {
    *number == N::default()
}

/// Answer to [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Welcome {
    /// The connection is open.
    Accepted {
        /// Protocol version of the connection.
        version: u16,
        /// The host that answers; its certificate has to bear the same name.
        host: HostId,
    },
    /// The connection is refused, and closed after this message.
    Refused {
        /// Reason, with advice.
        reason: String,
    },
}

/// Any message on a connection after the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Message {
    /// Source: proposes the VM. First message of a migration's first generation.
    Propose(Box<Proposal>),
    /// Destination: accepts; its QEMU waits, PREPARED is journalled.
    Accept(Acceptance),
    /// Destination: rejects the VM, and has removed everything that it had prepared.
    Reject {
        /// Findings of the pre-flight check that stand in the way.
        findings: Vec<Finding>,
        /// Largest epoch of the VM that this host has seen, if the epoch is the reason. The next attempt uses a larger
        /// one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        largest_epoch: Option<Epoch>,
    },
    /// Source: this control stream replaces the broken one. First message of a later generation.
    Resume,
    /// Destination: workers of older generations have ended, and data streams may be opened.
    Resumed,
    /// Source, if the destination has templates: queries them for a sample of the pages of the disks that are copied.
    /// Answered with [`Message::TemplatePages`].
    QueryTemplates {
        /// Content hashes of pages: the first 6 bytes of their BLAKE3, in 12 lower-case hexadecimal digits.
        hashes: Vec<String>,
    },
    /// Destination: pages of a template. Several of these messages answer one [`Message::QueryTemplates`], each
    /// template in order.
    TemplatePages {
        /// Number of the template, which references use.
        template: u16,
        /// Pages that are not zero pages.
        runs: Vec<HashedRun>,
        /// True for the last message of the answer, which may have no runs.
        last: bool,
    },
    /// Source: the guest has stopped and all its pages were acknowledged; asks the destination to compare its pages
    /// with these hashes of the source's pages.
    Verify {
        /// Index of the RAM block in the proposal's list; the copied disks follow the RAM blocks, in their order.
        block: u16,
        /// First chunk of the list.
        first_chunk: u64,
        /// XXH3 of each chunk's bytes, 64 bits, in 16 lower-case hexadecimal digits.
        hashes: Vec<String>,
    },
    /// Destination: answers [`Message::Verify`].
    Verified {
        /// Chunks whose bytes differ.
        different_chunks: Vec<u64>,
    },
    /// Source: these pages will arrive while the guest runs at the destination (post-copy), because the guest has
    /// written them since they were sent, as far as the source knows while the guest runs here. The destination
    /// discards its versions now, so that this takes no time while the guest is stopped. Entries as for
    /// [`Message::MissingPages`] follow in one `Blob` frame; answered with [`Message::Discarded`]. The list at the end
    /// contains these pages, too, unless [`Message::Resume`] is sent before it.
    Discard {
        /// Length of the entries, in bytes.
        bytes: u64,
        /// BLAKE3 of the entries, in 64 lower-case hexadecimal digits.
        digest: String,
    },
    /// Destination: answers [`Message::Discard`].
    Discarded {
        /// Duration of the discard, in microseconds.
        duration_us: u64,
    },
    /// List of the missing pages, which arrive while the guest runs (post-copy). Source: before the device state.
    /// Destination: first message on the page stream, in every generation. The entries follow in `Blob` frames; see
    /// [`crate::missing_pages`].
    MissingPages {
        /// Length of the entries, in bytes.
        bytes: u64,
        /// BLAKE3 of the entries, in 64 lower-case hexadecimal digits.
        digest: String,
        /// Last round of which any frame was sent or received: the next one has a larger number.
        round: u32,
    },
    /// Destination, on the page stream: requests these pages, for which a thread waits.
    RequestPages {
        /// The pages.
        pages: Vec<PageRequest>,
    },
    /// Destination, last message on the page stream: all pages are present, and the destination closes the page stream
    /// and the data streams. It is no end of post-copy: that is [`Message::Running`], which may still have to wait for
    /// the journal.
    PagesComplete,
    /// Source, before the stop, if the destination has accepted it: addresses that the guest has claimed, which the
    /// destination announces.
    Claims {
        /// The guest's network cards.
        cards: Vec<CardClaims>,
    },
    /// Source, on a connection for flows: changes to the tracked connections of the guest since the last of these
    /// messages. They follow in `Blob` frames, as `net::flows` encodes them. Answered with [`Message::FlowsInstalled`].
    Flows {
        /// Length of the changes, in bytes.
        bytes: u64,
    },
    /// Destination: answers [`Message::Flows`] when the changes are made.
    FlowsInstalled {
        /// Number of tracked connections that are installed by now.
        installed: u32,
        /// Tracked connections of this list that could not be installed.
        failed: Vec<FailedFlow>,
        /// Number of others that could not be installed either.
        #[serde(default, skip_serializing_if = "is_zero")]
        more_failed: u32,
    },
    /// Source: state of the guest's devices, compressed by Zstandard. The compressed bytes follow in `Blob` frames. All
    /// RAM was acknowledged before.
    DeviceState {
        /// Length of the compressed device state, in bytes.
        bytes: u64,
        /// Length of the device state, in bytes.
        state_bytes: u64,
        /// BLAKE3 of the device state, in 64 lower-case hexadecimal digits.
        digest: String,
    },
    /// Source: its QEMU is frozen. The guest has not run since the stop, and nothing can continue it before the
    /// handover is decided. The destination is not ready before it has received this message, however much it has
    /// loaded.
    Frozen {
        /// The migration.
        epoch: Epoch,
        /// True if the guest ran before the stop. If the handover is decided without the source, the guest keeps that
        /// state.
        #[serde(default = "default_run")]
        run: bool,
    },
    /// Destination: the state is loaded, the guest is paused, and everything is durable. From here on it is in doubt.
    Ready {
        /// The migration.
        epoch: Epoch,
        /// The incarnation that GO has to name.
        incarnation: Incarnation,
        /// BLAKE3 of the device state that was loaded, in hexadecimal; empty if the agent was restarted since.
        digest: String,
        /// Duration of loading, in microseconds.
        load_us: u64,
    },
    /// Source: COMMITTED is journalled; the destination is to run the guest.
    Go {
        /// The migration.
        epoch: Epoch,
        /// The process that is to run.
        incarnation: Incarnation,
        /// True if the guest is to run; false if its user had paused it, and it stays paused.
        run: bool,
    },
    /// Destination: owns the guest and has continued it; nothing is missing.
    Running {
        /// The migration.
        epoch: Epoch,
        /// Time from GO's arrival until QEMU's `cont` returned, in microseconds.
        continue_us: u64,
        /// Time from that moment until this message was sent, in microseconds, during which the guest has run.
        #[serde(default)]
        since_us: u64,
        /// Part of `continue_us` after QEMU's event RESUME, in microseconds; absent if there was no such event.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resumed_us: Option<u64>,
        /// CPU time of the destination's agent since the proposal, in microseconds, for the report; absent if the
        /// agent was restarted since.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        agent_cpu_us: Option<u64>,
        /// Address at or behind which a page that arrived after the guest was already present at its arrival; the
        /// guest was stopped.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unexpected_page: Option<PageRequest>,
    },
    /// Destination: the guest runs here, and pages are missing (post-copy). The source keeps its pages.
    Incomplete {
        /// The migration.
        epoch: Epoch,
        /// Last set of connections that the destination knows: the next one has a larger number.
        generation: Generation,
        /// Value as in [`Message::Running`]; 0 if another agent has continued the guest.
        continue_us: u64,
        /// Value as in [`Message::Running`].
        since_us: u64,
        /// Value as in [`Message::Running`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resumed_us: Option<u64>,
        /// Value as in [`Message::Running`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unexpected_page: Option<PageRequest>,
    },
    /// Destination, after RUNNING, if it has accepted [`Message::Claims`]: first frames of the guest.
    FirstFrames {
        /// The migration.
        epoch: Epoch,
        /// The guest's network cards; none if they were not measured.
        cards: Vec<CardFrames>,
    },
    /// Destination: has journalled that it will never run this epoch.
    Refused {
        /// The migration.
        epoch: Epoch,
        /// Reason.
        reason: String,
    },
    /// Destination: its copy is lost, and a virtual CPU of this copy may have run.
    Crashed {
        /// The migration.
        epoch: Epoch,
        /// Known circumstances.
        reason: String,
    },
    /// Source: asks for the destination's state in this epoch. Answered with READY, INCOMPLETE, RUNNING, REFUSED or
    /// CRASHED.
    Inquire {
        /// The migration.
        epoch: Epoch,
    },
    /// Source: the migration ends before COMMITTED; the destination is to discard its copy.
    Abort {
        /// The migration.
        epoch: Epoch,
        /// Reason.
        reason: String,
    },
    /// Destination, in doubt: asks for the source's decision.
    Ask {
        /// The migration.
        epoch: Epoch,
    },
    /// Source: the decision in its journal.
    Verdict {
        /// The migration.
        epoch: Epoch,
        /// The decision.
        verdict: Verdict,
    },
    /// Source, on a connection for that: measures the rate of the link by these bytes, which follow in `Blob` frames and
    /// mean nothing. Answered with [`Message::LinkMeasured`].
    MeasureLink {
        /// Length of the data that follows, in bytes.
        bytes: u64,
    },
    /// Destination: answers [`Message::MeasureLink`] once all of its data has arrived.
    LinkMeasured {
        /// Length of the data after the first frame, in bytes.
        bytes: u64,
        /// Time from the arrival of the first frame to that of the last one, in microseconds.
        duration_us: u64,
    },
    /// Either agent: checks that the peer answers.
    Ping,
    /// Answer to [`Message::Ping`].
    Pong,
    /// Request to the ownership registry.
    RegistryRequest(RegistryRequest),
    /// Answer of the ownership registry.
    RegistryReply(RegistryReply),
    /// Asks, on a connection for that, whether the redirection of a migration stands. Answered with
    /// [`Message::RedirectionStands`].
    AskRedirection,
    /// Answers [`Message::AskRedirection`].
    RedirectionStands {
        /// True if this host has its part of the redirection, or is about to have it.
        stands: bool,
        /// True if it is in effect for good: the guest has moved.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        confirmed: bool,
    },
    /// Source, to a host that the guest has left before: asks for that host's end of a tunnel to the destination.
    /// Answered with [`Message::TunnelEnd`].
    AskTunnelEnd(TunnelRequest),
    /// Host that the guest has left before: answers [`Message::AskTunnelEnd`].
    TunnelEnd {
        /// Its end, as `net::redirection::OfferedEnd`; absent if it has none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        end: Option<serde_json::Value>,
        /// Reason for which it has none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// Source, to a host that the guest has left before: changes the other end of that host's tunnel. Answered with
    /// [`Message::Repointed`].
    Repoint {
        /// The step.
        step: RepointStep,
        /// The redirection that takes the place of the present one, as `net::redirection::Redirection`; only with the first
        /// step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        redirection: Option<serde_json::Value>,
    },
    /// Host that the guest has left before: answers [`Message::Repoint`].
    Repointed {
        /// Reason for which the step was not done.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// Controller, first message to an agent: the term of the controller. Agent, if it has seen a larger one: that term, before
    /// it closes the connection.
    ControllerTerm {
        /// The term.
        term: u64,
    },
    /// Controller, to an agent: requests an action. Answered with [`FleetReport::Answer`].
    FleetCommand {
        /// Term of the controller that sends it.
        term: u64,
        /// Id, which stays the same when it is sent again.
        id: CommandId,
        /// The action.
        command: CommandVerb,
    },
    /// Controller, to an agent that has asked for the evacuation of its host: its state, also when that changes.
    HostEvacuation(HostEvacuation),
    /// Agent, to its controller.
    FleetReport {
        /// Number of the report on this connection, from 1 on.
        seq: u64,
        /// The report.
        report: FleetReport,
    },
}

/// Decision of the source about an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "decided", rename_all = "kebab-case")]
pub enum Verdict {
    /// This incarnation is to run.
    Committed {
        /// The incarnation.
        incarnation: Incarnation,
        /// True if the guest is to run; false if its user had paused it, and it stays paused.
        run: bool,
    },
    /// The guest continues at the source, and the copy was never permitted to run; the destination discards it.
    Aborted,
    /// The guest continues at the source after all: the copy's refusal, the registry or an operator has decided so
    /// after COMMITTED. The destination discards the copy, unless it is unknown whether the copy has run in the
    /// meantime.
    Returned,
    /// The source has not decided yet; the destination asks again.
    Undecided,
}

/// Address of a page that is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageRequest {
    /// Index of the RAM block in the proposal's list.
    pub block: u16,
    /// Number of the page in the block.
    pub page: u64,
}

/// Content hashes of neighbouring pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashedRun {
    /// Number of the first page.
    pub first_page: u64,
    /// Hashes as in [`Message::QueryTemplates`], one after the other, without a separator.
    pub hashes: String,
}
