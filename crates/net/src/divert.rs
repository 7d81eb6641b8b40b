//! Diversion: what a host sends on a guest's taps goes to taps of this process instead.
//!
//! A rule of netfilter at the egress of a tap forwards each frame to a tap of our own, except frames that bear
//! [`MARK`]. The rules stand in a table that belongs to our connection to netfilter: when this process ends in any way,
//! the kernel closes the connection and removes the table with it, so that no guest stays cut off. Our own taps end
//! with their descriptors.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use tracee::{PacketSocket, Tap, VIRTIO_HEADER_BYTES};

use crate::ethernet::{HEADER_BYTES, Mac, position_of_card};
use crate::held::HeldFrame;
use crate::netlink::{ACKNOWLEDGE, CREATE, EXCLUSIVE, Requests, Socket};

/// Mark of frames that are not diverted: "WHMB".
pub const MARK: u32 = 0x5748_4d42;

/// Address of our own taps, by which frames that the host itself sends there are recognised.
pub(crate) const OWN_MAC: Mac = Mac([0x02, 0x57, 0x48, 0x4d, 0x42, 0x01]);
/// Beginning of our own taps' names, which a number follows.
pub(crate) const OWN_NAME_START: &str = "whimbrel";
/// Pattern of our own taps' names; the kernel inserts a number.
const OWN_NAME: &str = "whimbrel%d";
/// Beginning of our tables' names, which the migration's name follows.
pub(crate) const TABLE_START: &str = "whimbrel-";
/// Frames that wait in one of our own taps.
const OWN_QUEUE: u32 = 10_000;

/// Largest frame, with its header.
const FRAME_BYTES: usize = VIRTIO_HEADER_BYTES + (64 << 10) + 256;

/// Numbers of `linux/netfilter/nf_tables.h`, `linux/if_link.h` and their like.
mod abi {
    pub(super) const BATCH_BEGIN: u16 = 0x10;
    pub(super) const BATCH_END: u16 = 0x11;
    pub(super) const NFTABLES: u16 = 10;
    pub(super) const NEW_TABLE: u16 = NFTABLES << 8;
    pub(super) const DELETE_TABLE: u16 = NFTABLES << 8 | 2;
    pub(super) const NEW_CHAIN: u16 = NFTABLES << 8 | 3;
    pub(super) const NEW_RULE: u16 = NFTABLES << 8 | 6;
    pub(super) const FAMILY_NETDEV: u8 = 5;
    pub(super) const TABLE_OWNER: u32 = 2;
    pub(super) const EGRESS: u32 = 1;
    pub(super) const META_MARK: u32 = 3;
    pub(super) const NOT_EQUAL: u32 = 1;
    pub(super) const REGISTER: u32 = 1;
    pub(super) const NEW_LINK: u16 = 16;
    pub(super) const LINK_ADDRESS: u16 = 1;
    pub(super) const LINK_QUEUE: u16 = 13;
    pub(super) const LINK_ALIAS: u16 = 20;
    pub(super) const LINK_UP: u32 = 1;
}

/// A guest's tap whose frames are diverted.
#[derive(Debug)]
struct Diverted {
    /// Address of the guest's card.
    mac: Mac,
    /// Our tap, to which they go.
    own: Tap,
    /// Sends frames on the guest's tap.
    sender: PacketSocket,
}

/// Diversion of a guest's taps. Dropping it removes everything; frames that are still in our taps are lost then.
#[derive(Debug)]
pub struct Diversion {
    table: String,
    netfilter: Socket,
    cards: Vec<Diverted>,
    /// True if the rules are gone.
    is_stopped: AtomicBool,
}

impl Diversion {
    /// Diverts what is sent on the interfaces of these cards, in the network namespace of this thread. `name` is the
    /// migration's, which all rules and devices bear.
    ///
    /// # Errors
    /// Among others if the kernel has no egress hook or no tables with an owner; nothing has changed then.
    pub fn start(name: &str, cards: &[(&str, Mac)]) -> io::Result<Self> {
        let route = Socket::route()?;
        let mut diverted = Vec::new();
        let mut rules = Vec::new();
        for (interface, mac) in cards {
            let sender = PacketSocket::sender(interface, MARK)?;
            let own = Tap::open(OWN_NAME, VIRTIO_HEADER_BYTES as i32)?;
            let index = rustix::net::netdevice::name_to_index(&sender, own.interface())?;
            route.confirm(set_up(index, name))?;
            rules.push((*interface, index));
            diverted.push(Diverted { mac: *mac, own, sender });
        }
        let table = format!("{TABLE_START}{name}");
        let netfilter = Socket::netfilter()?;
        netfilter.confirm(divert(&table, &rules))?;
        Ok(Self { table, netfilter, cards: diverted, is_stopped: AtomicBool::new(false) })
    }

    /// Takes the frames that were diverted since the last call, without those of the guest itself, which switches flood
    /// when they learn its new place.
    ///
    /// # Errors
    /// If one of our taps is gone.
    pub fn take(&self) -> io::Result<Vec<HeldFrame>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0; FRAME_BYTES];
        for diverted in &self.cards {
            while let Some(bytes) = diverted.own.take(&mut buffer)? {
                let Some((header, frame)) = buffer[..bytes].split_first_chunk() else { continue };
                let Some(source) = frame.get(6..12) else { continue };
                if frame.len() >= HEADER_BYTES && source != OWN_MAC.0 && source != diverted.mac.0 {
                    let card = diverted.mac;
                    frames.push(HeldFrame { card, header: *header, frame: frame.to_vec() });
                }
            }
        }
        Ok(frames)
    }

    /// Returns our taps, for waiting until frames arrive.
    pub fn taps(&self) -> impl Iterator<Item = &Tap> {
        self.cards.iter().map(|card| &card.own)
    }

    /// Returns the names of our taps, each with the address of its card.
    pub fn interfaces(&self) -> impl Iterator<Item = (&str, Mac)> {
        self.cards.iter().map(|card| (card.own.interface(), card.mac))
    }

    /// Sends a frame to the guest, past the rules.
    ///
    /// # Errors
    /// `ENOBUFS` if the guest's tap is full; others if this frame cannot be sent.
    pub fn send(&self, frame: &HeldFrame) -> io::Result<()> {
        let place = position_of_card(self.cards.iter().map(|card| card.mac), frame.card);
        let card = place.and_then(|place| self.cards.get(place)).ok_or(io::ErrorKind::NotFound)?;
        card.sender.send(frame.sendable_header(), &frame.frame)
    }

    /// Removes the rules: from now on frames go to the guest by themselves. Those that were diverted before remain in
    /// our taps. A second call has no effect.
    ///
    /// # Errors
    /// If the kernel refuses the request: the rules stay until the connection to netfilter is closed.
    pub fn stop(&self) -> io::Result<()> {
        if self.is_stopped.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let mut requests = Requests::default();
        begin_batch(&mut requests);
        requests.request(abi::DELETE_TABLE, ACKNOWLEDGE, &nfgen(abi::FAMILY_NETDEV, 0)).text(1, &self.table);
        end_batch(&mut requests);
        self.netfilter.confirm(requests)
    }
}

/// Composes the structure with which netfilter's messages begin.
pub(crate) fn nfgen(family: u8, resource: u16) -> [u8; 4] {
    let [high, low] = resource.to_be_bytes();
    [family, 0, high, low]
}

pub(crate) fn begin_batch(requests: &mut Requests) {
    requests.request(abi::BATCH_BEGIN, 0, &nfgen(0, abi::NFTABLES));
}

pub(crate) fn end_batch(requests: &mut Requests) {
    requests.request(abi::BATCH_END, 0, &nfgen(0, abi::NFTABLES));
}

/// Composes a table of our own with a chain and a rule for each interface, and the device to which its frames go.
fn divert(table: &str, rules: &[(&str, u32)]) -> Requests {
    let family = nfgen(abi::FAMILY_NETDEV, 0);
    let mut requests = Requests::default();
    begin_batch(&mut requests);
    requests
        .request(abi::NEW_TABLE, ACKNOWLEDGE | CREATE | EXCLUSIVE, &family)
        .text(1, table)
        .number(2, abi::TABLE_OWNER);
    for (interface, _) in rules {
        requests.request(abi::NEW_CHAIN, ACKNOWLEDGE | CREATE | EXCLUSIVE, &family);
        requests.text(1, table).text(3, interface);
        requests.nest(4).number(1, abi::EGRESS).number(2, 0).text(3, interface).end();
        requests.text(7, "filter");
    }
    for (interface, device) in rules {
        requests.request(abi::NEW_RULE, ACKNOWLEDGE | CREATE, &family);
        requests.text(1, table).text(2, interface).nest(4);
        expression(&mut requests, "meta", |data| {
            data.number(1, abi::REGISTER).number(2, abi::META_MARK);
        });
        expression(&mut requests, "cmp", |data| {
            data.number(1, abi::REGISTER).number(2, abi::NOT_EQUAL);
            data.nest(3).attribute(1, &MARK.to_ne_bytes()).end();
        });
        expression(&mut requests, "immediate", |data| {
            data.number(1, abi::REGISTER).nest(2).attribute(1, &device.to_ne_bytes()).end();
        });
        expression(&mut requests, "fwd", |data| {
            data.number(1, abi::REGISTER);
        });
        requests.end();
    }
    end_batch(&mut requests);
    requests
}

/// Appends an expression of a rule.
pub(crate) fn expression(requests: &mut Requests, name: &str, data: impl FnOnce(&mut Requests)) {
    requests.nest(1).text(1, name).nest(2);
    data(requests);
    requests.end().end();
}

/// Composes what one of our own taps needs: its address, room, the migration's name, and that it is up.
fn set_up(index: u32, name: &str) -> Requests {
    let mut requests = Requests::default();
    // Family, kind, index, flags, and which of the flags are set.
    let link = [0, index, abi::LINK_UP, abi::LINK_UP].map(u32::to_ne_bytes);
    requests.request(abi::NEW_LINK, ACKNOWLEDGE, link.as_flattened());
    requests.attribute(abi::LINK_ADDRESS, &OWN_MAC.0);
    requests.attribute(abi::LINK_QUEUE, &OWN_QUEUE.to_ne_bytes());
    requests.attribute(abi::LINK_ALIAS, name.as_bytes());
    requests
}
