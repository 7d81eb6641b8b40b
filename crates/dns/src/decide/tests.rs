use proptest::prelude::*;

use super::*;
use crate::change::ChangeState;
use crate::data::RecordType;

const FOUND_S: u32 = 300;
const LOW_S: u32 = 5;
const GOALS: [Goal; 4] = [Goal::Lowered, Goal::Switched, Goal::Restored, Goal::Undone];

fn address(last: u8) -> Data {
    Data::A([192, 0, 2, last].into())
}

fn replacement(before: Option<u8>, after: Option<u8>) -> Replacement {
    Replacement { before: before.map(address), after: after.map(address) }
}

fn change(replacements: Vec<Replacement>) -> Change {
    Change {
        zone: "example.org".parse().unwrap(),
        owner: "web.example.org".parse().unwrap(),
        kind: RecordType::A,
        replacements,
        lowered_ttl_s: LOW_S,
        new_ttl_s: 60,
        is_optional: false,
        survey: None,
        is_unsettled: false,
        state: ChangeState::Pending,
    }
}

fn observed(values: &[u8], ttl_s: u32) -> Observed {
    Observed { values: values.iter().copied().map(address).collect(), ttl_s, alias: None }
}

/// Does an update to records as a server does: all of it if its conditions hold, else nothing.
fn serve(records: &mut Observed, update: &Update) -> bool {
    let has: BTreeSet<_> = update
        .conditions
        .iter()
        .filter_map(
            |condition| if let Condition::Has(_, data) = condition { Some(data.clone()) } else { None },
        )
        .collect();
    let has_none = update.conditions.iter().any(|condition| matches!(condition, Condition::HasNone(..)));
    assert!(has.is_empty() == has_none, "a condition about all records: {update:?}");
    if has != records.values {
        return false;
    }
    for edit in &update.edits {
        match edit {
            Edit::Remove(_, data) => drop(records.values.remove(data)),
            Edit::Add(_, ttl_s, data) => {
                records.values.insert(data.clone());
                records.ttl_s = *ttl_s;
            }
        }
    }
    if records.values.is_empty() {
        records.ttl_s = 0;
    }
    true
}

/// Surveys records, and keeps what was found in the change.
fn surveyed(mut change: Change, records: &Observed) -> Option<(Change, Survey)> {
    let (survey, replacements) = survey(&change, records)?;
    change.replacements = replacements;
    Some((change, survey))
}

/// Pursues a goal; each update has to bring it nearer.
fn pursue(change: &Change, survey: &mut Survey, goal: Goal, records: &mut Observed) -> Step {
    for _ in 0..2 {
        refresh(change, survey, records);
        match next_step(change, survey, goal, records) {
            Step::Update(update) => assert!(serve(records, &update)),
            step => return step,
        }
    }
    panic!("two updates do not reach {goal:?}: {records:?}");
}

#[test]
fn a_record_is_replaced_with_a_low_ttl_in_between() {
    let mut records = observed(&[1], FOUND_S);
    let (change, mut survey) = surveyed(change(vec![replacement(Some(1), Some(2))]), &records).unwrap();
    let steps = [
        (Goal::Lowered, observed(&[1], LOW_S)),
        (Goal::Switched, observed(&[2], LOW_S)),
        (Goal::Restored, observed(&[2], FOUND_S)),
        (Goal::Undone, observed(&[1], FOUND_S)),
    ];
    for (goal, expected) in steps {
        assert_eq!(pursue(&change, &mut survey, goal, &mut records), Step::Done);
        assert_eq!(records, expected, "{goal:?}");
    }
}

#[test]
fn records_of_others_under_the_name_stay() {
    let mut records = observed(&[1, 7, 8], FOUND_S);
    let (change, mut survey) =
        surveyed(change(vec![replacement(Some(1), Some(2)), replacement(Some(3), Some(4))]), &records)
            .unwrap();
    assert_eq!(change.after(), [address(2)].into(), "an address that the name does not have is left out");
    assert_eq!(pursue(&change, &mut survey, Goal::Switched, &mut records), Step::Done);
    assert_eq!(records, observed(&[2, 7, 8], LOW_S));
    // Others may come and go.
    records = observed(&[2, 8, 9], LOW_S);
    assert_eq!(pursue(&change, &mut survey, Goal::Restored, &mut records), Step::Done);
    assert_eq!(records, observed(&[2, 8, 9], FOUND_S));
}

#[test]
fn records_that_end_or_are_new_come_back_or_go() {
    let mut records = observed(&[1], FOUND_S);
    let (ends, mut survey) = surveyed(change(vec![replacement(Some(1), None)]), &records).unwrap();
    assert_eq!(pursue(&ends, &mut survey, Goal::Switched, &mut records), Step::Done);
    assert_eq!(records, observed(&[], 0));
    assert_eq!(pursue(&ends, &mut survey, Goal::Undone, &mut records), Step::Done);
    assert_eq!(records, observed(&[1], FOUND_S));

    records = observed(&[], 0);
    let (begins, mut survey) = surveyed(change(vec![replacement(None, Some(2))]), &records).unwrap();
    for (goal, expected) in [
        (Goal::Lowered, observed(&[], 0)),
        (Goal::Switched, observed(&[2], LOW_S)),
        (Goal::Restored, observed(&[2], 60)),
        (Goal::Undone, observed(&[], 0)),
    ] {
        assert_eq!(pursue(&begins, &mut survey, goal, &mut records), Step::Done);
        assert_eq!(records, expected, "{goal:?}");
    }
}

#[test]
fn a_name_that_is_not_the_vms_is_not_surveyed() {
    let wanted = || change(vec![replacement(Some(1), Some(2))]);
    assert_eq!(surveyed(wanted(), &observed(&[], 0)), None, "missing");
    assert_eq!(surveyed(wanted(), &observed(&[9], FOUND_S)), None, "another's");
    assert_eq!(surveyed(wanted(), &observed(&[1, 2], FOUND_S)), None, "changed by hand before");
    assert_eq!(surveyed(change(vec![replacement(None, Some(2))]), &observed(&[9], FOUND_S)), None, "in use");
    let alias = Observed { alias: Some("a.example.org".parse().unwrap()), ..observed(&[], 0) };
    assert_eq!(surveyed(wanted(), &alias), None, "an alias");

    let mut optional = wanted();
    optional.is_optional = true;
    let (left, _) = surveyed(optional.clone(), &observed(&[], 0)).unwrap();
    assert_eq!(left.replacements, [], "there is nothing to change");
    assert_eq!(surveyed(optional, &observed(&[9], FOUND_S)), None);
}

#[test]
fn a_record_that_another_hand_changed_is_left_alone() {
    let start = observed(&[1], FOUND_S);
    let (change, mut survey) = surveyed(change(vec![replacement(Some(1), Some(2))]), &start).unwrap();
    let alias = Observed { alias: Some("a.example.org".parse().unwrap()), ..observed(&[], 0) };
    for records in [observed(&[9], LOW_S), observed(&[], 0), observed(&[1, 2], LOW_S), alias] {
        for goal in GOALS {
            assert_eq!(next_step(&change, &survey, goal, &records), Step::Conflict, "{goal:?} {records:?}");
        }
    }
    // The TTL of another hand stays, too.
    let mut records = observed(&[1], 1234);
    for goal in GOALS {
        assert_eq!(pursue(&change, &mut survey, goal, &mut records), Step::Done);
        assert_eq!(records.ttl_s, 1234);
    }
}

#[test]
fn records_of_others_that_come_later_are_known_when_ours_end() {
    let mut records = observed(&[1, 7], FOUND_S);
    let (change, mut survey) = surveyed(change(vec![replacement(Some(1), None)]), &records).unwrap();
    records = observed(&[1, 8], FOUND_S);
    assert_eq!(pursue(&change, &mut survey, Goal::Switched, &mut records), Step::Done);
    assert_eq!(records, observed(&[8], LOW_S));
    assert_eq!(pursue(&change, &mut survey, Goal::Undone, &mut records), Step::Done);
    assert_eq!(records, observed(&[1, 8], FOUND_S));
}

#[test]
fn a_name_that_another_took_after_ours_ended_stays_theirs() {
    let mut records = observed(&[1], FOUND_S);
    let (change, mut survey) = surveyed(change(vec![replacement(Some(1), None)]), &records).unwrap();
    assert_eq!(pursue(&change, &mut survey, Goal::Switched, &mut records), Step::Done);
    records = observed(&[9], FOUND_S);
    assert_eq!(next_step(&change, &survey, Goal::Undone, &records), Step::Conflict);
}

#[test]
fn a_ttl_that_is_low_already_is_not_raised() {
    let mut records = observed(&[1], 2);
    let (change, mut survey) = surveyed(change(vec![replacement(Some(1), Some(2))]), &records).unwrap();
    for goal in GOALS {
        assert_eq!(pursue(&change, &mut survey, goal, &mut records), Step::Done);
        assert_eq!(records.ttl_s, 2, "{goal:?}");
    }
}

/// Changes of a name by another hand.
#[derive(Clone, Debug)]
enum Act {
    Aim(usize),
    Add(u8),
    Remove(u8),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0_usize..4).prop_map(Act::Aim),
        1 => (1_u8..9).prop_map(Act::Add),
        1 => (1_u8..9).prop_map(Act::Remove),
    ]
}

proptest! {
    /// Records that are neither the source's nor the destination's are never added, and never removed.
    #[test]
    fn no_foreign_record_is_touched(
        start in proptest::collection::btree_set(1_u8..9, 0..4),
        ours in proptest::collection::vec((proptest::option::of(1_u8..5), proptest::option::of(5_u8..7)), 1..3),
        acts in proptest::collection::vec(act(), 0..12),
    ) {
        let replacements: Vec<_> =
            ours.into_iter().map(|(before, after)| replacement(before, after)).collect();
        let mut records = observed(&start.into_iter().collect::<Vec<_>>(), FOUND_S);
        let Some((change, mut survey)) = surveyed(change(replacements), &records) else { return Ok(()) };
        let ours: BTreeSet<_> = change.before().union(&change.after()).cloned().collect();
        let foreign = |records: &Observed| records.values.difference(&ours).cloned().collect::<BTreeSet<_>>();
        for act in acts {
            match act {
                Act::Aim(goal) => {
                    let before = records.clone();
                    let step = pursue(&change, &mut survey, GOALS[goal], &mut records);
                    prop_assert_eq!(foreign(&before), foreign(&records));
                    if step == Step::Conflict {
                        prop_assert_eq!(&before, &records);
                    }
                }
                Act::Add(last) => {
                    records.values.insert(address(last));
                    records.ttl_s = records.ttl_s.max(1);
                }
                Act::Remove(last) => {
                    records.values.remove(&address(last));
                }
            }
        }
    }
}
