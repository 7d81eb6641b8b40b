//! Decision about the names of one migration: what follows from its place and their state. Pure.

#[cfg(test)]
mod tests;

use dns::{Goal, Progress};
use engine::handover::source::SourceState;
use store::journal::State;

/// Host that has the VM after a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The VM has stayed.
    Source,
    /// The VM has moved.
    Destination,
}

/// Facts about the names of one migration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Goal that was asked for last.
    pub(super) goal: Goal,
    /// Progress towards it.
    pub(super) progress: Progress,
    /// True if no further attempt is likely to make what has not been made.
    pub(super) is_left_alone: bool,
    /// Place of the VM; none as long as it is not decided.
    pub(super) place: Option<Place>,
    /// True if the migration has made its last entry in the journal.
    pub(super) is_closed: bool,
    /// Time since the place was decided, in seconds.
    pub(super) decided_for_s: u64,
    /// True if resolvers may still give the old records.
    pub(super) is_cached: bool,
    /// True if a connection uses an old address; none if that is not known.
    pub(super) is_used: Option<bool>,
}

/// Next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// No step, for the moment.
    Wait,
    /// Another goal is aimed at.
    Pursue(Goal),
    /// The changes are made, or given up.
    End,
}

/// Returns the next step. Without other reasons, TTLs are given back after `restore_after_s`, and what is left alone is
/// given up then.
pub(super) fn next_step(facts: &Facts, restore_after_s: u64) -> Step {
    let is_late = facts.place.is_some() && facts.decided_for_s >= restore_after_s;
    match (facts.goal, facts.place) {
        // The journal decides: an agent may have died before it changed the goal.
        (Goal::Lowered | Goal::Undone, Some(Place::Destination)) => Step::Pursue(Goal::Switched),
        (Goal::Lowered | Goal::Switched | Goal::Restored, Some(Place::Source)) => Step::Pursue(Goal::Undone),
        (Goal::Lowered, None) => Step::Wait,
        (Goal::Switched, _) => {
            let is_unused = may_be_unused(facts) && facts.is_used == Some(false);
            if is_unused || is_late { Step::Pursue(Goal::Restored) } else { Step::Wait }
        }
        (Goal::Restored | Goal::Undone, _) => {
            let is_over = facts.progress == Progress::Complete || (is_late && facts.is_left_alone);
            if is_over && facts.is_closed { Step::End } else { Step::Wait }
        }
    }
}

/// Returns true if it depends on connections alone whether TTLs are given back.
pub(super) fn may_be_unused(facts: &Facts) -> bool {
    facts.goal == Goal::Switched && facts.progress != Progress::Incomplete && !facts.is_cached
}

/// Returns the place of the VM of a migration in this state.
pub(super) fn place(state: &State) -> Option<Place> {
    let State::Source(state) = state else { return None };
    match state {
        SourceState::Done { .. } | SourceState::Committed { ran: true, .. } => Some(Place::Destination),
        SourceState::Aborting | SourceState::Returning | SourceState::Aborted | SourceState::Returned => {
            Some(Place::Source)
        }
        SourceState::Idle
        | SourceState::Prepared { .. }
        | SourceState::Stopped { .. }
        | SourceState::QemuLost { .. }
        | SourceState::Committed { .. }
        | SourceState::Reclaiming { .. } => None,
    }
}

/// Returns the place of the VM of a migration that the journal does not have any longer: it ended long ago, and its
/// names had their goal then.
pub(super) fn place_by_goal(goal: Goal) -> Place {
    match goal {
        Goal::Lowered | Goal::Undone => Place::Source,
        Goal::Switched | Goal::Restored => Place::Destination,
    }
}
