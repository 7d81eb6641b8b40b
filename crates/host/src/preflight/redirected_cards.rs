//! Cards of a VM whose addresses change: which of its addresses belong to which card.

use std::collections::BTreeSet;
use std::net::IpAddr;

use api::NewAddress;
use net::Mac;
use net::announcer::Card;
use net::redirection::Redirection;

/// Card of a VM that gets new addresses.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RedirectedCard {
    /// Interface behind it.
    pub(super) interface: String,
    /// Its MAC address.
    pub(super) mac: Mac,
    /// Its addresses, with those that it gets.
    pub(super) wanted: Vec<NewAddress>,
    /// Its redirection that is active.
    pub(super) former: Option<Redirection>,
}

/// Distributes addresses among the cards of a VM. `formers` are the redirections of its cards, `seen` returns the addresses
/// that this host knows at a MAC address.
///
/// # Errors
/// The reason why it is not known which card has an address, or what is missing of one.
pub(super) fn distribute(
    cards: &[Card],
    formers: Vec<Redirection>,
    wanted: &[NewAddress],
    seen: impl Fn(Mac) -> Result<BTreeSet<IpAddr>, String>,
) -> Result<Vec<RedirectedCard>, String> {
    let named = cards.iter().filter_map(|card| Some((card.interface()?.to_owned(), card.mac)));
    let card = |(interface, mac)| RedirectedCard { interface, mac, wanted: Vec::new(), former: None };
    let mut all: Vec<_> = named.map(card).collect();
    for former in formers {
        let card = all.iter_mut().find(|card| card.mac == former.card);
        let card = card.ok_or_else(|| format!("the VM has no card {} with a tap any more", former.card))?;
        card.former = Some(former);
    }
    for address in wanted {
        let place = match &all[..] {
            [_] => 0,
            several => owner(several, address.old, &seen)?,
        };
        if let Some(card) = all.get_mut(place) {
            card.wanted.push(*address);
        }
    }
    let is_forgotten = |card: &&RedirectedCard| card.wanted.is_empty() && card.former.is_some();
    if let Some(forgotten) = all.iter().find(is_forgotten) {
        return Err(format!(
            "connections of its card {} are redirected as well: name the addresses of this card, too",
            forgotten.mac
        ));
    }
    all.retain(|card| !card.wanted.is_empty());
    Ok(all)
}

/// Returns the place of the card that has an address.
fn owner(
    cards: &[RedirectedCard],
    address: IpAddr,
    seen: &impl Fn(Mac) -> Result<BTreeSet<IpAddr>, String>,
) -> Result<usize, String> {
    let is_redirected = |card: &RedirectedCard| {
        card.former.as_ref().is_some_and(|former| {
            let here = former.place.attachment.pairs.iter();
            let mut own = former.guest_addresses();
            own.extend(here.flat_map(|pair| [pair.guest, pair.public]));
            own.contains(&address)
        })
    };
    if let Some(place) = cards.iter().position(is_redirected) {
        return Ok(place);
    }
    let mut found = Vec::new();
    for (place, card) in cards.iter().enumerate() {
        if seen(card.mac)?.contains(&address) {
            found.push(place);
        }
    }
    match found[..] {
        [place] => Ok(place),
        _ => Err(format!(
            "it is not known which of its cards has {address}: let this host reach the VM by it before (`ping`)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use net::redirection::testing::{CARD, first};

    fn mac(number: u8) -> Mac {
        Mac([0x52, 0x54, 0, 0, 0, number])
    }

    fn card(interface: &str, number: u8) -> RedirectedCard {
        let interface = interface.to_owned();
        RedirectedCard { interface, mac: mac(number), wanted: Vec::new(), former: None }
    }

    #[expect(clippy::unnecessary_wraps, reason = "a host may not be able to answer")]
    fn seen(mac: Mac) -> Result<BTreeSet<IpAddr>, String> {
        let address = |text: &str| BTreeSet::from([text.parse().unwrap()]);
        Ok(match mac.0[5] {
            1 => address("192.0.2.1"),
            2 | 3 => address("192.0.2.2"),
            _ => BTreeSet::new(),
        })
    }

    #[test]
    fn cards_without_a_tap_are_not_found() {
        let bare = |number| Card { mac: mac(number), taps: Vec::new() };
        let old = "192.0.2.5=198.51.100.5".parse().unwrap();
        let error = distribute(&[bare(7)], vec![first()], &[old], seen).unwrap_err();
        assert!(error.contains("no card 52:54:00:00:00:07 with a tap"), "{error}");
        let error = distribute(&[], Vec::new(), &[old], seen).unwrap_err();
        assert!(error.contains("which of its cards"), "{error}");
    }

    #[test]
    fn an_address_belongs_to_the_card_at_which_it_is_known() {
        let mut cards = [card("tap1", 1), card("tap2", 2), card("tap7", CARD.0[5])];
        let owner = |cards: &[RedirectedCard], text: &str| owner(cards, text.parse().unwrap(), &seen);
        assert_eq!(owner(&cards, "192.0.2.1"), Ok(0));
        assert_eq!(owner(&cards, "192.0.2.2"), Ok(1));
        assert!(owner(&cards, "10.1.0.5").unwrap_err().contains("10.1.0.5"));
        cards[2].former = Some(first());
        for known in ["10.1.0.5", "10.2.0.5", "fd01::5"] {
            assert_eq!(owner(&cards, known), Ok(2), "{known}");
        }
        cards[0].mac = mac(3);
        assert!(owner(&cards, "192.0.2.2").is_err(), "two cards have it");
    }
}
