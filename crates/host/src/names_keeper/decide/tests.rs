use proto::{Generation, Incarnation};

use super::*;

const LATE_S: u64 = 3600;

/// Names that have been changed, and were read back, of a VM that has moved a moment ago.
const SWITCHED: Facts = Facts {
    goal: Goal::Switched,
    progress: Progress::Complete,
    is_left_alone: false,
    place: Some(Place::Destination),
    is_closed: true,
    decided_for_s: 1,
    is_cached: false,
    is_used: Some(true),
};

fn step(facts: Facts) -> Step {
    next_step(&facts, LATE_S)
}

#[test]
fn the_goal_follows_the_place_of_the_vm() {
    let goals = [Goal::Lowered, Goal::Switched, Goal::Restored, Goal::Undone];
    let step = |goal, place| step(Facts { goal, place, is_closed: false, ..SWITCHED });
    let all = |place| goals.map(|goal| step(goal, place));
    let (wait, pursue) = (Step::Wait, Step::Pursue);
    assert_eq!(all(None), [wait; 4]);
    let (switched, undone) = (pursue(Goal::Switched), pursue(Goal::Undone));
    assert_eq!(all(Some(Place::Destination)), [switched, wait, wait, switched]);
    assert_eq!(all(Some(Place::Source)), [undone, undone, undone, wait]);
}

#[test]
fn ttls_are_given_back_when_nothing_uses_the_old_address() {
    let restored = Step::Pursue(Goal::Restored);
    let unused = Facts { is_used: Some(false), ..SWITCHED };
    assert_eq!(step(unused), restored);
    assert_eq!(step(Facts { progress: Progress::Lagging, ..unused }), restored);
    for waiting in [
        SWITCHED,
        Facts { is_used: None, ..SWITCHED },
        Facts { is_cached: true, ..unused },
        Facts { progress: Progress::Incomplete, ..unused },
    ] {
        assert_eq!(step(waiting), Step::Wait, "{waiting:?}");
        assert_eq!(step(Facts { decided_for_s: LATE_S, ..waiting }), restored, "at the latest");
        assert_eq!(step(Facts { place: None, decided_for_s: LATE_S, ..waiting }), Step::Wait);
    }
}

#[test]
fn changes_end_when_they_are_made_or_nobody_can_make_them() {
    for (goal, place) in [(Goal::Restored, Place::Destination), (Goal::Undone, Place::Source)] {
        let made = Facts { goal, place: Some(place), ..SWITCHED };
        assert_eq!(step(made), Step::End);
        assert_eq!(
            step(Facts { is_closed: false, ..made }),
            Step::Wait,
            "its driver still writes the report"
        );
        let missing = Facts { progress: Progress::Incomplete, ..made };
        assert_eq!(
            step(Facts { decided_for_s: 100 * LATE_S, ..missing }),
            Step::Wait,
            "it is tried for ever"
        );
        let foreign = Facts { is_left_alone: true, ..missing };
        assert_eq!(step(foreign), Step::Wait, "its owner may give it back");
        assert_eq!(step(Facts { decided_for_s: LATE_S, ..foreign }), Step::End);
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
    let committed = |ran| SourceState::Committed { incarnation: incarnation.clone(), run: true, ran };
    for (state, expected) in [
        (SourceState::Prepared { run: true }, None),
        (SourceState::Stopped { run: true }, None),
        (committed(false), None),
        (committed(true), Some(Place::Destination)),
        (SourceState::Done { incarnation: None, run: true }, Some(Place::Destination)),
        (SourceState::QemuLost { incarnation: None, run: true }, None),
        (SourceState::Aborting, Some(Place::Source)),
        (SourceState::Returned, Some(Place::Source)),
    ] {
        assert_eq!(place(&State::Source(state.clone())), expected, "{state:?}");
    }
    for goal in [Goal::Lowered, Goal::Switched, Goal::Restored, Goal::Undone] {
        let facts = Facts { goal, place: Some(place_by_goal(goal)), decided_for_s: u64::MAX, ..SWITCHED };
        let is_over = matches!(step(facts), Step::End | Step::Pursue(Goal::Restored | Goal::Undone));
        assert!(is_over, "{facts:?}");
    }
}
