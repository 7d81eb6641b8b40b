//! Servers that die, refuse or lose messages, and other hands that change the same names.

use dns::{ChangeSet, ChangeState, Failure, Goal, LagReason, Progress, RecordType, RrsetChange, Updater};
use lab::DEADLINE;
use whimbrel_dns as dns;

use crate::relay::{Injury, Relay};
use crate::servers::{SECRET, Servers, write_key};

fn change<'a>(change_set: &'a ChangeSet, owner: &str, kind: RecordType) -> &'a RrsetChange {
    let owner = owner.parse().unwrap();
    change_set.changes.iter().find(|change| change.owner == owner && change.kind == kind).unwrap()
}

/// Waits until the goal that was asked for last is complete.
#[track_caller]
fn complete(updater: &Updater) -> ChangeSet {
    let change_set = updater.wait(DEADLINE);
    let states: Vec<_> =
        change_set.changes.iter().map(|change| format!("{change}: {}", change.state)).collect();
    assert_eq!(change_set.progress(), Progress::Complete, "{states:#?}");
    change_set
}

fn is_away(change: &RrsetChange) -> bool {
    matches!(&change.state, ChangeState::Failed { failure: Failure::Unreachable { .. } })
}

#[test]
fn a_record_of_another_hand_is_left_alone_and_reported() {
    let servers = Servers::start();
    let updater = servers.prepare(&servers.config());
    complete(&updater);
    servers.nsupdate("update delete web.example.org A\nupdate add web.example.org 5 A 203.0.113.9");
    updater.switch();
    let is_conflict = |change_set: &ChangeSet| {
        let state = &change(change_set, "web.example.org", RecordType::A).state;
        matches!(state, ChangeState::Conflict { found } if found.to_string() == "203.0.113.9")
    };
    let change_set = updater.wait_until(DEADLINE, |change_set| change_set.unfinished().count() == 1);
    assert!(is_conflict(&change_set), "{change_set:?}");
    assert_eq!(change_set.progress(), Progress::Incomplete);
    let first = servers.first_address();
    assert_eq!(servers.dig(first, &["web.example.org", "A"]), ["web.example.org. 5 A 203.0.113.9"]);
    assert_eq!(servers.dig(first, &["web.example.org", "AAAA"]), ["web.example.org. 5 AAAA 2001:db8:1::7"]);

    // The other hand gives it back: then it follows.
    servers.nsupdate("update delete web.example.org A\nupdate add web.example.org 5 A 192.0.2.10");
    updater.retry();
    complete(&updater);
    assert_eq!(servers.dig(first, &["web.example.org", "A"]), ["web.example.org. 5 A 198.51.100.7"]);

    // Also on the way back.
    servers.nsupdate("update delete web.example.org A\nupdate add web.example.org 77 A 203.0.113.9");
    updater.undo();
    let change_set = updater.wait_until(DEADLINE, |change_set| change_set.unfinished().count() == 1);
    assert!(is_conflict(&change_set), "{change_set:?}");
    assert_eq!(servers.dig(first, &["web.example.org", "A"]), ["web.example.org. 77 A 203.0.113.9"]);
    assert_eq!(servers.dig(first, &["web.example.org", "AAAA"]), ["web.example.org. 300 AAAA 2001:db8::10"]);
}

#[test]
fn a_server_that_died_gets_the_change_when_it_is_back() {
    let mut servers = Servers::start();
    let config = servers.config();
    let updater = servers.prepare(&config);
    complete(&updater);
    servers.first.take().unwrap().kill().unwrap();
    updater.switch();
    let change_set = updater.wait_until(DEADLINE, |change_set| change_set.changes.iter().all(is_away));
    assert!(change_set.changes.iter().all(is_away), "{change_set:?}");
    // The agent ends in between, too.
    updater.suspend();
    let updater = servers.resume(&config);
    let change_set = updater.wait_until(DEADLINE, |change_set| change_set.changes.iter().all(is_away));
    assert_eq!(change_set.goal, Goal::Switched);
    servers.start_first();
    complete(&updater);
    let found = servers.dig(servers.second_address(), &["web.example.org", "A"]);
    assert_eq!(found, ["web.example.org. 5 A 198.51.100.7"]);
}

#[test]
fn a_server_that_was_away_from_the_beginning_loses_nothing() {
    let mut servers = Servers::start();
    let content = servers.content(servers.first_address());
    servers.first.take().unwrap().kill().unwrap();
    let updater = servers.prepare(&servers.config());
    updater.switch();
    let change_set = updater.wait_until(DEADLINE, |change_set| change_set.changes.iter().all(is_away));
    assert!(change_set.changes.iter().all(|change| change.original.is_none()));
    servers.start_first();
    let change_set = complete(&updater);
    // It was never lowered: caches have what they read for its TTL.
    let web = change(&change_set, "web.example.org", RecordType::A);
    let switched_at_s = web.original.as_ref().unwrap().switched_at_s.unwrap();
    assert_eq!(web.stale_until_s(), Some(switched_at_s + 300));
    updater.undo();
    complete(&updater);
    assert_eq!(servers.content(servers.first_address()), content);
}

#[test]
fn the_change_is_verified_at_a_server_that_comes_later() {
    let mut servers = Servers::start();
    let updater = servers.prepare(&servers.config());
    complete(&updater);
    servers.second.take().unwrap().kill().unwrap();
    updater.switch();
    let change_set = updater.wait_until(DEADLINE, |change_set| change_set.progress() == Progress::Lagging);
    let ChangeState::Made { lags, .. } = &change(&change_set, "web.example.org", RecordType::A).state else {
        panic!("{change_set:?}")
    };
    let [lag] = &lags[..] else { panic!("{lags:?}") };
    assert_eq!(lag.server.to_string(), servers.second_address().to_string());
    assert!(matches!(&lag.reason, LagReason::Failed { failure: Failure::Unreachable { .. } }), "{lag:?}");
    let found = servers.dig(servers.first_address(), &["web.example.org", "A"]);
    assert_eq!(found, ["web.example.org. 5 A 198.51.100.7"]);
    servers.start_second();
    complete(&updater);
}

#[test]
fn a_key_that_is_mended_is_used_by_the_next_agent() {
    let servers = Servers::start();
    let other_secret = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    let address = [servers.first_address().to_string()];
    let content = servers.content(servers.first_address());
    let config = servers.config_with(&address, other_secret);
    let updater = servers.prepare(&config);
    updater.switch();
    let is_refused =
        |change: &RrsetChange| matches!(&change.state, ChangeState::Failed { failure: Failure::Key { .. } });
    let change_set = updater.wait_until(DEADLINE, |change_set| change_set.changes.iter().all(is_refused));
    assert!(change_set.changes.iter().all(is_refused), "{change_set:?}");
    assert_eq!(servers.content(servers.first_address()), content);
    updater.suspend();
    write_key(&servers.lab.a.directory().join("key"), SECRET);
    let updater = servers.resume(&config);
    assert_eq!(complete(&updater).goal, Goal::Switched);
    let found = servers.dig(servers.first_address(), &["web.example.org", "A"]);
    assert_eq!(found, ["web.example.org. 5 A 198.51.100.7"]);
}

/// Starts servers of which the agent reaches the first through a relay, and lowers the TTLs. Returns what the zones had
/// before that, too.
fn behind_a_relay() -> (Servers, Relay, Updater, Vec<String>) {
    let servers = Servers::start();
    let content = servers.content(servers.first_address());
    let relay = Relay::start(&servers.lab.a, servers.first_address());
    let mut config = servers.config_with(&[relay.address.to_string()], SECRET);
    // One zone has one connection in each pass.
    config.zones.truncate(1);
    let updater = servers.prepare(&config);
    complete(&updater);
    (servers, relay, updater, content)
}

#[test]
fn an_update_whose_answer_is_lost_is_found_made() {
    let (servers, relay, updater, content) = behind_a_relay();
    relay.injure_next(Injury::LoseAnswer);
    updater.switch();
    relay.wait();
    complete(&updater);
    let found = servers.dig(servers.first_address(), &["web.example.org", "A"]);
    assert_eq!(found, ["web.example.org. 5 A 198.51.100.7"]);
    updater.undo();
    complete(&updater);
    assert_eq!(servers.content(servers.first_address()), content);
}

/// An update of which nothing was known reaches the server after the records were given back: its condition is met then.
/// So the records are read again, and given back again.
#[test]
fn an_update_that_comes_late_is_undone() {
    let (servers, relay, updater, content) = behind_a_relay();
    relay.injure_next(Injury::KeepBack);
    updater.switch();
    relay.wait();
    updater.undo();
    // One pass, and no other before the update has come.
    relay.cut_and_admit(1);
    let may_still_apply =
        |change: &RrsetChange| matches!(&change.state, ChangeState::Failed { failure: Failure::LostAnswer });
    let change_set =
        updater.wait_until(DEADLINE, |change_set| change_set.changes.iter().any(may_still_apply));
    let late =
        change_set.changes.iter().find(|change| may_still_apply(change)).expect("nothing is unsettled");
    assert_eq!((&late.owner.to_string()[..], late.kind), ("web.example.org", RecordType::A));
    assert_eq!(relay.release(&servers.lab.a), 0, "its condition is met");
    let found = servers.dig(servers.first_address(), &["web.example.org", "A"]);
    assert_eq!(found, ["web.example.org. 5 A 198.51.100.7"]);
    relay.admit_all();
    complete(&updater);
    assert_eq!(servers.content(servers.first_address()), content);
}
