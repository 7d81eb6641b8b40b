use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::change::{Lag, LagReason, Observed, Replacement, Survey};
use crate::data::{Data, RecordType};

fn change(state: ChangeState) -> Change {
    let address = |last| Some(Data::A([192, 0, 2, last].into()));
    Change {
        zone: "example.org".parse().unwrap(),
        owner: "web.example.org".parse().unwrap(),
        kind: RecordType::A,
        replacements: vec![Replacement { before: address(1), after: address(2) }],
        lowered_ttl_s: 5,
        new_ttl_s: 300,
        is_optional: false,
        survey: Some(Survey { others: [].into(), ttl_s: 300, lowered_at_s: None, switched_at_s: None }),
        is_unsettled: false,
        state,
    }
}

fn reached(goal: Goal, lags: Vec<Lag>) -> ChangeState {
    ChangeState::Reached { goal, ttl_s: 5, serial: 1, lags }
}

fn lag() -> Lag {
    let server = "192.0.2.54".to_owned().try_into().unwrap();
    Lag { server, reason: LagReason::Behind { serial: 1 } }
}

#[test]
fn a_record_survives_and_belongs_to_its_owner_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web1.dns");
    let file = RecordFile::new(&path);
    assert_eq!(file.load().unwrap(), None);
    let mut record = ChangeJournal::new(vec![change(ChangeState::Pending)]);
    file.create(&record).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(file.create(&record).unwrap_err().kind(), io::ErrorKind::AlreadyExists);

    record.goal = Goal::Switched;
    record.changes[0].state = reached(Goal::Switched, vec![lag()]);
    file.save(&record).unwrap();
    let loaded = file.load().unwrap().unwrap();
    assert!(loaded.changes[0].is_unsettled, "updates may be under way");
    record.changes[0].is_unsettled = true;
    assert_eq!(loaded, record);

    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"format\":1", "\"format\":2")).unwrap();
    assert_eq!(file.load().unwrap_err().kind(), io::ErrorKind::InvalidData);
    fs::write(&path, &text[1..]).unwrap();
    assert!(file.load().is_err());
    file.remove().unwrap();
    file.remove().unwrap();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn progress_is_that_of_the_slowest_change() {
    let progress = |states: Vec<ChangeState>| {
        let mut record = ChangeJournal::new(states.into_iter().map(change).collect());
        record.goal = Goal::Switched;
        record.progress()
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
    let times = |lowered_at_s, switched_at_s| {
        let mut change = change(ChangeState::Pending);
        change.survey.as_mut().unwrap().lowered_at_s = lowered_at_s;
        change.survey.as_mut().unwrap().switched_at_s = switched_at_s;
        let record = ChangeJournal::new(vec![change]);
        (record.settled_at_s(), record.stale_until_s())
    };
    assert_eq!(times(None, None), (None, None));
    assert_eq!(times(Some(1000), None), (Some(1300), None));
    assert_eq!(times(Some(1000), Some(1100)), (Some(1300), Some(1300)), "read right before it was lowered");
    assert_eq!(times(Some(1000), Some(2000)), (Some(1300), Some(2005)), "read right before it was changed");
    assert_eq!(times(None, Some(2000)), (None, Some(2300)), "never lowered");
}

#[test]
fn what_no_attempt_can_change_is_told_apart() {
    let judge = |states: Vec<ChangeState>| {
        let mut record = ChangeJournal::new(states.into_iter().map(change).collect());
        record.goal = Goal::Restored;
        (record.is_left_alone(), record.is_tried())
    };
    let failed = |failure| ChangeState::Failed { failure };
    let conflict = || ChangeState::Conflict { found: Observed::default() };
    let lagging = reached(Goal::Restored, vec![lag()]);
    let no_zone = failed(Failure::NotConfigured { zone: "example.org".parse().unwrap() });
    assert_eq!(judge(vec![]), (true, true));
    assert_eq!(judge(vec![lagging, conflict(), no_zone]), (true, true));
    assert_eq!(judge(vec![conflict(), failed(Failure::Unsettled)]), (false, true));
    assert_eq!(judge(vec![conflict(), ChangeState::Pending]), (false, false));
    assert_eq!(judge(vec![reached(Goal::Switched, vec![])]), (false, false));
}

#[test]
fn old_addresses_are_those_that_no_name_keeps() {
    let address = |text: &str| Some(Data::address(text.parse().unwrap()));
    let mut moved = change(ChangeState::Pending);
    moved.replacements = vec![
        Replacement { before: address("192.0.2.10"), after: address("198.51.100.7") },
        Replacement { before: address("192.0.2.11"), after: address("192.0.2.12") },
    ];
    let mut other = moved.clone();
    other.replacements = vec![Replacement { before: address("192.0.2.12"), after: address("192.0.2.11") }];
    let mut missing = moved.clone();
    missing.state = ChangeState::NotNeeded;
    missing.replacements = vec![Replacement { before: address("192.0.2.13"), after: None }];
    let record = ChangeJournal::new(vec![moved, other, missing]);
    assert_eq!(record.old_addresses(), ["192.0.2.10".parse().unwrap()].into());
}
