//! Rules of netfilter as the kernel takes them: expressions over registers.

use std::io;
use std::net::IpAddr;

use super::kernel_names::MARK_MASK;
use super::model::Prefix;
use super::rules::{ChainHook, RuleChain, RuleExpression, RuleFamily, RuleTable};
use crate::divert::{begin_batch, end_batch, expression, nfgen};
use crate::ethernet::{ARP, IPV4, IPV6};
use crate::netlink::{ACKNOWLEDGE, APPEND, CREATE, Requests};

/// Numbers of `linux/netfilter/nf_tables.h` and `linux/netfilter.h`.
mod abi {
    pub(super) const NFTABLES: u16 = 10;
    pub(super) const NEW_TABLE: u16 = NFTABLES << 8;
    pub(super) const DELETE_TABLE: u16 = NFTABLES << 8 | 2;
    pub(super) const NEW_CHAIN: u16 = NFTABLES << 8 | 3;
    pub(super) const NEW_RULE: u16 = NFTABLES << 8 | 6;
    pub(super) const FAMILY_INET: u8 = 1;
    pub(super) const FAMILY_IPV4: u8 = 2;
    pub(super) const FAMILY_NETDEV: u8 = 5;
    pub(super) const FAMILY_IPV6: u8 = 10;
    pub(super) const PREROUTING: u32 = 0;
    pub(super) const FORWARD: u32 = 2;
    pub(super) const OUTPUT: u32 = 3;
    pub(super) const POSTROUTING: u32 = 4;
    pub(super) const INGRESS: u32 = 0;
    pub(super) const EGRESS: u32 = 1;
    pub(super) const META_KIND: u32 = 1;
    pub(super) const META_MARK: u32 = 3;
    pub(super) const META_IN: u32 = 6;
    pub(super) const META_OUT: u32 = 7;
    pub(super) const META_FAMILY: u32 = 15;
    pub(super) const META_PROTOCOL: u32 = 16;
    pub(super) const TRACKED_STATE: u32 = 0;
    pub(super) const TRACKED_MARK: u32 = 3;
    pub(super) const EQUAL: u32 = 0;
    pub(super) const NOT_EQUAL: u32 = 1;
    pub(super) const LINK: u32 = 0;
    pub(super) const NETWORK: u32 = 1;
    pub(super) const TRANSPORT: u32 = 2;
    pub(super) const VERDICT: u32 = 0;
    pub(super) const REGISTER: u32 = 1;
    pub(super) const SOURCE_NAT: u32 = 0;
    pub(super) const DESTINATION_NAT: u32 = 1;
    pub(super) const TCP_OPTION: u32 = 1;
    pub(super) const DROP: u32 = 0;
    pub(super) const ACCEPT: u32 = 1;
    /// Longest name of a device, with the zero at its end.
    pub(super) const NAME_BYTES: usize = 16;
    /// Option of TCP: the largest segment.
    pub(super) const SEGMENT_OPTION: u8 = 2;
    /// Protocol in IPv6, and its question for a neighbour.
    pub(super) const ICMPV6: u8 = 58;
    /// See [`ICMPV6`].
    pub(super) const NEIGHBOUR_SOLICITATION: u8 = 135;
}

/// Composes the requests that make a table in place of one with the same name, in one step. `index_of` returns the number
/// of a device.
///
/// # Errors
/// If a device that a rule names does not exist.
pub fn make(table: &RuleTable, index_of: impl Fn(&str) -> io::Result<u32>) -> io::Result<Requests> {
    let family = nfgen(family(table.family), 0);
    let mut requests = Requests::default();
    begin_batch(&mut requests);
    replace(&mut requests, table);
    requests.request(abi::NEW_TABLE, ACKNOWLEDGE | CREATE, &family).text(1, &table.name);
    for chain in &table.chains {
        requests.request(abi::NEW_CHAIN, ACKNOWLEDGE | CREATE, &family);
        requests.text(1, &table.name).text(3, &chain.name);
        hook(&mut requests, chain);
        requests.text(7, if chain.translates { "nat" } else { "filter" });
    }
    for chain in &table.chains {
        for rule in &chain.rules {
            // Without the flag a rule comes before the others.
            requests.request(abi::NEW_RULE, ACKNOWLEDGE | CREATE | APPEND, &family);
            requests.text(1, &table.name).text(2, &chain.name).nest(4);
            for part in rule {
                encode(&mut requests, table.family, part, &index_of)?;
            }
            requests.end();
        }
    }
    end_batch(&mut requests);
    Ok(requests)
}

/// Composes the requests that remove a table, also if there is none.
pub fn remove(table: &RuleTable) -> Requests {
    let mut requests = Requests::default();
    begin_batch(&mut requests);
    replace(&mut requests, table);
    end_batch(&mut requests);
    requests
}

/// Appends the requests after which there is no table of this name: it can be deleted once it has been made.
fn replace(requests: &mut Requests, table: &RuleTable) {
    let family = nfgen(family(table.family), 0);
    requests.request(abi::NEW_TABLE, ACKNOWLEDGE | CREATE, &family).text(1, &table.name);
    requests.request(abi::DELETE_TABLE, ACKNOWLEDGE, &family).text(1, &table.name);
}

fn family(family: RuleFamily) -> u8 {
    match family {
        RuleFamily::Inet => abi::FAMILY_INET,
        RuleFamily::Netdev => abi::FAMILY_NETDEV,
    }
}

fn hook(requests: &mut Requests, chain: &RuleChain) {
    let (number, device) = match &chain.hook {
        ChainHook::Prerouting => (abi::PREROUTING, None),
        ChainHook::Forward => (abi::FORWARD, None),
        ChainHook::Output => (abi::OUTPUT, None),
        ChainHook::Postrouting => (abi::POSTROUTING, None),
        ChainHook::Ingress(device) => (abi::INGRESS, Some(device)),
        ChainHook::Egress(device) => (abi::EGRESS, Some(device)),
    };
    requests.nest(4).number(1, number).number(2, chain.priority as u32);
    if let Some(device) = device {
        requests.text(3, device);
    }
    requests.end();
}

/// Appends the expressions of a part of a rule.
fn encode(
    requests: &mut Requests,
    family: RuleFamily,
    part: &RuleExpression,
    index_of: &impl Fn(&str) -> io::Result<u32>,
) -> io::Result<()> {
    match part {
        RuleExpression::In(device) => device_is(requests, abi::META_IN, abi::EQUAL, device),
        RuleExpression::NotIn(device) => device_is(requests, abi::META_IN, abi::NOT_EQUAL, device),
        RuleExpression::Out(device) => device_is(requests, abi::META_OUT, abi::EQUAL, device),
        RuleExpression::NotOut(device) => device_is(requests, abi::META_OUT, abi::NOT_EQUAL, device),
        RuleExpression::Source(address) => address_is(requests, family, *address, true),
        RuleExpression::Destination(address) => address_is(requests, family, *address, false),
        RuleExpression::IsV6(is_v6) => family_is(requests, family, *is_v6),
        RuleExpression::Protocol(protocol) => {
            load(requests, "meta", abi::META_PROTOCOL);
            compare(requests, abi::EQUAL, &[*protocol]);
        }
        RuleExpression::DestinationPort(port) => {
            load_bytes(requests, abi::TRANSPORT, 2, 2);
            compare(requests, abi::EQUAL, &port.to_be_bytes());
        }
        RuleExpression::TcpFlags(mask, flags) => tcp_flags(requests, *mask, abi::EQUAL, *flags),
        RuleExpression::NotTcpFlags(mask, flags) => tcp_flags(requests, *mask, abi::NOT_EQUAL, *flags),
        RuleExpression::CtState(state) => {
            load(requests, "ct", abi::TRACKED_STATE);
            bits(requests, &state.to_ne_bytes(), &[0; 4]);
            compare(requests, abi::NOT_EQUAL, &[0; 4]);
        }
        RuleExpression::Unicast => {
            load_bytes(requests, abi::LINK, 0, 1);
            bits(requests, &[1], &[0]);
            compare(requests, abi::EQUAL, &[0]);
        }
        RuleExpression::DestinationMac(mac) => {
            load_bytes(requests, abi::LINK, 0, 6);
            compare(requests, abi::EQUAL, &mac.0);
        }
        RuleExpression::SolicitationFor(range) => solicitation_for(requests, *range),
        RuleExpression::Arp => kind_is(requests, ARP),
        RuleExpression::ArpRequest => arp_request(requests),
        RuleExpression::ArpOf(address) => {
            kind_is(requests, ARP);
            load_bytes(requests, abi::NETWORK, 14, 4);
            compare(requests, abi::EQUAL, &address.octets());
        }
        RuleExpression::NotArpFor(range) => not_arp_for(requests, *range),
        RuleExpression::Mark(mark) => {
            load(requests, "meta", abi::META_MARK);
            compare(requests, abi::EQUAL, &mark.to_ne_bytes());
        }
        RuleExpression::SetMark(mark) => change_mark(requests, "meta", abi::META_MARK, *mark),
        RuleExpression::SetCtMark(mark) => change_mark(requests, "ct", abi::TRACKED_MARK, *mark),
        RuleExpression::SetWholeMark(mark) => {
            immediate(requests, &mark.to_ne_bytes());
            store_mark(requests, "meta", abi::META_MARK);
        }
        RuleExpression::RestoreCtMark => {
            load(requests, "ct", abi::TRACKED_MARK);
            bits(requests, &MARK_MASK.to_ne_bytes(), &[0; 4]);
            store_mark(requests, "meta", abi::META_MARK);
        }
        RuleExpression::Notrack => expression(requests, "notrack", |_| {}),
        RuleExpression::Snat(address) => translate(requests, abi::SOURCE_NAT, *address),
        RuleExpression::Dnat(address) => translate(requests, abi::DESTINATION_NAT, *address),
        RuleExpression::ClampMss(bytes) => clamp_mss(requests, *bytes),
        RuleExpression::SetDestinationMac(mac) => {
            immediate(requests, &mac.0);
            store_bytes(requests, abi::LINK, 0, 6);
        }
        RuleExpression::SetArpSender(address) => {
            immediate(requests, &address.octets());
            store_bytes(requests, abi::NETWORK, 14, 4);
        }
        RuleExpression::Forward(device) => {
            immediate(requests, &index_of(device)?.to_ne_bytes());
            expression(requests, "fwd", |data| {
                data.number(1, abi::REGISTER);
            });
        }
        RuleExpression::Accept => verdict(requests, abi::ACCEPT),
        RuleExpression::Drop => verdict(requests, abi::DROP),
    }
    Ok(())
}

/// Selects frames of ARP that ask for an address.
fn arp_request(requests: &mut Requests) {
    kind_is(requests, ARP);
    load_bytes(requests, abi::NETWORK, 6, 2);
    compare(requests, abi::EQUAL, &[0, 1]);
}

/// Compares the address that an ARP frame asks for with a range of IPv4.
fn not_arp_for(requests: &mut Requests, range: Prefix) {
    let IpAddr::V4(first) = range.first().address else { return };
    let mask = u32::MAX.checked_shl(32 - u32::from(range.length)).unwrap_or(0);
    load_bytes(requests, abi::NETWORK, 24, 4);
    bits(requests, &mask.to_be_bytes(), &[0; 4]);
    compare(requests, abi::NOT_EQUAL, &first.octets());
}

/// Loads a value that the kernel knows of a packet or of its connection.
fn load(requests: &mut Requests, name: &str, key: u32) {
    expression(requests, name, |data| {
        data.number(1, abi::REGISTER).number(2, key);
    });
}

/// Stores a mark: the third attribute names the register for packets, the fourth for connections.
fn store_mark(requests: &mut Requests, name: &str, key: u32) {
    let register = if name == "ct" { 4 } else { 3 };
    expression(requests, name, |data| {
        data.number(2, key).number(register, abi::REGISTER);
    });
}

fn change_mark(requests: &mut Requests, name: &str, key: u32, mark: u32) {
    load(requests, name, key);
    bits(requests, &(!MARK_MASK).to_ne_bytes(), &mark.to_ne_bytes());
    store_mark(requests, name, key);
}

fn compare(requests: &mut Requests, operation: u32, value: &[u8]) {
    expression(requests, "cmp", |data| {
        data.number(1, abi::REGISTER).number(2, operation);
        data.nest(3).attribute(1, value).end();
    });
}

/// Keeps the bits of a mask, and inverts others.
fn bits(requests: &mut Requests, mask: &[u8], inverted: &[u8]) {
    expression(requests, "bitwise", |data| {
        data.number(1, abi::REGISTER).number(2, abi::REGISTER).number(3, mask.len() as u32);
        data.nest(4).attribute(1, mask).end();
        data.nest(5).attribute(1, inverted).end();
    });
}

fn immediate(requests: &mut Requests, value: &[u8]) {
    expression(requests, "immediate", |data| {
        data.number(1, abi::REGISTER).nest(2).attribute(1, value).end();
    });
}

fn verdict(requests: &mut Requests, code: u32) {
    expression(requests, "immediate", |data| {
        data.number(1, abi::VERDICT).nest(2).nest(2).number(1, code).end().end();
    });
}

fn load_bytes(requests: &mut Requests, base: u32, offset: u32, bytes: u32) {
    expression(requests, "payload", |data| {
        data.number(1, abi::REGISTER).number(2, base).number(3, offset).number(4, bytes);
    });
}

/// Stores bytes that no checksum covers.
fn store_bytes(requests: &mut Requests, base: u32, offset: u32, bytes: u32) {
    expression(requests, "payload", |data| {
        data.number(5, abi::REGISTER).number(2, base).number(3, offset).number(4, bytes);
        data.number(6, 0).number(7, 0).number(8, 0);
    });
}

fn device_is(requests: &mut Requests, key: u32, operation: u32, device: &str) {
    let mut name = [0; abi::NAME_BYTES];
    for (into, byte) in name.iter_mut().take(abi::NAME_BYTES - 1).zip(device.bytes()) {
        *into = byte;
    }
    load(requests, "meta", key);
    compare(requests, operation, &name);
}

fn kind_is(requests: &mut Requests, kind: u16) {
    load(requests, "meta", abi::META_KIND);
    compare(requests, abi::EQUAL, &kind.to_be_bytes());
}

fn family_is(requests: &mut Requests, family: RuleFamily, is_v6: bool) {
    match family {
        RuleFamily::Netdev => kind_is(requests, if is_v6 { IPV6 } else { IPV4 }),
        RuleFamily::Inet => {
            load(requests, "meta", abi::META_FAMILY);
            compare(requests, abi::EQUAL, &[if is_v6 { abi::FAMILY_IPV6 } else { abi::FAMILY_IPV4 }]);
        }
    }
}

fn address_is(requests: &mut Requests, family: RuleFamily, address: IpAddr, is_source: bool) {
    family_is(requests, family, address.is_ipv6());
    match address {
        IpAddr::V4(address) => {
            load_bytes(requests, abi::NETWORK, if is_source { 12 } else { 16 }, 4);
            compare(requests, abi::EQUAL, &address.octets());
        }
        IpAddr::V6(address) => {
            load_bytes(requests, abi::NETWORK, if is_source { 8 } else { 24 }, 16);
            compare(requests, abi::EQUAL, &address.octets());
        }
    }
}

/// Compares a packet with a neighbour solicitation, which has no extension headers, for an address in a range.
fn solicitation_for(requests: &mut Requests, range: Prefix) {
    let IpAddr::V6(first) = range.first().address else { return };
    let mask = u128::MAX.checked_shl(128 - u32::from(range.length)).unwrap_or(0);
    kind_is(requests, IPV6);
    for (offset, value) in [(6, abi::ICMPV6), (40, abi::NEIGHBOUR_SOLICITATION)] {
        load_bytes(requests, abi::NETWORK, offset, 1);
        compare(requests, abi::EQUAL, &[value]);
    }
    load_bytes(requests, abi::NETWORK, 48, 16);
    bits(requests, &mask.to_be_bytes(), &[0; 16]);
    compare(requests, abi::EQUAL, &first.octets());
}

fn tcp_flags(requests: &mut Requests, mask: u8, operation: u32, flags: u8) {
    load_bytes(requests, abi::TRANSPORT, 13, 1);
    bits(requests, &[mask], &[0]);
    compare(requests, operation, &[flags]);
}

fn translate(requests: &mut Requests, kind: u32, address: IpAddr) {
    let family = match address {
        IpAddr::V4(address) => {
            immediate(requests, &address.octets());
            abi::FAMILY_IPV4
        }
        IpAddr::V6(address) => {
            immediate(requests, &address.octets());
            abi::FAMILY_IPV6
        }
    };
    expression(requests, "nat", |data| {
        data.number(1, kind).number(2, family.into()).number(3, abi::REGISTER);
    });
}

/// Writes the option of TCP; the kernel only ever makes it less.
fn clamp_mss(requests: &mut Requests, bytes: u16) {
    immediate(requests, &bytes.to_be_bytes());
    expression(requests, "exthdr", |data| {
        data.attribute(2, &[abi::SEGMENT_OPTION]).number(3, 2).number(4, 2);
        data.number(6, abi::TCP_OPTION).number(7, abi::REGISTER);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{answers, attribute, attributes};

    /// Returns the names of a rule's expressions.
    fn expressions(family: RuleFamily, part: RuleExpression) -> Vec<String> {
        let hook = ChainHook::Forward;
        let rules = vec![vec![part]];
        let chain = RuleChain { name: "c".to_owned(), translates: false, hook, priority: -1, rules };
        let table = RuleTable { family, name: "t".to_owned(), chains: vec![chain] };
        let bytes = make(&table, |_| Ok(7)).unwrap().finish();
        let rule = answers(&bytes).find(|message| message.kind == abi::NEW_RULE).unwrap();
        let list = attribute(&rule.body[4..], 4).unwrap();
        let name = |(_, one): (u16, &[u8])| {
            let name = attribute(one, 1).unwrap();
            String::from_utf8(name[..name.len() - 1].to_vec()).unwrap()
        };
        attributes(list).map(name).collect()
    }

    #[test]
    fn parts_of_rules_become_expressions() {
        let v4: IpAddr = "10.0.0.1".parse().unwrap();
        let inet = |part| expressions(RuleFamily::Inet, part);
        assert_eq!(inet(RuleExpression::NotOut("whimbrel1000000".to_owned())), ["meta", "cmp"]);
        assert_eq!(inet(RuleExpression::Source(v4)), ["meta", "cmp", "payload", "cmp"]);
        assert_eq!(inet(RuleExpression::SetCtMark(1 << 24)), ["ct", "bitwise", "ct"]);
        assert_eq!(inet(RuleExpression::Snat(v4)), ["immediate", "nat"]);
        assert_eq!(inet(RuleExpression::ClampMss(1410)), ["immediate", "exthdr"]);
        let netdev = |part| expressions(RuleFamily::Netdev, part);
        assert_eq!(netdev(RuleExpression::Forward("tap0".to_owned())), ["immediate", "fwd"]);
        assert_eq!(netdev(RuleExpression::Drop), ["immediate"]);
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        let rules = vec![vec![RuleExpression::Forward("tap0".to_owned())]];
        let hook = ChainHook::Ingress("tap1".to_owned());
        let chain = RuleChain { name: "c".to_owned(), translates: false, hook, priority: 0, rules };
        let table = RuleTable { family: RuleFamily::Netdev, name: "t".to_owned(), chains: vec![chain] };
        let absent = |_: &str| Err(io::Error::from(io::ErrorKind::NotFound));
        assert!(make(&table, absent).is_err());
    }
}
