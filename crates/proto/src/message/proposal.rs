//! Proposal of a migration, and the answer that accepts it.

use serde::{Deserialize, Serialize};

use super::{Finding, NetworkProbe, is_zero};
use crate::ids::{Epoch, HostId};

/// Description of the VM that the source proposes to migrate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal {
    /// Address (`host:port`) at which the source's agent answers questions.
    pub reply_to: String,
    /// Number of data streams, in every generation.
    pub streams: u16,
    /// RAM blocks; their position in this list is their index on the data streams.
    pub ram: Vec<RamBlock>,
    /// Facts about the source that the destination's pre-flight check compares, as `qemu::SourceFacts`.
    pub facts: serde_json::Value,
    /// Description of the VM, as `qemu::VmDescription`.
    pub description: serde_json::Value,
    /// True for a pre-flight check only: the destination answers and keeps nothing.
    pub check_only: bool,
    /// With an ownership registry: the epoch in which the source owns the VM there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry_epoch: Option<Epoch>,
    /// With an ownership registry: the host that keeps it. Both agents have to ask the same one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness: Option<HostId>,
    /// Kind of RAM that the user requests at the destination (`memfd`, `anonymous`); absent to let pre-flight choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_kind: Option<String>,
    /// Options of QEMU's command line that are to be carried over at the user's request although they are unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_options: Vec<String>,
    /// Disks that the guest writes to, with the user's request for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<ProposedDisk>,
    /// Seed of the page hashes in [deltas](crate::delta); absent if no deltas are sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_seed: Option<u64>,
    /// True if pages may arrive after the guest (post-copy); every generation then has a page stream, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub post_copy: bool,
    /// Probe of the guest's networks, if they are to be checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<NetworkProbe>,
    /// For a VM that moves to another network: what the source offers for the redirection of its connections, as a list of
    /// `net::redirection::RedirectionOffer`, one for each card.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirection: Option<serde_json::Value>,
}

/// A disk that the guest writes to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProposedDisk {
    /// Name in the description.
    pub name: String,
    /// Length as the guest sees it, in bytes.
    pub bytes: u64,
    /// Approximate room that the content needs in an image that is not compressed, in bytes.
    pub allocated_bytes: u64,
    /// Request of the user.
    pub wanted: DiskMode,
    /// True if the user accepts that the copy lacks the internal snapshots of the disk's image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drop_snapshots: bool,
}

/// Request of a user for a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskMode {
    /// Shared if the destination finds that it has the same disk, copied otherwise.
    #[default]
    Auto,
    /// The disk is on storage that both hosts see.
    Shared,
    /// The disk is copied to an image that the destination creates.
    Copy,
}

/// A disk that is copied: a block of its own on the data streams, after the RAM blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedDisk {
    /// Name in the proposal. The position in the list, counted on from the RAM blocks, is the index on the streams.
    pub name: String,
    /// Path of the image at the destination, for messages to users.
    pub path: String,
    /// Format of the image, for messages to users.
    pub format: String,
    /// True if all of it has to be sent, zeros too, because the new image does not read as zeros before it is written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub send_zeros: bool,
}

/// A block of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// QEMU's name of the block.
    pub name: String,
    /// Bytes in use.
    pub bytes: u64,
    /// Size of the host pages of the block, in bytes.
    pub page_bytes: u64,
}

/// Answer of a destination that is ready to receive the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acceptance {
    /// Findings of the pre-flight check, none of them a blocker.
    pub findings: Vec<Finding>,
    /// Duration of starting the destination's QEMU, in microseconds.
    pub qemu_start_us: u64,
    /// Kind of RAM that the VM has at the destination, for the report.
    pub ram_kind: String,
    /// Version of the destination's QEMU, as QEMU itself reports it, for the report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_version: Option<String>,
    /// Disks that are to be sent because they are copied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copied: Vec<CopiedDisk>,
    /// True if the source may send page references.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub references: bool,
    /// Number of templates that references can use.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub templates: u16,
    /// Names of the [codecs](crate::packed::Codec) that the destination unpacks. The source need not know all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub codecs: Vec<String>,
    /// True if the source may send [deltas](crate::delta) of pages that were sent before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deltas: bool,
    /// True if pages may arrive after the guest, where that was proposed; if false, a finding gives the reason.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub post_copy: bool,
    /// True if the destination supports [`Message::Discard`](super::Message::Discard).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub can_discard: bool,
    /// True if the destination supports [`Message::Claims`](super::Message::Claims), and sends
    /// [`Message::FirstFrames`](super::Message::FirstFrames).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_network: bool,
    /// True if the source may hold frames for the guest, and send them ([`Purpose::Frames`](super::Purpose::Frames)).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub takes_frames: bool,
    /// True if the source may send tracked connections of the guest ([`Purpose::Flows`](super::Purpose::Flows)).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub takes_flows: bool,
    /// The redirections of the guest's connections, if they were offered, as a list of `net::redirection::Redirection` in
    /// the order of the offers: each host makes what is its own of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirection: Option<serde_json::Value>,
}
