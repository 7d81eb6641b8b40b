//! A guest with two cards, of which the first one has two addresses of each family.

use std::collections::BTreeMap;
use std::net::IpAddr;

use net::Mac;
use net::redirection::kernel_names::KernelNames;
use net::redirection::next_move::{NetworkMove, next_redirection};
use net::redirection::{AddressPair, Attachment, GuestPlace, NewAddressMode, Redirection, TunnelKind};
use whimbrel_net as net;

use crate::network::{self, BOTH, CARD, NEW, Network, OLD, SECOND_TAP, TAP, tunnel};

/// MAC address of the second card.
const SECOND_CARD: Mac = Mac([0x52, 0x54, 0, 0, 0, 8]);
/// Last numbers of the addresses of each card.
const NUMBERS: [&[u8]; 2] = [&[5, 7], &[6]];

/// Gives the guest a second card, and all addresses but the first one.
pub(crate) fn add(network: &Network) {
    network.add_card("eth1", SECOND_CARD);
    let guest = network.guest();
    for family in BOTH {
        for (device, number) in [("eth0", 7), ("eth1", 6)] {
            let own = family.address(network::Family::network(OLD), number, number.into());
            network::address(guest, device, own, family);
        }
        // Each card answers for itself.
        let second = family.address(network::Family::network(OLD), 6, 6).to_string();
        let (gateway, kind) =
            (family.gateway(OLD).to_string(), ["-4", "-6"][usize::from(second.contains(':'))]);
        guest.run(&["ip", kind, "rule", "add", "from", &second, "table", "6"]).unwrap();
        let route = ["ip", kind, "route", "add", "default", "via", &gateway, "dev", "eth1", "table", "6"];
        guest.run(&route).unwrap();
    }
    guest.run(&["sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore"]).unwrap();
    guest.run(&["sh", "-c", "echo 2 > /proc/sys/net/ipv4/conf/all/arp_announce"]).unwrap();
}

/// Returns all addresses of the guest in a network.
pub(crate) fn addresses(side: usize) -> Vec<IpAddr> {
    (0..NUMBERS.len()).flat_map(|card| of_card(card, side)).collect()
}

/// Returns the addresses of one card in a network.
pub(crate) fn of_card(card: usize, side: usize) -> Vec<IpAddr> {
    let network = network::Family::network(side);
    let all = |family: &network::Family| {
        let family = *family;
        NUMBERS[card].iter().map(move |number| family.address(network, *number, (*number).into()))
    };
    BOTH.iter().flat_map(all).collect()
}

/// Returns the redirections of both cards for the first move.
pub(crate) fn first_moves(network: &Network) -> [Redirection; 2] {
    [0, 1].map(|card| {
        let (mac, number) = ([CARD, SECOND_CARD][card], [7, 17][card]);
        let place = |side: usize| {
            let usual = network.place(side, NewAddressMode::Nat, &BOTH);
            let pairs = of_card(card, OLD).into_iter().zip(of_card(card, side));
            let attachment = Attachment {
                mac: if side == OLD { mac } else { KernelNames(number).proxy_mac() },
                pairs: pairs.map(|(guest, public)| AddressPair { guest, public }).collect(),
                lan: usual.attachment.lan,
            };
            let interface = [TAP, SECOND_TAP][card].to_owned();
            GuestPlace { host: usual.host, interface, number, attachment }
        };
        let next = NetworkMove {
            migration: "guest#3".to_owned(),
            epoch: 3,
            card: mac,
            addressing: NewAddressMode::Nat,
            from: place(OLD),
            to: place(NEW),
            tunnels: BTreeMap::from([("a".to_owned(), (number, tunnel(TunnelKind::Vxlan)))]),
        };
        next_redirection(None, next).unwrap().redirection.unwrap()
    })
}
