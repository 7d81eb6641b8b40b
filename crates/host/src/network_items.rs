//! Items of migrations in the kernel of this host, and their standing.

use std::io;

use net::{KernelItem, KernelItemKind};
use proto::{Epoch, MigrationId, VmName};

use api::report::{rfc3339, unix_ms_now};
use api::{NetworkItem, NetworkItemKind, NetworkItemStanding, NetworkState};
use store::journal::{Journal, JournalError, MigrationRecord};

/// Time within which a migration that has ended removes what it has in the kernel.
const REMOVAL_MS: u64 = 5000;

/// Lists what migrations have in the kernel, in the network namespace of this thread.
///
/// # Errors
/// If the journal cannot be read. A part of the kernel that cannot be read is named in the result.
pub fn list(journal: &Journal) -> Result<NetworkState, JournalError> {
    let mut state = NetworkState::default();
    // The kernel is read first: a migration that begins in between is in the journal by then.
    let parts = [
        ("tables of netfilter", net::inventory::tables()),
        ("network devices", net::inventory::devices()),
        ("routes and policy rules", net::inventory::routing()),
    ];
    let mut found = Vec::new();
    for (part, items) in parts {
        match items {
            Ok(items) => found.extend(items),
            Err(error) => state.unread.push(unread(part, &error)),
        }
    }
    let records = journal.migrations()?;
    let now_ms = unix_ms_now();
    state.items = found.into_iter().map(|item| describe(item, &records, now_ms)).collect();
    Ok(state)
}

fn unread(part: &str, error: &io::Error) -> String {
    format!("the {part} of this host cannot be listed: {error}")
}

/// Describes an item by the journal's records.
fn describe(item: KernelItem, records: &[MigrationRecord], now_ms: u64) -> NetworkItem {
    let migration = item.migration.as_deref().and_then(migration_named);
    let record = records.iter().find(|record| Some(record.id()) == migration.as_ref());
    let standing = standing(record, now_ms);
    let advice = match standing {
        NetworkItemStanding::InUse | NetworkItemStanding::Ending => None,
        NetworkItemStanding::LeftOver => {
            Some(format!("restart the agent, with which it ends; if it stays, run `{}`", item.removal))
        }
        NetworkItemStanding::Unknown => {
            Some(format!("if no other agent runs on this host, run `{}`", item.removal))
        }
    };
    NetworkItem {
        kind: match item.kind {
            KernelItemKind::Table => NetworkItemKind::Table,
            KernelItemKind::Device => NetworkItemKind::Device,
            KernelItemKind::Route => NetworkItemKind::Route,
            KernelItemKind::Rule => NetworkItemKind::Rule,
        },
        name: item.name,
        interfaces: item.interfaces,
        migration,
        begun: record.map(|record| rfc3339(record.created_unix_ms)),
        age_s: record.map(|record| now_ms.saturating_sub(record.created_unix_ms) / 1000),
        standing,
        advice,
    }
}

/// Returns the standing of an item of the migration with this record.
fn standing(record: Option<&MigrationRecord>, now_ms: u64) -> NetworkItemStanding {
    match record {
        None => NetworkItemStanding::Unknown,
        Some(record) if record.open => NetworkItemStanding::InUse,
        Some(record) if now_ms.saturating_sub(record.updated_unix_ms) < REMOVAL_MS => {
            NetworkItemStanding::Ending
        }
        Some(_) => NetworkItemStanding::LeftOver,
    }
}

/// Returns the migration with this name, as [`MigrationId`] prints it.
fn migration_named(name: &str) -> Option<MigrationId> {
    let (vm, epoch) = name.rsplit_once('#')?;
    Some(MigrationId { vm: VmName::new(vm).ok()?, epoch: Epoch(epoch.parse().ok()?) })
}

#[cfg(test)]
mod tests {
    use engine::handover::source::SourceState;
    use store::journal::State;

    use super::*;
    use crate::testing::{id, terms};

    const BEGUN_MS: u64 = 1_700_000_000_000;

    fn record(open: bool) -> MigrationRecord {
        MigrationRecord {
            terms: terms("a", "b"),
            state: State::Source(SourceState::Aborted),
            open,
            details: serde_json::Value::Null,
            message: None,
            created_unix_ms: BEGUN_MS,
            updated_unix_ms: BEGUN_MS + 10_000,
        }
    }

    fn table(migration: &str) -> KernelItem {
        KernelItem {
            kind: KernelItemKind::Table,
            name: format!("netdev whimbrel-{migration}"),
            migration: Some(migration.to_owned()),
            interfaces: vec!["tap0".to_owned()],
            removal: "nft delete table netdev handle 7".to_owned(),
        }
    }

    #[test]
    fn names_of_migrations_are_read() {
        assert_eq!(migration_named(&id(12).to_string()), Some(id(12)));
        for other in ["", "web", "web#", "#1", "web#-1", "web#1x", "a b#1"] {
            assert_eq!(migration_named(other), None, "{other}");
        }
    }

    #[test]
    fn what_has_outlived_its_migration_is_left_over() {
        let ended_ms = BEGUN_MS + 10_000;
        for (open, now_ms, expected) in [
            (true, ended_ms + 100 * REMOVAL_MS, NetworkItemStanding::InUse),
            (false, ended_ms, NetworkItemStanding::Ending),
            (false, ended_ms + REMOVAL_MS - 1, NetworkItemStanding::Ending),
            (false, ended_ms + REMOVAL_MS, NetworkItemStanding::LeftOver),
        ] {
            let item = describe(table("web#1"), &[record(open)], now_ms);
            assert_eq!(item.standing, expected);
            assert_eq!(item.age_s, Some((now_ms - BEGUN_MS) / 1000));
            assert_eq!(item.migration, Some(id(1)));
            let advice = item.advice.unwrap_or_default();
            assert_eq!(advice.contains("nft delete"), expected == NetworkItemStanding::LeftOver, "{advice}");
        }
    }

    #[test]
    fn what_the_journal_does_not_know_is_listed_all_the_same() {
        for (name, migration) in [("web#2", Some(id(2))), ("nothing", None)] {
            let item = describe(table(name), &[record(true)], BEGUN_MS);
            assert_eq!((item.standing, item.migration), (NetworkItemStanding::Unknown, migration));
            assert_eq!((item.age_s, item.begun), (None, None));
            assert!(item.advice.unwrap().contains("nft delete table netdev handle 7"));
        }
    }
}
