use proto::{Generation, Incarnation};

use super::*;

const LATE_S: u64 = 3600;

/// Names that have been changed, and were read back, of a VM that has moved a moment ago.
const SWITCHED: ChangeFacts = ChangeFacts {
    goal: Goal::Switched,
    progress: Progress::Complete,
    has_only_conflicts: false,
    location: Some(VmLocation::Destination),
    is_closed: true,
    decided_for_s: 1,
    is_cached: false,
    is_used: Some(true),
};

fn step(facts: ChangeFacts) -> Step {
    next_step(&facts, LATE_S)
}

#[test]
fn the_goal_follows_the_place_of_the_vm() {
    let goals = [Goal::Lowered, Goal::Switched, Goal::Restored, Goal::Undone];
    let step = |goal, location| step(ChangeFacts { goal, location, is_closed: false, ..SWITCHED });
    let all = |location| goals.map(|goal| step(goal, location));
    let (wait, set_goal) = (Step::Wait, Step::SetGoal);
    assert_eq!(all(None), [wait; 4]);
    let (switched, undone) = (set_goal(Goal::Switched), set_goal(Goal::Undone));
    assert_eq!(all(Some(VmLocation::Destination)), [switched, wait, wait, switched]);
    assert_eq!(all(Some(VmLocation::Source)), [undone, undone, undone, wait]);
}

#[test]
fn ttls_are_given_back_when_nothing_uses_the_old_address() {
    let restored = Step::SetGoal(Goal::Restored);
    let unused = ChangeFacts { is_used: Some(false), ..SWITCHED };
    assert_eq!(step(unused), restored);
    assert_eq!(step(ChangeFacts { progress: Progress::Lagging, ..unused }), restored);
    for waiting in [
        SWITCHED,
        ChangeFacts { is_used: None, ..SWITCHED },
        ChangeFacts { is_cached: true, ..unused },
        ChangeFacts { progress: Progress::Incomplete, ..unused },
    ] {
        assert_eq!(step(waiting), Step::Wait, "{waiting:?}");
        assert_eq!(step(ChangeFacts { decided_for_s: LATE_S, ..waiting }), restored, "at the latest");
        assert_eq!(step(ChangeFacts { location: None, decided_for_s: LATE_S, ..waiting }), Step::Wait);
    }
}

#[test]
fn changes_end_when_they_are_made_or_nobody_can_make_them() {
    for (goal, location) in [(Goal::Restored, VmLocation::Destination), (Goal::Undone, VmLocation::Source)] {
        let made = ChangeFacts { goal, location: Some(location), ..SWITCHED };
        assert_eq!(step(made), Step::End);
        assert_eq!(
            step(ChangeFacts { is_closed: false, ..made }),
            Step::Wait,
            "its driver still writes the report"
        );
        let missing = ChangeFacts { progress: Progress::Incomplete, ..made };
        assert_eq!(
            step(ChangeFacts { decided_for_s: 100 * LATE_S, ..missing }),
            Step::Wait,
            "it is tried for ever"
        );
        let foreign = ChangeFacts { has_only_conflicts: true, ..missing };
        assert_eq!(step(foreign), Step::Wait, "its owner may give it back");
        assert_eq!(step(ChangeFacts { decided_for_s: LATE_S, ..foreign }), Step::End);
    }
}

#[test]
fn the_journal_shows_where_the_vm_is() {
    let incarnation = Incarnation {
        boot_id: "this boot".to_owned(),
        pid: 1,
        start_time_ticks: 1,
        generation: Generation(1),
    };
    let committed = |has_run| SourceState::Committed { incarnation: incarnation.clone(), run: true, has_run };
    for (state, expected) in [
        (SourceState::Prepared { run: true }, None),
        (SourceState::Stopped { run: true }, None),
        (committed(false), None),
        (committed(true), Some(VmLocation::Destination)),
        (SourceState::Done { incarnation: None, run: true }, Some(VmLocation::Destination)),
        (SourceState::QemuLost { incarnation: None, run: true }, None),
        (SourceState::Aborting, Some(VmLocation::Source)),
        (SourceState::Returned, Some(VmLocation::Source)),
    ] {
        assert_eq!(location(&State::Source(state.clone())), expected, "{state:?}");
    }
    for goal in [Goal::Lowered, Goal::Switched, Goal::Restored, Goal::Undone] {
        let facts =
            ChangeFacts { goal, location: Some(location_by_goal(goal)), decided_for_s: u64::MAX, ..SWITCHED };
        let is_over = matches!(step(facts), Step::End | Step::SetGoal(Goal::Restored | Goal::Undone));
        assert!(is_over, "{facts:?}");
    }
}
