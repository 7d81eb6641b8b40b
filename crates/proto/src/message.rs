//! What the agents say to one another, as JSON.

mod register;

use serde::{Deserialize, Serialize};

pub use register::{Offer, Ownership, RegisterReply, RegisterRequest};

use crate::ids::{Epoch, Generation, HostId, Incarnation, MigrationId};

/// The first message on every connection, from the side that connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Oldest version that the sender speaks.
    pub oldest: u16,
    /// Newest version that the sender speaks.
    pub newest: u16,
    /// Who connects; the certificate has to bear the same name.
    pub host: HostId,
    /// What the connection is for.
    pub purpose: Purpose,
}

/// What a connection is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "for", rename_all = "kebab-case")]
pub enum Purpose {
    /// Control stream of a migration, source to destination.
    Control {
        /// Which migration.
        migration: MigrationId,
        /// Which set of connections.
        generation: Generation,
    },
    /// Data stream of a migration, source to destination.
    Data {
        /// Which migration.
        migration: MigrationId,
        /// Which set of connections.
        generation: Generation,
        /// Which stream, from 0 on.
        stream: u16,
    },
    /// Questions about a handover, either way, answered from the journal.
    Handover {
        /// Which migration.
        migration: MigrationId,
    },
    /// Questions to the register of owners.
    Register,
}

/// What a source that does not say it meant: guests that are paused are few.
fn ran() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u16) -> bool {
    *number == 0
}

/// The answer to [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Welcome {
    /// The connection is open.
    Accepted {
        /// The version that both sides speak from now on.
        version: u16,
        /// Who answers; the certificate has to bear the same name.
        host: HostId,
    },
    /// The connection is closed after this.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
}

/// Everything said on a connection after the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Message {
    /// Source: will you take this VM? First message of a migration's first generation.
    Propose(Box<Proposal>),
    /// Destination: yes; its QEMU waits, PREPARED is journalled.
    Accept(Acceptance),
    /// Destination: no; nothing is left of it.
    Reject {
        /// What stands in the way.
        findings: Vec<Finding>,
        /// Where that is the epoch: the largest of the VM that this host has seen. The next attempt takes a larger one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        largest_epoch: Option<Epoch>,
    },
    /// Source: this control stream takes the place of the broken one. First message of a later generation.
    Resume,
    /// Destination: workers of older generations have ended, data streams may come.
    Resumed,
    /// Source, where the destination has templates: do they have pages such as these? Some pages of the disks that are
    /// copied, from here and there. Answered with [`Message::Known`].
    Seek {
        /// Names of pages: the first 6 bytes of their BLAKE3, in 12 lower-case hexadecimal digits.
        names: Vec<String>,
    },
    /// Destination: what is in a template. Several of them answer one [`Message::Seek`], each template in order.
    Known {
        /// The template's number, by which references name it.
        template: u16,
        /// Pages that are not all zeros.
        runs: Vec<NamedRun>,
        /// Whether there is no more; the last one may have no runs.
        last: bool,
    },
    /// Source: the guest has stopped and all its pages were acknowledged; compare them with these hashes of my side.
    Verify {
        /// Index of the RAM block in the proposal's list; behind them are the disks that are copied, in their order.
        block: u16,
        /// First chunk of the list.
        first_chunk: u64,
        /// XXH3 of each chunk's bytes, 64 bits, in 16 lower-case hexadecimal digits.
        hashes: Vec<String>,
    },
    /// Destination: the answer to [`Message::Verify`].
    Verified {
        /// Chunks whose bytes differ.
        different_chunks: Vec<u64>,
    },
    /// Source: these pages will come while the guest runs (post-copy), for they were written since they were sent, as far as
    /// is known while it runs here. What is there of them is taken away now, so that it need not be when the guest stands
    /// still. Entries as of [`Message::Awaited`] follow in one `Blob` frame; answered with TAKEN-AWAY. They are among those
    /// that are named in the end, unless RESUME comes before.
    TakeAway {
        /// How many bytes follow.
        bytes: u64,
        /// BLAKE3 of the bytes, in 64 lower-case hexadecimal digits.
        digest: String,
    },
    /// Destination: the answer to [`Message::TakeAway`].
    TakenAway {
        /// How long that took, in microseconds.
        duration_us: u64,
    },
    /// These pages are to come while the guest runs (post-copy). Source: before the device state. Destination: first on
    /// the page stream, in every generation. The entries follow in `Blob` frames; see [`crate::awaited`].
    Awaited {
        /// How many bytes follow.
        bytes: u64,
        /// BLAKE3 of the bytes, in 64 lower-case hexadecimal digits.
        digest: String,
        /// The last round of which anything was seen: the next one has a larger number.
        round: u32,
    },
    /// Destination, on the page stream: somebody waits for these pages.
    Want {
        /// The pages.
        pages: Vec<WantedPage>,
    },
    /// Source: the guest's devices. The bytes follow in `Blob` frames. All RAM was acknowledged before.
    DeviceState {
        /// How many bytes follow.
        bytes: u64,
        /// BLAKE3 of the bytes, in 64 lower-case hexadecimal digits.
        digest: String,
    },
    /// Source: its QEMU is held. The guest has stood still since the stop, and nobody can continue it before the matter
    /// is decided. Until it has heard this, the destination is not ready, however much it has loaded.
    Held {
        /// Which migration.
        epoch: Epoch,
        /// Whether the guest ran before the stop. Decided without the source, it is to stay as it was.
        #[serde(default = "ran")]
        run: bool,
    },
    /// Destination: loaded and paused, everything durable. From here on it is in doubt.
    Ready {
        /// Which migration.
        epoch: Epoch,
        /// What GO has to name.
        incarnation: Incarnation,
        /// BLAKE3 of the device state that was loaded, in hexadecimal; empty if the agent was restarted since.
        digest: String,
        /// How long loading took, in microseconds.
        load_us: u64,
    },
    /// Source: COMMITTED is journalled; run.
    Go {
        /// Which migration.
        epoch: Epoch,
        /// Which process is to run.
        incarnation: Incarnation,
        /// Whether the guest is to run on, or was paused by its user and stays so.
        run: bool,
    },
    /// Destination: the guest is yours no more.
    Running {
        /// Which migration.
        epoch: Epoch,
        /// From GO's arrival until QEMU's `cont` had returned, in microseconds.
        continue_us: u64,
        /// From that moment until this message was sent, in microseconds: the guest had been running for so long.
        #[serde(default)]
        since_us: u64,
        /// The part of `continue_us` after QEMU's event RESUME, in microseconds; absent if there was none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resumed_us: Option<u64>,
        /// CPU time of its agent since the proposal, in microseconds, for the report; absent if the agent was
        /// restarted since.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        agent_cpu_us: Option<u64>,
        /// A page that came after the guest was there already when it came, at or after this one: the guest was stopped.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        untrusted: Option<WantedPage>,
    },
    /// Destination: the guest runs here, and pages of it are still to come (post-copy). The source keeps what it has.
    Incomplete {
        /// Which migration.
        epoch: Epoch,
        /// The last set of connections that it knows of: the next one has a larger number.
        generation: Generation,
        /// As in [`Message::Running`]; 0 if another agent did it.
        continue_us: u64,
        /// As in [`Message::Running`].
        since_us: u64,
        /// As in [`Message::Running`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resumed_us: Option<u64>,
        /// As in [`Message::Running`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        untrusted: Option<WantedPage>,
    },
    /// Destination: journalled that it will never run this epoch.
    Refused {
        /// Which migration.
        epoch: Epoch,
        /// Why.
        reason: String,
    },
    /// Destination: its copy is gone, and a virtual CPU of it may have run.
    Crashed {
        /// Which migration.
        epoch: Epoch,
        /// What is known about it.
        reason: String,
    },
    /// Source: what do you have of this epoch? Answered with READY, INCOMPLETE, RUNNING, REFUSED or CRASHED.
    Inquire {
        /// Which migration.
        epoch: Epoch,
    },
    /// Source: the migration ends before COMMITTED; discard.
    Abort {
        /// Which migration.
        epoch: Epoch,
        /// Why.
        reason: String,
    },
    /// Destination, in doubt: what did you decide?
    Ask {
        /// Which migration.
        epoch: Epoch,
    },
    /// Source: what the journal says.
    Verdict {
        /// Which migration.
        epoch: Epoch,
        /// What was decided.
        verdict: Verdict,
    },
    /// Either side: are you there?
    Ping,
    /// The answer to [`Message::Ping`].
    Pong,
    /// To the register of owners.
    Register(RegisterRequest),
    /// From the register of owners.
    Registered(RegisterReply),
}

/// What the source decided about an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "decided", rename_all = "kebab-case")]
pub enum Verdict {
    /// This incarnation is to run.
    Committed {
        /// The incarnation.
        incarnation: Incarnation,
        /// Whether the guest is to run on, or was paused by its user and stays so.
        run: bool,
    },
    /// The source runs on, and this copy was never told to run; discard.
    Aborted,
    /// The source runs on after all: the copy's refusal, the register or an operator has decided so after COMMITTED.
    /// Discard, unless nobody knows whether the copy has run meanwhile.
    Returned,
    /// Nothing yet: ask again.
    Undecided,
}

/// A page that somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WantedPage {
    /// Index of the RAM block in the proposal's list.
    pub block: u16,
    /// Its number in the block.
    pub page: u64,
}

/// A VM on offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal {
    /// Address (`host:port`) at which the source's agent answers questions.
    pub reply_to: String,
    /// How many data streams will come, in every generation.
    pub streams: u16,
    /// RAM blocks; their place in this list is their index on the data streams.
    pub ram: Vec<RamBlock>,
    /// Facts about the source that the destination's pre-flight compares, as `qemu::SourceFacts`.
    pub facts: serde_json::Value,
    /// The VM, as `qemu::VmDescription`.
    pub description: serde_json::Value,
    /// Only check: the destination answers and forgets.
    pub check_only: bool,
    /// With a register of owners: the epoch in which the source holds the VM there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub register_epoch: Option<Epoch>,
    /// With a register of owners: the host that keeps it. Both sides have to ask the same one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness: Option<HostId>,
    /// Kind of RAM that the user wants at the destination (`memfd`, `anonymous`); absent to let pre-flight choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_kind: Option<String>,
    /// Options of QEMU's command line that the user wants carried over although they are not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_options: Vec<String>,
    /// Disks that the guest writes to, and what is wanted for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<ProposedDisk>,
    /// Seed of the hashes of pages of which only what [changed](crate::delta) is sent; absent where none come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_seed: Option<u64>,
    /// Whether pages may come after the guest: then there is a page stream in every generation, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub post_copy: bool,
}

/// A disk that a guest writes to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProposedDisk {
    /// Its name in the description.
    pub name: String,
    /// Its length as the guest sees it, in bytes.
    pub bytes: u64,
    /// How much room its content takes in an image that is not compressed, about, in bytes.
    pub allocated_bytes: u64,
    /// What is wanted.
    pub wanted: DiskWish,
    /// Whether the user does without the internal snapshots of its image, which a copy has not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves_snapshots: bool,
}

/// What a user wants of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskWish {
    /// Shared if the destination sees that it is the same there, copied otherwise.
    #[default]
    Auto,
    /// It is on storage that both hosts see.
    Shared,
    /// It is copied to an image that the destination makes.
    Copy,
}

/// A disk that is copied: a block of its own on the data streams, after the RAM blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedDisk {
    /// Its name in the proposal. Its place in the list, counted on from the RAM blocks, is its index on the streams.
    pub name: String,
    /// Where its image is at the destination, for people.
    pub path: String,
    /// The image's format, for people.
    pub format: String,
    /// Whether all of it has to be sent, zeros too: what the image has before it is written is not zeros.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub zeros_too: bool,
}

/// Neighbouring pages, by their names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedRun {
    /// The first page.
    pub first_page: u64,
    /// Their names as in [`Message::Seek`], one after the other, without anything in between.
    pub names: String,
}

/// A block of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// QEMU's name for it.
    pub name: String,
    /// Bytes in use.
    pub bytes: u64,
    /// Size of the host pages behind it, in bytes.
    pub page_bytes: u64,
}

/// A destination that waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acceptance {
    /// What pre-flight had to say, none of it a blocker.
    pub findings: Vec<Finding>,
    /// How long starting its QEMU took, in microseconds.
    pub qemu_start_us: u64,
    /// Kind of RAM that the VM gets, for the report.
    pub ram_kind: String,
    /// Version of its QEMU, as the QEMU itself tells it, for the report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_version: Option<String>,
    /// Disks that are to be sent, because they are copied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copied: Vec<CopiedDisk>,
    /// Whether pages may be referred to.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub references: bool,
    /// How many templates there are to refer to.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub templates: u16,
    /// Names of the [codecs](crate::packed::Codec) that it unpacks. The source need not know all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub codecs: Vec<String>,
    /// Whether of pages that were sent before what [changed](crate::delta) may be sent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deltas: bool,
    /// Whether pages may come after the guest, where that was proposed; if not, a finding says why.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub post_copy: bool,
    /// Whether it knows [`Message::TakeAway`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub takes_away: bool,
}

/// One thing that pre-flight found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Stable name of the check.
    pub code: String,
    /// What was found.
    pub what: String,
    /// What to do about it.
    pub advice: String,
}

/// How bad a [`Finding`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Good to know.
    Info,
    /// The migration goes on; something may be slower or different.
    Warning,
    /// The migration cannot be done.
    Blocker,
}
