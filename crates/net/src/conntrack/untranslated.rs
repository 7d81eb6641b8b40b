//! Entries as a guest's own network sees its connections, and their marks.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::{ConntrackEntry, NFGEN_BYTES, abi};
use crate::netlink::{Requests, attribute, attributes};

/// State of TCP from which on a connection is over: both ends have closed it, or one has reset it.
const TIME_WAIT: u8 = 7;
/// Attribute of TCP: its state.
const TCP_STATE: u16 = 1;
/// Flags of an entry that is translated.
const TRANSLATED: u32 = abi::IS_SOURCE_NAT | abi::IS_DESTINATION_NAT;
/// Attributes that translation changes.
const REPLACED: [u16; 5] =
    [abi::ORIGINAL, abi::REPLY, abi::STATUS, abi::SEQUENCE_ORIGINAL, abi::SEQUENCE_REPLY];

impl ConntrackEntry {
    /// Returns the mark of the connection.
    pub fn mark(&self) -> u32 {
        self.number(abi::MARK).unwrap_or(0)
    }

    /// Returns true if no more packets of the connection are expected.
    pub fn is_over(&self) -> bool {
        let tcp = self.attribute(abi::PROTOCOL_STATE).and_then(|state| attribute(state, abi::TCP));
        let state = tcp.and_then(|tcp| attribute(tcp, TCP_STATE)?.first().copied());
        state.is_some_and(|state| state >= TIME_WAIT)
    }

    /// Returns the entry as it is between the guest with these addresses and what translates its connections: not
    /// translated. None if the entry is damaged.
    pub fn untranslated(&self, guest: &BTreeSet<IpAddr>) -> Option<Self> {
        let status = self.number(abi::STATUS).unwrap_or(0);
        if status & TRANSLATED == 0 {
            return Some(self.clone());
        }
        let (original, reply) = self.tuples()?;
        let (original, reply) = if guest.contains(&original.source) {
            let answer = original.answer(&reply);
            (original, answer)
        } else {
            (reply.answer(&original), reply)
        };
        let mut kept = Requests::default();
        for (kind, flow) in [(abi::ORIGINAL, &original), (abi::REPLY, &reply)] {
            kept.nest(kind);
            flow.compose(&mut kept);
            kept.end();
        }
        kept.number(abi::STATUS, status & !TRANSLATED);
        Some(self.with(kept, &REPLACED))
    }

    /// Returns the entry with another mark.
    #[must_use]
    pub fn with_mark(&self, mark: u32) -> Self {
        let mut kept = Requests::default();
        kept.number(abi::MARK, mark);
        self.with(kept, &[abi::MARK])
    }

    /// Returns the entry with attributes in place of those of the same kinds.
    fn with(&self, mut new: Requests, replaced: &[u16]) -> Self {
        let (header, listed) = self.0.split_at_checked(NFGEN_BYTES).unwrap_or_default();
        for (kind, value) in attributes(listed).filter(|(kind, _)| !replaced.contains(kind)) {
            new.attribute(kind, value);
        }
        Self([header, &new.finish()].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: [u8; 4] = [10, 0, 0, 7];
    const OTHER: [u8; 4] = [192, 0, 2, 9];
    const HOST: [u8; 4] = [198, 51, 100, 1];

    /// Composes one direction of a connection of TCP.
    fn direction(requests: &mut Requests, kind: u16, from: ([u8; 4], u16), to: ([u8; 4], u16)) {
        requests.nest(kind).nest(abi::TUPLE_IP).attribute(1, &from.0).attribute(2, &to.0).end();
        requests.nest(abi::TUPLE_PROTOCOL).attribute(abi::NUMBER, &[6]);
        requests.attribute(abi::SOURCE_PORT, &from.1.to_be_bytes());
        requests.attribute(abi::DESTINATION_PORT, &to.1.to_be_bytes()).end().end();
    }

    fn entry(ends: [([u8; 4], u16); 4], status: u32, state: u8) -> ConntrackEntry {
        let mut requests = Requests::default();
        direction(&mut requests, abi::ORIGINAL, ends[0], ends[1]);
        direction(&mut requests, abi::REPLY, ends[2], ends[3]);
        requests.number(abi::STATUS, status | abi::SEEN_REPLY).number(abi::MARK, 5);
        requests.nest(abi::PROTOCOL_STATE).nest(abi::TCP).attribute(TCP_STATE, &[state]).end().end();
        ConntrackEntry([&[2, 0, 0, 0][..], &requests.finish()].concat())
    }

    #[test]
    fn an_entry_is_seen_from_inside_without_translation() {
        let guest = BTreeSet::from([IpAddr::from(GUEST)]);
        // The guest has asked; its host has put its own address in place of the guest's.
        let asked = entry([(GUEST, 4000), (OTHER, 80), (OTHER, 80), (HOST, 5000)], abi::IS_SOURCE_NAT, 3);
        // The guest was asked by an address of its host.
        let served =
            entry([(OTHER, 4000), (HOST, 80), (GUEST, 8080), (OTHER, 4000)], abi::IS_DESTINATION_NAT, 3);
        for (entry, expected) in
            [(&asked, "tcp 10.0.0.7:4000 → 192.0.2.9:80"), (&served, "tcp 192.0.2.9:4000 → 10.0.0.7:8080")]
        {
            let inside = entry.untranslated(&guest).unwrap();
            assert_eq!(inside.to_string(), expected);
            let (original, reply) = inside.tuples().unwrap();
            assert_eq!((original.source, original.destination), (reply.destination, reply.source));
            assert_eq!(original.source_port(), reply.destination_port());
            assert_eq!(inside.number(abi::STATUS), Some(abi::SEEN_REPLY));
            assert_eq!((inside.mark(), inside.translated_to()), (5, vec![]));
            assert_eq!(inside.untranslated(&guest), Some(inside.clone()));
        }
        assert_eq!(ConntrackEntry(vec![1]).untranslated(&guest), Some(ConntrackEntry(vec![1])), "damaged");
    }

    #[test]
    fn marks_and_states_are_read_and_marks_replaced() {
        let plain = [(GUEST, 4000), (OTHER, 80), (OTHER, 80), (GUEST, 4000)];
        let marked = entry(plain, 0, 3).with_mark(0x0100_0005);
        assert_eq!((marked.mark(), marked.to_string()), (0x0100_0005, entry(plain, 0, 3).to_string()));
        for (state, is_over) in [(3, false), (6, false), (7, true), (8, true)] {
            assert_eq!(entry(plain, 0, state).is_over(), is_over, "{state}");
        }
    }
}
