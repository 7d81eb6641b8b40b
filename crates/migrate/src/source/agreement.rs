//! The agreement of both hosts about a migration.

use engine::handover::MigrationTerms;
use net::conntrack::TrackedConnection;
use net::redirection::offer::RedirectedMove;
use net::redirection::{Redirection, RedirectionOffer};
use proto::message::{CopiedDisk, Proposal};
use proto::packed::Codec;
use serde_json::Value;

/// The proposal, and what both hosts can do.
#[derive(Default)]
pub(super) struct Agreement {
    pub(super) proposal: Option<Proposal>,
    /// True if the destination supports post-copy and the goals allow it.
    pub(super) can_post_copy: bool,
    /// True if the destination discards pages before the guest is stopped.
    pub(super) can_discard: bool,
    /// Redirection of the guest's connections, if it moves to another network.
    pub(super) redirection: Option<RedirectedGuest>,
    /// True while the destination's answer about its templates is not complete.
    pub(super) is_querying_templates: bool,
}

/// Redirection of the connections of a guest that moves to another network.
#[derive(Clone, Debug)]
pub(super) struct RedirectedGuest {
    /// Offer of this host.
    pub(super) offer: RedirectionOffer,
    /// Redirection that both hosts make.
    pub(super) redirection: Redirection,
}

impl RedirectedGuest {
    /// Returns the redirection of an answer to a proposal; none if none was proposed.
    ///
    /// # Errors
    /// The reason why it is not the one that was offered: nothing else is made on this host.
    pub(super) fn of(
        terms: &MigrationTerms,
        proposal: &Proposal,
        answered: Option<Value>,
    ) -> Result<Option<Self>, String> {
        let Some(offered) = proposal.redirection.clone() else { return Ok(None) };
        let answered = answered.ok_or("the destination does not redirect the VM's connections")?;
        let unreadable = |error: serde_json::Error| format!("the redirection cannot be read: {error}");
        let offer: RedirectionOffer = serde_json::from_value(offered).map_err(unreadable)?;
        let redirection: Redirection = serde_json::from_value(answered).map_err(unreadable)?;
        let (name, epoch) = (terms.migration.to_string(), terms.epoch().0);
        let of = RedirectedMove { migration: &name, epoch };
        if offer.is_of(&redirection, of, terms.destination.as_str()) {
            Ok(Some(Self { offer, redirection }))
        } else {
            Err("the destination's redirection is not the one that was offered".to_owned())
        }
    }

    /// Returns an entry of connection tracking as the destination needs it; none if the connection cannot go on.
    pub(super) fn carried(&self, entry: &TrackedConnection) -> Option<TrackedConnection> {
        let from = self.offer.place.host.as_str();
        net::redirection::onward::carried(entry, from, self.offer.former.as_ref(), &self.redirection)
    }
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
