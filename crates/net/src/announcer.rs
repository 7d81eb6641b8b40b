//! Announcements through a guest's own tap, as if the guest sent them.

use std::io;

use tracee::Tap;
use tracing::{debug, warn};

use crate::announcement;
use crate::claims::Claim;
use crate::ethernet::{Mac, position_of_card};

/// A guest's network card, and the taps behind it: one for each of its queues.
#[derive(Debug)]
pub struct Card {
    /// MAC address.
    pub mac: Mac,
    /// Duplicates of the descriptors of its QEMU.
    pub taps: Vec<Tap>,
}

impl Card {
    /// Returns the name of the interface behind the card, if it has one.
    pub fn interface(&self) -> Option<&str> {
        self.taps.first().map(Tap::interface)
    }
}

/// Announces the cards of one guest.
#[derive(Debug)]
pub struct Announcer {
    cards: Vec<(Card, Vec<Claim>)>,
}

impl Announcer {
    /// Creates the announcer of a guest with these cards.
    pub fn new(cards: Vec<Card>) -> Self {
        Self { cards: cards.into_iter().map(|card| (card, Vec::new())).collect() }
    }

    /// Sets the addresses that the guest has claimed on the card that the other host names by this MAC address, which
    /// is the card's present one.
    pub fn set_claims(&mut self, mac: Mac, claims: &[Claim]) {
        let place = position_of_card(self.cards().map(|card| card.mac), mac);
        if let Some((card, known)) = place.and_then(|place| self.cards.get_mut(place)) {
            card.mac = mac;
            *known = claims.to_vec();
        }
    }

    /// Returns the cards.
    pub fn cards(&self) -> impl Iterator<Item = &Card> {
        self.cards.iter().map(|(card, _)| card)
    }

    /// Sends all frames once, and returns their number. What cannot be sent is reported in the log: QEMU announces the
    /// guest, too, a little later.
    pub fn announce(&self) -> usize {
        let mut sent = 0;
        for (card, claims) in &self.cards {
            for frame in announcement::frames(card.mac, claims) {
                match send(&card.taps, &frame) {
                    Ok(()) => sent += 1,
                    Err(error) => {
                        warn!(interface = card.interface(), mac = %card.mac, %error, "cannot announce the guest");
                        break;
                    }
                }
            }
        }
        debug!(sent, "announced the guest");
        sent
    }
}

/// Sends a frame through the first queue that accepts it: those that the guest does not use are detached.
pub(crate) fn send(taps: &[Tap], frame: &[u8]) -> io::Result<()> {
    let mut result = Err(io::ErrorKind::NotFound.into());
    for tap in taps {
        result = tap.send(frame);
        if result.is_ok() {
            break;
        }
    }
    result
}
