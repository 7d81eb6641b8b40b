//! Entries for a guest that moves: which conntrack entries its new host lacks. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::conntrack::{BadEntries, ConntrackEntry};

/// Most entries that are copied for one guest.
pub const MOST_ENTRIES: usize = 65_536;

/// Time for which a copy lasts without packets at least, if the entry itself does: a copy gets no packets until the
/// guest runs beside it.
const LEAST_LEFT: Duration = Duration::from_secs(10);

/// Change to the entries of the other host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryChange {
    /// There is a new entry.
    Install(ConntrackEntry),
    /// There is a new entry, whose NAT uses an address of the source host. It is of use only at a host with that
    /// address.
    InstallWithOwnAddress(ConntrackEntry),
    /// An entry has ended, or is about to be replaced.
    Remove(ConntrackEntry),
}

const INSTALL: u8 = 1;
const INSTALL_WITH_OWN_ADDRESS: u8 = 2;
const REMOVE: u8 = 3;

impl EntryChange {
    /// Returns the entry that it concerns.
    pub fn entry(&self) -> &ConntrackEntry {
        match self {
            Self::Install(entry) | Self::InstallWithOwnAddress(entry) | Self::Remove(entry) => entry,
        }
    }

    /// Appends the change as it is sent to the other host.
    pub fn encode(&self, into: &mut Vec<u8>) {
        into.push(match self {
            Self::Install(_) => INSTALL,
            Self::InstallWithOwnAddress(_) => INSTALL_WITH_OWN_ADDRESS,
            Self::Remove(_) => REMOVE,
        });
        self.entry().encode(into);
    }

    /// Decodes a change, and returns what follows it.
    ///
    /// # Errors
    /// If the bytes are cut off, or of an unknown kind.
    pub fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), BadEntries> {
        let (kind, rest) = bytes.split_first().ok_or(BadEntries)?;
        let (entry, rest) = ConntrackEntry::decode(rest)?;
        let change = match *kind {
            INSTALL => Self::Install(entry),
            INSTALL_WITH_OWN_ADDRESS => Self::InstallWithOwnAddress(entry),
            REMOVE => Self::Remove(entry),
            _ => return Err(BadEntries),
        };
        Ok((change, rest))
    }

    /// Decodes all changes of a list.
    ///
    /// # Errors
    /// As for [`decode`](Self::decode): none of the changes is returned then.
    pub fn decode_all(mut bytes: &[u8]) -> Result<Vec<Self>, BadEntries> {
        let mut changes = Vec::new();
        while !bytes.is_empty() {
            let (change, rest) = Self::decode(bytes)?;
            changes.push(change);
            bytes = rest;
        }
        Ok(changes)
    }
}

/// Entries that the other host has been sent.
#[derive(Debug, Default)]
pub struct ReplicatedEntries(BTreeMap<Vec<u8>, ReplicatedEntry>);

#[derive(Debug)]
struct ReplicatedEntry {
    entry: ConntrackEntry,
    at: Instant,
    is_with_own_address: bool,
}

impl ReplicatedEntry {
    /// Returns true if the copy needs no change.
    fn is_good_for(&self, entry: &ConntrackEntry, now: Instant) -> bool {
        let lasts = |entry: &ConntrackEntry| Duration::from_secs(entry.timeout_s().into());
        let left = lasts(&self.entry).saturating_sub(now.duration_since(self.at));
        self.entry.is_like(entry) && left >= lasts(entry).min(LEAST_LEFT)
    }
}

impl ReplicatedEntries {
    /// Returns the changes that make the other host's entries equal to `entries`, which are sent now. `own` are the
    /// addresses of this host.
    pub fn changes(
        &mut self,
        now: Instant,
        entries: Vec<ConntrackEntry>,
        own: &BTreeSet<IpAddr>,
    ) -> Vec<EntryChange> {
        let (mut removed, mut installed) = (Vec::new(), Vec::new());
        let mut gone = std::mem::take(&mut self.0);
        for entry in entries {
            let key = entry.key();
            match gone.remove(&key) {
                Some(sent) if sent.is_good_for(&entry, now) => {
                    self.0.insert(key, sent);
                    continue;
                }
                Some(sent) => removed.push(EntryChange::Remove(sent.entry)),
                None => {}
            }
            let is_with_own_address = entry.translated_to().iter().any(|address| own.contains(address));
            installed.push(if is_with_own_address {
                EntryChange::InstallWithOwnAddress(entry.clone())
            } else {
                EntryChange::Install(entry.clone())
            });
            self.0.insert(key, ReplicatedEntry { entry, at: now, is_with_own_address });
        }
        removed.extend(gone.into_values().map(|sent| EntryChange::Remove(sent.entry)));
        removed.extend(installed);
        removed
    }

    /// Returns the entries of these addresses that the source host no longer needs once the guest runs elsewhere.
    pub fn no_longer_needed(&self, addresses: &BTreeSet<IpAddr>) -> Vec<ConntrackEntry> {
        let left = self.0.values().filter(|sent| !sent.is_with_own_address && sent.entry.is_of(addresses));
        left.map(|sent| sent.entry.clone()).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
