use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::change::{Lag, LagReason, OriginalRrset, RdataChange, Rrset};
use crate::rdata::{Rdata, RecordType};

fn change(state: ChangeState) -> RrsetChange {
    let address = |last| Some(Rdata::A([192, 0, 2, last].into()));
    RrsetChange {
        zone: "example.org".parse().unwrap(),
        owner: "web.example.org".parse().unwrap(),
        kind: RecordType::A,
        rdata_changes: vec![RdataChange { before: address(1), after: address(2) }],
        lowered_ttl_s: 5,
        new_ttl_s: 300,
        is_optional: false,
        original_ttl_s: None,
        original: Some(OriginalRrset {
            others: [].into(),
            ttl_s: 300,
            lowered_at_s: None,
            switched_at_s: None,
        }),
        may_still_apply: false,
        state,
    }
}

fn reached(goal: Goal, lags: Vec<Lag>) -> ChangeState {
    ChangeState::Made { goal, ttl_s: 5, serial: 1, lags }
}

fn lag() -> Lag {
    let server = "192.0.2.54".to_owned().try_into().unwrap();
    Lag { server, reason: LagReason::Behind { serial: 1 } }
}

#[test]
fn a_record_survives_and_belongs_to_its_owner_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web1.dns");
    let file = ChangeSetFile::new(&path);
    assert_eq!(file.load().unwrap(), None);
    let mut change_set = ChangeSet::new(vec![change(ChangeState::Pending)]);
    file.create(&change_set).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(file.create(&change_set).unwrap_err().kind(), io::ErrorKind::AlreadyExists);

    change_set.goal = Goal::Switched;
    change_set.changes[0].state = reached(Goal::Switched, vec![lag()]);
    file.save(&change_set).unwrap();
    let loaded = file.load().unwrap().unwrap();
    assert!(loaded.changes[0].may_still_apply, "updates may be under way");
    change_set.changes[0].may_still_apply = true;
    assert_eq!(loaded, change_set);

    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"format\":1", "\"format\":2")).unwrap();
    assert_eq!(file.load().unwrap_err().kind(), io::ErrorKind::InvalidData);
    fs::write(&path, &text[1..]).unwrap();
    assert!(file.load().is_err());
    file.remove().unwrap();
    file.remove().unwrap();
    assert!(!file.is_given_up());
    file.save(&change_set).unwrap();
    let its_thread = file.clone();
    file.give_up().unwrap();
    its_thread.save(&change_set).unwrap_err();
    assert!(its_thread.is_given_up());
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn progress_is_that_of_the_slowest_change() {
    let progress = |states: Vec<ChangeState>| {
        let mut change_set = ChangeSet::new(states.into_iter().map(change).collect());
        change_set.goal = Goal::Switched;
        change_set.progress()
    };
    let done = || reached(Goal::Switched, vec![]);
    assert_eq!(progress(vec![]), Progress::Complete);
    assert_eq!(progress(vec![done(), done()]), Progress::Complete);
    assert_eq!(progress(vec![done(), reached(Goal::Switched, vec![lag()])]), Progress::Lagging);
    assert_eq!(progress(vec![done(), reached(Goal::Lowered, vec![])]), Progress::Incomplete);
    assert_eq!(progress(vec![done(), ChangeState::Pending]), Progress::Incomplete);
}

#[test]
fn caches_keep_what_they_read_for_its_ttl() {
    let stale_until_s = |lowered_at_s, switched_at_s| {
        let mut change = change(ChangeState::Pending);
        change.original.as_mut().unwrap().lowered_at_s = lowered_at_s;
        change.original.as_mut().unwrap().switched_at_s = switched_at_s;
        ChangeSet::new(vec![change]).stale_until_s()
    };
    assert_eq!(stale_until_s(None, None), None);
    assert_eq!(stale_until_s(Some(1000), None), None);
    assert_eq!(stale_until_s(Some(1000), Some(1100)), Some(1300), "read right before it was lowered");
    assert_eq!(stale_until_s(Some(1000), Some(2000)), Some(2005), "read right before it was changed");
    assert_eq!(stale_until_s(None, Some(2000)), Some(2300), "never lowered");
}

#[test]
fn what_no_attempt_can_change_is_told_apart() {
    let judge = |states: Vec<ChangeState>| {
        let mut change_set = ChangeSet::new(states.into_iter().map(change).collect());
        change_set.goal = Goal::Restored;
        (change_set.has_only_conflicts(), change_set.is_tried())
    };
    let failed = |failure| ChangeState::Failed { failure };
    let conflict = || ChangeState::Conflict { found: Rrset::default() };
    let lagging = reached(Goal::Restored, vec![lag()]);
    let no_zone = failed(Failure::NotConfigured { zone: "example.org".parse().unwrap() });
    assert_eq!(judge(vec![]), (true, true));
    assert_eq!(judge(vec![lagging, conflict(), no_zone]), (true, true));
    assert_eq!(judge(vec![conflict(), failed(Failure::LostAnswer)]), (false, true));
    assert_eq!(judge(vec![conflict(), ChangeState::Pending]), (false, false));
    assert_eq!(judge(vec![reached(Goal::Switched, vec![])]), (false, false));
}

#[test]
fn old_addresses_are_those_that_no_name_keeps() {
    let address = |text: &str| Some(Rdata::address(text.parse().unwrap()));
    let mut moved = change(ChangeState::Pending);
    moved.rdata_changes = vec![
        RdataChange { before: address("192.0.2.10"), after: address("198.51.100.7") },
        RdataChange { before: address("192.0.2.11"), after: address("192.0.2.12") },
    ];
    let mut other = moved.clone();
    other.rdata_changes = vec![RdataChange { before: address("192.0.2.12"), after: address("192.0.2.11") }];
    let mut missing = moved.clone();
    missing.state = ChangeState::NotNeeded;
    missing.rdata_changes = vec![RdataChange { before: address("192.0.2.13"), after: None }];
    let change_set = ChangeSet::new(vec![moved, other, missing]);
    assert_eq!(change_set.old_addresses(), ["192.0.2.10".parse().unwrap()].into());
}

#[test]
fn ttls_are_taken_over_from_changes_that_are_not_finished() {
    let mut next = ChangeSet::new(vec![change(ChangeState::Pending)]);
    next.changes[0].original = None;
    next.adopt_ttls(&[]);
    assert_eq!(next.changes[0].original_ttl_s, None);
    let unfinished = ChangeSet::new(vec![change(reached(Goal::Switched, Vec::new()))]);
    next.adopt_ttls(std::slice::from_ref(&unfinished));
    assert_eq!(next.changes[0].original_ttl_s, Some(300));
    // Nothing was read in between.
    let mut third = ChangeSet::new(vec![change(ChangeState::Pending)]);
    third.adopt_ttls(&[next]);
    assert_eq!(third.changes[0].original_ttl_s, Some(300));
    let mut other = unfinished;
    other.changes[0].owner = "db.example.org".parse().unwrap();
    third.adopt_ttls(&[other]);
    assert_eq!(third.changes[0].original_ttl_s, None);
}
