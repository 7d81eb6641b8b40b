//! Conntrack: the entries of a guest's connections, which stateful firewalls and NAT need at its new host.
//!
//! An entry is copied as the kernel lists it, with these differences. NAT is requested anew: the answers' direction is
//! given as it would be without NAT, together with the mappings, and the kernel computes the rest from these; an entry
//! whose directions simply differ would not be translated. Flags that only the kernel may set are left out. Sequence
//! numbers and windows, which the kernel does not list, begin anew with the next packets.

mod datagrams;
mod lists;
mod untranslated;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::netlink::{ACKNOWLEDGE, CREATE, DUMP, EXCLUSIVE, Requests, Socket, attribute, attributes};
pub(crate) use datagrams::{ICMP, UDP};
pub use lists::{any_of, ends_of_all, list};

/// Entries that are sent to the kernel at once.
const AT_ONCE: usize = 64;

/// Bytes of the structure with which netfilter's messages begin.
const NFGEN_BYTES: usize = 4;

/// Time after which an entry ends that the kernel lists without a time, because a flow table has its packets.
const USUAL_TIMEOUT_S: u32 = 600;

/// Longest entry that is accepted from another host, in bytes.
const ENTRY_BYTES: usize = 4096;

/// Numbers of `linux/netfilter/nfnetlink_conntrack.h` and `nf_conntrack_common.h`.
mod abi {
    pub(super) const NEW: u16 = 1 << 8;
    pub(super) const GET: u16 = 1 << 8 | 1;
    pub(super) const DELETE: u16 = 1 << 8 | 2;
    pub(super) const STATISTICS: u16 = 1 << 8 | 4;
    pub(super) const ORIGINAL: u16 = 1;
    pub(super) const REPLY: u16 = 2;
    pub(super) const STATUS: u16 = 3;
    pub(super) const PROTOCOL_STATE: u16 = 4;
    pub(super) const HELPER: u16 = 5;
    pub(super) const SOURCE_NAT: u16 = 6;
    pub(super) const TIMEOUT: u16 = 7;
    pub(super) const MARK: u16 = 8;
    pub(super) const DESTINATION_NAT: u16 = 13;
    pub(super) const MASTER: u16 = 14;
    pub(super) const SEQUENCE_ORIGINAL: u16 = 15;
    pub(super) const SEQUENCE_REPLY: u16 = 16;
    pub(super) const ZONE: u16 = 18;
    pub(super) const LABELS: u16 = 22;
    pub(super) const TUPLE_IP: u16 = 1;
    pub(super) const TUPLE_PROTOCOL: u16 = 2;
    pub(super) const NUMBER: u16 = 1;
    pub(super) const SOURCE_PORT: u16 = 2;
    pub(super) const DESTINATION_PORT: u16 = 3;
    /// Identifier, type, code.
    pub(super) const ICMP: [u16; 3] = [4, 5, 6];
    pub(super) const ICMPV6: [u16; 3] = [7, 8, 9];
    pub(super) const TCP: u16 = 1;
    pub(super) const TCP_FLAGS: [u16; 2] = [4, 5];
    pub(super) const SEEN_REPLY: u32 = 2;
    pub(super) const ASSURED: u32 = 4;
    pub(super) const CONFIRMED: u32 = 8;
    pub(super) const IS_SOURCE_NAT: u32 = 0x10;
    pub(super) const IS_DESTINATION_NAT: u32 = 0x20;
}

/// Flags of an entry that are kept.
const KEPT_STATUS: u32 = abi::SEEN_REPLY | abi::ASSURED | abi::IS_SOURCE_NAT | abi::IS_DESTINATION_NAT;
/// Flags of a direction of TCP that are kept: options that were agreed on, the beginning of its end, leniency. Others
/// change with every packet.
const KEPT_TCP_FLAGS: u8 = 0xf;
/// Attributes that are copied as they are: single values.
const COPIED: [u16; 4] = [abi::TIMEOUT, abi::MARK, abi::ZONE, abi::LABELS];
/// Attributes that are copied as they are: attributes within attributes.
const COPIED_NESTED: [u16; 4] =
    [abi::PROTOCOL_STATE, abi::MASTER, abi::SEQUENCE_ORIGINAL, abi::SEQUENCE_REPLY];

/// An entry of conntrack: family, and the attributes that are copied, as the kernel lists them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConntrackEntry(Vec<u8>);

/// Error: bytes are not entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("connection tracking entries are cut off or too long")]
pub struct BadEntries;

impl ConntrackEntry {
    /// Keeps of an entry in the kernel's list what is copied; none if it is damaged.
    fn of_list(body: &[u8]) -> Option<Self> {
        let (header, listed) = body.split_at_checked(NFGEN_BYTES)?;
        let mut kept = Requests::default();
        for (kind, value) in attributes(listed) {
            match kind {
                abi::STATUS => kept.number(kind, u32::from_be_bytes(*value.first_chunk()?) & KEPT_STATUS),
                abi::PROTOCOL_STATE => protocol_state(&mut kept, value),
                abi::ORIGINAL | abi::REPLY | abi::HELPER => kept.nested(kind, value),
                kind if COPIED.contains(&kind) => kept.attribute(kind, value),
                kind if COPIED_NESTED.contains(&kind) => kept.nested(kind, value),
                _ => continue,
            };
        }
        Some(Self([header, &kept.finish()].concat()))
    }

    /// Appends the entry as it is sent to the other host.
    pub fn encode(&self, into: &mut Vec<u8>) {
        into.extend((self.0.len() as u32).to_le_bytes());
        into.extend(&self.0);
    }

    /// Decodes an entry that another host has sent, and returns what follows it.
    ///
    /// # Errors
    /// If the bytes are cut off, or the entry is longer than one can be.
    pub fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), BadEntries> {
        let (length, rest) = bytes.split_first_chunk().ok_or(BadEntries)?;
        let length = Some(u32::from_le_bytes(*length) as usize).filter(|length| *length <= ENTRY_BYTES);
        let (entry, rest) = rest.split_at_checked(length.ok_or(BadEntries)?).ok_or(BadEntries)?;
        Ok((Self(entry.to_vec()), rest))
    }

    fn attribute(&self, kind: u16) -> Option<&[u8]> {
        attribute(self.0.get(NFGEN_BYTES..)?, kind)
    }

    fn family(&self) -> u8 {
        self.0.first().copied().unwrap_or(0)
    }

    fn number(&self, kind: u16) -> Option<u32> {
        self.attribute(kind)?.first_chunk().map(|number| u32::from_be_bytes(*number))
    }

    /// Returns the tuples in the direction of its first packet, and of the answers; none if the entry is damaged.
    fn tuples(&self) -> Option<(Tuple, Tuple)> {
        Some((Tuple::of(self.attribute(abi::ORIGINAL)?)?, Tuple::of(self.attribute(abi::REPLY)?)?))
    }

    /// Returns what distinguishes the entry from all others of a host.
    pub fn key(&self) -> Vec<u8> {
        let parts = [self.attribute(abi::ORIGINAL), self.attribute(abi::ZONE)];
        parts.map(Option::unwrap_or_default).concat()
    }

    /// Returns the number of seconds after which the entry ends if no packet follows.
    pub fn timeout_s(&self) -> u32 {
        self.number(abi::TIMEOUT).unwrap_or(USUAL_TIMEOUT_S)
    }

    /// Returns true if both are the same but for the time after which they end.
    pub fn is_like(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.lasting().eq(other.lasting())
    }

    /// Returns all but the time after which the entry ends.
    fn lasting(&self) -> impl Iterator<Item = (u16, &[u8])> {
        attributes(self.0.get(NFGEN_BYTES..).unwrap_or_default()).filter(|(kind, _)| *kind != abi::TIMEOUT)
    }

    /// Returns true if one end of the connection, before or after NAT, has one of these addresses.
    pub fn is_of(&self, addresses: &BTreeSet<IpAddr>) -> bool {
        self.0.get(NFGEN_BYTES..).is_some_and(|listed| is_of(listed, addresses))
    }

    /// Returns the addresses that NAT puts in place of others; none without NAT.
    pub fn translated_to(&self) -> Vec<IpAddr> {
        let status = self.number(abi::STATUS).unwrap_or(0);
        let end = |kind, index: usize| Some(ends(self.attribute(kind)?)?[index]);
        let source = end(abi::REPLY, 1).filter(|_| status & abi::IS_SOURCE_NAT != 0);
        let destination = end(abi::ORIGINAL, 1).filter(|_| status & abi::IS_DESTINATION_NAT != 0);
        source.into_iter().chain(destination).collect()
    }

    /// Returns the entry without its helper and labels, which a host may not know; none if it has neither.
    fn without_extras(&self) -> Option<Self> {
        const EXTRAS: [u16; 2] = [abi::HELPER, abi::LABELS];
        let (header, listed) = self.0.split_at_checked(NFGEN_BYTES)?;
        let mut kept = Requests::default();
        for (kind, value) in attributes(listed).filter(|(kind, _)| !EXTRAS.contains(kind)) {
            kept.attribute(kind, value);
        }
        Some(Self([header, &kept.finish()].concat())).filter(|kept| kept.0.len() < self.0.len())
    }

    /// Returns true if the kernel has made it because another entry expected it, which has to be there first.
    fn is_related(&self) -> bool {
        self.attribute(abi::MASTER).is_some()
    }

    /// Appends the request that makes the entry anew.
    fn request(&self, requests: &mut Requests) -> Option<()> {
        let (original, reply) = self.tuples()?;
        let status = self.number(abi::STATUS).unwrap_or(0);
        let (is_source, is_destination) =
            (status & abi::IS_SOURCE_NAT != 0, status & abi::IS_DESTINATION_NAT != 0);
        requests.request(abi::NEW, ACKNOWLEDGE | CREATE | EXCLUSIVE, &[self.family(), 0, 0, 0]);
        requests.nested(abi::ORIGINAL, self.attribute(abi::ORIGINAL)?);
        if is_source || is_destination {
            requests.nest(abi::REPLY);
            original.answer(&reply).compose(requests);
            requests.end();
        } else {
            requests.nested(abi::REPLY, self.attribute(abi::REPLY)?);
        }
        if is_source {
            mapping(requests, abi::SOURCE_NAT, reply.destination, reply.destination_port());
        }
        if is_destination {
            mapping(requests, abi::DESTINATION_NAT, reply.source, reply.source_port());
        }
        requests.number(abi::STATUS, status & (abi::SEEN_REPLY | abi::ASSURED) | abi::CONFIRMED);
        // The kernel makes no entry without a time.
        if self.attribute(abi::TIMEOUT).is_none() {
            requests.number(abi::TIMEOUT, USUAL_TIMEOUT_S);
        }
        for kind in COPIED {
            if let Some(value) = self.attribute(kind) {
                requests.attribute(kind, value);
            }
        }
        for kind in COPIED_NESTED {
            if let Some(value) = self.attribute(kind) {
                requests.nested(kind, value);
            }
        }
        // Of a helper only its name is known to every kernel.
        if let Some(name) = self.attribute(abi::HELPER).and_then(|helper| attribute(helper, 1)) {
            requests.nest(abi::HELPER).attribute(1, name).end();
        }
        Some(())
    }

    /// Appends the request that removes the entry.
    fn removal(&self, requests: &mut Requests) -> Option<()> {
        requests.request(abi::DELETE, ACKNOWLEDGE, &[self.family(), 0, 0, 0]);
        requests.nested(abi::ORIGINAL, self.attribute(abi::ORIGINAL)?);
        if let Some(zone) = self.attribute(abi::ZONE) {
            requests.attribute(abi::ZONE, zone);
        }
        Some(())
    }
}

impl fmt::Display for ConntrackEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tuples() {
            Some((original, _)) => original.fmt(f),
            None => write!(f, "a damaged entry"),
        }
    }
}

/// Attributes that distinguish tuples of a protocol, each with its kind.
type TupleParts = Vec<(u16, Vec<u8>)>;

/// One direction of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tuple {
    source: IpAddr,
    destination: IpAddr,
    /// Protocol, and attributes that distinguish its tuples: ports, or ICMP's identifier, type and code.
    protocol: u8,
    parts: TupleParts,
}

impl Tuple {
    fn of(tuple: &[u8]) -> Option<Self> {
        let [source, destination] = ends(tuple)?;
        let protocol = attribute(tuple, abi::TUPLE_PROTOCOL)?;
        let number = *attribute(protocol, abi::NUMBER)?.first()?;
        let parts = attributes(protocol).filter(|(kind, _)| *kind != abi::NUMBER);
        let parts = parts.map(|(kind, value)| (kind, value.to_vec())).collect();
        Some(Self { source, destination, protocol: number, parts })
    }

    fn part(&self, kind: u16) -> Option<&[u8]> {
        self.parts.iter().find_map(|(found, value)| (*found == kind).then_some(value.as_slice()))
    }

    fn source_port(&self) -> Option<&[u8]> {
        self.part(abi::SOURCE_PORT)
    }

    fn destination_port(&self) -> Option<&[u8]> {
        self.part(abi::DESTINATION_PORT)
    }

    /// Returns the answers' direction without NAT. What is no port (ICMP's type of the answer) is that of `reply`; NAT
    /// may have changed the identifier there, which is that of the request.
    fn answer(&self, reply: &Self) -> Self {
        const IDENTIFIERS: [u16; 2] = [abi::ICMP[0], abi::ICMPV6[0]];
        let part = |(kind, _): &(u16, Vec<u8>)| {
            let value = match *kind {
                abi::SOURCE_PORT => self.destination_port(),
                abi::DESTINATION_PORT => self.source_port(),
                kind if IDENTIFIERS.contains(&kind) => self.part(kind),
                _ => None,
            };
            (*kind, value.map_or_else(|| reply.part(*kind).unwrap_or_default().to_vec(), <[u8]>::to_vec))
        };
        Self {
            source: self.destination,
            destination: self.source,
            protocol: self.protocol,
            parts: reply.parts.iter().map(part).collect(),
        }
    }

    fn compose(&self, requests: &mut Requests) {
        requests.nest(abi::TUPLE_IP);
        for (v4_kind, address) in [(1, self.source), (2, self.destination)] {
            match address {
                IpAddr::V4(address) => requests.attribute(v4_kind, &address.octets()),
                IpAddr::V6(address) => requests.attribute(v4_kind + 2, &address.octets()),
            };
        }
        requests.end().nest(abi::TUPLE_PROTOCOL).attribute(abi::NUMBER, &[self.protocol]);
        for (kind, value) in &self.parts {
            requests.attribute(*kind, value);
        }
        requests.end();
    }
}

impl fmt::Display for Tuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = match self.protocol {
            1 | 58 => "icmp".to_owned(),
            6 => "tcp".to_owned(),
            17 => "udp".to_owned(),
            number => format!("protocol {number}"),
        };
        let end = |address: IpAddr, port: Option<&[u8]>| match port.and_then(<[u8]>::first_chunk) {
            Some(port) => std::net::SocketAddr::new(address, u16::from_be_bytes(*port)).to_string(),
            None => address.to_string(),
        };
        let (from, to) =
            (end(self.source, self.source_port()), end(self.destination, self.destination_port()));
        write!(f, "{protocol} {from} → {to}")
    }
}

/// Returns true if one end of a listed connection has one of these addresses.
fn is_of(listed: &[u8], addresses: &BTreeSet<IpAddr>) -> bool {
    [abi::ORIGINAL, abi::REPLY].iter().any(|kind| {
        let ends = attribute(listed, *kind).and_then(ends);
        ends.is_some_and(|ends| ends.iter().any(|end| addresses.contains(end)))
    })
}

/// Returns the addresses of a direction: source and destination.
fn ends(tuple: &[u8]) -> Option<[IpAddr; 2]> {
    let ip = attribute(tuple, abi::TUPLE_IP)?;
    let both = |kinds: [u16; 2], parse: fn(&[u8]) -> Option<IpAddr>| {
        let [source, destination] = kinds.map(|kind| attribute(ip, kind).and_then(parse));
        Some([source?, destination?])
    };
    both([1, 2], v4).or_else(|| both([3, 4], v6))
}

fn v4(bytes: &[u8]) -> Option<IpAddr> {
    Some(Ipv4Addr::from(*bytes.first_chunk::<4>()?).into())
}

fn v6(bytes: &[u8]) -> Option<IpAddr> {
    Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?).into())
}

/// Appends a mapping of NAT: a range of one address and one port.
fn mapping(requests: &mut Requests, kind: u16, address: IpAddr, port: Option<&[u8]>) {
    requests.nest(kind);
    match address {
        IpAddr::V4(address) => requests.attribute(1, &address.octets()).attribute(2, &address.octets()),
        IpAddr::V6(address) => requests.attribute(4, &address.octets()).attribute(5, &address.octets()),
    };
    if let Some(port) = port {
        requests.nest(3).attribute(1, port).attribute(2, port).end();
    }
    requests.end();
}

/// Appends the state of the protocol. For TCP, the kernel lists flags of each direction, and takes them with a mask.
fn protocol_state<'a>(requests: &'a mut Requests, state: &[u8]) -> &'a mut Requests {
    let Some(tcp) = attribute(state, abi::TCP) else {
        return requests.nested(abi::PROTOCOL_STATE, state);
    };
    requests.nest(abi::PROTOCOL_STATE).nest(abi::TCP);
    for (kind, value) in attributes(tcp) {
        match value.first() {
            Some(flags) if abi::TCP_FLAGS.contains(&kind) => {
                requests.attribute(kind, &[flags & KEPT_TCP_FLAGS, KEPT_TCP_FLAGS])
            }
            _ => requests.attribute(kind, value),
        };
    }
    requests.end().end()
}

/// Checks that this process may use connection tracking, and that the kernel has it.
///
/// # Errors
/// If the kernel has no connection tracking, or this process may not use it.
pub fn check(netfilter: &Socket) -> io::Result<()> {
    let mut requests = Requests::default();
    requests.request(abi::STATISTICS, DUMP, &[0; NFGEN_BYTES]);
    netfilter.dump(requests, |_| {})
}

/// An entry that the kernel refused.
#[derive(Debug)]
pub struct RefusedEntry {
    /// Number of the entry among those of the call.
    pub index: usize,
    /// Error of the kernel.
    pub error: io::Error,
}

/// Installs entries, and returns those that cannot be. A helper or labels that this host does not know are left out.
pub fn install(netfilter: &Socket, entries: &[ConntrackEntry]) -> io::Result<Vec<RefusedEntry>> {
    let (related, first): (Vec<_>, Vec<_>) =
        entries.iter().enumerate().partition(|(_, entry)| entry.is_related());
    let mut refused = for_all(netfilter, &first, ConntrackEntry::request)?;
    refused.extend(for_all(netfilter, &related, ConntrackEntry::request)?);
    let (present, failed): (Vec<_>, Vec<_>) =
        refused.into_iter().partition(|refused| refused.error.kind() == io::ErrorKind::AlreadyExists);
    let plain: Vec<_> = failed.iter().map(|refused| entries.get(refused.index)?.without_extras()).collect();
    let again: Vec<_> = plain
        .iter()
        .zip(&failed)
        .filter_map(|(entry, refused)| Some((refused.index, entry.as_ref()?)))
        .collect();
    let mut left = for_all(netfilter, &again, ConntrackEntry::request)?;
    left.extend(present);
    left.extend(
        failed.into_iter().zip(&plain).filter(|(_, plain)| plain.is_none()).map(|(refused, _)| refused),
    );
    Ok(left)
}

/// Removes entries, and returns those that cannot be: they may have ended.
pub fn remove(netfilter: &Socket, entries: &[ConntrackEntry]) -> io::Result<Vec<RefusedEntry>> {
    let numbered: Vec<_> = entries.iter().enumerate().collect();
    for_all(netfilter, &numbered, ConntrackEntry::removal)
}

fn for_all(
    netfilter: &Socket,
    entries: &[(usize, &ConntrackEntry)],
    request: impl Fn(&ConntrackEntry, &mut Requests) -> Option<()>,
) -> io::Result<Vec<RefusedEntry>> {
    let mut refused = Vec::new();
    for some in entries.chunks(AT_ONCE) {
        let (mut requests, mut asked) = (Requests::default(), Vec::new());
        for (index, entry) in some {
            let mut one = Requests::default();
            if request(entry, &mut one).is_none() {
                refused.push(RefusedEntry { index: *index, error: io::ErrorKind::InvalidData.into() });
                continue;
            }
            requests.append(one);
            asked.push(*index);
        }
        // The kernel takes no empty message.
        if asked.is_empty() {
            continue;
        }
        for (number, error) in netfilter.exchange(requests)? {
            if let Some(index) = (number as usize).checked_sub(1).and_then(|number| asked.get(number)) {
                refused.push(RefusedEntry { index: *index, error });
            }
        }
    }
    Ok(refused)
}
