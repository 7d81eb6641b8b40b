//! Entries of a table that changes.

use super::*;
use crate::netlink::Requests;

/// Composes an entry as a host sends it: TCP from 10.0.0.9 with this port to `to`; answers go to `answered`.
fn entry(port: u16, to: [u8; 4], answered: [u8; 4], state: u8, timeout_s: u32) -> ConntrackEntry {
    const CLIENT: [u8; 4] = [10, 0, 0, 9];
    let mut listed = Requests::default();
    let mut tuple = |kind: u16, source: [u8; 4], destination: [u8; 4], ports: [u16; 2]| {
        listed.nest(kind).nest(1).attribute(1, &source).attribute(2, &destination).end();
        listed.nest(2).attribute(1, &[6]);
        listed.attribute(2, &ports[0].to_be_bytes()).attribute(3, &ports[1].to_be_bytes()).end().end();
    };
    tuple(1, CLIENT, to, [port, 80]);
    tuple(2, to, answered, [80, port]);
    let is_source_nat = if answered == CLIENT { 0 } else { 0x10 };
    listed.number(3, 6 | is_source_nat).number(7, timeout_s);
    listed.nest(4).nest(1).attribute(1, &[state]).end().end();
    let body = [&[2, 0, 0, 0], &listed.finish()[..]].concat();
    let mut encoded = (body.len() as u32).to_le_bytes().to_vec();
    encoded.extend(body);
    ConntrackEntry::decode(&encoded).unwrap().0
}

const GUEST: [u8; 4] = [10, 0, 0, 1];
const CLIENT: [u8; 4] = [10, 0, 0, 9];
const HOST: [u8; 4] = [10, 0, 0, 2];

pub(crate) fn plain(port: u16, state: u8, timeout_s: u32) -> ConntrackEntry {
    entry(port, GUEST, CLIENT, state, timeout_s)
}

#[test]
fn only_what_has_changed_is_sent_again() {
    let (mut sent, own, now) = (ReplicatedEntries::default(), BTreeSet::new(), Instant::now());
    let (first, second) = (plain(1000, 3, 300), plain(1001, 1, 300));
    let changes = sent.changes(now, vec![first.clone(), second.clone()], &own);
    assert_eq!(changes, [EntryChange::Install(first.clone()), EntryChange::Install(second.clone())]);
    // The time is another with every packet.
    assert_eq!(sent.changes(now, vec![plain(1000, 3, 299), second.clone()], &own), []);
    let (later, third) = (plain(1001, 3, 300), plain(1002, 3, 300));
    let changes = sent.changes(now, vec![later.clone(), third.clone()], &own);
    let removed = BTreeSet::from([first.to_string(), second.to_string()]);
    let [EntryChange::Remove(one), EntryChange::Remove(other), installed @ ..] = &changes[..] else {
        panic!("{changes:?}")
    };
    assert_eq!(BTreeSet::from([one.to_string(), other.to_string()]), removed, "before others are installed");
    assert_eq!(installed, [EntryChange::Install(later), EntryChange::Install(third)]);
    assert_eq!(sent.changes(now, Vec::new(), &own).len(), 2);
    assert_eq!(sent.changes(now, Vec::new(), &own), []);
}

#[test]
fn a_copy_that_would_end_soon_is_replaced() {
    let (mut sent, own, start) = (ReplicatedEntries::default(), BTreeSet::new(), Instant::now());
    let entry = plain(1000, 3, 30);
    sent.changes(start, vec![entry.clone()], &own);
    assert_eq!(sent.changes(start + Duration::from_secs(20), vec![entry.clone()], &own), []);
    let later = start + Duration::from_secs(21);
    // This one ends as soon.
    assert_eq!(sent.changes(later, vec![plain(1000, 3, 9)], &own), []);
    let changes = sent.changes(later, vec![entry.clone()], &own);
    assert_eq!(changes, [EntryChange::Remove(entry.clone()), EntryChange::Install(entry)]);
}

#[test]
fn translation_to_the_hosts_own_address_is_marked() {
    let (mut sent, own) = (ReplicatedEntries::default(), BTreeSet::from([IpAddr::from(HOST)]));
    let (translated, other) = (entry(1000, GUEST, HOST, 3, 300), plain(1001, 3, 300));
    let changes = sent.changes(Instant::now(), vec![translated.clone(), other.clone()], &own);
    let expected = [EntryChange::InstallWithOwnAddress(translated), EntryChange::Install(other.clone())];
    assert_eq!(changes, expected);
    assert_eq!(sent.no_longer_needed(&BTreeSet::from([IpAddr::from(GUEST)])), [other]);
    assert_eq!(sent.no_longer_needed(&BTreeSet::from([IpAddr::from([10, 0, 0, 77])])), []);
}

#[test]
fn changes_come_back_from_bytes_or_not_at_all() {
    let entry = plain(1000, 3, 300);
    let changes = [
        EntryChange::Remove(entry.clone()),
        EntryChange::InstallWithOwnAddress(entry.clone()),
        EntryChange::Install(entry),
    ];
    let mut bytes = Vec::new();
    for change in &changes {
        change.encode(&mut bytes);
    }
    assert_eq!(EntryChange::decode_all(&bytes).unwrap(), changes);
    let whole = bytes.len() / changes.len();
    for cut in (0..bytes.len()).filter(|cut| cut % whole != 0) {
        assert_eq!(EntryChange::decode_all(&bytes[..cut]), Err(BadEntries));
    }
    bytes[0] = 9;
    assert_eq!(EntryChange::decode_all(&bytes), Err(BadEntries));
}
