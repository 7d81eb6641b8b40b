//! The agreement of both hosts about a migration.

use std::collections::BTreeSet;
use std::net::IpAddr;

use engine::handover::MigrationTerms;
use net::conntrack::ConntrackEntry;
use net::redirection::offer::MigrationRef;
use net::redirection::{Redirection, RedirectionOffer, next_move};
use proto::message::{Acceptance, Proposal};
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

impl Agreement {
    /// Returns the agreement with a destination that has answered this.
    pub(super) fn with<'a>(&'a self, acceptance: &'a Acceptance) -> Agreed<'a> {
        Agreed { proposal: self.proposal.as_ref(), acceptance, redirection: self.redirection.as_ref() }
    }
}

/// Proposal and answer, as participants see them.
pub(super) struct Agreed<'a> {
    /// The proposal of the source.
    pub(super) proposal: Option<&'a Proposal>,
    /// The answer of the destination.
    pub(super) acceptance: &'a Acceptance,
    /// Redirection of the guest's connections, if it moves to another network.
    pub(super) redirection: Option<&'a RedirectedGuest>,
}

/// Redirection of the connections of a guest that moves to another network.
#[derive(Clone, Debug)]
pub(super) struct RedirectedGuest {
    /// Its cards that get new addresses.
    pub(super) cards: Vec<RedirectedCard>,
}

/// Redirection of the connections of one card.
#[derive(Clone, Debug)]
pub(super) struct RedirectedCard {
    /// Offer of this host.
    pub(super) offer: RedirectionOffer,
    /// Redirection that all hosts make.
    pub(super) redirection: Redirection,
}

impl RedirectedGuest {
    /// Returns the redirections of an answer to a proposal; none if none were proposed.
    ///
    /// # Errors
    /// The reason why they are not those that were offered: nothing else is made on this host.
    pub(super) fn of(
        terms: &MigrationTerms,
        proposal: &Proposal,
        answered: Option<Value>,
    ) -> Result<Option<Self>, String> {
        let Some(offered) = proposal.redirection.clone() else { return Ok(None) };
        let answered = answered.ok_or("the destination does not redirect the VM's connections")?;
        let unreadable = |error: serde_json::Error| format!("the redirection cannot be read: {error}");
        let offers: Vec<RedirectionOffer> = serde_json::from_value(offered).map_err(unreadable)?;
        let redirections: Vec<Redirection> = serde_json::from_value(answered).map_err(unreadable)?;
        let (name, epoch) = (terms.migration.to_string(), terms.epoch().0);
        let of = MigrationRef { migration: &name, epoch };
        let is_offered = |(offer, redirection): (&RedirectionOffer, &Redirection)| {
            offer.is_of(redirection, of, terms.destination.as_str())
        };
        if offers.len() == redirections.len() && offers.iter().zip(&redirections).all(is_offered) {
            let cards = offers.into_iter().zip(redirections);
            let card = |(offer, redirection)| RedirectedCard { offer, redirection };
            Ok(Some(Self { cards: cards.map(card).collect() }))
        } else {
            Err("the destination's redirection is not the one that was offered".to_owned())
        }
    }

    /// Returns its redirections.
    pub(super) fn redirections(&self) -> Vec<Redirection> {
        self.cards.iter().map(|card| card.redirection.clone()).collect()
    }

    /// Returns true if this host may only bridge packets of a card, and so have no conntrack entries of its flows: it has not
    /// redirected them.
    pub(super) fn is_untracked(&self) -> bool {
        self.cards.iter().any(|card| card.offer.former.is_none())
    }

    /// Returns the guest's addresses whose connections are redirected.
    pub(super) fn addresses(&self) -> BTreeSet<IpAddr> {
        self.cards.iter().flat_map(|card| card.redirection.guest_addresses()).collect()
    }

    /// Returns a conntrack entry as the destination needs it; none if the connection cannot go on.
    pub(super) fn carried(&self, entry: &ConntrackEntry) -> Option<ConntrackEntry> {
        let RedirectedCard { offer, redirection } =
            next_move::of_entry(entry, &self.cards, |card| &card.redirection)?;
        next_move::carried(entry, &offer.place.host, offer.former.as_ref(), redirection)
    }
}
