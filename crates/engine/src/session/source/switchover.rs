//! Switchover: what follows the stop of the guest.

use super::rounds::SwitchoverKind;
use crate::handover::source::SourceState;

/// Plan of a source whose guest is stopped: the remaining pages are sent, or announced; if they were sent, and if that
/// is requested, all is compared; then the destination loads the device state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SwitchoverPlan {
    ending: SwitchoverKind,
    is_compared: bool,
}

impl SwitchoverPlan {
    /// Plans what follows a stop of this kind, in this state of the handover.
    pub fn begin(ending: SwitchoverKind, state: &SourceState, must_compare: bool) -> Self {
        // A guest that was paused by its user does not write: it has no reason to need both hosts.
        let ending = if runs_afterwards(state) { ending } else { SwitchoverKind::StopAndCopy };
        // Pages that arrive while the guest runs cannot be compared.
        Self { ending, is_compared: must_compare && ending == SwitchoverKind::StopAndCopy }
    }

    /// Returns when the remaining pages are sent.
    pub fn ending(self) -> SwitchoverKind {
        self.ending
    }

    /// Returns true if memory and copied disks are compared on both hosts before the device state is loaded.
    pub fn is_compared(self) -> bool {
        self.is_compared
    }
}

/// Returns true if the guest is to run after the handover; false if its user had paused it.
pub(super) fn runs_afterwards(state: &SourceState) -> bool {
    !matches!(state, SourceState::Stopped { run: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: SourceState = SourceState::Stopped { run: true };
    const PAUSED: SourceState = SourceState::Stopped { run: false };

    fn plan(ending: SwitchoverKind, state: &SourceState, must_compare: bool) -> (SwitchoverKind, bool) {
        let switchover = SwitchoverPlan::begin(ending, state, must_compare);
        (switchover.ending(), switchover.is_compared())
    }

    #[test]
    fn what_was_sent_is_compared_if_requested() {
        for must_compare in [false, true] {
            assert_eq!(
                plan(SwitchoverKind::StopAndCopy, &RUNS, must_compare),
                (SwitchoverKind::StopAndCopy, must_compare)
            );
        }
    }

    #[test]
    fn pages_that_follow_the_guest_are_not_compared() {
        for must_compare in [false, true] {
            assert_eq!(
                plan(SwitchoverKind::PostCopy, &RUNS, must_compare),
                (SwitchoverKind::PostCopy, false)
            );
        }
    }

    #[test]
    fn a_paused_guest_never_needs_both_hosts() {
        for (ending, must_compare) in [
            (SwitchoverKind::StopAndCopy, false),
            (SwitchoverKind::PostCopy, false),
            (SwitchoverKind::PostCopy, true),
        ] {
            assert_eq!(plan(ending, &PAUSED, must_compare), (SwitchoverKind::StopAndCopy, must_compare));
        }
    }
}
