//! Times of the next attempts. Pure.

#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::change::{ChangeState, LagReason};
use crate::change_set::ChangeSet;
use crate::failure::Failure;

/// Bounds of the delays for what passes by itself.
const QUICK: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// Bounds of the delays for what a person has to mend.
const SLOW: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(5));
/// Delay after which an update with a lost answer has had its effect, or will have none: its connection is closed, and
/// its server answers.
const LOST_ANSWER_DELAY: Duration = Duration::from_secs(1);

/// Returns the delay until the next attempt, after a number of attempts for the same goal; none if there is nothing to do.
pub(crate) fn delay(change_set: &ChangeSet, attempts: u32) -> Option<Duration> {
    let mut unfinished = change_set.unfinished().peekable();
    unfinished.peek()?;
    let mut is_passing = false;
    for change in unfinished {
        match &change.state {
            ChangeState::Failed { failure: Failure::LostAnswer } => return Some(LOST_ANSWER_DELAY),
            ChangeState::Failed { failure } => is_passing |= failure.is_passing(),
            ChangeState::NotNeeded | ChangeState::Conflict { .. } => {}
            ChangeState::Pending => is_passing = true,
            ChangeState::Made { lags, .. } => {
                is_passing |= lags.iter().any(|lag| match &lag.reason {
                    LagReason::Behind { .. } => true,
                    LagReason::Failed { failure } => failure.is_passing(),
                    LagReason::Different { .. } | LagReason::SerialNotIncremented { .. } => false,
                });
            }
        }
    }
    let (first, longest) = if is_passing { QUICK } else { SLOW };
    let doublings = attempts.saturating_sub(1).min(16);
    Some(first.saturating_mul(1 << doublings).min(longest))
}
