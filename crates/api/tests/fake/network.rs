//! State of the network of the fake control.

use super::{host, vm};
use crate::api::{
    Epoch, MigrationId, NameChanges, NameRecord, NameStanding, NamesGoal, NetworkItem, NetworkItemKind,
    NetworkItemStanding, NetworkState, OpenNames, RedirectionStage, StandingRedirection,
};

/// Returns a table in use, a device that is left over, and a name that has changed.
pub(crate) fn network_state() -> NetworkState {
    let item = |epoch| NetworkItem {
        kind: NetworkItemKind::Table,
        name: format!("netdev whimbrel-web1#{epoch}"),
        interfaces: vec!["tap0".to_owned()],
        migration: Some(MigrationId { vm: vm("web1"), epoch: Epoch(epoch) }),
        begun: Some("2026-01-01T00:00:00.000Z".to_owned()),
        age_s: Some(7),
        standing: NetworkItemStanding::InUse,
        advice: None,
    };
    let left = NetworkItem {
        kind: NetworkItemKind::Device,
        name: "whimbrel4".to_owned(),
        interfaces: Vec::new(),
        age_s: Some(7200),
        standing: NetworkItemStanding::LeftOver,
        advice: Some("restart the agent".to_owned()),
        ..item(2)
    };
    let redirection = StandingRedirection {
        migration: MigrationId { vm: vm("web1"), epoch: Epoch(3) },
        at: host("beta"),
        left: vec![host("alpha")],
        tunnel: Some("WireGuard".to_owned()),
        addresses: vec!["192.0.2.5=198.51.100.5".parse().unwrap()],
        stage: RedirectionStage::Active,
        age_s: 7,
        connections: Some(2),
    };
    let record = NameRecord {
        name: "web.example.org".to_owned(),
        kind: "A".to_owned(),
        before: vec!["192.0.2.10".to_owned()],
        after: vec!["198.51.100.7".to_owned()],
        standing: NameStanding::Made,
        ttl_s: Some(5),
        serial: Some(9),
        detail: "changed, with a low TTL (TTL 5 s, serial 9)".to_owned(),
    };
    let changes = NameChanges {
        goal: NamesGoal::Switched,
        reached: true,
        old_until_unix_s: Some(1_767_225_600),
        records: vec![record],
    };
    let names = vec![OpenNames { migration: MigrationId { vm: vm("web1"), epoch: Epoch(2) }, changes }];
    NetworkState { redirections: vec![redirection], items: vec![item(3), left], unread: Vec::new(), names }
}
