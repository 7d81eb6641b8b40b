//! The agreement of both hosts about a migration.

use proto::message::{CopiedDisk, Proposal};
use proto::packed::Codec;

/// The proposal, and what both hosts can do.
#[derive(Default)]
pub(super) struct Agreement {
    pub(super) proposal: Option<Proposal>,
    /// True if the destination supports post-copy and the goals allow it.
    pub(super) can_post_copy: bool,
    /// True if the destination discards pages before the guest is stopped.
    pub(super) can_discard: bool,
    /// True while the destination's answer about its templates is not complete.
    pub(super) is_querying_templates: bool,
}

/// Capabilities that a destination has accepted.
#[derive(Debug)]
pub(super) struct Capabilities {
    /// Disks that are to be sent.
    pub(super) copied: Vec<CopiedDisk>,
    /// True if the destination accepts page references.
    pub(super) references: bool,
    /// Number of templates at the destination.
    pub(super) templates: u16,
    /// Codecs that both hosts know.
    pub(super) codecs: Vec<Codec>,
    /// True if the destination accepts deltas.
    pub(super) deltas: bool,
    /// True if the destination announces the guest's addresses, and measures its first frames.
    pub(super) has_network: bool,
    /// True if the destination accepts frames for the guest.
    pub(super) takes_frames: bool,
    /// True if the destination installs tracked connections of the guest.
    pub(super) takes_flows: bool,
}
