//! The redirection of a guest that moves on, or back.
//!
//! A host that the guest has left has a tunnel of its own to the host where it is: there are no chains. What came through
//! a tunnel of the former redirection comes through the one to the same host in the next, so that its connections go on.
//! Connections by way of a host that has no part in the [offer](super::offer) of the next one end.

use std::collections::BTreeMap;

use super::kernel_names::{MARK_MASK, mark};
use super::model::{GuestPlace, Leg, NewAddressMode, Redirection};
use super::tunnel::Tunnel;
use crate::conntrack::ConntrackEntry;
use crate::ethernet::Mac;

/// A move to another network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkMove {
    /// Name of the migration.
    pub migration: String,
    /// Epoch of the guest's ownership after it.
    pub epoch: u64,
    /// MAC address of the guest's card.
    pub card: Mac,
    /// Owner of the new address.
    pub addressing: NewAddressMode,
    /// Former place of the guest. Counts as long as there is no redirection yet.
    pub from: GuestPlace,
    /// New place.
    pub to: GuestPlace,
    /// Tunnels to the hosts that it has left, each with its number. A host without one serves no connection any more.
    pub tunnels: BTreeMap<String, (u32, Tunnel)>,
}

/// Result of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextRedirection {
    /// The redirection; none if nothing is to be redirected.
    pub redirection: Option<Redirection>,
    /// Hosts that served connections, and to which there is no tunnel: these connections end.
    pub dropped: Vec<String>,
}

/// Error: another host owns the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the redirection is of epoch {recorded}, and epoch {requested} may not change it: the VM has moved on; ask the agent \
     of the host where it is"
)]
pub struct NotOwner {
    /// Epoch of the redirection that is there.
    pub recorded: u64,
    /// Epoch of the request.
    pub requested: u64,
}

/// Allows a change of a redirection to the guest's owner alone: a later epoch, or the same migration once more.
///
/// # Errors
/// [`NotOwner`] for an earlier epoch, or for another migration of the same one.
pub fn may_change(recorded: &Redirection, migration: &str, epoch: u64) -> Result<(), NotOwner> {
    let is_same = recorded.epoch == epoch && recorded.migration == migration;
    if epoch > recorded.epoch || is_same {
        return Ok(());
    }
    Err(NotOwner { recorded: recorded.epoch, requested: epoch })
}

/// Computes the redirection after a move.
///
/// # Errors
/// If the former redirection is not the mover's.
pub fn next_redirection(old: Option<&Redirection>, next: NetworkMove) -> Result<NextRedirection, NotOwner> {
    let NetworkMove { migration, epoch, card, addressing, from, to, mut tunnels } = next;
    if let Some(old) = old {
        may_change(old, &migration, epoch)?;
    }
    let from = old.map_or(from, |old| old.place.clone());
    let known_home = old.and_then(|old| old.home_lan.clone());
    let before = old.into_iter().flat_map(|old| &old.legs);
    let before: Vec<_> = before.map(|leg| (leg.host.clone(), leg.attachment.clone())).collect();
    let mut place = to;
    // Where the guest was before, it is reached as before.
    if let Some((_, attachment)) = before.iter().find(|(host, _)| *host == place.host) {
        place.attachment = attachment.clone();
    }
    let presences =
        before.iter().map(|(_, attachment)| attachment).chain([&from.attachment, &place.attachment]);
    let home = presences.into_iter().find(|attachment| attachment.is_home()).map(|home| home.lan.clone());
    let home_lan = known_home.or(home);
    let (mut legs, mut dropped) = (Vec::new(), Vec::new());
    for (host, attachment) in before.into_iter().chain([(from.host, from.attachment)]) {
        if host == place.host {
            continue;
        }
        match tunnels.remove(&host) {
            Some((number, tunnel)) => {
                legs.push(Leg { host, attachment, number, mark: mark(legs.len()), tunnel });
            }
            None => dropped.push(host),
        }
    }
    let is_needed = !legs.is_empty();
    let redirection = Redirection { migration, epoch, card, addressing, place, legs, home_lan };
    Ok(NextRedirection { redirection: is_needed.then_some(redirection), dropped })
}

/// Returns what the host where the guest is needs when its old connections have ended: the translation of its new
/// addresses, without which it would reach nothing. None where it has configured the addresses of its network.
pub fn without_legs(redirection: &Redirection) -> Option<Redirection> {
    redirection.is_needed_for_all().then(|| Redirection { legs: Vec::new(), ..redirection.clone() })
}

/// Returns a conntrack entry of the host that the guest leaves as the guest's new host needs it: as the
/// guest sees the connection, with the mark of the leg through which it goes on. Translation stays where it was made.
/// None if the connection cannot go on.
pub fn carried(
    entry: &ConntrackEntry,
    from: &str,
    old: Option<&Redirection>,
    new: &Redirection,
) -> Option<ConntrackEntry> {
    let before = old.and_then(|old| {
        let bits = entry.mark() & MARK_MASK;
        old.legs.iter().find(|leg| leg.mark == bits).map(|leg| leg.host.as_str())
    });
    let host = before.unwrap_or(from);
    let leg = new.legs.iter().find(|leg| leg.host == host);
    // At home again, its connections need no tunnel.
    let bits = if host == new.place.host { 0 } else { leg?.mark };
    let inside = entry.untranslated(&new.guest_addresses())?;
    Some(inside.with_mark(entry.mark() & !MARK_MASK | bits))
}

/// Returns the redirection to which a conntrack entry belongs, among those of a guest's cards.
pub fn of_entry<'a, T>(
    entry: &ConntrackEntry,
    cards: &'a [T],
    redirection: impl Fn(&T) -> &Redirection,
) -> Option<&'a T> {
    let is_of = |card: &&T| {
        let redirection = redirection(card);
        let legs = redirection.legs.iter().flat_map(|leg| &leg.attachment.pairs);
        let mut addresses = redirection.guest_addresses();
        addresses.extend(legs.map(|pair| pair.public));
        entry.is_of(&addresses)
    };
    cards.iter().find(is_of).or(cards.first())
}

#[cfg(test)]
mod tests;
