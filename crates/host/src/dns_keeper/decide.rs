//! Decision about the names of one migration: what follows from the VM's location and their state. Pure.

#[cfg(test)]
mod tests;

use dns::{Goal, Progress};
use engine::handover::source::SourceState;
use store::journal::State;

/// Host that has the VM after a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VmLocation {
    /// The VM has stayed.
    Source,
    /// The VM has moved.
    Destination,
}

/// Facts about the names of one migration.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChangeFacts {
    /// Goal that was asked for last.
    pub(super) goal: Goal,
    /// Progress towards it.
    pub(super) progress: Progress,
    /// True if no further attempt is likely to make what has not been made.
    pub(super) has_only_conflicts: bool,
    /// Place of the VM; none as long as it is not decided.
    pub(super) location: Option<VmLocation>,
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
    SetGoal(Goal),
    /// The changes are made, or given up.
    End,
}

/// Returns the next step. Without other reasons, TTLs are given back after `restore_after_s`, and what is left alone is
/// given up then.
pub(super) fn next_step(facts: &ChangeFacts, restore_after_s: u64) -> Step {
    let is_late = facts.location.is_some() && facts.decided_for_s >= restore_after_s;
    match (facts.goal, facts.location) {
        // The journal decides: an agent may have died before it changed the goal.
        (Goal::Lowered | Goal::Undone, Some(VmLocation::Destination)) => Step::SetGoal(Goal::Switched),
        (Goal::Lowered | Goal::Switched | Goal::Restored, Some(VmLocation::Source)) => {
            Step::SetGoal(Goal::Undone)
        }
        (Goal::Lowered, None) => Step::Wait,
        (Goal::Switched, _) => {
            let is_unused = may_be_unused(facts) && facts.is_used == Some(false);
            if is_unused || is_late { Step::SetGoal(Goal::Restored) } else { Step::Wait }
        }
        (Goal::Restored | Goal::Undone, _) => {
            let is_over = facts.progress == Progress::Complete || (is_late && facts.has_only_conflicts);
            if is_over && facts.is_closed { Step::End } else { Step::Wait }
        }
    }
}

/// Returns true if it depends on connections alone whether TTLs are given back.
pub(super) fn may_be_unused(facts: &ChangeFacts) -> bool {
    facts.goal == Goal::Switched && facts.progress != Progress::Incomplete && !facts.is_cached
}

/// Returns the location of the VM of a migration in this state.
pub(super) fn location(state: &State) -> Option<VmLocation> {
    let State::Source(state) = state else { return None };
    match state {
        SourceState::Done { .. } | SourceState::Committed { has_run: true, .. } => {
            Some(VmLocation::Destination)
        }
        SourceState::Aborting | SourceState::Returning | SourceState::Aborted | SourceState::Returned => {
            Some(VmLocation::Source)
        }
        SourceState::Idle
        | SourceState::Prepared { .. }
        | SourceState::Stopped { .. }
        | SourceState::QemuLost { .. }
        | SourceState::Committed { .. }
        | SourceState::Reclaiming { .. } => None,
    }
}

/// Returns the location of the VM of a migration that the journal does not have any longer: it ended long ago, and its
/// names had their goal then.
pub(super) fn location_by_goal(goal: Goal) -> VmLocation {
    match goal {
        Goal::Lowered | Goal::Undone => VmLocation::Source,
        Goal::Switched | Goal::Restored => VmLocation::Destination,
    }
}
