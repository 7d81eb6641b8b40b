use proptest::prelude::*;

use super::*;
use crate::change::ChangeState;
use crate::rdata::RecordType;

const FOUND_S: u32 = 300;
const LOW_S: u32 = 5;
const GOALS: [Goal; 4] = [Goal::Lowered, Goal::Switched, Goal::Restored, Goal::Undone];

fn address(last: u8) -> Rdata {
    Rdata::A([192, 0, 2, last].into())
}

fn rdata_change(before: Option<u8>, after: Option<u8>) -> RdataChange {
    RdataChange { before: before.map(address), after: after.map(address) }
}

fn change(rdata_changes: Vec<RdataChange>) -> RrsetChange {
    RrsetChange {
        zone: "example.org".parse().unwrap(),
        owner: "web.example.org".parse().unwrap(),
        kind: RecordType::A,
        rdata_changes,
        lowered_ttl_s: LOW_S,
        new_ttl_s: 60,
        is_optional: false,
        original_ttl_s: None,
        original: None,
        may_still_apply: false,
        state: ChangeState::Pending,
    }
}

fn observed(values: &[u8], ttl_s: u32) -> Rrset {
    Rrset { values: values.iter().copied().map(address).collect(), ttl_s, alias: None }
}

/// Does an update to records as a server does: all of it if its prerequisites hold, else nothing.
fn serve(records: &mut Rrset, update: &Update) -> bool {
    let has: BTreeSet<_> = update
        .prerequisites
        .iter()
        .filter_map(|prerequisite| {
            if let Prerequisite::RrsetExists(_, data) = prerequisite { Some(data.clone()) } else { None }
        })
        .collect();
    let has_none = update
        .prerequisites
        .iter()
        .any(|prerequisite| matches!(prerequisite, Prerequisite::RrsetDoesNotExist(..)));
    assert!(has.is_empty() == has_none, "a prerequisite about all records: {update:?}");
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

/// Reads the original records, and keeps what was found in the change.
fn with_original(mut change: RrsetChange, records: &Rrset) -> Option<(RrsetChange, OriginalRrset)> {
    let (original, rdata_changes) = read_original(&change, records)?;
    change.rdata_changes = rdata_changes;
    Some((change, original))
}

/// Pursues a goal; each update has to bring it nearer.
fn pursue(change: &RrsetChange, original: &mut OriginalRrset, goal: Goal, records: &mut Rrset) -> Step {
    for _ in 0..2 {
        refresh(change, original, records);
        match next_step(change, original, goal, records) {
            Step::Update(update) => assert!(serve(records, &update)),
            step => return step,
        }
    }
    panic!("two updates do not reach {goal:?}: {records:?}");
}

#[test]
fn a_record_is_replaced_with_a_low_ttl_in_between() {
    let mut records = observed(&[1], FOUND_S);
    let (change, mut original) =
        with_original(change(vec![rdata_change(Some(1), Some(2))]), &records).unwrap();
    let steps = [
        (Goal::Lowered, observed(&[1], LOW_S)),
        (Goal::Switched, observed(&[2], LOW_S)),
        (Goal::Restored, observed(&[2], FOUND_S)),
        (Goal::Undone, observed(&[1], FOUND_S)),
    ];
    for (goal, expected) in steps {
        assert_eq!(pursue(&change, &mut original, goal, &mut records), Step::Done);
        assert_eq!(records, expected, "{goal:?}");
    }
}

#[test]
fn a_ttl_that_was_not_given_back_is_known_later() {
    let change =
        RrsetChange { original_ttl_s: Some(FOUND_S), ..change(vec![rdata_change(Some(1), Some(2))]) };
    let ttl_s = |seen_s| with_original(change.clone(), &observed(&[1], seen_s)).unwrap().1.ttl_s;
    assert_eq!(ttl_s(LOW_S), FOUND_S);
    assert_eq!(ttl_s(LOW_S + 1), LOW_S + 1, "another hand has changed it since");
}

#[test]
fn records_of_others_under_the_name_stay() {
    let mut records = observed(&[1, 7, 8], FOUND_S);
    let (change, mut original) =
        with_original(change(vec![rdata_change(Some(1), Some(2)), rdata_change(Some(3), Some(4))]), &records)
            .unwrap();
    assert_eq!(change.after(), [address(2)].into(), "an address that the name does not have is left out");
    assert_eq!(pursue(&change, &mut original, Goal::Switched, &mut records), Step::Done);
    assert_eq!(records, observed(&[2, 7, 8], LOW_S));
    // Others may come and go.
    records = observed(&[2, 8, 9], LOW_S);
    assert_eq!(pursue(&change, &mut original, Goal::Restored, &mut records), Step::Done);
    assert_eq!(records, observed(&[2, 8, 9], FOUND_S));
}

#[test]
fn records_that_end_or_are_new_come_back_or_go() {
    let mut records = observed(&[1], FOUND_S);
    let (ends, mut original) = with_original(change(vec![rdata_change(Some(1), None)]), &records).unwrap();
    assert_eq!(pursue(&ends, &mut original, Goal::Switched, &mut records), Step::Done);
    assert_eq!(records, observed(&[], 0));
    assert_eq!(pursue(&ends, &mut original, Goal::Undone, &mut records), Step::Done);
    assert_eq!(records, observed(&[1], FOUND_S));

    records = observed(&[], 0);
    let (begins, mut original) = with_original(change(vec![rdata_change(None, Some(2))]), &records).unwrap();
    for (goal, expected) in [
        (Goal::Lowered, observed(&[], 0)),
        (Goal::Switched, observed(&[2], LOW_S)),
        (Goal::Restored, observed(&[2], 60)),
        (Goal::Undone, observed(&[], 0)),
    ] {
        assert_eq!(pursue(&begins, &mut original, goal, &mut records), Step::Done);
        assert_eq!(records, expected, "{goal:?}");
    }
}

#[test]
fn a_name_that_is_not_the_vms_is_not_surveyed() {
    let wanted = || change(vec![rdata_change(Some(1), Some(2))]);
    assert_eq!(with_original(wanted(), &observed(&[], 0)), None, "missing");
    assert_eq!(with_original(wanted(), &observed(&[9], FOUND_S)), None, "another's");
    assert_eq!(with_original(wanted(), &observed(&[1, 2], FOUND_S)), None, "changed by hand before");
    assert_eq!(
        with_original(change(vec![rdata_change(None, Some(2))]), &observed(&[9], FOUND_S)),
        None,
        "in use"
    );
    let alias = Rrset { alias: Some("a.example.org".parse().unwrap()), ..observed(&[], 0) };
    assert_eq!(with_original(wanted(), &alias), None, "an alias");

    let mut optional = wanted();
    optional.is_optional = true;
    let (left, _) = with_original(optional.clone(), &observed(&[], 0)).unwrap();
    assert_eq!(left.rdata_changes, [], "there is nothing to change");
    assert_eq!(with_original(optional, &observed(&[9], FOUND_S)), None);
}

#[test]
fn a_record_that_another_hand_changed_is_left_alone() {
    let start = observed(&[1], FOUND_S);
    let (change, mut original) = with_original(change(vec![rdata_change(Some(1), Some(2))]), &start).unwrap();
    let alias = Rrset { alias: Some("a.example.org".parse().unwrap()), ..observed(&[], 0) };
    for records in [observed(&[9], LOW_S), observed(&[], 0), observed(&[1, 2], LOW_S), alias] {
        for goal in GOALS {
            assert_eq!(next_step(&change, &original, goal, &records), Step::Conflict, "{goal:?} {records:?}");
        }
    }
    // The TTL of another client stays, too.
    let mut records = observed(&[1], 1234);
    for goal in GOALS {
        assert_eq!(pursue(&change, &mut original, goal, &mut records), Step::Done);
        assert_eq!(records.ttl_s, 1234);
    }
}

#[test]
fn records_of_others_that_come_later_are_known_when_ours_end() {
    let mut records = observed(&[1, 7], FOUND_S);
    let (change, mut original) = with_original(change(vec![rdata_change(Some(1), None)]), &records).unwrap();
    records = observed(&[1, 8], FOUND_S);
    assert_eq!(pursue(&change, &mut original, Goal::Switched, &mut records), Step::Done);
    assert_eq!(records, observed(&[8], LOW_S));
    assert_eq!(pursue(&change, &mut original, Goal::Undone, &mut records), Step::Done);
    assert_eq!(records, observed(&[1, 8], FOUND_S));
}

#[test]
fn a_name_that_another_took_after_ours_ended_stays_theirs() {
    let mut records = observed(&[1], FOUND_S);
    let (change, mut original) = with_original(change(vec![rdata_change(Some(1), None)]), &records).unwrap();
    assert_eq!(pursue(&change, &mut original, Goal::Switched, &mut records), Step::Done);
    records = observed(&[9], FOUND_S);
    assert_eq!(next_step(&change, &original, Goal::Undone, &records), Step::Conflict);
}

#[test]
fn a_ttl_that_is_low_already_is_not_raised() {
    let mut records = observed(&[1], 2);
    let (change, mut original) =
        with_original(change(vec![rdata_change(Some(1), Some(2))]), &records).unwrap();
    for goal in GOALS {
        assert_eq!(pursue(&change, &mut original, goal, &mut records), Step::Done);
        assert_eq!(records.ttl_s, 2, "{goal:?}");
    }
}

/// Changes of a name by another client.
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
        let rdata_changes: Vec<_> =
            ours.into_iter().map(|(before, after)| rdata_change(before, after)).collect();
        let mut records = observed(&start.into_iter().collect::<Vec<_>>(), FOUND_S);
        let Some((change, mut original)) = with_original(change(rdata_changes), &records) else { return Ok(()) };
        let ours: BTreeSet<_> = change.before().union(&change.after()).cloned().collect();
        let foreign = |records: &Rrset| records.values.difference(&ours).cloned().collect::<BTreeSet<_>>();
        for act in acts {
            match act {
                Act::Aim(goal) => {
                    let before = records.clone();
                    let step = pursue(&change, &mut original, GOALS[goal], &mut records);
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
