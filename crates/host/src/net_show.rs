//! Items of migrations in the kernel of this host, and their standing.

use std::collections::BTreeSet;
use std::io;

use net::redirection::kernel_names::number_of_device;
use net::redirection::{RecordStage, RedirectionRecord, teardown};
use net::{OwnObject, OwnObjectKind};
use proto::{HostId, MigrationId};

use crate::Context;
use crate::redirections::migration_named;
use api::report::{rfc3339, unix_ms_now};
use api::{
    NetworkItem, NetworkItemKind, NetworkItemStanding, NetworkState, NewAddress, RedirectionStage,
    StandingRedirection,
};
use store::journal::{JournalError, MigrationRecord};

/// Time within which a migration that has ended removes what it has in the kernel.
const REMOVAL_MS: u64 = 5000;

/// Lists what migrations have in the kernel, in the network namespace of this thread.
///
/// # Errors
/// If the journal cannot be read. A part of the kernel that cannot be read is named in the result.
pub fn list(context: &Context) -> Result<NetworkState, JournalError> {
    let mut state = NetworkState::default();
    // The kernel is read first: a migration that begins in between is in the journal by then.
    let parts = [
        ("tables of netfilter", net::own_objects::tables()),
        ("network devices", net::own_objects::devices()),
        ("routes and policy rules", net::own_objects::routing()),
    ];
    let mut found = Vec::new();
    for (part, items) in parts {
        match items {
            Ok(items) => found.extend(items),
            Err(error) => state.unread.push(unread(part, &error)),
        }
    }
    let kept = match context.redirections.records() {
        Ok(kept) => kept,
        Err(error) => {
            state.unread.push(format!("the redirections are not known: {}", crate::chain(&error)));
            Vec::new()
        }
    };
    let records = context.journal.migrations()?;
    let now_ms = unix_ms_now();
    let standing: BTreeSet<_> =
        kept.iter().filter_map(|kept| migration_named(&kept.redirection.migration)).collect();
    state.items = found.into_iter().map(|item| describe(item, &records, &standing, now_ms)).collect();
    state.redirections = kept.iter().filter_map(|kept| describe_redirection(kept, now_ms)).collect();
    Ok(state)
}

/// Describes a redirection by its record.
fn describe_redirection(record: &RedirectionRecord, now_ms: u64) -> Option<StandingRedirection> {
    let redirection = &record.redirection;
    let address =
        |pair: &net::redirection::AddressPair| NewAddress { old: pair.guest, new: pair.public, prefix: None };
    Some(StandingRedirection {
        migration: migration_named(&redirection.migration)?,
        at: HostId::new(&redirection.place.host).ok()?,
        left: redirection.legs.iter().filter_map(|leg| HostId::new(&leg.host).ok()).collect(),
        tunnel: redirection.legs.first().map(|leg| leg.tunnel.kind.to_string()),
        addresses: redirection.place.attachment.pairs.iter().map(address).collect(),
        stage: match record.stage {
            RecordStage::Prepared => RedirectionStage::Prepared,
            RecordStage::Active if record.is_incomplete => RedirectionStage::Incomplete,
            RecordStage::Active => RedirectionStage::Active,
            RecordStage::Ending => RedirectionStage::Ending,
        },
        age_s: now_ms.saturating_sub(record.since_unix_ms) / 1000,
        connections: teardown::connections(record).ok().flatten(),
    })
}

/// Returns true if an item is one of a redirection, which outlives its migration.
fn is_of_redirection(item: &OwnObject) -> bool {
    match item.kind {
        OwnObjectKind::Table => item.name.contains("-redirection-"),
        OwnObjectKind::Device => number_of_device(&item.name).is_some(),
        OwnObjectKind::Route | OwnObjectKind::Rule => true,
    }
}

fn unread(part: &str, error: &io::Error) -> String {
    format!("the {part} of this host cannot be listed: {error}")
}

/// Describes an item by the journal's records. `kept` are the migrations whose redirections stand.
fn describe(
    item: OwnObject,
    records: &[MigrationRecord],
    kept: &BTreeSet<MigrationId>,
    now_ms: u64,
) -> NetworkItem {
    let migration = item.migration.as_deref().and_then(migration_named);
    let record = records.iter().find(|record| Some(record.id()) == migration.as_ref());
    let is_kept = is_of_redirection(&item) && migration.as_ref().is_some_and(|id| kept.contains(id));
    let standing = if is_kept { NetworkItemStanding::InUse } else { standing(record, now_ms) };
    let advice = match standing {
        NetworkItemStanding::InUse | NetworkItemStanding::Ending => None,
        // Redirections outlive agents, and what no record names no agent knows.
        NetworkItemStanding::LeftOver if is_of_redirection(&item) => {
            Some(format!("if no other agent runs on this host, run `{}`", item.removal))
        }
        NetworkItemStanding::LeftOver => {
            Some(format!("restart the agent, with which it ends; if it stays, run `{}`", item.removal))
        }
        NetworkItemStanding::Unknown => {
            Some(format!("if no other agent runs on this host, run `{}`", item.removal))
        }
    };
    NetworkItem {
        kind: match item.kind {
            OwnObjectKind::Table => NetworkItemKind::Table,
            OwnObjectKind::Device => NetworkItemKind::Device,
            OwnObjectKind::Route => NetworkItemKind::Route,
            OwnObjectKind::Rule => NetworkItemKind::Rule,
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

    fn table(migration: &str) -> OwnObject {
        OwnObject {
            kind: OwnObjectKind::Table,
            name: format!("netdev whimbrel-{migration}"),
            migration: Some(migration.to_owned()),
            interfaces: vec!["tap0".to_owned()],
            removal: "nft delete table netdev handle 7".to_owned(),
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
            let item = describe(table("web#1"), &[record(open)], &BTreeSet::new(), now_ms);
            assert_eq!(item.standing, expected);
            assert_eq!(item.age_s, Some((now_ms - BEGUN_MS) / 1000));
            assert_eq!(item.migration, Some(id(1)));
            let advice = item.advice.unwrap_or_default();
            assert_eq!(advice.contains("nft delete"), expected == NetworkItemStanding::LeftOver, "{advice}");
        }
    }

    #[test]
    fn a_redirection_outlives_its_migration() {
        let (kept, now_ms) = (BTreeSet::from([id(1)]), BEGUN_MS + 100 * REMOVAL_MS);
        for (name, expected) in
            [("web#1", NetworkItemStanding::LeftOver), ("web#1-redirection-7", NetworkItemStanding::InUse)]
        {
            let item = OwnObject { migration: Some("web#1".to_owned()), ..table(name) };
            assert_eq!(describe(item, &[record(false)], &kept, now_ms).standing, expected, "{name}");
        }
        let item = OwnObject { migration: Some("web#1".to_owned()), ..table("web#1-redirection-7") };
        let advice = describe(item, &[record(false)], &BTreeSet::new(), now_ms).advice.unwrap();
        assert!(!advice.contains("restart") && advice.contains("nft delete"), "{advice}");
        let device =
            OwnObject { kind: OwnObjectKind::Device, name: "whimbrel1000070".to_owned(), ..table("web#1") };
        let standing = |kept| describe(device.clone(), &[record(false)], kept, now_ms).standing;
        assert_eq!(standing(&kept), NetworkItemStanding::InUse);
        assert_eq!(standing(&BTreeSet::new()), NetworkItemStanding::LeftOver);
    }

    #[test]
    fn what_the_journal_does_not_know_is_listed_all_the_same() {
        for (name, migration) in [("web#2", Some(id(2))), ("nothing", None)] {
            let item = describe(table(name), &[record(true)], &BTreeSet::new(), BEGUN_MS);
            assert_eq!((item.standing, item.migration), (NetworkItemStanding::Unknown, migration));
            assert_eq!((item.age_s, item.begun), (None, None));
            assert!(item.advice.unwrap().contains("nft delete table netdev handle 7"));
        }
    }
}
