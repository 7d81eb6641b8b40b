//! Questions to the guest at the destination.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::IpAddr;

use net::netlink::Socket;
use net::{Arping, ArpingTarget, Claims, Mac, addresses, bridge_ports};
use tracing::debug;

use host::network_cards;

/// A card, and the bridge from which it can be asked.
pub(super) type BridgedCard = (Mac, String);

/// Returns the cards in bridges in whose networks the host itself is: it can ask them there.
pub(super) fn bridged(interfaces: &[network_cards::Interface]) -> Vec<BridgedCard> {
    let bridge = |(interface, mac): &network_cards::Interface| match bridge_ports::bridge_port(interface) {
        Ok(port) => port.filter(|port| port.vlan == port.host_vlan).map(|port| (*mac, port.bridge)),
        Err(error) => {
            debug!(interface, %error, "the bridge of a card is unknown");
            None
        }
    };
    interfaces.iter().filter_map(bridge).collect()
}

/// Begins to ask the cards for the addresses that they claimed, for those that the host knows as their own, and then for
/// `others` from which the guest has sent.
pub(super) fn start(cards: &[BridgedCard], claims: &[Claims], others: &BTreeSet<IpAddr>) -> Option<Arping> {
    let route = Socket::route().ok()?;
    let asked = |(mac, bridge): &BridgedCard| {
        let claimed = claims.iter().filter(|claims| claims.mac() == *mac).flat_map(Claims::all);
        let mut addresses: Vec<_> = claimed.map(|claim| claim.address).collect();
        let neighbours = addresses::neighbours(&route, &[*mac]).unwrap_or_default();
        for address in neighbours.into_iter().chain(others.iter().copied()) {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        ArpingTarget { mac: *mac, bridge: bridge.clone(), addresses }
    };
    let asked: Vec<_> = cards.iter().map(asked).collect();
    if asked.is_empty() {
        return None;
    }
    let nonce = RandomState::new().build_hasher().finish();
    Arping::start(nonce, &asked)
        .inspect_err(|error| debug!(%error, "the guest is not asked at its new place"))
        .ok()
}
